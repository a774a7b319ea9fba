"""Dashboard *Ranks*: stragglers, hangs and ended ranks of a run with up to a thousand ranks."""

from __future__ import annotations

import enum

from dashboards.alerts import CLOCK_TIME, CLOCK_TIME_WIDTH
from dashboards.board import (
    ALERTS_OF_RUN,
    ATTEMPTS,
    CHECKPOINTS,
    ORDER_OF_QUERY,
    SINGLE_RUN,
    Board,
    Row,
    Variable,
)
from dashboards.gpu_problems import THROTTLED_RATIO_FAMILY
from dashboards.palette import (
    BAD,
    BLUE,
    BROWN,
    GREEN,
    NEUTRAL,
    ORANGE,
    PHASE_COLORS,
    PURPLE,
    SILVER,
    VERMILION,
    WARNING,
)
from dashboards.panels import (
    NO_VALUE,
    Panel,
    heatmap,
    threshold_steps,
    time_series,
    value_mappings,
    warn_from,
)
from dashboards.queries import (
    COMPUTE_SECONDS_BY_RANK_AND_NODE,
    ENDED_NORMALLY,
    GPU_INDEX_BY_RANK,
    REPORTING_RANKS,
    SAVE_PHASES,
    SPEED_RATIO_BY_RANK_AND_NODE,
    STANDSTILL_BY_STEP_AGE,
    WORK_PHASES,
    Query,
    gpu_values_by_rank,
)
from dashboards.rank_problems import (
    ENDED_FIRST,
    FEED_AGE_SECONDS,
    LONG_PHASE_START,
    LONG_PHASES,
    LOOKBACK,
    LOST_GPU_ROWS,
    LOST_GPU_STARTS,
    MAX_DATA_WAIT_RATIO,
    ODD_PHASE,
    ODD_RANK,
    SILENT_SECONDS,
    SLOW_RATIO,
    UNKNOWN_RANKS,
    VERY_SLOW_RATIO,
)
from dashboards.ranks_overview import hanging_ranks, node_table, overview_panels
from dashboards.run_problems import (
    ALL_WAIT_FOR_DATA,
    DATA_WAIT_RATIO_BY_RANK,
    GPUS_OF_ROW_LINK,
    NODE_OF_ROW_LINK,
)
from dashboards.tables import Column, percent_column, table

