"""Jobs that nobody has written: vectors of the schema of `data/one-logger-golden.json`, at random but always the same.

    python tests/one_logger_jobs.py SEED COUNT > FILE; python tests/replay_one_logger.py FILE

An orderly job has blocks that fail, several loops, applications and late configurations; one that is not has calls out of
order, ends and starts that are missing, explicit times and a clock that is set besides. What is right comes from the model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from random import Random
from typing import Any

from one_logger_model import BLOCKS, NAMES, Model

CLOCK = {"wall_start_sec": 1700000000.0, "monotonic_start_sec": 1000.0}
TICKS = (0, 0, 1, 2, 3, 4, 8, 16, 24, 32, 48, 64)
CHANGES = {
    "global_batch_size": (1, 2, 64),
    "seq_length": (4, 16, 1),
    "flops_per_sample": (5, 10**13),
    "world_size": (1, 3, 16),
    "train_iterations_target": (5, 77),
    "session_tag": ("other",),
    "perf_tag": ("other",),
}
"""Fields that may be left to callables, and what these come to say."""
PREPARATIONS = ("distributed_init", "model_init", "dataloader_init", "optimizer_init", "load_checkpoint")
BLOCK_OF = {what: block for block, what in BLOCKS.items()}


class Writer:
    """Writes one job.

    Args:
        seed: Of what is random.
        orderly: Whether every call is where it belongs.
    """

    def __init__(self, seed: int, *, orderly: bool) -> None:
        self.random = Random(seed)
        self.orderly = orderly
        self.steps: list[list[Any]] = []
        self.ticks = 0
        self.offset = 0.0
        self.step = 0
        self.pending: list[int] = []

    def write(self) -> dict[str, Any]:
        """Give the job's configuration and its steps."""
        chance, random = self.chance, self.random
        config: dict[str, Any] = {
            "world_size": random.choice([1, 2, 1024]),
            "session_tag": random.choice(["s", ""]),
        }
        if chance(0.2):
            config |= {"is_baseline_run": True, "summary_data_schema_version": "2.1"}
        if chance(0.2):
            config["custom_metadata"] = random.choice([{}, {"k": False, "l": [1.5, 2.0], "m": 3}])
        if chance(0.2):
            config["error_handling_strategy"] = "disable_quietly_and_report_metric_error"
        if chance(0.03):
            config["enable_for_current_rank"] = False
        self.telemetry = self.settings()
        known = {*self.telemetry, *config, "seq_length", "train_iterations_target"}
        self.varying = [name for name in CHANGES if name in known and chance(0.1)]
        if self.varying:
            config["variables"] = self.varying
        self.late = chance(0.15)
        config["telemetry"] = None if self.late else self.telemetry
        for _ in range(random.choice([1, 1, 2])):
            self.pair("app", self.application)
        return {"config": config, "steps": self.steps}

    def settings(self) -> dict[str, Any]:
        """Make a configuration of the training."""
        chance, choice = self.chance, self.random.choice
        made: dict[str, Any] = {
            "perf_tag": choice(["p", ["x", "y"], ""]),
            "global_batch_size": choice([1, 4, 4096]),
        }
        options: dict[str, Any] = {
            "log_every_n_train_iterations": choice([1, 2, 3, 5]),
            "seq_length": choice([0, 8, 2048, -3]),
            "micro_batch_size": choice([0, 8, -2]),
            "train_iterations_target": choice([10, 1000]),
            "train_samples_target": choice([10, 1000]),
            "custom_metadata": choice([{}, {"a": 1.5, "b": True, "c": "x:y", "d": ["p", "q"]}]),
        }
        made |= {name: value for name, value in options.items() if chance(0.6)}
        if chance(0.5):
            made["flops_per_sample"] = choice([1, 10**12, 123456789012345678901234])
            made["is_log_throughput_enabled"] = chance(0.8)
        if chance(0.3):
            made["save_checkpoint_strategy"] = "async"
        for switch in ("train_iterations", "validation_iterations", "test_iterations", "save_checkpoint"):
            if chance(0.08):
                made[f"is_{switch}_enabled"] = False
        return made

    # Parts -----------------------------------------------------------------------------------------------

    def application(self) -> None:
        """Prepare, train, save."""
        if self.late:
            self.late = False
            self.say("set_training_telemetry_config", **self.telemetry)
        for what in PREPARATIONS:
            if self.chance(0.3):
                self.pair(what)
        for _ in range(self.random.choice([1, 1, 2, 3])):
            self.loop()
            self.confirm()
            for part in (self.test, self.save, self.validate):
                if self.chance(0.15):
                    part()

    def loop(self) -> None:
        """Train for some iterations."""
        if self.chance(0.6):
            self.step = self.random.choice([0, 0, 3, 41])
        given = {"train_iterations_start": self.step}
        for name in ("train_samples_start", "train_iterations_target_or_fn", "train_samples_target_or_fn"):
            if self.chance(0.2):
                given[name] = self.random.choice([17, 500])
        self.pair("train", self.iterations, **given)

    def iterations(self) -> None:
        """Iterate, save, validate and test."""
        for _ in range(self.random.randint(0, 20)):
            inside = [self.save, self.validate, self.test]
            part = self.random.choice(inside) if not self.orderly and self.chance(0.05) else None
            self.step += self.pair("training_single_iteration", part)
            if self.chance(0.25):
                self.random.choice(inside)()
            self.confirm()

    def validate(self) -> None:
        """Validate on some batches."""
        batches = self.random.randint(0, 4)
        self.pair("validation", lambda: [self.pair("validation_single_iteration") for _ in range(batches)])

    def test(self) -> None:
        """Test."""
        self.pair("testing")

    def save(self) -> None:
        """Save; of an asynchronous one the success comes later."""
        self.pair("save_checkpoint", global_step=self.step)
        if self.telemetry.get("save_checkpoint_strategy") == "async":
            self.pending.append(self.step)

    def confirm(self) -> None:
        """Say that a save that is under way has succeeded, in any order."""
        if self.pending and self.chance(0.5):
            step = self.pending.pop(self.random.randrange(len(self.pending)))
            self.say("on_save_checkpoint_success", global_step=step)

    # Calls -----------------------------------------------------------------------------------------------

    def chance(self, probability: float) -> bool:
        """Decide."""
        return self.random.random() < probability

    def say(self, call: str, **given: Any) -> None:
        """Make one call, a little later than the one before."""
        self.steps.append([self.ticks / 64, call, given])
        self.ticks += self.random.choice(TICKS)

    def pair(self, what: str, body: Callable[[], object] | None = None, **given: Any) -> bool:
        """Begin and end something, as a block or by callbacks; whether it succeeded."""
        self.disturb()
        block = BLOCK_OF.get(what)
        failed = self.chance(0.06)
        if block is not None and self.chance(0.5):
            self.say("cm_enter", name=block, **given)
            if body is not None:
                body()
            self.say("cm_exit", name=block, **({"raise": True} if failed else {}))
            return not failed
        self.say(f"on_{what}_start", **given, **self.time("start_time_msec"))
        if body is not None:
            body()
        if (
            what == "save_checkpoint"
            and not failed
            and self.telemetry.get("save_checkpoint_strategy") != "async"
        ):
            self.say("on_save_checkpoint_success", **given, **self.time("time_msec"))
        if self.orderly or not self.chance(0.03):
            self.say(f"on_{what}_end", **self.time("finish_time_msec"))
        return True

    def time(self, name: str) -> dict[str, int]:
        """Give an explicit time, now and then."""
        if self.orderly or not self.chance(0.1):
            return {}
        ago = self.random.choice([0.0, 0.5, 3.0, 60.0, 5000.0])
        return {name: round((CLOCK["wall_start_sec"] + self.ticks / 64 + self.offset - ago) * 1000)}

    def disturb(self) -> None:
        """Change what callables say; in a job that is not orderly, do what does not belong here."""
        if self.varying and self.chance(0.15):
            name = self.random.choice(self.varying)
            self.say("set_value", **{name: self.random.choice(CHANGES[name])})
        if self.orderly or not self.chance(0.06):
            return
        what = self.random.choice([name for name in NAMES if name not in {"app", "train"}])
        self.random.choice(
            [
                lambda: self.say(f"on_{what}_start"),
                lambda: self.say(f"on_{what}_end"),
                lambda: self.say("on_app_start"),
                lambda: self.say("on_train_start", train_iterations_start=self.random.choice([-1, 0, 5])),
                lambda: self.say("on_train_end"),
                lambda: self.say("on_save_checkpoint_start", global_step=self.step),
                lambda: self.say(
                    "on_save_checkpoint_success", global_step=self.random.choice([self.step, 99])
                ),
                lambda: self.say("on_save_checkpoint_end"),
                self.set_clock,
            ]
        )()

    def set_clock(self) -> None:
        """Set the wall clock."""
        self.offset = self.random.choice([-5.0, 0.0, 30.0, -3600.0])
        self.say("set_wall_offset", sec=self.offset)


def vector(seed: int, *, orderly: bool) -> dict[str, Any]:
    """Write a job, with what is right."""
    written = Writer(seed, orderly=orderly).write()
    right, misuse = Model(written, CLOCK).run()
    return {"id": f"{'orderly' if orderly else 'any'}-{seed}", **written, "misuse": misuse, "right": right}


def content(vectors: list[dict[str, Any]]) -> dict[str, Any]:
    """Make what a file of the schema holds."""
    return {"schema": "one-logger-golden/1", "clock": CLOCK, "vectors": vectors}


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    jobs = [vector(seed, orderly=bool(seed % 2)) for seed in range(first, first + count)]
    json.dump(content(jobs), sys.stdout)
