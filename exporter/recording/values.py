"""Value types of the recording: definitions, aggregations, readings and identities.

The training process creates the values, and the sidecar decodes them from the feed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, NamedTuple

from exporter.recording.value_class import Value, value_class

KINDS = ("stat", "counter", "gauge", "histogram", "summary")
"""Kinds of Stats. `stat` is the kind of the job's Stats, with windows; the other kinds are single families without windows."""

NO_COUNTS: Mapping[str, int] = {}


class Aggregation(enum.Enum):
    """Aggregation over the windows of a Stat.

    VALUE is the last sample, and STDDEV the population standard deviation. P50 to P99 are quantiles with linear interpolation
    between order statistics, the default of numpy and of PromQL's `quantile_over_time`. HISTOGRAM has no windows: its buckets
    count since the start of the process, as in Prometheus.
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


@value_class
class AggregationRow(Value):
    """Computation of an aggregation, and name and help of its gauge."""

    infix: str = ""  # part of the gauge's name `<stat>_window_<infix>_<unit>`; "" without a gauge
    help: str = ""  # help text of the gauge
    # computes the value from a `Window` that has samples; None for quantiles and HISTOGRAM
    compute: Callable[[Any], float] | None = None
    ratio: float | None = None  # quantile, from 0 to 1; None for other aggregations


AGGREGATIONS: Mapping[Aggregation, AggregationRow] = {
    Aggregation.VALUE: AggregationRow("last", "Last sample", lambda window: window.last),
    Aggregation.MEAN: AggregationRow("mean", "Mean", lambda window: window.total / window.samples),
    Aggregation.COUNT: AggregationRow("", "Samples", lambda window: float(window.samples)),
    # OpenMetrics reserves `_sum` for summaries and histograms.
    Aggregation.SUM: AggregationRow("added", "Sum", lambda window: window.total),
    Aggregation.MIN: AggregationRow("min", "Smallest sample", lambda window: window.low),
    Aggregation.MAX: AggregationRow("max", "Largest sample", lambda window: window.high),
    Aggregation.STDDEV: AggregationRow(
        "stddev", "Standard deviation", lambda window: sqrt(window.squared_deviations / window.samples)
    ),
    Aggregation.HISTOGRAM: AggregationRow(),
    Aggregation.P50: AggregationRow("p50", "Median", ratio=0.50),
    Aggregation.P90: AggregationRow("p90", "90th percentile", ratio=0.90),
    Aggregation.P95: AggregationRow("p95", "95th percentile", ratio=0.95),
    Aggregation.P99: AggregationRow("p99", "99th percentile", ratio=0.99),
}
"""Table of aggregations. To add an aggregation, add a member and a row."""


@value_class
class ProcessIdentity(Value):
    """Identity of a recording process. `rank`, `role`, `local_rank` and `trains` may change while the process records."""

    id: str  # 32 random hexadecimal digits; also the name of the feed file
    pid: int  # in the pid namespace of the process, which may differ from the reader's
    started: float  # Unix time at which the recording started
    run: str
    rank: int | None  # global rank; None for an agent or a helper
    local_rank: int | None = None  # None if the launcher does not set a local rank
    # `trainer`, `agent` (torchrun's agent), or `helper` (a process without a rank)
    role: str = "trainer"
    node: str = ""
    # labels of `exporter.configure(labels=…)`, published as `label_<name>` on `training_rank_info`
    labels: tuple[tuple[str, str], ...] = ()
    version: str = ""  # version of the exporter in that process
    # True if the user or the launcher chose the name of the run; False if it was generated
    run_given: bool = True
    # True if the process has reported training, which gives it precedence among the processes of a rank
    trains: bool = False
    launch: str = ""  # id of the launch by `run`, from the environment; empty without `run`


@dataclass(frozen=True, slots=True)
class StatDefinition(Value):
    """Definition of a Stat. A Stat is identified by name and labels."""

    name: str  # as in the job's code, such as `training.batch.latency`
    aggregations: frozenset[Aggregation]  # aggregations of the windows, and HISTOGRAM for a histogram
    window_seconds: float | None = 60.0  # length of a time window; None for count windows
    window_samples: int | None = None  # number of samples that closes a window; None for time windows
    unit: str | None = None  # base unit (`seconds`, `bytes`, …); None for a plain number
    help: str = ""  # single line
    labels: tuple[tuple[str, str], ...] = ()  # constant labels, sorted by name
    buckets: tuple[float, ...] = ()  # finite upper bounds, ascending; empty without HISTOGRAM
    stale_seconds: float = 300.0  # time without a sample after which a count window has no data
    kind: str = "stat"  # member of `KINDS`
    # number of samples below which a window has no values; not part of the feed
    min_samples: int = 1


@value_class
class StatFamilies(Value):
    """Families of a Stat."""

    main: str  # histogram or summary, such as `training_batch_latency_seconds`
    # gauge of each aggregation of the windows, such as `training_batch_latency_window_mean_seconds`
    windows: tuple[tuple[Aggregation, str], ...] = ()
    samples: str = ""  # gauge: number of samples in the last closed window; "" without windows
    last_sample: str = ""  # gauge: Unix time of the latest sample; "" without windows

    def names(self) -> frozenset[str]:
        """Return all names that an exposition of these families could contain."""
        names = {self.main + suffix for suffix in ("", "_bucket", "_sum", "_count", "_created")}
        names |= {name for _, name in self.windows} | {self.samples, self.last_sample}
        if self.main.endswith("_total"):
            base = self.main.removesuffix("_total")
            names |= {base, f"{base}_created"}
        return frozenset(names - {""})


def families_of(definition: StatDefinition) -> StatFamilies:
    """Return the families of a Stat. A unit at the end of the Stat's name is not repeated."""
    suffix = f"_{definition.unit}" if definition.unit else ""
    base = definition.name.replace(".", "_").removesuffix(suffix)
    if definition.kind != "stat":
        return StatFamilies(base + suffix + ("_total" if definition.kind == "counter" else ""))
    aggregations = sorted(definition.aggregations, key=lambda aggregation: aggregation.value)
    infixes = [(aggregation, AGGREGATIONS[aggregation].infix) for aggregation in aggregations]
    return StatFamilies(
        base + suffix,
        tuple((aggregation, f"{base}_window_{infix}{suffix}") for aggregation, infix in infixes if infix),
        f"{base}_window_samples",
        f"{base}_last_sample_timestamp_seconds",
    )


