"""The hot path: blocks that are entered many times a second, each at the cost of two marks.

Used in the training process, on the job's threads. Every thread, and every asyncio task that marks, has handles of its
own, made once for each kind; a block is `with` on a handle. A handle's two methods close over all that they need: an
attribute less to look up is a hundredth of the budget. Nothing here raises, waits, or makes an object that the garbage
collector tracks.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from time import monotonic as clock

from exporter.recording.marks import FULL_ITEMS, Anchor, Track, Tracks
from exporter.training import kinds
from exporter.training.decorating import decorated
from exporter.training.events import Event
from exporter.training.kinds import ENTER, EXIT, FAIL, TOLD, VALUES, Kind
from exporter.training.reports import report
from exporter.training.spans import Span
from exporter.training.types import Attribute, Attributes, AttributeValue, all_are, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    from typing_extensions import Self

    AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

TRACKS = Tracks()
"""Those of this process."""

limit = FULL_ITEMS
"""Items in a buffer beyond which `full` is called; -1 where every call is to be looked at, since misuse raises."""


class Hooks:
    """What the recording of this process does for the hot path; set when it is put together.

    Attributes:
        full: Called on the thread whose buffer holds more than `limit` items; the second argument says whether the
            block was left by an exception.
        span: Gives the span of the innermost open block of a kind on a track.
        values: Gives what the job's callables say now; None where it has none to ask.
        settle: Called on the thread that has made a rare call.
    """

    full: Callable[[Track, bool], None] = staticmethod(lambda _track, _failing: None)
    span: Callable[[Track, Kind], Span | None] = staticmethod(lambda _track, _kind: None)
    values: Callable[[], dict[str, Any]] | None = None
    settle: Callable[[Track, bool], None] = staticmethod(lambda _track, _failing: None)


class Told:
    """What the job says of a span by its handle: an attribute or an event.

    Attributes:
        time: Of the mark.
        item: An `Attribute`, `Attributes` or an `Event`.
    """

    __slots__ = ("time", "item")

    def __init__(self, time: float, item: Attribute | Attributes | Event) -> None:
        self.time = time
        self.item = item


class Hot:
    """A block that can be entered again and again, and stands for the span that is open in it.

    Attributes:
        kind: Of the spans.
        track: The marks of the thread or task.
    """

    __slots__ = ("kind", "track")

    def __init__(self, kind: Kind, track: Track) -> None:
        self.kind = kind
        self.track = track

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exception: type[BaseException] | None, value: object, traceback: object) -> None:
        """Leave the block."""

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function, a coroutine function or a generator function: each call is one block."""
        kind = self.kind
        return decorated(function, lambda: here().block(kind))

    def add_attribute(self, name: str, value: AttributeValue) -> Attribute:
        """Set an attribute of the span."""
        attribute = Attribute(name, value)
        self._tell(attribute)
        return attribute

    def add_attributes(self, attributes: Attributes) -> None:
        """Set all of a collection."""
        self._tell(Attributes.of(attributes).copied())

    def add_event(self, event: Event) -> Event:
        """Add an event."""
        if all_are(((event, Event),)):
            self._tell(event)
        else:
            report("Span.add_event", "no_event", f"an Event, not {shown(event)}")
        return event

    @property
    def name(self) -> Any:
        """The span's."""
        return self.kind.name

    @property
    def name_str(self) -> str:
        """Its text."""
        return str(getattr(self.kind.name, "value", self.kind.name))

    @property
    def active(self) -> bool:
        """Whether it is open."""
        span = Hooks.span(self.track, self.kind)
        return span is not None and span.active

    def __getattr__(self, name: str) -> Any:
        """Give what only the span itself has: its id, its parent, its events."""
        if name.startswith("_") or not hasattr(Span, name):
            raise AttributeError(f"a span has no {name!r}")
        span = Hooks.span(self.track, self.kind)
        return getattr(Span.create(self.kind.name) if span is None else span, name)

    def __reduce__(self) -> tuple[Callable[[Kind], Hot], tuple[Kind]]:
        """Be pickled and copied with what a job keeps it in: elsewhere it is the handle of that thread."""
        return _handle_of, (self.kind,)

    def _tell(self, item: Attribute | Attributes | Event) -> None:
        self.track.buffer.extend((self.kind.code + TOLD, Told(clock(), item)))

    def __repr__(self) -> str:
        return f"<{self.kind.call}>"


def _handle_of(kind: Kind) -> Hot:
    handle: Hot = here().block(kind)
    return handle


