"""Row *At a glance* of the dashboard *Run*: state, alerts, problems and losses, single numbers, and four graphs."""

from __future__ import annotations

from dashboards.alerts import CLOCK_TIME, firing_alerts
from dashboards.cost_and_loss import LOST_THRESHOLDS
from dashboards.losses_now import (
    CAUSE_TEXTS,
    COST_PER_HOUR_BY_RUN,
    LOST_SHARE_NOW_BY_CAUSE,
    MIN_DISPLAYED_SHARE,
    STOPPED_RUN_CAUSES,
    USUAL_COST_PER_HOUR_BY_RUN,
)
from dashboards.palette import (
    BAD,
    BLUE,
    GOOD,
    GREEN,
    NEUTRAL,
    ORANGE,
    PALE_BLUE,
    WARNING,
    Override,
    fixed_color,
    fixed_colors_by_name,
)
from dashboards.panels import (
    NO_THRESHOLDS,
    Panel,
    bad_from,
    dashboard_link,
    stat,
    threshold_steps,
    time_series,
    value_mappings,
    warn_below,
    warn_from,
)
from dashboards.queries import (
    COST_SO_FAR_BY_CURRENCY,
    ENDED_NORMALLY,
    GPU_UUID_BY_RANK,
    JOULES_SO_FAR,
    LIVE_STATE,
    MEAN_STEP_SECONDS,
    PROGRESS_AGE_SECONDS,
    STANDSTILL,
    STANDSTILL_BY_STEP_AGE,
    STEP_OVERDUE_IN_WORK,
    WALL_SECONDS,
    Query,
    blank_if_incomplete,
    event_counts,
    instant_query,
    named_values_query,
)
from dashboards.rank_problems import (
    ENDING_WITHOUT_FAILED_EXIT,
    LIVE_RANK_COUNT,
    LOOKBACK,
    MISSING_RANK_COUNT,
    SLOW_RATIO,
    SLOWEST_OR_EQUAL_RANKS,
    STATE_START,
    UNKNOWN_RANK_COUNT,
    VERY_SLOW_RATIO,
)
from dashboards.run_problems import (
    DATA_WAIT_WITH_RANK,
    events_in_range,
    problem_start,
    what_is_wrong,
)
from dashboards.run_state import BAD_LEVEL, STATE_LEGEND, WARNING_LEVEL, state_query
from dashboards.tables import ZERO_AS_DASH, Column, table
from dashboards.unsaved_work import work_at_risk_or_lost

RANKS_OF_RUN_LINK = dashboard_link("training-ranks", "Ranks", run="${run}")
GPUS_OF_RUN_LINK = dashboard_link("training-gpus", "GPUs of this run", run="${run}")
STEP_OVERDUE_SECONDS = f"({STEP_OVERDUE_IN_WORK} or on () vector(0))"
"""PromQL for the seconds since the last step while a step is overdue and the ledger still counts the time as work; otherwise 0."""
GOODPUT_IF_SAVED = (
    "clamp_min(1 - (max(sum by (instance) (training_badput_seconds_total{@run}))"
    f" + on () {STEP_OVERDUE_SECONDS}) / {WALL_SECONDS}, 0)"
)
"""PromQL for the share of the run's wall time without badput, if the work since the last checkpoint is saved."""
YOUNG_RUN_SECONDS = 3600
"""Wall time below which the start of a run, and not a fault, decides the goodput."""
_SINCE_YOUNG_START = "since the start, first hour"
"""Legend of the goodput of a young run."""
_RUN_HAS_ENDED = 'max(training_run_state{@run, state=~"finished|stopped|failed|lost"}) == 1'
"""PromQL with a value after the run has ended, for any reason."""
_LAST_KNOWN_PROGRESS_AGE = (
    f"(time() - max(last_over_time(training_last_progress_timestamp_seconds{{@run}}[{LOOKBACK}])))"
)
"""PromQL for the seconds from the last recorded step or validation batch until now, for a run without a current sample."""
_ENDED_NORMALLY_IN_LOOKBACK = (
    f'max(last_over_time(training_run_state{{@run, state=~"finished|stopped"}}[{LOOKBACK}])) == 1'
)
"""PromQL with a value if the run has finished or was stopped, by its last state within `LOOKBACK`."""
GPU_WATTS = f"(max by (uuid) (gpu_power_watts) and on (uuid) {GPU_UUID_BY_RANK})"
"""PromQL for the power of each GPU of the run in watts, by UUID."""


