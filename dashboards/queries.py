"""Queries of panels, and the selectors that they share.

Expressions are written with selectors by name, `gpu_power_watts{@gpu}`, which become what the dashboard's
variables select: `gpu_power_watts{job=~"$job", instance=~"$node", gpu=~"$gpu"}`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

SELECTORS = {
    "cluster": 'cluster=~"$cluster"',
    "node": 'cluster=~"$cluster", job=~"$job", instance=~"$node"',
    "gpu": 'cluster=~"$cluster", job=~"$job", instance=~"$node", gpu=~"$gpu"',
    "run": 'cluster=~"$cluster", run=~"$run"',
    "rank": 'cluster=~"$cluster", run=~"$run", rank=~"$rank"',
    # `thermal` is all heat; the others, parts of it and the brake, are told since driver 575. They overlap: no sum.
    "heat": 'reason=~"thermal|hw_thermal|sw_thermal|hw_power_brake"',
    "here": 'cluster=~"$cluster", job=~"$job", instance=~"$node", run=~"$run"',
}
"""What `@name` stands for inside braces."""

_SELECTOR = re.compile(r"@(\w+)")


def expand(expression: str) -> str:
    """Put the variables' selectors in the place of their names.

    Raises:
        KeyError: There is no such selector.
    """
    return _SELECTOR.sub(lambda found: SELECTORS[found[1]], " ".join(expression.split()))


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel: PromQL with selectors by name, and the legend of each series."""

    expression: str
    legend: str = "__auto"  # `{{label}}` stands for a label's value
    color: str | None = None  # of the one series, or shades of it where the legend has a label
    bound: bool = False  # the others are held against it: dashed, and in no stack; grey without a colour
    dashed: bool = False  # to tell its series from those of the query before, in the same colours
    right: bool = False  # it has an axis of its own, on the right, and is dashed: it may lie over another
    instant: bool = False  # only its value at the end of the time range
    table: bool = False  # as a table of labels and values
    heatmap: bool = False  # the series are buckets by `le`

    def target(self, place: int) -> dict[str, Any]:
        """What Grafana reads, as the panel's first, second, … query."""
        form = "table" if self.table else "heatmap" if self.heatmap else "time_series"
        return {
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": expand(self.expression),
            "format": form,
            "instant": self.instant,
            "legendFormat": self.legend,
            "range": not self.instant,
            "refId": chr(ord("A") + place),
        }


DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


GPU_OF = (
    "(max by (instance, rank, gpu) (0 * training_process_gpu_memory_bytes{@run} + 1)"
    " or on (instance, rank) max by (instance, rank, gpu)"
    ' (label_replace(training_rank_info{@run, local_rank!=""}, "gpu", "$1", "local_rank", "(.+)")))'
)
"""Which GPU a rank has: as the driver says, else the one of its local rank's number, as launchers have it."""


def events(counter: str, by: str = "", *, born: bool = False) -> str:
    """How often something happened in each step of the picture: whole numbers, each event once.

    An `increase` over `$__rate_interval` looks back further than a step and would draw an event several times. What was
    before is the last value of six hours, so that a scrape that failed does not draw the whole total anew.

    Args:
        counter: The counter, with its selectors.
        by: Labels that are kept.
        born: The counter begins to exist with the first event, which is then one too.
    """
    here = f"sum by ({by}) ({counter})"
    before = f"sum by ({by}) (last_over_time({counter}[6h] offset $__interval))"
    if born:
        before = f"({before} or 0 * {here})"
    return f"clamp_min({here} - {before}, 0)"


def now(expression: str, legend: str = "__auto", color: str | None = None) -> Query:
    """The value at the end of the time range."""
    return Query(expression, legend, color, instant=True)


def rows(expression: str) -> Query:
    """The values at the end of the time range, one row for each series."""
    return Query(expression, instant=True, table=True)