@dataclass(frozen=True, slots=True)
class WindowReading(Value):
    """Last closed window of a Stat."""

    started: float  # Unix time
    ended: float  # Unix time
    samples: int  # number of samples; 0 means no data
    # value of each aggregation except HISTOGRAM; empty without data or below `min_samples`
    values: Mapping[Aggregation, float] = field(default_factory=dict)


@value_class
class StatReading(Value):
    """State of a Stat at a point in time."""

    definition: StatDefinition  # effective definition, with the Stat rules applied
    count: int = 0  # number of accepted samples since the start of the process
    # sum of the samples; None after a negative sample and beyond the range of floats, because the sum is then no counter
    sum: float | None = 0.0
    # number of samples up to each bound of `definition.buckets`, without +Inf
    bucket_counts: tuple[int, ...] = ()
    window: WindowReading | None = None  # last closed window; None for kinds without windows
    # Unix time at which the latest sample was drained; None before the first
    last_sample: float | None = None
    # samples excluded from all aggregates, by reason, such as `nan`, `infinite`, `not_a_number`, `out_of_range`, and the
    # reasons of `Stat.add_tensor`
    rejected: Mapping[str, int] = field(default_factory=dict)
    overflows: int = 0  # drains that found the buffer full; the number of lost samples is unknown
    # latest accepted sample of a gauge; None before the first, and for other kinds
    value: float | None = None
    # samples by exponential bucket (`exporter.recording.exponential`); empty without a histogram
    exponential: Mapping[int, int] = field(default_factory=dict)


@value_class
class EventsReading(Value):
    """Cumulative counts of a process's events."""

    # number of events by (type, severity); types above the limit are counted as `other`
    counts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    # Unix time of the latest event by (type, severity)
    last: Mapping[tuple[str, str], float] = field(default_factory=dict)
    # number of events by (type, reason): `sampled` and `rate_limit` for events that were counted and not delivered, `payload` for
    # events whose invalid parts were omitted
    suppressed: Mapping[tuple[str, str], int] = field(default_factory=dict)
    delivered: Mapping[str, int] = field(default_factory=dict)  # number of delivered events by handler
    # lost events by (handler, reason): `queue_full`, `error`, `exit`, `unregistered`, `no_thread`
    dropped: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.counts or self.suppressed or self.delivered or self.dropped)


