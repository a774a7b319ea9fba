"""Events: moments of a span, errors of the application among them.

Used in the training process. An event does not change once it is made, so every thread may read it. The classes are
one-logger's, name for name, except that an event owns its attributes: what the caller goes on doing with the
collection that it passed does not change what the exporters are about to send.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from exporter.training.attributes import (
    Attributes,
    EventName,
    Name,
    TracingTimestamp,
    assert_that,
    moment,
    name_of,
    shown,
)

ERROR, TELEMETRY_DATA_ERROR = "error", "telemetry_data_error"
LONGEST_TRACEBACK = 16_384
"""Characters of a traceback; the end of it says most."""


class Event:
    """A moment of a span, with attributes; it does not change, and always carries `timestamp_msec`."""

    __slots__ = ("name", "timestamp", "attributes")

    def __init__(
        self, name: EventName, timestamp: TracingTimestamp, attributes: Attributes | None = None
    ) -> None:
        self.name = name
        self.timestamp = moment(timestamp)
        # A copy: the caller may go on using what it passed, while the exporters still read this.
        self.attributes = Attributes.of(attributes).copied()
        self.attributes.add("timestamp_msec", self.timestamp.milliseconds_since_epoch)

    @property
    def name_str(self) -> str:
        """The name's text."""
        return name_of(self.name)

    @classmethod
    def create(
        cls, name: EventName, attributes: Attributes | None = None, timestamp: TracingTimestamp | None = None
    ) -> Event:
        """Make one of now, or of the time that is given."""
        return cls(name, moment(timestamp), attributes)

    def to_json(self) -> dict[str, Any]:
        """Give it as a dictionary that `from_json` reads."""
        return {
            "name": self.name_str,
            "timestamp": self.timestamp.to_json(),
            "attributes": self.attributes.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Event:
        """Read back what `to_json` gave, of an event of any class; `OneLoggerError` where it is none."""
        assert_that(data and data.get("name") and data.get("timestamp"), f"not an event: {data}")
        at = TracingTimestamp.from_json(data["timestamp"])
        attributes = Attributes.from_json(data.get("attributes") or {})
        if data["name"] == ERROR and "error_message" in data:
            kind, text, trace = (data.get(f"exception_{each}") for each in ("type", "message", "traceback"))
            return ErrorEvent(at, data["error_message"], kind, text, trace, attributes)
        if data["name"] == TELEMETRY_DATA_ERROR and "error_type" in data:
            what = TelemetryDataError.ErrorType(data["error_type"])
            return TelemetryDataError(at, what, data["error_message"], attributes)
        return Event(data["name"], at, attributes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Event) and (
            (self.name, self.timestamp, self.attributes) == (other.name, other.timestamp, other.attributes)
        )

    def __hash__(self) -> int:
        return hash((self.name_str, self.timestamp))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name_str!r}, {self.attributes.to_json()!r})"


class ErrorEvent(Event):
    """An error of the application, in words; of an exception, with its class, its text and the end of its traceback."""

    __slots__ = ("error_message", "exception_type", "exception_message", "exception_traceback")

    def __init__(
        self,
        timestamp: TracingTimestamp,
        error_message: str,
        exception_type: str | None = None,
        exception_message: str | None = None,
        exception_traceback: str | None = None,
        attributes: Attributes | None = None,
    ) -> None:
        self.error_message = _message(error_message)
        self.exception_type = exception_type
        self.exception_message = exception_message or exception_type
        self.exception_traceback = exception_traceback
        told = Attributes({"error_message": self.error_message})
        for name in ("exception_type", "exception_message", "exception_traceback"):
            if getattr(self, name):
                told.add(name, getattr(self, name))
        told.add_attributes(Attributes.of(attributes))
        super().__init__(ERROR, timestamp, told)

    @classmethod
    def create(  # type: ignore[override]  # as in one-logger
        cls,
        error_message: str,
        exception: BaseException | None = None,
        exception_traceback: str | None = None,
        timestamp: TracingTimestamp | None = None,
    ) -> ErrorEvent:
        """Make one of now; of an exception, with its traceback."""
        kind = text = None
        if isinstance(exception, BaseException):
            kind = type(exception).__name__
            text = _text_of(exception)
            exception_traceback = exception_traceback or _traceback_of(exception)
        return cls(moment(timestamp), error_message, kind, text, exception_traceback)

    def to_json(self) -> dict[str, Any]:
        """Give it as a dictionary that `from_json` reads."""
        told = super().to_json() | {"error_message": self.error_message}
        if self.exception_type is not None:
            told["exception_type"] = self.exception_type
            told["exception_message"] = self.exception_message
            told["exception_traceback"] = self.exception_traceback or ""
        return told


class TelemetryDataError(Event):
    """Telemetry that is known to be incomplete: a defect of it, not of the application."""

    __slots__ = ("error_message", "error_type")

    class ErrorType(Name):
        """Whether anything arrived at all."""

        NO_TELEMETRY_DATA = "no_telemetry_data"
        INCOMPLETE_TELEMETRY_DATA = "incomplete_telemetry_data"

    def __init__(
        self,
        timestamp: TracingTimestamp,
        error_type: TelemetryDataError.ErrorType,
        error_message: str,
        attributes: Attributes | None = None,
    ) -> None:
        self.error_type = error_type
        self.error_message = _message(error_message)
        told = {"error_message": self.error_message, "telemetry_data_error_type": error_type.value}
        super().__init__(
            TELEMETRY_DATA_ERROR, timestamp, Attributes.merge(Attributes(told), Attributes.of(attributes))
        )

    @classmethod
    def create(  # type: ignore[override]  # as in one-logger
        cls,
        error_type: TelemetryDataError.ErrorType,
        error_message: str,
        attributes: Attributes | None = None,
    ) -> TelemetryDataError:
        """Make one of now."""
        return cls(TracingTimestamp.now(), error_type, error_message, attributes)

    def to_json(self) -> dict[str, Any]:
        """Give it as a dictionary that `from_json` reads."""
        return super().to_json() | {"error_type": self.error_type.value, "error_message": self.error_message}


def _message(given: object) -> str:
    return given if isinstance(given, str) else shown(given)


def _text_of(exception: BaseException) -> str:
    try:
        return str(exception) or repr(exception)
    except Exception:  # noqa: BLE001  # the user's own `__str__`
        return type(exception).__name__


def _traceback_of(exception: BaseException) -> str | None:
    if exception.__traceback__ is None:
        return None
    try:
        return "".join(traceback.format_exception(exception))[-LONGEST_TRACEBACK:]
    except Exception:  # noqa: BLE001  # it prints the exception, by the user's own `__str__`
        return None
