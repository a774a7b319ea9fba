"""Answers to stack requests: one periodic task of the recording thread in each training process.

A check of the request file is a single system call. Each request is answered once, within a flush interval.
"""

from __future__ import annotations

from collections.abc import Callable
from os import getpid
from time import monotonic, time

from exporter.feed.stacks import (
    StackAnswer,
    StackRequest,
    read_request,
    request_stamp,
    write_answer,
)
from exporter.recording.stacks import capture
from exporter.recording.value_class import Value, value_class
from exporter.training.collectives import last_collective, sequence_numbers

LOOK_SECONDS = 1.0
"""Interval between two looks at the request file."""
MAX_REQUEST_AGE_SECONDS = 30.0
"""Older requests are ignored: they precede the start of the process."""


@value_class
class TrainingPosition(Value):
    """Where the training of this process is."""

    phase: str | None = None
    phase_seconds: float | None = None
    step: int | None = None


@value_class
class Place(Value):
    """Feed directory and identity under which this process writes."""

    directory: str
    process_id: str
    run: str
    rank: int | None


class StackResponder:
    """Periodic task that answers stack requests.

    Args:
        place: Returns the place of this process; None as long as it has written no feed file.
        progress: Returns the progress of its training.
        log_hang: Logs the event `training.hang` for the handlers of the job.
    """

    def __init__(
        self,
        place: Callable[[], Place | None],
        progress: Callable[[], TrainingPosition],
        log_hang: Callable[[StackAnswer], None],
    ) -> None:
        self._place = place
        self._progress = progress
        self._log_hang = log_hang
        self._next_look = 0.0
        self._stamp: tuple[str, int, int] | None = None
        self._answered = ""
        self._hang_logged = ""

    def tick(self) -> None:
        """Answer a new request, if there is one."""
        now = monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        place = self._place()
        if place is None:
            return
        stamp = request_stamp(place.directory)
        if stamp is None or stamp == self._stamp:
            return
        self._stamp = stamp
        request = read_request(place.directory)
        if request is None or request.id == self._answered:
            return
        if abs(time() - request.asked_at) <= MAX_REQUEST_AGE_SECONDS:
            self._answer(request, place)

    def _answer(self, request: StackRequest, place: Place) -> None:
        main, others = capture(request.detail)
        progress = self._progress()
        answer = StackAnswer(
            request_id=request.id,
            process_id=place.process_id,
            pid=getpid(),
            answered_at=time(),
            run=place.run,
            rank=place.rank,
            main=main,
            others=others,
            phase=progress.phase,
            phase_seconds=progress.phase_seconds,
            step=progress.step,
            sequences=sequence_numbers(),
            last_collective=last_collective(),
        )
        self._answered = request.id
        try:
            write_answer(place.directory, answer)
        except OSError:  # a full or foreign directory; the sidecar reports the missing answer
            return
        if request.hang_of == place.run and self._hang_logged != request.hang_of:
            self._hang_logged = request.hang_of
            self._log_hang(answer)

    def finish(self) -> Callable[[float, str], object] | None:
        """Do nothing at the end of the process; the sidecar removes the answer with the feed file."""
        return None

    def after_fork(self) -> None:
        """Forget the requests that the parent answered."""
        self._stamp = None
        self._answered = self._hang_logged = ""
