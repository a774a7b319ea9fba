"""Sequence numbers of torch.distributed: the number of enqueued collectives by process group.

The numbers come from private attributes of torch; with a version that lacks them, the result is empty. This module does not
import torch, wait, or call CUDA.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MAX_GROUPS = 16
"""Limit of process groups. Further groups are ignored."""


def sequence_numbers() -> dict[str, int]:
    """Return the number of enqueued collectives by process group; empty without torch.distributed."""
    groups = _groups()
    numbers: dict[str, int] = {}
    for group, name in groups[:MAX_GROUPS]:
        try:
            numbers[name] = int(group._get_sequence_number_for_group())  # noqa: SLF001  # torch has no public call
        except Exception:  # noqa: BLE001, S112, PERF203  # a backend without numbers, or a group that was destroyed
            continue
    return numbers


def last_collective() -> str | None:
    """Return the last entry of torch's flight recorder, or None if the recorder is off, empty or missing."""
    binding = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(binding, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    try:
        entries = json.loads(dump()).get("entries", [])
        newest = entries[-1]
        return f"{newest['profiling_name']} ({newest['state']})"[:200]
    except Exception:  # noqa: BLE001  # private format, or nothing recorded
        return None


def _groups() -> list[tuple[Any, str]]:
    """Return the process groups with their names, `default` for the default group."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    names_by_group = getattr(getattr(module, "_world", None), "pg_names", None)
    if not names_by_group:
        return []
    try:
        default = module._get_default_group()  # type: ignore[union-attr]  # noqa: SLF001  # torch has no public call
        return [
            (group, "default" if group is default else str(name))
            for group, name in list(names_by_group.items())
        ]
    except Exception:  # noqa: BLE001  # not initialized, or destroyed during the call
        return []
