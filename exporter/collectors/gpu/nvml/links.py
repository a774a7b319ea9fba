"""What connects a GPU: PCIe, NVLink and its fabric.

Used in the NVML child. Bytes leave as NVML counts them (KiB for NVLinks before the fifth generation). A port that is not
in use answers "not supported" for fields that work on its neighbours, so every link is remembered by itself. The bytes of
PCIe are in `gpm`: NVML's own counters (fields 197, 198) are registers of 32 bits, which wrap every 72 ms on a busy link.
"""

from __future__ import annotations

from exporter.collectors.gpu.nvml.device import ALL_LINKS, BLACKWELL, Device, Out
from exporter.collectors.gpu.nvml.units import count
from exporter.collectors.gpu.options import GpuOptions

_PCIE_ERRORS = {173: "correctable", 179: "non_fatal", 180: "fatal"}
_NVLINK_COUNT = 91
_MOST_LINKS = 36
_LINKS_OF_OLD_DRIVERS = 18

# Field, unit. The fifth generation has silently dead counters under the old ids.
_TRAFFIC = {
    "nvlink_transmit": ((138, "kibibytes"), (202, "bytes")),
    "nvlink_receive": ((139, "kibibytes"), (204, "bytes")),
}

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


class Links:
    """The links of one GPU."""

    def __init__(self, device: Device, options: GpuOptions) -> None:
        self._device = device
        self._options = options
        self._active: list[int] = []

    def read_medium(self, out: Out) -> None:
        """Read the traffic of NVLink."""
        newest_first = self._device.architecture() >= BLACKWELL
        for key, sources in _TRAFFIC.items():
            out.update((f"{key}_{unit}", None) for _, unit in sources)
            for field, unit in sources[::-1] if newest_first else sources:
                values = self._over_links(field, self._active)
                if values:
                    out[f"{key}_{unit}"] = values
                    break

    def read_slow(self, out: Out) -> None:
        """Read which links there are, and their errors."""
        device, options = self._device, self._options
        found = device.counts(_PCIE_ERRORS)
        errors = {name: found[field] for field, name in _PCIE_ERRORS.items() if field in found}
        out["pcie_errors"] = errors or None
        number = device.counts((_NVLINK_COUNT,)).get(_NVLINK_COUNT)
        # Drivers that do not tell the number say of each link that is not there that it is not supported.
        links = range(min(number, _MOST_LINKS) if number else _LINKS_OF_OLD_DRIVERS)
        states = {link: device.ask(f"nvlink.{link}", "nvmlDeviceGetNvLinkState", link) for link in links}
        known = {link: int(state != 0) for link, state in states.items() if state is not None}
        self._active = [link for link, state in known.items() if state]
        active = len(self._active)
        out["nvlink_links"] = {"active": active, "inactive": len(known) - active} if known else None
        up = {str(link): state for link, state in known.items()}
        out["nvlink_up"] = up if options.per_link and known else None
        there = [link for link in links if not device.lacks(f"nvlink.{link}")]
        out["nvlink_errors"] = self._errors(there) if there else None
        fabric = device.filled("fabric", "nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v2_t")
        out["fabric_state"] = None if fabric is None else fabric.state or None

    def _errors(self, links: list[int]) -> dict[str, int] | None:
        device = self._device
        found: dict[str, int] = {}
        types = _ERRORS_FIFTH if device.architecture() >= BLACKWELL else _ERRORS
        for name, fields in types.items():
            for field in fields:
                if field in _OVER_ALL_LINKS:
                    total = device.counts((field,)).get(field)
                    values = {} if total is None else {"": total}
                else:
                    values = self._over_links(field, links)
                if values:
                    found.update((f"{link}/{name}", number) for link, number in values.items())
                    break
            else:
                for link in links if name in _ERROR_COUNTERS else ():
                    call, which = "nvmlDeviceGetNvLinkErrorCounter", _ERROR_COUNTERS[name]
                    number = device.ask(f"nvlink.{link}.{name}", call, link, which, convert=count)
                    if number is not None:
                        found[f"{link}/{name}"] = number
        return found or None

    def _over_links(self, field: int, links: list[int]) -> dict[str, int]:
        """A field of links: the sum in one value where the driver offers it, else one value by link."""
        together = (field, ALL_LINKS)
        if not self._options.per_link:
            total = self._device.counts((together,)).get(together)
            if total is not None:
                return {"": total}
            if not self._device.lacks(f"field.{field}.{ALL_LINKS}"):
                return {}  # failed this time; the links one by one would be another series
        found = self._device.counts([(field, link) for link in links])
        return {str(each[1]): number for each, number in found.items() if isinstance(each, tuple)}
