"""The recorder of a process: owns everything that the process records, and the thread that aggregates and writes.

Runs in the training process. The thread starts with the first Stat, event, block or handler, runs no code of the job, and
releases the interpreter lock between pieces of a few tenths of a millisecond. Every orderly exit writes a last recording.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from time import monotonic, perf_counter, sleep, time
from typing import Any

from exporter.recording.conversion import safe_repr
from exporter.recording.event_log import EventLog
from exporter.recording.gpus import ProcessGpus
from exporter.recording.identity import Process, local_rank, number_within
from exporter.recording.interfaces import PeriodicTask, Sink, TrainingSource
from exporter.recording.notices import NOTICES, log_once
from exporter.recording.passive import PassiveStats
from exporter.recording.stat_cycle import StatCycle
from exporter.recording.stat_table import StatTable
from exporter.recording.state import BUFFER_SAMPLES, StatState
from exporter.recording.values import Ending, ProcessIdentity, Recording, TrainingReading
from exporter.recording.worker import end_all

DEFAULT_FLUSH_SECONDS = 1.0
TICK_SECONDS = 0.25
"""Interval of the look at all buffers between flushes: a million adds a second fill a buffer in 0.52 s."""
HIGH_WATER = BUFFER_SAMPLES // 32
"""A buffer with more samples is drained at once instead of at the next flush."""
SLICE_SECONDS = 0.0004
"""Work of the recording thread between two chances for the job's threads to take the interpreter lock."""
RENEW_SECONDS = 0.1
"""Longest wait of `configure` for the recording thread to finish its step."""
CHILD_FLUSH_SECONDS = 0.25
"""Longest flush interval of forked children and children of multiprocessing: SIGTERM often ends them, as it ends the
persistent workers of a DataLoader, and then they lose unflushed samples."""
EXIT_SECONDS = 2.0
"""The one deadline of an exiting process for all of: periodic tasks, handlers, span exporters, the last write."""
TASKS_SECONDS, HANDLERS_SECONDS, SPANS_SECONDS, JOIN_SECONDS = 1.5, 1.6, 1.75, 1.85
"""Time after the begin of the exit until which each of them may take; the rest is for the last write."""
EXIT_SWITCH_SECONDS = 0.0005
"""Switch interval of the interpreter while the process exits."""
DRAIN_SECONDS = 0.5
"""Longest drain of Stats with handlers of windows at exit."""


