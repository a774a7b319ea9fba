"""Dashboard *Node*: resources of a node, limits of the container, and the exporter.

Names such as `@node` and `@node_run` in PromQL are selectors of `dashboards.queries`.
"""

from __future__ import annotations

from collections.abc import Iterator

from dashboards.alerts import firing_alerts
from dashboards.availability import NO_EXPORTER_UP, exporter_state
from dashboards.board import ALERTS_OF_NODE, JOB, RUN, RUNBOOK, SINGLE_NODE, Board, Row
from dashboards.cost_and_loss import LOST_THRESHOLDS
from dashboards.exporter_health import exporter_panels
from dashboards.gpu_problems import count_lost_gpus, count_unknown_gpus
from dashboards.node_cost import NODE_COST_PER_HOUR, NODE_LOST_PER_HOUR, RUNS_LIVE_ON_NODE
from dashboards.node_gpus import gpu_panels
from dashboards.node_io import disk_panels, network_panels, optional_panels, process_panels
from dashboards.node_problems import WAITS_FOR_DATA, problems_of_node
from dashboards.node_ranks import ranks_table, runs_table
from dashboards.palette import (
    BAD,
    BLUE,
    BROWN,
    GREEN,
    GREY,
    KHAKI,
    ORANGE,
    PALE_BLUE,
    PURPLE,
    SKY_BLUE,
    VERMILION,
    WARNING,
    fixed_colors_by_name,
)
from dashboards.panels import (
    RUN_LINK,
    Panel,
    bad_from,
    stat,
    time_series,
    value_mappings,
    warn_from,
)
from dashboards.queries import Query, instant_query, named_values_query
from dashboards.tables import Column

UID = "training-node"
PAGE_BYTES = 4096
"""Assumed size of a memory page, because the exporter does not publish the size. On nodes with larger pages, *Swap and page faults* is too low."""
CPU_MODE_COLORS = {
    "user": BLUE,
    "nice": SKY_BLUE,
    "system": ORANGE,
    "iowait": PURPLE,
    "irq": KHAKI,
    "softirq": BROWN,
    "steal": VERMILION,
    "guest": GREEN,
    "guest_nice": GREEN,
}


_OF_NODE_OR_ITS_RUNS = f'unless (ALERTS{{@cluster, instance=""}} unless on (run) {RUNS_LIVE_ON_NODE})'
"""Condition of alerts: an alert without a node, such as that of a NaN loss, counts only if its run has a live process on the node."""
_CPU_WAIT = "waiting, data is late"
"""Legend of the share of the time in which a thread waits for a CPU, if a rank on the node waits for data. Only then does it have a color."""
UNKNOWN_GPU_COUNT = count_unknown_gpus("@node", "@target")
"""PromQL for the number of GPUs of the node in an unknown state; absent if there is none. No GPU is then up, but some may be lost."""
_PRESSURE_THRESHOLDS = warn_from(0.5)
"""Thresholds of the share of the time in which a thread waits for a CPU, for memory or for a disk."""


def board() -> Board:
    """Return the dashboard of a single node, the value of the variable `node`."""
    return Board(
        uid=UID,
        title="Training / Node",
        description="Problems, GPUs, CPU, memory, limits, disks and network of one node, and its job processes.",
        variables=(JOB, SINGLE_NODE, RUN, RUNBOOK),
        rows=(
            Row("At a glance", _overview_panels()),
            Row("GPU graphs", gpu_panels()),
            Row("Machine", _machine_panels()),
            Row("CPU", _cpu_panels()),
            Row("Memory", _memory_panels()),
            Row("Disks", disk_panels()),
            Row("Network", network_panels()),
            Row("Job processes", process_panels()),
            Row("Optional: single CPUs, RDMA, NFS and Lustre", optional_panels(), collapsed=True),
            Row("The exporter itself", exporter_panels(), collapsed=True),
        ),
        annotations=(ALERTS_OF_NODE,),
        bridges_missed_scrapes=True,
    )


