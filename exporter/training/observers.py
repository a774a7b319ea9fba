"""Observers of a process's training, and the kinds of blocks whose spans they request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from exporter.errors import OneLoggerError
from exporter.recording.notices import log_once
from exporter.recording.recorder import RECORDER
from exporter.training import kinds
from exporter.training.kinds import BlockKind
from exporter.training.misuse import report
from exporter.training.observer import TrainingObserver

_HOT = (*kinds.ITERATIONS, *kinds.STEPS, *kinds.SHORT)


class Observers:
    """Observers of blocks, and event handlers that request spans.

    Args:
        on_change: Called after a change of the observed kinds.

    Attributes:
        kinds: Observed hot kinds of blocks; all other kinds are always observed.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._observers: tuple[TrainingObserver, ...] = ()
        self._logs_spans = False
        self.kinds: frozenset[BlockKind] = frozenset()

    def add(self, observer: TrainingObserver) -> None:
        """Add an observer, or update the hot kinds of a known observer."""
        self._observers = (*(known for known in self._observers if known is not observer), observer)
        self._update()

    def remove(self, observer: TrainingObserver) -> None:
        """Remove an observer."""
        self._observers = tuple(known for known in self._observers if known is not observer)
        self._update()

    def is_watching(self) -> bool:
        """Return True if there is an observer, or an event handler that requests the spans of steps."""
        return bool(self._observers) or self._logs_spans

    def logs_spans(self) -> bool:
        """Return True if an event handler requests the spans of steps."""
        return any(handler.names("span") for handler in RECORDER.events.active)

    def look_for_handlers(self) -> None:
        """Observe hot blocks if an event handler requests spans."""
        if self.logs_spans() != self._logs_spans:
            self._update()

    def _update(self) -> None:
        requested_kinds = {kind for kind in _HOT for observer in self._observers if observer.observes(kind)}
        self._logs_spans = self.logs_spans()
        self.kinds = frozenset(requested_kinds | (set(_HOT) if self._logs_spans else set()))
        self._on_change()

    def notify(self, call: Callable[[TrainingObserver], Any], *, propagates: bool = True) -> list[Any]:
        """Call every observer and return the results. OneLoggerError is raised only if *propagates*."""
        results = []
        for observer in self._observers:
            try:
                results.append(call(observer))
            except OneLoggerError:  # noqa: PERF203  # an error of an observer must not skip the others
                if propagates:
                    raise
            except Exception as error:  # noqa: BLE001  # a defect of an observer must not reach the job
                report("observer", "raised", "an observer that does not raise")
                log_once(f"observer {error!r}", f"a defect in an observer of training: {error!r}")
        return results
