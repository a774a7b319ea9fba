"""Rows of the dashboard *Node*: disks, network, processes, RDMA and shared filesystems."""

from __future__ import annotations

from dashboards.palette import BAD, BLUE, KHAKI, ORANGE, PURPLE, VERMILION
from dashboards.panels import Panel, above, bars, lines, steps, to, words
from dashboards.queries import Query, now
from dashboards.tables import Column, table

TO_PROCESSES = to("training-run", "Run", run="${__field.labels.run}")


def disks() -> tuple[Panel, ...]:
    """Return the panels about disks and filesystems."""
    return (
        lines(
            "Disk throughput",
            Query("rate(host_disk_read_bytes_total{@node}[$__rate_interval])", "{{device}} read", BLUE),
            Query(
                "rate(host_disk_written_bytes_total{@node}[$__rate_interval])", "{{device}} written", ORANGE
            ),
            unit="Bps",
            w=6,
        ),
        lines(
            "Disk latency",
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
            w=6,
        ),
        bars(
            "Filesystems",
            now(
                "1 - host_filesystem_avail_bytes{@node} / (host_filesystem_size_bytes{@node} > 0)",
                "{{mountpoint}}",
            ),
            unit="percentunit",
            most=1,
            decimals=0,
            thresholds=steps((None, BLUE), (0.8, ORANGE), (0.95, VERMILION)),
            w=5,
        ),
        table(
            "Mounts",
            Column("mountpoint", "Mount"),
            Column("fstype", "Kind", width=70),
            Column(
                "max by (mountpoint, fstype) (host_filesystem_device_error{@node})",
                "Responds",
                width=90,
                mappings=words({0: ("yes", "text"), 1: ("no", BAD)}),
            ),
            Column(
                "max by (mountpoint, fstype) (host_filesystem_readonly{@node})",
                "Read-only",
                width=100,
                mappings=words({0: ("no", "text"), 1: ("yes", ORANGE)}),
            ),
            sort="Responds",
            w=7,
            h=8,
        ),
    )


def network() -> tuple[Panel, ...]:
    """Return the panels about Ethernet, TCP and link errors."""
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
        ),
        lines(
            "Network errors",
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
            Query("sum(rate(host_tcp_retransmits_total{@node}[$__rate_interval]))", "TCP retransmits", BLUE),
            Query(
                "sum(rate(host_rdma_receive_errors_total{@node}[$__rate_interval])"
                " + rate(host_rdma_symbol_errors_total{@node}[$__rate_interval]))",
                "RDMA errors",
                PURPLE,
            ),
            Query("sum(rate(host_rdma_link_downed_total{@node}[$__rate_interval]))", "RDMA link lost", KHAKI),
            unit="cps",
        ),
    )


def processes() -> tuple[Panel, ...]:
    """Return the panels about the processes of jobs."""
    legend = "{{run}} {{role}} of rank {{rank}}"
    return (
        table(
            "Processes of the job",
            Column("run", "Run", links=(to("training-run", "Run", run="${__value.raw}"),)),
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
                "Unique",
                unit="bytes",
                width=100,
            ),
            Column("sum by (run, rank, role) (training_process_threads{@here})", "Threads", width=80),
            Column("max by (run, rank, role) (training_process_open_fds{@here})", "Open files", width=90),
            Column(
                'sum by (run, rank, role) (training_process_state{@here, state="disk_sleep"})'
                " or sum by (run, rank, role) (training_process_instances{@here}) * 0",
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
        ),
        lines(
            "CPU by rank and role",
            Query(
                "sum by (run, rank, role) (rate(training_process_cpu_seconds_total{@here}[$__rate_interval]))",
                legend,
            ),
            unit="none",
            decimals=1,
            links=(TO_PROCESSES,),
        ),
        lines(
            "Memory by rank and role",
            Query("sum by (run, rank, role) (training_process_proportional_bytes{@here})", legend),
            unit="bytes",
        ),
    )


def shared() -> tuple[Panel, ...]:
    """Return the panels about RDMA, NFS and Lustre, which many machines do not have."""
    return (
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
            w=12,
        ),
        lines(
            "NFS and Lustre latency",
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
        ),
    )
