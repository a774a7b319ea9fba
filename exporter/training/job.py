"""The job: what its application, loops, iterations and saves mean for the figures, the families and the exporters.

Used by the interpreter, which says what begins and ends. Families count whatever is told; one-logger's records and rules
begin with the configuration of the provider.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from exporter.recording.identity import clean_text, identity
from exporter.training import kinds
from exporter.training.attributes import (
    OneLoggerInitializationAttributes,
    TrainingTelemetryAttributes,
)
from exporter.training.calls import Began, Call, Ended
from exporter.training.events import Event
from exporter.training.facts import Facts
from exporter.training.looping import Looping
from exporter.training.misuse import Misuse
from exporter.training.names import StandardTrainingJobEventName
from exporter.training.opened import Open
from exporter.training.progress import Progress
from exporter.training.saving import Saving
from exporter.training.series import Families
from exporter.training.types import Attributes, shown
from exporter.training.work import MOST_STEPS, Work
from exporter.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    from exporter.training.interpreter import Interpreter
    from exporter.training.provider import Configured

    Refusal: TypeAlias = tuple[str, str]

_EVENTS = StandardTrainingJobEventName
_NAMED = frozenset({"perf_tag", "global_batch_size", "log_every_n_train_iterations", "custom_metadata"})
_OFTEN = 50
"""Iterations between two updates where nothing is configured."""


class Job:
    """What a process trains.

    Args:
        families: Where all is counted.
        misuse: Takes what cannot be meant so.

    Attributes:
        configured: What the job has configured and has not switched off; None before.
        closed: Whether the application has ended, and no other has begun.
        finished: Whether it ended in order.
        failure: Why it ended or is about to.
    """

    def __init__(self, families: Families, misuse: Misuse) -> None:
        self._families = families
        self._misuse = misuse
        self.configured: Configured | None = None
        self.progress = Progress(families)
        self.work = Work()
        self.facts = Facts(families, self.progress)
        self.looping = Looping(self, families, self.progress, self.work)
        self.saving = Saving(self, families, self.work)
        self.closed = False
        self.finished = False
        self.failure = ""

    def reset(self) -> None:
        """Count from zero; what is open stays open."""
        self._families.reset()
        self.work.reset()
        self.progress.reset()
        iteration = self.looping.iteration
        if iteration is not None:
            iteration.work, iteration.waits = 0.0, 0.0

    # Rules -----------------------------------------------------------------------------------------------

    @property
    def tells(self) -> bool:
        """Whether telemetry is configured, so that one-logger's rules and records are in force."""
        return self.configured is not None

    @property
    def trains(self) -> bool:
        """Whether the configuration of the training is known."""
        return self.configured is not None and self.configured.training is not None

    @property
    def every(self) -> int:
        """Iterations between two updates."""
        if self.configured is None or self.configured.training is None:
            return _OFTEN
        return self.configured.training.log_every_n_train_iterations

    def rule(self, call: str, rule: str, expected: str) -> None:
        """Count a call that breaks a rule of one-logger's; before configuration there is none."""
        if self.tells:
            self._misuse.count(call, rule, expected)

    def wrong(self, call: str, rule: str, expected: str) -> None:
        """Count a call that cannot be meant so, configured or not."""
        self._misuse.count(call, rule, expected[:300])

    def refusal(self, mark: Began, kind: kinds.Kind) -> Refusal | None:
        """Say why a span cannot begin; None when it can."""
        loop = kind is kinds.TRAINING_LOOP
        if self.tells and not self.trains and (loop or kind is kinds.CHECKPOINT_SAVE):
            return "S6", "set_training_telemetry_config before it"
        if loop:
            start = mark.values.get("train_iterations_start")
            samples = mark.values.get("train_samples_start")
            if not _is_count(start):
                return "S9", f"train_iterations_start of 0 or more, not {shown(start)}"[:200]
            if samples is not None and not _is_count(samples):
                return "S9", f"train_samples_start of 0 or more, not {shown(samples)}"[:200]
        return None

    def ask(self, values: Mapping[str, Any]) -> None:
        """Take what the job's callables say."""
        self.looping.figures.ask(values)
        self.facts.ask(values)
        if "world_size" in values:
            self.facts.describe({"world_size": values["world_size"]})

    # Begins ----------------------------------------------------------------------------------------------

    def phase_of(self, opened: Open, mark: Began | None) -> str | None:
        """Name the phase of a span."""
        if opened.kind is kinds.CHECKPOINT_SAVE and mark is not None:
            return f"checkpoint_save_{self.saving.strategy_of(mark).value}"
        return opened.kind.phase

    def begins(self, opened: Open, mark: Began | None, by: Interpreter) -> None:
        """Note that a span has begun."""
        kind = opened.kind
        if kind is kinds.TRAINING_ITERATION:
            self.looping.begin_iteration(opened)
        if mark is None:
            if opened.span is not None:
                by.records.start(opened)
            return
        if kind is kinds.APPLICATION:
            self._begin_application(opened, mark, by)
            return
        attributes: Attributes | None = None
        if kind is kinds.TRAINING_LOOP:
            self.failure = ""  # whatever ended an earlier loop, the job has gone on
            loop = self.looping.begin(opened, mark)
            self.saving.loop_begins()
            self.facts.target(loop.target)
            self.facts.ask(mark.values)
            attributes = loop.attributes()
        elif kind is kinds.CHECKPOINT_SAVE:
            attributes = self.saving.begin(opened, mark)
            if attributes is None:
                return  # saves are switched off
        if attributes is not None and opened.span is not None:
            opened.span.set_initial_attributes(attributes)
        by.records.start(opened)

    def _begin_application(self, opened: Open, mark: Began, by: Interpreter) -> None:
        if self.closed:
            self.closed = False
            self.looping.renew()
            self.saving.renew()
        self.finished = False
        self.failure = ""
        by.records.start(opened)
        if self.configured is None:
            return
        settings = self.configured.settings
        said = mark.values.get("settings") or {}
        self.facts.application(settings, said)
        attributes = OneLoggerInitializationAttributes.create(
            world_size=said.get("world_size") or 1,
            one_logger_training_telemetry_version=__version__,
            enable_for_current_rank=settings.enable_for_current_rank,
            session_tag=said.get("session_tag") or "",
            is_baseline_run=bool(said.get("is_baseline_run")),
            summary_data_schema_version=settings.summary_data_schema_version,
            node_name=os.uname().nodename,
            rank=identity().rank or 0,
            custom_metadata=settings.custom_metadata,
        )
        by.records.event(opened, Event.create(_EVENTS.ONE_LOGGER_INITIALIZATION, attributes, mark.at))
        self._announce(opened, mark.values.get("training"), by)

    def _announce(self, opened: Open, values: Mapping[str, Any] | None, by: Interpreter) -> None:
        """Tell the configuration of the training."""
        if self.configured is None or self.configured.training is None or not values:
            return
        training = self.configured.training
        self.facts.training(values)
        self.looping.figures.ask(values)
        attributes = TrainingTelemetryAttributes.create(
            perf_tag="" if values.get("perf_tag") is None else values["perf_tag"],
            global_batch_size=values.get("global_batch_size") or 0,
            log_every_n_train_iterations=training.log_every_n_train_iterations,
            checkpoint_strategy=training.save_checkpoint_strategy,
            custom_metadata=training.custom_metadata,
            **{name: value for name, value in values.items() if name not in _NAMED},
        )
        by.event(opened, _EVENTS.UPDATE_TRAINING_TELEMETRY_CONFIG, attributes)

    # Ends ------------------------------------------------------------------------------------------------

    def ends(self, opened: Open, at: float, mark: Ended | None, by: Interpreter, *, failed: bool) -> None:
        """Note that a span has ended."""
        kind, looping = opened.kind, self.looping
        if kind is kinds.TRAINING_ITERATION:
            looping.end_iteration(opened, at, by, failed=failed)
        elif kind is kinds.VALIDATION_ITERATION or kind is kinds.TESTING_ITERATION:
            self._end_batch(opened, at, failed=failed)
        elif kind is kinds.VALIDATION_LOOP:
            attributes: Attributes = looping.figures.validation_update()
            by.event(opened, _EVENTS.VALIDATION_METRICS_UPDATE, attributes)
        elif kind is kinds.TESTING_LOOP:
            attributes = looping.figures.testing_update()
            by.event(opened, _EVENTS.TESTING_METRICS_UPDATE, attributes)
        elif kind is kinds.CHECKPOINT_SAVE:
            entered = mark is not None and mark.entered
            self.saving.end(opened, at, by, entered=entered, failed=failed)
        elif kind is kinds.TRAINING_LOOP:
            looping.end(by)
            self._note_failure(mark)
        elif kind is kinds.APPLICATION:
            self._end_application(at, mark, by)

    def _end_batch(self, opened: Open, at: float, *, failed: bool) -> None:
        """End an iteration of a validation or a test; one whose body raised is not completed."""
        if failed:
            return
        seconds = max(at - opened.began, 0.0)
        validates = opened.kind is kinds.VALIDATION_ITERATION
        self.progress.step("validation" if validates else "test", seconds, at)
        if validates:
            self.looping.figures.validations.add(seconds)

    def _end_application(self, at: float, mark: Ended | None, by: Interpreter) -> None:
        self.progress.settle()
        in_order = self.looping.open is None
        by.close_all(at)
        self.closed = True
        self._note_failure(mark)
        self.finished = in_order and not self.failure

    def _note_failure(self, mark: Ended | None) -> None:
        if mark is not None and mark.failure is not None and mark.failure.reason and not self.failure:
            self.failure = mark.failure.reason

    def cut_short(self, opened: Open, by: Interpreter) -> None:
        """Note that a span is open although the application ends."""
        if opened.kind is kinds.TRAINING_LOOP:
            self.looping.end(by)
        elif opened.kind is kinds.CHECKPOINT_SAVE:
            self.saving.fail(opened)
        elif opened is self.looping.iteration:
            self.looping.iteration = None

    # Other calls -----------------------------------------------------------------------------------------

    def called(self, call: Call, by: Interpreter) -> None:
        """Take any other call."""
        values, wrong = call.values, None
        if call.name == "on_save_checkpoint_success":
            self.saving.succeed(call, by)
        elif call.name == "step":
            wrong = self.looping.told(values, call.time, by)
        elif call.name == "checkpoint_saved":
            wrong = self.saving.told(values, call.time, by)
        elif call.name == "describe":
            for field, expected in self.facts.describe(values):
                self.wrong("describe", field, f"{field} {expected}, not {shown(values[field])}")
        elif call.name == "skipped_step":
            wrong = self._skip(values["reason"])
        elif call.name == "interruption":
            self.failure = values["reason"]
        elif call.name == "background":
            task = (
                clean_text(values["task"]) if isinstance(values["task"], str) and values["task"] else "other"
            )
            seconds = max(values["seconds"], 0.0)
            self._families.counter("training.background", "seconds", task=task[:100]).add(seconds)
        elif call.name == "set_training_telemetry_config":
            application = by.tree.find(kinds.APPLICATION)
            if application is not None and application.known:
                self._announce(application, values["training"], by)
        if wrong is not None:
            self.wrong(call.name, "value", wrong)

    def _skip(self, reason: object) -> str | None:
        if not isinstance(reason, str) or reason not in {"overflow", "nonfinite"}:
            return f"overflow or nonfinite, not {shown(reason)}"
        self._families.counter("training.skipped_steps", reason=str(reason)).add()
        return None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_STEPS
