"""The bridge from NVIDIA's one-logger: a job that is instrumented with it, as NeMo and Megatron are, is recorded here too.

Used in the training process, on the threads that call one-logger, whose recorder is listened to: exporters are not shown
iterations. The application and its initialisation are told in any case, the training only while no framework's bridge is.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from time import time
from types import ModuleType
from typing import Any

from exporter import training
from exporter.bridges.loop import leave
from exporter.bridges.sources import ACTIVE, Source, Strength
from exporter.patching import Around, never_raises, patch, when_imported
from exporter.recording.notices import log_once
from exporter.training import span_kinds as kinds

_RECORDER = "nv_one_logger.recorder.default_recorder"
_PROVIDER = "nv_one_logger.api.one_logger_provider"
_OWN = frozenset({"error_handling_strategy", "logger_config", "telemetry_config"})
"""Fields about how one-logger itself works, and one that is taken over by itself."""
LATE_SECONDS = 0.5
"""A begin or an end that is told later than this is told with its time."""
_INITS = {kinds.DISTRIBUTED_INIT, kinds.DATALOADER_INIT, kinds.MODEL_INIT, kinds.OPTIMIZER_INIT}
_SETUP = frozenset({kinds.APPLICATION} | _INITS)
"""Kinds of spans of the job, and not of its training."""
_MANY = kinds.STEPS | frozenset(kinds.SHORT)
"""Kinds of which there are many: told by blocks, the others by callbacks, which take a time."""


@dataclass(slots=True)
class _Told:
    """A span that has been told."""

    kind: kinds.Kind | None  # None for a name of the job's own
    block: Any  # what was entered; None where callbacks are called
    handled: BaseException | None  # when it began: no failure of its own


class _SpanSource(Source):
    """Tells of what one-logger is told."""

    strength = Strength.INSTRUMENTED

    def __init__(self) -> None:
        self._told: dict[Any, _Told] = {}
        self._configured = self._knows_training = False  # from theirs

    def yields(self) -> None:
        """A framework's bridge goes on with the training."""
        for key, told in reversed(list(self._told.items())):
            if told.kind not in _SETUP:
                del self._told[key]
                self._end(told, None, None)

    def starts(self, span: Any) -> None:
        if span is None:
            return
        kind = kinds.BY_NAME.get(_text(span.name))
        if kind is kinds.APPLICATION:
            self._take_over()
        elif kind not in _SETUP and not ACTIVE.take(self):
            return
        self._told[span.id] = _Told(kind, self._begin(kind, span), sys.exc_info()[1])

    def stops(self, span: Any, error: BaseException | None) -> None:
        told = None if span is None else self._told.pop(span.id, None)
        if told is not None:
            self._end(told, span, error if error is not told.handled else None)
            if told.kind is kinds.TRAINING_LOOP:
                ACTIVE.release(self)

    def happens(self, event: Any) -> None:
        name = "" if event is None else _text(event.name)
        if name == "update_training_telemetry_config":
            self._take_over()
        elif name == "save_checkpoint_success" and ACTIVE.source is self:
            training.on_save_checkpoint_success(_value(event, "current_iteration") or 0)

    @never_raises
    def _take_over(self) -> None:
        """Configure ours as theirs is, at the begin of the application, and what they know of the training once it is known."""
        module = sys.modules.get(_PROVIDER)
        theirs = None if module is None else module.OneLoggerProvider.instance()
        if theirs is None or not theirs.one_logger_ready:
            return
        provider = training.TrainingTelemetryProvider.instance()
        if not provider.one_logger_ready:
            given = _fields(training.OneLoggerConfig, theirs.config)
            fields = {name: value for name, value in given.items() if name not in _OWN}
            provider.with_base_config(training.OneLoggerConfig(**fields)).configure_provider()
            self._configured = True
        telemetry = getattr(theirs.config, "telemetry_config", None)
        if telemetry is not None and self._configured and not self._knows_training:
            given = _fields(training.TrainingTelemetryConfig, telemetry)
            provider.set_training_telemetry_config(training.TrainingTelemetryConfig(**given))
            self._knows_training = True

    def _begin(self, kind: kinds.Kind | None, span: Any) -> Any:
        if kind is None:
            block = training.span(_text(span.name))
        elif kind in _MANY:
            block = getattr(training, kind.call)()
        elif kind is kinds.TRAINING_LOOP:
            block = training.training_loop(
                train_iterations_start=_value(span, "train_iterations_start") or 0,
                train_samples_start=_value(span, "train_samples_start"),
                train_iterations_target_or_fn=_value(span, "train_iterations_target"),
                train_samples_target_or_fn=_value(span, "train_samples_target"),
            )
        else:
            given = {"start_time_msec": _late(span.start_event)}
            if kind is kinds.CHECKPOINT_SAVE:
                given["global_step"] = _value(span, "current_iteration") or 0
            getattr(training, kind.begin)(**given)
            return None
        block.__enter__()
        return block

    def _end(self, told: _Told, span: Any, error: BaseException | None) -> None:
        if told.block is not None:
            leave(told.block, error)
        elif told.kind is not None:
            stop = None if span is None else _late(span.stop_event)
            getattr(training, told.kind.end)(finish_time_msec=stop)


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

    def export_start(self, *_told: Any) -> None:
        """The recorder has told of it."""

    export_stop = export_event = export_error = close = export_start

    @never_raises
    def export_telemetry_data_error(self, error: Any) -> None:
        """One-logger has refused a call: what comes may be incomplete."""
        why = _value(error, "error_message")
        log_once("one-logger", f"one-logger tells that its data is not complete: {why}")


def __getattr__(name: str) -> Any:
    """Make the exporter's class when it is asked for: one-logger may not be installed."""
    if name != "OneLoggerExporter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = import_module("nv_one_logger.exporter.exporter").Exporter
    attributes = {"__module__": __name__, "__doc__": "An exporter for one-logger's provider."}
    made = globals()[name] = type(name, (_Exporting, base), attributes)
    return made


def _fields(ours: Any, theirs: Any) -> dict[str, Any]:
    """Read what is configured there; the fields have the same names here."""
    given = {name: getattr(theirs, name, None) for name, _ in ours.fields()}
    return {
        name: value if callable(value) else getattr(value, "value", value)
        for name, value in given.items()
        if value is not None
    }
