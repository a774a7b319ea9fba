"""Dashboard *Run*: state, speed, phases, learning, checkpoints, goodput, events and identity of a run."""

from __future__ import annotations

from dashboards.board import ALERTS_OF_RUN, ATTEMPTS, CHECKPOINTS, RANK, RUNBOOK, SINGLE_RUN, Board, Row
from dashboards.palette import (
    BAD,
    BADPUT_CAUSE_COLORS,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PHASE_COLORS,
    PURPLE,
    VERMILION,
    fixed_color,
    fixed_colors_by_name,
    series_override,
    shades,
)
from dashboards.panels import Panel, stat, time_series
from dashboards.queries import (
    SAVE_PHASES,
    WALL_SECONDS,
    WORK_PHASES,
    Query,
    blank_if_incomplete,
    event_counts,
    instant_query,
)
from dashboards.ranks_overview import hanging_ranks
from dashboards.run_overview import GOODPUT_IF_SAVED, RANKS_OF_RUN_LINK, overview_panels
from dashboards.tables import Column, table
from dashboards.unsaved_work import UNSAVED_SECONDS

UID = "training-run"
FLOPS_UTILIZATION_TEMPLATE = (
    "sum(rate(training_{work}_flops_total{{@run}}[$__rate_interval]) and on (instance, run, rank) training_peak_flops_per_second{{@run}})"
    " / sum(training_peak_flops_per_second{{@run}})"
)
"""Template of PromQL for the MFU (`{work}`: `model`) or the HFU (`hardware`).

The `and` excludes ranks without a known peak, and ended ranks, whose totals are still exported.
"""


def board() -> Board:
    """Return the dashboard of one run."""
    return Board(
        uid=UID,
        title="Training / Run",
        description="State, alerts, speed, waiting, failures and cost of a run.",
        variables=(SINGLE_RUN, RANK, RUNBOOK),
        rows=(
            Row("At a glance", overview_panels()),
            Row("Utilization and hanging ranks", _utilization_panels(), collapsed=True),
            Row("Phases", _phase_panels()),
            Row("Learning", _learning_panels(), collapsed=True),
            Row("Checkpoints", _checkpoint_panels(), collapsed=True),
            Row("Goodput and failures", _goodput_panels(), collapsed=True),
            Row("Events and identity", _identity_panels(), collapsed=True),
            Row(
                "Optional: GPU time, GPU memory and checkpoint space",
                _optional_panels(),
                collapsed=True,
            ),
        ),
        annotations=(ATTEMPTS, CHECKPOINTS, ALERTS_OF_RUN),
        bridges_missed_scrapes=True,
    )


def _utilization_panels() -> tuple[Panel, ...]:
    """Return the panels of the FLOPs utilization and of the hanging ranks."""
    return (
        time_series(
            "MFU and HFU",
            Query(
                blank_if_incomplete(FLOPS_UTILIZATION_TEMPLATE.format(work="model")),
                "MFU: operations of the model",
                BLUE,
            ),
            Query(
                blank_if_incomplete(FLOPS_UTILIZATION_TEMPLATE.format(work="hardware")),
                "HFU: with recomputation",
                ORANGE,
            ),
            unit="percentunit",
            w=24,
        ),
        hanging_ranks(),
    )


_NAMED_PHASES_PATTERN = f"{WORK_PHASES}|data_loading|{SAVE_PHASES}"
"""Regular expression of the phases of *Time by phase* that are not part of the series *all other phases*: names separated by `|`."""


