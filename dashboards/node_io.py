"""Rows of the dashboard *Node and container*: disks, network, processes, shared filesystems, hardware."""

from __future__ import annotations

from dashboards.palette import BAD, BLUE, KHAKI, ORANGE, PURPLE, VERMILION
from dashboards.panels import About, Panel, above, bars, lines, to, words
from dashboards.queries import Query, now
from dashboards.tables import Column, table

TO_PROCESSES = to("training-run", "Training run", run="${__field.labels.run}")


def disks() -> tuple[Panel, ...]:
    """Give the panels about disks and filesystems."""
    return (
        lines(
            "How much is read and written?",
            Query("rate(host_disk_read_bytes_total{@node}[$__rate_interval])", "{{device}} read", BLUE),
            Query(
                "rate(host_disk_written_bytes_total{@node}[$__rate_interval])", "{{device}} written", ORANGE
            ),
            unit="Bps",
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
                BLUE,
            ),
            Query(
                "rate(host_disk_write_time_seconds_total{@node}[$__rate_interval])"
                " / (rate(host_disk_writes_completed_total{@node}[$__rate_interval]) > 0)",
                "{{device}} write",
                ORANGE,
            ),
            unit="s",
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
            Column("mountpoint", "Mount"),
            Column("fstype", "Kind", width=90),
            Column(
                "max by (mountpoint, fstype) (host_filesystem_device_error{@node})",
                "Answers",
                width=90,
                mappings=words({0: ("yes", "text"), 1: ("no", BAD)}),
            ),
            Column(
                "max by (mountpoint, fstype) (host_filesystem_readonly{@node})",
                "Read-only",
                width=100,
                mappings=words({0: ("no", "text"), 1: ("yes", ORANGE)}),
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


def network() -> tuple[Panel, ...]:
    """Give the panels about Ethernet, TCP and RDMA."""
    return (
        lines(
            "Ethernet",
            Query(
                "rate(host_network_receive_bytes_total{@node}[$__rate_interval])", "{{device}} received", BLUE
            ),
            Query(
                "rate(host_network_transmit_bytes_total{@node}[$__rate_interval])", "{{device}} sent", ORANGE
            ),
            unit="Bps",
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
                "rate(host_rdma_receive_bytes_total{@node}[$__rate_interval])",
                "{{device}}:{{port}} received",
                BLUE,
            ),
            Query(
                "rate(host_rdma_transmit_bytes_total{@node}[$__rate_interval])",
                "{{device}}:{{port}} sent",
                ORANGE,
            ),
            unit="Bps",
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
                VERMILION,
            ),
            Query(
                "sum(rate(host_network_receive_dropped_total{@node}[$__rate_interval])"
                " + rate(host_network_transmit_dropped_total{@node}[$__rate_interval]))",
                "Ethernet dropped",
                ORANGE,
            ),
            Query("sum(rate(host_tcp_retransmits_total{@node}[$__rate_interval]))", "TCP sent again", BLUE),
            Query(
                "sum(rate(host_rdma_receive_errors_total{@node}[$__rate_interval])"
                " + rate(host_rdma_symbol_errors_total{@node}[$__rate_interval]))",
                "RDMA errors",
                PURPLE,
            ),
            Query("sum(rate(host_rdma_link_downed_total{@node}[$__rate_interval]))", "RDMA link lost", KHAKI),
            unit="cps",
            about=About(
                "Packets and links that failed, per second.",
                "any RDMA link lost; errors that grow with the traffic; many TCP segments sent again.",
                "cable, transceiver, switch port, in this order.",
            ),
            empty="No interface that is watched.",
            w=8,
        ),
    )


