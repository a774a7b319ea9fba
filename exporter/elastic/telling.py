"""Telling of torchelastic's events: they count in `training_events_total`, and what they mean for workers beside it.

Used in the training process and in torchrun's agent, on the thread that records, by the face and by the bridge. Nothing
here raises. An event's type is its name, with two exceptions:

- What an agent says of itself is `torchelastic.agent.status.<STATE>`. torch calls it `torchelastic.worker.status` like
  what it says of workers, and SUCCEEDED of the agent says only that `agent.run()` has returned.
- Of a rendezvous it is `torchelastic.rendezvous.<STATE>`: torch names those after the functions that report them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from time import monotonic_ns, time

from exporter.elastic.platform import PLATFORM
from exporter.errors import DefinitionError
from exporter.recording.event_kinds import Kind
from exporter.recording.event_values import check_data
from exporter.recording.events import EVENTS
from exporter.recording.identity import AGENT, clean_text
from exporter.recording.plain import plain

WORKER_STATUS = "torchelastic.worker.status."
AGENT_STATUS = "torchelastic.agent.status."
RENDEZVOUS = "torchelastic.rendezvous."

LONGEST_ERROR = 2000
"""Characters of an error that are kept: torch's may be of any length, and its end says the most."""
_SEVERITIES = {"FAILED": "error", "TERMINATED": "warning"}
_RESULTS = {"SUCCEEDED": "succeeded", "FAILED": "failed", "TERMINATED": "terminated"}
_MOST_KINDS = 1000
_BEYOND_MS = 1e14
_kinds: dict[tuple[str, str], Kind] = {}


def tell(name: object, source: object, metadata: object, timestamp_ms: object, origin: object = None) -> None:
    """Tell of an `Event`, whatever is in it; never raises.

    Args:
        name: The event's.
        source: `AGENT` or `WORKER`.
        metadata: The event's.
        timestamp_ms: Unix time in milliseconds; 0 for now, since torch leaves it at that.
        origin: The object that handlers of the face are given.
    """
    try:
        name = shown(name)
        metadata = metadata if isinstance(metadata, Mapping) else {}
        state = name.removeprefix(WORKER_STATUS) if name.startswith(WORKER_STATUS) else ""
        type_ = name
        if source == "AGENT" and state:
            type_ = AGENT_STATUS + state
        if name.startswith("torchelastic.") or (source == "AGENT" and "run_id" in metadata):
            AGENT.seen(str(metadata.get("run_id") or ""))
        data = {shown(key): _datum(key, value) for key, value in metadata.items() if value is not None}
        told = {"source": _datum("source", source), **data}
        _log(type_, None, _SEVERITIES.get(state, "info"), told, timestamp_ms, origin)
        if state and source == "WORKER":
            _count_worker(state, metadata)
    except Exception:  # noqa: BLE001, S110  # an event of any content: the job must not fail for being watched
        pass


def tell_rendezvous(fields: Mapping[str, object], origin: object = None) -> None:
    """Tell of a `RdzvEvent`, given its fields; never raises."""
    try:
        AGENT.seen(str(fields.get("run_id") or ""))
        state = str(getattr(fields.get("node_state"), "value", fields.get("node_state")))
        data = {
            key: _datum(key, value)
            for key, value in fields.items()
            if key not in {"message", "node_state"} and value is not None and value != ""
        }
        message = shown(fields.get("message", ""))
        _log(RENDEZVOUS + clean_text(state), message, _SEVERITIES.get(state, "info"), data, 0, origin)
    except Exception:  # noqa: BLE001, S110  # as above
        pass


def _log(
    type_: str,
    message: str | None,
    severity: str,
    data: Mapping[str, str | float | int | bool],
    timestamp_ms: object,
    origin: object,
) -> None:
    pair = (type_ or "unnamed", severity)
    kind = _kinds.get(pair)
    if kind is None:
        kind = EVENTS.kind(*pair)
        if len(_kinds) < _MOST_KINDS:
            _kinds[pair] = kind
    if not kind.enabled:
        return
    now = time()
    stamped = isinstance(timestamp_ms, int | float) and 0 < timestamp_ms < _BEYOND_MS
    happened = timestamp_ms / 1000 if stamped else now  # type: ignore[operator]  # a number
    number = kind.count()
    kind.occurrences.last = happened
    raw = (pair[0], message, severity, check_data(data), happened, now, monotonic_ns(), None, ())
    EVENTS.hand_on(kind, number, raw, origin)


def shown(value: object) -> str:
    """Make text of anything, an object included whose own way to do so fails."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001  # anybody's own __str__
        return type(value).__name__


def _datum(key: object, value: object) -> str | float | int | bool:
    if isinstance(value, str):
        return value[-LONGEST_ERROR:] if key in {"raw_error", "error_trace"} else value
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 63:
        return str(value)
    return value if isinstance(value, bool | int | float) else shown(value)


def _count_worker(state: str, metadata: Mapping[object, object]) -> None:
    role = PLATFORM.known_role(str(metadata.get("role") or "default"))
    if role is None:
        return
    try:
        if state == "START":
            plain("counter", "training.elastic.worker_starts", labels={"worker_role": role})(1)
        elif state in _RESULTS:
            code = "0" if state == "SUCCEEDED" else _exit_code(metadata)
            labels = {"exit_code": code, "result": _RESULTS[state], "worker_role": role}
            plain("counter", "training.elastic.worker_results", labels=labels)(1)
    except DefinitionError:  # a name that somebody else has: told when the metrics were made
        pass


def _exit_code(metadata: Mapping[object, object]) -> str:
    """The worker's exit code: torch hides it in JSON inside of the JSON, in a list of one."""
    try:
        (code,) = json.loads(str(metadata["metadata"]))["exit_code"]
    except (KeyError, TypeError, ValueError):
        return "unknown"
    return str(code) if type(code) is int and -256 < code < 256 else "unknown"
