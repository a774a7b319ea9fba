"""The dashboard *Fleet*: all runs and nodes of a cluster, from recording rules only.

A query here reads one series for each run or node, however many ranks and GPUs they have.
"""

from __future__ import annotations

from dashboards.board import Board, Mark, Row
from dashboards.palette import (
    BAD,
    BLUE,
    CAUSES,
    GREEN,
    ORANGE,
    PLAIN,
    PURPLE,
    VERMILION,
    WARNING,
    named,
    shades,
)
from dashboards.panels import About, Panel, above, below, lines, stat, steps, to, words
from dashboards.queries import Query, now
from dashboards.tables import Column, percent, table

UID = "training-fleet"

NO_RULES = (
    "The recording rules have made nothing: are deploy/prometheus/rules loaded, and is something scraped?"
)
HEAD = "{{run}}"


def _troubles() -> str:
    """How many things are wrong with a node."""
    wrong = (
        ("exporter", "instance:exporter:up == bool 0"),
        ("missing", "instance:gpu_missing:sum > bool 0"),
        ("heat", "instance:gpu_thermal_throttle:ratio5m > bool 0.01"),
        ("xid", "instance:gpu_xid:count1h > bool 0"),
        ("collectors", "instance:exporter_collectors_failed:count > bool 0"),
    )
    parts = (f'label_replace({expression}, "of", "{name}", "", "")' for name, expression in wrong)
    return f"sum by (instance) ({' or '.join(parts)})"


TROUBLES = _troubles()


def board() -> Board:
    """The dashboard."""
    return Board(
        uid=UID,
        title="Training / Fleet",
        what="All runs and nodes of a cluster on one page, from recording rules only.",
        variables=(),
        rows=(
            Row("At a glance", _glance()),
            Row("What is wrong now?", _alerts()),
            Row("Runs", _runs()),
            Row("Where does the cluster's time and power go?", _cluster()),
            Row("Nodes", _nodes()),
        ),
        marks=(
            Mark(
                "Critical alerts",
                'max by (alertname) (ALERTS{alertstate="firing", severity="critical"})',
                "{{alertname}}",
                VERMILION,
                shown=False,
                at_value=False,
            ),
        ),
        span="now-6h",
        refresh="1m",
    )


def _glance() -> tuple[Panel, ...]:
    return (
        stat(
            "Runs that progress",
            now("count(run:training_last_progress:age_seconds < 300)", "progress"),
            now("count(run:training_ranks_up:sum > 0)", "of"),
            unit="none",
            text="value_and_name",
            about=About(
                "Runs that made a step in the last five minutes, of those with a living process.",
                "fewer progress than live.",
                "the table says which stand still, and in which phase they are.",
                "no run is known.",
            ),
            empty="no run",
        ),
        stat(
            "Goodput, 6 h",
            now("cluster:training_goodput:ratio6h"),
            unit="percentunit",
            decimals=1,
            thresholds=below(0.9, 0.7),
            about=About(
                "Share of all runs' time that is not known to be lost.",
                "below 90 %.",
                "*What is lost, and to what?*.",
                "no run counts its time.",
            ),
        ),
        stat(
            "GPUs",
            now("cluster:gpu_devices:sum", "answer"),
            now("cluster:gpu_missing:sum > 0", "missing", BAD),
            unit="none",
            text="value_and_name",
            about=About(
                "GPUs that answer, and those that should and do not.",
                "any that is missing.",
                "the table of nodes names the node.",
                "no node has GPUs.",
            ),
        ),
        stat(
            "Exporters",
            now("cluster:exporter_up:sum", "answer"),
            now("cluster:exporter_up:count", "of"),
            now("cluster:exporter_up:count - cluster:exporter_up:sum > 0", "down", BAD),
            unit="none",
            text="value_and_name",
            about=About(
                "Exporters that Prometheus reaches.",
                "fewer than there are: those nodes are missing from every number here.",
                "*The exporter itself*.",
            ),
        ),
        stat(
            "Mean SM activity",
            now("cluster:gpu_sm_activity:avg"),
            unit="percentunit",
            decimals=0,
            thresholds=below(0.5, 0.2),
            about=About(
                "Over all GPUs with performance counters, idle ones too.",
                "below 50 %: GPUs stand still or wait.",
                "the nodes' table: idle with a run, or without.",
                "no GPU has performance counters.",
            ),
            empty="no counters",
        ),
        stat(
            "Firing alerts",
            now('count(ALERTS{alertstate="firing", severity="critical"})', "critical", BAD),
            now(
                'count(ALERTS{alertstate="firing", severity!="critical"}) or 0 * max(cluster:exporter_up:count)',
                "others",
            ),
            unit="none",
            text="value_and_name",
            about=About(
                "Alerts of these rules.",
                "any that is critical.",
                "the table of alerts has links to the place.",
                "the rules are not loaded.",
            ),
            empty="no rules",
        ),
    )