UID = "training-ranks"
_UNLESS_STANDSTILL = f"unless on () {STANDSTILL_BY_STEP_AGE}"
"""Condition that no step is overdue and the run is neither stalled nor hung.

It is needed because the exporters still report the compute times of the last steps during a hang.
"""
_IF_ALIVE = "and on (instance, rank) training_process_up{@run} == 1"
"""Condition that the process of a rank is alive. It is needed because the recorded speed remains for half a minute after the end of a process."""
_RECORDED_STANDSTILL = "max(run:training_standstill:info{@run})"
"""PromQL with a value while no step finishes, for subqueries: a recorded series costs less than `STANDSTILL_BY_STEP_AGE` at each point."""
SAMPLED_COMPUTE_SECONDS = f"max by (rank) (training_rank_compute_seconds{{@run}} > 0) {_UNLESS_STANDSTILL}"
"""PromQL for the seconds that each rank computes in a step, from the exporters instead of the rules, by rank.

The result is absent while no step finishes.
"""
LOST_GPU_SORT_VALUE = 2e6
"""Sort value of a rank with a lost GPU."""
STOPPING_RANK_SORT_VALUE = 1e6
"""Sort value of any other rank that stops the run. It is larger than the slowness of any rank."""
_RANKS_WORST_FIRST = (
    f"query_result(sort_desc(max by (rank) (0 * ({LOST_GPU_ROWS}) + {LOST_GPU_SORT_VALUE})"
    f" or max by (rank) (0 * ({ODD_RANK}) + {STOPPING_RANK_SORT_VALUE}) or max by (rank) (0 * {ODD_PHASE} + {STOPPING_RANK_SORT_VALUE})"
    f" or max by (rank) (0 * {ENDED_FIRST} + {STOPPING_RANK_SORT_VALUE})"
    f" or 1 / min by (rank) ({SPEED_RATIO_BY_RANK_AND_NODE}) or 0 * max by (rank) (training_rank_info{{@run}})))"
).replace("$__interval", "1m")
"""Query of all ranks of the run, in the order of the variable: the largest value first.

The value of a rank that stops the run is one of the sort values above. The value of any other rank is its slowness, 1 / speed, or 0 without
a speed. Grafana replaces `$__interval` in panels but not in variables, so a fixed interval stands in for it.
"""
RANK_VARIABLE = Variable(
    "rank",
    "Rank",
    _RANKS_WORST_FIRST,
    include_all=False,
    regex='/rank="([^"]+)"/',
    sort=ORDER_OF_QUERY,
    description="Ranks in the row of selected ranks; first the rank with a lost GPU, the rank that causes a hang, the rank that ended first, or the slowest rank.",
)
# Rows of the table *All ranks, the worst first*, in three steps: the GPUs of the ranks; then also the ranks without a known GPU; then the
# label `phase` for the ranks in a long phase.
_GPUS_OF_RANKS = (
    f"max by (instance, rank, gpu) (topk by (instance, rank) (1, {LOST_GPU_STARTS}))"
    f" or on (instance, rank) max by (instance, rank, gpu) ({GPU_INDEX_BY_RANK})"
    f" or on (instance, rank) max by (instance, rank, gpu) (last_over_time(rank:training_gpu:info{{@run}}[{LOOKBACK}]))"
    f" and on (instance, rank) (training_process_up{{@run}} or {UNKNOWN_RANKS})"
)
"""PromQL for the GPUs of each rank, by node, rank and GPU index: the lost GPU, else the current GPUs, else the last known GPUs."""
_RANKS_WITH_OR_WITHOUT_GPU = (
    f"({_GPUS_OF_RANKS} or on (instance, rank) max by (instance, rank) (training_process_up{{@run}})"
    f" or on (instance, rank) {UNKNOWN_RANKS})"
)
"""PromQL for all ranks of the table, by node, rank and, if known, GPU index. An unknown rank has the node on which it last lived."""
_RANK_ROWS = (
    f"(0 * {_RANKS_WITH_OR_WITHOUT_GPU} + on (instance, rank) group_left (phase) {LONG_PHASES}"
    f" or on (instance, rank) {_RANKS_WITH_OR_WITHOUT_GPU})"
)
"""PromQL for the same ranks, with the phase as the label `phase` if the rank has been in it for more than `SILENT_SECONDS`."""


class Severity(enum.IntEnum):
    """Severity of the state of a rank in the table of all ranks, which shows the largest first."""

    GPU_LOST = 6
    HOLDS_UP = 5  # all other ranks wait for this rank
    ENDED = 4  # the process ended before the end of the run
    UNKNOWN = 3  # no sample, because the exporter of the node is down or not scraped
    SLOW = 2  # below `SLOW_RATIO` of the fastest rank of the pipeline stage
    WAITS = 1  # waits for data, and not all ranks do
    NONE = 0


