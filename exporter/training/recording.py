"""The recording of training in this process: marks in, families, records and a reading out.

Used in the training process, by the recording thread, and by a job's thread in three cases: its buffer is full, it has
made a rare call and nothing is in the way, or it wants misuse raised. Whoever interprets holds the lock, and between two
short pieces gives it and the interpreter lock away. Nothing here waits for it, except where misuse is to be raised.

After a fork the child knows nothing of what its parent did, and is not configured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic, time

from exporter.errors import OneLoggerError
from exporter.recording.late import CURRENT_SPAN, WHEN_TRAINING_IS_LOADED
from exporter.recording.marks import FULL_ITEMS, MOST_ITEMS, Track, in_order
from exporter.recording.values import StatReading, TrainingReading
from exporter.training import calls, hot, kinds, provider, reports, telling
from exporter.training.delivery import close_all, flush_all
from exporter.training.events import ErrorEvent, Event
from exporter.training.interpreter import Interpreter, time_of
from exporter.training.job import Job
from exporter.training.kinds import Kind
from exporter.training.misuse import Misuse
from exporter.training.names import SpanName, name_of
from exporter.training.phase_clock import PhaseClock
from exporter.training.provider import Configured
from exporter.training.reading import read
from exporter.training.series import Families
from exporter.training.spans import Span
from exporter.training.types import Attributes, TracingTimestamp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SLICE_SECONDS = 0.0002
"""Interpreting between two chances for the job's threads."""
CHUNK_ITEMS = 1 << 17
"""Items drained at once."""
SLICE_ITEMS = 1 << 11
"""The same, where the time is limited."""
MIXED_ITEMS = 256
"""Items drained of each thread at once, where several mark at the same time."""
HELP_ITEMS = 1024
"""Items that a thread which makes a rare call interprets at most."""
PATIENCE_SECONDS = 1.0
"""The longest that the recording thread waits for a job's thread which interprets, and a call whose misuse is to be
raised for the recording thread."""
EXIT_SECONDS = 2.0
_STANDARD = {str(kind.name): kind for kind in kinds.KINDS} | {
    str(kinds.SAVE_NAMES["async"]): kinds.CHECKPOINT_SAVE
}


