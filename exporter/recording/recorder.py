"""Recorder of a process: Stats, events and training state, aggregated and written by a recording thread.

Runs in the training process. The thread starts with the first Stat, event, block or handler. It runs no code of the job, and
releases the interpreter lock between pieces of work of about 0.4 ms. A final recording is written at a normal exit and after an
uncaught exception. The recording thread does the work of a flush and all writes, because a write can block for as long as the file system
does. The threads of the job wait at most until a timeout.
"""

from __future__ import annotations

import atexit
import enum
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from time import monotonic, time
from typing import Any, TypeVar

from exporter.recording.conversion import safe_repr
from exporter.recording.event_log import EventLog
from exporter.recording.gpus import ProcessGpus
from exporter.recording.identity import Process, local_rank, number_within
from exporter.recording.interfaces import PeriodicTask, Sink, TrainingSource
from exporter.recording.notices import NOTICES, log_once
from exporter.recording.passive import PassiveStats
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.recording.stat_cycle import StatCycle
from exporter.recording.stat_state import BUFFER_SAMPLES, StatState
from exporter.recording.stat_table import StatTable
from exporter.recording.thread import RecordingThread
from exporter.recording.values import Ending, ProcessIdentity, Recording, TrainingReading
from exporter.recording.worker import end_all
from exporter.recording.write_queue import UnwrittenRecording, WriteQueue

DEFAULT_FLUSH_SECONDS = 1.0
"""Default interval between two writes to the feed."""
TICK_SECONDS = 0.5
"""Interval of the drains between flushes. A million samples a second fill a buffer in 1.05 s. A shorter interval costs more CPU time:
a wake-up takes 0.2 ms, because the caches of the processor no longer contain the code and the data of the exporter."""
HIGH_WATER_SAMPLES = BUFFER_SAMPLES // 64
"""Number of samples above which a tick drains a buffer before the next flush."""
RENEW_SECONDS = 1.0
"""Maximum time for which `configure` waits for the current work of the recording thread, such as an aggregation on a busy machine.
Samples that are recorded after a longer wait, and before the end of the work, have the earlier identity."""
CHILD_FLUSH_SECONDS = 0.25
"""Maximum flush interval of forked children and children of multiprocessing, such as the workers of a DataLoader. These processes
are often ended by SIGTERM, and then lose the samples since the last flush."""
EXIT_SECONDS = 2.0
"""Time limit of the shutdown: periodic tasks, handlers, span exporters and the final write."""
TASKS_SECONDS, HANDLERS_SECONDS, SPANS_SECONDS = 1.5, 1.6, 1.75
"""Deadlines of the parts, relative to the start of the shutdown. The remaining time is for the final write."""
EXIT_SWITCH_SECONDS = 0.0005
"""Thread switch interval of the interpreter during the shutdown."""
DRAIN_SECONDS = 0.5
"""Maximum time for which the shutdown waits to drain the Stats with window handlers."""

_T = TypeVar("_T")


class RankClaim(enum.IntEnum):
    """Reason for which a process has claimed its rank. A greater reason replaces a lesser one."""

    NONE = 0  # no claim
    SAMPLES = 1  # the process has recorded samples of the job
    TRAINING = 2  # the process trains


