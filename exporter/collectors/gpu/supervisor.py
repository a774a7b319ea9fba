"""Supervisor of the NVML child: starts the child, receives its messages and replaces it.

Runs in the sidecar, for the GPU collector. A single daemon thread handles starts, messages and deadlines. The kernel
kills the child when this thread exits, and the thread runs as long as the sidecar.
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
"""Reasons for which NVML is not up although no failure is known: no recent sample has arrived, or NVML was detached."""

IMMEDIATE_RESTARTS = frozenset({"memory", "gpu_lost", "devices_changed", "lib_rm_version_mismatch"})
"""Exit reasons after which the next child starts immediately, unless an earlier child failed shortly before."""

MAX_IMMEDIATE_HANGS = 3
"""Number of consecutive hangs on a GPU after which the next child starts immediately. After further hangs, it is delayed."""

_LONGEST_WAIT_SECONDS = 60.0

CRASHED, HUNG = "crashed", "hung"
"""Reasons for which NVML is not up: the child could not be started, ended without a reason or sent an invalid message; or the child
does not answer."""

RESTART_REASONS = (CRASHED, HUNG, *sorted({*IMMEDIATE_RESTARTS, "driver_not_loaded", "unknown"}))
"""Values of the label `reason` of restarts; all other reasons are counted as `unknown`."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Timeouts and backoffs of the supervisor, in seconds."""

    deadline: float = 5.0  # time without a message after which a serving child counts as hanging
    # The same for a starting child: without persistence mode, initializing a GPU takes seconds.
    start_deadline: float = 30.0
    patience: float = 5.0  # time from the detection of a hang to the start of a replacement
    first_backoff: float = 5.0  # delay after the first failure
    max_backoff: float = 300.0  # maximum delay
    steady: float = 60.0  # age of a child at whose exit earlier failures are forgotten
    shutdown: float = 1.5  # wait for a requested exit


DEFAULT_TIMINGS = Timings()

StartChild = Callable[[tuple[int, ...], tuple[tuple[int, str], ...]], NvmlChild]
"""Function that starts a child, given the GPUs to skip and the calls (GPU, function) to avoid. Raises OSError."""


