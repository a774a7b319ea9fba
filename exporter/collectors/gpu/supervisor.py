"""Supervisor of the NVML child: starts the child, receives its messages and replaces it.

Runs in the sidecar, for the GPU collector. A single daemon thread handles starts, messages and deadlines. The kernel ties the
child to this thread, which runs as long as the sidecar.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from exporter.collectors.gpu.child_process import NvmlChild, SlowCall
from exporter.collectors.gpu.nvml import ProtocolError

STARTING, DETACHED = "starting", "detached"

IMMEDIATE_RESTARTS = frozenset({"memory", "gpu_lost", "devices_changed", "lib_rm_version_mismatch"})
"""Exit reasons after which a new child starts immediately."""

MAX_IMMEDIATE_HANGS = 3
"""Number of consecutive hangs on a GPU with an immediate restart; later restarts wait."""

_LONGEST_WAIT_SECONDS = 60.0

CRASHED, HUNG = "crashed", "hung"

RESTART_REASONS = (CRASHED, HUNG, *sorted({*IMMEDIATE_RESTARTS, "driver_not_loaded", "unknown"}))
"""Values of the label `reason` of restarts; every other reason is `unknown`."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Timeouts and backoffs of the supervisor, in seconds."""

    deadline: float = 5.0  # maximum silence of a serving child before a hang
    # Maximum duration of a step of the start: without persistence mode, a GPU takes seconds.
    start_deadline: float = 30.0
    patience: float = 5.0  # time from the detection of a hang to the replacement
    first_backoff: float = 5.0  # wait after the first failure
    max_backoff: float = 300.0  # longest wait
    steady: float = 60.0  # service time after which earlier failures are forgotten
    shutdown: float = 1.5  # maximum duration of an orderly exit of a child


DEFAULT_TIMINGS = Timings()

StartChild = Callable[[tuple[int, ...], tuple[tuple[int, str], ...]], NvmlChild]
"""Starts a child that skips some GPUs and pauses some calls (GPU, function); raises OSError."""


