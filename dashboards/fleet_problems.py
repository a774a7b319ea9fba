"""Main problem of each run on the dashboard *Fleet*, and its start, in PromQL.

A problem is a series with the labels `run`, `alertname`, `instance`, `rank` and `gpu`, as far as these are known. The label `alertname`
is the name of an alert, a cause of lost time or a text. The value is the start of the problem in Unix seconds, or 0 if the start is
not recorded.
"""

from __future__ import annotations

from dashboards.alerts import (
    HARDWARE_ALERTS,
    RECORDED_STATE_START,
    alert_starts,
    urgency,
    with_xid,
)
from dashboards.cost_and_loss import (
    MIN_DISPLAYED_CAUSE_SHARE,
    lost_share_by_cause,
    standstill_by_run,
)
from dashboards.queries import RECORDED_LAST_PROGRESS_TIME
from dashboards.rank_problems import EXIT_REASON_PATTERN, MAX_DATA_WAIT_RATIO, SLOW_RATIO
from dashboards.verdicts import Verdict, verdict_by_run

_AVOIDABLE_CAUSES = '@cluster, cause!~"init|compile|checkpoint_load|nonfinite_loss"'
"""Matchers of the causes of lost time, except the start and NaN losses, which have verdicts of their own."""
UNSEEN_RUNS = "max by (run) (run:training_unseen:timestamp_seconds{@cluster})"
"""PromQL for the time of the last sample of each run that has not ended and that no exporter reports, in Unix seconds."""
RECORDED_LAST_PROGRESS_TIME_BY_RUN = f"max by (run) ({RECORDED_LAST_PROGRESS_TIME})"
STATE_START_BY_RUN = f"max by (run) ({RECORDED_STATE_START})"
RUNS = "group by (run) (run:training_run:info{@cluster})"
"""PromQL for a series of value 1 for each run with a recent sample."""
ALL_RANKS_ENDED = "all ranks have ended, outcome not decided"
DRIVER_DOWN = "driver does not respond, GPUs unknown"
ENDING_SECONDS = 120
"""Time after which a run that is still `ending` counts as making no progress. The exporter decides within about a minute."""


def _firing_alerts(label: str, pattern: str) -> str:
    """Return PromQL with a value for each run with a firing alert whose label, `alertname` or `severity`, matches the pattern."""
    return f'max by (run) (ALERTS{{@cluster, alertstate="firing", run!="", {label}=~"{pattern}"}})'


