"""Current observer of this process, which the configuration of a provider installs."""

from __future__ import annotations

import os

from exporter.errors import OneLoggerError
from exporter.one_logger.observer import OneLoggerObserver
from exporter.training.misuse import report
from exporter.training.recorder import TRAINING


class ObserverHolder:
    """Holder of the observer. A variable of the module would need the statement `global`."""

    observer: OneLoggerObserver | None = None


_HOLDER = ObserverHolder()


def current_observer() -> OneLoggerObserver | None:
    """Return the observer of this process, or None before the configuration and in a forked child."""
    observer = _HOLDER.observer
    return observer if observer is not None and observer.pid == os.getpid() else None


def install(observer: OneLoggerObserver | None) -> None:
    """Set the observer of this process; None for an unconfigured process."""
    previous, _HOLDER.observer = _HOLDER.observer, observer
    if previous is not None:
        TRAINING.observers.remove(previous)
    if observer is not None and observer.is_enabled:
        TRAINING.observers.add(observer)


def disable() -> None:
    """Stop all exports."""
    observer = current_observer()
    if observer is not None:
        observer.is_enabled = False
        TRAINING.observers.remove(observer)


def misuse(call: str, rule: str, expected: str, *, propagates: bool = False) -> None:
    """Count an invalid call of a provider or recorder.

    Raises:
        OneLoggerError: The job uses PROPAGATE_EXCEPTIONS, or *propagates* is true.
    """
    report(call, rule, expected)
    observer = current_observer()
    if propagates or (observer is not None and observer.settings.propagates):
        raise OneLoggerError(f"{call}: expected {expected}")
