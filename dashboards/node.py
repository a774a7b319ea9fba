"""The dashboard *Node and container*: what the job may use of its machine, and what it lacks."""

from __future__ import annotations

from collections.abc import Iterator

from dashboards.board import ALERTS_OF_NODE, JOB, ONE_NODE, RUN, Board, Row
from dashboards.node_io import disks, hardware, network, processes, shared
from dashboards.palette import (
    BAD,
    BLUE,
    BROWN,
    GREEN,
    GREY,
    KHAKI,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    SKY,
    VERMILION,
    named,
)
from dashboards.panels import About, Panel, above, lines, stat, words
from dashboards.queries import Query, events, now

UID = "training-node"
MODES = {
    "user": BLUE,
    "nice": SKY,
    "system": ORANGE,
    "iowait": PURPLE,
    "irq": KHAKI,
    "softirq": BROWN,
    "steal": VERMILION,
    "guest": GREEN,
    "guest_nice": GREEN,
}
BARE = "No limit is set, so there is nothing to be near to."
NO_PRESSURE = "This kernel keeps no pressure (CONFIG_PSI, or psi=1 at boot), or cgroups are of version 1."


def board() -> Board:
    """The dashboard."""
    return Board(
        uid=UID,
        title="Training / Node and container",
        what="CPU, memory, pressure, limits, disks and network of one machine, and what the job's processes use of it.",
        variables=(JOB, ONE_NODE, RUN),
        rows=(
            Row("At a glance", _glance()),
            Row("Does the job lack CPU?", _cpu()),
            Row("Does it lack memory?", _memory()),
            Row("Does it wait for disks?", disks()),
            Row("Network", network()),
            Row("Processes of the job", processes()),
            Row("Shared filesystems: NFS and Lustre", shared(), collapsed=True),
            Row("Hardware", hardware(), collapsed=True),
        ),
        marks=(ALERTS_OF_NODE,),
    )


def _glance() -> tuple[Panel, ...]:
    return (
        stat(
            "Exporter",
            now("max(up{@node})"),
            unit="none",
            mappings=words({1: ("answers", "text"), 0: ("down", BAD)}),
            about=About(
                "Whether Prometheus reaches the exporter of this node.",
                "*down*: every other number here is missing, whatever the node does.",
                "look at the exporter's log, and whether its port can be reached from Prometheus.",
                "Prometheus does not know this node.",
            ),
            empty="unknown node",
        ),
        stat(
            "CPU in use",
            now("max(host_cpu_utilization_ratio{@node})"),
            unit="percentunit",
            decimals=0,
            thresholds=above(0.9, 0.97),
            about=About(
                "Share of all CPUs' time that was not idle.",
                "above 90 %: data loading may be what the GPUs wait for.",
                "see *Who waits for what?* and the data wait on *Training run*; fewer or cheaper workers.",
            ),
        ),
        stat(
            "CPU throttled",
            now(
                "max(rate(cgroup_cpu_throttled_periods_total{@node}[$__rate_interval])"
                " / (rate(cgroup_cpu_periods_total{@node}[$__rate_interval]) > 0))"
            ),
            unit="percentunit",
            decimals=0,
            thresholds=above(0.05, 0.25),
            about=About(
                "Share of periods in which the CPU limit stopped the job.",
                "above 5 %; at 25 % every step waits for it.",
                "raise or remove the CPU limit of the container.",
                "there is no CPU limit, or nothing ran: all is well.",
            ),
            empty="no limit",
        ),
        stat(
            "Memory left",
            now(
                "min((cgroup_memory_limit_bytes{@node} - cgroup_memory_working_set_bytes{@node})"
                " or on (instance) host_memory_available_bytes{@node})"
            ),
            unit="bytes",
            about=About(
                "What the job can still take before the kernel kills: up to the container's limit, else what the "
                "machine has.",
                "less than one process needs to start (a few GiB), or a line that falls steadily below.",
                "see *Whose memory is it?*; fewer workers, a smaller prefetch, or a larger limit.",
            ),
        ),
        stat(
            "OOM kills",
            now(
                'max(sum by (instance) (increase(cgroup_memory_events_total{@node, event="oom_kill"}[$__range]))'
                " or on (instance) increase(host_vm_oom_kills_total{@node}[$__range]))"
            ),
            unit="none",
            decimals=0,
            thresholds=above(1, 1),
            about=About(
                "Processes that the kernel killed in the time that is shown.",
                "any.",
                "the job's log says which rank died; give it more memory or use less in the workers.",
            ),
        ),
        stat(
            "Shared memory",
            now("max(host_shm_used_bytes{@node} / host_shm_size_bytes{@node})"),
            unit="percentunit",
            decimals=0,
            thresholds=above(0.7, 0.9),
            about=About(
                "Share of /dev/shm, through which DataLoader workers hand over batches.",
                "above 90 %: the next worker ends with a bus error.",
                "`docker run --shm-size`, a memory `emptyDir` at /dev/shm, fewer workers, or a smaller prefetch.",
                "there is no /dev/shm.",
            ),
        ),
    )


