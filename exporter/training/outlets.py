"""Outlets: one exporter each, with its queue and its thread.

Used in the training process. An exporter is the user's code and runs on its outlet's thread. One that raises is asked
again, after a pause that grows while nothing succeeds, and never given up; one that hangs or is slow costs its own
records, counted by reason in `training_span_exporter_dropped_total`, and nothing else.
"""

from __future__ import annotations

import threading
from _queue import SimpleQueue  # `queue` would load `heapq` and more beside it
from collections.abc import Callable

from exporter.errors import DefinitionError
from exporter.recording.notices import tell_once
from exporter.recording.plain import plain
from exporter.training.events import TelemetryDataError
from exporter.training.types import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from exporter.training.exporters.base import Exporter

QUEUED_RECORDS = 10_000
"""Records that may wait for one exporter; a job with default settings makes a few per second."""
ATTEMPTS = 5
"""Times that one record is offered before it is dropped, while others may still arrive."""
WRITTEN_TOGETHER = 256
"""Records after which an exporter that holds some back is asked to write them, at the latest."""
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 30.0
JOIN_SECONDS = 0.5
DROP_REASONS = ("queue_full", "failed", "exit")


class _Marker:
    """What is put into a queue to learn when all before it was taken; `end` asks the thread to stop there."""

    __slots__ = ("end", "passed")

    def __init__(self, *, end: bool) -> None:
        self.end = end
        self.passed = threading.Event()


class _Counts:
    """The families of one exporter."""

    def __init__(self, name: str) -> None:
        self.delivered = _counter("records", exporter=name)
        self.errors = _counter("errors", exporter=name)
        self.dropped = {reason: _counter("dropped", exporter=name, reason=reason) for reason in DROP_REASONS}


def _counter(what: str, **labels: str) -> Callable[[float], None]:
    try:
        return plain("counter", f"training.span.exporter.{what}", labels=labels)
    except DefinitionError as error:  # too many series: the records go out all the same
        tell_once("span exporter counts", f"an exporter of spans is not counted: {error}")
        return lambda value: None  # noqa: ARG005  # it takes what it is given


