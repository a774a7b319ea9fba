"""Compatibility classes of torchelastic's events: `Event` and `RdzvEvent`.

Unlike the classes of torch, they serialize values of any type to JSON: NaN and infinity as null, and other objects as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from math import isfinite
from typing import Any, ClassVar

from exporter.recording.conversion import to_str

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]

EventMetadataValue = str | int | float | bool | None


class EventSource(str, Enum):
    """Origin of an event: the agent or a worker."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, Enum):
    """State of a node in a rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


class _Serialized:
    """Serialization of both classes of events."""

    _enumeration: ClassVar[tuple[str, type[Enum]]]  # name and type of the field that JSON has as text

    def __str__(self) -> str:
        return self.serialize()

    def serialize(self) -> str:
        """Return the event as a line of JSON."""
        return json.dumps(_json_value(fields_of(self)))

    @classmethod
    def deserialize(cls, data: Any) -> Any:
        """Return the event from the text of `serialize`. An event is returned unchanged. Raises TypeError or ValueError for others."""
        if isinstance(data, cls):
            return data
        if not isinstance(data, str):
            raise TypeError(f"{cls.__name__} is read from JSON text, not from {type(data).__name__}")
        fields_by_name = json.loads(data)
        name, enumeration = cls._enumeration
        try:
            fields_by_name[name] = enumeration[str(fields_by_name.get(name))]
            return cls(**fields_by_name)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a serialized {cls.__name__}: {data:.200}") from error


@dataclass
class Event(_Serialized):
    """Event of a torchelastic job."""

    _enumeration = "source", EventSource

    name: str  # also the value of the label `type`: use few names
    source: EventSource
    timestamp: int = 0  # Unix time in milliseconds; 0 for the time of recording
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)


@dataclass
class RdzvEvent(_Serialized):
    """Event of a rendezvous, with facts about the node; `error_trace` is set after a failure."""

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
    """Return the fields by name. The values are not copied, unlike by `dataclasses.asdict`, because some objects cannot be."""
    return {field.name: getattr(event, field.name) for field in fields(event)}


def _json_value(value: object) -> object:
    """Return a value as JSON types."""
    if isinstance(value, Mapping):
        return {to_str(name): _json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, float):
        return float(value) if isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return to_str(value)
