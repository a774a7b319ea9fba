"""Exceptions of this project, as a tree.

In the job, invalid arguments of Stats, `configure` and registrations raise, and so do invalid settings of training telemetry.
Recording calls raise no exception; their errors are counted.

    ExporterError
    ├── DefinitionError(ValueError)       invalid name, unit, label, window, aggregation or buckets of a Stat
    ├── FeedError
    │   ├── FeedFormatError               damaged bytes, or an unknown format version
    │   └── FeedDirectoryError            the feed directory, or a file of the sidecar in it, cannot be used
    ├── ConfigurationError(ValueError)    all problems of a file or command line
    ├── CollectError                      failed part of a collection; `reason` is a label value
    ├── OneLoggerError(ValueError)        invalid settings of training telemetry, or misuse with PROPAGATE_EXCEPTIONS
    │   └── ExportError                   a record that a span exporter did not export
    ├── StartError                        the system refuses new threads, so that the sidecar cannot start
    ├── StateError                        a state file of the ledger cannot be read, written or locked
    └── ListenError                       an address that cannot be bound
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ExporterError(Exception):
    """Base of all exceptions of this project."""


class DefinitionError(ExporterError, ValueError):
    """Invalid definition of a Stat, or invalid argument of `configure` or of another registration.

    `field` is the name of the invalid argument, `found` its value, and `allowed` a description of the valid values, or None.
    """

    def __init__(self, message: str, *, field: str, found: object, allowed: object = None) -> None:
        super().__init__(message)
        self.field = field
        self.found = found
        self.allowed = allowed


class FeedError(ExporterError):
    """Base of the errors of feed files and feed directories."""


class FeedFormatError(FeedError):
    """Bytes that are no valid file of the feed directory, such as a snapshot, in a supported version.

    `reason` is a label value: `magic`, `version`, `truncated`, `checksum`, `content`, `owner` or `too_large`.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class FeedDirectoryError(FeedError):
    """Unusable feed directory, or unusable file in it. `problem` is a clause, and `remedy` is an instruction for the user."""

    def __init__(self, problem: str, *, path: str, remedy: str) -> None:
        super().__init__(f"{problem}: {path}; {remedy}")
        self.problem = problem
        self.path = path
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem of a configuration."""

    source: str  # name of the file as the user wrote it, or the flag or variable
    line: int | None  # 1-based; None for a source without lines
    column: int | None  # 1-based; None for a source without lines
    message: str  # invalid value, allowed values, and the nearest known name

    def __str__(self) -> str:
        """Return `file:line:column: message`, which editors and terminals display as a link."""
        position = "".join(f":{number}" for number in (self.line, self.column) if number is not None)
        return f"{self.source}{position}: {self.message}"


class ConfigurationError(ExporterError, ValueError):
    """Invalid configuration. The message has a line per problem, in the order of the file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class CollectError(ExporterError):
    """Failed part of a collection. `reason` is the value of the label `reason` of `exporter_collector_errors_total`."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class OneLoggerError(ExporterError, ValueError):
    """Invalid settings of training telemetry.

    Setting an invalid value of a configuration raises this exception, a ValueError as in one-logger. Other calls raise it only in
    a job that chose `PROPAGATE_EXCEPTIONS`.
    """


class ExportError(OneLoggerError):
    """Record that a span exporter did not export. The delivery tries again, and then counts the record as dropped."""


class StartError(ExporterError):
    """Failed start of the sidecar: the system refuses new threads."""


class StateError(ExporterError):
    """State file of the ledger, at `path`, that cannot be read, written or locked."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


class ListenError(ExporterError):
    """Address that cannot be bound. `address` is the address as the user wrote it."""

    def __init__(self, message: str, *, address: str) -> None:
        super().__init__(message)
        self.address = address
