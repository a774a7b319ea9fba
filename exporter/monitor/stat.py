"""torch.monitor's Stat, with windows that close by the clock and samples that reach Prometheus.

`add` takes no lock. The thread that fills a chunk, or finds the end of a window, aggregates the samples.
"""

from __future__ import annotations

import datetime as dt
import enum
import operator
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import floor, inf, isfinite
from time import monotonic
from typing import Any, NoReturn, SupportsFloat, SupportsIndex

from exporter.errors import DefinitionError
from exporter.monitor.events import STAT_EVENT, Event, check_name, log_event
from exporter.recording.definition import MIN_WINDOW_SECONDS
from exporter.recording.events import EVENTS
from exporter.recording.limits import MAX_NAME_CHARACTERS
from exporter.recording.notices import log_once
from exporter.recording.recorder import RECORDER
from exporter.recording.stat import REGISTRY
from exporter.recording.stat import Stat as RecordedStat
from exporter.recording.values import Aggregation as RecordedAggregation

CHUNK_SAMPLES = 4096
"""Samples between two aggregations."""
_MAX_WINDOW_SAMPLES = 2**63 - 1
_ROOM = MAX_NAME_CHARACTERS - 40
"""Characters of a name; families append words."""


class Aggregation(enum.Enum):
    """These are types of aggregations that can be used to accumulate stats."""

    VALUE = 1
    MEAN = 2
    COUNT = 3
    SUM = 4
    MAX = 5
    MIN = 6

    def __index__(self) -> int:
        return self.value


def _check_aggregations(aggregations: Iterable[object]) -> tuple[Aggregation, ...]:
    """Return the members of Aggregation, also from torch's enumeration, without duplicates, in the order of the members."""
    allowed = ", ".join(f"Aggregation.{each.name}" for each in Aggregation)
    if isinstance(aggregations, Aggregation | str) or not isinstance(aggregations, Iterable):
        raise TypeError(f"aggregations must be a collection of {allowed}, not {aggregations!r}")
    found: set[Aggregation] = set()
    for each in aggregations:
        name = getattr(each, "name", "") if type(each).__name__ == "Aggregation" else ""
        if name not in Aggregation.__members__:
            raise TypeError(f"unknown aggregation {each!r}; allowed: {allowed}")
        found.add(Aggregation[name])
    return tuple(each for each in Aggregation if each in found)


