"""Observer of the training blocks that exports spans and the standard events of one-logger.

The metrics of the training do not depend on this module. A call that breaks a rule of one-logger is counted as misuse, and is
not exported.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic, time
from typing import Any

from exporter.errors import OneLoggerError
from exporter.one_logger.config import OneLoggerConfig, TrainingTelemetryConfig
from exporter.one_logger.configuration_events import initialization_attributes, training_attributes
from exporter.one_logger.delivery import Delivery
from exporter.one_logger.figures import CheckpointFigures, LoopFigures, SaveFigures
from exporter.one_logger.job_facts import JobFacts
from exporter.one_logger.names import CheckPointStrategy, StandardTrainingJobEventName
from exporter.one_logger.span_export import RECORDER_VALUE, SpanExport
from exporter.recording.conversion import safe_repr
from exporter.recording.recorder import RECORDER
from exporter.training import kinds
from exporter.training.attributes import Attributes, TracingTimestamp
from exporter.training.kinds import BlockKind
from exporter.training.misuse import report
from exporter.training.observer import ObservedBlock
from exporter.training.recorder import TRAINING
from exporter.training.spans import ErrorEvent, Event, Span

EventName = StandardTrainingJobEventName


@dataclass(slots=True)
class BlockState:
    """State of an observed block."""

    save: CheckpointFigures | None = None  # None for a block that is not a save


class OneLoggerObserver:
    """Observer of the training blocks, installed by the configuration of a provider.

    Attributes:
        settings: Configuration of the application.
        training: Configuration of the training; None until set.
        is_enabled: False if this process exports no records.
    """

    def __init__(self, settings: OneLoggerConfig, recorder: Any, delivery: Delivery) -> None:
        self.settings = settings
        self.recorder = recorder
        self.delivery = delivery
        self.span_export = SpanExport(delivery)
        self.pid = os.getpid()
        self.is_enabled = settings.enable_for_current_rank
        self.training: TrainingTelemetryConfig | None = None
        self._lock = threading.RLock()  # unused in forked children, where TRAINING has no observers
        self._facts = JobFacts(settings)
        self._figures = LoopFigures(self._facts.steps)
        self._saves = SaveFigures()
        self._application: ObservedBlock | None = None
        self._loop: ObservedBlock | None = None
        self._has_application_ended = self._is_application_ending = False
        # True if a loop began before the configuration: its iterations are valid, but not exported.
        self._in_earlier_loop = any(block.kind in kinds.LOOPS for block in TRAINING.open_blocks())
        if isinstance(settings.telemetry_config, TrainingTelemetryConfig):
            self.set_training(settings.telemetry_config)

    def set_training(self, training: TrainingTelemetryConfig) -> None:
        """Set the configuration of the training, and export it if the application has begun."""
        with self._lock:
            self.training = training
            self._facts.set_training(training)
            switches = (
                (training.is_train_iterations_enabled, EventName.TRAINING_METRICS_UPDATE),
                (training.is_validation_iterations_enabled, EventName.VALIDATION_METRICS_UPDATE),
                (training.is_test_iterations_enabled, EventName.TESTING_METRICS_UPDATE),
            )
            self.delivery.exclude_events(event.value for is_enabled, event in switches if is_enabled is False)
            if self._application is not None or self._loop is not None or self._in_earlier_loop:
                self._export_training(training)

    # Rules -----------------------------------------------------------------------------------------------

    def misuse(self, call: str, rule: str, expected: str) -> None:
        """Count an invalid call.

        Raises:
            OneLoggerError: The job uses PROPAGATE_EXCEPTIONS.
        """
        report(call, rule, expected)
        self._raise_if_propagating(f"{call}: expected {expected}")

    def _raise_if_propagating(self, message: str) -> None:
        if self.settings.propagates:
            raise OneLoggerError(message)

    def observes(self, kind: BlockKind) -> bool:
        """Return True if blocks of a kind are exported."""
        return self.delivery.accepts(kind.span_name)

    def allows(self, kind: BlockKind, call: str, values: Mapping[str, object]) -> bool:
        """Return True if a block can be exported. Otherwise count the call as misuse, unless saves are disabled."""
        if kind is kinds.CHECKPOINT_SAVE and not self._are_saves_enabled():
            return False
        if self._has_application_ended and kind is not kinds.APPLICATION:
            self.misuse(call, "application_ended", "on_app_start first: the application has ended")
            return False
        if self.training is None and kind in {kinds.TRAINING_LOOP, kinds.CHECKPOINT_SAVE}:
            self.misuse(call, "no_training_config", "set_training_telemetry_config first")
            return False
        if kind in kinds.LOOPS and not _is_valid_loop(values):  # counted by the recorder
            self._raise_if_propagating(
                f"{call}: expected a start of 0 or more, not {safe_repr(dict(values))}"
            )
            return False
        return True

    def begin_while_open(self, kind: BlockKind, call: str) -> bool:
        """Return True to refuse a second start of an open kind. The call is counted as misuse, unless saves are disabled.

        Return False for an open application or loop that started before the configuration: the new block replaces the open block.
        """
        if kind is kinds.CHECKPOINT_SAVE and not self._are_saves_enabled():
            return True
        if kind is kinds.APPLICATION and self._application is None:
            return False  # the open block started before the configuration
        if kind in kinds.LOOPS and self._loop is None:
            return False
        self.misuse(call, "already_open", f"the open {kind.call} to end first")
        return True

    def end_without_begin(self, kind: BlockKind, call: str) -> None:
        """Count the end of a block that is not open."""
        if kind is not kinds.CHECKPOINT_SAVE or self._are_saves_enabled():
            self.misuse(call, "not_open", f"{kind.begin_name} first")

    def _are_saves_enabled(self) -> bool:
        return self.training is None or self.training.is_save_checkpoint_enabled is not False

    # Start of a block ------------------------------------------------------------------------------------

    def block_began(self, block: ObservedBlock) -> None:
        """Export the start of a span."""
        if RECORDER_VALUE in block.values:
            return
        with self._lock:
            kind, state = block.kind, BlockState()
            block.data = state
            if kind in kinds.LOOPS:
                self._begin_loop(block)
            elif kind is kinds.CHECKPOINT_SAVE:
                state.save = self._begin_save(block)
            self.span_export.start(block.span)
            if kind is kinds.APPLICATION:
                self._begin_application(block)

    def _begin_application(self, block: ObservedBlock) -> None:
        """Reset the figures, and export the configuration as events of the application's span."""
        settings = self.settings
        self._application, self._has_application_ended, self._loop = block, False, None
        session_tag = settings.session_tag or RECORDER.process.session
        is_baseline = bool(settings.is_baseline_run)
        self._facts.begin_application(session_tag, is_baseline=is_baseline)
        self._figures, self._saves = LoopFigures(self._facts.steps), SaveFigures()
        attributes = initialization_attributes(
            settings, self._facts.world_size, session_tag, is_baseline=is_baseline
        )
        self._export_event(block, EventName.ONE_LOGGER_INITIALIZATION, attributes, block.began)
        if self.training is not None:
            self._export_training(self.training)

    def _export_training(self, training: TrainingTelemetryConfig) -> None:
        """Publish the configuration of the training, and export it as an event if the application is open."""
        perf_tag, iterations_target = training.perf_tag or "", training.train_iterations_target
        self._facts.describe_training(perf_tag, iterations_target)
        if self._application is not None:
            attributes = training_attributes(training, self._facts.steps, perf_tag, iterations_target)
            self._export_event(self._application, EventName.UPDATE_TRAINING_TELEMETRY_CONFIG, attributes)

    def _begin_loop(self, block: ObservedBlock) -> None:
        """Start new figures for a loop, and set the attributes of the loop's span."""
        values: Mapping[str, Any] = block.values
        self._loop, self._in_earlier_loop = block, False
        self._facts.begin_loop(
            self._target(block, "train_iterations_target"),
            self._target(block, "train_samples_target"),
        )
        self._figures = LoopFigures(
            self._facts.steps,
            values["train_iterations_start"],
            values.get("train_samples_start"),
            block.began.seconds_since_epoch,
        )
        self._saves.loop_began()
        block.span.set_initial_attributes(self._figures.attributes())

    def _target(self, block: ObservedBlock, name: str) -> int | None:
        """Return the target of a loop, or the target of the configuration if the loop has none."""
        target = block.values.get(name)
        if isinstance(target, int):
            return target
        return None if self.training is None else self.training.current_value(f"{name}_or_fn")

    def _begin_save(self, block: ObservedBlock) -> CheckpointFigures:
        """Return the figures of a new save, and set the attributes of the save's span.

        Before the first loop, the step of the save stands for the completed iterations.
        """
        training, step = self.training, block.values.get("global_step")
        strategy = CheckPointStrategy.SYNC if training is None else training.save_checkpoint_strategy
        figures = self._figures
        step_number = step if isinstance(step, int) else figures.completed_iterations
        completed_iterations = step_number if figures.start_time is None else figures.completed_iterations
        save = self._saves.begin(step_number, strategy, figures.snapshot(completed_iterations))
        block.span.set_initial_attributes(save.attributes())
        return save

    # End of a block --------------------------------------------------------------------------------------

    def block_ending(self, block: ObservedBlock) -> None:
        """Record that the application ends, before its open blocks are ended. The end of a loop is ignored here."""
        if block is self._application:
            self._is_application_ending = True

    def block_ended(
        self, block: ObservedBlock, timestamp: TracingTimestamp, error: BaseException | None
    ) -> None:
        """Export the figures of a block, and the stop of the span. At the end of the application, close the exporters."""
        state = block.data
        if not isinstance(state, BlockState):
            return
        with self._lock:
            ends_application = block is self._application
            if ends_application:
                self._application = None
                self._is_application_ending, self._has_application_ended = False, True
            else:
                self._export_figures(block, state, timestamp, is_failed=error is not None)
                if self._is_application_ending:
                    self._export_forced_end(block, state, timestamp)
            self.span_export.stop(block.span)
            block.data = None
            if ends_application:
                self.delivery.close_exporters()

    def _export_figures(
        self, block: ObservedBlock, state: BlockState, timestamp: TracingTimestamp, *, is_failed: bool
    ) -> None:
        """Export the event that precedes the stop of a span.

        For a block that is still open at the end of the application, only the event of the training loop is exported.
        """
        figures = self._figures
        if block is self._loop:
            self._loop = None
            if figures.pending_iterations:
                self._export_event(block, EventName.TRAINING_METRICS_UPDATE, figures.update())
        elif self._is_application_ending:
            return
        elif block.kind is kinds.VALIDATION_LOOP:
            self._export_event(block, EventName.VALIDATION_METRICS_UPDATE, figures.validation_ended())
        elif block.kind is kinds.TESTING_LOOP:
            self._export_event(block, EventName.TESTING_METRICS_UPDATE, figures.testing_ended())
        elif state.save is not None:
            self._end_save(block, state.save, timestamp, is_failed=is_failed)

    def _export_forced_end(
        self, block: ObservedBlock, state: BlockState, timestamp: TracingTimestamp
    ) -> None:
        """Export an error for a block that is still open when the application ends."""
        if state.save is not None:
            self._saves.drop(state.save)
        message = (
            f"Timer for span {block.span.name_str} was automatically stopped: the application ended, so the span is"
            " being stopped, and its on_xxx_end method was not called correctly"
        )
        error = ErrorEvent.create(message, timestamp=timestamp)
        block.span.append_event(error)
        self.span_export.error(block.span, error)

    def _end_save(
        self, block: ObservedBlock, save: CheckpointFigures, timestamp: TracingTimestamp, *, is_failed: bool
    ) -> None:
        """Export the end of a save. A synchronous save by a context manager has then succeeded, unless the block raised."""
        if block.is_lexical and not is_failed and save.strategy is CheckPointStrategy.SYNC:
            if self._saves.find_pending(save.step) is save:
                self._export_success(block, save, timestamp)
            else:
                self.misuse("checkpoint_save", "unknown_step", "no confirmation of the save inside the block")
        seconds = max(timestamp.perf_counter_seconds - block.began.perf_counter_seconds, 0.0)
        attributes = self._saves.end(save, seconds, is_failed=is_failed)
        self._export_event(block, EventName.SYNC_CHECKPOINT_METRICS_UPDATE, attributes)

    def save_succeeded(self, global_step: object, timestamp: TracingTimestamp, call: str) -> None:
        """Export the success of a save: as an event of the save's span if the save is synchronous, otherwise of the application's span."""
        with self._lock:
            if not self._are_saves_enabled():
                return
            save = self._saves.find_pending(global_step)
            if save is None:  # counted by the recorder
                self._raise_if_propagating(f"{call}: expected the step of an unconfirmed save")
                return
            block = self._application
            if save.strategy is CheckPointStrategy.SYNC:
                block = next(filter(_is_block_of(save), TRAINING.open_blocks()), None)
            if block is None:
                self.misuse(call, "not_open", "the application to run")
            else:
                self._export_success(block, save, timestamp)

    def _export_success(
        self, block: ObservedBlock, save: CheckpointFigures, timestamp: TracingTimestamp
    ) -> None:
        """Export the success of a save as an event of the span of *block*."""
        attributes = self._saves.succeed(save, timestamp.seconds_since_epoch, self._figures.start_time)
        self._export_event(block, EventName.SAVE_CHECKPOINT_SUCCESS, attributes, timestamp)

    def block_discarded(self, block: ObservedBlock) -> None:
        """Discard a block that does not end. While the application ends, export the block as ended by the application."""
        with self._lock:
            if block is self._application:
                self._application = None
            if block is self._loop:
                self._loop = None
            if isinstance(block.data, BlockState):
                if self._is_application_ending:
                    now = TracingTimestamp.now()
                    block.span.stop(None, now)
                    self._export_forced_end(block, block.data, now)
                    self.span_export.stop(block.span)
                elif block.data.save is not None:
                    self._saves.drop(block.data.save)
            block.data = None
            self.span_export.forget(block.span)

    # Iterations and events -------------------------------------------------------------------------------

    def iteration_ended(self, kind: BlockKind, start_time: float, end_time: float, is_failed: bool) -> None:
        """Count a successful iteration. Export the figures after every `log_every_n_train_iterations` training iterations."""
        if is_failed:
            return
        seconds = max(end_time - start_time, 0.0)
        with self._lock:
            if kind is kinds.VALIDATION_ITERATION:
                self._figures.validations.add_value(seconds)
            elif kind in kinds.ITERATIONS:
                # The end of the iteration is a monotonic time; one-logger exports Unix times.
                end_unix_seconds = time() + (end_time - monotonic())
                self._training_iteration_ended(kind, seconds, end_unix_seconds)

    def _training_iteration_ended(self, kind: BlockKind, seconds: float, end_unix_seconds: float) -> None:
        """Count a training iteration. An iteration outside of a loop is misuse, unless a bridge has inferred the iteration."""
        training, figures = self.training, self._figures
        if training is None:
            if not kind.is_inferred:
                self.misuse(kind.end_name, "no_training_config", "set_training_telemetry_config first")
            return
        self._facts.update()
        if self._loop is None:
            if not kind.is_inferred and not self._in_earlier_loop:
                self.misuse(kind.end_name, "outside_training_loop", "to be inside a training loop")
            return
        figures.iteration_ended(seconds, end_unix_seconds, self._facts.world_size)
        if figures.completed_iterations % training.log_every_n_train_iterations == 0:
            self._export_event(self._loop, EventName.TRAINING_METRICS_UPDATE, figures.update())

    def step_reported(
        self, step: int | None, seconds: float | None, mode: str, timestamp: TracingTimestamp
    ) -> None:
        """Do nothing. One-logger has no counterpart of `training.step`."""

    def event_added(self, span: Span, event: Event) -> None:
        """Export an event that the job has added to a span."""
        self.span_export.event(span, event)

    def _export_event(
        self,
        block: ObservedBlock,
        name: StandardTrainingJobEventName,
        attributes: Attributes,
        timestamp: TracingTimestamp | None = None,
    ) -> None:
        """Add an event to the span of a block, and export the event."""
        event = Event.create(name, attributes, timestamp)
        block.span.append_event(event)
        self.span_export.event(block.span, event)


def _is_valid_loop(values: Mapping[str, object]) -> bool:
    """Return True if the steps and the samples before a loop are numbers of 0 or more. The samples may be unknown."""
    start, samples = values.get("train_iterations_start"), values.get("train_samples_start")
    return _is_count(start) and (samples is None or _is_count(samples))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_block_of(save: CheckpointFigures) -> Callable[[ObservedBlock], bool]:
    """Return a function that returns True for the block of a save."""
    return lambda block: isinstance(block.data, BlockState) and block.data.save is save