def _handle(kind: Kind, track: Track) -> Hot:
    """Make the handle of a kind on a track.

    It does not look whether the buffer is full, which would cost a tenth: an iteration does, and in a job that floods its
    buffer without any the recording thread has this one look too, from then on.
    """
    buffer, now = track.buffer, clock
    extend = buffer.extend
    entered, left, failed = kind.code + ENTER, kind.code + EXIT, kind.code + FAIL

    class Handle(Hot):
        """A short block."""

        __slots__ = ()

        def __enter__(self) -> Self:
            extend((entered, now()))
            return self

        def __exit__(self, exception: type[BaseException] | None, value: object, traceback: object) -> None:
            extend((left if exception is None else failed, now()))

    def leave(
        _handle: Hot, exception: type[BaseException] | None, _value: object, _traceback: object
    ) -> None:
        extend((left if exception is None else failed, now()))
        if len(buffer) > limit:
            Hooks.full(track, exception is not None)

    def look() -> None:
        Handle.__exit__ = leave  # type: ignore[method-assign]  # the same, and a look

    track.looks.append(look)
    return Handle(kind, track)


def _iteration(kind: Kind, track: Track) -> Hot:
    """Make the handle of an iteration: beside being a block, it is where the job's callables are asked."""
    buffer, now = track.buffer, clock
    extend = buffer.extend
    entered, left, failed = kind.code + ENTER, kind.code + EXIT, kind.code + FAIL

    class Iteration(Hot):
        """An iteration."""

        __slots__ = ()

        def __enter__(self) -> Self:
            extend((entered, now()))
            if limit < 0:
                try:
                    Hooks.full(track, False)  # the block is only entered
                except BaseException:
                    extend((failed, now()))  # its body does not run, so nobody leaves it
                    raise
            return self

        def __exit__(self, exception: type[BaseException] | None, value: object, traceback: object) -> None:
            if Hooks.values is not None:
                extend((VALUES, Hooks.values()))
            extend((left if exception is None else failed, now()))
            if len(buffer) > limit:
                Hooks.full(track, exception is not None)

    return Iteration(kind, track)


_ITERATIONS = {kinds.TRAINING_ITERATION, kinds.VALIDATION_ITERATION, kinds.TESTING_ITERATION}
_NAMES = {
    "training_iteration": kinds.TRAINING_ITERATION,
    "validation_iteration": kinds.VALIDATION_ITERATION,
    "testing_iteration": kinds.TESTING_ITERATION,
    "data_loading": kinds.DATA_LOADING,
    "model_forward": kinds.MODEL_FORWARD,
    "model_backward": kinds.MODEL_BACKWARD,
    "zero_grad": kinds.ZERO_GRAD,
    "optimizer_update": kinds.OPTIMIZER_UPDATE,
}


class _Place:
    """The track of one thread or task, and its handles as attributes.

    Attributes:
        track: The track.
        buffer: Its marks.
        extend: Of the buffer.
        opened: Rare spans that were begun here and not ended, the outermost first.
    """

    track: Track
    buffer: list[Any]
    extend: Callable[[Any], None]
    opened: list[Span]
    _anchor: Anchor
    _blocks: dict[Kind, Hot]

    def _begin(self, track: Track, anchor: Anchor) -> None:
        self._anchor = anchor
        self._blocks = {}
        self.track = track
        self.buffer = track.buffer
        self.extend = track.buffer.extend
        self.opened = []

    def block(self, kind: Kind) -> Hot:
        """Give the handle of any kind."""
        handle = self._blocks.get(kind)
        if handle is None:
            handle = (_iteration if kind in _ITERATIONS else _handle)(kind, self.track)
            self._blocks[kind] = handle
        return handle

    def say(self, code: int, value: object) -> None:
        """Put any other mark."""
        self.extend((code, value))
        if len(self.buffer) > limit >= 0:
            Hooks.full(self.track, False)  # nothing is failing


class _Thread(_Place, threading.local):
    """That of each thread; made, with its usual handles, when the thread looks at it first."""

    def __init__(self) -> None:
        anchor = Anchor()
        self._begin(TRACKS.make(anchor), anchor)
        for name, kind in _NAMES.items():
            setattr(self, name, self.block(kind))


class _TaskPlace(_Place):
    """That of an asyncio task."""

    def __init__(self, parent: Track) -> None:
        anchor = Anchor()
        self._begin(TRACKS.make(anchor, parent), anchor)

    def __getattr__(self, name: str) -> Hot:
        """Make a handle at its first use: a job may have thousands of tasks."""
        if name not in _NAMES:
            raise AttributeError(name)
        return self.block(_NAMES[name])


class _First:
    """That of a process which has not marked yet."""

    def __getattr__(self, name: str) -> Any:
        """Begin with the first mark."""
        switch(on=True)
        return getattr(here(), name)


