"""GPU time by phase, measured with CUDA events.

An event is recorded on the current stream at each phase change of the main thread, and read in a later step, after the
device has completed the event, without waiting. torch is never imported; docs/training.md says which steps are timed.
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
from exporter.training.kinds import ITERATIONS, BlockKind
from exporter.training.metrics import Families
from exporter.training.phases import PHASES

MIN_STEP_SECONDS = 0.005
"""Steps below this duration are not timed."""
STEPS_PER_SECOND = 10
"""Steps that are timed per second, at most."""
MAX_COST_RATIO = 0.005
"""Share of the time that recording events may cost. `EXPORTER_GPU_TIME` replaces the default."""
MAX_EVENTS = 1024
"""Limit of pending events. Above the limit the timing stops until the next step."""
COLLECT_EVENTS = 256
"""Pending events from which events are also collected within a step."""
MAX_COST_SECONDS = 1e-4
"""Upper bound of the cost of an event. A longer time was spent in other threads or processes."""
MAX_DEPTH = 64
OTHER = "other"
STANDALONE_PHASES = frozenset(
    {"validation", "test", "checkpoint_save_sync", "checkpoint_save_async", "checkpoint_load"}
)
"""Phases that are timed even outside a timed step."""
IDLE_PHASES = frozenset({"data_loading", "logging", OTHER})
"""Phases that count as idle time of the device between the work of two steps."""


class Edge(Enum):
    """Edge at which an event is recorded."""

    PHASE = "phase change"
    BEGIN = "begin of a timed step, and end of the previous step"
    END = "end of the step"
    CLOSE = "end of the timing"


@dataclass(slots=True)
class RecordedEvent:
    """CUDA event on the stream, with the phase before the event."""

    event: Any
    phase: str
    edge: Edge


@dataclass(slots=True)
class TimedStep:
    """Device seconds from the start of a step to the start of the next step."""

    phase_seconds: dict[str, float] = field(default_factory=dict)
    step_seconds: float | None = None  # from start to end of the step; None if the end is unknown
    idle_seconds: float = 0.0  # idle time between the work of two steps
    total_seconds: float = 0.0
    has_work: bool = False

    def add(self, phase: str, seconds: float) -> None:
        """Add the time between two events."""
        self.total_seconds += seconds
        self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + seconds
        self.has_work = self.has_work or (PHASES[phase].work and phase != "iteration")
        if phase in IDLE_PHASES and (self.step_seconds is not None or not self.has_work):
            self.idle_seconds += seconds


class GpuTimer:
    """Timer of the main thread's phases on the device."""

    def __init__(self, environment: Mapping[str, str], clock: Callable[[], float] = monotonic) -> None:
        self.is_on = False  # set by the recording thread
        self.completed_steps: deque[TimedStep] = deque(maxlen=1000)  # not published yet
        self._cost_ratio = number_within(environment, "EXPORTER_GPU_TIME", MAX_COST_RATIO, 0.0, 1.0)
        self._clock = clock
        self._thread: int | None = None
        self._open: list[tuple[BlockKind, str]] = []
        self._pending_events: deque[RecordedEvent] = deque()
        self._free_events: list[Any] = []
        self._last_event: Any = None  # latest collected event
        self._current_step: TimedStep | None = None  # not complete yet
        self._is_timing = self._has_stale_events = False
        self._next_step_at = self._cost_seconds = 0.0

    # On the job's thread --------------------------------------------------------------------------------

    def begin(self, kind: BlockKind, phase: str) -> None:
        """Record the start of a block of a phase."""
        if not self.is_on or get_ident() != self._thread:
            return
        previous_phase = self._active
        if kind in ITERATIONS:
            self._step_begins(previous_phase)
        elif phase in STANDALONE_PHASES and not self._is_timing:
            self._collect()
            self._is_timing = True
            self._record_event(previous_phase, Edge.BEGIN)
        elif self._is_timing and phase != previous_phase:
            self._record_event(previous_phase, Edge.PHASE)
        self._open.append((kind, phase))
        del self._open[:-MAX_DEPTH]

    def end(self, kind: BlockKind) -> None:
        """Record the end of a block, which need not be the innermost."""
        if not self.is_on or get_ident() != self._thread:
            return
        previous_phase, open_blocks = self._active, self._open
        for index in range(len(open_blocks) - 1, -1, -1):
            if open_blocks[index][0] is kind:
                del open_blocks[index]
                break
        if self._is_timing and (kind in ITERATIONS or self._active != previous_phase):
            self._record_event(previous_phase, Edge.END if kind in ITERATIONS else Edge.PHASE)

    def record_step(self) -> None:
        """Record the end of a step and the start of the next, in a job without iterations."""
        if (
            self.is_on
            and get_ident() == self._thread
            and not any(kind in ITERATIONS for kind, _ in self._open)
        ):
            if self._is_timing:
                self._record_event(self._active, Edge.END)
            self._step_begins(self._active)

    @property
    def _active(self) -> str:
        return self._open[-1][1] if self._open else OTHER

    def _step_begins(self, previous_phase: str) -> None:
        self._collect()
        if self._has_stale_events:
            self._has_stale_events = False
            self._forget()
        now, was_timing = self._clock(), self._is_timing
        self._is_timing = now >= self._next_step_at
        if self._is_timing:
            # Catch up on at most a second, so that all steps of a tenth of a second are timed.
            self._next_step_at = max(self._next_step_at, now - 1.0) + max(
                1 / STEPS_PER_SECOND, self._cost_seconds / self._cost_ratio
            )
            self._cost_seconds = 0.0
            self._record_event(previous_phase, Edge.BEGIN)
        elif was_timing:
            self._record_event(previous_phase, Edge.CLOSE)

    def _record_event(self, previous_phase: str, edge: Edge) -> None:
        start_time = perf_counter()
        try:
            cuda = sys.modules["torch"].cuda
            if cuda.is_current_stream_capturing() or len(self._pending_events) >= MAX_EVENTS:
                return self._forget()
            event = self._free_events.pop() if self._free_events else cuda.Event(enable_timing=True)
            event.record()
            self._pending_events.append(RecordedEvent(event, previous_phase, edge))
            if len(self._pending_events) >= COLLECT_EVENTS and not len(self._pending_events) % 16:
                self._collect()
        except Exception as error:  # noqa: BLE001  # the job's own CUDA calls report the error
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
                recorded = pending_events.popleft()
                if self._last_event is not None:
                    if self._current_step is not None:
                        self._current_step.add(
                            recorded.phase, self._last_event.elapsed_time(recorded.event) / 1000
                        )
                    self._free_events.append(self._last_event)
                self._last_event = recorded.event
                if recorded.edge is Edge.END and self._current_step is not None:
                    self._current_step.step_seconds = self._current_step.total_seconds
                elif recorded.edge is Edge.BEGIN or recorded.edge is Edge.CLOSE:
                    if self._current_step is not None:
                        self.completed_steps.append(self._current_step)
                    self._current_step = TimedStep() if recorded.edge is Edge.BEGIN else None
        except Exception as error:  # noqa: BLE001  # the job's own CUDA calls report the error
            self._fail(error)

    def _forget(self) -> None:
        """Discard the events in flight. The next step may be timed."""
        self._free_events += (pending.event for pending in self._pending_events)
        self._pending_events.clear()
        self._current_step = None
        self._is_timing = False

    def _fail(self, error: Exception) -> None:
        """Stop the timing permanently, because after a CUDA error every CUDA call raises."""
        self._forget()
        self.is_on, self._cost_ratio = False, 0.0
        log_once("gpu time", f"phases are not timed on the GPU any more: {error!r}")

    # On the recording thread ------------------------------------------------------------------------------

    def decide(self, main: int | None, step_seconds: float) -> None:
        """Decide whether the steps of the main thread are timed, from the usual step duration."""
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        long_enough = self._cost_ratio > 0 and main is not None and step_seconds > MIN_STEP_SECONDS
        is_initialized = getattr(cuda, "is_initialized", None)  # missing while torch is being imported
        is_on = bool(long_enough and is_initialized is not None and is_initialized())
        if is_on and not self.is_on:
            self._thread, self._has_stale_events = main, True  # discard old events
        self.is_on = is_on

    def publish(self, families: Families) -> None:
        """Publish the completed timings."""
        while self.completed_steps:
            step = self.completed_steps.popleft()
            for phase, seconds in step.phase_seconds.items():
                families.counter("training.phase_gpu", "seconds", phase=phase).add(seconds)
            families.counter("training.gpu_idle_between_steps", "seconds").add(step.idle_seconds)
            if step.step_seconds is not None:
                families.counter("training.gpu_timed_steps").add()
                families.histogram("training.step_gpu_duration").observe(step.step_seconds)
