"""Options of the GPU collector, and the meaning of CUDA_VISIBLE_DEVICES.

Used in the sidecar and in the NVML child; pure. CUDA_VISIBLE_DEVICES is parsed as in CUDA: numbers, or prefixes of UUIDs;
the first entry that names no GPU ends the list. Numbers count the usable GPUs in NVML's order, the order of the PCI bus;
CUDA's order is the same if all GPUs are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from exporter.config.options import Duration, Range, option

MAX_GPUS = 64
"""Largest number of watched GPUs."""

_MIN_PREFIX_LENGTH = 5  # "GPU-" and a digit


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Options: selection of GPUs, counters and period."""

    mode: Literal["auto", "required"] = option(
        "auto",
        "auto: watch all GPUs, if there are any. required: the exporter is not ready while NVML does not answer.",
    )
    replay: str | None = option(None, "Name of a described machine to replay in place of NVIDIA's library.")
    gpm: bool = option(
        True, "Whether to sample performance counters (SM, tensor and memory activity) from Hopper on."
    )
    period: Annotated[Duration, Range(0.1, 60)] = option(
        1.0, "Time between two passes over the GPUs; below a second the slower passes are sped up too."
    )
    retry: Annotated[Duration, Range(0.1, 3600)] = option(
        30.0, "Time between two attempts to reach a lost GPU."
    )


DEFAULT_OPTIONS = GpuOptions()
"""The defaults."""


def job_numbers(visible: str | None, uuids: Mapping[int, Sequence[str]]) -> dict[int, int] | None:
    """Return the job's number of each GPU, by place among the usable GPUs; None if the variable names no GPU.

    Args:
        visible: CUDA_VISIBLE_DEVICES.
        uuids: UUIDs of a GPU and the GPU's MIG instances, by place.
    """
    if visible is None or expected_devices(visible) is None:
        return None
    numbers: dict[int, int] = {}
    for place, entry in enumerate(visible.split(",")):
        index = _index_of(entry.strip(), uuids)
        if index is None:
            break
        numbers.setdefault(index, place)
    return numbers


def expected_devices(visible: str | None) -> int | None:
    """Return the number of GPUs in the variable, present or not; None if the variable names no GPU."""
    entries = set()
    for entry in (visible or "").split(","):
        text = entry.strip()
        if not (text.isdecimal() or text.startswith(("GPU-", "MIG-"))):
            break
        entries.add(text)
    return len(entries) or None


def _index_of(entry: str, uuids: Mapping[int, Sequence[str]]) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) in uuids else None
    # The old spelling of an instance: MIG-GPU-<uuid>/<gi>/<ci>.
    prefix = entry.removeprefix("MIG-").partition("/")[0] if entry.startswith("MIG-GPU-") else entry
    if len(prefix) < _MIN_PREFIX_LENGTH:
        return None
    indices = {index for index, names in uuids.items() if any(name.startswith(prefix) for name in names)}
    return indices.pop() if len(indices) == 1 else None
