"""First row of the dashboard *Ranks*: live ranks, the slowest rank, lost time, waits for data, hangs, problems and nodes of the run."""

from __future__ import annotations

from dashboards.alerts import CLOCK_TIME, CLOCK_TIME_WIDTH
from dashboards.palette import (
    BAD,
    NEUTRAL,
    WARNING,
)
from dashboards.panels import (
    NO_THRESHOLDS,
    Panel,
    bad_from,
    stat,
    threshold_steps,
    warn_from,
)
from dashboards.queries import (
    COST_PER_HOUR_BY_CURRENCY,
    ENDED_NORMALLY,
    HANG_LABELS,
    HANGING_RANKS,
    ODD_GROUP_SIZE,
    SPEED_RATIO_BY_RANK_AND_NODE,
    STANDSTILL,
    STANDSTILL_BY_STEP_AGE,
    instant_query,
)
from dashboards.rank_problems import (
    LAST_SAMPLE_TIME_BY_NODE,
    LOST_GPU_ROWS,
    ODD_PHASE,
    ODD_RANK,
    SLOW_RATIO,
    SLOWEST_OR_EQUAL_RANKS,
    STANDSTILL_START,
    UP_BY_RANK,
    VERY_SLOW_RATIO,
)
from dashboards.run_problems import DATA_WAIT_WITH_RANK, GPUS_OF_ROW_LINK, NODE_OF_ROW_LINK, what_is_wrong
from dashboards.straggler import lost_time_panel
from dashboards.tables import (
    NO_SAMPLE_OF_RUN,
    STANDSTILL_WITHOUT_STACKS,
    ZERO_AS_DASH,
    Column,
    percent_column,
    placeholder_row,
    table,
)


def overview_panels() -> tuple[Panel, ...]:
    """Return the panels of the row *At a glance*."""
    return (
        stat(
            "Ranks alive",
            instant_query(f"sum({UP_BY_RANK})", "alive"),
            instant_query("max(training_world_size{@run})", "of"),
            instant_query(_query_ended_rank_count(), "{{end}}"),
            instant_query(
                f"clamp_min(max(training_world_size{{@run}}) - (count({UP_BY_RANK}) or vector(0)), 0)"
                f" unless on () ({ENDED_NORMALLY})",
                "unknown",
                WARNING,
            ),
            unit="none",
            text_mode="value_and_name",
            overrides=[
                {
                    "matcher": {"id": "byName", "options": "ended"},
                    "properties": [{"id": "thresholds", "value": bad_from(1)}],
                }
            ],
            w=6,
        ),
        stat(
            "Slowest rank",
            instant_query(SLOWEST_OR_EQUAL_RANKS, "{{who}}"),
            unit="percentunit",
            decimals=0,
            text_mode="value_and_name",
            thresholds=threshold_steps((None, BAD), (VERY_SLOW_RATIO, WARNING), (SLOW_RATIO, NEUTRAL)),
            w=4,
        ),
        lost_time_panel(),
        stat(
            "Waiting for data, last 2 min",
            instant_query(f"{DATA_WAIT_WITH_RANK} unless on () {STANDSTILL_BY_STEP_AGE}", "{{whose}}"),
            instant_query(
                # The loss of *Run*, which is absent during a standstill: the complete cost is then part of the panel
                # *Lost: slowest rank or no step*.
                f"{COST_PER_HOUR_BY_CURRENCY} * on () group_left ()"
                f' max(run:training_lost:ratio{{@run, cause="data_stall"}}) unless on () {STANDSTILL}',
                "{{currency}}/h",
            ),
            unit="percentunit",
            decimals=0,
            text_mode="value_and_name",
            thresholds=warn_from(0.1, 0.2),
            overrides=[
                {
                    "matcher": {"id": "byFrameRefID", "options": "B"},  # the second query, the cost
                    "properties": [
                        {"id": "unit", "value": "none"},
                        {"id": "decimals", "value": 2},
                        {"id": "thresholds", "value": NO_THRESHOLDS},
                    ],
                }
            ],
            w=5,
        ),
        stat(
            "Cause of the hang",
            instant_query(_query_hang_cause(), "{{cause_text}} {{function}} {{location}} {{instance}}"),
            unit="none",
            text_mode="name",
            thresholds=threshold_steps((None, NEUTRAL), (1, BAD)),
            w=4,
        ),
        what_is_wrong(w=24, h=5),
    )


