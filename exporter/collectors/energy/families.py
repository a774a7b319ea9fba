"""The families of CPU and memory energy.

Used in the sidecar by the RAPL collector. The label `source` stays on every counter, so that a model never hides
in a measured series; of one package only one source counts at a time, so that a sum without it is right.
"""

from __future__ import annotations

from exporter.families import family

CPU_ENERGY = family(
    "host_cpu_energy_joules_total",
    "Energy of a CPU package since counting began, over restarts of the exporter; corrected for wraps and resets. Absent without registers, and without the right to read them (root only since Linux 5.10).",
    "/sys/class/powercap/intel-rapl:*/energy_uj; hwmon: power meter CPU of ACPI over time; tdp_model only where configured",
    "package",
    "source",
)
DRAM_ENERGY = family(
    "host_dram_energy_joules_total",
    "Energy of the memory behind a CPU package, likewise. Absent also on CPUs that do not measure it (AMD, desktops).",
    "/sys/class/powercap/intel-rapl:*:*/energy_uj, name dram",
    "package",
    "source",
)
SOC_ENERGY = family(
    "host_soc_energy_joules_total",
    "Energy of what is beside the cores on a chip that tells it apart (Grace), likewise. Absent on all others.",
    "power meter SysIO of ACPI over time",
    "device",
    "source",
)
CPU_POWER = family(
    "host_cpu_power_watts",
    "Mean power of a CPU package between the last two readings. Absent before the second.",
    "energy / time",
    "package",
    "source",
)
DRAM_POWER = family(
    "host_dram_power_watts",
    "Mean power of the memory behind a CPU package between the last two readings. Absent before the second.",
    "energy / time",
    "package",
    "source",
)
IDLE_POWER = family(
    "host_cpu_power_idle_watts",
    "Power of a CPU package without work, by the way in which it is known: config, before_start (tenth percentile while no run was alive), min_seen. A method is absent as long as it knows nothing.",
    "configuration, host_cpu_power_watts",
    "package",
    "method",
)
SPECS = (CPU_ENERGY, DRAM_ENERGY, SOC_ENERGY, CPU_POWER, DRAM_POWER, IDLE_POWER)
