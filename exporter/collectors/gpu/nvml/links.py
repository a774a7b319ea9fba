"""NVLinks of a GPU: state, traffic and errors.

Runs in the NVML child. Traffic is in NVML's unit (KiB before the fifth generation, then bytes). An inactive link
returns "not supported" for fields that active links support, so support is tracked per link.

Several fields, and GPM, count the same bytes or errors from different start values. A failed reading is therefore never replaced by
another source. If a field becomes supported later, it replaces GPM or the sum of a kind of errors, and the sidecar counts its increase
from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exporter.collectors.gpu.nvml.device import BLACKWELL, SUM_OF_LINKS, NvmlDevice, query_name_of
from exporter.collectors.gpu.nvml.readings import Labels, PassReadings

_NVLINK_COUNT_FIELD = 91
_MAX_LINKS = 36
"""Maximum number of links that are read, twice the number of a Blackwell GPU."""
_OLD_DRIVER_LINKS = 18
"""Number of links that are tried on a driver without the number of links."""
_STATE = "nvmlDeviceGetNvLinkState"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficField:
    """Field that counts the traffic of a direction, and its reading."""

    field: int
    reading: str
    direction: str


# The fifth generation has counters under both pairs of ids; the counters under the old ids remain 0.
_TRAFFIC = (
    (
        TrafficField(field=138, reading="nvlink_transmit_kibibytes", direction="transmit"),
        TrafficField(field=139, reading="nvlink_receive_kibibytes", direction="receive"),
    ),
    (
        TrafficField(field=202, reading="nvlink_transmit_bytes", direction="transmit"),
        TrafficField(field=204, reading="nvlink_receive_bytes", direction="receive"),
    ),
)
"""Fields of both directions, before and from the fifth generation."""

# Kinds of errors by field, before the fifth generation.
_SUMMED_ERRORS = {38: "crc_flit", 45: "crc_data", 160: "ecc"}
"""Fields that are sums over the links."""
_ERRORS = {161: "replay", 162: "recovery", 163: "crc"}
"""Fields of a single link."""
_OLD_DRIVER_ERRORS = {52: "replay", 59: "recovery"}
"""Sums over the links that replace the fields of a single link on drivers without them."""

_FIFTH_GENERATION_ERRORS = {
    # Fields of a single link.
    206: "malformed_packet",
    207: "buffer_overrun",
    208: "receive",
    209: "receive_remote",
    210: "receive_general",
    211: "link_integrity",
    212: "transmit_discard",
    213: "recovery_successful",
    214: "recovery_failed",
    215: "recovery",
}


class NvLinks:
    """NVLinks of a GPU."""

    def __init__(self, device: NvmlDevice) -> None:
        self.has_links = False  # True if the GPU has links
        self.has_traffic_counters = False  # True once a traffic field is supported
        self._device = device
        self._active_links: list[int] = []
        self._used_fields: dict[str, TrafficField] = {}  # field that has counted, by direction
        self._kinds_by_link: set[str] = set()  # kinds of errors that a field of a single link has counted

    def read_traffic(self, readings: PassReadings) -> None:
        """Read the bytes sent and received. Of each direction, the first supported field is read."""
        if not self.has_links:
            return
        is_newest_first = self._device.architecture() >= BLACKWELL
        supported_directions = set(self._used_fields)
        for pair in _TRAFFIC[::-1] if is_newest_first else _TRAFFIC:
            fields = [
                source
                for source in pair
                if self._used_fields.get(source.direction) is source
                or source.direction not in supported_directions
            ]
            byte_counts = self._read_byte_counts([source.field for source in fields])
            for source in pair:
                readings.set_all(source.reading, byte_counts.get(source.field, {}))
            for source in fields:
                if byte_counts[source.field]:
                    self._used_fields[source.direction] = source
                if byte_counts[source.field] or not self._is_unsupported(source.field):
                    supported_directions.add(source.direction)
        self.has_traffic_counters = bool(supported_directions)

    def read_states_and_errors(self, readings: PassReadings) -> None:
        """Read the link states and errors."""
        device = self._device
        link_count = device.read_counts((_NVLINK_COUNT_FIELD,)).get(_NVLINK_COUNT_FIELD)
        # Drivers without field 91 return "not supported" for every link that does not exist.
        links = range(min(link_count, _MAX_LINKS) if link_count else _OLD_DRIVER_LINKS)
        states = {link: device.query(f"nvlink.{link}", _STATE, link) for link in links}
        existing_links = [link for link, state in states.items() if state is not None]
        self._active_links = [link for link in existing_links if states[link] != 0]
        self.has_links = bool(existing_links)
        ports_by_state: dict[Labels, float] = {}
        if existing_links:
            active_count = len(self._active_links)
            ports_by_state = {("active",): active_count, ("inactive",): len(existing_links) - active_count}
        readings.set_all("nvlink_links", ports_by_state)
        supported_links = [link for link in links if not device.is_unsupported(f"nvlink.{link}")]
        readings.set_all("nvlink_errors", self._read_errors(supported_links) if supported_links else {})

    def _read_errors(self, links: list[int]) -> dict[Labels, float]:
        """Return the numbers of errors by link ("" for the sum over the links) and kind."""
        device = self._device
        is_fifth_generation = device.architecture() >= BLACKWELL
        errors: dict[Labels, float] = {}
        failed_kinds: set[str] = set()  # of fields of a single link that may have a value in a later pass
        for field, error_kind in (_FIFTH_GENERATION_ERRORS if is_fifth_generation else _ERRORS).items():
            by_link = self._read_by_link(field, links)
            errors.update(((*link, error_kind), count) for link, count in by_link.items())
            if by_link:
                self._kinds_by_link.add(error_kind)
            elif any(not device.is_unsupported(query_name_of((field, link))) for link in links):
                failed_kinds.add(error_kind)
        if not is_fifth_generation:
            other_kinds = self._kinds_by_link | failed_kinds
            sums = {**_SUMMED_ERRORS, **_OLD_DRIVER_ERRORS}
            totals = device.read_counts_by_kind(
                {field: error_kind for field, error_kind in sums.items() if error_kind not in other_kinds}
            )
            errors.update((("", error_kind), count) for error_kind, count in totals.items())
        return errors

    def _is_unsupported(self, field: int) -> bool:
        """Return True if the GPU supports a traffic field neither as a sum nor for any active link."""
        scopes = (SUM_OF_LINKS, *self._active_links)
        return all(self._device.is_unsupported(query_name_of((field, scope))) for scope in scopes)

    def _read_byte_counts(self, fields: Sequence[int]) -> dict[int, dict[Labels, float]]:
        """Return each field as the sum over the links, with the label "". If the driver does not support the sum, return the field by link."""
        sums = self._device.read_counts([(field, SUM_OF_LINKS) for field in fields])
        byte_counts: dict[int, dict[Labels, float]] = {}
        for field in fields:
            total = sums.get((field, SUM_OF_LINKS))
            if total is not None:
                byte_counts[field] = {("",): total}
            elif self._device.is_unsupported(query_name_of((field, SUM_OF_LINKS))):
                byte_counts[field] = self._read_by_link(field, self._active_links)
            else:
                # The sum failed in this pass only. Values by link would belong to a different counter.
                byte_counts[field] = {}
        return byte_counts

    def _read_by_link(self, field: int, links: list[int]) -> dict[Labels, float]:
        """Return the values of a field by the label of the link, such as ("3",). Links without a value are omitted."""
        counts = self._device.read_counts([(field, link) for link in links])
        return {(str(link),): counts[field, link] for link in links if (field, link) in counts}
