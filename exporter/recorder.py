"""The recorder: one daemon thread that drains buffers, closes windows by the clock and writes the feed.

Runs in the training process; started by the first Stat, event or handler. It runs no user code, and gives the interpreter
lock away between two pieces of a few tenths of a millisecond. Every orderly exit loses nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from time import monotonic, perf_counter, sleep, time

from exporter.errors import FeedError
from exporter.feed.directory import OverridesReader, feed_directory
from exporter.feed.writer import FeedWriter
from exporter.recording.events import EVENTS
from exporter.recording.identity import PROCESS, number_within
from exporter.recording.notices import end_notices, tell_once
from exporter.recording.stat import REGISTRY
from exporter.recording.state import BUFFER_SAMPLES, GRAVES, StatState
from exporter.recording.values import Ending, ProcessIdentity, Recording, StatReading
from exporter.recording.windows import WindowClock
from exporter.recording.worker import Worker, end_all
from exporter.training.buffers import Hooks
from exporter.training.recording import TRAINING
from exporter.version import __version__

DEFAULT_FLUSH_SECONDS = 1.0
TICK_SECONDS = 0.25
"""How often buffers are looked at between flushes: a million adds a second fill a buffer in 0.52 s. Each look costs
a tenth of a millisecond, most of it waking up."""
HIGH_WATER = BUFFER_SAMPLES // 32
"""A buffer with more samples than this is drained at once, not at the next flush."""
SLICE_SECONDS = 0.0002
"""Work between two chances for the job's threads to take the interpreter lock."""
RENEW_SECONDS = 0.1
"""The longest that `configure` waits for the recording thread to finish what it is at."""
CHILD_FLUSH_SECONDS = 0.25
"""How often forked children and those of multiprocessing flush at least: they are often ended by SIGTERM, as the
persistent workers of a DataLoader are, and then lose what they have not flushed."""
STUCK_SECONDS = 5.0
"""A callback of a passive Stat that runs for longer is said to hang."""
EXIT_SECONDS = 2.0
"""The longest that an exiting process waits for the recording thread to finish what it is at."""
DRAIN_SECONDS = 0.5
"""The same, before its handlers are given the last windows."""


