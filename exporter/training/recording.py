"""The recording of training in this process: span buffers in, families and a reading out.

Interpreted by the recording thread, or by a job's thread whose buffer is full, which has made a rare call while nobody else
interprets, or which wants misuse raised: whoever does holds the lock, and gives it away between two short pieces.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from time import monotonic, time
from typing import Any

from exporter.errors import OneLoggerError
from exporter.recording.events import EVENTS
from exporter.recording.recorder import RECORDER
from exporter.recording.values import StatReading, TrainingReading
from exporter.training import buffers, calls, gpu_time
from exporter.training.buffers import FULL_ITEMS, MOST_ITEMS, Hooks, SpanBuffer
from exporter.training.interpreter import Interpreter, time_of
from exporter.training.job import Job
from exporter.training.metrics import REPORTED, Families, Misuse
from exporter.training.span_kinds import Kind
from exporter.training.spans import NO_TELEMETRY, Span, Telemetry

PIECE_ITEMS = 256
"""Items drained of each thread between two chances for the job's threads: some 0.2 ms."""
CHUNK_ITEMS = 1 << 17
"""The same, by a thread that interprets what it has noted itself."""
HELP_ITEMS = 1024
"""Items that a thread which makes a rare call interprets at most."""
SPAN_SECONDS = 0.05
"""The longest that a call waits which asks a short block for its span, for the recording thread to finish a piece."""
PATIENCE_SECONDS = 1.0
"""The longest that the recording thread waits for a job's thread which interprets, and a call whose misuse is to be
raised for the recording thread."""

Mark = tuple[float, int, SpanBuffer, tuple[int, Any]]
"""Its time, its place among those that were drained with it, its buffer, its code and value."""


