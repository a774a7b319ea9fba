"""Table of the runs on the dashboard *Fleet*."""

from __future__ import annotations

from dashboards.alerts import (
    CLOCK_TIME,
    CLOCK_TIME_WIDTH,
    NO_PROGRESS_ALERTS,
    URGENCY_CRITICAL,
    URGENCY_NO_PROGRESS,
    URGENCY_WARNING,
    most_urgent,
    title_mappings,
    with_xid,
)
from dashboards.palette import BAD, GOOD, NEUTRAL, WARNING
from dashboards.panels import Panel, bad_from, dashboard_link, value_mappings, warn_below, warn_from
from dashboards.queries import LAST_STEP_BY_RUN
from dashboards.run_problems import DATA_WAIT_RATIO, SLOW_RATIO
from dashboards.tables import Column, percent, table

URGENCY_NO_NEWS = URGENCY_CRITICAL - 0.5
"""Urgency of a run without a sample, between the urgencies of critical alerts and warnings."""
URGENCY_SLOW = 0.5
"""Urgency of a run without an alert that a slow rank or waiting for data slows."""
RUN_URGENCY_MAPPINGS = value_mappings(
    {
        str(URGENCY_NO_PROGRESS): ("no progress", BAD),
        str(URGENCY_CRITICAL): ("critical", BAD),
        str(URGENCY_NO_NEWS): ("no news", BAD),
        str(URGENCY_WARNING): ("warning", WARNING),
        str(URGENCY_SLOW): ("slow", WARNING),
        "0": ("no alert", NEUTRAL),
    }
)
STATE_MAPPINGS = value_mappings(
    {
        "starting": ("starting", NEUTRAL),
        "running": ("running", GOOD),
        "stalled": ("stalled", WARNING),
        "hung": ("hung", BAD),
        "ending": ("ending", WARNING),
        "stopped": ("stopped", WARNING),
        "finished": ("finished", GOOD),
        "failed": ("failed", BAD),
        "lost": ("lost", BAD),
        "unknown": ("unknown", WARNING),
    }
)
RUN_INFO = "max by (run, user) (run:training_run:info{@cluster})"
_LATEST_STATE = (
    "topk by (run) (1, max by (run, state) (timestamp(run:training_run_state:info{@cluster}))) * 0 + 1"
)
"""PromQL for a series of value 1 with the latest state of each run as a label."""
RUN_INFO_WITH_STATE = f"{RUN_INFO} * on (run) group_left (state) ({_LATEST_STATE}) or on (run) {RUN_INFO}"
LAST_NEWS_TEMPLATE = (
    "max by (run) (max_over_time(timestamp(run:training_run_state:info{{@cluster, state{matcher}"
    '"stopped|finished|failed|lost"}})[1h:30s]))'
)
UNSEEN_RUNS = (
    f"({LAST_NEWS_TEMPLATE.format(matcher='!~')} unless on (run) run:training_run_state:info{{@cluster}}"
    f" unless on (run) {LAST_NEWS_TEMPLATE.format(matcher='=~')} > on (run) {LAST_NEWS_TEMPLATE.format(matcher='!~')})"
)
"""PromQL for the time of the last sample of each run that has not ended and that no exporter reports."""
_LAST_NODES = "group by (run, instance) (last_over_time(instance:training_ranks:count{@cluster}[1h]))"
_UNSEEN_NODE = (
    f"topk by (run) (1, {_LAST_NODES} unless on (run, instance) instance:training_ranks:count{{@cluster}})"
)
_UNSEEN_AGE = (
    f'label_replace(count_values by (run) ("age", floor((time() - {UNSEEN_RUNS}) / 60)),'
    ' "age", "no news for $1 min from ", "age", "(.+)")'
)
_UNSEEN_NOTE = f'label_join({_UNSEEN_NODE} * on (run) group_left (age) {_UNSEEN_AGE}, "alertname", "", "age", "instance")'
UNSEEN_ROWS = (
    "label_replace(max by (run, user) (last_over_time(run:training_run:info{@cluster}[1h]))"
    f' * on (run) group_left (alertname) ({_UNSEEN_NOTE}), "state", "unknown", "", "")'
)
_NO_PROGRESS_MATCHER = f'run!="", alertname=~"{NO_PROGRESS_ALERTS}"'
FIRING_ALERTS_TEMPLATE = 'ALERTS{{@cluster, alertstate="firing", {matcher}}}'
NO_PROGRESS_SECONDS = 300
"""Time without a step after which a live run counts as making no progress."""
_LAST_STEP_AGE = "run:training_last_progress:age_seconds{@cluster}"
_STATE_AGE = "run:training_run_state:age_seconds{@cluster}"
LAST_STEP = f"max by (run) ({LAST_STEP_BY_RUN})"
_STATE_SINCE = f"max by (run) (timestamp({_STATE_AGE}) - {_STATE_AGE})"
NO_PROGRESS_RUNS = (
    'max by (run) (run:training_run_state:info{@cluster, state=~"hung|failed|lost"}'
    f" or {_LAST_STEP_AGE} >= {NO_PROGRESS_SECONDS} and on (cluster, run) run:training_ranks_up:sum{{@cluster}} > 0)"
    f" or on (run) max by (run) ({FIRING_ALERTS_TEMPLATE.format(matcher=_NO_PROGRESS_MATCHER)})"
)
"""PromQL with a value for each run that failed, hangs, is lost or completes no steps."""
LIVE_RUNS = "max by (run) (run:training_ranks_up:sum{@cluster}) > 0"
_SLOW_RUNS = (
    f"((max by (run) (run:training_straggler_score:min{{@cluster}}) < {SLOW_RATIO}"
    f" or on (run) max by (run) (run:training_waiting_for_data:max5m{{@cluster}}) > {DATA_WAIT_RATIO})"
    f" and on (run) {LIVE_RUNS})"
)