def _phase_panels() -> tuple[Panel, ...]:
    """Return the panel with the shares of the phases in the time of the selected ranks."""

    def share(matcher: str, by: str = "") -> str:
        """Return PromQL for the share of phases in the time of the main threads in all phases.

        Args:
            matcher: Matcher of the phases.
            by: Labels to keep; empty for the sum over the phases.
        """
        phase_rate = (
            f"sum by ({by}) (rate(training_phase_seconds_total{{@rank, {matcher}}}[$__rate_interval]))"
        )
        return f"{phase_rate} / ignoring (phase) group_left () sum(rate(training_phase_seconds_total{{@rank}}[$__rate_interval]))"

    saves, others = "checkpoint saves", "all other phases"
    return (
        time_series(
            "Time by phase",
            Query(share(f'phase=~"{WORK_PHASES}"', "phase"), "{{phase}}"),
            Query(share('phase="data_loading"', "phase"), "{{phase}}"),
            Query(share(f'phase=~"{SAVE_PHASES}"'), saves),
            Query(share(f'phase!~"{_NAMED_PHASES_PATTERN}"'), others),
            unit="percentunit",
            maximum=1,
            stacked=True,
            color=fixed_color(GREY),
            overrides=[
                *fixed_colors_by_name(
                    {
                        name: color
                        for name, color in PHASE_COLORS.items()
                        if name in _NAMED_PHASES_PATTERN.split("|")
                    }
                ),
                *fixed_colors_by_name({saves: PURPLE, others: GREY}),
                # `maximum` is a soft limit, which larger values extend. This axis ends at 100 %.
                {"matcher": {"id": "byType", "options": "number"}, "properties": [{"id": "max", "value": 1}]},
            ],
            legend="means",
            decimals=1,
            w=24,
            h=10,
            links=(RANKS_OF_RUN_LINK,),
        ),
    )


def _optional_panels() -> tuple[Panel, ...]:
    """Return the panels that need CUDA or configured checkpoint directories."""
    timed_steps_query = "sum(rate(training_gpu_timed_steps_total{@rank}[$__rate_interval]))"
    work_matcher = f'phase=~"{WORK_PHASES}"'
    return (
        time_series(
            "GPU time of a step",
            Query(
                "sum by (phase) (rate(training_phase_gpu_seconds_total{@rank}[$__rate_interval]))"
                f" / ignoring (phase) group_left () {timed_steps_query}",
                "{{phase}}",
            ),
            Query(
                f"sum(rate(training_phase_gpu_seconds_total{{@rank, {work_matcher}}}[$__rate_interval])) / {timed_steps_query}"
                f" - sum(rate(training_phase_seconds_total{{@rank, {work_matcher}}}[$__rate_interval]))"
                ' / sum(rate(training_steps_total{@rank, mode="train"}[$__rate_interval]))',
                "GPU time beyond the main thread's",
                reference=True,
            ),
            unit="s",
            stacked=True,
            color=fixed_color(GREY),
            overrides=fixed_colors_by_name(PHASE_COLORS),
            legend="right",
            w=12,
            h=12,
        ),
        time_series(
            "GPU memory allocated by PyTorch",
            Query('max by (rank) (training_gpu_memory_bytes{@rank, state="allocated"})', "rank {{rank}}"),
            unit="bytes",
        ),
        time_series(
            "Allocation retries and failures",
            Query(
                f'label_replace({event_counts("training_gpu_alloc_retries_total{@rank}")}, "event", "retries", "", "")'
                f' or label_replace({event_counts("training_gpu_oom_total{@rank}")}, "event", "out of memory", "", "")',
                "{{event}}",
            ),
            unit="none",
            bars=True,
            overrides=fixed_colors_by_name({"retries": ORANGE, "out of memory": VERMILION}),
        ),
        stat(
            "Free space for checkpoints",
            instant_query("min(training_checkpoint_dir_available_bytes{@run})"),
            unit="bytes",
            w=6,
            h=8,
        ),
    )


def _learning_panels() -> tuple[Panel, ...]:
    """Return the panels of the gradient norm, the learning rate and the loss scale."""
    return (
        time_series(
            "Gradient norm",
            Query("max(training_grad_norm{@run})", "gradient norm", BLUE),
            unit="none",
            use_default_soft_max=False,
        ),
        time_series(
            "Learning rate, loss scale",
            Query("max(training_learning_rate{@run})", "learning rate", BLUE),
            Query("max(training_loss_scale{@run})", "loss scale (right)", ORANGE, right_axis=True),
            unit="none",
            use_default_soft_max=False,
        ),
    )


