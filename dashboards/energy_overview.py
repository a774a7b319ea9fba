"""First rows of the dashboard *Energy and cost*: power, cost and losses now and in the time range, by cause and by run."""

from __future__ import annotations

from collections.abc import Mapping

from dashboards import verdicts
from dashboards.alerts import CLOCK_TIME, CLOCK_TIME_WIDTH, title_mappings
from dashboards.cost_and_loss import LOST_THRESHOLDS, SHORT_CAUSE_TEXTS
from dashboards.energy_devices import (
    DEVICES_OF_RUNS,
    ENERGY_UNIT,
    GPU_ENERGY,
    UNUSED_GPU_ENERGY,
)
from dashboards.energy_loss import (
    COST_BY_CAUSE,
    COST_IN_RANGE_BY_RUN,
    GPU_SECONDS_BY_CAUSE,
    JOULES_IN_RANGE_BY_RUN,
    LOST_COST_IN_RANGE_BY_RUN,
    LOST_SHARE_IN_RANGE_BY_RUN,
    NO_LOSS_CAUSES,
    WATT_HOURS_BY_CAUSE,
    as_cause,
)
from dashboards.fleet_problems import problem_starts
from dashboards.fleet_runs import STATE_MAPPINGS
from dashboards.losses_now import (
    ACTIVE_RUNS,
    CAUSE_TEXTS,
    COST_OF_WORK_AT_RISK,
    COST_PER_HOUR_BY_RUN,
    ENDED_RUNS,
    GPU_COUNT_BY_RUN,
    GPU_WATTS_BY_RUN,
    GPUS_OF_RUNS_NOW,
    INCOMPLETE_RUNS,
    LOST_COST_PER_HOUR_BY_CAUSE,
    LOST_COST_PER_HOUR_BY_CURRENCY,
    LOST_COST_PER_HOUR_BY_RUN,
    LOST_COST_SHARE_NOW,
    LOST_COST_SINCE_START,
    LOST_GPU_SHARE_NOW,
    LOST_SHARE_NOW_BY_CAUSE,
    LOST_SHARE_NOW_BY_RUN,
    LOST_SHARE_NOW_WITH_STOPPED_RUNS,
    MIN_DISPLAYED_SHARE,
    NO_COST,
    NO_LOSS,
    RANK_BY_LOSS,
    READ_GPU_COUNT_BY_RUN,
    RUN_COUNTS_BY_VERDICT,
    STANDSTILL_BY_RUN,
    START_BY_LOSS,
    STOPPED_RUN_CAUSES,
    UNKNOWN_COST,
    UNKNOWN_LOSSES,
    UNKNOWN_RUNS,
    UNREAD_GPU_COUNT_BY_RUN,
    VERDICT_BY_LOSS,
    VERDICT_BY_RUN,
    VERDICTS_BY_TEXT,
)
from dashboards.palette import (
    BAD,
    GOOD,
    GREY,
    NEUTRAL,
    PHASE_COLORS,
    WARNING,
    Override,
    fixed_color,
    fixed_colors_by_name,
)
from dashboards.panels import (
    NO_VALUE,
    NODE_LINK,
    RUN_LINK,
    Panel,
    bar_gauge,
    stat,
    value_mappings,
    warn_below,
    warn_from,
)
from dashboards.queries import STATE_BY_RUN, instant_query, named_values_query
from dashboards.tables import Column, percent_column, table

