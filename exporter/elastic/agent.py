"""Families of torchrun's agent and workers, from torchelastic's metrics and events.

Runs in the job and in torchrun's agent, on the thread of the call. The recording functions do not raise. See docs/torchelastic.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic_ns, time
from typing import Any

from exporter.recording.conversion import to_str
from exporter.recording.event_values import RawEvent, convert_data
from exporter.recording.events import EVENTS
from exporter.recording.identity import LAUNCH_ID, clean_text
from exporter.recording.recorder import RECORDER
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.recording.stat import create_series

RecordValue = Callable[[object], None]
"""Function that records a value of a metric, or ignores a value that is no valid number."""

_MAX_METRIC_VALUE = 1e15
"""Limit of metric values. An int above the range of a float would raise OverflowError."""
GROUP = "torchelastic"
"""Group of torchelastic's own metrics, and default group of `put_metric`."""
OUTCOMES = ("success_no_retries", "success_with_retries", "failed_no_retries", "failed_with_retries")
"""Outcomes of a run of the workers. torchelastic reports each in a field `run_<outcome>`: 1 for the outcome of the run, else 0."""
_FUNCTIONS = {
    f"LocalElasticAgent.{name}" for name in ("_monitor_workers", "_start_workers", "_stop_workers")
} | {
    f"SimpleElasticAgent.{name}"
    for name in ("_assign_worker_ranks", "_initialize_workers", "_rendezvous", "_restart_workers", "run")
}
"""Functions of the agent whose calls torchelastic measures."""
_STATES = {"unknown", "init", "healthy", "unhealthy", "stopped", "succeeded", "failed"}
"""States of the workers. At each check, torchelastic reports the current state."""
_RENDEZVOUS_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Bucket bounds in seconds. By default, a rendezvous waits up to ten minutes for other nodes."""


def _series(kind: str, name: str, unit: str | None = None, **labels: str) -> Callable[[float], None]:
    """Return the function that records a number in a series of the family `training_elastic_<name>` (with the suffixes of its type)."""
    buckets = _RENDEZVOUS_BUCKETS if kind == "histogram" else None
    return create_series(kind, f"training.elastic.{name}", unit=unit, labels=labels, buckets=buckets)


class AgentMetrics:
    """Metrics that torchelastic emits about the agent and its workers.

    Attributes:
        role: Role of the workers, as last reported.
    """

    def __init__(self) -> None:
        self.role = "default"

    def recorder(self, name: object) -> RecordValue | None:
        """Return the function that records the values of one of torchelastic's metrics, or None for other names."""
        if not isinstance(name, str):
            return None
        owner, _, field_path = name.partition(".")
        if owner == "workers":
            role, _, field = field_path.rpartition(".")  # a role may contain dots
            record = self._worker_recorder(role, field)
        else:
            function, _, field = field_path.partition(".")
            record = self._function_recorder(f"{owner}.{function}", field)
        if record is not None:
            RECORDER.process.observe_agent()
        return record

    def declare_role(self, role: str) -> str:
        """Return a role as a label value, and create its counters at 0, so that `increase()` counts the first run."""
        self.role = clean_text(role) or "default"
        for outcome in (*OUTCOMES, "interrupted"):
            _series("counter", "runs", outcome=outcome, worker_role=self.role)
        _series("counter", "failure_restarts", worker_role=self.role)
        return self.role

    def _function_recorder(self, function: str, field: str) -> RecordValue | None:
        """Return the function that records a field of a function of the agent, such as `SimpleElasticAgent.run` and `success`."""
        if function not in _FUNCTIONS or field not in {"duration.ms", "success", "failure"}:
            return None
        if field == "duration.ms":
            if function.endswith("._rendezvous"):
                add = _series("histogram", "rendezvous", "seconds")
            else:
                add = _series("summary", "function", "seconds", function=function)
            # torch measures on the wall clock: a negative duration would invalidate the sum of the histogram.
            return _numbers_only(lambda milliseconds: add(max(milliseconds, 0) / 1000))
        calls = {
            outcome: _series("counter", "function_calls", function=function, outcome=outcome)
            for outcome in ("success", "failure")
        }
        restarts = _series("counter", "restarts")

        def record(_value: object) -> None:
            calls[field](1)
            if (function, field) == ("SimpleElasticAgent._restart_workers", "success"):
                restarts(1)
            elif (function, field) == ("SimpleElasticAgent.run", "failure"):
                _series("counter", "runs", outcome="interrupted", worker_role=self.role)(1)

        return record

    def _worker_recorder(self, role: str, field: str) -> RecordValue | None:
        """Return the function that records a field of the workers of a role, such as `remaining_restarts`."""
        outcome = field.removeprefix("run_")
        if (
            field not in {"remaining_restarts", "flakiness", "run_total", *_STATES}
            and outcome not in OUTCOMES
        ):
            return None
        worker_role = self.declare_role(role)
        if field == "remaining_restarts":
            return _restart_recorder(worker_role)
        if field == "flakiness":
            flakiness = _series("summary", "flakiness", worker_role=worker_role)
            return _numbers_only(lambda percent: flakiness(percent / 100))
        if field == "run_total":
            return lambda _value: None  # not recorded: it is the sum of the outcomes
        if field in _STATES:
            checks = _series("counter", "worker_state_checks", state=field, worker_role=worker_role)
            return lambda _value: checks(1)
        runs = _series("counter", "runs", outcome=outcome, worker_role=worker_role)
        return _numbers_only(lambda value: runs(1) if value == 1 else None)


