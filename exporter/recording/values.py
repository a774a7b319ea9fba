"""Value types of the recording: definitions, aggregations, readings and identities.

Created in the training process, and by the sidecar from the feed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from exporter.recording.value_class import Value, value_class

KINDS = ("stat", "counter", "gauge", "histogram", "summary")
"""Kinds of Stats: `stat` is for users and has windows, the other kinds are single families without windows."""

NO_COUNTS: Mapping[str, int] = {}


class Aggregation(enum.Enum):
    """Aggregation over the windows of a Stat.

    VALUE is the last sample, STDDEV the population's standard deviation. P50 to P99 are quantiles with linear interpolation
    between order statistics (the default of numpy and of PromQL's `quantile_over_time`). HISTOGRAM has no windows: its
    buckets count since the start of the process, as in Prometheus.
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

    infix: str = ""  # in the gauge's name: `<stat>_window_<infix>_<unit>`; "" without a gauge
    help: str = ""  # help text of the gauge
    # from an open `Window` with at least a single sample; None for quantiles and HISTOGRAM
    compute: Callable[[Any], float] | None = None
    ratio: float | None = None  # of a quantile, 0 to 1


AGGREGATIONS: Mapping[Aggregation, AggregationRow] = {
    Aggregation.VALUE: AggregationRow("last", "Last sample", lambda window: window.last),
    Aggregation.MEAN: AggregationRow("mean", "Mean", lambda window: window.total / window.samples),
    Aggregation.COUNT: AggregationRow("", "Samples", lambda window: float(window.samples)),
    # OpenMetrics keeps `_sum` for summaries and histograms.
    Aggregation.SUM: AggregationRow("added", "Sum", lambda window: window.total),
    Aggregation.MIN: AggregationRow("min", "Least sample", lambda window: window.low),
    Aggregation.MAX: AggregationRow("max", "Greatest sample", lambda window: window.high),
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
    """Identity of a recording process; `rank`, `role`, `local_rank` and `trains` change at most once for an id."""

    id: str  # 32 hexadecimal digits, random per process; the file's name
    pid: int  # in the writer's pid namespace, which may differ from the reader's
    started: float  # Unix time of the start of the recording, seconds
    run: str
    rank: int | None  # global rank; None for an agent or a helper
    local_rank: int | None = None  # None if the launcher does not set a local rank
    # `trainer`, `agent` (torchrun's agent), or `helper` (a process without a rank)
    role: str = "trainer"
    node: str = ""
    # labels of `exporter.configure(labels=…)`; descriptive, published on an info family only
    labels: tuple[tuple[str, str], ...] = ()
    version: str = ""  # version of the exporter in that process
    # True if a person or a launcher chose the run's name; False if the name was generated for this launch
    run_given: bool = True
    # True if the process has reported training; takes precedence among processes that claim the same rank
    trains: bool = False
    launch: str = ""  # id of the launch of `run`, from the environment; empty without `run`


@dataclass(frozen=True, slots=True)
class StatDefinition(Value):
    """Definition of a Stat; (name, labels) is the identity."""

    name: str  # as in the user's code, with dots: `training.batch.latency`
    aggregations: frozenset[Aggregation]  # windowed values, and HISTOGRAM for a histogram
    window_seconds: float | None = 60.0  # length of a time window, None for count windows
    window_samples: int | None = None  # samples that close a window, None for time windows
    unit: str | None = None  # base unit (`seconds`, `bytes`, …) or None for a plain number
    help: str = ""  # single line
    labels: tuple[tuple[str, str], ...] = ()  # constant labels, sorted by name
    buckets: tuple[float, ...] = ()  # finite upper bounds, ascending; empty without HISTOGRAM
    stale_seconds: float = 300.0  # time without a sample after which a count window has no data
    kind: str = "stat"  # a member of `KINDS`; all but `stat` have no windows
    # A window with fewer samples has no values; not part of the feed
    min_samples: int = 1


@value_class
class StatFamilies(Value):
    """Families of a Stat."""

    main: str  # the histogram or summary: `training_batch_latency_seconds`
    # A gauge for each windowed aggregation: `training_batch_latency_window_mean_seconds`
    windows: tuple[tuple[Aggregation, str], ...] = ()
    samples: str = ""  # gauge, samples of the last closed window; "" for a family without windows
    last_sample: str = ""  # gauge, Unix time of the latest sample; "" for a family without windows

    def names(self) -> frozenset[str]:
        """Return every family and sample name of an exposition."""
        names = {self.main + suffix for suffix in ("", "_bucket", "_sum", "_count", "_created")}
        names |= {name for _, name in self.windows} | {self.samples, self.last_sample}
        if self.main.endswith("_total"):
            base = self.main.removesuffix("_total")
            names |= {base, f"{base}_created"}
        return frozenset(names - {""})


def families_of(definition: StatDefinition) -> StatFamilies:
    """Return the families of a Stat; a unit at the end of the Stat's name is not repeated."""
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

    started: float  # Unix time, seconds
    ended: float  # Unix time of the boundary, seconds
    samples: int  # 0 means no data, and empty `values`
    # a number for each windowed aggregation (not for HISTOGRAM)
    values: Mapping[Aggregation, float] = field(default_factory=dict)


@value_class
class StatReading(Value):
    """State of a Stat at a point in time."""

    definition: StatDefinition  # in force, with overrides
    count: int = 0  # accepted samples since the start of the process; exact
    # sum of the samples; None if the sum cannot be a counter (a negative sample, or beyond the floating range)
    sum: float | None = 0.0
    # samples <= each bound of `definition.buckets`, cumulative over the bounds, without +Inf
    bucket_counts: tuple[int, ...] = ()
    # last closed window; None before the first window closed or after a count window became stale
    window: WindowReading | None = None
    last_sample: float | None = None  # Unix time when the latest sample was drained; None before the first
    # samples excluded from every aggregate, by reason: `nan`, `infinite`, `not_a_number`, `out_of_range`, `capture`,
    # `device`, `shape`, `backlog`
    rejected: Mapping[str, int] = field(default_factory=dict)
    overflows: int = 0  # drains that found the buffer full: an unknown number of samples was lost
    # latest accepted sample of a gauge; None before the first, and for the other kinds
    value: float | None = None
    # samples by exponential bucket (`exporter.recording.exponential`); empty without a histogram
    exponential: Mapping[int, int] = field(default_factory=dict)


@value_class
class EventsReading(Value):
    """Counts of a process's events; all but `last` only grow."""

    # events by (type, severity); further types are counted as `other`
    counts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    # Unix time of the latest event by (type, severity)
    last: Mapping[tuple[str, str], float] = field(default_factory=dict)
    # counted events that handlers did not get, by (type, reason): `sampled`, `rate_limit`; `payload` for events without
    # their failed payload
    suppressed: Mapping[tuple[str, str], int] = field(default_factory=dict)
    delivered: Mapping[str, int] = field(default_factory=dict)  # events by name of the handler
    # lost events by (name of the handler, reason): `queue_full`, `error`, `exit`, `unregistered`, `no_thread`
    dropped: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.counts or self.suppressed or self.delivered or self.dropped)


NO_EVENTS = EventsReading()

_OF_THE_MACHINE = "oom_kill preemption gpu gpu_memory nccl_timeout network storage host"
END_REASONS = ("exit", "signal", *_OF_THE_MACHINE.split(), "sdc", "user", "unknown")
"""Causes of a training's early end: values of the label `reason` of `training_interruptions_total`."""


@value_class
class TrainingReading(Value):
    """State of a process's training, beside the Stats.

    "Work" is time of the main thread inside training iterations, without phases such as waiting for data, saving, validating
    and compiling.
    """

    # (name, value) of the known facts of the run, sorted: `session_tag`, `perf_tag` (joined by commas), `application`,
    # `is_baseline`, `world_size`, `framework`, `model`, `precision` …
    facts: tuple[tuple[str, str], ...] = ()
    phase: str = "other"  # current phase of the main thread
    phase_since: float = 0.0  # Unix time of the phase's start, seconds
    # exclusive seconds of the main thread by phase since the start of the recording, the running phase included; their
    # sum is the wall time
    phases: Mapping[str, float] = field(default_factory=dict)
    # Unix time of the end of the latest step or validation batch; None before the first
    last_progress: float | None = None
    first_step: int | None = None  # first step of the first training loop of this process; None before
    loop: int = 0  # training loops so far
    inferred_loop: bool = False  # True if a bridge inferred the latest loop
    # completed steps by the job's count, including steps before this process; None before the first loop
    step: int | None = None
    steps: int = 0  # training iterations that this process has completed
    work_seconds: float = 0.0  # work of completed iterations
    open_seconds: float = 0.0  # work of the current iteration
    failed_seconds: float = 0.0  # work of iterations whose body raised
    committed_step: int | None = None  # step of the latest successful save; None before the first
    # work before the start of the latest successful save
    committed_seconds: float = 0.0
    # work without a save, in order, neighbours merged: (loop, first step, last step, seconds); step n follows n
    # completed steps
    segments: tuple[tuple[int, int, int, float], ...] = ()
    finished: bool = False  # True after an orderly end of the application, which commits all work
    failure: str = ""  # cause of the end, a member of `END_REASONS`; "" for no failure
    longest_step_seconds: float | None = None  # of the last hundred, without the first; None before
    # phase intervals of the main thread in the last seconds, the oldest first, in groups of about a second: pairs of an
    # index into `history_phases` and microseconds, up to `history_until` on the monotonic clock
    history_until: float = 0.0
    history_phases: tuple[str, ...] = ()
    intervals: tuple[tuple[int, ...], ...] = ()
    # model FLOP per token, forward and backward; None if unknown
    flops_per_token: float | None = None
    # FLOP per token including recomputation; None if unknown
    hardware_flops_per_token: float | None = None
    peak_flops: float | None = None  # FLOP/s of this rank's device as configured; None if unknown


@value_class
class Ending(Value):
    """Uncaught exception that ended a Python process."""

    exception: str  # type of the exception
    at: float  # Unix time at which the interpreter began to exit, seconds


@value_class
class GpuUse(Value):
    """GPUs of a process, as far as known without a call of CUDA."""

    names: tuple[str, ...] = ()  # UUIDs, prefixes of UUIDs, or NVML's numbers as texts
    used: bool | None = None  # False if torch has not initialised CUDA; None without torch
    named: bool = False  # True if torch or CUDA_VISIBLE_DEVICES names the GPUs; False for CUDA's default GPU


NO_GPUS = GpuUse()


@value_class
class Recording(Value):
    """Complete state of a process's recording at a point in time. Published about once a second."""

    stats: tuple[StatReading, ...]  # every enabled Stat, in order of construction
    final: bool = False  # True for the last recording of an orderly exit
    events: EventsReading = NO_EVENTS
    training: TrainingReading | None = None  # None before the process reports training
    ending: Ending | None = None  # the exception that ends the process; None for any other end
    stats_refused: int = 0  # Stats above the limit of a process, which `stats` does not include
    gpus: GpuUse = NO_GPUS
