"""What a Stat is, what it computes, the families it becomes, and what it has seen so far.

Used in the training process, where the values are made, and in the sidecar, where they are read back from the feed.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

KINDS = ("stat", "counter", "gauge", "histogram", "summary")
"""What a Stat is published as: with windows and all, as users make them, or as one family without windows."""

NOTHING: Mapping[str, int] = {}


class Aggregation(enum.Enum):
    """What is computed over each window of a Stat.

    VALUE is the last sample; STDDEV the population's; P50 to P99 are quantiles with linear interpolation
    between order statistics (numpy's default, and that of PromQL's `quantile_over_time`). HISTOGRAM is not
    windowed: its buckets count since the process began, as Prometheus wants them.
    """

    VALUE = "value"
    MEAN = "mean"
    COUNT = "count"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    STDDEV = "stddev"
    HISTOGRAM = "histogram"
    P50 = "p50"
    P90 = "p90"
    P95 = "p95"
    P99 = "p99"


@dataclass(frozen=True, slots=True)
class Row:
    """How one aggregation is computed and published."""

    word: str = ""  # in the gauge's name: `<stat>_window_<word>_<unit>`; "" without a gauge of its own
    help: str = ""  # what the gauge shows of its window
    # from an open `Window` with at least one sample; None for quantiles and for what is not windowed
    compute: Callable[[Any], float] | None = None
    ratio: float | None = None  # of a quantile, 0 to 1


AGGREGATIONS: Mapping[Aggregation, Row] = {
    Aggregation.VALUE: Row("last", "Last sample", lambda window: window.last),
    Aggregation.MEAN: Row("mean", "Mean", lambda window: window.total / window.samples),
    Aggregation.COUNT: Row("", "Samples", lambda window: float(window.samples)),
    # OpenMetrics keeps `_sum` for summaries and histograms.
    Aggregation.SUM: Row("added", "Sum", lambda window: window.total),
    Aggregation.MIN: Row("min", "Least sample", lambda window: window.low),
    Aggregation.MAX: Row("max", "Greatest sample", lambda window: window.high),
    Aggregation.STDDEV: Row(
        "stddev", "Standard deviation", lambda window: sqrt(window.deviation / window.samples)
    ),
    Aggregation.HISTOGRAM: Row(),
    Aggregation.P50: Row("p50", "Median", ratio=0.50),
    Aggregation.P90: Row("p90", "90th percentile", ratio=0.90),
    Aggregation.P95: Row("p95", "95th percentile", ratio=0.95),
    Aggregation.P99: Row("p99", "99th percentile", ratio=0.99),
}
"""The one table of aggregations, which everything else reads: to add one, add a member and its row."""


class Value:
    """A frozen dataclass that can be copied with changes."""

    __slots__ = ()

    def replace(self, **changes: object) -> Self:
        """Copy it with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]  # its subclasses are dataclasses


@dataclass(frozen=True, slots=True)
class ProcessIdentity(Value):
    """Who records; `rank`, `role`, `local_rank` and `trains` may change once, from none to one, under the same id."""

    id: str  # 32 hexadecimal digits, random per process; the file's name
    pid: int  # in the writer's own pid namespace, which need not be the reader's
    started: float  # Unix time at which the process's recording began, seconds
    run: str
    rank: int | None  # global rank, None for a process of no rank (an agent, a helper)
    local_rank: int | None = None  # None where the launcher says nothing
    # `trainer`; `agent` for torchrun's; `helper` for a process that has no rank yet, or never will
    role: str = "trainer"
    node: str = ""
    # what `exporter.configure(labels=…)` added; descriptive, published on an info family only
    labels: tuple[tuple[str, str], ...] = ()
    version: str = ""  # the exporter's own version in that process
    # whether a person or a launcher chose the run's name; else it was made for this launch
    run_given: bool = True
    # whether the process has told of training; of two that claim one rank such a process goes first
    trains: bool = False
    launch: str = ""  # id of the launch of `run`, from the environment; empty without `run`


