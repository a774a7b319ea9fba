"""Main problem of each run on the dashboard *Fleet*, and its start, in PromQL.

A problem is a series with the labels `run`, `alertname`, `instance`, `rank` and `gpu`, as far as these are known. The label `alertname`
is the name of an alert, a cause of lost time or a text, so that all problems have one column. The value is the start of the problem in Unix
seconds, or 0 if the start is not recorded.

A function `…_problems` returns PromQL for such series. The constants are the PromQL from which the functions build the problems.
`dashboards.queries` explains the recurring forms of PromQL.
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
from dashboards.gpu_problems import MAX_THROTTLED_RATIO, THROTTLED_RATIO_FAMILY
from dashboards.queries import RECORDED_LAST_PROGRESS_TIME
from dashboards.rank_problems import EXIT_REASON_PATTERN, MAX_DATA_WAIT_RATIO, SLOW_RATIO
from dashboards.verdicts import Verdict, verdict_by_run

_CAUSES_WITHOUT_OWN_VERDICT = '@cluster, cause!~"init|compile|checkpoint_load|nonfinite_loss"'
"""Matchers of the causes of lost time, except those of the start and NaN losses, which have verdicts of their own."""
UNSEEN_RUNS = "max by (run) (run:training_unseen:timestamp_seconds{@cluster})"
"""PromQL for the time of the last sample of each run that has not ended and that no exporter reports, in Unix seconds."""
LAST_PROGRESS_TIME_BY_RUN = f"max by (run) ({RECORDED_LAST_PROGRESS_TIME})"
"""PromQL for the time of the last step or validation batch of each run, in Unix seconds."""
STATE_START_BY_RUN = f"max by (run) ({RECORDED_STATE_START})"
"""PromQL for the start of the current state of each run, in Unix seconds."""
RUNS = "group by (run) (run:training_run:info{@cluster})"
"""PromQL for a series of value 1 for each run with a recent sample."""
ALL_RANKS_ENDED = "all ranks have ended, outcome not decided"
DRIVER_DOWN = "driver does not respond, GPUs unknown"
ENDING_SECONDS = 120
"""Time after which a run that is still `ending` counts as making no progress. The exporter decides within about a minute."""


_RUNS_WITH_HARDWARE_ALERT = (
    f'max by (run) (ALERTS{{@cluster, alertstate="firing", run!="", alertname=~"{HARDWARE_ALERTS}"}})'
)
"""PromQL with a value for each run with a firing alert about its hardware."""
_STATE_TEMPLATE = 'run:training_run_state:info{{@cluster, state=~"{states}"}}'
"""Template of PromQL with a value for each run in one of the states, a regular expression."""
_STILL_ENDING = (
    f"max by (run) (run:training_run_state:age_seconds{{@cluster}} >= {ENDING_SECONDS}"
    f" and on (cluster, run) {_STATE_TEMPLATE.format(states='ending')})"
)
"""PromQL with a value for each run whose outcome is not decided after `ENDING_SECONDS`."""
_LIVE_RUNS = f"max by (run) ({_STATE_TEMPLATE.format(states='starting|running|stalled|hung')})"
"""PromQL with a value for each run that has neither ended nor started to end."""
_FIRST_EXIT = "max by (run, instance, rank, reason) (run:training_first_exit:timestamp_seconds{@cluster})"
"""PromQL for the time of the first exit of each run that makes no progress because ranks exited, with node, rank and reason."""
NO_PROGRESS_RUNS = "max by (run) (run:training_no_progress:info{@cluster})"
"""PromQL with a value for each run that makes no progress: it failed, is lost, hangs, stands still, has a first exit or remains `ending`.

