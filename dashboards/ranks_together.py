"""Rows of the dashboard *Ranks and stragglers*: do all do the same, and the chosen ranks closely."""

from __future__ import annotations

from dashboards.palette import BAD, BLUE, ORANGE, PHASES, VERMILION, WARNING, named
from dashboards.panels import About, Panel, heatmap, lines, to, words
from dashboards.queries import Query
from dashboards.tables import Column, table

GPU_OF = (
    "(max by (instance, rank, gpu) (0 * training_process_gpu_memory_bytes{@run} + 1)"
    " or on (instance, rank) max by (instance, rank, gpu)"
    ' (label_replace(training_rank_info{@run, local_rank!=""}, "gpu", "$1", "local_rank", "(.+)")))'
)
"""Which GPU a rank has: as the driver says, else the one of its local rank's number, as launchers have it."""
OTHERS = (
    "(max by (instance, rank, phase) (training_phase_active{@run} == 1)"
    " unless on (phase) topk(1, count by (phase) (training_phase_active{@run} == 1)))"
)
"""Ranks whose phase is not that of most."""
SILENT = (
    "max by (instance, rank) (training_process_up{@run}) == 0 or"
    " max by (instance, rank) (time() - training_feed_last_update_timestamp_seconds{@run} > 10) * 0 + 1"
)
"""0 for ranks that have ended, 1 for those that live and say nothing."""
NO_COMPUTE = "The job tells no steps: it needs exporter.training or a bridge on every rank."
NO_PHASES = "The job tells no phases on these ranks."
TO_GPUS = to("training-gpus", "GPUs of this node", node="${__data.fields.Node}")
TO_NODE = to("training-node", "Node and container", node="${__data.fields.Node}")


def together() -> tuple[Panel, ...]:
    """Give the panels about ranks that do something else than the others, or nothing."""
    return (
        lines(
            "What do the ranks do?",
            Query("count by (phase) (training_phase_active{@run} == 1)", "{{phase}}"),
            unit="none",
            stacked=True,
            overrides=named(PHASES),
            legend="right",
            w=14,
            h=9,
            about=About(
                "Ranks by the phase that they are in.",
                "a thin band of another colour beside a wide one: few keep many waiting. A fall of the total: ranks died.",
                "the table beside names them.",
                "no process of the run lived then.",
            ),
            empty=NO_PHASES,
        ),
        table(
            "Who does something else than most, and since when?",
            Column("rank", "Rank", width=70),
            Column("instance", "Node", links=(TO_GPUS, TO_NODE)),
            Column("phase", "Phase"),
            Column(
                "time() - max by (instance, rank) (training_phase_active_since_timestamp_seconds{@run})"
                f" and on (instance, rank) {OTHERS}",
                "For",
                unit="s",
                decimals=1,
                width=90,
            ),
            Column(
                "time() - max by (instance, rank) (training_last_progress_timestamp_seconds{@run})"
                f" and on (instance, rank) {OTHERS}",
                "Last step",
                unit="s",
                decimals=1,
                width=100,
            ),
            of=OTHERS,
            sort="For",
            w=10,
            h=9,
            about=About(
                "Ranks whose phase is not the one of most ranks; a rank that others wait for is here with a long time.",
                "the same rank at the top for longer than a step.",
                "`py-spy dump --pid` on that node.",
                "all do the same.",
            ),
            empty="All ranks are in the same phase.",
        ),
        lines(
            "How long do they wait for data, and for each other?",
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
            w=24,
            h=7,
            about=About(
                "Share of the time in which ranks wait.",
                "only the worst rank waits for data: its disk or its shard. All wait for each other: a straggler.",
                "*Node and container* of that rank's node.",
                "the job does not tell.",
            ),
            empty=NO_PHASES,
        ),
        heatmap(
            "Since when is each rank silent?",
            Query(
                "min by (rank) (clamp_max(time() - training_feed_last_update_timestamp_seconds{@run}, 30))",
                "{{rank}}",
            ),
            unit="s",
            between=(0, 30),
            w=14,
            h=8,
            about=About(
                "One line for each rank; the colour is the age of its last news: blue is now, yellow half a minute or more.",
                "a line that stands out: that process is stopped, hangs or is dead. A block of eight: its node.",
                "`training_process_up` tells dead from hanging: *Is its process there?* beside.",
                "the exporter of that node was down, or the rank was not there yet.",
            ),
            empty="No rank of this run is known.",
        ),
        table(
            "Which ranks are dead, or silent?",
            Column("rank", "Rank", width=70),
            Column("instance", "Node", links=(TO_GPUS, TO_NODE)),
            Column(
                SILENT,
                "Is its process there?",
                width=160,
                mappings=words({0: ("dead", BAD), 1: ("hangs", WARNING)}),
            ),
            Column(
                "time() - max by (instance, rank) (training_feed_last_update_timestamp_seconds{@run})"
                f" and on (instance, rank) ({SILENT})",
                "Last news",
                unit="s",
                decimals=0,
                width=110,
            ),
            sort="Is its process there?",
            descending=False,
            w=10,
            h=8,
            about=About(
                "Ranks that have ended, by the kernel's lock on their feed file, and ranks that live and say nothing.",
                "any, while the run should go on.",
                "dead: the job's log, `oom_kill` on *Node and container*, Xid on *GPUs*. Hangs: `py-spy dump`.",
                "all ranks live and speak.",
            ),
            empty="All ranks live and speak.",
        ),
    )


