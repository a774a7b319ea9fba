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
        changed: Called when the observed kinds have changed.

    Attributes:
        kinds: Hot kinds of blocks that are observed; all other kinds always are.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._observers: tuple[TrainingObserver, ...] = ()
        self._logs_spans = False
        self.kinds: frozenset[BlockKind] = frozenset()

    def add(self, observer: TrainingObserver) -> None:
        """Add an observer, or update the hot kinds of a known observer."""
        self._observers = (*(each for each in self._observers if each is not observer), observer)
        self._update()

    def remove(self, observer: TrainingObserver) -> None:
        """Remove an observer."""
        self._observers = tuple(each for each in self._observers if each is not observer)
        self._update()

    def is_watching(self) -> bool:
        """Return True if every edge of a block is observed."""
        return bool(self._observers) or self._logs_spans

    def logs_spans(self) -> bool:
        """Return True if an event handler requests the spans of steps."""
        return any(each.names("span") for each in RECORDER.events.active)

    def look_for_handlers(self) -> None:
        """Observe hot blocks if an event handler requests spans."""
        if self.logs_spans() != self._logs_spans:
            self._update()

    def _update(self) -> None:
        wanted = {kind for kind in _HOT for each in self._observers if each.wants(kind)}
        self._logs_spans = self.logs_spans()
        self.kinds = frozenset(wanted | (set(_HOT) if self._logs_spans else set()))
        self._changed()

    def notify(self, call: Callable[[TrainingObserver], Any], *, propagates: bool = True) -> list[Any]:
        """Call every observer and return the results; OneLoggerError is raised only if *propagates*."""
        found = []
        for observer in self._observers:
            try:
                found.append(call(observer))
            except OneLoggerError:  # noqa: PERF203  # each observer for itself
                if propagates:
                    raise
            except Exception as error:  # noqa: BLE001  # a defect of an observer is not the job's problem
                report("observer", "raised", "an observer that does not raise")
                log_once(f"observer {error!r}", f"a defect in an observer of training: {error!r}")
        return found
