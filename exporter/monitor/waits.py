"""_WaitCounter: torch.monitor's, whose counters are those that the bridge reads from torch itself.

Used in the training process, on the threads that wait; without a lock. What it counts is in the families
`training_torch_wait…` under its key.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from time import perf_counter

from exporter.recording.identity import clean_text
from exporter.recording.stat import metric

MOST_KEYS = 200
"""Keys with series of their own; the rest is `other`."""
OTHER = "other"


class _Series:
    """The families' series of one key."""

    def __init__(self, key: str) -> None:
        labels = {"key": key}
        self.calls = metric("counter", "training.torch.wait_calls", labels=labels)
        self.seconds = metric("counter", "training.torch.wait", unit="seconds", labels=labels)
        self._waits = metric("gauge", "training.torch.waits", labels=labels)
        self._longest = metric("gauge", "training.torch.wait_longest", unit="seconds", labels=labels)
        self._running: set[object] = set()
        self._most = 0.0

    def begin(self, wait: object) -> None:
        self.calls(1)
        self._running.add(wait)
        self._waits(len(self._running))

    def end(self, wait: object, seconds: float) -> None:
        self._running.discard(wait)
        self._waits(len(self._running))
        self.seconds(seconds)
        if seconds > self._most:
            self._most = seconds
            self._longest(seconds)

    def forget(self) -> None:
        self._running.clear()
        self._most = 0.0


class _WaitCounterTracker:
    """One wait: what `guard` gives, for one `with` block."""

    __slots__ = ("_began", "_series")

    def __init__(self, series: _Series) -> None:
        self._series = series
        self._began = 0.0

    def __enter__(self) -> None:
        self._series.begin(self)
        self._began = perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._series.end(self, perf_counter() - self._began)


class _WaitCounter:
    """Counts waits and the time that they took.

    Args:
        key: What is waited for: `my.wait`; the label `key`.

    Raises:
        TypeError: The key is no text.
    """

    __slots__ = ("_series",)

    def __init__(self, key: str) -> None:
        if not isinstance(key, str):
            raise TypeError(f"the key of a wait counter must be str, not {type(key).__name__}")
        self._series = _series_of(clean_text(key) or OTHER)

    def guard(self) -> AbstractContextManager[None]:
        """Count a `with` block; what it raises is raised on."""
        return _WaitCounterTracker(self._series)


_known: dict[str, _Series] = {}


def _forget() -> None:
    """In a forked child: what waits is the parent's."""
    for series in _known.values():
        series.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _series_of(key: str) -> _Series:
    if key not in _known and len(_known) >= MOST_KEYS:
        key = OTHER
    found = _known.get(key)
    if found is None:
        found = _known.setdefault(key, _Series(key))
    return found
