"""CUDA_VISIBLE_DEVICES: which GPUs the job sees, and as which numbers.

Used in the NVML child; the sidecar counts what is asked for. As CUDA reads it: numbers, or the beginnings of UUIDs; the
first entry that names no GPU ends the list. Numbers count the GPUs that may be used in NVML's order, that of the PCI
bus: CUDA's own is the same wherever all GPUs are alike.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

MOST_GPUS = 64
"""Of one machine that are watched."""

_FEWEST_CHARACTERS = 5  # "GPU-" and a digit


def job_numbers(visible: str | None, uuids: Mapping[int, Sequence[str]]) -> dict[int, int] | None:
    """Give the number under which the job sees each GPU.

    Args:
        visible: The variable; None where it is not set.
        uuids: By place among the GPUs that may be used: the UUID, then those of its instances.

    Returns:
        The job's number by place; none where the GPUs that the variable names are not there. None where it names no
        GPU, so that all are taken.
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


def is_chosen(names: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a GPU with these names (index, UUID, bus, model) is among those to sample."""
    return (not include or _matches(names, include)) and not _matches(names, exclude)


def _index_of(entry: str, uuids: Mapping[int, Sequence[str]]) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) in uuids else None
    # The old spelling of an instance is MIG-GPU-<uuid>/<gi>/<ci>.
    wanted = entry.removeprefix("MIG-").partition("/")[0] if entry.startswith("MIG-GPU-") else entry
    if len(wanted) < _FEWEST_CHARACTERS:
        return None
    found = {index for index, names in uuids.items() if any(name.startswith(wanted) for name in names)}
    return found.pop() if len(found) == 1 else None


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)