class Stat:
    """Stat computes summary statistics over fixed intervals, and logs them as an event at the end of an interval.

    The windows are those of torch: aligned to multiples of the length (a timedelta, or seconds as a float) on the machine's
    monotonic clock, in milliseconds. With `max_samples` a window closes inside the `add` that fills the window, and later
    samples of the same window are `discarded`. Without a `window_size` (None, which torch refuses) the next window starts at
    once. Samples are also recorded in the `exporter.Stat` of this name (invalid characters become `_`), which all Stats of the
    name share.

    Raises:
        TypeError: An argument is of the wrong type (an int is an invalid window_size, as in torch).
        ValueError: The window is not finite or shorter than a millisecond, or has neither a time nor a positive `max_samples`.
    """

    _ends: float  # end of the open window on the monotonic clock
    _full: bool  # True after a close by `max_samples`
    # Changing attributes, then constant attributes; further attributes are refused, as in torch.
    __slots__ = (
        *("_closed", "_count", "_ends", "_full", "_high", "_last", "_low", "_room", "_sum", "discarded"),
        *("_aggregations", "_append", "_lock", "_max_samples", "_name", "_record", "_values", "_window_ms"),
        "__weakref__",
    )

    def __init__(
        self,
        name: str,
        aggregations: Iterable[Aggregation],
        window_size: dt.timedelta | float | None,
        max_samples: int = _MAX_WINDOW_SAMPLES,
    ) -> None:
        self._name = check_name(name, "a Stat")
        self._aggregations = _check_aggregations(aggregations)
        self._max_samples = operator.index(max_samples)
        if self._max_samples > _MAX_WINDOW_SAMPLES:
            raise TypeError("max_samples must fit into 64 bits")
        self._window_ms = _milliseconds(
            window_size, self._max_samples
        )  # 0 for windows without an end in time
        self._values: list[float] = []
        self._append = self._values.append  # constant: a late sample belongs to the next window
        self.discarded = 0
        self._closed: dict[Aggregation, float] = dict.fromkeys(self._aggregations, 0.0)
        self._restart()
        self._record = _recorded(self._name, self._aggregations, self._window_ms, self._max_samples)
        EVENTS.kind(STAT_EVENT, "info")
        _live[id(self)] = weakref.ref(self)

    @property
    def name(self) -> str:
        """The name of the stat that was set during construction."""
        return self._name

    @property
    def count(self) -> int:
        """Number of samples in the open window; 0 after the end of the window or a close by `max_samples`."""
        self._close_if_due()
        return 0 if self._full else self._count + len(self._values)

    def get(self) -> dict[Aggregation, float]:
        """Return the values of the last closed window; 0.0 each before the first window."""
        self._close_if_due()
        return dict(self._closed)

    def add(self, v: SupportsFloat | SupportsIndex) -> None:
        """Add a float, int or bool, a scalar of numpy, or a tensor of one element (waiting for the tensor's value).

        Raises TypeError for other values and numbers beyond the range of a float.
        """
        if type(v) is not float:
            v = _number(v)
        if monotonic() >= self._ends or len(self._values) >= self._room:
            self._close_or_add(v)
        else:
            self._append(v)
            self._record(v)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Stat cannot be copied or pickled: its samples belong to this process")

    def __del__(self) -> None:
        with suppress(Exception):  # after a failed construction or during the exit of the interpreter
            _live.pop(id(self), None)
            self._close_if_due(at_end=True)

    def _close_or_add(self, v: float | None = None, *, at_end: bool = False) -> None:
        """Close the window at its end, or at the end of the Stat or the process; then add a sample."""
        if not self._lock.acquire(blocking=False):
            # Another thread, or this thread below a signal handler, is closing the window.
            if v is not None:
                self._append(v)
                self._record(v)
            return
        closed: list[dict[str, float]] = []
        try:
            now = monotonic()
            if at_end or now >= self._ends:
                self._aggregate()
                closed += self._close()
                self._begin(now)
            if v is not None and self._full:
                self.discarded += 1
            elif v is not None:
                self._append(v)
                self._record(v)
                self._aggregate()
                if self._count >= self._max_samples:
                    closed += self._close()
                    if self._window_ms:
                        self._full, self._room = True, -1
                    else:
                        self._make_room()
        finally:
            self._lock.release()
            for data in closed:
                log_event(Event(STAT_EVENT, dt.datetime.now(), data))  # noqa: DTZ005  # local and naive, as torch's own

    def _close_if_due(self, *, at_end: bool = False) -> None:
        if (at_end or monotonic() >= self._ends) and (self._values or self._count or self._full):
            self._close_or_add(at_end=at_end)

    def _restart(self) -> None:
        """Start an empty window: in a forked child the open window is the parent's."""
        self._lock = threading.Lock()
        self._values.clear()
        self._empty()
        self._begin(monotonic())

    def _begin(self, now: float) -> None:
        self._full = False
        length = self._window_ms
        self._ends = (floor(now * 1000.0 / length) + 1) * length / 1000.0 if length else inf
        self._make_room()

    def _make_room(self) -> None:
        # The sample that fills the window calls `_close_or_add`.
        self._room = min(CHUNK_SAMPLES, max(self._max_samples - self._count, 1)) - 1

    def _empty(self) -> None:
        self._count = 0
        self._sum = self._low = self._high = self._last = 0.0

    def _aggregate(self) -> None:
        """Aggregate the waiting samples, or discard the samples of a full window."""
        batch = self._values[: len(self._values)]
        del self._values[: len(batch)]
        if self._full:
            self.discarded += len(batch)
        elif batch:
            # In order, as in torch: a NaN in first place invalidates minimum and maximum there too.
            self._low = min([self._low, *batch]) if self._count else min(batch)
            self._high = max([self._high, *batch]) if self._count else max(batch)
            self._sum = sum(batch, self._sum)
            self._last = batch[-1]
            self._count += len(batch)
            self._make_room()

    def _close(self) -> list[dict[str, float]]:
        """Close the open window; returns the data of events to log, none for an empty window."""
        count = self._count
        if not count:
            return []
        values = {
            Aggregation.VALUE: self._last,
            Aggregation.MEAN: self._sum / count,
            Aggregation.COUNT: float(count),
            Aggregation.SUM: self._sum,
            Aggregation.MAX: self._high,
            Aggregation.MIN: self._low,
        }
        self._closed = {each: values[each] for each in self._aggregations}
        self._empty()
        return [{f"{self._name}.{each.name.lower()}": value for each, value in self._closed.items()}]


