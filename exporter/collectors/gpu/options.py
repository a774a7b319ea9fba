"""The options of the GPU collector, as they stand in the configuration and as the NVML child is given them.

Used in the sidecar and in the NVML child; pure. Which GPUs there are to watch also goes by CUDA_VISIBLE_DEVICES, read as
CUDA reads it: numbers, or the beginnings of UUIDs; the first entry that names no GPU ends the list. Numbers count the GPUs
that may be used in NVML's order, that of the PCI bus: CUDA's own is the same wherever all GPUs are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from exporter.config.options import Duration, Range, option

MOST_GPUS = 64
"""Of one machine that are watched."""

_FEWEST_CHARACTERS = 5  # "GPU-" and a digit


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Which GPUs are watched, and how closely."""

    mode: Literal["auto", "required"] = option(
        "auto",
        "auto: watch what there is. required: the exporter is not ready while NVML does not answer.",
    )
    replay: str | None = option(
        None, "A described machine to play in place of NVIDIA's library: its name, or a file."
    )
    gpm: bool = option(
        True, "Whether to sample performance counters (SM, tensor and memory activity) from Hopper on."
    )
    details: bool = option(
        False,
        "Also aggregate errors and finer kinds of activity, about 10 more series a GPU; and NVML's cost by function.",
    )
    period: Annotated[Duration, Range(0.1, 60)] = option(
        1.0, "Time between two passes over the GPUs; below a second the slower passes are sped up too."
    )
    retry: Annotated[Duration, Range(0.1, 3600)] = option(30.0, "How often a lost GPU is tried again.")


DEFAULT_OPTIONS = GpuOptions()
"""Watch what there is."""


def job_numbers(visible: str | None, uuids: Mapping[int, Sequence[str]]) -> dict[int, int] | None:
    """Give the number under which the job sees each GPU, by its place among those that may be used.

    `visible` is CUDA_VISIBLE_DEVICES; `uuids` are, by place, the UUID of a GPU and those of its instances. None where
    the variable names no GPU, so that all are taken.
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
    """Count the GPUs that the variable asks for, whether or not they are there; None where it says nothing."""
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
    # The old spelling of an instance is MIG-GPU-<uuid>/<gi>/<ci>.
    wanted = entry.removeprefix("MIG-").partition("/")[0] if entry.startswith("MIG-GPU-") else entry
    if len(wanted) < _FEWEST_CHARACTERS:
        return None
    found = {index for index, names in uuids.items() if any(name.startswith(wanted) for name in names)}
    return found.pop() if len(found) == 1 else None
