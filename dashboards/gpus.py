"""Dashboard *GPUs*: presence, health, use, memory, power, heat, clocks and links."""

from __future__ import annotations

from dashboards.board import ALERTS_OF_NODE, JOB, NODE, NUMERICAL_SORT, RUN, Board, Row, Variable
from dashboards.palette import (
    ABSENT,
    BAD,
    GOOD,
    GREY,
    KHAKI,
    NEUTRAL,
    PURPLE,
    THROTTLES,
    WARNING,
    colors_by_first_word,
    colors_by_name,
    fixed_color,
)
from dashboards.panels import (
    Panel,
    bars,
    dashboard_link,
    stat,
    state_timeline,
    time_series,
    value_mappings,
    warn_above,
    warn_below,
)
from dashboards.queries import Query, event_counts, instant_query
from dashboards.tables import ZERO_AS_DASH, Column, percent, placeholder_row, table

UID = "training-gpus"
GPUS_OF_RUN = (
    'last_over_time(training_rank_info{@run, uuid!=""}[$__range])'
    " or last_over_time(training_process_gpu_memory_bytes{@run}[$__range])"
    ' or label_replace(last_over_time(training_energy_share_ratio{@run, component="gpu"}[$__range]) > 0,'
    ' "uuid", "$1", "device", "(.+)")'
)
"""PromQL for the GPUs of a run, as in the rules `run_gpu:…`."""
RUN_VARIABLE = Variable(
    RUN.name,
    RUN.label,
    RUN.query,
    all_value=".*",
    description="Run whose GPUs are shown; All shows every GPU of the nodes.",
)
NODE_VARIABLE = Variable(
    NODE.name,
    NODE.label,
    # `.*`, the value of All, also matches series without the label `run`.
    'query_result(group by (instance) (last_over_time(exporter_build_info{@cluster, job=~"$job", run=~"$run"}[$__range])'
    f' or last_over_time(gpu_up{{@cluster, job=~"$job"}}[$__range]) and on (uuid) ({GPUS_OF_RUN})))',
    all_value=None,
    regex='/instance="([^"]+)"/',
    description=NODE.description,
)
UUID_VARIABLE = Variable(
    "uuid",
    "GPU UUID",
    f'query_result(group by (uuid) (last_over_time(gpu_up{{@node, run=~"$run"}}[$__range]) or {GPUS_OF_RUN}))',
    all_value=None,
    regex='/uuid="([^"]+)"/',
    hidden=True,
    description="UUIDs of the GPUs of the selected runs and nodes.",
)
GPU_VARIABLE = Variable(
    "gpu",
    "GPU",
    'label_values(gpu_up{@node, uuid=~"$uuid"}, gpu)',
    sort=NUMERICAL_SORT,
    description="Index of the GPU in CUDA_VISIBLE_DEVICES of the job; without that variable, the index in NVML.",
)


def _gpu_problems() -> str:
    """Return PromQL for the number of unhealthy conditions of each GPU."""
    conditions = (
        ("lost", "gpu_up{@gpu} == bool 0"),
        ("recovery", "gpu_recovery_action{@gpu} > bool 0"),
        ("ecc", 'gpu_ecc_errors_total{@gpu, kind="uncorrected"} > bool 0'),
        ("row remap failed", "gpu_remapped_rows_failed{@gpu} > bool 0"),
        ("row remap pending", "gpu_remapped_rows_pending{@gpu} > bool 0"),
        ("xid", "time() - gpu_xid_last_timestamp_seconds{@gpu} < bool 3600"),
        ("heat", "rate(gpu_clocks_event_seconds_total{@gpu, @throttling}[$__rate_interval]) > bool 0.05"),
        ("nvlink", 'gpu_nvlink_links{@gpu, state="inactive"} > bool 0'),
    )
    terms = (
        f'label_replace(max by (instance, gpu) ({expression}), "condition", "{name}", "", "")'
        for name, expression in conditions
    )
    return f"sum by (instance, gpu) ({' or '.join(terms)})"


