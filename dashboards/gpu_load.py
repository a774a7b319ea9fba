"""Panels of the dashboard *GPUs*: use, memory, power, heat, clocks, links, MIG instances and inventory.

The plot of a quantity has these lines, see `_gpu_plot`:

- Outliers, at most `MAX_LINES`: GPUs with a clear difference from the median of the GPUs of their run, in the last two minutes of the time
  range. The difference is to the own run, because runs differ by design. The lines are thick, with the same color in every panel.
- Fallen GPUs, at most `MAX_LINES`: GPUs whose value in the same two minutes is clearly below their own earlier value, such as all GPUs of
  a run that waits for data. The lines look like those of outliers. Only plots have them in which low values are bad, and in which a
  difference is a share of the median.
- The GPUs with the lowest or the highest means in the time range, whichever are bad, at most `MAX_LINES`. The lines are thin and gray.
- Free GPUs, at most `MAX_FREE_LINES`: GPUs that a run held earlier, while live ranks hold other GPUs. The lines are dashed.
- Lost GPUs, at most `MAX_LINES`. The lines are thick and red, and end at the loss.
- The median of each run.

Outliers, means and medians are those of the GPUs that live ranks hold at the end of the time range. If live ranks hold none, they are those
of the GPUs that runs held; if runs held none, those of all GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dashboards.gpu_problems import THROTTLED_RATIO_FAMILY
from dashboards.palette import (
    BAD,
    BLUE,
    GREEN,
    GREY,
    HASHED_COLOR,
    ORANGE,
    SILVER,
    THROTTLE_REASON_COLORS,
    Override,
    fixed_color,
    fixed_colors_by_name,
)
from dashboards.panels import Json, Panel, bar_gauge, dashboard_link, time_series
from dashboards.queries import Query, gpus_of_runs, instant_query
from dashboards.tables import Column, table

MAX_LINES = 8
"""Maximum number of lines of each kind in a plot: outliers, and highest or lowest means."""
MAX_POINTS = 200
"""Maximum number of points of a line, which limits the samples of a query that compares thousands of GPUs."""
MAX_MEDIANS = 3
"""Maximum number of runs whose medians a plot shows; runs differ by design."""
GPU_LEGEND = "{{instance}} GPU {{gpu}}"
OUTLIER_NOTE = ": outlier"
"""Addition to the legend of a GPU that differs from the median of its run at the end of the time range."""
FALLEN_NOTE = ": fell"
"""Addition to the legend of a GPU that differs from its own earlier value at the end of the time range."""
EARLIER_QUANTILE = 0.75
"""Quantile of the values of a GPU in the time range that counts as its earlier value.

The values after a fall are low, and fill the smaller part of most time ranges, so that they change a high quantile little.
"""
LOST_NOTE = ": lost"
"""Addition to the legend of a GPU that is lost at the end of the time range."""
_LOST_GPUS = "last_over_time(gpu_up{@gpu}[2m] @ end()) == 0"
"""PromQL with a value for each GPU that is lost at the end of the time range."""
_RUN_BY_UUID = (
    "topk by (uuid) (1, max by (uuid, run) (last_over_time(gpu:training_run:group{@cluster}[2m] @ end())))"
)
"""PromQL for a series of value 1 for each GPU, with the run that holds the GPU; a free GPU has no label `run`."""
MAX_FREE_LINES = 3
"""Maximum number of lines of free GPUs."""
FREE_NOTE = ": no rank"
"""Addition to the legend of a free GPU: a run held the GPU in the time range; at its end, no live rank holds the GPU, and the GPU responds."""
_FREE_OVERRIDE: Override = {
    "matcher": {"id": "byRegexp", "options": f"/{FREE_NOTE}$/"},
    "properties": [
        {"id": "color", "value": fixed_color(SILVER)},
        {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [4, 4]}},
    ],
}
_LOST_OVERRIDE: Override = {
    "matcher": {"id": "byRegexp", "options": f"/{LOST_NOTE}$/"},
    "properties": [
        {"id": "color", "value": fixed_color(BAD)},
        {"id": "custom.lineWidth", "value": 3},
        {"id": "custom.hideFrom", "value": {"legend": False, "tooltip": False, "viz": False}},
    ],
}
_OUTLIER_OVERRIDE: Override = {
    "matcher": {"id": "byRegexp", "options": f"/({OUTLIER_NOTE}|{FALLEN_NOTE})$/"},
    "properties": [
        {"id": "color", "value": HASHED_COLOR},
        {"id": "custom.lineWidth", "value": 3},
        {"id": "custom.hideFrom", "value": {"legend": False, "tooltip": False, "viz": False}},
    ],
}
_NO_LEGEND_OF_GPUS: Override = {
    "matcher": {"id": "byFrameRefID", "options": "A"},
    "properties": [{"id": "custom.hideFrom", "value": {"legend": True, "tooltip": False, "viz": False}}],
}
"""Override that leaves the lines of the first query, the GPUs, out of the legend, which the gray lines would fill.