def _query_ended_rank_count() -> str:
    """Return PromQL for the number of ranks that have a sample and no process, in one series.

    The label `end` is `finished` after the normal end of the run, otherwise `ended`. Without a sample of any rank, the result is absent.
    """
    ended = f"(count({UP_BY_RANK} == 0) or 0 * max(training_process_up{{@run}}))"
    finished = f'label_replace({ended} and on () ({ENDED_NORMALLY}), "end", "finished", "", "")'
    return f'{finished} or on () label_replace({ended}, "end", "ended", "", "")'


def _query_hang_cause() -> str:
    """Return PromQL for one series whose label `cause_text` names the cause of a standstill.

    The value is 1 during a standstill, otherwise 0. A hang also has the labels of the position, `HANG_LABELS`; an odd phase has the label
    `function` with the text `phase NAME`. The label `cause_text` names the first of these causes that applies:

    1. the rank with a lost GPU,
    2. the odd rank or the odd group of a hang; the text is *no odd rank* if there is neither,
    3. the only rank in another phase than all other ranks,
    4. a standstill without a named rank.

    Without a standstill, the text is *no rank hangs*; without a sample of the run, `NO_SAMPLE_OF_RUN`.
    """

    def with_cause_text(expression: str, text: str, label: str = "") -> str:
        """Return PromQL that adds the label `cause_text` to the series. In *text*, `$1` is the value of *label*."""
        return f'label_replace({expression}, "cause_text", "{text}", "{label}", "{"(.+)" if label else ""}")'

    lost_gpu = f'label_join(topk(1, {LOST_GPU_ROWS}), "cause_text", ": ", "rank", "problem") and on () {STANDSTILL_START}'
    ranks_at_position = f"count by ({HANG_LABELS}) ({HANGING_RANKS})"
    hang = " or ".join(
        (
            with_cause_text(f"{ODD_RANK} * 0 + 1", "rank $1:", "rank"),
            with_cause_text(f"max by ({HANG_LABELS}) ({ODD_GROUP_SIZE} > 1) * 0 + 1", "several ranks:"),
            with_cause_text(
                f"topk(1, {ranks_at_position}) * 0 + 1 unless on () {ODD_GROUP_SIZE}", "no odd rank:"
            ),
        )
    )
    with_phase = f'label_replace(({hang}), "in_phase", ", phase $1", "phase", "(.+)")'
    hang_with_phase = f'label_join({with_phase}, "location", "", "location", "in_phase")'
    lost_gpu_or_hang = (
        f"{with_cause_text(f'({lost_gpu}) * 0 + 1', 'rank $1', 'cause_text')} or on () {hang_with_phase}"
    )
    odd_phase = f'label_replace({with_cause_text(ODD_PHASE, "rank $1:", "rank")}, "function", "phase $1", "phase", "(.+)")'
    standstill_without_stacks = with_cause_text(f"0 * ({STANDSTILL_START}) + 1", STANDSTILL_WITHOUT_STACKS)
    no_hang = with_cause_text("0 * max(training_run_state{@run})", "no rank hangs")
    return f"{lost_gpu_or_hang} or on () {odd_phase} or on () {standstill_without_stacks} or on () {no_hang} or on () {with_cause_text('vector(0)', NO_SAMPLE_OF_RUN)}"


