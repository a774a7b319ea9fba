"""Dashboard *Ranks*: stragglers, hangs and ended ranks of a run with up to a thousand ranks."""

from __future__ import annotations

from dashboards.board import (
    ALERTS_OF_RUN,
    CHECKPOINTS,
    NUMERICAL_SORT,
    RESTARTS,
    SINGLE_RUN,
    Board,
    Row,
    Variable,
)
from dashboards.palette import BAD, BLUE, GREEN, NEUTRAL, ORANGE, PHASES, VERMILION, WARNING, colors_by_name
from dashboards.panels import (
    Panel,
    dashboard_link,
    heatmap,
    stat,
    threshold_steps,
    time_series,
    value_mappings,
    warn_above,
)
from dashboards.queries import GPU_INDEX_BY_RANK, LAST_COMPUTE, Query, gpu_values_by_rank, instant_query
from dashboards.tables import ZERO_AS_DASH, Column, hanging_ranks, percent, placeholder_row, table

UID = "training-ranks"
RANK_VARIABLE = Variable(
    "rank",
    "Rank",
    "label_values(training_rank_info{@run}, rank)",
    include_all=False,
    sort=NUMERICAL_SORT,
    description="Ranks in the row of selected ranks.",
)
COMPUTE_SECONDS = "max by (rank) (training_rank_compute_seconds{@run} > 0)"
RECENT_COMPUTE_SECONDS = f"max by (rank) ({LAST_COMPUTE} > 0)"
RECENT_COMPUTE_SECONDS_BY_NODE = f"max by (instance, rank) ({LAST_COMPUTE} > 0)"
SPEED_RATIO = f"scalar(min({RECENT_COMPUTE_SECONDS})) / {RECENT_COMPUTE_SECONDS}"
SPEED_RATIO_BY_NODE = f"scalar(min({RECENT_COMPUTE_SECONDS})) / {RECENT_COMPUTE_SECONDS_BY_NODE}"
FEED_AGE_SECONDS = (
    "max by (instance, rank) (timestamp(training_feed_last_update_timestamp_seconds{@run})"
    " - training_feed_last_update_timestamp_seconds{@run})"
)
"""PromQL for the age of the feed at the time of the scrape; `time()` would add the time since the scrape."""
SILENT_SECONDS = 30
STOPPED_RANKS = f"max by (instance, rank) (training_process_up{{@run}}) == 0 or ({FEED_AGE_SECONDS} > {SILENT_SECONDS}) * 0 + 1"
"""PromQL that is 0 for ended ranks and 1 for live ranks with a feed older than `SILENT_SECONDS`."""
GPUS_LINK = dashboard_link("training-gpus", "GPUs of this node", node="${__data.fields.Node}")
NODE_LINK = dashboard_link("training-node", "Node", node="${__data.fields.Node}")


def board() -> Board:
    """Return the dashboard of the ranks of a run."""
    return Board(
        uid=UID,
        title="Training / Ranks",
        description="Slow, silent and ended ranks, with their node, GPU and the start of the slowness.",
        variables=(SINGLE_RUN, RANK_VARIABLE),
        rows=(
            Row("At a glance", _overview_panels()),
            Row("Stragglers", _straggler_panels()),
            Row("Hanging, ended and silent ranks", _stopped_rank_panels()),
            Row("All ranks", _aggregate_panels()),
            Row("Selected ranks", _selected_rank_panels()),
        ),
        annotations=(RESTARTS, CHECKPOINTS, ALERTS_OF_RUN),
    )