The recorded series has a value also before the alert about the run fires.
"""
ENDING_RUNS = f"max by (run) ({_STATE_TEMPLATE.format(states='ending')})"
"""PromQL with a value for each run whose ranks have ended and whose outcome is not decided."""
_UNKNOWN_RANK_COUNT_BY_RUN = f"(max by (run) (run:training_ranks_unknown:sum{{@cluster}}) > 0 and on (run) {_STATE_TEMPLATE.format(states='running|stalled|hung')})"
"""PromQL for the number of ranks without a sample of each `running`, `stalled` or `hung` run that has such ranks."""
_LAST_SAMPLE_BY_NODE = (
    "max by (run, instance) (last_over_time(instance:training_last_sample:timestamp_seconds{@cluster}[1h]))"
)
"""PromQL for the time of the last sample of each run on each node, within an hour."""
UNSEEN_NODE = f"topk by (run) (1, {_LAST_SAMPLE_BY_NODE} unless on (run, instance) instance:training_ranks:count{{@cluster}})"
"""PromQL for the time of the last sample of one node of each run that has nodes without current samples: the node whose samples ended last."""
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

The rule records one rank of each run. `topk` is needed because, after a restart of Prometheus, the series of the former rank remains for
five minutes.
"""
_RANK_OF_FAULTY_GPU = "max by (run, instance, gpu, rank) (run_gpu:training_fault_rank:info{@cluster})"
"""PromQL for the rank of each GPU with a fault."""
_STEPS_OF_EARLY_END = "max by (run, steps) (run:training_early_end:info{@cluster})"
"""PromQL for each run that finished before its step target, with its last step and the target as the label `steps`."""
_RUNS_AFTER_EXIT_IN_LAST_HOUR = (
    "(max by (run) (run:training_exit_before_restart:timestamp_seconds{@cluster}) > time() - 3600"
    " and on (run) (max by (run) (run:training_restarts:increase1d{@cluster}) > 0"
    f" or on (run) {_STATE_TEMPLATE.format(states='starting')}))"
)
"""PromQL with a value for each live run with an exit in the last hour that has restarted, or that is in the state `starting`."""
_RUNS_RESTARTED_IN_LAST_HOUR = (
    "(max by (run) (run:training_restart_lost:ratio1h{@cluster}) > 0.01"
    f" or on (run) {_RUNS_AFTER_EXIT_IN_LAST_HOUR})"
)
"""PromQL with a value for each live run that lost more than 1 % of the last hour to restarts, or of `_RUNS_AFTER_EXIT_IN_LAST_HOUR`.

The second condition is needed because the exporter counts the loss of a restart only when the run trains again.
"""
_STANDSTILL_RANK = "max by (run, instance, rank, gpu) (run:training_standstill_rank:info{@cluster})"
"""PromQL for the rank that causes the standstill of each run."""
_SLOWING_RANK = f"topk by (run) (1, {_SLOW_RANK} or on (run) {_DATA_WAIT_RANK})"
"""PromQL for the slow rank of each run, else the rank that waits longest for data."""
_RANK_OF_PROBLEM = f"topk by (run) (1, {_STANDSTILL_RANK} or on (run) {_SLOWING_RANK})"
"""PromQL for the rank that causes a standstill of each run, else the rank of `_SLOWING_RANK`."""
_ALERT_LABELS = "run, alertname, xid, instance, rank, gpu"
"""Labels of an alert that its problem has too."""
_ALERTS_OF_RUNS = '@cluster, run!="", severity!="info"'
"""Matchers of the alerts that can be the main problem of a run."""
_EXITED_WITHOUT_CAUSE = (
    f"(max by (run) ({_FIRST_EXIT}) or on (run) {_STILL_ENDING}) unless on (run) {_RUNS_WITH_HARDWARE_ALERT}"
)
"""PromQL with a value for each run whose ranks exited and whose hardware has no alert: the first exit is then the problem."""


def _alert_problems_without_rank() -> str:
    """Return PromQL for the start of the alert that explains the problem of each run, with the labels of the alert.

    An alert about the hardware precedes the most urgent alert, because a lost GPU explains a hang. Among the alerts about the hardware, an
    Xid is more exact than a lost GPU. Among equally urgent alerts, the alert that became pending first is selected.
    """
    alerts = urgency(_ALERTS_OF_RUNS, _ALERT_LABELS)
    hardware = urgency(
        f'{_ALERTS_OF_RUNS}, alertname=~"GpuLost|GpuMissing|NvmlDown|GpuEccUncorrected"', _ALERT_LABELS
    )
    xids = urgency(f'{_ALERTS_OF_RUNS}, alertname="GpuXidCritical"', _ALERT_LABELS)
    starts = alert_starts('@cluster, run!=""')
    pending_since = f'max by ({_ALERT_LABELS}) (ALERTS_FOR_STATE{{@cluster, run!=""}})'
    # Urgencies are whole numbers up to 5. The added 3 and 2 lift the alerts about hardware, which are at least critical, above all others.
    # The subtracted time, about 0.02, orders alerts of equal urgency: it is less than the distance of two urgencies, and 1e-11 for a
    # second is not lost in the rounding of the sum.
    main = f"topk by (run) (1, (3 + ({xids}) or 2 + ({hardware}) or {alerts}) - on ({_ALERT_LABELS}) 1e-11 * {pending_since})"
    return f"(max by ({_ALERT_LABELS}) ({starts}) and on ({_ALERT_LABELS}) {main})"