GPU_PROBLEMS = _gpu_problems()
GPUS_WITH_RANK = (
    "max by (instance, gpu, run, rank) (gpu_up{@gpu} * 0 + on (uuid) group_left (run, rank)"
    ' topk by (uuid) (1, last_over_time(training_rank_info{@cluster, uuid!=""}[$__range])))'
    " or on (instance, gpu) max by (instance, gpu) (gpu_up{@gpu} * 0)"
)
"""PromQL for each GPU, with the last run and rank that used the GPU in the time range."""
RANKS_LINK = dashboard_link("training-ranks", "Ranks on this node")
LEGEND = "{{instance}} GPU {{gpu}}"


def board() -> Board:
    """Return the dashboard of the GPUs of runs or nodes."""
    return Board(
        uid=UID,
        title="Training / GPUs",
        description="Use, memory, power, heat, clocks, links and errors of the GPUs of a run, or of some nodes.",
        variables=(JOB, RUN_VARIABLE, NODE_VARIABLE, UUID_VARIABLE, GPU_VARIABLE),
        rows=(
            Row("At a glance", _overview_panels()),
            Row("Health", _health_panels()),
            Row("Use", _utilization_panels()),
            Row("Memory", _memory_panels()),
            Row("Power, heat and clocks", _power_panels()),
            Row("NVLink and PCIe", links(), collapsed=True),
            Row("MIG instances", _mig_panels(), collapsed=True),
            Row("Inventory", _inventory_panels(), collapsed=True),
        ),
        annotations=(ALERTS_OF_NODE,),
    )


def _overview_panels() -> tuple[Panel, ...]:
    return (
        state_timeline(
            "Exporter, driver and GPUs",
            Query("min by (instance) (up{@node})", "{{instance}} exporter"),
            Query(
                "max by (instance) (gpu_nvml_up{@node}) == 1 or on (instance) max by (instance) (2 *"
                ' gpu_nvml_error_info{@node, reason="library_not_found"}) or max by (instance) (gpu_nvml_up{@node})',
                "{{instance}} driver",
            ),
            Query(
                "max by (instance, gpu) (gpu_up{@gpu} and on (uuid) min_over_time(gpu_up{@gpu}[$__range] @ end()) == 0)",
                LEGEND,
            ),
            mappings=value_mappings({1: ("up", GOOD), 0: ("down", BAD), 2: ("no driver here", ABSENT)}),
            w=14,
            h=10,
        ),
        stat(
            "GPUs",
            instant_query("sum(gpu_devices{@node})", "up"),
            instant_query("sum(gpu_devices_expected{@node})", "expected"),
            instant_query(
                "clamp_min(sum(gpu_devices_expected{@node}) - sum(gpu_devices{@node} or 0 * gpu_devices_expected{@node}), 0)",
                "missing",
                BAD,
            ),
            unit="none",
            text_mode="value_and_name",
            w=5,
        ),
        stat(
            "Mean SM activity",
            instant_query("avg(gpu_sm_activity_ratio{@gpu})"),
            unit="percentunit",
            decimals=0,
            thresholds=warn_below(0.5, 0.2),
            w=5,
        ),
        stat(
            "Thermal or power throttling",
            instant_query(
                "topk(1, max by (instance, gpu) (rate(gpu_clocks_event_seconds_total{@gpu, @throttling}[$__rate_interval])))",
                LEGEND,
            ),
            unit="percentunit",
            decimals=0,
            text_mode="value_and_name",
            thresholds=warn_above(0.01, 0.1),
            w=5,
            h=3,
        ),
        stat(
            "Reason for a missing driver or GPU",
            instant_query(
                "max by (instance, reason) (gpu_nvml_error_info{@node}) unless on (instance) gpu_nvml_up{@node} == 1"
                " or label_replace(max by (instance, gpu, reason) (gpu_error_info{@gpu})"
                ' and on (instance) gpu_nvml_up{@node} == 1, "gpu_prefix", "GPU $1: ", "gpu", "(.+)")'
                ' or label_replace(min(gpu_up{@gpu}) == 1, "reason", "all GPUs respond", "", "")'
                ' or label_replace(max(up{@node}) == 0, "reason", "exporter down", "", "")',
                "{{instance}} {{gpu_prefix}}{{reason}}",
            ),
            unit="none",
            text_mode="name",
            color=fixed_color(NEUTRAL),
            w=10,
            h=3,
        ),
    )