class TrainingRecording:
    """What this process records of its training."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._recording = True
        self._begin(monotonic())
        self._announced: Configured | None = None
        self._known_training: object = None
        hot.Hooks.full = self._full
        hot.Hooks.settle = self._settle
        hot.Hooks.span = self._span_of
        reports.on_report(self._report)
        provider.record_by(self)
        provider.on_change(self._configured)

    def _begin(self, began: float) -> None:
        self._families = Families()
        self._misuse = Misuse(self._families)
        job = Job(self._families, self._misuse)
        self._interpreter = Interpreter(job, PhaseClock(self._families, began), self._misuse)
        self._known_drops: dict[Track, int] = {}
        self._read: Sequence[StatReading] = ()
        self._told: TrainingReading | None = None

    # What the recorder asks ------------------------------------------------------------------------------

    def on_first(self, start: Callable[[], None]) -> None:
        """Say what is to be called when there is something to record; it must be cheap and never raise."""
        hot.TRACKS.on_new(start)

    def record(self, *, on: bool) -> None:
        """Say whether anything is recorded in this process."""
        self._recording = on
        if not on:
            hot.switch(on=False)

    def since(self, began: float) -> None:
        """Say at which Unix time the recording of the process began; its first phase begins then."""
        if not self._interpreter.tree.started:
            self._begin(monotonic() - max(time() - began, 0.0))

    def in_use(self) -> bool:
        """Whether anything was told."""
        return bool(hot.TRACKS.all()) or self._misuse.waiting

    def drain(self, give_way: Callable[[], None] = lambda: None) -> None:
        """Interpret all marks up to now.

        Args:
            give_way: Called between two pieces.
        """
        until = monotonic()
        more = True
        while more and self._acquire(PATIENCE_SECONDS):
            try:
                more = self._piece(SLICE_SECONDS, until)
            finally:
                self._release()
            give_way()
        if self._acquire(PATIENCE_SECONDS):
            try:
                self._forget_ended()
            finally:
                self._release()

    def tick(self, give_way: Callable[[], None] = lambda: None) -> None:
        """Interpret where much is waiting, so that what is drained once a second stays little."""
        hot.look_for_asyncio()
        waiting = max([len(track.buffer) for track in hot.TRACKS.all()], default=0)
        if waiting > FULL_ITEMS // 4:
            self.drain(give_way)

    def series(self) -> Sequence[StatReading]:
        """Read all families, with the time up to now."""
        if not self._acquire(PATIENCE_SECONDS):
            return self._read
        try:
            interpreter = self._interpreter
            if interpreter.tree.started:
                interpreter.clock.advance(monotonic())
                interpreter.clock.publish(interpreter.records.offset)
                interpreter.job.progress.publish(interpreter.records.offset)
                interpreter.job.looping.publish()
            if interpreter.tree.started or self._misuse.latest:
                self._read = tuple(self._families.readings())
            return self._read
        finally:
            self._release()

    def reading(self) -> TrainingReading | None:
        """Tell what the families do not; None while nothing was told."""
        if not self._interpreter.tree.started:
            return None
        if self._acquire(PATIENCE_SECONDS):
            try:
                self._told = read(self._interpreter)
            finally:
                self._release()
        return self._told

    def collect(self) -> None:
        """Take the values of the calling thread's tensors that have arrived."""
        telling.collect()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until the exporters of spans have taken what there is."""
        return flush_all(timeout_seconds)

    def close(self) -> None:
        """Give the exporters of spans a bounded time to end."""
        close_all(EXIT_SECONDS)

    def settle(self) -> None:
        """Count what may still be corrected; before the last reading."""
        if self._acquire(PATIENCE_SECONDS):
            try:
                self._interpreter.job.progress.settle()
            finally:
                self._release()

    def reset(self) -> None:
        """Count from zero; what is open stays open."""
        if self._acquire(PATIENCE_SECONDS):
            try:
                self._interpreter.reset(monotonic())
            finally:
                self._release()

    def after_fork(self) -> None:
        """In a forked child: forget what the parent recorded."""
        self._lock = threading.Lock()
        self._owner = None
        hot.TRACKS.clear()
        hot.forget_open()
        hot.Hooks.values = None
        hot.raise_misuse(on=False)
        if not self._recording or not hot.is_on():
            hot.switch(on=self._recording)
        self._announced = self._known_training = None
        self._begin(monotonic())

    # What the job's threads do ---------------------------------------------------------------------------

    def _acquire(self, seconds: float) -> bool:
        """Become the one who interprets, within the time; never within itself, as a signal handler would be."""
        if self._owner == threading.get_ident() or not self._lock.acquire(timeout=seconds):
            return False
        self._owner = threading.get_ident()
        return True

    def _release(self) -> None:
        self._owner = None
        self._lock.release()

    def _piece(self, seconds: float, until: float) -> bool:
        """Interpret some marks; by whoever holds the lock.

        Args:
            seconds: About how long.
            until: Marks after this time may stay for later.

        Returns:
            Whether there are more.
        """
        interpreter = self._interpreter
        interpreter.records.offset = time() - monotonic()
        self._misuse.settle()
        busy = [track for track in hot.TRACKS.all() if track.buffer or track.waiting]
        for track in busy:
            if len(track.buffer) > 2 * FULL_ITEMS and track.looks:
                track.watch()
            if len(track.buffer) > MOST_ITEMS:
                track.drop()
            if track.dropped != self._known_drops.get(track, 0):
                interpreter.dropped(track, track.dropped - self._known_drops.get(track, 0))
                self._known_drops[track] = track.dropped
        if len(busy) == 1:
            track = busy[0]
            most = CHUNK_ITEMS if seconds == inf else SLICE_ITEMS
            items = track.waiting
            if len(items) < most:
                items = items + track.take(most - len(items))
            taken = interpreter.take(track, items, seconds)
            track.waiting = items[taken:]
            # A thread that marks all the time would never let it come to an end otherwise.
            return bool(track.waiting or track.buffer) and interpreter.now < until
        if busy:
            marks = in_order(busy, until, CHUNK_ITEMS if seconds == inf else MIXED_ITEMS, time_of)
            for _, _, track, code, value in marks:
                interpreter.take_one(track, code, value)
            return bool(marks) and interpreter.now < until
        return False

    def _forget_ended(self) -> None:
        """Let go of the threads and tasks that have ended."""
        for track in hot.TRACKS.forget_ended():
            self._known_drops.pop(track, None)
            self._interpreter.forget(track)

    def _try(self) -> bool:
        """Interpret all there is on this thread, if nobody else does."""
        if not self._acquire(0):
            return False
        try:
            until = monotonic()
            while self._piece(inf, until):
                pass
        finally:
            self._release()
        return True

    def _full(self, track: Track, failing: bool) -> None:  # as the hot path calls it
        if hot.limit < 0:
            self._strict(failing=failing)
        elif not self._try() and len(track.buffer) > MOST_ITEMS:
            track.drop()

    def _settle(self, track: Track, failing: bool) -> None:  # as the hot path calls it
        if hot.limit < 0:
            self._strict(failing=failing)
        elif len(track.buffer) <= HELP_ITEMS:
            self._try()

    def _strict(self, *, failing: bool) -> None:
        """Interpret at once, and raise what was wrong.

        Raises:
            OneLoggerError: A call since the last one cannot be meant so; not while the job's own exception passes.
        """
        if not self._acquire(PATIENCE_SECONDS):
            return
        try:
            while self._piece(inf, monotonic()):
                pass
            problems = list(self._misuse.latest)
            self._misuse.latest.clear()
        finally:
            self._release()
        if problems and not failing:
            raise OneLoggerError(problems[0])

    def _span_of(self, track: Track, kind: Kind) -> Span | None:
        """Give the span of an open block, as far as it is known by now."""
        self._try()
        opened = None if track.state is None else track.state.latest(kind)
        return None if opened is None else self._interpreter.records.span(opened)

    def _report(self, call: str, rule: str, expected: str) -> None:
        self._misuse.report(call, rule, expected)

    def _configured(self, configured: Configured) -> None:
        """Take a change of the configuration, on the thread that makes it."""
        if not configured.enabled:
            hot.switch(on=False)
            return
        training, settings = configured.training, configured.settings
        first = self._announced is None
        if first:
            self._announced = configured
            calls.say("configured", configured=configured)
        if training is not None and training is not self._known_training:
            self._known_training = training
            varying = tuple(sorted(training.varying() & set(calls.LOOP_FIELDS)))
            world = "world_size" in settings.varying()

            def values() -> dict[str, Any]:
                found = {name: training.value(name) for name in varying}
                return found | {"world_size": settings.value("world_size")} if world else found

            hot.Hooks.values = values if varying or world else None
            if not first:
                calls.say("set_training_telemetry_config", training=calls.training_values())
        hot.raise_misuse(on=settings.propagates)

    # Spans that the job makes by itself -------------------------------------------------------------------

    def start_span(
        self,
        name: SpanName,
        span_attributes: Attributes | None = None,
        start_event_attributes: Attributes | None = None,
        start_time: TracingTimestamp | None = None,
        parent_span: Span | None = None,
    ) -> Span:
        """Begin one, in the parent that is given or else in what this thread or task is in."""
        kind = _STANDARD.get(name_of(name)) or kinds.kind_named(name, phase=False)
        values: dict[str, Any] | None = None
        if kind is kinds.APPLICATION:
            values = calls.application_values()
        elif kind is kinds.TRAINING_LOOP:
            values = calls.loop_values("start", 0, None, None, None)
        elif kind is kinds.CHECKPOINT_SAVE:
            values = calls.save_values(0)
        return calls.begin(
            kind,
            "start",
            at=start_time,
            name=name,
            span_attributes=span_attributes,
            start_event_attributes=start_event_attributes,
            parent=parent_span,
            values=values,
        )

    def stop_span(
        self,
        span: Span,
        stop_event_attributes: Attributes | None = None,
        stop_time: TracingTimestamp | None = None,
    ) -> None:
        """End one."""
        given: object = span
        if not isinstance(given, Span):
            reports.report("recorder.stop", "no_such_span", f"a span, not {type(given).__name__}")
            return
        kind = _STANDARD.get(span.name_str) or kinds.kind_named(span.name, phase=False)
        calls.end(kind, "stop", at=stop_time, span=span, attributes=stop_event_attributes)

    def span_event(self, span: Span, event: Event) -> None:
        """Record an event of one, of a standard one too."""
        if isinstance(event, Event) and hasattr(span, "add_event"):
            span.add_event(event)
        else:
            reports.report("recorder.event", "no_such_span", "a span and an event")

    def span_error(self, span: Span, event: ErrorEvent) -> None:
        """Record an error of the application in one, of a standard one too."""
        given: object = span
        if isinstance(given, Span):
            given.keep(event)
            calls.say("span_error", span=given, event=event)
        else:
            reports.report("recorder.error", "no_such_span", "a span that is active")

    def active_spans(self, name: SpanName) -> list[Span]:
        """Give those of a name that have not ended."""
        self._try()
        text = name_of(name)
        found = [opened.span for opened in self._interpreter.tree.all()]
        return [span for span in found if span is not None and span.name_str == text]


TRAINING = TrainingRecording()
"""That of this process."""

CURRENT_SPAN.find = hot.current_span_id

for _tell in WHEN_TRAINING_IS_LOADED:
    _tell(TRAINING)
