"""Pending batches: fetched from a loader and not trained on yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from exporter.bridges.batches import samples_and_tokens

MAX_BATCHES = 64
MAX_THREADS = 16


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch, and the iterator of the loader from which the batch was fetched."""

    loader: int
    samples: int | None
    tokens: int | None


class PendingBatches:
    """Pending batches of each thread: the first backward pass shows which thread trains."""

    def __init__(self) -> None:
        self.ahead = 0  # batches that a loader fetches ahead
        self.is_exhausted = False
        self._by_thread: dict[int, deque[PendingBatch]] = {}

    def add(self, loader: Any, batch: Any) -> None:
        """Add a batch that this thread has fetched."""
        thread = get_ident()
        batches = self._by_thread.get(thread)
        if batches is None:
            if len(self._by_thread) >= MAX_THREADS:
                return
            batches = self._by_thread[thread] = deque(maxlen=MAX_BATCHES)
        batches.append(PendingBatch(id(loader), *samples_and_tokens(batch)))

    def clear(self) -> None:
        """Drop the batches of this thread."""
        self._by_thread.pop(get_ident(), None)

    def last(self) -> PendingBatch | None:
        """Return the last batch of this thread, or None."""
        batches = self._by_thread.get(get_ident())
        return batches[-1] if batches else None

    def remove(self, batch: PendingBatch) -> None:
        """Drop a batch of this thread."""
        self._by_thread[get_ident()].remove(batch)

    def next(self) -> PendingBatch | None:
        """Remove and return the next batch that this thread now trains on; None if the rest was fetched ahead."""
        batches = self._by_thread.get(get_ident())
        if batches and (self.is_exhausted or len(batches) > self.ahead):
            return batches.popleft()
        return None
