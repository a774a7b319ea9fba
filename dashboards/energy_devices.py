"""Tables of the dashboard *Energy and cost*: energy and cost by node and by GPU."""

from __future__ import annotations

from dashboards.energy_loss import increase_in_range
from dashboards.panels import NODE_LINK, RUN_LINK, Panel
from dashboards.tables import Column, percent_column, table

ENERGY_UNIT = "watth"
"""Unit of watt-hours, which Grafana shows with a prefix: Wh, kWh, MWh."""
HELD_GPUS_TEMPLATE = (
    "group by (instance, uuid, run) ("
    'training_rank_info{{{selector}, uuid!=""}} or training_process_gpu_memory_bytes{{{selector}}}'
    ' or label_replace(training_energy_share_ratio{{{selector}, component="gpu"}} > 0, "uuid", "$1", "device", "(.+)"))'
)
"""Template of PromQL for the GPUs that runs hold, as in the rules `run_gpu:…`."""
HELD_GPUS = HELD_GPUS_TEMPLATE.format(selector="@run")
"""PromQL for a series of value 1 for each device that a selected run holds now, by node, UUID and run."""
DEVICES_OF_RUNS = (
    "group by (instance, device, run) (last_over_time(training_energy_share_ratio{@run}[$__range]) > 0)"
)
"""PromQL for a series of value 1 for each device whose energy a selected run was charged for in the time range, by node, device and run."""
GPU_ENERGY = "max by (instance, uuid) (increase(gpu_energy_joules_total{@energy_node}[$__range]))"
"""PromQL for the joules of each device in the time range, by node and UUID."""
_GPU_ENERGY_OF_RUNS = increase_in_range(
    'training_energy_joules_total{@energy_node, component="gpu"}', "instance"
)
"""PromQL for the joules of the GPUs of each node that runs are charged for, in the time range."""
UNUSED_GPU_ENERGY = f"clamp_min(sum by (instance) ({GPU_ENERGY}) - ({_GPU_ENERGY_OF_RUNS} or 0 * sum by (instance) ({GPU_ENERGY})), 0)"
"""PromQL for the joules of the GPUs of each node that no run is charged for."""


def device_panels() -> tuple[Panel, ...]:
    """Return the tables of energy and cost by node and by GPU."""
    return (_node_table(), _gpu_table())


def _node_table() -> Panel:
    """Return the table of the energy, cost and emissions of the runs on each node, and of the energy of the GPUs of no run."""
    energy_of_runs = "training_energy_joules_total{@node_run_any_job}"
    return table(
        "Energy and cost of each node, in this time range",
        Column("instance", "Node", links=(NODE_LINK,)),
        Column(
            "sum by (instance) (max by (instance, gpu) (gpu_power_watts{@energy_node}))",
            "GPU power",
            unit="watt",
            decimals=1,
            width=85,
        ),
        Column(
            f"{increase_in_range(energy_of_runs, 'instance')} / 3600",
            "Energy",
            unit=ENERGY_UNIT,
            decimals=1,
            width=95,
        ),
        Column(f"{UNUSED_GPU_ENERGY} / 3600", "GPUs of no run", unit=ENERGY_UNIT, decimals=1, width=120),
        Column(
            increase_in_range("training_cost_total{@node_run_any_job}", "instance"),
            "Cost",
            decimals=2,
            width=70,
        ),
        Column(
            increase_in_range("training_carbon_grams_total{@node_run_any_job}", "instance"),
            "CO2",
            unit="massg",
            decimals=1,
            width=70,
        ),
        sort="Energy",
        w=11,
        h=9,
    )


def _gpu_table() -> Panel:
    """Return the table of the power, energy and rent of each GPU, without the GPUs whose last run is not selected."""
    # `>= bool 0` turns the state of a device, 1 or 0, into 1: a factor that only adds the index to series with a UUID.
    gpus = "topk by (instance, uuid) (1, last_over_time(gpu_up{@energy_node}[$__range]) >= bool 0)"
    held = HELD_GPUS_TEMPLATE.format(selector="@energy_node")
    last_runs = f"topk by (instance, uuid) (1, last_over_time(({held})[$__range:$__interval]))"
    selected_runs = "group by (run) (last_over_time(training_run_state{@run}[$__range]))"
    # The driver lists no processes of a lost GPU, which its run still pays for.
    lost = (
        "(group by (instance, uuid) (gpu_up{@energy_node} == 0)"
        " and on (uuid) last_over_time(run_gpu:training_gpu_lost:group{@cluster}[35s]))"
    )
    # The number of points of the subquery at which a run pays for the device, times the distance of the points.
    held_seconds = (
        f"sum_over_time((max by (instance, uuid) ({held}) or on (instance, uuid) {lost})[$__range:$__interval])"
        " * $__interval_ms / 1000"
    )
    prices = "max by (instance) (training_gpu_price_per_second{@energy_node})"
    power = "max by (instance, gpu) (gpu_power_watts{@energy_node})"
    limits = 'max by (instance, gpu) (gpu_power_limit_watts{@energy_node, limit="enforced"})'

    gpus_of_other_runs = f"(({gpus}) and on (instance, uuid) ({last_runs} unless on (run) {selected_runs}))"

    def of_rows(expression: str) -> str:
        """Return PromQL for the values of the GPUs of the table: the value of another GPU would be a row of its own."""
        return f"{expression} unless on (instance, gpu) {gpus_of_other_runs}"

    return table(
        "Energy and rent of each GPU, in this time range",
        Column("instance", "Node", width=100),
        Column("gpu", "GPU", width=70),
        Column("run", "Last run", links=(RUN_LINK,)),
        Column(of_rows(power), "Power now", unit="watt", decimals=0, width=80),
        percent_column(of_rows(f"{power} / ({limits} > 0)"), "of its limit", 110, bar=(0, 1)),
        Column(
            of_rows(
                "max by (instance, gpu) (increase(gpu_energy_joules_total{@energy_node}[$__range])) / 3600"
            ),
            "Energy",
            unit=ENERGY_UNIT,
            decimals=1,
            width=90,
        ),
        Column(
            of_rows(
                f"sum by (instance, gpu) ({held_seconds} * on (instance, uuid) group_left (gpu) {gpus}"
                f" * on (instance) group_left () {prices})"
            ),
            "Rent charged",
            decimals=2,
            width=110,
        ),
        row_query=(
            f"max by (instance, gpu, run) ({gpus} * on (instance, uuid) group_left (run) ({last_runs} and on (run) {selected_runs}))"
            f" or on (instance, gpu) max by (instance, gpu) ({gpus} unless on (instance, uuid) {last_runs})"
        ),
        sort="Energy",
        w=13,
        h=9,
        max_data_points=120,
    )
