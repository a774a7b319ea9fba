"""PromQL for the state of a run in words: state, reason, firing alerts, and the age of the last sample."""

from __future__ import annotations

from dashboards.queries import (
    LIVE_STATE,
    PROGRESS_AGE_SECONDS,
    SPEED_RATIO_BY_RANK_AND_NODE,
    STANDSTILL_BY_STEP_AGE,
    STEP_OVERDUE_IN_WORK,
)
from dashboards.rank_problems import (
    CRITICAL_XIDS_OF_GPUS,
    LOOKBACK,
    LOST_GPU_ROWS,
    MAX_DATA_WAIT_RATIO,
    MISSING_RANK_COUNT,
    ODD_PHASE,
    ODD_RANK,
    SLOW_RATIO,
    STEPS_OF_EARLY_END,
    THROTTLED_GPU_ROWS,
    UNKNOWN_RANK_COUNT,
)
from dashboards.run_problems import (
    ALL_WAIT_FOR_DATA,
    DATA_WAIT_RATIO_BY_RANK,
    LAST_SAVE_FAILED,
    NONFINITE_ALERT,
    NONFINITE_NOW,
)
from dashboards.verdicts import Verdict

WARNING_LEVEL, BAD_LEVEL = 1, 10
"""Levels from which a state is a warning or bad.

The level of a run is the sum of five parts: its state, an overdue step, a cause, missing ranks, and alerts. Each part adds 0,
`WARNING_LEVEL` or `BAD_LEVEL`. The warnings of all parts together stay below `BAD_LEVEL`.
"""
_IS_TRAINING = 'max(training_run_state{@run, state=~"running|stalled|hung"}) == 1'
"""PromQL with a value while the run is `running`, `stalled` or `hung`."""
STATE_LEGEND = "{{state}}{{overdue}}{{culprit}}{{note}}{{missing}}{{alerts}}{{age}}{{instance}}"
"""Legend of the state. Each label after `state` is a part of the text with its punctuation, such as `, no step for 40 s`, or is absent."""

_SAMPLE_AGE_SECONDS = (
    f"round(time() - max(last_over_time(run:training_last_sample:timestamp_seconds{{@run}}[{LOOKBACK}])))"
)
"""PromQL for the seconds since the last sample of the run, if it is at most `LOOKBACK` old."""
_CURRENT_STATES = 'run:training_run_state:info{{@run, state=~"{states}"}}'
"""Template of PromQL for the current state, as on *Fleet*, if it is one of `{states}`. A run without a sample for a minute has none."""
_LAST_STATES = f'last_over_time(training_run_state{{{{@run, state=~"{{states}}"}}}}[{LOOKBACK}])'
"""Template of PromQL for the last states within `LOOKBACK`: a series for each of `{states}`, of value 1 for the last state, otherwise 0."""


def state_query() -> str:
    """Return PromQL for a series with the level of the run and the labels of `STATE_LEGEND`, as far as they apply.

    A run without a sample has its last known state, with the age of the last sample and a node. A last state other than `finished` is then
    at least a warning. The result is absent if the run has had no sample within `LOOKBACK`.
    """
    levels = {0: "starting|running|finished", WARNING_LEVEL: "stalled|ending|stopped"}
    silent_levels = {0: "finished", WARNING_LEVEL: "starting|running|stalled|ending|stopped"}
    state = (
        f"({_state_with_note(_CURRENT_STATES, levels)}) + on () group_left (overdue) ({_overdue()})"
        f" + on () group_left (culprit) ({_culprit()})"
        f" + on () group_left (missing) ({_missing_ranks()})"
        f" + on () group_left (alerts) ({_alerts()})"
    )
    silent_state = (
        f"({_state_with_note(_LAST_STATES, silent_levels)}) + on () group_left (age, instance) ({_age_and_node()})"
        f" + on () group_left (alerts) ({_alerts()})"
    )
    return f"({state}) or on () ({silent_state})"


def _state_with_note(series: str, levels: dict[int, str]) -> str:
    """Return PromQL for the level of the state, with the labels `state` and `note`.

    The note is the reason of the end, or the last step of a run that finished early, which is a warning; other runs have no note.

    Args:
        series: `_CURRENT_STATES` or `_LAST_STATES`.
        levels: Regular expressions of the states by level, without the states of `BAD_LEVEL`.
    """
    all_levels = levels | {BAD_LEVEL: "hung|failed|lost"}
    states = " or ".join(
        f"{level} * max by (state) ({series.format(states=states)} == 1)"
        for level, states in all_levels.items()
    )
    # `topk` selects one state: without staleness markers, as in rebuilt data, the former state remains for a minute beside the current one.
    state = f"topk(1, {states})"
    reason = (
        "topk by (state) (1, max by (state, note) (label_replace(label_replace("
        f"last_over_time(training_run_outcome_info{{@run}}[{LOOKBACK}]),"
        ' "state", "$1", "outcome", "(.+)"), "note", ": $1", "reason", "(?:inferred: )?(.+)")))'
    )
    early_end = f'label_replace({STEPS_OF_EARLY_END}, "note", " early, at step $1", "steps", "(.+)")'
    finished_query = f"max by (state) ({series.format(states='finished')} == 1)"
    return (
        f"{WARNING_LEVEL} * {finished_query} * on () group_left (note) {early_end}"
        f" or on () (({state}) * on (state) group_left (note) ({reason} or on (state) 0 * ({state}) + 1))"
    )


