"""Which processes hold a GPU, their memory on it, and how busy they keep it.

Used in the NVML child. Process ids are those of the host's namespace, as the driver knows no other; they go to the
sidecar as values and never become labels.
"""

from __future__ import annotations

from typing import Any

from exporter.collectors.gpu.nvml.device import Device
from exporter.collectors.gpu.nvml.library import GARBAGE, CallFailedError
from exporter.collectors.gpu.nvml.readings import Out
from exporter.collectors.gpu.nvml.units import GarbageError, ratio, size
from exporter.collectors.gpu.options import GpuOptions

_UTILIZATION = "nvmlDeviceGetProcessUtilization"
_MOST_PROCESSES = 256
_LARGEST_PID = 1 << 22
"""Of Linux; a driver whose structure differs from the binding's (535.43, 535.86) gives others."""

_LONGEST_SAMPLE_SECONDS = 5.0
_ENGINES = ("sm", "mem", "enc", "dec")


class Processes:
    """The processes of one GPU.

    Args:
        every_seconds: How often they are looked at.
    """

    def __init__(self, every_seconds: float) -> None:
        self._longest_gap = max(_LONGEST_SAMPLE_SECONDS, 1.5 * every_seconds)
        self._last = 0  # driver's time of the newest sample, µs
        self._busy: dict[int, tuple[int, float]] = {}  # by pid: time of its last sample, SM seconds

    def read(self, device: Device, *, wall: float, out: Out) -> None:
        """Read who is there, and what each did since the last time."""
        running = device.ask("processes", "nvmlDeviceGetComputeRunningProcesses_v3", convert=_memories)
        if running is None and device.lacks("processes"):
            running = device.ask("processes.v2", "nvmlDeviceGetComputeRunningProcesses_v2", convert=_memories)
        out["processes"] = None
        out["processes_running"] = None
        if running is None:
            return
        out["processes_running"] = {"compute": len(running)}
        ratios = self._utilization(device, wall=wall)
        self._busy = {pid: state for pid, state in self._busy.items() if pid in running}
        out["processes"] = {
            str(pid): {
                "memory": memory,
                "sm_seconds": self._busy[pid][1] if pid in self._busy else None,
                **ratios.get(pid, {}),
            }
            for pid, memory in list(running.items())[:_MOST_PROCESSES]
        }

    def read_slow(self, device: Device, options: GpuOptions, out: Out) -> None:
        """Count the processes that draw; on some GPUs that takes milliseconds."""
        if options.details:
            found = device.ask(
                "processes.graphics", "nvmlDeviceGetGraphicsRunningProcesses_v3", convert=_memories
            )
            out["processes_drawing"] = None if found is None else {"graphics": len(found)}

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
        sums: dict[int, list[float]] = {}
        counts = self._last > 0
        future = int((wall + _LONGEST_SAMPLE_SECONDS) * 1e6)
        for sample in sorted(samples, key=lambda each: each.timeStamp):
            if not since < sample.timeStamp <= future:
                continue
            try:
                values = [ratio(getattr(sample, f"{engine}Util")) for engine in _ENGINES]
            except GarbageError:
                device.library.count_error(_UTILIZATION, GARBAGE)
                continue
            # What was before the first look, a predecessor of this process may have counted.
            self._add(sample.pid, sample.timeStamp, values[0] if counts else 0.0)
            sums[sample.pid] = [
                a + b for a, b in zip(sums.get(sample.pid, [0.0] * 5), [*values, 1.0], strict=True)
            ]
            self._last = max(self._last, sample.timeStamp)
        if self._last > future:
            self._last = 0
        return {
            pid: {engine: total / totals[-1] for engine, total in zip(_ENGINES, totals, strict=False)}
            for pid, totals in sums.items()
        }

    def _add(self, pid: int, time: int, busy: float) -> None:
        before, seconds = self._busy.get(pid, (0, 0.0))
        elapsed = (time - before) / 1e6
        if before and 0 < elapsed <= self._longest_gap:
            seconds += busy * elapsed
        self._busy[pid] = (time, seconds)


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