class Recorder:
    """Recorder of a process.

    Attributes:
        process: Identity of the process: run, rank and role.
        stats: Stats of the process.
        events: Events of the process, and their handlers.
        is_recording: False if nothing is recorded, because of `EXPORTER_DISABLED=1` or a free-threaded interpreter.
        thread: Recording thread.
        start: Starts the recording thread if it is not running. Never raises.
        started_at: Unix time at which the process started to record under its current identity.
    """

    def __init__(self) -> None:
        default_seconds = DEFAULT_FLUSH_SECONDS
        self.flush_seconds = number_within(os.environ, "EXPORTER_FLUSH_SECONDS", default_seconds, 0.1, 60.0)
        self.is_recording = os.environ.get("EXPORTER_DISABLED") != "1"
        self._refusal = unsupported_interpreter() if self.is_recording else None
        self.is_recording = self.is_recording and self._refusal is None
        self._training: TrainingSource | None = None
        self._sink: Sink | None = None
        self._tasks: tuple[PeriodicTask, ...] = ()
        self._passive = PassiveStats()
        self.thread = RecordingThread(self._run, self._prepare)
        self.start = self.thread.start
        self.process = Process(renew=self.renew)
        self.stats = StatTable(wake=self.start)
        self._cycle = StatCycle(self.stats, self.thread.yield_gil)
        self.events = EventLog(
            identify=self.process.identity, current_span=self._current_span, wake=self.start
        )
        self.stats.is_recording = self.events.is_recording = self.is_recording
        self._unwritten = WriteQueue(self._write)
        self._is_child = False
        self._initialize()
        # Registered before the exit handlers of the job. Those run earlier, so that their samples are recorded.
        atexit.register(self.shutdown)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _initialize(self) -> None:
        """Set the state that a forked child does not inherit: requests, start time, GPUs and the claim of the rank."""
        self._is_flush_requested = self._is_renewal_requested = False
        # True once the last recording of the process is aggregated, and no recording follows.
        self._has_ended = False
        self._is_shutting_down = False
        self._is_closed = False  # True after the shutdown, when nothing more is written
        self.started_at = time()
        self._gpus = ProcessGpus()
        self._rank_claim = RankClaim.NONE
        # Identity under which the recording is published; None before the first publication and after a change
        self._recorded_identity: ProcessIdentity | None = None

    # Composition -----------------------------------------------------------------------------------------

    def attach_feed(self, sink: Sink) -> None:
        """Set the sink that receives the recordings."""
        self._sink = sink

    def attach_training(self, training: TrainingSource) -> None:
        """Set the source of the training state."""
        self._training = training

    def attach(self, task: PeriodicTask, *, start: bool = False) -> None:
        """Add a periodic task, which runs while the recording thread runs. *start* starts the thread."""
        self._tasks = (*self._tasks, task)
        if start and self.is_recording:
            self.start()

    # Called by the job's threads -------------------------------------------------------------------------

    def drain(self, timeout_seconds: float) -> bool:
        """Aggregate the samples of Stats with window handlers. Return False after the timeout."""
        if not any(state.window_handlers for state in self.stats.states()):
            return True
        return self._work(lambda: self._cycle.drain(lambda state: state.window_handlers), timeout_seconds)

    def flush(self, timeout_seconds: float) -> bool:
        """Aggregate and write a recording. Return False after the timeout, and if the write failed."""
        return self._work(lambda: self._publish(is_identity_ending=False), timeout_seconds, writes=True)

    def flush_soon(self) -> None:
        """Request an immediate flush by the recording thread, for example after a checkpoint."""
        self._is_flush_requested = True
        self.thread.wake()

    def flush_all(self, timeout_seconds: float) -> bool:
        """Write all values recorded so far, and wait for event handlers and span exporters. See `exporter.flush`.

        The values of CUDA tensors are included if they have arrived and belong to this thread.
        """
        deadline = monotonic() + timeout_seconds
        for state in self.stats.states():
            if state.tensors is not None:
                state.tensors.collect()
        if self._training is not None:
            self._training.collect_tensors()
        self.drain(timeout_seconds)
        self.events.flush(max(deadline - monotonic(), 0.1))
        is_written = self.flush(max(deadline - monotonic(), 0.1))
        if self._training is not None:
            self._training.flush_span_exporters(max(deadline - monotonic(), 0.1))
        return is_written

    def shutdown(self) -> None:
        """Write the final recording, and end the thread, within about `EXIT_SECONDS`.

        Later calls are ignored, unless an exception of a signal handler has ended the first call. The call at the exit then continues.
        """
        if self._is_shutting_down or self._is_closed:
            return
        self._is_shutting_down = self.thread.is_stopping = True
        switch_interval = sys.getswitchinterval()
        # With the default interval, a busy daemon thread of the job would delay each system call of the shutdown by 5 ms.
        sys.setswitchinterval(EXIT_SWITCH_SECONDS)
        try:
            self._shut_down(monotonic())
        finally:
            sys.setswitchinterval(switch_interval)
            self._is_shutting_down = False

    def _shut_down(self, start: float) -> None:
        """End the parts of the recorder in order. Each part has a deadline relative to the monotonic time *start*."""
        self.events.limit_waits(start + HANDLERS_SECONDS)
        self.thread.wake()
        self.drain(DRAIN_SECONDS)
        waits = [_attempt(task.finish) for task in self._tasks]
        for wait in waits:
            if wait is not None:
                _attempt(wait, start + TASKS_SECONDS - monotonic(), "exit")
        _attempt(self.events.close, start + HANDLERS_SECONDS - monotonic())
        _attempt(partial(end_all, [self._passive], seconds=0.1, reason="exit"))
        ending, remaining_seconds = _ending(time()), max(start + EXIT_SECONDS - monotonic(), 0.1)
        self._work(lambda: self._publish_last(start, ending), remaining_seconds, writes=True)
        if not self._has_ended or self._unwritten.latest() is not None:
            log_once(
                "final write",
                f"the samples since the last snapshot are lost: the final snapshot was not written within {EXIT_SECONDS:g} s of the"
                " exit; if the file system of the feed is slow, set EXPORTER_FEED_DIR to a directory in memory, such as /dev/shm/NAME",
            )
        self._is_closed = True
        if self.thread.is_running():
            self.thread.wake()
            # The C library ends a thread that takes the interpreter lock during finalization, which may abort the process.
            self.thread.join(max(start + EXIT_SECONDS - monotonic(), 0.1))
        elif self._sink is not None:
            self._sink.close()
        NOTICES.flush(max(start + EXIT_SECONDS - monotonic(), 0.1))

    def renew(self) -> None:
        """Start a new recording for a changed identity, now or after the current work of the recording thread."""
        self.events.forget_identity()
        self._is_renewal_requested = True
        self._work(self._renew, RENEW_SECONDS)
        self.thread.wake()  # for the write

    def reset(self) -> None:
        """Return to the initial state: no recorded values, new locks, no threads."""
        self._initialize()
        NOTICES.reset()
        parts = (
            self.thread,
            self.process,
            self.stats,
            self.events,
            self._cycle,
            self._passive,
            self._unwritten,
        )
        for part in (*parts, self._sink, self._training, *self._tasks):
            if part is not None:
                part.after_fork()

    # Implementation ------------------------------------------------------------------------------------------

    def _current_span(self) -> str | None:
        return None if self._training is None else self._training.current_span_id()

    def _in_use(self) -> bool:
        """Return True once the process has a Stat, an event, a handler or training data."""
        return bool(
            self.stats.states()
            or self.events.in_use()
            or (self._training is not None and self._training.in_use())
        )

    def _work(self, work: Callable[[], object], timeout_seconds: float, *, writes: bool = False) -> bool:
        """Let the recording thread do work; while this thread writes, and without this thread, work on the caller's thread.

        With *writes*, the recording thread then writes the queue. Returns False after the timeout, if *work* raises or returns False, and if
        the write failed.
        """
        deadline = monotonic() + timeout_seconds

        def work_and_write() -> bool:
            return self.thread.run_exclusively(work, work_seconds()) and write()

        def write() -> bool:
            return not writes or self._unwritten.write_all(work_seconds())

        def work_seconds() -> float:
            # The shutdown waits beyond its deadline while the thread makes progress.
            return max(remaining_seconds(), 0.1)

        def remaining_seconds() -> float:
            return max(deadline - monotonic(), 0.0)

        if not self._unwritten.is_writing():
            return self.thread.call(work_and_write, timeout_seconds)
        is_done = self.thread.run_exclusively(work, timeout_seconds)
        return is_done and self.thread.call(write, remaining_seconds())

    def _publish_last(self, start: float, ending: Ending | None) -> None:
        """Queue the final recording if the recorder is in use. No recording is queued afterwards."""
        if self._in_use() and not self._has_ended:
            self._renew()
            if self._training is not None:
                self._training.update_totals(is_identity_ending=True)
                # Closed before the final recording, which includes the number of records that the span exporters dropped.
                self._training.close_span_exporters(max(start + SPANS_SECONDS - monotonic(), 0.1))
            self._publish(is_identity_ending=True, is_process_ending=True, ending=ending)
        self._has_ended = True

    def _renew(self) -> None:
        """Start a requested new recording: queue the final recording of the old identity, and restart all counts at zero.

        If nothing has been published, the counts continue under the new identity. While the write queue is full, the request stays pending.
        """
        if not self._is_renewal_requested or self._unwritten.is_full():
            return
        self._is_renewal_requested = False
        if self._is_published():
            self._publish(is_identity_ending=True)
            for state in self.stats.states():
                state.reset(wall=time())
            self.events.reset()
            if self._training is not None:
                self._training.reset()
        self.events.forget_identity()
        self.process.begin_recording()
        self._recorded_identity = None
        self.started_at = time()

    def _is_published(self) -> bool:
        """Return True if a recording of the current identity is in a feed file or in the write queue."""
        latest = self._unwritten.latest()
        if latest is not None:
            return not latest.recording.final  # the last recording of an identity is final
        return self._sink is not None and self._sink.is_open()

    def _prepare(self) -> bool:
        """Prepare the process for the recording thread. Return False if nothing is recorded."""
        if self._refusal is not None:
            log_once("interpreter", self._refusal)
        if self.is_recording:
            self.process.export_environment()
            self._hook_multiprocessing()
        return self.is_recording

    def _hook_multiprocessing(self) -> None:
        """Register the shutdown as a finalizer of multiprocessing, because its children skip `atexit`.

        A child clears the finalizers that it inherits, and registers its own after the fork.
        """
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            self._finalize_at_exit()
            util.register_after_fork(self, Recorder._finalize_at_exit)

    def _finalize_at_exit(self) -> None:
        sys.modules["multiprocessing.util"].Finalize(None, self.shutdown, exitpriority=0)

    def _after_fork(self) -> None:
        """Reset the recorder in a forked child, and start the thread if the child has inherited a recorder in use."""
        self.reset()
        self._is_child = True
        if self._in_use():
            self.start()

    def _run(self) -> None:
        """Flush once per interval, and tick between the flushes, until the thread must end. Runs on the recording thread."""
        self.thread.run_exclusively(self._apply_changed_rules)
        last_flush = monotonic()
        while self._sleep_until(next_flush := last_flush + self._interval_seconds()):
            self.thread.run_calls()
            if self._is_flush_requested or monotonic() >= next_flush:
                self._is_flush_requested = False
                self.thread.run_exclusively(self._flush_cycle)
                last_flush = max(next_flush, monotonic() - self._interval_seconds())
            else:
                self.thread.run_exclusively(self._tick_cycle)
            self._unwritten.write_all(0.0)
        while not self._is_closed:  # the shutdown calls for the final recording
            self.thread.run_calls()
            self.thread.wait_for_wake()
        if self._sink is not None:
            self._sink.close()

    def _interval_seconds(self) -> float:
        """Return the flush interval, which is shorter in a child process.

        A process that multiprocessing has spawned is recognized only after its imports, while it already records.
        """
        process = sys.modules.get("multiprocessing.process")
        if process is not None and process.parent_process() is not None:
            self._is_child = True
        return min(self.flush_seconds, CHILD_FLUSH_SECONDS) if self._is_child else self.flush_seconds

    def _sleep_until(self, next_flush: float) -> bool:
        """Sleep until the next flush, tick, window end or request. Return False if the thread must end."""
        return self.thread.sleep_until(
            min([next_flush, monotonic() + TICK_SECONDS, *self._cycle.window_ends()])
        )

    def _flush_cycle(self) -> None:
        """Do the work of a flush up to the write: renewal, passive Stats, Stat rules, periodic tasks, and a recording."""
        self._renew()
        self._passive.tick(self.stats.states())
        self._apply_changed_rules()
        for task in self._tasks:
            task.tick()
        self._publish(is_identity_ending=False, within_seconds=self.flush_seconds)

    def _tick_cycle(self) -> None:
        """Do the work between flushes: renewal, periodic tasks, due windows, and buffers above `HIGH_WATER_SAMPLES`."""
        self._renew()
        for task in self._tasks:
            task.tick()
        if self._training is not None:
            self._training.tick()
        if self._cycle.needs_close():
            self._cycle.close_windows()
        self._cycle.drain(lambda state: len(state.buffer) > HIGH_WATER_SAMPLES, TICK_SECONDS)

    def _publish(
        self,
        *,
        is_identity_ending: bool,
        is_process_ending: bool = False,
        ending: Ending | None = None,
        within_seconds: float = inf,
    ) -> bool:
        """Aggregate a recording and queue it for the feed. Return False if the queue is full, and after the last recording of the process.

        The arguments are those of `_aggregate`.
        """
        if self._has_ended:
            return False
        recording = self._aggregate(
            is_identity_ending=is_identity_ending,
            is_process_ending=is_process_ending,
            ending=ending,
            within_seconds=within_seconds,
        )
        # Before the first recording, the job may still change its environment.
        if self._recorded_identity is None or not self._is_published():
            identity = self.process.recorded_identity()
            self._recorded_identity = identity.replace(pid=os.getpid(), started=self.started_at)
        return self._unwritten.add(UnwrittenRecording(recording, self._recorded_identity))

    def _aggregate(
        self,
        *,
        is_identity_ending: bool,
        is_process_ending: bool = False,
        ending: Ending | None = None,
        within_seconds: float = inf,
    ) -> Recording:
        """Aggregate the recorded data, and claim the rank if the data requires it.

        *is_identity_ending* is True for the last recording of the identity. *is_process_ending* is True for the last recording of the process,
        and *ending* is the exception that ends the process. Buffers that are not drained after *within_seconds* are drained by the
        next call.
        """
        training = self._training
        self._cycle.close_windows()
        if training is not None:
            training.update_totals(is_identity_ending=is_identity_ending)
        self._cycle.drain(lambda state: state.buffer, within_seconds)
        states, wall = self.stats.states(), time()
        for state in states:
            state.expire(wall=wall)
            if state.tensors is not None:
                state.tensors.refuse_unread(is_process_ending=is_process_ending)
        if training is not None:
            training.refuse_unread_tensors(is_process_ending=is_process_ending)
        recording = Recording(
            (*self._cycle.readings(), *(() if training is None else training.stat_readings())),
            is_identity_ending,
            self.events.reading(),
            None if training is None else self._with_session_tag(training.training_reading()),
            ending,
            self.stats.refused_stats,
            self._gpus.read(os.environ, local_rank(), is_identity_ending=is_identity_ending),
        )
        self._claim(states)
        return recording

    def _write(self, unwritten: UnwrittenRecording) -> bool:
        """Write a recording. Return False without a sink, after the close, or if the write failed."""
        if self._sink is None or self._is_closed:
            return False
        return self._sink.publish(unwritten.recording, unwritten.identity, is_child=self._is_child)

    def _with_session_tag(self, reading: TrainingReading | None) -> TrainingReading | None:
        """Add the session tag of the recording to the facts, unless the job has reported a session tag."""
        session = self.process.recorded_session
        if reading is None or not session or any(name == "session_tag" for name, _ in reading.facts):
            return reading
        return reading.replace(facts=tuple(sorted([*reading.facts, ("session_tag", session)])))

    def _claim(self, states: Iterable[StatState]) -> None:
        """Claim the rank once the process records samples of the job or trains."""
        trains = self._training is not None and self._training.trains()
        claim = RankClaim.TRAINING if trains else RankClaim.NONE
        if not trains and any(state.count and not state.is_exporter_family for state in states):
            claim = RankClaim.SAMPLES
        if claim > self._rank_claim:
            self._rank_claim = claim
            self.process.claim_rank(trains=trains)
            self.events.forget_identity()
            self._recorded_identity = None  # changes with the claim

    def _apply_changed_rules(self) -> None:
        """Apply the Stat rules of the sidecar's configuration if they have changed, and log a notice for each invalid rule."""
        rules = None if self._sink is None else self._sink.changed_rules()
        for problem in self.stats.replace_configured_rules(list(rules)) if rules is not None else ():
            log_once(
                f"rule {problem}",
                f"a rule of `recording:` in the sidecar's configuration is ignored: {problem}",
            )


