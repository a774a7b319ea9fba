"""Every exception that this project raises, as one tree.

Raised in every kind of process. Nothing here reaches a training loop: in the job only *constructing* a
Stat (`DefinitionError`) or the settings of training telemetry (`OneLoggerError`) can raise, everything after it
is counted instead.

    ExporterError
    ├── DefinitionError(ValueError)       a Stat that cannot be: name, unit, label, window, aggregation, buckets
    ├── EventsLostError                   raised by an event handler: so many events did not arrive
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

    Attributes:
        field: The argument that is wrong.
        found: The offending value.
        allowed: What would have been accepted, in words or as a list.
    """

    def __init__(self, message: str, *, field: str, found: object, allowed: object = None) -> None:
        super().__init__(message)
        self.field = field
        self.found = found
        self.allowed = allowed


class EventsLostError(ExporterError):
    """Raised by a handler of events when some of those that it was given since its last flush are lost.

    Nobody sees it but the handler's own delivery, which counts.

    Attributes:
        lost: How many.
        reason: A short slug, used as a label value.
    """

    def __init__(self, message: str, *, lost: int, reason: str) -> None:
        super().__init__(message)
        self.lost = lost
        self.reason = reason


class FeedError(ExporterError):
    """Base of what can go wrong at the border between the job and the sidecar."""


class FeedFormatError(FeedError):
    """Bytes that are not a snapshot of a version this program knows.

    Attributes:
        reason: A short slug, used as a label value: `magic`, `version`, `truncated`, `checksum`, `content`.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class FeedDirectoryError(FeedError):
    """A feed directory that must not be used.

    Attributes:
        path: The directory.
        remedy: What the user can do about it.
    """

    def __init__(self, message: str, *, path: str, remedy: str) -> None:
        super().__init__(f"{message}: {path}; {remedy}")
        self.path = path
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration.

    Attributes:
        source: The file's name as the user gave it, or the flag or variable.
        line: 1-based; None where the source has no lines.
        column: 1-based; None where the source has no columns.
        message: The offending value, what is allowed, and the nearest known name where one is near.
    """

    source: str
    line: int | None
    column: int | None
    message: str

    def __str__(self) -> str:
        """`file:line:column: message`, the form that editors and terminals link."""
        place = "".join(f":{part}" for part in (self.line, self.column) if part is not None)
        return f"{self.source}{place}: {self.message}"


class ConfigurationError(ExporterError, ValueError):
    """A configuration with at least one problem; the message is all of them, one a line.

    Attributes:
        problems: In the order of the file.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class CollectError(ExporterError):
    """A collection that failed.

    Attributes:
        reason: A short slug from a closed set, used as the label `reason`.
    """

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
    """The ledger's state file cannot be read, or cannot be written.

    Attributes:
        path: The file.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


class ListenError(ExporterError):
    """An address that cannot be listened on.

    Attributes:
        address: As the user wrote it.
    """

    def __init__(self, message: str, *, address: str) -> None:
        super().__init__(message)
        self.address = address
