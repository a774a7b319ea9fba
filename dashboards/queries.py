"""PromQL queries of panels, and their shared selectors.

Expressions contain named selectors such as `gpu_power_watts{@gpu}`, which expand to matchers on the variables of the
dashboard: `gpu_power_watts{job=~"$job", instance=~"$node", uuid=~"$uuid", gpu=~"$gpu"}`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

SELECTORS = {
    "cluster": 'cluster=~"$cluster"',
    # Without `job`, which alerts about sums lack.
    "machine": 'cluster=~"$cluster", instance=~"$node"',
    "node": 'cluster=~"$cluster", job=~"$job", instance=~"$node"',
    "gpu": 'cluster=~"$cluster", job=~"$job", instance=~"$node", uuid=~"$uuid", gpu=~"$gpu"',
    "run": 'cluster=~"$cluster", run=~"$run"',
    "rank": 'cluster=~"$cluster", run=~"$run", rank=~"$rank"',
    # Drivers since 575 split `thermal` into hw_thermal and sw_thermal. The reasons overlap: never sum them.
    "heat": 'reason=~"thermal|hw_thermal|sw_thermal|hw_power_brake"',
    "here": 'cluster=~"$cluster", job=~"$job", instance=~"$node", run=~"$run"',
}
"""Matchers by selector name."""

_SELECTOR = re.compile(r"@(\w+)")
_OF_MACHINE = re.compile(
    r"\b\w+\((?:host|cgroup)_\w+\{[^}]*\}\[[^]]*\]\)|\b(?:host|cgroup)_\w+\{[^}]*\}(?!\[)"
)
OF_A_TARGET = "job, namespace, pod, container, endpoint"
"""Labels in which the exporter of a node and the sidecar of a pod on the node differ."""


def expand(expression: str) -> str:
    """Return an expression with expanded selectors; series of one machine from two exporters count once.

    Raises:
        KeyError: Unknown selector.
    """
    once = _OF_MACHINE.sub(rf"max without ({OF_A_TARGET}) (\g<0>)", " ".join(expression.split()))
    return _SELECTOR.sub(lambda found: SELECTORS[found[1]], once)


@dataclass(frozen=True, slots=True)
class Query:
    """Query of a panel: PromQL with named selectors, and the legend."""

    expression: str
    legend: str = "__auto"  # `{{label}}` expands to the value of the label
    color: str | None = None  # one colour, or shades if the legend has a label
    bound: bool = False  # a reference line: dashed, not stacked, grey by default
    dashed: bool = False  # dashed lines in the colours of the query before
    right: bool = False  # dashed, on the right axis
    instant: bool = False  # instant query at the end of the time range
    table: bool = False  # table format

    def target(self, place: int) -> dict[str, Any]:
        """Return the JSON of the query at a position in the panel."""
        return {
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": expand(self.expression),
            "format": "table" if self.table else "time_series",
            "instant": self.instant,
            "legendFormat": self.legend,
            "range": not self.instant,
            "refId": chr(ord("A") + place),
        }


DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


_INFERRED = 'label_replace(training_rank_info{@run, local_rank!=""}, "gpu", "$1", "local_rank", "(.+)")'


def _gpu_of(labels: str, inferred: str) -> str:
    told = ('training_rank_info{@run, uuid!=""}', "training_process_gpu_memory_bytes{@run}", inferred)
    return (
        f"({' or on (instance, rank) '.join(f'group by (instance, rank, {labels}) ({one})' for one in told)})"
    )


GPU_OF = _gpu_of("gpu", _INFERRED)
"""GPU index of each rank: from the rank itself, else from the driver's processes, else the local rank."""
UUID_OF = _gpu_of(
    "uuid", f"{_INFERRED} * on (instance, gpu) group_left (uuid) topk by (instance, gpu) (1, gpu_up)"
)
"""GPU UUID of each rank: the exporter of a card may be another one than that of the rank, with other indexes."""


def held(family: str) -> str:
    """Return PromQL for a GPU family by rank of the run; several exporters of one card count once."""
    return f"max by (instance, rank) ({UUID_OF} * on (uuid) group_left () max by (uuid) ({family}))"


def events(counter: str, by: str = "", *, born: bool = False) -> str:
    """Return PromQL for the number of events in each step of a graph.

    An `increase` over `$__rate_interval` is longer than a step and would show an event several times. The difference of the
    last values of two steps counts each event once, also across a failed scrape.

    Args:
        counter: Counter with selectors.
        by: Labels to keep.
        born: The counter starts to exist with its first event, which counts too.
    """
    here = f"sum by ({by}) (last_over_time({counter}[$__interval]))"
    before = f"sum by ({by}) (last_over_time({counter}[6h] offset $__interval))"
    if born:
        before = f"({before} or 0 * {here})"
    return f"clamp_min({here} - {before}, 0)"


LAST_COMPUTE = "last_over_time(training_rank_compute_seconds{@run}[$__rate_interval])"
"""Compute time of the last steps of a rank, through pauses shorter than a minute at a scrape interval of 15 s."""

_REPORTING = (
    "count by ({by}) (group by ({labels}) (training_process_up{{@run}}"
    " and count_over_time(training_process_up{{@run}}[$__rate_interval]) > 1))"
)


def complete(expression: str, by: str = "") -> str:
    """Return PromQL for a sum over the ranks of a run that is blank while ranks are missing; `by` is `run` or empty.

    A rank is missing during an outage of the exporter, and until the counters of the rank have a rate.
    """
    reporting = _REPORTING.format(by=by, labels="run, rank")
    return f"({expression}) unless on ({by}) ({reporting} < max by ({by}) (training_world_size{{@run}}))"


def now(expression: str, legend: str = "__auto", color: str | None = None) -> Query:
    """Return an instant query."""
    return Query(expression, legend, color, instant=True)


def rows(expression: str) -> Query:
    """Return an instant query in table format."""
    return Query(expression, instant=True, table=True)
