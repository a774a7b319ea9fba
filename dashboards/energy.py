"""Dashboard *Energy and cost*: power, losses, energy per step and token, emissions, cost, and the source of each value."""

from __future__ import annotations

import enum

from dashboards.board import ATTEMPTS, NODE, RUN, Board, Row, Variable
from dashboards.energy_devices import DEVICES_OF_RUNS, ENERGY_UNIT, device_panels
from dashboards.energy_loss import WASTED_WATT_HOURS_SINCE_START
from dashboards.energy_overview import (
    CROSSCHECK_RATIO,
    GAP_SECONDS_IN_RANGE,
    MAX_CROSSCHECK_RATIO,
    MIN_CROSSCHECK_RATIO,
    SUSPECT_DEVICES,
    build_current_losses_table,
    overview_panels,
    total_panels,
)
from dashboards.losses_now import (
    CAUSE_NAMES,
    COMPLETE_RUN_POWER,
    COST_PER_HOUR_BY_RUN,
    LOST_SHARE_NOW_BY_RUN,
    STANDSTILL_BY_RUN,
    TOO_MUCH_STALE_COST,
)
from dashboards.palette import (
    BAD,
    BADPUT_CAUSE_COLORS,
    BLUE,
    GREEN,
    HASHED_COLOR,
    NEUTRAL,
    ORANGE,
    WARNING,
    colors_by_pattern,
    fixed_color,
    series_override,
    shades,
)
from dashboards.panels import (
    RUN_LINK,
    Panel,
    threshold_steps,
    time_series,
    value_mappings,
)
from dashboards.queries import ENDING_RUNS, NODES_OF_ENERGY, Query
from dashboards.tables import Column, table

UID = "training-energy"
_ENDING_FOR_LESS_THAN_A_MINUTE = (
    f"({ENDING_RUNS} unless on (run)"
    ' max by (run) (training_run_state{@run, state="ending"} offset 1m) == 1)'
)
"""PromQL with a value for each run that is `ending` and was not a minute ago. A run that finishes is `ending` for a moment."""
MAX_POINTS_OF_WASTE = 120
"""Maximum number of points of the plot of wasted energy. Each point costs a subquery."""
NODE_VARIABLE = Variable(
    NODE.name,
    NODE.label,
    f"query_result(group by (instance) ({NODES_OF_ENERGY}))",
    regex='/instance="([^"]+)"/',
    description="Nodes of the runs, for the panels about devices; all nodes if no run has used energy.",
)


def board() -> Board:
    """Return the dashboard of energy, emissions and cost."""
    return Board(
        uid=UID,
        title="Training / Energy and cost",
        description="Power, energy per step and token, wasted energy, CO2 emissions and cost; measured and modeled values are marked.",
        variables=(RUN, NODE_VARIABLE),
        rows=(
            Row("At a glance", overview_panels()),
            Row("Losses and power", _loss_panels()),
            Row("Totals", total_panels()),
            Row("Nodes and GPUs", device_panels()),
            Row("Energy per unit of work", _efficiency_panels()),
            Row("Carbon and cost", _carbon_panels()),
            Row("Sources", _source_panels()),
        ),
        annotations=(ATTEMPTS,),
        bridges_missed_scrapes=True,
    )


def _loss_panels() -> tuple[Panel, ...]:
    """Return the panels of the lost share, of the power and of the wasted energy of runs over time, and the table of the current losses."""
    wasted_energy = time_series(
        "Wasted energy by cause",
        Query(WASTED_WATT_HOURS_SINCE_START, "{{cause}}"),
        unit=ENERGY_UNIT,
        stacked=True,
        overrides=[
            series_override({"id": "byName", "options": cause}, fixed_color(color), name=CAUSE_NAMES[cause])
            for cause, color in (BADPUT_CAUSE_COLORS | {"slowest_rank": GREEN}).items()
        ],
        w=8,
    )
    wasted_energy.body["maxDataPoints"] = MAX_POINTS_OF_WASTE
    held_gpus = "group by (uuid, run) (run_gpu:training_gpu_held:group{@run})"
    power_per_gpu = (
        f"avg by (run) ({held_gpus} * on (uuid) group_left () max by (uuid) (gpu_power_watts{{@cluster}}))"
    )
    return (
        time_series(
            "Lost share of the cost of each run",
            Query(f"{LOST_SHARE_NOW_BY_RUN} unless on (run) {_ENDING_FOR_LESS_THAN_A_MINUTE}", "{{run}}"),
            unit="percentunit",
            w=8,
        ),
        # The mean of the GPUs, because the power of a large run would hide the power of small runs.
        time_series(
            "GPU power of each run, mean of its GPUs",
            Query(power_per_gpu, "{{run}}"),
            Query(
                'min(gpu_power_limit_watts{@energy_node, limit="enforced"})', "lowest limit", reference=True
            ),
            unit="watt",
            color=HASHED_COLOR,
            w=8,
        ),
        wasted_energy,
        build_current_losses_table(),
    )