def _urgency_query() -> str:
    """Return PromQL for the urgency of each run.

    The urgency is `URGENCY_NO_PROGRESS` for a run of `NO_PROGRESS_RUNS`, otherwise the urgency of the most urgent firing alert.
    """
    critical, warning = (
        f"{value} + 0 * max by (run) ({FIRING_ALERTS_TEMPLATE.format(matcher=matcher)})"
        for value, matcher in (
            (URGENCY_CRITICAL, 'run!="", severity="critical"'),
            (URGENCY_WARNING, 'run!="", severity="warning"'),
        )
    )
    return " or on (run) ".join(
        [
            f"{URGENCY_NO_PROGRESS} + 0 * ({NO_PROGRESS_RUNS})",
            critical,
            f"{URGENCY_NO_NEWS} + 0 * {UNSEEN_RUNS}",
            warning,
            f"{URGENCY_SLOW} + 0 * {_SLOW_RUNS}",
            f"0 * max by (run) ({RUN_INFO})",
        ]
    )


def _most_urgent_alert_query() -> str:
    """Return PromQL for the most urgent alert of each run, with its name or Xid as the label `alertname`."""
    alerts = most_urgent('@cluster, run!=""', "run, alertname, xid", "run")
    return f"({with_xid(alerts, 'alertname')})"


def _since_query() -> str:
    """Return PromQL for the start of the verdict: the end of the run, the last step, the start of the alert or the state."""
    starts = with_xid('max by (run, alertname, xid) (ALERTS_FOR_STATE{@cluster, run!=""})', "alertname")
    return " or on (run) ".join(
        [
            f'{_STATE_SINCE} and on (run) run:training_run_state:info{{@cluster, state=~"failed|lost"}}',
            f"{LAST_STEP} and on (run) ({NO_PROGRESS_RUNS})",
            f"max by (run) ({starts} and on (run, alertname) {_most_urgent_alert_query()})",
            _STATE_SINCE,
            UNSEEN_RUNS,
        ]
    )


RUN_ROWS = (
    f"({UNSEEN_ROWS}) or on (run) ({RUN_INFO_WITH_STATE}) * on (run) group_left (alertname) (0 * {_most_urgent_alert_query()} + 1)"
    f" or on (run) ({RUN_INFO_WITH_STATE})"
)


def run_panels() -> tuple[Panel, ...]:
    """Return the table of all runs, runs without progress first."""
    return (
        table(
            "All runs",
            Column(
                "run",
                "Run",
                links=(
                    dashboard_link("training-run", "Run", run="${__value.raw}"),
                    dashboard_link("training-ranks", "Ranks", run="${__value.raw}"),
                    dashboard_link("training-energy", "Energy and cost", run="${__value.raw}"),
                ),
                width=150,
            ),
            Column(_urgency_query(), "Verdict", decimals=0, width=110, mappings=RUN_URGENCY_MAPPINGS),
            Column("state", "State", width=90, mappings=STATE_MAPPINGS),
            Column("alertname", "Worst alert", width=245, mappings=title_mappings()),
            Column(
                f"1000 * ({_since_query()})",
                "Since",
                unit=CLOCK_TIME,
                width=CLOCK_TIME_WIDTH,
            ),
            Column("user", "Owner", width=80),
            Column("max by (run) (run:training_gpus:count{@cluster})", "GPUs", decimals=0, width=70),
            Column(
                "3600 * max by (run) (run:training_cost:rate5m{@cluster})",
                "Cost/h",
                decimals=2,
                width=80,
            ),
            Column("max by (run) (run:training_cost:sum{@cluster})", "Cost", decimals=2, width=70),
            Column(
                "max by (run) (run:training_ranks_missing:sum{@cluster})",
                "Missing",
                decimals=0,
                width=75,
                thresholds=bad_from(1),
            ),
            Column(
                f'time() - {LAST_STEP} unless on (run) run:training_run_state:info{{@cluster, state=~"finished|stopped"}}',
                "Last step",
                unit="s",
                decimals=0,
                width=90,
                thresholds=warn_from(120, 300),
            ),
            percent("max by (run) (run:training_progress:ratio{@cluster})", "Progress", 80, bar=(0, 1)),
            percent(
                "max by (run) (run:training_straggler_score:min{@cluster})",
                "Slowest",
                80,
                warn_below(0.9, 0.75),
            ),
            percent(
                "max by (run) (run:training_waiting_for_data:max5m{@cluster})",
                "Data wait",
                90,
                warn_from(0.1, 0.2),
            ),
            percent(
                "max by (run) (run:training_goodput_if_saved:ratio6h{@cluster})",
                "Goodput",
                90,
                warn_below(0.9, 0.7),
            ),
            row_query=RUN_ROWS,
            sort="Verdict",
            h=9,
        ),
    )
