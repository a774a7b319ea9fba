"""State of a Stat: the buffer of samples, the open and the last closed window, and the totals.

Threads of the job append to the buffer and the refusals; all other state is protected by the cycle lock of the recorder.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from math import isfinite

from exporter.recording.conversion import Rejection, to_sample
from exporter.recording.exponential import count_into
from exporter.recording.handle import Handle
from exporter.recording.tensors import TensorReader
from exporter.recording.values import Aggregation, StatDefinition, StatReading, WindowReading
from exporter.recording.windows import DoubleDoubleSum, Window

BUFFER_SAMPLES = 1 << 19
"""Bound of a Stat's buffer: a million samples a second for half a second, at most 16 MiB."""
CHUNK_SAMPLES = 4096
"""Samples drained at once: work of less than a millisecond, for which threads of the job may have to wait."""

_NUMBERS = frozenset({float, int, bool})


class StatState:
    """State of a Stat.

    Attributes:
        effective: The definition in force: the definition of the code with the overrides of the configuration.
        is_exporter_family: True for a family of the exporter, False for a Stat of the job.
        origin: Place of the first construction, `file:line`.
        refusals: Reasons for samples that are missing because `Stat.add_tensor` refused them or a passive callback raised.
        foreign_reading: Reading of another library's metric; None for samples of this process.
        window_handlers: Handlers of closed windows with samples.
    """

    def __init__(
        self,
        definition: StatDefinition,
        *,
        wall: float,
        samples: int = BUFFER_SAMPLES,
        is_exporter_family: bool = False,
        batch_handlers: Sequence[Handle] = (),
        dispose: Callable[[object], object] | None = None,
    ) -> None:
        self._batch_handlers = batch_handlers
        self._dispose = dispose  # receives lists of objects whose finalizers may run the job's code
        self.definition = self.effective = definition
        self.is_exporter_family, self.origin = is_exporter_family, ""
        self.buffer: deque[object] = deque(maxlen=samples)
        self.refusals: deque[str] = deque(maxlen=samples)
        self.enabled = True
        self.tensors: TensorReader | None = None
        self.measure: Callable[[], float] | None = None
        self.window_handlers: tuple[Handle, ...] = ()
        self._next: StatDefinition | None = None
        self.reset(wall=wall)

    def after_fork(self, *, wall: float) -> None:
        """Discard the samples and the tensors in flight of the parent in a forked child."""
        if self.tensors is not None:
            self.tensors.after_fork()
        self.reset(wall=wall)

    def reset(self, *, wall: float) -> None:
        """Discard all samples and counts."""
        self.buffer.clear()
        self.refusals.clear()
        self.count = 0
        self._sum = DoubleDoubleSum()
        self._summable = True
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
        """Apply a changed definition from the next window. Histogram buckets change only before the first sample."""
        if self._bucket_counts is not None:
            aggregations = definition.aggregations - {Aggregation.HISTOGRAM}
            aggregations |= self.effective.aggregations & {Aggregation.HISTOGRAM}
            definition = definition.replace(aggregations=aggregations, buckets=self.effective.buckets)
        self._next = definition
        self.enabled, self._reading = enabled, None
        if not self._window.samples:
            self._begin_window(self._window_start)

    def drain(self, *, wall: float) -> bool:
        """Aggregate up to `CHUNK_SAMPLES` samples of the buffer. Return True if more may be left."""
        waiting = len(self.buffer)
        if waiting == self.buffer.maxlen:
            self._overflows += 1
            self._reading = None
        if not waiting:
            return False
        take = self.buffer.popleft
        batch = [take() for _ in range(min(waiting, CHUNK_SAMPLES))]
        if self.enabled and (samples := self._accept(batch)):
            self._absorb(samples, wall)
        return waiting > CHUNK_SAMPLES

    def close_window(self, start: float, end: float, *, late_windows: bool, wall: float) -> None:
        """Close the time window; *late_windows* adds an empty window for the time since its end."""
        self._close(max(start, self._window_start), end)
        if late_windows:
            self.closed_window = WindowReading(end, wall, 0)
        self._begin_window(end)

    def expire(self, *, wall: float) -> None:
        """Drop a count window without new samples for `stale_seconds`."""
        is_stale = wall - (self._last_sample or wall) > self.effective.stale_seconds
        if is_stale and self.effective.window_seconds is None and self.closed_window.samples:
            self.closed_window, self._reading = WindowReading(self.closed_window.ended, wall, 0), None

    def set_foreign_reading(
        self, count: int, total: float | None, bucket_counts: tuple[int, ...] = (), value: float | None = None
    ) -> None:
        """Replace the reading by the totals or the value of another library's metric. May be called on any thread."""
        self.foreign_reading = StatReading(self.effective, count, total, bucket_counts, value=value)

    def reading(self) -> StatReading:
        """Return the reading, which is the same object until the next change."""
        if self.foreign_reading is not None:
            return self.foreign_reading
        while self.refusals:
            self._reject(self.refusals.popleft())
        if self._reading is None:
            buckets = self.effective.buckets
            self._reading = StatReading(
                self.effective,
                self.count,
                self.sum if self._summable and isfinite(self.sum) else None,
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
        """Return the finite floats of a batch. Other values are counted as rejected."""
        try:
            kinds = set(map(type, batch))
            if kinds <= _NUMBERS:
                samples = batch if kinds == {float} else list(map(float, batch))  # type: ignore[arg-type]  # all plain numbers
                if all(map(isfinite, samples)):  # type: ignore[arg-type]  # all plain numbers
                    return samples  # type: ignore[return-value]  # all floats
        except Exception:  # noqa: BLE001, S110  # an int too large for a float, or code of a metaclass
            pass
        accepted: list[float] = []
        foreign: list[object] = []
        while batch:
            value = batch.pop()
            number = to_sample(value)
            if type(number) is float:
                accepted.append(number)
            else:
                self._reject(number.value)  # type: ignore[union-attr]  # a Rejection
                if number is Rejection.NOT_A_NUMBER:
                    foreign.append(value)
        del value
        accepted.reverse()
        if foreign and self._dispose is not None:
            self._dispose(foreign)
        return accepted

    def _reject(self, reason: str) -> None:
        self._rejected_samples[reason] = self._rejected_samples.get(reason, 0) + 1
        self._reading = None

    def _absorb(self, samples: list[float], wall: float) -> None:
        if self._batch_handlers and self.effective.kind == "stat":
            for handler in tuple(self._batch_handlers):
                handler.put((self, samples))
        self._reading = None
        self._last_sample = wall
        self._value = samples[-1]
        self.count += len(samples)
        self._sum.add(samples)
        if self._bucket_counts is None:
            self._bucket_counts = [0] * len(self.effective.buckets)
        sorted_samples = self._order(samples)
        if sorted_samples[0] < 0:
            self._summable = False
        if self._bucket_counts:
            for index, bound in enumerate(self.effective.buckets):
                self._bucket_counts[index] += bisect_right(sorted_samples, bound)
            count_into(self._exponential, sorted_samples)
        if self.effective.window_samples is None:
            self._window.add(samples, sorted_samples)
        else:
            self._fill_count_windows(samples, wall)

    def _fill_count_windows(self, samples: list[float], wall: float) -> None:
        position, total = 0, len(samples)
        while position < total:
            limit = self.effective.window_samples or total  # the close may have switched to a time window
            if not self.window_handlers and not self._window.samples and total - position >= 2 * limit:
                # Without handlers only the last closed window is visible: earlier windows are skipped.
                position += ((total - position) // limit - 1) * limit
            part = samples[position : position + limit - self._window.samples]
            self._window.add(part, self._order(part))
            position += len(part)
            if self._window.samples == self.effective.window_samples:
                self._close(self._window_start, wall)
                self._begin_window(wall)

    def _order(self, samples: list[float]) -> list[float]:
        if self._bucket_counts or self._window.needs_order:
            return sorted(samples)
        return [min(samples), max(samples)]

    def _close(self, start: float, end: float) -> None:
        samples = self._window.samples
        values = self._window.values() if samples >= self.effective.min_samples else {}
        self.closed_window = WindowReading(start, end, samples, values)
        self._reading = None
        if samples:
            for handler in self.window_handlers:
                handler.put((self, self.closed_window))

    def _begin_window(self, start: float) -> None:
        if self._next is not None:
            self.effective, self._next = self._next, None
        self._window = Window(self.effective.aggregations)
        self._window_start = start
