"""Dashboard *Fleet*: all runs and nodes of a cluster.

All queries except those of the run comparison read recorded series, or the series of alerts. Most recorded series exist for each
run, node or cluster. Series of ranks and devices are read only where they exist for a few: slow ranks, lost or throttled devices. The
cost of a query therefore hardly depends on the size of a run.
"""

from __future__ import annotations

from dashboards.alerts import firing_alerts
from dashboards.board import RUNBOOK, Annotation, Board, Row
from dashboards.compare import BASELINE, PERF_TAG, RUNS, comparison_panels
from dashboards.cost_and_loss import (
    CLUSTER_COST_PER_HOUR,
    CLUSTER_LOST_COST_PER_HOUR,
    CLUSTER_LOST_SHARE,
    LOST_THRESHOLDS,
    gpus_by_run,
)
from dashboards.fleet_nodes import CONDITION_COUNT_BY_NODE, node_panels
from dashboards.fleet_problems import UNSEEN_RUNS
from dashboards.fleet_runs import run_panels
from dashboards.palette import (
    BAD,
    BLUE,
    ORANGE,
    PURPLE,
    VERMILION,
    WARNING,
    shades,
)
from dashboards.panels import (
    NO_THRESHOLDS,
    NODE_LINK,
    RUN_LINK,
    Panel,
    stat,
    time_series,
    warn_below,
)
from dashboards.queries import Query, instant_query, named_values_query
from dashboards.tables import Column
from dashboards.verdicts import (
    ENDING,
    NO_PROBLEM,
    NO_PROGRESS,
    STARTING,
    UNKNOWN,
    Verdict,
    verdict_by_run,
)

UID = "training-fleet"


def board() -> Board:
    """Return the dashboard of a cluster."""
    return Board(
        uid=UID,
        title="Training / Fleet",
        description="All runs and nodes of a cluster on one page, from recording rules and alerts.",
        variables=(PERF_TAG, BASELINE, RUNS, RUNBOOK),
        rows=(
            Row("At a glance", _overview_panels()),
            Row("Runs", run_panels()),
            Row("Alerts", _alert_panels()),
            Row("Time and power of the cluster", _cluster_panels()),
            Row("Nodes", node_panels()),
            Row("Comparison of runs that do the same work", comparison_panels(), collapsed=True),
        ),
        annotations=(
            Annotation(
                "Critical alerts",
                'max by (alertname) (ALERTS{@cluster, alertstate="firing", severity="critical"})',
                "{{alertname}}",
                VERMILION,
                enabled=False,
                use_value_for_time=False,
            ),
        ),
        time_from="now-6h",
        refresh="1m",
    )


def _overview_panels() -> tuple[Panel, ...]:
    """Return the panels with the numbers of runs, nodes and GPUs, and with the goodput and the cost of the cluster."""
    # Absent instead of 0 if Prometheus has no rules or no run.
    zero_runs = f"0 * count({verdict_by_run('@cluster')})"
    active = (
        f"({verdict_by_run('@cluster')} unless on (run)"
        ' run:training_run_state:info{@cluster, state=~"finished|stopped"})'
    )
    return (
        stat(
            "Runs",
            named_values_query(
                {
                    NO_PROBLEM: f"(count({active} == {Verdict.NO_PROBLEM}) or {zero_runs})",
                    # Each comparison keeps some of the runs that the comparison to its left keeps.
                    "problem": f"(count({active} > {Verdict.NO_PROBLEM} < {Verdict.UNKNOWN} != {Verdict.STARTING}) or {zero_runs})",
                    NO_PROGRESS: f"(count({active} == {Verdict.NO_PROGRESS}) or {zero_runs})",
                    UNKNOWN: f"(count({active} == {Verdict.UNKNOWN}) or {zero_runs})",
                    ENDING: f"count({active} == {Verdict.ENDING})",
                    STARTING: f"count({active} == {Verdict.STARTING})",
                    "of": f"(count({active}) or {zero_runs})",
                }
            ),
            unit="none",
            text_mode="value_and_name",
            colors_by_name={
                NO_PROGRESS: BAD,
                UNKNOWN: WARNING,
                "problem": WARNING,
                ENDING: WARNING,
                STARTING: WARNING,
            },
            w=10,
            h=3,
        ),
        stat(
            "Nodes",
            instant_query("sum(cluster:exporter_up:sum{@cluster})", "up"),
            instant_query("sum(cluster:exporter_up:count{@cluster})", "of"),
            instant_query(
                "sum(cluster:exporter_up:count{@cluster} - cluster:exporter_up:sum{@cluster})",
                "unknown",
                BAD,
            ),
            instant_query(f"sum({CONDITION_COUNT_BY_NODE} > bool 0)", "problem", WARNING),
            unit="none",
            text_mode="value_and_name",
            w=6,
            h=3,
        ),
        stat(
            "GPUs",
            # Without the nodes of *unknown*: each device counts in one of the three parts.
            instant_query(
                "sum(instance:gpu_devices:sum{@cluster} unless on (cluster, instance) instance:gpu_unknown:sum{@cluster})"
                " or 0 * count(cluster:gpu_lost:sum{@cluster})",
                "up",
            ),
            instant_query(
                "sum(cluster:gpu_lost:sum{@cluster})",
                "lost",
                BAD,
            ),
            instant_query(
                "sum(instance:gpu_unknown:sum{@cluster}) or 0 * count(cluster:exporter_up:count{@cluster})",
                "unknown",
                WARNING,
            ),
            unit="none",
            text_mode="value_and_name",
            w=4,
            h=3,
        ),
        stat(
            "SM activity, used GPUs",
            instant_query("cluster:gpu_sm_activity_held:avg{@cluster}", "last 5 min"),
            unit="percentunit",
            text_mode="value_and_name",
            w=4,
            h=3,
            decimals=0,
            thresholds=warn_below(0.5, 0.2),
        ),
        _goodput(),
        _cost_per_hour(),
        _cost_so_far(),
    )


