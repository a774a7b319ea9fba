"""Observers of the training in a process, and the hot kinds of blocks that they observe. Hot blocks are entered in each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from exporter.errors import OneLoggerError
from exporter.recording.notices import log_once
from exporter.recording.recorder import RECORDER
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.training import kinds
from exporter.training.kinds import BlockKind
from exporter.training.misuse import report
from exporter.training.observer import TrainingObserver

_HOT_KINDS = (*kinds.STEPS, *kinds.PHASE_KINDS)


class Observers:
    """Registered observers. An event handler that requests spans makes all hot kinds observed.

    Args:
        on_change: Called after a change of the observers or of the observed kinds.

    Attributes:
        kinds: Observed hot kinds of blocks. Blocks of all other kinds are always observed.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._observers: tuple[TrainingObserver, ...] = ()
        self._logs_spans = False
        self.kinds: frozenset[BlockKind] = frozenset()

    def add(self, observer: TrainingObserver) -> None:
        """Add an observer. For a registered observer, update its hot kinds."""
        self._observers = (*(other for other in self._observers if other is not observer), observer)
        self._update()

    def remove(self, observer: TrainingObserver) -> None:
        """Remove an observer."""
        self._observers = tuple(other for other in self._observers if other is not observer)
        self._update()

    def is_watching(self) -> bool:
        """Return True if there is an observer, or an event handler that requests spans."""
        return bool(self._observers) or self._logs_spans

    def logs_spans(self) -> bool:
        """Return True if an event handler requests spans."""
        return any(handler.has_pattern("span") for handler in RECORDER.events.handlers)

    def check_handlers(self) -> None:
        """Update the observed kinds if the first event handler for spans was added, or the last was removed."""
        if self.logs_spans() != self._logs_spans:
            self._update()

    def _update(self) -> None:
        requested_kinds = {
            kind for kind in _HOT_KINDS for observer in self._observers if observer.observes(kind)
        }
        self._logs_spans = self.logs_spans()
        self.kinds = frozenset(requested_kinds | (set(_HOT_KINDS) if self._logs_spans else set()))
        self._on_change()

    def notify(self, call: Callable[[TrainingObserver], Any], *, propagates: bool = True) -> list[Any]:
        """Call every observer and return the results. Exceptions other than `OneLoggerError` are logged.

        Raises:
            OneLoggerError: An observer raised the error, and *propagates* is true.
        """
        results = []
        for observer in self._observers:
            try:
                results.append(call(observer))
            except OneLoggerError:  # noqa: PERF203  # without *propagates*, the other observers are called
                if propagates:
                    raise
            except Exception as error:  # a defect of an observer must not reach the job
                if is_from_signal_handler(error):
                    raise
                report("observer", "raised", "no exception from an observer")
                log_once(f"observer {error!r}", f"a defect in an observer of training: {error!r}")
        return results