def processes() -> tuple[Panel, ...]:
    """Give the panels about the job's processes."""
    legend = "{{run}} {{role}} of rank {{rank}}"
    return (
        table(
            "What runs?",
            Column("run", "Run", links=(to("training-run", "Training run", run="${__value.raw}"),)),
            Column("rank", "Rank", width=70),
            Column("role", "Role", width=110),
            Column("sum by (run, rank, role) (training_process_instances{@here})", "Processes", width=90),
            Column(
                "sum by (run, rank, role) (rate(training_process_cpu_seconds_total{@here}[$__rate_interval]))",
                "CPUs",
                decimals=2,
                width=80,
            ),
            Column(
                "sum by (run, rank, role) (training_process_resident_bytes{@here})",
                "Resident",
                unit="bytes",
                width=100,
            ),
            Column(
                "sum by (run, rank, role) (training_process_unique_bytes{@here})",
                "Its own",
                unit="bytes",
                width=100,
            ),
            Column("sum by (run, rank, role) (training_process_threads{@here})", "Threads", width=80),
            Column("max by (run, rank, role) (training_process_open_fds{@here})", "Open files", width=90),
            Column(
                'sum by (run, rank, role) (training_process_state{@here, state="disk_sleep"})',
                "Wait for a disk",
                width=120,
                thresholds=above(1),
            ),
            Column(
                "sum by (run, rank, role) (rate(training_process_io_read_bytes_total{@here}[$__rate_interval]))",
                "Read",
                unit="Bps",
                width=100,
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
            about=About(
                "Memory of each rank's processes; what several share is divided among them (PSS), so it adds up.",
                "workers that grow in every epoch: Python objects of the data set are copied by reference counts.",
                "keep the data set's index in arrays instead of lists.",
                "another user's processes, or there was no time to read their page tables (every minute at most).",
            ),
            empty="The page tables of the job's processes cannot be read (another user), or none runs.",
        ),
    )


def shared() -> tuple[Panel, ...]:
    """Give the panels about NFS and Lustre."""
    return (
        lines(
            "NFS and Lustre: how long does an operation take?",
            Query(
                "rate(host_nfs_operation_time_seconds_total{@node}[$__rate_interval])"
                " / (rate(host_nfs_operations_total{@node}[$__rate_interval]) > 0)",
                "{{mount}} {{operation}}",
                BLUE,
            ),
            Query(
                "rate(host_lustre_operation_time_seconds_total{@node}[$__rate_interval])"
                " / (rate(host_lustre_operations_total{@node}[$__rate_interval]) > 0)",
                "{{mount}} {{operation}}",
                ORANGE,
            ),
            unit="s",
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
            Query("rate(host_nfs_read_bytes_total{@node}[$__rate_interval])", "{{mount}} read", BLUE),
            Query("rate(host_nfs_written_bytes_total{@node}[$__rate_interval])", "{{mount}} written", ORANGE),
            Query("rate(host_lustre_read_bytes_total{@node}[$__rate_interval])", "{{mount}} read", BLUE),
            Query(
                "rate(host_lustre_written_bytes_total{@node}[$__rate_interval])", "{{mount}} written", ORANGE
            ),
            unit="Bps",
            about=About(
                "Bytes a second of programs, page cache included.",
                "a flat line far below what the server can do, while the GPUs wait for data.",
                "more readers in parallel, or larger reads.",
            ),
            empty="No NFS and no Lustre is mounted.",
        ),
    )


def hardware() -> tuple[Panel, ...]:
    """Give the panels about sensors, heat and memory errors."""
    return (
        lines(
            "Temperatures",
            Query("host_temperature_celsius{@node}", "{{chip}} {{sensor}}"),
            unit="celsius",
            least=None,
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
            Query("rate(host_cpu_throttles_total{@node}[$__rate_interval])", "{{level}}", VERMILION),
            unit="cps",
            about=About("How often cores and packages slowed down.", "anything above zero.", "cooling."),
            empty="This CPU does not count it (virtual machines do not).",
            w=8,
        ),
        lines(
            "Memory errors",
            Query(
                "sum by (controller) (rate(host_memory_ecc_correctable_errors_total{@node}[$__rate_interval]))",
                "{{controller}} corrected",
                ORANGE,
            ),
            Query(
                "sum by (controller) (rate(host_memory_ecc_uncorrectable_errors_total{@node}[$__rate_interval]))",
                "{{controller}} not corrected",
                VERMILION,
            ),
            unit="cps",
            about=About(
                "Errors of the machine's memory (not the GPUs').",
                "corrected ones every minute; any that is not corrected.",
                "replace the module; results since then may be wrong.",
            ),
            empty="No ECC memory, or no driver for it.",
            w=8,
        ),
    )