_UNRELIABLE_ENERGY = (
    "(max by (run) (max_over_time(run:training_ranks_missing:sum{@run}[5m])) > 0"
    " or group by (run) (last_over_time(run_gpu:training_gpu_lost:group{@run}[5m]))"
    " or group by (run) (group by (run, instance, device) (training_energy_share_ratio{@run} > 0)"
    f" and on (instance, device) {SUSPECT_DEVICES}))"
)
"""PromQL with a value for each run with a missing rank or a lost GPU in the last five minutes, or with a suspect energy counter.

The energy per step would be too small: a lost GPU, and a node whose exporter is down, report no energy, but the steps and tokens of the run
count.
"""


def _trained_for_window(family: str) -> str:
    """Return PromQL with a value for each run that had finished a step five minutes ago and has trained since.

    The window of the slopes of any other run contains a start, which uses little energy and finishes no step, or a standstill.
    """
    return (
        f'(group by (run) ({family} offset 5m > 0) and on (run) max by (run) (training_run_state{{@run, state="running"}}) == 1'
        ' unless on (run) max by (run) (max_over_time(training_run_state{@run, state!="running"}[5m])) == 1'
        f" unless on (run) {STANDSTILL_BY_RUN})"
    )


def _efficiency_panels() -> tuple[Panel, ...]:
    """Return the panels of the energy for each step and token."""

    def complete(slope: str, family: str) -> str:
        """Return PromQL for the positive slope of the counters *family* of each run that trained for the whole window."""
        return (
            f"(({slope} > 0) and on (run) {_trained_for_window(family)} unless on (run) {_UNRELIABLE_ENERGY})"
        )

    # The steps and tokens per second are slopes (`deriv`) like the power: after an outage, a rate would be too small for five minutes.
    steps_family, tokens_family = (
        'training_steps_total{@run, mode="train"}',
        'training_tokens_total{@run, mode="train"}',
    )
    steps = complete(f"max by (run) (deriv({steps_family}[5m]))", steps_family)
    tokens = complete(f"sum by (run) (deriv({tokens_family}[5m]))", tokens_family)

    return (
        time_series(
            "Joules per step and GPU",
            Query(
                f"({COMPLETE_RUN_POWER}) / on (run) {steps} / on (run) (max by (run) (run:training_gpus:count{{@run}}) > 0)",
                "{{run}}",
            ),
            unit="joule",
            w=12,
        ),
        time_series(
            "Joules per token",
            Query(f"({COMPLETE_RUN_POWER}) / on (run) {tokens}", "{{run}}"),
            unit="joule",
            w=12,
        ),
    )


def _carbon_panels() -> tuple[Panel, ...]:
    """Return the panels about emissions, cost and their settings."""
    rate_by_kind = "sum by (run, kind, currency) (rate(training_cost_total{@run}[5m]))"
    share = (
        f"({rate_by_kind} / on (run, currency) group_left () (sum by (run, currency) ({rate_by_kind}) > 0))"
    )
    return (
        time_series(
            "CO2 per hour",
            Query("3600 * max by (run) (run:training_carbon:grams_rate5m{@run})", "{{run}}"),
            unit="massg",
            log_base=10,
            w=8,
        ),
        time_series(
            "Carbon intensity",
            Query(
                "max by (zone, source, factor, kind) (training_carbon_intensity_grams_per_joule{@energy_node}) * 3.6e6",
                "{{zone}}: {{kind}}, {{factor}} ({{source}})",
            ),
            unit="suffix:g/kWh",
            color=shades(BLUE),
            step_interpolation=True,
            w=8,
        ),
        time_series(
            "Cost per hour",
            Query(
                f"sum by (kind, currency) ({share} * on (run, currency) group_left () ({COST_PER_HOUR_BY_RUN}))"
                f" unless on () ({TOO_MUCH_STALE_COST})",
                "{{kind}}, {{currency}}",
            ),
            unit="none",
            decimals=2,
            stacked=True,
            overrides=colors_by_pattern({"electricity": ORANGE, "device_time": BLUE}),
            w=8,
        ),
        table(
            "Effective settings",
            Column("setting", "Setting"),
            Column(
                'label_replace(max by (source) (training_power_usage_effectiveness{@energy_node}), "setting", "PUE of the site", "", "")'
                " or label_replace(max by (source, zone) (training_carbon_intensity_grams_per_joule{@energy_node}) * 3.6e6,"
                ' "setting", "grams of CO2 per kWh", "", "")'
                " or label_replace(max by (source, currency) (training_electricity_price_per_joule{@energy_node}) * 3.6e6,"
                ' "setting", "electricity per kWh", "", "")'
                " or label_replace(max by (currency) (training_gpu_price_per_second{@energy_node}) * 3600,"
                ' "setting", "GPU hour", "", "")',
                "Value",
                decimals=3,
                width=90,
            ),
            Column("currency", "Currency", width=90),
            Column("zone", "Zone", width=70),
            Column("source", "Source"),
            w=24,
            h=6,
        ),
    )


