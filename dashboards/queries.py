"""Queries of panels, and the selectors that they share.

Expressions are written with selectors by name, `gpu_power_watts{@gpu}`, which become what the dashboard's
variables select: `gpu_power_watts{job=~"$job", instance=~"$node", uuid=~"$uuid", gpu=~"$gpu"}`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

SELECTORS = {
    "cluster": 'cluster=~"$cluster"',
    "node": 'cluster=~"$cluster", job=~"$job", instance=~"$node"',
    "gpu": 'cluster=~"$cluster", job=~"$job", instance=~"$node", uuid=~"$uuid", gpu=~"$gpu"',
    "run": 'cluster=~"$cluster", run=~"$run"',
    "rank": 'cluster=~"$cluster", run=~"$run", rank=~"$rank"',
    # `thermal` is all heat; the others, parts of it and the brake, are told since driver 575. They overlap: no sum.
    "heat": 'reason=~"thermal|hw_thermal|sw_thermal|hw_power_brake"',
    "here": 'cluster=~"$cluster", job=~"$job", instance=~"$node", run=~"$run"',
}
"""What `@name` stands for inside braces."""

_SELECTOR = re.compile(r"@(\w+)")
_OF_MACHINE = re.compile(
    r"\b\w+\((?:host|cgroup)_\w+\{[^}]*\}\[[^]]*\]\)|\b(?:host|cgroup)_\w+\{[^}]*\}(?!\[)"
)
OF_A_TARGET = "job, namespace, pod, container, endpoint"
"""Labels in which two exporters of one machine differ: the node's own, and the sidecar of a pod on it."""


def expand(expression: str) -> str:
    """Put the variables' selectors in the place of their names, and count a machine once that two exporters tell of.

    Raises:
        KeyError: There is no such selector.
    """
    once = _OF_MACHINE.sub(rf"max without ({OF_A_TARGET}) (\g<0>)", " ".join(expression.split()))
    return _SELECTOR.sub(lambda found: SELECTORS[found[1]], once)


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

    def target(self, place: int) -> dict[str, Any]:
        """What Grafana reads, as the panel's first, second, … query."""
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


_GUESSED = 'label_replace(training_rank_info{@run, local_rank!=""}, "gpu", "$1", "local_rank", "(.+)")'


def _gpu_of(labels: str, guessed: str) -> str:
    told = ('training_rank_info{@run, uuid!=""}', "training_process_gpu_memory_bytes{@run}", guessed)
    return (
        f"({' or on (instance, rank) '.join(f'group by (instance, rank, {labels}) ({one})' for one in told)})"
    )


GPU_OF = _gpu_of("gpu", _GUESSED)
"""Which GPU a rank has: as it says, as the driver says, else the one of its local rank's number, as launchers have it."""
UUID_OF = _gpu_of(
    "uuid", f"{_GUESSED} * on (instance, gpu) group_left (uuid) topk by (instance, gpu) (1, gpu_up)"
)
"""The same by uuid: the exporter that watches a card need not be that of the rank, nor number it alike."""


def held(family: str) -> str:
    """A value of the GPU that each rank of the run has; whoever tells it, and however often, counts once."""
    return f"max by (instance, rank) ({UUID_OF} * on (uuid) group_left () max by (uuid) ({family}))"


def events(counter: str, by: str = "", *, born: bool = False) -> str:
    """How often something happened in each step of the picture: whole numbers, each event once.

    An `increase` over `$__rate_interval` looks back further than a step and would draw an event several times. What was
    before is the last value of six hours, and what is now the last of the step: a scrape that failed draws nothing anew
    and hides nothing.

    Args:
        counter: The counter, with its selectors.
        by: Labels that are kept.
        born: The counter begins to exist with the first event, which is then one too.
    """
    here = f"sum by ({by}) (last_over_time({counter}[$__interval]))"
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
