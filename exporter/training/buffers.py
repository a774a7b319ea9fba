"""Span buffers: what the job's threads note of their work, for the recording thread to interpret.

A mark is a code and a value, most often the time; it goes into the buffer of its thread or asyncio task with one `extend`,
which no signal handler and no other thread can interrupt, and leaves nothing behind that the garbage collector tracks.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from time import monotonic
from typing import TYPE_CHECKING, Any

from exporter.recording.recorder import RECORDER
from exporter.recording.timing import AnyFunction, within
from exporter.training.span_kinds import ENTER, EXIT, FAIL, STEPS, VALUES, Kind
from exporter.training.spans import NO_TELEMETRY, Span, Telemetry

if TYPE_CHECKING:
    from typing_extensions import Self

    from exporter.training.gpu_time import GpuTimer

FULL_ITEMS = 1 << 15
"""Items in a buffer at which its thread interprets them itself: at 100 iterations a second the recording thread finds
a hundredth of it."""
MOST_ITEMS = 1 << 20
"""Items at which, where nobody can interpret them, the older half is dropped and counted: 8 MiB, and the floats."""
MOST_OPEN = 64
"""Spans of one thread that are known to be open: a job that never ends them does not fill the memory."""

limit = FULL_ITEMS
"""Items in a buffer beyond which `full` is called; -1 where every call is to be looked at, since misuse raises."""


class Hooks:
    """What the recording of this process does for its buffers; set when it is put together."""

    # Called on the thread whose buffer holds more than `limit` items, and on one that has made a rare call, with whether an
    # exception is passing.
    full: Callable[[SpanBuffer, bool], None] = staticmethod(lambda _buffer, _failing: None)
    settle: Callable[[SpanBuffer, bool], None] = staticmethod(lambda _buffer, _failing: None)
    # Gives the span of the innermost open block of a kind.
    span: Callable[[SpanBuffer, Kind], Span | None] = staticmethod(lambda _buffer, _kind: None)
    values: Callable[[], dict[str, Any]] | None = None  # gives what the job's callables say now
    collect: Callable[[], None] = staticmethod(lambda: None)
    telemetry: Telemetry = NO_TELEMETRY
    gpu: GpuTimer | None = None


class Anchor:
    """Lives as long as its thread, or its task's context, does."""

    __slots__ = ("__weakref__",)


class SpanBuffer:
    """The marks of one thread or asyncio task: `items` are codes and values in turn."""

    def __init__(self, anchor: Anchor, parent: SpanBuffer | None = None) -> None:
        self.items: Any = []
        self.thread = threading.get_ident()
        self.parent = parent  # the buffer of the code that started the task; None for a thread
        self.anchor = weakref.ref(anchor)
        self.waiting: list[Any] = []  # items that are drained, but other buffers' come first
        self.dropped = self.counted = 0  # marks that were dropped, and of those, which were counted as misuse
        self.state: Any = None  # whatever the interpreter keeps of it
        self.handles: Callable[[], Handles | None] = lambda: (
            None
        )  # gives its handles as long as there are any

    def take(self, most: int) -> list[Any]:
        """Drain up to so many items, an even number, after those that wait."""
        waiting, self.waiting = self.waiting, []
        more = max(most - len(waiting), 0)
        waiting += self.items[:more]
        del self.items[:more]
        return waiting

    def drop(self) -> None:
        """Drop the older half: by whoever interprets, or on its own thread, when nobody can."""
        half = len(self.items) // 4 * 2
        del self.items[:half]
        self.dropped += half // 2


_buffers: dict[int, SpanBuffer] = {}  # by identity: thousands of tasks may come and go


def all_buffers() -> list[SpanBuffer]:
    """All that may have marks, those of ended threads included until they are drained."""
    return list(_buffers.values())


def forget_ended() -> list[SpanBuffer]:
    """Let go of the buffers that are drained and whose threads and tasks have ended."""
    ended = [each for each in all_buffers() if each.anchor() is None and not each.items and not each.waiting]
    for buffer in ended:
        del _buffers[id(buffer)]
    return ended


def forget_parent() -> None:
    """In a forked child: forget every mark of the parent, and what is open there."""
    opened = _opened()
    if opened:
        opened.clear()
    alive = set(sys._current_frames())  # noqa: SLF001  # the only list of threads that holds after a fork
    for buffer in all_buffers():
        buffer.items.clear()
        buffer.waiting.clear()
        buffer.state = None
        if buffer.thread not in alive:
            del _buffers[id(buffer)]


# Blocks ---------------------------------------------------------------------------------------------------


