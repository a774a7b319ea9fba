"""Dashboard *Ranks*: the ranks of a run, up to a thousand."""

from __future__ import annotations

from dashboards.board import ALERTS_OF_RUN, CHECKPOINTS, NUMERICAL, ONE_RUN, RESTARTS, Board, Row, Variable
from dashboards.palette import BAD, BLUE, GREEN, ORANGE, PHASES, PLAIN, VERMILION, WARNING, named
from dashboards.panels import Panel, above, heatmap, lines, stat, steps, to, words
from dashboards.queries import GPU_OF, LAST_COMPUTE, Query, held, now
from dashboards.tables import NO_ZERO, Column, hanging_ranks, nothing, percent, table

UID = "training-ranks"
RANKS = Variable(
    "rank",
    "Rank",
    "label_values(training_rank_info{@run}, rank)",
    all_of_them=False,
    sort=NUMERICAL,
    what="For the last row: the ranks to look at closely.",
)
COMPUTE = "max by (rank) (training_rank_compute_seconds{@run} > 0)"
RECENT = f"max by (rank) ({LAST_COMPUTE} > 0)"
RECENT_AT = f"max by (instance, rank) ({LAST_COMPUTE} > 0)"
SCORE = f"scalar(min({RECENT})) / {RECENT}"
SCORE_AT = f"scalar(min({RECENT})) / {RECENT_AT}"
FEED_AGE = (
    "max by (instance, rank) (timestamp(training_feed_last_update_timestamp_seconds{@run})"
    " - training_feed_last_update_timestamp_seconds{@run})"
)
"""Age of the feed at the scrape: the time since the scrape is no age of the feed."""
SILENT_SECONDS = 30
SILENT = (
    f"max by (instance, rank) (training_process_up{{@run}}) == 0 or ({FEED_AGE} > {SILENT_SECONDS}) * 0 + 1"
)
"""0 for ended ranks, 1 for live ranks with a feed older than SILENT_SECONDS."""
TO_GPUS = to("training-gpus", "GPUs of this node", node="${__data.fields.Node}")
TO_NODE = to("training-node", "Node", node="${__data.fields.Node}")


def board() -> Board:
    """Return the dashboard."""
    return Board(
        uid=UID,
        title="Training / Ranks",
        what="Slow, silent and ended ranks, with their node and GPU, and since when.",
        variables=(ONE_RUN, RANKS),
        rows=(
            Row("At a glance", _glance()),
            Row("Stragglers", _slow()),
            Row("Hanging, ended and silent ranks", stopped()),
            Row("Ranks together", together()),
            Row("Chosen ranks", chosen()),
        ),
        marks=(RESTARTS, CHECKPOINTS, ALERTS_OF_RUN),
    )


def _glance() -> tuple[Panel, ...]:
    hangs = "max by (instance, rank, function, location, phase) (training_hang_info{@run})"
    alike = f"count by (function, location, phase) ({hangs})"
    # The odd rank is in the minority; of two equal groups neither is odd.
    odd = (
        f"bottomk(1, {hangs} * on (function, location, phase) group_left () {alike} * 2"
        f" < on () group_left () count({hangs}))"
    )
    return (
        stat(
            "Ranks alive",
            now("sum(max by (rank) (training_process_up{@run}))", "alive"),
            now("max(training_world_size{@run})", "of"),
            now(
                "count(max by (rank) (training_process_up{@run}) == 0) or 0 * max(training_process_up{@run})",
                "ended",
                BAD,
            ),
            unit="none",
            text="value_and_name",
        ),
        stat(
            "Slowest rank",
            now(f"bottomk(1, {SCORE})", "rank {{rank}}"),
            unit="percentunit",
            decimals=0,
            text="value_and_name",
            thresholds=steps((None, BAD), (0.75, WARNING), (0.9, PLAIN)),
        ),
        stat(
            "Lost to the slowest",
            now(f"1 - quantile(0.5, {RECENT}) / max({RECENT})"),
            unit="percentunit",
            decimals=0,
            thresholds=above(0.1, 0.25),
        ),
        stat(
            "Waiting for data, slowest rank",
            now(
                'topk(1, max by (rank) (rate(training_phase_seconds_total{@run, phase="data_loading"}[$__rate_interval])))',
                "rank {{rank}}",
            ),
            unit="percentunit",
            decimals=0,
            text="value_and_name",
            thresholds=above(0.05, 0.2),
        ),
        stat(
            "Rank that holds up a hang",
            now(
                f'label_replace({odd} * 0 + 1, "odd", "rank $1:", "rank", "(.+)")'
                f' or label_replace(topk(1, {alike}) * 0 + 1 unless on () {odd}, "odd", "no odd rank:", "", "")'
                f' or label_replace(absent({hangs}) * 0, "odd", "no rank hangs", "", "")',
                "{{odd}} {{function}} {{location}} {{instance}}",
            ),
            unit="none",
            text="name",
            thresholds=steps((None, PLAIN), (1, BAD)),
            w=8,
        ),
    )