def overview_panels() -> tuple[Panel, ...]:
    """Return the panels of the row *At a glance*."""
    return (
        *_build_state_panels(),
        what_is_wrong(w=24, h=5),
        *_build_time_series_panels(),
        _build_loss_table(w=9, h=8),
        *_build_number_panels(),
        firing_alerts(
            "@run",
            (
                Column("instance", "Node", width=120),
                Column("rank", "Rank", width=80),
                Column("gpu", "GPU", width=80),
            ),
            w=24,
            h=5,
            unknown_if="absent(training_run_state{@run})",
            unknown_text="unknown: no sample",
        ),
    )


def _build_state_panels() -> tuple[Panel, ...]:
    """Return the panels about the state and the progress."""
    # Ranks are unknown and none is missing: the panel shows *unknown* without *missing*.
    only_unknown = f"{UNKNOWN_RANK_COUNT} > 0 unless on () {MISSING_RANK_COUNT} > 0"
    return (
        stat(
            "State",
            instant_query(state_query(), STATE_LEGEND),
            unit="none",
            text_mode="name",
            thresholds=threshold_steps((None, GOOD), (WARNING_LEVEL, WARNING), (BAD_LEVEL, BAD)),
            w=9,
            h=3,
        ),
        _build_start_panel(),
        stat(
            "Ranks",
            named_values_query(
                {
                    "alive": f"{LIVE_RANK_COUNT} or 0 * max(training_run_state{{@run}})",
                    "of": "max(training_world_size{@run})",
                    "missing": f"{MISSING_RANK_COUNT} unless on () ({only_unknown})"
                    f" unless on () ({ENDED_NORMALLY} or {ENDING_WITHOUT_FAILED_EXIT})",
                    "unknown": f"{UNKNOWN_RANK_COUNT} > 0 unless on () {ENDED_NORMALLY}",
                }
            ),
            colors_by_name={"missing": BAD, "unknown": WARNING},
            unit="none",
            text_mode="value_and_name",
            h=3,
        ),
        stat(
            "Last step",
            named_values_query(
                {
                    "at the last scrape": f"{PROGRESS_AGE_SECONDS} unless on () {ENDED_NORMALLY}",
                    "exporter silent": f"{_LAST_KNOWN_PROGRESS_AGE} unless on () {PROGRESS_AGE_SECONDS}"
                    f" unless on () {_ENDED_NORMALLY_IN_LOOKBACK}",
                }
            ),
            unit="s",
            decimals=0,
            text_mode="value_and_name",
            thresholds=warn_from(60, 300),
            w=3,
            h=3,
        ),
        stat(
            "Step",
            instant_query("max(training_step{@run})", "now"),
            instant_query("max(training_step_target{@run})", "of"),
            unit="locale",
            text_mode="value_and_name",
            w=4,
            h=3,
        ),
    )


def _build_start_panel() -> Panel:
    """Return the panel with the start of the problem that *State* names, else of the worst current problem.

    Without a problem or after the end of the run, the panel shows the start of the state. The name of the value says which start it is.
    """
    return stat(
        "Since",
        instant_query(
            f'label_replace(1000 * ({problem_start()}) unless on () {_RUN_HAS_ENDED}, "start", "problem", "", "")'
            f' or on () label_replace(1000 * {STATE_START}, "start", "state", "", "")',
            "{{start}}",
        ),
        unit=CLOCK_TIME,
        text_mode="value_and_name",
        overrides=[
            {
                "matcher": {"id": "byFrameRefID", "options": "A"},  # the only query
                "properties": [
                    {"id": "mappings", "value": value_mappings({0: ("before this range", NEUTRAL)})}
                ],
            }
        ],
        w=4,
        h=3,
    )