class Handle:
    """A block on one buffer that can be entered again and again, and stands for the span that is open in it."""

    __slots__ = ("kind", "buffer", "_items", "_extend", "_enter", "_exit", "_fail", "_asks")

    def __init__(self, kind: Kind, buffer: SpanBuffer) -> None:
        self.kind = kind
        self.buffer = buffer
        self._items = buffer.items
        self._extend = buffer.items.extend
        self._enter, self._exit, self._fail = kind.code + ENTER, kind.code + EXIT, kind.code + FAIL
        self._asks = kind in STEPS

    def __enter__(self) -> Self:
        self._extend((self._enter, monotonic()))
        if limit < 0:
            try:
                Hooks.full(self.buffer, False)  # the block is only entered
            except BaseException:
                self._extend((self._fail, monotonic()))  # its body does not run, so nobody leaves it
                raise
        return self

    def __exit__(self, exception: type[BaseException] | None, value: object, traceback: object) -> None:
        if self._asks and Hooks.values is not None:
            self._extend((VALUES, Hooks.values()))
        self._extend((self._exit if exception is None else self._fail, monotonic()))
        if len(self._items) > limit:
            Hooks.full(self.buffer, exception is not None)

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function, a coroutine function or a generator function: each call is one block."""
        kind = self.kind
        return within(lambda: handle_of(kind), function)

    @property
    def active(self) -> bool:
        """Whether it is open."""
        span = Hooks.span(self.buffer, self.kind)
        return span is not None and span.active

    def __getattr__(self, name: str) -> Any:
        """Give what the span itself has: its name, its id, `add_attribute`; where it is not open, one that goes nowhere."""
        if name.startswith("_") or not hasattr(Span, name):
            raise AttributeError(f"a span has no {name!r}")
        span = Hooks.span(self.buffer, self.kind)
        return getattr(Span.create(self.kind.name) if span is None else span, name)

    def __reduce__(self) -> tuple[Callable[[Kind], Handle], tuple[Kind]]:
        """Be pickled and copied with what a job keeps it in: elsewhere it is the handle of that thread."""
        return handle_of, (self.kind,)

    def __repr__(self) -> str:
        return f"<{self.kind.call}>"


# Places: whose buffer a call belongs to -----------------------------------------------------------------------


class Handles(dict[Kind, Handle]):
    """The handles of one buffer, made at their first use."""

    def __init__(self, buffer: SpanBuffer) -> None:
        super().__init__()
        self._buffer = buffer
        self._type = Handle
        buffer.handles = weakref.ref(self)

    def __missing__(self, kind: Kind) -> Handle:
        made = self[kind] = self._type(kind, self._buffer)
        return made

    def become(self, handle: type[Handle]) -> None:
        """Have all of them, also those that the job keeps, be of another class without attributes of its own."""
        if self._type is not handle:
            self._type = handle
            for made in list(self.values()):
                made.__class__ = handle


class Place:
    """The buffer of one thread or task, `extend`, which puts marks into it, and its handles by kind."""

    def begin(self, parent: SpanBuffer | None = None, *, recorded: bool = True) -> None:
        """Make the buffer; the recording begins with the first."""
        self._anchor = Anchor()
        self.buffer = SpanBuffer(self._anchor, parent)
        if not recorded:
            self.buffer.items = deque(maxlen=0)  # keeps nothing
        self.extend: Callable[[Any], None] = self.buffer.items.extend
        self.handles = Handles(self.buffer)
        self.opened: list[Span] = []  # rare spans that were begun here and not ended, the outermost first
        if recorded:
            _buffers[id(self.buffer)] = self.buffer
            RECORDER.start()


class _Thread(threading.local, Place):
    """That of each thread, made when the thread marks first."""

    def __getattr__(self, name: str) -> Any:
        if name not in {"buffer", "extend", "handles", "opened"}:
            raise AttributeError(name)
        self.begin()
        look_for_tasks()
        return getattr(_of_task(), name) if place is _TASKS else self.__dict__[name]


class _Task:
    """That of the present asyncio task, or of the thread where none runs; replaces `_Thread` once a task marks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_of_task(), name)


_THREADS: Any = _Thread()
_TASKS: Any = _Task()
_INERT: Any = Place()
_INERT.begin(recorded=False)
_TASK_PLACE: ContextVar[tuple[weakref.ref[Any], Place] | None] = ContextVar("exporter-training", default=None)
_running_loop: Callable[[], object] | None = None
place: Any = _THREADS
"""What the job's calls note to: the threads', the tasks' or the inert one."""


def here() -> Any:
    """Give the place of the calling thread or task."""
    look_for_tasks()
    return place


def handle_of(kind: Kind) -> Handle:
    """Give the handle of a kind in the calling thread or task."""
    handle: Handle = here().handles[kind]
    return handle


def in_task() -> bool:
    """Tell whether an asyncio loop runs in this thread."""
    return _running_loop is not None and _running_loop() is not None


def look_for_tasks() -> None:
    """See whether the caller is an asyncio task, and if so have tasks told apart from now on."""
    global place, _running_loop  # noqa: PLW0603  # read on the hot path, where an attribute would cost
    if _running_loop is None:  # has the job loaded asyncio by now?
        _running_loop = getattr(sys.modules.get("asyncio"), "_get_running_loop", None)
    if place is _THREADS and in_task():
        place = _TASKS


def switch(*, on: bool) -> None:
    """Record from now on, or nothing any more."""
    global place  # noqa: PLW0603  # as above
    place = _THREADS if on else _INERT


def is_on() -> bool:
    """Tell whether anything is recorded."""
    return place is not _INERT


def raise_misuse(*, on: bool) -> None:
    """Have every call looked at as it is made."""
    global limit  # noqa: PLW0603  # as above
    limit = -1 if on else FULL_ITEMS


def current_span_id() -> str | None:
    """Give the id of the innermost rare span that is open in the calling thread or task; None for none."""
    opened = _opened()
    return str(opened[-1].id) if opened else None


def _opened() -> list[Span] | None:
    """Those of a thread that has not marked are not made for the question."""
    found = here()
    if found is _TASKS:
        found = _of_task()
    return found.__dict__.get("opened")  # type: ignore[no-any-return]  # see `Place`


def _of_task() -> Place:
    task = sys.modules["asyncio"].current_task() if in_task() else None
    if task is None:
        return _THREADS  # type: ignore[no-any-return]  # a thread's is one too
    known = _TASK_PLACE.get()
    if known is None or known[0]() is not task:
        made = Place()
        made.begin(_THREADS.buffer if known is None else known[1].buffer)
        known = (weakref.ref(task), made)
        _TASK_PLACE.set(known)
    return known[1]