def _slow() -> tuple[Panel, ...]:
    return (
        heatmap(
            "Slowness of each rank",
            Query(f"{COMPUTE} / scalar(min({COMPUTE})) - 1", "{{rank}}"),
            unit="percentunit",
            between=(0, 0.5),
            w=10,
            h=9,
        ),
        heatmap(
            "Slowness of each node's slowest rank",
            Query(
                f"max by (instance) (max by (instance, rank) (training_rank_compute_seconds{{@run}} > 0))"
                f" / scalar(min({COMPUTE})) - 1",
                "{{instance}}",
            ),
            unit="percentunit",
            between=(0, 0.5),
            w=7,
            h=9,
        ),
        lines(
            "Spread of compute time",
            Query(f"max({COMPUTE})", "slowest", VERMILION),
            Query(f"quantile(0.95, {COMPUTE})", "19 of 20 are faster", ORANGE),
            Query(f"quantile(0.5, {COMPUTE})", "median", BLUE),
            Query(f"min({COMPUTE})", "fastest", GREEN),
            unit="s",
            w=7,
            h=9,
        ),
        table(
            "All ranks, the slowest first",
            Column("rank", "Rank", width=70),
            Column("instance", "Node", links=(TO_GPUS, TO_NODE)),
            Column("gpu", "GPU", width=60),
            percent(SCORE_AT, "Speed", 160, steps((None, BAD), (0.75, WARNING), (0.9, BLUE)), bar=(0, 1)),
            percent(
                f"avg_over_time((({SCORE_AT}) < bool 0.9)[$__range:$__interval])", "Slow, of the time", 160
            ),
            percent(
                held("rate(gpu_clocks_event_seconds_total{@heat}[$__rate_interval])"),
                "Held back",
                100,
                above(0.01, 0.1),
            ),
            Column(
                RECENT_AT,
                "Computes",
                unit="s",
                decimals=3,
                width=100,
            ),
            percent(
                'max by (instance, rank) (rate(training_phase_seconds_total{@run, phase="data_loading"}[$__rate_interval]))',
                "Waits for data",
                120,
                above(0.2),
            ),
            percent(
                "max by (instance, rank) (rate(training_gpu_idle_between_steps_seconds_total{@run}[$__rate_interval]))"
                " / sum by (instance, rank) (rate(training_phase_gpu_seconds_total{@run}[$__rate_interval]))",
                "GPU waits",
                110,
                above(0.1),
            ),
            Column(held('gpu_clock_hertz{clock="sm"}'), "SM clock", unit="hertz", width=100),
            Column(held('gpu_temperature_celsius{sensor="gpu"}'), "Temperature", unit="celsius", width=80),
            Column(
                FEED_AGE,
                "Last news",
                unit="s",
                decimals=0,
                width=100,
                thresholds=above(SILENT_SECONDS),
            ),
            of=f"max by (instance, rank, gpu) ({GPU_OF})",
            sort="Speed",
            descending=False,
            points=100,
            h=9,
        ),
    )


def stopped() -> tuple[Panel, ...]:
    """Return the panels about ranks that hang, ended or write no feed."""
    none = nothing(SILENT, "instance", "all ranks alive")
    return (
        hanging_ranks(w=14),
        table(
            "Ended and silent ranks",
            Column("rank", "Rank", width=70),
            Column("instance", "Node", links=(TO_GPUS, TO_NODE)),
            Column(
                f"{SILENT} or {none} + 2",
                "Process",
                width=80,
                mappings=words({0: ("ended", BAD), 1: ("silent", WARNING), 2: ("alive", PLAIN)}),
            ),
            Column(
                f"{FEED_AGE} and on (instance, rank) ({SILENT}) or {none}",
                "Last news",
                unit="s",
                decimals=0,
                width=110,
                mappings=NO_ZERO,
            ),
            sort="Process",
            descending=False,
            w=10,
            h=5,
        ),
    )


def together() -> tuple[Panel, ...]:
    """Return the panels about waiting and phases."""
    return (
        lines(
            "Waiting for data and for each other",
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
                "each other, median rank",
                BLUE,
            ),
            unit="percentunit",
            w=12,
            h=9,
        ),
        lines(
            "Ranks by phase",
            Query("sum by (phase) (training_phase_active{@run})", "{{phase}}"),
            unit="none",
            stacked=True,
            overrides=named(PHASES),
            legend="right",
            w=12,
            h=9,
        ),
    )


def chosen() -> tuple[Panel, ...]:
    """Return the panels about the chosen ranks."""
    name = "rank {{rank}}"

    def of_chosen(family: str) -> str:
        return f"max by (rank) ({held(family).replace('@run', '@rank')})"

    return (
        lines(
            "Compute time of a step",
            Query("max by (rank) (training_rank_compute_seconds{@rank})", name),
            unit="s",
            w=6,
        ),
        lines(
            "SM clock of their GPUs", Query(of_chosen('gpu_clock_hertz{clock="sm"}'), name), unit="hertz", w=6
        ),
        lines(
            "SM activity of their GPUs",
            Query(of_chosen("gpu_sm_activity_ratio"), name),
            unit="percentunit",
            most=1,
            w=6,
        ),
        lines(
            "CPU of their processes",
            Query("sum by (rank) (rate(training_process_cpu_seconds_total{@rank}[$__rate_interval]))", name),
            unit="none",
            decimals=1,
            w=6,
        ),
    )