_CAUSE_OF_STOPPED_RUN = f"max by (cause) ({STOPPED_RUN_CAUSES})"
"""PromQL with the value 0 for a failed or an ending run, with the cause as on *Energy and cost*."""
_NOTHING_LOST = (
    f'label_replace(0 * max(run:training_live:info{{@run}}) and on () {LIVE_STATE}, "cause", "nothing", "", "")'
    f' or on () label_replace(0 * max(training_run_state{{@run}}) unless on () {LIVE_STATE}, "cause", "ended", "", "")'
    ' or on () label_replace(vector(0), "cause", "unknown", "", "")'
)
"""PromQL for a series of value 0, the only row of a run without a loss. Its label `cause` is one of

    nothing  the run is live and loses nothing
    ended    the run is not live
    unknown  no sample of the run, or no recorded series of a live run
"""


def _build_loss_table(w: int, h: int) -> Panel:
    """Return the table of what the run loses now, by cause, the largest loss first."""
    # From the overdue step on, because the rule of the losses is evaluated later.
    standstill = f'label_replace(0 * {STANDSTILL} + 1, "cause", "standstill", "", "")'
    share = (
        f"({standstill} or on () max by (cause) ({LOST_SHARE_NOW_BY_CAUSE}) > {MIN_DISPLAYED_SHARE} and on () {LIVE_STATE}"
        f" or on () {_CAUSE_OF_STOPPED_RUN} + 1)"
    )
    # The largest number of 15 minutes, so that a node whose exporter went down still counts, as in the cost, which is a slope.
    gpu_hours_per_hour = (
        f"({share}) * on () group_left () max(max_over_time(run:training_gpus:count{{@run}}[15m]))"
    )
    cost_per_hour = (
        f"({share}) * on () group_left (currency) sum by (currency) ({COST_PER_HOUR_BY_RUN})"
        f" or ({share}) * on () group_left (currency) sum by (currency) ({USUAL_COST_PER_HOUR_BY_RUN})"
        f" unless on () ({COST_PER_HOUR_BY_RUN})"
    )
    return table(
        "Losses now, by cause",
        Column("cause", "Cause", mappings=CAUSE_TEXTS),
        Column(
            f"{share} or on () {_NOTHING_LOST}",
            "of time",
            "percentunit",
            80,
            thresholds=LOST_THRESHOLDS,
            mappings=ZERO_AS_DASH,
            decimals=0,
        ),
        Column(gpu_hours_per_hour, "GPU h/h", decimals=2, width=75),
        Column(cost_per_hour, "Cost/h", decimals=2, width=75),
        Column("currency", "Unit", width=55),
        sort="of time",
        w=w,
        h=h,
    )