def _alerts() -> tuple[Panel, ...]:
    of = "alertname, severity, run, instance, rank, gpu"
    return (
        table(
            "Which alerts fire?",
            Column(
                "severity",
                "Severity",
                width=100,
                mappings=words(
                    {
                        "critical": ("critical", BAD),
                        "warning": ("warning", WARNING),
                        "info": ("info", PLAIN),
                    }
                ),
            ),
            Column("alertname", "Alert"),
            Column("run", "Run", links=(to("training-run", "Training run", run="${__value.raw}"),)),
            Column("rank", "Rank", width=80),
            Column(
                "instance", "Node", links=(to("training-node", "Node and container", node="${__value.raw}"),)
            ),
            Column("gpu", "GPU", width=80),
            Column(
                f"time() - max by ({of}) (ALERTS_FOR_STATE)"
                f' and on ({of}) max by ({of}) (ALERTS{{alertstate="firing"}})',
                "For",
                unit="s",
                decimals=0,
                width=100,
            ),
            sort="Severity",
            descending=False,
            about=About(
                "Alerts that fire now, and how long their condition has held.",
                "critical ones.",
                "each has a runbook entry with what to check and to do.",
                "none fires, or the alerting rules are not loaded.",
            ),
            empty="No alert fires.",
            h=6,
        ),
    )


def _runs() -> tuple[Panel, ...]:
    return (
        table(
            "All runs",
            Column(
                "run",
                "Run",
                links=(
                    to("training-run", "Training run", run="${__value.raw}"),
                    to("training-ranks", "Ranks and stragglers", run="${__value.raw}"),
                    to("training-energy", "Energy, carbon, cost", run="${__value.raw}"),
                ),
            ),
            Column("user", "User", width=90),
            Column("model", "Model", width=110),
            Column("max by (run) (run:training_ranks_up:sum)", "Ranks", width=70),
            Column(
                "max by (run) (run:training_last_progress:age_seconds)",
                "Last step",
                unit="s",
                decimals=0,
                width=90,
                thresholds=above(120, 300),
            ),
            percent("max by (run) (run:training_progress:ratio)", "Done", 140, bar=(0, 1)),
            Column("max by (run) (run:training_eta:seconds)", "Left", unit="dtdurations", width=110),
            Column(
                "max by (run) (run:training_tokens:rate5m)", "Tokens/s", unit="locale", decimals=0, width=100
            ),
            Column("max by (run) (run:training_step_seconds:p50_5m)", "Step", unit="s", decimals=2, width=95),
            percent("max by (run) (run:training_mfu:ratio5m)", "MFU", 70),
            percent(
                "max by (run) (run:training_straggler_score:min)",
                "Slowest rank",
                110,
                steps((None, BAD), (0.75, WARNING), (0.9, PLAIN)),
            ),
            percent("max by (run) (run:training_goodput_optimistic:ratio6h)", "Goodput", 90, below(0.9, 0.7)),
            Column(
                "max by (run) (run:training_restarts:increase1d)",
                "Restarts, 1 d",
                decimals=0,
                width=110,
                thresholds=above(1, 4),
            ),
            Column("max by (run) (run:training_power:watts5m)", "Power", unit="watt", width=90),
            Column("max by (run) (run:training_energy_per_token:joules15m)", "J/token", decimals=2, width=80),
            of="max by (run, user, model) (run:training_run:info)",
            sort="Last step",
            about=About(
                "A line for each run. Its name leads to the dashboards about it.",
                "a last step minutes ago; a slowest rank below 90 %; goodput below 90 %; restarts.",
                "follow the link.",
                "the run does not tell that number.",
            ),
            empty=NO_RULES,
            h=11,
        ),
    )


