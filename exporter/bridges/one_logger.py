"""The bridge from NVIDIA's one-logger: a job that is instrumented with it, as NeMo and Megatron are, is recorded here too.

Used in the training process, on the threads that call one-logger. With `EXPORTER_AUTO=1` every recorder of one-logger's is
listened to. Otherwise an exporter is given to its provider, or named in its configuration of exporters:

    provider.with_exporter(exporter.bridges.one_logger.OneLoggerExporter())

An exporter is not shown the iterations, nor what is inside of them, unless the job asks for that; so ours only has the
recorder listened to. Spans become spans of `exporter.training`, which computes its figures itself; the configuration
is taken over with them. The application and its initialisation are told in any case, the training only while no
framework's bridge tells it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from time import time
from types import ModuleType
from typing import Any

from exporter import training
from exporter.bridges.sources import ACTIVE, INSTRUMENTED, Source
from exporter.patching import Around, never_raises, patch, when_imported
from exporter.recording.notices import tell_once

_RECORDER = "nv_one_logger.recorder.default_recorder"
_PROVIDER = "nv_one_logger.api.one_logger_provider"
_OWN = frozenset({"error_handling_strategy", "logger_config", "telemetry_config"})
"""Fields about how one-logger itself works, and one that is taken over by itself."""
LATE_SECONDS = 0.5
"""A begin or an end that is told later than this is told with its time."""

_SETUP = {
    "application": "app",
    "distributed_code_initialization": "distributed_init",
    "data_loader_initialization": "dataloader_init",
    "model_initialization": "model_init",
    "optimizer_initialization": "optimizer_init",
}
"""Spans of the job, by the name of their callbacks."""
_CALLBACKS = {
    **_SETUP,
    "checkpoint_load": "load_checkpoint",
    "validation_loop": "validation",
    "testing_loop": "testing",
    "checkpoint_save_sync": "save_checkpoint",
    "checkpoint_save_async": "save_checkpoint",
}
"""Spans that are few likewise."""
_BLOCKS = {
    "training_single_iteration": "training_iteration",
    "validation_single_iteration": "validation_iteration",
    "TESTING_SINGLE_ITERATION": "testing_iteration",
    "data_loading": "data_loading",
    "model_forward": "model_forward",
    "zero_grad": "zero_grad",
    "model_backward": "model_backward",
    "optimizer_update": "optimizer_update",
}
"""Spans of the training that are many, by the name of their context managers."""


@dataclass(slots=True)
class _Told:
    """A span that has been told."""

    name: str
    block: Any  # what was entered; None where callbacks are called
    handled: BaseException | None  # when it began: no failure of its own


class _SpanSource(Source):
    """Tells of what one-logger is told."""

    strength = INSTRUMENTED

    def __init__(self) -> None:
        self._told: dict[Any, _Told] = {}

    def yields(self) -> None:
        """A framework's bridge goes on with the training."""
        for key, told in reversed(list(self._told.items())):
            if told.name not in _SETUP:
                del self._told[key]
                self._end(told, None, None)

    def starts(self, span: Any) -> None:
        if span is None:
            return
        name = _text(span.name)
        if name == "application":
            _take_over()
        elif name not in _SETUP and not ACTIVE.take(self):
            return
        self._told[span.id] = _Told(name, self._begin(name, span), sys.exc_info()[1])

    def stops(self, span: Any, error: BaseException | None) -> None:
        told = None if span is None else self._told.pop(span.id, None)
        if told is not None:
            self._end(told, span, error if error is not told.handled else None)
            if told.name == "training_loop":
                ACTIVE.release(self)

    def happens(self, event: Any) -> None:
        name = "" if event is None else _text(event.name)
        if name == "update_training_telemetry_config":
            _take_over()
        elif name == "save_checkpoint_success" and ACTIVE.source is self:
            training.on_save_checkpoint_success(_value(event, "current_iteration") or 0)

    def _begin(self, name: str, span: Any) -> Any:
        if name in _CALLBACKS:
            given = {"start_time_msec": _late(span.start_event)}
            if _CALLBACKS[name] == "save_checkpoint":
                given["global_step"] = _value(span, "current_iteration") or 0
            getattr(training, f"on_{_CALLBACKS[name]}_start")(**given)
            return None
        if name == "training_loop":
            block = training.training_loop(
                train_iterations_start=_value(span, "train_iterations_start") or 0,
                train_samples_start=_value(span, "train_samples_start"),
                train_iterations_target_or_fn=_value(span, "train_iterations_target"),
                train_samples_target_or_fn=_value(span, "train_samples_target"),
            )
        elif name in _BLOCKS:
            block = getattr(training, _BLOCKS[name])()
        else:
            block = training.span(name)
        block.__enter__()
        return block

    def _end(self, told: _Told, span: Any, error: BaseException | None) -> None:
        if told.block is None:
            stop = None if span is None else _late(span.stop_event)
            getattr(training, f"on_{_CALLBACKS[told.name]}_end")(finish_time_msec=stop)
        elif error is None:
            told.block.__exit__(None, None, None)
        else:
            told.block.__exit__(type(error), error, error.__traceback__)