def _build_number_panels() -> tuple[Panel, ...]:
    """Return the panels with single numbers about speed, failures, goodput and cost."""
    young_condition = f"{WALL_SECONDS} < {YOUNG_RUN_SECONDS}"
    return (
        stat(
            "Slowest rank",
            instant_query(SLOWEST_OR_EQUAL_RANKS, "{{who}}"),
            unit="percentunit",
            decimals=0,
            text_mode="value_and_name",
            thresholds=warn_below(SLOW_RATIO, VERY_SLOW_RATIO),
            w=4,
        ),
        stat(
            "Waiting for data, last 2 min",
            instant_query(f"{DATA_WAIT_WITH_RANK} and on () {LIVE_STATE}", "{{whose}}"),
            unit="percentunit",
            decimals=0,
            text_mode="value_and_name",
            thresholds=warn_from(0.1, 0.2),
            w=5,
        ),
        work_at_risk_or_lost(),
        stat(
            "Failures",
            instant_query(
                _count_events('training_checkpoints_total{@run, result="failed"}', "kind"), "saves"
            ),
            instant_query(_count_events("training_restarts_total{@run}", "reason"), "restarts"),
            instant_query(_count_events('training_nonfinite_total{@run, kind="loss"}', "value"), "NaN loss"),
            instant_query(_count_events('training_nonfinite_total{@run, kind="grad"}', "value"), "NaN grad"),
            unit="none",
            decimals=0,
            text_mode="value_and_name",
            thresholds=bad_from(1),
            w=4,
        ),
        stat(
            "Time left",
            instant_query(
                f"max(run:training_eta:seconds{{@run}}) and on () {LIVE_STATE} unless on () {STANDSTILL_BY_STEP_AGE}"
            ),
            unit="dthms",
            w=3,
        ),
        stat(
            "Goodput if work is saved",
            instant_query(
                _add_note(GOODPUT_IF_SAVED, young_condition, _SINCE_YOUNG_START, "since the start"),
                "{{note}}",
            ),
            unit="percentunit",
            decimals=1,
            text_mode="value_and_name",
            thresholds=warn_below(0.9, 0.7),
            overrides=[
                {
                    "matcher": {"id": "byName", "options": _SINCE_YOUNG_START},
                    "properties": [{"id": "thresholds", "value": NO_THRESHOLDS}],
                },
            ],
            w=5,
        ),
        stat(
            "Cost so far",
            instant_query(COST_SO_FAR_BY_CURRENCY, "{{currency}}"),
            instant_query(f"{JOULES_SO_FAR} / 3.6e6", "kWh"),
            unit="none",
            decimals=2,
            text_mode="value_and_name",
            w=3,
        ),
    )


def _add_note(expression: str, condition: str, if_true: str, if_false: str) -> str:
    """Return PromQL that adds the label `note`: *if_true* if the condition has a value, otherwise *if_false*."""
    with_note = f'label_replace({expression} and on () {condition}, "note", "{if_true}", "", "")'
    return f'{with_note} or on () label_replace({expression}, "note", "{if_false}", "", "")'


def _count_events(counter: str, by: str) -> str:
    """Return PromQL for the number of events in the time range; 0 if the counter does not exist: the run had no such event.

    The arguments are those of `events_in_range`.
    """
    return f"{events_in_range(counter, by)} or 0 * {WALL_SECONDS}"


_VALIDATION_STEPS = event_counts(
    'training_steps_total{@run, mode!="train"}', "mode", starts_at_first_event=True
)
_WHILE_STEPS_FINISH = "and on () time() - max(training_last_progress_timestamp_seconds{@run}) < 60"
"""Condition that ends a line a minute after the last step or validation batch."""


def _smoothed_rate(counter: str) -> str:
    """Return PromQL for the rate of a counter of the run, summed over the ranks and averaged over a further minute.

    A rate over four scrapes contains the same save or validation in one value and not in the next.
    """
    return f'avg_over_time((sum(rate({counter}{{@run, mode="train"}}[$__rate_interval])))[1m:15s])'


