"""Panels of the dashboard *GPUs*: use, memory, power, heat, clocks, links, MIG instances and inventory.

A plot shows at most `MAX_LINES` GPUs: those that stand out most in the time range. GPUs that no run holds are hidden while a
run holds any of the selected GPUs.
"""

from __future__ import annotations

from dashboards.palette import HASHED_COLOR, THROTTLE_REASON_COLORS, fixed_colors_by_name
from dashboards.panels import Panel, bar_gauge, dashboard_link, time_series
from dashboards.queries import Query, instant_query
from dashboards.tables import Column, table

MAX_LINES = 8
LEGEND = "{{instance}} GPU {{gpu}}"
RANKS_LINK = dashboard_link("training-ranks", "Ranks on this node")
GPUS_OF_ANY_RUN = (
    'last_over_time(training_rank_info{@cluster, uuid!=""}[$__range] @ end())'
    " or last_over_time(training_process_gpu_memory_bytes{@cluster}[$__range] @ end())"
    ' or label_replace(last_over_time(training_energy_share_ratio{@cluster, component="gpu"}[$__range] @ end()) > 0,'
    ' "uuid", "$1", "device", "(.+)")'
)
"""PromQL for the GPUs that any run holds, as in the rules `run_gpu:…`."""


def used_gpus(expression: str) -> str:
    """Return PromQL for the GPUs that a run holds, or for all selected GPUs if no run holds any of them."""
    used_gpus_query = f"({expression}) and on (uuid) ({GPUS_OF_ANY_RUN})"
    return f"({used_gpus_query} or ({expression}) unless on () ({used_gpus_query}))"


def _extreme_gpus(expression: str, *, lowest: bool = False) -> Query:
    """Return the query for the GPUs with the largest or smallest means over the time range."""
    mean = f"avg_over_time(({expression})[$__range:$__interval] @ end())"
    select = "bottomk" if lowest else "topk"
    return Query(
        f"{used_gpus(expression)} and on (instance, gpu) {select}({MAX_LINES}, {used_gpus(mean)})", LEGEND
    )


def _median(expression: str) -> Query:
    return Query(f"quantile(0.5, {used_gpus(expression)})", "median", reference=True)


def utilization_panels() -> tuple[Panel, ...]:
    """Return the panels about the use of the compute units and of the memory bandwidth."""

    def activity(title: str, expression: str) -> Panel:
        return time_series(
            title,
            _extreme_gpus(expression, lowest=True),
            _median(expression),
            unit="percentunit",
            maximum=1,
            color=HASHED_COLOR,
            w=6,
            links=(RANKS_LINK,),
        )

    return (
        activity("SM activity", "gpu_sm_activity_ratio{@gpu}"),
        activity("Tensor core activity", "gpu_tensor_activity_ratio{@gpu}"),
        activity("Memory bandwidth in use", "gpu_dram_activity_ratio{@gpu}"),
        activity(
            "Utilisation (a kernel runs)",
            "clamp_max(rate(gpu_utilization_busy_seconds_total{@gpu}[$__rate_interval]), 1)",
        ),
    )


def memory_panels() -> tuple[Panel, ...]:
    """Return the panels about device memory."""
    return (
        time_series(
            "Memory in use",
            _extreme_gpus("gpu_memory_used_bytes{@gpu}"),
            _median("gpu_memory_used_bytes{@gpu}"),
            Query("max(gpu_memory_total_bytes{@gpu})", "size of a GPU", reference=True),
            unit="bytes",
            color=HASHED_COLOR,
            w=10,
        ),
        bar_gauge(
            "GPU memory by rank",
            instant_query(
                "topk(20, sum by (run, rank, gpu, instance) (training_process_gpu_memory_bytes{@node_run}))",
                "rank {{rank}} of {{run}}, GPU {{gpu}}",
            ),
            unit="bytes",
            w=7,
        ),
    )


