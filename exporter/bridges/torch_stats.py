"""The bridges to torch's own counters: its allocator of GPU memory, and its wait counters (stores, process groups, …).

Used in the training process, and the latter in torchrun's agent. Threads of the bridges ask from time to time; nothing is
hooked, nothing waits for the GPU, and no peak is reset.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from exporter.bridges.periodic import Periodic
from exporter.recording.identity import PROCESS, clean_text
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

MOST_KEYS = 200
"""Counters with series of their own; the rest is `other`."""
OTHER = "other"

Counters = Mapping[str, Mapping[str, int]]
Device = tuple[str, str]
"""The job's number of a GPU, and its UUID; `unknown` where torch does not tell that."""


class CudaMemory:
    """Turns what the allocator says into families; `read` gives its numbers of each device that the process uses."""

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
                    # Totals of the process; a reset of the job's begins them anew.
                    before = self._before.get((device, name), 0)
                    self._before[device, name] = now
                    metric("counter", family, labels=labels)(now - before if now >= before else now)

    def forget(self) -> None:
        """In a forked child: what was counted so far is the parent's, and CUDA is not the child's."""
        self._before.clear()


def install_cuda_memory() -> None:
    """Look at the allocator from time to time. Raises ImportError: There is no torch."""
    torch: Any = import_module("torch")
    if hasattr(torch._C, "_cuda_memoryStats"):  # noqa: SLF001  # else it is a torch without CUDA
        memory = CudaMemory(lambda: _read_memory(torch))
        Periodic("cuda-memory", memory.look, seconds=5.0, after_fork=memory.forget)


def _read_memory(torch: Any) -> dict[Device, Mapping[str, Any]]:
    found: dict[Device, Mapping[str, Any]] = {}
    for index in range(MOST_DEVICES if torch.cuda.is_initialized() else 0):
        try:
            stats = torch._C._cuda_memoryStats(index)  # noqa: SLF001  # the public one asks CUDA for the device
        except RuntimeError:  # there are no more devices
            break
        if stats["reserved_bytes"]["all"]["peak"] or stats["num_ooms"]:
            # In NVML's spelling; torch has it since 2.4. The public function counts devices by NVML.
            uuid = getattr(torch.cuda._get_device_properties(index), "uuid", None)  # noqa: SLF001
            found[str(index), "unknown" if uuid is None else f"GPU-{uuid}"] = stats
    return found


class WaitCounters:
    """Turns totals into increments; `read` gives the counters of this process."""

    def __init__(self, read: Callable[[], Counters]) -> None:
        self._read = read
        self._before: dict[str, Mapping[str, int]] | None = {}
        self._keys: set[str] = set()

    def look(self) -> None:
        """Look once."""
        if PROCESS.is_agent and not PROCESS.run_id:
            return  # whose they are is not known yet; they are totals, so nothing is lost
        found = self._read()
        before, self._before = self._before, dict(found)
        if before is None:
            return  # a forked child begins with what its parent had
        for key, now in found.items():
            if now != before.get(key):
                self._record(key, before.get(key, {}), now)

    def forget(self) -> None:
        """In a forked child: what was counted so far is the parent's."""
        self._before = None

    def _record(self, key: str, before: Mapping[str, int], now: Mapping[str, int]) -> None:
        def increase(what: str) -> int:
            return max(now.get(what, 0) - before.get(what, 0), 0)

        label = clean_text(key.removeprefix("pytorch.wait_counter.")) or OTHER
        if label not in self._keys:
            if len(self._keys) >= MOST_KEYS:
                label = OTHER
            self._keys.add(label)
        labels = {"key": label}
        metric("counter", "training.torch.wait_calls", labels=labels)(increase("total_calls"))
        seconds = increase("total_time_us") / 1e6
        metric("counter", "training.torch.wait", unit="seconds", labels=labels)(seconds)
        if label != OTHER:  # of several together there is no such number
            metric("gauge", "training.torch.waits", labels=labels)(now.get("active_count", 0))
            longest = metric("gauge", "training.torch.wait_longest", unit="seconds", labels=labels)
            longest(now.get("max_time_us", 0) / 1e6)


def install_wait_counters() -> None:
    """Look at the wait counters from time to time. Raises ImportError: This torch has none."""
    counters = WaitCounters(_wait_reader())
    Periodic("wait-counters", counters.look, seconds=1.0, after_fork=counters.forget)


def _wait_reader() -> Callable[[], Counters]:
    c10d: Any = import_module("torch._C._distributed_c10d")  # its type stubs lack what is needed here

    request_class, response_class = c10d._Request, c10d._Response  # noqa: SLF001  # there are no public names
    handler = c10d._get_handler("wait_counter_values")  # noqa: SLF001  # as above

    class Request(request_class):  # type: ignore[misc, valid-type]  # torch's
        def body(self) -> bytes:
            return b""

        def params(self) -> dict[str, str]:
            return {}

    class Response(response_class):  # type: ignore[misc, valid-type]  # torch's
        content: str | bytes = "{}"

        def set_content(self, content: str | bytes, _content_type: str) -> None:
            self.content = content

        def set_status(self, status: int) -> None:
            pass

    def read() -> Counters:
        response = Response()
        handler(Request(), response)
        found: dict[str, Any] = json.loads(response.content)
        return {key: value for key, value in found.items() if isinstance(value, dict)}

    return read
