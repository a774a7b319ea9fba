"""First row of the dashboard *Energy and cost*: power, cost and losses now and in the time range, by cause and by run."""

from __future__ import annotations

from collections.abc import Mapping

from dashboards import verdicts
from dashboards.alerts import CLOCK_TIME, CLOCK_TIME_WIDTH, title_mappings
from dashboards.cost_and_loss import LOST_THRESHOLDS
from dashboards.energy_devices import (
    ENERGY_UNIT,
    GPU_ENERGY,
    HELD_GPUS,
    UNUSED_GPU_ENERGY,
)
from dashboards.energy_loss import (
    COST_BY_CAUSE,
    ENERGY_BY_CAUSE,
    GPU_COUNT_IN_RANGE,
    GPU_SECONDS_BY_CAUSE,
    LOST_COST_BY_RUN,
    LOST_SHARE_AFTER_START,
    LOST_SHARE_BY_RUN,
    PROGRESS_CAUSE,
    RUN_COST,
    RUN_ENERGY,
    RUN_POWER_5M,
    SECONDS_AFTER_START,
    START_CAUSES,
)
from dashboards.fleet_runs import STATE_MAPPINGS
from dashboards.losses_now import (
    ACTIVE_RUNS,
    CAUSE_TEXTS,
    COST_OF_LOSSES,
    COST_PER_HOUR_BY_RUN,
    ENDED_RUNS,
    INCOMPLETE_RUNS,
    LOSS_SINCE,
    LOST_COST_PER_HOUR_BY_CURRENCY,
    LOST_COST_SHARE_NOW,
    LOST_GPU_SHARE_NOW,
    LOST_OR_AT_RISK,
    LOST_POWER_BY_CAUSE,
    LOST_SHARE_NOW,
    MIN_DISPLAYED_SHARE,
    NO_COST,
    NO_LOSS,
    RANKS_OF_LOSSES,
    RUN_COUNTS_BY_VERDICT,
    RUNS_AT_RISK,
    RUNS_WITHOUT_DRIVER,
    STANDSTILL_BY_RUN,
    STOPPED_COST,
    STOPPED_RUNS,
    UNKNOWN_COST,
    UNKNOWN_LOSSES,
    UNKNOWN_RUNS,
    VERDICTS,
)
from dashboards.palette import BAD, NEUTRAL, WARNING, Override
from dashboards.panels import (
    RUN_LINK,
    Panel,
    stat,
    value_mappings,
    warn_below,
    warn_from,
)
from dashboards.queries import (
    STATE_BY_RUN,
    Query,
    instant_query,
)
from dashboards.tables import Column, percent_column, table

CROSSCHECK_RATIO = "max by (instance, device) (exporter_energy_crosscheck{@energy_node})"
"""PromQL for the ratio of the increase of each device's energy counter to its power, integrated over the same time."""
MIN_CROSSCHECK_RATIO, MAX_CROSSCHECK_RATIO = 0.8, 1.25
"""Smallest and largest ratio of an energy counter to integrated power at which the two agree."""
_SUSPECT_DEVICES = (
    f"({CROSSCHECK_RATIO} < {MIN_CROSSCHECK_RATIO} or {CROSSCHECK_RATIO} > {MAX_CROSSCHECK_RATIO})"
)
"""PromQL for the ratio of each device whose energy counter and power disagree."""
READING_VERDICTS = (
    f"0 * {_SUSPECT_DEVICES} + 2"
    ' or on (instance, device) 0 * max by (instance, device) (exporter_energy_source_info{@energy_node, measured="false"}) + 1'
    " or on (instance, device) 0 * max by (instance, device) (exporter_energy_source_info{@energy_node})"
)
"""PromQL for the verdict about the reading of each device: 2 if it is suspect, 1 if it is modeled, 0 if it is measured."""
MIN_WATTS_PER_GPU = 1
"""Mean power of a GPU above which the energy of a cause is known. Even an idle GPU uses more."""
INCOMPLETE_RUNS_LEGEND = "runs unknown"
"""Legend of the number of incomplete runs: of those that no exporter reports, and of those of which only some ranks have a sample."""
_INCOMPLETE_COUNT_STYLE: Override = {
    "matcher": {"id": "byName", "options": INCOMPLETE_RUNS_LEGEND},
    "properties": [
        {"id": "unit", "value": "none"},
        {"id": "decimals", "value": 0},
        {"id": "thresholds", "value": warn_from(1)},
    ],
}
_INCOMPLETE_COUNT = f"(count({INCOMPLETE_RUNS}) or 0 * sum({COST_PER_HOUR_BY_RUN}))"
"""PromQL for the number of incomplete runs; 0 if there is none and a cost is known."""


