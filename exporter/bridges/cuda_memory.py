"""Bridge to torch's allocator of GPU memory.

Used in the training process. A thread of the exporter reads the statistics of the allocator. The read does not wait for the GPU and
resets no peak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from exporter.bridges.periodic import Periodic
from exporter.recording.stat import create_series

MAX_DEVICES = 64
"""Maximum number of devices whose statistics are read."""
POLL_SECONDS = 5.0
"""Interval between two polls of the allocator."""
STATES: Mapping[str, tuple[str, str]] = {
    "allocated": ("allocated_bytes", "current"),
    "reserved": ("reserved_bytes", "current"),
    "peak_allocated": ("allocated_bytes", "peak"),
    "peak_reserved": ("reserved_bytes", "peak"),
}
"""Keys in torch's statistics: the quantity, then `current` or `peak`. By the value of the label `state`."""
TOTALS: Mapping[str, str] = {
    "num_alloc_retries": "training.gpu_alloc_retries",
    "num_ooms": "training.gpu_oom",
}
"""Name of the counter, by the key of the total in torch's statistics."""

Device = tuple[str, str]
"""Index of a GPU in the job, and its UUID, which is `unknown` before torch 2.4."""


class CudaMemory:
    """Metrics of the allocator.

    Args:
        read: Function that returns the statistics of each device that the process uses.
    """

    def __init__(self, read: Callable[[], Mapping[Device, Mapping[str, Any]]]) -> None:
        self._read = read
        self._last_totals: dict[tuple[Device, str], int] = {}

    def poll(self) -> None:
        """Read the statistics of all devices once."""
        for device, statistics in self._read().items():
            labels = dict(zip(("gpu", "uuid"), device, strict=True))
            for state, (quantity, moment) in STATES.items():
                value = statistics.get(quantity, {}).get("all", {}).get(moment)
                if value is not None:
                    state_labels = labels | {"state": state}
                    create_series("gauge", "training.gpu_memory", unit="bytes", labels=state_labels)(value)
            for key, counter in TOTALS.items():
                total = statistics.get(key)
                if total is not None:
                    # A total that is smaller than before was reset by the job.
                    previous = self._last_totals.get((device, key), 0)
                    self._last_totals[device, key] = total
                    create_series("counter", counter, labels=labels)(
                        total - previous if total >= previous else total
                    )

    def clear_totals(self) -> None:
        """Discard the totals of the parent. Called in a forked child."""
        self._last_totals.clear()


def install() -> None:
    """Poll the allocator every `POLL_SECONDS` from now on. Has no effect if torch was built without CUDA.

    Raises:
        ImportError: torch is not installed.
    """
    torch: Any = import_module("torch")
    if hasattr(torch._C, "_cuda_memoryStats"):  # noqa: SLF001  # absent if torch was built without CUDA
        memory = CudaMemory(lambda: _read_memory(torch))
        Periodic("cuda-memory", memory.poll, seconds=POLL_SECONDS, after_fork=memory.clear_totals)


def _read_memory(torch: Any) -> dict[Device, Mapping[str, Any]]:
    """Return torch's statistics of each device on which the process has allocated memory or has run out of memory."""
    statistics_by_device: dict[Device, Mapping[str, Any]] = {}
    for index in range(MAX_DEVICES if torch.cuda.is_initialized() else 0):
        try:
            statistics = torch._C._cuda_memoryStats(index)  # noqa: SLF001  # the public function queries the device
        except RuntimeError:  # torch has no device with this index
            break
        if statistics["reserved_bytes"]["all"]["peak"] or statistics["num_ooms"]:
            # The private function has the same index as the statistics; the public function indexes devices as NVML does.
            uuid = getattr(torch.cuda._get_device_properties(index), "uuid", None)  # noqa: SLF001
            statistics_by_device[str(index), "unknown" if uuid is None else f"GPU-{uuid}"] = statistics
    return statistics_by_device
