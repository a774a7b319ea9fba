"""CPU topology: which logical CPUs are one physical core, and which are one package.

Used in the sidecar by the collectors that count cores or read what siblings share. A CPU's directory of
/sys/devices/system/cpu comes in. Pure functions, no threads.
"""

from __future__ import annotations

from pathlib import Path

from exporter.collectors.kernel_files import read_file


def core_of(cpu: Path) -> str | None:
    """Identify the core that a CPU belongs to; None when the kernel does not say (it is offline).

    Raises:
        CollectError: The kernel's answer cannot be read.
    """
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second is the name before Linux 5.3
        text = (read_file(cpu / "topology" / name) or "").strip()
        if text:
            return text
    return None


def package_of(cpu: Path) -> str | None:
    """Identify the package that a CPU belongs to; None when the kernel does not say.

    Raises:
        CollectError: The kernel's answer cannot be read.
    """
    return (read_file(cpu / "topology" / "physical_package_id") or "").strip() or None