def hanging_ranks(w: int = 24, h: int = 5) -> Panel:
    """Return a table with the position in the code of each hanging rank, the positions with the fewest ranks first.

    The ranks at these positions are likely to hold up the other ranks. Without a position, the table has a single row with the reason: no
    stack has been reported yet, no rank hangs, or the run has no sample.
    """
    ranks_at_position = f"count by ({HANG_LABELS}) ({HANGING_RANKS})"
    no_hang_found = placeholder_row(
        "training_hang_info{@run}",
        "function",
        "no rank hangs",
        unknown_if="absent(training_run_state{@run})",
        unknown_text=NO_SAMPLE_OF_RUN,
    )
    standstill_without_stacks = f"0 * {STANDSTILL} unless on () training_hang_info{{@run}}"
    no_hang = f'(label_replace({standstill_without_stacks}, "function", "{STANDSTILL_WITHOUT_STACKS}", "", "") or on () {no_hang_found})'
    return table(
        "Where hanging ranks wait",
        Column("rank", "Rank", width=70),
        Column("instance", "Node", width=100),
        Column("function", "Function"),
        Column("location", "Line"),
        Column("phase", "Phase", width=110),
        Column(
            f"1000 * ({HANGING_RANKS}) * on (instance, rank) group_left ()"
            f" max by (instance, rank) (training_phase_active_since_timestamp_seconds{{@run}}) or {no_hang}",
            "Since",
            unit=CLOCK_TIME,
            width=CLOCK_TIME_WIDTH,
            mappings=ZERO_AS_DASH,
        ),
        Column(
            f"({HANGING_RANKS}) * on ({HANG_LABELS}) group_left () {ranks_at_position} or {no_hang}",
            "Ranks here",
            decimals=0,
            width=100,
            mappings=ZERO_AS_DASH,
        ),
        Column(
            f'({HANGING_RANKS}) * on (instance, rank) group_left () max by (instance, rank) (training_collective_sequence{{@run, group="default"}})'
            f" or {no_hang}",
            "Collectives",
            decimals=0,
            width=105,
            mappings=ZERO_AS_DASH,
        ),
        row_query=f"{HANGING_RANKS} or {no_hang}",
        sort="Ranks here",
        descending=False,
        w=w,
        h=h,
    )


def node_table(w: int, h: int) -> Panel:
    """Return the table of the nodes of the run: first the node with the most ended ranks, then with the most unknown ranks.

    A rank that is not alive on any node counts on each node on which it had a sample in the time range.
    """
    live_ranks = "group by (instance, rank) (training_process_up{@run} == 1)"
    # A rank that has moved to another node does not count on its former node.
    expected_ranks = (
        f"group by (instance, rank) (last_over_time(training_process_up{{@run}}[$__range]))"
        f" unless on (rank) group by (rank) ({live_ranks}) or {live_ranks}"
    )
    expected = f"count by (instance) ({expected_ranks})"
    alive = f"(count by (instance) ({live_ranks}) or on (instance) 0 * {expected})"
    exporters = "group by (instance) (exporter_build_info{@cluster})"
    panel = table(
        "Nodes of the run",
        Column("instance", "Node", links=(GPUS_OF_ROW_LINK, NODE_OF_ROW_LINK)),
        Column(expected, "Ranks", decimals=0, width=70),
        Column(f"{alive} and on (instance) {exporters}", "Alive", decimals=0, width=66),
        Column(
            f"({expected} - on (instance) {alive}) and on (instance) {exporters} unless on () ({ENDED_NORMALLY})"
            f" or on (instance) 0 * {expected}",
            "Ended",
            decimals=0,
            width=75,
            thresholds=bad_from(1),
            mappings=ZERO_AS_DASH,
        ),
        Column(
            f"{expected} unless on (instance) {exporters} unless on () ({ENDED_NORMALLY}) or on (instance) 0 * {expected}",
            "Unknown",
            decimals=0,
            width=90,
            thresholds=warn_from(1),
            mappings=ZERO_AS_DASH,
        ),
        Column(f"1000 * {LAST_SAMPLE_TIME_BY_NODE}", "Last sample", unit=CLOCK_TIME, width=CLOCK_TIME_WIDTH),
        percent_column(
            f"min by (instance) ({SPEED_RATIO_BY_RANK_AND_NODE} and on (instance, rank) {live_ranks}) unless on () {STANDSTILL_BY_STEP_AGE}",
            "Slowest rank",
            125,
            # The first color is that of an absent value.
            threshold_steps((None, NEUTRAL), (0, BAD), (VERY_SLOW_RATIO, WARNING), (SLOW_RATIO, NEUTRAL)),
        ),
        sort="Ended",
        w=w,
        h=h,
    )
    panel.body["options"]["sortBy"] += [
        {"displayName": "Unknown", "desc": True},
        {"displayName": "Slowest rank", "desc": False},
    ]
    return panel