CROSSCHECK_RATIO = "max by (instance, device) (exporter_energy_crosscheck{@energy_node})"
"""PromQL for the increase of each device's energy counter, divided by the integral of the device's power over the same time."""
MIN_CROSSCHECK_RATIO, MAX_CROSSCHECK_RATIO = 0.8, 1.25
"""Smallest and largest ratio of an energy counter to integrated power at which the two agree."""
SUSPECT_DEVICES = (
    f"({CROSSCHECK_RATIO} < {MIN_CROSSCHECK_RATIO} or {CROSSCHECK_RATIO} > {MAX_CROSSCHECK_RATIO})"
)
"""PromQL for the ratio of each device whose energy counter and power disagree."""
GAP_SECONDS_IN_RANGE = (
    "sum by (instance, device) (increase(exporter_energy_gap_seconds_total{@energy_node}[$__range]))"
)
"""PromQL for the seconds of the time range for which the energy of each device has no reading."""
MIN_WATTS_PER_GPU = 1
"""Mean power of a GPU above which the energy of a cause is known. Even an idle GPU uses more."""
TWO_LINE_NAME_NUMBER_SIZE = 34
"""Font size of the numbers of a tile whose names may have two lines."""
INCOMPLETE_RUNS_LEGEND = "runs not fully known"
"""Legend of the number of `INCOMPLETE_RUNS`: no rank of the run has a sample, or only some ranks have one."""


def overview_panels() -> tuple[Panel, ...]:
    """Return the row *At a glance*: tiles with the verdicts, cost, power and energy readings, and a table of the runs."""
    return (
        _build_verdict_tile(),
        _build_cost_tile(),
        _build_power_tile(),
        _build_readings_tile(),
        _build_run_table(),
    )


def total_panels() -> tuple[Panel, ...]:
    """Return the row *Totals*: tiles with the totals, the losses and the unused GPU energy, tables of runs and causes, and a chart of phases."""
    return (
        _build_totals_tile(),
        _build_lost_in_range_tile(),
        _build_unused_gpu_energy_tile(),
        _build_run_range_table(),
        _build_cause_table(),
        _build_phase_chart(),
    )


def _build_verdict_tile() -> Panel:
    """Return the tile with the number of runs by verdict, as on *Fleet*; a count of 0 is absent."""

    def text_color(text: str) -> str:
        """Return the color of the most urgent verdict with this text, except for *loses time*."""
        if text == verdicts.LOSES_TIME:
            return WARNING  # most runs with this text lose less than `MIN_LARGE_LOSS_SHARE`, from which the verdict is red
        most_urgent, *_ = VERDICTS_BY_TEXT[text]
        _, color = verdicts.VERDICT_TEXTS[most_urgent]
        return color

    return stat(
        "Runs by verdict",
        named_values_query(RUN_COUNTS_BY_VERDICT),
        colors_by_name={text: text_color(text) for text in RUN_COUNTS_BY_VERDICT},
        unit="none",
        decimals=0,
        text_mode="value_and_name",
        name_size=12,
        value_size=TWO_LINE_NAME_NUMBER_SIZE,
        w=9,
    )


def _build_unit_overrides(units: Mapping[str, str]) -> list[Override]:
    """Return overrides of the unit from {series name: unit}."""
    return [
        {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": unit}]}
        for name, unit in units.items()
    ]


def _build_power_tile() -> Panel:
    """Return the tile with the power of the GPUs of the runs, its share of the power limits, and the number of GPUs without a power."""
    gpu_power = f"(max by (uuid) (gpu_power_watts{{@cluster}}) and on (uuid) {GPUS_OF_RUNS_NOW})"
    gpu_limits = 'max by (uuid) (gpu_power_limit_watts{@cluster, limit="enforced"})'
    # Both sums are over the GPUs with a sample of both.
    power_of_limited_gpus = f"sum({gpu_power} and on (uuid) {gpu_limits})"
    limits = f"sum({gpu_limits} and on (uuid) {gpu_power})"
    of_limits = "of the limits"
    unread = "GPUs not read"
    # `count_values` returns a series of value 1 whose label `gpus` is the number of GPUs. The product takes the label for the legend.
    gpu_count = f'count_values("gpus", sum({READ_GPU_COUNT_BY_RUN}))'
    return stat(
        "GPU power now",
        instant_query(f"sum({GPU_WATTS_BY_RUN}) * on () group_left (gpus) {gpu_count}", "{{gpus}} GPUs"),
        named_values_query(
            {
                of_limits: f"{power_of_limited_gpus} / ({limits} > 0)",
                unread: f"sum({UNREAD_GPU_COUNT_BY_RUN})",
            }
        ),
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
            },
            {
                "matcher": {"id": "byName", "options": unread},
                "properties": [
                    {"id": "unit", "value": "none"},
                    {"id": "decimals", "value": 0},
                    {"id": "thresholds", "value": warn_from(1)},
                ],
            },
        ],
        w=5,
    )


