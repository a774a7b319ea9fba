"""Every exception that this project raises, as one tree.

Raised in every kind of process. Nothing here reaches a training loop: in the job only *constructing* a
Stat (`DefinitionError`) or the settings of training telemetry (`OneLoggerError`) can raise, everything after it
is counted instead.

    ExporterError
    ├── DefinitionError(ValueError)       a Stat that cannot be: name, unit, label, window, aggregation, buckets
    ├── FeedError
    │   ├── FeedFormatError               damaged bytes, or a format version of the future
    │   └── FeedDirectoryError            the directory is missing, foreign or not a directory
    ├── ConfigurationError(ValueError)    all problems of one file or command line at once
    ├── CollectError                      a collection that failed; `reason` is a label value
    ├── OneLoggerError(ValueError)        training telemetry that cannot be configured; a misuse, where raising was chosen
    │   └── ExportError                   raised by an exporter of spans: this record did not go out
    ├── StartError                        the system does not give what the sidecar needs to start, such as threads
    ├── StateError                        the ledger's state file cannot be read or written
    └── ListenError                       an address that cannot be listened on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ExporterError(Exception):
    """Base of all exceptions of this project."""


class DefinitionError(ExporterError, ValueError):
    """A Stat that cannot be made as asked; nothing was recorded.

    `field` is the argument that is wrong, `found` the offending value, `allowed` what would have been accepted.
    """

    def __init__(self, message: str, *, field: str, found: object, allowed: object = None) -> None:
        super().__init__(message)
        self.field = field
        self.found = found
        self.allowed = allowed


class FeedError(ExporterError):
    """Base of what can go wrong at the border between the job and the sidecar."""


class FeedFormatError(FeedError):
    """Bytes that are not a snapshot of a version this program knows.

    `reason` is a label value: `magic`, `version`, `truncated`, `checksum`, `content`.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class FeedDirectoryError(FeedError):
    """A feed directory that must not be used; `remedy` is what the user can do about it."""

    def __init__(self, message: str, *, path: str, remedy: str) -> None:
        super().__init__(f"{message}: {path}; {remedy}")
        self.path = path
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration."""

    source: str  # the file's name as the user gave it, or the flag or variable
    line: int | None  # 1-based; None where the source has no lines
    column: int | None
    message: str  # the offending value, what is allowed, and the nearest known name where one is near

    def __str__(self) -> str:
        """`file:line:column: message`, the form that editors and terminals link."""
        place = "".join(f":{part}" for part in (self.line, self.column) if part is not None)
        return f"{self.source}{place}: {self.message}"


class ConfigurationError(ExporterError, ValueError):
    """A configuration with at least one problem; the message is all of them, one a line, in the order of the file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class CollectError(ExporterError):
    """A collection that failed; `reason` is a label value from a closed set."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class OneLoggerError(ExporterError, ValueError):
    """One-logger's own: settings of training telemetry that cannot be.

    Of a *call*, only a job that chose `PROPAGATE_EXCEPTIONS` explicitly ever sees it. Also a ValueError, as what
    one-logger's configuration classes raise is.
    """


class ExportError(OneLoggerError):
    """Raised by an exporter of spans for a record that did not go out; its delivery tries again, then counts it."""


class StartError(ExporterError):
    """The sidecar cannot start: the system gives it no threads."""


class StateError(ExporterError):
    """The ledger's state file at `path` cannot be read, or cannot be written."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


class ListenError(ExporterError):
    """An address, as the user wrote it, that cannot be listened on."""

    def __init__(self, message: str, *, address: str) -> None:
        super().__init__(message)
        self.address = address
