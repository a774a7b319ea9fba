"""Batch sizes: samples and tokens of a batch, read from tensor shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exporter.recording.signal_safety import is_from_signal_handler

_MAX_DEPTH = 4
"""Levels of nested containers that are searched for a tensor."""


def samples_and_tokens(batch: Any) -> tuple[int | None, int | None]:
    """Return the numbers of samples and tokens of a batch. A number that the shapes do not show is None.

    Tokens are counted only in a mapping with two-dimensional `input_ids`.
    """
    try:
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        shape = getattr(ids, "shape", None)
        if shape is not None and len(shape) == 2:
            return int(shape[0]), int(shape[0]) * int(shape[1])
        return _samples(batch, _MAX_DEPTH), None
    except Exception as error:  # a batch is an object of the job
        if is_from_signal_handler(error):
            raise
        return None, None


def _samples(batch: Any, depth: int) -> int | None:
    """Return the length of the first tensor in a batch that has a dimension.

    Without such a tensor, return the length of the first innermost list that is not empty, or None.
    """
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    is_mapping = isinstance(batch, Mapping)
    if not depth or isinstance(batch, (str, bytes)) or not (is_mapping or isinstance(batch, Sequence)):
        return None
    values = batch.values() if is_mapping else batch
    samples = next(filter(None, (_samples(value, depth - 1) for value in values)), None)
    return samples if samples or is_mapping else len(batch) or None