def _numbers_only(add: Callable[[float], None]) -> RecordValue:
    """Return the function that passes numbers below `_MAX_METRIC_VALUE` to *add*, and ignores other values."""

    def record(value: object) -> None:
        if isinstance(value, int | float) and -_MAX_METRIC_VALUE < value < _MAX_METRIC_VALUE:
            add(value)

    return record


def _restart_recorder(worker_role: str) -> RecordValue:
    """Return the function that records the remaining restarts, and counts each decrease as restarts after a failure."""
    gauge = _series("gauge", "remaining_restarts", worker_role=worker_role)
    failure_restarts = _series("counter", "failure_restarts", worker_role=worker_role)
    previous: float | None = None

    def record(value: float) -> None:
        nonlocal previous
        gauge(value)
        if previous is not None and value < previous:
            failure_restarts(previous - value)
        previous = value

    return _numbers_only(record)


AGENT_METRICS = AgentMetrics()
"""torchelastic's metrics in this process."""


# Events --------------------------------------------------------------------------------------------------------

# Prefixes of the types of events; a state follows.
WORKER_STATUS = "torchelastic.worker.status."
AGENT_STATUS = "torchelastic.agent.status."
RENDEZVOUS = "torchelastic.rendezvous."

MAX_ERROR_CHARACTERS = 2000
"""Maximum length of an error text. Only the end of a longer text is kept, because a traceback ends with the exception."""
_SEVERITIES = {"FAILED": "error", "TERMINATED": "warning"}
"""Severities of events by the state that they report; `info` for other states."""
_RESULTS = {"SUCCEEDED": "succeeded", "FAILED": "failed", "TERMINATED": "terminated"}
"""Values of the label `result` by the last state of a worker."""
_MAX_MILLISECONDS = 1e14
"""Limit of Unix times in milliseconds: the year 5138. Larger numbers are not times."""
_MAX_PID_DIGITS = 10
"""Maximum number of digits of a process id. Worker ids with more digits are not process ids."""


def record_event(
    name: object, source: object, metadata: object, timestamp_ms: object, origin: object = None
) -> None:
    """Record the fields of an `Event`, whose values may be of any type. Never raises.

    *origin* is the event object, which the handlers of `exporter.elastic.events` receive; None without such an object. A timestamp
    that is not a Unix time, such as 0, the default of torch, is replaced by the current time.
    """
    try:
        name = to_str(name)
        metadata = metadata if isinstance(metadata, Mapping) else {}
        state = name.removeprefix(WORKER_STATUS) if name.startswith(WORKER_STATUS) else ""
        if name.startswith("torchelastic.") or (source == "AGENT" and "run_id" in metadata):
            RECORDER.process.observe_agent(str(metadata.get("run_id") or ""))
        type_ = AGENT_STATUS + state if source == "AGENT" and state else name
        if state and source == "WORKER":
            _count_worker(state, metadata)
        data = {"source": source, **metadata}
        _record(type_, state, data, message=None, timestamp_ms=timestamp_ms, origin=origin)
    except Exception as error:  # an event of any content must not raise into the job
        if is_from_signal_handler(error):
            raise


