"""What a batch holds, told by its shapes alone: nothing is read from a device.

Used in the training process, on the thread that trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

IDS = "input_ids"
"""Under this name a batch of the Hugging Face libraries holds its tokens."""
DEEPEST = 4


def samples_and_tokens(batch: Any) -> tuple[int | None, int | None]:
    """Count a batch.

    Returns:
        The samples: the length of the first dimension of the first tensor, or of a list of what is no tensor; and the
        tokens, padding included, of a batch that names them. None for what it does not tell.
    """
    try:
        ids = batch.get(IDS) if isinstance(batch, Mapping) else None
        shape = getattr(ids, "shape", None)
        if ids is not None and shape is not None and len(shape) == 2:
            return int(shape[0]), int(shape[0]) * int(shape[1])
        return _samples(batch, DEEPEST), None
    except Exception:  # noqa: BLE001  # a batch is the job's own object
        return None, None


def _samples(batch: Any, depth: int) -> int | None:
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if depth and isinstance(batch, Mapping):
        return next((each for each in (_samples(value, depth - 1) for value in batch.values()) if each), None)
    if depth and isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        for value in batch:
            if isinstance(value, (Mapping, Sequence)) and not isinstance(value, (str, bytes)):
                found = _samples(value, depth - 1)
            else:
                found = _samples(value, 0) if hasattr(value, "shape") else len(batch)
            if found:
                return found
    return None
