"""Compute processes of a GPU: their memory and their share of the SMs.

Runs in the NVML child. Process ids are in the host's pid namespace, as reported by the driver. They are sent to the
sidecar as values and never become labels.
"""

from __future__ import annotations

import ctypes
from typing import Any

from exporter.collectors.gpu.nvml.device import NvmlDevice
from exporter.collectors.gpu.nvml.library import GARBAGE, CallFailedError
from exporter.collectors.gpu.nvml.readings import PassReadings
from exporter.collectors.gpu.nvml.units import GarbageError, ratio, size

_RUNNING = "nvmlDeviceGetComputeRunningProcesses_v3"
_RUNNING_OLDER = "nvmlDeviceGetComputeRunningProcesses_v2"
_UTILIZATION = "nvmlDeviceGetProcessUtilization"
_MAX_PROCESSES = 256
_LONGEST_SAMPLE_SECONDS = 5.0
_LARGEST_PID = 1 << 22
"""Limit of Linux. A driver with a different structure than the binding (535.43, 535.86) returns larger numbers."""


class GpuProcesses:
    """Reader of a GPU's processes."""

    def __init__(self) -> None:
        self._last = 0  # driver's time of the newest sample, microseconds

    def read(self, device: NvmlDevice, *, wall: float, readings: PassReadings) -> None:
        """Read the processes, and their use of the SMs since the last time."""
        running: dict[int, int | None] | None = device.query(_RUNNING, _RUNNING, convert=_memories)
        if running is None and device.is_unsupported(_RUNNING):
            running = device.query(_RUNNING_OLDER, _RUNNING_OLDER, convert=_memories)
        readings.read_processes = True
        readings.put("processes", None if running is None else len(running))
        if running is not None:
            # With a single process no shares are needed; utilization costs more than the list.
            busy = self._utilization(device, wall=wall) if len(running) > 1 else {}
            readings.processes = [
                {"pid": pid, "memory": memory, "sm": busy.get(pid)}
                for pid, memory in list(running.items())[:_MAX_PROCESSES]
            ]

    def _utilization(self, device: NvmlDevice, *, wall: float) -> dict[int, float]:
        item = "processes.utilization"
        if not device.may_call(item, _UTILIZATION):
            return {}
        # For the time 0 the driver returns the last, stale sample of every known process.
        since = self._last or int((wall - _LONGEST_SAMPLE_SECONDS) * 1e6)
        try:
            samples = device.call(_UTILIZATION, since)
        except CallFailedError as failure:
            # No new sample: with some drivers success without samples, raised as an error by the binding.
            if failure.error not in {"success", "not_found"}:
                device.fail(item, failure.call, failure.error)
            return {}
        ratios_by_pid: dict[int, list[float]] = {}
        future = int((wall + _LONGEST_SAMPLE_SECONDS) * 1e6)
        for sample in samples:
            if not since < sample.timeStamp <= future:
                continue
            try:
                ratios_by_pid.setdefault(sample.pid, []).append(ratio(sample.smUtil))
            except GarbageError:
                device.library.count_error(_UTILIZATION, GARBAGE)
            self._last = max(self._last, sample.timeStamp)
        if self._last > future:  # the wall clock was set back
            self._last = 0
        return {pid: sum(ratios) / len(ratios) for pid, ratios in ratios_by_pid.items() if ratios}


def _memories(processes: Any) -> dict[int, int | None]:
    """Return memory by process id; None if the driver does not report memory (some MIG modes, vGPU)."""
    memory_by_pid: dict[int, int | None] = {}
    for process in processes:
        if process.pid > _LARGEST_PID:
            raise GarbageError(process.pid)
        used = None if process.usedGpuMemory is None else size(process.usedGpuMemory)
        previous = memory_by_pid.get(process.pid)
        # On a MIG GPU a process is listed once per instance.
        memory_by_pid[process.pid] = used if previous is None else previous + (used or 0)
    return memory_by_pid


def sram_exceeded(device: NvmlDevice) -> int | None:
    """Return 1 if SRAM errors exceed the threshold for a replacement of the card; None if the driver reports no status."""
    structure = getattr(device.library.binding, "c_nvmlEccSramErrorStatus_v1_t", None)
    if structure is None:  # the binding is older
        return None
    status = structure()
    answer = device.query("sram", "nvmlDeviceGetSramEccErrorStatus", ctypes.byref(status))
    return None if answer is None else int(status.bThresholdExceeded != 0)