def _build_cost_tile() -> Panel:
    """Return the tile with the cost per hour of the runs, the lost cost, the lost share, and the largest possible unknown loss.

    The lost share is of the GPU time if no price is known or if there are several currencies. The number of incomplete runs replaces the
    unknown loss if no price is known.
    """
    share = (
        f'label_replace({LOST_COST_SHARE_NOW}, "text", "of it lost", "", "")'
        f' or on () label_replace({LOST_GPU_SHARE_NOW}, "text", "of the GPU time lost", "", "")'
    )
    cost = f"(sum by (currency) ({COST_PER_HOUR_BY_RUN}) or {NO_COST})"
    unknown_cost = (
        f'label_replace(sum by (currency) ({UNKNOWN_COST}), "text", "$1 unknown", "currency", "(.+)")'
    )
    unknown_count = f'label_replace(count({INCOMPLETE_RUNS}), "text", "{INCOMPLETE_RUNS_LEGEND}", "", "")'
    return stat(
        "Cost per hour, 5 min",
        instant_query(cost, "{{currency}}"),
        instant_query(f"{LOST_COST_PER_HOUR_BY_CURRENCY} or 0 * {cost}", "{{currency}} lost"),
        instant_query(f"({share}) or ({unknown_cost} or on () {unknown_count})", "{{text}}"),
        unit="none",
        decimals=2,
        text_mode="value_and_name",
        overrides=[
            {
                "matcher": {"id": "byRegexp", "options": "/^of /"},
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
            {
                "matcher": {"id": "byName", "options": INCOMPLETE_RUNS_LEGEND},
                "properties": [
                    {"id": "decimals", "value": 0},
                    {"id": "thresholds", "value": warn_from(1)},
                ],
            },
        ],
        w=6,
    )


def _query_total(family: str, by: str = "") -> str:
    """Return PromQL for the total of a counter over the runs since their start, by labels.

    The total is the sum of the last samples of the last 15 minutes. Without such samples, it is the sum of the last samples of the runs
    that ended in the time range. The label `note` is `, ended` if all runs have ended, and absent otherwise.
    """
    recent = f"sum by ({by}) (last_over_time({family}{{@run}}[15m]))"
    of_ended_runs = f"sum by ({by}) (last_over_time({family}{{@run}}[$__range]) and on (run) {ENDED_RUNS})"
    total = f"({recent} or on () {of_ended_runs})"
    only_ended_runs = f"{ENDED_RUNS} unless on () {ACTIVE_RUNS}"
    return f'(label_replace({total}, "note", ", ended", "", "") and on () {only_ended_runs} or on () {total})'


def _build_totals_tile() -> Panel:
    """Return the tile with the cost, energy and CO2 of the runs since their start."""
    carbon, energy = "CO2", "energy"
    return stat(
        "Since the start of the runs, without downtime",
        instant_query(_query_total("training_cost_total", "currency"), "{{currency}}{{note}}"),
        instant_query(f"{_query_total('training_energy_joules_total')} / 3600", energy),
        instant_query(_query_total("training_carbon_grams_total"), carbon),
        unit="none",
        decimals=2,
        text_mode="value_and_name",
        overrides=_build_unit_overrides({carbon: "massg", energy: ENERGY_UNIT}),
        w=9,
    )


def _build_lost_in_range_tile() -> Panel:
    """Return the tile with the cost and energy that the runs lost in the time range."""
    return stat(
        "Lost in this time range",
        instant_query(f"sum by (currency) ({LOST_COST_IN_RANGE_BY_RUN})", "{{currency}}"),
        instant_query(f"sum(({WATT_HOURS_BY_CAUSE}) unless on (cause) {NO_LOSS_CAUSES})", "energy"),
        unit="none",
        decimals=2,
        text_mode="value_and_name",
        overrides=_build_unit_overrides({"energy": ENERGY_UNIT}),
        w=7,
    )


def _build_unused_gpu_energy_tile() -> Panel:
    """Return the tile with the energy of the GPUs that is charged to no run, and its share of the energy of all GPUs."""
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
        w=8,
    )