class Recorder:
    """Everything that one process records.

    Attributes:
        process: The identity: run, rank, role.
        stats: The Stats.
        events: The events and their handlers.
        recording: False if nothing is recorded, because of `EXPORTER_DISABLED=1` or a free-threaded interpreter.
        started_at: Unix time at which the recording of this process began.
    """

    def __init__(self) -> None:
        usual = DEFAULT_FLUSH_SECONDS
        self.flush_seconds = number_within(os.environ, "EXPORTER_FLUSH_SECONDS", usual, 0.1, 60.0)
        self.recording = os.environ.get("EXPORTER_DISABLED") != "1"
        self._refusal = refusal_of_interpreter() if self.recording else None
        self.recording = self.recording and self._refusal is None
        self._training: TrainingSource | None = None
        self._sink: Sink | None = None
        self._tasks: tuple[PeriodicTask, ...] = ()
        self._passive = PassiveStats()
        self.process = Process(renew=self.renew)
        self.stats = StatTable(wake=self.start)
        self._cycle = StatCycle(self.stats, self.yield_gil)
        self.events = EventLog(
            identify=self.process.identity, current_span=self._current_span, wake=self.start
        )
        self.stats.recording = self.events.recording = self.recording
        self._is_child = False
        self._begin()
        # Registered before the job's own exit handlers, which therefore run first: what they add is recorded.
        atexit.register(self.shutdown)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _begin(self) -> None:
        """Set up the state that belongs to one process."""
        self._starting = threading.Lock()
        self._cycle_lock = threading.Lock()
        self._alarm = threading.Lock()  # held while the thread sleeps: releasing it wakes the thread
        self._alarm.acquire()
        self._thread: threading.Thread | None = None
        self._stopping = self._hurry = self._renewing = self._closed = False
        self.started_at = time()
        self._gpus = ProcessGpus()
        self._claimed = 0  # 1: a rank, 2: as a process that trains
        self._slice_began = 0.0

    # Composition -----------------------------------------------------------------------------------------

    def attach_feed(self, sink: Sink) -> None:
        """Write recordings to a sink."""
        self._sink = sink

    def attach_training(self, training: TrainingSource) -> None:
        """Record the training too."""
        self._training = training

    def attach(self, task: PeriodicTask, *, start: bool = False) -> None:
        """Add a periodic task, which runs from the first value or event on; from now on with *start*."""
        self._tasks = (*self._tasks, task)
        if start and self.recording:
            self.start()

    # Called by the job's threads -------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread unless it runs; cheap to call again, never raises."""
        # A thread that holds the lock is starting the thread; a signal handler that interrupts it must not wait.
        if self._thread is not None or self._stopping or not self._starting.acquire(blocking=False):
            return
        try:
            if self._refusal is not None:
                log_once("interpreter", self._refusal)
            if self._thread is None and self.recording:
                thread = threading.Thread(target=self._run, name="exporter-recording", daemon=True)
                self.process.begin()
                self._hook_multiprocessing()
                thread.start()
                self._thread = thread
        except Exception as error:  # noqa: BLE001  # no threads, a broken installation: not the job's problem
            log_once("thread", f"nothing is recorded: the recording thread cannot start: {safe_repr(error)}")
        finally:
            self._starting.release()

    def drain(self, timeout_seconds: float) -> bool:
        """Aggregate, on the caller's thread, the samples of Stats whose windows have handlers."""
        return self._guarded(lambda: self._cycle.drain(lambda state: state.listeners), timeout_seconds)

    def flush(self, timeout_seconds: float) -> bool:
        """Aggregate and write everything on the caller's thread; returns True if it was written in time."""
        return self._guarded(lambda: self._publish(final=False), timeout_seconds)

    def flush_soon(self) -> None:
        """Let the recording thread flush at once, without waiting for it: a checkpoint was saved."""
        self._hurry = True
        self._wake()

    def flush_all(self, timeout_seconds: float) -> bool:
        """Publish everything recorded so far, this thread's tensors in flight included; see `exporter.flush`."""
        deadline = monotonic() + timeout_seconds
        for state in self.stats.states():
            if state.tensors is not None:
                state.tensors.collect()
        if self._training is not None:
            self._training.collect_tensors()
        self.drain(timeout_seconds)
        self.events.flush(max(deadline - monotonic(), 0.1))
        arrived = self.flush(max(deadline - monotonic(), 0.1))
        if self._training is not None:
            self._training.flush(max(deadline - monotonic(), 0.1))
        return arrived

    def shutdown(self) -> None:
        """Write the last recording and end the thread, within `EXIT_SECONDS`; a second call does nothing."""
        if self._stopping:
            return
        self._stopping = True
        switch_interval = sys.getswitchinterval()
        # Busy daemon threads of the job would hold the interpreter lock for 5 ms each at every system call of ours.
        sys.setswitchinterval(EXIT_SWITCH_SECONDS)
        try:
            self._shut_down(monotonic())
        finally:
            sys.setswitchinterval(switch_interval)

    def _shut_down(self, began: float) -> None:
        self.events.limit_waits(began + HANDLERS_SECONDS)
        self._wake()
        self.drain(DRAIN_SECONDS)
        for wait in [task.finish() for task in self._tasks]:
            if wait is not None:
                wait(began + TASKS_SECONDS - monotonic(), "exit")
        self.events.close(began + HANDLERS_SECONDS - monotonic())
        end_all([self._passive], seconds=0.1, reason="exit")
        # The C library ends a thread that wants the interpreter lock during finalization, which may abort the process.
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(began + JOIN_SECONDS - monotonic(), 0.1))
        # If the recording thread hangs in a write, the last recording is lost and the process ends all the same.
        self._guarded(lambda: self._write_last(began), max(began + EXIT_SECONDS - monotonic(), 0.1))
        NOTICES.flush(max(began + EXIT_SECONDS - monotonic(), 0.1))

    def renew(self) -> None:
        """Start a new recording under a changed identity, at once or when the recording thread has finished its step."""
        self.events.renew()
        self._renewing = True
        self._guarded(self._renew, RENEW_SECONDS)

    def reset(self) -> None:
        """Forget everything recorded, every lock and every thread: the state of a process that has recorded nothing."""
        self._begin()
        NOTICES.reset()
        for part in (
            self.process,
            self.stats,
            self.events,
            self._cycle,
            self._passive,
            self._sink,
            self._training,
            *self._tasks,
        ):
            if part is not None:
                part.after_fork()

    def yield_gil(self) -> None:
        """Release the interpreter lock if this thread has worked for a while; not while the process exits."""
        if perf_counter() - self._slice_began > SLICE_SECONDS and not self._stopping:
            sleep(0)
            self._slice_began = perf_counter()

    # Inside ----------------------------------------------------------------------------------------------

    def _current_span(self) -> str | None:
        return None if self._training is None else self._training.current_span_id()

    def _in_use(self) -> bool:
        return bool(
            self.stats.states()
            or self.events.in_use()
            or (self._training is not None and self._training.in_use())
        )

    def _write_last(self, began: float) -> None:
        if self._in_use():
            if self._training is not None:
                self._training.collect(final=True)
                # Before the last recording, which has the records that the exporters could not take.
                self._training.close(max(began + SPANS_SECONDS - monotonic(), 0.1))
            self._publish(final=True)
        self._closed = True
        if self._sink is not None:
            self._sink.close()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the thread is awake
            self._alarm.release()

    def _renew(self) -> None:
        if self._renewing:
            self._renewing = False
            if self._sink is not None and self._sink.is_open():
                self._publish(final=True)
                self._sink.close()
                for state in self.stats.states():
                    state.reset(wall=time())
                self.events.reset()
                if self._training is not None:
                    self._training.reset()
            self.events.renew()
            self.started_at = time()

    def _hook_multiprocessing(self) -> None:
        """Let children of multiprocessing flush: they skip atexit, and clear earlier finalizers at their start."""
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            self._finalize_at_exit()
            util.register_after_fork(self, Recorder._finalize_at_exit)
            process = sys.modules.get("multiprocessing.process")
            if process is not None and process.parent_process() is not None:
                self._is_child = True

    def _finalize_at_exit(self) -> None:
        sys.modules["multiprocessing.util"].Finalize(None, self.shutdown, exitpriority=0)

    def _after_fork(self) -> None:
        self.reset()
        self._is_child = True
        if self._in_use():
            self.start()

    def _run(self) -> None:
        self._guarded(self._read_rules)
        seconds = min(self.flush_seconds, CHILD_FLUSH_SECONDS) if self._is_child else self.flush_seconds
        next_flush = monotonic() + seconds
        while self._sleep_until(next_flush):
            if self._hurry or monotonic() >= next_flush:
                self._hurry = False
                self._guarded(self._flush_cycle)
                next_flush = max(next_flush + seconds, monotonic())
            else:
                self._guarded(self._tick_cycle)

    def _sleep_until(self, next_flush: float) -> bool:
        """Sleep until there is something to do; returns False when the thread must end."""
        if not self._stopping:
            now = monotonic()
            until = min([next_flush, now + TICK_SECONDS, *self._cycle.due()])
            self._alarm.acquire(timeout=max(until - now, 0.0))
            self._slice_began = perf_counter()
        return not self._stopping

    def _guarded(self, step: Callable[[], object], timeout_seconds: float = -1) -> bool:
        """Run one step alone; a defect costs that step, not the thread and not the job."""
        lock = self._cycle_lock  # a reset replaces the lock
        if not lock.acquire(timeout=timeout_seconds):
            return False
        try:
            return step() is not False
        except Exception as error:  # noqa: BLE001  # see above
            log_once(f"defect {safe_repr(error)}", f"a defect in the recording thread: {safe_repr(error)}")
            return False
        finally:
            lock.release()

    def _flush_cycle(self) -> None:
        self._renew()
        self._passive.tick(self.stats.states())
        self._read_rules()
        for task in self._tasks:
            task.tick()
        self._publish(final=False, within_seconds=self.flush_seconds)

    def _tick_cycle(self) -> None:
        self._renew()
        for task in self._tasks:
            task.tick()
        if self._training is not None:
            self._training.tick()
        if self._cycle.has_due_window():
            self._cycle.close_windows()
        self._cycle.drain(lambda state: len(state.buffer) > HIGH_WATER, TICK_SECONDS)

    def _publish(self, *, final: bool, within_seconds: float = inf) -> bool:
        training = self._training
        self._cycle.close_windows()
        if training is not None:
            training.collect(final=final)
        self._cycle.drain(lambda state: state.buffer, within_seconds)
        states, wall, last = self.stats.states(), time(), final and self._stopping
        for state in states:
            state.expire(wall=wall)
            if state.tensors is not None:
                state.tensors.count_lost(everything=last)
        recording = Recording(
            (
                *self._cycle.readings(),
                *(() if training is None else training.series()),
            ),
            final,
            self.events.reading(),
            None if training is None else self._tagged(training.reading()),
            _ending(wall) if last else None,
            self.stats.refused,
            self._gpus.look(os.environ, local_rank(), final=final),
        )
        self._claim(states)
        if self._sink is None or self._closed:
            return False
        return self._sink.publish(recording, self._written_as, is_child=self._is_child)

    def _tagged(self, reading: TrainingReading | None) -> TrainingReading | None:
        """Add the session of `configure` to the facts, unless the job's telemetry has a session tag of its own."""
        session = self.process.session
        if reading is None or not session or any(name == "session_tag" for name, _ in reading.facts):
            return reading
        return reading.replace(facts=tuple(sorted([*reading.facts, ("session_tag", session)])))

    def _claim(self, states: Iterable[StatState]) -> None:
        """Claim the rank once the process records samples of the job, or trains."""
        trains = self._training is not None and self._training.trains()
        claim = 2 if trains else int(any(state.count and not state.own for state in states))
        if claim > self._claimed:
            self._claimed = claim
            self.process.claim_rank(trains=claim > 1)
            self.events.renew()
            if self._sink is not None:
                self._sink.rename(self._written_as())

    def _written_as(self) -> ProcessIdentity:
        return self.process.identity().replace(pid=os.getpid(), started=self.started_at)

    def _read_rules(self) -> None:
        rules = None if self._sink is None else self._sink.changed_rules()
        for problem in self.stats.override(list(rules)) if rules is not None else ():
            log_once(f"rule {problem}", f"recording rule of the sidecar's configuration ignored: {problem}")


def refusal_of_interpreter() -> str | None:
    """Return why nothing is recorded on this interpreter: the buffers rely on the interpreter lock. None if all is well."""
    is_gil_enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    if is_gil_enabled():
        return None
    return (
        "nothing is recorded: this Python runs without the interpreter lock, which is not supported;"
        " set PYTHON_GIL=1 or use a standard build of CPython"
    )


def _ending(wall: float) -> Ending | None:
    """Return the uncaught exception that ends this process, or a child of multiprocessing; None for a normal exit."""
    error: Any = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # the last exception at a prompt has ended nothing
        error = getattr(sys, "last_value", None)
    if error is None or isinstance(error, SystemExit):
        return None
    return Ending(type(error).__name__, wall)


RECORDER = Recorder()
"""The recorder of this process."""
