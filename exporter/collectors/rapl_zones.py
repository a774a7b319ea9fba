"""RAPL zones: which energy registers the CPUs of this machine have, and what each stands for.

Used in the sidecar by the RAPL collector. /sys/class/powercap comes in, zones go out. No threads, no state.

    intel-rapl:0        name package-0     the CPU, its cores and caches          counted
    intel-rapl:0:0      name core          a part of it                           overlaps
    intel-rapl:0:1      name dram          the memory behind it, not part of it   counted
    intel-rapl:1        name psys          the whole platform                     overlaps
    intel-rapl-mmio:0   name package-0     the same package, by another way in    left out

AMD's CPUs have packages and cores under the same names, and no memory. A package with several dies is
`package-0-die-1`; on some (Threadripper, first EPYCs) every die shows the whole package's register: see
`RaplCollector`.

Source: Documentation/power/powercap/powercap.rst, drivers/powercap/intel_rapl_common.c.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exporter.collectors.draft import Draft
from exporter.collectors.kernel_files import NOT_OFFERED, failure, parse_count, read_file, refuse

WAYS_IN = ("intel-rapl", "intel-rapl-tpmi", "intel-rapl-mmio")
"""Kernel drivers, the preferred one first."""

_ZONE = re.compile(r"(intel-rapl(?:-tpmi|-mmio)?)((?::[0-9]{1,4}){1,3})", re.ASCII)
_PACKAGE = re.compile(r"package-([0-9]{1,4})(-die-[0-9]{1,4})?", re.ASCII)
_NAME = re.compile(r"[a-z0-9_-]{1,40}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Zone:
    """One energy register.

    Attributes:
        path: Its directory.
        key: The kernel's name of it, which stays the same over reboots.
        kind: A package, its memory, or something that overlaps with others.
        name: `package-0`, `dram`, `core`, `psys` …
        package: `0`, `0-die-1`; "" for a zone above all packages.
        socket: `0`; dies of one socket may show the same register.
        range_joules: Where it wraps.
    """

    path: Path
    key: str
    kind: Literal["package", "dram", "other"]
    name: str
    package: str
    socket: str
    range_joules: float

    @property
    def device(self) -> str:
        """The label of families that span CPUs and GPUs."""
        return f"package{self.package}" if self.package else "machine"


def find_zones(sys: Path, draft: Draft) -> list[Zone]:
    """Find all zones, each once; what cannot be understood is a problem of the draft."""
    root = sys / "class/powercap"
    try:
        names = sorted(entry.name for entry in root.iterdir())
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise failure(root, error) from error
        names = []
    keys = [found for found in (_ZONE.fullmatch(name) for name in names) if found]
    keys.sort(key=lambda found: (WAYS_IN.index(found[1]), [int(part) for part in found[2].split(":")[1:]]))
    if not keys:
        draft.unsupported(f"no energy registers in {root} (a virtual machine, or no driver for this CPU)")
        return []
    zones: dict[str, Zone] = {}
    taken: dict[tuple[str, str], str] = {}
    hidden = False
    for found in keys:
        with draft.part():
            zone = _zone(root, found[0], zones)
            if zone is None:
                hidden = True
                continue
            # A register that another driver shows too is the same register.
            way_in = found[1]
            if taken.setdefault((zone.package, zone.name), way_in) == way_in:
                zones[zone.key] = zone
    if hidden and not zones:
        draft.unsupported(
            f"{root} leads nowhere: the container runtime masks /sys/devices/virtual/powercap; run the exporter on"
            " the host, or mount that directory and give the container the right to read it"
        )
    return _with_unique_packages(zones)


def _zone(root: Path, key: str, zones: dict[str, Zone]) -> Zone | None:
    path = root / key
    name = (read_file(path / "name") or "").strip()
    if not name:
        return None
    if not _NAME.fullmatch(name):
        refuse(name, (path / "name",), "the name of a zone")
    text = (read_file(path / "max_energy_range_uj") or "").strip()
    range_joules = parse_count(text, path / "max_energy_range_uj") / 1e6
    package = _PACKAGE.fullmatch(name)
    if package is not None:
        number = package[1] + (package[2] or "")
        return Zone(path, key, "package", name, number, package[1], range_joules)
    parent = zones.get(key.rpartition(":")[0])
    above, socket = ("", "") if parent is None else (parent.package, parent.socket)
    kind: Literal["dram", "other"] = "dram" if name == "dram" and parent is not None else "other"
    return Zone(path, key, kind, name, above, socket, range_joules)


def _with_unique_packages(zones: dict[str, Zone]) -> list[Zone]:
    """Two zones of one name would be one series: the later ones get the kernel's number."""
    seen: set[tuple[str, str]] = set()
    unique: list[Zone] = []
    for zone in zones.values():
        each = zone
        if (zone.package, zone.name) in seen:
            number = zone.key.partition(":")[2].replace(":", "-")
            each = Zone(
                zone.path,
                zone.key,
                zone.kind,
                zone.name,
                f"{zone.package}-zone-{number}",
                zone.socket,
                zone.range_joules,
            )
        seen.add((each.package, each.name))
        unique.append(each)
    return unique
