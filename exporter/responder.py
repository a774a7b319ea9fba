"""Stack responder: periodic task of a training process that answers the stack requests of the sidecar.

A check of the request file costs two system calls, and more in a shared directory. A process answers a request at most once,
usually within a second after the sidecar wrote the request.
"""

from __future__ import annotations

from collections.abc import Callable
from os import getpid
from time import monotonic, time

from exporter.feed.entries import FileStamp
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

CHECK_INTERVAL_SECONDS = 1.0
"""Interval between two checks of the request file."""
MAX_REQUEST_AGE_SECONDS = 30.0
"""Age above which a request is ignored, because the sidecar no longer waits for the answer."""


@value_class
class TrainingPosition(Value):
    """Current phase and step of the training of this process."""

    phase: str | None = None
    phase_seconds: float | None = None  # time since the phase started
    step: int | None = None  # last completed step


@value_class
class _LoggedHang(Value):
    """Hang for which the event was logged. A later hang of the same run has another step."""

    run: str
    step: int | None  # last completed step


@value_class
class FeedLocation(Value):
    """Feed directory of this process, and the identity of the process in its feed file."""

    directory: str
    process_id: str
    run: str
    rank: int | None


class StackResponder:
    """Periodic task that answers stack requests.

    Args:
        locate: Returns the feed location of this process, or None if no feed file is open.
        locate_training: Returns the phase and step of the training.
        log_hang: Logs the event `training.hang`, which the event handlers of the job receive.
    """

    def __init__(
        self,
        locate: Callable[[], FeedLocation | None],
        locate_training: Callable[[], TrainingPosition],
        log_hang: Callable[[StackAnswer], None],
    ) -> None:
        self._locate = locate
        self._locate_training = locate_training
        self._log_hang = log_hang
        self._next_check = 0.0  # monotonic time
        self._request_stamp: FileStamp | None = None
        self._answered_id = ""
        self._logged_hang: _LoggedHang | None = None

    def tick(self) -> None:
        """Answer a new request that is not older than `MAX_REQUEST_AGE_SECONDS`. Do nothing within `CHECK_INTERVAL_SECONDS` of a check."""
        now = monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_INTERVAL_SECONDS
        location = self._locate()
        if location is None:
            return
        stamp = request_stamp(location.directory)
        if stamp is None or stamp == self._request_stamp:
            return
        self._request_stamp = stamp
        request = read_request(location.directory)
        if request is None or request.id == self._answered_id:
            return
        if abs(time() - request.asked_at) <= MAX_REQUEST_AGE_SECONDS:
            self._answer(request, location)

    def _answer(self, request: StackRequest, location: FeedLocation) -> None:
        """Write the stacks and the position of the training. If the request reports that this run hangs, log the hang once."""
        main, other_stacks = capture(request.detail)
        position = self._locate_training()
        answer = StackAnswer(
            request_id=request.id,
            process_id=location.process_id,
            pid=getpid(),
            answered_at=time(),
            run=location.run,
            rank=location.rank,
            main=main,
            others=other_stacks,
            phase=position.phase,
            phase_seconds=position.phase_seconds,
            step=position.step,
            collective_counts=sequence_numbers(),
            last_collective=last_collective(),
        )
        self._answered_id = request.id
        try:
            write_answer(location.directory, answer)
        except OSError:
            # The directory is full or not writable. The sidecar reports that the answer is missing.
            return
        # A restarted sidecar requests the stacks of the same hang again.
        hang = _LoggedHang(location.run, position.step)
        if request.hang_of == location.run and self._logged_hang != hang:
            self._logged_hang = hang
            self._log_hang(answer)

    def finish(self) -> Callable[[float, str], object] | None:
        """Do nothing, because the sidecar removes the answer together with the feed file."""
        return None

    def after_fork(self) -> None:
        """Discard the answered request and the logged hang of the parent in a forked child."""
        self._request_stamp = None
        self._answered_id = ""
        self._logged_hang = None
