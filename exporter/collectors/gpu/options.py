"""Options of the GPU collector, and the meaning of CUDA_VISIBLE_DEVICES.

Used in the sidecar and in the NVML child; performs no I/O. CUDA_VISIBLE_DEVICES is parsed as in CUDA: entries are
indices or prefixes of UUIDs, and the first invalid entry ends the list. Indices refer to the accessible GPUs in
NVML's order, which is the order of the PCI bus; CUDA's default order is the same if all GPUs have the same model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from exporter.config.options import Duration, Range, option

MAX_GPUS = 64
"""Maximum number of monitored GPUs."""

_MIN_PREFIX_LENGTH = 5  # "GPU-" or "MIG-", and a digit


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Options: selection of GPUs, counters and period."""

    mode: Literal["auto", "required"] = option(
        "auto",
        "auto: monitor all GPUs, if any. required: the exporter is not ready while NVML does not answer.",
    )
    replay: str | None = option(
        None,
        "Name of an included machine to replay in place of NVML, for example h100; docs/replay.md lists the machines.",
    )
    gpm: bool = option(
        True, "Sample performance counters (SM, tensor and memory activity), available from Hopper on."
    )
    period: Annotated[Duration, Range(0.1, 60)] = option(
        1.0,
        "Time between two passes over the GPUs; a period below 1 s also shortens the intervals of slower readings.",
    )
    retry: Annotated[Duration, Range(0.1, 3600)] = option(
        30.0, "Time between two attempts to attach to a lost GPU."
    )


DEFAULT_OPTIONS = GpuOptions()
"""Options with their default values."""


def job_indices(visible: str | None, uuids: Mapping[int, Sequence[str]]) -> dict[int, int] | None:
    """Return the job's index of each GPU in CUDA_VISIBLE_DEVICES, by the GPU's position among the accessible GPUs.

    Returns None if the variable names no GPU.

    Args:
        visible: CUDA_VISIBLE_DEVICES.
        uuids: UUIDs of each GPU and its MIG devices, by position.
    """
    if visible is None or expected_devices(visible) is None:
        return None
    index_by_position: dict[int, int] = {}
    for index, entry in enumerate(visible.split(",")):
        position = _position_of(entry.strip(), uuids)
        if position is None:
            break
        index_by_position.setdefault(position, index)
    return index_by_position


def expected_devices(visible: str | None) -> int | None:
    """Return the number of GPUs in CUDA_VISIBLE_DEVICES, present or not. Returns None if the variable names no GPU.

    The UUIDs of MIG devices do not show whether the devices are on the same GPU: they count as one GPU.
    """
    gpus = set()
    for entry in map(str.strip, (visible or "").split(",")):
        if entry.isdecimal() or entry.startswith(("GPU-", "MIG-GPU-")):
            gpus.add(_gpu_of(entry))
        elif entry.startswith("MIG-"):
            gpus.add("MIG")
        else:
            break
    return len(gpus) or None


def _gpu_of(entry: str) -> str:
    """Return the entry of the GPU for a MIG device in the old format, `MIG-GPU-<uuid>/<gi>/<ci>`, or an unchanged other entry."""
    return entry.removeprefix("MIG-").partition("/")[0] if entry.startswith("MIG-GPU-") else entry


def _position_of(entry: str, uuids: Mapping[int, Sequence[str]]) -> int | None:
    """Return the position of the GPU that an entry names, or None for an invalid entry or a prefix of several GPUs."""
    if entry.isdecimal():
        return int(entry) if int(entry) in uuids else None
    prefix = _gpu_of(entry)
    if len(prefix) < _MIN_PREFIX_LENGTH:
        return None
    positions = {
        position for position, names in uuids.items() if any(name.startswith(prefix) for name in names)
    }
    return positions.pop() if len(positions) == 1 else None