def _overdue() -> str:
    """Return PromQL for the level of an overdue step, with the time since the last step as the label `overdue`.

    A step that is overdue in a phase of work is a warning, and bad once the last step is a minute old. The level is 0 in other phases, such
    as a save, and in the states `stalled` and `hung`, which have levels of their own. Without an overdue step, the level is 0 and the label
    is absent. The time is that of the panel *Last step*, which Grafana rounds.
    """

    def text(number: str, unit: str) -> str:
        """Return PromQL for a series of value 1 with the label `overdue`: `, no step for 40 s`."""
        return f'label_replace(count_values("overdue", round({number})), "overdue", ", no step for $1 {unit}", "overdue", "(.+)")'

    age = f"({text(f'{PROGRESS_AGE_SECONDS} < 60', 's')} or on () {text(f'({PROGRESS_AGE_SECONDS} >= 60) / 60', 'min')})"
    is_overdue = f"(max(run:training_step_overdue:seconds{{@run}}) > 0 or on () {STEP_OVERDUE_IN_WORK})"
    return (
        f"{BAD_LEVEL} * ({age} and on () {is_overdue} and on () {PROGRESS_AGE_SECONDS} >= 60)"
        f" or on () {WARNING_LEVEL} * ({age} and on () {is_overdue})"
        f" or on () 0 * ({age} and on () {STANDSTILL_BY_STEP_AGE}) or on () vector(0)"
    )


def _culprit() -> str:
    """Return PromQL for the cause of a standstill, of damage or of a slow run as the label `culprit`.

    The label names the first cause that applies:

        the lost GPU of a rank
        the rank that causes a hang, or for which all other ranks wait
        a GPU with an Xid of the hardware
        a NaN or infinite loss
        failing saves
        the cause of a slow run, see `_slow_part`

    The value is the level: `WARNING_LEVEL`, `BAD_LEVEL` for a run that loses much time, or 0 without a cause. A run that does not train has
    no cause.
    """
    return f"{_cause_of_standstill()} or on () {_damage()} or on () {_slow_part()} or on () vector(0)"


def _cause_of_standstill() -> str:
    """Return PromQL for `WARNING_LEVEL` with the cause of a standstill as the label `culprit`.

    The text is `: GPU 3 of rank 11 on node-2 lost (Xid 79)` or `, rank 11 on node-2`, the rank that holds up the others.
    """
    odd_rank = f'label_join(topk(1, {ODD_RANK} or on () {ODD_PHASE}), "culprit", " on ", "rank", "instance")'
    rank_of_lost_gpu = f'label_join(topk(1, {LOST_GPU_ROWS}), "culprit", " on ", "rank", "instance")'
    lost_gpu = f'label_join({rank_of_lost_gpu}, "culprit", " of rank ", "gpu", "culprit")'
    lost_gpu_with_xid = f'label_join({lost_gpu}, "culprit", " lost", "culprit", "note")'
    with_text = (
        f'label_replace({lost_gpu_with_xid}, "culprit", ": GPU $1", "culprit", "(.+)")'
        f' or on () label_replace({odd_rank}, "culprit", ", rank $1", "culprit", "(.+)")'
    )
    return f"0 * max by (culprit) ({with_text}) + {WARNING_LEVEL} and on () {_IS_TRAINING}"


def _damage() -> str:
    """Return PromQL for `WARNING_LEVEL` with the label `culprit`: an Xid of the hardware, else a NaN loss, else failing saves."""
    rank = f'label_join(topk(1, {CRITICAL_XIDS_OF_GPUS}), "culprit", " on ", "rank", "instance")'
    gpu_of_rank = f'label_join({rank}, "culprit", " of rank ", "gpu", "culprit")'
    xid_on_gpu = f'label_join({gpu_of_rank}, "culprit", " on GPU ", "xid", "culprit")'
    xid = f'label_replace({xid_on_gpu}, "culprit", ", Xid $1", "culprit", "(.+)")'
    others = " or on () ".join(
        f'label_replace(0 * ({condition}) + {WARNING_LEVEL} and on () {_IS_TRAINING}, "culprit", ", {text}", "", "")'
        for condition, text in (
            (f"{NONFINITE_NOW} or on () {NONFINITE_ALERT}", "loss was NaN or infinite"),
            (LAST_SAVE_FAILED, "saves fail"),
        )
    )
    return f"0 * max by (culprit) ({xid}) + {WARNING_LEVEL} and on () {_IS_TRAINING} or on () {others}"