def _build_time_series_panels() -> tuple[Panel, ...]:
    """Return the panels with graphs of the loss, the step time, the throughput and the GPUs."""
    # B is the second query of the panel *Loss*: 1 in an interval with values that are NaN or infinite, drawn as a bar of full height.
    nonfinite_bars: list[Override] = [
        {
            "matcher": {"id": "byFrameRefID", "options": "B"},
            "properties": [
                {"id": "color", "value": fixed_color(BAD)},
                {"id": "custom.drawStyle", "value": "bars"},
                {"id": "custom.fillOpacity", "value": 35},
                {"id": "custom.lineWidth", "value": 0},
                {"id": "custom.axisPlacement", "value": "hidden"},
                {"id": "unit", "value": "bool"},
                {"id": "min", "value": 0},
                {"id": "max", "value": 1},
            ],
        }
    ]
    # C is the third query.
    validation_points: list[Override] = [
        {
            "matcher": {"id": "byFrameRefID", "options": "C"},
            "properties": [
                {"id": "custom.drawStyle", "value": "points"},
                {"id": "custom.pointSize", "value": 7},
                {"id": "custom.showPoints", "value": "always"},
            ],
        }
    ]
    return (
        time_series(
            "Loss",
            # Without a value from a minute after the last step: a flat line would look like steps.
            Query(f'max by (mode) (training_loss{{@run, mode="train"}}) {_WHILE_STEPS_FINISH}', "{{mode}}"),
            Query(
                f"max by (kind, value) ({event_counts('training_nonfinite_total{@run}', 'kind, value', starts_at_first_event=True)}) > bool 0 == 1",
                "{{kind}} was {{value}}",
            ),
            # The exporter reports the last loss until the process ends. A point is drawn only where the run validates.
            Query(
                f'max by (mode) (training_loss{{@run, mode!="train"}}) and on (mode) {_VALIDATION_STEPS} > 0',
                "{{mode}}",
            ),
            unit="none",
            minimum=None,
            overrides=[
                *fixed_colors_by_name({"train": BLUE, "validation": ORANGE, "test": GREEN}),
                *nonfinite_bars,
                *validation_points,
            ],
            w=6,
            h=8,
        ),
        time_series(
            "Step time",
            Query(MEAN_STEP_SECONDS, "mean", BLUE),
            # The offset follows each range of the expression.
            Query(MEAN_STEP_SECONDS.replace("]", "] offset 1h"), "one hour earlier", reference=True),
            Query(
                f"max(training_step_longest_seconds{{@run}}) {_WHILE_STEPS_FINISH}",
                "longest of the last 100",
                PALE_BLUE,
            ),
            unit="s",
            w=6,
            log_base=2,  # a rise by half is visible beside a save that lasts ten times a step
            links=(RANKS_OF_RUN_LINK,),
        ),
        time_series(
            "Throughput",
            Query(
                blank_if_incomplete(_smoothed_rate("training_tokens_total")),
                "tokens",
                BLUE,
            ),
            # Without the samples if the run counts tokens: the two curves would have the same shape.
            Query(
                f"{blank_if_incomplete(_smoothed_rate('training_samples_total'))}"
                ' unless on () max(last_over_time(training_tokens_total{@run, mode="train"}[$__range]))',
                "samples",
                ORANGE,
            ),
            unit="si:tokens/s",
            overrides=[
                {
                    "matcher": {"id": "byName", "options": "samples"},
                    "properties": [{"id": "unit", "value": "si:samples/s"}],
                }
            ],
            w=6,
        ),
        time_series(
            "GPUs of the run",
            Query(
                f"avg(max by (uuid) (gpu_sm_activity_ratio) and on (uuid) {GPU_UUID_BY_RANK})",
                "SM activity",
                BLUE,
            ),
            Query(
                blank_if_incomplete(
                    f"sum({GPU_WATTS}) unless on () (count({GPU_WATTS}) < max_over_time(count(group by (uuid) ({GPU_UUID_BY_RANK}))[35s:15s]))"
                ),
                "power (right)",
                ORANGE,
                right_axis=True,
            ),
            unit="percentunit",
            maximum=1,
            w=6,
            links=(GPUS_OF_RUN_LINK,),
            overrides=[
                {
                    "matcher": {"id": "byName", "options": "power (right)"},
                    "properties": [
                        {"id": "unit", "value": "watt"},
                        {"id": "custom.axisSoftMax", "value": 100},
                    ],
                }
            ],
        ),
    )
