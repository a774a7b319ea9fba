"""_WaitCounter: torch.monitor's; the bridge reads torch's own.

Used in the training process, on the threads that wait; without a lock. Calls are counted at their begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from exporter.recording.identity import clean_text
from exporter.recording.stat import metric

MOST_KEYS = 200
"""Keys with series of their own; the rest is `other`."""
OTHER = "other"


class _WaitCounterTracker:
    """The series of one key."""

    def __init__(self, key: str) -> None:
        labels = {"key": key}
        self.calls = metric("counter", "training.torch.wait_calls", labels=labels)
        self.seconds = metric("counter", "training.torch.wait", unit="seconds", labels=labels)


class _WaitCounter:
    """Counts waits for something, the label `key`, and the time that they took. Raises TypeError: That is no text."""

    __slots__ = ("_tracker",)

    def __init__(self, key: str) -> None:
        if not isinstance(key, str):
            raise TypeError(f"the key of a wait counter must be str, not {type(key).__name__}")
        key = clean_text(key) or OTHER
        if key not in _known and len(_known) >= MOST_KEYS:
            key = OTHER
        self._tracker = _known.get(key) or _known.setdefault(key, _WaitCounterTracker(key))

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Count a `with` block; what it raises is raised on."""
        began = perf_counter()
        self._tracker.calls(1)
        try:
            yield
        finally:
            self._tracker.seconds(perf_counter() - began)


_known: dict[str, _WaitCounterTracker] = {}