@dataclass(frozen=True, slots=True)
class StatDefinition(Value):
    """What makes a Stat; (name, labels) is its identity."""

    name: str  # as the user wrote it, dots and all: `training.batch.latency`
    aggregations: frozenset[Aggregation]  # which windowed values, and whether a histogram
    window_seconds: float | None = 60.0  # length of a time window, None for windows that only count
    window_samples: int | None = None  # samples that close a window, None for windows that only time
    unit: str | None = None  # A base unit (`seconds`, `bytes`, …) or None for a plain number
    help: str = ""  # one line for people
    labels: tuple[tuple[str, str], ...] = ()  # constant labels, sorted by name
    buckets: tuple[float, ...] = ()  # finite upper bounds, ascending; empty without HISTOGRAM
    stale_seconds: float = 300.0  # after so long without a sample a pure count window has no data
    kind: str = "stat"  # one of `KINDS`; all but `stat` have no windows
    # A window with fewer has no values. Of the recording process alone: it is not in the feed
    min_samples: int = 1


@dataclass(frozen=True, slots=True)
class StatFamilies:
    """The families that one Stat becomes."""

    main: str  # the histogram or summary: `training_batch_latency_seconds`
    # A gauge for each windowed aggregation: `training_batch_latency_window_mean_seconds`
    windows: tuple[tuple[Aggregation, str], ...] = ()
    samples: str = ""  # gauge, samples of the last closed window; "" for a family without windows
    last_sample: str = ""  # gauge, Unix time of the latest sample; "" likewise

    def names(self) -> frozenset[str]:
        """Every family and sample name, as they collide in an exposition."""
        names = {self.main + suffix for suffix in ("", "_bucket", "_sum", "_count", "_created")}
        names |= {name for _, name in self.windows} | {self.samples, self.last_sample}
        if self.main.endswith("_total"):
            base = self.main.removesuffix("_total")
            names |= {base, f"{base}_created"}
        return frozenset(names - {""})


def families_of(definition: StatDefinition) -> StatFamilies:
    """Name the families of a Stat; a unit that the name already carries is not written twice."""
    suffix = f"_{definition.unit}" if definition.unit else ""
    base = definition.name.replace(".", "_").removesuffix(suffix)
    if definition.kind != "stat":
        return StatFamilies(base + suffix + ("_total" if definition.kind == "counter" else ""))
    wanted = sorted(definition.aggregations, key=lambda each: each.value)
    words = [(each, AGGREGATIONS[each].word) for each in wanted]
    return StatFamilies(
        base + suffix,
        tuple((each, f"{base}_window_{word}{suffix}") for each, word in words if word),
        f"{base}_window_samples",
        f"{base}_last_sample_timestamp_seconds",
    )


@dataclass(frozen=True, slots=True)
class WindowReading(Value):
    """The last closed window of a Stat."""

    started: float  # Unix time, seconds
    ended: float  # Unix time, seconds; the boundary, not the moment of closing
    samples: int  # samples in it; 0 means that there is no data and `values` is empty
    # one number for each windowed aggregation asked for (not for HISTOGRAM)
    values: Mapping[Aggregation, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StatReading(Value):
    """Everything about one Stat at one moment."""

    definition: StatDefinition  # as in force when the reading was made (overrides applied)
    count: int = 0  # accepted samples since the process began; exact
    # their sum; None once it cannot be a counter (a negative sample, or beyond the floating range)
    sum: float | None = 0.0
    # samples <= each bound of `definition.buckets`, cumulative over the bounds, without +Inf
    bucket_counts: tuple[int, ...] = ()
    # the last closed window; None before the first one closed or after a count window went stale
    window: WindowReading | None = None
    last_sample: float | None = None  # Unix time when the latest sample was drained, None before the first
    # samples kept out of every aggregate, by reason: `nan`, `infinite`, `not_a_number`, `out_of_range`, `capture`,
    # `device`, `shape`, `backlog`
    rejected: Mapping[str, int] = field(default_factory=dict)
    overflows: int = 0  # drains that found the buffer full, so that an unknown number of samples was lost
    # the latest accepted sample of a gauge; None before the first, and for the other kinds
    value: float | None = None
    # samples by exponential bucket (`exporter.recording.exponential`); empty without a histogram of our own
    exponential: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EventsReading(Value):
    """What has become of the events of a process since it began; all of it but `last` only grows."""

    # events by (type, severity); those whose type is not counted apart are `other`
    counts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    # Unix time at which the one of them that was logged last happened; no others
    last: Mapping[tuple[str, str], float] = field(default_factory=dict)
    # events that were counted but kept from the handlers, by (type, reason): `sampled`, `rate_limit`; `payload` for
    # those whose payload could not be made
    suppressed: Mapping[tuple[str, str], int] = field(default_factory=dict)
    delivered: Mapping[str, int] = field(default_factory=dict)  # events that a handler took, by its name
    # events that a handler missed, by (its name, reason): `queue_full`, `error`, `exit`, `unregistered`,
    # `no_thread`
    dropped: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.counts or self.suppressed or self.delivered or self.dropped)