def _cpu() -> tuple[Panel, ...]:
    return (
        lines(
            "What do the CPUs do?",
            Query(
                'sum by (mode) (rate(host_cpu_seconds_total{@node, mode!="idle"}[$__rate_interval]))',
                "{{mode}}",
            ),
            Query('max(host_cpus{@node, kind="online"})', "CPUs", bound=True),
            unit="none",
            decimals=1,
            stacked=True,
            overrides=named(MODES),
            about=About(
                "CPUs busy by mode, and how many there are (dashed).",
                "the stack touches the dashed line; much `system` or `softirq` (the network), `iowait` (disks), "
                "`steal` (the hypervisor gives the time to somebody else).",
                "touching: fewer data workers or more CPUs. `steal`: another machine.",
            ),
            empty="No CPU times from this node.",
        ),
        lines(
            "How much does the container use of what it may?",
            Query(
                "sum by (mode) (rate(cgroup_cpu_usage_seconds_total{@node}[$__rate_interval]))", "{{mode}}"
            ),
            Query("max(cgroup_cpu_limit_cpus{@node})", "limit", bound=True),
            Query(
                "max(rate(cgroup_cpu_throttled_seconds_total{@node}[$__rate_interval]))",
                "standing still",
                VERMILION,
                bound=True,
            ),
            unit="none",
            decimals=1,
            stacked=True,
            overrides=named({"user": BLUE, "system": ORANGE}),
            about=About(
                "CPUs that the container uses, its limit where it has one, and CPUs that stood still because of it.",
                "any time of standing still: a limit stops threads in the middle of a step.",
                "raise the limit; with `requests` alone the job may use what nobody else needs.",
            ),
            empty="The exporter sees no cgroup with a CPU controller.",
        ),
        lines(
            "Who waits for what? (machine)",
            *_waits("host"),
            unit="percentunit",
            most=1,
            about=About(
                "Share of time in which at least one thread had to wait for a CPU, for memory, or for a disk.",
                "memory above zero for long (it swaps or reclaims); I/O above 30 %.",
                "memory: less of it per worker. I/O: see the disks below. CPU: fewer threads than CPUs "
                "(`OMP_NUM_THREADS`, workers).",
            ),
            empty=NO_PRESSURE,
        ),
        lines(
            "Who waits for what? (container)",
            *_waits("cgroup"),
            unit="percentunit",
            most=1,
            about=About(
                "The same for the container's own threads.",
                "the machine waits little and the container much: its limits are the reason.",
                "raise the limit that it waits for.",
            ),
            empty=NO_PRESSURE,
        ),
    )