_LOST_GPU_COUNT = "count(last_over_time(run_gpu:training_gpu_lost:group{@run}[35s]))"
"""PromQL for the number of lost GPUs of the selected runs; absent if there is none."""
_UNREAD_GPU_COUNT = f"(sum({UNREAD_GPU_COUNT_BY_RUN}) > 0)"
"""PromQL for the number of GPUs of the selected runs without a current power, as in *GPU power now*; absent if there is none."""


def _build_readings_tile() -> Panel:
    """Return the tile with the number of lost GPUs, of unknown GPUs, of suspect devices, and of devices with gaps, of the selected runs.

    A number of 0 is absent. If all numbers are absent and the runs use a device, the tile shows *complete*.
    """
    devices = f"count(group by (instance, device) (exporter_energy_source_info{{@energy_node}}) and on (instance, device) {DEVICES_OF_RUNS})"
    suspect_devices = f"count({SUSPECT_DEVICES} and on (instance, device) {DEVICES_OF_RUNS})"
    devices_with_gaps = f"count({GAP_SECONDS_IN_RANGE} > 0 and on (instance, device) {DEVICES_OF_RUNS})"
    return stat(
        "Energy readings",
        named_values_query(
            {
                "GPUs lost": _LOST_GPU_COUNT,
                "GPUs unknown": f"({_UNREAD_GPU_COUNT} - {_LOST_GPU_COUNT} or {_UNREAD_GPU_COUNT}) > 0",
                "suspect": suspect_devices,
                "with gaps": devices_with_gaps,
                "all devices": f"0 * {devices}"
                f" unless on () ({_LOST_GPU_COUNT} or {_UNREAD_GPU_COUNT} or {suspect_devices} or {devices_with_gaps})",
            }
        ),
        colors_by_name={"GPUs lost": BAD, "GPUs unknown": WARNING, "suspect": BAD, "with gaps": WARNING},
        unit="none",
        text_mode="value_and_name",
        overrides=[
            {
                "matcher": {"id": "byName", "options": "all devices"},
                "properties": [{"id": "mappings", "value": value_mappings({0: ("complete", GOOD)})}],
            }
        ],
        value_size=TWO_LINE_NAME_NUMBER_SIZE,
        w=4,
    )


_IMPACT_MAPPINGS = value_mappings(
    {
        verdict.value: ("usual", NEUTRAL) if verdict is verdicts.Verdict.NO_PROBLEM else text_and_color
        for verdict, text_and_color in verdicts.VERDICT_TEXTS.items()
    }
)
"""Value mappings of the impact of a loss: the verdicts, and *usual* for a loss that is no problem, because its run may have another one."""


