"""The families of CPU and memory energy: what they are, and how registers become samples.

Used in the sidecar by the RAPL collector. The label `source` stays on every counter, so that a model never hides
in a measured series; of one package only one source counts at a time, so that a sum without it is right.
"""

from __future__ import annotations

from collections.abc import Mapping

from exporter.collectors.draft import Draft
from exporter.collectors.family import FamilySpec
from exporter.collectors.power_meters import SOURCE as METER_SOURCE
from exporter.collectors.power_meters import PowerMeter
from exporter.collectors.rapl_zones import Zone

CPU_ENERGY = FamilySpec(
    "host_cpu_energy_joules_total",
    "counter",
    "Energy of a CPU package since counting began, over restarts of the exporter; corrected for wraps and resets. Absent without registers, and without the right to read them (root only since Linux 5.10).",
    ("package", "source"),
    unit="joules",
    source="/sys/class/powercap/intel-rapl:*/energy_uj; hwmon: power meter CPU of ACPI over time; tdp_model only where configured",
)
DRAM_ENERGY = FamilySpec(
    "host_dram_energy_joules_total",
    "counter",
    "Energy of the memory behind a CPU package, likewise. Absent also on CPUs that do not measure it (AMD, desktops).",
    ("package", "source"),
    unit="joules",
    source="/sys/class/powercap/intel-rapl:*:*/energy_uj, name dram",
)
SOC_ENERGY = FamilySpec(
    "host_soc_energy_joules_total",
    "counter",
    "Energy of what is beside the cores on a chip that tells it apart (Grace), likewise. Absent on all others.",
    ("device", "source"),
    unit="joules",
    source="power meter SysIO of ACPI over time",
)
ZONE_ENERGY = FamilySpec(
    "host_energy_zone_joules_total",
    "counter",
    "Energy of a zone that overlaps with others (psys, core, uncore, module), never to be added to them. Absent as the packages' energy is.",
    ("zone", "device", "source"),
    unit="joules",
    source="/sys/class/powercap/intel-rapl:*/energy_uj; power meter Module of ACPI over time",
)
CPU_POWER = FamilySpec(
    "host_cpu_power_watts",
    "gauge",
    "Mean power of a CPU package between the last two readings. Absent before the second.",
    ("package", "source"),
    unit="watts",
    source="energy / time",
)
DRAM_POWER = FamilySpec(
    "host_dram_power_watts",
    "gauge",
    "Mean power of the memory behind a CPU package between the last two readings. Absent before the second.",
    ("package", "source"),
    unit="watts",
    source="energy / time",
)
IDLE_POWER = FamilySpec(
    "host_cpu_power_idle_watts",
    "gauge",
    "Power of a CPU package without work, by the way in which it is known: config, before_start (tenth percentile while no run was alive), min_seen. A method is absent as long as it knows nothing.",
    ("package", "method"),
    unit="watts",
    source="configuration, host_cpu_power_watts",
)
SPECS = (CPU_ENERGY, DRAM_ENERGY, SOC_ENERGY, ZONE_ENERGY, CPU_POWER, DRAM_POWER, IDLE_POWER)


class EnergyBlock:
    """The samples of one pass."""

    def __init__(self) -> None:
        self._samples: dict[FamilySpec, dict[tuple[str, ...], float]] = {spec: {} for spec in SPECS}

    def add(self, zone: Zone, source: str, joules: float | None, watts: float | None) -> None:
        """Add a zone; None is what is not known, or may not be shown."""
        if zone.kind == "package":
            self.add_package(zone.package, source, joules, watts)
        elif zone.kind == "dram":
            self._put(DRAM_ENERGY, joules, zone.package, source)
            self._put(DRAM_POWER, watts, zone.package, source)
        else:
            self._put(ZONE_ENERGY, joules, zone.name, zone.device, source)

    def add_package(self, package: str, source: str, joules: float | None, watts: float | None) -> None:
        """Add a package, or what stands for all of them."""
        self._put(CPU_ENERGY, joules, package, source)
        self._put(CPU_POWER, watts, package, source)

    def add_meter(self, meter: PowerMeter, *, shown: bool) -> None:
        """Add a socket that tells its power."""
        if meter.watts is None:
            return
        joules = meter.joules if shown else None
        if meter.kind == "cpu":
            self.add_package(meter.socket, METER_SOURCE, joules, meter.watts)
        elif meter.kind == "soc":
            self._put(SOC_ENERGY, joules, meter.device, METER_SOURCE)
        else:
            self._put(ZONE_ENERGY, joules, meter.kind, meter.device, METER_SOURCE)

    def add_idle(self, package: str, watts_by_method: Mapping[str, float]) -> None:
        """Add what a package draws without work."""
        for method, watts in watts_by_method.items():
            self._put(IDLE_POWER, watts, package, method)

    def _put(self, spec: FamilySpec, value: float | None, *labels: str) -> None:
        if value is not None:
            self._samples[spec][labels] = value

    def put_into(self, draft: Draft) -> None:
        """Hand everything over."""
        for spec, samples in self._samples.items():
            draft.add_family(spec, samples)
