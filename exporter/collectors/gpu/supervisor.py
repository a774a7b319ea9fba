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

STARTING = "starting"
"""Reason for which NVML is not up: no recent sample has arrived, and no failure is known."""
DETACHED = "detached"
"""Reason for which NVML is not up: NVML was detached on request."""

IMMEDIATE_RESTARTS = frozenset({"memory", "gpu_lost", "devices_changed", "lib_rm_version_mismatch"})
"""Exit reasons after which the next child starts immediately, unless an earlier child failed shortly before."""

MAX_IMMEDIATE_HANGS = 3
"""Number of consecutive failures, hangs included, up to which a hang on a GPU is followed by an immediate start. A GPU with more
consecutive hangs stays skipped."""

_LONGEST_WAIT_SECONDS = 60.0
"""Wait of the thread if no deadline is nearer. A message of a child and `_wake` end the wait."""

CRASHED = "crashed"
"""Reason for which NVML is not up: the child could not be started, ended without a reason or sent an invalid message."""
HUNG = "hung"
"""Reason for which NVML is not up: the child does not answer."""

RESTART_REASONS = (CRASHED, HUNG, *sorted({*IMMEDIATE_RESTARTS, "driver_not_loaded", "unknown"}))
"""Values of the label `reason` of restarts; all other reasons are counted as `unknown`."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Timeouts and backoffs of the supervisor."""

    deadline_seconds: float = 5.0  # time without a message after which a serving child counts as hanging
    # Deadline of a starting child: without persistence mode, initializing a GPU takes seconds.
    start_deadline_seconds: float = 30.0
    replacement_delay_seconds: float = 5.0  # from the detection of a hang to the start of a replacement
    first_backoff_seconds: float = 5.0  # delay after the first failure
    max_backoff_seconds: float = 300.0
    steady_age_seconds: float = 60.0  # age from which the end of a child counts as the first failure
    shutdown_timeout_seconds: float = 1.5  # longest wait for a requested exit


DEFAULT_TIMINGS = Timings()

StartChild = Callable[[tuple[int, ...], tuple[tuple[int, str], ...]], NvmlChild]
"""Function that starts a child, given the GPUs to skip and the calls (GPU, function) to avoid. Raises OSError."""


