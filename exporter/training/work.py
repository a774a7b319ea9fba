"""Work: the time that training iterations took, and which of it a checkpoint has made safe.

Used by the recording thread of the training process; the sidecar's ledger makes goodput of it.
"""

from __future__ import annotations

MOST_SEGMENTS = 64
"""Stretches of work without a checkpoint that are kept apart."""


MOST_STEPS = 10**300
"""The furthest step: beyond it there is no float."""


class Segment:
    """A stretch of work that no checkpoint covers.

    Attributes:
        loop: The training loop that it was done in.
        first: Its first step.
        last: Its last step.
        seconds: What it took.
        number: Of the save that it is to be safe by, or a later one.
    """

    __slots__ = ("loop", "first", "last", "seconds", "number")

    def __init__(self, loop: int, first: int, last: int, seconds: float, number: int) -> None:
        self.loop = loop
        self.first = first
        self.last = last
        self.seconds = seconds
        self.number = number


class Work:
    """The work of this process.

    Attributes:
        seconds: Of completed iterations.
        failed_seconds: Of iterations whose body raised.
        committed_step: Step of the latest save that succeeded.
        committed_seconds: What the saves cover.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.failed_seconds = 0.0
        self.committed_step: int | None = None
        self.committed_seconds = 0.0
        self._segments: list[Segment] = []
        self._saves = 0
        self._committed = 0

    def reset(self) -> None:
        """Count from zero; saves under way make nothing safe that was done before."""
        self.seconds = self.failed_seconds = self.committed_seconds = 0.0
        self.committed_step = None
        self._segments = []

    def done(self, loop: int, first: int, last: int, seconds: float) -> None:
        """Count completed iterations.

        Args:
            loop: The training loop.
            first: Step of the first of them.
            last: Step of the last.
            seconds: What they took.
        """
        self.seconds += seconds
        newest = self._segments[-1] if self._segments else None
        if newest is not None and (newest.loop, newest.number) == (loop, self._saves) and newest.last < first:
            newest.last = last
            newest.seconds += seconds
            return
        self._segments.append(Segment(loop, first, last, seconds, self._saves))
        if len(self._segments) > MOST_SEGMENTS:
            self._merge()

    def failed(self, seconds: float) -> None:
        """Count an iteration whose body raised."""
        self.failed_seconds += seconds

    def save_begins(self) -> int:
        """Note that a save begins.

        Returns:
            Its number, for `commit`.
        """
        self._saves += 1
        return self._saves

    def commit(self, save: int, step: int | None) -> None:
        """Note that a save has succeeded; one that began before another that has succeeded changes nothing.

        Args:
            save: Its number.
            step: Steps completed when it began.
        """
        if save <= self._committed:
            return
        self._committed = save
        self._segments = [segment for segment in self._segments if segment.number >= save]
        self._settle(step)

    def commit_steps(self, step: int) -> None:
        """Note that a save of a step has succeeded of which it is not known when it began.

        Args:
            step: Steps completed when it began.
        """
        kept = []
        for segment in self._segments:
            steps = segment.last - segment.first + 1
            done = min(max(step - segment.first, 0), steps)
            segment.seconds -= segment.seconds * done / steps
            segment.first += done
            if done < steps:
                kept.append(segment)
        self._segments = kept
        self._settle(step)

    def _settle(self, step: int | None) -> None:
        uncommitted = sum([segment.seconds for segment in self._segments])
        self.committed_seconds = max(self.committed_seconds, self.seconds - uncommitted)
        self.committed_step = step

    def segments(self) -> tuple[tuple[int, int, int, float], ...]:
        """Give what no save covers, in order."""
        return tuple(
            [(segment.loop, segment.first, segment.last, segment.seconds) for segment in self._segments]
        )

    def _merge(self) -> None:
        """Join the two oldest neighbours that can be; a save commits them only once it covers both."""
        for index in range(len(self._segments) - 1):
            left, right = self._segments[index], self._segments[index + 1]
            if left.loop == right.loop and left.last < right.first:
                right.first = left.first
                right.seconds += left.seconds
                del self._segments[index]
                return
        oldest, second = self._segments[:2]  # loops or steps that went back: the seconds at least are kept
        second.seconds += oldest.seconds
        del self._segments[0]