def _checkpoint_panels() -> tuple[Panel, ...]:
    """Return the panels about checkpoints: unsaved work, duration and results."""

    def mean_seconds(part: str) -> str:
        """Return PromQL for the mean duration of a part of a checkpoint."""

        def rate(suffix: str) -> str:
            return f'sum(rate(training_checkpoint_duration_seconds_{suffix}{{@run, part="{part}"}}[$__rate_interval]))'

        return f"{rate('sum')} / ({rate('count')} > 0)"

    return (
        time_series(
            "Unsaved work",
            Query(UNSAVED_SECONDS, "since the last checkpoint", BLUE),
            Query("max(training_checkpoint_interval_seconds{@run})", "usual interval", reference=True),
            unit="s",
            fill=10,
            w=8,
        ),
        time_series(
            "Checkpoint duration",
            Query(mean_seconds("blocking"), "blocking", VERMILION),
            Query(mean_seconds("total"), "total", BLUE, dashed=True),
            unit="s",
            w=8,
        ),
        time_series(
            "Checkpoints by result",
            Query(
                event_counts("training_checkpoints_total{@run}", "result", starts_at_first_event=True),
                "{{result}}",
            ),
            unit="none",
            bars=True,
            overrides=fixed_colors_by_name({"ok": BLUE, "failed": VERMILION}),
            w=6,
        ),
    )


def _goodput_panels() -> tuple[Panel, ...]:
    """Return the panels about goodput, badput by cause, lost steps, interruptions and restarts."""
    return (
        time_series(
            "Goodput",
            Query(
                f"max(training_productive_seconds_total{{@run}}) / {WALL_SECONDS}",
                "committed",
                BLUE,
            ),
            Query(GOODPUT_IF_SAVED, "if saved", GREEN),
            unit="percentunit",
            maximum=1,
            w=8,
        ),
        time_series(
            "Badput by cause",
            Query(
                f"max by (cause) (training_badput_seconds_total{{@run}} > 0) / on () group_left () {WALL_SECONDS}",
                "{{cause}}",
            ),
            unit="percentunit",
            stacked=True,
            overrides=fixed_colors_by_name(BADPUT_CAUSE_COLORS),
            w=8,
        ),
        stat("Lost steps", instant_query("max(training_lost_steps_total{@run})"), unit="locale", w=8, h=8),
        table(
            "Interruptions and restarts",
            Column("reason", "Reason"),
            Column("sum by (reason) (training_interruptions_total{@run}) > 0", "Interruptions", width=140),
            Column("sum by (reason) (training_restarts_total{@run}) > 0", "Restarts", width=110),
            sort="Interruptions",
            w=24,
            h=4,
        ),
    )


def _identity_panels() -> tuple[Panel, ...]:
    """Return the panels about the events and the metadata of a run."""
    return (
        time_series(
            "Events",
            Query(
                event_counts("training_events_total{@run}", "type, severity", starts_at_first_event=True),
                "{{type}} ({{severity}})",
            ),
            unit="none",
            bars=True,
            overrides=[
                series_override({"id": "byRegexp", "options": f"/\\({severity}\\)$/"}, shades(color))
                for severity, color in {
                    "info": BLUE,
                    "warning": ORANGE,
                    "error": BAD,
                    "critical": BAD,
                }.items()
            ],
        ),
        table(
            "Identity of the run",
            Column("run", "Run"),
            Column("job_name", "Job"),
            Column("user", "User"),
            Column("model", "Model"),
            Column("framework", "Framework"),
            Column("precision", "Precision"),
            Column("world_size", "Ranks", width=80),
            Column("perf_tag", "Same work (perf_tag)"),
            row_query="max by (run, job_name, user, model, framework, precision, world_size, perf_tag) (training_run_info{@run})",
            h=4,
        ),
    )
