"""Saving: checkpoints as they begin, succeed and end.

Used by the interpreter. A synchronous save that ends without success has failed, and so has any whose body raised; the
next one is not held up by it. Where saves are switched off by the configuration nothing is told of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from exporter.training import kinds
from exporter.training.attributes import CheckpointSaveSpanAttributes
from exporter.training.calls import Began, Call
from exporter.training.events import Event
from exporter.training.names import CheckPointStrategy, StandardTrainingJobEventName
from exporter.training.opened import Open
from exporter.training.saves import KINDS, Save, SaveFamilies, Saves
from exporter.training.series import LARGEST, Families
from exporter.training.types import shown
from exporter.training.work import MOST_STEPS, Work

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from exporter.training.interpreter import Interpreter
    from exporter.training.job import Job

_EVENTS = StandardTrainingJobEventName


class Saving:
    """The saves of a process.

    Args:
        job: Whose.
        families: Where they are counted.
        work: What they make safe.
    """

    def __init__(self, job: Job, families: Families, work: Work) -> None:
        self._job = job
        self._families = SaveFamilies(families)
        self._work = work
        self._saves = Saves()

    def renew(self) -> None:
        """Begin another job in the same process."""
        self._saves = Saves()

    def loop_begins(self) -> None:
        """Begin anew what counts by loop."""
        self._saves.loop_begins()
        self._families.loop_begins()

    @staticmethod
    def strategy_of(mark: Began) -> CheckPointStrategy:
        """Tell the strategy of a save that begins."""
        return mark.values.get("strategy") or CheckPointStrategy.SYNC

    def begin(self, opened: Open, mark: Began) -> CheckpointSaveSpanAttributes | None:
        """Begin a save.

        Returns:
            What describes it; None where saves are switched off.
        """
        if is_untold_save(mark):
            return None
        loop = self._job.looping.loop
        step = mark.values.get("global_step")
        if isinstance(step, bool) or not isinstance(step, int) or abs(step) > MOST_STEPS:
            self._job.wrong(mark.name, "global_step", f"global_step to be a number, not {shown(step)}")
            step = 0 if loop is None else loop.completed
        begun = self._work.save_begins()
        completed = step if loop is None else loop.completed
        opened.save = self._saves.begin(
            step,
            self.strategy_of(mark),
            opened.began,
            self._job.looping.figures,
            lambda: self._work.commit(begun, completed),
        )
        self._families.expect(opened.save.strategy.value)
        return self._saves.attributes(opened.save)

    def succeed(self, call: Call, by: Interpreter) -> None:
        """Take the job's word that a save is safe."""
        job = self._job
        if is_untold_save(call):
            return
        step = call.values["global_step"]
        save = self._saves.pending(step)
        opened = by.tree.find(kinds.CHECKPOINT_SAVE)
        asynchronous = call.values["strategy"] is CheckPointStrategy.ASYNC
        holder = by.tree.find(kinds.APPLICATION) if asynchronous else opened
        if job.tells and (holder is None or not holder.known):
            what = "the application to run" if asynchronous else "on_save_checkpoint_start before it"
            job.rule(call.name, "S5", what)
            return
        if save is None:
            job.wrong(
                call.name,
                "unknown_step",
                f"the step of a save that was begun and is not safe yet, not {shown(step)}",
            )
            return
        at = call.values["at"]
        self._confirm(save, holder, at.perf_counter_seconds, at.seconds_since_epoch, at, by)

    def end(self, opened: Open, at: float, by: Interpreter, *, entered: bool, failed: bool) -> None:
        """End a save as far as it held up the training."""
        save = opened.save
        if save is None:
            return
        if save.strategy is CheckPointStrategy.SYNC and entered and not failed:
            if save.confirmed:
                self._job.rule("checkpoint_save", "unknown_step", "no success of its own inside the block")
            else:
                self._confirm(save, opened, at, by.records.wall(at), None, by)
        seconds = max(at - opened.began, 0.0)
        self._families.blocked(save.strategy.value, seconds)
        if not save.confirmed and (failed or save.strategy is CheckPointStrategy.SYNC):
            self.fail(opened)
        attributes = self._saves.end(save, seconds)
        by.event(opened, _EVENTS.SYNC_CHECKPOINT_METRICS_UPDATE, attributes)

    def fail(self, opened: Open) -> None:
        """Note that a save has failed."""
        if opened.save is not None and not opened.save.confirmed:
            self._saves.abandon(opened.save)
            self._families.failed(opened.save.strategy.value)

    def told(self, values: Mapping[str, Any], at: float, by: Interpreter) -> str | None:
        """Take the job's word of a save that is over.

        Returns:
            What is wrong with it; None where nothing is.
        """
        step, kind = values["step"], values["kind"]
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MOST_STEPS:
            return f"a step of 0 or more, not {shown(step)}"
        if kind not in KINDS:
            return f"kind to be one of {', '.join(KINDS)}, not {shown(kind)}"
        numbers: dict[str, float | None] = {}
        for name in ("seconds", "blocking_seconds", "bytes"):
            number = values[name]
            if number is None:
                numbers[name] = None
            elif isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < LARGEST:
                return f"{name} of 0 or more, not {shown(number)}"
            else:
                numbers[name] = float(number)
        if numbers["blocking_seconds"] is not None:
            self._families.blocked(kind, numbers["blocking_seconds"])
        if not values["ok"]:
            self._families.failed(kind)
            return None
        self._families.succeeded(kind, step, at, by.records.wall(at), numbers["seconds"], numbers["bytes"])
        if kind != "local":
            self._work.commit_steps(step)
        return None

    def _confirm(
        self, save: Save, holder: Open | None, at: float, wall: float, moment: Any, by: Interpreter
    ) -> None:
        attributes = self._saves.confirm(save, wall, self._job.looping.loop)
        save.commit()
        self._families.succeeded(save.strategy.value, save.step, at, wall, max(at - save.began, 0.0))
        if holder is not None:
            at_ = moment or by.records.moment(by.now)
            by.records.event(holder, Event.create(_EVENTS.SAVE_CHECKPOINT_SUCCESS, attributes, at_))


def is_untold_save(call: Call | None) -> bool:
    """Whether a call is about a save while saves are switched off: no rule is about it, and nothing is told."""
    return call is not None and call.values.get("is_save_checkpoint_enabled") is False
