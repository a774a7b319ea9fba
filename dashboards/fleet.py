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
    CLUSTER_STOPPED_COST_PER_HOUR,
    LOST_THRESHOLDS,
    SHORT_CAUSE_NAMES,
)
from dashboards.fleet_nodes import CONDITION_COUNT_BY_NODE, node_panels
from dashboards.fleet_problems import NO_PROGRESS_RUNS, RUNS_WITH_LIVE_RANKS, UNSEEN_RUNS
from dashboards.fleet_runs import run_panels
from dashboards.palette import (
    BAD,
    BADPUT_CAUSE_COLORS,
    BLUE,
    ORANGE,
    PURPLE,
    VERMILION,
    WARNING,
    Override,
    fixed_colors_by_name,
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
from dashboards.queries import Query, instant_query
from dashboards.tables import Column

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
    # Without a value, not 0, if Prometheus has no rules or no run.
    zero_runs = "0 * count(run:training_ranks_up:sum{@cluster})"
    return (
        stat(
            "Runs that progress",
            instant_query(
                f"count({RUNS_WITH_LIVE_RANKS} unless on (run) ({NO_PROGRESS_RUNS}) unless on (run) {UNSEEN_RUNS}) or {zero_runs}",
                "progress",
            ),
            instant_query(
                f"count({RUNS_WITH_LIVE_RANKS} or on (run) {NO_PROGRESS_RUNS} or on (run) {UNSEEN_RUNS})",
                "of",
            ),
            instant_query(f"count({NO_PROGRESS_RUNS}) or {zero_runs}", "no progress", BAD),
            instant_query(
                f"count({UNSEEN_RUNS} unless on (run) ({NO_PROGRESS_RUNS})) or {zero_runs}", "unknown", BAD
            ),
            unit="none",
            text_mode="value_and_name",
            w=8,
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
            w=7,
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
            w=5,
            h=3,
        ),
        stat(
            "SM activity of used GPUs, 5 min",
            instant_query("cluster:gpu_sm_activity_held:avg{@cluster}"),
            unit="percentunit",
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
    is_old = "cluster:training_goodput_if_saved:ratio6h{@cluster} offset 1h"
    young = "in the first hour"
    return stat(
        "Goodput if work is saved, 6 h",
        instant_query(
            f'label_replace(min({goodput} and on (cluster) {is_old}), "note", "of the time", "", "")'
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
    gpus = "max by (run) (run:training_gpus:count{@cluster})"
    return stat(
        "Cost per hour, 5 min",
        instant_query(f"sum by (currency) ({CLUSTER_COST_PER_HOUR})", "{{currency}}"),
        instant_query(f"sum by (currency) ({CLUSTER_LOST_COST_PER_HOUR})", "{{currency}} lost"),
        # Weighted by the devices of each run: a hang of a large run costs more than a hang of a small run.
        instant_query(
            f"sum({CLUSTER_LOST_SHARE} * on (run) {gpus}) / sum({gpus} and on (run) {CLUSTER_LOST_SHARE})",
            share,
        ),
        instant_query(f"count({UNSEEN_RUNS}) > 0", "runs unknown", BAD),
        instant_query(
            f"sum by (currency) ({CLUSTER_STOPPED_COST_PER_HOUR})", "{{currency}} of stopped runs", BAD
        ),
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
"""Conditions of sums over clusters, as in the rules: if more than 5 % is unknown, a sum would look like a smaller load."""


def _cause_names() -> list[Override]:
    """Return overrides that show the causes of badput with the texts of the tables."""
    return [
        {
            "matcher": {"id": "byName", "options": cause},
            "properties": [{"id": "displayName", "value": SHORT_CAUSE_NAMES[cause]}],
        }
        for cause in BADPUT_CAUSE_COLORS
    ]


def _cluster_panels() -> tuple[Panel, ...]:
    return (
        time_series(
            "Badput of the cluster by cause, 6 h",
            Query("avg by (cause) (run:training_badput_share:ratio6h{@cluster}) > 0", "{{cause}}"),
            unit="percentunit",
            stacked=True,
            overrides=[*fixed_colors_by_name(BADPUT_CAUSE_COLORS), *_cause_names()],
            w=8,
        ),
        time_series(
            "Power of the cluster",
            Query(f"sum(cluster:gpu_power:watts{{@cluster}}) {_GPUS_COMPLETE}", "all GPUs", BLUE),
            Query(
                f"sum(cluster:training_power:watts5m{{@cluster}}) {_RUNS_COMPLETE}",
                "runs with CPUs, mean of 5 min",
                ORANGE,
            ),
            unit="watt",
            w=8,
        ),
        time_series(
            "Cost and loss per hour, 5 min",
            Query(
                f"sum by (currency) (cluster:training_cost:rate5m{{@cluster}}) * 3600 {_RUNS_COMPLETE}",
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
            w=8,
        ),
    )