class Outlet:
    """One exporter, its queue and its thread.

    Args:
        exporter: The user's.
        name: Label value under which it is counted.
        bound: Records that may wait.
        first_pause_seconds: After the first failure; it doubles with each further one until something succeeds.
    """

    def __init__(
        self,
        exporter: Exporter,
        name: str,
        *,
        bound: int = QUEUED_RECORDS,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
    ) -> None:
        self.exporter = exporter
        self.name = name
        self._bound = bound
        self._first_pause_seconds = first_pause_seconds
        self._write_out = getattr(exporter, "write_out", None)
        self._unwritten = 0
        self._queue: SimpleQueue[tuple[str, tuple[Any, ...]] | _Marker] = SimpleQueue()
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None
        self._failures = 0  # since something succeeded
        self._failed = 0  # records dropped by this outlet's thread
        self._refused = 0  # records dropped by those that record
        self._told = 0  # of both, those that the exporter knows it misses
        self._any_sent = False
        self._ended = False
        self._abandoned = False
        self._counts = _Counts(name)

    def begin(self) -> None:
        """Start its thread, which initialises the exporter."""
        if self._thread is not None or self._ended:
            return
        try:
            thread = threading.Thread(target=self._run, name=f"exporter-spans-{self.name}", daemon=True)
            thread.start()
        except RuntimeError as error:  # no more threads, none that are daemons, or the interpreter is ending
            tell_once(f"span exporter {self.name}", f"the exporter {self.name} cannot start: {error!r}")
            self._ended = True
            return
        self._thread = thread

    def put(self, method: str, *arguments: Any) -> None:
        """Hand over one record; never raises, never waits."""
        if self._ended:
            self._counts.dropped["exit"](1)
        elif self._queue.qsize() >= self._bound:
            self._refused += 1
            self._counts.dropped["queue_full"](1)
        else:
            self._queue.put((method, arguments))

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until all that waits now was taken; says whether it was, within the time."""
        if self._thread is None or self._ended or threading.current_thread() is self._thread:
            return self._queue.empty()
        marker = _Marker(end=False)
        self._queue.put(marker)
        return marker.passed.wait(max(timeout_seconds, 0.0))

    def finish(self) -> Callable[[float], None]:
        """Ask the thread to end after what waits now, without pauses, and to close the exporter.

        Returns:
            Waits for that so many seconds; what was not taken by then is counted as dropped.
        """
        self._hurry.set()
        if self._ended:
            return lambda seconds: None  # noqa: ARG005  # nothing is left to wait for
        self._ended = True
        marker = _Marker(end=True)
        self._queue.put(marker)

        def wait(timeout_seconds: float) -> None:
            thread = self._thread
            if thread is None:  # it never began
                self._counts.dropped["exit"](self._queue.qsize() - 1)
            elif thread is threading.current_thread():
                return
            elif marker.passed.wait(max(timeout_seconds, 0.0)):
                thread.join(
                    JOIN_SECONDS
                )  # one that runs while the interpreter is torn down may abort the process
            else:
                self._abandoned = True
                # Without the marker, with the one that it hangs in.
                self._counts.dropped["exit"](max(self._queue.qsize() - 1, 0) + 1)

        return wait

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._ended = True

    def _serve(self) -> None:
        ready = self._initialize()
        while True:
            item = self._queue.get()
            if self._abandoned:
                return
            if isinstance(item, _Marker):
                if ready:
                    self._have_written()
                if item.end:
                    self._attempt("close")
                item.passed.set()
                if item.end:
                    return
            elif not ready:
                self._counts.dropped["failed"](1)
            else:
                self._send(*item)
                if self._queue.empty() or self._unwritten >= WRITTEN_TOGETHER:
                    self._have_written()

    def _initialize(self) -> bool:
        """Try until it succeeds; False when the process ends before that."""
        while not self._attempt("initialize"):
            if self._hurry.wait(self._pause()):
                return self._attempt("initialize")
        return True

    def _send(self, method: str, arguments: tuple[Any, ...]) -> None:
        if not self._persist(method, *arguments):
            self._failed += 1
            self._counts.dropped["failed"](1)
            return
        if not self._abandoned:  # else it was counted as dropped when nobody could wait any longer
            self._counts.delivered(1)
        self._any_sent = True
        self._unwritten += 1
        self._tell_losses()

    def _have_written(self) -> None:
        """Have an exporter that holds records back write them; it keeps those that it cannot."""
        if self._write_out is not None and self._unwritten:
            self._unwritten = 0
            self._persist("write_out")

    def _persist(self, method: str, *arguments: Any) -> bool:
        """Try several times, with pauses; once only where the process is ending."""
        for attempt in range(ATTEMPTS):
            if self._attempt(method, *arguments):
                return True
            if self._hurry.is_set():
                break
            if attempt < ATTEMPTS - 1:
                self._hurry.wait(self._pause())
        return False

    def _tell_losses(self) -> None:
        """Have a consumer know that what it reads is incomplete."""
        lost = self._failed + self._refused - self._told
        if not lost:
            return
        self._told += lost
        kinds = TelemetryDataError.ErrorType
        kind = kinds.INCOMPLETE_TELEMETRY_DATA if self._any_sent else kinds.NO_TELEMETRY_DATA
        error = TelemetryDataError.create(kind, f"{lost} records before this one were dropped")
        self._attempt("export_telemetry_data_error", error)

    def _pause(self) -> float:
        return min(self._first_pause_seconds * 2.0 ** min(self._failures - 1, 20), LONGEST_PAUSE_SECONDS)

    def _attempt(self, method: str, *arguments: Any) -> bool:
        try:
            getattr(self.exporter, method)(*arguments)
        except BaseException as error:  # noqa: BLE001  # the user's code: SystemExit would end the thread, too
            self._failures += 1
            self._counts.errors(1)
            tell_once(
                f"span exporter {self.name} {method}",
                f"the exporter {self.name} failed in {method}: {shown(error)}",
            )
            return False
        self._failures = 0
        return True