NO_EVENTS = EventsReading()

END_REASONS = (
    *("exit", "signal", "oom_kill", "preemption", "gpu", "gpu_memory", "nccl_timeout", "network", "storage"),
    *("host", "sdc", "user", "unknown"),
)
"""Reasons for the early end of a training: values of the label `reason` of `training_interruptions_total`."""


class WorkSegment(NamedTuple):
    """Work of consecutive steps of a training loop that no save covers. A step has the number of the steps completed before it."""

    loop: int  # number of the loop in the process, from 1
    first_step: int
    last_step: int  # included
    seconds: float


@value_class
class TrainingReading(Value):
    """State of a process's training, except for the Stats.

    "Work" is the time that the main thread spends in training iterations, without phases such as waiting for data, saving,
    validating and compiling.
    """

    # (name, value) of the known facts of the run, sorted: `session_tag`, `perf_tag` (joined by commas), `application`,
    # `is_baseline`, `world_size`, `framework`, `model`, `precision` …
    facts: tuple[tuple[str, str], ...] = ()
    phase: str = "other"  # current phase of the main thread
    phase_since: float = 0.0  # Unix time at which the phase started
    # seconds of the main thread in each phase, including the current phase; the sum is the wall time since the start of the recording
    phases: Mapping[str, float] = field(default_factory=dict)
    # Unix time of the end of the latest step or validation batch; None before the first. After the end of a training loop: the start of
    # the next loop until its first step; None before the next loop
    last_progress: float | None = None
    # completed steps before the first training loop of this process; None before the loop
    first_step: int | None = None
    loop: int = 0  # number of training loops that this process has started
    inferred_loop: bool = False  # True if a bridge inferred the latest loop
    # completed steps by the job's count, including steps of earlier processes; None before the first loop
    step: int | None = None
    steps: int = 0  # training iterations that this process has completed
    work_seconds: float = 0.0  # work of completed iterations
    open_seconds: float = 0.0  # work of the current iteration
    failed_seconds: float = 0.0  # work of iterations whose body raised
    committed_step: int | None = None  # step of the latest successful save; None before the first
    # work before the start of the latest successful save
    committed_seconds: float = 0.0
    segments: tuple[WorkSegment, ...] = ()  # work without a save, in order, with merged neighbors
    # True after an orderly end of the application without a failure, which commits all work
    finished: bool = False
    failure: str = ""  # reported reason of the end, a member of `END_REASONS`; "" without a failure
    # longest of the last 100 steps, except the first step of the process; None before
    longest_step_seconds: float | None = None
    # phase intervals of the main thread in the last seconds, oldest first, in groups of about a second; an interval is a pair of an
    # index into `history_phases` and microseconds; the last interval ends at `history_until` on the monotonic clock
    history_until: float = 0.0
    history_phases: tuple[str, ...] = ()
    intervals: tuple[tuple[int, ...], ...] = ()
    # FLOP per token of the forward and backward passes; None if unknown
    flops_per_token: float | None = None
    # FLOP per token including recomputation; None if unknown
    hardware_flops_per_token: float | None = None
    # peak FLOP/s of this rank's device, as reported by the job; None if unknown
    peak_flops: float | None = None


@value_class
class Ending(Value):
    """Uncaught exception that ended a Python process."""

    exception: str  # type of the exception
    at: float  # Unix time of the final recording


@value_class
class GpuUse(Value):
    """GPUs of a process, as far as they are known without a call of CUDA."""

    names: tuple[str, ...] = ()  # UUIDs, prefixes of UUIDs, or NVML indexes as texts
    used: bool | None = None  # True if torch has initialized CUDA; None without torch
    # True if torch or CUDA_VISIBLE_DEVICES names the GPUs; False if CUDA's default GPU is assumed
    named: bool = False


NO_GPUS = GpuUse()


@value_class
class Recording(Value):
    """State of a process's recording at a point in time, written about once a second."""

    stats: tuple[StatReading, ...]  # enabled Stats in order of construction, then the series of the training
    # True for the last recording of the identity: before a normal exit or a change of the identity
    final: bool = False
    events: EventsReading = NO_EVENTS
    training: TrainingReading | None = None  # None before the process reports training
    ending: Ending | None = None  # uncaught exception that ends the process; None without one
    # number of constructions of Stats that were refused, because the process has reached the limit of Stats
    stats_refused: int = 0
    gpus: GpuUse = NO_GPUS
