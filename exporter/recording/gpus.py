"""GPUs of this process, from torch's allocator, the environment and the driver's files.

Used in the training process, on the recording thread. torch is never imported and CUDA is never called: the allocator's
statistics are counters in memory. Numbers are CUDA's, which are in the order of the PCI bus if all GPUs are alike.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from exporter.recording.values import GpuUse

MAX_GPUS = 64
MAX_NAME_CHARACTERS = 64
"""Characters of `MIG-GPU-<uuid>/<gi>/<ci>`, and some more."""
LOOK_EVERY = 10
"""Publications between two looks at the allocator, once a GPU is known, and at missing files of the driver."""

DRIVER_FILES = "/proc/driver/nvidia/gpus"
"""A directory for each GPU that this container sees, named by the address on the PCI bus."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_UUID = "GPU UUID:"


class ProcessGpus:
    """GPUs of this process, as UUIDs; as numbers without the driver's files."""

    def __init__(self, driver_files: str = DRIVER_FILES) -> None:
        self._driver_files = driver_files
        self._uuids: list[str] = []
        self._known = GpuUse()
        self._due = self._files_due = 0

    def look(self, environment: Mapping[str, str], local_rank: int | None, *, final: bool = False) -> GpuUse:
        """Return the GPUs in use, otherwise the GPU that the environment assigns to the local rank."""
        if self._due > 0 and not final:
            self._due -= 1
            return self._known
        visible = _visible(environment)
        used = _torch_uses_cuda()
        numbers = _numbers_in_use() if used else []
        if numbers:
            self._due = LOOK_EVERY
            self._known = GpuUse(self._names(numbers, visible), used=True, named=True)
        else:
            # With a single visible GPU, the launcher has made the choice for the rank.
            one = visible is not None and len(visible) == 1
            place = 0 if one or local_rank is None else local_rank
            named = one or (visible is not None and local_rank is not None)
            self._known = GpuUse(self._names([place], visible), used=used, named=named)
        return self._known

    def _names(self, numbers: list[int], visible: list[str] | None) -> tuple[str, ...]:
        """Return the names of GPUs by the job's numbers; a number beyond the variable has no name."""
        if not self._uuids:
            if self._files_due <= 0:
                self._uuids, self._files_due = _uuids(self._driver_files), LOOK_EVERY
            self._files_due -= 1
        found = []
        for number in numbers:
            entry = str(number) if visible is None else visible[number] if number < len(visible) else ""
            if entry.isdecimal() and int(entry) < len(self._uuids):
                entry = self._uuids[int(entry)]
            if entry and len(entry) <= MAX_NAME_CHARACTERS and entry.isprintable():
                found.append(entry)
        return tuple(found)


def _uuids(directory: str) -> list[str]:
    """Return the UUIDs of the GPUs in the order of the PCI bus; empty if a UUID is unknown."""
    found = []
    try:
        for name in sorted(os.listdir(directory)):  # noqa: PTH208  # without the import of pathlib
            with open(f"{directory}/{name}/information", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                found += [line.removeprefix(_UUID).strip() for line in file if line.startswith(_UUID)]
    except OSError:
        return []
    return found if all(uuid.startswith("GPU-") and "?" not in uuid for uuid in found) else []


def _visible(environment: Mapping[str, str]) -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES; None if the variable is not set."""
    text = environment.get(_VISIBLE)
    return None if text is None else [entry.strip() for entry in text.split(",")][:MAX_GPUS]


def _torch_uses_cuda() -> bool | None:
    """Return True if torch has initialised CUDA, False if torch has not; None without torch."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)  # missing while torch is being imported
    return None if is_initialized is None else bool(is_initialized())


def _numbers_in_use() -> list[int]:
    """Return the job's numbers of the GPUs on which torch has reserved memory."""
    bindings = getattr(sys.modules["torch"], "_C", None)
    read: Any = getattr(bindings, "_cuda_memoryStats", None)  # the public function asks CUDA for the device
    if read is None:  # torch without CUDA
        return []
    found: list[int] = []
    with suppress(Exception):  # foreign code: raises for the number after the last GPU
        found.extend(number for number in range(MAX_GPUS) if read(number)["reserved_bytes"]["all"]["peak"])
    return found
