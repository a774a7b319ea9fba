"""GPU time by phase, measured with CUDA events.

In a timed step, an event is recorded on the current stream at each phase change of the main thread. Events are read once the
device has completed them, usually at the start of a later step, so the job does not wait. This module does not import torch.
docs/training.md describes which steps are timed.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from threading import get_ident
from time import monotonic, perf_counter
from typing import Any

from exporter.recording.identity import number_within
from exporter.recording.notices import log_once
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.training.kinds import ITERATIONS, BlockKind
from exporter.training.metrics import Families
from exporter.training.phases import PHASES

MIN_STEP_SECONDS = 0.005
"""Duration of an ordinary step up to which no step of the job is timed."""
STEPS_PER_SECOND = 10
"""Maximum number of timed steps per second, on average. After a pause of a second, steps are timed in a row until the average is reached."""
MAX_COST_RATIO = 0.005
"""Maximum share of the thread's time that recording events may take. `EXPORTER_GPU_TIME` replaces this default."""
MAX_EVENTS = 1024
"""Limit of pending events. Instead of a further event, the pending events are discarded and the step is not timed."""
COLLECT_EVENTS = 256
"""Number of pending events from which events are also read within a step."""
MAX_COST_SECONDS = 1e-4
"""Upper bound for the measured cost of an event. Any longer time is attributed to other threads or processes."""
MAX_DEPTH = 64
"""Limit of tracked open blocks. Above the limit, the oldest block is no longer tracked."""
OTHER = "other"
STANDALONE_PHASES = frozenset(
    {"validation", "test", "checkpoint_save_sync", "checkpoint_save_async", "checkpoint_load"}
)
"""Phases that are timed outside of timed steps too."""
IDLE_PHASES = frozenset({"data_loading", "logging", OTHER})
"""Phases that count as idle time between two steps, if they are before the first work of a step or after its end."""


class EventReason(Enum):
    """Reason for which an event is recorded."""

    PHASE = "phase change"
    BEGIN = "start of a timed step or of a phase outside of steps, and end of the time before"
    END = "end of the step"
    CLOSE = "start of a step that is not timed, after a timed step"


@dataclass(slots=True)
class RecordedEvent:
    """CUDA event on the stream, with the phase that ends at the event."""

    event: Any
    phase: str
    reason: EventReason


@dataclass(slots=True)
class TimedStep:
    """Device seconds from the start of a timed step, or of a phase outside of steps, to the start of the next step."""

    phase_seconds: dict[str, float] = field(default_factory=dict)
    step_seconds: float | None = None  # from start to end of the step; None if the end is unknown
    idle_seconds: float = 0.0  # idle time between the work of two steps
    total_seconds: float = 0.0
    # True after a phase that is work, such as `forward`; the phase `iteration` does not count.
    has_work: bool = False

    def add(self, phase: str, seconds: float) -> None:
        """Add the device time of a phase between two events."""
        self.total_seconds += seconds
        self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + seconds
        self.has_work = self.has_work or (PHASES[phase].work and phase != "iteration")
        if phase in IDLE_PHASES and (self.step_seconds is not None or not self.has_work):
            self.idle_seconds += seconds


