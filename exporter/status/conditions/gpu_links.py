"""Conditions of the links of GPUs: NVLink and PCIe."""

from __future__ import annotations

from collections.abc import Iterator

from exporter.status.condition import Condition, Match
from exporter.status.formatting import number
from exporter.status.view import View

RATE_SECONDS = 300.0
"""Time range of the rates of NVLink errors and PCIe replays."""
MAX_REPLAYS_PER_MINUTE = 1.0
"""Rate above which PCIe replays need attention."""
BUSY_RATIO = 0.5
"""Utilization above which a GPU must use all PCIe lanes. An idle GPU may use fewer lanes to save power."""


def _nvlink_errors(view: View) -> Iterator[Match]:
    titles = {gpu.uuid: gpu.title for gpu in view.gpus}
    for uuid, kind in view.history.list_owners("nvlink errors"):
        if uuid in titles and view.history.compute_mean_rate(
            "nvlink errors", uuid, kind, seconds=RATE_SECONDS
        ):
            yield Match((uuid, kind), {"gpu": titles[uuid], "kind": kind})


def _pcie_replays(view: View) -> Iterator[Match]:
    for gpu in view.gpus:
        rate = view.history.compute_mean_rate("pcie replays", gpu.uuid, seconds=RATE_SECONDS)
        if rate is not None and 60 * rate > MAX_REPLAYS_PER_MINUTE:
            yield Match((gpu.uuid,), {"gpu": gpu.title, "rate": number(60 * rate)})


def _narrow_pcie_links(view: View) -> Iterator[Match]:
    for gpu in view.gpus:
        width, max_width = (
            view.samples.value("gpu_pcie_link_width", uuid=gpu.uuid, kind=kind) for kind in ("current", "max")
        )
        busy_ratio = view.samples.value("gpu_utilization_ratio", uuid=gpu.uuid)
        if width is None or max_width is None or busy_ratio is None:
            continue
        if width < max_width and busy_ratio > BUSY_RATIO:
            yield Match(
                (gpu.uuid,), {"gpu": gpu.title, "width": f"{width:.0f}", "max_width": f"{max_width:.0f}"}
            )


CONDITIONS = (
    Condition(
        alert_name="NvlinkErrors",
        criterion="errors for 15m without a break",
        sentence="NVLink of {gpu} has errors ({kind})",
        remedy="reset the node; if the errors return, have the connector or bridge inspected",
        find_matches=_nvlink_errors,
    ),
    Condition(
        alert_name="PcieReplays",
        criterion="more than 1 replay a minute",
        sentence="PCIe of {gpu} retransmits {rate} packets per minute",
        remedy="reseat the GPU or its riser",
        find_matches=_pcie_replays,
    ),
    Condition(
        alert_name="PcieWidthDegraded",
        criterion="fewer PCIe lanes than the GPU supports, while the GPU is busy",
        sentence="{gpu} uses {width} of {max_width} PCIe lanes under load",
        remedy="check the slot's width (lspci -vv), then reseat the GPU or its riser",
        find_matches=_narrow_pcie_links,
    ),
)
