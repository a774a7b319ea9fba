"""Processes of the job on a simulated /proc: membership, and counters that do not fall."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from collectors_support import assert_golden, assert_sound, text_of, value_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_support import START
from places import DATA
from process_support import FakeProcess, Proc, Watch, labels_of

from exporter.collectors.job import GpuProcessUse, JobProcess
from exporter.collectors.processes.memory import ProcessMemoryCollector
from exporter.collectors.processes.tree import ProcessTree
from exporter.families import Collected
from exporter.recording.values import ProcessIdentity

CPU = "training_process_cpu_seconds_total"
INSTANCES = "training_process_instances"
TRAINER = ("r", "0", "trainer")
LOADER = ("r", "0", "dataloader")


@pytest.fixture(autouse=True)
def procfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", "/proc")  # undo the change of `Watch`


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path / "proc")


@pytest.fixture
def watch(proc: Proc) -> Watch:
    """A job with a single rank; the trainer is process 100."""
    watch = Watch(proc)
    watch.records(proc.add(FakeProcess(100)))
    return watch


def a_worker(pid: int, **others: Any) -> FakeProcess:
    return FakeProcess(pid, parent=100, comm="pt_data_worker", **others)


def test_a_rank_with_workers_gives_the_expected_exposition(proc: Proc) -> None:
    trainer = proc.add(FakeProcess(100, threads=80, cpus="0-7"))
    for pid in (110, 111):
        proc.add(a_worker(pid, user=pid / 10))
    proc.add(FakeProcess(120, parent=100, comm="python", command="python\0compile_worker\0", state="D"))
    other_rank = proc.add(FakeProcess(200, user=7.0))
    agent = proc.add(FakeProcess(50, command="torchrun\0"))
    trainer.parent = other_rank.parent = 50
    watch = Watch(proc)
    for process, rank in ((trainer, 0), (other_rank, 1), (agent, None)):
        watch.records(process, rank=rank)
    watch.gpus = [
        GpuProcessUse(100, "0", "GPU-a", 5 << 30),
        GpuProcessUse(110, "0", "GPU-a", None),
        GpuProcessUse(4711, "0", "GPU-a", 1 << 30),
    ]

    collected = watch.collect()
    memory = ProcessMemoryCollector(members=lambda: watch.collector.members).collect()

    assert_sound(watch.collector, collected)
    assert collected.problems == []
    assert_golden(text_of([*collected, *memory]), DATA / "processes.metrics")


def test_a_restarted_rank_continues_counting(watch: Watch, proc: Proc) -> None:
    proc.processes[100].user = 50.0
    watch.collect()
    watch.dies()
    ended = watch.collect()
    watch.records(proc.add(FakeProcess(101, user=2.0, started_at=proc.wall)))
    after = watch.collect()

    assert value_of(ended, "training_process_up", "r", "0") == 0
    assert value_of(after, CPU, *TRAINER, "user") == 52.0
    assert value_of(after, "training_process_up", "r", "0") == 1


def test_another_process_with_the_same_pid_is_not_the_recording_process(watch: Watch, proc: Proc) -> None:
    for pid, rank in ((200, 1), (31_000, 2)):
        watch.records(proc.add(FakeProcess(pid, own_pid=7 if pid == 31_000 else None)), rank=rank)
    proc.processes[100].started_at += 3600.0  # started after the recording
    second = watch.job[1]
    watch.job[1] = replace(second, process=second.process.replace(pid=7))  # a different pid in the snapshot

    # A process in a container, seen from the host.
    assert labels_of(watch.collect(), INSTANCES) == [("r", "2", "trainer")]


def test_a_process_stays_visible_when_the_clock_is_set(watch: Watch, proc: Proc) -> None:
    watch.collect()
    proc.wall += 7200.0
    proc.add(a_worker(110))
    collected = watch.collect()

    assert value_of(collected, INSTANCES, *TRAINER) == value_of(collected, INSTANCES, *LOADER) == 1
    assert collected.unsupported == []


def test_a_process_in_an_invisible_namespace_is_only_up(watch: Watch) -> None:
    watch.job[0] = replace(watch.job[0], pid=None)
    collected = watch.collect()

    assert value_of(collected, "training_process_up", "r", "0") == 1
    assert labels_of(collected, INSTANCES) == []
    assert "pid namespace" in collected.unsupported[0]


def test_workers_that_outlive_their_trainer_stay_members(watch: Watch, proc: Proc) -> None:
    proc.add(a_worker(110))
    watch.collect()
    watch.dies()

    assert value_of(watch.collect(), INSTANCES, *LOADER) == 1


def test_a_forked_child_without_exec_is_a_worker(watch: Watch, proc: Proc) -> None:
    spawned = "python\0-c\0from multiprocessing.spawn import spawn_main\0"
    server = "python\0-c\0from multiprocessing.forkserver import main\0"
    proc.add(FakeProcess(110, parent=100))
    proc.add(FakeProcess(111, parent=100, command=spawned))
    proc.add(FakeProcess(112, parent=100, command=server))
    proc.add(FakeProcess(113, parent=112))
    proc.add(FakeProcess(114, parent=100, command="nvidia-smi\0", comm="nvidia-smi"))
    collected = watch.collect()

    assert value_of(collected, INSTANCES, *LOADER) == 3
    assert value_of(collected, INSTANCES, "r", "0", "other") == 2


def test_a_child_is_classified_only_after_it_had_time_to_exec(watch: Watch, proc: Proc) -> None:
    child = proc.add(FakeProcess(110, parent=100, started_at=proc.wall + 4.9, user=0.25))
    young = watch.collect()
    child.command = "nvidia-smi\0"
    old = watch.collect()

    assert value_of(young, INSTANCES, *LOADER) is None
    assert value_of(old, CPU, "r", "0", "other", "user") == 0.25


def test_the_exporter_is_not_a_process_of_the_job_that_started_it(watch: Watch, proc: Proc) -> None:
    proc.add(FakeProcess(999_999, parent=100))
    proc.add(FakeProcess(120, parent=999_999))

    assert labels_of(watch.collect(), INSTANCES) == [TRAINER]


def test_a_worker_that_records_is_a_worker(proc: Proc) -> None:
    watch = Watch(proc)
    watch.records(proc.add(a_worker(110, started=proc.wall - 20)))
    watch.records(proc.add(FakeProcess(100)))
    collected = watch.collect()

    assert value_of(collected, INSTANCES, *TRAINER) == value_of(collected, INSTANCES, *LOADER) == 1


@pytest.mark.parametrize("name", ["stat", "status", "statm", "io"])
@pytest.mark.parametrize("content", ["garbage", "1 (x) Q -1 " + "x " * 60, "9" * 5000])
def test_garbage_affects_only_its_process_and_names_it(
    watch: Watch, proc: Proc, name: str, content: str
) -> None:
    watch.records(proc.add(FakeProcess(200, user=7.0)), rank=1)
    watch.collect()
    (proc.root / "100" / name).write_text(content)
    collected = watch.collector.collect()

    assert_sound(watch.collector, collected)
    assert value_of(collected, CPU, "r", "1", "trainer", "user") == 7.0
    assert {reason for reason, _ in collected.problems} == {"malformed"}
    assert "100" in collected.problems[0][1]


def test_the_series_of_an_ended_run_linger_and_disappear(watch: Watch) -> None:
    watch.collect()
    watch.dies()
    watch.collect()
    watch.job.clear()
    lingering = watch.collect(after_seconds=890.0)
    over = [watch.collect(after_seconds=11.0), watch.collect()][-1]

    assert value_of(lingering, CPU, *TRAINER, "user") == 1.0
    assert over == Collected()


def counters(collected: Collected) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in collected
        for sample in metric.samples
        if metric.type == "counter"
    }


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["work", "fall", "end", "start", "reuse", "zombie", "step back"]),
            st.integers(0, 5),
            st.floats(0, 100),
        ),
        max_size=12,
    )
)
def test_no_counter_decreases(tmp_path: Path, happenings: list[tuple[str, int, float]]) -> None:
    proc = Proc(tmp_path / "proc")
    watch = Watch(proc)
    watch.records(proc.add(FakeProcess(100)))
    before = counters(watch.collect())
    for what, which, amount in happenings:
        pid = 110 + which
        worker = proc.processes.get(pid)
        if what == "start" and worker is None:
            proc.add(a_worker(pid, user=amount, started=proc.wall))
        elif what == "step back":
            proc.wall -= amount * 1000
        elif worker is not None:
            if what == "work":
                worker.user += amount
            elif what == "fall":
                worker.user /= 2
            elif what == "zombie":
                worker.state = "Z"
            elif what == "end":
                proc.end(pid)
            else:
                proc.add(a_worker(pid, started=proc.wall))
        after = counters(watch.collect())

        assert {name: value for name, value in before.items() if after[name] < value} == {}
        before = after


def test_cpu_time_before_the_sidecar_started_is_no_increase(watch: Watch, proc: Proc) -> None:
    old = proc.processes[100]
    old.started_at, old.user = START - 3600.0, 500.0
    watch.job[0] = replace(watch.job[0], process=watch.job[0].process.replace(started=START - 3590.0))
    first = watch.collect()
    old.user = 502.0

    assert value_of(first, CPU, *TRAINER, "user") == 0.0
    assert value_of(watch.collect(), CPU, *TRAINER, "user") == 2.0


def test_a_process_that_ended_before_the_tree_is_read_is_not_hidden() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
    gone = ProcessIdentity(id="p" * 16, pid=process.pid, run="r", rank=0, started=time.time())
    tree, passes = ProcessTree(ignore=()), list[int]()
    for now in (0.0, 10.0):
        collected = Collected()
        job = [JobProcess(gone, alive=True, pid=process.pid)]
        tree.update(job, collected=collected, now=now, wall=time.time())
        passes.append(tree.hidden)

    assert passes == [0, 1]  # the feed reports its death before a second pass
