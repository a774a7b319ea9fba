"""Command-line flags in Prometheus' style.

The module has few imports, because the job of `run` waits for them. `configuration` interprets the values of the flags.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from exporter.config.options import parse_duration
from exporter.errors import ConfigurationError, Problem

PROGRAM = "training-exporter"
DEFAULT_ADDRESS = ":20909"
FEED_DIRECTORY_VARIABLE = "EXPORTER_FEED_DIR"

EXIT_FAILED = 1
"""Exit status after a failure."""
EXIT_REFUSED = 2
"""Exit status if the command cannot start, for example because of an invalid command line."""
EXIT_JOINED = 3
"""Exit status of the sidecar of `run` if another sidecar serves the feed directory."""

FLAGS: Mapping[str, tuple[str, str]] = {
    "--config.file": ("FILE", "read the configuration from this YAML file (default: none)"),
    "--web.listen-address": ("ADDRESS", f"listen on this address; repeatable (default {DEFAULT_ADDRESS})"),
    "--web.config.file": ("FILE", "read TLS and password settings, in exporter-toolkit's format"),
    "--web.enable-lifecycle": ("", "let POST /-/reload reload the configuration"),
    "--feed.dir": (
        "DIR",
        "feed directory, shared with the jobs (default $EXPORTER_FEED_DIR or /dev/shm/exporter-UID)",
    ),
    "--state.dir": ("DIR", "directory for totals that outlive restarts (default: the feed directory)"),
    "--gpu.replay": ("NAME", "replay an included machine (h100, t4, ...) instead of reading GPUs"),
    "--log.level": ("LEVEL", "debug, info, warn or error (default info)"),
    "--log.format": ("FORMAT", "logfmt or json (default logfmt)"),
}
"""Metavar, which is "" for a switch, and help of each flag of the sidecar."""


def flag_error(source: str, message: str) -> ConfigurationError:
    """Return the ConfigurationError for a flag or for the command line."""
    return ConfigurationError([Problem(source, line=None, column=None, message=message)])


def print_notice(line: str) -> None:
    """Write a line with the prefix `exporter:` to standard error. Write errors are ignored."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            # A single write, so that the job's output cannot split the line.
            print(f"exporter: {line}\n", end="", file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """Argument parser without abbreviations, which reports each mistake on one line.

    Raises `ConfigurationError` where argparse would print an error and exit. `--help` and `--version` print and exit.
    """

    def __init__(self, prog: str, description: str, arguments: str = "") -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} [flags]{arguments}",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a ConfigurationError."""
        source, _, text = message.removeprefix("argument ").partition(": ")
        if message.startswith("argument ") and text:
            raise flag_error(source, text)
        raise flag_error("command line", message)

    def parse_flags(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse a command line. Raises ConfigurationError for unknown and incomplete flags. Of a repeated flag, the last value counts.

        `--web.listen-address` may be repeated to add addresses.
        """
        namespace, unknown = self.parse_known_args(arguments)
        if unknown:
            raise ConfigurationError([self._unknown(argument) for argument in unknown])
        return namespace

    def _unknown(self, argument: str) -> Problem:
        """Return the problem of an unknown argument, with the similar flag or the key of the configuration file, if any."""
        # Imported only after an error, because the module imports YAML.
        from exporter.config.expectation import suggest  # noqa: PLC0415

        flag = argument.partition("=")[0]
        if not flag.startswith("-") or flag == "-":
            return Problem(
                "command line", line=None, column=None, message=f"unexpected argument {argument!r}"
            )
        if switch := re.fullmatch(r"--(no-)?collector\.(\w+)", flag):
            option = f"collectors: {{{switch[2]}: {{enabled: {'false' if switch[1] else 'true'}}}}}"
            return Problem(
                flag,
                line=None,
                column=None,
                message=f"unknown flag; write {option} in the file of --config.file",
            )
        documented_actions = [action for action in self._actions if action.help is not argparse.SUPPRESS]
        names = [name for action in documented_actions for name in action.option_strings]
        return Problem(flag, line=None, column=None, message=f"unknown flag, {suggest(flag, names)}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the sidecar. `resolve` reads their values from the namespace."""
    group = parser.add_argument_group("exporter")
    for flag, (metavar, text) in FLAGS.items():
        if metavar:
            action = "append" if flag == "--web.listen-address" else "store"
            group.add_argument(flag, metavar=metavar, action=action, help=text)
        else:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)


def value_of(flags: argparse.Namespace, flag: str) -> Any:
    """Return the value of a flag, or None if the flag is not given."""
    return getattr(flags, flag.removeprefix("--").replace("-", "_"))


def command_line_of(flags: argparse.Namespace) -> list[str]:
    """Return the flags of the sidecar that were given, as a command line."""
    arguments: list[str] = []
    for flag in FLAGS:
        value = value_of(flags, flag)
        if isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-"))
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            arguments += [f"{flag}={item}" for item in values]
    return arguments


def parse_duration_flag(flag: str, text: str) -> float:
    """Parse the duration of a flag such as `--run.linger=30s`. Raises ConfigurationError."""
    try:
        return parse_duration(text)
    except ValueError:
        expected = f'expected a duration such as 500ms, 15s, 1m30s or 1h, found "{text}"'
        raise flag_error(flag, expected) from None
