"""The bridge to torch's allocator of GPU memory: what it holds, and what it could not get.

Used in the training process. A thread of the bridge asks from time to time, the allocator alone: nothing waits for the
GPU, no peak is reset, and as long as the job has not touched CUDA there is nothing to ask. What the driver sees of the
same memory is the sidecar's to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from exporter.bridges.periodic import Periodic
from exporter.recording.plain import plain

LOOK_SECONDS = 5.0
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
"""The job's number of a GPU, and its UUID; `UNKNOWN` where torch does not tell that."""
UNKNOWN = "unknown"
Stats = Mapping[str, Any]


class CudaMemory:
    """Turns what the allocator says into families.

    Args:
        read: Gives the allocator's numbers of each device that the process uses.
    """

    def __init__(self, read: Callable[[], Mapping[Device, Stats]]) -> None:
        self._read = read
        self._adders: dict[tuple[Device, str], Callable[[float], None]] = {}
        self._before: dict[tuple[Device, str], int] = {}

    def step(self) -> None:
        """Look once."""
        for device, stats in self._read().items():
            for state, (name, kind) in STATES.items():
                value = stats.get(name, {}).get("all", {}).get(kind)
                if value is not None:
                    self._adder(device, "gauge", "training.gpu_memory", state)(value)
            for name, family in COUNTS.items():
                now = stats.get(name)
                if now is not None:
                    # Totals of the process; a reset of the job's begins them anew.
                    before = self._before.get((device, name), 0)
                    self._before[device, name] = now
                    self._adder(device, "counter", family)(now - before if now >= before else now)

    def forget(self) -> None:
        """In a forked child: what was counted so far is the parent's, and CUDA is not the child's."""
        self._before.clear()

    def _adder(self, device: Device, kind: str, family: str, state: str = "") -> Callable[[float], None]:
        key = (device, family + state)
        adder = self._adders.get(key)
        if adder is None:
            gpu, uuid = device
            labels = {"gpu": gpu, "uuid": uuid} | ({"state": state} if state else {})
            unit = "bytes" if state else None
            adder = self._adders[key] = plain(kind, family, unit=unit, labels=labels)
        return adder


def install() -> None:
    """Look at the allocator from time to time.

    Raises:
        ImportError: There is no torch.
    """
    torch: Any = import_module("torch")
    if not hasattr(torch._C, "_cuda_memoryStats"):  # noqa: SLF001  # the public one asks CUDA for the device
        return  # a torch without CUDA
    memory = CudaMemory(_reader(torch))
    Periodic("exporter-cuda-memory", memory.step, seconds=LOOK_SECONDS, after_fork=memory.forget)


def _reader(torch: Any) -> Callable[[], Mapping[Device, Stats]]:
    uuids: dict[int, str] = {}

    def read() -> Mapping[Device, Stats]:
        found: dict[Device, Stats] = {}
        if not torch.cuda.is_initialized():
            return found
        for index in range(MOST_DEVICES):
            try:
                stats = torch._C._cuda_memoryStats(index)  # noqa: SLF001  # see above
            except RuntimeError:  # there are no more devices
                break
            if stats["reserved_bytes"]["all"]["peak"] or stats["num_ooms"]:
                if index not in uuids:
                    uuids[index] = _uuid(torch, index)
                found[str(index), uuids[index]] = stats
        return found

    return read


def _uuid(torch: Any, index: int) -> str:
    """The UUID in NVML's spelling; torch has it since 2.4, and knows the properties of a device that was used."""
    properties = torch.cuda._get_device_properties(index)  # noqa: SLF001  # the public one counts devices by NVML
    uuid = getattr(properties, "uuid", None)
    return UNKNOWN if uuid is None else f"GPU-{uuid}"
