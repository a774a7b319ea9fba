"""Flags in Prometheus' style: how a command line is taken apart, before anything is known of what it means.

Used by every subcommand, and light, since the job of `run` waits for it: what the flags mean is in `resolve`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from exporter.config.options import parse_duration
from exporter.errors import ConfigurationError, Problem

PROGRAM = "training-exporter"
DEFAULT_ADDRESS = ":20909"
FEED_DIRECTORY_VARIABLE = "EXPORTER_FEED_DIR"


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
        # Here, since a mistake has time: YAML and every collector are imported for it.
        from exporter.cli.configuration import DEFAULT_COLLECTORS  # noqa: PLC0415
        from exporter.config.loader import suggest  # noqa: PLC0415

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


def parse_duration_flag(flag: str, text: str) -> float:
    """Seconds of a flag such as `--run.linger=30s`.

    Raises:
        ConfigurationError: It is not a duration.
    """
    try:
        return parse_duration(text)
    except ValueError:
        expected = f'expected a duration such as 500ms, 15s, 1m30s or 1h, found "{text}"'
        raise ConfigurationError([Problem(flag, None, None, expected)]) from None
