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
        self.waits = metric("gauge", "training.torch.waits", labels=labels)
        self.longest = metric("gauge", "training.torch.wait_longest", unit="seconds", labels=labels)
        self.forget()

    def forget(self) -> None:
        """In a forked child: what waits is the parent's."""
        self.running: set[object] = set()
        self.most = 0.0


class _WaitCounterTracker:
    """One wait: what `guard` gives, for one `with` block."""

    def __init__(self, series: _Series) -> None:
        self._series = series

    def __enter__(self) -> None:
        series = self._series
        series.calls(1)
        series.running.add(self)
        series.waits(len(series.running))
        self._began = perf_counter()

    def __exit__(self, *exception: object) -> None:
        seconds, series = perf_counter() - self._began, self._series
        series.running.discard(self)
        series.waits(len(series.running))
        series.seconds(seconds)
        if seconds > series.most:
            series.most = seconds
            series.longest(seconds)


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
        key = clean_text(key) or OTHER
        if key not in _known and len(_known) >= MOST_KEYS:
            key = OTHER
        self._series = _known.get(key) or _known.setdefault(key, _Series(key))

    def guard(self) -> AbstractContextManager[None]:
        """Count a `with` block; what it raises is raised on."""
        return _WaitCounterTracker(self._series)


_known: dict[str, _Series] = {}


def _forget() -> None:
    for series in _known.values():
        series.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
