"""The dashboard *Training run*: is it progressing, what is it doing, and what did its time go into."""

from __future__ import annotations

from dashboards.board import ALERTS_OF_RUN, CHECKPOINTS, ONE_RUN, RANK, RESTARTS, Board, Row
from dashboards.palette import (
    BAD,
    BLUE,
    CAUSES,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PHASES,
    PLAIN,
    PURPLE,
    SKY,
    VERMILION,
    WARNING,
    Override,
    bound,
    by_last_character,
    fixed,
    named,
    shades,
)
from dashboards.panels import About, Column, Panel, above, bars, below, heatmap, lines, stat, steps, table, to
from dashboards.queries import Query, events, now, rows

UID = "training-run"

NOT_TOLD = "The job does not tell it: see the table of bridges, or call exporter.training."
NO_STEPS = "No steps: the job does not use exporter.training or a bridge, or has not begun."
NO_CHECKPOINT = "No checkpoint yet, or the job does not tell of them."
NO_LEDGER = "No time is counted: the job does not use exporter.training or a bridge."
TO_RANKS = to("training-ranks", "Ranks and stragglers", run="${run}")

STEP_BUCKETS = (
    'sum by (le) (rate(training_step_duration_seconds_bucket{@run, mode="train"}[$__rate_interval]))'
)
MFU = (
    "sum(rate(training_{work}_flops_total{{@run}}[$__rate_interval]) and on (instance, run, rank) training_peak_flops{{@run}})"
    " / sum(training_peak_flops{{@run}})"
)
"""Of the ranks whose peak is known: totals of dead ones linger, their peak does not."""
WALL = "max by (run) (training_wall_seconds_total{@run})"


def board() -> Board:
    """The dashboard."""
    return Board(
        uid=UID,
        title="Training / Run",
        what="Is this run progressing, how fast, what is it waiting for, and what did its failures cost?",
        variables=(ONE_RUN, RANK),
        rows=(
            Row("At a glance", _glance()),
            Row("Is it progressing, and how fast?", _progress()),
            Row("What does its time go into?", _phases()),
            Row("Is it learning?", _learning()),
            Row("Checkpoints", _checkpoints()),
            Row("What did failures and waiting cost?", _goodput()),
            Row("Memory as PyTorch's allocator sees it", _allocator(), collapsed=True),
            Row("Events, and who the run is", _identity(), collapsed=True),
        ),
        marks=(RESTARTS, CHECKPOINTS, ALERTS_OF_RUN),
    )


def _glance() -> tuple[Panel, ...]:
    return (
        stat(
            "Since the last step",
            now("time() - max(training_last_progress_timestamp_seconds{@run})"),
            unit="s",
            decimals=0,
            thresholds=above(60, 300),
            about=About(
                "Time since a rank finished a step or a batch of validation.",
                "much longer than the longest step (*How long does a step take?*); above five minutes it hangs, "
                "unless it validates, saves or starts, which the next panel says.",
                "*Ranks and stragglers* shows which rank stopped first and in which phase; `py-spy dump` on that one.",
                "no rank has made a step yet, or none is known any more.",
            ),
            empty="no steps",
        ),
        stat(
            "What is it doing now?",
            now("count by (phase) (training_phase_active{@run} == 1)", "{{phase}}"),
            unit="none",
            text="value_and_name",
            color={"mode": "fixed", "fixedColor": PLAIN},
            w=8,
            about=About(
                "Ranks by the phase that they are in at the moment.",
                "all but one wait in `grad_sync` or `backward`: they wait for the one that is elsewhere.",
                "*Ranks and stragglers* names it, with its node and GPU.",
                "the job tells no phases, or no process of it lives.",
            ),
            empty="no phases",
        ),
        stat(
            "Step",
            now("max(training_step{@run})", "now"),
            now("max(training_step_target{@run})", "of"),
            unit="locale",
            text="value_and_name",
            about=About(
                "The step that the run is at, and the one that it ends at.",
                "it goes back after a restart: those steps are done again (*Lost steps*).",
                "save more often: *Checkpoints* says how often.",
                "the job does not tell.",
            ),
        ),
        stat(
            "Time left",
            now(
                "clamp_min(max(training_step_target{@run}) - max(training_step{@run}), 0)"
                ' / (max(rate(training_steps_total{@run, mode="train"}[5m])) > 0)'
            ),
            unit="dtdurations",
            about=About(
                "Steps that are left, at the speed of the last five minutes.",
                "it grows: the run slows down, or stands still now and then.",
                "see what its time goes into.",
                "it stands still now, or has no target.",
            ),
            empty="stands still, or no target",
        ),
        stat(
            "Goodput so far",
            now(f"max(training_productive_seconds_total{{@run}}) / max({WALL})"),
            unit="percentunit",
            decimals=1,
            thresholds=below(0.9, 0.7),
            about=About(
                "Share of the time since the first attempt that went into steps which a checkpoint has made safe.",
                "below 90 % after some hours; just after the start it is low since nothing is saved yet.",
                "*What did failures and waiting cost?* says what the rest went into.",
                "no time is counted for this run.",
            ),
        ),
    )