class ReadingQuality(enum.IntEnum):
    """Quality of the energy reading of a device. The table *Source of each number* shows the largest number first."""

    LOST = 5  # the GPU is lost
    UNKNOWN = 4  # the exporter of the node does not respond
    GAP = 3  # a part of the time range has no reading
    SUSPECT = 2  # the energy counter and the power disagree
    MODELED = 1
    MEASURED = 0


_LOST_DEVICES = (
    'label_replace(max by (instance, uuid) (gpu_up{@energy_node}) == 0, "device", "$1", "uuid", "(.+)")'
)
"""PromQL for the lost GPUs, by node and device."""
_CURRENT_DEVICES = "max by (instance, device) (exporter_energy_source_info{@energy_node})"
_DEVICES_OF_OTHER_RUNS = (
    '(last_over_time(training_energy_share_ratio{cluster=~"$cluster", run!~"$run"}[$__range]) > 0'
    f" unless on (instance, device) {DEVICES_OF_RUNS})"
)
"""PromQL for the devices whose energy, in the time range, only runs that are not selected were charged for."""
_DEVICE_LABELS = "instance, component, device, index, source, name"
_READ_DEVICES = (
    f"(max by ({_DEVICE_LABELS}) (exporter_energy_source_info{{@energy_node}}) unless on (instance, device) {_DEVICES_OF_OTHER_RUNS}"
    f" or on (instance, device) max by ({_DEVICE_LABELS}) (last_over_time(exporter_energy_source_info{{@energy_node}}[$__range]))"
    f" and on (instance, device) {DEVICES_OF_RUNS})"
)
"""PromQL for the devices of the nodes, without those of other runs; without a current sample only the devices of the selected runs."""


def _reading_quality_by_device() -> str:
    """Return PromQL for the `ReadingQuality` of each device, by node and device."""
    conditions = {
        ReadingQuality.LOST: _LOST_DEVICES,
        ReadingQuality.GAP: f"{GAP_SECONDS_IN_RANGE} > 0",
        ReadingQuality.SUSPECT: SUSPECT_DEVICES,
        ReadingQuality.MODELED: 'max by (instance, device) (exporter_energy_source_info{@energy_node, measured="false"})',
        ReadingQuality.MEASURED: _CURRENT_DEVICES,
    }
    devices = f"group by (instance, device) ({_READ_DEVICES})"
    of_current_devices = " or on (instance, device) ".join(
        f"0 * max by (instance, device) ({condition}) + {quality}"
        for quality, condition in conditions.items()
    )
    return (
        f"(({of_current_devices}) and on (instance, device) {_CURRENT_DEVICES} and on (instance, device) {devices})"
        f" or on (instance, device) 0 * {devices} + {ReadingQuality.UNKNOWN}"
    )


def _source_panels() -> tuple[Panel, ...]:
    """Return the panels about the sources of the energy readings."""
    gpus = 'last_over_time(exporter_energy_source_info{@energy_node, component="gpu"}[$__range])'

    def of_rows(expression: str) -> str:
        """Return PromQL for the values of the devices of the table: the value of another device would be a row of its own."""
        return f"{expression} and on (instance, device) {_READ_DEVICES}"

    return (
        table(
            "Source of each number",
            Column("instance", "Node", width=110),
            Column("component", "Component", width=110),
            Column("index", "GPU", width=60),
            Column("run", "Run", width=115, links=(RUN_LINK,)),
            Column("name", "Device"),
            Column("source", "Read from", width=125),
            Column(
                _reading_quality_by_device(),
                "Reading",
                width=110,
                mappings=value_mappings(
                    {
                        ReadingQuality.LOST.value: ("lost", BAD),
                        ReadingQuality.UNKNOWN.value: ("unknown", WARNING),
                        ReadingQuality.GAP.value: ("gap", WARNING),
                        ReadingQuality.SUSPECT.value: ("suspect", BAD),
                        ReadingQuality.MODELED.value: ("modeled", WARNING),
                        ReadingQuality.MEASURED.value: ("measured", NEUTRAL),
                    }
                ),
            ),
            Column(
                of_rows(CROSSCHECK_RATIO),
                "Counter / power",
                decimals=2,
                width=135,
                thresholds=threshold_steps(
                    (None, NEUTRAL),
                    (0.001, BAD),
                    (MIN_CROSSCHECK_RATIO, NEUTRAL),
                    (MAX_CROSSCHECK_RATIO, BAD),
                ),
            ),
            Column(
                of_rows(
                    "(sum by (instance, device) (exporter_energy_resets_total{@energy_node})"
                    f" or {_CURRENT_DEVICES} * 0)"
                ),
                "Resets",
                width=80,
            ),
            Column(
                of_rows(f"({GAP_SECONDS_IN_RANGE} or {_CURRENT_DEVICES} * 0)"),
                "Not read",
                unit="s",
                width=90,
            ),
            Column("device", "Device id"),
            row_query=(
                f"{_READ_DEVICES} * on (instance, device) group_left (run)"
                f" topk by (instance, device) (1, {DEVICES_OF_RUNS} and on (instance, device) {gpus}) or on (instance, device) {_READ_DEVICES}"
            ),
            sort="Reading",
            h=10,
        ),
    )
