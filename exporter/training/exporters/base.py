"""What an exporter of spans is: one-logger's interface, and the base class that knows whether it is ready.

Used in the training process, on the exporter's own thread. An exporter that raises is asked again with the same
record, so a record is either taken as a whole or not at all. Any object with these methods will do; it need not
derive from a class here, and no decorator is asked of one that does.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod

from exporter.errors import ExportError
from exporter.training.events import ErrorEvent, Event, TelemetryDataError
from exporter.training.spans import Span

__all__ = ["BaseExporter", "ExportError", "Exporter"]


class Exporter(ABC):
    """Takes what a job tells; what it is given are copies, which nobody changes any more.

    One that holds records back may have a method `write_out()` too, called when its queue has run empty and at the latest
    after every 256 records; what it cannot write then it has to keep, within bounds.
    """

    @abstractmethod
    def initialize(self) -> None:
        """Get ready; asked again after a failure.

        Raises:
            ExportError: It is not, yet.
        """

    @abstractmethod
    def export_start(self, span: Span) -> None:
        """Take a span that has begun, as it was then.

        Raises:
            ExportError: It was not taken.
        """

    @abstractmethod
    def export_stop(self, span: Span) -> None:
        """Take a span that has ended, with all its attributes.

        Raises:
            ExportError: It was not taken.
        """

    @abstractmethod
    def export_event(self, event: Event, span: Span) -> None:
        """Take an event of a span other than its start and its stop.

        Raises:
            ExportError: It was not taken.
        """

    @abstractmethod
    def export_error(self, event: ErrorEvent, span: Span) -> None:
        """Take an error of the application.

        Raises:
            ExportError: It was not taken.
        """

    @abstractmethod
    def export_telemetry_data_error(self, error: TelemetryDataError) -> None:
        """Take the news that the telemetry is incomplete.

        Raises:
            ExportError: It was not taken.
        """

    @abstractmethod
    def close(self) -> None:
        """Write out what is held back, and let go of every resource.

        Raises:
            ExportError: Something could not be written.
        """


class BaseExporter(Exporter):
    """An exporter that refuses records before `initialize` and after `close`."""

    class _State(enum.Enum):
        NOT_INITIALIZED = enum.auto()
        READY = enum.auto()
        CLOSED = enum.auto()

    def __init__(self) -> None:
        self._state = self._State.NOT_INITIALIZED

    def initialize(self) -> None:
        """Be ready."""
        self._state = self._State.READY

    def export_start(self, span: Span) -> None:  # noqa: ARG002  # the interface's
        """Check that it is ready."""
        self._check_state()

    def export_stop(self, span: Span) -> None:  # noqa: ARG002  # the interface's
        """Check that it is ready."""
        self._check_state()

    def export_event(self, event: Event, span: Span) -> None:  # noqa: ARG002  # the interface's
        """Check that it is ready."""
        self._check_state()

    def export_error(self, event: ErrorEvent, span: Span) -> None:  # noqa: ARG002  # the interface's
        """Check that it is ready."""
        self._check_state()

    def export_telemetry_data_error(self, error: TelemetryDataError) -> None:  # noqa: ARG002  # the interface's
        """Check that it is ready."""
        self._check_state()

    def close(self) -> None:
        """Be closed."""
        self._state = self._State.CLOSED

    @property
    def ready(self) -> bool:
        """Whether it takes records."""
        return self._state is self._State.READY

    @property
    def closed(self) -> bool:
        """Whether it takes no more."""
        return self._state is self._State.CLOSED

    def _check_state(self) -> None:
        if self._state is self._State.NOT_INITIALIZED:
            raise ExportError("Exporter not initialized. Call initialize first.")
        if self._state is self._State.CLOSED:
            raise ExportError("Exporter is closed and cannot be used anymore.")
