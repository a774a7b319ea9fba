"""Panel *Work at risk or lost* of the dashboard *Run*: duration and cost of the work since the last checkpoint."""

from __future__ import annotations

from dashboards.losses_now import COST_PER_HOUR_BY_RUN, USUAL_COST_PER_HOUR_BY_RUN
from dashboards.palette import BAD
from dashboards.panels import Panel, bad_from, stat, threshold_steps, warn_from
from dashboards.queries import LIVE_STATE, instant_query

OVERDUE_INTERVALS = 3
"""Multiple of the usual time between checkpoints above which a save is overdue: the default of the alert TrainingCheckpointOverdue."""
_UNCOMMITTED_SECONDS = "max(training_uncommitted_seconds{@run})"
"""PromQL for the seconds of work since the last checkpoint that the exporter reports."""
_SECONDS_WITHOUT_STEP = (
    "max(last_over_time((timestamp(training_last_progress_timestamp_seconds{@run})"
    " - training_last_progress_timestamp_seconds{@run})[35s:5s]))"
)
"""PromQL for the seconds from the last step to the last scrape, of the rank with the oldest step.

The subquery of 35 s keeps the value over a single missed scrape.
"""
UNSAVED_SECONDS = (
    f"(round(clamp_min({_UNCOMMITTED_SECONDS} - ({_SECONDS_WITHOUT_STEP} and on () max(run:training_step_overdue:seconds{{@run}}) > 0), 0)"
    f" or on () {_UNCOMMITTED_SECONDS}))"
)
"""PromQL for the seconds of unsaved work, without labels.

The time since the last step is subtracted while a step is overdue: until the exporter decides that the run hangs,
`training_uncommitted_seconds` includes this time as work.
"""
_RUN_DIED = 'max(training_run_state{@run, state=~"failed|lost"}) == 1'
_SAVE_IS_OVERDUE = (
    f"{UNSAVED_SECONDS} > {OVERDUE_INTERVALS} * max(training_checkpoint_interval_seconds{{@run}})"
)
_NONFINITE_START_TIME = "max(run:training_nonfinite_start:timestamp_seconds{@run})"
"""PromQL for the time of the first NaN or infinite loss in Unix seconds. The rule drops it 15 minutes after the last such loss."""
_CHECKPOINT_TIME_BEFORE_NONFINITE = (
    "max_over_time((max(training_checkpoint_last_success_timestamp_seconds{@run})"
    ' unless on () max(training_nonfinite_total{@run, kind="loss"}) > 0)[$__range:$__interval])'
)
"""PromQL for the time of the last checkpoint before the first NaN or infinite loss, in Unix seconds.

The subquery reads the time of the last checkpoint at each point of the time range. `unless` drops the points after the first such loss.
"""
_SECONDS_SINCE_FINITE_CHECKPOINT = (
    f"(time() - ({_CHECKPOINT_TIME_BEFORE_NONFINITE} or on () {_NONFINITE_START_TIME})"
    f" and on () {_NONFINITE_START_TIME} and on () {LIVE_STATE})"
)
"""PromQL for the seconds since the last checkpoint before the first NaN or infinite loss of a live run: later checkpoints contain the loss.

Without such a checkpoint in the time range, the seconds since the first such loss. The result is absent from 15 minutes after the last such
loss, and for a run without one.
"""
_SECONDS_AT_RISK = f"({_SECONDS_SINCE_FINITE_CHECKPOINT} > {UNSAVED_SECONDS} or on () {UNSAVED_SECONDS})"
"""PromQL for the larger of the seconds since the last finite checkpoint and the seconds of unsaved work."""
_SINCE_FINITE_SAVE, _OVERDUE = "since the save before NaN", "unsaved, save overdue"
_NOTES = {
    _SINCE_FINITE_SAVE: f"{_SECONDS_SINCE_FINITE_CHECKPOINT} > {UNSAVED_SECONDS}",
    "lost": _RUN_DIED,
    _OVERDUE: _SAVE_IS_OVERDUE,
    "unsaved": UNSAVED_SECONDS,
}
"""PromQL conditions by note. The panel shows the note of the first condition with a value."""


_HAS_FINISHED = 'max(training_run_state{@run, state="finished"}) == 1'
_LAST_SAVED_STEP = "max(training_checkpoint_last_step{@run})"
_UNSAVED_STEPS_BY_NOTE = {
    "steps after the last save": f"max(training_step{{@run}}) - {_LAST_SAVED_STEP} > 0 and on () {_HAS_FINISHED}",
    "steps, no save reported": f"max(training_attempt_steps{{@run}}) > 0 and on () {_HAS_FINISHED} unless on () {_LAST_SAVED_STEP}",
}
"""PromQL by note for the number of steps of a finished run that no reported checkpoint contains, if there are any.

The exporter counts the work of a finished run as saved, although the job may not have saved its last steps.
"""


def work_at_risk_or_lost() -> Panel:
    """Return the panel with the work that a crash would lose, or that the failure of the run has lost: its duration and its cost.

    For a finished run, the panel shows the number of steps that no reported checkpoint contains instead, if there are any.
    """
    seconds = " or on () ".join(
        f'label_replace({_SECONDS_AT_RISK} and on () {condition}, "note", "{note}", "", "")'
        for note, condition in _NOTES.items()
    )
    steps = " or on () ".join(
        f'label_replace({steps_of_note}, "note", "{note}", "", "")'
        for note, steps_of_note in _UNSAVED_STEPS_BY_NOTE.items()
    )
    cost_per_hour = (
        f"(sum by (currency) ({COST_PER_HOUR_BY_RUN}) or sum by (currency) ({USUAL_COST_PER_HOUR_BY_RUN}))"
    )
    return stat(
        "Work at risk or lost",
        instant_query(f"{steps} or on () {seconds}", "{{note}}"),
        instant_query(
            f"{_SECONDS_AT_RISK} * on () group_right () {cost_per_hour} / 3600 unless on () ({steps})",
            "{{currency}}",
        ),
        unit="none",
        decimals=2,
        text_mode="value_and_name",
        overrides=[
            {
                # All notes of `_NOTES`.
                "matcher": {"id": "byRegexp", "options": "/^(unsaved|lost|since)/"},
                "properties": [{"id": "unit", "value": "s"}, {"id": "decimals", "value": 0}],
            },
            {
                "matcher": {
                    "id": "byRegexp",
                    "options": f"/^({_OVERDUE}|{_SINCE_FINITE_SAVE})$/",
                },
                "properties": [{"id": "thresholds", "value": threshold_steps((None, BAD))}],
            },
            {
                "matcher": {"id": "byName", "options": "lost"},
                "properties": [{"id": "thresholds", "value": bad_from(1)}],
            },
            *(
                {
                    "matcher": {"id": "byName", "options": note},
                    "properties": [
                        {"id": "decimals", "value": 0},
                        {"id": "thresholds", "value": warn_from(1)},
                    ],
                }
                for note in _UNSAVED_STEPS_BY_NOTE
            ),
        ],
        w=6,
    )