class Supervisor:
    """Supervisor of an NVML child, and of at most one hanging predecessor.

    - A child that exits is replaced after 5 s; after repeated failures, the delay doubles up to five minutes. A child that
      requested its restart (`IMMEDIATE_RESTARTS`) is replaced immediately, unless an earlier child failed shortly before.
    - A child whose call hangs on a GPU is replaced before the readings of the other GPUs expire. The new child skips
      this GPU. From the fourth consecutive hang on, the replacement is delayed.
    - A child without a message within the deadline counts as hanging. Until the sidecar stops, it is not killed, because
      killing a process inside a driver call can harm the driver; it exits when the call returns. A replacement starts
      after `patience` seconds. If the replacement hangs as well, the supervisor waits until one of the calls returns.
    - A skipped GPU is used again after the hanging call has returned; the call is then made less often.

    Args:
        start_child: Function that starts a child.
        on_message: Called with a message `machine` or `sample`, and the sequence number of the child.
        on_state: Called with the reason of NVML's failure ("" if NVML is up), a description, and the index of the GPU of a
            hanging call, if known.
        timings: Timeouts and delays.
        monotonic: The clock.
    """

    def __init__(
        self,
        *,
        start_child: StartChild,
        on_message: Callable[[Mapping[str, Any], int], None],
        on_state: Callable[[str, str, int | None], None],
        timings: Timings = DEFAULT_TIMINGS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.restarts: dict[str, int] = dict.fromkeys(RESTART_REASONS, 0)
        self._start_child = start_child
        self._on_message = on_message
        self._on_state = on_state
        self._timings = timings
        self._monotonic = monotonic
        self._active: NvmlChild | None = None
        self._hanging_child: NvmlChild | None = None
        self._failures = 0  # consecutive, until a child is steady
        self._hangs: dict[int, int] = {}  # number of consecutive hangs by GPU
        self._skipped_gpus: set[int] = set()
        self._avoided_calls: set[tuple[int, str]] = set()  # GPU and call
        self._child_number = 0
        self._start_due: float | None = 0.0  # time of the next start; None for no start
        self._hung_since: float | None = None
        # Time of the last sample of any child: the readings of a replaced child are published until the deadline.
        self._sampled_at = 0.0
        self._reason = STARTING
        # Set by other threads.
        self._is_detached = False
        self._is_stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="exporter-nvml", daemon=True)

    def start(self) -> None:
        """Start the thread. Must be called only once."""
        self._thread.start()

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """Stop the thread and the child. A hanging child is killed at once."""
        self._is_stopping = True
        self._wake()
        self._thread.join(timeout_seconds)

    def detach(self) -> None:
        """Stop the child, so that the driver can be unloaded or a GPU reset."""
        self._is_detached = True
        self._wake()

    def reattach(self) -> None:
        """Restart a child after `detach`."""
        self._is_detached = False
        self._wake()

    @property
    def is_alive(self) -> bool:
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
            while not self._is_stopping:
                self._act(self._monotonic(), is_detached=self._is_detached)
                for key, _ in self._selector.select(self._wait_seconds(self._monotonic())):
                    if isinstance(key.fileobj, NvmlChild):
                        self._receive(key.fileobj)
                    else:
                        self._wake_reader.recv(4096)
        finally:
            self._shut_down()

    def _wait_seconds(self, now: float) -> float:
        """Return the time until the next deadline."""
        deadlines = [now + _LONGEST_WAIT_SECONDS]
        child = self._active
        if child is not None and self._reason != DETACHED:  # a detached child has no deadline
            if self._hung_since is None:
                deadlines.append(child.last_message_at + self._deadline(child))
            elif self._hanging_child is None:
                deadlines.append(self._hung_since + self._timings.patience)
        elif self._start_due is not None:
            deadlines.append(self._start_due)
        if self._reason == "":
            deadlines.append(self._sampled_at + self._timings.deadline)
        return max(0.01, min(deadlines) - now)

    def _act(self, now: float, *, is_detached: bool) -> None:
        """Detach or reattach on request, replace or start a child if due, and report readings that have expired."""
        if is_detached and self._reason != DETACHED:
            self._start_due = None
            if self._active is not None:
                self._active.send("stop")
                # The user may reset the GPU as soon as the detachment is reported.
                self._active.wait(self._timings.shutdown)
            self._set(DETACHED, "NVML was detached on request")
        elif not is_detached and self._reason == DETACHED:
            self._start_due = now
            self._skipped_gpus.clear()
            self._avoided_calls.clear()
            self._hangs.clear()
            self._set(STARTING, "NVML is being reattached")
        if self._active is not None:
            self._check_deadline(self._active, now)
        elif self._start_due is not None and now >= self._start_due:
            self._launch(now)
        if self._reason == "" and now >= self._sampled_at + self._timings.deadline:
            self._set(STARTING, "the process that calls NVML is being replaced")

    def _launch(self, now: float) -> None:
        self._start_due = None
        try:
            self._active = self._start_child(
                tuple(sorted(self._skipped_gpus)), tuple(sorted(self._avoided_calls))
            )
        except OSError as error:
            self._start_due = now + self._backoff()
            self._set(CRASHED, f"the process that calls NVML cannot be started: {error}")
            return
        self._selector.register(self._active, selectors.EVENT_READ)
        self._child_number += 1
        self._hung_since = None

    def _check_deadline(self, child: NvmlChild, now: float) -> None:
        timings, slow_call = self._timings, child.slow_call
        gpu = None if slow_call is None else slow_call.gpu
        deadline = self._deadline(child)
        if child.is_serving and self._reason == "" and self._hanging_child is None and gpu is not None:
            self._replace(child, now)
            return
        if now - child.last_message_at < deadline or self._reason == DETACHED:
            return
        if self._hung_since is None:
            self._hung_since = now
            call = "" if slow_call is None else f": {slow_call.call} does not return"
            gpu_text = "" if gpu is None else f" on GPU {gpu}"
            self._set(HUNG, f"no answer from NVML for {deadline:g} s{call}{gpu_text}", gpu)
        if now - self._hung_since >= timings.patience and self._hanging_child is None:
            self._replace(child, now)

    def _replace(self, child: NvmlChild, now: float) -> None:
        """Abandon a child in its hanging call, and schedule a new child that skips the GPU of the call."""
        child.send("stop")  # processed when the call returns
        self._hanging_child, self._active = child, None
        slow_call = child.slow_call
        gpu = None if slow_call is None else slow_call.gpu
        if slow_call is not None and gpu is not None:
            self._hangs[gpu] = self._hangs.get(gpu, 0) + 1
            self._skipped_gpus.add(gpu)
            self._avoided_calls.add((gpu, slow_call.call))
        self._hung_since = None
        self._forget_failures(child, now)
        self.restarts[HUNG] += 1
        self._start_due = now + self._backoff(immediate_starts=1 if gpu is None else MAX_IMMEDIATE_HANGS)

    def _reuse_skipped(self, hanging_child: NvmlChild) -> None:
        """Use the skipped GPUs again after the hanging call has returned, except GPUs that have hung often."""
        self._close(hanging_child)
        self._hanging_child = None
        for gpu in sorted(self._skipped_gpus):
            if self._hangs.get(gpu, 0) > MAX_IMMEDIATE_HANGS:
                continue  # further hangs would cause gaps on the other GPUs
            self._skipped_gpus.discard(gpu)
            if self._active is not None:
                calls = [call for index, call in self._avoided_calls if index == gpu]
                self._active.send("reattach", gpu=gpu, calls=calls)

    def _receive(self, child: NvmlChild) -> None:
        now = self._monotonic()
        try:
            messages: Iterable[dict[str, Any]] | None = child.receive()
            for message in messages or ():
                if child is self._active:  # messages of a replaced child are ignored
                    self._process(child, message, now)
        except (ProtocolError, LookupError, ArithmeticError, TypeError, ValueError, AttributeError) as error:
            if child is self._active:
                self._handle_exit(
                    child, now, CRASHED, f"the process that calls NVML sent an invalid message: {error!r}"
                )
            return
        if messages is None:
            self._handle_pipe_end(child, now)

    def _handle_pipe_end(self, child: NvmlChild, now: float) -> None:
        """Handle the end of a child's pipe."""
        child.wait(0.5)
        if child is self._hanging_child:
            self._reuse_skipped(child)
        elif child is self._active:
            cause, exit_message = f"the process that calls NVML {child.cause()}", child.exit_message
            if exit_message is None:
                exit_message = {"reason": CRASHED, "message": cause}
            self._handle_exit(child, now, str(exit_message.get("reason")), str(exit_message.get("message")))

    def _process(self, child: NvmlChild, message: Mapping[str, Any], now: float) -> None:
        kind = message["kind"]
        # The child's pipe thread sends `slow`: this message does not show that the sampling thread is responsive.
        if kind == "slow":
            child.slow_call = SlowCall(message["gpu"], str(message["call"]))
            return
        child.last_message_at = now
        if kind == "exit":
            child.exit_message = message
        elif kind == "machine":
            child.is_serving = True
            self._on_message(message, self._child_number)
        elif kind == "sample":
            child.slow_call = None
            self._hung_since = None
            self._sampled_at = now
            self._on_message(message, self._child_number)
            if self._reason not in {"", DETACHED}:
                self._set("", "")

    def _handle_exit(self, child: NvmlChild, now: float, reason: str, message: str) -> None:
        """Handle the exit of the active child."""
        self._close(child)
        self._active = None
        if self._reason == DETACHED:
            return
        self._forget_failures(child, now)
        if reason == DETACHED:  # the GPU was reattached before the child exited
            self._start_due = now
            return
        if child.is_serving or reason == CRASHED:
            self.restarts[reason if reason in self.restarts else "unknown"] += 1
        is_requested = reason in IMMEDIATE_RESTARTS and child.is_serving
        self._start_due = now + self._backoff(immediate_starts=int(is_requested))
        if not is_requested:
            self._set(reason, message)

    def _backoff(self, *, immediate_starts: int = 0) -> float:
        """Count a failure, and return the delay before the next start.

        The delay is 0 for the first `immediate_starts` failures in a row.
        """
        self._failures += 1
        if self._failures <= immediate_starts:
            return 0.0
        timings = self._timings
        return min(timings.max_backoff, timings.first_backoff * 2.0 ** min(self._failures - 1, 16))

    def _forget_failures(self, child: NvmlChild, now: float) -> None:
        if now - child.started_at >= self._timings.steady:
            self._failures = 0
            self._hangs.clear()

    def _deadline(self, child: NvmlChild) -> float:
        return self._timings.deadline if child.is_serving else self._timings.start_deadline

    def _set(self, reason: str, message: str, gpu: int | None = None) -> None:
        self._reason = reason
        self._on_state(reason, message, gpu)

    def _close(self, child: NvmlChild) -> None:
        self._selector.unregister(child)
        child.terminate()

    def _shut_down(self) -> None:
        children = [child for child in (self._active, self._hanging_child) if child is not None]
        for child in children:
            child.send("stop")
        if self._active is not None:
            self._active.wait(self._timings.shutdown)
        for child in children:
            self._close(child)
        self._active = self._hanging_child = None
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()
