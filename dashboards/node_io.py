"""Panels of the dashboard *Node*: disks, network, job processes, single CPUs, RDMA and shared filesystems."""

from __future__ import annotations

from dashboards.palette import BAD, BLUE, ORANGE, PURPLE, VERMILION, VIOLET, fixed_colors_by_name
from dashboards.panels import (
    RUN_LINK,
    Panel,
    bar_gauge,
    dashboard_link,
    threshold_steps,
    time_series,
    value_mappings,
    warn_from,
)
from dashboards.queries import Query, instant_query, named_values_query
from dashboards.tables import Column, table

MAX_CPUS = 8
"""Maximum number of lines of single CPUs."""
RUN_OF_SERIES_LINK = dashboard_link("training-run", "Run", run="${__field.labels.run}")


def disk_panels() -> tuple[Panel, ...]:
    """Return the panels about disks and filesystems."""
    return (
        time_series(
            "Disk throughput",
            Query("rate(host_disk_read_bytes_total{@node}[$__rate_interval])", "{{device}} read", BLUE),
            Query(
                "rate(host_disk_written_bytes_total{@node}[$__rate_interval])", "{{device}} written", ORANGE
            ),
            unit="Bps",
            w=6,
        ),
        time_series(
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
        bar_gauge(
            "Filesystems",
            instant_query(
                "1 - host_filesystem_avail_bytes{@node} / (host_filesystem_size_bytes{@node} > 0)",
                "{{mountpoint}}",
            ),
            unit="percentunit",
            maximum=1,
            decimals=0,
            thresholds=threshold_steps((None, BLUE), (0.8, ORANGE), (0.95, VERMILION)),
            w=5,
        ),
        table(
            "Mounts",
            Column("mountpoint", "Mount"),
            Column("fstype", "Type", width=70),
            Column(
                "max by (mountpoint, fstype) (host_filesystem_device_error{@node})",
                "Responds",
                width=90,
                mappings=value_mappings({0: ("yes", "text"), 1: ("no", BAD)}),
            ),
            Column(
                "max by (mountpoint, fstype) (host_filesystem_readonly{@node})",
                "Read-only",
                width=100,
                mappings=value_mappings({0: ("no", "text"), 1: ("yes", ORANGE)}),
            ),
            sort="Responds",
            w=7,
            h=8,
        ),
    )


def network_panels() -> tuple[Panel, ...]:
    """Return the panels about Ethernet, TCP and link errors."""
    errors = {
        "Ethernet errors": "sum(rate(host_network_receive_errors_total{@node}[$__rate_interval])"
        " + rate(host_network_transmit_errors_total{@node}[$__rate_interval]))",
        "Ethernet dropped": "sum(rate(host_network_receive_dropped_total{@node}[$__rate_interval])"
        " + rate(host_network_transmit_dropped_total{@node}[$__rate_interval]))",
        "TCP retransmits": "sum(rate(host_tcp_retransmits_total{@node}[$__rate_interval]))",
        "RDMA errors": "sum(rate(host_rdma_receive_errors_total{@node}[$__rate_interval])"
        " + rate(host_rdma_symbol_errors_total{@node}[$__rate_interval]))",
        "RDMA links lost": "sum(rate(host_rdma_link_downed_total{@node}[$__rate_interval]))",
    }
    return (
        time_series(
            "Ethernet",
            Query(
                "rate(host_network_receive_bytes_total{@node}[$__rate_interval])", "{{device}} received", BLUE
            ),
            Query(
                "rate(host_network_transmit_bytes_total{@node}[$__rate_interval])", "{{device}} sent", ORANGE
            ),
            unit="Bps",
        ),
        time_series(
            "Network errors",
            named_values_query(errors, instant=False),
            unit="cps",
            overrides=fixed_colors_by_name(
                {
                    "Ethernet errors": VERMILION,
                    "Ethernet dropped": ORANGE,
                    "TCP retransmits": BLUE,
                    "RDMA errors": PURPLE,
                    "RDMA links lost": VIOLET,
                }
            ),
        ),
    )


def process_panels() -> tuple[Panel, ...]:
    """Return the panels about job processes."""
    legend = "{{run}} {{role}} of rank {{rank}}"
    return (
        table(
            "Processes of the job, rates over 5 min",
            Column("run", "Run", links=(RUN_LINK,)),
            Column("rank", "Rank", width=70),
            Column("role", "Role", width=110),
            Column("sum by (run, rank, role) (training_process_instances{@node_run})", "Processes", width=90),
            Column(
                "sum by (run, rank, role) (rate(training_process_cpu_seconds_total{@node_run}[5m]))",
                "CPUs",
                decimals=2,
                width=80,
            ),
            Column(
                "sum by (run, rank, role) (training_process_resident_bytes{@node_run})",
                "Resident",
                unit="bytes",
                width=100,
            ),
            Column(
                "sum by (run, rank, role) (training_process_unique_bytes{@node_run})",
                "Unique",
                unit="bytes",
                width=100,
            ),
            Column("sum by (run, rank, role) (training_process_threads{@node_run})", "Threads", width=80),
            Column("max by (run, rank, role) (training_process_open_fds{@node_run})", "Open files", width=90),
            Column(
                'sum by (run, rank, role) (training_process_state{@node_run, state="disk_sleep"})'
                " or sum by (run, rank, role) (training_process_instances{@node_run}) * 0",
                "In disk sleep",
                width=120,
                thresholds=warn_from(1),
            ),
            Column(
                "sum by (run, rank, role) (rate(training_process_io_read_bytes_total{@node_run}[5m]))",
                "Read",
                unit="Bps",
                width=100,
            ),
            sort="Resident",
        ),
        time_series(
            "CPU by rank and role",
            Query(
                "sum by (run, rank, role) (rate(training_process_cpu_seconds_total{@node_run}[$__rate_interval]))",
                legend,
            ),
            unit="none",
            decimals=1,
            links=(RUN_OF_SERIES_LINK,),
        ),
        time_series(
            "Memory by rank and role",
            Query("sum by (run, rank, role) (training_process_proportional_bytes{@node_run})", legend),
            unit="bytes",
        ),
    )


def optional_panels() -> tuple[Panel, ...]:
    """Return the panels that have values only with an option of the exporter or with the hardware: single CPUs, RDMA, NFS and Lustre."""
    return (
        time_series(
            "Busiest CPUs",
            Query(
                f"topk({MAX_CPUS}, 1 - sum by (cpu) (rate("
                'host_cpu_seconds_total{@node, cpu!="", mode=~"idle|iowait"}[$__rate_interval])))',
                "CPU {{cpu}}",
            ),
            unit="percentunit",
            maximum=1,
            w=8,
        ),
        time_series(
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
            w=8,
        ),
        time_series(
            "NFS and Lustre latency",
            Query(
                "rate(host_nfs_operation_time_seconds_total{@node}[$__rate_interval])"
                " / (rate(host_nfs_operations_total{@node}[$__rate_interval]) > 0)"
                " or rate(host_lustre_operation_time_seconds_total{@node}[$__rate_interval])"
                " / (rate(host_lustre_operations_total{@node}[$__rate_interval]) > 0)",
                "{{mount}} {{operation}}",
            ),
            unit="s",
            w=8,
        ),
    )
