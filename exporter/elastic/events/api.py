"""Events of torchelastic: `Event` and `RdzvEvent`, torchelastic's classes, name for name.

Unlike torch's classes they always serialize to JSON: NaN and infinity as null, other metadata as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from math import isfinite
from typing import Any, ClassVar

from exporter.recording.conversion import to_message

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]

EventMetadataValue = str | int | float | bool | None


class EventSource(str, Enum):
    """Source of an event."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, Enum):
    """The states of a node in a rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


class _Serialized:
    """Serialization of both kinds of events."""

    _enumeration: ClassVar[tuple[str, type[Enum]]]

    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        """Return the event as a line of JSON."""
        return json.dumps(_plain(fields_of(self)))

    @classmethod
    def deserialize(cls, data: Any) -> Any:
        """Return the event of a text from `serialize`, or the given event; raises TypeError or ValueError for others."""
        if isinstance(data, cls):
            return data
        if not isinstance(data, str):
            raise TypeError(f"{cls.__name__} is read from JSON text, not from {type(data).__name__}")
        found = json.loads(data)
        name, kind = cls._enumeration
        try:
            found[name] = kind[str(found.get(name))]
            return cls(**found)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"this is no {cls.__name__}: {data:.200}") from error


@dataclass
class Event(_Serialized):
    """Event of a torchelastic job."""

    _enumeration = "source", EventSource

    name: str  # value of the label `type`, with a small number of distinct names
    source: EventSource
    timestamp: int = 0  # Unix time in milliseconds; 0 for the time of recording
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)


@dataclass
class RdzvEvent(_Serialized):
    """Event of a rendezvous, with the known facts of the node; `error_trace` belongs to a failure."""

    _enumeration = "node_state", NodeState

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""


def fields_of(event: Any) -> dict[str, object]:
    """Return the fields without copies, which `asdict` would make and some objects refuse."""
    return {each.name: getattr(event, each.name) for each in fields(event)}


def _plain(value: object) -> object:
    """Return a value as JSON values."""
    if isinstance(value, Mapping):
        return {to_message(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(value) if isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return to_message(value)
