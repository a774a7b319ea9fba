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

CRASHED, HUNG = "crashed", "hung"

RESTART_REASONS = (CRASHED, HUNG, *sorted({*AT_ONCE, "driver_not_loaded", "unknown"}))
"""Values of the label `reason` of restarts; anything else is `unknown`."""


@dataclass(frozen=True, slots=True)
class Timings:
    """How patient the supervisor is, in seconds.

    Attributes:
        deadline: Silence of a child that serves, after which it hangs.
        start_deadline: The same between two steps of its start: without persistence mode a GPU takes seconds.
        patience: How long a child may hang before there is a replacement.
        first_backoff: Wait after a first failure.
        most_backoff: Wait after many.
        steady: A child that served for so long had no bad start.
        farewell: How long a child may take to end in order.
    """

    deadline: float = 5.0
    start_deadline: float = 30.0
    patience: float = 5.0
    first_backoff: float = 5.0
    most_backoff: float = 300.0
    steady: float = 60.0
    farewell: float = 1.5


DEFAULT_TIMINGS = Timings()


class Restarts:
    """Remembers what became of the children: when there is to be another one, and without which GPUs.

    A child that ends well, or hangs on one GPU, is followed by another at once; one that fails after 5 s, then ever more
    seldom. A GPU that was left out gets a second chance when the call on it has returned, and no third: one bad card must
    not cost the others their readings.

    Attributes:
        counts: By reason, how often there was another child.
        left_out: GPUs that the next child does not touch.
    """

    def __init__(self, timings: Timings) -> None:
        self.counts: dict[str, int] = dict.fromkeys(RESTART_REASONS, 0)
        self.left_out: frozenset[int] = frozenset()
        self._timings = timings
        self._failures = 0
        self._hangs: dict[int, int] = {}

    def count(self, reason: str) -> None:
        """Note that there is another one, because of this."""
        self.counts[reason if reason in self.counts else "unknown"] += 1

    def wait(self, *, at_once: int = 0) -> float:
        """How long to wait after another end; none as long as there were no more than `at_once` in a row."""
        self._failures += 1
        if self._failures <= at_once:
            return 0.0
        timings = self._timings
        return min(timings.most_backoff, timings.first_backoff * 2.0 ** min(self._failures - 1, 16))

    def forgive(self, seconds: float) -> None:
        """Forget earlier failures after a child that served for so long."""
        if seconds >= self._timings.steady:
            self._failures = 0

    def leave_out(self, gpu: int) -> None:
        """A call on this GPU hangs."""
        self._hangs[gpu] = self._hangs.get(gpu, 0) + 1
        self.left_out |= {gpu}

    def take_back(self, gpu: int | None, *, slow: bool) -> frozenset[int]:
        """A call that hung has returned, so soon that it was merely `slow` or not.

        Returns:
            The GPUs that get a second chance, as it is known now that they do not hang for good.
        """
        if slow and gpu in self._hangs:
            self._hangs[gpu] -= 1
        again = frozenset(each for each in self.left_out if self._hangs.get(each, 0) <= 1)
        self.left_out -= again
        return again

    def forget_hangs(self) -> None:
        """NVML is taken anew, and every GPU with it."""
        self.left_out = frozenset()
        self._hangs.clear()