def chosen() -> tuple[Panel, ...]:
    """Give the panels about the ranks that the reader has chosen."""
    gpu = GPU_OF.replace("@run", "@rank")
    name = "rank {{rank}}"
    return (
        lines(
            "Compute time of a step",
            Query("max by (rank) (training_rank_compute_seconds{@rank})", name),
            unit="s",
            w=8,
            about=About(
                "Of the chosen ranks.",
                "one above the others.",
                "the panels beside say whether its GPU or its CPU is slower.",
            ),
            empty=NO_COMPUTE,
        ),
        lines(
            "SM clock of their GPUs",
            Query(
                f'max by (rank) ({gpu} * on (instance, gpu) group_left () max by (instance, gpu) (gpu_clock_hertz{{clock="sm"}}))',
                name,
            ),
            unit="hertz",
            w=8,
            about=About(
                "Of the GPU that each rank has.", "one below the others.", "*GPUs*: why did the clocks drop?"
            ),
            empty="No GPU is known for these ranks.",
        ),
        lines(
            "SM activity of their GPUs",
            Query(
                f"max by (rank) ({gpu} * on (instance, gpu) group_left () max by (instance, gpu) (gpu_sm_activity_ratio))",
                name,
            ),
            unit="percentunit",
            most=1,
            w=8,
            about=About(
                "Of the GPU that each rank has.",
                "one below the others: it waits. One above: the others wait for it.",
                "compare with its compute time.",
            ),
            empty="No GPU is known for these ranks, or it has no performance counters.",
        ),
        lines(
            "How long do they wait for data?",
            Query(
                'max by (rank) (rate(training_phase_seconds_total{@rank, phase="data_loading"}[$__rate_interval]))',
                name,
            ),
            unit="percentunit",
            w=8,
            about=About(
                "Share of each rank's time.",
                "one above the others.",
                "its node's disks and CPUs: *Node and container*.",
            ),
            empty=NO_PHASES,
        ),
        lines(
            "CPU of their processes",
            Query("sum by (rank) (rate(training_process_cpu_seconds_total{@rank}[$__rate_interval]))", name),
            unit="none",
            decimals=1,
            w=8,
            about=About(
                "CPUs that each rank's processes use, data workers included.",
                "one below the others with the same work: it is starved of CPU, or its workers died.",
                "*Node and container*: pressure and limits.",
            ),
            empty="The processes cannot be seen (another pid namespace).",
        ),
        lines(
            "Memory of their processes",
            Query("sum by (rank) (training_process_resident_bytes{@rank})", name),
            unit="bytes",
            w=8,
            about=About(
                "Resident memory of each rank's processes.",
                "one that climbs.",
                "*Node and container*: whose memory is it?",
            ),
            empty="The processes cannot be seen (another pid namespace).",
        ),
    )