_SEVERITY_TEXTS = value_mappings(
    {
        Severity.GPU_LOST.value: ("GPU lost", BAD),
        Severity.HOLDS_UP.value: ("holds up", BAD),
        Severity.ENDED.value: ("ended", BAD),
        Severity.UNKNOWN.value: ("unknown", WARNING),
        Severity.SLOW.value: ("slow", WARNING),
        Severity.WAITS.value: ("waits for data", WARNING),
        Severity.NONE.value: (NO_VALUE, NEUTRAL),
    }
)
MAX_RANK_DIGITS = 5
"""Number of digits to which `sorted_by_rank` pads ranks, enough for 99,999 ranks."""
_RANKS_BY_SEVERITY = {
    Severity.GPU_LOST: LOST_GPU_ROWS,
    Severity.HOLDS_UP: f"({ODD_RANK} or {ODD_PHASE})",
    Severity.ENDED: f"(max by (instance, rank) (training_process_up{{@run}}) == 0 unless on () {ENDED_NORMALLY})",
    Severity.UNKNOWN: UNKNOWN_RANKS,
    Severity.SLOW: f"({SPEED_RATIO_BY_RANK_AND_NODE} < {SLOW_RATIO} {_UNLESS_STANDSTILL})",
    Severity.WAITS: f"({DATA_WAIT_RATIO_BY_RANK} > {MAX_DATA_WAIT_RATIO} unless on () {ALL_WAIT_FOR_DATA})",
    Severity.NONE: "training_process_up{@run}",
}
"""PromQL with a value for each rank in a state, by severity."""
_SEVERITY_BY_RANK = " or on (instance, rank) ".join(
    f"max by (instance, rank) (0 * {ranks} + {severity.value})"
    for severity, ranks in _RANKS_BY_SEVERITY.items()
)
"""PromQL for the most severe state of each rank, as a number of `Severity`."""


def board() -> Board:
    """Return the dashboard of the ranks of a run."""
    return Board(
        uid=UID,
        title="Training / Ranks",
        description="Slow, silent and ended ranks, with their node, GPU and the start of the slowness.",
        variables=(SINGLE_RUN, RANK_VARIABLE),
        rows=(
            Row(
                "At a glance",
                (*overview_panels(), _rank_table(), hanging_ranks(w=13, h=6), node_table(w=11, h=6)),
            ),
            Row("Stragglers", _straggler_panels()),
            Row("Phases", _aggregate_panels()),
            Row("Selected ranks", _selected_rank_panels()),
        ),
        annotations=(ATTEMPTS, CHECKPOINTS, ALERTS_OF_RUN),
        bridges_missed_scrapes=True,
    )


def sorted_by_rank(expression: str) -> str:
    """Return PromQL that sorts series by the number of their rank.

    Prometheus sorts the series of a result by their labels in alphabetical order. The label `number`, which precedes `rank` in the alphabet,
    is the rank padded with zeros.
    """
    for digits in range(1, MAX_RANK_DIGITS):
        expression = f'label_replace({expression}, "number", "{"0" * (MAX_RANK_DIGITS - digits)}$1", "rank", "(.{{{digits}}})")'
    return f'label_replace({expression}, "number", "$1", "rank", "(.{{{MAX_RANK_DIGITS},}})")'


def _straggler_panels() -> tuple[Panel, ...]:
    """Return the panels about slow ranks: heat maps by rank and by node, and the spread of the compute times."""
    return (
        heatmap(
            "Slowness of each rank",
            Query(
                sorted_by_rank(
                    f"1 / min by (rank) ({SPEED_RATIO_BY_RANK_AND_NODE}) - 1 {_UNLESS_STANDSTILL}"
                ),
                "{{rank}}",
            ),
            unit="percentunit",
            color_range=(0, 0.5),
            w=10,
            h=9,
        ),
        heatmap(
            "Slowness of each node's slowest rank",
            Query(
                f"1 / min by (instance) ({SPEED_RATIO_BY_RANK_AND_NODE}) - 1 {_UNLESS_STANDSTILL}",
                "{{instance}}",
            ),
            unit="percentunit",
            color_range=(0, 0.5),
            w=7,
            h=9,
        ),
        time_series(
            "Spread of compute time",
            Query(f"max({SAMPLED_COMPUTE_SECONDS})", "slowest", VERMILION),
            Query(f"quantile(0.95, {SAMPLED_COMPUTE_SECONDS})", "95th percentile", ORANGE),
            Query(f"quantile(0.5, {SAMPLED_COMPUTE_SECONDS})", "median", BLUE),
            Query(f"min({SAMPLED_COMPUTE_SECONDS})", "fastest", GREEN),
            unit="s",
            w=7,
            h=9,
        ),
    )


