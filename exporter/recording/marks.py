"""Marks: what the job's threads note down of their work, a pair of items each, for the recording thread to interpret.

Used in the training process. A mark is a code and a value, most often the time; it goes into the buffer of its thread
(or asyncio task) with one `extend`, one step in C: neither a signal handler nor another thread can come between the two,
and nothing that the garbage collector tracks is left behind. Buffers are bounded: a thread whose buffer fills, since it
marks faster than the recording thread gets the interpreter lock, empties it itself; where even that cannot be, the oldest
marks are dropped and counted. After a fork the child's buffers are empty.
"""

from __future__ import annotations

import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    Mark: TypeAlias = tuple[int, Any]

FULL_ITEMS = 1 << 15
"""Items in a buffer at which its thread interprets them itself: at 100 iterations a second the recording thread finds
a hundredth of it."""
MOST_ITEMS = 1 << 20
"""Items at which the older half is dropped: 8 MiB, and the floats."""


class Anchor:
    """Lives as long as its thread, or its task's context, does."""

    __slots__ = ("__weakref__",)


class Track:
    """The marks of one thread or asyncio task.

    Attributes:
        buffer: Codes and values in turn.
        thread: Identifier of the thread.
        parent: The track of the code that started the task; None for a thread.
        waiting: Marks that are drained but not interpreted yet, since other tracks' come first.
        dropped: Marks that were dropped, all told.
        looks: Each has one kind of mark look from now on whether the buffer is full.
        state: Whatever the interpreter keeps of it.
    """

    __slots__ = (
        "__weakref__",
        "anchor",
        "buffer",
        "dropped",
        "looks",
        "parent",
        "state",
        "thread",
        "waiting",
    )

    def __init__(self, thread: int, anchor: Anchor, parent: Track | None = None) -> None:
        self.buffer: list[Any] = []
        self.thread = thread
        self.parent = parent
        self.anchor = weakref.ref(anchor)
        self.waiting: list[Any] = []
        self.dropped = 0
        self.looks: list[Callable[[], None]] = []
        self.state: Any = None

    def take(self, most: int) -> list[Any]:
        """Drain up to so many items, an even number."""
        taken = self.buffer[:most]
        del self.buffer[:most]
        return taken

    def watch(self) -> None:
        """Have every mark look whether the buffer is full: of a thread that fills it faster than it is drained."""
        while self.looks:
            self.looks.pop()()

    def drop(self) -> None:
        """Drop the older half: by whoever interprets, or on its own thread, when nobody can."""
        half = len(self.buffer) // 4 * 2
        del self.buffer[:half]
        self.dropped += half // 2


class Tracks:
    """The tracks of one process."""

    def __init__(self, adopt: Callable[[], None] = lambda: None) -> None:
        self._tracks: dict[int, Track] = {}  # by identity: thousands of tasks may come and go
        self._adopt = adopt

    def on_new(self, adopt: Callable[[], None]) -> None:
        """Say what is called, on its own thread, when a thread or task is about to mark for the first time."""
        self._adopt = adopt

    def make(self, anchor: Anchor, parent: Track | None = None) -> Track:
        """Make the track of the calling thread or task."""
        track = Track(threading.get_ident(), anchor, parent)
        self._tracks[id(track)] = track
        self._adopt()
        return track

    def all(self) -> list[Track]:
        """All that may have marks, those of ended threads included until they are drained."""
        return list(self._tracks.values())

    def waiting(self) -> bool:
        """Whether there is anything to interpret."""
        return any(track.buffer or track.waiting for track in self.all())

    def forget_ended(self) -> list[Track]:
        """Let go of those that are drained and whose threads and tasks have ended."""
        ended = [
            track for track in self.all() if track.anchor() is None and not track.buffer and not track.waiting
        ]
        for track in ended:
            del self._tracks[id(track)]
        return ended

    def clear(self) -> None:
        """Forget every mark; what a forked child does with its parent's."""
        alive = set(sys._current_frames())  # noqa: SLF001  # the only list of threads that holds after a fork
        for track in self.all():
            track.buffer.clear()
            track.waiting.clear()
            track.state = None
            if track.thread not in alive:
                del self._tracks[id(track)]


def in_order(
    tracks: list[Track], until: float, most: int, time_of: Callable[[int, Any], float | None]
) -> list[tuple[float, int, Track, int, Any]]:
    """Drain several tracks and give their marks in order of time: (time, number, track, code, value).

    Args:
        tracks: Whose.
        until: Marks after this time stay for later: another track, drained before, may have an earlier one by now.
        most: Items of each track that are looked at.
        time_of: Tells the time of a mark; None for one that belongs to the mark before it.
    """
    drained: list[tuple[Track, list[Any], list[tuple[float, int, Track, int, Any]]]] = []
    number = 0
    for track in tracks:
        items = track.waiting
        if len(items) < most:
            items = items + track.take(most - len(items))
        marks = []
        before = 0.0
        for position in range(0, len(items), 2):
            code, value = items[position], items[position + 1]
            at = time_of(code, value)
            before = before if at is None else max(before, at)
            marks.append((before, number, track, code, value))
            number += 1
        if track.buffer:
            until = min(until, before)  # it has more, which may come before the others'
        drained.append((track, items, marks))
    ready = []
    for track, items, marks in drained:
        now = bisect_right(marks, until, key=_time_of)
        ready += marks[:now]
        track.waiting = items[2 * now :]
    ready.sort(key=_time_and_number)
    return ready


def _time_of(mark: tuple[float, int, Track, int, Any]) -> float:
    return mark[0]


def _time_and_number(mark: tuple[float, int, Track, int, Any]) -> tuple[float, int]:
    return mark[0], mark[1]