def _overview_panels() -> tuple[Panel, ...]:
    """Return the panels with the state of the exporter, GPUs, cost, CPU and memory, and the tables of problems, runs, alerts and ranks."""
    cpu_wait = f"max({_pressure_ratio('cpu', '5m')} and on (instance) up{{@target}} == 1)"
    return (
        exporter_state(w=4),
        stat(
            "GPUs",
            named_values_query(
                {
                    "up": "sum(gpu_devices{@node})",
                    "lost": f"{count_lost_gpus('@node', '@target')} unless on () {NO_EXPORTER_UP}",
                    "unknown": UNKNOWN_GPU_COUNT,
                }
            ),
            colors_by_name={"lost": BAD, "unknown": WARNING},
            unit="none",
            text_mode="value_and_name",
            w=5,
        ),
        _cost_per_hour(),
        stat(
            "CPU",
            instant_query("max(host_cpu_utilization_ratio{@node})", "in use, now"),
            instant_query(
                f'label_replace({cpu_wait} and on () {WAITS_FOR_DATA}, "note", "{_CPU_WAIT}", "", "")'
                f' or on () label_replace({cpu_wait}, "note", "waiting, 5 min", "", "")',
                "{{note}}",
            ),
            unit="percentunit",
            decimals=0,
            text_mode="value_and_name",
            overrides=[
                {
                    "matcher": {"id": "byName", "options": _CPU_WAIT},
                    "properties": [{"id": "thresholds", "value": _PRESSURE_THRESHOLDS}],
                }
            ],
            w=5,
        ),
        stat(
            "Memory left",
            instant_query(
                "min((cgroup_memory_limit_bytes{@node} - cgroup_memory_working_set_bytes{@node})"
                " or on (instance) host_memory_available_bytes{@node})",
                "left",
            ),
            instant_query(
                "min(cgroup_memory_limit_bytes{@node} or on (instance) host_memory_total_bytes{@node})", "of"
            ),
            unit="bytes",
            decimals=1,
            text_mode="value_and_name",
            w=4,
        ),
        problems_of_node(),
        runs_table(),
        firing_alerts(
            '@cluster, instance=~"$node|"',
            (
                Column(
                    "run",
                    "Run",
                    width=140,
                    links=(RUN_LINK,),
                ),
                Column("rank", "Rank", width=65),
                Column("gpu", "GPU", width=65),
            ),
            w=24,
            h=7,
            condition=_OF_NODE_OR_ITS_RUNS,
            unknown_if=NO_EXPORTER_UP,
            unknown_text="node unknown",
        ),
        ranks_table(),
    )


def _machine_panels() -> tuple[Panel, ...]:
    """Return the panels of events and states that rarely explain a problem: a reboot, OOM kills, shared memory and the collectors."""
    # Two scrapes, as in the table of the problems: a single failure changes nothing.
    collector_success_query = (
        "min by (instance, collector) (max_over_time(exporter_collector_success{@node}[35s]))"
    )
    boot_time_query = "max by (instance) (host_boot_time_seconds{@node})"
    return (
        stat(
            "Machine up for",
            instant_query(f"time() - {boot_time_query} and on (instance) up{{@target}} == 1"),
            unit="s",
            decimals=0,
            w=5,
            h=3,
        ),
        stat(
            "OOM kills",
            instant_query(
                'max((sum by (instance) (increase(cgroup_memory_events_total{@node, event="oom_kill"}[$__range]))'
                " or on (instance) increase(host_vm_oom_kills_total{@node}[$__range])) and on (instance) up{@target} == 1)"
            ),
            unit="none",
            decimals=0,
            thresholds=bad_from(1),
            w=5,
            h=3,
        ),
        stat(
            "Shared memory",
            instant_query("max(host_shm_used_bytes{@node} / host_shm_size_bytes{@node})"),
            unit="percentunit",
            decimals=0,
            thresholds=warn_from(0.7, 0.9),
            w=5,
            h=3,
        ),
        stat(
            "Working collectors",
            instant_query(f"count({collector_success_query} == 1)", "up"),
            instant_query(
                f"count by (collector) ({collector_success_query} == 0) or on () 0 * count({collector_success_query})",
                "failed {{collector}}",
                BAD,
            ),
            unit="none",
            text_mode="value_and_name",
            w=9,
            h=3,
        ),
    )


def _cost_per_hour() -> Panel:
    """Return the panel with the cost per hour of the runs on the node and the lost part of the cost, or with *exporter down*."""
    share = "of it lost"
    exporter_down = "(max(up{@target}) == 0)"
    cost, lost = f"sum by (currency) ({NODE_COST_PER_HOUR})", f"sum by (currency) ({NODE_LOST_PER_HOUR})"
    unknown = "unknown"
    return stat(
        "Cost per hour, 5 min",
        instant_query(
            f'{cost} or label_replace(0 * {exporter_down}, "currency", "{unknown}", "", "")', "{{currency}}"
        ),
        instant_query(lost, "{{currency}} lost"),
        instant_query(f"max({lost} / ({cost} > 0))", share),
        unit="none",
        decimals=2,
        text_mode="value_and_name",
        overrides=[
            {
                "matcher": {"id": "byName", "options": share},
                "properties": [
                    {"id": "unit", "value": "percentunit"},
                    {"id": "decimals", "value": 0},
                    {"id": "thresholds", "value": LOST_THRESHOLDS},
                ],
            },
            {
                "matcher": {"id": "byName", "options": unknown},
                "properties": [{"id": "mappings", "value": value_mappings({0: ("exporter down", WARNING)})}],
            },
        ],
        w=6,
    )