def _rank_table() -> Panel:
    """Return the table of all ranks: by severity, then by speed."""
    panel = table(
        "All ranks, the worst first",
        Column("rank", "Rank", width=70),
        Column("instance", "Node", links=(GPUS_OF_ROW_LINK, NODE_OF_ROW_LINK)),
        Column("gpu", "GPU", width=60),
        Column(_SEVERITY_BY_RANK, "State", decimals=0, width=100, mappings=_SEVERITY_TEXTS),
        Column("phase", "Phase", width=120),
        Column(f"1000 * {LONG_PHASE_START}", "In phase since", unit=CLOCK_TIME, width=CLOCK_TIME_WIDTH),
        percent_column(
            f"{SPEED_RATIO_BY_RANK_AND_NODE} {_IF_ALIVE} {_UNLESS_STANDSTILL}",
            "Speed",
            95,
            # The first color is that of an absent value.
            threshold_steps((None, NEUTRAL), (0, BAD), (VERY_SLOW_RATIO, WARNING), (SLOW_RATIO, BLUE)),
            bar=(0, 1),
        ),
        percent_column(
            f"avg_over_time(({SPEED_RATIO_BY_RANK_AND_NODE} < bool {SLOW_RATIO} unless on () {_RECORDED_STANDSTILL})[$__range:$__interval])"
            f" {_IF_ALIVE} {_UNLESS_STANDSTILL}",
            "Time slow",
            100,
        ),
        percent_column(
            gpu_values_by_rank(THROTTLED_RATIO_FAMILY),
            "Throttled, 2 min",
            130,
            warn_from(0.01, 0.1),
        ),
        Column(gpu_values_by_rank('gpu_clock_hertz{clock="sm"}'), "SM clock", unit="hertz", width=90),
        Column(
            gpu_values_by_rank('gpu_temperature_celsius{sensor="gpu"}'),
            "Heat",
            unit="celsius",
            width=70,
        ),
        Column(
            f"{COMPUTE_SECONDS_BY_RANK_AND_NODE} {_IF_ALIVE} {_UNLESS_STANDSTILL}",
            "Compute",
            unit="s",
            decimals=2,
            width=82,
        ),
        percent_column(
            f"{DATA_WAIT_RATIO_BY_RANK} {_IF_ALIVE} {_UNLESS_STANDSTILL}",
            "Data wait",
            96,
            warn_from(0.2),
        ),
        percent_column(
            "max by (instance, rank) (rate(training_gpu_idle_between_steps_seconds_total{@run}[$__rate_interval]))"
            " / sum by (instance, rank) (rate(training_phase_gpu_seconds_total{@run}[$__rate_interval]))",
            "GPU idle",
            90,
            warn_from(0.1),
        ),
        Column(
            f"{FEED_AGE_SECONDS} {_IF_ALIVE}",
            "Feed age",
            unit="s",
            decimals=0,
            width=90,
            thresholds=warn_from(SILENT_SECONDS),
        ),
        row_query=_RANK_ROWS,
        sort="State",
        max_data_points=100,
        h=7,
    )
    panel.body["options"]["sortBy"].append({"displayName": "Speed", "desc": False})
    return panel