def _progress() -> tuple[Panel, ...]:
    return (
        lines(
            "Which step is it at?",
            Query("max(training_step{@run})", "step"),
            unit="locale",
            overrides=named({"step": BLUE}),
            w=8,
            about=About(
                "The number of the step; a straight climb is a steady run. Orange-red lines mark attempts, purple ones "
                "checkpoints.",
                "a flat part (it waits or hangs), or a fall (a restart from an older checkpoint).",
                "flat: the phases below say what it does. Fall: *What did failures cost?*.",
                "no process of the job lives, or it does not tell its step.",
            ),
            empty=NO_STEPS,
        ),
        lines(
            "How many tokens or samples a second?",
            Query('sum(rate(training_tokens_total{@run, mode="train"}[$__rate_interval]))', "tokens"),
            Query('sum(rate(training_samples_total{@run, mode="train"}[$__rate_interval]))', "samples"),
            unit="cps",
            overrides=[
                *named({"tokens": BLUE, "samples": ORANGE}),
                {
                    "matcher": {"id": "byName", "options": "samples"},
                    "properties": [{"id": "custom.axisPlacement", "value": "right"}],
                },
            ],
            w=8,
            about=About(
                "Throughput of the whole run: tokens on the left, samples on the right.",
                "a step down that lasts: something was changed or throttled; zeros at intervals: it saves or validates.",
                "compare with *GPUs* (clocks) and with the data wait below.",
            ),
            empty=NOT_TOLD,
        ),
        lines(
            "How much of the GPUs' arithmetic is used?",
            Query(
                MFU.format(work="model"),
                "MFU: the model's own",
            ),
            Query(
                MFU.format(work="hardware"),
                "HFU: with recomputation",
            ),
            unit="percentunit",
            overrides=named({"MFU: the model's own": BLUE, "HFU: with recomputation": ORANGE}),
            w=8,
            about=About(
                "Floating point operations of the model as a share of what the GPUs could do (the peak is exported "
                "with its source). Formulas differ: compare only runs of one `flops_method`.",
                "below 30 % for large transformers.",
                "tensor activity on *GPUs* says whether the kernels or the waiting are at fault.",
            ),
            empty="The job tells no FLOPs, or the peak of its device is not known.",
        ),
        lines(
            "How long does a step take?",
            Query(f"histogram_quantile(0.5, {STEP_BUCKETS})", "median, by buckets"),
            Query(f"histogram_quantile(0.99, {STEP_BUCKETS})", "99 of 100 are below"),
            Query(
                'sum(rate(training_step_duration_seconds_sum{@run, mode="train"}[$__rate_interval]))'
                ' / sum(rate(training_step_duration_seconds_count{@run, mode="train"}[$__rate_interval]))',
                "mean",
            ),
            Query("max(training_step_longest_seconds{@run})", "longest of the last 100"),
            Query("max(training_step_ideal_seconds{@run})", "undisturbed"),
            unit="s",
            overrides=[
                *named(
                    {
                        "median, by buckets": PALE,
                        "mean": BLUE,
                        "99 of 100 are below": ORANGE,
                        "longest of the last 100": VERMILION,
                    }
                ),
                bound("undisturbed"),
            ],
            logarithmic=True,
            links=(TO_RANKS,),
            about=About(
                "Time of training steps; *undisturbed* is the mean of those without outliers. Quantiles come from a histogram and "
                "are as rough as its buckets; the mean is exact.",
                "a mean well above *undisturbed*, or a widening distance to the upper lines.",
                "a regular pattern is the data loader or a periodic task; a steady rise, memory or heat.",
                "no step ended in that interval.",
            ),
            empty=NO_STEPS,
        ),
        heatmap(
            "How are the steps' times spread?",
            Query(
                'sum by (le) (increase(training_step_duration_seconds_bucket{@run, mode="train"}[$__rate_interval]))',
                "{{le}}",
                heatmap=True,
            ),
            unit="none",
            axis="s",
            about=About(
                "Steps by how long they took; a light field is where most are.",
                "two bands: every n-th step does something more, or one in n waits.",
                "count how often the upper band comes: it is the period of the cause.",
                "no step ended in that interval.",
            ),
            empty=NO_STEPS,
        ),
    )


