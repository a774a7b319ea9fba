"""Platform metrics: what torchelastic's agent tells of itself, as families of the exporter's own.

Used in torchrun's agent, on the agent's thread. The names that torchelastic emits in the group `torchelastic` come in,
functions that take their values go out; the families are declared in `exporter.ledger.elastic_families`. Whatever else
is in that group is the job's, and is recorded like any other metric.

    SimpleElasticAgent._rendezvous.duration.ms   seconds of a rendezvous
    SimpleElasticAgent.run.failure               a run that was interrupted
    workers.<role>.<state>                       one more look that found this state; a role may have dots
    workers.<role>.remaining_restarts            a gauge, and each fall of it a restart that a failure has used up
    workers.<role>.run_<outcome>                 1 for what has become of the run, 0 for the others
"""

from __future__ import annotations

from collections.abc import Callable

from exporter.recording.identity import AGENT, clean_text
from exporter.recording.plain import plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeGuard

Record = Callable[[object], None]

_BEYOND = 1e15
"""No metric of torchelastic is as great; an int may be too great for arithmetic with floats."""
GROUP = "torchelastic"
"""torchelastic's own group, which is also the default one of `put_metric`."""
MOST_ROLES = 32
"""Roles of workers with series of their own: an agent has one."""
OUTCOMES = ("success_no_retries", "success_with_retries", "failed_no_retries", "failed_with_retries")

_FUNCTIONS = frozenset(
    {
        "LocalElasticAgent._monitor_workers",
        "LocalElasticAgent._start_workers",
        "LocalElasticAgent._stop_workers",
        "SimpleElasticAgent._assign_worker_ranks",
        "SimpleElasticAgent._initialize_workers",
        "SimpleElasticAgent._rendezvous",
        "SimpleElasticAgent._restart_workers",
        "SimpleElasticAgent.run",
    }
)
_STATES = frozenset({"unknown", "init", "healthy", "unhealthy", "stopped", "succeeded", "failed"})
_SECONDS = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper bounds: a rendezvous waits for other nodes, up to torchelastic's own limit of ten minutes and beyond."""


class Platform:
    """The platform metrics of one agent.

    Attributes:
        role: Of its workers, as far as it is known.
    """

    def __init__(self) -> None:
        self.role = "default"
        self._roles: set[str] = set()

    def recorder(self, name: object) -> Record | None:
        """Give the function that takes the values of a platform metric, None where the name is no such metric."""
        if not isinstance(name, str):
            return None
        if name.startswith("workers."):
            role, _, what = name.removeprefix("workers.").rpartition(".")
            record = self._of_workers(role, what)
        else:
            owner, _, rest = name.partition(".")
            function, _, what = rest.partition(".")
            function = f"{owner}.{function}"
            record = self._of_function(function, what) if function in _FUNCTIONS else None
        if record is not None:
            AGENT.seen()
        return record

    def known_role(self, role: str) -> str | None:
        """Make a role a label value; None beyond `MOST_ROLES`."""
        label = clean_text(role) or "default"
        if label not in self._roles:
            if len(self._roles) >= MOST_ROLES:
                return None
            self._roles.add(label)
            for outcome in (*OUTCOMES, "interrupted"):  # so that the first of them is an increase
                _run_counter(label, outcome)
            plain("counter", "training.elastic.failure_restarts", labels={"worker_role": label})
        self.role = label
        return label

    def _of_function(self, function: str, what: str) -> Record | None:
        if what == "duration.ms":
            if function.endswith("._rendezvous"):
                return _milliseconds(
                    plain("histogram", "training.elastic.rendezvous", unit="seconds", buckets=_SECONDS)
                )
            labels = {"function": function}
            return _milliseconds(plain("summary", "training.elastic.function", unit="seconds", labels=labels))
        if what not in {"success", "failure"}:
            return None
        calls = {
            outcome: plain(
                "counter",
                "training.elastic.function_calls",
                labels={"function": function, "outcome": outcome},
            )
            for outcome in ("success", "failure")
        }[what]
        restarts = plain("counter", "training.elastic.restarts")

        def record(value: object) -> None:  # noqa: ARG001  # it is always 1
            calls(1)
            if function == "SimpleElasticAgent._restart_workers" and what == "success":
                restarts(1)
            elif function == "SimpleElasticAgent.run" and what == "failure":
                _run_counter(self.role, "interrupted")(1)

        return record

    def _of_workers(self, role: str, what: str) -> Record | None:
        outcome = what.removeprefix("run_")
        known = {"remaining_restarts", "flakiness", "run_total"}
        if what not in known | _STATES and outcome not in OUTCOMES:
            return None
        label = self.known_role(role)
        if label is None:
            return None
        labels = {"worker_role": label}
        if what == "remaining_restarts":
            return _remaining(labels)
        if what == "flakiness":
            return _share(labels)
        if what == "run_total":
            return lambda value: None  # noqa: ARG005  # the sum of the outcomes
        return _looks(what, labels) if what in _STATES else _runs(label, outcome)


def _run_counter(label: str, outcome: str) -> Callable[[float], None]:
    return plain("counter", "training.elastic.runs", labels={"outcome": outcome, "worker_role": label})


def _milliseconds(add: Callable[[float], None]) -> Record:
    def record(value: object) -> None:
        # A wall clock that was set makes negative durations, which would end the sum of the histogram.
        if _is_number(value):
            add(max(value, 0) / 1000)

    return record


def _remaining(labels: dict[str, str]) -> Record:
    gauge = plain("gauge", "training.elastic.remaining_restarts", labels=labels)
    used = plain("counter", "training.elastic.failure_restarts", labels=labels)
    before: float | None = None

    def record(value: object) -> None:
        nonlocal before
        if _is_number(value):
            gauge(value)
            if before is not None and value < before:
                used(before - value)
            before = value

    return record


def _share(labels: dict[str, str]) -> Record:
    share = plain("summary", "training.elastic.flakiness", unit="ratio", labels=labels)

    def record(value: object) -> None:
        if _is_number(value):
            share(value / 100)

    return record


def _looks(what: str, labels: dict[str, str]) -> Record:
    looks = plain("counter", "training.elastic.worker_state_checks", labels={"state": what, **labels})
    return lambda value: looks(1)  # noqa: ARG005  # it is always 1


def _runs(label: str, outcome: str) -> Record:
    runs = _run_counter(label, outcome)

    def record(value: object) -> None:
        if _is_number(value) and value == 1:
            runs(1)

    return record


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and -_BEYOND < value < _BEYOND


PLATFORM = Platform()
"""That of this process."""
