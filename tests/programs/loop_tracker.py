"""Loop tracker of the bridges, driven by hooks in random order."""

from __future__ import annotations

import random
from collections.abc import Callable

from exporter import training
from exporter.bridges.loop import Level, LoopTracker


class CountingTracker(LoopTracker):
    """Tracker that counts the iterations that it completes without an error."""

    completed_steps = 0

    def _close(self, error: BaseException | None) -> Level:
        level = super()._close(error)
        self.completed_steps += level is Level.ITERATION and error is None
        return level

    def discard_iteration(self) -> None:
        previous_steps = self.completed_steps
        super().discard_iteration()
        self.completed_steps = previous_steps


def call_hooks_in_any_order() -> None:
    """Call up to 29 hooks in random order and end all blocks, 300 times. Print the number of completed steps and of levels left open."""
    chance, tracker = random.Random(5), CountingTracker()
    open_levels: set[Level] = set()
    phases = ["forward", "backward", "compile", None]

    def error() -> ValueError | None:
        return ValueError("amid") if chance.random() < 0.2 else None

    def begin_unless_open(level: Level, begin: Callable[[], object]) -> None:
        if not tracker.is_open(level):
            begin()

    actions: list[Callable[[], object]] = [
        lambda: tracker.begin_loop(chance.randrange(9)),
        tracker.begin_iteration,
        tracker.begin_iteration,
        lambda: tracker.end(Level.ITERATION, error()),
        lambda: tracker.phase(chance.choice(phases)),
        lambda: tracker.phase(chance.choice(phases)),
        lambda: tracker.phase(None),
        tracker.discard_iteration,
        lambda: begin_unless_open(
            Level.EVALUATION, lambda: tracker.begin(Level.EVALUATION, training.validation_loop())
        ),
        lambda: begin_unless_open(
            Level.BATCH, lambda: tracker.begin(Level.BATCH, training.validation_iteration())
        ),
        lambda: begin_unless_open(Level.SAVE, lambda: tracker.begin_save(3)),
        lambda: tracker.end(chance.choice([Level.BATCH, Level.SAVE, Level.LOAD]), error()),
    ]
    for _ in range(300):
        for _ in range(chance.randrange(30)):
            chance.choice(actions)()
        tracker.end_all(KeyError("end"))
        open_levels |= {level for level in Level if tracker.is_open(level)}
    print(tracker.completed_steps, len(open_levels))
