"""Dashboard *Run*: the state of a run, then phases, learning, checkpoints, goodput and failures."""

from __future__ import annotations

from dashboards.board import ALERTS_OF_RUN, CHECKPOINTS, RANK, RESTARTS, RUNBOOK, SINGLE_RUN, Board, Row
from dashboards.palette import (
    BAD,
    BLUE,
    CAUSES,
    GOOD,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PHASES,
    PURPLE,
    VERMILION,
    WARNING,
    Override,
    colors_by_name,
    fixed_color,
    series_override,
    shades,
)
from dashboards.panels import (
    Panel,
    dashboard_link,
    stat,
    threshold_steps,
    time_series,
    warn_above,
    warn_below,
)
from dashboards.queries import (
    GPU_UUID_BY_RANK,
    LAST_COMPUTE,
    Query,
    blank_if_incomplete,
    event_counts,
    instant_query,
)
from dashboards.tables import Column, firing_alerts, hanging_ranks, table
from exporter.training import phases

UID = "training-run"
RANKS_LINK = dashboard_link("training-ranks", "Ranks", run="${run}")
GPUS_LINK = dashboard_link("training-gpus", "GPUs of this run", run="${run}")
MFU = (
    "sum(rate(training_{work}_flops_total{{@run}}[$__rate_interval]) and on (instance, run, rank) training_peak_flops_per_second{{@run}})"
    " / sum(training_peak_flops_per_second{{@run}})"
)
"""PromQL for MFU or HFU. The `and` removes ranks without a known peak; the peak ends with the process, the totals do not."""
COMPUTE_SECONDS = f"max by (rank) ({LAST_COMPUTE} > 0)"
MEAN_STEP_SECONDS = (
    'sum(rate(training_step_duration_seconds_sum{@run, mode="train"}[$__rate_interval]{offset}))'
    ' / sum(rate(training_step_duration_seconds_count{@run, mode="train"}[$__rate_interval]{offset}))'
)
OBSERVED_RATIO = (
    "(clamp_max(max(rate(training_wall_seconds_total{@run}[5m])), 1) > 0"
    ' and on () max(training_run_state{@run, state=~"starting|running|stalled|hung"}) == 1)'
)
"""PromQL for the share of the last five minutes with samples: below 1 for a younger run, without a value after the end of a run."""
GPU_POWERS = f"(max by (uuid) (gpu_power_watts) and on (uuid) {GPU_UUID_BY_RANK})"
WALL_SECONDS = "max by (run) (training_wall_seconds_total{@run})"