def _overview_panels() -> tuple[Panel, ...]:
    hanging = "max by (instance, rank, function, location, phase) (training_hang_info{@run})"
    ranks_at_line = f"count by (function, location, phase) ({hanging})"
    # The odd rank belongs to the smallest group if that group has fewer than half of the ranks.
    odd_rank = (
        f"bottomk(1, {hanging} * on (function, location, phase) group_left () {ranks_at_line} * 2"
        f" < on () group_left () count({hanging}))"
    )
    return (
        stat(
            "Ranks alive",
            instant_query("sum(max by (rank) (training_process_up{@run}))", "alive"),
            instant_query("max(training_world_size{@run})", "of"),
            instant_query(
                "count(max by (rank) (training_process_up{@run}) == 0) or 0 * max(training_process_up{@run})",
                "ended",
                BAD,
            ),
            instant_query(
                "clamp_min(max(training_world_size{@run})"
                " - (count(max by (rank) (training_process_up{@run})) or vector(0)), 0)"
                ' unless on () max(training_run_state{@run, state=~"finished|stopped"}) == 1',
                "not seen",
                BAD,
            ),
            unit="none",
            text_mode="value_and_name",
        ),
        stat(
            "Slowest rank",
            instant_query(f"bottomk(1, {SPEED_RATIO})", "rank {{rank}}"),
            unit="percentunit",
            decimals=0,
            text_mode="value_and_name",
            thresholds=threshold_steps((None, BAD), (0.75, WARNING), (0.9, NEUTRAL)),
        ),
        stat(
            "Time lost to the slowest rank",
            instant_query(f"1 - quantile(0.5, {RECENT_COMPUTE_SECONDS}) / max({RECENT_COMPUTE_SECONDS})"),
            unit="percentunit",
            decimals=0,
            thresholds=warn_above(0.1, 0.25),
        ),
        stat(
            "Waiting for data, slowest rank",
            instant_query(
                'topk(1, max by (rank) (rate(training_phase_seconds_total{@run, phase="data_loading"}[$__rate_interval])))',
                "rank {{rank}}",
            ),
            unit="percentunit",
            decimals=0,
            text_mode="value_and_name",
            thresholds=warn_above(0.05, 0.2),
        ),
        stat(
            "Rank that holds up a hang",
            instant_query(
                f'label_replace({odd_rank} * 0 + 1, "odd", "rank $1:", "rank", "(.+)")'
                f' or label_replace(topk(1, {ranks_at_line}) * 0 + 1 unless on () {odd_rank}, "odd", "no odd rank:", "", "")'
                f' or label_replace(absent({hanging}) * 0, "odd", "no rank hangs", "", "")',
                "{{odd}} {{function}} {{location}} {{instance}}",
            ),
            unit="none",
            text_mode="name",
            thresholds=threshold_steps((None, NEUTRAL), (1, BAD)),
            w=8,
        ),
    )


def _straggler_panels() -> tuple[Panel, ...]:
    return (
        heatmap(
            "Slowness of each rank",
            Query(f"{COMPUTE_SECONDS} / scalar(min({COMPUTE_SECONDS})) - 1", "{{rank}}"),
            unit="percentunit",
            color_range=(0, 0.5),
            w=10,
            h=9,
        ),
        heatmap(
            "Slowness of each node's slowest rank",
            Query(
                f"max by (instance) (max by (instance, rank) (training_rank_compute_seconds{{@run}} > 0))"
                f" / scalar(min({COMPUTE_SECONDS})) - 1",
                "{{instance}}",
            ),
            unit="percentunit",
            color_range=(0, 0.5),
            w=7,
            h=9,
        ),
        time_series(
            "Spread of compute time",
            Query(f"max({COMPUTE_SECONDS})", "slowest", VERMILION),
            Query(f"quantile(0.95, {COMPUTE_SECONDS})", "95th percentile", ORANGE),
            Query(f"quantile(0.5, {COMPUTE_SECONDS})", "median", BLUE),
            Query(f"min({COMPUTE_SECONDS})", "fastest", GREEN),
            unit="s",
            w=7,
            h=9,
        ),
        table(
            "All ranks, the slowest first",
            Column("rank", "Rank", width=70),
            Column("instance", "Node", links=(GPUS_LINK, NODE_LINK)),
            Column("gpu", "GPU", width=60),
            percent(
                SPEED_RATIO_BY_NODE,
                "Speed",
                160,
                threshold_steps((None, BAD), (0.75, WARNING), (0.9, BLUE)),
                bar=(0, 1),
            ),
            percent(
                f"avg_over_time((({SPEED_RATIO_BY_NODE}) < bool 0.9)[$__range:$__interval])",
                "Share of time slow",
                160,
            ),
            percent(
                gpu_values_by_rank("rate(gpu_clocks_event_seconds_total{@throttling}[$__rate_interval])"),
                "Throttled",
                100,
                warn_above(0.01, 0.1),
            ),
            Column(
                RECENT_COMPUTE_SECONDS_BY_NODE,
                "Compute time",
                unit="s",
                decimals=3,
                width=100,
            ),
            percent(
                'max by (instance, rank) (rate(training_phase_seconds_total{@run, phase="data_loading"}[$__rate_interval]))',
                "Waiting for data",
                120,
                warn_above(0.2),
            ),
            percent(
                "max by (instance, rank) (rate(training_gpu_idle_between_steps_seconds_total{@run}[$__rate_interval]))"
                " / sum by (instance, rank) (rate(training_phase_gpu_seconds_total{@run}[$__rate_interval]))",
                "GPU idle",
                110,
                warn_above(0.1),
            ),
            Column(gpu_values_by_rank('gpu_clock_hertz{clock="sm"}'), "SM clock", unit="hertz", width=100),
            Column(
                gpu_values_by_rank('gpu_temperature_celsius{sensor="gpu"}'),
                "Temperature",
                unit="celsius",
                width=80,
            ),
            Column(
                FEED_AGE_SECONDS,
                "Feed age",
                unit="s",
                decimals=0,
                width=100,
                thresholds=warn_above(SILENT_SECONDS),
            ),
            row_query=f"max by (instance, rank, gpu) ({GPU_INDEX_BY_RANK})",
            sort="Speed",
            descending=False,
            max_data_points=100,
            h=9,
        ),
    )


