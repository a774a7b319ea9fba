"""torch.monitor's Stat, with windows that close by the clock and samples that reach Prometheus.

`add` does not wait for a lock. The thread that fills a chunk of samples, or notices the end of a window, aggregates the samples.
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
from exporter.recording.limits import MAX_STAT_NAME_CHARACTERS
from exporter.recording.notices import log_once
from exporter.recording.recorder import RECORDER
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.recording.stat import REGISTRY
from exporter.recording.stat import Stat as RecordedStat
from exporter.recording.values import Aggregation as RecordedAggregation

CHUNK_SAMPLES = 4096
"""Maximum number of samples between two aggregations."""
_MAX_INT64 = 2**63 - 1
"""Default and limit of `max_samples`, and limit of the length of a window in milliseconds, as in torch."""
_MAX_BASE_NAME_CHARACTERS = MAX_STAT_NAME_CHARACTERS - 40
"""Maximum length of the recorded part of a name, which leaves room for the prefix `stat_` and for the suffixes of families."""


class Aggregation(enum.Enum):
    """Aggregations of a Stat, as in torch."""

    VALUE = 1
    MEAN = 2
    COUNT = 3
    SUM = 4
    MAX = 5
    MIN = 6

    def __index__(self) -> int:
        return self.value


def _check_aggregations(aggregations: Iterable[object]) -> tuple[Aggregation, ...]:
    """Return distinct members of `Aggregation` in its order, for members of this enumeration or of torch's.

    Raises TypeError for other values.
    """
    allowed = ", ".join(f"Aggregation.{member.name}" for member in Aggregation)
    if isinstance(aggregations, Aggregation | str) or not isinstance(aggregations, Iterable):
        raise TypeError(f"aggregations must be a collection of {allowed}, not {aggregations!r}")
    members: set[Aggregation] = set()
    for member in aggregations:
        name = getattr(member, "name", "") if type(member).__name__ == "Aggregation" else ""
        if name not in Aggregation.__members__:
            raise TypeError(f"unknown aggregation {member!r}; allowed: {allowed}")
        members.add(Aggregation[name])
    return tuple(member for member in Aggregation if member in members)


class Stat:
    """Summary statistics over fixed intervals, logged as an event at the end of each interval.

    As in torch, windows end at multiples of their length (a timedelta, or seconds as a float) on the monotonic clock, in
    milliseconds. With `max_samples`, a window closes within the `add` that fills it, and later samples of the same window are
    `discarded`. Without a `window_size` (None, which torch rejects), the next window starts immediately. Samples are also recorded
    in the `exporter.Stat` of the same name (invalid characters become `_`), which all Stats of this name share.

    Raises:
        TypeError: An argument is of the wrong type. An int is an invalid `window_size`, as in torch.
        ValueError: The window is not finite or is shorter than a millisecond, or there is neither a window nor a positive
            `max_samples`.
    """

    _window_end: float  # end of the open window on the monotonic clock; infinite for windows without a length
    _is_full: bool  # True after a close by `max_samples`, until the end of the window
    _chunk_room: int  # number of waiting samples from which `add` calls `_close_or_add`; -1 for a full window
    # Attributes that change, then constant attributes. Other attributes cannot be assigned, as in torch.
    __slots__ = (
        *(
            "_closed_values",
            "_count",
            "_window_end",
            "_is_full",
            "_maximum",
            "_last",
            "_minimum",
            "_chunk_room",
            "_sum",
            "discarded",
        ),
        *("_aggregations", "_append", "_lock", "_max_samples", "_name", "_record", "_values", "_window_ms"),
        "__weakref__",
    )

    def __init__(
        self,
        name: str,
        aggregations: Iterable[Aggregation],
        window_size: dt.timedelta | float | None,
        max_samples: int = _MAX_INT64,
    ) -> None:
        self._name = check_name(name, "a Stat")
        self._aggregations = _check_aggregations(aggregations)
        self._max_samples = operator.index(max_samples)
        if self._max_samples > _MAX_INT64:
            raise TypeError("max_samples must fit into 64 bits")
        self._window_ms = _milliseconds(window_size, self._max_samples)  # 0 for windows without a length
        self._values: list[float] = []
        # Bound once, because `_aggregate` removes samples from this list and never replaces the list: a concurrent sample stays.
        self._append = self._values.append
        self.discarded = 0
        self._closed_values: dict[Aggregation, float] = dict.fromkeys(self._aggregations, 0.0)
        self._restart()
        self._record = _recording_function(self._name, self._aggregations, self._window_ms, self._max_samples)
        EVENTS.kind(STAT_EVENT, "info")
        _STATS[id(self)] = weakref.ref(self)

    @property
    def name(self) -> str:
        """Name of the Stat."""
        return self._name

    @property
    def count(self) -> int:
        """Number of samples in the open window; 0 after the end of the window or a close by `max_samples`."""
        self._close_if_due()
        return 0 if self._is_full else self._count + len(self._values)

    def get(self) -> dict[Aggregation, float]:
        """Return the values of the last closed window, or zeros before the first window has closed."""
        self._close_if_due()
        return dict(self._closed_values)

    def add(self, v: SupportsFloat | SupportsIndex) -> None:
        """Add a float, int or bool, a scalar of numpy, or a tensor of one element (which waits for the value of the tensor).

        Raises TypeError for other values, and for numbers outside the range of a float.
        """
        if type(v) is not float:
            v = _number(v)
        if monotonic() >= self._window_end or len(self._values) >= self._chunk_room:
            self._close_or_add(v)
        else:
            self._append(v)
            self._record(v)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Stat cannot be copied or pickled: its samples belong to this process")

    def __del__(self) -> None:
        with suppress(Exception):  # after a failed construction or during the exit of the interpreter
            _STATS.pop(id(self), None)
            self._close_if_due(at_end=True)

    def _close_or_add(self, v: float | None = None, *, at_end: bool = False) -> None:
        """Close an ended window, or any window *at_end* (of the Stat or the process), then add a sample, and log the closed windows.

        A sample that fills the window closes it too. If another thread holds the lock, the sample is only added, and that thread or
        the next call aggregates the sample.
        """
        if not self._lock.acquire(blocking=False):
            # A different thread is closing the window, or a signal handler has interrupted this thread during the close.
            if v is not None:
                self._append(v)
                self._record(v)
            return
        closed_windows: list[dict[str, float]] = []
        try:
            now = monotonic()
            if at_end or now >= self._window_end:
                self._aggregate()
                closed_windows += self._close()
                self._begin_window(now)
            if v is not None and self._is_full:
                self.discarded += 1
            elif v is not None:
                self._append(v)
                self._record(v)
                self._aggregate()
                if self._count >= self._max_samples:
                    closed_windows += self._close()
                    if self._window_ms:
                        self._is_full, self._chunk_room = True, -1
                    else:
                        self._reset_chunk()
        finally:
            self._lock.release()
            for data in closed_windows:
                log_event(Event(STAT_EVENT, dt.datetime.now(), data))  # noqa: DTZ005  # local and naive, as in torch

    def _close_if_due(self, *, at_end: bool = False) -> None:
        """Close the window if the window has ended or *at_end*. A window without samples stays open, because it logs no event."""
        if (at_end or monotonic() >= self._window_end) and (self._values or self._count or self._is_full):
            self._close_or_add(at_end=at_end)

    def _restart(self) -> None:
        """Start an empty window, also in a forked child, where the open window belongs to the parent."""
        self._lock = threading.Lock()
        self._values.clear()
        self._clear_aggregates()
        self._begin_window(monotonic())

    def _begin_window(self, now: float) -> None:
        """Open the window that contains a monotonic time."""
        self._is_full = False
        length = self._window_ms
        self._window_end = (floor(now * 1000.0 / length) + 1) * length / 1000.0 if length else inf
        self._reset_chunk()

    def _reset_chunk(self) -> None:
        """Set the number of samples that may wait until the next aggregation.

        The number is one less than the number that fills the window or the chunk, so that `add` calls `_close_or_add` for the last
        sample.
        """
        self._chunk_room = min(CHUNK_SAMPLES, max(self._max_samples - self._count, 1)) - 1

    def _clear_aggregates(self) -> None:
        """Set the aggregates to those of an empty window."""
        self._count = 0
        self._sum = self._minimum = self._maximum = self._last = 0.0

    def _aggregate(self) -> None:
        """Aggregate the waiting samples, or discard the samples of a full window."""
        batch = self._values[: len(self._values)]
        del self._values[: len(batch)]
        if self._is_full:
            self.discarded += len(batch)
        elif batch:
            # In the order of the samples, because as in torch a leading NaN makes the minimum and the maximum NaN.
            self._minimum = min([self._minimum, *batch]) if self._count else min(batch)
            self._maximum = max([self._maximum, *batch]) if self._count else max(batch)
            self._sum = sum(batch, self._sum)
            self._last = batch[-1]
            self._count += len(batch)
            self._reset_chunk()

    def _close(self) -> list[dict[str, float]]:
        """Close the open window. Return a list with the data of the event to log, which is empty for an empty window."""
        count = self._count
        if not count:
            return []
        values = {
            Aggregation.VALUE: self._last,
            Aggregation.MEAN: self._sum / count,
            Aggregation.COUNT: float(count),
            Aggregation.SUM: self._sum,
            Aggregation.MAX: self._maximum,
            Aggregation.MIN: self._minimum,
        }
        self._closed_values = {aggregation: values[aggregation] for aggregation in self._aggregations}
        self._clear_aggregates()
        return [
            {
                f"{self._name}.{aggregation.name.lower()}": value
                for aggregation, value in self._closed_values.items()
            }
        ]


_STATS: dict[int, weakref.ref[Stat]] = {}
"""All existing Stats, by `id()`."""


class _WindowTask:
    """Periodic task that closes windows on time if no sample is added."""

    def tick(self) -> None:
        """Close the windows that have ended."""
        for stat in _existing_stats():
            stat._close_if_due()  # noqa: SLF001  # a class of this file

    def finish(self) -> None:
        """Close the open windows at the exit of the process."""
        for stat in _existing_stats():
            stat._close_if_due(at_end=True)  # noqa: SLF001  # a class of this file

    def after_fork(self) -> None:
        """Start empty windows in a forked child."""
        for stat in _existing_stats():
            stat._restart()  # noqa: SLF001  # a class of this file


def _existing_stats() -> list[Stat]:
    return [stat for reference in list(_STATS.values()) if (stat := reference()) is not None]


RECORDER.attach(_WindowTask())


def _number(v: Any) -> float:
    """Return a sample as a float. Raises TypeError for other values than numbers, and for the errors of their conversion."""
    if isinstance(v, str | bytes | bytearray | memoryview):
        raise TypeError(f"a Stat takes numbers, not {type(v).__name__}")
    try:
        return float(v)
    except Exception as error:  # `__float__` of any class
        if is_from_signal_handler(error):
            raise
        raise TypeError(f"a Stat takes a single number, not {type(v).__name__}: {error}") from error


def _milliseconds(window_size: object, max_samples: int) -> int:
    """Return the length of the windows, or 0 for windows without a length. Raises TypeError or ValueError."""
    if window_size is None and max_samples != _MAX_INT64:
        if max_samples < 1:
            raise ValueError(f"without window_size, max_samples must be above 0, not {max_samples}")
        return 0
    if isinstance(window_size, dt.timedelta):
        milliseconds = window_size // dt.timedelta(milliseconds=1)
    elif isinstance(window_size, float):
        # Limited before the conversion, because a product above the range of a float is infinite.
        float_milliseconds = min(max(window_size * 1000.0, 0.0), _MAX_INT64)
        milliseconds = int(float_milliseconds) if isfinite(window_size) else 0
    else:
        type_name = type(window_size).__name__
        raise TypeError(f"window_size must be a timedelta, or seconds as a float, not {type_name}")
    if milliseconds < 1:
        raise ValueError(f"window_size must be finite and at least a millisecond, not {window_size!r}")
    return min(milliseconds, _MAX_INT64)


def _recording_function(
    name: str, aggregations: Iterable[Aggregation], window_ms: int, max_samples: int
) -> Callable[[float], None]:
    """Return the function that records samples for Prometheus.

    If the name cannot be the name of a family, the function has no effect, which is logged once. If a Stat of this name has a different
    definition, the function adds to that Stat.
    """
    recorded_name = recorded_stat_name(name)
    try:
        return RecordedStat(
            recorded_name,
            [RecordedAggregation[aggregation.name] for aggregation in aggregations],
            window_seconds=min(max(window_ms / 1000.0, MIN_WINDOW_SECONDS), 86_400.0) if window_ms else None,
            window_samples=None if window_ms else max_samples,
            help=f"torch.monitor Stat {recorded_name}.",
        ).add
    except DefinitionError as error:
        existing = REGISTRY.find(recorded_name)
        if existing is not None:
            return existing.add  # a Stat of the same name and a different definition; both share the families
        log_once(f"monitor {recorded_name}", f"the torch.monitor Stat {name!r} is not published: {error}")
        return deque[float](maxlen=0).append


def recorded_stat_name(name: str) -> str:
    """Return a valid name of a Stat: parts of letters, digits and `_`, joined by dots.

    A valid name of at most `_MAX_BASE_NAME_CHARACTERS` is returned unchanged. Longer names are cut.
    """
    parts = re.sub(r"[^0-9A-Za-z_.]", "_", name[:_MAX_BASE_NAME_CHARACTERS]).split(".")
    valid_name = ".".join(part for part in parts if part) or "unnamed"
    return valid_name if valid_name[0].isalpha() else f"stat_{valid_name}"