The overrides of outliers and lost GPUs show their lines in the legend again.
"""
HARMFUL_REASONS = "thermal|hw_thermal|sw_thermal|hw_slowdown|hw_power_brake"
"""Regular expression of the reasons for a lower clock that are heat or the power brake. `hw_slowdown` includes two of the others."""
_GPUS_WITHOUT_SAMPLE = (
    "group by (instance, gpu, uuid) (last_over_time(gpu_up{@gpu}[$__range]))"
    " unless on (instance) group by (instance) (last_over_time(gpu_up{@gpu}[35s]))"
)
"""PromQL for the GPUs of the time range on nodes without a current sample of any GPU; absent if there is none."""
RANKS_LINK = dashboard_link("training-ranks", "Ranks on this node")
GPUS_OF_ANY_RUN = gpus_of_runs("@cluster")
"""PromQL for each GPU that any run held in the time range."""


def _gpus_of_live_ranks(template: str) -> str:
    """Return PromQL for the GPUs that live processes of runs hold, by UUID and further labels.

    Args:
        template: PromQL for the value of a series at some time; `{}` is the series.
    """
    live_processes = f"{template.format('training_process_up{@cluster}')} == 1"
    gpus_of_ranks = template.format('training_rank_info{@cluster, uuid!=""}')
    gpus_of_processes = template.format("training_process_gpu_memory_bytes{@cluster}")
    charged_gpus = template.format('training_energy_share_ratio{@cluster, component="gpu"}')
    return (
        f"{gpus_of_ranks} and on (instance, run, rank) {live_processes}"
        f" or {gpus_of_processes} and on (instance, run, rank) {live_processes}"
        f' or label_replace({charged_gpus} > 0, "uuid", "$1", "device", "(.+)") and on (instance, run) {live_processes}'
    )


GPUS_OF_LIVE_RANKS = _gpus_of_live_ranks("{}")
"""PromQL for each GPU that a live process of a run holds now."""
_GPUS_OF_LIVE_RANKS_AT_END = _gpus_of_live_ranks("last_over_time({}[2m] @ end())")
"""PromQL for each GPU that a live process of a run held at its last sample in the last two minutes of the time range.

