"""GPUs of this process, from torch's allocator, the environment and the driver's files.

Runs in the training process, on the recording thread. This module neither imports torch nor calls CUDA: the allocator's statistics
are counters in memory. A GPU's number is the number that CUDA gives the GPU. The code assumes that the numbers follow the order of the
PCI bus, as they do if all GPUs are of the same model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from typing import Any

from exporter.recording.values import GpuUse

MAX_GPUS = 64
"""Maximum number of GPUs of a process, and of entries of CUDA_VISIBLE_DEVICES. Further GPUs are ignored."""
MAX_GPU_NAME_CHARACTERS = 64
"""Maximum length of the name of a GPU. Longer names are ignored. The longest names are `MIG-GPU-<uuid>/<gi>/<ci>`."""
READ_INTERVAL = 10
"""Number of recordings between two reads of the allocator, once torch uses a GPU. Missing driver files are looked up as rarely."""

DRIVER_FILES = "/proc/driver/nvidia/gpus"
"""Directory with a subdirectory per visible GPU, named by the address on the PCI bus."""

_VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_UUID_PREFIX = "GPU UUID:"


class ProcessGpus:
    """GPUs of this process, as UUIDs, or as numbers if the driver's files are missing."""

    def __init__(self, driver_files: str = DRIVER_FILES) -> None:
        self._driver_files = driver_files
        self._uuids: list[str] = []
        self._latest = GpuUse()
        self._skips_left = self._file_skips_left = 0

    def read(
        self, environment: Mapping[str, str], local_rank: int | None, *, is_identity_ending: bool = False
    ) -> GpuUse:
        """Return the GPUs on which torch has reserved memory. Before that, return the GPU that the environment assigns to the local rank.

        Once torch uses a GPU, only every `READ_INTERVAL`-th call reads the allocator, and other calls return the latest result.

        Args:
            environment: Environment of this process.
            local_rank: Local rank of this process; None if unknown.
            is_identity_ending: True before the last recording of the identity. The call then always reads the allocator.
        """
        if self._skips_left > 0 and not is_identity_ending:
            self._skips_left -= 1
            return self._latest
        visible = _visible_entries(environment)
        uses_cuda = _torch_uses_cuda()
        numbers = _numbers_in_use() if uses_cuda else []
        if numbers:
            self._skips_left = READ_INTERVAL
            self._latest = GpuUse(self._names(numbers, visible), used=True, named=True)
        else:
            # A launcher that makes a single GPU visible has assigned the GPU to this rank.
            is_single = visible is not None and len(visible) == 1
            number = 0 if is_single or local_rank is None else local_rank
            is_named = visible is not None and (len(visible) <= 1 or local_rank is not None)
            self._latest = GpuUse(self._names([number], visible), used=uses_cuda, named=is_named)
        return self._latest

    def _names(self, numbers: list[int], visible: list[str] | None) -> tuple[str, ...]:
        """Return the names of the GPUs with these numbers. A number that CUDA does not make visible has no name."""
        if not self._uuids:
            if self._file_skips_left <= 0:
                self._uuids, self._file_skips_left = _uuids(self._driver_files), READ_INTERVAL
            self._file_skips_left -= 1
        if visible is not None and self._uuids:
            visible = _before_missing_gpu(visible, len(self._uuids))
        names = []
        for number in numbers:
            name = ""
            if visible is None:
                name = str(number)
            elif number < len(visible):
                name = visible[number]
            if name.isdecimal() and int(name) < len(self._uuids):
                name = self._uuids[int(name)]
            if name and len(name) <= MAX_GPU_NAME_CHARACTERS and name.isprintable():
                names.append(name)
        return tuple(names)


def _uuids(directory: str) -> list[str]:
    """Return the UUIDs of the GPUs in the order of the PCI bus. If any UUID is unknown, return no UUIDs."""
    uuids = []
    try:
        for name in sorted(os.listdir(directory)):  # noqa: PTH208  # without the import of pathlib
            with open(f"{directory}/{name}/information", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                uuids += [
                    line.removeprefix(_UUID_PREFIX).strip() for line in file if line.startswith(_UUID_PREFIX)
                ]
    except OSError:
        return []
    return uuids if all(uuid.startswith("GPU-") and "?" not in uuid for uuid in uuids) else []


def _visible_entries(environment: Mapping[str, str]) -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES before the first invalid entry, or None if the variable is not set.

    CUDA hides the GPUs after an invalid entry. Jobs use the entry `-1` for that purpose.
    """
    text = environment.get(_VISIBLE_VARIABLE)
    if text is None:
        return None
    entries = [entry.strip() for entry in text.split(",")][:MAX_GPUS]
    return list(takewhile(lambda entry: entry.isdecimal() or entry.startswith(("GPU-", "MIG-")), entries))


def _before_missing_gpu(visible: list[str], gpu_count: int) -> list[str]:
    """Return the entries before the first number without a GPU. CUDA also hides the GPUs after such an entry."""
    return list(takewhile(lambda entry: not entry.isdecimal() or int(entry) < gpu_count, visible))


def _torch_uses_cuda() -> bool | None:
    """Return True if torch has initialized CUDA, or None without torch."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)  # missing while torch is being imported
    return None if is_initialized is None else bool(is_initialized())


def _numbers_in_use() -> list[int]:
    """Return the numbers, as torch counts them, of the GPUs on which torch has reserved memory."""
    bindings = getattr(sys.modules["torch"], "_C", None)
    read: Any = getattr(bindings, "_cuda_memoryStats", None)  # the public function calls CUDA
    if read is None:  # torch without CUDA
        return []
    numbers: list[int] = []
    with suppress(Exception):  # raises for the number after the last GPU
        numbers.extend(number for number in range(MAX_GPUS) if read(number)["reserved_bytes"]["all"]["peak"])
    return numbers
