"""Rows of the dashboard *Training run*: checkpoints, what failures cost, memory, and who the run is."""

from __future__ import annotations

from dashboards.palette import BLUE, CAUSES, GREEN, GREY, ORANGE, VERMILION, fixed, named, shades
from dashboards.panels import About, Panel, above, bars, lines, stat
from dashboards.queries import Query, events, now
from dashboards.tables import Column, table

NO_CHECKPOINT = "No checkpoint yet, or the job does not tell of them."
NO_LEDGER = "No time is counted: the job does not use exporter.training or a bridge."
WALL = "max by (run) (training_wall_seconds_total{@run})"


def checkpoints() -> tuple[Panel, ...]:
    """Give the panels about saving: how often, how long, and what is at risk meanwhile."""
    blocking = "sum by (le, part) (rate(training_checkpoint_duration_seconds_bucket{@run}[$__rate_interval]))"
    return (
        lines(
            "How much work is at risk?",
            Query("max(training_uncommitted_seconds{@run})", "since the last checkpoint", BLUE),
            Query("max(training_checkpoint_interval_seconds{@run})", "usual interval", bound=True),
            unit="s",
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
            Query(events("training_checkpoints_total{@run}", "result"), "{{result}}"),
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


def goodput() -> tuple[Panel, ...]:
    """Give the panels about time that was lost, and to what."""
    return (
        lines(
            "How much of the time was productive?",
            Query(
                f"max by (run) (training_productive_seconds_total{{@run}}) / {WALL}",
                "saved by a checkpoint",
                BLUE,
            ),
            Query(
                f"1 - max by (run) (sum by (instance, run) (training_badput_seconds_total{{@run}})) / {WALL}",
                "known not to be lost",
                GREEN,
            ),
            unit="percentunit",
            most=1,
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
            Column("reason", "Reason"),
            Column("sum by (reason) (training_interruptions_total{@run}) > 0", "Interruptions", width=140),
            Column("sum by (reason) (training_restarts_total{@run}) > 0", "Restarts", width=110),
            sort="Interruptions",
            w=7,
            h=4,
            about=About(
                "Ends of attempts by reason, and what the run was restarted after.",
                "`oom_kill` (memory of the machine), `gpu` and `gpu_memory`, `nccl_timeout` (a rank hung), `storage`.",
                "`gpu`: *GPUs*, Xid errors. `oom_kill`: *Node and container*. `nccl_timeout`: *Ranks and stragglers*.",
                "it was never interrupted.",
            ),
            empty="No interruption is known.",
        ),
    )


def allocator() -> tuple[Panel, ...]:
    """Give the panels about memory as PyTorch's allocator sees it."""
    empty = (
        "The job does not use torch.cuda, or does not tell (exporter.training reads it where torch is there)."
    )
    return (
        lines(
            "How much memory do tensors take?",
            Query('max by (rank) (training_gpu_memory_bytes{@rank, state="allocated"})', "rank {{rank}}"),
            unit="bytes",
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
            Query(events("training_gpu_alloc_retries_total{@rank}"), "tried again", ORANGE),
            Query(events("training_gpu_oom_total{@rank}"), "out of memory", VERMILION),
            unit="none",
            bars=True,
            w=8,
            about=About(
                "Allocations that had to give cached memory back first, and those that failed.",
                "any: a retry stops the GPU for milliseconds.",
                "a smaller batch, or activation checkpointing.",
            ),
            empty=empty,
        ),
    )


def identity() -> tuple[Panel, ...]:
    """Give the panels about events, and about who the run is."""
    return (
        lines(
            "Events",
            Query(
                events("training_events_total{@run}", "type, severity", born=True), "{{type}} ({{severity}})"
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
            Column("run", "Run"),
            Column("job_name", "Job"),
            Column("user", "User"),
            Column("model", "Model"),
            Column("framework", "Framework"),
            Column("precision", "Precision"),
            Column("world_size", "Ranks", width=80),
            Column("perf_tag", "Comparable with (perf_tag)"),
            of="max by (run, job_name, user, model, framework, precision, world_size, perf_tag) (training_run_info{@run})",
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