class Recorder:
    """Drains the Stats, events and training of this process into its feed file.

    Attributes:
        began: Unix time at which the recording of this process began.
    """

    def __init__(self) -> None:
        usual = DEFAULT_FLUSH_SECONDS
        self._flush_seconds = number_within(os.environ, "EXPORTER_FLUSH_SECONDS", usual, 0.1, 60.0)
        self._overrides: OverridesReader | None = None
        self._passive = Worker(_measure, name="passive", bound=1)
        self._forked = False
        self._begin()
        # Registered before the job's own exit handlers, which therefore run first: what they add is recorded.
        atexit.register(self.shutdown)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _begin(self) -> None:
        """Set up what belongs to one process alone."""
        self._starting = threading.Lock()
        self._cycle = threading.Lock()
        self._alarm = threading.Lock()  # held while the thread sleeps: releasing it wakes the thread
        self._alarm.acquire()
        self._thread: threading.Thread | None = None
        self._stopping = self._hurry = self._renewing = False
        self._writer: FeedWriter | None = None
        self.began = time()
        self._clocks: dict[float, WindowClock] = {}
        self._claimed = 0  # 1: a rank, 2: as one that trains
        self._first = 0  # the Stat whose buffer is to be emptied first
        self._slice_began = 0.0

    def start(self) -> None:
        """Start the thread unless it runs; cheap to call again, never raises."""
        # Whoever holds the lock is starting the thread; a signal handler that interrupts it must not wait for it.
        if self._thread is not None or self._stopping or not self._starting.acquire(blocking=False):
            return
        try:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="exporter-recording", daemon=True)
                PROCESS.begin()
                self._hook_multiprocessing()
                thread.start()
                self._thread = thread
        except Exception as error:  # noqa: BLE001  # no (daemon) threads here, a broken installation: not the job's problem
            tell_once("thread", f"recording is off, it cannot start: {error!r}")
        finally:
            self._starting.release()

    def drain(self, timeout_seconds: float) -> bool:
        """Put together, on the caller's thread, what was added to Stats whose windows somebody is told of."""
        return self._guarded(lambda: self._drain_those(lambda state: state.listeners), timeout_seconds)

    def flush(self, timeout_seconds: float) -> bool:
        """Drain everything and write it, on the caller's thread; says whether it was written in time."""
        return self._guarded(lambda: self._publish(final=False), timeout_seconds)

    def flush_soon(self) -> None:
        """Have the recording thread flush at once, without waiting for it: a checkpoint was saved."""
        self._hurry = True
        self._wake()

    def shutdown(self) -> None:
        """Write the last recording and end the thread; again is harmless. Later samples are not recorded."""
        if self._stopping:
            return
        self._stopping = True
        self._wake()
        self.drain(DRAIN_SECONDS)
        EVENTS.close()
        end_all([self._passive], seconds=0.2, reason="exit")
        # A thread that wants the interpreter lock while it is being torn down is ended by the C library, which may
        # abort the process: so none of ours is left running, if it can be helped.
        until = monotonic() + EXIT_SECONDS
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(EXIT_SECONDS)
        # Where the recording thread hangs in a write the last recording is lost, and the process ends all the same.
        self._guarded(self._write_last, max(until - monotonic(), 0.1))
        TRAINING.close()
        end_notices()

    def _write_last(self) -> None:
        if _in_use():
            TRAINING.drain(self._give_way)
            TRAINING.close()  # first, so that what the exporters could not take is on the last recording
            self._publish(final=True)
        if self._writer is not None:
            self._writer.close()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # it is awake
            self._alarm.release()

    def renew(self) -> None:
        """Begin anew under another identity, now or when the recording thread has finished what it is at."""
        EVENTS.renew()
        self._renewing = True
        self._guarded(self._renew, RENEW_SECONDS)

    def _renew(self) -> None:
        if self._renewing:
            self._renewing = False
            if self._writer is not None:
                self._publish(final=True)
                self._writer.close()
                for state in REGISTRY.states():
                    state.reset(wall=time())
                EVENTS.reset()
                TRAINING.reset()
            EVENTS.renew()
            self._writer = None
            self.began = time()

    def _hook_multiprocessing(self) -> None:
        """Have children of multiprocessing flush: they skip atexit, and clear earlier finalizers when they begin."""
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            self._finalize_at_exit()
            util.register_after_fork(self, Recorder._finalize_at_exit)
            process = sys.modules.get("multiprocessing.process")
            if process is not None and process.parent_process() is not None:
                self._forked = True

    def _finalize_at_exit(self) -> None:
        sys.modules["multiprocessing.util"].Finalize(None, self.shutdown, exitpriority=0)

    def _after_fork(self) -> None:
        self._begin()
        self._forked = True
        for part in (PROCESS, REGISTRY, EVENTS, TRAINING, self._passive, GRAVES):
            part.after_fork()
        if _in_use():
            self.start()

    def _run(self) -> None:
        seconds = min(self._flush_seconds, CHILD_FLUSH_SECONDS) if self._forked else self._flush_seconds
        next_flush = monotonic() + seconds
        self._guarded(self._read_rules)
        while self._sleep_until(next_flush):
            if self._hurry or monotonic() >= next_flush:
                self._hurry = False
                self._guarded(self._flush_cycle)
                next_flush = max(next_flush + seconds, monotonic())
            else:
                self._guarded(self._tick_cycle)

    def _sleep_until(self, next_flush: float) -> bool:
        """Sleep until there is something to do; False when it is time to end."""
        if not self._stopping:
            now = monotonic()
            until = min([next_flush, now + TICK_SECONDS, *(clock.due for clock in self._clocks.values())])
            self._alarm.acquire(timeout=max(until - now, 0.0))
            self._slice_began = perf_counter()
        return not self._stopping

    def _guarded(self, step: Callable[[], object], timeout_seconds: float = -1) -> bool:
        """Run one step with everything to itself; a defect of ours costs that step, not the thread and not the job."""
        if not self._cycle.acquire(timeout=timeout_seconds):
            return False
        try:
            return step() is not False
        except Exception as error:  # noqa: BLE001  # see above
            tell_once(f"defect {error!r}", f"a defect in the recording thread: {error!r}")
            return False
        finally:
            self._cycle.release()

    def _flush_cycle(self) -> None:
        self._renew()
        passive = [state for state in REGISTRY.states() if state.measure is not None]
        busy_since = self._passive.busy_since
        if passive and busy_since is None:
            self._passive.put(passive)
        elif busy_since is not None and time() - busy_since > STUCK_SECONDS:
            told = "a callback of a passive Stat hangs: none of them is measured meanwhile"
            tell_once("passive stuck", told)
        self._read_rules()
        EVENTS.tick()
        self._publish(final=False, within_seconds=self._flush_seconds)

    def _tick_cycle(self) -> None:
        self._renew()
        EVENTS.tick()
        TRAINING.tick(self._give_way)
        self._close_windows()
        self._drain_those(lambda state: len(state.buffer) > HIGH_WATER, TICK_SECONDS)

    def _close_windows(self) -> None:
        wall, now = time(), monotonic()
        by_length: dict[float, list[StatState]] = {}
        for state in REGISTRY.states():
            if (seconds := state.effective.window_seconds) is not None:
                by_length.setdefault(seconds, []).append(state)
        self._clocks = {
            seconds: self._clocks.get(seconds) or WindowClock(seconds, wall=wall, monotonic=now)
            for seconds in by_length
        }
        for seconds, clock in self._clocks.items():
            late = clock.late(wall=wall, monotonic=now)
            if late is None:
                continue
            for state in by_length[seconds]:
                self._drain(state)
            started, ended = clock.advance(wall=wall, monotonic=now)
            for state in by_length[seconds]:
                self._give_way()
                state.close_window(started, ended, late_windows=late >= seconds, wall=wall)

    def _publish(self, *, final: bool, within_seconds: float = inf) -> bool:
        self._close_windows()
        TRAINING.drain(self._give_way)
        if final:
            TRAINING.settle()
        self._drain_those(lambda state: state.buffer, within_seconds)
        states, wall, last = REGISTRY.states(), time(), final and self._stopping
        for state in states:
            state.expire(wall=wall)
            if state.tensors is not None:
                state.tensors.count_lost(everything=last)
        recording = Recording(
            (*[self._reading(state) for state in states if state.enabled], *TRAINING.series()),
            final,
            EVENTS.reading(),
            TRAINING.reading(),
            _ending(wall) if last else None,
            REGISTRY.refused,
        )
        claim = 2 if TRAINING.trains() else int(any(state.count and not state.own for state in states))
        if claim > self._claimed:
            self._claimed = claim
            PROCESS.claim_rank(trains=claim > 1)
            EVENTS.renew()
            if self._writer is not None:
                self._writer.identity = _written_as(self._writer.identity.id, self.began)
        return self._write(recording)

    def _write(self, recording: Recording) -> bool:
        if self._writer is None:
            touched = (
                recording.events
                or recording.training
                or any(reading.count or reading.rejected or reading.overflows for reading in recording.stats)
            )
            if self._forked and not touched:
                return True  # such as a DataLoader's worker, which inherits every Stat and uses none
            directory = _directory()
            if directory is None:
                return False
            identity = _written_as(os.urandom(16).hex(), self.began)
            self._writer = FeedWriter(directory, identity, flush_seconds=self._flush_seconds)
        written = self._writer.publish(recording)
        problem, notice = self._writer.problem, self._writer.notice
        if not written:
            tell_once(f"feed {problem}", f"the last snapshot was not written: {problem}")
        if notice is not None:
            tell_once(notice, notice)
        return written

    def _drain_those(self, wanted: Callable[[StatState], object], within_seconds: float = inf) -> None:
        """Empty some of the buffers, and leave the rest to the next time where that takes long: threads may add faster."""
        states, until = REGISTRY.states(), monotonic() + within_seconds
        first, self._first = min(self._first, len(states)), 0
        for position in (*range(first, len(states)), *range(first)):
            if wanted(states[position]):
                if monotonic() > until:
                    self._first = position
                    break
                self._drain(states[position])

    def _drain(self, state: StatState) -> None:
        """Empty a buffer; at most what it held at the start, whatever is added meanwhile."""
        for _ in range(len(state.buffer) // 1024 + 1):
            self._give_way()
            if not state.drain(wall=time()):
                return

    def _reading(self, state: StatState) -> StatReading:
        self._give_way()
        return state.reading()

    def _give_way(self) -> None:
        """Let the job's threads have the interpreter lock, if this one has worked for a while."""
        if perf_counter() - self._slice_began > SLICE_SECONDS:
            sleep(0)
            self._slice_began = perf_counter()

    def _read_rules(self) -> None:
        if self._overrides is None and (directory := _directory()) is not None:
            self._overrides = OverridesReader(directory)
        try:
            rules = None if self._overrides is None else self._overrides.changed_rules()
        except FeedError as error:
            tell_once(f"overrides {error}", f"the recording rules of the sidecar are left out: {error}")
            return
        for problem in REGISTRY.override(rules) if rules is not None else ():
            told = f"a recording rule of the sidecar's configuration is left out: {problem}"
            tell_once(f"rule {problem}", told)


def _in_use() -> bool:
    return bool(REGISTRY.states() or EVENTS.in_use() or TRAINING.in_use())


def _measure(passive: list[StatState]) -> None:
    """Call the callback of every passive Stat, on the worker's thread."""
    for state in passive:
        if state.measure is not None and state.enabled:
            try:
                state.buffer.append(state.measure())
            except BaseException as error:  # noqa: BLE001  # the user's code, SystemExit too
                state.refusals.append("error")
                name = state.definition.name
                tell_once(f"passive {name}", f"the passive Stat {name!r} could not be measured: {error!r}")


def _ending(wall: float) -> Ending | None:
    """Tell the exception that ends this process: one that nobody caught, or that ends a child of multiprocessing."""
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # the last one at a prompt has ended nothing
        error = getattr(sys, "last_value", None)
    if error is None or isinstance(error, SystemExit):
        return None
    return Ending(type(error).__name__, wall)


def _directory() -> str | None:
    try:
        return feed_directory(os.environ)
    except FeedError as error:
        tell_once("feed directory", f"nothing is exported: {error}")
        return None


def _written_as(process_id: str, began: float) -> ProcessIdentity:
    return PROCESS.identity().replace(id=process_id, pid=os.getpid(), started=began, version=__version__)


RECORDER = Recorder()
"""That of this process."""

REGISTRY.recording = EVENTS.recording = os.environ.get("EXPORTER_DISABLED") != "1"
REGISTRY.wake = EVENTS.wake = RECORDER.start
REGISTRY.flush = RECORDER.flush
TRAINING.record(on=REGISTRY.recording)
TRAINING.since(RECORDER.began)
Hooks.adopt = RECORDER.start
Hooks.flush_soon = RECORDER.flush_soon
PROCESS.renew = RECORDER.renew
