"""Compute processes of a GPU, with memory and SM utilization.

Runs in the NVML child. The driver reports pids of the host's pid namespace. Pids are sent to the sidecar as values
and never become labels.
"""

from __future__ import annotations

from typing import Any

from exporter.collectors.gpu.nvml.device import NvmlDevice
from exporter.collectors.gpu.nvml.library import GARBAGE, CallFailedError
from exporter.collectors.gpu.nvml.readings import PassReadings
from exporter.collectors.gpu.nvml.units import GarbageError, ratio, size

_RUNNING_V3 = "nvmlDeviceGetComputeRunningProcesses_v3"
_RUNNING_V2 = "nvmlDeviceGetComputeRunningProcesses_v2"
_UTILIZATION = "nvmlDeviceGetProcessUtilization"
_MAX_PROCESSES = 256
"""Maximum number of processes of a GPU in a message."""
_MAX_SAMPLE_SECONDS = 5.0
"""Maximum age of the samples in the first pass, and time by which a sample may be ahead of the wall clock."""
_MAX_PID = 1 << 22
"""Maximum pid on Linux. Drivers whose structure differs from pynvml's (535.43, 535.86) return larger numbers."""


class GpuProcesses:
    """Reader of a GPU's processes."""

    def __init__(self) -> None:
        self._newest_microseconds = 0  # time of the newest sample on the driver's clock

    def read(self, device: NvmlDevice, *, wall: float, readings: PassReadings) -> None:
        """Read the processes, and their SM utilization since the previous pass."""
        memory_by_pid: dict[int, int | None] | None = device.query(
            _RUNNING_V3, _RUNNING_V3, convert=_memory_by_pid
        )
        if memory_by_pid is None and device.is_unsupported(_RUNNING_V3):
            memory_by_pid = device.query(_RUNNING_V2, _RUNNING_V2, convert=_memory_by_pid)
        readings.has_process_list = True
        readings.set_value("processes", None if memory_by_pid is None else len(memory_by_pid))
        if memory_by_pid is not None:
            # Utilization is used to divide the energy of a GPU among its processes. For a single process it is not read,
            # because the call takes longer than the list.
            sm_ratios = self._utilization(device, wall=wall) if len(memory_by_pid) > 1 else {}
            readings.processes = [
                {"pid": pid, "memory": memory, "sm": sm_ratios.get(pid)}
                for pid, memory in list(memory_by_pid.items())[:_MAX_PROCESSES]
            ]

    def _utilization(self, device: NvmlDevice, *, wall: float) -> dict[int, float]:
        """Return the mean SM utilization of each process since the previous pass. Processes without a new sample are omitted."""
        query_name = "processes.utilization"
        if not device.may_call(query_name, _UTILIZATION):
            return {}
        # For the time 0, the driver returns the last, possibly stale sample of each process.
        since_microseconds = self._newest_microseconds or int((wall - _MAX_SAMPLE_SECONDS) * 1e6)
        try:
            samples = device.call(_UTILIZATION, since_microseconds)
        except CallFailedError as failure:
            # No new sample: some drivers return success without samples, which pynvml raises as an error.
            if failure.error not in {"success", "not_found"}:
                device.record_failure(query_name, failure.call, failure.error)
            return {}
        ratios_by_pid: dict[int, list[float]] = {}
        latest_microseconds = int((wall + _MAX_SAMPLE_SECONDS) * 1e6)
        for sample in samples:
            if not since_microseconds < sample.timeStamp <= latest_microseconds:
                continue
            try:
                ratios_by_pid.setdefault(sample.pid, []).append(ratio(sample.smUtil))
            except GarbageError:
                device.library.count_error(_UTILIZATION, GARBAGE)
            self._newest_microseconds = max(self._newest_microseconds, sample.timeStamp)
        if self._newest_microseconds > latest_microseconds:  # the wall clock was set back
            self._newest_microseconds = 0
        return {pid: sum(ratios) / len(ratios) for pid, ratios in ratios_by_pid.items() if ratios}


def _memory_by_pid(processes: Any) -> dict[int, int | None]:
    """Return the memory of each process by pid.

    A value is None if the driver lists the process without its memory (some MIG modes, vGPU).
    """
    memory_by_pid: dict[int, int | None] = {}
    for process in processes:
        if process.pid > _MAX_PID:
            raise GarbageError(process.pid)
        memory_bytes = None if process.usedGpuMemory is None else size(process.usedGpuMemory)
        earlier_bytes = memory_by_pid.get(process.pid)
        # With MIG, a process is listed once per instance.
        memory_by_pid[process.pid] = (
            memory_bytes if earlier_bytes is None else earlier_bytes + (memory_bytes or 0)
        )
    return memory_by_pid