def overview_panels() -> tuple[Panel, ...]:
    """Return the first screen: the runs by verdict, power, cost, losses and their causes, and whether the readings are reliable."""
    return (
        _build_verdict_tile(),
        _build_lost_per_hour_tile(),
        _build_cost_per_hour_tile(),
        _build_lost_in_range_tile(),
        _build_current_losses_table(),
        _build_totals_tile(),
        _build_power_tile(),
        _build_useful_share_tile(),
        _build_unused_gpu_energy_tile(),
        _build_readings_tile(),
        _build_table_by_cause(),
        _build_table_by_run(),
    )


def _build_verdict_tile() -> Panel:
    """Return the panel with the number of runs by the worst verdict of their rows in the table of the current losses."""
    colors = {verdicts.NO_PROGRESS: BAD, verdicts.ENDANGERS_WORK: BAD} | dict.fromkeys(
        (verdicts.ENDING, verdicts.LOSES_TIME, verdicts.UNKNOWN), WARNING
    )
    return stat(
        "Runs by verdict",
        *(
            instant_query(count, verdict, colors.get(verdict))
            for verdict, count in RUN_COUNTS_BY_VERDICT.items()
        ),
        unit="none",
        decimals=0,
        text_mode="value_and_name",
        w=7,
    )


def _build_unit_overrides(units: Mapping[str, str]) -> list[Override]:
    """Return overrides of the unit from {series name: unit}."""
    return [
        {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": unit}]}
        for name, unit in units.items()
    ]


def _build_power_tile() -> Panel:
    """Return the panel with the power of the runs, and the power of their GPUs as a share of the power limits."""
    gpu_power = f"(max by (uuid) (gpu_power_watts{{@cluster}}) and on (uuid) {HELD_GPUS})"
    gpu_limits = 'max by (uuid) (gpu_power_limit_watts{@cluster, limit="enforced"})'
    # Both sums are over the GPUs with a sample of both.
    power_of_limited_gpus = f"sum({gpu_power} and on (uuid) {gpu_limits})"
    limits = f"sum({gpu_limits} and on (uuid) {gpu_power})"
    of_limits = "of the GPU limits, now"
    return stat(
        "Power, last 5 min",
        instant_query(
            f"sum({RUN_POWER_5M}) unless on () {INCOMPLETE_RUNS} unless on () {RUNS_WITHOUT_DRIVER}",
            "all devices",
        ),
        instant_query(f"{power_of_limited_gpus} / ({limits} > 0)", of_limits),
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
        w=5,
    )


def _build_cost_per_hour_tile() -> Panel:
    """Return the panel with the cost and CO2 per hour of all runs, the number of incomplete runs, and the cost of the stopped runs."""
    carbon = "CO2"
    return stat(
        "Cost and CO2 per hour",
        instant_query(f"sum by (currency) ({COST_PER_HOUR_BY_RUN}) or {NO_COST}", "{{currency}}"),
        instant_query("3600 * sum(max by (run) (run:training_carbon:grams_rate5m{@run}))", carbon),
        _build_incomplete_count_query(),
        instant_query(f"sum by (currency) ({STOPPED_COST})", "{{currency}} of stopped runs"),
        unit="none",
        decimals=2,
        text_mode="value_and_name",
        overrides=[*_build_unit_overrides({carbon: "massg"}), _INCOMPLETE_COUNT_STYLE],
        w=6,
    )


def _build_incomplete_count_query() -> Query:
    """Return the query of the number of runs with a rank without a sample. A total over all runs contains such a run in part or not at all."""
    return instant_query(_INCOMPLETE_COUNT, INCOMPLETE_RUNS_LEGEND)


def _build_unknown_cost_query() -> Query:
    """Return the query of the cost per hour that may be lost in addition, by currency.

    This is the cost of the runs with a rank without a sample and of the stopped runs. If no such cost is known, the query returns the number of
    runs with a rank without a sample.
    """
    cost = f'label_replace(sum by (currency) ({UNKNOWN_COST}), "text", "$1 unknown", "currency", "(.+)")'
    count = f'label_replace({_INCOMPLETE_COUNT}, "text", "{INCOMPLETE_RUNS_LEGEND}", "", "")'
    return instant_query(f"{cost} or on () {count}", "{{text}}")


def _build_lost_per_hour_tile() -> Panel:
    """Return the panel with the cost and power that the runs lose, their share of the total, and the cost that may be lost in addition."""
    share = (
        f'label_replace({LOST_COST_SHARE_NOW}, "text", "of the cost", "", "")'
        f' or on () label_replace({LOST_GPU_SHARE_NOW}, "text", "of the GPU time", "", "")'
    )
    power = "power"
    return stat(
        "Lost per hour, last 5 min",
        instant_query(
            f"{LOST_COST_PER_HOUR_BY_CURRENCY} or sum by (currency) ({COST_PER_HOUR_BY_RUN}) * 0 or {NO_COST}",
            "{{currency}}",
        ),
        instant_query(
            f"(sum({LOST_POWER_BY_CAUSE}) or 0 * sum({RUN_POWER_5M})) unless on () {INCOMPLETE_RUNS} unless on () {RUNS_WITHOUT_DRIVER}",
            power,
        ),
        instant_query(share, "{{text}}"),
        _build_unknown_cost_query(),
        unit="none",
        decimals=2,
        text_mode="value_and_name",
        overrides=[
            {
                "matcher": {"id": "byName", "options": power},
                "properties": [{"id": "unit", "value": "watt"}, {"id": "decimals", "value": 1}],
            },
            {
                "matcher": {"id": "byRegexp", "options": "/^of the /"},
                "properties": [
                    {"id": "unit", "value": "percentunit"},
                    {"id": "decimals", "value": 0},
                    {"id": "thresholds", "value": LOST_THRESHOLDS},
                ],
            },
            {
                "matcher": {"id": "byRegexp", "options": "/ unknown$/"},
                "properties": [{"id": "thresholds", "value": warn_from(0.01)}],
            },
            _INCOMPLETE_COUNT_STYLE,
        ],
        w=7,
    )


def _build_useful_share_tile() -> Panel:
    """Return the panel with the useful share of the GPU time and of the energy, without the start of the runs."""
    return stat(
        "Useful in this range",
        instant_query(
            f"1 - sum({LOST_SHARE_AFTER_START} * on (run) {SECONDS_AFTER_START} * on (run) {GPU_COUNT_IN_RANGE})"
            f" / sum({SECONDS_AFTER_START} * on (run) {GPU_COUNT_IN_RANGE})",
            "of the GPU time",
        ),
        instant_query(
            f"sum(({ENERGY_BY_CAUSE}) and on (cause) {PROGRESS_CAUSE})"
            f" / (sum(({ENERGY_BY_CAUSE}) unless on (cause) {START_CAUSES}) > 0)",
            "of the energy",
        ),
        unit="percentunit",
        decimals=0,
        text_mode="value_and_name",
        thresholds=warn_below(0.85, 0.7),
        w=4,
    )


def _query_total(family: str, by: str = "") -> str:
    """Return PromQL for the total of the runs since their start, by labels.

    The total is that of the samples of the last 15 minutes or, without such samples, that of the runs that ended in the time range.
    The label `note` is `, ended` if all runs have ended, and absent otherwise.
    """
    recent = f"sum by ({by}) (last_over_time({family}{{@run}}[15m]))"
    of_ended_runs = f"sum by ({by}) (last_over_time({family}{{@run}}[$__range]) and on (run) {ENDED_RUNS})"
    total = f"({recent} or on () {of_ended_runs})"
    only_ended_runs = f"{ENDED_RUNS} unless on () {ACTIVE_RUNS}"
    return f'(label_replace({total}, "note", ", ended", "", "") and on () {only_ended_runs} or on () {total})'


def _build_totals_tile() -> Panel:
    """Return the panel with the cost, energy and CO2 of the runs since their start."""
    carbon, energy = "CO2", "energy"
    return stat(
        "Since the start of the runs",
        instant_query(_query_total("training_cost_total", "currency"), "{{currency}}{{note}}"),
        instant_query(f"{_query_total('training_energy_joules_total')} / 3600", energy),
        instant_query(_query_total("training_carbon_grams_total"), carbon),
        unit="none",
        decimals=2,
        text_mode="value_and_name",
        overrides=_build_unit_overrides({carbon: "massg", energy: ENERGY_UNIT}),
        w=5,
    )


def _build_lost_in_range_tile() -> Panel:
    """Return the panel with the cost and energy that the runs lost in the time range."""
    return stat(
        "Lost in this time range",
        instant_query(f"sum by (currency) ({LOST_COST_BY_RUN})", "{{currency}}"),
        instant_query(f"sum(({ENERGY_BY_CAUSE}) unless on (cause) {PROGRESS_CAUSE})", "energy"),
        unit="none",
        decimals=2,
        text_mode="value_and_name",
        overrides=_build_unit_overrides({"energy": ENERGY_UNIT}),
        w=4,
    )


def _build_unused_gpu_energy_tile() -> Panel:
    """Return the panel with the energy of the GPUs that is charged to no run, and its share of the energy of all GPUs."""
    share = "of the GPU energy"
    return stat(
        "GPU energy of no run",
        instant_query(f"sum({UNUSED_GPU_ENERGY}) / 3600", "energy"),
        instant_query(f"sum({UNUSED_GPU_ENERGY}) / (sum({GPU_ENERGY}) > 0)", share),
        unit=ENERGY_UNIT,
        decimals=1,
        text_mode="value_and_name",
        overrides=[
            {
                "matcher": {"id": "byName", "options": share},
                "properties": [{"id": "unit", "value": "percentunit"}, {"id": "decimals", "value": 0}],
            }
        ],
        w=4,
    )


_GPUS_IN_RANGE = "last_over_time(gpu_up{@energy_node}[$__range])"
_READ_GPUS = "gpu_energy_joules_total{@energy_node}"
_TARGETS = "(up{@cluster} and on (job, instance) last_over_time(exporter_build_info{@cluster}[$__range]))"
"""PromQL for the exporters that Prometheus scrapes now, up or down."""
_UNREAD_SEEN_GPUS = (
    f"group by (uuid) ({_GPUS_IN_RANGE} unless on (uuid) {_READ_GPUS} unless on (instance, gpu) {_READ_GPUS}"
    f" and on (instance) {_TARGETS})"
)
"""PromQL for the GPUs of the time range without a current energy counter, on nodes that Prometheus still scrapes, once for each UUID.

One of several exporters of a machine counts the energy. A GPU that replaces another GPU has the same index.
"""
_UNSEEN_GPU_COUNTS = (
    "(max by (instance) (last_over_time(gpu_devices_expected{@energy_node}[$__range]))"
    f" - on (instance) (count by (instance) (group by (instance, gpu) ({_GPUS_IN_RANGE}))"
    " or on (instance) 0 * max by (instance) (last_over_time(gpu_devices_expected{@energy_node}[$__range])))"
    f" > 0 and on (instance) {_TARGETS})"
)
"""PromQL for the number of the expected GPUs of each node that had no sample in the time range."""
_UNREAD_GPU_COUNT = (
    f'sum(label_replace(count({_UNREAD_SEEN_GPUS}), "part", "seen", "", "") or sum({_UNSEEN_GPU_COUNTS}))'
)
"""PromQL for the number of expected GPUs without a current energy counter; absent if there is none."""


def _build_readings_tile() -> Panel:
    """Return the panel with the number of devices by the reliability of their energy readings."""

    def sources(matcher: str = "") -> str:
        return f"count(max by (instance, device) (exporter_energy_source_info{{@energy_node{matcher}}}))"

    devices = sources()
    measured, modeled = sources(', measured="true"'), sources(', measured="false"')
    gaps = (
        "sum by (instance, device) (increase(exporter_energy_gap_seconds_total{@energy_node}[$__range])) > 0"
    )
    return stat(
        "Energy readings",
        instant_query(f"{measured} or 0 * {devices}", "measured"),
        instant_query(f"{modeled} or 0 * {devices}", "modeled"),
        instant_query(
            f"count({_SUSPECT_DEVICES}) or 0 * {devices}",
            "suspect",
            BAD,
        ),
        instant_query(f"count({gaps}) or 0 * {devices}", "with gaps", WARNING),
        instant_query(f"{_UNREAD_GPU_COUNT} or 0 * {devices}", "not read", BAD),
        unit="none",
        text_mode="value_and_name",
        w=6,
    )


def _build_current_losses_table() -> Panel:
    """Return the table of what each run loses now, by cause, the worst verdict first. Within a verdict, the most expensive loss is first."""
    losses = f"({LOST_SHARE_NOW} > {MIN_DISPLAYED_SHARE} or {STOPPED_RUNS})"
    # In this order: losses with a known rank and its labels, the other losses and the stopped runs, the losses of incomplete runs, the
    # risks, and a row if nothing is lost.
    row_query = (
        f"{losses} * on (run, cause) group_left (rank, instance, gpu, reason) ({RANKS_OF_LOSSES})"
        f" or on (run, cause) {losses} or {UNKNOWN_LOSSES} or {RUNS_AT_RISK} or on () {NO_LOSS}"
    )
    rows = f"({VERDICTS})"
    panel = table(
        "Losses now, last 5 min",
        Column(VERDICTS, "Verdict", width=118, mappings=verdicts.VERDICT_MAPPINGS),
        Column("run", "Run", width=110, links=(RUN_LINK,)),
        Column("cause", "Cause", width=178, mappings=CAUSE_TEXTS),
        Column("reason", "Reason", mappings=title_mappings()),
        Column("rank", "Rank", width=65),
        Column("instance", "Node", width=90),
        Column("gpu", "GPU", width=62),
        percent_column(f"{LOST_SHARE_NOW} > {MIN_DISPLAYED_SHARE}", "Share", 66, LOST_THRESHOLDS),
        Column(
            f"max by (run, cause) ({COST_OF_LOSSES}) and on (run, cause) {rows}",
            "Cost/h",
            decimals=2,
            width=80,
        ),
        Column(
            f"1000 * ({LOSS_SINCE})",
            "Since",
            unit=CLOCK_TIME,
            width=CLOCK_TIME_WIDTH,
            mappings=value_mappings({0: ("before this range", NEUTRAL)}),
        ),
        Column(LOST_OR_AT_RISK, "At stake", decimals=2, width=80),
        Column(
            f"{LOST_POWER_BY_CAUSE} and on (run, cause) {rows}", "Power", unit="watt", decimals=1, width=75
        ),
        row_query=row_query,
        sort="Verdict",
        w=24,
        h=10,
        max_data_points=120,
    )
    panel.body["options"]["sortBy"].append({"displayName": "Cost/h", "desc": True})
    return panel


def _build_table_by_cause() -> Panel:
    """Return the table of GPU time, energy and cost by cause. The shares add up to 100 %."""
    gpu_seconds, watt_hours = (
        f"sum by (cause) ({GPU_SECONDS_BY_CAUSE})",
        f"sum by (cause) ({ENERGY_BY_CAUSE})",
    )
    # A mean of less than `MIN_WATTS_PER_GPU` is no reading: the exporter started after most of the time had passed.
    known_watt_hours = f"({watt_hours} > on (cause) {MIN_WATTS_PER_GPU} * {gpu_seconds} / 3600)"
    return table(
        "Where time, energy and money went, in this time range",
        Column("cause", "Cause", mappings=CAUSE_TEXTS),
        Column(f"{gpu_seconds} / 3600 > 0", "GPU hours", decimals=2, width=90),
        percent_column(
            f"{gpu_seconds} / on () group_left () sum({GPU_SECONDS_BY_CAUSE}) > 0",
            "of GPU time",
            125,
            bar=(0, 1),
        ),
        Column(f"sum by (cause) ({COST_BY_CAUSE}) > 0", "Cost", decimals=2, width=70),
        Column(known_watt_hours, "Energy", unit=ENERGY_UNIT, decimals=1, width=90),
        sort="GPU hours",
        w=11,
        h=11,
        max_data_points=120,
    )


_LAST_STATE_BY_RUN = (
    f"({STATE_BY_RUN} or on (run)"
    f" max by (run, state) (last_over_time(training_run_state{{@run}}[$__range]) == 1) and on (run) {ENDED_RUNS})"
)
"""PromQL for a series of value 1 for each run with the current state as a label; for a run that has ended, the last state in the range."""


def _build_table_by_run() -> Panel:
    """Return the table of the totals and losses of each run, the largest lost cost first."""
    return table(
        "Cost and loss of each run, in this time range",
        Column("run", "Run", links=(RUN_LINK,)),
        Column(
            "state",
            "State",
            width=80,
            mappings=[*STATE_MAPPINGS, *value_mappings({"no step": ("no step", BAD)})],
        ),
        Column(f"sum by (run) ({COST_PER_HOUR_BY_RUN} or {STOPPED_COST})", "Cost/h", decimals=2, width=72),
        Column(f"sum by (run) ({RUN_COST})", "Cost", decimals=2, width=65),
        percent_column(LOST_SHARE_BY_RUN, "Lost", 60),
        percent_column(LOST_SHARE_AFTER_START, "after start", 80, LOST_THRESHOLDS),
        Column(f"sum by (run) ({LOST_COST_BY_RUN})", "Lost cost", decimals=2, width=75),
        Column(f"{RUN_ENERGY} / 3600", "Energy", unit=ENERGY_UNIT, decimals=1, width=85),
        row_query=(
            f'label_replace({_LAST_STATE_BY_RUN} and on (run) {STANDSTILL_BY_RUN}, "state", "no step", "state", "running")'
            f" or on (run) {_LAST_STATE_BY_RUN}"
            f' or on (run) label_replace({UNKNOWN_RUNS}, "state", "unknown", "", "")'
        ),
        sort="Lost cost",
        w=13,
        h=11,
        max_data_points=120,
    )
