"""Conditions of the links of GPUs: NVLink and PCIe."""

from __future__ import annotations

from collections.abc import Iterator

from exporter.status.condition import Condition, Found
from exporter.status.numbers import number
from exporter.status.view import View

RATE_SECONDS = 300.0
MOST_REPLAYS_PER_MINUTE = 1.0
BUSY_RATIO = 0.5


def _nvlink(seen: View) -> Iterator[Found]:
    titles = {gpu.uuid: gpu.title for gpu in seen.gpus}
    for uuid, kind in seen.past.owners("nvlink errors"):
        if uuid in titles and seen.past.rate("nvlink errors", uuid, kind, seconds=RATE_SECONDS):
            yield Found((uuid, kind), {"gpu": titles[uuid], "kind": kind})


def _replays(seen: View) -> Iterator[Found]:
    for gpu in seen.gpus:
        rate = seen.past.rate("pcie replays", gpu.uuid, seconds=RATE_SECONDS)
        if rate is not None and 60 * rate > MOST_REPLAYS_PER_MINUTE:
            yield Found((gpu.uuid,), {"gpu": gpu.title, "rate": number(60 * rate)})


def _width(seen: View) -> Iterator[Found]:
    for gpu in seen.gpus:
        now, most = (
            seen.readings.value("gpu_pcie_link_width", uuid=gpu.uuid, kind=kind)
            for kind in ("current", "max")
        )
        busy = seen.readings.value("gpu_utilization_ratio", uuid=gpu.uuid)
        if now is not None and most is not None and now < most and busy is not None and busy > BUSY_RATIO:
            yield Found((gpu.uuid,), {"gpu": gpu.title, "now": f"{now:.0f}", "most": f"{most:.0f}"})


CONDITIONS = (
    Condition(
        alert="NvlinkErrors",
        condition="errors for 15m without a break",
        sentence="NVLink of {gpu} has errors ({kind})",
        remedy="reset the node; if the errors return, have the connector or bridge inspected",
        find=_nvlink,
    ),
    Condition(
        alert="PcieReplays",
        condition="more than 1 replay a minute",
        sentence="PCIe of {gpu} retransmits {rate} packets per minute",
        remedy="reseat the card or its riser",
        find=_replays,
    ),
    Condition(
        alert="PcieWidthDegraded",
        condition="fewer PCIe lanes than the card has, while it is busy",
        sentence="{gpu} uses {now} of {most} PCIe lanes under load",
        remedy="check the slot's width (lspci -vv), then reseat the card or its riser",
        find=_width,
    ),
)
