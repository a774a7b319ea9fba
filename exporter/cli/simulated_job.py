"""One rank of the demo's training job: steps, losses, checkpoints, a wait for data, a crash.

A training process, started by `demo` for each rank; it uses the public API as any training code would and
nothing else. Standard input is its life line: it ends when that closes, so that no rank outlives the demo,
not even a demo that was killed. The numbers follow from the seed, the rank and the step alone, so that a
rank that restarts from its checkpoint repeats them.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from exporter import Aggregation, Stat, configure

PASSIVE_WINDOW_SECONDS = 5.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens in the demo, in steps; one cycle takes about a minute at speed 1.

    Attributes:
        seed: Of all that looks random.
        speed: How much faster than a minute a cycle goes.
        ranks: Processes.
        cycle_steps: After so many steps everything happens again.
        pause_step: Within the cycle; every rank waits there for data.
        pause_seconds: How long.
        checkpoint_steps: A checkpoint after so many steps.
        crash_rank: The rank that is killed.
        crash_step: Within the cycle; where it is killed.
        restart_seconds: From its death to its next start.
        window_seconds: Of the Stats.
    """

    seed: int = 1
    speed: float = 1.0
    ranks: int = 2
    cycle_steps: int = 220
    pause_step: int = 60
    pause_seconds: float = 12.0
    checkpoint_steps: int = 25
    crash_rank: int = 1
    crash_step: int = 140
    restart_seconds: float = 3.0
    window_seconds: float = 2.0

    def step_seconds(self, rank: int, step: int) -> float:
        """How long a step takes: about 0.2 s, rank 1 a little more, now and then a slow one."""
        chance = self._chance("step", rank, step)
        slow = 2.5 if chance.random() < 0.03 else 1.0
        return (0.19 + 0.02 * rank) * chance.lognormvariate(0.0, 0.08) * slow

    def loss(self, rank: int, step: int) -> float:
        """A loss that falls with the steps."""
        return 1.8 + 8.0 / (1.0 + step / 30.0) + self._chance("loss", rank, step).gauss(0.0, 0.05)

    def tokens(self, rank: int, step: int) -> int:
        """Tokens of a step; batches are packed unevenly."""
        return 8192 - self._chance("tokens", rank, step).randrange(512)

    def crashes(self, rank: int, step: int, attempt: int) -> bool:
        """Whether the rank is killed at this step; once in each cycle, so a restart gets past it."""
        return rank == self.crash_rank and step == self.crash_step + attempt * self.cycle_steps

    def pauses(self, step: int) -> bool:
        """Whether there is no data at this step."""
        return step % self.cycle_steps == self.pause_step

    def _chance(self, what: str, rank: int, step: int) -> random.Random:
        return random.Random(f"{self.seed} {what} {rank} {step}")  # noqa: S311  # a simulation, no secret


DEFAULT = Scenario()


class Rank:
    """The training loop of one rank.

    Args:
        scenario: What happens.
        rank: Which rank this is.
        attempt: How often it was started before.
        checkpoint: The file with the number of steps done.
    """

    def __init__(self, scenario: Scenario, *, rank: int, attempt: int, checkpoint: Path) -> None:
        self._scenario = scenario
        self._rank = rank
        self._attempt = attempt
        self._checkpoint = checkpoint
        window = scenario.window_seconds / scenario.speed
        self._step_time = Stat(
            "demo.step.duration",
            {Aggregation.MEAN, Aggregation.P50, Aggregation.P99, Aggregation.HISTOGRAM},
            window_seconds=window,
            unit="seconds",
            buckets=(0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0),
            help="Time of one step of the simulated job.",
        )
        self._loss = Stat(
            "demo.loss",
            {Aggregation.VALUE, Aggregation.MEAN},
            window_seconds=window,
            help="Loss of the simulated job.",
        )
        self._tokens = Stat(
            "demo.tokens",
            {Aggregation.SUM},
            window_seconds=window,
            help="Tokens that the simulated job has trained on.",
        )
        self._checkpoint_time = Stat(
            "demo.checkpoint.duration",
            {Aggregation.VALUE},
            window_seconds=window,
            unit="seconds",
            help="Time to save a checkpoint of the simulated job.",
        )
        self._memory = Stat.passive(
            "demo.memory.resident",
            resident_bytes,
            window_seconds=PASSIVE_WINDOW_SECONDS,
            unit="bytes",
            help="Memory of a process of the simulated job.",
        )

    def train(self) -> None:
        """Step after step until standard input closes."""
        step = int(self._checkpoint.read_text()) if self._checkpoint.exists() else 0
        while True:
            step += 1
            if self._scenario.crashes(self._rank, step, self._attempt):
                os.kill(os.getpid(), signal.SIGKILL)
            if self._scenario.pauses(step) and not self._go_on_after(self._scenario.pause_seconds):
                return
            duration = self._scenario.step_seconds(self._rank, step)
            if not self._go_on_after(duration):
                return
            self._step_time.add(duration)
            self._loss.add(self._scenario.loss(self._rank, step))
            self._tokens.add(self._scenario.tokens(self._rank, step))
            if step % self._scenario.checkpoint_steps == 0:
                with self._checkpoint_time.time():
                    self._save(step)

    def _save(self, step: int) -> None:
        time.sleep(0.3 / self._scenario.speed)
        whole = self._checkpoint.with_suffix(".new")
        whole.write_text(str(step))
        whole.replace(self._checkpoint)

    def _go_on_after(self, seconds: float) -> bool:
        """Pass the time; False as soon as the demo has ended."""
        return not select.select([sys.stdin], [], [], seconds / self._scenario.speed)[0]


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def main(arguments: Sequence[str]) -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser(prog="exporter.cli.simulated_job")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--seed", type=int, default=DEFAULT.seed)
    parser.add_argument("--speed", type=float, default=DEFAULT.speed)
    parser.add_argument("--checkpoint", type=Path, required=True)
    given = parser.parse_args(arguments)
    # A terminal's Ctrl-C is the demo's to act on; a SIGTERM ends the rank in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_in_order)
    scenario = Scenario(seed=given.seed, speed=given.speed)
    configure(rank=given.rank)
    Rank(scenario, rank=given.rank, attempt=given.attempt, checkpoint=given.checkpoint).train()


def _exit_in_order(number: int, frame: object) -> NoReturn:  # noqa: ARG001  # a signal handler's signature
    sys.exit(128 + number)


if __name__ == "__main__":
    main(sys.argv[1:])
