"""GPU time by phase, measured with CUDA events.

An event is recorded on the current stream at each phase change of the main thread, and read in a later step, after the
device has passed the event, without waiting. torch is never imported; docs/training.md says which steps are timed.
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
PER_SECOND = 10
SHARE = 0.005
MAX_EVENTS = 1024
"""Events that may be under way; a job that queues more is not timed."""
COLLECT_EVENTS = 256
"""Events under way at which some are collected within a step."""
MAX_COST_SECONDS = 1e-4
"""Upper bound of an event's cost; a longer time was spent in other threads or processes."""
MAX_DEPTH = 64
OTHER = "other"
LONELY = frozenset({"validation", "test", "checkpoint_save_sync", "checkpoint_save_async", "checkpoint_load"})
"""Phases that are timed even if the step before was not timed."""
IDLE = frozenset({"data_loading", "logging", OTHER})
"""Phases that leave the device idle if they are between the work of two steps."""


class Edge(Enum):
    """Edge at which an event is recorded."""

    PHASE = "phase change"
    BEGIN = "begin of a timed step, and end of the previous step"
    END = "end of the step"
    CLOSE = "end of the timing"


@dataclass(slots=True)
class Mark:
    """CUDA event on the stream, and the phase before the event."""

    event: Any
    phase: str
    edge: Edge


@dataclass(slots=True)
class Timed:
    """Device seconds from the begin of a step to the begin of the next step."""

    phases: dict[str, float] = field(default_factory=dict)
    step: float | None = None  # from begin to end of the step; None without an end
    idle: float = 0.0  # idle time between the work of two steps
    total: float = 0.0
    works: bool = False

    def take(self, phase: str, seconds: float) -> None:
        """Add the time between two events."""
        self.total += seconds
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        self.works = self.works or (PHASES[phase].work and phase != "iteration")
        if phase in IDLE and (self.step is not None or not self.works):
            self.idle += seconds


class GpuTimer:
    """Timer of the main thread's phases on the device."""

    def __init__(self, environment: Mapping[str, str], clock: Callable[[], float] = monotonic) -> None:
        self.on = False  # set by the recording thread
        self.done: deque[Timed] = deque(maxlen=1000)  # not published yet
        self._share = number_within(environment, "EXPORTER_GPU_TIME", SHARE, 0.0, 1.0)
        self._clock = clock
        self._thread: int | None = None
        self._open: list[tuple[BlockKind, str]] = []
        self._marks: deque[Mark] = deque()
        self._free: list[Any] = []
        self._last: Any = None  # the event that was collected last
        self._timed: Timed | None = None  # not complete yet
        self._timing = self._stale = False
        self._due = self._cost = 0.0

    # On the job's thread --------------------------------------------------------------------------------

    def begin(self, kind: BlockKind, phase: str) -> None:
        """Record the begin of a block of a phase."""
        if not self.on or get_ident() != self._thread:
            return
        before = self._active
        if kind in ITERATIONS:
            self._step_begins(before)
        elif phase in LONELY and not self._timing:
            self._collect()
            self._timing = True
            self._mark(before, Edge.BEGIN)
        elif self._timing and phase != before:
            self._mark(before, Edge.PHASE)
        self._open.append((kind, phase))
        del self._open[:-MAX_DEPTH]

    def end(self, kind: BlockKind) -> None:
        """Record the end of a block, which need not be the innermost."""
        if not self.on or get_ident() != self._thread:
            return
        before, opened = self._active, self._open
        for place in range(len(opened) - 1, -1, -1):
            if opened[place][0] is kind:
                del opened[place]
                break
        if self._timing and (kind in ITERATIONS or self._active != before):
            self._mark(before, Edge.END if kind in ITERATIONS else Edge.PHASE)

    def step(self) -> None:
        """Record the end of a step and the begin of the next, in a job without iterations."""
        if self.on and get_ident() == self._thread and not any(kind in ITERATIONS for kind, _ in self._open):
            if self._timing:
                self._mark(self._active, Edge.END)
            self._step_begins(self._active)

    @property
    def _active(self) -> str:
        return self._open[-1][1] if self._open else OTHER

    def _step_begins(self, before: str) -> None:
        self._collect()
        if self._stale:
            self._stale = False
            self._forget()
        now, timing = self._clock(), self._timing
        self._timing = now >= self._due
        if self._timing:
            # Catch up on at most a second, so that steps of a tenth of a second are all timed.
            self._due = max(self._due, now - 1.0) + max(1 / PER_SECOND, self._cost / self._share)
            self._cost = 0.0
            self._mark(before, Edge.BEGIN)
        elif timing:
            self._mark(before, Edge.CLOSE)

    def _mark(self, before: str, edge: Edge) -> None:
        began = perf_counter()
        try:
            cuda = sys.modules["torch"].cuda
            if cuda.is_current_stream_capturing() or len(self._marks) >= MAX_EVENTS:
                return self._forget()
            event = self._free.pop() if self._free else cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(Mark(event, before, edge))
            if len(self._marks) >= COLLECT_EVENTS and not len(self._marks) % 16:
                self._collect()
        except Exception as error:  # noqa: BLE001  # foreign code: an error of CUDA is the job's to hear of, not from us
            self._fail(error)
        self._cost += min(perf_counter() - began, MAX_COST_SECONDS)
        return None

    def _collect(self) -> None:
        """Read the events that the device has passed."""
        marks = self._marks
        try:
            if not marks or sys.modules["torch"].cuda.is_current_stream_capturing():
                return
            while marks and marks[0].event.query():
                mark = marks.popleft()
                if self._last is not None:
                    if self._timed is not None:
                        self._timed.take(mark.phase, self._last.elapsed_time(mark.event) / 1000)
                    self._free.append(self._last)
                self._last = mark.event
                if mark.edge is Edge.END and self._timed is not None:
                    self._timed.step = self._timed.total
                elif mark.edge is Edge.BEGIN or mark.edge is Edge.CLOSE:
                    if self._timed is not None:
                        self.done.append(self._timed)
                    self._timed = Timed() if mark.edge is Edge.BEGIN else None
        except Exception as error:  # noqa: BLE001  # as above
            self._fail(error)

    def _forget(self) -> None:
        """Discard the events in flight; the next step may be timed."""
        self._free += (mark.event for mark in self._marks)
        self._marks.clear()
        self._timed = None
        self._timing = False

    def _fail(self, error: Exception) -> None:
        """Stop for good: after a CUDA error every CUDA call raises."""
        self._forget()
        self.on, self._share = False, 0.0
        log_once("gpu time", f"phases are not timed on the GPU any more: {error!r}")

    # On the recording thread ------------------------------------------------------------------------------

    def decide(self, main: int | None, step_seconds: float) -> None:
        """Decide whether the steps of the main thread are timed, from the usual step duration."""
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        long_enough = self._share > 0 and main is not None and step_seconds > MIN_STEP_SECONDS
        initialized = getattr(cuda, "is_initialized", None)  # not yet, where torch is being imported
        on = bool(long_enough and initialized is not None and initialized())
        if on and not self.on:
            self._thread, self._stale = main, True  # discard old events
        self.on = on

    def publish(self, families: Families) -> None:
        """Publish the completed timings."""
        while self.done:
            timed = self.done.popleft()
            for phase, seconds in timed.phases.items():
                families.counter("training.phase_gpu", "seconds", phase=phase).add(seconds)
            families.counter("training.gpu_idle_between_steps", "seconds").add(timed.idle)
            if timed.step is not None:
                families.counter("training.gpu_timed_steps").add()
                families.histogram("training.step_gpu_duration").observe(timed.step)
