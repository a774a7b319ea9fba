"""Records: one-logger's figures of a job and the events that carry them, by its names and formulas, its defects mended.

Used by whoever interprets, as the `Telemetry` of `exporter.training`. Durations are the monotonic clock's.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from exporter.errors import OneLoggerError
from exporter.one_logger import names
from exporter.one_logger.config import OneLoggerConfig, TrainingTelemetryConfig
from exporter.one_logger.delivery import Delivery
from exporter.one_logger.names import StandardTrainingJobEventName as EventNames
from exporter.one_logger.timers import MetricSummarizer
from exporter.recording.recorder import RECORDER
from exporter.training.attributes import Attributes, TracingTimestamp
from exporter.training.buffers import Hooks
from exporter.training.checkpoints import Save
from exporter.training.metrics import report
from exporter.training.open_spans import OpenSpan
from exporter.training.progress import Loop
from exporter.training.spans import Event, Telemetry

TERA = 10**12
VERSION = "2.3.1"
"""One-logger's, whose records these are: whoever reads them may go by it."""
TRAINING_FIELDS = tuple(
    short for name, _ in TrainingTelemetryConfig.fields() if (short := name.removesuffix("_or_fn")) != name
)
"""Fields of the training's configuration that its event tells, as `Settings.value` names them."""
_STATISTICS = ("avg", "min", "max", "total")


class LoopFigures:
    """The figures of one training loop, and the Unix time of its begin; None where that was before the configuration."""

    def __init__(self, loop: Loop, began: float | None) -> None:
        self.loop = loop
        self.began = began
        given = loop.values.get("train_samples_start")
        self.samples_start = loop.start * loop.samples if given is None else given
        self.pending = 0
        self.evaluated_at: dict[str, int] = {}  # by phase
        self.iterations = MetricSummarizer[float]()
        self.validations = MetricSummarizer[float]()
        self._samples = self._flops = 0
        self._tokens: int | None = None
        self._overall = loop.start * loop.samples * self._flops_of_sample if self._measures else None
        self._throughput: float | None = None
        self._throughputs = MetricSummarizer[float]()
        self._first_finish: float | None = None
        self._last_finish: float | None = None

    def saved(self) -> dict[str, Any]:
        """Tell what a save that begins now makes safe; no operations where throughput was never on."""
        overall = self._overall or 0 if self._measures else self._overall
        return {
            "productive_train_samples": self.samples_start + self._samples,
            "productive_train_iterations_sec": self.iterations.total_value or 0.0,
            "productive_validation_iterations_sec": self.validations.total_value or 0.0,
            "productive_train_tflops": None if overall is None else overall / TERA,
        }

    @property
    def _flops_of_sample(self) -> int:
        return self.loop.values.get("flops_per_sample") or 0

    @property
    def _measures(self) -> bool:
        return bool(self.loop.values.get("is_log_throughput_enabled")) and self._flops_of_sample > 0

    def _target(self, name: str) -> int | None:
        """Give a target as it was stated; throughput has no use for one of 0 or less."""
        found: int | None = self.loop.values.get(name)
        return None if self._measures and found is not None and found <= 0 else found

    def attributes(self) -> Any:
        """Describe the loop at its begin."""
        samples_target = self._target("train_samples_target")
        length = self.loop.values.get("seq_length")
        return names.TrainingLoopAttributes.create(
            train_iterations_start=self.loop.start,
            train_samples_start=self.samples_start,
            train_tokens_target=length * samples_target if length and samples_target else None,
            completed_floating_point_operations_overall=self._overall,
            train_iterations_target=self._target("train_iterations_target"),
            train_samples_target=samples_target,
        )

    def step_ended(self, seconds: float, finished: float, world_size: int) -> None:
        """Count an iteration that ended at a Unix time."""
        samples, tokens = self.loop.samples, self.loop.tokens
        self.pending += 1
        self.iterations.add_value(seconds)
        self._samples += samples
        if tokens is not None:
            self._tokens = (self._tokens or 0) + tokens
        self._last_finish = finished
        if self._first_finish is None:
            self._first_finish = finished
        if self._measures:
            flops = samples * self._flops_of_sample
            self._flops += flops
            self._overall = (self._overall or 0) + flops
            if self.iterations.total_value:
                self._throughput = self._flops / (self.iterations.total_value * TERA * world_size)
            if seconds > 0:
                self._throughputs.add_value(flops / (seconds * TERA * world_size))

    def update(self) -> Any:
        """Tell all figures; the next interval begins."""
        interval, self.pending = self.pending, 0
        iterations = self.iterations
        return names.TrainingMetricsUpdateAttributes.create(
            train_iterations_start=self.loop.start,
            current_iteration=self.loop.completed - 1,
            num_iterations=iterations.count,
            train_samples_start=self.samples_start,
            num_train_samples=self._samples,
            interval=interval,
            **{name: value or 0.0 for name, value in _times(iterations).items()},
            train_tokens=self._tokens,
            completed_floating_point_operations_overall=self._overall,
            total_flops=self._flops,
            train_throughput_per_gpu=self._throughput,
            train_throughput_per_gpu_max=self._throughputs.max_value,
            train_throughput_per_gpu_min=self._throughputs.min_value,
            first_logged_train_iterations_finish_timestamp_sec=self._first_finish,
            last_logged_train_iterations_finish_timestamp_sec=self._last_finish,
        )