def _phases() -> tuple[Panel, ...]:
    share = "sum by (phase) (rate(training_phase_seconds_total{@rank}[$__rate_interval]))"
    wait = (
        'sum by (rank) (rate(training_phase_seconds_total{@rank, phase="data_loading"}[$__rate_interval]))'
        " / sum by (rank) (rate(training_phase_seconds_total{@rank}[$__rate_interval]))"
    )
    return (
        lines(
            "What does the time go into?",
            Query(
                f"{share} / ignoring (phase) group_left ()"
                " sum(rate(training_phase_seconds_total{@rank}[$__rate_interval]))",
                "{{phase}}",
            ),
            unit="percentunit",
            most=1,
            stacked=True,
            color=fixed(GREY),
            overrides=named(PHASES),
            legend="right",
            w=16,
            h=10,
            links=(TO_RANKS,),
            about=About(
                "Time of the main threads by phase, as shares of it, over the chosen ranks. Blue and green is work, "
                "orange waiting for data, purple checkpoints, brown starting.",
                "orange above 20 %; purple above 5 %; grey (*other*) above 10 %: time that nobody has named.",
                "orange: more or faster data workers. Purple: asynchronous checkpoints. Grey: put a span around it.",
                "no process of the chosen ranks lived then.",
            ),
            empty="The job tells no phases: spans of exporter.training or a bridge make them.",
        ),
        lines(
            "How long do ranks wait for data?",
            Query(f"quantile(0.5, {wait})", "median rank"),
            Query(f"max({wait})", "worst rank"),
            unit="percentunit",
            most=1,
            overrides=named({"median rank": BLUE, "worst rank": VERMILION}),
            thresholds=steps((None, PLAIN), (0.2, WARNING)),
            w=8,
            h=5,
            links=(TO_RANKS,),
            about=About(
                "Share of each rank's time in which it waited for the next batch.",
                "above the dashed line (20 %); only the worst: that rank's data or disk.",
                "all: `num_workers`, prefetch, cheaper decoding. One: *Node and container* of its node.",
                "no rank loaded data then.",
            ),
            empty="The job tells no data_loading phase.",
        ),
        lines(
            "What goes on in the background?",
            Query(
                "sum by (task) (rate(training_background_seconds_total{@run}[$__rate_interval]))", "{{task}}"
            ),
            unit="percentunit",
            color=shades(PURPLE),
            w=8,
            h=5,
            about=About(
                "Share of time in which a task ran beside training: uploads of checkpoints, prefetching.",
                "an upload at 100 %: the next checkpoint has to wait for it.",
                "save less often, or to something faster.",
                "nothing ran beside training.",
            ),
            empty="No task beside training was told.",
        ),
    )


