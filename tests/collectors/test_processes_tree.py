"""Processes of the job on a simulated /proc: membership, kernels without some files, garbage, and counters that do not fall."""

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
from process_support import IO_TEMPLATE, FakeProcess, JobOnProc, Proc, labels_of

from exporter.collectors.job import MAX_EXITED_RUNS, GpuProcessUse, JobProcess
from exporter.collectors.processes.memory import ProcessMemoryCollector
from exporter.collectors.processes.tree import ProcessTree
from exporter.families import Collected
from exporter.recording.values import ProcessIdentity

CPU_SECONDS = "training_process_cpu_seconds_total"
INSTANCES = "training_process_instances"
READ_BYTES = "training_process_io_read_bytes_total"
TRAINER_LABELS = ("r", "0", "trainer")
LOADER_LABELS = ("r", "0", "dataloader")


@pytest.fixture(autouse=True)
def procfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore psutil's path of /proc after each test, because JobOnProc changes it."""
    monkeypatch.setattr(psutil, "PROCFS_PATH", "/proc")


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path / "proc")


@pytest.fixture
def job(proc: Proc) -> JobOnProc:
    """Return a job with a single rank, whose trainer is process 100."""
    job = JobOnProc(proc)
    job.add_recording(proc.add(FakeProcess(100)))
    return job


def worker_process(pid: int, **fields: Any) -> FakeProcess:
    return FakeProcess(pid, parent=100, comm="pt_data_worker", **fields)


def test_a_rank_with_workers_gives_the_expected_exposition(proc: Proc) -> None:
    trainer = proc.add(FakeProcess(100, threads=80, cpus="0-7"))
    for pid in (110, 111):
        proc.add(worker_process(pid, user_seconds=pid / 10))
    proc.add(FakeProcess(120, parent=100, comm="python", command="python\0compile_worker\0", state="D"))
    other_rank = proc.add(FakeProcess(200, user_seconds=7.0))
    agent = proc.add(FakeProcess(50, command="torchrun\0"))
    trainer.parent = other_rank.parent = 50
    job = JobOnProc(proc)
    for process, rank in ((trainer, 0), (other_rank, 1), (agent, None)):
        job.add_recording(process, rank=rank)
    job.gpus = [
        GpuProcessUse(100, "0", "GPU-a", 5 << 30),
        GpuProcessUse(110, "0", "GPU-a", None),
        GpuProcessUse(4711, "0", "GPU-a", 1 << 30),
    ]

    collected = job.collect()
    memory = ProcessMemoryCollector(members=lambda: job.collector.members).collect()

    assert_sound(job.collector, collected)
    assert collected.problems == []
    assert_golden(text_of([*collected, *memory]), DATA / "processes.metrics")


def test_a_restarted_rank_continues_counting(job: JobOnProc, proc: Proc) -> None:
    proc.processes[100].user_seconds = 50.0
    job.collect()
    job.end_recording()
    collected_after_end = job.collect()
    job.add_recording(proc.add(FakeProcess(101, user_seconds=2.0, started_at=proc.wall)))
    collected_after_restart = job.collect()

    assert value_of(collected_after_end, "training_process_up", "r", "0") == 0
    assert value_of(collected_after_restart, CPU_SECONDS, *TRAINER_LABELS, "user") == 52.0
    assert value_of(collected_after_restart, "training_process_up", "r", "0") == 1


def test_the_io_of_an_ended_worker_is_not_counted_again_with_its_parent(job: JobOnProc, proc: Proc) -> None:
    trainer, worker = proc.processes[100], proc.add(worker_process(110))
    job.collect()
    worker.read_bytes += 1_000_000
    job.collect()
    proc.end(110)  # adds the bytes of the worker to the trainer
    trainer.read_bytes += 70
    collected_after_end = job.collect()
    trainer.read_bytes += 5
    collected = job.collect()

    assert value_of(collected_after_end, READ_BYTES, *LOADER_LABELS) == 4096 + 1_000_000
    assert value_of(collected_after_end, READ_BYTES, *TRAINER_LABELS) == 4096 + 70
    assert value_of(collected, READ_BYTES, *TRAINER_LABELS) == 4096 + 70 + 5


def test_a_kernel_without_a_list_of_allowed_cpus_in_the_status_allows_all_cpus(
    job: JobOnProc, proc: Proc
) -> None:
    proc.processes[100].cpus = None  # gVisor
    collected = job.collect()

    assert collected.problems == []
    assert value_of(collected, INSTANCES, *TRAINER_LABELS) == 1
    assert job.collector.use is not None
    assert [run.cpus for run in job.collector.use.runs] == [job.collector.use.cpus]


@pytest.mark.parametrize("io", [None, ""], ids=["no file", "an empty file"])
def test_a_kernel_without_io_accounting_affects_only_the_io(
    job: JobOnProc, proc: Proc, io: str | None
) -> None:
    proc.processes[100].io = io
    collected = job.collect()

    assert collected.problems == []
    assert value_of(collected, CPU_SECONDS, *TRAINER_LABELS, "user") == 1.0
    assert value_of(collected, "training_process_open_fds", *TRAINER_LABELS) == 5
    assert value_of(collected, READ_BYTES, *TRAINER_LABELS) is None


