"""What the flags, the environment, the file and the defaults make together: one configuration.

Used by every subcommand that takes the sidecar's flags, and again at every reload. A flag wins over the environment
(`EXPORTER_FEED_DIR` alone), that over the file, and that over the default. A relative path in a file is relative to
the file, one on the command line or in the environment to the working directory.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from exporter.cli.configuration import Configuration
from exporter.cli.flags import FEED_DIRECTORY_VARIABLE, FLAGS, value_of
from exporter.config.loader import load_file, parse
from exporter.config.options import options_of
from exporter.errors import ConfigurationError, Problem
from exporter.replay.machines import is_machine_file, load_machine


def resolve(flags: argparse.Namespace, environ: Mapping[str, str]) -> Configuration:
    """Put the configuration together; reads the file, and a machine to replay, each time.

    Raises:
        ConfigurationError: All problems of the file, the environment and the flags.
    """
    problems: list[Problem] = []
    configuration = Configuration()

    def take(source: str, text: str, hint: Any) -> Any:
        try:
            return parse(text, source, hint)
        except ConfigurationError as error:
            problems.extend(error.problems)
            return None

    file = value_of(flags, "--config.file")
    if file is not None and take("--config.file", file, Path) is not None:
        try:
            configuration = _relative_to(Path(file).absolute().parent, load_file(file, Configuration))
        except ConfigurationError as error:
            problems.extend(error.problems)
    changes: dict[str, dict[str, Any]] = {"web": {}, "feed": {}, "state": {}, "gpu": {}, "log": {}}
    if environ.get(FEED_DIRECTORY_VARIABLE):
        variable = f"${FEED_DIRECTORY_VARIABLE}"
        changes["feed"]["dir"] = take(variable, environ[FEED_DIRECTORY_VARIABLE], Path)
    for flag in FLAGS:
        section, _, name = flag.removeprefix("--").partition(".")
        key, value = name.replace("-", "_").replace(".", "_"), value_of(flags, flag)
        if value is None or section == "config":
            continue
        if not isinstance(value, bool):
            options = options_of(type(getattr(configuration, section)))
            hint = next(option.hint for option in options if option.name == key)
            if isinstance(value, list):
                value = tuple(take(flag, each, get_args(hint)[0]) for each in value)
            else:
                value = take(flag, value, hint)
        changes[section][key] = None if flag == "--gpu.replay" and value == "" else value
    made = {
        section: dataclasses.replace(getattr(configuration, section), **keys)
        for section, keys in changes.items()
    }
    if not problems:
        problems += [Problem("--web.listen-address", None, None, text) for _, text in made["web"].problems()]
    gpu = made["gpu"]
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
    changes: dict[str, Any] = {}
    for section in dataclasses.fields(configuration):
        value = getattr(configuration, section.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            given = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            paths = {name: directory / path for name, path in given.items() if isinstance(path, Path)}
            changes[section.name] = dataclasses.replace(value, **paths)
    gpu = configuration.gpu
    if gpu.replay is not None and is_machine_file(gpu.replay):
        changes["gpu"] = dataclasses.replace(gpu, replay=str(directory / gpu.replay))
    return dataclasses.replace(configuration, **changes)