def _utilization_panels() -> tuple[Panel, ...]:
    return (
        time_series(
            "SM activity",
            Query("gpu_sm_activity_ratio{@gpu}", LEGEND),
            unit="percentunit",
            maximum=1,
            w=6,
            links=(RANKS_LINK,),
        ),
        time_series(
            "Tensor core activity",
            Query("gpu_tensor_activity_ratio{@gpu}", LEGEND),
            unit="percentunit",
            maximum=1,
            w=6,
        ),
        time_series(
            "Memory bandwidth in use",
            Query("gpu_dram_activity_ratio{@gpu}", LEGEND),
            unit="percentunit",
            maximum=1,
            w=6,
        ),
        time_series(
            "Utilisation (a kernel runs)",
            Query("clamp_max(rate(gpu_utilization_busy_seconds_total{@gpu}[$__rate_interval]), 1)", LEGEND),
            unit="percentunit",
            maximum=1,
            w=6,
        ),
    )


def _memory_panels() -> tuple[Panel, ...]:
    return (
        time_series(
            "Memory in use",
            Query("gpu_memory_used_bytes{@gpu}", LEGEND),
            Query(
                "max by (instance) (gpu_memory_total_bytes{@gpu})",
                "{{instance}} size of one GPU",
                reference=True,
            ),
            unit="bytes",
            w=10,
        ),
        bars(
            "GPU memory by rank",
            instant_query(
                "sum by (run, rank, gpu, instance) (training_process_gpu_memory_bytes{@node_run})",
                "rank {{rank}} of {{run}}, GPU {{gpu}}",
            ),
            unit="bytes",
            w=7,
        ),
    )


def _power_panels() -> tuple[Panel, ...]:
    return (
        time_series(
            "Power of each GPU",
            Query("gpu_power_watts{@gpu}", LEGEND),
            Query(
                'min by (instance) (gpu_power_limit_watts{@gpu, limit="enforced"})',
                "{{instance}} limit",
                reference=True,
            ),
            unit="watt",
            w=8,
        ),
        time_series(
            "Temperature of each GPU",
            Query('gpu_temperature_celsius{@gpu, sensor="gpu"}', LEGEND),
            unit="celsius",
            minimum=None,
            w=8,
        ),
        time_series("SM clock", Query('gpu_clock_hertz{@gpu, clock="sm"}', LEGEND), unit="hertz", w=8),
        time_series(
            "Clock limits by reason",
            Query(
                'sum by (reason) (rate(gpu_clocks_event_seconds_total{@gpu, reason!="low_utilization"}[$__rate_interval]))',
                "{{reason}}",
            ),
            unit="none",
            decimals=2,
            overrides=colors_by_name(THROTTLES),
        ),
        time_series(
            "Thermal and power brake throttling",
            Query(
                "max by (instance, gpu) (rate(gpu_clocks_event_seconds_total{@gpu, @throttling}[$__rate_interval]))",
                LEGEND,
            ),
            unit="percentunit",
            links=(RANKS_LINK,),
        ),
    )


def links() -> tuple[Panel, ...]:
    """Return the panels about traffic over NVLink and PCIe."""

    def traffic(title: str, link: str) -> Panel:
        rate = f"sum by (instance, gpu) (rate(gpu_{link}_{{way}}_bytes_total{{{{@gpu}}}}[$__rate_interval]))"
        return time_series(
            title,
            Query(rate.format(way="transmit"), f"sent, {LEGEND}"),
            Query(rate.format(way="receive"), f"received, {LEGEND}", dashed=True),
            unit="Bps",
            legend="hidden",
        )

    return traffic("NVLink traffic", "nvlink"), traffic("PCIe traffic", "pcie")


