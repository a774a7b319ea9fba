"""What connects a GPU: PCIe, NVLink, its fabric, the link to a Grace CPU.

Used in the NVML child. Everything here is of the slower tiers: cumulative counters lose nothing by it. Bytes leave
as NVML counts them (KiB for NVLinks before the fifth generation); the sidecar adds them up.

A port that is not in use answers "not supported" for fields that work on its neighbours, so every link is asked and
remembered by itself.
"""

from __future__ import annotations

import ctypes

from exporter.collectors.nvml.conversions import GarbageError, count, small
from exporter.collectors.nvml.gpu import ALL_LINKS
from exporter.collectors.nvml.identity import BLACKWELL, architecture_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from exporter.collectors.nvml.gpu import Gpu
    from exporter.collectors.nvml.options import Options

    Field = int | tuple[int, int]

PCIE_TRANSMITTED, PCIE_RECEIVED = 197, 198
_PCIE_REPLAY_ROLLOVERS = 95
_PCIE_L0_TO_RECOVERY = 169
_PCIE_ERRORS = {173: "correctable", 179: "non_fatal", 180: "fatal"}
_PCIE_ERRORS_DETAILS = {
    174: "naks_received",
    175: "receiver",
    176: "bad_tlp",
    177: "naks_sent",
    178: "bad_dllp",
    181: "unsupported_request",
    182: "lcrc",
    183: "lane",
}

_NVLINK_COUNT = 91
_NVLINK_SPEED = 164  # of a link, MB/s
_BEYOND_SPEED = 1e8  # MB/s; all ones are more
_NVLINK_SPEED_COMMON = 90
_MOST_LINKS = 36
_LINKS_OF_OLD_DRIVERS = 18

# Field, unit. The fifth generation has silently dead counters under the old ids.
_TRANSMITTED = ((138, "kibibytes"), (202, "bytes"))
_RECEIVED = ((139, "kibibytes"), (204, "bytes"))

_ERRORS = {
    "replay": (161, 52),
    "recovery": (162, 59),
    "crc_flit": (38,),
    "crc_data": (45,),
    "crc": (163,),
    "ecc": (160,),
}
_OVER_ALL_LINKS = frozenset({38, 45, 52, 59, 160})
"""Fields that are sums over the links already; the others take a link as their scope."""

_ERRORS_FIFTH = {
    "malformed_packet": (206,),
    "buffer_overrun": (207,),
    "receive": (208,),
    "receive_remote": (209,),
    "receive_general": (210,),
    "link_integrity": (211,),
    "transmit_discard": (212,),
    "recovery_successful": (213,),
    "recovery_failed": (214,),
    "recovery": (215,),
}
_ERROR_COUNTERS = {"replay": 0, "recovery": 1, "crc_flit": 2, "crc_data": 3}

_C2C_COUNT = 170
_C2C_ERRORS = {231: "interrupt", 232: "replay", 233: "replay_b2b"}


def read_medium(gpu: Gpu, options: Options, out: dict[str, Any]) -> None:
    """Read traffic, and the state of the links."""
    generation = gpu.ask("pcie.generation", "nvmlDeviceGetCurrPcieLinkGeneration", convert=small)
    width = gpu.ask("pcie.width", "nvmlDeviceGetCurrPcieLinkWidth", convert=small)
    out["pcie_generation"] = None if generation is None else {"current": generation}
    out["pcie_width"] = None if width is None else {"current": width}
    fields = _counts(gpu, (PCIE_TRANSMITTED, PCIE_RECEIVED))
    out["pcie_transmit"] = fields.get(PCIE_TRANSMITTED)
    out["pcie_receive"] = fields.get(PCIE_RECEIVED)
    links = _links(gpu)
    states = {link: gpu.ask(f"nvlink.{link}", "nvmlDeviceGetNvLinkState", link) for link in links}
    known = {link: int(state != 0) for link, state in states.items() if state is not None}
    active = [link for link, state in known.items() if state]
    out["nvlink_links"] = {"active": len(active), "inactive": len(known) - len(active)} if known else None
    out["nvlink_up"] = _by_link(known) if options.per_link and known else None
    _read_speed(gpu, options, active, out)
    newest_first = architecture_of(gpu) >= BLACKWELL
    for key, sources in (("nvlink_transmit", _TRANSMITTED), ("nvlink_receive", _RECEIVED)):
        _read_traffic(gpu, key, sources[::-1] if newest_first else sources, options, active, out)