def build_current_losses_table() -> Panel:
    """Return the table of what each run loses now, by cause, the worst verdict first. Within a verdict, the most expensive loss is first."""
    losses = f"({LOST_SHARE_NOW_BY_CAUSE} > {MIN_DISPLAYED_SHARE} or {STOPPED_RUN_CAUSES})"
    # Four kinds of rows: losses with a known rank, with its labels; the other losses, and stopped runs; the losses of incomplete runs; and a
    # single row if nothing is lost.
    row_query = (
        f"{losses} * on (run, cause) group_left (rank, instance, gpu, reason) ({RANK_BY_LOSS})"
        f" or on (run, cause) {losses} or {UNKNOWN_LOSSES} or on () {NO_LOSS}"
    )
    # A cost without a loss in the table would be a row of its own.
    of_listed_losses = f"and on (run, cause) ({VERDICT_BY_LOSS})"
    panel = table(
        "Losses now",
        Column(VERDICT_BY_LOSS, "Impact", width=118, mappings=_IMPACT_MAPPINGS),
        Column("run", "Run", width=116, links=(RUN_LINK,)),
        Column("cause", "Cause", width=160, mappings=CAUSE_TEXTS),
        Column("reason", "Reason", mappings=title_mappings()),
        Column("rank", "Rank", width=60),
        Column("instance", "Node", width=72),
        Column("gpu", "GPU", width=58),
        percent_column(
            f"{LOST_SHARE_NOW_WITH_STOPPED_RUNS} > {MIN_DISPLAYED_SHARE}", "Lost now", 78, LOST_THRESHOLDS
        ),
        Column(
            f"max by (run, cause) ({LOST_COST_PER_HOUR_BY_CAUSE}) {of_listed_losses}",
            "Lost/h",
            decimals=2,
            width=66,
        ),
        Column(
            f"max by (run, cause) ({UNKNOWN_COST}) {of_listed_losses}",
            "Unknown/h",
            decimals=2,
            width=84,
        ),
        Column(
            f"1000 * ({START_BY_LOSS})",
            "Since",
            unit=CLOCK_TIME,
            width=CLOCK_TIME_WIDTH,
            mappings=value_mappings({0: ("before this range", NEUTRAL)}),
        ),
        Column(f"max by (run, cause) ({LOST_COST_SINCE_START})", "Lost", decimals=2, width=58),
        row_query=row_query,
        sort="Impact",
        w=24,
        h=7,
        max_data_points=120,
    )
    panel.body["options"]["sortBy"].append({"displayName": "Lost/h", "desc": True})
    return panel


def _build_cause_table() -> Panel:
    """Return the table of GPU time, energy and cost in the time range, by cause. The shares of the GPU time add up to 100 %."""
    gpu_seconds = f"sum by (cause) ({GPU_SECONDS_BY_CAUSE})"
    watt_hours = f"sum by (cause) ({WATT_HOURS_BY_CAUSE})"
    # A mean power below `MIN_WATTS_PER_GPU` means that the energy was not read for most of the time.
    # Unattributed energy has no time.
    min_watt_hours = (
        f"({MIN_WATTS_PER_GPU} * {gpu_seconds} / 3600 or {as_cause('vector(0)', 'unattributed')})"
    )
    known_watt_hours = f"({watt_hours} > on (cause) {min_watt_hours})"
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
        w=12,
        h=13,
        max_data_points=120,
    )


def _build_phase_chart() -> Panel:
    """Return the bar chart of the energy of the runs since their start, by phase; the nine largest phases."""
    return bar_gauge(
        "Energy by phase, since the start of the runs",
        instant_query(
            "topk(9, sum by (phase) (last_over_time(training_phase_energy_joules_total{@run}[15m]))) / 3600",
            "{{phase}}",
        ),
        unit=ENERGY_UNIT,
        decimals=1,
        overrides=fixed_colors_by_name(PHASE_COLORS | {"unattributed": GREY}),
        color=fixed_color(GREY),
        w=24,
        h=9,
    )


_LAST_STATE_BY_RUN = (
    f"({STATE_BY_RUN} or on (run)"
    f" max by (run, state) (last_over_time(training_run_state{{@run}}[$__range]) == 1) and on (run) {ENDED_RUNS})"
)
"""PromQL for a series of value 1 for each run with the current state as a label; for a run that has ended, the last state in the range."""
UNKNOWN_WATTS = -1
"""Value that the table shows as *unknown*, because a power is never negative."""