NO_EVENTS = EventsReading()

_OF_THE_MACHINE = "oom_kill preemption gpu gpu_memory nccl_timeout network storage host"
END_REASONS = ("exit", "signal", *_OF_THE_MACHINE.split(), "sdc", "user", "unknown")
"""What can end a training before its time: values of the label `reason` of `training_interruptions_total`."""


@dataclass(frozen=True, slots=True)
class TrainingReading(Value):
    """What a process tells of the training it does, beside the numbers that it puts into Stats.

    "Work" is time of the main thread inside training iterations that no phase claims which is none (waiting for
    data, saving, validating, compiling).
    """

    # (name, value) of what describes the run, sorted: `session_tag`, `perf_tag` (joined by commas), `application`,
    # `is_baseline`, `world_size`, `framework`, `model`, `precision` …; only what is known
    facts: tuple[tuple[str, str], ...] = ()
    phase: str = "other"  # what the main thread does
    phase_since: float = 0.0  # Unix time since which it does, seconds
    # exclusive seconds of the main thread by phase since the process's recording began, the running phase's included;
    # they sum to the wall time
    phases: Mapping[str, float] = field(default_factory=dict)
    # Unix time at which the latest step or validation batch ended; None before the first
    last_progress: float | None = None
    first_step: int | None = None  # step at which the first training loop of this process began; None before
    loop: int = 0  # training loops that have begun
    guessed: bool = False  # that of the latest: a bridge has concluded it
    # steps completed as the job counts them, those before this process included; None before the first loop
    step: int | None = None
    steps: int = 0  # training iterations that this process has completed
    work_seconds: float = 0.0  # work of completed iterations
    open_seconds: float = 0.0  # work of the iteration under way
    failed_seconds: float = 0.0  # work of iterations whose body raised
    committed_step: int | None = None  # step of the latest successful save; None without one
    # work that the saves cover, all of it done before the latest of them began
    committed_seconds: float = 0.0
    # work that no save covers, in order, neighbours merged: (loop, first step, last step, seconds); the step that
    # begins where n are completed is step n
    segments: tuple[tuple[int, int, int, float], ...] = ()
    finished: bool = False  # whether the application ended in order: then all of its work counts as committed
    failure: str = ""  # why it ended or is about to, one of `END_REASONS`; "" for nothing
    longest_step_seconds: float | None = None  # of the last hundred, without the first; None before
    # what the main thread did in the last seconds, the oldest first: by turns a phase, by its place in
    # `history_phases`, and microseconds; up to `history_until` on the monotonic clock
    history_until: float = 0.0
    history_phases: tuple[str, ...] = ()
    history: tuple[int, ...] = ()
    # model FLOP for one token, forward and backward; None where nobody said
    flops_per_token: float | None = None
    # the same with what is computed again; None where nobody said
    hardware_flops_per_token: float | None = None
    peak_flops: float | None = None  # FLOP/s of this rank's device as configured; None where nobody said


@dataclass(frozen=True, slots=True)
class Ending(Value):
    """What ended a Python process that did not end in order."""

    exception: str  # type of the exception that nobody has caught
    at: float  # Unix time at which the interpreter began to exit, seconds


@dataclass(frozen=True, slots=True)
class Recording(Value):
    """All that the recording thread knows at one moment; what a sink is given about once a second."""

    stats: tuple[StatReading, ...]  # every enabled Stat, in order of construction
    final: bool = False  # True for the last one of a process that ends in order
    events: EventsReading = NO_EVENTS  # what has become of the events
    # what the process tells of the training it does; None while it tells nothing
    training: TrainingReading | None = None
    # the exception that ends the process; None for any other end, and while it lives
    ending: Ending | None = None
    # stats that were made beyond the most that a process records, so that they are not among `stats`
    stats_refused: int = 0
