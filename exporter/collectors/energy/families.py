"""The families of CPU and memory energy.

Used in the sidecar by the RAPL collector. The label `source` stays on every counter, so that a model never hides
in a measured series; of one package only one source counts at a time, so that a sum without it is right.
"""

from __future__ import annotations

from exporter.families import FamilySpec

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
SPECS = (CPU_ENERGY, DRAM_ENERGY, SOC_ENERGY, CPU_POWER, DRAM_POWER, IDLE_POWER)
