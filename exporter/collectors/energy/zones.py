"""RAPL zones: which energy registers the CPUs of this machine have, and what each stands for.

Used in the sidecar by the RAPL collector. /sys/class/powercap comes in, zones go out. No threads, no state.

    intel-rapl:0        name package-0     the CPU, its cores and caches          counted
    intel-rapl:0:0      name core          a part of it                           left out
    intel-rapl:0:1      name dram          the memory behind it, not part of it   counted
    intel-rapl:1        name psys          the whole platform                     left out
    intel-rapl-mmio:0   name package-0     the same package, by another way in    left out

AMD's CPUs have packages and cores under the same names, and no memory. A package with several dies is
`package-0-die-1`; on some (Threadripper, first EPYCs) every die shows the whole package's register: see
`RaplCollector`.

Source: Documentation/power/powercap/powercap.rst, drivers/powercap/intel_rapl_common.c.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from exporter.collectors.kernel_files import list_directory, parse_count, read_existing, source
from exporter.families import Collected

WAYS_IN = ("intel-rapl", "intel-rapl-tpmi", "intel-rapl-mmio")
"""Kernel drivers, the preferred one first."""

_ZONE = re.compile(r"(intel-rapl(?:-tpmi|-mmio)?)((?::[0-9]{1,4}){1,3})", re.ASCII)
_PACKAGE = re.compile(r"package-([0-9]{1,4})(-die-[0-9]{1,4})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Zone:
    """One energy register.

    Attributes:
        path: Its directory.
        key: The kernel's name of it, which stays the same over reboots.
        kind: A package, or its memory.
        name: `package-0`, `dram`.
        package: `0`, `0-die-1`.
        socket: `0`; dies of one socket may show the same register.
        range_joules: Where it wraps.
    """

    path: Path
    key: str
    kind: Literal["package", "dram"]
    name: str
    package: str
    socket: str
    range_joules: float

    @property
    def device(self) -> str:
        """The label of families that span CPUs and GPUs."""
        return f"package{self.package}"


def find_zones(sys: Path, collected: Collected) -> list[Zone]:
    """Find all zones that count, each once; what cannot be understood is a problem of the pass.

    Raises:
        CollectError: The directory exists and cannot be listed.
    """
    root = sys / "class/powercap"
    keys = [found for found in map(_ZONE.fullmatch, list_directory(root)) if found]
    keys.sort(key=lambda found: (WAYS_IN.index(found[1]), [int(part) for part in found[2].split(":")[1:]]))
    if not keys:
        collected.unsupported.append(
            f"no energy registers in {root} (a virtual machine, or no driver for this CPU)"
        )
    elif not any((root / found[0] / "name").exists() for found in keys):
        collected.unsupported.append(
            f"{root} leads nowhere: the container runtime masks /sys/devices/virtual/powercap; run the exporter on"
            " the host, or mount that directory and give the container the right to read it"
        )
        return []
    zones: dict[str, Zone] = {}
    taken: dict[tuple[str, str], str] = {}
    for found in keys:
        with source(collected, root / found[0]):
            zone = _zone(root, found[0], zones)
            # A register that another driver shows too is the same register.
            if zone is not None and taken.setdefault((zone.package, zone.name), found[1]) == found[1]:
                zones[zone.key] = zone
    return _with_unique_packages(zones)


def _zone(root: Path, key: str, zones: dict[str, Zone]) -> Zone | None:
    path = root / key
    name = read_existing(path / "name").strip()
    package = _PACKAGE.fullmatch(name)
    parent = zones.get(key.rpartition(":")[0])
    if package is None and (name != "dram" or parent is None):
        return None  # core, uncore, psys: in or around a package
    text = read_existing(path / "max_energy_range_uj").strip()
    range_joules = parse_count(text, path / "max_energy_range_uj") / 1e6
    if package is not None:
        number = package[1] + (package[2] or "")
        return Zone(path, key, "package", name, number, package[1], range_joules)
    assert parent is not None  # noqa: S101 - else it has returned
    return Zone(path, key, "dram", name, parent.package, parent.socket, range_joules)


def _with_unique_packages(zones: dict[str, Zone]) -> list[Zone]:
    """Two zones of one name would be one series: the later ones get the kernel's number."""
    seen: set[tuple[str, str]] = set()
    unique: list[Zone] = []
    for zone in zones.values():
        each = zone
        if (zone.package, zone.name) in seen:
            number = zone.key.partition(":")[2].replace(":", "-")
            each = replace(zone, package=f"{zone.package}-zone-{number}")
        seen.add((each.package, each.name))
        unique.append(each)
    return unique
