"""The values that leave the recording stage: what a Stat is, and what it has seen so far.

Used in the training process, where they are made, and in the sidecar, where they are read back from the feed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from exporter.recording.aggregations import Aggregation as Aggregation  # noqa: PLC0414  # its old home

if TYPE_CHECKING:
    from typing_extensions import Self

KINDS = ("stat", "counter", "gauge", "histogram", "summary")
"""What a Stat is published as: with windows and all, as users make them, or as one plain family."""

NOTHING: Mapping[str, int] = {}


class Value:
    """A frozen dataclass that can be copied with changes."""

    __slots__ = ()

    def replace(self, **changes: object) -> Self:
        """Copy it with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]  # its subclasses are dataclasses


@dataclass(frozen=True, slots=True)
class StatDefinition(Value):
    """What makes a Stat; (name, labels) is its identity.

    Attributes:
        name: As the user wrote it, dots and all: `training.batch.latency`.
        aggregations: Which windowed values, and whether a histogram.
        window_seconds: Length of a time window, None for windows that only count.
        window_samples: Samples that close a window, None for windows that only time.
        unit: A base unit (`seconds`, `bytes`, …) or None for a plain number.
        help: One line for people.
        labels: Constant labels, sorted by name.
        buckets: Finite upper bounds, ascending; empty without HISTOGRAM.
        stale_seconds: After so long without a sample a pure count window has no data.
        kind: One of `KINDS`; all but `stat` have no windows.
        min_samples: A window with fewer has no values. Of the recording process alone: it is not in the feed.
    """

    name: str
    aggregations: frozenset[Aggregation]
    window_seconds: float | None = 60.0
    window_samples: int | None = None
    unit: str | None = None
    help: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    buckets: tuple[float, ...] = ()
    stale_seconds: float = 300.0
    kind: str = "stat"
    min_samples: int = 1


@dataclass(frozen=True, slots=True)
class WindowReading(Value):
    """The last closed window of a Stat.

    Attributes:
        started: Unix time, seconds.
        ended: Unix time, seconds; the boundary, not the moment of closing.
        samples: Samples in it; 0 means that there is no data and `values` is empty.
        values: One number for each windowed aggregation asked for (not for HISTOGRAM).
    """

    started: float
    ended: float
    samples: int
    values: Mapping[Aggregation, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StatReading(Value):
    """Everything about one Stat at one moment.

    Attributes:
        definition: As in force when the reading was made (overrides applied).
        count: Accepted samples since the process began; exact.
        sum: Their sum; None once it cannot be a counter (a negative sample, or beyond the floating range).
        bucket_counts: Samples <= each bound of `definition.buckets`, cumulative over the bounds, without +Inf.
        window: The last closed window; None before the first one closed or after a count window went stale.
        last_sample: Unix time when the latest sample was drained, None before the first.
        rejected: Samples kept out of every aggregate, by reason: `nan`, `infinite`, `not_a_number`,
            `out_of_range`, `capture`, `device`, `shape`, `backlog`.
        overflows: Drains that found the buffer full, so that an unknown number of samples was lost.
        value: The latest accepted sample of a gauge; None before the first, and for the other kinds.
    """

    definition: StatDefinition
    count: int = 0
    sum: float | None = 0.0
    bucket_counts: tuple[int, ...] = ()
    window: WindowReading | None = None
    last_sample: float | None = None
    rejected: Mapping[str, int] = field(default_factory=dict)
    overflows: int = 0
    value: float | None = None


@dataclass(frozen=True, slots=True)
class EventsReading(Value):
    """What has become of the events of a process since it began; all of it but `last` only grows.

    Attributes:
        counts: Events by (type, severity); those whose type is not counted apart are `other`.
        last: Unix time at which the one of them that was logged last happened; no others.
        suppressed: Events that were counted but kept from the handlers, by (type, reason): `sampled`,
            `rate_limit`; `payload` for those whose payload could not be made.
        delivered: Events that a handler took, by its name.
        dropped: Events that a handler missed, by (its name, reason): `queue_full`, `error`, `exit`, `unregistered`,
            `write`, `no_thread`.
    """

    counts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    last: Mapping[tuple[str, str], float] = field(default_factory=dict)
    suppressed: Mapping[tuple[str, str], int] = field(default_factory=dict)
    delivered: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.counts or self.suppressed or self.delivered or self.dropped)


