"""What a job has configured in one-logger, configured here too.

Used in the training process, on the thread that calls one-logger. The fields have the same names; what is left to a
callable stays left to it. A job that has configured `exporter.training` itself is left alone.
"""

from __future__ import annotations

import sys
from typing import Any

from exporter.recording.notices import tell_once

_PROVIDER = "nv_one_logger.api.one_logger_provider"
_OWN = frozenset({"error_handling_strategy", "logger_config", "telemetry_config"})
"""Fields about how one-logger itself works, and one that is taken over by itself."""


class _TakenOver:
    """Whether ours was configured from theirs."""

    settings = False
    training = False


def take_over(training: Any) -> None:
    """Configure ours as theirs is, at the begin of the application."""
    theirs = _theirs()
    if theirs is None or _TakenOver.settings:
        return
    try:
        provider = training.TrainingTelemetryProvider.instance()
        if provider.one_logger_ready:
            return
        given = _fields(training.OneLoggerConfig, theirs)
        fields = {name: value for name, value in given.items() if name not in _OWN}
        provider.with_base_config(training.OneLoggerConfig(**fields)).configure_provider()
    except Exception as error:  # noqa: BLE001  # the job's own values; the spans are told all the same
        tell_once("one-logger settings", f"one-logger's configuration is not taken over: {error}")
        return
    _TakenOver.settings = True
    take_over_training(training)


def take_over_training(training: Any) -> None:
    """Take over what they know of the training, once it is known."""
    theirs = getattr(_theirs(), "telemetry_config", None)
    if theirs is None or not _TakenOver.settings or _TakenOver.training:
        return
    try:
        ours = training.TrainingTelemetryConfig(**_fields(training.TrainingTelemetryConfig, theirs))
        training.TrainingTelemetryProvider.instance().set_training_telemetry_config(ours)
    except Exception as error:  # noqa: BLE001  # as above
        tell_once("one-logger training settings", f"its training configuration is not taken over: {error}")
        return
    _TakenOver.training = True


def _theirs() -> Any:
    module = sys.modules.get(_PROVIDER)
    if module is None:
        return None
    provider = module.OneLoggerProvider.instance()
    return provider.config if provider.one_logger_ready else None


def _fields(ours: Any, theirs: Any) -> dict[str, Any]:
    found = {}
    for name, _ in ours.fields():
        value = getattr(theirs, name, None)
        if value is not None:
            found[name] = value if callable(value) else getattr(value, "value", value)
    return found
