"""Training state: loops, steps, saves and the outcome of the run, computed from the job's records.

The caller holds the lock of the recorder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from time import monotonic_ns, time
from typing import Any

from exporter.recording.conversion import AttributeValue, safe_repr, to_datum
from exporter.recording.event_values import RawEvent
from exporter.recording.identity import clean_text
from exporter.recording.notices import log_once
from exporter.recording.recorder import RECORDER
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.recording.value_class import Value, value_class
from exporter.recording.values import TrainingReading
from exporter.training.checkpoints import Checkpoints, Save, Work
from exporter.training.clock import ClockReading, PhaseClock
from exporter.training.collectives import sequence_numbers
from exporter.training.durations import classic_buckets, native_buckets
from exporter.training.facts import FLOP_FACTS, Facts
from exporter.training.kinds import OTHER
from exporter.training.metrics import PHASE_BUCKETS, Families, Series
from exporter.training.misuse import count_and_log_pending, report
from exporter.training.numbers import Numbers
from exporter.training.phases import PHASES
from exporter.training.progress import SKIPPED, Loop, NonfiniteStart, Progress, is_count
from exporter.training.records import (
    ApplicationBegan,
    ApplicationEnded,
    BackgroundEnded,
    EvaluationStepEnded,
    Interrupted,
    IterationEnded,
    LoopBegan,
    LoopEnded,
    NonfiniteBegan,
    Record,
    RunDescribed,
    SaveBegan,
    SaveEnded,
    SaveReported,
    SaveSucceeded,
    SpanEnded,
    SpanLogged,
    StepReported,
    StepSkipped,
)
from exporter.training.totals import PhaseTotals

MAX_SPAN_LABEL_CHARACTERS = 100
"""Maximum length of the labels `span` and `task`. Longer names are cut."""
MAX_PARAMETERS = 32
"""Limit of the parameters of the run. Further names are ignored."""


@value_class
class PhaseSeries(Value):
    """Series of a phase."""

    entries: Series
    seconds: Series
    active: Series
    durations: Series | None  # None unless the phase is recurring

    @classmethod
    def from_families(cls, families: Families, name: str) -> PhaseSeries:
        """Create the series of a phase."""
        durations = None
        if PHASES[name].recurring:
            durations = families.histogram("training.phase_duration", PHASE_BUCKETS, phase=name)
        return cls(
            entries=families.counter("training.phase_entries", phase=name),
            seconds=families.counter("training.phase", "seconds", phase=name),
            active=families.gauge("training.phase_active", phase=name),
            durations=durations,
        )

    def publish(self, totals: PhaseTotals, seconds: float, *, is_active: bool) -> None:
        """Update the series from the totals of the clock."""
        self.entries.raise_to(totals.entries)
        self.seconds.raise_to(seconds)
        self.active.set(float(is_active))
        if self.durations is None or not totals.cells:
            return
        cells = list(totals.cells)
        if sum(cells) != self.durations.count:  # a duration was counted since the last call
            counts = classic_buckets(cells, PHASE_BUCKETS)
            self.durations.replace(totals.duration_seconds, counts, native_buckets(cells))


class TrainingState:
    """State of the training in a process.

    Attributes:
        wall_clock_offset: Wall clock minus monotonic clock in seconds, set by the recorder before each use.
        loop: Latest training loop; None before the first loop.
        published_until: Monotonic time up to which the latest reading counts the phases; None before the first reading.
    """

    def __init__(self, clock: PhaseClock, numbers: Numbers) -> None:
        self.clock = clock
        self.families = Families()
        self.facts = Facts(self.families)
        self.progress = Progress(self.families, self.facts, numbers)
        self.work = Work()
        self.checkpoints = Checkpoints(self.families, self.work)
        self.wall_clock_offset = 0.0
        self.published_until: float | None = None
        self.loop: Loop | None = None
        self._loop_count = 0
        self._start_of_first_loop: int | None = None  # number of steps before the first loop
        self._is_loop_inferred = False  # of the latest loop
        # Monotonic time at the end of the latest step, or at the start of the loop.
        self._last_step_end: float | None = None
        self._last_possible_work_seconds = 0.0  # `PhaseClock.possible_work_seconds` at the latest step
        self._has_application_ended = False  # True if the application has ended and was not started again
        self._is_finished = False
        self._failure = ""  # exit reason, from `END_REASONS`
        self._open_loop_start: float | None = None  # monotonic start of a training loop that has not ended
        self._parameters: dict[str, AttributeValue | None] = {}  # parameters of `describe` that are not facts
        self._saves: dict[int, Save] = {}  # saves that block the training, by key
        self._phases: dict[str, PhaseSeries] = {}
        self._handlers: dict[type, Any] = {
            EvaluationStepEnded: self._evaluation_step_ended,
            StepReported: self._step_reported,
            LoopBegan: self._loop_began,
            LoopEnded: self._loop_ended,
            ApplicationBegan: self._application_began,
            ApplicationEnded: self._application_ended,
            SaveBegan: self._save_began,
            SaveEnded: self._save_ended,
            SaveSucceeded: self._save_succeeded,
            SaveReported: self._save_reported,
            RunDescribed: self._run_described,
            NonfiniteBegan: self._nonfinite_began,
            StepSkipped: self._step_skipped,
            Interrupted: self._interrupted,
            BackgroundEnded: self._background_ended,
            SpanEnded: self._span_ended,
            SpanLogged: self._span_logged,
        }

    def apply(self, records: Sequence[Record]) -> None:
        """Apply records in order.

        Consecutive records of one type are a group. After an unexpected exception, which is logged, the rest of the group is lost.
        """
        for record_type, group in groupby(records, type):
            try:
                if record_type is tuple:
                    self._iterations_ended(group)  # type: ignore[arg-type]  # groupby yields this type only
                    continue
                handle = self._handlers[record_type]
                for record in group:
                    handle(record)
            except Exception as error:  # a defect must not stop the recording thread
                if is_from_signal_handler(error):
                    raise
                log_once(f"record {error!r}", f"a defect in the recording of training: {error!r}")

    def reset(self) -> None:
        """Count from zero."""
        self.families.reset()
        self.work.reset()
        self.progress.reset()

    def count_misuse(self, dropped_records: int) -> None:
        """Count the pending reports of misuse, and, with the rule `dropped`, a flush with dropped records."""
        if dropped_records:
            self.families.counter("training.misuse", call="records", rule="dropped").add()
            log_once(
                "training records dropped",
                f"{dropped_records} training records were dropped, because the queue was full"
                ' (logged once; training_misuse_total{rule="dropped"} counts the flushes with dropped records)',
            )
        count_and_log_pending(self.families)

    # Steps -----------------------------------------------------------------------------------------------

    def _iterations_ended(self, records: Iterable[IterationEnded]) -> None:
        """Count consecutive iterations together, which is faster than one by one. Most records are iterations."""
        progress, last_end_time, total_work_seconds = self.progress, 0.0, 0.0
        durations: list[float] = []
        compute: list[float] = []
        for start_time, end_time, work_seconds, wait_seconds, is_failed, expected in records:
            if is_failed:
                self.work.failed_seconds += work_seconds
                continue
            seconds = end_time - start_time if end_time > start_time else 0.0
            durations.append(seconds)
            if wait_seconds is not None:
                compute.append(seconds - wait_seconds if seconds > wait_seconds else 0.0)
            total_work_seconds += work_seconds
            last_end_time = end_time
            if expected is not None or progress.expected is not None:
                progress.expect(expected)
        if durations:
            self._last_possible_work_seconds += total_work_seconds
            progress.count_training_steps(len(durations), last_end_time, durations, compute)
            self._steps_ended(last_end_time, total_work_seconds, len(durations))

    def _steps_ended(
        self, end_time: float, work_seconds: float, steps: int, number: int | None = None
    ) -> None:
        """Count the work of steps. *number* is the job's count after the last step; None continues the previous count."""
        self._last_step_end = end_time
        loop = self.loop
        if loop is None:
            loop = self._enter_loop(0 if number is None else max(number - 1, 0), is_inferred=False)
        first_step = loop.completed_steps if number is None else number - steps
        loop.completed_steps = first_step + steps
        self.work.add_completed(loop.number, first_step, first_step + steps - 1, work_seconds)

    def _step_reported(self, record: StepReported) -> None:
        """Count a step of a job that reports no iterations.

        The work of the step is the possible work since the previous step, at most the duration of the step. Without a previous step, the
        work is the reported duration, or 0.
        """
        seconds, previous_end, work = record.seconds, self._last_step_end, record.seconds or 0.0
        if previous_end is not None:
            seconds = max(record.end_time - previous_end, 0.0) if seconds is None else seconds
            work = max(min(record.possible_work_seconds - self._last_possible_work_seconds, seconds), 0.0)
        self._last_possible_work_seconds = record.possible_work_seconds
        self.progress.count_training_steps(1, record.end_time, [] if seconds is None else [seconds], [])
        if record.expected is not None or self.progress.expected is not None:
            self.progress.expect(record.expected)
        self._steps_ended(record.end_time, work, 1, record.number)

    def _evaluation_step_ended(self, record: EvaluationStepEnded) -> None:
        self.progress.count_evaluation_batch(record.mode, record.seconds, record.end_time)

    def _step_skipped(self, record: StepSkipped) -> None:
        if record.reason in SKIPPED:
            self.families.counter("training.skipped_steps", reason=str(record.reason)).add()
        else:
            report("skipped_step", "value", f"overflow or nonfinite, not {safe_repr(record.reason)}")

    def _nonfinite_began(self, record: NonfiniteBegan) -> None:
        step = None
        if self.loop is not None:
            step = self.loop.completed_steps + record.is_iteration_open
        self.progress.nonfinite_starts[record.kind] = NonfiniteStart(step, record.unix_seconds)

    # Loops and the application ---------------------------------------------------------------------------

    def _enter_loop(self, start: int, *, is_inferred: bool) -> Loop:
        """Return a new loop, which becomes the latest loop.

        `first_step` of the reading is the start of the first loop. If a bridge has inferred that loop and the job starts a loop of its
        own, `first_step` is the start of the job's first loop.
        """
        self._loop_count += 1
        self.loop = Loop(self._loop_count, start, start)
        if self._start_of_first_loop is None or (self._is_loop_inferred and not is_inferred):
            self._start_of_first_loop = start
        self._is_loop_inferred = is_inferred
        return self.loop

    def _loop_began(self, record: LoopBegan) -> None:
        self.progress.count_expected()
        self._failure = ""  # the job has continued after the failure of an earlier loop
        self._last_step_end = self._open_loop_start = record.start_time
        self._enter_loop(record.start, is_inferred=record.is_inferred)
        self.checkpoints.begin_loop()
        if record.target:
            self.facts.describe({"step_target": record.target})

    def _loop_ended(self, record: LoopEnded) -> None:
        self.progress.count_expected()
        self.progress.is_over = True
        self._open_loop_start = None
        self._failure = self._failure or record.failure

    def _application_began(self, _: ApplicationBegan) -> None:
        """Clear the outcome. An application that starts after the end of an earlier one also starts without a loop and pending saves."""
        if self._has_application_ended:
            self._has_application_ended = False
            self.loop = None
            self.checkpoints.pending_saves.clear()
        self._is_finished, self._failure = False, ""

    def _application_ended(self, record: ApplicationEnded) -> None:
        self.progress.count_expected()
        self._has_application_ended = True
        self._failure = self._failure or record.failure
        self._is_finished = record.is_orderly and not self._failure

    def _interrupted(self, record: Interrupted) -> None:
        self._failure = record.reason

    # Saves -----------------------------------------------------------------------------------------------

    def _save_began(self, record: SaveBegan) -> None:
        """Record the start of a save. A save of an invalid step is reported as misuse, and counts as a save of the latest step."""
        step = record.step
        if type(step) is not int or not is_count(abs(step)):
            report(record.call, "global_step", f"global_step to be an integer, not {safe_repr(step)}")
            step = 0 if self.loop is None else self.loop.completed_steps
        completed_steps = step if self.loop is None else self.loop.completed_steps
        self._saves[record.key] = self.checkpoints.begin(
            step, record.strategy, record.start_time, completed_steps
        )

    def _save_ended(self, record: SaveEnded) -> None:
        """Record the end of the blocking part of a save.

        A synchronous save has then succeeded or failed. An asynchronous save that did not fail stays pending until it is confirmed.
        """
        save = self._saves.pop(record.key, None)
        if save is None:
            return
        is_synchronous = save.strategy == "sync"
        if is_synchronous and record.is_success and not save.is_confirmed:
            self.checkpoints.succeed(save, record.end_time, record.unix_seconds)  # `fail` then has no effect
        self.checkpoints.observe_blocking(save.strategy, max(record.end_time - save.start_time, 0.0))
        if is_synchronous or record.is_success is False:
            self.checkpoints.fail(save)

    def _save_succeeded(self, record: SaveSucceeded) -> None:
        save = self.checkpoints.find_pending(record.step)
        if save is None:
            expected = f"the step of an unconfirmed save, not {safe_repr(record.step)}"
            report(record.call, "unknown_step", expected)
        else:
            self.checkpoints.succeed(save, record.end_time, record.unix_seconds)

    def _save_reported(self, record: SaveReported) -> None:
        problem = self.checkpoints.report(record)
        if problem is not None:
            report("checkpoint_saved", "value", problem)

    # Facts and spans -------------------------------------------------------------------------------------

    def _run_described(self, record: RunDescribed) -> None:
        for name, expected in self.facts.describe(record.values):
            report("describe", name, f"{name} {expected}, not {safe_repr(record.values[name])}")
        for name, value in record.parameters.items():
            if name in self._parameters or len(self._parameters) < MAX_PARAMETERS:
                self._parameters[name] = value

    def _background_ended(self, record: BackgroundEnded) -> None:
        task = clean_text(record.task)[:MAX_SPAN_LABEL_CHARACTERS] if type(record.task) is str else ""
        if type(record.task) is not str:
            report("background", "task", f"the name of the task, not {safe_repr(record.task)}")
        self.families.counter("training.background", "seconds", task=task or OTHER).add(record.seconds)

    def _span_ended(self, record: SpanEnded) -> None:
        name = clean_text(record.name)[:MAX_SPAN_LABEL_CHARACTERS]
        self.families.summary("training.span_duration", span=name or OTHER).observe(record.seconds)

    def _span_logged(self, record: SpanLogged) -> None:
        """Record an event about a span, with the facts or the result of the run if requested."""
        event_kind = RECORDER.events.kind(record.type, "info")
        if not event_kind.enabled:
            return
        data: dict[str, Any] = dict(record.data)
        if record.parameters and record.type == "training.begin":
            flops = {name: getattr(self.facts, name) for name in FLOP_FACTS}
            data = self._parameters | dict(self.facts.pairs()) | flops | data
        elif record.parameters:
            step = None if self.loop is None else self.loop.completed_steps
            reason = record.reason or self._failure or None
            data |= {"reason": reason, "step": step, "steps": self.progress.steps}
        values = {name: to_datum(value) for name, value in data.items()} | {"name": record.name}
        event_data = {name: value for name, value in values.items() if value is not None}
        raw = RawEvent(
            record.type, None, "info", event_data, record.unix_seconds, time(), monotonic_ns(), record.span_id
        )
        RECORDER.events.record(event_kind, raw, record.unix_seconds)

    # Publishing ------------------------------------------------------------------------------------------

    def publish(self, end_time: float | None = None) -> TrainingReading:
        """Update the series up to now and return the reading. In simulations, *end_time* replaces the current time."""
        for group, number in sequence_numbers().items():
            self.families.gauge("training.collective_sequence", group=group).set(number)
        clock = self.clock.read(end_time)
        self.published_until = clock.time
        self._publish_phases(clock)
        self.progress.publish(self.wall_clock_offset)
        if self.loop is not None:
            self.families.gauge("training.step").set(float(self.loop.completed_steps))
        return self._reading(clock)

    def _publish_phases(self, clock: ClockReading) -> None:
        for name, totals in self.clock.phases.items():
            if not totals.entries and name not in clock.seconds:
                continue
            series = self._phases.get(name)
            if series is None:
                series = self._phases[name] = PhaseSeries.from_families(self.families, name)
            series.publish(totals, clock.seconds.get(name, 0.0), is_active=name == clock.active)
        active_since = self.families.gauge("training.phase_active_since_timestamp", "seconds")
        active_since.set(round(clock.active_since + self.wall_clock_offset, 3))

    def _reading(self, clock: ClockReading) -> TrainingReading:
        progress, work = self.progress, self.work
        # After a loop, no step is due until the next loop has started.
        latest_progress = self._open_loop_start if progress.is_over else progress.last_progress
        last_progress = None
        if progress.last_progress is not None and latest_progress is not None:
            last_progress = latest_progress + self.wall_clock_offset
        return TrainingReading(
            facts=self.facts.pairs(),
            phase=clock.active,
            phase_since=clock.active_since + self.wall_clock_offset,
            phases=clock.seconds,
            last_progress=last_progress,
            first_step=self._start_of_first_loop,
            loop=self._loop_count,
            inferred_loop=self._is_loop_inferred,
            step=None if self.loop is None else self.loop.completed_steps,
            steps=progress.steps,
            work_seconds=work.seconds,
            open_seconds=clock.open_work_seconds,
            failed_seconds=work.failed_seconds,
            committed_step=work.committed_step,
            committed_seconds=work.committed_seconds,
            segments=work.segments(),
            finished=self._is_finished,
            failure=self._failure,
            longest_step_seconds=progress.longest_seconds,
            history_until=clock.history.until,
            history_phases=clock.history.phases,
            intervals=clock.history.groups,
            flops_per_token=self.facts.flops_per_token,
            hardware_flops_per_token=self.facts.hardware_flops_per_token,
            peak_flops=self.facts.peak_flops,
        )
