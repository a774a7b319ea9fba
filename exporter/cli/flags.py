"""Flags in Prometheus' style, and how they, the environment, the file and the defaults make one configuration.

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
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from exporter.cli.configuration import DEFAULT_COLLECTORS, Address, Configuration, UrlPath
from exporter.cli.gpu_settings import GpuSection
from exporter.cli.logs import Form, Level
from exporter.config.loader import load_file, parse, suggest
from exporter.config.options import Duration
from exporter.errors import ConfigurationError, Problem
from exporter.replay.machines import load_machine

PROGRAM = "training-exporter"
FEED_DIRECTORY_VARIABLE = "EXPORTER_FEED_DIR"

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


class Parser(argparse.ArgumentParser):
    """argparse without its surprises: no abbreviations, no silent repetition, one line per mistake.

    Raises `ConfigurationError` where argparse would print its usage and exit.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Turn argparse's message into a problem of the command line."""
        source, _, rest = message.removeprefix("argument ").partition(": ")
        known = message.startswith("argument ") and rest
        text = rest if known else message
        raise ConfigurationError([Problem(source if known else "command line", None, None, text)])

    def parse_flags(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse a command line that holds flags only.

        Raises:
            ConfigurationError: A flag or argument is unknown, incomplete or repeated.
        """
        namespace, unknown = self.parse_known_args(arguments)
        problems = [self._unknown(argument) for argument in unknown]
        if problems:
            raise ConfigurationError(problems)
        return namespace

    def _unknown(self, argument: str) -> Problem:
        flag = argument.partition("=")[0]
        if not flag.startswith("-") or flag == "-":
            return Problem("command line", None, None, f"unexpected argument {argument!r}")
        switch = re.fullmatch(r"--(no-)?collector\.(\w+)", flag)
        if switch and switch[2] in DEFAULT_COLLECTORS:
            enabled = "false" if switch[1] else "true"
            option = f"collectors: {{{switch[2]}: {{enabled: {enabled}}}}}"
            return Problem(flag, None, None, f"unknown flag; write {option} in the file of --config.file")
        known = [
            name
            for action in self._actions
            if action.help is not argparse.SUPPRESS
            for name in action.option_strings
        ]
        return Problem(flag, None, None, f"unknown flag, {suggest(flag, known)}")


class _Once(argparse.Action):
    """A flag that may be given once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"argument {option_string}: is given twice")
        setattr(namespace, self.dest, values)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the sidecar's flags; `resolve` reads what they leave in the namespace."""
    files = parser.add_argument_group("configuration")
    files.add_argument(
        "--config.file", metavar="FILE", action=_Once, help="configuration (YAML); works without one"
    )
    web = parser.add_argument_group("web")
    web.add_argument(
        "--web.listen-address",
        metavar="ADDRESS",
        action="append",
        help="address to listen on, repeatable (default :20909)",
    )
    web.add_argument(
        "--web.config.file",
        metavar="FILE",
        action=_Once,
        help="TLS and passwords, as in Prometheus' exporter-toolkit",
    )
    web.add_argument(
        "--web.telemetry-path", metavar="PATH", action=_Once, help="path of the metrics (default /metrics)"
    )
    web.add_argument(
        "--web.enable-lifecycle",
        action=argparse.BooleanOptionalAction,
        help="POST /-/reload reads the file again",
    )
    directories = parser.add_argument_group("directories")
    directories.add_argument(
        "--feed.dir",
        metavar="DIR",
        action=_Once,
        help=f"where training processes hand over what they record (default ${FEED_DIRECTORY_VARIABLE}, "
        "else /dev/shm/exporter-<uid>)",
    )
    directories.add_argument(
        "--state.dir",
        metavar="DIR",
        action=_Once,
        help="where totals outlive restarts (default the feed directory)",
    )
    gpu = parser.add_argument_group("GPUs")
    gpu.add_argument(
        "--gpu.replay",
        metavar="NAME|FILE",
        action=_Once,
        help="play a described machine in place of NVIDIA's library (h100, t4, ...; docs/replay.md); empty for none",
    )
    log = parser.add_argument_group("logs")
    log.add_argument(
        "--log.level", metavar="LEVEL", action=_Once, help="debug, info, warn or error (default info)"
    )
    log.add_argument("--log.format", metavar="FORMAT", action=_Once, help="logfmt or json (default logfmt)")


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


def parse_duration_flag(flag: str, text: str) -> float:
    """Seconds of a flag such as `--run.linger=30s`.

    Raises:
        ConfigurationError: It is not a duration.
    """
    seconds: float = parse(text, flag, Duration)
    return seconds


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
