"""Bridge to torch's allocator of GPU memory.

Used in the training process. A thread reads the allocator's numbers; the thread never waits for the GPU and resets no peak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from exporter.bridges.periodic import Periodic
from exporter.recording.stat import metric

MOST_DEVICES = 64
STATES: Mapping[str, tuple[str, str]] = {
    "allocated": ("allocated_bytes", "current"),
    "reserved": ("reserved_bytes", "current"),
    "peak_allocated": ("allocated_bytes", "peak"),
    "peak_reserved": ("reserved_bytes", "peak"),
}
"""Label value, and where torch has the number."""
COUNTS: Mapping[str, str] = {
    "num_alloc_retries": "training.gpu_alloc_retries",
    "num_ooms": "training.gpu_oom",
}

Device = tuple[str, str]
"""The job's index of a GPU and the GPU's UUID, which is `unknown` in older versions of torch."""


class CudaMemory:
    """Families of the allocator's statistics; `read` returns the statistics of each device in use."""

    def __init__(self, read: Callable[[], Mapping[Device, Mapping[str, Any]]]) -> None:
        self._read = read
        self._before: dict[tuple[Device, str], int] = {}

    def look(self) -> None:
        """Look once."""
        for device, stats in self._read().items():
            labels = dict(zip(("gpu", "uuid"), device, strict=True))
            for state, (name, kind) in STATES.items():
                value = stats.get(name, {}).get("all", {}).get(kind)
                if value is not None:
                    of_state = labels | {"state": state}
                    metric("gauge", "training.gpu_memory", unit="bytes", labels=of_state)(value)
            for name, family in COUNTS.items():
                now = stats.get(name)
                if now is not None:
                    # Totals of the process; a reset by the job restarts them.
                    before = self._before.get((device, name), 0)
                    self._before[device, name] = now
                    metric("counter", family, labels=labels)(now - before if now >= before else now)

    def forget(self) -> None:
        """In a forked child: discard the parent's counts; a forked child cannot use CUDA."""
        self._before.clear()


def install() -> None:
    """Poll the allocator every five seconds. Raises ImportError if torch is not installed."""
    torch: Any = import_module("torch")
    if hasattr(torch._C, "_cuda_memoryStats"):  # noqa: SLF001  # else it is a torch without CUDA
        memory = CudaMemory(lambda: _read_memory(torch))
        Periodic("cuda-memory", memory.look, seconds=5.0, after_fork=memory.forget)


def _read_memory(torch: Any) -> dict[Device, Mapping[str, Any]]:
    found: dict[Device, Mapping[str, Any]] = {}
    for index in range(MOST_DEVICES if torch.cuda.is_initialized() else 0):
        try:
            stats = torch._C._cuda_memoryStats(index)  # noqa: SLF001  # the public one asks CUDA for the device
        except RuntimeError:  # index after the last device
            break
        if stats["reserved_bytes"]["all"]["peak"] or stats["num_ooms"]:
            # NVML's form of the UUID, available since torch 2.4. The public function indexes devices as NVML does.
            uuid = getattr(torch.cuda._get_device_properties(index), "uuid", None)  # noqa: SLF001
            found[str(index), "unknown" if uuid is None else f"GPU-{uuid}"] = stats
    return found
