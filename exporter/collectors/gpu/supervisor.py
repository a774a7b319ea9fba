"""The supervisor of the NVML child: starts it, listens to it, and decides when there is to be another one.

Used in the sidecar by the GPU collector. One daemon thread does everything, and also is the parent that the kernel
ties the child's life to: it lives as long as the sidecar does.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from exporter.collectors.gpu.child_process import Heard, NvmlChild
from exporter.collectors.gpu.nvml import ProtocolError

STARTING, RELEASED = "starting", "released"

AT_ONCE = frozenset({"memory", "gpu_lost", "devices_changed", "lib_rm_version_mismatch"})
"""Farewells after which a new child is to go on without a gap."""

HANGS_AT_ONCE = 3
"""As many times, until a child has been steady, a GPU that hangs costs the others no gap."""

_TICK_SECONDS = 0.2

CRASHED, HUNG = "crashed", "hung"

RESTART_REASONS = (CRASHED, HUNG, *sorted({*AT_ONCE, "driver_not_loaded", "unknown"}))
"""Values of the label `reason` of restarts; anything else is `unknown`."""


@dataclass(frozen=True, slots=True)
class Timings:
    """How patient the supervisor is, in seconds."""

    deadline: float = 5.0  # silence of a child that serves, after which it hangs
    # The same between two steps of its start: without persistence mode a GPU takes seconds.
    start_deadline: float = 30.0
    patience: float = 5.0  # how long a child may hang before there is a replacement
    first_backoff: float = 5.0  # wait after a first failure
    most_backoff: float = 300.0  # wait after many
    steady: float = 60.0  # a child that served for so long had no bad start
    farewell: float = 1.5  # how long a child may take to end in order


DEFAULT_TIMINGS = Timings()


class Supervisor:
    """Sees to it that there is one NVML child, and not more than is good.

    - A child that ends is followed by another after 5 s, then ever more seldom; at once where it asked to be replaced.
    - A child that serves and whose call on one GPU takes long is replaced before the others' readings are too old, by
      one without that GPU; the fourth time in a minute after a wait. While one starts, calls may take long.
    - A child that says nothing for the deadline hangs in a call. To kill it in a driver's hands can do harm: it is left
      alone, and told to end when its call returns. After some patience there is one replacement. If that hangs as well,
      everything waits until one of them returns.
    - A GPU that was left out is taken again when the call on it has returned, unless it hung before (was not merely
      slow): then it stays out until NVML is released and taken again, lest it cost the others again and again.

    Args:
        start: Makes a child that leaves out some GPUs, with what takes its messages; raises OSError.
        take: Takes a message `machine` or `sample`, and the number of the child.
        change: Takes the reason why NVML does not answer ("" when it does), a text for people, and the GPU that a
            call hangs on, where it is known.
    """

    def __init__(
        self,
        *,
        start: Callable[[tuple[int, ...], float, Callable[[NvmlChild, Heard], None]], NvmlChild],
        take: Callable[[Mapping[str, Any], int], None],
        change: Callable[[str, str, int | None], None],
        timings: Timings = DEFAULT_TIMINGS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        # By reason, how often there was another child.
        self.restarts: dict[str, int] = dict.fromkeys(RESTART_REASONS, 0)
        self._start = start
        self._take = take
        self._change = change
        self._timings = timings
        self._monotonic = monotonic
        self._active: NvmlChild | None = None
        self._stuck: NvmlChild | None = None
        self._failures = 0  # in a row, until a child has been steady
        self._hangs: dict[int, int] = {}  # by GPU, how often it did
        self._left_out: set[int] = set()
        self._number = 0
        self._due: float | None = 0.0  # when to start the next; None: not at all
        self._hung_since: float | None = None
        self._sampled_at = 0.0  # readings count for the deadline, also those of a child that was replaced
        self._reason = STARTING
        self._released = False  # this and the next two are set by other threads
        self._stopping = False
        self._inbox: queue.SimpleQueue[tuple[NvmlChild, Heard] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="exporter-nvml", daemon=True)

    def start(self) -> None:
        """Begin; to be called once."""
        self._thread.start()

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """End, and the child with it; one that hangs is killed and not waited for."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(timeout_seconds)

    def release(self, *, released: bool = True) -> None:
        """Let go of NVML, so that the driver can be unloaded or a GPU be reset; or take it again."""
        self._released = released
        self._inbox.put(None)

    @property
    def alive(self) -> bool:
        """Whether its thread runs; it must, between `start` and `stop`."""
        return self._thread.is_alive()

    @property
    def pid(self) -> int | None:
        """The process id of the child; None while there is none."""
        active = self._active
        return None if active is None else active.pid

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._keep(self._monotonic(), released=self._released)
                with contextlib.suppress(queue.Empty):
                    news = self._inbox.get(timeout=_TICK_SECONDS)
                    if news is not None:
                        self._hear(*news)
        finally:
            self._shut_down()

    def _keep(self, now: float, *, released: bool) -> None:
        """Do what it is time for."""
        if self._stuck is not None and self._stuck.ended():
            self._take_back(self._stuck, now)
            self._stuck = None
        if released and self._reason != RELEASED:
            self._due = None
            if self._active is not None:
                self._active.tell("release")
                self._active.wait(self._timings.farewell)  # whoever waits for the word then resets a GPU
            self._set(RELEASED, "NVML was released on request")
        elif not released and self._reason == RELEASED:
            self._due = now
            self._left_out.clear()
            self._hangs.clear()
            self._set(STARTING, "NVML is taken again")
        if self._active is not None:
            self._look_at_deadline(self._active, now)
        elif self._due is not None and now >= self._due:
            self._launch(now)
        if self._reason == "" and now >= self._sampled_at + self._timings.deadline:
            self._set(STARTING, "the process that calls NVML is being replaced")

    def _launch(self, now: float) -> None:
        self._due = None
        try:
            left_out = tuple(sorted(self._left_out))
            self._active = self._start(left_out, now, lambda *heard: self._inbox.put(heard))
        except OSError as error:
            self._due = now + self._wait()
            self._set(CRASHED, f"the process that calls NVML cannot be started: {error}")
            return
        self._number += 1
        self._hung_since = None

    def _look_at_deadline(self, child: NvmlChild, now: float) -> None:
        timings, gpu = self._timings, child.slow_gpu
        deadline = self._deadline(child)
        if child.serving and self._reason == "" and self._stuck is None and gpu is not None:
            self._replace(child, now)
            return
        if now - child.heard_at < deadline or self._reason == RELEASED:
            return
        if self._hung_since is None:
            self._hung_since = now
            call = "" if child.slow is None else f": {child.slow[1]} does not return"
            about = "" if gpu is None else f" on GPU {gpu}"
            self._set(HUNG, f"no answer from NVML for {deadline:g} s{call}{about}", gpu)
        if now - self._hung_since >= timings.patience and self._stuck is None:
            self._replace(child, now)

    def _replace(self, child: NvmlChild, now: float) -> None:
        """Leave a child alone in its call, and start another one without the GPU that the call is for."""
        child.tell("release")  # for when its call returns
        self._stuck, self._active = child, None
        gpu = child.slow_gpu
        if gpu is not None:
            self._hangs[gpu] = self._hangs.get(gpu, 0) + 1
            self._left_out.add(gpu)
        self._hung_since = None
        self._forgive(child, now)
        self.restarts[HUNG] += 1
        self._due = now + self._wait(at_once=1 if gpu is None else HANGS_AT_ONCE)

    def _take_back(self, stuck: NvmlChild, now: float) -> None:
        """The call that hung has returned: what did not hang before gets a second chance."""
        stuck.close()
        slow = now - stuck.heard_at < self._deadline(stuck) + self._timings.patience
        if slow and stuck.slow_gpu in self._hangs:
            self._hangs[stuck.slow_gpu] -= 1
        for gpu in sorted(gpu for gpu in self._left_out if self._hangs.get(gpu, 0) <= 1):
            self._left_out.discard(gpu)
            if self._active is not None:
                self._active.tell("admit", gpu=gpu)

    def _hear(self, child: NvmlChild, heard: Heard) -> None:
        now = self._monotonic()
        if heard is None:
            child.wait(0.5)  # then `_keep` sees that one that was stuck has ended
        if child is not self._active:
            return  # what it has to say is old
        if heard is None:
            cause, farewell = f"the process that calls NVML {child.cause()}", child.farewell
            child.end()
            if farewell is None:
                farewell = {"reason": CRASHED, "message": cause}
            self._lost(child, now, str(farewell.get("reason")), str(farewell.get("message")))
            return
        try:
            if isinstance(heard, ProtocolError):
                raise heard
            self._understand(child, heard, now)
        except (LookupError, ArithmeticError, TypeError, ValueError, AttributeError) as error:
            child.end()
            self._lost(child, now, CRASHED, f"the process that calls NVML says what cannot be: {error!r}")

    def _understand(self, child: NvmlChild, message: Mapping[str, Any], now: float) -> None:
        kind = message["kind"]
        if kind == "slow":  # not from the thread that samples, and no sign of its life
            child.slow = (message["gpu"], str(message["call"]))
            return
        child.heard_at = now
        if kind == "bye":
            child.farewell = message
        elif kind == "machine":
            child.serving = True
            self._take(message, self._number)
        elif kind == "sample":
            child.slow = None
            self._hung_since = None
            self._sampled_at = now
            self._take(message, self._number)
            if self._reason not in {"", RELEASED}:
                self._set("", "")

    def _lost(self, child: NvmlChild, now: float, reason: str, message: str) -> None:
        self._active = None
        if self._reason == RELEASED:
            return
        self._forgive(child, now)
        if reason == RELEASED:  # and taken again before it had ended
            self._due = now
            return
        if child.serving or reason == CRASHED:
            self.restarts[reason if reason in self.restarts else "unknown"] += 1
        at_once = reason in AT_ONCE and child.serving
        self._due = now + self._wait(at_once=int(at_once))
        if not at_once:
            self._set(reason, message)

    def _wait(self, *, at_once: int = 0) -> float:
        """How long to wait after another end; not as long as there were no more than `at_once` in a row."""
        self._failures += 1
        if self._failures <= at_once:
            return 0.0
        timings = self._timings
        return min(timings.most_backoff, timings.first_backoff * 2.0 ** min(self._failures - 1, 16))

    def _forgive(self, child: NvmlChild, now: float) -> None:
        if now - child.started_at >= self._timings.steady:
            self._failures = 0

    def _deadline(self, child: NvmlChild) -> float:
        return self._timings.deadline if child.serving else self._timings.start_deadline

    def _set(self, reason: str, message: str, gpu: int | None = None) -> None:
        self._reason = reason
        self._change(reason, message, gpu)

    def _shut_down(self) -> None:
        children = [child for child in (self._active, self._stuck) if child is not None]
        for child in children:
            child.tell("release")
        if self._active is not None:
            self._active.wait(self._timings.farewell)
        for child in children:
            child.end()
        self._active = self._stuck = None