def _build_run_table() -> Panel:
    """Return the table of the verdict, main problem, cost, power and loss of each run now, the worst verdict first."""
    # `x ^ 0` is 1 with the labels of x.
    unknown_power = f"{UNKNOWN_WATTS} * {UNREAD_GPU_COUNT_BY_RUN} ^ 0"
    # The dash of a run without a problem keeps the column *What is wrong*, which fills the width of the table.
    rows = f"(group by (run) ({_LAST_STATE_BY_RUN}) or on (run) group by (run) ({UNKNOWN_RUNS}))"
    panel = table(
        "Cost and loss of each run",
        Column(VERDICT_BY_RUN, "Verdict", decimals=0, width=118, mappings=verdicts.VERDICT_MAPPINGS),
        Column("run", "Run", width=116, links=(RUN_LINK,)),
        Column("alertname", "What is wrong", mappings=[*title_mappings(), *SHORT_CAUSE_TEXTS]),
        Column("rank", "Rank", width=58, filterable=False),
        Column("instance", "Node", width=62, links=(NODE_LINK,), filterable=False),
        Column("gpu", "GPU", width=52, filterable=False),
        Column(
            f"1000 * {problem_starts(rows, NO_VALUE)}",
            "Since",
            unit=CLOCK_TIME,
            width=CLOCK_TIME_WIDTH,
            mappings=value_mappings({0: (NO_VALUE, NEUTRAL)}),
        ),
        Column(
            f"{GPU_WATTS_BY_RUN} unless on (run) {UNREAD_GPU_COUNT_BY_RUN} or on (run) {unknown_power}",
            "Power",
            unit="watt",
            decimals=1,
            width=80,
            mappings=value_mappings({UNKNOWN_WATTS: ("unknown", WARNING)}),
        ),
        Column(f"sum by (run) ({COST_PER_HOUR_BY_RUN})", "Cost/h", decimals=2, width=74),
        Column(f"sum by (run) ({LOST_COST_PER_HOUR_BY_RUN})", "Lost/h", decimals=2, width=74),
        percent_column(LOST_SHARE_NOW_BY_RUN, "Lost now", 88, LOST_THRESHOLDS),
        Column(f"max by (run) ({COST_OF_WORK_AT_RISK})", "Work at risk", decimals=2, width=110),
        sort="Verdict",
        w=24,
        h=8,
        max_data_points=120,
    )
    panel.body["options"]["sortBy"].append({"displayName": "Lost/h", "desc": True})
    return panel


def _build_run_range_table() -> Panel:
    """Return the table of the state, cost, loss and energy of each run in the time range, the largest loss first."""
    return table(
        "Cost, loss and energy of each run, in this time range",
        Column("run", "Run", links=(RUN_LINK,)),
        Column(
            "state",
            "State",
            width=80,
            mappings=[*STATE_MAPPINGS, *value_mappings({"no step": ("no step", BAD)})],
        ),
        Column(GPU_COUNT_BY_RUN, "GPUs", width=65),
        Column(f"sum by (run) ({COST_IN_RANGE_BY_RUN})", "Cost", decimals=2, width=70),
        Column(f"sum by (run) ({LOST_COST_IN_RANGE_BY_RUN})", "Lost", decimals=2, width=78),
        percent_column(LOST_SHARE_IN_RANGE_BY_RUN, "of it lost", 100),
        Column(f"{JOULES_IN_RANGE_BY_RUN} / 3600", "Energy", unit=ENERGY_UNIT, decimals=1, width=95),
        row_query=(
            f'label_replace({_LAST_STATE_BY_RUN} and on (run) {STANDSTILL_BY_RUN}, "state", "no step", "state", "running")'
            f" or on (run) {_LAST_STATE_BY_RUN}"
            f' or on (run) label_replace({UNKNOWN_RUNS}, "state", "unknown", "", "")'
        ),
        sort="Lost",
        w=12,
        h=13,
        max_data_points=120,
    )
