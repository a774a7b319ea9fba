"""Bridge to torch's allocator of GPU memory.

Used in the training process. A thread of the exporter reads the statistics of the allocator, which neither waits for the GPU nor
resets a peak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from exporter.bridges.periodic import Periodic
from exporter.recording.stat import metric

MAX_DEVICES = 64
POLL_SECONDS = 5.0
STATES: Mapping[str, tuple[str, str]] = {
    "allocated": ("allocated_bytes", "current"),
    "reserved": ("reserved_bytes", "current"),
    "peak_allocated": ("allocated_bytes", "peak"),
    "peak_reserved": ("reserved_bytes", "peak"),
}
"""Keys of a number in torch's statistics (quantity; current or peak), by the value of the label `state`."""
COUNTS: Mapping[str, str] = {
    "num_alloc_retries": "training.gpu_alloc_retries",
    "num_ooms": "training.gpu_oom",
}
"""Counter by the key of a total in torch's statistics."""

Device = tuple[str, str]
"""Index of a GPU in the job, and its UUID, which is `unknown` before torch 2.4."""


class CudaMemory:
    """Metrics of the allocator.

    Args:
        read: Returns the statistics of each device that the process uses.
    """

    def __init__(self, read: Callable[[], Mapping[Device, Mapping[str, Any]]]) -> None:
        self._read = read
        self._last_counts: dict[tuple[Device, str], int] = {}

    def poll(self) -> None:
        """Read the statistics of all devices once."""
        for device, statistics in self._read().items():
            labels = dict(zip(("gpu", "uuid"), device, strict=True))
            for state, (name, moment) in STATES.items():
                value = statistics.get(name, {}).get("all", {}).get(moment)
                if value is not None:
                    state_labels = labels | {"state": state}
                    metric("gauge", "training.gpu_memory", unit="bytes", labels=state_labels)(value)
            for name, family in COUNTS.items():
                total = statistics.get(name)
                if total is not None:
                    # The job can reset the totals of its process.
                    previous = self._last_counts.get((device, name), 0)
                    self._last_counts[device, name] = total
                    metric("counter", family, labels=labels)(total - previous if total >= previous else total)

    def forget(self) -> None:
        """Discard the counts of the parent, in a forked child."""
        self._last_counts.clear()


def install() -> None:
    """Start to poll the allocator every five seconds. Raises ImportError if torch is not installed."""
    torch: Any = import_module("torch")
    if hasattr(torch._C, "_cuda_memoryStats"):  # noqa: SLF001  # absent in a torch without CUDA
        memory = CudaMemory(lambda: _read_memory(torch))
        Periodic("cuda-memory", memory.poll, seconds=POLL_SECONDS, after_fork=memory.forget)


def _read_memory(torch: Any) -> dict[Device, Mapping[str, Any]]:
    statistics_by_device: dict[Device, Mapping[str, Any]] = {}
    for index in range(MAX_DEVICES if torch.cuda.is_initialized() else 0):
        try:
            statistics = torch._C._cuda_memoryStats(index)  # noqa: SLF001  # the public function queries the device
        except RuntimeError:  # the index is above that of the last device
            break
        if statistics["reserved_bytes"]["all"]["peak"] or statistics["num_ooms"]:
            # The private function has the same index as the statistics; the public function indexes devices as NVML does.
            uuid = getattr(torch.cuda._get_device_properties(index), "uuid", None)  # noqa: SLF001
            statistics_by_device[str(index), "unknown" if uuid is None else f"GPU-{uuid}"] = statistics
    return statistics_by_device