def read_slow(gpu: Gpu, options: Options, out: dict[str, Any]) -> None:
    """Read errors, and what the links could be."""
    generation = gpu.ask("pcie.generation_max", "nvmlDeviceGetMaxPcieLinkGeneration", convert=small)
    width = gpu.ask("pcie.width_max", "nvmlDeviceGetMaxPcieLinkWidth", convert=small)
    out["pcie_generation_max"] = None if generation is None else {"max": generation}
    out["pcie_width_max"] = None if width is None else {"max": width}
    kinds = {**_PCIE_ERRORS, **_PCIE_ERRORS_DETAILS} if options.details else _PCIE_ERRORS
    fields = _counts(gpu, (_PCIE_REPLAY_ROLLOVERS, _PCIE_L0_TO_RECOVERY, *kinds))
    out["pcie_replays"] = gpu.ask("pcie.replays", "nvmlDeviceGetPcieReplayCounter", convert=small)
    out["pcie_replay_rollovers"] = fields.get(_PCIE_REPLAY_ROLLOVERS) if options.details else None
    out["pcie_l0_to_recovery"] = fields.get(_PCIE_L0_TO_RECOVERY) if options.details else None
    errors = {name: fields[field] for field, name in kinds.items() if field in fields}
    out["pcie_errors"] = errors or None
    links = [link for link in _links(gpu) if not gpu.lacks(f"nvlink.{link}")]
    out["nvlink_errors"] = _read_errors(gpu, options, links) if links else None
    _read_fabric(gpu, out)
    c2c = _counts(gpu, (_C2C_COUNT, *_C2C_ERRORS))
    out["c2c_links"] = c2c.get(_C2C_COUNT) or None  # 0 where there is no Grace beside it
    errors = {name: c2c[field] for field, name in _C2C_ERRORS.items() if field in c2c}
    out["c2c_errors"] = errors if errors and out["c2c_links"] else None


class PcieSampling:
    """PCIe traffic where there is no counter, from 20 ms in every pass: an estimate, and it blocks for as long.

    Attributes:
        totals: Bytes by direction, as far as estimated.
    """

    __slots__ = ("totals", "_last")

    def __init__(self) -> None:
        self.totals = {"pcie_transmit": 0.0, "pcie_receive": 0.0}
        self._last: float | None = None

    def read(self, gpu: Gpu, out: dict[str, Any]) -> None:
        """Measure both directions, and take them to have been so since the last time."""
        for direction, key in enumerate(self.totals):
            kilobytes = gpu.ask(f"{key}.rate", "nvmlDeviceGetPcieThroughput", direction, convert=small)
            if kilobytes is None:
                out[f"{key}_sampled"] = None
                continue
            if self._last is not None:
                self.totals[key] += kilobytes * 1000 * (gpu.now - self._last)
            out[f"{key}_sampled"] = self.totals[key]
        self._last = gpu.now


def _links(gpu: Gpu) -> range:
    number = _counts(gpu, (_NVLINK_COUNT,)).get(_NVLINK_COUNT)
    if number is not None and number > 0:
        return range(min(number, _MOST_LINKS))
    # Drivers that do not tell the number say of each link that is not there that it is not supported.
    return range(_LINKS_OF_OLD_DRIVERS)


