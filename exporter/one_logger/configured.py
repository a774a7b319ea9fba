"""The configured observer of this process."""

from __future__ import annotations

import os

from exporter.errors import OneLoggerError
from exporter.one_logger.observer import OneLoggerObserver
from exporter.training.misuse import report
from exporter.training.recorder import TRAINING


class ConfiguredObserver:
    """Holder of the observer of this process."""

    observer: OneLoggerObserver | None = None


_CONFIGURED = ConfiguredObserver()


def current() -> OneLoggerObserver | None:
    """Return the observer of this process; None before configuration, and in a forked child."""
    found = _CONFIGURED.observer
    return found if found is not None and found.process == os.getpid() else None


def install(observer: OneLoggerObserver | None) -> None:
    """Set the observer of this process; None for an unconfigured process."""
    earlier, _CONFIGURED.observer = _CONFIGURED.observer, observer
    if earlier is not None:
        TRAINING.observers.remove(earlier)
    if observer is not None and observer.enabled:
        TRAINING.observers.add(observer)


def disable() -> None:
    """Stop all exports."""
    observer = current()
    if observer is not None:
        observer.enabled = False
        TRAINING.observers.remove(observer)


def misuse(call: str, rule: str, expected: str, *, propagates: bool = False) -> None:
    """Count an invalid call of a provider or recorder.

    Raises OneLoggerError: The job has chosen PROPAGATE_EXCEPTIONS, or *propagates* is true.
    """
    report(call, rule, expected)
    observer = current()
    if propagates or (observer is not None and observer.settings.propagates):
        raise OneLoggerError(f"{call}: expected {expected}")