def _learning() -> tuple[Panel, ...]:
    marks: list[Override] = [
        {
            "matcher": {"id": "byFrameRefID", "options": "B"},
            "properties": [
                {"id": "color", "value": fixed(BAD)},
                {"id": "custom.drawStyle", "value": "points"},
                {"id": "custom.showPoints", "value": "always"},
                {"id": "custom.pointSize", "value": 9},
                {"id": "custom.axisPlacement", "value": "hidden"},
                {"id": "unit", "value": "none"},
            ],
        }
    ]
    return (
        lines(
            "How large is the loss?",
            Query("max by (mode) (training_loss{@run})", "{{mode}}"),
            Query(
                events("training_nonfinite_total{@run}", "kind, value", born=True) + " > 0",
                "{{kind}} was {{value}}",
            ),
            unit="none",
            least=None,
            overrides=[*named({"train": BLUE, "validation": ORANGE, "test": GREEN}), *marks],
            w=12,
            h=9,
            about=About(
                "The last finite loss of rank 0; a dot marks an interval with losses or gradients that were no numbers.",
                "a dot; a rise that does not end; a train loss that falls while validation rises.",
                "a dot: find the batch (`training_skipped_steps_total` says whether it was skipped), go back to the "
                "checkpoint before. Rise: the learning rate.",
                "no loss was told in that interval: validation is told when it runs.",
            ),
            empty="The job tells no loss.",
        ),
        lines(
            "How large are the gradients?",
            Query("max(training_grad_norm{@run})", "gradient norm"),
            unit="none",
            soft=False,
            overrides=named({"gradient norm": BLUE}),
            w=6,
            h=9,
            about=About(
                "Norm of the gradients, before clipping where the job tells it so.",
                "spikes that become more frequent: they come before a loss that is no number.",
                "lower the learning rate, or clip.",
            ),
            empty="The job tells no gradient norm.",
        ),
        lines(
            "Learning rate, loss scale",
            Query("max(training_learning_rate{@run})", "learning rate"),
            Query("max(training_loss_scale{@run})", "loss scale (right)"),
            unit="none",
            soft=False,
            overrides=[
                *named({"learning rate": BLUE, "loss scale (right)": ORANGE}),
                {
                    "matcher": {"id": "byName", "options": "loss scale (right)"},
                    "properties": [{"id": "custom.axisPlacement", "value": "right"}],
                },
            ],
            w=6,
            h=5,
            about=About(
                "The schedule as it is; with mixed precision the loss scale too.",
                "a loss scale that only falls.",
                "gradients overflow at every scale: look for the operation that does.",
            ),
            empty="The job tells neither.",
        ),
        lines(
            "Skipped steps",
            Query(
                events("training_skipped_steps_total{@run}", "reason", born=True),
                "{{reason}}",
            ),
            unit="none",
            bars=True,
            overrides=named({"overflow": ORANGE, "nonfinite": VERMILION}),
            w=6,
            h=4,
            about=About(
                "Steps whose update was not applied.",
                "more than one in ten.",
                "an overflow now and then is how the loss scale is found; more is not.",
            ),
            empty="None was told.",
        ),
    )


def _checkpoints() -> tuple[Panel, ...]:
    blocking = "sum by (le, part) (rate(training_checkpoint_duration_seconds_bucket{@run}[$__rate_interval]))"
    return (
        lines(
            "How much work is at risk?",
            Query("max(training_uncommitted_seconds{@run})", "since the last checkpoint"),
            Query("max(training_checkpoint_interval_seconds{@run})", "usual interval"),
            unit="s",
            overrides=[*named({"since the last checkpoint": BLUE}), bound("usual interval")],
            fill=10,
            w=8,
            about=About(
                "Time of steps that no checkpoint has made safe: a crash now would lose it.",
                "a tooth that rises above three times the usual interval.",
                "the next panels: do saves fail, is the disk full?",
                "the run has not begun.",
            ),
            empty=NO_CHECKPOINT,
        ),
        lines(
            "How long does a checkpoint take?",
            Query(f"histogram_quantile(0.5, {blocking})", "{{part}}, median"),
            unit="s",
            overrides=named({"blocking, median": VERMILION, "total, median": BLUE}),
            w=8,
            about=About(
                "Time in which training stands still for a checkpoint (blocking), and until it is safe (total).",
                "blocking time that grows: a slower filesystem or a larger state.",
                "save asynchronously, or in shards.",
                "no checkpoint ended in that interval.",
            ),
            empty=NO_CHECKPOINT,
        ),
        lines(
            "Do checkpoints succeed?",
            Query(
                events("training_checkpoints_total{@run}", "result"),
                "{{result}}",
            ),
            unit="none",
            bars=True,
            overrides=named({"ok": BLUE, "failed": VERMILION}),
            w=8,
            about=About(
                "Checkpoints in each interval by what became of them.",
                "any that failed: the work at risk goes on growing.",
                "the job's log has the error; mostly a full disk or a quota.",
                "the job does not tell of checkpoints.",
            ),
            empty=NO_CHECKPOINT,
        ),
        stat(
            "Since the last checkpoint",
            now("time() - max(training_checkpoint_last_success_timestamp_seconds{@run})"),
            unit="s",
            decimals=0,
            w=6,
            about=About(
                "Time since a checkpoint succeeded.",
                "more than three of the usual intervals.",
                "see whether saves fail.",
                "none has succeeded yet.",
            ),
            empty="none yet",
        ),
        stat(
            "Size of the last one",
            now("max(training_checkpoint_last_bytes{@run})"),
            unit="bytes",
            w=6,
            about=About(
                "What the last checkpoint takes on disk.",
                "more than half of what the filesystem has left.",
                "remove old ones before the next is due.",
                "the job does not tell.",
            ),
            empty="not told",
        ),
        stat(
            "Room for checkpoints",
            now("min(training_checkpoint_dir_available_bytes{@run})"),
            unit="bytes",
            w=6,
            about=About(
                "What the filesystem of the checkpoints has left.",
                "less than two checkpoints need.",
                "remove old ones.",
                "no directory of checkpoints is configured.",
            ),
            empty="not configured",
        ),
        stat(
            "How often should it save?",
            now(
                "sqrt(2 * (histogram_quantile(0.5, sum by (le)"
                ' (training_checkpoint_duration_seconds_bucket{@run, part="blocking"})))'
                f" * max({WALL}) / (sum(training_interruptions_total{{@run}}) > 0))"
            ),
            unit="s",
            decimals=0,
            w=6,
            about=About(
                "The interval that loses least (Young, Daly): square root of twice the time of a save times the mean "
                "time between interruptions.",
                "far from the usual interval, in either direction.",
                "set the job's interval near it; after few interruptions it is a rough guess.",
                "no interruption yet, or no checkpoint.",
            ),
            empty="no interruption yet",
        ),
    )


