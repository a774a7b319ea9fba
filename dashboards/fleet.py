"""Dashboard *Fleet*: all runs and nodes of a cluster.

All queries except those of the run comparison read recorded series or `ALERTS`. A recorded series exists for each run, node or
cluster, so that the cost of a query does not depend on the number of ranks and GPUs.
"""

from __future__ import annotations

from dashboards.alerts import firing_alerts
from dashboards.board import RUNBOOK, Annotation, Board, Row
from dashboards.compare import BASELINE, PERF_TAG, RUNS, comparison_panels
from dashboards.fleet_runs import LIVE_RUNS, NO_PROGRESS_RUNS, UNSEEN_RUNS, run_panels
from dashboards.palette import (
    BAD,
    BADPUT_CAUSE_COLORS,
    BLUE,
    NEUTRAL,
    ORANGE,
    PURPLE,
    VERMILION,
    fixed_colors_by_name,
    shades,
)
from dashboards.panels import (
    Panel,
    bad_from,
    dashboard_link,
    stat,
    time_series,
    value_mappings,
    warn_below,
    warn_from,
)
from dashboards.queries import Query, instant_query
from dashboards.tables import Column, percent, table

UID = "training-fleet"


def _node_problems() -> str:
    """Return PromQL for the number of unhealthy conditions of each node."""
    conditions = (
        ("exporter", "instance:exporter:up{@cluster} == bool 0"),
        ("missing", "instance:gpu_missing:sum{@cluster} > bool 0"),
        ("heat", "instance:gpu_thermal_throttle:ratio5m{@cluster} > bool 0.01"),
        ("xid", "instance:gpu_xid:count1h{@cluster} > bool 0"),
        ("collectors", "instance:exporter_collectors_failed:count{@cluster} > bool 0"),
    )
    terms = (f'label_replace({expression}, "condition", "{name}", "", "")' for name, expression in conditions)
    return f"sum by (instance) ({' or '.join(terms)})"


EXPORTER_UP = "instance:exporter:up{@cluster} == 1"
NODE_PROBLEMS = _node_problems()


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
            Row("Nodes", _node_panels()),
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
    no_run = "0 * count(run:training_ranks_up:sum{@cluster})"
    return (
        stat(
            "Runs that progress",
            instant_query(
                f"count({LIVE_RUNS} unless on (run) ({NO_PROGRESS_RUNS}) unless on (run) {UNSEEN_RUNS}) or {no_run}",
                "progress",
            ),
            instant_query(
                f"count({LIVE_RUNS} or on (run) {NO_PROGRESS_RUNS} or on (run) {UNSEEN_RUNS})",
                "of",
            ),
            instant_query(f"count({NO_PROGRESS_RUNS}) or {no_run}", "no progress", BAD),
            instant_query(
                f"count({UNSEEN_RUNS} unless on (run) ({NO_PROGRESS_RUNS})) or {no_run}", "unknown", BAD
            ),
            unit="none",
            text_mode="value_and_name",
            w=5,
        ),
        stat(
            "Goodput if work is saved, last 6 h",
            instant_query("cluster:training_goodput_if_saved:ratio6h{@cluster}"),
            unit="percentunit",
            decimals=1,
            thresholds=warn_below(0.9, 0.7),
        ),
        stat(
            "GPUs",
            instant_query("sum(cluster:gpu_devices:sum{@cluster})", "up"),
            instant_query("sum(cluster:gpu_missing:sum{@cluster})", "missing", BAD),
            # The last known GPUs of the nodes whose exporter is down; 0 if all exporters are up.
            instant_query(
                "sum(last_over_time(instance:gpu_devices:sum{@cluster}[1h])"
                " and on (cluster, instance) instance:exporter:up{@cluster} == 0) or 0 * count(cluster:exporter_up:count{@cluster})",
                "unknown",
                BAD,
            ),
            unit="none",
            text_mode="value_and_name",
            w=4,
        ),
        stat(
            "Exporters",
            instant_query("sum(cluster:exporter_up:sum{@cluster})", "up"),
            instant_query("sum(cluster:exporter_up:count{@cluster})", "of"),
            instant_query(
                "sum(cluster:exporter_up:count{@cluster} - cluster:exporter_up:sum{@cluster})",
                "down",
                BAD,
            ),
            unit="none",
            text_mode="value_and_name",
            w=3,
        ),
        stat(
            "SM activity of used GPUs",
            instant_query("cluster:gpu_sm_activity_held:avg{@cluster}"),
            unit="percentunit",
            w=4,
            decimals=0,
            thresholds=warn_below(0.5, 0.2),
        ),
        stat(
            "Cost of all runs",
            instant_query("sum by (currency) (run:training_cost:sum{@cluster})", "{{currency}} so far"),
            instant_query(
                "sum by (currency) (cluster:training_cost:rate5m{@cluster}) * 3600", "{{currency}} per hour"
            ),
            instant_query(f"count({UNSEEN_RUNS}) > 0", "runs of unknown cost", BAD),
            unit="none",
            decimals=0,
            text_mode="value_and_name",
            w=4,
        ),
    )


