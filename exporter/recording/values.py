"""The values that leave the recording stage: what a Stat is, and what it has seen so far.

Used in the training process, where they are made, and in the sidecar, where they are read back from the
feed. Frozen, standard library only, no behaviour.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


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
class StatDefinition:
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


@dataclass(frozen=True, slots=True)
class WindowReading:
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
class StatReading:
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
    """

    definition: StatDefinition
    count: int = 0
    sum: float | None = 0.0
    bucket_counts: tuple[int, ...] = ()
    window: WindowReading | None = None
    last_sample: float | None = None
    rejected: Mapping[str, int] = field(default_factory=dict)
    overflows: int = 0


@dataclass(frozen=True, slots=True)
class Recording:
    """All that the recording thread knows at one moment; what a sink is given about once a second.

    Attributes:
        stats: Every enabled Stat, in order of construction.
        final: True for the last one of a process that ends in order.
        drain_delay_seconds: The longest that a window was closed after its end since the last recording.
        passive_stuck_since: Unix time since which a passive callback has not returned, None when none hangs.
    """

    stats: tuple[StatReading, ...]
    final: bool = False
    drain_delay_seconds: float = 0.0
    passive_stuck_since: float | None = None