def _goodput() -> tuple[Panel, ...]:
    return (
        lines(
            "How much of the time was productive?",
            Query(
                f"max by (run) (training_productive_seconds_total{{@run}}) / {WALL}", "saved by a checkpoint"
            ),
            Query(
                f"1 - max by (run) (sum by (instance, run) (training_badput_seconds_total{{@run}})) / {WALL}",
                "known not to be lost",
            ),
            unit="percentunit",
            most=1,
            overrides=named({"saved by a checkpoint": BLUE, "known not to be lost": SKY}),
            w=8,
            about=About(
                "Goodput since the first attempt. The lower line counts work that a checkpoint has made safe and rises "
                "in steps; the upper one all time that is not known to be lost.",
                "below 90 % after some hours.",
                "the causes are beside.",
                "no time is counted for the run then.",
            ),
            empty=NO_LEDGER,
        ),
        lines(
            "What was the rest lost to?",
            Query(
                f"max by (run, cause) (training_badput_seconds_total{{@run}}) / on (run) group_left () {WALL}",
                "{{cause}}",
            ),
            unit="percentunit",
            stacked=True,
            overrides=named(CAUSES),
            w=8,
            about=About(
                "Badput by cause, as shares of the time since the first attempt.",
                "a cause that grows: `lost_progress` (work done again after a crash), `downtime` (nothing ran), "
                "`data_stall`, `checkpoint_save`, `hang`.",
                "`lost_progress`: save more often. `downtime`: faster restarts, spare nodes. `init`, `compile`: caches.",
                "no time is counted for the run then.",
            ),
            empty=NO_LEDGER,
        ),
        bars(
            "How much, since the first attempt?",
            now("max by (cause) (training_badput_seconds_total{@run}) > 0", "{{cause}}"),
            unit="s",
            overrides=named(CAUSES),
            color=fixed(GREY),
            w=8,
            about=About(
                "Lost time by cause.",
                "the longest bar is what to work on.",
                "as beside.",
                "nothing was lost, or no time is counted.",
            ),
            empty="Nothing was lost, or no time is counted for this run.",
        ),
        stat(
            "Attempts",
            now("max(training_attempt{@run})"),
            unit="none",
            w=4,
            thresholds=above(3),
            about=About(
                "How often the run was started.",
                "more than three in an hour: it fails in the same place again.",
                "the reasons are beside; the job's log has the exception.",
            ),
        ),
        stat(
            "Lost steps",
            now("max(training_lost_steps_total{@run})"),
            unit="locale",
            w=4,
            about=About(
                "Steps that were done, lost in a crash, and done again.",
                "more than a checkpoint's interval for each restart.",
                "save more often.",
            ),
        ),
        stat(
            "Mean time between interruptions",
            now(f"max({WALL}) / (sum(training_interruptions_total{{@run}}) > 0)"),
            unit="dtdurations",
            w=5,
            about=About(
                "Time since the first attempt, by the number of interruptions.",
                "shorter than a few checkpoint intervals.",
                "the reasons are beside.",
                "there was no interruption.",
            ),
            empty="none yet",
        ),
        stat(
            "Until the first step",
            now("max(training_time_to_first_step_seconds{@run})"),
            unit="s",
            decimals=1,
            w=4,
            about=About(
                "How long the present attempt took to make its first step.",
                "minutes, with many restarts.",
                "caches of compilers and data, faster loading of checkpoints.",
                "no step yet.",
            ),
            empty="no step yet",
        ),
        table(
            "Why was it interrupted, and restarted?",
            rows("sum by (reason) (training_interruptions_total{@run})"),
            rows("sum by (reason) (training_restarts_total{@run})"),
            columns=(
                Column("reason", "Reason"),
                Column("A", "Interruptions", unit="none", width=130),
                Column("B", "Restarts", unit="none", width=110),
            ),
            sort="Interruptions",
            w=7,
            h=4,
            about=About(
                "Ends of attempts by reason, and what the run was restarted after.",
                "`oom_kill` (memory of the machine), `gpu` and `gpu_memory`, `nccl_timeout` (a rank hung), `storage`.",
                "`gpu`: *GPUs*, Xid errors. `oom_kill`: *Node and container*. `nccl_timeout`: *Ranks and stragglers*.",
                "it was never interrupted.",
            ),
            empty="It was never interrupted.",
        ),
    )


