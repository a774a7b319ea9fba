"""Pending batches: batches that were fetched from a loader and not trained on yet."""

from __future__ import annotations

from collections import deque
from threading import get_ident
from typing import Any, NamedTuple

from exporter.bridges.batches import samples_and_tokens, samples_of_tensors

MAX_BATCHES = 64
MAX_THREADS = 16
_new_batch = tuple.__new__  # takes a third of the time of the named tuple's constructor


class PendingBatch(NamedTuple):
    """Size of a pending batch. A named tuple, because every step creates one and a tuple is cheap."""

    loader: int  # id of the iterator that returned the batch
    samples: int | None
    tokens: int | None


class PendingBatches:
    """Pending batches of the thread that trains.

    The first call of `take`, at the first backward pass, determines that thread. Before, batches are kept for each thread.

    Attributes:
        ahead: Number of batches that a loader fetches ahead of the training.
        is_exhausted: True if the loader has returned its last batch.
    """

    def __init__(self) -> None:
        self.ahead = 0
        self.is_exhausted = False
        self._batches: deque[PendingBatch] | None = None  # of the thread that trains
        self._by_thread: dict[int, deque[PendingBatch]] = {}

    def add(self, loader: Any, batch: Any) -> None:
        """Add a batch that the calling thread has fetched."""
        batches = self._batches
        if batches is None:
            batches = self._of_thread()
        samples, tokens = samples_of_tensors(batch), None
        if samples is None:
            samples, tokens = samples_and_tokens(batch)
        batches.append(_new_batch(PendingBatch, (id(loader), samples, tokens)))

    def clear(self) -> None:
        """Drop the batches of the calling thread."""
        self._of_thread().clear()

    def last(self) -> PendingBatch | None:
        """Return the latest batch of the calling thread, or None."""
        batches = self._of_thread()
        return batches[-1] if batches else None

    def remove(self, batch: PendingBatch) -> None:
        """Drop a batch of the calling thread."""
        self._of_thread().remove(batch)

    def take(self) -> list[PendingBatch]:
        """Remove and return the batches on which the calling thread trains now. Batches fetched ahead remain."""
        batches = self._batches
        if batches is None:
            batches = self._batches = self._of_thread()
            self._by_thread.clear()
        ahead = 0 if self.is_exhausted else self.ahead
        if len(batches) == 1 and not ahead:  # the usual case
            return [batches.popleft()]
        return [batches.popleft() for _ in range(len(batches) - ahead)]

    def _of_thread(self) -> deque[PendingBatch]:
        """Return the batches of the thread that trains; before the first backward pass, of the calling thread.

        Batches of further threads than `MAX_THREADS` are not kept.
        """
        if self._batches is not None:
            return self._batches
        batches = self._by_thread.get(get_ident())
        if batches is None:
            batches = deque(maxlen=MAX_BATCHES)
            if len(self._by_thread) < MAX_THREADS:
                self._by_thread[get_ident()] = batches
        return batches
