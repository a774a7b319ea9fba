"""What this process was configured to tell by the providers; once per process.

Used in the training process, by its own threads. Before configuration nothing is exported, and nothing is a misuse. After a
fork the child is not configured: it must not write under its parent's identity.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from exporter.errors import OneLoggerError
from exporter.one_logger.config import OneLoggerConfig, TrainingTelemetryConfig
from exporter.one_logger.delivery import Delivery, close_all, flush_all
from exporter.one_logger.names import StandardTrainingJobEventName as EventNames
from exporter.one_logger.records import Records
from exporter.training import calls
from exporter.training.buffers import Hooks
from exporter.training.calls import LOOP_FIELDS
from exporter.training.metrics import report
from exporter.training.recording import TRAINING

if TYPE_CHECKING:
    from exporter.one_logger.recorder import DefaultRecorder

T = TypeVar("T")
_SWITCHED = {
    "is_train_iterations_enabled": EventNames.TRAINING_METRICS_UPDATE.value,
    "is_validation_iterations_enabled": EventNames.VALIDATION_METRICS_UPDATE.value,
    "is_test_iterations_enabled": EventNames.TESTING_METRICS_UPDATE.value,
}
"""A field of the training's configuration → the event that is not exported where it is false."""


class _State:
    """The one configuration of this process."""

    records: Records | None = None
    recorder: DefaultRecorder | None = None
    lock = threading.Lock()
    instances: dict[type, Any] = {}  # noqa: RUF012  # the process's


def current() -> Records | None:
    """Give what was configured; None before."""
    return _State.records


def current_recorder() -> DefaultRecorder | None:
    """Give the recorder that was configured; None before."""
    return _State.recorder


def the_records() -> Records:
    """Give what was configured; `OneLoggerError` before."""
    if _State.records is None:
        raise OneLoggerError("configure the provider before: with_base_config(…), then configure_provider()")
    return _State.records


def misuse(call: str, rule: str, expected: str) -> None:
    """Report a misuse of the providers; raises `OneLoggerError` where the job chose to have it raised."""
    report(call, rule, expected)
    records = _State.records
    if records is not None and records.propagates:
        raise OneLoggerError(f"{call}: {expected}")


def configure(settings: OneLoggerConfig, delivery: Delivery, recorder: DefaultRecorder) -> bool:
    """Set the configuration of this process, once; says whether this was the first time."""
    with _State.lock:
        if _State.records is not None:
            return False
        told = settings.telemetry_config
        training = told if isinstance(told, TrainingTelemetryConfig) else None
        records = Records(settings, training, delivery)
        _State.records, _State.recorder = records, recorder
    TRAINING.configure(records)
    _apply_training(records)
    return True


def set_training(records: Records, training: TrainingTelemetryConfig) -> bool:
    """Set the training job's configuration, once; says whether this was the first time."""
    with _State.lock:
        if records.training is not None:
            return False
        records.set_training(training)
    _apply_training(records)
    if records.enabled:
        calls.say("set_training_telemetry_config", training=records.ask_training())
    return True


def force_off() -> None:
    """Tell nothing from now on."""
    if _State.records is not None:
        _State.records.enabled = False
        TRAINING.configure(_State.records)


def forget() -> None:
    """Begin as an unconfigured process; in a forked child, and in tests."""
    _State.records = _State.recorder = None
    _State.lock = threading.Lock()
    _State.instances.clear()


def _apply_training(records: Records) -> None:
    """Leave out the events that are switched off, and have the callables asked at each iteration."""
    training, settings = records.training, records.settings
    if training is None or not records.enabled:
        return
    records.delivery.leave_out(event for flag, event in _SWITCHED.items() if training.value(flag) is False)
    varying = tuple(sorted(training.varying() & set(LOOP_FIELDS)))
    world = "world_size" in settings.varying()

    def values() -> dict[str, Any]:
        found = {name: training.value(name) for name in varying}
        return found | {"world_size": settings.value("world_size")} if world else found

    Hooks.values = values if varying or world else None


def instance(kind: type[T]) -> T:
    """Give the object of a class in this process, made without calling it."""
    with _State.lock:
        made: T | None = _State.instances.get(kind)
        if made is None:
            made = _State.instances[kind] = object.__new__(kind)
        return made


TRAINING.deliver_by(flush_all, close_all)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)