class GpuTimer:
    """Timer of the main thread's phases on the device. An error of CUDA ends the timing and does not reach the job."""

    def __init__(self, environment: Mapping[str, str], clock: Callable[[], float] = monotonic) -> None:
        self.is_on = False  # set by the recording thread, and cleared by an error of CUDA
        self.completed_steps: deque[TimedStep] = deque(maxlen=1000)  # not published yet
        self._cost_ratio = number_within(environment, "EXPORTER_GPU_TIME", MAX_COST_RATIO, 0.0, 1.0)
        self._clock = clock
        self._main_thread: int | None = None
        self._open: list[tuple[BlockKind, str]] = []  # open blocks with their phases, innermost last
        self._pending_events: deque[RecordedEvent] = deque()
        self._free_events: list[Any] = []  # CUDA events to record again
        self._last_event: Any = None  # latest collected event
        self._current_step: TimedStep | None = None  # not complete yet
        self._is_timing = False  # True from a timed step, or a timed phase outside of steps, to the next step
        self._has_stale_events = False  # True until the first step after the timing was turned on
        self._next_step_at = 0.0  # earliest start of the next timed step, on `clock`
        self._cost_seconds = 0.0  # cost of recording since the start of the latest timed step

    # On the job's thread --------------------------------------------------------------------------------

    def begin(self, kind: BlockKind, phase: str) -> None:
        """Record the start of a block. If the timing is not active, only a step and a phase of `STANDALONE_PHASES` start it."""
        if not self.is_on or get_ident() != self._main_thread:
            return
        ending_phase = self._active_phase
        if kind in ITERATIONS:
            self._begin_step(ending_phase)
        elif phase in STANDALONE_PHASES and not self._is_timing:
            self._collect()
            self._is_timing = True
            self._record_event(ending_phase, EventReason.BEGIN)
        elif self._is_timing and phase != ending_phase:
            self._record_event(ending_phase, EventReason.PHASE)
        self._open.append((kind, phase))
        del self._open[:-MAX_DEPTH]

    def end(self, kind: BlockKind) -> None:
        """Record the end of a block, which need not be the innermost."""
        if not self.is_on or get_ident() != self._main_thread:
            return
        ending_phase, open_blocks = self._active_phase, self._open
        for index in range(len(open_blocks) - 1, -1, -1):
            if open_blocks[index][0] is kind:
                del open_blocks[index]
                break
        if self._is_timing and (kind in ITERATIONS or self._active_phase != ending_phase):
            self._record_event(ending_phase, EventReason.END if kind in ITERATIONS else EventReason.PHASE)

    def record_step(self) -> None:
        """Record the end of a step and the start of the next step, in a job that reports steps without blocks."""
        if (
            self.is_on
            and get_ident() == self._main_thread
            and not any(kind in ITERATIONS for kind, _ in self._open)
        ):
            if self._is_timing:
                self._record_event(self._active_phase, EventReason.END)
            self._begin_step(self._active_phase)

    @property
    def _active_phase(self) -> str:
        open_blocks = self._open  # `turn_on_or_off` may replace the list
        return open_blocks[-1][1] if open_blocks else OTHER

    def _begin_step(self, ending_phase: str) -> None:
        """Decide whether to time the step that starts now, and end the timing of the previous step."""
        self._collect()
        if not self._cost_ratio:  # a CUDA error has ended the timing; `is_on` may be stale
            return
        if self._has_stale_events:
            self._has_stale_events = False
            self._forget()
        now, was_timing = self._clock(), self._is_timing
        self._is_timing = now >= self._next_step_at
        if self._is_timing:
            # The interval starts at the planned time. If it started at *now*, late starts would add up, and not all steps of 0.1 s would be
            # timed.
            self._next_step_at = max(self._next_step_at, now - 1.0) + max(
                1 / STEPS_PER_SECOND, self._cost_seconds / self._cost_ratio
            )
            self._cost_seconds = 0.0
            self._record_event(ending_phase, EventReason.BEGIN)
        elif was_timing:
            self._record_event(ending_phase, EventReason.CLOSE)

    def _record_event(self, ending_phase: str, reason: EventReason) -> None:
        """Record an event on the current stream.

        If `MAX_EVENTS` are pending, or the stream is being captured into a CUDA graph, discard the pending events and stop timing the step.
        """
        start_time = perf_counter()
        try:
            cuda = sys.modules["torch"].cuda
            if cuda.is_current_stream_capturing() or len(self._pending_events) >= MAX_EVENTS:
                return self._forget()
            event = self._free_events.pop() if self._free_events else cuda.Event(enable_timing=True)
            event.record()
            self._pending_events.append(RecordedEvent(event, ending_phase, reason))
            # At every 16th event, because reading a device that has not completed the oldest event is in vain.
            if len(self._pending_events) >= COLLECT_EVENTS and not len(self._pending_events) % 16:
                self._collect()
        except Exception as error:  # the job's own CUDA calls raise the same error
            if is_from_signal_handler(error):
                raise
            self._fail(error)
        self._cost_seconds += min(perf_counter() - start_time, MAX_COST_SECONDS)
        return None

    def _collect(self) -> None:
        """Read the events that the device has completed."""
        pending_events = self._pending_events
        try:
            if not pending_events or sys.modules["torch"].cuda.is_current_stream_capturing():
                return
            while pending_events and pending_events[0].event.query():
                recorded_event = pending_events.popleft()
                if self._last_event is not None:
                    if self._current_step is not None:
                        self._current_step.add(
                            recorded_event.phase, self._last_event.elapsed_time(recorded_event.event) / 1000
                        )
                    self._free_events.append(self._last_event)
                self._last_event = recorded_event.event
                if recorded_event.reason is EventReason.END and self._current_step is not None:
                    self._current_step.step_seconds = self._current_step.total_seconds
                elif recorded_event.reason is EventReason.BEGIN or recorded_event.reason is EventReason.CLOSE:
                    if self._current_step is not None:
                        self.completed_steps.append(self._current_step)
                    self._current_step = TimedStep() if recorded_event.reason is EventReason.BEGIN else None
        except Exception as error:  # the job's own CUDA calls raise the same error
            if is_from_signal_handler(error):
                raise
            self._fail(error)

    def _forget(self) -> None:
        """Discard the pending events and stop timing the current step. The next step may be timed."""
        self._free_events += (pending.event for pending in self._pending_events)
        self._pending_events.clear()
        self._current_step = None
        self._is_timing = False

    def _fail(self, error: Exception) -> None:
        """Stop the timing permanently, because after a CUDA error, further CUDA calls usually raise too."""
        self._forget()
        self.is_on, self._cost_ratio = False, 0.0
        log_once("gpu time", f"phases are no longer timed on the GPU: {error!r}")

    # On the recording thread ------------------------------------------------------------------------------

    def turn_on_or_off(self, main_thread: int | None, step_seconds: float) -> None:
        """Turn the timing on or off.

        Args:
            main_thread: Identifier of the main thread; None before the first block.
            step_seconds: Duration of an ordinary step; 0 if unknown.
        """
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        is_allowed = self._cost_ratio > 0 and main_thread is not None and step_seconds > MIN_STEP_SECONDS
        is_initialized = getattr(cuda, "is_initialized", None)  # missing while torch is being imported
        is_on = bool(is_allowed and is_initialized is not None and is_initialized())
        if is_on and not self.is_on:
            self._main_thread = main_thread
            self._has_stale_events = True  # events of an earlier period are discarded
            self._open = []  # the ends of blocks were not recorded while the timing was off
        self.is_on = is_on

    def publish(self, families: Families) -> None:
        """Add the completed steps to the metrics."""
        while self.completed_steps:
            step = self.completed_steps.popleft()
            for phase, seconds in step.phase_seconds.items():
                families.counter("training.phase_gpu", "seconds", phase=phase).add(seconds)
            families.counter("training.gpu_idle_between_steps", "seconds").add(step.idle_seconds)
            if step.step_seconds is not None:
                families.counter("training.gpu_timed_steps").add()
                families.histogram("training.step_gpu_duration").observe(step.step_seconds)
