"""Bridge to NVIDIA's one-logger, for unchanged jobs that are instrumented with one-logger, such as jobs with NeMo or Megatron.

The bridge patches one-logger's recorder, because one-logger's exporters receive no iterations by default. The hooks run on the threads
that call the recorder. Spans of the application and of its initialization are always recorded; the other spans are recorded
unless the bridge of a framework is active.
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
from exporter.training import kinds
from exporter.training.checkpoints import SavePolicy
from exporter.training.recorder import TRAINING

# Modules of one-logger whose import the bridge awaits.
_RECORDER = "nv_one_logger.recorder.default_recorder"
_PROVIDER = "nv_one_logger.api.one_logger_provider"
LATE_SECONDS = 0.5
"""Age above which the recorded time of a start or a stop is used. Otherwise, the current time is used."""
_INITIALIZATIONS = frozenset(
    {kinds.DISTRIBUTED_INIT, kinds.DATALOADER_INIT, kinds.MODEL_INIT, kinds.OPTIMIZER_INIT}
)
_ALWAYS_RECORDED = _INITIALIZATIONS | {kinds.APPLICATION}
"""Kinds of spans that are always recorded."""
_RECORDED_BY_BLOCKS = kinds.STEPS | frozenset(kinds.PHASE_KINDS)
"""Standard kinds that blocks record, besides the training loop. Callbacks, which accept a time, record the other standard kinds."""


@dataclass(slots=True)
class _OpenSpan:
    """Open span of one-logger.

    Attributes:
        kind: Kind of the span; None for a name that is not standard.
        block: Open block that records the span; None if callbacks record the span.
        handled_error: Exception that was being handled at the start, and is therefore no failure of the span.
    """

    kind: kinds.BlockKind | None
    block: Any
    handled_error: BaseException | None


class _SpanSource(Source):
    """Source that records the spans of one-logger."""

    strength = Strength.INSTRUMENTED

    def __init__(self) -> None:
        self._open: dict[Any, _OpenSpan] = {}

    def superseded(self) -> None:
        """End the open spans of the training, which the bridge of a framework records from now on."""
        for key, open_span in reversed(list(self._open.items())):
            if open_span.kind not in _ALWAYS_RECORDED:
                del self._open[key]
                self._end(open_span, None, None)

    def start_span(self, span: Any) -> None:
        """Record the start of a span. A span of the training is ignored while the bridge of a framework is active; None is ignored."""
        if span is None:
            return
        kind = kinds.standard_kind(_text(span.name))
        if kind is kinds.APPLICATION or kind is kinds.TRAINING_LOOP:
            _describe()
        if kind not in _ALWAYS_RECORDED and not ACTIVE.activate(self):
            return
        self._open[span.id] = _OpenSpan(kind, self._begin(kind, span), sys.exc_info()[1])

    def stop_span(self, span: Any, error: BaseException | None) -> None:
        """Record the stop of a span. *error* is the exception that is being handled, if any."""
        open_span = None if span is None else self._open.pop(span.id, None)
        if open_span is not None:
            self._end(open_span, span, error if error is not open_span.handled_error else None)
            if open_span.kind is kinds.TRAINING_LOOP:
                ACTIVE.release(self)

    def record_event(self, event: Any) -> None:
        """Record the success of a save, or the changed configuration. Other events, and None, are ignored."""
        name = "" if event is None else _text(event.name)
        if name == "update_training_telemetry_config":
            _describe()
        elif name == "save_checkpoint_success" and ACTIVE.source is self:
            training.on_save_checkpoint_success(_attribute(event, "current_iteration") or 0)

    def _begin(self, kind: kinds.BlockKind | None, span: Any) -> Any:
        """Enter a block, or call a callback. Return the block; None for a callback."""
        if kind is None:
            block: Any = training.span(_text(span.name))
        elif kind in _RECORDED_BY_BLOCKS:
            block = getattr(training, kind.call)()
        elif kind is kinds.TRAINING_LOOP:
            block = training.training_loop(
                train_iterations_start=_attribute(span, "train_iterations_start") or 0,
                train_samples_start=_attribute(span, "train_samples_start"),
                train_iterations_target_or_fn=_attribute(span, "train_iterations_target"),
                train_samples_target_or_fn=_attribute(span, "train_samples_target"),
            )
        else:
            arguments = {"start_time_msec": _late_msec(span.start_event)}
            if kind is kinds.CHECKPOINT_SAVE:
                arguments["global_step"] = _attribute(span, "current_iteration") or 0
            getattr(training, kind.begin_name)(**arguments)
            return None
        block.__enter__()
        return block

    def _end(self, open_span: _OpenSpan, span: Any, error: BaseException | None) -> None:
        """Leave the block of a span, or call its callback. *span* is None if one-logger has not stopped the span."""
        if open_span.block is not None:
            leave(open_span.block, error)
        elif open_span.kind is not None:
            stop = None if span is None else _late_msec(span.stop_event)
            getattr(training, open_span.kind.end_name)(finish_time_msec=stop)


@never_raises
def _describe() -> None:
    """Record the facts of one-logger's configuration."""
    module = sys.modules.get(_PROVIDER)
    provider = None if module is None else module.OneLoggerProvider.instance()
    if provider is None or not provider.one_logger_ready:
        return
    config = provider.config
    world_size = _current_value(config, "world_size") or 1
    facts = {
        "application": config.application_name,
        "session_tag": _current_value(config, "session_tag"),
        "is_baseline": _current_value(config, "is_baseline_run"),
        "world_size": world_size,
    }
    telemetry = getattr(config, "telemetry_config", None)
    if telemetry is not None:
        target = _current_value(telemetry, "train_iterations_target")
        facts |= {
            "perf_tag": _current_value(telemetry, "perf_tag"),
            "flops_per_sample": _current_value(telemetry, "flops_per_sample"),
            "step_target": target if target is not None and target > 0 else None,
        }
        batch_size = _current_value(telemetry, "global_batch_size")
        sequence_length = _current_value(telemetry, "seq_length")
        if batch_size:
            tokens = batch_size * sequence_length / world_size if sequence_length else None
            TRAINING.expect(batch_size / world_size, tokens)
        strategy = str(getattr(telemetry.save_checkpoint_strategy, "value", "sync"))
        is_enabled = _current_value(telemetry, "is_save_checkpoint_enabled") is not False
        TRAINING.set_save_policy(lambda: SavePolicy(strategy, is_enabled))
    TRAINING.describe({name: value for name, value in facts.items() if value is not None})


