"""Aggregations: what can be computed over each window of a Stat. One table, which everything else reads.

Used in the training process, which computes them, and in the sidecar, which names, explains and publishes them. To add
one, add a member and its row.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any


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
    """How one aggregation is computed and published.

    Attributes:
        word: In the gauge's name: `<stat>_window_<word>_<unit>`; "" without a gauge of its own.
        help: What the gauge shows of its window.
        compute: From an open `Window` with at least one sample; None for quantiles and for what is not windowed.
        ratio: Of a quantile, 0 to 1.
    """

    word: str = ""
    help: str = ""
    compute: Callable[[Any], float] | None = None
    ratio: float | None = None


AGGREGATIONS: Mapping[Aggregation, Row] = {
    Aggregation.VALUE: Row("last", "Last sample", lambda window: window.last),
    Aggregation.MEAN: Row("mean", "Mean", lambda window: window.total / window.samples),
    Aggregation.COUNT: Row("", "Samples", lambda window: float(window.samples)),
    # OpenMetrics keeps `_sum` for summaries and histograms.
    Aggregation.SUM: Row("added", "Sum", lambda window: window.total),
    Aggregation.MIN: Row("min", "Least sample", lambda window: window.low),
    Aggregation.MAX: Row("max", "Greatest sample", lambda window: window.high),
    Aggregation.STDDEV: Row(
        "stddev",
        "Standard deviation",
        lambda window: sqrt(window.deviation / window.samples),
    ),
    Aggregation.HISTOGRAM: Row(),
    Aggregation.P50: Row("p50", "Median", ratio=0.50),
    Aggregation.P90: Row("p90", "90th percentile", ratio=0.90),
    Aggregation.P95: Row("p95", "95th percentile", ratio=0.95),
    Aggregation.P99: Row("p99", "99th percentile", ratio=0.99),
}