def unsupported_interpreter() -> str | None:
    """Return the reason why nothing is recorded in a free-threaded interpreter, or None for other interpreters."""
    is_gil_enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    if is_gil_enabled():
        return None
    return (
        "nothing is recorded: this Python runs without the interpreter lock, which is not supported;"
        " set PYTHON_GIL=1 or use a standard build of CPython"
    )


def _attempt(work: Callable[..., _T], *arguments: Any) -> _T | None:
    """Return the result of a part of the shutdown, or None if the part raises. The exception is logged once."""
    try:
        return work(*arguments)
    except Exception as error:  # a defect must not reach the job or prevent the final recording
        if is_from_signal_handler(error):
            raise
        log_once(f"shutdown {safe_repr(error)}", f"a defect in the shutdown: {safe_repr(error)}")
        return None


def _ending(wall: float) -> Ending | None:
    """Return the uncaught exception that ends this process, or None for a normal exit."""
    error: Any = sys.exc_info()[1]
    is_interactive = hasattr(sys, "ps1")  # an exception at a prompt does not end the process
    if error is None and not is_interactive:
        error = getattr(sys, "last_value", None)
    if error is None or isinstance(error, SystemExit):
        return None
    return Ending(type(error).__name__, wall)


RECORDER = Recorder()
"""Recorder of this process."""
