"""Table of the nodes on the dashboard *Fleet*, with the conditions of unhealthy nodes."""

from __future__ import annotations

from dataclasses import dataclass

from dashboards.palette import BAD, GOOD, WARNING
from dashboards.panels import NODE_LINK, RUN_LINK, Panel, bad_from, dashboard_link, value_mappings, warn_from
from dashboards.tables import Column, percent_column, table


@dataclass(frozen=True, slots=True)
class NodeCondition:
    """Unhealthy condition of a node."""

    text: str
    expression: str  # PromQL: 1 for each node with the condition, 0 for the others
    color: str


EXPORTER_UP = "instance:exporter:up{@cluster} == 1"
"""PromQL with the value 1 for each node whose exporter is up."""
_LOST_GPUS = "instance:gpu_lost:sum{@cluster}"
"""PromQL for the number of lost GPUs of each node whose exporter is up."""
_NODE_CONDITIONS = (
    NodeCondition(
        "GPUs unknown",
        f"0 * {_LOST_GPUS} + 1 and on (cluster, instance) instance:gpu_unknown:sum{{@cluster}} or 0 * {_LOST_GPUS}",
        BAD,
    ),
    NodeCondition("GPU lost", f"{_LOST_GPUS} > bool 0", BAD),
    NodeCondition("Xid in the last hour", "instance:gpu_xid:count1h{@cluster} > bool 0", BAD),
    NodeCondition("exporter down", "instance:exporter:up{@cluster} == bool 0", BAD),
    NodeCondition("heat slows a GPU", "instance:gpu_thermal_throttle:ratio5m{@cluster} > bool 0.01", WARNING),
    NodeCondition("collector fails", "instance:exporter_collectors_failed:count{@cluster} > bool 0", WARNING),
)
"""Conditions of a node, the worst first."""
_CONDITIONS_WITH_SEVERITY = tuple(enumerate(reversed(_NODE_CONDITIONS), 1))
"""Pairs of a severity and a condition: the severity is 1 for the mildest condition, and largest for the worst."""


def _conditions_of_nodes(aggregation: str) -> str:
    """Return PromQL for the number of conditions of each node (`sum`), or for the severity of its worst condition (`max`), by node.

    The value is 0 for a node without a condition.
    """
    factor = "" if aggregation == "sum" else "{severity} * "
    # Without the label `condition`, `or` would drop all series of a node but the first.
    terms = (
        f'label_replace({factor.format(severity=severity)}({condition.expression}), "condition", "{severity}", "", "")'
        for severity, condition in _CONDITIONS_WITH_SEVERITY
    )
    return f"{aggregation} by (instance) ({' or '.join(terms)})"


CONDITION_COUNT_BY_NODE = _conditions_of_nodes("sum")
"""PromQL for the number of unhealthy conditions of each node; 0 for a healthy node."""
WORST_CONDITION_BY_NODE = _conditions_of_nodes("max")
"""PromQL for the severity of the worst condition of each node; 0 for a healthy node."""
CONDITION_TEXTS = value_mappings(
    {0: ("no problem", GOOD)}
    | {severity: (condition.text, condition.color) for severity, condition in _CONDITIONS_WITH_SEVERITY}
)
"""Value mappings from severities to the texts of the conditions."""


def node_panels() -> tuple[Panel, ...]:
    """Return the table of all nodes, the node with the worst condition first, and the run with the most ranks on each node."""
    ranks_by_run = "sum by (instance, run) (instance:training_ranks:count{@cluster})"
    nodes = "max by (instance) (instance:exporter:up{@cluster} * 0 + 1)"
    return (
        table(
            "All nodes, rates over 5 min",
            Column(
                "instance",
                "Node",
                links=(
                    dashboard_link("training-gpus", "GPUs", node="${__value.raw}"),
                    NODE_LINK,
                ),
            ),
            Column(WORST_CONDITION_BY_NODE, "Worst problem", decimals=0, width=165, mappings=CONDITION_TEXTS),
            Column("run", "Largest run", width=115, links=(RUN_LINK,)),
            Column("sum by (instance) (instance:training_ranks:count{@cluster})", "Ranks", width=60),
            Column("sum by (instance) (instance:gpu_devices:sum{@cluster})", "GPUs", width=58),
            Column(
                f"sum by (instance) ({_LOST_GPUS})",
                "Lost",
                width=60,
                thresholds=bad_from(1),
            ),
            Column(
                "sum by (instance) (instance:gpu_xid:count1h{@cluster})",
                "Xids, 1 h",
                width=78,
                thresholds=bad_from(1),
            ),
            percent_column(
                f"max by (instance) (instance:gpu_thermal_throttle:ratio5m{{@cluster}} and on (cluster, instance) {EXPORTER_UP})",
                "Throttled",
                84,
                warn_from(0.01, 0.1),
            ),
            percent_column(
                f"avg by (instance) (instance:gpu_busy:ratio5m{{@cluster}} and on (cluster, instance) {EXPORTER_UP})",
                "GPU busy",
                82,
            ),
            percent_column(
                "avg by (instance) (avg_over_time(instance:gpu_sm_activity:avg{@cluster}[5m])"
                f" and on (cluster, instance) {EXPORTER_UP})",
                "SM activity",
                105,
                bar=(0, 1),
            ),
            Column("sum by (instance) (instance:gpu_power:watts{@cluster})", "Power", unit="watt", width=75),
            Column(
                "max by (instance) (instance:gpu_temperature:max{@cluster})",
                "Hottest",
                unit="celsius",
                width=78,
            ),
            # Without a color: training uses all CPUs.
            percent_column("max by (instance) (instance:host_cpu:ratio{@cluster})", "CPU", 55),
            percent_column(
                "max by (instance) (instance:host_memory:ratio{@cluster})",
                "Memory",
                75,
                warn_from(0.9, 0.95),
            ),
            row_query=(
                f"{nodes} * on (instance) group_left (run) topk by (instance) (1, {ranks_by_run})"
                f" or on (instance) {nodes}"
            ),
            sort="Worst problem",
            h=10,
            w=24,
        ),
    )