class _Task:
    """That of the present asyncio task, or of the thread where none runs; replaces `_Thread` once a task marks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_of_task(), name)


class _Inert(_Place):
    """That of a process in which nothing is recorded."""

    def __init__(self) -> None:
        anchor = Anchor()
        self._begin(Track(0, anchor), anchor)
        self.extend = self._drop
        for name, kind in _NAMES.items():
            setattr(self, name, self.block(kind))

    def block(self, kind: Kind) -> Hot:
        """Give a handle that does nothing."""
        return self._blocks.setdefault(kind, _Nothing(kind, self.track))

    @staticmethod
    def _drop(_items: object) -> None:
        """Forget a mark."""


class _Nothing(Hot):
    """A block of which nothing is told."""

    __slots__ = ()

    def _tell(self, item: Attribute | Attributes | Event) -> None:
        """Forget it."""


_threads: Any = None
_TASKS: Any = _Task()
_INERT: Any = _Inert()
_place: Any = _First()
_running_loop: Callable[[], object] | None = None
_OF_TASK: ContextVar[tuple[weakref.ref[Any], _Place] | None] = ContextVar("exporter-training", default=None)


def here() -> Any:
    """Give the track and the handles of the calling thread or task."""
    look_for_tasks()
    return _place


def look_for_asyncio() -> None:
    """See whether the job has loaded asyncio by now; a few times a second, and at every rare call."""
    global _running_loop  # noqa: PLW0603  # read on the hot path, where an attribute would cost
    if _running_loop is None:
        _running_loop = getattr(sys.modules.get("asyncio"), "_get_running_loop", None)


def current_span_id() -> str | None:
    """Give the id of the innermost rare span that is open in the calling thread or task; None for none."""
    opened = _opened()
    return str(opened[-1].id) if opened else None


def forget_open() -> None:
    """In a forked child: what is open is the parent's."""
    opened = _opened()
    if opened:
        opened.clear()


def _opened() -> list[Span] | None:
    place = here()
    if place is _TASKS:
        place = _of_task()
    # Of a process that has not marked, nothing is made for the question.
    return place.__dict__.get("opened")  # type: ignore[no-any-return]  # see `_Place`


def look_for_tasks() -> None:
    """See whether the caller is an asyncio task, and if so have tasks told apart from now on."""
    global _place  # noqa: PLW0603  # read on the hot path, where an attribute would cost
    look_for_asyncio()
    if _running_loop is not None and _place is not _INERT and _running_loop() is not None:
        switch(on=True)
        _place = _TASKS


def switch(*, on: bool) -> None:
    """Record from now on, or nothing any more."""
    global _place, _threads  # noqa: PLW0603  # read on the hot path, where an attribute would cost
    if on and _threads is None:
        _threads = _Thread()
    _place = _threads if on else _INERT


def is_on() -> bool:
    """Whether anything is recorded."""
    return _place is not _INERT


def raise_misuse(*, on: bool) -> None:
    """Have every call looked at as it is made."""
    global limit  # noqa: PLW0603  # read on the hot path, where an attribute would cost
    limit = -1 if on else FULL_ITEMS


def _of_task() -> _Place:
    task = None
    if _running_loop is not None and _running_loop() is not None:
        task = sys.modules["asyncio"].current_task()
    if task is None:
        return _threads  # type: ignore[no-any-return]  # a thread's is one too
    known = _OF_TASK.get()
    if known is None or known[0]() is not task:
        parent = _threads.track if known is None else known[1].track
        known = (weakref.ref(task), _TaskPlace(parent))
        _OF_TASK.set(known)
    return known[1]


# What the job calls -------------------------------------------------------------------------------------------


def training_iteration() -> Hot:
    """Make a block of one training iteration: one step of the optimizer, all its micro-batches included."""
    if _running_loop is not None and _running_loop() is not None:
        look_for_tasks()
    return _place.training_iteration  # type: ignore[no-any-return]  # a handle


def validation_iteration() -> Hot:
    """Make a block of one batch of a validation."""
    return _place.validation_iteration  # type: ignore[no-any-return]  # a handle


def testing_iteration() -> Hot:
    """Make a block of one batch of a test."""
    return _place.testing_iteration  # type: ignore[no-any-return]  # a handle


def data_loading() -> Hot:
    """Make a block in which the training waits for data."""
    return _place.data_loading  # type: ignore[no-any-return]  # a handle


def model_forward() -> Hot:
    """Make a block of a forward pass."""
    return _place.model_forward  # type: ignore[no-any-return]  # a handle


def model_backward() -> Hot:
    """Make a block of a backward pass."""
    return _place.model_backward  # type: ignore[no-any-return]  # a handle


def zero_grad() -> Hot:
    """Make a block in which gradients are set to zero."""
    return _place.zero_grad  # type: ignore[no-any-return]  # a handle


def optimizer_update() -> Hot:
    """Make a block of an optimizer's step."""
    return _place.optimizer_update  # type: ignore[no-any-return]  # a handle


def phase(name: str) -> Hot:
    """Make a block of a phase, by any name of `training_phase_seconds_total`; by another it is a span of that name."""
    return here().block(kinds.kind_named(name, phase=True))  # type: ignore[no-any-return]  # a handle