def _stopped_rank_panels() -> tuple[Panel, ...]:
    """Return the panels about ranks that hang, have ended, or have an old feed."""
    placeholder = placeholder_row(STOPPED_RANKS, "instance", "no such rank seen")
    return (
        hanging_ranks(w=14),
        table(
            "Ended and silent ranks",
            Column("rank", "Rank", width=70),
            Column("instance", "Node", links=(GPUS_LINK, NODE_LINK)),
            Column(
                f"{STOPPED_RANKS} or {placeholder} + 2",
                "Process",
                width=80,
                mappings=value_mappings({0: ("ended", BAD), 1: ("silent", WARNING), 2: ("-", NEUTRAL)}),
            ),
            Column(
                f"{FEED_AGE_SECONDS} and on (instance, rank) ({STOPPED_RANKS}) or {placeholder}",
                "Feed age",
                unit="s",
                decimals=0,
                width=110,
                mappings=ZERO_AS_DASH,
            ),
            sort="Process",
            descending=False,
            w=10,
            h=5,
        ),
    )


def _aggregate_panels() -> tuple[Panel, ...]:
    """Return the panels about waiting times and phases of all ranks."""
    return (
        time_series(
            "Waiting for data and for other ranks",
            Query(
                'max(max by (rank) (rate(training_phase_seconds_total{@run, phase="data_loading"}[$__rate_interval])))',
                "data, worst rank",
                VERMILION,
            ),
            Query(
                'quantile(0.5, max by (rank) (rate(training_phase_seconds_total{@run, phase="data_loading"}[$__rate_interval])))',
                "data, median rank",
                ORANGE,
            ),
            Query(
                'quantile(0.5, max by (rank) (rate(training_phase_seconds_total{@run, phase="grad_sync"}[$__rate_interval])))',
                "other ranks, median rank",
                BLUE,
            ),
            unit="percentunit",
            w=12,
            h=9,
        ),
        time_series(
            "Ranks by phase",
            Query("sum by (phase) (training_phase_active{@run})", "{{phase}}"),
            unit="none",
            stacked=True,
            overrides=colors_by_name(PHASES),
            legend="right",
            w=12,
            h=9,
        ),
    )


def _selected_rank_panels() -> tuple[Panel, ...]:
    """Return the panels about the ranks that the variable `rank` selects."""
    legend = "rank {{rank}}"

    def gpu_values(family: str) -> str:
        return f"max by (rank) ({gpu_values_by_rank(family).replace('@run', '@rank')})"

    return (
        time_series(
            "Compute time of a step",
            Query("max by (rank) (training_rank_compute_seconds{@rank})", legend),
            unit="s",
            w=6,
        ),
        time_series(
            "SM clock of their GPUs",
            Query(gpu_values('gpu_clock_hertz{clock="sm"}'), legend),
            unit="hertz",
            w=6,
        ),
        time_series(
            "SM activity of their GPUs",
            Query(gpu_values("gpu_sm_activity_ratio"), legend),
            unit="percentunit",
            maximum=1,
            w=6,
        ),
        time_series(
            "CPU of their processes",
            Query(
                "sum by (rank) (rate(training_process_cpu_seconds_total{@rank}[$__rate_interval]))", legend
            ),
            unit="none",
            decimals=1,
            w=6,
        ),
    )
