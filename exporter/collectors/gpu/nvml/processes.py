"""Which processes compute on a GPU, their memory on it, and how busy they keep it.

Used in the NVML child. Process ids are those of the host's namespace, as the driver knows no other; they go to the
sidecar as values and never become labels.
"""

from __future__ import annotations

from typing import Any

from exporter.collectors.gpu.nvml.device import Device, Out
from exporter.collectors.gpu.nvml.library import GARBAGE, CallFailedError
from exporter.collectors.gpu.nvml.units import GarbageError, ratio, size

_UTILIZATION = "nvmlDeviceGetProcessUtilization"
_MOST_PROCESSES = 256
_LARGEST_PID = 1 << 22
"""Of Linux; a driver whose structure differs from the binding's (535.43, 535.86) gives others."""

_LONGEST_SAMPLE_SECONDS = 5.0
_ENGINES = ("sm", "mem", "enc", "dec")


class Processes:
    """The processes of one GPU."""

    def __init__(self) -> None:
        self._last = 0  # driver's time of the newest sample, µs

    def read(self, device: Device, *, wall: float, out: Out) -> None:
        """Read who is there, and what each did since the last time."""
        running = device.ask("processes", "nvmlDeviceGetComputeRunningProcesses_v3", convert=_memories)
        if running is None and device.lacks("processes"):
            running = device.ask("processes.v2", "nvmlDeviceGetComputeRunningProcesses_v2", convert=_memories)
        out["processes"] = out["processes_running"] = None
        if running is None:
            return
        out["processes_running"] = len(running)
        ratios = self._utilization(device, wall=wall)
        out["processes"] = {
            str(pid): {"memory": memory, **ratios.get(pid, {})}
            for pid, memory in list(running.items())[:_MOST_PROCESSES]
        }

    def _utilization(self, device: Device, *, wall: float) -> dict[int, dict[str, float]]:
        item = "processes.utilization"
        if device.lacks(item):
            return {}
        # With 0 the driver gives a last, stale sample of every process it remembers.
        since = self._last or int((wall - _LONGEST_SAMPLE_SECONDS) * 1e6)
        try:
            samples = device.library.call(_UTILIZATION, device.handle, since)
        except CallFailedError as failure:
            # Nothing new: some drivers say so by success with no samples, of which the binding makes an error.
            if failure.error not in {"success", "not_found"}:
                device.fail(item, failure.call, failure.error)
            return {}
        found: dict[int, list[list[float]]] = {}
        future = int((wall + _LONGEST_SAMPLE_SECONDS) * 1e6)
        for sample in samples:
            if not since < sample.timeStamp <= future:
                continue
            try:
                ratios = [ratio(getattr(sample, f"{engine}Util")) for engine in _ENGINES]
            except GarbageError:
                device.library.count_error(_UTILIZATION, GARBAGE)
                continue
            found.setdefault(sample.pid, []).append(ratios)
            self._last = max(self._last, sample.timeStamp)
        if self._last > future:  # the wall clock was set back
            self._last = 0
        return {
            pid: {
                engine: sum(each) / len(each)
                for engine, each in zip(_ENGINES, zip(*rows, strict=True), strict=True)
            }
            for pid, rows in found.items()
        }


def _memories(processes: Any) -> dict[int, int | None]:
    """Memory by process id; None where the driver does not tell it (some MIG modes, vGPU)."""
    found: dict[int, int | None] = {}
    for process in processes:
        if process.pid > _LARGEST_PID:
            raise GarbageError(process.pid)
        used = process.usedGpuMemory
        if used is not None:
            used = size(used)
        before = found.get(process.pid)
        # On a MIG GPU a process is listed once for each instance that it uses.
        found[process.pid] = used if before is None else before + (used or 0)
    return found
