"""Pending batches: batches that were fetched from a loader and not trained on yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from exporter.bridges.batches import samples_and_tokens
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.training.numbers import Numbers

MAX_BATCHES = 64
"""Maximum number of earlier batches in a queue. Above the limit, the oldest batch is dropped."""
MAX_THREADS = 16
"""Maximum number of threads with a queue before the first backward pass."""


@dataclass(slots=True)
class PendingBatch:
    """Size of a pending batch."""

    iterator_id: int  # `id()` of the iterator that returned the batch
    samples: int | None
    tokens: int | None


class BatchQueue:
    """Pending batches of a thread: the latest in the queue's own fields, the earlier batches in a deque.

    A loop without accumulation has a single pending batch. No object is created for this batch.
    """

    __slots__ = ("earlier", "has_latest", "iterator_id", "samples", "tokens")

    def __init__(self) -> None:
        self.earlier: deque[PendingBatch] = deque(maxlen=MAX_BATCHES)
        self.has_latest = False
        self.iterator_id = 0
        self.samples: int | None = None
        self.tokens: int | None = None

    def latest(self) -> PendingBatch | None:
        """Return the latest batch, or None."""
        return PendingBatch(self.iterator_id, self.samples, self.tokens) if self.has_latest else None

    def move_latest(self) -> None:
        """Move the latest batch to the earlier batches."""
        self.earlier.append(PendingBatch(self.iterator_id, self.samples, self.tokens))
        self.has_latest = False

    def drop_latest(self) -> None:
        """Drop the latest batch."""
        self.has_latest = bool(self.earlier)
        if self.earlier:
            batch = self.earlier.pop()
            self.iterator_id, self.samples, self.tokens = batch.iterator_id, batch.samples, batch.tokens

    def clear(self) -> None:
        """Drop all batches."""
        self.earlier.clear()
        self.has_latest = False


class PendingBatches:
    """Pending batches of the thread that trains.

    The first call of `count_trained`, at the first backward pass, determines that thread. Until then, each thread has a queue.

    Attributes:
        fetches_ahead: True if the loader fetches a batch before the previous batch is trained on.
        is_exhausted: True if the loader has returned its last batch.
    """

    def __init__(self) -> None:
        self.fetches_ahead = False
        self.is_exhausted = False
        self._queue: BatchQueue | None = None  # of the thread that trains
        self._queues: dict[int, BatchQueue] = {}  # by thread

    def add(self, iterator: Any, batch: Any) -> None:
        """Add a batch that the calling thread has fetched."""
        self.is_exhausted = False
        queue = self._queue
        if queue is None:
            queue = self._queue_of_thread()
        if queue.has_latest:
            queue.move_latest()
        batch_class = type(batch)
        try:  # for a tensor, and for a list of tensors
            samples = batch[0].shape[0] if batch_class is list or batch_class is tuple else batch.shape[0]
        except (AttributeError, LookupError, TypeError):  # another batch, such as a mapping
            samples = None
        except Exception as error:  # a batch is an object of the job
            if is_from_signal_handler(error):
                raise
            samples = None
        if type(samples) is int and samples:
            queue.samples, queue.tokens = samples, None
        else:
            queue.samples, queue.tokens = samples_and_tokens(batch)
        queue.iterator_id = id(iterator)
        queue.has_latest = True

    def clear(self) -> None:
        """Drop the batches of the calling thread."""
        self._queue_of_thread().clear()

    def latest(self) -> PendingBatch | None:
        """Return the latest batch of the calling thread, or None."""
        return self._queue_of_thread().latest()

    def drop_latest(self) -> None:
        """Drop the latest batch of the calling thread."""
        self._queue_of_thread().drop_latest()

    def count_trained(self, numbers: Numbers) -> int:
        """Count the batches on which the calling thread trains now, and return their number. A batch fetched ahead remains."""
        queue = self._queue
        if queue is None:
            queue = self._queue = self._queue_of_thread()
            self._queues.clear()
        is_latest_trained = queue.has_latest and (self.is_exhausted or not self.fetches_ahead)
        if not queue.earlier:  # without accumulation
            if is_latest_trained:
                queue.has_latest = False
                samples, train = queue.samples, numbers.train
                if samples and queue.tokens is None and train.samples and numbers.microbatches:
                    # As `add_batch` counts a further batch. A call would cost 1 µs a step.
                    train.samples += samples
                    numbers.microbatches += 1
                else:
                    numbers.add_batch(samples, queue.tokens)
            return int(is_latest_trained)
        if is_latest_trained:
            queue.move_latest()
        count = len(queue.earlier)
        for batch in queue.earlier:
            numbers.add_batch(batch.samples, batch.tokens)
        queue.earlier.clear()
        return count

    def _queue_of_thread(self) -> BatchQueue:
        """Return the queue of the thread that trains. Before the first backward pass, return the queue of the calling thread.

        Batches of threads above the limit `MAX_THREADS` are dropped.
        """
        if self._queue is not None:
            return self._queue
        queue = self._queues.get(get_ident())
        if queue is None:
            queue = BatchQueue()
            if len(self._queues) < MAX_THREADS:
                self._queues[get_ident()] = queue
        return queue