def _alert_panels() -> tuple[Panel, ...]:
    return (
        firing_alerts(
            "@cluster",
            (
                Column("run", "Run", links=(dashboard_link("training-run", "Run", run="${__value.raw}"),)),
                Column("rank", "Rank", width=80),
                Column(
                    "instance",
                    "Node",
                    links=(dashboard_link("training-node", "Node", node="${__value.raw}"),),
                ),
                Column("gpu", "GPU", width=80),
            ),
            w=24,
            h=7,
            group_by=("run", "instance", "gpu"),
        ),
    )


def _cluster_panels() -> tuple[Panel, ...]:
    return (
        time_series(
            "Badput of the cluster by cause",
            Query("avg by (cause) (run:training_badput_share:ratio6h{@cluster}) > 0", "{{cause}}"),
            unit="percentunit",
            stacked=True,
            overrides=fixed_colors_by_name(BADPUT_CAUSE_COLORS),
            w=8,
        ),
        time_series(
            "Power of the cluster",
            Query("sum(cluster:gpu_power:watts{@cluster})", "all GPUs", BLUE),
            Query("sum(cluster:training_power:watts5m{@cluster})", "runs, CPUs included", ORANGE),
            unit="watt",
            w=8,
        ),
        time_series(
            "Cost per hour",
            Query("sum by (currency) (cluster:training_cost:rate5m{@cluster}) * 3600", "{{currency}}"),
            unit="none",
            decimals=2,
            color=shades(PURPLE),
            w=8,
        ),
    )


def _node_panels() -> tuple[Panel, ...]:
    return (
        table(
            "All nodes",
            Column(
                "instance",
                "Node",
                links=(
                    dashboard_link("training-gpus", "GPUs", node="${__value.raw}"),
                    dashboard_link("training-node", "Node", node="${__value.raw}"),
                ),
            ),
            Column(NODE_PROBLEMS, "Problems", width=90, thresholds=warn_from(1)),
            Column(
                "min by (instance) (instance:exporter:up{@cluster})",
                "Exporter",
                width=100,
                mappings=value_mappings({1: ("up", NEUTRAL), 0: ("down", BAD)}),
            ),
            Column("sum by (instance) (instance:training_ranks:count{@cluster})", "Ranks", width=70),
            Column("sum by (instance) (instance:gpu_devices:sum{@cluster})", "GPUs", width=70),
            Column(
                "sum by (instance) (instance:gpu_missing:sum{@cluster})",
                "Missing GPUs",
                width=80,
                thresholds=bad_from(1),
            ),
            percent(
                "avg by (instance) (instance:gpu_sm_activity:avg{@cluster})", "SM activity", 140, bar=(0, 1)
            ),
            percent(
                f"avg by (instance) (instance:gpu_busy:ratio5m{{@cluster}} and on (cluster, instance) {EXPORTER_UP})",
                "GPU busy",
                80,
            ),
            Column("sum by (instance) (instance:gpu_power:watts{@cluster})", "Power", unit="watt", width=90),
            Column(
                "max by (instance) (instance:gpu_temperature:max{@cluster})",
                "Hottest GPU",
                unit="celsius",
                width=90,
            ),
            percent(
                f"max by (instance) (instance:gpu_thermal_throttle:ratio5m{{@cluster}} and on (cluster, instance) {EXPORTER_UP})",
                "Throttled",
                100,
                warn_from(0.01, 0.1),
            ),
            Column(
                "sum by (instance) (instance:gpu_xid:count1h{@cluster})",
                "Xid, 1 h",
                width=80,
                thresholds=bad_from(1),
            ),
            percent("max by (instance) (instance:host_cpu:ratio{@cluster})", "CPU", 70, warn_from(0.9, 0.97)),
            percent(
                "max by (instance) (instance:host_memory:ratio{@cluster})",
                "Memory",
                90,
                warn_from(0.9, 0.95),
            ),
            Column(
                "sum by (instance) (instance:exporter_collectors_failed:count{@cluster})",
                "Failed collectors",
                width=130,
                thresholds=warn_from(1),
            ),
            sort="Problems",
            h=8,
            w=24,
        ),
    )
