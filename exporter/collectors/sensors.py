"""Sensors: temperatures and fans of the machine.

Used in the sidecar. hwmon of /sys comes in, on machines without its thermometers the thermal zones. No
threads, no state. Asking some chips (disks, network cards) takes milliseconds: a subject for a slow interval.

`chip` is the driver's name and the device's, which unlike hwmon's own numbers stay the same over reboots.

Source: Documentation/hwmon/sysfs-interface.rst.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import (
    FILE_REASONS,
    NOT_OFFERED,
    failure,
    numbered_entries,
    parse_count,
    parse_signed,
    read_file,
)

TEMPERATURE = FamilySpec(
    "host_temperature_celsius",
    "gauge",
    "Temperature of a sensor; those of single CPU cores only with per_core. Absent where there are no sensors (virtual machines) and while one has no reading.",
    ("chip", "sensor"),
    unit="celsius",
    source="/sys/class/hwmon/hwmon*/temp*_input, else /sys/class/thermal/thermal_zone*/temp",
)
FAN = FamilySpec(
    "host_fan_rpm",
    "gauge",
    "Turns of a fan per minute. Absent where there are no fans to be seen.",
    ("chip", "sensor"),
    source="/sys/class/hwmon/hwmon*/fan*_input",
)
SPECS = (TEMPERATURE, FAN)

ABSOLUTE_ZERO_CELSIUS = -273.15

_INPUT = re.compile(r"(temp|fan)([0-9]{1,4})_input")
_CORE = re.compile(r"Core [0-9]+")
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]+")


class SensorsCollector:
    """Reads thermometers and fans.

    Args:
        sys: Where sysfs is mounted.
        per_core: Also the thermometers of single CPU cores, of which a large machine has hundreds.
    """

    name = "sensors"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(self, *, sys: Path = Path("/sys"), per_core: bool = False) -> None:
        self._hwmon = sys / "class/hwmon"
        self._thermal = sys / "class/thermal"
        self._per_core = per_core

    def collect(self) -> Collected:
        """Read all sensors once.

        Raises:
            CollectError: None of them could be read.
        """
        draft = Draft()
        readings: dict[str, dict[tuple[str, ...], float]] = {"temp": {}, "fan": {}}
        with draft.part():
            for _, hwmon in numbered_entries(self._hwmon, "hwmon"):
                with draft.part():
                    self._read_chip(draft, hwmon, readings)
        if not readings["temp"]:
            with draft.part():
                self._read_zones(draft, readings["temp"])
        draft.add_family(TEMPERATURE, readings["temp"])
        draft.add_family(FAN, readings["fan"])
        missing = [word for kind, word in (("temp", "thermometers"), ("fan", "fans")) if not readings[kind]]
        if missing and not draft.failed:
            draft.unsupported(f"no {' and no '.join(missing)} in {self._hwmon}")
        return draft.finish()

    def _read_chip(
        self, draft: Draft, hwmon: Path, readings: dict[str, dict[tuple[str, ...], float]]
    ) -> None:
        try:
            inputs = sorted(
                (found[1], int(found[2]))
                for found in (_INPUT.fullmatch(entry.name) for entry in hwmon.iterdir())
                if found
            )
        except OSError as error:
            if error.errno in NOT_OFFERED:
                return
            raise failure(hwmon, error) from error
        chip = _chip_name(hwmon)
        labels = {(kind, number): _label(hwmon / f"{kind}{number}_label") for kind, number in inputs}
        uses = Counter((kind, label) for (kind, _), label in labels.items())
        for kind, number in inputs:
            label = labels[kind, number]
            if _CORE.fullmatch(label) and not self._per_core:
                continue
            own = f"{kind}{number}"
            # Two sensors of one label would be one series.
            sensor = own if not label else f"{label} {own}" if uses[kind, label] > 1 else label
            path = hwmon / f"{own}_input"
            with draft.part():
                text = read_file(path)
                if text is None:
                    continue
                if kind == "fan":
                    readings[kind][chip, sensor] = parse_count(text.strip(), path)
                else:
                    _put_temperature(readings[kind], (chip, sensor), text, path)

    def _read_zones(self, draft: Draft, temperatures: dict[tuple[str, ...], float]) -> None:
        for _, zone in numbered_entries(self._thermal, "thermal_zone"):
            with draft.part():
                text = read_file(zone / "temp")
                if text is not None:
                    sensor = _label(zone / "type") or "temp"
                    _put_temperature(temperatures, (zone.name, sensor), text, zone / "temp")


def _put_temperature(
    temperatures: dict[tuple[str, ...], float], labels: tuple[str, ...], text: str, path: Path
) -> None:
    celsius = parse_signed(text.strip(), path) / 1000
    if celsius > ABSOLUTE_ZERO_CELSIUS:  # 0 K is a driver's way of saying that it does not know
        temperatures[labels] = celsius


def _chip_name(hwmon: Path) -> str:
    driver = _label(hwmon / "name") or hwmon.name
    try:
        device = _printable(os.path.basename(os.readlink(hwmon / "device")))  # noqa: PTH115, PTH119 - the link's text is the name; it need not lead anywhere
    except OSError:  # a chip that is no device, such as a thermal zone's
        return driver if driver == hwmon.name else f"{driver}-{hwmon.name}"
    return device if device.startswith(driver) else f"{driver}-{device}"


def _label(path: Path) -> str:
    return _printable(read_file(path) or "")


def _printable(text: str) -> str:
    return _UNPRINTABLE.sub(" ", text).strip()[:100]
