"""Dashboard *Run*: the state of a run, then phases, learning, checkpoints, goodput and failures."""

from __future__ import annotations

from dashboards.board import ALERTS_OF_RUN, CHECKPOINTS, ONE_RUN, RANK, RESTARTS, RUNBOOK, Board, Row
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
    fixed,
    named,
    of_series,
    shades,
)
from dashboards.panels import Panel, above, below, lines, stat, steps, to
from dashboards.queries import LAST_COMPUTE, UUID_OF, Query, complete, events, now
from dashboards.tables import Column, firing_alerts, hanging_ranks, table
from exporter.training import phases

UID = "training-run"
TO_RANKS = to("training-ranks", "Ranks", run="${run}")
TO_GPUS = to("training-gpus", "GPUs of this run", run="${run}")
MFU = (
    "sum(rate(training_{work}_flops_total{{@run}}[$__rate_interval]) and on (instance, run, rank) training_peak_flops_per_second{{@run}})"
    " / sum(training_peak_flops_per_second{{@run}})"
)
"""Ranks with a known peak only; the peak disappears with the process, the totals stay."""
COMPUTE = f"max by (rank) ({LAST_COMPUTE} > 0)"
MEAN = (
    'sum(rate(training_step_duration_seconds_sum{@run, mode="train"}[$__rate_interval]{past}))'
    ' / sum(rate(training_step_duration_seconds_count{@run, mode="train"}[$__rate_interval]{past}))'
)
OBSERVED = (
    "(clamp_max(max(rate(training_wall_seconds_total{@run}[5m])), 1) > 0"
    ' and on () max(training_run_state{@run, state=~"starting|running|stalled|hung"}) == 1)'
)
"""Share of the last five minutes that the counters cover: below 1 for a younger run. Ends with the run."""
POWERS = f"(max by (uuid) (gpu_power_watts) and on (uuid) {UUID_OF})"
WALL = "max by (run) (training_wall_seconds_total{@run})"


def board() -> Board:
    """Return the dashboard."""
    return Board(
        uid=UID,
        title="Training / Run",
        what="State, alerts, speed, waiting, failures and cost of a run.",
        variables=(ONE_RUN, RANK, RUNBOOK),
        rows=(
            Row("At a glance", _glance()),
            Row("Progress", _progress(), collapsed=True),
            Row("Phases", _phases()),
            Row("Learning", _learning(), collapsed=True),
            Row("Checkpoints", checkpoints(), collapsed=True),
            Row("Goodput and failures", goodput(), collapsed=True),
            Row("Events and identity", identity(), collapsed=True),
            Row("Optional: time and memory of the GPU, room for checkpoints", optional(), collapsed=True),
        ),
        marks=(RESTARTS, CHECKPOINTS, ALERTS_OF_RUN),
    )


def _state(states: str) -> str:
    """Return PromQL for the present state of the run if it is one of these, with the reason of an end."""
    state = f'max by (state) (training_run_state{{@run, state=~"{states}"}} == 1)'
    outcome = 'max by (state, reason) (label_replace(training_run_outcome_info{@run}, "state", "$1", "outcome", "(.*)"))'
    return f"({state} * on (state) group_right () {outcome} or on (state) {state})"


