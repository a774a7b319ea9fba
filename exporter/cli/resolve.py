"""What the flags, the environment, the file and the defaults make together: one configuration.

Used by every subcommand that takes the sidecar's flags. A command line and an environment come in; a
`Configuration` goes out, or one `ConfigurationError` with all problems of all of them. Reads the configuration
file, a machine to replay, and nothing else; called again at every reload, so that a flag still wins over the file
then.

A flag wins over the environment, that over the file, and that over the default. Of the environment only
`EXPORTER_FEED_DIR` is read, which the training processes know too. A relative path in a file is relative to
the file, one on the command line or in the environment to the working directory.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exporter.cli.configuration import Address, Configuration, UrlPath
from exporter.cli.flags import FEED_DIRECTORY_VARIABLE
from exporter.cli.gpu_settings import GpuSection
from exporter.cli.logs import Form, Level
from exporter.config.loader import load_file, parse
from exporter.errors import ConfigurationError, Problem
from exporter.replay.machines import load_machine

# Flag → (section, key, type of the value).
_SCALARS: Mapping[str, tuple[str, str, Any]] = {
    "--web.config.file": ("web", "config_file", Path),
    "--web.telemetry-path": ("web", "telemetry_path", UrlPath),
    "--feed.dir": ("feed", "dir", Path),
    "--state.dir": ("state", "dir", Path),
    "--gpu.replay": ("gpu", "replay", str),
    "--log.level": ("log", "level", Level),
    "--log.format": ("log", "format", Form),
}


def resolve(flags: argparse.Namespace, environ: Mapping[str, str]) -> Configuration:
    """Put the configuration together; reads the file again each time.

    Args:
        flags: What a parser with `add_flags` made of a command line.
        environ: The environment.

    Raises:
        ConfigurationError: All problems of the file, the environment and the flags.
    """
    problems: list[Problem] = []
    configuration = Configuration()
    given = vars(flags)

    def take(source: str, text: str, hint: Any) -> Any:
        try:
            return parse(text, source, hint)
        except ConfigurationError as error:
            problems.extend(error.problems)
            return None

    file = given["config.file"]
    if file is not None and take("--config.file", file, Path) is not None:
        try:
            configuration = _relative_to(Path(file).absolute().parent, load_file(file, Configuration))
        except ConfigurationError as error:
            problems.extend(error.problems)
    changes: dict[str, dict[str, Any]] = {section.name: {} for section in dataclasses.fields(Configuration)}
    directory = environ.get(FEED_DIRECTORY_VARIABLE)
    if directory:
        changes["feed"]["dir"] = take(f"${FEED_DIRECTORY_VARIABLE}", directory, Path)
    for flag, (section, key, hint) in _SCALARS.items():
        text = given[flag.removeprefix("--").replace("-", "_")]
        if text is not None:
            changes[section][key] = take(flag, text, hint)
    if given["web.listen_address"] is not None:
        addresses = [take("--web.listen-address", text, Address) for text in given["web.listen_address"]]
        changes["web"]["listen_address"] = tuple(addresses)
    if given["web.enable_lifecycle"] is not None:
        changes["web"]["enable_lifecycle"] = given["web.enable_lifecycle"]
    if changes["gpu"].get("replay") == "":
        changes["gpu"]["replay"] = None
    made = {
        section: dataclasses.replace(getattr(configuration, section), **keys)
        for section, keys in changes.items()
        if keys
    }
    if "web" in made and not problems:
        problems.extend(
            Problem("--web.listen-address", None, None, text) for _, text in made["web"].problems()
        )
    gpu: GpuSection = made.get("gpu", configuration.gpu)
    if gpu.enabled and gpu.replay is not None:
        try:
            load_machine(gpu.replay)
        except ConfigurationError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigurationError(problems)
    return dataclasses.replace(configuration, **made)


def _relative_to(directory: Path, configuration: Configuration) -> Configuration:
    """Resolve the paths of a file against the file's own directory."""

    def at(path: Path | None) -> Path | None:
        return None if path is None else directory / path

    return dataclasses.replace(
        configuration,
        web=dataclasses.replace(configuration.web, config_file=at(configuration.web.config_file)),
        feed=dataclasses.replace(configuration.feed, dir=at(configuration.feed.dir)),
        state=dataclasses.replace(configuration.state, dir=at(configuration.state.dir)),
        gpu=configuration.gpu.relative_to(directory),
    )
