"""PowerMeters: the energy of sockets that tell their power only, as NVIDIA's Grace does.

Used in the sidecar by the RAPL collector, within its pass. ACPI power meters of /sys/class/hwmon come in; readings
of energy go out, power integrated over time (trapezoids) and published with source="hwmon". No threads.

    CPU Power Socket 0       the cores                              counted: cpu, package 0
    SysIO Power Socket 0     what is beside them on the chip        counted: soc, socket0
    Module Power Socket 0    the whole module, memory included      left out: overlaps
    Grace Power Socket 0     the first two together                 left out

The meters average over 50 ms and more, and are read every few seconds: short peaks between two readings are missed,
which a register would have counted.

Source: NVIDIA Grace Performance Tuning Guide, "Power and Thermals"; Documentation/hwmon/acpi_power_meter.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from exporter.collectors.energy.counter import LONGEST_SECONDS
from exporter.collectors.job import EnergyReading
from exporter.collectors.keeping import Rows
from exporter.collectors.kernel_files import numbered_entries, parse_count, read_file, refuse, source
from exporter.errors import CollectError
from exporter.families import Collected

SOURCE = "hwmon"
MAX_WATTS = 4000.0
"""More than any module draws."""

_NAME = re.compile(r"(CPU|SysIO) Power Socket ([0-9]{1,3})", re.ASCII)
_Kind = Literal["cpu", "soc"]
_KINDS: Mapping[str, _Kind] = {"CPU": "cpu", "SysIO": "soc"}


@dataclass(slots=True, eq=False)
class PowerMeter:
    """One meter.

    Attributes:
        path: Its directory.
        kind: What it measures.
        socket: The socket's number.
        name: What the machine calls it.
        joules: Power integrated since counting began.
        watts: The last reading; None while there is none.
        gaps: Time without a reading, by reason.
    """

    path: Path
    kind: _Kind
    socket: str
    name: str
    joules: float = 0.0
    watts: float | None = None
    gaps: dict[str, float] = field(default_factory=lambda: {"permission": 0.0, "error": 0.0})
    _before: tuple[float, float] | None = None  # monotonic time, watts

    @property
    def device(self) -> str:
        """The label of families that span CPUs and GPUs."""
        return f"package{self.socket}" if self.kind == "cpu" else f"socket{self.socket}"

    def update(self, now: float, *, since: float) -> None:
        """Add the time since the last reading; the first one, and one after a long pause, only begin.

        Args:
            now: Monotonic time.
            since: Time since the last pass, in which nothing was read if nothing is now.

        Raises:
            CollectError: It cannot be read, or shows what cannot be.
        """
        self.watts = None
        try:
            watts = self._read()
        except CollectError as error:
            self.gaps["permission" if error.reason == "permission" else "error"] += since
            raise
        before, self._before, self.watts = self._before, (now, watts), watts
        if before is not None and 0 < now - before[0] <= LONGEST_SECONDS:
            self.joules += (before[1] + watts) / 2 * (now - before[0])

    def _read(self) -> float:
        path = self.path / "power1_average"
        text = read_file(path)
        if text is None:
            refuse("", (path,), "a number of microwatts")
        watts = parse_count(text.strip(), path) / 1e6
        if watts > MAX_WATTS:
            refuse(text, (path,), f"a power up to {MAX_WATTS:g} W")
        return watts

    def forget(self) -> None:
        """Begin anew with the next reading; the total stays."""
        self._before = self.watts = None


class PowerMeters:
    """All meters of the machine.

    Args:
        sys: Where sysfs is mounted.
    """

    def __init__(self, sys: Path) -> None:
        self._hwmon = sys / "class/hwmon"
        self._meters: dict[tuple[str, str], PowerMeter] = {}

    def __iter__(self) -> Iterator[PowerMeter]:
        return iter(self._meters.values())

    @property
    def measures_cpus(self) -> bool:
        """Whether the power of the CPUs was read in the last pass."""
        return any(meter.kind == "cpu" and meter.watts is not None for meter in self)

    def find(self, collected: Collected, kept: Rows) -> None:
        """Look for meters that are not known yet; they go on from what was kept."""
        with source(collected, self._hwmon):
            for _, hwmon in numbered_entries(self._hwmon, "hwmon"):
                # In the directory of the device, up to the driver's conversion in Linux 6.8.
                for path in (hwmon, hwmon / "device"):
                    with source(collected, path):
                        found = _NAME.fullmatch((read_file(path / "power1_oem_info") or "").strip())
                        if found and (_KINDS[found[1]], found[2]) not in self._meters:
                            meter = PowerMeter(path, _KINDS[found[1]], found[2], found[0])
                            self._meters[meter.kind, meter.socket] = meter
                            self._resume(meter, kept)

    def read(self, collected: Collected, now: float, *, since: float) -> None:
        """Read all of them; one that fails costs itself.

        Args:
            collected: For what goes wrong.
            now: Monotonic time.
            since: Time since the last pass.
        """
        for meter in self:
            with source(collected, meter.path):
                meter.update(now, since=since)

    def rest(self) -> None:
        """Count nothing: another exporter does."""
        for meter in self:
            meter.forget()

    def resume(self, kept: Rows) -> None:
        """Go on from what `rows` has written; what was counted since is added."""
        for meter in self:
            self._resume(meter, kept)

    def rows(self) -> Rows:
        """Write the totals, for a page."""
        return {
            ("meter", meter.kind, meter.socket): (meter.joules, meter.gaps["permission"], meter.gaps["error"])
            for meter in self
        }

    def readings(self, now: float) -> Sequence[EnergyReading]:
        """Give what adds up, for the attribution to runs."""
        return [
            EnergyReading(
                component="cpu" if meter.kind == "cpu" else "soc",
                device=meter.device,
                source=SOURCE,
                measured=True,
                joules=None if meter.watts is None else meter.joules,
                watts=meter.watts,
                at=now,
                name=meter.name,
                index=meter.socket,
                gap_seconds=dict(meter.gaps),
            )
            for meter in self
        ]

    def _resume(self, meter: PowerMeter, kept: Rows) -> None:
        values = kept.get(("meter", meter.kind, meter.socket))
        if values:
            joules, *gaps = (value or 0.0 for value in values)
            meter.joules += joules
            for reason, seconds in zip(meter.gaps, gaps, strict=False):
                meter.gaps[reason] += seconds