def _glance() -> tuple[Panel, ...]:
    marks: list[Override] = [
        {
            "matcher": {"id": "byFrameRefID", "options": "B"},
            "properties": [
                {"id": "color", "value": fixed(BAD)},
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
    alive = "count(max by (rank) (training_process_up{@run}) == 1)"
    ended = 'max(training_run_state{@run, state=~"finished|stopped"}) == 1'
    return (
        stat(
            "State",
            now(
                f"{_state('running|finished')} * 0 or {_state('starting|ending|stalled|stopped')}"
                f" or {_state('hung|failed|lost')} * 2",
                "{{state}} {{reason}}",
            ),
            unit="none",
            text="name",
            thresholds=steps((None, GOOD), (1, WARNING), (2, BAD)),
            w=8,
        ),
        stat(
            "Since",
            now("max(training_run_state_since_timestamp_seconds{@run}) * 1000"),
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
            now(f"{alive} or vector(0)", "alive"),
            now("max(training_world_size{@run})", "of"),
            now(
                f"clamp_min(max(training_world_size{{@run}}) - ({alive} or vector(0)), 0) unless on () {ended}",
                "missing",
                BAD,
            ),
            unit="none",
            text="value_and_name",
            w=4,
        ),
        stat(
            "Slowest rank",
            now(f"bottomk(1, scalar(min({COMPUTE})) / {COMPUTE})", "rank {{rank}}"),
            unit="percentunit",
            decimals=0,
            text="value_and_name",
            thresholds=below(0.9, 0.75),
        ),
        stat(
            "Waiting for data",
            now(
                'topk(1, max by (rank) (rate(training_phase_seconds_total{@run, phase="data_loading"}[5m])))'
                f" / on () group_left () {OBSERVED}",
                "rank {{rank}}",
            ),
            unit="percentunit",
            decimals=0,
            text="value_and_name",
            thresholds=above(0.05, 0.2),
        ),
        stat(
            "Last step",
            now("time() - max(training_last_progress_timestamp_seconds{@run})"),
            unit="s",
            decimals=0,
            thresholds=above(60, 300),
        ),
        stat(
            "Step",
            now("max(training_step{@run})", "now"),
            now("max(training_step_target{@run})", "of"),
            unit="locale",
            text="value_and_name",
        ),
        stat(
            "Time left",
            now(
                "clamp_min(max(training_step_target{@run}) - max(training_step{@run}), 0)"
                f' / (max(rate(training_steps_total{{@run, mode="train"}}[5m])) / {OBSERVED} > 0)'
            ),
            unit="dthms",
        ),
        stat(
            "Failures",
            now(
                'sum(increase(training_checkpoints_total{@run, result="failed"}[$__range]))'
                " or 0 * max(training_wall_seconds_total{@run})",
                "failed saves",
            ),
            now(
                "sum(increase(training_restarts_total{@run}[$__range])) or 0 * max(training_wall_seconds_total{@run})",
                "restarts",
            ),
            now(
                "sum(increase(training_nonfinite_total{@run}[$__range])) or 0 * max(training_wall_seconds_total{@run})",
                "NaN",
            ),
            unit="none",
            decimals=0,
            text="value_and_name",
            thresholds=above(1, 1),
            w=5,
        ),
        stat(
            "Goodput, committed",
            now(f"max(training_productive_seconds_total{{@run}}) / max({WALL})"),
            unit="percentunit",
            decimals=1,
            thresholds=below(0.9, 0.7),
        ),
        stat(
            "Cost so far",
            now("sum by (currency) (training_cost_total{@run})", "{{currency}}"),
            now("sum(training_energy_joules_total{@run}) / 3.6e6", "kWh"),
            unit="none",
            decimals=2,
            text="value_and_name",
            w=3,
        ),
        lines(
            "Loss",
            Query("max by (mode) (training_loss{@run})", "{{mode}}"),
            Query(
                f"max by (kind, value) ({events('training_nonfinite_total{@run}', 'kind, value', born=True)}) > bool 0 == 1",
                "{{kind}} was {{value}}",
            ),
            unit="none",
            least=None,
            overrides=[*named({"train": BLUE, "validation": ORANGE, "test": GREEN}), *marks],
            w=6,
            h=8,
        ),
        lines(
            "Step time",
            Query(MEAN.replace("{past}", ""), "mean", BLUE),
            Query(MEAN.replace("{past}", " offset 1h"), "an hour before", bound=True),
            Query("max(training_step_longest_seconds{@run})", "longest of the last 100", PALE),
            unit="s",
            w=6,
            log_scale=True,
            links=(TO_RANKS,),
        ),
        lines(
            "Throughput",
            Query(
                complete('sum(rate(training_tokens_total{@run, mode="train"}[$__rate_interval]))'),
                "tokens",
                BLUE,
            ),
            Query(
                complete('sum(rate(training_samples_total{@run, mode="train"}[$__rate_interval]))'),
                "samples (right)",
                ORANGE,
                right=True,
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
        lines(
            "GPUs of the run",
            Query(f"avg(max by (uuid) (gpu_sm_activity_ratio) and on (uuid) {UUID_OF})", "SM activity", BLUE),
            Query(
                complete(
                    f"sum({POWERS}) unless on () (count({POWERS}) < count(group by (uuid) ({UUID_OF})))"
                ),
                "power (right)",
                ORANGE,
                right=True,
            ),
            unit="percentunit",
            most=1,
            w=6,
            links=(TO_GPUS,),
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


def _progress() -> tuple[Panel, ...]:
    return (
        lines(
            "MFU and HFU",
            Query(complete(MFU.format(work="model")), "MFU: operations of the model", BLUE),
            Query(complete(MFU.format(work="hardware")), "HFU: with recomputation", ORANGE),
            unit="percentunit",
            w=24,
        ),
        hanging_ranks(),
    )


WORK_PHASES = "|".join(sorted(phases.WORK))
SAVE_PHASES = "|".join(row.name for row in phases.PHASES.values() if row.badput == "checkpoint_save")
NAMED_PHASES = f"{WORK_PHASES}|data_loading|{SAVE_PHASES}"
"""Phases with a colour of their own in *Time by phase*; all others share one."""


def _phases() -> tuple[Panel, ...]:
    def share(matcher: str, by: str = "") -> str:
        """Return the share of the main threads' time that phases of a matcher took."""
        seconds = f"sum by ({by}) (rate(training_phase_seconds_total{{@rank, {matcher}}}[$__rate_interval]))"
        return f"{seconds} / ignoring (phase) group_left () sum(rate(training_phase_seconds_total{{@rank}}[$__rate_interval]))"

    return (
        lines(
            "Time by phase",
            Query(share(f'phase=~"{WORK_PHASES}"', "phase"), "{{phase}}"),
            Query(share('phase="data_loading"', "phase"), "{{phase}}"),
            Query(share(f'phase=~"{SAVE_PHASES}"'), "checkpoint saves"),
            Query(share(f'phase!~"{NAMED_PHASES}"'), "all other phases"),
            unit="percentunit",
            most=1,
            stacked=True,
            color=fixed(GREY),
            overrides=[
                *named({name: color for name, color in PHASES.items() if name in NAMED_PHASES.split("|")}),
                *named({"checkpoint saves": PURPLE, "all other phases": GREY}),
                {"matcher": {"id": "byType", "options": "number"}, "properties": [{"id": "max", "value": 1}]},
            ],
            legend="right",
            decimals=1,
            w=24,
            h=10,
            links=(TO_RANKS,),
        ),
    )


def optional() -> tuple[Panel, ...]:
    """Return the panels of jobs that use CUDA, and of configured checkpoint directories."""
    timed = "sum(rate(training_gpu_timed_steps_total{@rank}[$__rate_interval]))"
    work = f'phase=~"{WORK_PHASES}"'
    return (
        lines(
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
                bound=True,
            ),
            unit="s",
            stacked=True,
            color=fixed(GREY),
            overrides=named(PHASES),
            legend="right",
            w=12,
            h=12,
        ),
        lines(
            "Memory of tensors",
            Query('max by (rank) (training_gpu_memory_bytes{@rank, state="allocated"})', "rank {{rank}}"),
            unit="bytes",
        ),
        lines(
            "Allocation retries and failures",
            Query(events("training_gpu_alloc_retries_total{@rank}"), "tried again", ORANGE),
            Query(events("training_gpu_oom_total{@rank}"), "out of memory", VERMILION),
            unit="none",
            bars=True,
        ),
        stat(
            "Room for checkpoints",
            now("min(training_checkpoint_dir_available_bytes{@run})"),
            unit="bytes",
            w=6,
            h=8,
        ),
    )


def _learning() -> tuple[Panel, ...]:
    return (
        lines(
            "Gradient norm",
            Query("max(training_grad_norm{@run})", "gradient norm", BLUE),
            unit="none",
            soft=False,
        ),
        lines(
            "Learning rate, loss scale",
            Query("max(training_learning_rate{@run})", "learning rate", BLUE),
            Query("max(training_loss_scale{@run})", "loss scale (right)", ORANGE, right=True),
            unit="none",
            soft=False,
        ),
    )


def checkpoints() -> tuple[Panel, ...]:
    """Return the panels about saving: how often, how long, and what is at risk meanwhile."""

    def mean(part: str) -> str:
        rate = f'sum(rate(training_checkpoint_duration_seconds_{{}}{{{{@run, part="{part}"}}}}[$__rate_interval]))'
        return f"{rate.format('sum')} / ({rate.format('count')} > 0)"

    return (
        lines(
            "Unsaved work",
            Query("max(training_uncommitted_seconds{@run})", "since the last checkpoint", BLUE),
            Query("max(training_checkpoint_interval_seconds{@run})", "usual interval", bound=True),
            unit="s",
            fill=10,
            w=8,
        ),
        lines(
            "Checkpoint duration",
            Query(mean("blocking"), "blocking", VERMILION),
            Query(mean("total"), "total", BLUE, dashed=True),
            unit="s",
            w=8,
        ),
        lines(
            "Checkpoints by result",
            Query(events("training_checkpoints_total{@run}", "result", born=True), "{{result}}"),
            unit="none",
            bars=True,
            overrides=named({"ok": BLUE, "failed": VERMILION}),
            w=6,
        ),
    )


def goodput() -> tuple[Panel, ...]:
    """Return the panels about time that was lost, and to what."""
    return (
        lines(
            "Goodput",
            Query(
                f"max by (run) (training_productive_seconds_total{{@run}}) / {WALL}",
                "committed",
                BLUE,
            ),
            Query(
                f"1 - max by (run) (sum by (instance, run) (training_badput_seconds_total{{@run}})) / {WALL}",
                "if saved",
                GREEN,
            ),
            unit="percentunit",
            most=1,
            w=8,
        ),
        lines(
            "Badput by cause",
            Query(
                f"max by (run, cause) (training_badput_seconds_total{{@run}} > 0) / on (run) group_left () {WALL}",
                "{{cause}}",
            ),
            unit="percentunit",
            stacked=True,
            overrides=named(CAUSES),
            w=8,
        ),
        stat("Lost steps", now("max(training_lost_steps_total{@run})"), unit="locale", w=8, h=8),
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


def identity() -> tuple[Panel, ...]:
    """Return the panels about events, and about who the run is."""
    return (
        lines(
            "Events",
            Query(
                events("training_events_total{@run}", "type, severity", born=True), "{{type}} ({{severity}})"
            ),
            unit="none",
            bars=True,
            overrides=[
                of_series({"id": "byRegexp", "options": f"/\\({severity}\\)$/"}, shades(color))
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
            of="max by (run, job_name, user, model, framework, precision, world_size, perf_tag) (training_run_info{@run})",
            h=4,
        ),
    )