def _cluster() -> tuple[Panel, ...]:
    return (
        lines(
            "Which runs waste their time?",
            Query(
                "run:training_goodput_optimistic:ratio1h and bottomk(8, run:training_goodput_optimistic:ratio1h @ end())",
                HEAD,
            ),
            unit="percentunit",
            most=1,
            w=8,
            about=About(
                "Goodput of the last hour of the eight runs with the least.",
                "below 90 % for long.",
                "*Training run* of that run.",
            ),
            empty=NO_RULES,
        ),
        lines(
            "What is lost, and to what?",
            Query("avg by (cause) (run:training_badput_share:ratio6h)", "{{cause}}"),
            unit="percentunit",
            stacked=True,
            overrides=named(CAUSES),
            w=8,
            about=About(
                "Badput of the last six hours by cause, on average over the runs.",
                "one cause in many runs is the cluster's: `data_stall` the storage, `downtime` the scheduler, "
                "`lost_progress` too few checkpoints.",
                "mend it once, for all.",
            ),
            empty=NO_RULES,
        ),
        lines(
            "Which runs have a straggler?",
            Query(
                "run:training_straggler_score:min and bottomk(8, run:training_straggler_score:min @ end())",
                HEAD,
            ),
            unit="percentunit",
            most=1,
            w=8,
            about=About(
                "Speed of the slowest rank compared with the fastest, of the eight worst runs.",
                "below 90 %.",
                "*Ranks and stragglers* of that run.",
            ),
            empty=NO_RULES,
        ),
        lines(
            "How much power?",
            Query("cluster:gpu_power:watts", "all GPUs", BLUE),
            Query("cluster:training_power:watts5m", "runs, CPUs included", ORANGE),
            unit="watt",
            w=8,
            about=About(
                "What the GPUs draw, and what is attributed to runs.",
                "a wide gap: GPUs that nobody's run uses.",
                "the nodes' table: GPUs busy without a run.",
            ),
            empty=NO_RULES,
        ),
        lines(
            "How much CO2 an hour?",
            Query("cluster:training_carbon:grams_rate1h * 3600", "all runs", GREEN),
            unit="massg",
            w=8,
            about=About(
                "Grams of CO2 equivalent in an hour, at the configured intensity.",
                "no threshold.",
                "cleaner hours, less waste.",
            ),
            empty="No carbon intensity is configured on any node, or the rules are not loaded.",
        ),
        lines(
            "How much money an hour?",
            Query("cluster:training_cost:rate1h * 3600", "{{currency}}"),
            unit="none",
            decimals=2,
            color=shades(PURPLE),
            w=8,
            about=About(
                "Electricity and rent of all runs in an hour, at the configured prices.",
                "more than the budget.",
                "the runs' table, sorted by power.",
            ),
            empty="No price is configured on any node, or the rules are not loaded.",
        ),
    )


def _nodes() -> tuple[Panel, ...]:
    return (
        table(
            "All nodes",
            Column(
                "instance",
                "Node",
                links=(
                    to("training-gpus", "GPUs", node="${__value.raw}"),
                    to("training-node", "Node and container", node="${__value.raw}"),
                    to("training-exporter", "The exporter itself", node="${__value.raw}"),
                ),
            ),
            Column(TROUBLES, "Troubles", width=90, thresholds=above(1)),
            Column(
                "min by (instance) (instance:exporter:up)",
                "Exporter",
                width=100,
                mappings=words({1: ("answers", PLAIN), 0: ("down", BAD)}),
            ),
            Column("sum by (instance) (instance:training_ranks:count)", "Ranks", width=70),
            Column("sum by (instance) (instance:gpu_devices:sum)", "GPUs", width=70),
            Column(
                "sum by (instance) (instance:gpu_missing:sum)", "Missing", width=80, thresholds=above(1, 1)
            ),
            percent("avg by (instance) (instance:gpu_sm_activity:avg)", "SM activity", 140, bar=(0, 1)),
            percent("avg by (instance) (instance:gpu_busy:ratio5m)", "Busy", 80),
            Column("sum by (instance) (instance:gpu_power:watts)", "Power", unit="watt", width=90),
            Column("max by (instance) (instance:gpu_temperature:max)", "Hottest", unit="celsius", width=90),
            percent(
                "max by (instance) (instance:gpu_thermal_throttle:ratio5m)",
                "Held back",
                100,
                above(0.01, 0.1),
            ),
            Column(
                "sum by (instance) (instance:gpu_xid:count1h)", "Xid, 1 h", width=80, thresholds=above(1, 1)
            ),
            percent("max by (instance) (instance:host_cpu:ratio)", "CPU", 70, above(0.9, 0.97)),
            percent("max by (instance) (instance:host_memory:ratio)", "Memory", 90, above(0.9, 0.95)),
            Column(
                "sum by (instance) (instance:exporter_collectors_failed:count)",
                "Failed collectors",
                width=130,
                thresholds=above(1),
            ),
            sort="Troubles",
            about=About(
                "A line for each node, those with most troubles first. Its name leads to the dashboards about it.",
                "an exporter that is down; missing GPUs; heat that holds them back; Xid errors; much GPU use without "
                "ranks, or ranks without GPU use.",
                "follow the link; drain the node for Xid errors and missing GPUs.",
                "the node has no such thing (a CPU node has no GPUs), or its exporter is down.",
            ),
            empty=NO_RULES,
            h=12,
            w=24,
        ),
    )