_live: dict[int, weakref.ref[Stat]] = {}


class _Clockwork:
    """Periodic task that closes windows."""

    def tick(self) -> None:
        for stat in _living():
            stat._close_if_due()  # noqa: SLF001  # of this file

    def finish(self) -> None:
        for stat in _living():
            stat._close_if_due(at_end=True)  # noqa: SLF001  # of this file

    def after_fork(self) -> None:
        for stat in _living():
            stat._restart()  # noqa: SLF001  # of this file


def _living() -> list[Stat]:
    return [stat for reference in list(_live.values()) if (stat := reference()) is not None]


RECORDER.attach(_Clockwork())


def _number(v: Any) -> float:
    if isinstance(v, str | bytes | bytearray | memoryview):
        raise TypeError(f"a Stat takes numbers, not {type(v).__name__}")
    try:
        return float(v)
    except Exception as error:  # anybody's own __float__
        raise TypeError(f"a Stat takes one number at a time, not {type(v).__name__}: {error}") from error


def _milliseconds(window_size: object, max_samples: int) -> int:
    if window_size is None and max_samples != _MAX_WINDOW_SAMPLES:
        if max_samples < 1:
            raise ValueError(f"a window without window_size needs max_samples above 0, not {max_samples}")
        return 0
    if isinstance(window_size, dt.timedelta):
        whole = window_size // dt.timedelta(milliseconds=1)
    elif isinstance(window_size, float):
        whole = int(window_size * 1000.0) if isfinite(window_size) else 0
    else:
        found = type(window_size).__name__
        raise TypeError(f"window_size must be a timedelta, or seconds as a float, not {found}")
    if whole < 1:
        raise ValueError(f"window_size must be finite and at least a millisecond, not {window_size!r}")
    return min(whole, _MAX_WINDOW_SAMPLES)


def _recorded(
    name: str, aggregations: Iterable[Aggregation], window_ms: int, max_samples: int
) -> Callable[[float], None]:
    """Return the function that records samples for Prometheus; one without effect if the name is invalid for a family."""
    own, text = stat_name(name), f"torch.monitor Stat {stat_name(name)}."
    kinds = [RecordedAggregation[each.name] for each in aggregations]
    seconds = min(max(window_ms / 1000.0, MIN_WINDOW_SECONDS), 86_400.0) if window_ms else None
    samples = None if window_ms else max_samples
    try:
        return RecordedStat(own, kinds, window_seconds=seconds, window_samples=samples, help=text).add
    except DefinitionError as error:
        known = REGISTRY.find(own)
        if known is not None:
            return known.add  # an earlier definition of the same name, whose families are shared
        log_once(f"monitor {own}", f"the torch.monitor Stat {name!r} is not published: {error}")
        return deque[float](maxlen=0).append


def stat_name(name: str) -> str:
    """Return a name of words of letters, digits and `_`, joined by dots; a valid name is unchanged."""
    words = re.sub(r"[^0-9A-Za-z_.]", "_", name[:_ROOM]).split(".")
    joined = ".".join(word for word in words if word) or "unnamed"
    return joined if joined[0].isalpha() else f"stat_{joined}"