def _cpu_panels() -> tuple[Panel, ...]:
    """Return the panels about the CPUs of the node and of the container, and about the pressure on resources."""
    return (
        time_series(
            "CPUs by mode",
            Query(
                'sum by (mode) (rate(host_cpu_seconds_total{@node, mode!="idle"}[$__rate_interval]))',
                "{{mode}}",
            ),
            Query('max(host_cpus{@node, kind="online"})', "CPUs", reference=True),
            Query("host_load1{@node}", "load, 1 min", VERMILION, reference=True, right_axis=True),
            unit="none",
            decimals=1,
            stacked=True,
            overrides=fixed_colors_by_name(CPU_MODE_COLORS),
            w=8,
        ),
        time_series(
            "CPU of the container, and its limit",
            Query(
                "sum by (mode) (rate(cgroup_cpu_usage_seconds_total{@node}[$__rate_interval]))", "{{mode}}"
            ),
            Query("max(cgroup_cpu_limit_cpus{@node})", "limit", reference=True),
            Query(
                "max(rate(cgroup_cpu_throttled_seconds_total{@node}[$__rate_interval]))",
                "throttled",
                VERMILION,
                reference=True,
            ),
            unit="none",
            decimals=1,
            stacked=True,
            overrides=fixed_colors_by_name({"user": BLUE, "system": ORANGE}),
            w=8,
        ),
        time_series(
            "Pressure",
            *_pressure_queries(),
            unit="percentunit",
            maximum=1,
            thresholds=_PRESSURE_THRESHOLDS,
            w=8,
        ),
    )


def _pressure_ratio(resource: str, window: str) -> str:
    """Return PromQL for the share of the time in which at least one thread waited for a resource: `cpu`, `memory` or `io`."""
    return f"clamp_max(rate(host_pressure_{resource}_waiting_seconds_total{{@node}}[{window}]), 1)"


def _pressure_queries() -> Iterator[Query]:
    """Yield the queries of the pressure on each resource of the node, and on the I/O of the container."""
    for resource, name, color in (
        ("cpu", "CPU", BLUE),
        ("memory", "memory", VERMILION),
        ("io", "I/O", PURPLE),
    ):
        yield Query(_pressure_ratio(resource, "$__rate_interval"), name, color)
    container_io_query = "rate(cgroup_pressure_io_waiting_seconds_total{@node}[$__rate_interval])"
    yield Query(container_io_query, "I/O, container", PURPLE, dashed=True)


def _memory_panels() -> tuple[Panel, ...]:
    """Return the panels about the memory of the node and of the container, and about swap."""
    return (
        time_series(
            "Memory of the node",
            Query("host_memory_anon_bytes{@node}", "processes", BLUE),
            Query("host_memory_shared_bytes{@node}", "shared, tmpfs", PURPLE),
            Query("host_memory_slab_bytes{@node}", "slab", ORANGE),
            Query(
                "clamp_min(host_memory_cached_bytes{@node} + host_memory_buffers_bytes{@node}"
                " - host_memory_shared_bytes{@node}, 0)",
                "page cache",
                PALE_BLUE,
            ),
            Query("host_memory_total_bytes{@node}", "size", GREY, reference=True),
            unit="bytes",
            stacked=True,
            w=8,
        ),
        time_series(
            "Memory of the container, and its limit",
            Query("cgroup_memory_working_set_bytes{@node}", "working set", BLUE),
            Query("cgroup_memory_current_bytes{@node}", "with page cache", PALE_BLUE),
            Query("cgroup_memory_limit_bytes{@node}", "limit", VERMILION, reference=True),
            Query("cgroup_memory_high_bytes{@node}", "memory.high", ORANGE, reference=True),
            unit="bytes",
            w=8,
        ),
        time_series(
            "Swap and page faults",
            Query("rate(host_swap_in_bytes_total{@node}[$__rate_interval])", "from swap, bytes/s", ORANGE),
            Query("rate(host_swap_out_bytes_total{@node}[$__rate_interval])", "to swap, bytes/s", VERMILION),
            Query(
                f'rate(host_vm_page_faults_total{{@node, kind="major"}}[$__rate_interval]) * {PAGE_BYTES}',
                "pages read by faults, bytes/s",
                BLUE,
            ),
            unit="Bps",
            w=8,
        ),
    )
