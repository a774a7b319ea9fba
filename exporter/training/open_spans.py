"""What is open: the spans of all threads and tasks of a process that have begun and not ended; for the interpreter."""

from __future__ import annotations

from itertools import count
from operator import attrgetter

from exporter.training.buffers import SpanBuffer
from exporter.training.checkpoints import Save
from exporter.training.phase_clock import PhaseEntry
from exporter.training.span_kinds import Kind
from exporter.training.spans import Span

_ORDER = count()


class OpenSpan(PhaseEntry):
    """A span that is open, or a block that was refused and is not left yet."""

    entered = False  # it is a block, which will be left
    over = False  # it has ended by something else than its block's end, or never began
    refused = False  # it never began
    recorded = logged = False  # the exporters know it; the handlers of events do
    span: Span | None = None  # made when somebody asks for it
    parent: OpenSpan | None = None  # what was the innermost when it began
    work = waits = 0.0  # of the phase clock when it began, of an iteration of the main thread
    save: Save | None = None

    def __init__(self, kind: Kind, began: float, stack: SpanStack, *, known: bool) -> None:
        self.kind = kind
        self.began = began  # monotonic time
        self.stack = stack
        self.known = known  # it began while telemetry was configured; else no rule is about it
        self.order = next(_ORDER)


class SpanStack:
    """What is open in one thread or task, in the order of begins, with blocks that are over until they are left."""

    __slots__ = ("parent", "thread", "main", "spans")

    def __init__(self, parent: SpanStack | None, thread: int) -> None:
        self.parent = parent  # that of the code that started the task
        self.thread = thread
        self.main = False  # the one whose time phases divide
        self.spans: list[OpenSpan] = []

    def latest(self, kind: Kind) -> OpenSpan | None:
        """Give the open one of a kind that began last."""
        for opened in reversed(self.spans):
            if opened.kind is kind and not opened.over:
                return opened
        return None

    def innermost(self) -> OpenSpan | None:
        """Give the one that began last, of this task or else of those that led to it."""
        for opened in reversed(self.spans):
            if not opened.over:
                return opened
        return None if self.parent is None else self.parent.innermost()

    def close(self, opened: OpenSpan, *, left: bool = False) -> None:
        """Close one; a block that is over stays until it is left."""
        opened.over = True
        if opened.entered and not left:
            return
        if self.spans[-1] is opened:
            self.spans.pop()
        else:
            self.spans.remove(opened)


class OpenSpans:
    """What is open in all threads and tasks of a process."""

    def __init__(self) -> None:
        self.started = False  # whether anything was marked
        self._stacks: dict[int, SpanStack] = {}  # by identity: thousands of tasks may come and go
        self.main_thread: int | None = None  # the one whose time phases divide

    def stack_of(self, buffer: SpanBuffer) -> SpanStack:
        """Give the stack of a thread or task."""
        stack: SpanStack | None = buffer.state
        if stack is None:
            parent = None if buffer.parent is None else self.stack_of(buffer.parent)
            stack = buffer.state = SpanStack(parent, buffer.thread)
            stack.main = buffer.thread == self.main_thread
            self._stacks[id(stack)] = stack
            self.started = True
        return stack

    def begins_in(self, stack: SpanStack) -> None:
        """Note that a span begins; the thread of the first is the one whose time phases divide."""
        if self.main_thread is None:
            self.main_thread = stack.thread
            for each in self._stacks.values():
                each.main = each.thread == stack.thread

    def forget(self, stack: SpanStack) -> None:
        """Let go of a thread or task that has ended, once nothing is open in it."""
        if all(opened.over for opened in stack.spans):
            self._stacks.pop(id(stack), None)

    def all(self) -> list[OpenSpan]:
        """Give all that is open, in the order of its begins."""
        found = [each for stack in self._stacks.values() for each in stack.spans if not each.over]
        return sorted(found, key=attrgetter("order"))

    def find(self, kind: Kind) -> OpenSpan | None:
        """Give the open span of a kind, of whatever thread."""
        return next(filter(None, (stack.latest(kind) for stack in self._stacks.values())), None)

    def open_of(self, span: Span) -> OpenSpan | None:
        """Give what stands for a span that is open."""
        return next((opened for opened in self.all() if opened.span is span), None)
