"""The recorder: one daemon thread that drains buffers, closes windows by the clock and feeds a sink.

Runs in the training process; started by the first Stat, event or handler. It runs no user code, and between
two pieces of at most a few tenths of a millisecond it gives the interpreter lock away, so that the job's threads
do not wait for it. The sink (the feed's writer) is the only thing here that touches a file. When the sidecar dies nothing
changes here; when this process dies, at most one flush interval of samples is lost.

After a fork the child's buffers are empty, its totals zero and its sink a new one; `os._exit` and SIGKILL lose
what was added since the last flush; every orderly exit loses nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic, perf_counter, sleep, time
from typing import Protocol

from exporter.recording.events import EventLog
from exporter.recording.notices import end_notices, tell_once
from exporter.recording.overrides import Rule
from exporter.recording.registry import Registry
from exporter.recording.state import BUFFER_SAMPLES, StatState
from exporter.recording.values import Ending, Recording, StatReading, TrainingReading
from exporter.recording.windows import WindowClock
from exporter.recording.worker import Worker


class Sink(Protocol):
    """Where recordings go; a new one for each process. Nothing of it raises."""

    @property
    def problem(self) -> str | None:
        """Why the last recording did not arrive, None when it did."""
        ...

    @property
    def notice(self) -> str | None:
        """What the job's operator should know."""
        ...

    def publish(self, recording: Recording) -> bool:
        """Take one recording; says whether it arrived."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class Training(Protocol):
    """What the recorder asks of the recording of training."""

    def in_use(self) -> bool:
        """Whether anything was told."""
        ...

    def trains(self) -> bool:
        """Whether the job has told of a phase, a step or a number."""
        ...

    def drain(self, give_way: Callable[[], None]) -> None:
        """Interpret what was told up to now, and give way between two pieces."""
        ...

    def tick(self, give_way: Callable[[], None]) -> None:
        """Do the same where much is waiting."""
        ...

    def series(self) -> Sequence[StatReading]:
        """Read its families."""
        ...

    def reading(self) -> TrainingReading | None:
        """Tell what the families do not; None while nothing was told."""
        ...

    def settle(self) -> None:
        """Count what may still be corrected."""
        ...

    def close(self) -> None:
        """Give exporters a bounded time to end."""
        ...

    def reset(self) -> None:
        """Count from zero."""
        ...

    def after_fork(self) -> None:
        """In a forked child: forget what the parent recorded."""
        ...


TICK_SECONDS = 0.25
"""How often buffers are looked at between flushes: a million adds a second fill a buffer in 0.52 s. Each look costs
a tenth of a millisecond, most of it waking up."""
BUSY_TICK_SECONDS = 0.05
"""The same, once a buffer was found beyond its high water."""
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
"""A callback of a passive Stat that runs for longer is shown as stuck."""
EXIT_SECONDS = 2.0
"""The longest that an exiting process waits for the recording thread to finish what it is at."""


class Recorder:
    """Drains the Stats of a registry into a sink.

    Args:
        registry: Whose Stats.
        events: The events of the process.
        training: The training of the process.
        open_sink: Makes the sink of this process from the Unix time at which its recording began; None when there
            is none yet, then it is asked again at the next flush.
        prepare: Called by the first `start`, on the caller's thread.
        claim_rank: Called when the process first records a sample of the job's (False), and when it first tells of its
            training (True).
        changed_rules: Gives the configuration's `recording:` rules when they have changed since its last call.
        flush_seconds: How often the sink is given a recording.
        wall: Unix time, seconds.
        clock: Monotonic time, seconds.
    """

    def __init__(
        self,
        registry: Registry,
        events: EventLog,
        training: Training,
        open_sink: Callable[[float], Sink | None],
        changed_rules: Callable[[], Sequence[Rule] | None] = lambda: None,
        *,
        prepare: Callable[[], None] = lambda: None,
        claim_rank: Callable[[bool], None] = lambda _: None,
        flush_seconds: float = 1.0,
        wall: Callable[[], float] = time,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._registry = registry
        self._open_sink = open_sink
        self._changed_rules = changed_rules
        self.events = events
        self.training = training
        self._prepare = prepare
        self._claim_rank = claim_rank
        self._flush_seconds = flush_seconds
        self._wall = wall
        self._clock = clock
        self._passive = Worker(_measure, name="passive", bound=1, what="measurements")
        self._graves = Worker(list.clear, name="graves", bound=1 << 20)
        registry.discard = self._graves.put
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
        self._stopping = False
        self._hurry = False
        self._renewing = False
        self._sink: Sink | None = None
        self._began = self._wall()
        self._clocks: dict[float, WindowClock] = {}
        self._clocked: tuple[StatState, ...] = ()
        self._claimed = 0  # 1: a rank, 2: as one that trains
        self._delay_seconds = 0.0
        self._first = 0  # the Stat whose buffer is to be emptied first
        self._slice_began = 0.0
        self._tick_seconds = TICK_SECONDS

    @property
    def began(self) -> float:
        """Unix time at which the recording of this process began."""
        return self._began

    def start(self) -> None:
        """Start the thread unless it runs; cheap to call again, never raises."""
        # Whoever holds the lock is starting the thread; a signal handler that interrupts it must not wait for it.
        if self._thread is None and not self._stopping and self._starting.acquire(blocking=False):
            try:
                self._start_once()
            finally:
                self._starting.release()

    def _start_once(self) -> None:
        if self._thread is not None:
            return
        try:
            thread = threading.Thread(target=self._run, name="exporter-recording", daemon=True)
            self._prepare()
            self._hook_multiprocessing()
            thread.start()
        except Exception as error:  # noqa: BLE001  # no (daemon) threads here, a broken installation: not the job's problem
            tell_once("thread", f"recording is off, it cannot start: {error!r}")
            return
        self._thread = thread

    def flush(self, timeout_seconds: float = 5.0) -> bool:
        """Drain everything and publish it, on the caller's thread.

        Returns:
            Whether the sink took it in time.
        """

        def step() -> bool:
            self._close_windows()
            return self._publish(final=False)

        return self._guarded(step, timeout_seconds)

    def flush_soon(self) -> None:
        """Have the recording thread publish at once, without waiting for it: a checkpoint was saved."""
        self._hurry = True
        with suppress(RuntimeError):  # it is awake
            self._alarm.release()

    def shutdown(self) -> None:
        """Publish the last recording and end the thread; again is harmless. Later samples are not recorded."""
        if self._stopping:
            return
        self._stopping = True
        with suppress(RuntimeError):  # it is awake
            self._alarm.release()
        self.events.close()
        self._passive.finish()(0.2, "exit")
        # A thread that wants the interpreter lock while it is being torn down is ended by the C library, which may
        # abort the process: so none of ours is left running, if it can be helped.
        until = self._clock() + EXIT_SECONDS
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(EXIT_SECONDS)

        def step() -> bool:
            if self._registry.states() or self.events.in_use() or self.training.in_use():
                self._close_windows()
                self.training.drain(self._give_way)
                self.training.close()  # first, so that what the exporters could not take is on the last recording
                self._publish(final=True)
            if self._sink is not None:
                self._sink.close()
            return True

        # Where the recording thread hangs in the sink the last recording is lost, and the process ends all the same.
        self._guarded(step, max(until - self._clock(), 0.1))
        self.training.close()
        end_notices()

    def renew(self) -> None:
        """Begin anew under another identity: what was recorded so far stays with the old one.

        Where the recording thread is busy in the sink it does so itself, as soon as it can.
        """
        self._renewing = True
        self._guarded(self._renew, RENEW_SECONDS)

    def _renew(self) -> bool:
        if self._renewing:
            self._renewing = False
            if self._sink is not None:
                self._publish(final=True)
                self._sink.close()
                now = self._wall()
                for state in self._registry.states():
                    state.reset(wall=now)
                self.events.reset()
                self.training.reset()
            self.events.renew()
            self._sink = None
            self._began = self._wall()
        return True

    def _hook_multiprocessing(self) -> None:
        """Have children of multiprocessing flush: they skip atexit, and clear earlier finalizers when they begin."""
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.Finalize(None, self.shutdown, exitpriority=0)
            util.register_after_fork(self, Recorder._finalize_child)
            process = sys.modules.get("multiprocessing.process")
            if process is not None and process.parent_process() is not None:
                self._forked = True

    def _finalize_child(self) -> None:
        util = sys.modules["multiprocessing.util"]
        util.Finalize(None, self.shutdown, exitpriority=0)

    def _after_fork(self) -> None:
        self._begin()
        self._stopping = False
        self._forked = True
        self._registry.after_fork()
        self.events.after_fork()
        self.training.after_fork()
        self._passive.after_fork()
        self._graves.after_fork()
        if self._registry.states() or self.events.in_use() or self.training.in_use():
            self.start()

    def _run(self) -> None:
        seconds = min(self._flush_seconds, CHILD_FLUSH_SECONDS) if self._forked else self._flush_seconds
        next_flush = self._clock() + seconds
        self._guarded(self._read_rules)
        while self._sleep_until(next_flush):
            if self._hurry or self._clock() >= next_flush:
                self._hurry = False
                self._guarded(self._flush_cycle)
                next_flush = max(next_flush + seconds, self._clock())
            else:
                self._guarded(self._tick_cycle)

    def _sleep_until(self, next_flush: float) -> bool:
        """Sleep until there is something to do; False when it is time to end."""
        if not self._stopping:
            now = self._clock()
            until = min(
                [next_flush, now + TICK_SECONDS, *(clock.due for clock in list(self._clocks.values()))]
            )
            self._alarm.acquire(timeout=max(until - now, 0.0))
            self._slice_began = perf_counter()
        return not self._stopping

    def _guarded(self, step: Callable[[], bool], timeout_seconds: float = -1) -> bool:
        """Run one step with everything to itself; a defect of ours costs that step, not the thread and not the job."""
        if not self._cycle.acquire(timeout=timeout_seconds):
            return False
        try:
            return step()
        except Exception as error:  # noqa: BLE001  # see above
            tell_once(f"defect {error!r}", f"a defect in the recording thread: {error!r}")
            return False
        finally:
            self._cycle.release()

    def _flush_cycle(self) -> bool:
        self._renew()
        passive = [state for state in self._registry.states() if state.measure is not None]
        if passive and self._passive.busy_since is None:
            self._passive.put(passive)
        self._read_rules()
        self._clocked = ()  # an override may have changed a window's length
        self.events.tick()
        self._close_windows()
        return self._publish(final=False, within_seconds=self._flush_seconds)

    def _tick_cycle(self) -> bool:
        self._renew()
        self.events.tick()
        self.training.tick(self._give_way)
        self._close_windows()
        full = any(len(state.buffer) > HIGH_WATER for state in self._registry.states())
        if full:
            self._drain_all(TICK_SECONDS, above=HIGH_WATER)
        self._tick_seconds = BUSY_TICK_SECONDS if full else TICK_SECONDS
        return True

    def _close_windows(self) -> None:
        wall, now = self._wall(), self._clock()
        states = self._registry.states()
        if states is not self._clocked:
            self._clocked = states
            for seconds in {state.effective.window_seconds for state in states}:
                if seconds is not None and seconds not in self._clocks:
                    self._clocks[seconds] = WindowClock(seconds, wall=wall, monotonic=now)
        for seconds, clock in list(self._clocks.items()):
            late = clock.late(wall=wall, monotonic=now)
            if late is None:
                continue
            self._delay_seconds = max(self._delay_seconds, late)
            mine = [state for state in states if state.effective.window_seconds == seconds]
            if not mine:
                del self._clocks[seconds]
                continue
            for state in mine:
                self._drain(state)
            started, ended = clock.advance(wall=wall, monotonic=now)
            for state in mine:
                self._give_way()
                state.close_window(started, ended, late_windows=late >= seconds, wall=wall)

    def _publish(self, *, final: bool, within_seconds: float | None = None) -> bool:
        self.training.drain(self._give_way)
        if final:
            self.training.settle()
        self._drain_all(within_seconds)
        states = self._registry.states()
        wall = self._wall()
        for state in states:
            state.expire(wall=wall)
            if state.tensors is not None:
                state.tensors.count_lost(everything=final and self._stopping)
        recording = Recording(
            (*[self._reading(state) for state in states if state.enabled], *self.training.series()),
            final,
            self._delay_seconds,
            self._stuck_since(wall),
            self.events.reading(),
            self.training.reading(),
            _ending(wall) if final and self._stopping else None,
            self._registry.refused,
        )
        self._delay_seconds = 0.0
        claim = 2 if self.training.trains() else int(any(state.count and not state.own for state in states))
        if claim > self._claimed:
            self._claimed = claim
            self._claim_rank(claim > 1)
        if self._sink is None:
            touched = (
                recording.events
                or recording.training
                or any(reading.count or reading.rejected or reading.overflows for reading in recording.stats)
            )
            if self._forked and not touched:
                return True  # such as a DataLoader's worker, which inherits every Stat and uses none
            self._sink = self._open_sink(self._began)
        if self._sink is None:
            return False
        arrived = self._sink.publish(recording)
        if not arrived:
            tell_once(
                f"sink {self._sink.problem}", f"the last snapshot was not written: {self._sink.problem}"
            )
        if self._sink.notice is not None:
            tell_once(self._sink.notice, self._sink.notice)
        return arrived

    def _stuck_since(self, wall: float) -> float | None:
        since = self._passive.busy_since
        return since if since is not None and wall - since > STUCK_SECONDS else None

    def _drain_all(self, within_seconds: float | None, *, above: int = 0) -> None:
        """Empty the buffers; where threads add faster than this one may run, what is left comes with the next recording.

        Args:
            within_seconds: After so long no further Stat is begun with, and the next time begins there; None to empty all.
            above: Buffers with no more samples than this are left as they are.
        """
        states = self._registry.states()
        started = self._clock()
        first = self._first if self._first < len(states) else 0
        self._first = 0
        for position in (*range(first, len(states)), *range(first)):
            if len(states[position].buffer) <= above:
                continue
            if within_seconds is not None and self._clock() - started > within_seconds:
                self._first = position
                return
            self._drain(states[position])

    def _drain(self, state: StatState) -> None:
        """Empty a buffer; at most what it held at the start, whatever is added meanwhile."""
        for _ in range(len(state.buffer) // 1024 + 1):
            self._give_way()
            if not state.drain(wall=self._wall()):
                return

    def _reading(self, state: StatState) -> StatReading:
        self._give_way()
        return state.reading()

    def _give_way(self) -> None:
        """Let the job's threads have the interpreter lock, if this one has worked for a while."""
        now = perf_counter()
        if now - self._slice_began > SLICE_SECONDS:
            sleep(0)
            self._slice_began = perf_counter()

    def _read_rules(self) -> bool:
        rules = self._changed_rules()
        if rules is not None:
            of_stats = [rule for rule in rules if not rule.get("events")]
            of_events = [
                {key: value for key, value in rule.items() if key != "events"}
                for rule in rules
                if rule.get("events")
            ]
            for problem in [*self._registry.override(of_stats), *self.events.override(of_events)]:
                tell_once(
                    f"rule {problem}",
                    f"a recording rule of the sidecar's configuration is left out: {problem}",
                )
        return rules is not None


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