_STATE_TEMPLATE = 'run:training_run_state:info{{@cluster, state=~"{states}"}}'
_STILL_ENDING = (
    f"max by (run) (run:training_run_state:age_seconds{{@cluster}} >= {ENDING_SECONDS}"
    f" and on (cluster, run) {_STATE_TEMPLATE.format(states='ending')})"
)
"""PromQL with a value for each run whose outcome is not decided after `ENDING_SECONDS`."""
_LIVE_RUNS = f"max by (run) ({_STATE_TEMPLATE.format(states='starting|running|stalled|hung')})"
_FIRST_EXIT = "max by (run, instance, rank, reason) (run:training_first_exit:timestamp_seconds{@cluster})"
"""PromQL for the time of the first exit of each run that makes no progress because ranks exited, with node, rank and reason."""
NO_PROGRESS_RUNS = "max by (run) (run:training_no_progress:info{@cluster})"
"""PromQL with a value for each run that failed, is lost, hangs, stands still or remains `ending`, also before its alert fires."""
ENDING_RUNS = f"max by (run) ({_STATE_TEMPLATE.format(states='ending')})"
"""PromQL with a value for each run whose ranks have ended and whose outcome is not decided."""
_UNKNOWN_RANK_COUNT_BY_RUN = f"(max by (run) (run:training_ranks_unknown:sum{{@cluster}}) > 0 and on (run) {_STATE_TEMPLATE.format(states='running|stalled|hung')})"
"""PromQL for the number of ranks without a sample of each live run that has such ranks."""
_LAST_SAMPLE_BY_NODE = (
    "max by (run, instance) (last_over_time(instance:training_last_sample:timestamp_seconds{@cluster}[1h]))"
)
"""PromQL for the time of the last sample of each run on each node, within an hour."""
UNSEEN_NODE = f"topk by (run) (1, {_LAST_SAMPLE_BY_NODE} unless on (run, instance) instance:training_ranks:count{{@cluster}})"
"""PromQL for one node of each run that has nodes without current samples: the node whose samples ended last, and this time."""
_SLOW_RANK = f"bottomk by (run) (1, max by (run, instance, rank, gpu) (run:training_slow_rank:ratio{{@cluster}}) < {SLOW_RATIO})"
"""PromQL for the speed of the slowest rank of each run, if the rank is slow, with its node and GPU."""
_ALL_WAIT_FOR_DATA = (
    f"(max by (run) (run:training_waiting_for_data:min2m{{@cluster}}) > {MAX_DATA_WAIT_RATIO})"
)
"""PromQL for the smallest share of time in which a rank waits for data, for each run whose ranks all wait: no rank is then the cause."""
_DATA_WAIT_RANK = (
    f"(topk by (run) (1, max by (run, instance, rank) (run:training_data_wait_rank:ratio2m{{@cluster}}) > {MAX_DATA_WAIT_RATIO})"
    f" unless on (run) {_ALL_WAIT_FOR_DATA})"
)
"""PromQL for the share of time in which the rank that waits longest waits for data, unless all ranks wait.

`topk` selects one rank of each run: after a restart of Prometheus, the series of the rank before remains for five minutes.
"""
_RANK_OF_FAULTY_GPU = "max by (run, instance, gpu, rank) (run_gpu:training_fault_rank:info{@cluster})"
"""PromQL for the rank of each GPU with a fault."""
_EARLY_ENDS = "max by (run, steps) (run:training_early_end:info{@cluster})"
"""PromQL for each run that finished before its step target, with its last step and the target as the label `steps`."""
_RECENT_RESTARTS = (
    "(max by (run) (run:training_exit_before_restart:timestamp_seconds{@cluster}) > time() - 3600"
    " and on (run) (max by (run) (run:training_restarts:increase1d{@cluster}) > 0"
    f" or on (run) {_STATE_TEMPLATE.format(states='starting')}))"
)
_RESTARTED_RUNS = (
    f"(max by (run) (run:training_restart_lost:ratio1h{{@cluster}}) > 0.01 or on (run) {_RECENT_RESTARTS})"
)
"""PromQL with a value for each live run that lost more than 1 % of the last hour to a restart, or that restarts after an exit in this hour.

The exporter counts the loss of a restart when the run trains again.
"""
_HANGING_RANK = "max by (run, instance, rank, gpu) (run:training_standstill_rank:info{@cluster})"
"""PromQL for the rank that causes the standstill of each run."""
_SLOWING_RANK = f"topk by (run) (1, {_SLOW_RANK} or on (run) {_DATA_WAIT_RANK})"
"""PromQL for the slow rank of each run, else the rank that waits longest for data."""
_RANK_OF_PROBLEM = f"topk by (run) (1, {_HANGING_RANK} or on (run) {_SLOWING_RANK})"
"""PromQL for the rank that causes a standstill of each run, else the rank of `_SLOWING_RANK`."""
_ALERT_LABELS = "run, alertname, xid, instance, rank, gpu"
_ALERTS_OF_RUNS = '@cluster, run!="", severity!="info"'
_EXITED_WITHOUT_CAUSE = (
    f"(max by (run) ({_FIRST_EXIT}) or on (run) {_STILL_ENDING})"
    f" unless on (run) {_firing_alerts('alertname', HARDWARE_ALERTS)}"
)
"""PromQL with a value for each run whose ranks exited and whose hardware has no alert: the first exit is then the problem."""


def _main_alert() -> str:
    """Return PromQL for the start of the alert that explains the problem of each run, with the labels of the alert.

    An alert about the hardware precedes the most urgent alert, because a lost GPU explains a hang. Among the alerts about the hardware, an
    Xid is more exact than a lost GPU. Among equally urgent alerts, the alert that became pending first keeps the row.
    """
    alerts = urgency(_ALERTS_OF_RUNS, _ALERT_LABELS)
    hardware = urgency(
        f'{_ALERTS_OF_RUNS}, alertname=~"GpuLost|GpuMissing|NvmlDown|GpuEccUncorrected"', _ALERT_LABELS
    )
    xids = urgency(f'{_ALERTS_OF_RUNS}, alertname="GpuXidCritical"', _ALERT_LABELS)
    starts = alert_starts('@cluster, run!=""')
    pending_since = f'max by ({_ALERT_LABELS}) (ALERTS_FOR_STATE{{@cluster, run!=""}})'
    # 3 and 2 lift the alerts about hardware, which are at least critical, above all other alerts. The subtracted time is below 0.1, less
    # than the distance of two urgencies, and a difference of a second is still a difference.
    main = f"topk by (run) (1, (3 + ({xids}) or 2 + ({hardware}) or {alerts}) - on ({_ALERT_LABELS}) 1e-11 * {pending_since})"
    return f"(max by ({_ALERT_LABELS}) ({starts}) and on ({_ALERT_LABELS}) {main})"


def _main_alert_with_rank() -> str:
    """Return PromQL for the start of the main alert of each run, with node, rank and GPU.

    Alerts about GPUs have no rank, and some alerts about runs have neither rank nor node. The rank that uses the GPU completes an
    alert about a GPU. The rank that causes a hang or waits for data completes only the alert about the hang or the wait.
    """
    alert = _main_alert()

    def with_matchers(matchers: str) -> str:
        """Return PromQL for the main alerts without a rank that match."""
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