def _waits(whose: str) -> Iterator[Query]:
    for what, name, color in (("cpu", "CPU", BLUE), ("memory", "memory", VERMILION), ("io", "I/O", PURPLE)):
        yield Query(
            f"rate({whose}_pressure_{what}_waiting_seconds_total{{@node}}[$__rate_interval])", name, color
        )


def _memory() -> tuple[Panel, ...]:
    return (
        lines(
            "What fills the machine's memory?",
            Query("host_memory_anon_bytes{@node}", "processes", BLUE),
            Query("host_memory_shared_bytes{@node}", "shared, tmpfs", PURPLE),
            Query("host_memory_slab_bytes{@node}", "kernel's objects", ORANGE),
            Query(
                "clamp_min(host_memory_cached_bytes{@node} + host_memory_buffers_bytes{@node}"
                " - host_memory_shared_bytes{@node}, 0)",
                "page cache",
                PALE,
            ),
            Query("host_memory_total_bytes{@node}", "size", GREY, bound=True),
            unit="bytes",
            stacked=True,
            about=About(
                "Memory by what it holds, and how much there is (dashed). The page cache gives way when somebody needs "
                "memory; the rest does not.",
                "processes and tmpfs come close to the dashed line, or climb for hours (a leak).",
                "see *Whose memory is it?*; tmpfs is /dev/shm and whatever else lives in memory.",
            ),
            empty="No memory sizes from this node.",
        ),
        lines(
            "How near is the container to its limit?",
            Query("cgroup_memory_working_set_bytes{@node}", "working set", BLUE),
            Query("cgroup_memory_current_bytes{@node}", "with page cache", PALE),
            Query("cgroup_memory_limit_bytes{@node}", "limit", VERMILION, bound=True),
            Query("cgroup_memory_high_bytes{@node}", "slowed down from", ORANGE, bound=True),
            unit="bytes",
            about=About(
                "Memory that counts against the container's limit (dashed); the working set is what cannot be had back.",
                "the working set within 10 % of the limit.",
                "a larger limit, fewer workers, or less prefetch. At the limit the kernel kills.",
            ),
            empty=BARE,
        ),
        lines(
            "Does it swap, or fault?",
            Query("rate(host_swap_in_bytes_total{@node}[$__rate_interval])", "from swap, bytes/s", ORANGE),
            Query("rate(host_swap_out_bytes_total{@node}[$__rate_interval])", "to swap, bytes/s", VERMILION),
            Query(
                'rate(host_vm_page_faults_total{@node, kind="major"}[$__rate_interval]) * 4096',
                "pages read by faults, bytes/s",
                BLUE,
            ),
            unit="Bps",
            about=About(
                "Memory that has to come back from a disk.",
                "anything that lasts: a step then waits for a disk.",
                "free memory; training and swap do not go together.",
            ),
            empty="No paging counters from this node.",
            w=8,
        ),
        lines(
            "How full is the shared memory?",
            Query("host_shm_used_bytes{@node}", "used", BLUE),
            Query("host_shm_size_bytes{@node}", "size", bound=True),
            unit="bytes",
            fill=10,
            about=About(
                "Shared memory (/dev/shm) as the exporter sees it; DataLoader workers hand batches over through it.",
                "used touches size: workers end with *bus error*.",
                "`--shm-size`, or a memory volume at /dev/shm.",
            ),
            empty="There is no /dev/shm.",
            w=8,
        ),
        lines(
            "What happened at the limit?",
            Query(events("cgroup_memory_events_total{@node}", "event"), "{{event}}"),
            unit="none",
            bars=True,
            overrides=named({"max": ORANGE, "high": KHAKI, "oom": VERMILION, "oom_kill": RED, "low": GREY}),
            about=About(
                "Events of the container's memory: `high` (slowed down), `max` (at the limit), `oom_kill` (killed).",
                "any `oom_kill`; `max` in every interval.",
                "a larger limit, or less memory in the workers.",
            ),
            empty="The exporter sees no cgroup with a memory controller.",
            w=8,
        ),
    )