def test_the_io_is_read_where_the_kernel_names_the_read_characters_differently(
    job: JobOnProc, proc: Proc
) -> None:
    trainer = proc.processes[100]
    trainer.io = IO_TEMPLATE.replace("rchar", "char")  # gVisor until March 2026
    job.collect()
    trainer.read_bytes += 70
    collected = job.collect()

    assert collected.problems == []
    assert value_of(collected, READ_BYTES, *TRAINER_LABELS) == 70 + 4096


def test_a_process_that_changes_the_run_moves_with_its_workers_and_counts_once(
    job: JobOnProc, proc: Proc
) -> None:
    trainer = proc.processes[100]
    trainer.user_seconds = 50.0
    proc.add(worker_process(110))
    job.collect()
    job.processes[0] = replace(job.processes[0], identity=job.processes[0].identity.replace(run="second"))
    trainer.user_seconds = 53.0
    collected = job.collect()

    assert value_of(collected, CPU_SECONDS, *TRAINER_LABELS, "user") == 50.0
    assert value_of(collected, CPU_SECONDS, "second", "0", "trainer", "user") == 3.0
    assert (
        value_of(collected, INSTANCES, *TRAINER_LABELS) == value_of(collected, INSTANCES, *LOADER_LABELS) == 0
    )
    assert value_of(collected, INSTANCES, "second", "0", "dataloader") == 1


def test_another_process_with_the_same_pid_is_not_the_recording_process(job: JobOnProc, proc: Proc) -> None:
    for pid, rank in ((200, 1), (31_000, 2)):
        job.add_recording(proc.add(FakeProcess(pid, namespace_pid=7 if pid == 31_000 else None)), rank=rank)
    proc.processes[100].started_at += 3600.0  # started after the recording
    # The snapshot of process 200 names another pid.
    job.processes[1] = replace(job.processes[1], identity=job.processes[1].identity.replace(pid=7))

    # Only the process in a container, whose own pid differs from the pid on the host, is matched.
    assert labels_of(job.collect(), INSTANCES) == [("r", "2", "trainer")]


def test_a_process_stays_visible_when_the_clock_is_set(job: JobOnProc, proc: Proc) -> None:
    job.collect()
    proc.wall += 7200.0
    proc.add(worker_process(110))
    collected = job.collect()

    assert (
        value_of(collected, INSTANCES, *TRAINER_LABELS) == value_of(collected, INSTANCES, *LOADER_LABELS) == 1
    )
    assert collected.unsupported == []


def test_a_process_in_an_invisible_namespace_is_only_up(job: JobOnProc) -> None:
    job.processes[0] = replace(job.processes[0], pid=None)
    collected = job.collect()

    assert value_of(collected, "training_process_up", "r", "0") == 1
    assert labels_of(collected, INSTANCES) == []
    assert "pid namespace" in collected.unsupported[0]


def test_workers_that_outlive_their_trainer_stay_members(job: JobOnProc, proc: Proc) -> None:
    proc.add(worker_process(110))
    job.collect()
    job.end_recording()

    assert value_of(job.collect(), INSTANCES, *LOADER_LABELS) == 1


def test_a_forked_child_without_exec_is_a_worker(job: JobOnProc, proc: Proc) -> None:
    spawn_command = "python\0-c\0from multiprocessing.spawn import spawn_main\0"
    forkserver_command = "python\0-c\0from multiprocessing.forkserver import main\0"
    proc.add(FakeProcess(110, parent=100))
    proc.add(FakeProcess(111, parent=100, command=spawn_command))
    proc.add(FakeProcess(112, parent=100, command=forkserver_command))
    proc.add(FakeProcess(113, parent=112))
    proc.add(FakeProcess(114, parent=100, command="nvidia-smi\0", comm="nvidia-smi"))
    collected = job.collect()

    assert value_of(collected, INSTANCES, *LOADER_LABELS) == 3
    assert value_of(collected, INSTANCES, "r", "0", "other") == 2


def test_a_child_is_classified_only_after_it_had_time_to_exec(job: JobOnProc, proc: Proc) -> None:
    child = proc.add(FakeProcess(110, parent=100, started_at=proc.wall + 4.9, user_seconds=0.25))
    collected_before_exec = job.collect()
    child.command = "nvidia-smi\0"
    collected_after_exec = job.collect()

    assert value_of(collected_before_exec, INSTANCES, *LOADER_LABELS) is None
    assert value_of(collected_after_exec, CPU_SECONDS, "r", "0", "other", "user") == 0.25


def test_the_exporter_is_not_a_process_of_the_job_that_started_it(job: JobOnProc, proc: Proc) -> None:
    proc.add(FakeProcess(999_999, parent=100))
    proc.add(FakeProcess(120, parent=999_999))

    assert labels_of(job.collect(), INSTANCES) == [TRAINER_LABELS]