Outliers are compared over the same two minutes, so that an exporter that is down has no outliers among the GPUs without a run.
"""


def of_used_gpus(expression: str) -> str:
    """Return PromQL that limits series to the GPUs that a run held in the time range; if there is none, all series remain."""
    used_gpus_query = f"({expression}) and on (uuid) ({GPUS_OF_ANY_RUN})"
    return f"({used_gpus_query} or ({expression}) unless on () ({used_gpus_query}))"


def _of_gpus_in_use(expression: str) -> str:
    """Return PromQL that limits series to the GPUs that live ranks hold at the end of the time range; if there is none, see `of_used_gpus`."""
    in_use = f"({expression}) and on (uuid) ({_GPUS_OF_LIVE_RANKS_AT_END})"
    return f"({in_use} or {of_used_gpus(expression)} unless on () ({in_use}))"


@dataclass(frozen=True, slots=True)
class GpuQuantity:
    """Quantity of each GPU, with the difference from the median of its run that makes a GPU an outlier."""

    expression: str  # PromQL with a series for each GPU, with the labels `instance`, `gpu` and `uuid`
    is_low_bad: bool  # low values are bad, otherwise high values
    distance: float  # difference above which a GPU is an outlier, in the unit of the quantity or as a share of the median
    is_relative: bool = False  # the distance is a share of the median
    is_compared: bool = True  # False: the value itself exceeds `distance`, not its difference

    def outliers(self, values: str) -> str:
        """Return PromQL for the outliers among *values*, PromQL for a value of each GPU; at most `MAX_LINES`."""
        if not self.is_compared:
            return f"topk({MAX_LINES}, {values} > {self.distance})"
        by_run = f"({values} * on (uuid) group_left (run) ({_RUN_BY_UUID} or on (uuid) group by (uuid) ({values})))"
        median = f"quantile by (run) (0.5, {by_run})"
        difference = (
            f"({median} - on (run) group_right () {by_run})"
            if self.is_low_bad
            else f"({by_run} - on (run) group_left () {median})"
        )
        limit = (
            f"on (run) group_left () ({self.distance} * {median})" if self.is_relative else f"{self.distance}"
        )
        return f"topk({MAX_LINES}, {difference} > {limit})"

    def fallen(self, values: str) -> str:
        """Return PromQL for the GPUs whose value among *values* is below their earlier value by more than `distance`; at most `MAX_LINES`.

        The distance is a share of the earlier value, see `EARLIER_QUANTILE`.
        """
        earlier = f"quantile_over_time({EARLIER_QUANTILE}, ({self.expression})[$__range:$__interval] @ end())"
        return f"topk({MAX_LINES}, 1 - {values} / {earlier} > {self.distance})"


def _marked(expression: str, gpus: str, note: str) -> str:
    """Return PromQL for the series of some GPUs, with the run in brackets and *note* as the label `note`, for the legend."""
    selected = f"({expression}) and on (instance, gpu) {gpus}"
    with_run = f"({selected}) * on (uuid) group_left (run) {_RUN_BY_UUID}"
    # The second replacement applies to the GPUs whose run is known.
    return f'label_replace(label_replace({with_run}, "note", "{note}", "", ""), "note", " ($1){note}", "run", "(.+)")'


def _gpu_plot(
    title: str,
    quantity: GpuQuantity,
    *references: Query,
    unit: str,
    w: int,
    maximum: float | None = None,
    minimum: float | None = 0,
    links: Sequence[Json] = (),
) -> Panel:
    """Return the plot of a quantity, with the lines that the docstring of the module lists, and with *references*.

    Of two kinds of lines for the same GPU, the first in the order lost, outlier, fallen, free, extreme is drawn.
    """
    expression = quantity.expression
    means_at_end = f"avg_over_time(({expression})[2m:30s] @ end())"
    # The GPUs of a run that has ended are idle, and no outliers.
    means_in_use = f"({means_at_end} and on (uuid) ({_GPUS_OF_LIVE_RANKS_AT_END}))"
    outliers = quantity.outliers(f"({means_in_use} or {means_at_end} unless on () {means_in_use})")
    free_gpus = (
        f"bottomk({MAX_FREE_LINES}, {means_at_end} and on (uuid) ({GPUS_OF_ANY_RUN})"
        " and on (uuid) last_over_time(gpu_up{@cluster}[2m] @ end()) == 1"
        f" unless on (uuid) ({_GPUS_OF_LIVE_RANKS_AT_END}))"
    )
    lines = [
        _marked(expression, f"topk({MAX_LINES}, {_LOST_GPUS})", LOST_NOTE),
        _marked(expression, outliers, OUTLIER_NOTE),
        *(
            [_marked(expression, quantity.fallen(means_in_use), FALLEN_NOTE)]
            if quantity.is_low_bad and quantity.is_relative
            else []
        ),
        f'label_replace(({expression}) and on (instance, gpu) {free_gpus}, "note", "{FREE_NOTE}", "", "")',
        _extreme_gpus(expression, lowest=quantity.is_low_bad),
    ]
    panel = time_series(
        title,
        Query(" or on (instance, gpu) ".join(lines), f"{GPU_LEGEND}{{{{note}}}}"),
        Query(_median_by_run(expression), "median of {{run}}", BLUE, reference=True),
        *references,
        unit=unit,
        maximum=maximum,
        minimum=minimum,
        color=fixed_color(GREY),
        overrides=[_NO_LEGEND_OF_GPUS, _FREE_OVERRIDE, _OUTLIER_OVERRIDE, _LOST_OVERRIDE],
        w=w,
        links=links,
    )
    panel.body["maxDataPoints"] = MAX_POINTS
    return panel


_MANY_RUNS = f"(count(count by (run) ({_RUN_BY_UUID} and on (uuid) gpu_up{{@gpu}})) > {MAX_MEDIANS})"
"""PromQL with a value if the selected GPUs have more than `MAX_MEDIANS` runs."""


def _median_by_run(expression: str) -> str:
    """Return PromQL for the median of the GPUs in use of each run, if the selected GPUs have at most `MAX_MEDIANS` runs."""
    in_use = _of_gpus_in_use(expression)
    by_run = f"({in_use}) * on (uuid) group_left (run) ({_RUN_BY_UUID} or on (uuid) group by (uuid) ({expression}))"
    return f"quantile by (run) (0.5, {by_run}) unless on () {_MANY_RUNS}"


def _extreme_gpus(expression: str, *, lowest: bool) -> str:
    """Return PromQL for the `MAX_LINES` GPUs in use with the largest means over the time range, or with the smallest if *lowest* is true."""
    mean = f"avg_over_time(({expression})[$__range:$__interval] @ end())"
    select = "bottomk" if lowest else "topk"
    return f"(({expression}) and on (instance, gpu) {select}({MAX_LINES}, {_of_gpus_in_use(mean)}))"


def utilization_panels() -> tuple[Panel, ...]:
    """Return the panels about the use of the GPUs: two for each GPU, and one that compares the kinds of use of the median GPU."""

    def activity(title: str, expression: str) -> Panel:
        """Return the plot of a ratio of which low values are bad."""
        quantity = GpuQuantity(expression, is_low_bad=True, distance=0.25, is_relative=True)
        return _gpu_plot(title, quantity, unit="percentunit", maximum=1, w=8, links=(RANKS_LINK,))

    def median(expression: str) -> str:
        """Return PromQL for the median of the GPUs in use of each run, or of all runs if `_MANY_RUNS` are selected."""
        of_all_runs = f"quantile(0.5, {_of_gpus_in_use(expression)}) and on () {_MANY_RUNS}"
        return f'{_median_by_run(expression)} or label_replace({of_all_runs}, "run", "all runs", "", "")'

    busy = "clamp_max(rate(gpu_utilization_busy_seconds_total{@gpu}[$__rate_interval]), 1)"
    kinds_of_use = time_series(
        "Kinds of use, median GPU",
        Query(median(busy), "a kernel runs, {{run}}", GREY),
        Query(median("gpu_sm_activity_ratio{@gpu}"), "SMs active, {{run}}", BLUE),
        Query(median("gpu_tensor_activity_ratio{@gpu}"), "tensor cores active, {{run}}", GREEN),
        Query(median("gpu_dram_activity_ratio{@gpu}"), "memory bandwidth in use, {{run}}", ORANGE),
        unit="percentunit",
        maximum=1,
        w=8,
    )
    kinds_of_use.body["maxDataPoints"] = MAX_POINTS
    return (
        activity("SM activity", "gpu_sm_activity_ratio{@gpu}"),
        activity("Utilization (a kernel runs)", busy),
        kinds_of_use,
    )


def memory_panels() -> tuple[Panel, ...]:
    """Return the panels about device memory."""
    return (
        _gpu_plot(
            "Memory in use",
            GpuQuantity("gpu_memory_used_bytes{@gpu}", is_low_bad=False, distance=0.2, is_relative=True),
            Query("max(gpu_memory_total_bytes{@gpu})", "size of a GPU", reference=True),
            unit="bytes",
            w=10,
        ),
        bar_gauge(
            "GPU memory by rank",
            instant_query(
                "topk(20, sum by (run, rank, gpu, instance) (training_process_gpu_memory_bytes{@node_run}))",
                "rank {{rank}} of {{run}}, {{instance}} GPU {{gpu}}",
            ),
            unit="bytes",
            w=7,
        ),
    )


def power_panels() -> tuple[Panel, ...]:
    """Return the panels about power, temperature, clocks and throttling."""

    def gpus_by_reason(title: str, reasons: str) -> Panel:
        """Return the plot of the mean number of GPUs below full clock, by reason. *reasons* is an operator with a regular expression."""
        limited = f"rate(gpu_clocks_event_seconds_total{{@gpu, reason{reasons}}}[$__rate_interval])"
        return time_series(
            title,
            Query(f"sum by (reason) ({of_used_gpus(limited)})", "{{reason}}"),
            Query(f"count({of_used_gpus(_GPUS_WITHOUT_SAMPLE)})", "no sample", SILVER, dashed=True),
            unit="suffix: GPUs",
            decimals=1,
            maximum=1,
            overrides=fixed_colors_by_name(THROTTLE_REASON_COLORS),
            w=8,
        )

    return (
        _gpu_plot(
            "Power of each GPU",
            GpuQuantity("gpu_power_watts{@gpu}", is_low_bad=True, distance=0.2, is_relative=True),
            Query('min(gpu_power_limit_watts{@gpu, limit="enforced"})', "lowest limit", reference=True),
            unit="watt",
            w=8,
        ),
        _gpu_plot(
            "Temperature of each GPU",
            GpuQuantity('gpu_temperature_celsius{@gpu, sensor="gpu"}', is_low_bad=False, distance=8),
            unit="celsius",
            minimum=None,
            w=8,
        ),
        _gpu_plot(
            "SM clock",
            GpuQuantity('gpu_clock_hertz{@gpu, clock="sm"}', is_low_bad=True, distance=0.1, is_relative=True),
            unit="hertz",
            w=8,
        ),
        gpus_by_reason("GPUs slowed by heat or the power brake, by reason", f'=~"{HARMFUL_REASONS}"'),
        _gpu_plot(
            "Throttling of each GPU",
            GpuQuantity(
                f"max by (instance, gpu, uuid) ({THROTTLED_RATIO_FAMILY}{{@gpu}}) unless on (uuid) gpu_up{{@gpu}} == 0",
                is_low_bad=False,
                distance=0.05,
                is_compared=False,
            ),
            unit="percentunit",
            w=8,
            links=(RANKS_LINK,),
        ),
        gpus_by_reason(
            "GPUs at another limit of the clock, by reason", f'!~"{HARMFUL_REASONS}|low_utilization"'
        ),
    )


def link_panels() -> tuple[Panel, ...]:
    """Return the panels about traffic over NVLink and PCIe: the devices with the least traffic in each direction."""

    def lowest_rates(family: str) -> str:
        """Return PromQL for the rate of the GPUs with the lowest mean rates of a counter."""
        rate = f"sum by (instance, gpu, uuid) (rate({family}{{@gpu}}[$__rate_interval]))"
        return _extreme_gpus(rate, lowest=True)

    def traffic(title: str, link: str) -> Panel:
        """Return the plot of the traffic over `nvlink` or `pcie`; received bytes are dashed."""
        return time_series(
            title,
            Query(lowest_rates(f"gpu_{link}_transmit_bytes_total"), f"sent, {GPU_LEGEND}"),
            Query(lowest_rates(f"gpu_{link}_receive_bytes_total"), f"received, {GPU_LEGEND}", dashed=True),
            unit="Bps",
            legend="hidden",
            color=HASHED_COLOR,
        )

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
    """Return the table of GPU models, drivers and addresses."""
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
