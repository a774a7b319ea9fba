"""Collectors of the processes of a job, on a real trainer whose children work, stop, exit and become zombies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from collectors_support import assert_sound, value_of
from ledger_support import make_process
from places import TESTS
from programs import code_of
from programs.trainer import WRITTEN_BYTES, obey_commands
from users_support import without_privileges
from waiting import wait_until

from exporter.collectors.job import JobProcess
from exporter.collectors.processes.collector import ProcessCollector
from exporter.collectors.processes.memory import ProcessMemoryCollector
from exporter.collectors.processes.tree import YOUNG_SECONDS
from exporter.families import Collected

TRAINER_LABELS = ("r", "0", "trainer")
LOADER_LABELS = ("r", "0", "dataloader")
PREFIX = "training_process"
CPU_SECONDS, STATE_COUNT = f"{PREFIX}_cpu_seconds_total", f"{PREFIX}_state"


class TrainerProcess:
    """Process that runs `obey_commands` in a new session, so that `close` also ends the children."""

    def __init__(self, directory: Path | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code_of(obey_commands)],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def execute(self, *arguments: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(arguments) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[TrainerProcess]:
    process = TrainerProcess(tmp_path)
    yield process
    process.close()


def collector_of(trainer: TrainerProcess) -> ProcessCollector:
    identity = make_process(started=time.time()).replace(pid=trainer.process.pid)
    return ProcessCollector(
        job=lambda: [JobProcess(identity, is_alive=True, pid=trainer.process.pid)], discover_seconds=0.0
    )


def required_value(collected: Collected, name: str, *labels: str) -> float:
    """Return the value of a sample. An absent sample fails the test."""
    sample_value = value_of(collected, name, *labels)
    assert sample_value is not None, (name, labels)
    return sample_value


def cpu_seconds(collected: Collected) -> float:
    return sum(required_value(collected, CPU_SECONDS, *LOADER_LABELS, mode) for mode in ("user", "system"))


def test_real_workers_are_counted_by_state_and_keep_their_cpu_time(trainer: TrainerProcess) -> None:
    collector = collector_of(trainer)
    for name in ("one", "two"):
        trainer.execute("fork", name)
    trainer.execute("program")
    trainer.execute("burn", "one")
    time.sleep(YOUNG_SECONDS + 0.2)  # younger children have no role yet
    initial = collector.collect()
    assert_sound(collector, initial)
    assert initial.problems == []
    assert required_value(initial, "training_process_instances", *LOADER_LABELS) == 2
    assert required_value(initial, "training_process_instances", "r", "0", "other") == 1
    assert cpu_seconds(initial) >= 0.2

    trainer.execute("stop", "two")
    trainer.execute("exit", "one")
    wait_until(lambda: value_of(collector.collect(), STATE_COUNT, *LOADER_LABELS, "zombie") == 1)
    with_zombie = collector.collect()
    trainer.execute("reap", "one")
    # The trainer sleeps once it has replied.
    wait_until(lambda: value_of(collector.collect(), STATE_COUNT, *TRAINER_LABELS, "sleeping") == 1)
    without_zombie = collector.collect()

    assert required_value(with_zombie, STATE_COUNT, *LOADER_LABELS, "stopped") == 1
    assert required_value(without_zombie, "training_process_instances", *LOADER_LABELS) == 1
    assert cpu_seconds(without_zombie) >= cpu_seconds(initial)


def test_bytes_that_a_worker_wrote_are_not_counted_again_after_the_trainer_waited_for_it(
    trainer: TrainerProcess,
) -> None:
    collector = collector_of(trainer)
    trainer.execute("fork", "one")
    time.sleep(YOUNG_SECONDS + 0.2)
    trainer.execute("write", "one")
    initial = collector.collect()
    trainer.execute("exit", "one")
    trainer.execute("reap", "one")
    collected = collector.collect()

    written = f"{PREFIX}_io_written_bytes_total"
    assert required_value(collected, written, *LOADER_LABELS) >= WRITTEN_BYTES  # 0 on a filesystem in memory
    assert (
        required_value(collected, written, *TRAINER_LABELS)
        - required_value(initial, written, *TRAINER_LABELS)
        < WRITTEN_BYTES / 2
    )


def test_values_match_ps_and_procfs(trainer: TrainerProcess) -> None:
    collector = collector_of(trainer)
    trainer.execute("fork", "one")  # the reply shows that the trainer has started
    collected = collector.collect()
    memory = ProcessMemoryCollector(members=lambda: collector.members).collect()
    pid = trainer.process.pid
    ps_columns = subprocess.run(
        ["ps", "-o", "rss=,nlwp=,pss=", "-p", str(pid)], capture_output=True, text=True, check=True
    ).stdout.split()

    resident_kib, threads, proportional_kib = map(int, ps_columns)
    assert required_value(collected, f"{PREFIX}_resident_bytes", *TRAINER_LABELS) == pytest.approx(
        resident_kib * 1024, rel=0.05
    )
    assert required_value(collected, f"{PREFIX}_threads", *TRAINER_LABELS) == threads
    # Between the two reads, other interpreters that share pages with the trainer may start or end.
    assert required_value(memory, f"{PREFIX}_proportional_bytes", *TRAINER_LABELS) == pytest.approx(
        proportional_kib * 1024, rel=0.2
    )
    assert required_value(memory, f"{PREFIX}_unique_bytes", *TRAINER_LABELS) <= resident_kib * 1024
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    assert required_value(collected, f"{PREFIX}_open_fds", *TRAINER_LABELS) == descriptors


def test_the_io_of_an_unreadable_process_stays_absent_after_the_process_has_ended() -> None:
    trainer = TrainerProcess()
    collector = collector_of(trainer)
    with without_privileges():
        collector.collect()
    trainer.close()
    collected = collector.collect()

    assert value_of(collected, CPU_SECONDS, *TRAINER_LABELS, "user") is not None
    assert not any("_io_" in sample.name for metric in collected for sample in metric.samples)


def test_private_values_of_another_users_processes_are_absent(trainer: TrainerProcess) -> None:
    collector = collector_of(trainer)
    with without_privileges():
        collected = collector.collect()
        memory = ProcessMemoryCollector(members=lambda: collector.members).collect()

    names = {sample.name for metric in collected for sample in metric.samples}
    assert collected.problems == memory.problems == []
    assert list(memory) == []
    assert not any("_io_" in name for name in names)
    assert "training_process_open_fds" not in names
    assert required_value(collected, "training_process_instances", *TRAINER_LABELS) == 1
    assert value_of(collected, CPU_SECONDS, *TRAINER_LABELS, "user") is not None
