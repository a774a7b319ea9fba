"""Panels of the dashboard *Energy and cost*: the first screen, and energy and cost by run, node and GPU."""

from __future__ import annotations

from collections.abc import Mapping

from dashboards.alerts import CLOCK_TIME
from dashboards.energy_loss import (
    CAUSE_TEXTS,
    COST_BY_CAUSE,
    COST_PER_HOUR,
    ENERGY_BY_CAUSE,
    LOSS_SINCE,
    LOST_COST_BY_RUN,
    LOST_GPU_SHARE_NOW,
    LOST_PER_HOUR_BY_CAUSE,
    LOST_SHARE_BY_RUN,
    LOST_SHARE_NOW,
    PROGRESS_CAUSE,
    RANK_OF_LOSS,
    RUN_COST,
    RUN_ENERGY,
    TIME_BY_CAUSE,
    WALL_SECONDS,
    increase_in_range,
)
from dashboards.fleet_runs import STATE_MAPPINGS
from dashboards.palette import BAD, NEUTRAL, WARNING, Override
from dashboards.panels import (
    Panel,
    dashboard_link,
    stat,
    value_mappings,
    warn_below,
    warn_from,
)
from dashboards.queries import blank_if_incomplete, instant_query
from dashboards.tables import Column, percent, table

ENERGY_UNIT = "watth"
"""Unit of watt-hours, which Grafana shows with a prefix: Wh, kWh, MWh."""
RUN_POWER = "sum by (run) (rate(training_energy_joules_total{@run}[$__rate_interval]))"
"""PromQL for the power of each run."""
COMPLETE_RUN_POWER = blank_if_incomplete(RUN_POWER, "run")
"""PromQL for the power of each run of which all ranks report."""
MIN_RATIO, MAX_RATIO = 0.8, 1.25
"""Smallest and largest ratio of an energy counter to integrated power at which the two agree."""
ANY_LOSS = 0.01
"""Threshold of a loss per hour: any loss is bad."""
RUN_LINK = dashboard_link("training-run", "Run", run="${__value.raw}")
_HELD_GPUS = (
    "group by (instance, uuid, run) ("
    'training_rank_info{{{selector}, uuid!=""}} or training_process_gpu_memory_bytes{{{selector}}}'
    ' or label_replace(training_energy_share_ratio{{{selector}, component="gpu"}} > 0, "uuid", "$1", "device", "(.+)"))'
)
"""Template of PromQL for the GPUs that runs hold, as in the rules `run_gpu:…`."""
_USED_GPUS = _HELD_GPUS.format(selector="@run")
_GPU_ENERGY = "max by (instance, uuid) (increase(gpu_energy_joules_total{@energy_node}[$__range]))"
_GPU_ENERGY_OF_RUNS = increase_in_range(
    'training_energy_joules_total{@energy_node, component="gpu"}', "instance"
)
_UNUSED_GPU_ENERGY = f"clamp_min(sum by (instance) ({_GPU_ENERGY}) - ({_GPU_ENERGY_OF_RUNS} or 0 * sum by (instance) ({_GPU_ENERGY})), 0)"
"""PromQL for the joules of the GPUs of each node that no run is charged for."""


def overview_panels() -> tuple[Panel, ...]:
    """Return the first screen: power, cost, losses and their causes, and whether the readings are reliable."""
    return (
        _power_now(),
        _cost_now(),
        _lost_now(),
        _useful_share(),
        _totals(),
        _lost_in_range(),
        _unused_gpu_energy(),
        _readings(),
        _losses_now(),
        _loss_by_cause(),
        _loss_by_run(),
    )