def _slow_ranks() -> str:
    """Return PromQL for the problem of each slowed run: the slow rank, else the rank that waits for data, else the wait of all ranks."""

    def row(ratio: str, text: str, start: str, labels: str) -> str:
        """Return PromQL for the start of a problem with a ratio in percent in its text; *labels* join the ranks with the start."""
        counted = f'count_values by (run, instance, rank, gpu) ("percent", round(100 * {ratio}))'
        with_text = f'max by (run, instance, rank, gpu, alertname) (label_replace({counted}, "alertname", "{text}", "percent", "(.+)"))'
        return f"0 * {with_text} + on ({labels}) group_left () max by ({labels}) ({start})"

    slow_start = "run:training_slow_start:timestamp_seconds{@cluster}"
    wait_start = "run:training_data_wait_start:timestamp_seconds{@cluster}"
    return " or on (run) ".join(
        (
            row(_SLOW_RANK, "computes at $1 % of the fastest rank", slow_start, "run"),
            row(_DATA_WAIT_RANK, "waits for data $1 % of the time", wait_start, "run"),
            row(_ALL_WAIT_FOR_DATA, "all ranks wait for data: $1 %", wait_start, "run"),
        )
    )


def _exits() -> str:
    """Return PromQL for the first exit of each run whose ranks exited, and for each run that is `ending` without such an exit."""
    first = f'label_replace({_FIRST_EXIT}, "alertname", "ended first: $1", "reason", "{EXIT_REASON_PATTERN}")'
    text = f"all ranks ended, cause unknown after {ENDING_SECONDS // 60} min"
    ending = (
        f'label_replace(0 * {_STILL_ENDING} + on (run) {STATE_START_BY_RUN}, "alertname", "{text}", "", "")'
    )
    undecided = f'label_replace(0 * {ENDING_RUNS} + on (run) {STATE_START_BY_RUN}, "alertname", "{ALL_RANKS_ENDED}", "", "")'
    return f"max by (run, instance, rank, alertname) ({first}) or on (run) {ending} or on (run) {undecided}"


def _standstills() -> str:
    """Return PromQL for the problem of each run that stands still, with the rank that causes the standstill if it is known.

    The start is that of the loss of the GPU, otherwise the last step of the run.
    """
    text = "no rank finishes a step"
    labels = "run, instance, rank, gpu, alertname"
    rank = "run:training_standstill_rank:info{@cluster}"
    lost_since = "max by (cluster, instance, gpu) (gpu:gpu_lost_start:timestamp_seconds)"
    with_start = (
        f"0 * {rank} + on (cluster, instance, gpu) group_left () ({lost_since} and on (cluster, instance, gpu) {rank})"
        f" or 0 * {rank} + on (cluster, run) group_left () {RECORDED_LAST_PROGRESS_TIME}"
    )
    with_line = f'label_replace({with_start}, "alertname", "holds up the others: $1", "cause", "(.+)")'
    with_phase = f'label_replace({with_line}, "alertname", "all other ranks wait for this rank: $1", "cause", "(phase .+)")'
    with_rank = (
        f'label_replace(label_join({with_phase}, "cause", " ", "cause", "gpu"),'
        ' "alertname", "GPU $1 lost: no rank finishes a step", "cause", "GPU lost (.+)")'
    )
    without_rank = f'label_replace({RECORDED_LAST_PROGRESS_TIME_BY_RUN} and on (run) {standstill_by_run("@cluster")}, "alertname", "{text}", "", "")'
    return f"max by ({labels}) ({with_rank}) or on (run) {without_rank}"


def _main_loss() -> str:
    """Return PromQL for the main cause of each run with the verdict `LOSES_TIME` or `LOSES_MUCH_TIME`, with the value 0: no start is recorded."""
    verdict = f"{verdict_by_run('@cluster')} >= {Verdict.LOSES_TIME} <= {Verdict.LOSES_MUCH_TIME}"
    loss = f"0 * (topk by (run) (1, {lost_share_by_cause(_AVOIDABLE_CAUSES)} > {MIN_DISPLAYED_CAUSE_SHARE}) and on (run) {verdict})"
    return f'max by (run, alertname) (label_replace({loss}, "alertname", "$1", "cause", "(.+)"))'


def _restarts() -> str:
    """Return PromQL for each run that lost time to a restart within the last hour, with the first exit before the restart if it is known."""
    exits = (
        "max by (run, instance, rank, reason) (run:training_exit_before_restart:timestamp_seconds{@cluster})"
    )
    exit_row = (
        f'label_replace({exits}, "alertname", "restarted after: $1", "reason", "{EXIT_REASON_PATTERN}")'
    )
    rows = (
        f"max by (run, instance, rank, alertname) ({exit_row}) or on (run)"
        f' label_replace({STATE_START_BY_RUN}, "alertname", "restarted in the last hour", "", "")'
    )
    return f"({rows}) and on (run) {_RESTARTED_RUNS}"


