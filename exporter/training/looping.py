"""Looping: training loops, their iterations and validations, as they begin and end.

Used by the interpreter. With a configuration, an iteration outside a training loop belongs to none (one-logger's rule);
without one, most jobs have no loop, and their iterations count all the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from exporter.training.loops import Loop
from exporter.training.names import StandardTrainingJobEventName
from exporter.training.opened import Open
from exporter.training.progress import Progress
from exporter.training.series import Families
from exporter.training.types import shown
from exporter.training.work import MOST_STEPS, Work

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from exporter.training.calls import Began
    from exporter.training.interpreter import Interpreter
    from exporter.training.job import Job

_EVENTS = StandardTrainingJobEventName


class Looping:
    """The loops of a process.

    Args:
        job: Whose.
        families: Where the position is told.
        progress: Counts steps.
        work: Counts what they took.

    Attributes:
        loop: The latest loop; None before the first.
        open: Its span; None outside it.
        count: Loops that have begun.
        first_step: At which the first of them began.
        iteration: The iteration of the main thread that is open.
    """

    def __init__(self, job: Job, families: Families, progress: Progress, work: Work) -> None:
        self._job = job
        self._families = families
        self._progress = progress
        self._work = work
        self.loop: Loop | None = None
        self.open: Open | None = None
        self.count = 0
        self.first_step: int | None = None
        self.iteration: Open | None = None
        self._prelude = Loop(0, 0, 0, 0.0, {})
        self._last_step: float | None = None
        self._last_work = 0.0

    def renew(self) -> None:
        """Begin another job in the same process."""
        self.loop = None
        self._prelude = Loop(0, 0, 0, 0.0, {})

    @property
    def figures(self) -> Loop:
        """The latest loop, or what stands for it before the first."""
        return self._prelude if self.loop is None else self.loop

    def begin(self, opened: Open, mark: Began) -> Loop:
        """Begin a loop."""
        values = mark.values
        loop = self._enter(
            values["train_iterations_start"],
            values["train_samples_start"],
            mark.at.seconds_since_epoch,
            values,
        )
        self.open = opened
        self._last_step = mark.time
        return loop

    def end(self, by: Interpreter) -> None:
        """End the loop: what was not told yet is told, and no progress is waited for."""
        self._progress.settle()
        self._progress.over = True
        opened, self.open = self.open, None
        if opened is not None and self.figures.pending:
            by.event(opened, _EVENTS.TRAINING_METRICS_UPDATE, self.figures.update())

    def begin_iteration(self, opened: Open) -> None:
        """Begin an iteration."""
        self._progress.settle()
        if opened.stack.main and self.iteration is None:
            self.iteration = opened

    def end_iteration(self, opened: Open, at: float, by: Interpreter, *, failed: bool) -> None:
        """End an iteration; one whose body raised is not completed."""
        if self.iteration is opened:
            self.iteration = None
        work = waits = 0.0
        if opened.work is not None:
            work, waits = by.clock.work - opened.work, by.clock.waits - opened.waits
        if failed:
            self._work.failed(work)
            return
        seconds = max(at - opened.began, 0.0)
        self.step(seconds, at, work, by, compute=max(seconds - waits, 0.0) if opened.stack.main else None)

    def step(
        self,
        seconds: float,
        at: float,
        work: float,
        by: Interpreter,
        *,
        compute: float | None = None,
        number: int | None = None,
    ) -> None:
        """Count a step that was completed.

        Args:
            seconds: What it took.
            at: When it ended.
            work: Of it, what was work.
            by: Who interprets.
            compute: Of it, without waiting; None where that is not known.
            number: Steps completed, as the job says; None for one more.
        """
        self._progress.step("train", seconds, at, compute)
        self._last_step, self._last_work = at, _worked(by)
        job = self._job
        if job.tells and not job.trains:
            job.rule("on_training_single_iteration_end", "S6", "set_training_telemetry_config before it")
            return
        if job.tells and self.open is None:
            job.rule("on_training_single_iteration_end", "S11", "to be inside a training loop")
            return
        loop = self.loop
        if loop is None:
            loop = self._enter(0 if number is None else max(number - 1, 0), None, by.records.wall(at), {})
        if number is not None:
            loop.completed = number - 1
        samples, tokens = loop.complete(seconds, by.records.wall(at), job.facts.world_size)
        ranks = job.facts.world_size or 1
        self._progress.owe(samples / ranks, None if tokens is None else tokens / ranks)
        self._work.done(loop.number, loop.completed - 1, loop.completed - 1, work)
        if self.open is not None and loop.completed % job.every == 0:
            by.event(self.open, _EVENTS.TRAINING_METRICS_UPDATE, loop.update())

    def fold(
        self,
        durations: list[float],
        waits: list[list[float]],
        work: float,
        finished: list[float],
        by: Interpreter,
    ) -> None:
        """Count iterations that were completed one after another, where there is a loop.

        Args:
            durations: What each took.
            waits: Of each, what it waited for data or for other ranks, kind by kind.
            work: Of all, what was work.
            finished: When each ended.
            by: Who interprets.
        """
        job, loop, count = self._job, self.figures, len(durations)
        self._progress.fold(durations, waits, finished[-1])
        self._last_step, self._last_work = finished[-1], _worked(by)
        first = loop.completed
        samples, tokens = loop.complete_all(
            durations, by.records.wall(finished[0]), by.records.wall(finished[-1]), job.facts.world_size
        )
        ranks = job.facts.world_size or 1
        self._progress.owe(samples / ranks, None if tokens is None else tokens / ranks, times=count)
        self._work.done(loop.number, first, loop.completed - 1, work)
        if self.open is not None and loop.completed % job.every == 0:
            by.event(self.open, _EVENTS.TRAINING_METRICS_UPDATE, loop.update())

    def told(self, values: Mapping[str, Any], at: float, by: Interpreter) -> str | None:
        """Take the job's word that a step has just ended.

        Returns:
            What is wrong with it; None where nothing is.
        """
        number, seconds, mode = values["step"], values["seconds"], values["mode"]
        if number is not None and (
            not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MOST_STEPS
        ):
            return f"step of 0 or more, not {shown(number)}"
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e9
        ):
            return f"seconds of 0 or more, not {shown(seconds)}"
        if mode != "train":
            self._progress.step(mode, 0.0 if seconds is None else float(seconds), at)
            return None
        if self.iteration is not None:
            return None  # it is counted when it ends
        if values["asked"]:
            job_values = values["asked"]
            self.figures.ask(job_values)
        by.clock.training_begins(at)
        by.clock.advance(at)
        last = self._last_step
        passed = 0.0 if last is None else max(at - last, 0.0)
        took = passed if seconds is None else float(seconds)
        work = min(_worked(by) - self._last_work, took) if last is not None else took
        if last is None and seconds is None:
            self._last_step, self._last_work = at, _worked(by)
        self.step(took, at, max(work, 0.0), by, number=number)
        return None

    def publish(self) -> None:
        """Bring the position up to date."""
        if self.loop is not None:
            self._families.gauge("training.step").set(float(self.loop.completed))

    def _enter(self, start: int, samples: int | None, wall: float, values: Mapping[str, Any]) -> Loop:
        self.count += 1
        self.loop = Loop(self.count, start, samples, wall, values)
        if self.first_step is None:
            self.first_step = start
        return self.loop


def _worked(by: Interpreter) -> float:
    """Time that may have been work, of a job that tells no iterations: all that is not another phase."""
    return by.clock.work + by.clock.seconds.get("other", 0.0)