def _slow_part() -> str:
    """Return PromQL for `WARNING_LEVEL` while a run is slow, `BAD_LEVEL` if it loses much time, with the cause as the label `culprit`.

    The cause is the slowest rank, else the rank that waits longest for data, else a rank with a throttled GPU, else the wait of all ranks
    for data. The result is absent during a standstill, and if the run is not in the state `running`.
    """
    all_wait = f'label_replace({ALL_WAIT_FOR_DATA}, "culprit", ", slowed by waiting for data", "", "")'
    ranks_with_text = (
        (f"bottomk(1, {SPEED_RATIO_BY_RANK_AND_NODE} < {SLOW_RATIO})", "slowed by rank $1"),
        (
            f"topk(1, {DATA_WAIT_RATIO_BY_RANK} > {MAX_DATA_WAIT_RATIO} unless on () {ALL_WAIT_FOR_DATA})",
            "slowed by the data of rank $1",
        ),
        (f"topk(1, {THROTTLED_GPU_ROWS})", "GPU of rank $1 throttled"),
    )
    texts = " or on () ".join(
        f'label_replace(label_join({rank}, "culprit", " on ", "rank", "instance"), "culprit", ", {text}", "culprit", "(.+)")'
        for rank, text in ranks_with_text
    )
    is_running = 'max(training_run_state{@run, state="running"}) == 1'
    zero_with_cause = f"0 * max by (culprit) ({texts} or on () {all_wait})"
    loses_much = f"max(run:training_verdict:urgency{{@run}}) == {Verdict.LOSES_MUCH_TIME.value}"
    level = f"({zero_with_cause} + {BAD_LEVEL} and on () {loses_much} or on () {zero_with_cause} + {WARNING_LEVEL})"
    return f"({level} and on () {is_running} unless on () {STANDSTILL_BY_STEP_AGE})"


def _missing_ranks() -> str:
    """Return PromQL for `WARNING_LEVEL` while ranks of a live run have ended, or are unknown, with their number as the label `missing`.

    Otherwise the value is 0, without the label.
    """
    missing = _count_as_label("missing", f"{MISSING_RANK_COUNT} > 0", "rank missing", "ranks missing")
    unknown = _count_as_label("missing", f"{UNKNOWN_RANK_COUNT} > 0", "rank unknown", "ranks unknown")
    return f"{WARNING_LEVEL} * ({missing} or on () {unknown}) and on () {LIVE_STATE} or on () vector(0)"


def _alerts() -> str:
    """Return PromQL for the level of the run's firing alerts, with the number of critical alerts, else of warnings, as the label `alerts`."""

    def alerts(severity: str, plural: str, level: int) -> str:
        """Return PromQL for *level* with the number of alerts of a severity as the label `alerts`; absent without such an alert."""
        alert_count_query = f'count(ALERTS{{alertstate="firing", severity="{severity}", @run}})'
        return f"{level} * {_count_as_label('alerts', alert_count_query, severity, plural)}"

    critical = alerts("critical", "critical", BAD_LEVEL)
    return f"{critical} or on () {alerts('warning', 'warnings', WARNING_LEVEL)} or on () vector(0)"


def _count_as_label(label: str, count: str, singular: str, plural: str) -> str:
    """Return PromQL for a series of value 1 with a count and a noun as a label, such as `, 2 warnings`; absent without a count."""
    with_plural = (
        f'label_replace(count_values("{label}", {count}), "{label}", ", $1 {plural}", "{label}", "(.+)")'
    )
    return f'label_replace({with_plural}, "{label}", ", 1 {singular}", "{label}", ", 1 {plural}")'


def _age_and_node() -> str:
    """Return PromQL for a series of value 0 with the age of the last sample and one node of the run as the labels `age` and `instance`."""

    def age(number: str, unit: str) -> str:
        """Return PromQL for a series of value 1 with the label `age`: `, no news for 90 s from `, before the name of the node."""
        return f'label_replace(count_values("age", {number}), "age", ", no news for $1 {unit} from ", "age", "(.+)")'

    seconds = age(f"{_SAMPLE_AGE_SECONDS} < 120", "s")
    minutes = age(f"floor({_SAMPLE_AGE_SECONDS} / 60) >= 2", "min")
    node = f"topk(1, group by (instance) (last_over_time(training_run_state{{@run}}[{LOOKBACK}])))"
    return f"0 * {node} * on () group_left (age) ({seconds} or on () {minutes})"