def board() -> Board:
    """Return the dashboard of one run."""
    return Board(
        uid=UID,
        title="Training / Run",
        description="State, alerts, speed, waiting, failures and cost of a run.",
        variables=(SINGLE_RUN, RANK, RUNBOOK),
        rows=(
            Row("At a glance", _overview_panels()),
            Row("Progress", _progress_panels(), collapsed=True),
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
        annotations=(RESTARTS, CHECKPOINTS, ALERTS_OF_RUN),
    )


def _state_query(states: str) -> str:
    """Return PromQL for the state of the run if it matches `states`, with the reason if the run has ended."""
    state = f'max by (state) (training_run_state{{@run, state=~"{states}"}} == 1)'
    outcome = "max by (state, reason) (label_replace(label_replace(training_run_outcome_info{@run},"
    outcome += ' "state", "$1", "outcome", "(.*)"), "reason", ": $1", "reason", "(.+)"))'
    return f"({state} * on (state) group_right () {outcome} or on (state) {state})"


def _overview_panels() -> tuple[Panel, ...]:
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
    ranks_alive = "count(max by (rank) (training_process_up{@run}) == 1)"
    ended_run = 'max(training_run_state{@run, state=~"finished|stopped"}) == 1'
    return (
        stat(
            "State",
            instant_query(
                f"{_state_query('running|finished')} * 0 or {_state_query('starting|ending|stalled|stopped')}"
                f" or {_state_query('hung|failed|lost')} * 2",
                "{{state}}{{reason}}",
            ),
            unit="none",
            text_mode="name",
            thresholds=threshold_steps((None, GOOD), (1, WARNING), (2, BAD)),
            w=8,
        ),
        stat(
            "In state since",
            instant_query("max(training_run_state_since_timestamp_seconds{@run}) * 1000"),
            unit="dateTimeFromNow",
        ),
        firing_alerts(
            "@run",
            (
                Column("instance", "Node", width=90),
                Column("rank", "Rank", width=70),
                Column("gpu", "GPU", width=70),
            ),
            w=12,
            h=8,
        ),
        stat(
            "Ranks",
            instant_query(f"{ranks_alive} or vector(0)", "alive"),
            instant_query("max(training_world_size{@run})", "of"),
            instant_query(
                f"clamp_min(max(training_world_size{{@run}}) - ({ranks_alive} or vector(0)), 0) unless on () {ended_run}",
                "missing",
                BAD,
            ),
            unit="none",
            text_mode="value_and_name",
            w=4,
        ),
        stat(
            "Slowest rank",
            instant_query(f"bottomk(1, scalar(min({COMPUTE_SECONDS})) / {COMPUTE_SECONDS})", "rank {{rank}}"),
            unit="percentunit",
            decimals=0,
            text_mode="value_and_name",
            thresholds=warn_below(0.9, 0.75),
        ),
        stat(
            "Waiting for data",
            instant_query(
                'topk(1, max by (rank) (rate(training_phase_seconds_total{@run, phase="data_loading"}[5m])))'
                f" / on () group_left () {OBSERVED_RATIO}",
                "rank {{rank}}",
            ),
            unit="percentunit",
            decimals=0,
            text_mode="value_and_name",
            thresholds=warn_above(0.05, 0.2),
        ),
        stat(
            "Last step",
            instant_query("time() - max(training_last_progress_timestamp_seconds{@run})"),
            unit="s",
            decimals=0,
            thresholds=warn_above(60, 300),
        ),
        stat(
            "Step",
            instant_query("max(training_step{@run})", "now"),
            instant_query("max(training_step_target{@run})", "of"),
            unit="locale",
            text_mode="value_and_name",
        ),
        stat(
            "Time left",
            instant_query(
                "clamp_min(max(training_step_target{@run}) - max(training_step{@run}), 0)"
                f' / (max(rate(training_steps_total{{@run, mode="train"}}[5m])) / {OBSERVED_RATIO} > 0)'
            ),
            unit="dthms",
        ),
        stat(
            "Failures",
            instant_query(
                'sum(increase(training_checkpoints_total{@run, result="failed"}[$__range]))'
                " or 0 * max(training_wall_seconds_total{@run})",
                "failed saves",
            ),
            instant_query(
                "sum(increase(training_restarts_total{@run}[$__range])) or 0 * max(training_wall_seconds_total{@run})",
                "restarts",
            ),
            instant_query(
                "sum(increase(training_nonfinite_total{@run}[$__range])) or 0 * max(training_wall_seconds_total{@run})",
                "NaN",
            ),
            unit="none",
            decimals=0,
            text_mode="value_and_name",
            thresholds=warn_above(1, 1),
            w=5,
        ),
        stat(
            "Goodput, committed",
            instant_query(f"max(training_productive_seconds_total{{@run}}) / max({WALL_SECONDS})"),
            unit="percentunit",
            decimals=1,
            thresholds=warn_below(0.9, 0.7),
        ),
        stat(
            "Cost so far",
            instant_query(
                "sum by (currency) (last_over_time(training_cost_total{@run}[15m]))", "{{currency}}"
            ),
            instant_query("sum(last_over_time(training_energy_joules_total{@run}[15m])) / 3.6e6", "kWh"),
            unit="none",
            decimals=2,
            text_mode="value_and_name",
            w=3,
        ),
        time_series(
            "Loss",
            Query("max by (mode) (training_loss{@run})", "{{mode}}"),
            Query(
                f"max by (kind, value) ({event_counts('training_nonfinite_total{@run}', 'kind, value', starts_at_first_event=True)}) > bool 0 == 1",
                "{{kind}} was {{value}}",
            ),
            unit="none",
            minimum=None,
            overrides=[
                *colors_by_name({"train": BLUE, "validation": ORANGE, "test": GREEN}),
                *nonfinite_bars,
            ],
            w=6,
            h=8,
        ),
        time_series(
            "Step time",
            Query(MEAN_STEP_SECONDS.replace("{offset}", ""), "mean", BLUE),
            Query(MEAN_STEP_SECONDS.replace("{offset}", " offset 1h"), "one hour earlier", reference=True),
            Query("max(training_step_longest_seconds{@run})", "longest of the last 100", PALE),
            unit="s",
            w=6,
            log_scale=True,
            links=(RANKS_LINK,),
        ),
        time_series(
            "Throughput",
            Query(
                blank_if_incomplete('sum(rate(training_tokens_total{@run, mode="train"}[$__rate_interval]))'),
                "tokens",
                BLUE,
            ),
            Query(
                blank_if_incomplete(
                    'sum(rate(training_samples_total{@run, mode="train"}[$__rate_interval]))'
                ),
                "samples (right)",
                ORANGE,
                right_axis=True,
            ),
            unit="si:tokens/s",
            overrides=[
                {
                    "matcher": {"id": "byName", "options": "samples (right)"},
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
                    f"sum({GPU_POWERS}) unless on () (count({GPU_POWERS}) < count(group by (uuid) ({GPU_UUID_BY_RANK})))"
                ),
                "power (right)",
                ORANGE,
                right_axis=True,
            ),
            unit="percentunit",
            maximum=1,
            w=6,
            links=(GPUS_LINK,),
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


def _progress_panels() -> tuple[Panel, ...]:
    return (
        time_series(
            "MFU and HFU",
            Query(blank_if_incomplete(MFU.format(work="model")), "MFU: operations of the model", BLUE),
            Query(blank_if_incomplete(MFU.format(work="hardware")), "HFU: with recomputation", ORANGE),
            unit="percentunit",
            w=24,
        ),
        hanging_ranks(),
    )


WORK_PHASES = "|".join(sorted(phases.WORK))
SAVE_PHASES = "|".join(row.name for row in phases.PHASES.values() if row.badput == "checkpoint_save")
NAMED_PHASES = f"{WORK_PHASES}|data_loading|{SAVE_PHASES}"
"""Phases that have their own colour in *Time by phase*; all other phases are one series."""


def _phase_panels() -> tuple[Panel, ...]:
    def share(matcher: str, by: str = "") -> str:
        """Return PromQL for the share of the main threads' time in the phases that a matcher selects."""
        seconds = f"sum by ({by}) (rate(training_phase_seconds_total{{@rank, {matcher}}}[$__rate_interval]))"
        return f"{seconds} / ignoring (phase) group_left () sum(rate(training_phase_seconds_total{{@rank}}[$__rate_interval]))"

    return (
        time_series(
            "Time by phase",
            Query(share(f'phase=~"{WORK_PHASES}"', "phase"), "{{phase}}"),
            Query(share('phase="data_loading"', "phase"), "{{phase}}"),
            Query(share(f'phase=~"{SAVE_PHASES}"'), "checkpoint saves"),
            Query(share(f'phase!~"{NAMED_PHASES}"'), "all other phases"),
            unit="percentunit",
            maximum=1,
            stacked=True,
            color=fixed_color(GREY),
            overrides=[
                *colors_by_name(
                    {name: color for name, color in PHASES.items() if name in NAMED_PHASES.split("|")}
                ),
                *colors_by_name({"checkpoint saves": PURPLE, "all other phases": GREY}),
                {"matcher": {"id": "byType", "options": "number"}, "properties": [{"id": "max", "value": 1}]},
            ],
            legend="right",
            decimals=1,
            w=24,
            h=10,
            links=(RANKS_LINK,),
        ),
    )


def _optional_panels() -> tuple[Panel, ...]:
    """Return the panels that need CUDA or configured checkpoint directories."""
    timed = "sum(rate(training_gpu_timed_steps_total{@rank}[$__rate_interval]))"
    work = f'phase=~"{WORK_PHASES}"'
    return (
        time_series(
            "GPU time of a step",
            Query(
                "sum by (phase) (rate(training_phase_gpu_seconds_total{@rank}[$__rate_interval]))"
                f" / ignoring (phase) group_left () {timed}",
                "{{phase}}",
            ),
            Query(
                f"sum(rate(training_phase_gpu_seconds_total{{@rank, {work}}}[$__rate_interval])) / {timed}"
                f" - sum(rate(training_phase_seconds_total{{@rank, {work}}}[$__rate_interval]))"
                ' / sum(rate(training_steps_total{@rank, mode="train"}[$__rate_interval]))',
                "work queued ahead of the GPU",
                reference=True,
            ),
            unit="s",
            stacked=True,
            color=fixed_color(GREY),
            overrides=colors_by_name(PHASES),
            legend="right",
            w=12,
            h=12,
        ),
        time_series(
            "Memory of tensors",
            Query('max by (rank) (training_gpu_memory_bytes{@rank, state="allocated"})', "rank {{rank}}"),
            unit="bytes",
        ),
        time_series(
            "Allocation retries and failures",
            Query(event_counts("training_gpu_alloc_retries_total{@rank}"), "retries", ORANGE),
            Query(event_counts("training_gpu_oom_total{@rank}"), "out of memory", VERMILION),
            unit="none",
            bars=True,
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
    return (
        time_series(
            "Gradient norm",
            Query("max(training_grad_norm{@run})", "gradient norm", BLUE),
            unit="none",
            use_soft_maximum=False,
        ),
        time_series(
            "Learning rate, loss scale",
            Query("max(training_learning_rate{@run})", "learning rate", BLUE),
            Query("max(training_loss_scale{@run})", "loss scale (right)", ORANGE, right_axis=True),
            unit="none",
            use_soft_maximum=False,
        ),
    )


def _checkpoint_panels() -> tuple[Panel, ...]:
    """Return the panels about checkpoints: unsaved work, duration and results."""

    def mean(part: str) -> str:
        rate = f'sum(rate(training_checkpoint_duration_seconds_{{}}{{{{@run, part="{part}"}}}}[$__rate_interval]))'
        return f"{rate.format('sum')} / ({rate.format('count')} > 0)"

    return (
        time_series(
            "Unsaved work",
            Query("max(training_uncommitted_seconds{@run})", "since the last checkpoint", BLUE),
            Query("max(training_checkpoint_interval_seconds{@run})", "usual interval", reference=True),
            unit="s",
            fill=10,
            w=8,
        ),
        time_series(
            "Checkpoint duration",
            Query(mean("blocking"), "blocking", VERMILION),
            Query(mean("total"), "total", BLUE, dashed=True),
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
            overrides=colors_by_name({"ok": BLUE, "failed": VERMILION}),
            w=6,
        ),
    )


def _goodput_panels() -> tuple[Panel, ...]:
    """Return the panels about goodput, badput by cause, lost steps and restarts."""
    return (
        time_series(
            "Goodput",
            Query(
                f"max by (run) (training_productive_seconds_total{{@run}}) / {WALL_SECONDS}",
                "committed",
                BLUE,
            ),
            Query(
                f"1 - max by (run) (sum by (instance, run) (training_badput_seconds_total{{@run}})) / {WALL_SECONDS}",
                "if saved",
                GREEN,
            ),
            unit="percentunit",
            maximum=1,
            w=8,
        ),
        time_series(
            "Badput by cause",
            Query(
                f"max by (run, cause) (training_badput_seconds_total{{@run}} > 0) / on (run) group_left () {WALL_SECONDS}",
                "{{cause}}",
            ),
            unit="percentunit",
            stacked=True,
            overrides=colors_by_name(CAUSES),
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
            Column("perf_tag", "Comparable with (perf_tag)"),
            row_query="max by (run, job_name, user, model, framework, precision, world_size, perf_tag) (training_run_info{@run})",
            h=4,
        ),
    )