def _allocator() -> tuple[Panel, ...]:
    empty = (
        "The job does not use torch.cuda, or does not tell (exporter.training reads it where torch is there)."
    )
    return (
        lines(
            "How much memory do tensors take?",
            Query('max by (rank) (training_gpu_memory_bytes{@rank, state="allocated"})', "rank {{rank}}"),
            unit="bytes",
            overrides=by_last_character(),
            w=8,
            about=About(
                "Memory of living tensors, by rank.",
                "a climb from step to step: something keeps tensors (a list of losses is the usual one).",
                "`loss.item()` or `detach()` before keeping.",
            ),
            empty=empty,
        ),
        lines(
            "How much does the allocator keep?",
            Query('max by (rank) (training_gpu_memory_bytes{@rank, state="reserved"})', "rank {{rank}}"),
            unit="bytes",
            overrides=by_last_character(),
            w=8,
            about=About(
                "Memory that PyTorch holds, in use or not.",
                "much more than the tensors take: fragmentation.",
                "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.",
            ),
            empty=empty,
        ),
        lines(
            "Did it have to try again, or run out?",
            Query(events("training_gpu_alloc_retries_total{@rank}"), "tried again"),
            Query(events("training_gpu_oom_total{@rank}"), "out of memory"),
            unit="none",
            bars=True,
            overrides=named({"tried again": ORANGE, "out of memory": VERMILION}),
            w=8,
            about=About(
                "Allocations that had to give cached memory back first, and those that failed.",
                "any: a retry stops the GPU for milliseconds.",
                "a smaller batch, or activation checkpointing.",
            ),
            empty=empty,
        ),
    )


def _identity() -> tuple[Panel, ...]:
    return (
        lines(
            "Events",
            Query(
                events("training_events_total{@run}", "type, severity", born=True),
                "{{type}} ({{severity}})",
            ),
            unit="none",
            bars=True,
            color=shades(BLUE),
            w=12,
            about=About(
                "What the job has logged with `exporter.log`, by type and severity.",
                "errors.",
                "the job's event file has their text.",
                "nothing was logged.",
            ),
            empty="The job has logged no event.",
        ),
        table(
            "Who is this run?",
            rows(
                "max by (run, job_name, user, model, framework, precision, world_size, perf_tag) (training_run_info{@run})"
            ),
            columns=(
                Column("run", "Run"),
                Column("job_name", "Job"),
                Column("user", "User"),
                Column("model", "Model"),
                Column("framework", "Framework"),
                Column("precision", "Precision"),
                Column("world_size", "Ranks", width=80),
                Column("perf_tag", "Comparable with (perf_tag)"),
            ),
            w=12,
            h=8,
            about=About(
                "What the job says of itself.",
                "empty fields: nobody can compare it later.",
                "`EXPORTER_RUN`, `exporter.training` configuration.",
                "the job does not tell.",
            ),
            empty="The job does not tell who it is.",
        ),
        lines(
            "Was the API misused?",
            Query("sum by (call, rule) (training_misuse_total{@run})", "{{call}}: {{rule}}"),
            unit="none",
            color=shades(ORANGE),
            legend="right",
            w=24,
            h=6,
            about=About(
                "Calls of exporter.training that came out of order or with values that cannot be.",
                "any: numbers around it may lack that span.",
                "the log of the job names the call and what was expected.",
                "never.",
            ),
            empty="Never.",
        ),
    )