class Supervisor:
    """Supervisor of an NVML child, and of at most one hanging predecessor.

    - A child that exits is replaced after 5 s, then at growing intervals; immediately if the child requested a restart.
    - A serving child with a hanging call on a GPU is replaced before the readings of the other GPUs are too old. The
      new child skips that GPU. From the fourth hang within a minute, the replacement waits.
    - A child that sends no message within the deadline hangs in a call. Killing a process inside a driver call can harm the
      driver: the child keeps running and exits when the call returns. A replacement starts after `patience` seconds. If the replacement hangs as well, the
      supervisor waits until either call returns.
    - A skipped GPU is used again when the hanging call has returned; the call is then made less often.

    Args:
        start: Starts a child.
        take: Receives a message `machine` or `sample`, and the number of the child.
        change: Receives the reason of NVML's failure ("" if up), a text for users, and the index of the GPU
            that a call hangs on, if known.
        timings: Deadlines and waits.
        monotonic: The clock.
    """

    def __init__(
        self,
        *,
        start: StartChild,
        take: Callable[[Mapping[str, Any], int], None],
        change: Callable[[str, str, int | None], None],
        timings: Timings = DEFAULT_TIMINGS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.restarts: dict[str, int] = dict.fromkeys(RESTART_REASONS, 0)
        self._start = start
        self._take = take
        self._change = change
        self._timings = timings
        self._monotonic = monotonic
        self._active: NvmlChild | None = None
        self._stuck: NvmlChild | None = None
        self._failures = 0  # in a row, until a child has been steady
        self._hangs: dict[int, int] = {}  # by GPU
        self._skipped: set[int] = set()
        self._avoided: set[tuple[int, str]] = set()  # GPU and call
        self._number = 0
        self._due: float | None = 0.0  # time of the next start; None for no start
        self._hung_since: float | None = None
        self._sampled_at = 0.0  # of any child: readings of a predecessor still count for the deadline
        self._reason = STARTING
        self._detached = False  # _detached and _stopping are set by other threads
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="exporter-nvml", daemon=True)

    def start(self) -> None:
        """Start the thread; may be called only once."""
        self._thread.start()

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """Stop the thread and the child; a hanging child is killed without a wait."""
        self._stopping = True
        self._wake()
        self._thread.join(timeout_seconds)

    def detach(self) -> None:
        """Stop the child, so that the driver can be unloaded or a GPU reset."""
        self._detached = True
        self._wake()

    def reattach(self) -> None:
        """Restart a child after `detach`."""
        self._detached = False
        self._wake()

    @property
    def alive(self) -> bool:
        """True if the supervisor thread is running."""
        return self._thread.is_alive()

    @property
    def pid(self) -> int | None:
        """Process id of the child, or None."""
        active = self._active
        return None if active is None else active.pid

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread is awake; closed: the thread has ended
            self._wake_writer.send(b"!")

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._act(self._monotonic(), detached=self._detached)
                for key, _ in self._selector.select(self._wait_seconds(self._monotonic())):
                    if isinstance(key.fileobj, NvmlChild):
                        self._receive(key.fileobj)
                    else:
                        self._wake_reader.recv(4096)
        finally:
            self._shut_down()

    def _wait_seconds(self, now: float) -> float:
        """Return the time until the next deadline."""
        moments = [now + _LONGEST_WAIT_SECONDS]
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
        return max(0.01, min(moments) - now)

    def _act(self, now: float, *, detached: bool) -> None:
        """Perform all due actions."""
        if detached and self._reason != DETACHED:
            self._due = None
            if self._active is not None:
                self._active.send("stop")
                self._active.wait(
                    self._timings.shutdown
                )  # the user may reset the GPU after the detachment is reported
            self._set(DETACHED, "NVML was detached on request")
        elif not detached and self._reason == DETACHED:
            self._due = now
            self._skipped.clear()
            self._avoided.clear()
            self._hangs.clear()
            self._set(STARTING, "NVML is being reattached")
        if self._active is not None:
            self._check_deadline(self._active, now)
        elif self._due is not None and now >= self._due:
            self._launch(now)
        if self._reason == "" and now >= self._sampled_at + self._timings.deadline:
            self._set(STARTING, "the process that calls NVML is being replaced")

    def _launch(self, now: float) -> None:
        self._due = None
        try:
            self._active = self._start(tuple(sorted(self._skipped)), tuple(sorted(self._avoided)))
        except OSError as error:
            self._due = now + self._backoff()
            self._set(CRASHED, f"the process that calls NVML cannot be started: {error}")
            return
        self._selector.register(self._active, selectors.EVENT_READ)
        self._number += 1
        self._hung_since = None

    def _check_deadline(self, child: NvmlChild, now: float) -> None:
        timings, slow = self._timings, child.slow
        gpu = None if slow is None else slow.gpu
        deadline = self._deadline(child)
        if child.serving and self._reason == "" and self._stuck is None and gpu is not None:
            self._replace(child, now)
            return
        if now - child.heard_at < deadline or self._reason == DETACHED:
            return
        if self._hung_since is None:
            self._hung_since = now
            call = "" if slow is None else f": {slow.call} does not return"
            where = "" if gpu is None else f" on GPU {gpu}"
            self._set(HUNG, f"no answer from NVML for {deadline:g} s{call}{where}", gpu)
        if now - self._hung_since >= timings.patience and self._stuck is None:
            self._replace(child, now)

    def _replace(self, child: NvmlChild, now: float) -> None:
        """Leave a child in the hanging call, and schedule a child that skips the GPU of the call."""
        child.send("stop")  # processed when the call returns
        self._stuck, self._active = child, None
        slow = child.slow
        gpu = None if slow is None else slow.gpu
        if slow is not None and gpu is not None:
            self._hangs[gpu] = self._hangs.get(gpu, 0) + 1
            self._skipped.add(gpu)
            self._avoided.add((gpu, slow.call))
        self._hung_since = None
        self._forget_failures(child, now)
        self.restarts[HUNG] += 1
        self._due = now + self._backoff(at_once=1 if gpu is None else MAX_IMMEDIATE_HANGS)

    def _reuse_skipped(self, stuck: NvmlChild) -> None:
        """Use the skipped GPUs again: the hanging call has returned."""
        self._close(stuck)
        self._stuck = None
        for gpu in sorted(self._skipped):
            if self._hangs.get(gpu, 0) > MAX_IMMEDIATE_HANGS:
                continue  # repeated hangs would cause gaps on other GPUs
            self._skipped.discard(gpu)
            if self._active is not None:
                calls = [call for index, call in self._avoided if index == gpu]
                self._active.send("reattach", gpu=gpu, calls=calls)

    def _receive(self, child: NvmlChild) -> None:
        now = self._monotonic()
        try:
            messages: Iterable[dict[str, Any]] | None = child.receive()
            for message in messages or ():
                if child is self._active:  # messages of a replaced child are outdated
                    self._process(child, message, now)
        except (ProtocolError, LookupError, ArithmeticError, TypeError, ValueError, AttributeError) as error:
            if child is self._active:
                self._lost(
                    child, now, CRASHED, f"the process that calls NVML sent an invalid message: {error!r}"
                )
            return
        if messages is None:
            self._ended(child, now)

    def _ended(self, child: NvmlChild, now: float) -> None:
        """Handle the end of a child's pipe."""
        child.wait(0.5)
        if child is self._stuck:
            self._reuse_skipped(child)
        elif child is self._active:
            cause, exit_message = f"the process that calls NVML {child.cause()}", child.exit
            if exit_message is None:
                exit_message = {"reason": CRASHED, "message": cause}
            self._lost(child, now, str(exit_message.get("reason")), str(exit_message.get("message")))

    def _process(self, child: NvmlChild, message: Mapping[str, Any], now: float) -> None:
        kind = message["kind"]
        if kind == "slow":  # sent by the pipe thread, not by the sampling thread
            child.slow = SlowCall(message["gpu"], str(message["call"]))
            return
        child.heard_at = now
        if kind == "exit":
            child.exit = message
        elif kind == "machine":
            child.serving = True
            self._take(message, self._number)
        elif kind == "sample":
            child.slow = None
            self._hung_since = None
            self._sampled_at = now
            self._take(message, self._number)
            if self._reason not in {"", DETACHED}:
                self._set("", "")

    def _lost(self, child: NvmlChild, now: float, reason: str, message: str) -> None:
        """Handle the end of the active child."""
        self._close(child)
        self._active = None
        if self._reason == DETACHED:
            return
        self._forget_failures(child, now)
        if reason == DETACHED:  # the GPU was reattached before the child exited
            self._due = now
            return
        if child.serving or reason == CRASHED:
            self.restarts[reason if reason in self.restarts else "unknown"] += 1
        at_once = reason in IMMEDIATE_RESTARTS and child.serving
        self._due = now + self._backoff(at_once=int(at_once))
        if not at_once:
            self._set(reason, message)

    def _backoff(self, *, at_once: int = 0) -> float:
        """Return the wait before the next child; 0 for the first `at_once` failures in a row."""
        self._failures += 1
        if self._failures <= at_once:
            return 0.0
        timings = self._timings
        return min(timings.max_backoff, timings.first_backoff * 2.0 ** min(self._failures - 1, 16))

    def _forget_failures(self, child: NvmlChild, now: float) -> None:
        if now - child.started_at >= self._timings.steady:
            self._failures = 0
            self._hangs.clear()

    def _deadline(self, child: NvmlChild) -> float:
        return self._timings.deadline if child.serving else self._timings.start_deadline

    def _set(self, reason: str, message: str, gpu: int | None = None) -> None:
        self._reason = reason
        self._change(reason, message, gpu)

    def _close(self, child: NvmlChild) -> None:
        self._selector.unregister(child)
        child.end()

    def _shut_down(self) -> None:
        children = [child for child in (self._active, self._stuck) if child is not None]
        for child in children:
            child.send("stop")
        if self._active is not None:
            self._active.wait(self._timings.shutdown)
        for child in children:
            self._close(child)
        self._active = self._stuck = None
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()
