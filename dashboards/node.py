"""The dashboard *Node and container*: what the job may use of its machine, and what it lacks."""

from __future__ import annotations

from dashboards.board import ALERTS_OF_NODE, JOB, ONE_NODE, RUN, Board, Row
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
    bound,
    by_query,
    named,
)
from dashboards.panels import About, Column, Panel, above, bars, lines, stat, table, to, words
from dashboards.queries import Query, events, now, rows

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
TO_PROCESSES = to("training-run", "Training run", run="${__field.labels.run}")


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
            Row("Does it wait for disks?", _disks()),
            Row("Network", _network()),
            Row("Processes of the job", _processes()),
            Row("Shared filesystems: NFS and Lustre", _shared(), collapsed=True),
            Row("Hardware", _hardware(), collapsed=True),
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
            Query('max(host_cpus{@node, kind="online"})', "CPUs"),
            unit="none",
            decimals=1,
            stacked=True,
            overrides=[*named(MODES), bound("CPUs")],
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
            Query("max(cgroup_cpu_limit_cpus{@node})", "limit"),
            Query("max(rate(cgroup_cpu_throttled_seconds_total{@node}[$__rate_interval]))", "standing still"),
            unit="none",
            decimals=1,
            stacked=True,
            overrides=[
                *named({"user": BLUE, "system": ORANGE}),
                bound("limit"),
                bound("standing still", VERMILION),
            ],
            about=About(
                "CPUs that the container uses, its limit where it has one, and CPUs that stood still because of it.",
                "any time of standing still: a limit stops threads in the middle of a step.",
                "raise the limit; with `requests` alone the job may use what nobody else needs.",
            ),
            empty="The exporter sees no cgroup with a CPU controller.",
        ),
        lines(
            "Who waits for what? (machine)",
            Query("rate(host_pressure_cpu_waiting_seconds_total{@node}[$__rate_interval])", "CPU"),
            Query("rate(host_pressure_memory_waiting_seconds_total{@node}[$__rate_interval])", "memory"),
            Query("rate(host_pressure_io_waiting_seconds_total{@node}[$__rate_interval])", "I/O"),
            unit="percentunit",
            most=1,
            overrides=named({"CPU": BLUE, "memory": VERMILION, "I/O": PURPLE}),
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
            Query("rate(cgroup_pressure_cpu_waiting_seconds_total{@node}[$__rate_interval])", "CPU"),
            Query("rate(cgroup_pressure_memory_waiting_seconds_total{@node}[$__rate_interval])", "memory"),
            Query("rate(cgroup_pressure_io_waiting_seconds_total{@node}[$__rate_interval])", "I/O"),
            unit="percentunit",
            most=1,
            overrides=named({"CPU": BLUE, "memory": VERMILION, "I/O": PURPLE}),
            about=About(
                "The same for the container's own threads.",
                "the machine waits little and the container much: its limits are the reason.",
                "raise the limit that it waits for.",
            ),
            empty=NO_PRESSURE,
        ),
    )