def record_rendezvous(fields: Mapping[str, object], origin: object = None) -> None:
    """Record the fields of a `RdzvEvent`, whose values may be of any type. Never raises."""
    try:
        RECORDER.process.observe_agent(str(fields.get("run_id") or ""))
        state = str(getattr(fields.get("node_state"), "value", fields.get("node_state")))
        excluded_keys = {"message", "node_state"}
        data = {key: value for key, value in fields.items() if key not in excluded_keys and value != ""}
        message = to_str(fields.get("message", ""))
        # torch's events of a rendezvous have no timestamp.
        _record(
            RENDEZVOUS + clean_text(state), state, data, message=message, timestamp_ms=None, origin=origin
        )
    except Exception as error:  # an event of any content must not raise into the job
        if is_from_signal_handler(error):
            raise


def _record(
    type_: str,
    state: str,
    data: Mapping[str, Any],
    *,
    message: str | None,
    timestamp_ms: object,
    origin: object,
) -> None:
    """Record an event with the severity of its state, and wait for the handlers. Does nothing for a disabled type.

    A *timestamp_ms* that is not a Unix time in milliseconds is replaced by the current time.
    """
    type_ = type_ or "unnamed"
    severity = _SEVERITIES.get(state, "info")
    kind = EVENTS.kind(type_, severity)
    if kind.enabled:
        now = time()
        event_time = now
        if isinstance(timestamp_ms, int | float) and 0 < timestamp_ms < _MAX_MILLISECONDS:
            event_time = timestamp_ms / 1000
        truncated_errors = {
            key: str(data[key])[-MAX_ERROR_CHARACTERS:]
            for key in ("raw_error", "error_trace")
            if data.get(key)
        }
        event_data = convert_data({**data, **truncated_errors}, lambda _name: None)
        raw = RawEvent(
            type=type_,
            message=message,
            severity=severity,
            data=event_data,
            timestamp=event_time,
            logged_at=now,
            monotonic_ns=monotonic_ns(),
        )
        EVENTS.record(kind, raw, event_time, origin)
        EVENTS.await_handlers(kind)


def _count_worker(state: str, metadata: Mapping[object, object]) -> None:
    """Count the start or the result of a worker. Other states of a worker are not counted."""
    role = AGENT_METRICS.declare_role(str(metadata.get("role") or "default"))
    if state == "START":
        _series("counter", "worker_starts", worker_role=role)(1)
    elif state in _RESULTS:
        code = "0" if state == "SUCCEEDED" else _exit_code(metadata)
        labels = {"exit_code": code, "result": _RESULTS[state], "worker_role": role}
        _series("counter", "worker_results", **labels)(1)
        _write_worker_end(code, str(metadata.get("worker_id")))


def _write_worker_end(code: str, worker_id: str) -> None:
    """Write the exit status of a worker for the sidecar of `run`. The id of a local worker is its pid.

    Statuses -15 and -9 are not written, because the agent itself ends workers with these signals after a failure.
    """
    directory, launch = os.environ.get("EXPORTER_FEED_DIR"), os.environ.get(LAUNCH_ID)
    is_pid = worker_id.isdecimal() and len(worker_id) <= _MAX_PID_DIGITS
    if directory and launch and is_pid and code not in {"unknown", "-15", "-9"}:
        from exporter.feed.runs import write_worker_end  # noqa: PLC0415  # needed rarely, and only in an agent

        write_worker_end(Path(directory), pid=int(worker_id), status=int(code), launch=launch)


def _exit_code(metadata: Mapping[object, object]) -> str:
    """Return the exit code of a worker as a label value, or `unknown`. torch stores the code as a list in nested JSON.

    A negative code is the number of a signal. Numbers of 256 and more are neither, and would be an unlimited set of label values.
    """
    try:
        (code,) = json.loads(str(metadata["metadata"]))["exit_code"]
    except (KeyError, TypeError, ValueError):
        return "unknown"
    return str(code) if type(code) is int and -256 < code < 256 else "unknown"