def _aggregate_panels() -> tuple[Panel, ...]:
    """Return the panels about waiting times and phases of all ranks."""

    def share_by_rank(phase_matcher: str) -> str:
        """Return PromQL for the share of the time that each rank spends in the selected phases, by rank.

        The divisor is the time in all phases instead of the elapsed time, so that the shares of all phases add up to 1: the clock of a rank
        and the times of the scrapes differ a little.
        """

        def phase_seconds(selector: str) -> str:
            return f"sum by (rank) (rate(training_phase_seconds_total{{{selector}}}[$__rate_interval]))"

        return f"{phase_seconds(f'@run, {phase_matcher}')} / ({phase_seconds('@run')} > 0)"

    def count_ranks_in(phase_matcher: str) -> str:
        """Return PromQL for the mean number of ranks in the selected phases, among the ranks with current samples."""
        return f"sum({share_by_rank(phase_matcher)} and on (rank) {REPORTING_RANKS})"

    data_share = share_by_rank('phase="data_loading"')
    sync_share = share_by_rank('phase="grad_sync"')
    # The other ranks wait for the rank that waits least. In a run of two ranks, the median of both would be half of the wait.
    others_sync_share = f"({sync_share} > on () group_left () min({sync_share}))"
    world_size = "(max(training_world_size{@run}) or max(last_over_time(training_world_size{@run}[1h])))"
    ranks_without_sample = f"clamp_min({world_size} - count({REPORTING_RANKS}), 0)"

    work = count_ranks_in(f'phase=~"{WORK_PHASES}", phase!="grad_sync"')
    return (
        time_series(
            "Waiting for data and for other ranks",
            Query(f"max({data_share})", "data, worst rank", VERMILION),
            Query(f"quantile(0.5, {data_share})", "data, median rank", ORANGE),
            Query(
                f"quantile(0.5, {others_sync_share}) or on () min({sync_share})",
                "other ranks, median without the rank that waits least",
                BLUE,
            ),
            unit="percentunit",
            w=12,
            h=9,
        ),
        time_series(
            "Ranks by phase",
            Query(f"{work} unless on () {STANDSTILL_BY_STEP_AGE}", "work", BLUE),
            Query(f"{work} and on () {STANDSTILL_BY_STEP_AGE} or 0 * {work}", "work, no step", VERMILION),
            Query(count_ranks_in('phase="grad_sync"'), "waiting for other ranks", PHASE_COLORS["grad_sync"]),
            Query(count_ranks_in('phase="data_loading"'), "waiting for data", ORANGE),
            Query(count_ranks_in(f'phase=~"{SAVE_PHASES}"'), "saving", PURPLE),
            Query(
                count_ranks_in(f'phase!~"{WORK_PHASES}|data_loading|{SAVE_PHASES}"'), "other phases", BROWN
            ),
            Query(ranks_without_sample, "no sample", SILVER),
            unit="none",
            stacked=True,
            legend="means",
            decimals=1,
            w=12,
            h=9,
        ),
    )


def _selected_rank_panels() -> tuple[Panel, ...]:
    """Return the panels about the ranks that the variable `rank` selects, each with the median of the other ranks."""

    def plot(
        title: str, by_rank: str, unit: str, *, maximum: float | None = None, decimals: int | None = None
    ) -> Panel:
        """Return the plot of a value of each selected rank, and of the median of the other ranks.

        *by_rank* is PromQL with the selector `@rank`; the median has the same PromQL with the selector `@other_rank`.
        """
        return time_series(
            title,
            Query(by_rank, "rank {{rank}}", VERMILION),
            Query(
                f"quantile(0.5, {by_rank.replace('@rank', '@other_rank')})",
                "median of the other ranks",
                reference=True,
            ),
            unit=unit,
            maximum=maximum,
            decimals=decimals,
            w=6,
        )

    def gpu_values(family: str) -> str:
        """Return PromQL with the selector `@rank` for the largest value of a GPU family among the GPUs of each rank."""
        return f"max by (rank) ({gpu_values_by_rank(family).replace('@run', '@rank')})"

    return (
        plot(
            "Compute time of a step",
            f"max by (rank) (training_rank_compute_seconds{{@rank}}) {_UNLESS_STANDSTILL}",
            "s",
        ),
        plot("SM clock of their GPUs", gpu_values('gpu_clock_hertz{clock="sm"}'), "hertz"),
        plot("SM activity of their GPUs", gpu_values("gpu_sm_activity_ratio"), "percentunit", maximum=1),
        plot(
            "CPU of their processes",
            "sum by (rank) (rate(training_process_cpu_seconds_total{@rank}[$__rate_interval]))",
            "none",
            decimals=1,
        ),
    )
