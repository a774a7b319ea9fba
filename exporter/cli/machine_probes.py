"""The questions of `check` about the machine: memory, control groups, energy counters, NVIDIA's driver.

Used by `check` only, each on a thread of its own with a deadline. Reads, creates nothing; no device is
opened. What a machine does not have is a normal state, and its families are absent.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from exporter.cli.configuration import Configuration
from exporter.cli.finding import Finding, Surroundings, bytes_text

# Docker gives a container 64 MiB of /dev/shm, which DataLoader workers fill first.
SMALL_SHM_BYTES = 1 << 30


def shared_memory(configuration: Configuration, around: Surroundings) -> Iterator[Finding]:
    """How large /dev/shm is."""
    del configuration
    subject, remedy = (
        "shared memory",
        "give the container more: --shm-size=8g, or a volume with medium: Memory",
    )
    try:
        space = os.statvfs(around.shm)
    except OSError as error:
        yield Finding(
            "warn", subject, f"{around.shm}: {error.strerror}", "set --feed.dir and EXPORTER_FEED_DIR"
        )
        return
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    small = size < SMALL_SHM_BYTES
    found = f"{around.shm} has {bytes_text(size)}, {bytes_text(free)} free"
    yield Finding("warn" if small else "ok", subject, found, remedy if small else "")


def cgroup(configuration: Configuration, around: Surroundings) -> Iterator[Finding]:
    """Which version of control groups there is."""
    del configuration
    root = around.sys / "fs/cgroup"
    if (root / "cgroup.controllers").exists():
        yield Finding("ok", "cgroup", "version 2")
    elif root.is_dir() and any(root.iterdir()):
        yield Finding("ok", "cgroup", "version 1")
    else:
        yield Finding("warn", "cgroup", f"none at {root}", "families of the container's limits are absent")


def rapl(configuration: Configuration, around: Surroundings) -> Iterator[Finding]:
    """Whether the CPU's energy counters can be read."""
    del configuration
    counters = sorted((around.sys / "class/powercap").glob("*rapl*/energy_uj"))
    if not counters:
        yield Finding("ok", "rapl", "no energy counters on this machine; CPU energy is absent")
        return
    unreadable = [path for path in counters if not os.access(path, os.R_OK)]
    if unreadable:
        remedy = f"for root only by default; let the exporter read it: chmod a+r {unreadable[0]}"
        yield Finding(
            "warn", "rapl", f"{len(unreadable)} of {len(counters)} energy counters are unreadable", remedy
        )
        return
    yield Finding("ok", "rapl", f"{len(counters)} energy counters are readable")


def nvidia(configuration: Configuration, around: Surroundings) -> Iterator[Finding]:
    """Whether there are a driver and its Python binding, and whether they are used; the driver is not touched."""
    if not configuration.gpu.enabled:
        yield Finding("ok", "nvidia", "gpu.enabled is false; GPU families are absent")
        return
    if configuration.gpu.replay is not None:
        replayed = (
            f"the described machine {configuration.gpu.replay} is played (gpu.replay): not this one's GPUs"
        )
        yield Finding("ok", "nvidia", replayed)
        return
    has_binding = importlib.util.find_spec("pynvml") is not None
    try:
        lines = (around.proc / "driver/nvidia/version").read_text().splitlines()
    except OSError:
        yield Finding("ok", "nvidia", "no NVIDIA driver here; GPU families are absent")
        return
    driver = lines[0].removeprefix("NVRM version:").strip() if lines else "of unknown version"
    if has_binding:
        yield Finding("ok", "nvidia", f"driver {driver}; pynvml can be imported")
    else:
        remedy = "install it for the exporter's Python: pip install nvidia-ml-py"
        yield Finding("warn", "nvidia", f"driver {driver}, but no pynvml", remedy)


MACHINE_PROBES = (shared_memory, cgroup, rapl, nvidia)
