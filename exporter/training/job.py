"""The job: what the begins and ends of its spans, and its other calls, mean for the families and the feed.

Families count whatever the job tells; a telemetry that is configured adds its rules and records. With one, an iteration
outside a training loop belongs to none (one-logger's rule); without one, most jobs have no loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from exporter.recording.identity import clean_text
from exporter.recording.values import TrainingReading
from exporter.training import span_kinds as kinds
from exporter.training.attributes import TracingTimestamp, shown
from exporter.training.calls import Began, Call, Ended
from exporter.training.checkpoints import Checkpoints, Work
from exporter.training.metrics import Families, Misuse, amount
from exporter.training.phase_clock import PhaseClock
from exporter.training.progress import RATES, SKIPPED, Facts, Loop, Progress, is_count
from exporter.training.spans import NO_TELEMETRY, Telemetry

if TYPE_CHECKING:
    from exporter.training.open_spans import OpenSpan


class Job:
    """What a process trains, from the monotonic time at which its recording began."""

    def __init__(self, families: Families, misuse: Misuse, began: float) -> None:
        self.families = families
        self.misuse = misuse
        self.clock = PhaseClock(families, began)
        self.facts = Facts(families)
        self.progress = Progress(families, self.facts)
        self.work = Work()
        self.checkpoints = Checkpoints(families, self.work)
        self.telemetry: Telemetry = NO_TELEMETRY  # what the job has configured
        self.offset = 0.0  # of the wall clock from the monotonic one, at present
        self.tells = False  # the job has told of a loop or a step itself, so that a bridge need not guess
        self.closed = False  # the application has ended, and no other has begun
        self.loop: Loop | None = None  # the latest; None before the first
        self.open_loop: OpenSpan | None = None  # its span; None outside it
        self.iteration: OpenSpan | None = None  # of the main thread
        self._before_loops = Loop(0, 0, {}, 0)
        self._loops = 0
        self._first_step: int | None = None
        self._guessed = False  # that step
        self._last_step: float | None = None
        self._last_work = 0.0
        self._finished = False
        self.failure = ""  # why the job ends, as far as it is known; one of `END_REASONS`

    def reset(self, now: float) -> None:
        """Count from zero; what is open stays open."""
        self.families.reset()
        self.work.reset()
        self.progress.reset()
        self.clock.reset(now)
        if self.iteration is not None:
            self.iteration.work, self.iteration.waits = 0.0, 0.0

    def moment(self, at: float) -> TracingTimestamp:
        """Give a monotonic time on both clocks."""
        return TracingTimestamp(at + self.offset, at)

    def rule(self, call: str, rule: str, expected: str) -> None:
        """Count a call that breaks a rule of one-logger's; before configuration there is none."""
        if self.telemetry.configured:
            self.misuse.count(call, rule, expected)

    def wrong(self, call: str, rule: str, expected: str) -> None:
        """Count a call that cannot be meant so, configured or not."""
        self.misuse.count(call, rule, expected[:300])

    def refusal(self, kind: kinds.Kind, values: Mapping[str, Any]) -> tuple[str, str] | None:
        """Say why a span cannot begin, as a rule and what was expected; None when it can."""
        telemetry, loop = self.telemetry, kind is kinds.TRAINING_LOOP
        if telemetry.configured and not telemetry.trains and (loop or kind is kinds.CHECKPOINT_SAVE):
            return "S6", "set_training_telemetry_config before it"
        for name in ("train_iterations_start", "train_samples_start") if loop else ():
            value = values.get(name)
            if not is_count(value) and (value is not None or name == "train_iterations_start"):
                return "S9", f"{name} of 0 or more, not {shown(value)}"
        return None

    def ask(self, values: Mapping[str, Any]) -> None:
        """Take what the job's callables say."""
        (self.loop or self._before_loops).ask(values)
        self.facts.ask(values)

    # Begins ----------------------------------------------------------------------------------------------

    def span_began(self, opened: OpenSpan, mark: Began | None) -> None:
        """Note that a span has begun."""
        kind = opened.kind
        if kind in kinds.ITERATIONS:
            self.progress.count_expected()
            if opened.stack.main and self.iteration is None:
                self.iteration = opened
                opened.work, opened.waits = self.clock.work, self.clock.waits
        if mark is None:
            return
        if kind in kinds.LOOPS:
            self.failure = ""  # whatever ended an earlier loop, the job has gone on
            self._last_step = mark.time
            self.open_loop = opened
            loop = self._enter(mark.values["train_iterations_start"], mark.values)
            self.checkpoints.furthest = None  # steps count from somewhere else
            self.facts.ask(mark.values)
            if opened.known:
                self.telemetry.loop_began(opened, loop, mark.span.start_event.timestamp.seconds_since_epoch)
        elif kind is kinds.CHECKPOINT_SAVE:
            self._save_began(opened, mark)
        elif kind is kinds.APPLICATION:
            if self.closed:
                self.closed = False
                self.loop, self._before_loops = None, Loop(0, 0, {}, 0)
                self.checkpoints.under_way.clear()
            self._finished, self.failure = False, ""

    def application_began(self, opened: OpenSpan, values: Mapping[str, Any]) -> None:
        """Take what is configured when an application begins; after the start of its span was told."""
        if self.telemetry.configured:
            self.facts.ask({**values, **(values.get("settings") or {})})
            self.telemetry.application_began(opened, values)
            self.training_configured(opened, values.get("training"))

    def training_configured(self, opened: OpenSpan, values: Mapping[str, Any] | None) -> None:
        """Take the configuration of the training within an application."""
        if self.telemetry.trains and values:
            self.facts.ask(values)
            (self.loop or self._before_loops).ask(values)
            self.telemetry.training_configured(opened, values)

    def _enter(self, start: int, values: Mapping[str, Any]) -> Loop:
        self._loops += 1
        self.loop = Loop(self._loops, start, dict(values), start)
        if self._first_step is None or (self._guessed and self.tells):
            self._first_step = start
        self._guessed = not self.tells
        return self.loop

    def _save_began(self, opened: OpenSpan, mark: Began) -> None:
        if is_untold_save(mark):
            return
        step = mark.values.get("global_step")
        if not isinstance(step, int) or not is_count(abs(step)):
            self.wrong(mark.name, "global_step", f"global_step to be a number, not {shown(step)}")
            step = 0 if self.loop is None else self.loop.completed
        completed = step if self.loop is None else self.loop.completed
        strategy = mark.values.get("strategy", "sync")
        opened.save = self.checkpoints.begin(step, strategy, opened.began, completed)
        if opened.known:
            self.telemetry.save_began(opened, opened.save)

    # Ends ------------------------------------------------------------------------------------------------

    def span_ended(self, opened: OpenSpan, at: float, mark: Ended | None, *, failed: bool) -> None:
        """Note that a span has ended."""
        kind = opened.kind
        if kind in kinds.ITERATIONS:
            self._iteration_ended(opened, at, failed=failed)
        elif kind is kinds.VALIDATION_ITERATION or kind is kinds.TESTING_ITERATION:
            if not failed:  # else it is not completed
                seconds = max(at - opened.began, 0.0)
                validates = kind is kinds.VALIDATION_ITERATION
                self.progress.step("validation" if validates else "test", seconds, at)
                if validates:
                    self.telemetry.validation_step_ended(seconds)
        elif kind is kinds.VALIDATION_LOOP or kind is kinds.TESTING_LOOP:
            if opened.known:
                self.telemetry.evaluation_ended(opened, 0 if self.loop is None else self.loop.completed)
        elif kind is kinds.CHECKPOINT_SAVE:
            self._save_ended(opened, at, entered=mark is not None and mark.entered, failed=failed)
        elif kind in kinds.LOOPS:
            self._loop_ended()
            self._note_failure(mark)

    def application_ended(self, mark: Ended | None, *, in_order: bool) -> None:
        """Note that the application has ended, after all in it was closed."""
        self.closed = True
        self._note_failure(mark)
        self._finished = in_order and not self.failure

    def cut_short(self, opened: OpenSpan) -> None:
        """Note that a span is open although the application ends; of an iteration, nothing is counted."""
        if opened.kind in kinds.LOOPS:
            self._loop_ended()
        elif opened.save is not None:
            self.checkpoints.fail(opened.save)
        self.discarded(opened)

    def discarded(self, opened: OpenSpan) -> None:
        """Note that a span is forgotten, since nobody will end it."""
        if opened is self.iteration:
            self.iteration = None
        elif opened is self.open_loop:
            self.open_loop = None

    def _loop_ended(self) -> None:
        self.progress.count_expected()
        self.progress.over = True
        opened, self.open_loop = self.open_loop, None
        if opened is not None and opened.known:
            self.telemetry.loop_ended(opened)

    def _note_failure(self, mark: Ended | None) -> None:
        if mark is not None and not self.failure:
            self.failure = mark.reason

    def _iteration_ended(self, opened: OpenSpan, at: float, *, failed: bool) -> None:
        """End an iteration; one whose body raised is not completed."""
        work = waits = 0.0
        if self.iteration is opened:
            self.iteration = None
            work, waits = self.clock.work - opened.work, self.clock.waits - opened.waits
        if failed:
            self.work.failed_seconds += work
            return
        seconds = max(at - opened.began, 0.0)
        self._step_ended(seconds, at, work, max(seconds - waits, 0.0) if opened.stack.main else None)

    def _step_ended(
        self, seconds: float | None, at: float, work: float, compute: float | None, number: int | None = None
    ) -> None:
        """Count a completed step: what it took, of that what was work, and what it took without waiting."""
        telemetry = self.telemetry
        self.progress.step("train", seconds, at, compute)
        self._last_step, self._last_work = at, self.clock.maybe_work()
        if telemetry.configured:
            end = kinds.TRAINING_ITERATION.end
            if not telemetry.trains:
                return self.rule(end, "S6", "set_training_telemetry_config before it")
            if self.open_loop is None:
                return self.rule(end, "S11", "to be inside a training loop")
        loop = self.loop or self._enter(0 if number is None else max(number - 1, 0), {})
        loop.completed = loop.completed + 1 if number is None else number
        ranks, tokens = self.facts.world_size or 1, loop.tokens
        self.progress.expect(loop.samples / ranks, None if tokens is None else tokens / ranks)
        self.work.done(loop.number, loop.completed - 1, work)
        if telemetry.configured:
            telemetry.step_ended(self.open_loop, loop, seconds or 0.0, at + self.offset, ranks)
        return None

    def _save_ended(self, opened: OpenSpan, at: float, *, entered: bool, failed: bool) -> None:
        """End a save as far as it held up the training."""
        save = opened.save
        if save is None:
            return
        synchronous = save.strategy == "sync"
        if synchronous and entered and not failed:
            if save.confirmed:
                self.rule("checkpoint_save", "unknown_step", "no success of its own inside the block")
            else:
                self.save_succeeded(save.step, opened, self.moment(at), "checkpoint_save")
        seconds = max(at - opened.began, 0.0)
        self.checkpoints.blocked(save.strategy, seconds)
        if failed or synchronous:
            self.checkpoints.fail(save)
        if opened.known:
            self.telemetry.save_ended(opened, save, seconds)

    def save_succeeded(self, step: object, holder: OpenSpan | None, at: TracingTimestamp, call: str) -> None:
        """Note that the save of a step is safe; the success is an event of its holder."""
        save = self.checkpoints.pending(step)
        if save is None:
            what = f"the step of a save that was begun and is not safe yet, not {shown(step)}"
            self.wrong(call, "unknown_step", what)
            return
        self.checkpoints.succeed(save, at.perf_counter_seconds, at.seconds_since_epoch)
        if holder is not None and holder.known:
            self.telemetry.save_succeeded(holder, save, at)

    # Other calls -----------------------------------------------------------------------------------------

    def called(self, call: Call) -> None:
        """Take any other call that says a fact."""
        values, wrong = call.values, None
        if call.name == "step":
            wrong = self._step_told(values, call.time)
        elif call.name == "checkpoint_saved":
            wrong = self.checkpoints.told(values, call.time, call.time + self.offset)
        elif call.name == "describe":
            for field, expected in self.facts.describe(values):
                self.wrong("describe", field, f"{field} {expected}, not {shown(values[field])}")
        elif call.name == "skipped_step":
            reason = values["reason"]
            if reason in SKIPPED:
                self.families.counter("training.skipped_steps", reason=reason).add()
            else:
                wrong = f"overflow or nonfinite, not {shown(reason)}"
        elif call.name == "interruption":
            self.failure = values["reason"]
        elif call.name == "background":
            task = clean_text(values["task"])[:100] if isinstance(values["task"], str) else ""
            seconds = self.families.counter("training.background", "seconds", task=task or "other")
            seconds.add(values["seconds"])
        if wrong is not None:
            self.wrong(call.name, "value", wrong)

    def _step_told(self, values: Mapping[str, Any], at: float) -> str | None:
        """Take the job's word that a step has just ended; gives what is wrong with it."""
        number, seconds, mode = values["step"], values["seconds"], values["mode"]
        if number is not None and not is_count(number):
            return f"step of 0 or more, not {shown(number)}"
        if seconds is not None and amount(seconds, 1e9) is None:
            return f"seconds of 0 or more, not {shown(seconds)}"
        if mode != "train":
            self.progress.step(mode, seconds, at)
            return None
        if self.iteration is not None:
            return None  # it is counted when it ends
        if values["asked"]:
            self.ask(values["asked"])
        self.clock.training_begins(at)
        self.clock.advance(at)
        last = self._last_step
        work = seconds or 0.0
        if last is not None:
            seconds = max(at - last, 0.0) if seconds is None else seconds
            work = max(min(self.clock.maybe_work() - self._last_work, seconds), 0.0)
        self._step_ended(seconds, at, work, None, number)
        return None

    def parameters(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Give all that is known of the training when something begins that was called with these values."""
        said = {**values, **(values.get("settings") or {}), **(values.get("training") or {})}
        given = {name: value for name, value in said.items() if not isinstance(value, Mapping)}
        rates = {name: getattr(self.facts, name) for name in RATES}
        return dict(self.facts.pairs()) | rates | given

    # What is published -----------------------------------------------------------------------------------

    def publish(self, now: float) -> None:
        """Bring the families up to date."""
        self.clock.advance(now)
        self.clock.publish(self.offset)
        self.progress.publish(self.offset)
        if self.loop is not None:
            self.families.gauge("training.step").set(float(self.loop.completed))

    def reading(self) -> TrainingReading:
        """Tell what the feed carries besides the families, up to the time to which the phases were counted."""
        clock, progress, work, iteration = self.clock, self.progress, self.work, self.iteration
        until, phases, history = clock.history.reading()
        return TrainingReading(
            facts=self.facts.pairs(),
            phase=clock.active,
            phase_since=clock.since + self.offset,
            phases=clock.seconds(),
            last_progress=None if progress.last is None else progress.last + self.offset,
            first_step=self._first_step,
            loop=self._loops,
            guessed=self._guessed,
            step=None if self.loop is None else self.loop.completed,
            steps=progress.steps,
            work_seconds=work.seconds,
            open_seconds=0.0 if iteration is None else clock.work - iteration.work,
            failed_seconds=work.failed_seconds,
            committed_step=work.committed_step,
            committed_seconds=work.committed_seconds,
            segments=work.segments(),
            finished=self._finished,
            failure=self.failure,
            longest_step_seconds=progress.longest,
            history_until=until,
            history_phases=phases,
            history=history,
            flops_per_token=self.facts.flops_per_token,
            hardware_flops_per_token=self.facts.hardware_flops_per_token,
            peak_flops=self.facts.peak_flops,
        )


def is_untold_save(call: Call | None) -> bool:
    """Tell whether a call is about a save while saves are switched off: no rule is about it, and nothing is told."""
    return call is not None and call.values.get("is_save_checkpoint_enabled") is False