def _text(name: Any) -> str:
    return str(getattr(name, "value", name))


def _value(owner: Any, name: str) -> Any:
    attribute = owner.attributes.get(name)
    return getattr(attribute, "value", attribute)


def _late(event: Any) -> float | None:
    """Milliseconds since the epoch of an event that was told late; None for one of now."""
    if event is None:
        return None
    then = float(event.timestamp.seconds_since_epoch)
    return then * 1000 if time() - then > LATE_SECONDS else None


SOURCE = _SpanSource()
"""That of this process."""


def install() -> None:
    """Listen to every recorder of one-logger's, from when it is imported."""
    when_imported(_RECORDER, _watch)


def _watch(module: ModuleType) -> None:
    recorder = module.DefaultRecorder
    patch(recorder, "start", _start)
    patch(recorder, "stop", _stop)
    patch(recorder, "event", _event)


def _start(*_args: Any, **_kwargs: Any) -> Around:
    span, _ = yield
    SOURCE.starts(span)


def _stop(_recorder: Any, span: Any = None, *_args: Any, **kwargs: Any) -> Around:
    handled = sys.exc_info()[1]
    _, error = yield
    if error is None:
        SOURCE.stops(kwargs.get("span", span), handled)


def _event(*_args: Any, **_kwargs: Any) -> Around:
    event, _ = yield
    SOURCE.happens(event)


class _Exporting:
    """What one-logger calls of an exporter."""

    @never_raises
    def initialize(self) -> None:
        _watch(import_module(_RECORDER))

    def export_start(self, span: Any) -> None:
        """The recorder has told of it."""

    export_stop = export_start

    def export_event(self, event: Any, span: Any) -> None:
        """Likewise."""

    export_error = export_event

    @never_raises
    def export_telemetry_data_error(self, error: Any) -> None:
        """One-logger has refused a call: what comes may be incomplete."""
        tell_once(
            "one-logger", f"one-logger tells that its data is not complete: {_value(error, 'error_message')}"
        )

    def close(self) -> None:
        """Nothing more will come."""


def __getattr__(name: str) -> Any:
    """Make the exporter's class when it is asked for: one-logger may not be installed."""
    if name != "OneLoggerExporter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = import_module("nv_one_logger.exporter.exporter").Exporter
    attributes = {"__module__": __name__, "__doc__": "An exporter for one-logger's provider."}
    made = globals()[name] = type(name, (_Exporting, base), attributes)
    return made


# What the job has configured there, configured here too: the fields have the same names ---------------------------


class _TakenOver:
    """Whether ours was configured from theirs."""

    settings = training = False


def _take_over() -> None:
    """Configure ours as theirs is, at the begin of the application, and what they know of the training once it is known."""
    module = sys.modules.get(_PROVIDER)
    theirs = None if module is None else module.OneLoggerProvider.instance()
    if theirs is None or not theirs.one_logger_ready:
        return
    try:
        provider = training.TrainingTelemetryProvider.instance()
        if not provider.one_logger_ready:
            given = _fields(training.OneLoggerConfig, theirs.config)
            fields = {name: value for name, value in given.items() if name not in _OWN}
            provider.with_base_config(training.OneLoggerConfig(**fields)).configure_provider()
            _TakenOver.settings = True
        telemetry = getattr(theirs.config, "telemetry_config", None)
        if telemetry is not None and _TakenOver.settings and not _TakenOver.training:
            given = _fields(training.TrainingTelemetryConfig, telemetry)
            provider.set_training_telemetry_config(training.TrainingTelemetryConfig(**given))
            _TakenOver.training = True
    except Exception as error:  # noqa: BLE001  # the job's own values; the spans are told all the same
        tell_once("one-logger settings", f"one-logger's configuration is not taken over: {error}")


def _fields(ours: Any, theirs: Any) -> dict[str, Any]:
    given = {name: getattr(theirs, name, None) for name, _ in ours.fields()}
    return {
        name: value if callable(value) else getattr(value, "value", value)
        for name, value in given.items()
        if value is not None
    }