NO_EVENTS = EventsReading()

END_REASONS = (
    "exit",
    "signal",
    "oom_kill",
    "preemption",
    "gpu",
    "gpu_memory",
    "nccl_timeout",
    "network",
    "storage",
    "host",
    "sdc",
    "user",
    "unknown",
)
"""What can end a training before its time: values of the label `reason` of `training_interruptions_total`."""


@dataclass(frozen=True, slots=True)
class TrainingReading(Value):
    """What a process tells of the training it does, beside the numbers that it puts into Stats.

    "Work" is time of the main thread inside training iterations that no phase claims which is none (waiting for
    data, saving, validating, compiling).

    Attributes:
        facts: (name, value) of what describes the run, sorted: `session_tag`, `perf_tag` (joined by commas),
            `application`, `is_baseline`, `world_size`, `framework`, `model`, `precision` …; only what is known.
        phase: What the main thread does.
        phase_since: Unix time since which it does, seconds.
        phases: Exclusive seconds of the main thread by phase since the process's recording began, the running
            phase's included; they sum to the wall time.
        last_progress: Unix time at which the latest step or validation batch ended; None before the first.
        first_step: Step at which the first training loop of this process began; None before.
        loop: Training loops that have begun.
        step: Steps completed as the job counts them, those before this process included; None before the first loop.
        steps: Training iterations that this process has completed.
        work_seconds: Work of completed iterations.
        open_seconds: Work of the iteration under way.
        failed_seconds: Work of iterations whose body raised.
        committed_step: Step of the latest successful save; None without one.
        committed_seconds: Work that the saves cover, all of it done before the latest of them began.
        segments: Work that no save covers, in order, neighbours merged: (loop, first step, last step, seconds); the
            step that begins where n are completed is step n.
        finished: Whether the application ended in order: then all of its work counts as committed.
        failure: Why it ended or is about to, one of `END_REASONS`; "" for nothing.
        longest_step_seconds: Of the last hundred, without the first; None before.
        timeline: (end of the bin on the monotonic clock, (phase, seconds) in it): the last bins of a tenth of a
            second, aligned to multiples of it.
        flops_per_token: Model FLOP for one token, forward and backward; None where nobody said.
        hardware_flops_per_token: The same with what is computed again; None where nobody said.
        peak_flops: FLOP/s of this rank's device as configured; None where nobody said.
    """

    facts: tuple[tuple[str, str], ...] = ()
    phase: str = "other"
    phase_since: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    last_progress: float | None = None
    first_step: int | None = None
    loop: int = 0
    step: int | None = None
    steps: int = 0
    work_seconds: float = 0.0
    open_seconds: float = 0.0
    failed_seconds: float = 0.0
    committed_step: int | None = None
    committed_seconds: float = 0.0
    segments: tuple[tuple[int, int, int, float], ...] = ()
    finished: bool = False
    failure: str = ""
    longest_step_seconds: float | None = None
    timeline: tuple[tuple[float, tuple[tuple[str, float], ...]], ...] = ()
    flops_per_token: float | None = None
    hardware_flops_per_token: float | None = None
    peak_flops: float | None = None


@dataclass(frozen=True, slots=True)
class Ending(Value):
    """What ended a Python process that did not end in order.

    Attributes:
        exception: Type of the exception that nobody has caught.
        at: Unix time at which the interpreter began to exit, seconds.
    """

    exception: str
    at: float


@dataclass(frozen=True, slots=True)
class Recording(Value):
    """All that the recording thread knows at one moment; what a sink is given about once a second.

    Attributes:
        stats: Every enabled Stat, in order of construction.
        final: True for the last one of a process that ends in order.
        drain_delay_seconds: The longest that a window was closed after its end since the last recording.
        passive_stuck_since: Unix time since which a passive callback has not returned, None when none hangs.
        events: What has become of the events.
        training: What the process tells of the training it does; None while it tells nothing.
        ending: The exception that ends the process; None for any other end, and while it lives.
        stats_refused: Stats that were made beyond the most that a process records, so that they are not among `stats`.
    """

    stats: tuple[StatReading, ...]
    final: bool = False
    drain_delay_seconds: float = 0.0
    passive_stuck_since: float | None = None
    events: EventsReading = NO_EVENTS
    training: TrainingReading | None = None
    ending: Ending | None = None
    stats_refused: int = 0