def _early_ends() -> str:
    """Return PromQL for the end of each run that finished before its step target."""
    early = f"0 * {_EARLY_ENDS} + on (run) group_left () {STATE_START_BY_RUN}"
    with_text = f'label_replace({early}, "alertname", "finished early, at step $1", "steps", "(.+)")'
    return f"max by (run, alertname) ({with_text})"


def _unknown_ranks() -> str:
    """Return PromQL for each live run with ranks without a sample, with a node without samples if there is one, and with the value 0."""
    text = f'label_replace(count_values by (run) ("ranks", {_UNKNOWN_RANK_COUNT_BY_RUN}), "alertname", "ranks without news: $1", "ranks", "(.+)")'
    with_node = f"0 * {text} + on (run) group_left (instance) ({UNSEEN_NODE} or on (run) 0 * {RUNS})"
    return f"max by (run, instance, alertname) ({with_node})"


def _drivers_down() -> str:
    """Return PromQL for each run with a node whose GPU driver does not respond, unless an alert about its hardware fires."""
    start = "max by (cluster, instance) (instance:gpu_driver_down_start:timestamp_seconds{@cluster})"
    down = f"0 * run:training_driver_down:info{{@cluster}} + on (cluster, instance) group_left () {start}"
    with_text = f'label_replace({down}, "alertname", "{DRIVER_DOWN}", "", "")'
    first = f"topk by (run) (1, max by (run, instance, alertname) ({with_text}))"
    return f"({first} unless on (run) {_firing_alerts('alertname', HARDWARE_ALERTS)})"


def _nonfinite_losses() -> str:
    """Return PromQL for each live run with a NaN or infinite loss within 15 minutes, with the number of these losses in the last 20 minutes."""
    total = "max by (run) (run:training_nonfinite_loss:sum{@cluster})"
    count = f"{total} - max by (run) (min_over_time(run:training_nonfinite_loss:sum{{@cluster}}[20m])) > 0"
    with_text = f'label_replace(count_values by (run) ("steps", {count}), "alertname", "loss was NaN or infinite in $1 steps", "steps", "(.+)")'
    start = "max by (run) (run:training_nonfinite_start:timestamp_seconds{@cluster})"
    return f"max by (run, alertname) (0 * {with_text} + on (run) group_left () {start} and on (run) {_LIVE_RUNS})"


def _failing_saves() -> str:
    """Return PromQL for each live run with a failed save within an hour, with the number of failed saves and the last checkpoint."""
    total = "max by (run) (run:training_failed_saves:sum{@cluster})"
    count = f"{total} - max by (run) (min_over_time(run:training_failed_saves:sum{{@cluster}}[1h])) > 0"
    with_count = f'label_replace(count_values by (run) ("saves", {count}), "alertname", "$1 saves failed", "saves", "(.+)")'
    step = 'count_values by (run) ("step", max by (run) (run:training_checkpoint_last_step:max{@cluster}))'
    with_step = f'label_join({with_count} * on (run) group_left (step) {step}, "alertname", "; last checkpoint: step ", "alertname", "step")'
    start = "max by (run) (run:training_saves_failing_start:timestamp_seconds{@cluster})"
    rows = f"({with_step} or on (run) {with_count})"
    return f"max by (run, alertname) (0 * {rows} + on (run) group_left () {start} and on (run) {_LIVE_RUNS})"


def main_problem() -> str:
    """Return PromQL for the main problem of each run that has a problem: the first of the list that the run has.

    The texts are those of *What is wrong* on *Run*. The title of an alert is shown for a run without such a text.
    """
    alerts = with_xid(_main_alert_with_rank(), "alertname")
    problems = (
        f"{_drivers_down()} unless on (run) ({NO_PROGRESS_RUNS})",
        f"({alerts} and on (run) {_firing_alerts('alertname', HARDWARE_ALERTS)})",
        _exits(),
        _standstills(),
        _nonfinite_losses(),
        _failing_saves(),
        f"{alerts} unless on (run) ({_EXITED_WITHOUT_CAUSE})",
        _slow_ranks(),
        _restarts(),
        _main_loss(),
        _unknown_ranks(),
        _early_ends(),
    )
    return f"({' or on (run) '.join(problems)})"


def since_query() -> str:
    """Return PromQL for the start of the main problem of each run, otherwise of its state, in Unix seconds.

    For a run without a current sample, the result is the time of the last sample.
    """
    return f"{UNSEEN_RUNS} or on (run) max by (run) {main_problem()} or on (run) {STATE_START_BY_RUN}"