def _current_value(config: Any, name: str) -> Any:
    """Return the current value of the field `NAME_or_fn`, which may be a callable."""
    value = getattr(config, f"{name}_or_fn", None)
    return value() if callable(value) else value


def _text(name: Any) -> str:
    """Return a name as text; for a member of an enumeration, its value."""
    return str(getattr(name, "value", name))


def _attribute(owner: Any, name: str) -> Any:
    """Return the value of an attribute of a span or an event, or None."""
    attribute = owner.attributes.get(name)
    return getattr(attribute, "value", attribute)


def _late_msec(event: Any) -> float | None:
    """Return the time of an event in milliseconds since the epoch, or None if the event is at most `LATE_SECONDS` old."""
    if event is None:
        return None
    unix_seconds = float(event.timestamp.seconds_since_epoch)
    return unix_seconds * 1000 if time() - unix_seconds > LATE_SECONDS else None


SOURCE = _SpanSource()
"""Source of this process."""


def install() -> None:
    """Put hooks around the methods of one-logger's recorder, once its module is imported."""
    when_imported(_RECORDER, _patch_recorder)


def _patch_recorder(module: ModuleType) -> None:
    recorder = module.DefaultRecorder
    patch(recorder, "start", _start)
    patch(recorder, "stop", _stop)
    patch(recorder, "event", _event)


def _start(*_args: Any, **_kwargs: Any) -> Around:
    span, _ = yield
    SOURCE.start_span(span)


def _stop(_recorder: Any, span: Any = None, *_args: Any, **kwargs: Any) -> Around:
    handled_error = sys.exc_info()[1]
    _, error = yield
    if error is None:
        SOURCE.stop_span(kwargs.get("span", span), handled_error)


def _event(*_args: Any, **_kwargs: Any) -> Around:
    event, _ = yield
    SOURCE.record_event(event)


class _BridgeExporter:
    """Exporter of one-logger whose `initialize` installs the hooks. The hooks record the spans."""

    @never_raises
    def initialize(self) -> None:
        _patch_recorder(import_module(_RECORDER))

    def export_start(self, span: Any) -> None:
        """Do nothing."""

    def export_stop(self, span: Any) -> None:
        """Do nothing."""

    def export_event(self, event: Any, span: Any) -> None:
        """Do nothing."""

    def export_error(self, event: Any, span: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    @never_raises
    def export_telemetry_data_error(self, error: Any) -> None:
        """Log that one-logger reports incomplete data, so that spans may be missing."""
        reason = _attribute(error, "error_message")
        log_once("one-logger", f"one-logger reports incomplete data: {reason}")


def __getattr__(name: str) -> Any:
    """Create the class `OneLoggerExporter` on first use, because one-logger need not be installed."""
    if name != "OneLoggerExporter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = import_module("nv_one_logger.exporter.exporter").Exporter

    class OneLoggerExporter(_BridgeExporter, base):  # type: ignore[misc,valid-type]  # the base class is known at run time
        """Exporter for one-logger's provider that installs the bridge."""

    globals()[name] = OneLoggerExporter
    return OneLoggerExporter
