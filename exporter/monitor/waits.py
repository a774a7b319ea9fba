"""_WaitCounter: torch.monitor's, whose counters are those that the bridge reads from torch itself.

Used in the training process, on the threads that wait; without a lock. What it counts is in the families
`training_torch_wait…` under its key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from exporter.recording.identity import clean_text
from exporter.recording.stat import metric

MOST_KEYS = 200
"""Keys with series of their own; the rest is `other`."""
OTHER = "other"


class _WaitCounterTracker:
    """The series of one key: what `_WaitCounter.guard` counts in."""

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

    @contextmanager
    def wait(self) -> Iterator[None]:
        wait, began = object(), perf_counter()
        self.calls(1)
        self.running.add(wait)
        self.waits(len(self.running))
        try:
            yield
        finally:
            seconds = perf_counter() - began
            self.running.discard(wait)
            self.waits(len(self.running))
            self.seconds(seconds)
            self.most = max(self.most, seconds)
            self.longest(self.most)


class _WaitCounter:
    """Counts waits and the time that they took.

    Args:
        key: What is waited for: `my.wait`; the label `key`.

    Raises:
        TypeError: The key is no text.
    """

    __slots__ = ("guard",)

    def __init__(self, key: str) -> None:
        if not isinstance(key, str):
            raise TypeError(f"the key of a wait counter must be str, not {type(key).__name__}")
        key = clean_text(key) or OTHER
        if key not in _known and len(_known) >= MOST_KEYS:
            key = OTHER
        series = _known.get(key) or _known.setdefault(key, _WaitCounterTracker(key))
        self.guard = series.wait  # counts a `with` block; what it raises is raised on


_known: dict[str, _WaitCounterTracker] = {}


def _forget() -> None:
    for series in _known.values():
        series.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