def test_a_worker_that_records_is_a_worker(proc: Proc) -> None:
    job = JobOnProc(proc)
    job.add_recording(proc.add(worker_process(110, started_at=proc.wall - 20)))
    job.add_recording(proc.add(FakeProcess(100)))
    collected = job.collect()

    assert (
        value_of(collected, INSTANCES, *TRAINER_LABELS) == value_of(collected, INSTANCES, *LOADER_LABELS) == 1
    )


@pytest.mark.parametrize("name", ["stat", "status", "statm", "io"])
@pytest.mark.parametrize("content", ["garbage", "1 (x) Q -1 " + "x " * 60, "9" * 5000])
def test_garbage_affects_only_its_process_and_names_it(
    job: JobOnProc, proc: Proc, name: str, content: str
) -> None:
    job.add_recording(proc.add(FakeProcess(200, user_seconds=7.0)), rank=1)
    job.collect()
    (proc.root / "100" / name).write_text(content)
    collected = job.collector.collect()

    assert_sound(job.collector, collected)
    assert value_of(collected, CPU_SECONDS, "r", "1", "trainer", "user") == 7.0
    assert {reason for reason, _ in collected.problems} == {"malformed"}
    assert all("100" in message for _, message in collected.problems)


def test_the_series_of_an_ended_run_linger_and_disappear(job: JobOnProc) -> None:
    job.collect()
    job.end_recording()
    job.collect()
    job.processes.clear()
    lingering = job.collect(after_seconds=890.0)
    job.collect(after_seconds=11.0)
    after_linger = job.collect()

    assert value_of(lingering, CPU_SECONDS, *TRAINER_LABELS, "user") == 1.0
    assert after_linger == Collected()


def test_the_processes_of_the_runs_that_ended_last_are_shown(job: JobOnProc, proc: Proc) -> None:
    for number in range(MAX_EXITED_RUNS + 5):
        identity = job.processes[0].identity.replace(run=f"run-{number:02}")
        job.processes[0] = replace(job.processes[0], identity=identity)
        job.collect()
    shown_runs = [f"run-{number:02}" for number in range(4, MAX_EXITED_RUNS + 5)]

    assert sorted({run for run, *_ in labels_of(job.collect(), CPU_SECONDS)}) == shown_runs


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
            st.sampled_from(
                ["work", "counter falls", "end", "start", "pid is reused", "zombie", "clock steps back"]
            ),
            st.integers(0, 5),
            st.floats(0, 100),
        ),
        max_size=12,
    )
)
def test_no_counter_decreases_in_any_sequence_of_events(
    tmp_path: Path, events: list[tuple[str, int, float]]
) -> None:
    proc = Proc(tmp_path / "proc")
    job = JobOnProc(proc)
    job.add_recording(proc.add(FakeProcess(100)))
    previous = counters(job.collect())
    for event, index, amount in events:
        pid = 110 + index
        worker = proc.processes.get(pid)
        if event == "start" and worker is None:
            proc.add(worker_process(pid, user_seconds=amount, started_at=proc.wall))
        elif event == "clock steps back":
            proc.wall -= amount * 1000
        elif worker is not None:
            if event == "work":
                worker.user_seconds += amount
            elif event == "counter falls":
                worker.user_seconds /= 2
            elif event == "zombie":
                worker.state = "Z"
            elif event == "end":
                proc.end(pid)
            else:
                proc.add(worker_process(pid, started_at=proc.wall))
        current = counters(job.collect())

        assert {name: value for name, value in previous.items() if current[name] < value} == {}
        previous = current


def test_cpu_time_before_the_sidecar_started_is_no_increase(job: JobOnProc, proc: Proc) -> None:
    trainer = proc.processes[100]
    trainer.started_at, trainer.user_seconds = START - 3600.0, 500.0
    job.processes[0] = replace(
        job.processes[0], identity=job.processes[0].identity.replace(started=START - 3590.0)
    )
    initial = job.collect()
    trainer.user_seconds = 502.0

    assert value_of(initial, CPU_SECONDS, *TRAINER_LABELS, "user") == 0.0
    assert value_of(job.collect(), CPU_SECONDS, *TRAINER_LABELS, "user") == 2.0


def test_a_process_that_ended_before_the_tree_is_read_is_not_hidden() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
    identity = ProcessIdentity(id="p" * 16, pid=process.pid, run="r", rank=0, started=time.time())
    tree, hidden_counts = ProcessTree(ignore=()), list[int]()
    for _ in range(2):  # two scans of the feed, and three passes over the processes after each
        processes = [JobProcess(identity, is_alive=True, pid=process.pid)]
        for _ in range(3):
            tree.update(processes, collected=Collected(), now=0.0, wall=time.time())
            hidden_counts.append(tree.hidden_count)

    # In practice, the second scan of the feed reports the end.
    assert hidden_counts == [0, 0, 0, 1, 1, 1]
