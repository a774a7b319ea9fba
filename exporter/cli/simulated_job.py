"""One rank of the demo's training job: phases, steps, losses, checkpoints, a wait for data, a NaN, a crash.

A training process, started by `demo` for each rank; it uses the public API as any training code would and
nothing else. Standard input is its life line: it ends when that closes, so that no rank outlives the demo,
not even a demo that was killed.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from exporter import Aggregation, Stat, configure, training
from exporter.cli.scenario import DEFAULT, Scenario

PASSIVE_WINDOW_SECONDS = 5.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
FLOPS_PER_TOKEN = 6 * 1.3e9
"""Of a model of 1.3 billion parameters, forward and backward."""
BATCH = 4
DATA, FORWARD, BACKWARD, OPTIMIZER = 0.05, 0.28, 0.52, 0.15
"""What a rank's own time in a step goes into."""


class Rank:
    """The training loop of one rank.

    Args:
        scenario: What happens.
        rank: Which rank this is.
        attempt: How often the job was started before.
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
        self._memory = Stat.passive(
            "demo.memory.resident",
            resident_bytes,
            window_seconds=PASSIVE_WINDOW_SECONDS,
            unit="bytes",
            help="Memory of a process of the simulated job.",
        )
        training.describe(
            job_name="demo",
            framework="simulated",
            model="demo-1.3b",
            precision="bf16",
            flops_method="6N",
            flops_per_token=FLOPS_PER_TOKEN,
            step_target=scenario.target_steps,
            world_size=scenario.ranks,
        )

    def run(self) -> None:
        """Prepare and train until standard input closes."""
        with training.application():
            step = self._prepare()
            with training.training_loop(train_iterations_start=step):
                while True:
                    step += 1
                    self._step(step)
                    if self._scenario.validates(step):
                        self._validate()
                    if step % self._scenario.checkpoint_steps == 0:
                        self._save(step)

    def _prepare(self) -> int:
        with training.distributed_init():
            self._pass(0.4)
        with training.model_init():
            self._pass(0.8)
        with training.optimizer_init():
            self._pass(0.1)
        with training.dataloader_init():
            self._pass(0.3)
        if not self._checkpoint.exists():
            return 0
        with training.checkpoint_load():
            self._pass(0.6)
            return int(self._checkpoint.read_text())

    def _step(self, step: int) -> None:
        scenario = self._scenario
        own, whole = scenario.compute_seconds(self._rank, step), scenario.step_seconds(step)
        with training.data_loading():
            self._pass(own * DATA + scenario.pauses(step) * scenario.pause_seconds)
        with training.training_iteration():
            if scenario.crashes(self._rank, step, self._attempt):
                os.kill(os.getpid(), signal.SIGKILL)
            with training.model_forward():
                self._pass(own * FORWARD)
            with training.model_backward():
                self._pass(own * BACKWARD)
            with training.phase("grad_sync"):
                self._pass(whole - own)
            with training.optimizer_update():
                self._pass(own * OPTIMIZER)
            loss = scenario.loss(self._rank, step)
            training.record(
                loss=loss,
                grad_norm=scenario.grad_norm(step),
                learning_rate=scenario.learning_rate(step),
                samples=BATCH,
                tokens=scenario.tokens(self._rank, step),
            )
        self._step_time.add(whole)
        self._loss.add(loss)

    def _validate(self) -> None:
        with training.validation_loop():
            for _ in range(self._scenario.validation_batches):
                with training.validation_iteration():
                    self._pass(0.15)

    def _save(self, step: int) -> None:
        with training.checkpoint_save(step):
            self._pass(self._scenario.checkpoint_seconds)
            whole = self._checkpoint.with_suffix(".new")
            whole.write_text(str(step))
            whole.replace(self._checkpoint)

    def _pass(self, seconds: float) -> None:
        """Pass the time; end as soon as the demo has ended."""
        if select.select([sys.stdin], [], [], seconds / self._scenario.speed)[0]:
            sys.exit()


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def main(arguments: Sequence[str]) -> int:
    """Be one rank, until the demo ends."""
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
    Rank(scenario, rank=given.rank, attempt=given.attempt, checkpoint=given.checkpoint).run()
    return 0


def _exit_in_order(number: int, frame: object) -> NoReturn:  # noqa: ARG001  # a signal handler's signature
    sys.exit(128 + number)


if __name__ == "__main__":
    main(sys.argv[1:])
