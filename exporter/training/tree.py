"""The tree: what is open in all threads and tasks of a process.

Used by the interpreter.
"""

from __future__ import annotations

from exporter.recording.marks import Track
from exporter.training.kinds import Kind
from exporter.training.opened import Open, Stack
from exporter.training.spans import Span


class Tree:
    """The open spans of one process.

    Attributes:
        started: Whether any mark was interpreted.
    """

    def __init__(self) -> None:
        self.started = False
        self._stacks: dict[int, Stack] = {}  # by identity: thousands of tasks may come and go
        self._main_thread: int | None = None

    def stack_of(self, track: Track) -> Stack:
        """Give the open spans of a track."""
        stack: Stack | None = track.state
        if stack is None:
            parent = None if track.parent is None else self.stack_of(track.parent)
            stack = track.state = Stack(parent, track.thread)
            stack.main = track.thread == self._main_thread
            self._stacks[id(stack)] = stack
            self.started = True
        return stack

    def begins_in(self, stack: Stack) -> None:
        """Note that a span begins; the thread of the first is the main one, whose time is what phases divide."""
        if self._main_thread is None:
            self._main_thread = stack.thread
            for each in self._stacks.values():
                each.main = each.thread == stack.thread

    def forget(self, track: Track) -> None:
        """Let go of a track whose thread has ended, once nothing is open in it."""
        stack = track.state
        if stack is not None and not stack.opens:
            self._stacks.pop(id(stack), None)

    def find(self, kind: Kind) -> Open | None:
        """Give the open span of a kind, of whatever thread."""
        for stack in self._stacks.values():
            found = stack.latest(kind)
            if found is not None:
                return found
        return None

    def open_of(self, span: Span) -> Open | None:
        """Give what stands for a span that is open."""
        for stack in self._stacks.values():
            for opened in stack.opens:
                if opened.span is span:
                    return opened
        return None

    def all(self) -> list[Open]:
        """Give all that is open, in the order of its begins."""
        return sorted((opened for stack in self._stacks.values() for opened in stack.opens), key=_order_of)


def _order_of(opened: Open) -> int:
    return opened.number