def _memory() -> tuple[Panel, ...]:
    kinds = {
        "processes": BLUE,
        "shared, tmpfs": PURPLE,
        "kernel's objects": ORANGE,
        "page cache": PALE,
        "size": GREY,
    }
    return (
        lines(
            "What fills the machine's memory?",
            Query("host_memory_anon_bytes{@node}", "processes"),
            Query("host_memory_shared_bytes{@node}", "shared, tmpfs"),
            Query("host_memory_slab_bytes{@node}", "kernel's objects"),
            Query(
                "clamp_min(host_memory_cached_bytes{@node} + host_memory_buffers_bytes{@node}"
                " - host_memory_shared_bytes{@node}, 0)",
                "page cache",
            ),
            Query("host_memory_total_bytes{@node}", "size"),
            unit="bytes",
            stacked=True,
            overrides=[*named(kinds), bound("size")],
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
            Query("cgroup_memory_working_set_bytes{@node}", "working set"),
            Query("cgroup_memory_current_bytes{@node}", "with page cache"),
            Query("cgroup_memory_limit_bytes{@node}", "limit"),
            Query("cgroup_memory_high_bytes{@node}", "slowed down from"),
            unit="bytes",
            overrides=[
                *named({"working set": BLUE, "with page cache": PALE}),
                bound("limit", VERMILION),
                bound("slowed down from", ORANGE),
            ],
            about=About(
                "Memory that counts against the container's limit (dashed); the working set is what cannot be had back.",
                "the working set within 10 % of the limit.",
                "a larger limit, fewer workers, or less prefetch. At the limit the kernel kills.",
            ),
            empty=BARE,
        ),
        lines(
            "Does it swap, or fault?",
            Query("rate(host_swap_in_bytes_total{@node}[$__rate_interval])", "from swap, bytes/s"),
            Query("rate(host_swap_out_bytes_total{@node}[$__rate_interval])", "to swap, bytes/s"),
            Query(
                'rate(host_vm_page_faults_total{@node, kind="major"}[$__rate_interval]) * 4096',
                "pages read by faults, bytes/s",
            ),
            unit="Bps",
            overrides=by_query((ORANGE, VERMILION, BLUE)),
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
            Query("host_shm_used_bytes{@node}", "used"),
            Query("host_shm_size_bytes{@node}", "size"),
            unit="bytes",
            overrides=[*named({"used": BLUE}), bound("size")],
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


def _disks() -> tuple[Panel, ...]:
    direction = by_query((BLUE, ORANGE))
    return (
        lines(
            "How much is read and written?",
            Query("rate(host_disk_read_bytes_total{@node}[$__rate_interval])", "{{device}} read"),
            Query("rate(host_disk_written_bytes_total{@node}[$__rate_interval])", "{{device}} written"),
            unit="Bps",
            overrides=direction,
            about=About(
                "Bytes a second of each disk. Data is read all the time, checkpoints are written in bursts.",
                "reads at what the disk can do while the GPUs wait; writes that last longer than the checkpoint.",
                "cache the data set in memory or on a faster disk; write checkpoints asynchronously.",
            ),
            empty="No disk that is watched (`collectors.disk`).",
            w=8,
        ),
        lines(
            "How busy are the disks?",
            Query("rate(host_disk_io_time_seconds_total{@node}[$__rate_interval])", "{{device}}"),
            unit="percentunit",
            most=1,
            overrides=by_query((BLUE,)),
            about=About(
                "Share of time in which at least one request was under way. Flash can do more at 100 %.",
                "100 % together with a growing wait beside.",
                "spread the data, read it in larger pieces.",
            ),
            empty="No disk that is watched (`collectors.disk`).",
            w=8,
        ),
        lines(
            "How long does a request take?",
            Query(
                "rate(host_disk_read_time_seconds_total{@node}[$__rate_interval])"
                " / (rate(host_disk_reads_completed_total{@node}[$__rate_interval]) > 0)",
                "{{device}} read",
            ),
            Query(
                "rate(host_disk_write_time_seconds_total{@node}[$__rate_interval])"
                " / (rate(host_disk_writes_completed_total{@node}[$__rate_interval]) > 0)",
                "{{device}} write",
            ),
            unit="s",
            overrides=direction,
            about=About(
                "Mean time of a request.",
                "above a few milliseconds on flash, above 20 ms on anything.",
                "somebody else uses the disk, or it is failing: see the kernel's log.",
                "no request in that interval, or nothing was measured.",
            ),
            empty="No request in this time.",
            w=8,
        ),
        bars(
            "How full are the filesystems?",
            now(
                "1 - host_filesystem_avail_bytes{@node} / (host_filesystem_size_bytes{@node} > 0)",
                "{{mountpoint}}",
            ),
            unit="percentunit",
            most=1,
            decimals=0,
            thresholds={
                "mode": "absolute",
                "steps": [
                    {"value": None, "color": BLUE},
                    {"value": 0.8, "color": ORANGE},
                    {"value": 0.95, "color": VERMILION},
                ],
            },
            about=About(
                "Used share of each filesystem.",
                "where the checkpoints go: less left than two of them need.",
                "remove old checkpoints. A full disk fails the next one, and the work since the last is at risk.",
                "the filesystem does not answer: see *Which mounts do not answer?*.",
            ),
            empty="No filesystem that is watched (`collectors.filesystem`).",
            w=12,
        ),
        table(
            "Which mounts do not answer, or are read-only?",
            rows("max by (mountpoint, fstype) (host_filesystem_device_error{@node})"),
            rows("max by (mountpoint, fstype) (host_filesystem_readonly{@node})"),
            columns=(
                Column("mountpoint", "Mount"),
                Column("fstype", "Kind", width=90),
                Column("A", "Answers", width=90, mappings=words({0: ("yes", "text"), 1: ("no", BAD)})),
                Column("B", "Read-only", width=100, mappings=words({0: ("no", "text"), 1: ("yes", ORANGE)})),
            ),
            sort="Answers",
            about=About(
                "Whether each filesystem tells its size, and whether it takes writes.",
                "*no*: a server that hangs; whoever touches the mount waits with it. Read-only where checkpoints go: "
                "ext4 does that to itself after an error.",
                "server: ask its people. ext4: the kernel's log has the reason.",
            ),
            empty="No filesystem that is watched (`collectors.filesystem`).",
            w=12,
            h=8,
        ),
    )


def _network() -> tuple[Panel, ...]:
    return (
        lines(
            "Ethernet",
            Query("rate(host_network_receive_bytes_total{@node}[$__rate_interval])", "{{device}} received"),
            Query("rate(host_network_transmit_bytes_total{@node}[$__rate_interval])", "{{device}} sent"),
            unit="Bps",
            overrides=by_query((BLUE, ORANGE)),
            about=About(
                "Bytes a second of each interface.",
                "a flat top at the speed of the link.",
                "collectives belong on RDMA, data on a link of its own.",
            ),
            empty="No interface that is watched (`collectors.network`).",
            w=8,
        ),
        lines(
            "RDMA",
            Query(
                "rate(host_rdma_receive_bytes_total{@node}[$__rate_interval])", "{{device}}:{{port}} received"
            ),
            Query(
                "rate(host_rdma_transmit_bytes_total{@node}[$__rate_interval])", "{{device}}:{{port}} sent"
            ),
            unit="Bps",
            overrides=by_query((BLUE, ORANGE)),
            about=About(
                "Bytes a second of each InfiniBand or RoCE port.",
                "one port below all others, or none at all while several nodes train.",
                "`NCCL_DEBUG=INFO` says which ports NCCL has chosen; a port below the others has a bad cable or switch.",
            ),
            empty="No RDMA port in this machine.",
            w=8,
        ),
        lines(
            "What went wrong on the way?",
            Query(
                "sum(rate(host_network_receive_errors_total{@node}[$__rate_interval])"
                " + rate(host_network_transmit_errors_total{@node}[$__rate_interval]))",
                "Ethernet errors",
            ),
            Query(
                "sum(rate(host_network_receive_dropped_total{@node}[$__rate_interval])"
                " + rate(host_network_transmit_dropped_total{@node}[$__rate_interval]))",
                "Ethernet dropped",
            ),
            Query("sum(rate(host_tcp_retransmits_total{@node}[$__rate_interval]))", "TCP sent again"),
            Query(
                "sum(rate(host_rdma_receive_errors_total{@node}[$__rate_interval])"
                " + rate(host_rdma_symbol_errors_total{@node}[$__rate_interval]))",
                "RDMA errors",
            ),
            Query("sum(rate(host_rdma_link_downed_total{@node}[$__rate_interval]))", "RDMA link lost"),
            unit="cps",
            overrides=by_query((VERMILION, ORANGE, BLUE, PURPLE, KHAKI)),
            about=About(
                "Packets and links that failed, per second.",
                "any RDMA link lost; errors that grow with the traffic; many TCP segments sent again.",
                "cable, transceiver, switch port, in this order.",
            ),
            empty="No interface that is watched.",
            w=8,
        ),
    )


def _processes() -> tuple[Panel, ...]:
    legend = "{{run}} rank {{rank}} {{role}}"
    colors = by_query((BLUE,))
    return (
        table(
            "What runs?",
            rows("sum by (run, rank, role) (training_process_instances{@here})"),
            rows(
                "sum by (run, rank, role) (rate(training_process_cpu_seconds_total{@here}[$__rate_interval]))"
            ),
            rows("sum by (run, rank, role) (training_process_resident_bytes{@here})"),
            rows("sum by (run, rank, role) (training_process_unique_bytes{@here})"),
            rows("sum by (run, rank, role) (training_process_threads{@here})"),
            rows("max by (run, rank, role) (training_process_open_fds{@here})"),
            rows('sum by (run, rank, role) (training_process_state{@here, state="disk_sleep"})'),
            rows(
                "sum by (run, rank, role) (rate(training_process_io_read_bytes_total{@here}[$__rate_interval]))"
            ),
            columns=(
                Column("run", "Run", links=(to("training-run", "Training run", run="${__value.raw}"),)),
                Column("rank", "Rank", width=70),
                Column("role", "Role", width=110),
                Column("A", "Processes", unit="none", width=90),
                Column("B", "CPUs", unit="none", decimals=2, width=80),
                Column("C", "Resident", unit="bytes", width=100),
                Column("D", "Its own", unit="bytes", width=100),
                Column("E", "Threads", unit="none", width=80),
                Column("F", "Open files", unit="none", width=90),
                Column("G", "Wait for a disk", unit="none", width=120, thresholds=above(1)),
                Column("H", "Read", unit="Bps", width=100),
            ),
            sort="Resident",
            about=About(
                "Processes of each rank by role: the trainer, its data workers, and others that it started.",
                "data workers missing or doubled; a trainer that waits for a disk; open files that only grow.",
                "data workers: `num_workers`. Waiting for a disk: see the mounts above.",
                "the processes are in another pid namespace (share it: `shareProcessNamespace`, `--pid=host`).",
            ),
            empty="No process of a job is seen here: none runs, or it is in another pid namespace.",
        ),
        lines(
            "Who uses the CPUs?",
            Query(
                "sum by (run, rank, role) (rate(training_process_cpu_seconds_total{@here}[$__rate_interval]))",
                legend,
            ),
            unit="none",
            decimals=1,
            overrides=colors,
            links=(TO_PROCESSES,),
            about=About(
                "CPUs used by the processes of each rank and role.",
                "data workers at one CPU each: they are the bottleneck.",
                "more workers, cheaper transformations, or decoding on the GPU.",
            ),
            empty="No process of a job is seen here.",
        ),
        lines(
            "Whose memory is it?",
            Query("sum by (run, rank, role) (training_process_proportional_bytes{@here})", legend),
            unit="bytes",
            overrides=colors,
            about=About(
                "Memory of each rank's processes; what several share is divided among them (PSS), so it adds up.",
                "workers that grow in every epoch: Python objects of the data set are copied by reference counts.",
                "keep the data set's index in arrays instead of lists.",
                "another user's processes, or there was no time to read their page tables (every minute at most).",
            ),
            empty="The page tables of the job's processes cannot be read (another user), or none runs.",
        ),
    )


def _shared() -> tuple[Panel, ...]:
    return (
        lines(
            "NFS and Lustre: how long does an operation take?",
            Query(
                "rate(host_nfs_operation_time_seconds_total{@node}[$__rate_interval])"
                " / (rate(host_nfs_operations_total{@node}[$__rate_interval]) > 0)",
                "{{mount}} {{operation}}",
            ),
            Query(
                "rate(host_lustre_operation_time_seconds_total{@node}[$__rate_interval])"
                " / (rate(host_lustre_operations_total{@node}[$__rate_interval]) > 0)",
                "{{mount}} {{operation}}",
            ),
            unit="s",
            overrides=by_query((BLUE, ORANGE)),
            about=About(
                "Mean time of reads, writes and other calls.",
                "above 50 ms for reads, above 10 ms for the others.",
                "the server or the network to it; many small files belong into few large ones.",
                "no call in that interval, or no such mount.",
            ),
            empty="No NFS and no Lustre is mounted.",
        ),
        lines(
            "NFS and Lustre: how much is read and written?",
            Query("rate(host_nfs_read_bytes_total{@node}[$__rate_interval])", "{{mount}} read"),
            Query("rate(host_nfs_written_bytes_total{@node}[$__rate_interval])", "{{mount}} written"),
            Query("rate(host_lustre_read_bytes_total{@node}[$__rate_interval])", "{{mount}} read"),
            Query("rate(host_lustre_written_bytes_total{@node}[$__rate_interval])", "{{mount}} written"),
            unit="Bps",
            overrides=by_query((BLUE, ORANGE, BLUE, ORANGE)),
            about=About(
                "Bytes a second of programs, page cache included.",
                "a flat line far below what the server can do, while the GPUs wait for data.",
                "more readers in parallel, or larger reads.",
            ),
            empty="No NFS and no Lustre is mounted.",
        ),
    )


def _hardware() -> tuple[Panel, ...]:
    return (
        lines(
            "Temperatures",
            Query("host_temperature_celsius{@node}", "{{chip}} {{sensor}}"),
            unit="celsius",
            least=None,
            overrides=by_query((BLUE,)),
            about=About(
                "What the machine's sensors say.",
                "a sensor far above its neighbours, or CPUs above 90 degrees.",
                "fans and dust.",
            ),
            empty="No sensors to be seen: virtual machines have none.",
            w=8,
        ),
        lines(
            "Do the CPUs slow down from heat?",
            Query("rate(host_cpu_throttles_total{@node}[$__rate_interval])", "{{level}}"),
            unit="cps",
            overrides=by_query((VERMILION,)),
            about=About("How often cores and packages slowed down.", "anything above zero.", "cooling."),
            empty="This CPU does not count it (virtual machines do not).",
            w=8,
        ),
        lines(
            "Memory errors",
            Query(
                "sum by (controller) (rate(host_memory_ecc_correctable_errors_total{@node}[$__rate_interval]))",
                "{{controller}} corrected",
            ),
            Query(
                "sum by (controller) (rate(host_memory_ecc_uncorrectable_errors_total{@node}[$__rate_interval]))",
                "{{controller}} not corrected",
            ),
            unit="cps",
            overrides=by_query((ORANGE, VERMILION)),
            about=About(
                "Errors of the machine's memory (not the GPUs').",
                "corrected ones every minute; any that is not corrected.",
                "replace the module; results since then may be wrong.",
            ),
            empty="No ECC memory, or no driver for it.",
            w=8,
        ),
    )
