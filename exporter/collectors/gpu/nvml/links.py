"""What connects a GPU: PCIe and NVLink.

Used in the NVML child. Bytes leave as NVML counts them (KiB for NVLinks before the fifth generation). A port that is not
in use answers "not supported" for fields that work on its neighbours, so every link is remembered by itself. The bytes of
PCIe are in `integrals`: NVML's own counters (fields 197, 198) are registers of 32 bits, which wrap every 72 ms on a busy link.
"""

from __future__ import annotations

from exporter.collectors.gpu.nvml.device import ALL_LINKS, BLACKWELL, Device, Out

_PCIE_ERRORS = {173: "correctable", 179: "non_fatal", 180: "fatal"}
_NVLINK_COUNT = 91
_MOST_LINKS = 36
_LINKS_OF_OLD_DRIVERS = 18

# Field, unit. The fifth generation has silently dead counters under the old ids.
_TRAFFIC = {
    "nvlink_transmit": ((138, "kibibytes"), (202, "bytes")),
    "nvlink_receive": ((139, "kibibytes"), (204, "bytes")),
}

_OVER_ALL_LINKS = {38: "crc_flit", 45: "crc_data", 160: "ecc"}
"""Errors that are sums over the links already."""

_ERRORS = {161: "replay", 162: "recovery", 163: "crc"}
_ERRORS_OF_OLD_DRIVERS = {52: "replay", 59: "recovery"}
"""The same as sums."""

_ERRORS_FIFTH = dict(
    enumerate(
        (
            *("malformed_packet", "buffer_overrun", "receive", "receive_remote", "receive_general"),
            *("link_integrity", "transmit_discard", "recovery_successful", "recovery_failed", "recovery"),
        ),
        start=206,
    )
)


class Links:
    """The links of one GPU; `traffic` tells whether NVLink's own counters are read."""

    def __init__(self, device: Device) -> None:
        self.traffic = False
        self._device = device
        self._active: list[int] = []

    def read_medium(self, out: Out) -> None:
        """Read the traffic of NVLink."""
        newest_first = self._device.architecture() >= BLACKWELL
        self.traffic = False
        for key, sources in _TRAFFIC.items():
            out.update((f"{key}_{unit}", None) for _, unit in sources)
            for field, unit in sources[::-1] if newest_first else sources:
                values = self._bytes(field)
                if values:
                    out[f"{key}_{unit}"] = values
                    self.traffic = True
                    break

    def read_slow(self, out: Out) -> None:
        """Read which links there are, and their errors."""
        device = self._device
        out["pcie_errors_total"] = device.by_kind(_PCIE_ERRORS) or None
        number = device.counts((_NVLINK_COUNT,)).get(_NVLINK_COUNT)
        # Drivers that do not tell the number say of each link that is not there that it is not supported.
        links = range(min(number, _MOST_LINKS) if number else _LINKS_OF_OLD_DRIVERS)
        states = {link: device.ask(f"nvlink.{link}", "nvmlDeviceGetNvLinkState", link) for link in links}
        known = {link: state != 0 for link, state in states.items() if state is not None}
        self._active = [link for link, active in known.items() if active]
        active = len(self._active)
        out["nvlink_links"] = {"active": active, "inactive": len(known) - active} if known else None
        there = [link for link in links if not device.lacks(f"nvlink.{link}")]
        out["nvlink_errors_total"] = self._errors(there) or None if there else None

    def _errors(self, links: list[int]) -> dict[str, int]:
        """By link ("" for all together) and kind."""
        device = self._device
        fifth = device.architecture() >= BLACKWELL
        found: dict[str, int] = {}
        for field, kind in (_ERRORS_FIFTH if fifth else _ERRORS).items():
            of_links = self._by_link(field, links)
            found.update((f"{link}/{kind}", number) for link, number in of_links.items())
        if not fifth:
            seen = {key.partition("/")[2] for key in found}
            sums = {**_OVER_ALL_LINKS, **_ERRORS_OF_OLD_DRIVERS}
            totals = device.by_kind({field: kind for field, kind in sums.items() if kind not in seen})
            found.update((f"/{kind}", number) for kind, number in totals.items())
        return found

    def _bytes(self, field: int) -> dict[str, int]:
        """The sum over the links in one value where the driver offers it, else one value by link."""
        together = (field, ALL_LINKS)
        total = self._device.counts((together,)).get(together)
        if total is not None:
            return {"": total}
        if not self._device.lacks(f"field.{field}.{ALL_LINKS}"):
            return {}  # failed this time; the links one by one would be another series
        return self._by_link(field, self._active)

    def _by_link(self, field: int, links: list[int]) -> dict[str, int]:
        found = self._device.counts([(field, link) for link in links])
        return {str(each[1]): number for each, number in found.items() if isinstance(each, tuple)}
