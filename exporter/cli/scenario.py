"""What happens in the demo, and when: the numbers of its simulated job.

Used by the demo and by its ranks, which all know the same scenario. The numbers follow from the seed, the rank and the
step alone, so that a rank that begins again from its checkpoint repeats them.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scenario:
    """A job of several ranks that go in step; one cycle takes about a minute at speed 1.

    Attributes:
        seed: Of all that looks random.
        speed: How much faster than a minute a cycle goes.
        ranks: Processes.
        cycle_steps: After so many steps everything happens again.
        target_steps: Where the training would end.
        pause_step: Within the cycle; every rank waits there for data.
        pause_seconds: How long.
        nonfinite_step: Within the cycle; the loss is NaN there.
        validation_step: Within the cycle; a validation follows.
        validation_batches: Of it.
        checkpoint_steps: A checkpoint after so many steps.
        checkpoint_seconds: How long it takes.
        slow_rank: The one that the others wait for.
        crash_rank: The rank that is killed.
        crash_step: Within the cycle; where it is killed.
        restart_seconds: From its death to the next start of all ranks.
        window_seconds: Of the Stats.
    """

    seed: int = 1
    speed: float = 1.0
    ranks: int = 2
    cycle_steps: int = 200
    target_steps: int = 100_000
    pause_step: int = 60
    pause_seconds: float = 12.0
    nonfinite_step: int = 90
    validation_step: int = 110
    validation_batches: int = 8
    checkpoint_steps: int = 25
    checkpoint_seconds: float = 0.3
    slow_rank: int = 1
    crash_rank: int = 1
    crash_step: int = 140
    restart_seconds: float = 3.0
    window_seconds: float = 2.0

    def compute_seconds(self, rank: int, step: int) -> float:
        """A rank's own work in a step: about 0.19 s, the slow one's a little more, now and then a slow one."""
        chance = self._chance("step", rank, step)
        slow = 2.5 if chance.random() < 0.03 else 1.0
        return (0.19 + 0.02 * (rank == self.slow_rank)) * chance.lognormvariate(0.0, 0.08) * slow

    def step_seconds(self, step: int) -> float:
        """How long a step takes: as long as the slowest rank, since all go in step."""
        return max(self.compute_seconds(rank, step) for rank in range(self.ranks))

    def loss(self, rank: int, step: int) -> float:
        """A loss that falls with the steps; NaN once in a cycle."""
        if step % self.cycle_steps == self.nonfinite_step:
            return math.nan
        return 1.8 + 8.0 / (1.0 + step / 30.0) + self._chance("loss", rank, step).gauss(0.0, 0.05)

    def grad_norm(self, step: int) -> float:
        """The norm of the gradient, the same on all ranks."""
        return 0.6 + 2.0 / (1.0 + step / 50.0) + abs(self._chance("gradient", 0, step).gauss(0.0, 0.1))

    def learning_rate(self, step: int) -> float:
        """Warmed up over 200 steps, then along a cosine."""
        done = min(step / self.target_steps, 1.0)
        return 3e-4 * min(step / 200, 1.0) * (0.1 + 0.45 * (1.0 + math.cos(math.pi * done)))

    def tokens(self, rank: int, step: int) -> int:
        """Tokens of a step; batches are packed unevenly."""
        return 8192 - self._chance("tokens", rank, step).randrange(512)

    def crashes(self, rank: int, step: int, attempt: int) -> bool:
        """Whether the rank is killed at this step; once in each cycle, so a restart gets past it."""
        return rank == self.crash_rank and step == self.crash_step + attempt * self.cycle_steps

    def pauses(self, step: int) -> bool:
        """Whether there is no data at this step."""
        return step % self.cycle_steps == self.pause_step

    def validates(self, step: int) -> bool:
        """Whether a validation follows this step."""
        return step % self.cycle_steps == self.validation_step

    def _chance(self, what: str, rank: int, step: int) -> random.Random:
        return random.Random(f"{self.seed} {what} {rank} {step}")  # noqa: S311  # a simulation, no secret


DEFAULT = Scenario()