def _alert_problems() -> str:
    """Return PromQL for the alert that explains the problem of each run, with node, rank and GPU.

    Alerts about GPUs have no rank, and some alerts about runs have neither rank nor node. An alert about a GPU receives the rank that the
    rules record for the fault of this GPU, or else the rank of `_RANK_OF_PROBLEM` if it uses this GPU. The alert about a hang receives the
    rank that causes the hang, and the alert about a wait for data the rank that waits. Other alerts remain unchanged.
    """
    alert = _alert_problems_without_rank()

    def select(matchers: str) -> str:
        """Return PromQL for the alerts without a rank that match."""
        return (
            f'({alert} and on (run, alertname) ALERTS{{@cluster, alertstate="firing", rank="", {matchers}}})'
        )

    about_gpu = select('gpu!=""')
    hang = select('instance="", alertname="TrainingHang"')
    data_wait = select('instance="", alertname="TrainingDataStall"')
    plus_rank_of_gpu = "+ on (run, instance, gpu) group_left (rank) 0 *"
    return (
        f"({about_gpu} {plus_rank_of_gpu} {_RANK_OF_FAULTY_GPU} or on (run) {about_gpu} {plus_rank_of_gpu} {_RANK_OF_PROBLEM}"
        f" or on (run) {hang} + on (run) group_left (instance, rank, gpu) 0 * {_STANDSTILL_RANK}"
        f" or on (run) {data_wait} + on (run) group_left (instance, rank) 0 * {_DATA_WAIT_RANK} or on (run) {alert})"
    )


def _slowdown_problems() -> str:
    """Return PromQL for the problem of each slowed run: the slow rank, else the rank that waits for data, else the wait of all ranks."""

    def problem(ratio: str, text: str, start: str) -> str:
        """Return PromQL for a problem whose *text* has the ratio in percent for `$1`. The start is that of the run."""
        with_percent = f'count_values by (run, instance, rank, gpu) ("percent", round(100 * {ratio}))'
        with_text = f'max by (run, instance, rank, gpu, alertname) (label_replace({with_percent}, "alertname", "{text}", "percent", "(.+)"))'
        return f"0 * {with_text} + on (run) group_left () max by (run) ({start})"

    throttled_rank = (
        f"max by (run, instance, rank) (max by (run, instance, rank, uuid) (rank:training_gpu:info{{@cluster}} and on (run, instance, rank) {_SLOW_RANK})"
        f" * on (uuid) group_left () max by (uuid) ({THROTTLED_RATIO_FAMILY}{{@cluster}}) > {MAX_THROTTLED_RATIO})"
    )
    slow_start = "run:training_slow_start:timestamp_seconds{@cluster}"
    wait_start = "run:training_data_wait_start:timestamp_seconds{@cluster}"
    return " or on (run) ".join(
        (
            problem(
                f"({_SLOW_RANK} and on (run, instance, rank) {throttled_rank})",
                "computes at $1 % of the fastest rank; GPU throttled",
                slow_start,
            ),
            problem(_SLOW_RANK, "computes at $1 % of the fastest rank", slow_start),
            problem(_DATA_WAIT_RANK, "waits for data $1 % of the time", wait_start),
            problem(_ALL_WAIT_FOR_DATA, "all ranks wait for data: $1 %", wait_start),
        )
    )


def _exit_problems() -> str:
    """Return PromQL for the first exit of each run whose ranks exited, and for each run that is `ending` without such an exit."""
    first = f'label_replace({_FIRST_EXIT}, "alertname", "ended first: $1", "reason", "{EXIT_REASON_PATTERN}")'
    text = f"all ranks ended, cause unknown after {ENDING_SECONDS // 60} min"
    ending = (
        f'label_replace(0 * {_STILL_ENDING} + on (run) {STATE_START_BY_RUN}, "alertname", "{text}", "", "")'
    )
    undecided = f'label_replace(0 * {ENDING_RUNS} + on (run) {STATE_START_BY_RUN}, "alertname", "{ALL_RANKS_ENDED}", "", "")'
    return f"max by (run, instance, rank, alertname) ({first}) or on (run) {ending} or on (run) {undecided}"


