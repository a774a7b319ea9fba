"""Exceptions of this project, as a tree.

In the job, only the construction of a Stat, `configure` (`DefinitionError`) and the settings of training telemetry
(`OneLoggerError`) raise; errors of recording calls are counted.

    ExporterError
    ├── DefinitionError(ValueError)       invalid name, unit, label, window, aggregation or buckets of a Stat
    ├── FeedError
    │   ├── FeedFormatError               damaged bytes, or an unknown format version
    │   └── FeedDirectoryError            the directory is missing, foreign or not a directory
    ├── ConfigurationError(ValueError)    all problems of a file or command line
    ├── CollectError                      a collection that failed; `reason` is a label value
    ├── OneLoggerError(ValueError)        invalid settings of training telemetry, or misuse with PROPAGATE_EXCEPTIONS
    │   └── ExportError                   a record that a span exporter did not export
    ├── StartError                        a resource of the sidecar is missing, such as threads
    ├── StateError                        the ledger's state file cannot be read or written
    └── ListenError                       an address that cannot be listened on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ExporterError(Exception):
    """Base of all exceptions of this project."""


class DefinitionError(ExporterError, ValueError):
    """Invalid definition of a Stat, or invalid argument of `configure`; nothing was recorded.

    `field` is the name of the invalid argument, `found` its value, and `allowed` a description of valid values.
    """

    def __init__(self, message: str, *, field: str, found: object, allowed: object = None) -> None:
        super().__init__(message)
        self.field = field
        self.found = found
        self.allowed = allowed


class FeedError(ExporterError):
    """Base of errors between the job and the sidecar."""


class FeedFormatError(FeedError):
    """Bytes that are not a valid snapshot of a known version.

    `reason` is a label value: `magic`, `version`, `truncated`, `checksum`, `content`.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class FeedDirectoryError(FeedError):
    """Unusable feed directory; `remedy` is an instruction for the user."""

    def __init__(self, message: str, *, path: str, remedy: str) -> None:
        super().__init__(f"{message}: {path}; {remedy}")
        self.path = path
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem of a configuration."""

    source: str  # the file's name as the user gave it, or the flag or variable
    line: int | None  # 1-based; None for a source without lines
    column: int | None
    message: str  # the invalid value, the allowed values, and the nearest known name

    def __str__(self) -> str:
        """Return `file:line:column: message`, which editors and terminals display as a link."""
        place = "".join(f":{part}" for part in (self.line, self.column) if part is not None)
        return f"{self.source}{place}: {self.message}"


class ConfigurationError(ExporterError, ValueError):
    """Invalid configuration. The message has a line per problem, in the order of the file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class CollectError(ExporterError):
    """Failed collection; `reason` is a label value from a closed set."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class OneLoggerError(ExporterError, ValueError):
    """Invalid settings of training telemetry.

    A call raises this exception only in a job that chose `PROPAGATE_EXCEPTIONS` explicitly. A ValueError, as in one-logger.
    """


class ExportError(OneLoggerError):
    """Record that a span exporter did not export; the delivery retries, then counts the record as dropped."""


class StartError(ExporterError):
    """Failed start of the sidecar, because the system refuses new threads."""


class StateError(ExporterError):
    """Unreadable or unwritable state file of the ledger, at `path`."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


class ListenError(ExporterError):
    """Address that cannot be bound, as the user wrote it."""

    def __init__(self, message: str, *, address: str) -> None:
        super().__init__(message)
        self.address = address
