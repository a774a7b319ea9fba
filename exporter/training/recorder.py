"""Training recorder: the training of a process, from the job's blocks to the metrics in the feed.

The job's threads update the phase clock and the numbers, and append records. The recording thread applies the records. From
`MANY_RECORDS` queued records on, the appending thread applies the records.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, time
from typing import Protocol

from exporter.recording.conversion import AttributeValue
from exporter.recording.recorder import RECORDER
from exporter.recording.signal_safety import SignalSafeLock, is_from_signal_handler
from exporter.recording.values import StatReading, TrainingReading
from exporter.training import kinds
from exporter.training.attributes import TracingTimestamp
from exporter.training.checkpoints import SavePolicy
from exporter.training.clock import PhaseClock, StackEntry
from exporter.training.current_span import CurrentSpan
from exporter.training.gpu_time import GpuTimer
from exporter.training.kinds import BlockKind
from exporter.training.misuse import PENDING_REPORTS
from exporter.training.numbers import Numbers
from exporter.training.observer import ObservedBlock
from exporter.training.observers import Observers
from exporter.training.records import (
    EvaluationStepEnded,
    Expectation,
    NonfiniteBegan,
    Record,
    RunDescribed,
    StepReported,
)
from exporter.training.state import TrainingState

MANY_RECORDS = 1 << 14
"""Number of queued records from which the appending thread applies the records itself."""
MAX_RECORDS = 1 << 16
"""Capacity of the queue. Further records are dropped and counted."""
BATCH_RECORDS = 128
"""Number of records that are applied between two releases of the interpreter lock."""
MAX_OPEN_RARE_BLOCKS = 1024
"""Limit of open rare blocks. Above the limit, the oldest block is ended."""
MAX_CALLBACK_BLOCKS = 64
"""Limit of the hot blocks of callbacks that are tracked. Above the limit, the oldest block is no longer tracked."""
LOCK_TIMEOUT_SECONDS = 1.0
"""Maximum wait of the recording thread for another thread that applies records."""


class OpenRareBlock(Protocol):
    """Interface of an open rare block that the recorder needs."""

    kind: BlockKind
    observed: ObservedBlock

    def discard(self) -> None:
        """Discard the block, which will not end."""

    def evict(self) -> None:
        """End the block as incomplete, because more than `MAX_OPEN_RARE_BLOCKS` are open."""


class OpenHotBlock(Protocol):
    """Interface of a hot block, started by a callback, that the recorder needs."""

    kind: BlockKind
    is_open: bool

    def abandon(self, now: float) -> None:
        """End the block without counting a step."""


class TrainingRecording:
    """Recorder of a process's training.

    Attributes:
        clock: The phase clock, which stays the same object after a reset or a fork.
        job_is_instrumented: True if the job reports its own loops or steps. Blocks that bridges infer are then refused.
        expected: Configured samples and tokens of a step, or None.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self.clock = PhaseClock(monotonic())
        self.records: deque[Record] = deque()
        self.numbers = Numbers(self._record_nonfinite)
        self.open_rare_blocks: dict[int, OpenRareBlock] = {}
        self.callback_blocks: deque[OpenHotBlock] = deque(maxlen=MAX_CALLBACK_BLOCKS)
        self.iterations_of_other_threads: dict[int, StackEntry] = {}  # by thread, except the main thread
        self.is_on = RECORDER.is_recording
        # Functions that flush and close the span exporters within a timeout in seconds.
        self._exporters: list[tuple[Callable[[float], bool], Callable[[float], None]]] = []
        # Timers of the parent processes, kept because freeing their events would call CUDA in the forked child.
        self._retired_timers: list[GpuTimer] = []
        self._initialize(monotonic() - max(time() - RECORDER.started_at, 0.0))

    def _initialize(self, began: float) -> None:
        """Set the initial state. *began* is the monotonic time from which the phases are counted."""
        self._lock = SignalSafeLock()
        self.gpu = GpuTimer(self._environment)
        self.spans = CurrentSpan()
        self.clock.restart(began)
        self.records.clear()
        self.dropped_records = 0
        self.numbers.after_fork()
        self.open_rare_blocks.clear()
        self.callback_blocks.clear()
        self.iterations_of_other_threads.clear()
        self.observers = Observers(self._watch)
        self.job_is_instrumented = False
        self.has_records = False  # True after the first record
        self.is_training = False  # True after the first phase or reported step
        self.expected: Expectation | None = None
        self.save_policy: Callable[[], SavePolicy] | None = None
        self._state = TrainingState(self.clock, self.numbers)
        self._series: Sequence[StatReading] = ()
        self._reading: TrainingReading | None = None

    # Lifecycle -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Count from zero. Open blocks stay open, and records in the queue are applied later."""
        self._lock.run(self._reset)

    def _reset(self) -> None:
        """Count from zero. The caller holds the lock."""
        # The time since the last recording of the earlier identity belongs to the new identity.
        self.clock.reset(monotonic() if self._state.published_until is None else self._state.published_until)
        self.numbers.reset(self._state.progress.published_totals)
        self._state.reset()

    def after_fork(self) -> None:
        """Restart in a forked child, without the parent's records, open blocks and configuration."""
        PENDING_REPORTS.clear()
        self._retired_timers.append(self.gpu)
        self._initialize(monotonic())

    def add_exporter_lifecycle(self, flush: Callable[[float], bool], close: Callable[[float], None]) -> None:
        """Register the functions that flush and close span exporters within a timeout in seconds.

        The functions stay registered in a forked child.
        """
        self._exporters.append((flush, close))

    def flush_span_exporters(self, timeout_seconds: float) -> bool:
        """Flush the span exporters within a timeout. Return False if an exporter did not finish."""
        deadline = monotonic() + timeout_seconds
        results = [flush(max(deadline - monotonic(), 0.1)) for flush, _ in self._exporters]
        return all(results)

    def close_span_exporters(self, timeout_seconds: float) -> None:
        """Close the span exporters within a timeout."""
        deadline = monotonic() + timeout_seconds
        for _, close in self._exporters:
            close(max(deadline - monotonic(), 0.1))

    def _watch(self) -> None:
        """Make all edges of the clock take the slow path if observers or the GPU timer need them."""
        self.clock.watch(on=self.observers.is_watching() or self.gpu.is_on)

    # The job's threads -----------------------------------------------------------------------------------

    def current_span_id(self) -> str | None:
        """Return the id of the innermost open span of the calling thread or task."""
        return self.spans.id()

    def start_on(self, thread: int) -> None:
        """Make the thread of the first block the main thread of the clock, and start the recording thread."""
        if self.clock.thread is None and self.is_on:
            self.clock.thread = thread
            self.start_recording()

    def start_recording(self) -> None:
        """Start the recording thread, unless it runs already."""
        if self.is_on:
            RECORDER.start()

    def append(self, record: Record) -> None:
        """Append a record. From `MANY_RECORDS` queued records on, first apply them. If the queue is full, drop and count the record."""
        if not self.is_on:
            return
        self.has_records = True
        records = self.records
        if len(records) >= MANY_RECORDS:
            self._apply_many()
        if len(records) < MAX_RECORDS:
            records.append(record)
        else:
            self.dropped_records += 1

    def report_step(self, number: int | None, seconds: float | None, mode: str) -> None:
        """Record a step or batch that has just completed. Inside an open iteration, the iteration is counted instead of a training step.

        Args:
            number: Number of completed steps including this step; None for one more than before.
            seconds: Duration of the step; None for the time since the previous step.
            mode: `train`, `validation` or `test`.
        """
        now, clock = monotonic(), self.clock
        self.start_recording()
        if mode != "train":
            self.append(EvaluationStepEnded(mode, seconds, now))
            return
        self.is_training = True
        iteration = clock.iteration
        if iteration is None:
            self.take_over()
        if self.gpu.is_on:
            self.gpu.record_step()
        timestamp = TracingTimestamp(time(), now)
        self.observers.notify(lambda observer: observer.step_reported(number, seconds, mode, timestamp))
        if iteration is None and self.is_on:
            if clock.thread in {None, threading.get_ident()}:
                clock.begin_training(now)
            self.append(StepReported(number, seconds, now, clock.possible_work_seconds(now), self.expected))

    def _record_nonfinite(self, kind: str) -> None:
        """Record the first of consecutive losses or gradient norms that are not finite."""
        self.append(NonfiniteBegan(kind, time(), self.clock.iteration is not None))

    def collect_tensors(self) -> None:
        """Record the calling thread's tensors whose values are available, without waiting for a device."""
        self.numbers.collect_tensors()

    def refuse_unread_tensors(self, *, is_process_ending: bool) -> None:
        """Drop the tensors of ended threads whose values have not been read, and count each as misuse.

        At the end of the process, do so for all threads.
        """
        self.numbers.refuse_unread_tensors(is_process_ending=is_process_ending)

    def publish_soon(self) -> None:
        """Request an immediate flush by the recording thread."""
        if self.is_on:
            RECORDER.flush_soon()

    def _apply_many(self) -> None:
        """Apply the queued records on the job's thread, unless another thread is applying records."""
        self._lock.run(lambda: self._apply(len(self.records)), 0.0)

    def describe(
        self, values: Mapping[str, object], parameters: Mapping[str, AttributeValue | None] | None = None
    ) -> None:
        """Record converted facts about the run, and parameters with user-defined names."""
        self.start_recording()
        self.append(RunDescribed(dict(values), dict(parameters or {})))

    def expect(self, samples: float | None, tokens: float | None) -> None:
        """Set this rank's samples and tokens of a step. They are counted unless the job records its own."""
        current = self.expected
        if current is None or (current.samples, current.tokens) != (samples, tokens):
            self.expected = Expectation(samples, tokens)

    def set_save_policy(self, policy: Callable[[], SavePolicy] | None) -> None:
        """Set the function that returns the policy for a save. None means synchronous saves."""
        self.save_policy = policy

    # Open blocks ------------------------------------------------------------------------------------------

    def open_blocks(self) -> list[ObservedBlock]:
        """Return the open observed blocks, the oldest first."""
        return [block.observed for block in list(self.open_rare_blocks.values())]

    def saves_are_enabled(self) -> bool:
        """Return False if the job is configured to record no saves."""
        return self.current_save_policy().enabled

    def current_save_policy(self) -> SavePolicy:
        """Return the policy for a save that starts now; the default policy if the function of `set_save_policy` fails."""
        try:
            policy = None if self.save_policy is None else self.save_policy()
        except Exception as error:  # the function belongs to an observer
            if is_from_signal_handler(error):
                raise
            policy = None
        return policy or SavePolicy()

    def take_over(self) -> None:
        """Record that the job is instrumented, and discard the blocks that a bridge has inferred."""
        if self.job_is_instrumented:
            return
        self.job_is_instrumented = True
        now = monotonic()
        inferred_iterations = [entry for entry in self.clock.stack[1:] if is_inferred_iteration(entry)]
        for entry in reversed(inferred_iterations):
            self.clock.remove([entry], now)
            entry.abandon(now)
        inferred_blocks = [block for block in self.open_rare_blocks.values() if block.kind.is_inferred]
        for block in reversed(inferred_blocks):
            block.discard()

    def abandon_callback_blocks(self) -> None:
        """End the hot blocks that callbacks have left open, at the start of an application."""
        for block in list(self.callback_blocks):
            if block.is_open:
                block.abandon(monotonic())
        self.callback_blocks.clear()

    def discard_iteration(self) -> None:
        """Discard the open iteration of this thread or, if this thread has none, of the main thread. Bridges call this."""
        other_thread_iteration = self.iterations_of_other_threads.get(threading.get_ident())
        if other_thread_iteration is not None:
            other_thread_iteration.abandon(monotonic())
            return
        for entry in reversed(self.clock.stack):
            if getattr(entry, "kind", None) in kinds.ITERATIONS:
                self.clock.remove([entry], monotonic())
                entry.abandon(monotonic())
                return

    # The recording thread --------------------------------------------------------------------------------

    def in_use(self) -> bool:
        """Return True if the job has used the training API, even if all its calls were invalid."""
        return self._has_reported() or bool(PENDING_REPORTS or self._series)

    def _has_reported(self) -> bool:
        """Return True if the job has entered a block, appended a record or recorded a number."""
        return self.clock.thread is not None or self.has_records or self.numbers.is_used

    def trains(self) -> bool:
        """Return True if the job has reported a phase, a step or a number."""
        return self.is_training or self.numbers.is_used or self.clock.has_entries()

    def _apply(self, max_records: int) -> bool:
        """Apply the oldest records, and return True. The caller holds the lock."""
        state, records = self._state, self.records
        state.wall_clock_offset = time() - monotonic()
        state.apply([records.popleft() for _ in range(min(max_records, len(records)))])
        return True

    def drain(self) -> None:
        """Apply the records that are queued at the call. Return early if another thread holds the lock for a second."""
        remaining_records = len(self.records)
        while remaining_records > 0:
            if not self._lock.run(lambda: self._apply(BATCH_RECORDS), LOCK_TIMEOUT_SECONDS):
                return
            remaining_records -= BATCH_RECORDS
            RECORDER.thread.yield_gil()

    def tick(self) -> None:
        """Apply the records between two flushes if more than an eighth of `MANY_RECORDS` are queued."""
        self.observers.check_handlers()
        if len(self.records) > MANY_RECORDS // 8:
            self.drain()

    def stat_readings(self) -> Sequence[StatReading]:
        """Return the current readings of all series, or the previous readings if the lock is held for a second."""
        series = self._lock.run(self._publish, LOCK_TIMEOUT_SECONDS)
        if series is not None:
            self._series = series
        return self._series

    def _publish(self) -> Sequence[StatReading]:
        """Count misuse, update the training reading and return the readings of all series. The caller holds the lock."""
        self.observers.check_handlers()
        state, is_used = self._state, self.in_use()
        state.count_misuse(self._take_dropped_records())
        if not is_used:
            return ()
        if self._has_reported():
            self._reading = state.publish()
            main_thread = self.clock.thread or threading.main_thread().ident
            self.gpu.turn_on_or_off(main_thread, state.progress.ideal_seconds)
            if self.gpu.is_on != self.clock.is_watched:
                self._watch()
            self.gpu.publish(state.families)
        return tuple(state.families.readings())

    def _take_dropped_records(self) -> int:
        count, self.dropped_records = self.dropped_records, 0
        return count

    def training_reading(self) -> TrainingReading | None:
        """Return the training reading of the latest call of `stat_readings`, or None if the job had reported no training."""
        return self._reading

    def update_totals(self, *, is_identity_ending: bool) -> None:
        """Apply all records.

        If *is_identity_ending* is True, also count the configured numbers of the latest step, and publish the time of the last progress, which
        is otherwise absent after the training loop.
        """
        self.drain()
        if is_identity_ending:
            self._lock.run(self._end_progress, LOCK_TIMEOUT_SECONDS)

    def _end_progress(self) -> None:
        """Count the configured numbers of the latest step, and publish the time of the last progress. The caller holds the lock."""
        self._state.progress.count_expected()
        self._state.progress.is_over = False


def is_inferred_iteration(entry: StackEntry) -> bool:
    """Return True if an entry of the clock is an iteration that a bridge has inferred."""
    return getattr(entry, "kind", None) is kinds.INFERRED_ITERATION


TRAINING = TrainingRecording()
"""Training recorder of this process."""