def _standstill_problems() -> str:
    """Return PromQL for the problem of each run that stands still, with the rank that causes the standstill if it is known.

    The start is the loss of the GPU if the GPU of the rank is lost, otherwise the last step of the run.
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
    without_rank = f'label_replace({LAST_PROGRESS_TIME_BY_RUN} and on (run) {standstill_by_run("@cluster")}, "alertname", "{text}", "", "")'
    return f"max by ({labels}) ({with_rank}) or on (run) {without_rank}"


def _largest_loss_problems() -> str:
    """Return PromQL for the cause of the largest loss of each run with the verdict `LOSES_TIME` or `LOSES_MUCH_TIME`.

    The value is 0, because no start is recorded.
    """
    # Each comparison drops the runs for which it is false.
    verdict = f"{verdict_by_run('@cluster')} >= {Verdict.LOSES_TIME} <= {Verdict.LOSES_MUCH_TIME}"
    share = lost_share_by_cause(_CAUSES_WITHOUT_OWN_VERDICT)
    loss = f"0 * (topk by (run) (1, {share} > {MIN_DISPLAYED_CAUSE_SHARE}) and on (run) {verdict})"
    return f'max by (run, alertname) (label_replace({loss}, "alertname", "$1", "cause", "(.+)"))'


def _restart_problems() -> str:
    """Return PromQL for each run that restarted in the last hour, with the first exit before the restart if it is known.

    Without a known exit, the start is that of the current state of the run.
    """
    exits = (
        "max by (run, instance, rank, reason) (run:training_exit_before_restart:timestamp_seconds{@cluster})"
    )
    with_text = (
        f'label_replace({exits}, "alertname", "restarted after: $1", "reason", "{EXIT_REASON_PATTERN}")'
    )
    problems = (
        f"max by (run, instance, rank, alertname) ({with_text}) or on (run)"
        f' label_replace({STATE_START_BY_RUN}, "alertname", "restarted in the last hour", "", "")'
    )
    return f"({problems}) and on (run) {_RUNS_RESTARTED_IN_LAST_HOUR}"


def _early_end_problems() -> str:
    """Return PromQL for the end of each run that finished before its step target."""
    end = f"0 * {_STEPS_OF_EARLY_END} + on (run) group_left () {STATE_START_BY_RUN}"
    with_text = f'label_replace({end}, "alertname", "finished early, at step $1", "steps", "(.+)")'
    return f"max by (run, alertname) ({with_text})"


def _unknown_rank_problems() -> str:
    """Return PromQL for each run of `_UNKNOWN_RANK_COUNT_BY_RUN`, with the number of ranks and one node without samples.

    The start is the time of the last sample of this node. Without such a node, the start is 0.
    """
    with_text = f'label_replace(count_values by (run) ("ranks", {_UNKNOWN_RANK_COUNT_BY_RUN}), "alertname", "ranks without news: $1", "ranks", "(.+)")'
    with_node = f"0 * {with_text} + on (run) group_left (instance) ({UNSEEN_NODE} or on (run) 0 * {RUNS})"
    return f"max by (run, instance, alertname) ({with_node})"


def _driver_down_problems() -> str:
    """Return PromQL for each run with a node whose GPU driver does not respond, unless an alert about its hardware fires."""
    start = "max by (cluster, instance) (instance:gpu_driver_down_start:timestamp_seconds{@cluster})"
    down = f"0 * run:training_driver_down:info{{@cluster}} + on (cluster, instance) group_left () {start}"
    with_text = f'label_replace({down}, "alertname", "{DRIVER_DOWN}", "", "")'
    first = f"topk by (run) (1, max by (run, instance, alertname) ({with_text}))"
    return f"({first} unless on (run) {_RUNS_WITH_HARDWARE_ALERT})"


def _nonfinite_loss_problems() -> str:
    """Return PromQL for each live run with a NaN or infinite loss within 15 minutes, with the number of these losses in the last 20 minutes."""
    total = "max by (run) (run:training_nonfinite_loss:sum{@cluster})"
    count = f"{total} - max by (run) (min_over_time(run:training_nonfinite_loss:sum{{@cluster}}[20m])) > 0"
    with_text = f'label_replace(count_values by (run) ("steps", {count}), "alertname", "loss was NaN or infinite in $1 steps", "steps", "(.+)")'
    start = "max by (run) (run:training_nonfinite_start:timestamp_seconds{@cluster})"
    return f"max by (run, alertname) (0 * {with_text} + on (run) group_left () {start} and on (run) {_LIVE_RUNS})"


def _failing_save_problems() -> str:
    """Return PromQL for each live run with a failed save within an hour, with the number of these saves and, if known, the last checkpoint."""
    total = "max by (run) (run:training_failed_saves:sum{@cluster})"
    count = f"{total} - max by (run) (min_over_time(run:training_failed_saves:sum{{@cluster}}[1h])) > 0"
    with_count = f'label_replace(count_values by (run) ("saves", {count}), "alertname", "$1 saves failed", "saves", "(.+)")'
    step = 'count_values by (run) ("step", max by (run) (run:training_checkpoint_last_step:max{@cluster}))'
    with_step = f'label_join({with_count} * on (run) group_left (step) {step}, "alertname", "; last checkpoint: step ", "alertname", "step")'
    start = "max by (run) (run:training_saves_failing_start:timestamp_seconds{@cluster})"
    texts = f"({with_step} or on (run) {with_count})"
    return f"max by (run, alertname) (0 * {texts} + on (run) group_left () {start} and on (run) {_LIVE_RUNS})"


def main_problem() -> str:
    """Return PromQL for the main problem of each run that has a problem: the first of the list that the run has.

    The texts are those of *What is wrong* on *Run*. An alert has its name, and an alert about an Xid the Xid, in place of a text. A slow
    rank and a wait for data precede the alerts of severity warning, whose texts have no number. The text of a slow rank therefore stays
    when the alert about the rank fires.
    """
    alerts = with_xid(_alert_problems(), "alertname")
    has_critical_alert = 'max by (run) (ALERTS{@cluster, alertstate="firing", severity="critical"})'
    problems = (
        f"{_driver_down_problems()} unless on (run) ({NO_PROGRESS_RUNS})",
        f"({alerts} and on (run) {_RUNS_WITH_HARDWARE_ALERT})",
        _exit_problems(),
        _standstill_problems(),
        _nonfinite_loss_problems(),
        _failing_save_problems(),
        f"({_slowdown_problems()}) unless on (run) {has_critical_alert}",
        f"{alerts} unless on (run) ({_EXITED_WITHOUT_CAUSE})",
        _restart_problems(),
        _largest_loss_problems(),
        _unknown_rank_problems(),
        _early_end_problems(),
    )
    return f"({' or on (run) '.join(problems)})"


def problem_starts(runs: str, text: str) -> str:
    """Return PromQL for the start of `since_query` for each run, with the labels of the main problem.

    Args:
        runs: PromQL for series by run. A run without any start has the value 0.
        text: Value of the label `alertname` of a run without a problem.
    """
    unseen = f"{UNSEEN_RUNS} * on (run) group_left (alertname, instance) {unseen_run_problems()}"
    no_problem = f'label_replace({STATE_START_BY_RUN} or on (run) 0 * {runs}, "alertname", "{text}", "", "")'
    starts = f"{unseen} or on (run) {main_problem()} or on (run) {no_problem}"
    return f"(max by (run, alertname, instance, rank, gpu) ({starts}) and on (run) {runs})"


def since_query() -> str:
    """Return PromQL for the start of the main problem of each run, otherwise of its state, in Unix seconds.

    For a run without a current sample, the result is the time of the last sample.
    """
    return f"{UNSEEN_RUNS} or on (run) max by (run) {main_problem()} or on (run) {STATE_START_BY_RUN}"


def unseen_run_problems() -> str:
    """Return PromQL for a series of value 1 for each run that has not ended and has no current sample.

    The label `alertname` is the text with the minutes since the last sample, and `instance` the node of the run whose samples ended last.
    """
    age = f'count_values by (run) ("age", floor((time() - {UNSEEN_RUNS}) / 60))'
    text = f'label_replace({age}, "alertname", "no news for $1 min", "age", "(.+)")'
    return f"(max by (run, alertname) ({text}) * on (run) group_left (instance) (0 * {UNSEEN_NODE} + 1))"


def main_problem_or_text(runs: str, text: str) -> str:
    """Return PromQL for a series of value 1 for each run: its main problem, or *text* for a run without a problem.

    Args:
        runs: PromQL for series by run.
        text: Value of the label `alertname` of a run without a problem.
    """
    return f'(0 * {main_problem()} + 1 or on (run) label_replace({runs}, "alertname", "{text}", "", ""))'