class Supervisor:
    """Supervisor of an NVML child, and of at most one hanging predecessor.

    - A child that exits is replaced after 5 s; after repeated failures, the delay doubles up to five minutes. A child that
      requested its restart (`IMMEDIATE_RESTARTS`) is replaced immediately, unless an earlier child failed shortly before.
    - A child whose call hangs on a GPU is replaced before the readings of the other GPUs expire. The new child skips
      this GPU. From the fourth consecutive failure on, the replacement is delayed.
    - A child without a message within the deadline counts as hanging. The child exits when the call returns. The supervisor does not
      kill the child until the sidecar stops, because killing a process inside a driver call can harm the driver. A replacement
      starts `Timings.replacement_delay_seconds` after the detection. If the replacement hangs as well, the supervisor waits until
      one of the calls returns.
    - A skipped GPU is used again after the hanging call has returned; the call is then made less often. A GPU with four
      consecutive hangs stays skipped.

    Args:
        start_child: Function that starts a child.
        on_message: Called with a message `machine` or `sample`, and the sequence number of the child.
        on_state: Called with the reason of NVML's failure, a description, and the index of the GPU whose call hangs. The reason is "" if
            NVML is up, and the index is None if it is unknown.
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
        # Consecutive failures, and consecutive hangs by GPU. The end of a child of `steady_age_seconds` resets both.
        self._failures = 0
        self._hangs: dict[int, int] = {}
        self._skipped_gpus: set[int] = set()
        self._avoided_calls: set[tuple[int, str]] = set()  # GPU and call
        self._child_number = 0
        self._start_due: float | None = 0.0  # time of the next start; None for no start
        self._hung_since: float | None = None  # time at which a hang of the active child was detected
        # Time of the last sample of any child. The readings of a replaced child are published until the deadline after this time.
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
        """Start the thread. Must be called only once. Raises RuntimeError if the system refuses the thread."""
        try:
            self._thread.start()
        except RuntimeError:
            self._close_selector()
            raise

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """Stop the thread and the children. A child that does not exit within `Timings.shutdown_timeout_seconds` is killed."""
        self._is_stopping = True
        self._wake()
        self._thread.join(timeout_seconds)

    def detach(self) -> None:
        """Stop the child, so that the driver can be unloaded or a GPU reset. Does not wait for the exit."""
        self._is_detached = True
        self._wake()

    def reattach(self) -> None:
        """Start a child after `detach`. The child uses all GPUs again."""
        self._is_detached = False
        self._wake()

    @property
    def is_alive(self) -> bool:
        """True if the supervisor thread is running."""
        return self._thread.is_alive()

    @property
    def pid(self) -> int | None:
        """Process id of the active child, or None without an active child."""
        active = self._active
        return None if active is None else active.pid

    def _wake(self) -> None:
        """End the wait of the supervisor thread."""
        with contextlib.suppress(OSError):  # full: the thread is awake; closed: the thread has ended
            self._wake_writer.send(b"!")

    def _run(self) -> None:
        """Update the state, then wait for messages of the children or `_wake`, until the supervisor is stopped."""
        try:
            while not self._is_stopping:
                self._update(self._monotonic(), is_detached=self._is_detached)
                for key, _ in self._selector.select(self._wait_seconds(self._monotonic())):
                    if isinstance(key.fileobj, NvmlChild):
                        self._receive(key.fileobj)
                    else:
                        self._wake_reader.recv(4096)
        finally:
            self._shut_down()

    def _wait_seconds(self, now: float) -> float:
        """Return the time until the next deadline or start, at most `_LONGEST_WAIT_SECONDS`."""
        deadlines = [now + _LONGEST_WAIT_SECONDS]
        child = self._active
        if child is not None and self._reason != DETACHED:  # a detached child has no deadline
            if self._hung_since is None:
                deadlines.append(child.last_message_at + self._deadline(child))
            elif self._hanging_child is None:
                deadlines.append(self._hung_since + self._timings.replacement_delay_seconds)
        elif self._start_due is not None:
            deadlines.append(self._start_due)
        if self._reason == "":
            deadlines.append(self._sampled_at + self._timings.deadline_seconds)
        return max(0.01, min(deadlines) - now)

    def _update(self, now: float, *, is_detached: bool) -> None:
        """Detach or reattach on request, replace or start a child if due, and report readings that have expired."""
        if is_detached and self._reason != DETACHED:
            self._start_due = None
            if self._active is not None:
                self._active.send("stop")
                # The user may reset the GPU as soon as the detachment is reported.
                self._active.wait(self._timings.shutdown_timeout_seconds)
            self._report(DETACHED, "NVML was detached on request")
        elif not is_detached and self._reason == DETACHED:
            self._start_due = now
            self._skipped_gpus.clear()
            self._avoided_calls.clear()
            self._hangs.clear()
            self._report(STARTING, "NVML is being reattached")
        if self._active is not None:
            self._check_deadline(self._active, now)
        elif self._start_due is not None and now >= self._start_due:
            self._launch(now)
        if self._reason == "" and now >= self._sampled_at + self._timings.deadline_seconds:
            self._report(STARTING, "the process that calls NVML is being replaced")

    def _launch(self, now: float) -> None:
        """Start a child. If the system refuses the process, schedule another attempt."""
        self._start_due = None
        try:
            self._active = self._start_child(
                tuple(sorted(self._skipped_gpus)), tuple(sorted(self._avoided_calls))
            )
        except OSError as error:
            self._start_due = now + self._backoff()
            self._report(CRASHED, f"the process that calls NVML cannot be started: {error}")
            return
        self._selector.register(self._active, selectors.EVENT_READ)
        self._child_number += 1
        self._hung_since = None

    def _check_deadline(self, child: NvmlChild, now: float) -> None:
        """Report a hang of the active child, and replace the child unless its predecessor hangs, too.

        While NVML is up, a child that reports a slow call on a GPU is replaced at once, before the readings of the other GPUs
        expire. Otherwise, a child is replaced `Timings.replacement_delay_seconds` after the detection of the hang.
        """
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
            self._report(HUNG, f"no answer from NVML for {deadline:g} s{call}{gpu_text}", gpu)
        if now - self._hung_since >= timings.replacement_delay_seconds and self._hanging_child is None:
            self._replace(child, now)

    def _replace(self, child: NvmlChild, now: float) -> None:
        """Abandon a child in its hanging call, and schedule a new child, which skips the GPU of the call if the GPU is known."""
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
        """Use the skipped GPUs again after the hanging call has returned, except GPUs with more than `MAX_IMMEDIATE_HANGS` hangs."""
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
        """Read from a child's pipe, and handle the messages or the end of the pipe. An invalid message counts as a crash."""
        now = self._monotonic()
        try:
            messages: Iterable[dict[str, Any]] | None = child.receive()
            for message in messages or ():
                if child is self._active:  # messages of a replaced child are ignored
                    self._handle_message(child, message, now)
        except (ProtocolError, LookupError, ArithmeticError, TypeError, ValueError, AttributeError) as error:
            if child is self._active:
                self._handle_exit(
                    child, now, CRASHED, f"the process that calls NVML sent an invalid message: {error!r}"
                )
            return
        if messages is None:
            self._handle_pipe_end(child, now)

    def _handle_pipe_end(self, child: NvmlChild, now: float) -> None:
        """Handle the exit of the hanging child, whose skipped GPUs are used again, or of the active child, which is replaced."""
        child.wait(0.5)
        if child is self._hanging_child:
            self._reuse_skipped(child)
        elif child is self._active:
            exit_message = child.exit_message
            if exit_message is None:
                message = f"the process that calls NVML {child.exit_description()}"
                exit_message = {"reason": CRASHED, "message": message}
            self._handle_exit(child, now, str(exit_message.get("reason")), str(exit_message.get("message")))

    def _handle_message(self, child: NvmlChild, message: Mapping[str, Any], now: float) -> None:
        """Update the state of the active child, and pass the messages `machine` and `sample` on."""
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
                self._report("", "")

    def _handle_exit(self, child: NvmlChild, now: float, reason: str, message: str) -> None:
        """Close the active child after its exit, and schedule the next child unless NVML is detached.

        A crash, and any exit of a child that had initialized NVML, count as a restart.
        """
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
            self._report(reason, message)

    def _backoff(self, *, immediate_starts: int = 0) -> float:
        """Count a failure, and return the seconds until the next start.

        The delay is 0 for the first `immediate_starts` consecutive failures.
        """
        self._failures += 1
        if self._failures <= immediate_starts:
            return 0.0
        timings = self._timings
        return min(
            timings.max_backoff_seconds, timings.first_backoff_seconds * 2.0 ** min(self._failures - 1, 16)
        )

    def _forget_failures(self, child: NvmlChild, now: float) -> None:
        """Reset the counts of earlier failures if a child has reached the age `steady_age_seconds`."""
        if now - child.started_at >= self._timings.steady_age_seconds:
            self._failures = 0
            self._hangs.clear()

    def _deadline(self, child: NvmlChild) -> float:
        """Return the seconds without a message after which a child counts as hanging."""
        return self._timings.deadline_seconds if child.is_serving else self._timings.start_deadline_seconds

    def _report(self, reason: str, message: str, gpu: int | None = None) -> None:
        """Store the state of NVML, and pass the state to `on_state`."""
        self._reason = reason
        self._on_state(reason, message, gpu)

    def _close(self, child: NvmlChild) -> None:
        """Stop reading from a child, and kill the child if it is running."""
        self._selector.unregister(child)
        child.terminate()

    def _shut_down(self) -> None:
        """Ask all children to exit, wait for the active child, and kill the children that have not exited."""
        children = [child for child in (self._active, self._hanging_child) if child is not None]
        for child in children:
            child.send("stop")
        if self._active is not None:
            self._active.wait(self._timings.shutdown_timeout_seconds)
        for child in children:
            self._close(child)
        self._active = self._hanging_child = None
        self._close_selector()

    def _close_selector(self) -> None:
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()
