"""Events of torchelastic: `Event` and `RdzvEvent`, torchelastic's classes, name for name.

Used in the training process and in torchrun's agent. Values only. Unlike torch's, what they serialize to is always JSON:
a number that is not finite is null, and metadata that JSON does not know is written as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from math import isfinite
from typing import Any, TypeVar

from exporter.elastic.agent import shown

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]

Made = TypeVar("Made")
EventMetadataValue = str | int | float | bool | None


class EventSource(str, Enum):
    """Who tells of an event."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, Enum):
    """The states of a node in a rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass
class Event:
    """Anything that happens in a torchelastic job.

    Attributes:
        name: What; a value of the label `type`, so there should be few of them.
        source: Who tells of it.
        timestamp: Unix time in milliseconds; 0 for when it is recorded.
        metadata: What is known about it.
    """

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        """Read what `serialize` has written; an Event is given back as it is.

        Raises:
            TypeError: That is neither.
            ValueError: That is no event: no JSON, an unknown source, a field too many or too few.
        """
        if isinstance(data, Event):
            return data
        found = _object(data, "an event")
        found["source"] = _member(EventSource, found.get("source"))
        return _made(Event, found)

    def serialize(self) -> str:
        """Write it as one line of JSON."""
        return _json(fields_of(self))


@dataclass
class RdzvEvent:
    """Anything that happens in a rendezvous.

    Attributes:
        name: What.
        run_id: The run.
        message: For people.
        hostname: Where.
        pid: Of which process.
        node_state: The node's state.
        master_endpoint: Of the rendezvous' store, where it is known.
        rank: Of the node, where it is known.
        local_id: Of the node, where there is one.
        error_trace: Of a failure.
    """

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

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: str | RdzvEvent) -> RdzvEvent:
        """Read what `serialize` has written; a RdzvEvent is given back as it is.

        Raises:
            TypeError: That is neither.
            ValueError: That is no such event.
        """
        if isinstance(data, RdzvEvent):
            return data
        found = _object(data, "a rendezvous event")
        found["node_state"] = _member(NodeState, found.get("node_state"))
        return _made(RdzvEvent, found)

    def serialize(self) -> str:
        """Write it as one line of JSON."""
        return _json(fields_of(self))


def fields_of(event: Event | RdzvEvent) -> dict[str, object]:
    """Give the fields, as they are: `asdict` copies what is in them, which may have no copies."""
    return {each.name: getattr(event, each.name) for each in fields(event)}


def _object(data: object, what: str) -> dict[str, Any]:
    if not isinstance(data, str):
        raise TypeError(f"{what} is read from JSON text, not from {type(data).__name__}")
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError(f"JSON of {what} is an object, not {type(found).__name__}")  # noqa: TRY004  # of the text
    return found


def _member(kind: type[Enum], name: object) -> Any:
    try:
        return kind[str(name)]
    except KeyError as error:
        known = ", ".join(kind.__members__)
        raise ValueError(f"{name!r} is no {kind.__name__}; known: {known}") from error


def _made(kind: type[Made], found: Mapping[str, Any]) -> Made:
    try:
        return kind(**found)
    except TypeError as error:
        raise ValueError(f"these are not the fields of {kind.__name__}: {', '.join(found)}") from error


def _json(value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(_plain(value))


def _plain(value: object) -> object:
    """Make JSON's own values of anything."""
    if isinstance(value, Mapping):
        return {shown(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(value) if isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return shown(value)