class TrainingRecording:
    """What this process records of its training."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._recording = True
        # Wait for the exporters of spans, and say whether they have taken what there is; give them a bounded time to end.
        self.flush: Callable[[float], bool] = lambda _timeout_seconds: True
        self.close: Callable[[float], None] = lambda _timeout_seconds: None
        self._begin(monotonic())
        Hooks.full = self._full
        Hooks.settle = self._settle
        Hooks.span = self._span_of
        gpu_time.begin_anew()

    def _begin(self, began: float) -> None:
        self._families = Families()
        self._misuse = Misuse(self._families)
        self._job = Job(self._families, self._misuse, began)
        self._interpreter = Interpreter(self._job)
        self._series: Sequence[StatReading] = ()
        self._reading: TrainingReading | None = None

    # What the recorder asks ------------------------------------------------------------------------------

    def record(self, *, on: bool) -> None:
        """Say whether anything is recorded in this process."""
        self._recording = on
        if not on:
            buffers.switch(on=False)

    def since(self, began: float) -> None:
        """Say at which Unix time the recording of the process began; its first phase begins then."""
        if not self._interpreter.open.started:
            self._begin(monotonic() - max(time() - began, 0.0))

    def in_use(self) -> bool:
        """Tell whether anything was told."""
        return bool(buffers.all_buffers() or REPORTED)

    def trains(self) -> bool:
        """Tell whether the job has told of a phase, a step or a number: whether this process trains."""
        return self._interpreter.trains

    def collect(self, *, final: bool) -> None:
        """Interpret all marks up to now."""
        self.drain()
        if final:
            self.settle()

    def current_span_id(self) -> str | None:
        """Return the id of the calling thread's innermost span."""
        return buffers.current_span_id()

    def collect_tensors(self) -> None:
        """Read the tensors in flight of the calling thread that have arrived."""
        Hooks.collect()

    def drain(self) -> None:
        """Interpret all marks up to now."""
        until = monotonic()
        more = True
        while more:
            with self._alone(PATIENCE_SECONDS) as alone:
                more = alone and self._piece(PIECE_ITEMS, until)
                if alone and not more:
                    for buffer in buffers.forget_ended():
                        self._interpreter.forget(buffer)
            RECORDER.yield_gil()

    def tick(self) -> None:
        """Interpret where much is waiting, so that what is drained once a second stays little."""
        buffers.look_for_tasks()
        if any(len(buffer.items) > FULL_ITEMS // 4 for buffer in buffers.all_buffers()):
            self.drain()

    def series(self) -> Sequence[StatReading]:
        """Read all families, with the time up to now."""
        with self._alone(PATIENCE_SECONDS) as alone:
            if alone and self._interpreter.open.started:
                self._job.publish(monotonic())
                if Hooks.gpu is not None:
                    # A job that only tells that steps have ended has no main thread of phases.
                    main = self._interpreter.open.main_thread or threading.main_thread().ident
                    Hooks.gpu.decide(main, self._job.progress.ideal, buffers.all_buffers())
                    Hooks.gpu.publish(self._families)
            if alone and (self._interpreter.open.started or self._misuse.latest):
                self._series = tuple(self._families.readings())
        return self._series

    def reading(self) -> TrainingReading | None:
        """Tell what the families do not; None while nothing was told."""
        with self._alone(PATIENCE_SECONDS) as alone:
            if alone and self._interpreter.open.started:
                self._reading = self._job.reading()
        return self._reading

    def settle(self) -> None:
        """Count what may still be corrected; before the last reading."""
        with self._alone(PATIENCE_SECONDS) as alone:
            if alone:
                self._job.progress.count_expected()

    def reset(self) -> None:
        """Count from zero; what is open stays open."""
        with self._alone(PATIENCE_SECONDS) as alone:
            if alone:
                self._job.reset(monotonic())

    def after_fork(self) -> None:
        """In a forked child: forget what the parent recorded."""
        self._lock = threading.Lock()
        self._owner = None
        REPORTED.clear()
        buffers.forget_parent()
        Hooks.values = None
        Hooks.telemetry = NO_TELEMETRY
        gpu_time.begin_anew()
        buffers.raise_misuse(on=False)
        if not self._recording or not buffers.is_on():
            buffers.switch(on=self._recording)
        self._begin(monotonic())

    # What bridges and telemetries ask --------------------------------------------------------------------

    @staticmethod
    def discard_iteration() -> None:
        """Forget the iteration that is open: a bridge has found that it is none, and then leaves it."""
        calls.say("discard_iteration")

    @property
    def job_tells(self) -> bool:
        """Whether the job has told of a loop or a step itself, so that nobody needs to guess any."""
        return self._job.tells

    def configure(self, telemetry: Telemetry) -> None:
        """Take what the job configures, or that it has changed, on the thread that does so."""
        known, Hooks.telemetry = Hooks.telemetry, telemetry
        if not telemetry.enabled:
            buffers.switch(on=False)
            return
        if known is not telemetry:
            calls.say("configured", telemetry=telemetry)
        buffers.raise_misuse(on=telemetry.propagates)

    def open_spans(self) -> list[Span]:
        """Give the spans that have not ended, in the order of their begins."""
        self._try()
        with self._alone(SPAN_SECONDS) as alone:
            opened = self._interpreter.open.all() if alone else []
            return [self._interpreter.span_of(each) for each in opened]

    # What the job's threads do ---------------------------------------------------------------------------

    @contextmanager
    def _alone(self, seconds: float) -> Iterator[bool]:
        """Become the one who interprets, within the time; never within itself, as a signal handler would be."""
        lock = self._lock  # a handler may fork, too: then the child has another one
        if self._owner == threading.get_ident() or not lock.acquire(timeout=seconds):
            yield False
            return
        self._owner = threading.get_ident()
        try:
            yield True
        finally:
            if lock is self._lock:
                self._owner = None
            lock.release()

    def _piece(self, most: int, until: float) -> bool:
        """Interpret some marks, by whoever holds the lock; those after `until` may stay. Tells whether there are more."""
        interpreter = self._interpreter
        self._job.offset = time() - monotonic()
        self._misuse.count_reported()
        interpreter.traced = any(each.names("span") for each in EVENTS.active)
        busy = [buffer for buffer in buffers.all_buffers() if buffer.items or buffer.waiting]
        for buffer in busy:
            if len(buffer.items) > MOST_ITEMS:
                buffer.drop()
            if buffer.dropped != buffer.counted:
                interpreter.dropped(buffer, buffer.dropped - buffer.counted)
                buffer.counted = buffer.dropped
        if len(busy) == 1:
            interpreter.take(busy[0], busy[0].take(most))
            more = bool(busy[0].items)
        else:
            marks = in_order(busy, until, most)
            for _, _, buffer, mark in marks:
                interpreter.take(buffer, mark)
            more = bool(marks)
        # A thread that marks all the time would never let it come to an end.
        return more and interpreter.now < until

    @contextmanager
    def _caught_up(self, seconds: float) -> Iterator[bool]:
        """Interpret all there is on this thread, unless somebody else does so for longer than that."""
        with self._alone(seconds) as alone:
            until = monotonic()
            while alone and self._piece(CHUNK_ITEMS, until):
                pass
            yield alone

    def _try(self) -> bool:
        with self._caught_up(0) as alone:
            return alone

    def _full(self, buffer: SpanBuffer, failing: bool) -> None:  # as the buffers call it
        if buffers.limit < 0:
            self._strict(failing=failing)
        elif not self._try() and len(buffer.items) > MOST_ITEMS:
            buffer.drop()

    def _settle(self, buffer: SpanBuffer, failing: bool) -> None:  # as the buffers call it
        if buffers.limit < 0:
            self._strict(failing=failing)
        elif len(buffer.items) <= HELP_ITEMS:
            self._try()

    def _strict(self, *, failing: bool) -> None:
        """Interpret at once, and raise what was wrong since the last call; not while the job's own exception passes."""
        problems: list[str] = []
        with self._caught_up(PATIENCE_SECONDS) as alone:
            if alone:
                problems = list(self._misuse.latest)
                self._misuse.latest.clear()
        if problems and not failing:
            raise OneLoggerError(problems[0])

    def _span_of(self, buffer: SpanBuffer, kind: Kind) -> Span | None:
        """Give the span of an open block; None where none is open, or nobody can tell soon."""
        with self._caught_up(SPAN_SECONDS) as alone:
            opened = buffer.state.latest(kind) if alone and buffer.state is not None else None
            return None if opened is None else self._interpreter.span_of(opened)


def in_order(busy: list[SpanBuffer], until: float, most: int) -> list[Mark]:
    """Drain so many items of several buffers, and give their marks up to a time in order."""
    drained: list[
        Mark
    ] = []  # later ones stay: another buffer, drained before, may have an earlier one by now
    for buffer in busy:
        items, at = buffer.take(most), 0.0
        for position in range(0, len(items), 2):
            mark = items[position], items[position + 1]
            at = max(at, time_of(*mark) or at)
            drained.append((at, len(drained), buffer, mark))
        if buffer.items:
            until = min(until, at)  # it has more, which may come before the others'
    drained.sort(key=itemgetter(0, 1))
    ready = bisect_right(drained, until, key=itemgetter(0))
    for _, _, buffer, mark in sorted(drained[ready:], key=itemgetter(1)):
        buffer.waiting += mark
    return drained[:ready]


TRAINING = TrainingRecording()
"""That of this process."""

TRAINING.record(on=RECORDER.recording)
TRAINING.since(RECORDER.started_at)