def _read_speed(gpu: Gpu, options: Options, active: list[int], out: dict[str, Any]) -> None:
    asked = active if options.per_link else active[:1]
    fields = _counts(gpu, [(_NVLINK_SPEED, link) for link in asked])
    speeds = {
        field[1]: speed * 1e6
        for field, speed in fields.items()
        if isinstance(field, tuple) and speed < _BEYOND_SPEED
    }
    if not speeds and active:
        common = _counts(gpu, (_NVLINK_SPEED_COMMON,)).get(_NVLINK_SPEED_COMMON)
        speeds = {} if common is None or common >= _BEYOND_SPEED else dict.fromkeys(asked, common * 1e6)
    if not options.per_link:
        out["nvlink_speed"] = {"": min(speeds.values())} if speeds else None
    else:
        out["nvlink_speed"] = _by_link(speeds) or None


def _read_traffic(
    gpu: Gpu,
    key: str,
    sources: Iterable[tuple[int, str]],
    options: Options,
    active: list[int],
    out: dict[str, Any],
) -> None:
    chosen = ""
    for field, unit in sources:
        values = _over_links(gpu, field, active, per_link=options.per_link)
        if values:
            out[f"{key}_{unit}"], chosen = values, unit
            break
    for _, unit in sources:
        if unit != chosen:
            out[f"{key}_{unit}"] = None


def _read_errors(gpu: Gpu, options: Options, links: list[int]) -> dict[str, int] | None:
    found: dict[str, int] = {}
    kinds = _ERRORS_FIFTH if architecture_of(gpu) >= BLACKWELL else _ERRORS
    for kind, fields in kinds.items():
        for field in fields:
            if field in _OVER_ALL_LINKS:
                total = _counts(gpu, (field,)).get(field)
                values = {} if total is None else {"": total}
            else:
                values = _over_links(gpu, field, links, per_link=options.per_link)
            if values:
                found.update((f"{link}/{kind}", number) for link, number in values.items())
                break
        else:
            for link in links if kind in _ERROR_COUNTERS else ():
                number = gpu.ask(
                    f"nvlink.{link}.{kind}",
                    "nvmlDeviceGetNvLinkErrorCounter",
                    link,
                    _ERROR_COUNTERS[kind],
                    convert=count,
                )
                if number is not None:
                    found[f"{link}/{kind}"] = number
    return found or None


def _over_links(gpu: Gpu, field: int, links: list[int], *, per_link: bool) -> dict[str, int]:
    """A field of links: the sum in one value where the driver offers it, else one value by link."""
    together = (field, ALL_LINKS)
    if not per_link:
        total = _counts(gpu, (together,)).get(together)
        if total is not None:
            return {"": total}
        if not gpu.lacks(f"field.{field}.{ALL_LINKS}"):
            return {}  # failed this time; the links one by one would be another series
    fields = _counts(gpu, [(field, link) for link in links])
    return {str(each[1]): number for each, number in fields.items() if isinstance(each, tuple)}


def _read_fabric(gpu: Gpu, out: dict[str, Any]) -> None:
    structure = getattr(gpu.library.binding, "c_nvmlGpuFabricInfo_v2_t", None)
    if structure is None:
        return
    info = structure()
    if gpu.ask("fabric", "nvmlDeviceGetGpuFabricInfoV", ctypes.byref(info)) is None or info.state == 0:
        out["fabric_state"] = out["fabric_status"] = out["fabric"] = None
        return
    out["fabric_state"] = info.state
    out["fabric_status"] = info.status
    cluster = _uuid(bytes(info.clusterUuid).hex())
    out["fabric"] = {f"{cluster}/{info.cliqueId}": 1} if any(info.clusterUuid) else None


def _uuid(digits: str) -> str:
    """As nvidia-smi writes it."""
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _counts(gpu: Gpu, wanted: Iterable[Field]) -> dict[Field, int]:
    found: dict[Field, int] = {}
    for field, number in gpu.fields(wanted).items():
        try:
            found[field] = count(int(number))
        except GarbageError:  # noqa: PERF203 - one wrong number must not cost the others
            gpu.library.count_error("nvmlDeviceGetFieldValues", "garbage")
    return found


def _by_link(values: dict[int, Any]) -> dict[str, Any]:
    return {str(link): value for link, value in values.items()}