def power_panels() -> tuple[Panel, ...]:
    """Return the panels about power, temperature, clocks and throttling."""
    power, temperature = "gpu_power_watts{@gpu}", 'gpu_temperature_celsius{@gpu, sensor="gpu"}'
    clock = 'gpu_clock_hertz{@gpu, clock="sm"}'
    clock_limits = 'rate(gpu_clocks_event_seconds_total{@gpu, reason!="low_utilization"}[$__rate_interval])'
    throttled_query = "max by (instance, gpu, uuid) (rate(gpu_clocks_event_seconds_total{@gpu, @throttling}[$__rate_interval]))"
    return (
        time_series(
            "Power of each GPU",
            _extreme_gpus(power, lowest=True),
            _median(power),
            Query('min(gpu_power_limit_watts{@gpu, limit="enforced"})', "lowest limit", reference=True),
            unit="watt",
            color=HASHED_COLOR,
            w=8,
        ),
        time_series(
            "Temperature of each GPU",
            _extreme_gpus(temperature),
            _median(temperature),
            unit="celsius",
            minimum=None,
            color=HASHED_COLOR,
            w=8,
        ),
        time_series(
            "SM clock",
            _extreme_gpus(clock, lowest=True),
            _median(clock),
            unit="hertz",
            color=HASHED_COLOR,
            w=8,
        ),
        time_series(
            "GPUs below full clock, by reason",
            Query(f"sum by (reason) ({used_gpus(clock_limits)})", "{{reason}}"),
            unit="suffix: GPUs",
            decimals=1,
            overrides=fixed_colors_by_name(THROTTLE_REASON_COLORS),
        ),
        time_series(
            "Thermal and power brake throttling",
            _extreme_gpus(throttled_query),
            unit="percentunit",
            color=HASHED_COLOR,
            links=(RANKS_LINK,),
        ),
    )


def link_panels() -> tuple[Panel, ...]:
    """Return the panels about traffic over NVLink and PCIe."""

    def traffic(title: str, link: str) -> Panel:
        rate = f"sum by (instance, gpu, uuid) (rate(gpu_{link}_{{direction}}_bytes_total{{{{@gpu}}}}[$__rate_interval]))"
        queries = []
        for text, direction in (("sent", "transmit"), ("received", "receive")):
            extreme = _extreme_gpus(rate.format(direction=direction), lowest=True)
            queries.append(Query(extreme.expression, f"{text}, {LEGEND}", dashed=direction == "receive"))
        return time_series(title, *queries, unit="Bps", legend="hidden", color=HASHED_COLOR)

    return traffic("NVLink traffic", "nvlink"), traffic("PCIe traffic", "pcie")


def mig_panels() -> tuple[Panel, ...]:
    """Return the panels about MIG instances."""
    legend = "{{instance}} GPU {{gpu}} {{mig_uuid}}"
    return (
        time_series(
            "SM activity of instances (MIG)",
            Query("gpu_mig_sm_activity_ratio{@gpu}", legend),
            unit="percentunit",
            maximum=1,
            legend="hidden",
        ),
        time_series(
            "Memory of instances (MIG)",
            Query("gpu_mig_memory_used_bytes{@gpu} / gpu_mig_memory_total_bytes{@gpu}", legend),
            unit="percentunit",
            maximum=1,
            legend="hidden",
        ),
    )


def inventory_panels() -> tuple[Panel, ...]:
    """Return the table of the GPUs' models, drivers and addresses."""
    return (
        table(
            "GPUs and their drivers",
            Column("instance", "Node"),
            Column("gpu", "GPU", width=60),
            Column("name", "Model", width=190),
            Column("driver", "Driver", width=100),
            Column("cuda_driver", "CUDA", width=70),
            Column("vbios", "VBIOS", width=135),
            Column("serial", "Serial", width=130),
            Column("pci_bus_id", "PCI address", width=150),
            Column(
                'max by (instance, gpu, uuid) (gpu_pcie_link_generation{@gpu, kind="current"})',
                "PCIe",
                width=70,
            ),
            Column(
                'max by (instance, gpu, uuid) (gpu_pcie_link_width{@gpu, kind="current"})', "Lanes", width=70
            ),
            Column("uuid", "UUID", width=360),
            row_query="max by (instance, gpu, name, driver, cuda_driver, vbios, serial, pci_bus_id, uuid) (gpu_info{@gpu})",
        ),
    )