def _goodput() -> Panel:
    """Return the panel with the goodput of all runs: of the cluster with the lowest goodput, if several are selected.

    In the first hour of the series, the value has no color: the start of the runs, and not a fault, decides the value.
    """
    goodput = "cluster:training_goodput_if_saved:ratio6h{@cluster}"
    an_hour_ago = f"{goodput} offset 1h"
    young = "in the first hour"
    return stat(
        "Goodput if work is saved, 6 h",
        instant_query(
            f'label_replace(min({goodput} and on (cluster) {an_hour_ago}), "note", "of the time", "", "")'
            f' or on () label_replace(min({goodput}), "note", "{young}", "", "")',
            "{{note}}",
        ),
        unit="percentunit",
        decimals=0,
        text_mode="value_and_name",
        thresholds=warn_below(0.9, 0.7),
        overrides=[
            {
                "matcher": {"id": "byName", "options": young},
                "properties": [{"id": "thresholds", "value": NO_THRESHOLDS}],
            }
        ],
        w=6,
        h=3,
    )


def _cost_per_hour() -> Panel:
    """Return the panel with the cost per hour of all runs, the lost part of the cost, and the number of runs with unknown cost."""
    share = "GPU time lost"
    gpus = gpus_by_run("@cluster")
    return stat(
        "Cost per hour, 5 min",
        instant_query(f"sum by (currency) ({CLUSTER_COST_PER_HOUR})", "{{currency}}"),
        instant_query(f"sum by (currency) ({CLUSTER_LOST_COST_PER_HOUR})", "{{currency}} lost"),
        # Weighted by the devices of each run: a hang of a large run costs more than a hang of a small run.
        named_values_query(
            {
                share: f"sum({CLUSTER_LOST_SHARE} * on (run) {gpus}) / sum({gpus} and on (run) {CLUSTER_LOST_SHARE})",
                "runs unknown": f"count({UNSEEN_RUNS})",
            }
        ),
        colors_by_name={"runs unknown": BAD},
        unit="locale",
        decimals=0,
        text_mode="value_and_name",
        overrides=[
            {
                "matcher": {"id": "byName", "options": share},
                "properties": [
                    {"id": "unit", "value": "percentunit"},
                    {"id": "thresholds", "value": LOST_THRESHOLDS},
                ],
            }
        ],
        w=8,
        h=3,
    )


def _cost_so_far() -> Panel:
    """Return the panel with the cost of all runs since their start, by currency."""
    return stat(
        "Cost of all runs so far",
        instant_query("sum by (currency) (run:training_cost:sum{@cluster})", "{{currency}}"),
        unit="locale",
        decimals=0,
        text_mode="value_and_name",
        w=4,
        h=3,
    )


def _alert_panels() -> tuple[Panel, ...]:
    """Return the table of the most urgent alert of each run, node and GPU."""
    return (
        firing_alerts(
            "@cluster",
            (
                Column("run", "Run", width=150, links=(RUN_LINK,)),
                Column("rank", "Rank", width=80),
                Column("instance", "Node", width=120, links=(NODE_LINK,)),
                Column("gpu", "GPU", width=80),
            ),
            w=24,
            h=7,
            group_by=("run", "instance", "gpu"),
            unknown_if="absent(cluster:exporter_up:count{@cluster})",
            unknown_text="unknown: no exporter, or no rules",
        ),
    )


_RUNS_COMPLETE = "unless on () max(cluster:training_unknown:ratio{@cluster}) > 0.05"
_GPUS_COMPLETE = "unless on () max(cluster:gpu_power_unknown:ratio{@cluster}) > 0.05"
"""Conditions of sums over clusters, as in the rules: if more than 5 % of the ranks or GPUs are unknown, a sum would look like a smaller load."""


def _cluster_panels() -> tuple[Panel, ...]:
    """Return the plots of the power, the cost and the loss of all runs and GPUs together."""
    return (
        time_series(
            "Power of the cluster",
            Query(f"sum(cluster:gpu_power:watts{{@cluster}}) {_GPUS_COMPLETE}", "all GPUs", BLUE),
            Query(
                f"sum(cluster:training_power:watts5m{{@cluster}}) {_RUNS_COMPLETE}",
                "runs with CPUs, mean of 5 min",
                ORANGE,
            ),
            unit="watt",
            w=12,
        ),
        time_series(
            "Cost and loss per hour, 5 min",
            Query(
                f"sum by (currency) ({CLUSTER_COST_PER_HOUR}) {_RUNS_COMPLETE}",
                "{{currency}}",
            ),
            Query(
                f"sum by (currency) ({CLUSTER_LOST_COST_PER_HOUR}) {_RUNS_COMPLETE}",
                "{{currency}} lost",
                VERMILION,
            ),
            unit="locale",
            decimals=2,
            color=shades(PURPLE),
            w=12,
        ),
    )
