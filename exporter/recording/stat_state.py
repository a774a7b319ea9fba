"""State of a Stat: the buffer of samples, the open and the last closed window, and the totals.

Threads of the job append to the buffer and to the refusals. All other state changes within `RecordingThread.run_exclusively`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from math import isfinite

from exporter.recording.conversion import Rejection, to_sample
from exporter.recording.exponential import count_into
from exporter.recording.handle import Handle
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.recording.tensors import TensorReader
from exporter.recording.values import Aggregation, StatDefinition, StatReading, WindowReading
from exporter.recording.windows import DoubleDoubleSum, Window

BUFFER_SAMPLES = 1 << 20
"""Maximum number of samples in a Stat's buffer: a million samples a second for a second, at most 32 MiB."""
CHUNK_SAMPLES = 4096
"""Number of samples that are drained at once. Threads of the job may have to wait for this work, which takes less than 1 ms."""

_NUMBERS = frozenset({float, int, bool})


class StatState:
    """State of a Stat.

    Attributes:
        definition: Definition in the code.
        effective: Effective definition: the definition in the code, changed by the Stat rules of the configuration.
        is_exporter_family: True for a family of the exporter, False for a Stat of the job.
        origin: Source line of the first construction, as `file:line`.
        buffer: Samples that have not been drained. If it is full, the oldest samples are lost.
        refusals: Reasons for missing samples: `Stat.add_tensor` refused a tensor, or a passive callback raised.
        foreign_reading: Reading that replaces the samples, for a metric of another library; None for other Stats.
        window_handlers: Handlers of closed windows with samples.
        measure: Callback of a passive Stat; None for other Stats.
        tensors: Reader of the tensors of `Stat.add_tensor`; None before the first tensor.
        closed_window: Last closed window; empty before the first.
        count: Number of accepted samples since the start or the last `reset`.
    """

    tensors: TensorReader | None = None

    def __init__(
        self,
        definition: StatDefinition,
        *,
        wall: float,
        max_samples: int = BUFFER_SAMPLES,
        is_exporter_family: bool = False,
        batch_handlers: Sequence[Handle] = (),
        dispose: Callable[[object], object] | None = None,
    ) -> None:
        self._batch_handlers = batch_handlers
        self._dispose = dispose  # receives lists of foreign objects, whose finalizers may run the job's code
        self.definition = self.effective = definition
        self.is_exporter_family, self.origin = is_exporter_family, ""
        self.buffer: deque[object] = deque(maxlen=max_samples)
        self.refusals: deque[str] = deque(maxlen=max_samples)
        self.enabled = True
        self.measure: Callable[[], float] | None = None
        self.window_handlers: tuple[Handle, ...] = ()
        self._next_definition: StatDefinition | None = None  # effective from the next window
        self.reset(wall=wall)

    def tensor_reader(self) -> TensorReader:
        """Return the reader of tensors, created on first use."""
        if self.tensors is None:
            # A single call of C keeps the reader of the first of several threads.
            vars(self).setdefault("tensors", TensorReader(self.buffer.append, self.refusals.append))
        reader: TensorReader = vars(self)["tensors"]
        return reader

    def after_fork(self, *, wall: float) -> None:
        """Discard the parent's samples and tensors in flight, in a forked child."""
        if self.tensors is not None:
            self.tensors.after_fork()
        self.buffer.clear()
        self.refusals.clear()
        self.reset(wall=wall)

    def reset(self, *, wall: float) -> None:
        """Count from zero. Samples in the buffer, and refused samples that are not counted yet, are counted later."""
        self.count = 0
        self._sum = DoubleDoubleSum()
        self._is_summable = True  # False after a negative sample
        self._bucket_counts: list[int] | None = None
        self._exponential: dict[int, int] = {}
        self._last_sample: float | None = None
        self._rejected_samples: dict[str, int] = {}
        self._overflows = 0
        self._value: float | None = None
        self._reading: StatReading | None = None
        self.foreign_reading: StatReading | None = None
        self._begin_window(wall)
        self.closed_window = WindowReading(wall, wall, 0)

    @property
    def sum(self) -> float:
        """Sum of the samples accepted so far."""
        return self._sum.value

    def override(self, definition: StatDefinition, *, enabled: bool) -> None:
        """Apply a changed definition from the next window on. After the first sample, the histogram is not changed."""
        if self._bucket_counts is not None:
            aggregations = definition.aggregations - {Aggregation.HISTOGRAM}
            aggregations |= self.effective.aggregations & {Aggregation.HISTOGRAM}
            definition = definition.replace(aggregations=aggregations, buckets=self.effective.buckets)
        self._next_definition = definition
        self.enabled, self._reading = enabled, None
        if not self._window.samples:
            self._begin_window(self._window_start)

    def drain(self, *, wall: float) -> bool:
        """Aggregate up to `CHUNK_SAMPLES` samples of the buffer. Return True if samples are left."""
        buffered_samples = len(self.buffer)
        if buffered_samples == self.buffer.maxlen:
            self._overflows += 1
            self._reading = None
        if not buffered_samples:
            return False
        popleft = self.buffer.popleft
        batch = [popleft() for _ in range(min(buffered_samples, CHUNK_SAMPLES))]
        if not self.enabled:
            self._discard(batch)
        elif samples := self._accept(batch):
            self._absorb(samples, wall)
        return buffered_samples > CHUNK_SAMPLES

    def close_window(self, start: float, end: float, *, is_late: bool, wall: float) -> None:
        """Close the time window. *is_late* is True if a further window has passed since its end: that window is empty."""
        self._close(max(start, self._window_start), end)
        if is_late:
            self.closed_window = WindowReading(end, wall, 0)
        self._begin_window(end)

    def expire(self, *, wall: float) -> None:
        """Replace a closed count window by an empty window after `stale_seconds` without a sample."""
        is_stale = wall - (self._last_sample or wall) > self.effective.stale_seconds
        if is_stale and self.effective.window_seconds is None and self.closed_window.samples:
            self.closed_window, self._reading = WindowReading(self.closed_window.ended, wall, 0), None

    def set_foreign_reading(
        self, count: int, total: float | None, bucket_counts: tuple[int, ...] = (), value: float | None = None
    ) -> None:
        """Set the totals or the value of a metric of another library. May be called on any thread."""
        self.foreign_reading = StatReading(self.effective, count, total, bucket_counts, value=value)

    def reading(self) -> StatReading:
        """Return the reading. Returns the same object until the next change."""
        if self.foreign_reading is not None:
            return self.foreign_reading
        while self.refusals:
            self._reject(self.refusals.popleft())
        if self._reading is None:
            buckets = self.effective.buckets
            self._reading = StatReading(
                self.effective,
                self.count,
                self.sum if self._is_summable and isfinite(self.sum) else None,
                tuple(self._bucket_counts) if self._bucket_counts and buckets else (0,) * len(buckets),
                self.closed_window if self.effective.kind == "stat" else None,
                self._last_sample,
                dict(self._rejected_samples),
                self._overflows,
                self._value if self.effective.kind == "gauge" else None,
                dict(self._exponential),
            )
        return self._reading

    def _accept(self, batch: list[object]) -> list[float]:
        """Return the samples of a batch as finite floats, and count other values as rejected."""
        try:
            kinds = set(map(type, batch))
            if kinds <= _NUMBERS:
                samples = batch if kinds == {float} else list(map(float, batch))  # type: ignore[arg-type]  # all plain numbers
                if all(map(isfinite, samples)):  # type: ignore[arg-type]  # all plain numbers
                    return samples  # type: ignore[return-value]  # all floats
        except Exception as error:  # an int too large for a float, or code of a metaclass
            if is_from_signal_handler(error):
                raise
        accepted_samples: list[float] = []
        foreign_objects: list[object] = []
        while batch:
            value = batch.pop()
            sample = to_sample(value)
            if type(sample) is float:
                accepted_samples.append(sample)
            else:
                self._reject(sample.value)  # type: ignore[union-attr]  # a Rejection
                if sample is Rejection.NOT_A_NUMBER:
                    foreign_objects.append(value)
        del value  # the last reference would run the object's finalizer on this thread
        accepted_samples.reverse()
        if foreign_objects and self._dispose is not None:
            self._dispose(foreign_objects)
        return accepted_samples

    def _discard(self, batch: list[object]) -> None:
        """Discard the samples of a disabled Stat, without running the finalizers of foreign objects on this thread."""
        foreign_objects = [
            sample
            for sample in batch
            if not (type(sample) is float or type(sample) is int or type(sample) is bool)
        ]
        batch.clear()
        if foreign_objects and self._dispose is not None:
            self._dispose(foreign_objects)

    def _reject(self, reason: str) -> None:
        self._rejected_samples[reason] = self._rejected_samples.get(reason, 0) + 1
        self._reading = None

    def _absorb(self, samples: list[float], wall: float) -> None:
        """Add finite samples to the totals, the histogram and the window, and pass them to the batch handlers."""
        if self._batch_handlers and self.effective.kind == "stat":
            for handler in tuple(self._batch_handlers):
                handler.put((self, samples))
        self._reading = None
        self._last_sample = wall
        self._value = samples[-1]
        self.count += len(samples)
        sum_of_samples = DoubleDoubleSum(samples)
        self._sum.add_sum(sum_of_samples)
        if self._bucket_counts is None:
            self._bucket_counts = [0] * len(self.effective.buckets)
        sorted_samples = self._order(samples)
        if sorted_samples[0] < 0:
            self._is_summable = False
        if self._bucket_counts:
            for index, bound in enumerate(self.effective.buckets):
                self._bucket_counts[index] += bisect_right(sorted_samples, bound)
            count_into(self._exponential, sorted_samples)
        if self.effective.window_samples is None:
            self._window.add(samples, sorted_samples, sum_of_samples)
        else:
            self._fill_count_windows(samples, wall)

    def _fill_count_windows(self, samples: list[float], wall: float) -> None:
        """Add samples to windows that close after `window_samples` samples; a part may remain in the open window."""
        position, total = 0, len(samples)
        while position < total:
            limit = self.effective.window_samples or total  # the next definition may have a time window
            if not self.window_handlers and not self._window.samples and total - position >= 2 * limit:
                # Earlier windows are skipped, because without handlers only the last closed window is visible.
                position += ((total - position) // limit - 1) * limit
            part = samples[position : position + limit - self._window.samples]
            self._window.add(part, self._order(part), DoubleDoubleSum(part))
            position += len(part)
            if self._window.samples == self.effective.window_samples:
                self._close(self._window_start, wall)
                self._begin_window(wall)

    def _order(self, samples: list[float]) -> list[float]:
        """Return the samples in ascending order, or only the minimum and the maximum if the order is not needed."""
        if self._bucket_counts or self._window.needs_order:
            return sorted(samples)
        return [min(samples), max(samples)]

    def _close(self, start: float, end: float) -> None:
        """Store the open window as the closed window, and pass it to the handlers if it has samples."""
        samples = self._window.samples
        values = self._window.values() if samples >= self.effective.min_samples else {}
        self.closed_window = WindowReading(start, end, samples, values)
        self._reading = None
        if samples:
            for handler in self.window_handlers:
                handler.put((self, self.closed_window))

    def _begin_window(self, start: float) -> None:
        """Open an empty window. A changed definition takes effect."""
        if self._next_definition is not None:
            self.effective, self._next_definition = self._next_definition, None
        self._window = Window(self.effective.aggregations)
        self._window_start = start