class Supervisor:
    """Sees to it that there is one NVML child, and not more than is good.

    - A child that cannot have NVML (no library, no driver, no permission) says why and ends; it is tried again, ever
      more seldom. So is one that crashed. One that asks to be replaced (memory, another driver) is, at once.
    - A child that serves and whose call on one GPU takes long is replaced before the others' readings are too old, by
      one without that GPU: only its series end. The fourth time in a minute there is a wait first, and the others have
      a gap. While a child starts, calls may take long: to attach a GPU can.
    - A child that says nothing for the deadline hangs in a call. To kill it in a driver's hands can do harm: it is left
      alone, and told to end when its call returns. After some patience there is one replacement, without the GPU that
      the call was for. If that hangs as well, everything waits until one of them returns.
    - A GPU that was left out is taken again when the call on it has returned, unless it hung before (was not merely
      slow): then it stays out until NVML is released and taken again.

    Args:
        start: Makes a child that leaves out some GPUs, with what takes its messages; raises OSError.
        take: Takes a message `machine` or `sample`, and the number of the child.
        change: Takes the reason why NVML does not answer ("" when it does), a text for people, and the GPU that a
            call hangs on, where it is known.
        timings: How patient.
        monotonic: Seconds.
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
        self._start = start
        self._take = take
        self._change = change
        self._timings = timings
        self._monotonic = monotonic
        self._active: NvmlChild | None = None
        self._stuck: NvmlChild | None = None
        self._killed: list[NvmlChild] = []  # until the kernel has let them go
        self._restarts = Restarts(timings)
        self._number = 0
        self._due: float | None = 0.0  # when to start the next; None: not at all
        self._hung_since: float | None = None
        self._sampled_at = 0.0  # readings count for the deadline, also those of a child that was replaced
        self._reason = STARTING
        self._released = False  # this and the next two are set by other threads
        self._stopping = False
        self._inbox: queue.SimpleQueue[tuple[NvmlChild, Heard] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; to be called once."""
        self._thread = threading.Thread(target=self._run, name="exporter-nvml", daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """End, and the child with it; one that hangs is killed and not waited for."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def release(self, *, released: bool = True) -> None:
        """Let go of NVML, so that the driver can be unloaded or a GPU be reset; or take it again."""
        self._released = released
        self._inbox.put(None)

    @property
    def alive(self) -> bool:
        """Whether its thread runs; it must, between `start` and `stop`."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def restarts(self) -> Mapping[str, int]:
        """By reason, how often there was another child."""
        return self._restarts.counts

    @property
    def pid(self) -> int | None:
        """The process id of the child; None while there is none."""
        active = self._active
        return None if active is None else active.pid

    def _run(self) -> None:
        try:
            while not self._stopping:
                now = self._monotonic()
                self._keep(now, released=self._released)
                with contextlib.suppress(queue.Empty):
                    news = self._inbox.get(timeout=self._next_moment(now))
                    if news is not None:
                        self._hear(*news)
        finally:
            self._shut_down()

    def _keep(self, now: float, *, released: bool) -> None:
        """Do what it is time for."""
        if self._stuck is not None and self._stuck.ended():  # the call that hung has returned
            stuck, self._stuck = self._stuck, None
            stuck.close()
            slow = now - stuck.heard_at < self._deadline(stuck) + self._timings.patience
            for gpu in sorted(self._restarts.take_back(_culprit(stuck), slow=slow)):
                if self._active is not None:
                    self._active.tell("admit", gpu=gpu)
        self._killed = [child for child in self._killed if not child.ended()]
        if released:
            self._due = None
            if self._reason != RELEASED:
                if self._active is not None:
                    self._active.tell("release")
                self._set(RELEASED, "NVML was released on request")
        elif self._reason == RELEASED:
            self._set(STARTING, "NVML is taken again")
            self._restarts.forget_hangs()
            if self._active is None:
                self._due = now
        if self._active is None and self._due is not None and now >= self._due:
            self._launch(now)
        if self._active is not None:
            self._look_at_deadline(self._active, now)
        if self._reason == "" and now >= self._sampled_at + self._timings.deadline:
            self._set(STARTING, "the process that calls NVML is being replaced")

    def _launch(self, now: float) -> None:
        self._due = None
        try:
            self._active = self._start(tuple(sorted(self._restarts.left_out)), now, self._tell)
        except OSError as error:
            self._due = now + self._restarts.wait()
            self._set(CRASHED, f"the process that calls NVML cannot be started: {error}")
            return
        self._number += 1
        self._hung_since = None

    def _look_at_deadline(self, child: NvmlChild, now: float) -> None:
        timings, gpu = self._timings, _culprit(child)
        deadline = self._deadline(child)
        if child.serving and self._reason == "" and self._stuck is None and gpu is not None:
            self._replace(child, now)
            return
        if now - child.heard_at < deadline:
            return
        if self._hung_since is None:
            self._hung_since = now
            about = "it"
            if child.slow is not None:
                about = f"{child.slow[1]} on {'no particular GPU' if gpu is None else f'GPU {gpu}'}"
            if self._reason != RELEASED:
                self._set(HUNG, f"no answer from NVML for {deadline:g} s: {about} does not return", gpu)
        if now - self._hung_since >= timings.patience and self._stuck is None and self._reason != RELEASED:
            self._replace(child, now)

    def _replace(self, child: NvmlChild, now: float) -> None:
        """Leave a child alone in its call, and start another one without the GPU that the call is for."""
        child.tell("release")  # for when its call returns
        self._stuck, self._active = child, None
        gpu = _culprit(child)
        if gpu is not None:
            self._restarts.leave_out(gpu)
        self._hung_since = None
        self._restarts.forgive(now - child.started_at)
        self._restarts.count(HUNG)
        self._due = now + self._restarts.wait(at_once=1 if gpu is None else HANGS_AT_ONCE)

    def _tell(self, child: NvmlChild, heard: Heard) -> None:
        self._inbox.put((child, heard))

    def _hear(self, child: NvmlChild, heard: Heard) -> None:
        if child is not self._active:
            if child is self._stuck and heard is None:
                child.wait(0.5)  # then `_keep` sees it
            return  # what it has to say is old
        now = self._monotonic()
        if heard is None:
            child.wait(0.5)
            cause, farewell = child.cause(), child.farewell
            self._end(child)
            if farewell is None:
                self._lost(child, now, CRASHED, f"the process that calls NVML {cause}")
            else:
                self._lost(child, now, str(farewell.get("reason")), str(farewell.get("message") or ""))
            return
        try:
            if isinstance(heard, ProtocolError):
                raise heard
            self._understand(child, heard, now)
        except (LookupError, ArithmeticError, TypeError, ValueError, AttributeError) as error:
            self._end(child)
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
        self._restarts.forgive(now - child.started_at)
        if reason == RELEASED:  # and taken again before it had ended
            self._due = now
            return
        if child.serving or reason == CRASHED:
            self._restarts.count(reason)
        if reason in AT_ONCE and child.serving:
            self._due = now + self._restarts.wait(at_once=1)
            return
        self._due = now + self._restarts.wait()
        self._set(reason, message)

    def _end(self, child: NvmlChild) -> None:
        child.end()
        if not child.ended():
            self._killed.append(child)

    def _deadline(self, child: NvmlChild) -> float:
        return self._timings.deadline if child.serving else self._timings.start_deadline

    def _set(self, reason: str, message: str, gpu: int | None = None) -> None:
        self._reason = reason
        self._change(reason, message, gpu)

    def _next_moment(self, now: float) -> float:
        """How long nothing is to be done unless somebody speaks."""
        moments = [now + 60.0]
        child = self._active
        if child is not None:
            if self._hung_since is None:
                moments.append(child.heard_at + self._deadline(child))
            elif self._stuck is None:
                moments.append(self._hung_since + self._timings.patience)
        elif self._due is not None:
            moments.append(self._due)
        if self._reason == "":
            moments.append(self._sampled_at + self._timings.deadline)
        return max(0.0, min(moments) - now)

    def _shut_down(self) -> None:
        children = [child for child in (self._active, self._stuck) if child is not None]
        for child in children:
            child.tell("release")
        if self._active is not None:
            self._active.wait(self._timings.farewell)
        for child in children:
            child.end()
        for child in (*children, *self._killed):
            child.wait(0.2)
        self._active = self._stuck = None


def _culprit(child: NvmlChild) -> int | None:
    """The GPU that a call of a child takes long on."""
    return None if child.slow is None else child.slow[0]