def _times(seconds: MetricSummarizer[float]) -> dict[str, float | None]:
    """Give the statistics of iterations by the names of their attributes; None where there was none."""
    return {f"{each}_iteration_time_sec": getattr(seconds, f"{each}_value") for each in _STATISTICS}


class Records(Telemetry):
    """What a configured provider adds to the recording of training."""

    configured = True

    def __init__(self, settings: OneLoggerConfig, recorder: Any, delivery: Delivery) -> None:
        self.settings = settings
        self.recorder = recorder
        self.delivery = delivery
        self.application_name = settings.application_name
        self.enabled = settings.enable_for_current_rank
        self.propagates = settings.propagates
        told = settings.telemetry_config
        self.set_training(told if isinstance(told, TrainingTelemetryConfig) else None)
        self.wants = delivery.wants
        self.span_began, self.span_ended = delivery.start, delivery.stop
        self.span_event, self.span_error = delivery.event, delivery.error
        self._begin_job()

    def _begin_job(self) -> None:
        self._loop = LoopFigures(Loop(0, 0, {}, 0), None)
        self._attempts = {"sync": 0, "async": 0}
        self._saving = {"sync": MetricSummarizer[float](), "async": MetricSummarizer[float]()}
        self._successes = 0
        self._first_success: float | None = None
        self._furthest: Save | None = None

    # On the job's threads --------------------------------------------------------------------------------

    def set_training(self, training: TrainingTelemetryConfig | None) -> None:
        """Say what the training is; None while it is not known."""
        self.training = training
        self.trains = training is not None

    def ask(self, *fields: str) -> dict[str, Any]:
        """Give what the configuration of the training says of some fields now, callables asked."""
        if self.training is None or not self.enabled:
            return {}
        return {name: self.training.value(name) for name in fields}

    def ask_application(self) -> dict[str, Any]:
        """Give what the begin of an application tells, callables asked."""
        if not self.enabled:
            return {}
        fields = ("world_size", "session_tag", "is_baseline_run")
        return {
            "application_name": self.application_name,
            "settings": {name: self.settings.value(name) for name in fields},
            "training": self.ask(*TRAINING_FIELDS),
        }

    # Told by whoever interprets --------------------------------------------------------------------------

    def _tell(
        self, opened: OpenSpan | None, name: EventNames, attributes: Attributes, at: Any = None
    ) -> None:
        """Add an event of ours to a span."""
        if opened is not None and opened.span is not None and opened.known:
            event = Event.create(name, attributes, at or self.now())
            opened.span.keep(event)
            if opened.recorded:
                self.span_event(opened.span, event)

    def application_began(self, opened: OpenSpan, values: Mapping[str, Any]) -> None:
        """Tell who the application is."""
        self._begin_job()
        asked, settings = values.get("settings") or {}, self.settings
        attributes = names.OneLoggerInitializationAttributes.create(
            world_size=asked.get("world_size") or 1,
            one_logger_training_telemetry_version=VERSION,
            enable_for_current_rank=settings.enable_for_current_rank,
            session_tag=asked.get("session_tag") or "",
            is_baseline_run=bool(asked.get("is_baseline_run")),
            summary_data_schema_version=settings.summary_data_schema_version,
            node_name=platform.node(),
            rank=RECORDER.process.identity().rank or 0,
            custom_metadata=settings.custom_metadata,
        )
        at = None if opened.span is None else opened.span.start_event.timestamp
        self._tell(opened, EventNames.ONE_LOGGER_INITIALIZATION, attributes, at)

    def training_configured(self, opened: OpenSpan, values: Mapping[str, Any]) -> None:
        """Tell the configuration of the training."""
        if self.training is None:
            return
        if self._loop.loop.number == 0:
            self._loop.loop.ask(values)
        usual: dict[str, Any] = {"perf_tag": "", "global_batch_size": 0}
        attributes = names.TrainingTelemetryAttributes.create(
            log_every_n_train_iterations=self.training.log_every_n_train_iterations,
            checkpoint_strategy=self.training.save_checkpoint_strategy,
            custom_metadata=self.training.custom_metadata,
            **usual | {name: value for name, value in values.items() if value is not None},
        )
        self._tell(opened, EventNames.UPDATE_TRAINING_TELEMETRY_CONFIG, attributes)

    def loop_began(self, opened: OpenSpan, loop: Loop, wall: float) -> None:
        """Begin the figures of a training loop, and describe its span."""
        self._loop = LoopFigures(loop, wall)
        self._furthest = None
        if opened.span is not None:
            opened.span.set_initial_attributes(self._loop.attributes())

    def loop_ended(self, opened: OpenSpan) -> None:
        """Tell what was not told yet."""
        if self._loop.pending:
            self._tell(opened, EventNames.TRAINING_METRICS_UPDATE, self._loop.update())

    def step_ended(
        self, opened: OpenSpan | None, loop: Loop, seconds: float, wall: float, world_size: int
    ) -> None:
        """Count a step, and tell all figures every so many."""
        if self._loop.loop is not loop:
            self._loop = LoopFigures(loop, None)  # one that began before the configuration
        self._loop.step_ended(seconds, wall, world_size)
        if self.training is not None and loop.completed % self.training.log_every_n_train_iterations == 0:
            self._tell(opened, EventNames.TRAINING_METRICS_UPDATE, self._loop.update())

    def validation_step_ended(self, seconds: float) -> None:
        """Count a validation batch."""
        self._loop.validations.add_value(seconds)

    def evaluation_ended(self, opened: OpenSpan, completed: int) -> None:
        """Tell the figures of the validations of this loop, or where the tests are."""
        loop, phase = self._loop, str(opened.kind.phase)
        now, interval = max(0, completed - 1), completed - loop.evaluated_at.get(phase, loop.loop.start)
        loop.evaluated_at[phase] = completed
        if phase == "validation":
            figures = names.ValidationMetricsUpdateAttributes.create(
                now, interval, **_times(loop.validations)
            )
            self._tell(opened, EventNames.VALIDATION_METRICS_UPDATE, figures)
        else:
            figures = names.TestingMetricsUpdateAttributes.create(now, interval)
            self._tell(opened, EventNames.TESTING_METRICS_UPDATE, figures)

    def save_began(self, opened: OpenSpan, save: Save) -> None:
        """Keep what is trained by now, and describe the save's span."""
        save.figures = self._loop.saved()
        self._attempts[save.strategy] += 1
        if opened.span is not None:
            given = save.strategy, save.step, self._attempts[save.strategy]
            opened.span.set_initial_attributes(names.CheckpointSaveSpanAttributes.create(*given))

    def save_succeeded(self, opened: OpenSpan, save: Save, at: TracingTimestamp) -> None:
        """Tell what is safe by now: what the save with the most iterations holds."""
        wall = at.seconds_since_epoch
        self._successes += 1
        if self._first_success is None:
            self._first_success = wall
        furthest = max(self._furthest or save, save, key=lambda each: (each.completed, each.number))
        self._furthest = furthest
        figures = furthest.figures or LoopFigures(Loop(0, 0, {}, 0), None).saved()
        attributes = names.SaveCheckpointSuccessEventAttributes.create(
            checkpoint_strategy=save.strategy,
            current_iteration=save.step,
            first_successful_save_checkpoint_timestamp_sec=self._first_success,
            latest_successful_save_checkpoint_timestamp_sec=wall,
            save_checkpoint_success_count=self._successes,
            productive_train_iterations=furthest.completed,
            **figures,
            training_start_timestamp_sec=self._loop.began,
        )
        self._tell(opened, EventNames.SAVE_CHECKPOINT_SUCCESS, attributes, at)

    def save_ended(self, opened: OpenSpan, save: Save, seconds: float) -> None:
        """Tell how long the saves have held up the training."""
        times = self._saving[save.strategy]
        times.add_value(seconds)
        attributes = names.SyncCheckpointMetricsUpdateAttributes.create(
            times.total_value, times.min_value, times.max_value
        )
        self._tell(opened, EventNames.SYNC_CHECKPOINT_METRICS_UPDATE, attributes)


def current() -> Records | None:
    """Give what this process was configured to tell; None before."""
    found = Hooks.telemetry
    return found if isinstance(found, Records) else None


def misuse(call: str, rule: str, expected: str) -> None:
    """Report a misuse of the providers; raises `OneLoggerError` where the job chose to have it raised."""
    report(call, rule, expected)
    if Hooks.telemetry.propagates:
        raise OneLoggerError(f"{call}: {expected}")
