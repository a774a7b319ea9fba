"""Tables of the runs on the dashboard *Fleet*: problems and costs, speed and progress."""

from __future__ import annotations

from dashboards.alerts import (
    CLOCK_TIME,
    CLOCK_TIME_WIDTH,
    NO_PROGRESS_ALERTS,
    URGENCY_CRITICAL,
    URGENCY_NO_PROGRESS,
    URGENCY_WARNING,
    title_mappings,
    urgency,
    with_xid,
)
from dashboards.availability import last_time
from dashboards.palette import BAD, GOOD, NEUTRAL, WARNING
from dashboards.panels import (
    NODE_LINK,
    RUN_LINK,
    Panel,
    bad_from,
    dashboard_link,
    value_mappings,
    warn_below,
    warn_from,
)
from dashboards.queries import LAST_STEP_TIME_BY_RUN
from dashboards.recorded_losses import (
    CLUSTER_COST_PER_HOUR,
    CLUSTER_LOST_PER_HOUR,
    CLUSTER_LOST_SHARE,
    LARGE_LOSS_RATIO,
    LOSS_RATIO,
    LOST_THRESHOLDS,
    MAIN_CAUSE_TEXTS,
    lost_share,
    main_cause,
    recorded_standstill,
)
from dashboards.run_problems import MAX_DATA_WAIT_RATIO, SLOW_RATIO
from dashboards.tables import Column, percent_column, table