def _health_panels() -> tuple[Panel, ...]:
    """Return the panels about errors; GPUs with problems come first."""
    errors = [
        f'label_replace({event_counts(f"{family}{{@gpu}}", by, starts_at_first_event=True)} > 0, "error", "{name}", "{by}", "(.*)")'
        for family, by, name in (
            ("gpu_xid_errors_total", "xid", "Xid $1"),
            ("gpu_ecc_errors_total", "kind", "ECC $1"),
            ("gpu_pcie_errors_total", "kind", "PCIe $1"),
            ("gpu_pcie_replays_total", "gpu", "PCIe replay, GPU $1"),
            ("gpu_nvlink_errors_total", "kind", "NVLink $1"),
        )
    ]
    no_error = 'label_replace(0 * max(gpu_up{@gpu}), "error", "no error", "", "")'
    no_xid = placeholder_row("gpu_xid_errors_total{@gpu}", "xid", "none")
    return (
        table(
            "Health of each GPU",
            Column("instance", "Node", width=110),
            Column("gpu", "GPU", width=60),
            Column("run", "Run", links=(dashboard_link("training-run", "Run", run="${__value.raw}"),)),
            Column("rank", "Rank", width=70),
            Column(GPU_PROBLEMS, "Problems", width=90, thresholds=warn_above(1, 1)),
            Column(
                "min by (instance, gpu) (gpu_up{@gpu})",
                "State",
                width=80,
                mappings=value_mappings({1: ("up", GOOD), 0: ("lost", BAD)}),
            ),
            Column(
                "count by (instance, gpu) (time() - gpu_xid_last_timestamp_seconds{@gpu} < 3600)"
                " or on (instance, gpu) max by (instance, gpu) (gpu_up{@gpu} * 0)",
                "Xids, 1 h",
                decimals=0,
                width=80,
                thresholds=warn_above(1, 1),
            ),
            percent(
                "max by (instance, gpu) (rate(gpu_clocks_event_seconds_total{@gpu, @throttling}[$__rate_interval]))",
                "Throttled",
                90,
                warn_above(0.01, 0.1),
            ),
            Column(
                "max by (instance, gpu) (gpu_recovery_action{@gpu})",
                "Recovery action",
                width=130,
                mappings=value_mappings(
                    {
                        0: ("nothing", NEUTRAL),
                        1: ("GPU reset", BAD),
                        2: ("reboot", BAD),
                        3: ("drain peers", WARNING),
                        4: ("drain and reset", BAD),
                        5: ("IMEX recovery", BAD),
                        6: ("bus reset", BAD),
                        7: ("system reboot", BAD),
                    }
                ),
            ),
            Column(
                'sum by (instance, gpu) (gpu_ecc_errors_total{@gpu, kind="uncorrected"})',
                "Uncorrected ECC",
                width=100,
                thresholds=warn_above(1, 1),
            ),
            Column(
                "max by (instance, gpu) (gpu_remapped_rows_pending{@gpu})",
                "Row remap pending",
                width=100,
                mappings=value_mappings({0: ("no", NEUTRAL), 1: ("yes", WARNING)}),
            ),
            Column(
                "max by (instance, gpu) (gpu_remapped_rows_failed{@gpu})",
                "Row remap failed",
                width=120,
                mappings=value_mappings({0: ("no", NEUTRAL), 1: ("replace the GPU", BAD)}),
            ),
            Column(
                'sum by (instance, gpu) (gpu_nvlink_links{@gpu, state="inactive"})',
                "NVLinks down",
                width=100,
                thresholds=warn_above(1),
            ),
            Column(
                'max by (instance, gpu) (gpu_pcie_link_width{@gpu, kind="max"} - ignoring (kind)'
                ' gpu_pcie_link_width{@gpu, kind="current"})',
                "Missing PCIe lanes",
                width=100,
                thresholds=warn_above(1),
            ),
            row_query=GPUS_WITH_RANK,
            sort="Problems",
            h=8,
        ),
        time_series(
            "New errors",
            Query(f"{' or '.join(errors)} or {no_error}", "{{error}}"),
            unit="none",
            overrides=colors_by_first_word(
                {"Xid": BAD, "ECC": WARNING, "PCIe": KHAKI, "NVLink": PURPLE, "no": GREY}
            ),
            bars=True,
            w=10,
            h=6,
        ),
        table(
            "Xid errors",
            Column("instance", "Node"),
            Column("gpu", "GPU", width=60),
            Column("xid", "Xid", width=70),
            Column(
                f"sum by (instance, gpu, xid) (gpu_xid_errors_total{{@gpu}}) or {no_xid}", "Count", width=70
            ),
            Column(
                f"max by (instance, gpu, xid) (gpu_xid_last_timestamp_seconds{{@gpu}}) * 1000 or {no_xid}",
                "Last time",
                unit="dateTimeAsIso",
                width=170,
                mappings=ZERO_AS_DASH,
            ),
            sort="Last time",
            w=14,
            h=6,
        ),
    )


def _mig_panels() -> tuple[Panel, ...]:
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


def _inventory_panels() -> tuple[Panel, ...]:
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