def _units_by_name(units: Mapping[str, str]) -> list[Override]:
    """Return overrides of the unit from {series name: unit}."""
    return [
        {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": unit}]}
        for name, unit in units.items()
    ]


def _power_now() -> Panel:
    used_gpu_power = f"sum(max by (uuid) (gpu_power_watts{{@cluster}}) and on (uuid) {_USED_GPUS})"
    limits = (
        f'sum(max by (uuid) (gpu_power_limit_watts{{@cluster, limit="enforced"}}) and on (uuid) {_USED_GPUS})'
    )
    of_limits = "of the GPU limits"
    return stat(
        "Power now",
        instant_query(
            f"sum({RUN_POWER}) unless on () count({RUN_POWER} unless on (run) ({COMPLETE_RUN_POWER}))",
            "all devices",
        ),
        instant_query(f"{used_gpu_power} / ({limits} > 0)", of_limits),
        unit="watt",
        text_mode="value_and_name",
        overrides=[
            {
                "matcher": {"id": "byName", "options": of_limits},
                "properties": [
                    {"id": "unit", "value": "percentunit"},
                    {"id": "decimals", "value": 0},
                    {"id": "thresholds", "value": warn_below(0.4, 0.2)},
                ],
            }
        ],
        w=6,
    )


def _cost_now() -> Panel:
    carbon = "CO2"
    return stat(
        "Cost and CO2 per hour",
        instant_query(f"sum by (currency) ({COST_PER_HOUR})", "{{currency}}"),
        instant_query("3600 * sum(max by (run) (run:training_carbon:grams_rate5m{@run}))", carbon),
        unit="none",
        decimals=2,
        text_mode="value_and_name",
        overrides=_units_by_name({carbon: "massg"}),
        w=6,
    )


def _lost_now() -> Panel:
    share = "of the GPU time"
    return stat(
        "Lost per hour now",
        instant_query(
            f"sum by (currency) ({LOST_PER_HOUR_BY_CAUSE}) or sum by (currency) ({COST_PER_HOUR}) * 0",
            "{{currency}}",
        ),
        instant_query(LOST_GPU_SHARE_NOW, share),
        unit="none",
        decimals=2,
        text_mode="value_and_name",
        thresholds=warn_from(ANY_LOSS, ANY_LOSS),
        overrides=[
            {
                "matcher": {"id": "byName", "options": share},
                "properties": [
                    {"id": "unit", "value": "percentunit"},
                    {"id": "decimals", "value": 0},
                    {"id": "thresholds", "value": warn_from(0.1, 0.3)},
                ],
            }
        ],
        w=6,
    )


def _useful_share() -> Panel:
    return stat(
        "Useful in this time range",
        instant_query(
            f"1 - sum(({LOST_SHARE_BY_RUN}) * on (run) {WALL_SECONDS}) / sum({WALL_SECONDS})", "of the time"
        ),
        instant_query(
            f"sum(({ENERGY_BY_CAUSE}) and on (cause) {PROGRESS_CAUSE}) / (sum({ENERGY_BY_CAUSE}) > 0)",
            "of the energy",
        ),
        unit="percentunit",
        decimals=0,
        text_mode="value_and_name",
        thresholds=warn_below(0.9, 0.7),
        w=6,
    )


def _totals() -> Panel:
    carbon = "CO2"
    return stat(
        "Since the start of the runs",
        instant_query("sum by (currency) (last_over_time(training_cost_total{@run}[15m]))", "{{currency}}"),
        instant_query("sum(last_over_time(training_energy_joules_total{@run}[15m])) / 3600", "energy"),
        instant_query("sum(last_over_time(training_carbon_grams_total{@run}[15m]))", carbon),
        unit="none",
        decimals=2,
        text_mode="value_and_name",
        overrides=_units_by_name({carbon: "massg", "energy": ENERGY_UNIT}),
        w=6,
    )


def _lost_in_range() -> Panel:
    return stat(
        "Lost in this time range",
        instant_query(f"sum by (currency) ({LOST_COST_BY_RUN})", "{{currency}}"),
        instant_query(f"sum(({ENERGY_BY_CAUSE}) unless on (cause) {PROGRESS_CAUSE})", "energy"),
        unit="none",
        decimals=2,
        text_mode="value_and_name",
        overrides=_units_by_name({"energy": ENERGY_UNIT}),
        w=6,
    )


def _unused_gpu_energy() -> Panel:
    share = "of the GPU energy"
    return stat(
        "GPU energy of no run",
        instant_query(f"sum({_UNUSED_GPU_ENERGY}) / 3600", "energy"),
        instant_query(f"sum({_UNUSED_GPU_ENERGY}) / (sum({_GPU_ENERGY}) > 0)", share),
        unit=ENERGY_UNIT,
        decimals=1,
        text_mode="value_and_name",
        overrides=[
            {
                "matcher": {"id": "byName", "options": share},
                "properties": [{"id": "unit", "value": "percentunit"}, {"id": "decimals", "value": 0}],
            }
        ],
        w=6,
    )


def _readings() -> Panel:
    def sources(matcher: str = "") -> str:
        return f"count(max by (instance, device) (exporter_energy_source_info{{@energy_node{matcher}}}))"

    devices = sources()
    measured, modelled = sources(', measured="true"'), sources(', measured="false"')
    check = "max by (instance, device) (exporter_energy_crosscheck{@energy_node})"
    gaps = (
        "sum by (instance, device) (increase(exporter_energy_gap_seconds_total{@energy_node}[$__range])) > 0"
    )
    return stat(
        "Energy readings",
        instant_query(f"{measured} or 0 * {devices}", "measured"),
        instant_query(f"{modelled} or 0 * {devices}", "modelled", WARNING),
        instant_query(
            f"count({check} < {MIN_RATIO} or {check} > {MAX_RATIO}) or 0 * {devices}", "contradictory", BAD
        ),
        instant_query(f"count({gaps}) or 0 * {devices}", "with gaps", WARNING),
        unit="none",
        text_mode="value_and_name",
        w=6,
    )


def _losses_now() -> Panel:
    """Return the table of what each run loses now, by cause, the most expensive loss first."""
    return table(
        "Losses now",
        Column("run", "Run", links=(RUN_LINK,)),
        Column("cause", "Cause", mappings=CAUSE_TEXTS),
        Column("rank", "Rank", width=70),
        Column("instance", "Node", width=120),
        percent(f"{LOST_SHARE_NOW} > 0", "of its time, 5 min", 150, bar=(0, 1)),
        Column(LOST_PER_HOUR_BY_CAUSE, "Cost per hour", decimals=2, width=115),
        Column("currency", "Currency", width=80),
        Column(
            f"1000 * ({LOSS_SINCE})",
            "Since",
            unit=CLOCK_TIME,
            width=150,
            mappings=value_mappings({0: ("before this range", NEUTRAL)}),
        ),
        row_query=(
            f"{LOST_SHARE_NOW} * on (run, cause) group_left (rank, instance) (0 * ({RANK_OF_LOSS}) + 1) > 0"
            f" or on (run, cause) {LOST_SHARE_NOW} > 0"
        ),
        sort="Cost per hour",
        w=24,
        h=6,
        max_data_points=120,
    )


def _loss_by_cause() -> Panel:
    """Return the table of time, energy and cost by cause. The shares add up to 100 %."""
    seconds, watt_hours = f"sum by (cause) ({TIME_BY_CAUSE})", f"sum by (cause) ({ENERGY_BY_CAUSE})"
    return table(
        "Where time, energy and money went",
        Column("cause", "Cause", width=200, mappings=CAUSE_TEXTS),
        Column(f"{seconds} > 0", "Time", unit="s", width=80),
        percent(f"{seconds} / on () group_left () sum({TIME_BY_CAUSE}) > 0", "of time", 125, bar=(0, 1)),
        Column(f"{watt_hours} > 0", "Energy", unit=ENERGY_UNIT, decimals=1, width=90),
        percent(f"{watt_hours} / on () group_left () sum({ENERGY_BY_CAUSE}) > 0", "of energy", 80),
        Column(f"sum by (cause) ({COST_BY_CAUSE}) > 0", "Cost", decimals=2, width=70),
        sort="Time",
        w=11,
        h=9,
        max_data_points=120,
    )


def _loss_by_run() -> Panel:
    """Return the table of the totals and losses of each run, the largest loss first."""
    return table(
        "Cost and loss of each run",
        Column("run", "Run", links=(RUN_LINK,)),
        Column("state", "State", width=80, mappings=STATE_MAPPINGS),
        Column(COMPLETE_RUN_POWER, "Power", unit="watt", decimals=1, width=80),
        Column(f"sum by (run) ({COST_PER_HOUR})", "Per hour", decimals=2, width=75),
        Column(f"{RUN_ENERGY} / 3600", "Energy", unit=ENERGY_UNIT, decimals=1, width=85),
        Column(f"sum by (run) ({RUN_COST})", "Cost", decimals=2, width=65),
        Column(
            increase_in_range("training_carbon_grams_total{@run}", "run"),
            "CO2",
            unit="massg",
            decimals=1,
            width=70,
        ),
        percent(f"{LOST_SHARE_BY_RUN}", "Lost time", 75, warn_from(0.1, 0.3)),
        Column(f"sum by (run) ({LOST_COST_BY_RUN})", "Lost cost", decimals=2, width=75),
        row_query="max by (run, state) (training_run_state{@run} == 1)",
        sort="Lost cost",
        w=13,
        h=9,
        max_data_points=120,
    )


def device_panels() -> tuple[Panel, ...]:
    """Return the tables of energy and cost by node and by GPU."""
    return (_nodes(), _gpus())


def _nodes() -> Panel:
    energy_of_runs = "training_energy_joules_total{@node_run_any_job}"
    return table(
        "Energy and cost of each node",
        Column("instance", "Node", links=(dashboard_link("training-node", "Node", node="${__value.raw}"),)),
        Column(
            f"sum by (instance) (rate({energy_of_runs}[$__rate_interval]))",
            "Power",
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
        Column(
            f"{_UNUSED_GPU_ENERGY} / 3600", "GPU energy of no run", unit=ENERGY_UNIT, decimals=1, width=160
        ),
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


def _gpus() -> Panel:
    gpus = "topk by (instance, uuid) (1, last_over_time(gpu_up{@energy_node}[$__range]) >= bool 0)"
    held = _HELD_GPUS.format(selector="@energy_node")
    runs = f"topk by (instance, uuid) (1, last_over_time(({held})[$__range:$__interval]))"
    held_seconds = (
        f"sum_over_time((max by (instance, uuid) ({held}))[$__range:$__interval]) * $__interval_ms / 1000"
    )
    prices = "max by (instance) (training_gpu_price_per_second{@energy_node})"
    power = "max by (instance, gpu) (gpu_power_watts{@energy_node})"
    limits = 'max by (instance, gpu) (gpu_power_limit_watts{@energy_node, limit="enforced"})'

    return table(
        "Energy and rent of each GPU",
        Column("instance", "Node", width=110),
        Column("gpu", "GPU", width=70),
        Column("run", "Run, or last run", links=(RUN_LINK,)),
        Column(power, "Power", unit="watt", decimals=0, width=80),
        percent(f"{power} / ({limits} > 0)", "of its limit", 110, bar=(0, 1)),
        Column(
            "max by (instance, gpu) (increase(gpu_energy_joules_total{@energy_node}[$__range])) / 3600",
            "Energy",
            unit=ENERGY_UNIT,
            decimals=1,
            width=90,
        ),
        Column(
            f"sum by (instance, gpu) ({held_seconds} * on (instance, uuid) group_left (gpu) {gpus}"
            f" * on (instance) group_left () {prices})",
            "Rent charged",
            decimals=2,
            width=110,
        ),
        row_query=(
            f"max by (instance, gpu, run) ({gpus} * on (instance, uuid) group_left (run) {runs})"
            f" or on (instance, gpu) max by (instance, gpu) ({gpus})"
        ),
        sort="Energy",
        w=13,
        h=9,
        max_data_points=120,
    )