URGENCY_NO_NEWS = URGENCY_CRITICAL + 0.5
"""Urgency of a run without a sample: no alert about the run can fire, and the run may have stopped."""
URGENCY_LOSES_MUCH, URGENCY_LOSES = URGENCY_WARNING + 0.3, URGENCY_WARNING + 0.2
"""Urgencies of a run that loses more than `LARGE_LOSS_RATIO` or `LOSS_RATIO` of its time, above the warnings: many warnings cost less."""
URGENCY_PARTLY_UNKNOWN = URGENCY_CRITICAL - 0.5
"""Urgency of a live run of which some ranks have no sample, above known losses."""
URGENCY_RESTARTED = 1
"""Urgency of a run without an alert that has lost time to a restart within the last hour."""
URGENCY_SLOW = 0.5
"""Urgency of a run without an alert that a slow rank or waiting for data slows a little."""
_STARTUP_CAUSES = "init|compile|checkpoint_load"
"""Causes of lost time at the start of each run."""
RUN_URGENCY_MAPPINGS = value_mappings(
    {
        str(URGENCY_NO_PROGRESS): ("no progress", BAD),
        str(URGENCY_CRITICAL): ("critical", BAD),
        str(URGENCY_NO_NEWS): ("no news", BAD),
        str(URGENCY_LOSES_MUCH): ("loses time", BAD),
        str(URGENCY_LOSES): ("loses time", WARNING),
        str(URGENCY_WARNING): ("warning", WARNING),
        str(URGENCY_PARTLY_UNKNOWN): ("partly unknown", WARNING),
        str(URGENCY_RESTARTED): ("restarted", WARNING),
        str(URGENCY_SLOW): ("slow", WARNING),
        "0": ("no alert", NEUTRAL),
    }
)
RUN_STATES = {
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
"""Texts and colors of the states of a run."""
STATE_MAPPINGS = value_mappings(RUN_STATES)
RUN_INFO = "max by (run, user) (run:training_run:info{@cluster})"
_LATEST_STATE = (
    "topk by (run) (1, max by (run, state) (timestamp(run:training_run_state:info{@cluster}))) * 0 + 1"
)
"""PromQL for a series of value 1 with the latest state of each run as a label."""
UNSEEN_RUNS = "max by (run) (run:training_unseen:timestamp_seconds{@cluster})"
"""PromQL for the time of the last sample of each run that has not ended and that no exporter reports."""
_LAST_NODES = "group by (run, instance) (last_over_time(instance:training_ranks:count{@cluster}[1h]))"
_UNSEEN_NODE = (
    f"topk by (run) (1, {_LAST_NODES} unless on (run, instance) instance:training_ranks:count{{@cluster}})"
)
_UNSEEN_AGE = (
    f'label_replace(count_values by (run) ("age", floor((time() - {UNSEEN_RUNS}) / 60)),'
    ' "alertname", "no news for $1 min", "age", "(.+)")'
)
UNSEEN_ROWS = (
    "label_replace(max by (run, user) (last_over_time(run:training_run:info{@cluster}[1h]))"
    f" * on (run) group_left (alertname) max by (run, alertname) ({_UNSEEN_AGE})"
    f' * on (run) group_left (instance) {_UNSEEN_NODE}, "state", "unknown", "", "")'
)
_NO_PROGRESS_MATCHER = f'run!="", alertname=~"{NO_PROGRESS_ALERTS}"'
FIRING_ALERTS_TEMPLATE = 'ALERTS{{@cluster, alertstate="firing", {matcher}}}'
NO_PROGRESS_SECONDS = 300
"""Time without a step after which a live run counts as making no progress."""
_LAST_STEP_AGE = "run:training_last_progress:age_seconds{@cluster}"
_STATE_AGE = "run:training_run_state:age_seconds{@cluster}"
LAST_STEP_TIME = f"max by (run) ({LAST_STEP_TIME_BY_RUN})"
_STATE_SINCE = f"max by (run) (timestamp({_STATE_AGE}) - {_STATE_AGE})"
NO_PROGRESS_RUNS = (
    'max by (run) (run:training_run_state:info{@cluster, state=~"hung|failed|lost"}'
    f" or {_LAST_STEP_AGE} >= {NO_PROGRESS_SECONDS} and on (cluster, run) run:training_ranks_up:sum{{@cluster}} > 0"
    " or run:training_standstill:info{@cluster})"
    f" or on (run) max by (run) ({FIRING_ALERTS_TEMPLATE.format(matcher=_NO_PROGRESS_MATCHER)})"
)
"""PromQL with a value for each run that failed, hangs, is lost or completes no steps, also before its alert fires."""
RUNS_WITH_LIVE_RANKS = "max by (run) (run:training_ranks_up:sum{@cluster}) > 0"
_UNKNOWN_RANK_COUNT_BY_RUN = (
    f"(max by (run) (run:training_ranks_missing:sum{{@cluster}}) > 0 and on (run) {RUNS_WITH_LIVE_RANKS})"
)
"""PromQL for the number of ranks without a sample of each live run that has such ranks."""
_SLOW_RANK = f"bottomk by (run) (1, max by (run, instance, rank, gpu) (run:training_slow_rank:ratio{{@cluster}}) < {SLOW_RATIO})"
_ALL_WAIT_FOR_DATA = (
    f"(max by (run) (run:training_waiting_for_data:min5m{{@cluster}}) > {MAX_DATA_WAIT_RATIO})"
)
"""PromQL for the smallest share of time in which a rank waits for data, if all ranks wait: no rank is then the cause."""
_DATA_WAIT_RANK = (
    f"(topk by (run) (1, max by (run, instance, rank) (run:training_data_wait_rank:ratio5m{{@cluster}}) > {MAX_DATA_WAIT_RATIO})"
    f" unless on (run) {_ALL_WAIT_FOR_DATA})"
)
"""PromQL for one rank of each run. After a restart of Prometheus, the series of the rank before remains for five minutes."""
_RANK_OF_FAULTY_GPU = "max by (run, instance, gpu, rank) (run_gpu:training_fault_rank:info{@cluster})"
_RESTARTED_RUNS = 'max by (run) (run:training_lost:ratio{@cluster, cause="restarts"}) > 0.01'
"""PromQL with a value for each live run that lost more than 1 % of the last hour to a restart."""
_HANGING_RANK = "max by (run, instance, rank, gpu) (run:training_standstill_rank:info{@cluster})"
_SLOWING_RANK = f"topk by (run) (1, {_SLOW_RANK} or on (run) {_DATA_WAIT_RANK})"
_RANK_OF_PROBLEM = f"topk by (run) (1, {_HANGING_RANK} or on (run) {_SLOWING_RANK})"
"""PromQL for the rank that causes a standstill, else the slow rank, else the rank that waits longest for data."""
_RUNS = "group by (run) (run:training_run:info{@cluster})"
_AVOIDABLE_LOSS = lost_share(f'@cluster, cause!~"{_STARTUP_CAUSES}"')
"""PromQL for the share of the time that each run loses, without its start."""
_ALERT_LABELS = "run, alertname, xid, instance, rank, gpu"
_ALERTS_OF_RUNS = '@cluster, run!="", severity!="info"'


_STANDSTILL_WITHOUT_ALERT = (
    f"{recorded_standstill('@cluster')}"
    f""" unless on (run) {FIRING_ALERTS_TEMPLATE.format(matcher='run!="", severity="critical"')}"""
)
"""PromQL with a value for each run without a step whose alert does not fire yet: a minute after the exporter decides, which takes minutes."""


def _urgency_query() -> str:
    """Return PromQL for the urgency of each run.

    The urgency is `URGENCY_NO_PROGRESS` for a run of `NO_PROGRESS_RUNS`, otherwise the urgency of the most urgent firing alert.
    """
    critical, warning = (
        f"{value} * max by (run) ({FIRING_ALERTS_TEMPLATE.format(matcher=matcher)})"
        for value, matcher in (
            (URGENCY_CRITICAL, 'run!="", severity="critical"'),
            (URGENCY_WARNING, 'run!="", severity="warning"'),
        )
    )
    return " or on (run) ".join(
        [
            f"{URGENCY_NO_PROGRESS} + 0 * ({NO_PROGRESS_RUNS})",
            f"{URGENCY_NO_NEWS} + 0 * {UNSEEN_RUNS}",
            critical,
            f"{URGENCY_PARTLY_UNKNOWN} + 0 * {_UNKNOWN_RANK_COUNT_BY_RUN}",
            f"{URGENCY_LOSES_MUCH} + 0 * ({_AVOIDABLE_LOSS} >= {LARGE_LOSS_RATIO})",
            f"{URGENCY_LOSES} + 0 * ({_AVOIDABLE_LOSS} >= {LOSS_RATIO})",
            warning,
            f"{URGENCY_RESTARTED} + 0 * ({_RESTARTED_RUNS})",
            f"{URGENCY_SLOW} + 0 * max by (run) ({_SLOWING_RANK} or on (run) {_ALL_WAIT_FOR_DATA})",
            f"0 * max by (run) ({RUN_INFO})",
        ]
    )


def _main_alert() -> str:
    """Return PromQL for the alert of each run that has the cause: an alert about its hardware, else the most urgent alert.

    A lost GPU explains a hang. Among the alerts about the hardware, an Xid is more exact than a GPU that does not answer.
    """
    alerts = urgency(_ALERTS_OF_RUNS, _ALERT_LABELS)
    hardware = urgency(
        f'{_ALERTS_OF_RUNS}, alertname=~"GpuLost|GpuMissing|NvmlDown|GpuEccUncorrected"', _ALERT_LABELS
    )
    xids = urgency(f'{_ALERTS_OF_RUNS}, alertname="GpuXidCritical"', _ALERT_LABELS)
    return f"topk by (run) (1, 3 + ({xids}) or 2 + ({hardware}) or {alerts})"


def _main_alert_with_rank() -> str:
    """Return PromQL for the main alert of each run, with node, rank and GPU.

    Alerts about GPUs have no rank, and some alerts about runs have neither rank nor node. The rank that uses the GPU completes an
    alert about a GPU. The rank that holds up a hang or waits for data completes only the alert about the hang or the wait.
    """
    alert = _main_alert()

    def with_matchers(matchers: str) -> str:
        return (
            f'({alert} and on (run, alertname) ALERTS{{@cluster, alertstate="firing", rank="", {matchers}}})'
        )

    about_gpu = with_matchers('gpu!=""')
    on_gpu = "on (run, instance, gpu) group_left (rank) 0 *"
    hang = with_matchers('instance="", alertname="TrainingHang"')
    data_wait = with_matchers('instance="", alertname="TrainingDataStall"')
    return (
        f"({about_gpu} + {on_gpu} {_RANK_OF_FAULTY_GPU} or on (run) {about_gpu} + {on_gpu} {_RANK_OF_PROBLEM}"
        f" or on (run) {hang} + on (run) group_left (instance, rank, gpu) 0 * {_HANGING_RANK}"
        f" or on (run) {data_wait} + on (run) group_left (instance, rank) 0 * {_DATA_WAIT_RANK} or on (run) {alert})"
    )


def _slow_rank_texts() -> str:
    """Return PromQL for the slow rank of each run, with a text as the label `alertname`."""

    def text(ratio: str, content: str) -> str:
        counted = f'count_values by (run, instance, rank, gpu) ("percent", round(100 * {ratio}))'
        return f'max by (run, instance, rank, gpu, alertname) (label_replace({counted}, "alertname", "{content}", "percent", "(.+)"))'

    slow = text(_SLOW_RANK, "computes at $1 % of the fastest rank")
    waiting = text(_DATA_WAIT_RANK, "waits for data $1 % of the time")
    all_wait = text(_ALL_WAIT_FOR_DATA, "all ranks wait for data: $1 %")
    return f"({slow} or on (run) {waiting} or on (run) {all_wait})"


def _since_query() -> str:
    """Return PromQL for the start of the verdict: the end of the run, the last step, the start of the alert, of the slowness or of the state."""
    starts = f'max by ({_ALERT_LABELS}) (ALERTS_FOR_STATE{{@cluster, run!=""}})'
    slow_since = last_time(
        f"max by (run) (run:training_straggler_score:min{{@cluster}}) >= bool {SLOW_RATIO}"
    )
    unknown_since = last_time("max by (run) (run:training_ranks_missing:sum{@cluster}) == bool 0")
    waiting_since = last_time(
        f"max by (run) (run:training_waiting_for_data:max5m{{@cluster}}) <= bool {MAX_DATA_WAIT_RATIO}"
    )
    return " or on (run) ".join(
        [
            f'{_STATE_SINCE} and on (run) run:training_run_state:info{{@cluster, state=~"failed|lost"}}',
            f"{LAST_STEP_TIME} and on (run) ({NO_PROGRESS_RUNS})",
            f"max by (run) ({starts} and on ({_ALERT_LABELS}) {_main_alert()})",
            f"max by (run) ({slow_since}) and on (run) {_SLOW_RANK}",
            f"max by (run) ({unknown_since}) and on (run) {_UNKNOWN_RANK_COUNT_BY_RUN}",
            f"max by (run) ({waiting_since}) and on (run) ({_DATA_WAIT_RANK} or on (run) {_ALL_WAIT_FOR_DATA})",
            _STATE_SINCE,
            UNSEEN_RUNS,
        ]
    )


def _standstill_texts() -> str:
    """Return PromQL for each run without a step, with its rank, node and GPU if they are known, and a text as the label `alertname`."""
    text = "no rank finishes a step"
    with_rank = f'label_replace(run:training_standstill_rank:info{{@cluster}}, "alertname", "$1: {text}", "cause", "(.+)")'
    without_rank = f'label_replace({recorded_standstill("@cluster")}, "alertname", "{text}", "", "")'
    return f"(max by (run, instance, rank, gpu, alertname) ({with_rank}) or on (run) {without_rank})"


def _main_loss() -> str:
    """Return PromQL for the main cause of each run that loses much of its time, as the label `alertname`."""
    loss = f"{main_cause('@cluster')} and on (run) {_AVOIDABLE_LOSS} >= {LOSS_RATIO}"
    return f'max by (run, alertname) (label_replace({loss}, "alertname", "$1", "cause", "(.+)"))'


def _unknown_rank_texts() -> str:
    """Return PromQL for each live run with ranks without a sample, with a node without samples, and a text as the label `alertname`."""
    text = f'label_replace(count_values by (run) ("ranks", {_UNKNOWN_RANK_COUNT_BY_RUN}), "alertname", "ranks without news: $1", "ranks", "(.+)")'
    return f"max by (run, instance, alertname) ({text} * on (run) group_left (instance) ({_UNSEEN_NODE} or on (run) {_RUNS}))"


def _rows() -> str:
    """Return PromQL for a row for each run, with owner, state, problem, rank, node, GPU and main cause of its losses as labels.

    A join drops runs without a match. `or on (run)` therefore adds a series without the label for all other runs.
    """
    problem = (
        f"({with_xid(_main_alert_with_rank(), 'alertname')} unless on (run) ({_STANDSTILL_WITHOUT_ALERT})"
        f" or on (run) {_standstill_texts()} or on (run) {_slow_rank_texts()} or on (run) {_main_loss()}"
        f" or on (run) {_unknown_rank_texts()}"
        f""" or on (run) label_replace({_RESTARTED_RUNS}, "alertname", "restarted in the last hour", "", ""))"""
    )
    with_problem = (
        f"{RUN_INFO} * on (run) group_left (state) ({_LATEST_STATE} or on (run) {_RUNS})"
        f" * on (run) group_left (alertname, instance, rank, gpu) (0 * {problem} + 1 or on (run) {_RUNS})"
        f" * on (run) group_left (cause) (0 * {main_cause('@cluster')} + 1 or on (run) {_RUNS})"
    )
    return f"({UNSEEN_ROWS}) or on (run) {with_problem}"


RUN_ROWS = _rows()


def run_panels() -> tuple[Panel, ...]:
    """Return the table of all runs, runs without progress first, and the table of their speed."""
    return (_all_runs(), _speed())


def _all_runs() -> Panel:
    panel = table(
        "All runs, rates over 5 min",
        Column(
            "run",
            "Run",
            links=(
                RUN_LINK,
                dashboard_link("training-ranks", "Ranks", run="${__value.raw}"),
                dashboard_link("training-energy", "Energy and cost", run="${__value.raw}"),
            ),
            width=110,
        ),
        Column(_urgency_query(), "Verdict", decimals=0, width=110, mappings=RUN_URGENCY_MAPPINGS),
        Column("state", "State", width=72, mappings=STATE_MAPPINGS),
        Column("alertname", "What is wrong", mappings=[*title_mappings(), *MAIN_CAUSE_TEXTS]),
        Column("rank", "Rank", width=64),
        Column("instance", "Node", width=110, links=(NODE_LINK,)),
        Column("gpu", "GPU", width=60),
        Column(
            f"1000 * ({_since_query()})",
            "Since",
            unit=CLOCK_TIME,
            width=CLOCK_TIME_WIDTH,
            mappings=value_mappings({0: ("before this range", NEUTRAL)}),
        ),
        Column("user", "Owner", width=75),
        Column("max by (run) (run:training_gpus:count{@cluster})", "GPUs", "locale", 58, decimals=0),
        Column(f"max by (run) ({CLUSTER_COST_PER_HOUR})", "Cost/h", "locale", 70, decimals=2),
        Column(f"max by (run) ({CLUSTER_LOST_PER_HOUR})", "Lost/h", "locale", 70, decimals=2),
        percent_column(CLUSTER_LOST_SHARE, "Lost", 65, LOST_THRESHOLDS),
        Column("cause", "Lost to", width=140, mappings=MAIN_CAUSE_TEXTS),
        row_query=RUN_ROWS,
        sort="Verdict",
        h=13,
        max_data_points=720,
    )
    panel.body["options"]["sortBy"].append({"displayName": "Lost", "desc": True})
    return panel


def _speed() -> Panel:
    """Return the table of progress, speed and totals of each run, the largest loss of time first."""

    def unless_still(expression: str) -> str:
        return f"max by (run) ({expression}) unless on (run) run:training_standstill:info{{@cluster}}"

    return table(
        "Speed and progress of the runs, rates over 5 min",
        Column("run", "Run", links=(RUN_LINK,), width=130),
        Column("user", "Owner", width=75),
        Column("model", "Model"),
        percent_column(CLUSTER_LOST_SHARE, "Lost", 80, LOST_THRESHOLDS),
        Column(
            f'time() - {LAST_STEP_TIME} unless on (run) run:training_run_state:info{{@cluster, state=~"finished|stopped"}}',
            "Last step",
            unit="s",
            decimals=0,
            width=85,
            thresholds=warn_from(120, 300),
        ),
        percent_column("max by (run) (run:training_progress:ratio{@cluster})", "Progress", 95, bar=(0, 1)),
        Column(unless_still("run:training_eta:seconds{@cluster}"), "Time left", unit="s", width=90),
        Column(
            unless_still("run:training_step_seconds:mean5m{@cluster}"),
            "Step time",
            unit="s",
            decimals=2,
            width=96,
        ),
        Column(
            unless_still("run:training_tokens:rate5m{@cluster}"),
            "Tokens/s",
            unit="short",
            decimals=1,
            width=90,
        ),
        percent_column(unless_still("run:training_mfu:ratio5m{@cluster}"), "MFU", 65),
        percent_column(
            unless_still("run:training_straggler_score:min{@cluster}"),
            "Slowest",
            90,
            warn_below(0.9, 0.75),
        ),
        percent_column(
            unless_still("run:training_waiting_for_data:max5m{@cluster}"),
            "Data wait",
            96,
            warn_from(0.1, 0.2),
        ),
        Column(
            "max by (run) (run:training_ranks_missing:sum{@cluster})",
            "No news",
            decimals=0,
            width=85,
            thresholds=bad_from(1),
        ),
        Column(
            "max by (run) (run:training_restarts:increase1d{@cluster})",
            "Restarts, 1 d",
            decimals=0,
            width=110,
            thresholds=warn_from(1),
        ),
        percent_column("max by (run) (run:training_goodput_if_saved:ratio6h{@cluster})", "Goodput, 6 h", 115),
        Column("max by (run) (run:training_cost:sum{@cluster})", "Cost so far", "locale", 105, decimals=2),
        row_query="max by (run, user, model) (run:training_run:info{@cluster})",
        sort="Lost",
        h=9,
    )
