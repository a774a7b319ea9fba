"""Processes of the job on a /proc made by hand: who belongs to whom, and counters that do not fall."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from collectors_support import MACHINES, UPDATE, assert_sound, text_of, value_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from process_support import FakeProcess, Proc, Watch, labels_of

from exporter.collectors.job import GpuProcessUse
from exporter.collectors.processes.memory import ProcessMemoryCollector
from exporter.families import Collected
from exporter.ledger.store import StateStore

CPU = "training_process_cpu_seconds_total"
INSTANCES = "training_process_instances"
TRAINER = ("r", "0", "trainer")
LOADER = ("r", "0", "dataloader")


@pytest.fixture(autouse=True)
def procfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", "/proc")  # what `Watch` sets is undone


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path / "proc")


@pytest.fixture
def keeper(tmp_path: Path) -> StateStore:
    state = tmp_path / "state"
    state.mkdir()
    return StateStore(state, keeper="here")


def test_a_rank_with_workers_gives_the_expected_exposition(proc: Proc) -> None:
    trainer = proc.add(FakeProcess(100, threads=80, cpus="0-7"))
    for pid in (110, 111):
        proc.add(FakeProcess(pid, parent=100, comm="pt_data_worker", user=pid / 10))
    proc.add(FakeProcess(120, parent=100, comm="python", command="python\0compile_worker\0", state="D"))
    other_rank = proc.add(FakeProcess(200, user=7.0))
    agent = proc.add(FakeProcess(50, command="torchrun\0"))
    trainer.parent = other_rank.parent = 50
    watch = Watch(proc)
    for each, rank in ((trainer, 0), (other_rank, 1), (agent, None)):
        watch.records(each, rank=rank)
    watch.gpus = [
        GpuProcessUse(100, "0", "GPU-a", 5 << 30),
        GpuProcessUse(110, "0", "GPU-a", None),
        GpuProcessUse(4711, "0", "GPU-a", 1 << 30),
    ]

    collected = watch.collect()
    memory = ProcessMemoryCollector(members=lambda: watch.collector.members).collect()

    assert_sound(watch.collector, collected)
    assert collected.problems == []
    golden = MACHINES.parent / "processes.metrics"
    text = text_of([*collected, *memory])
    if UPDATE:
        golden.write_text(text)
    assert text == golden.read_text()


def test_a_restarted_rank_goes_on_counting(proc: Proc) -> None:
    watch = Watch(proc)
    first = watch.records(proc.add(FakeProcess(100, user=50.0)))
    watch.collect()
    proc.end(100)
    watch.died(first)
    watch.collect()
    watch.records(proc.add(FakeProcess(101, user=2.0, started=proc.wall)))
    after = watch.collect()

    assert value_of(after, CPU, *TRAINER, "user") == 52.0
    assert value_of(after, "training_process_up", "r", "0") == 1


def test_somebody_else_with_the_pid_is_not_the_recording_process(proc: Proc) -> None:
    watch = Watch(proc)
    for pid, rank in ((100, 0), (200, 1), (31_000, 2)):
        watch.records(proc.add(FakeProcess(pid, own_pid=7 if pid == 31_000 else None)), rank=rank)
    proc.processes[100].started += 3600.0  # began after its recording
    assert watch.job is not None
    watch.job[1] = replace(
        watch.job[1], process=watch.job[1].process.replace(pid=7)
    )  # calls itself otherwise

    assert labels_of(watch.collect(), INSTANCES) == [
        ("r", "2", "trainer")
    ]  # in a container, seen from outside


def test_a_clock_that_was_set_hides_nobody_from_the_next_sidecar(proc: Proc, keeper: StateStore) -> None:
    watch = Watch(proc, keeper)
    watch.records(proc.add(FakeProcess(100)))
    watch.collect()
    proc.wall += 7200.0
    proc.add(FakeProcess(110, parent=100, comm="pt_data_worker"))
    watch.restart()
    collected = watch.collect()

    assert value_of(collected, INSTANCES, *TRAINER) == 1
    assert value_of(collected, INSTANCES, *LOADER) == 1
    assert collected.unsupported == []


def test_a_process_in_a_namespace_that_cannot_be_seen_is_up_and_nothing_else(proc: Proc) -> None:
    watch = Watch(proc)
    each = watch.records(FakeProcess(100))
    assert watch.job is not None
    watch.job[0] = replace(each, pid=None)

    collected = watch.collect()

    assert value_of(collected, "training_process_up", "r", "0") == 1
    assert labels_of(collected, INSTANCES) == []
    assert "pid namespace" in collected.unsupported[0]


def test_workers_that_outlive_their_trainer_stay_members(proc: Proc, keeper: StateStore) -> None:
    watch = Watch(proc, keeper)
    trainer = watch.records(proc.add(FakeProcess(100)))
    proc.add(FakeProcess(110, parent=100, comm="pt_data_worker"))
    watch.collect()
    proc.end(100)
    watch.died(trainer)
    orphaned = watch.collect()
    watch.restart()
    restarted = watch.collect()

    assert value_of(orphaned, INSTANCES, *LOADER) == 1
    assert value_of(restarted, INSTANCES, *LOADER) == 1


def test_a_forked_child_that_is_no_other_program_is_a_worker(proc: Proc) -> None:
    watch = Watch(proc)
    watch.records(proc.add(FakeProcess(100)))
    proc.add(FakeProcess(110, parent=100))
    proc.add(
        FakeProcess(111, parent=100, command="python\0-c\0from multiprocessing.spawn import spawn_main\0")
    )
    proc.add(
        FakeProcess(112, parent=100, command="python\0-c\0from multiprocessing.forkserver import main\0")
    )
    proc.add(FakeProcess(113, parent=112))
    proc.add(FakeProcess(114, parent=100, command="nvidia-smi\0", comm="nvidia-smi"))
    collected = watch.collect()

    assert value_of(collected, INSTANCES, *LOADER) == 3
    assert value_of(collected, INSTANCES, "r", "0", "other") == 2


def test_a_child_is_judged_only_when_it_had_time_to_become_another_program(proc: Proc) -> None:
    watch = Watch(proc)
    watch.records(proc.add(FakeProcess(100)))
    child = proc.add(FakeProcess(110, parent=100, started=proc.wall + 4.9, user=0.25))
    young = watch.collect()
    child.command = "nvidia-smi\0"
    old = watch.collect()

    assert value_of(young, INSTANCES, *LOADER) is None
    assert value_of(old, CPU, "r", "0", "other", "user") == 0.25


def test_the_exporter_itself_is_not_of_the_job_that_started_it(proc: Proc) -> None:
    watch = Watch(proc)
    watch.records(proc.add(FakeProcess(100)))
    proc.add(FakeProcess(999_999, parent=100))
    proc.add(FakeProcess(120, parent=999_999))

    assert labels_of(watch.collect(), INSTANCES) == [TRAINER]


def test_a_worker_that_records_is_a_worker(proc: Proc) -> None:
    watch = Watch(proc)
    watch.records(proc.add(FakeProcess(110, parent=100, comm="pt_data_worker", started=proc.wall - 20)))
    watch.records(proc.add(FakeProcess(100)))
    collected = watch.collect()

    assert value_of(collected, INSTANCES, *TRAINER) == 1
    assert value_of(collected, INSTANCES, *LOADER) == 1


def test_a_zombie_shows_as_one_and_counts_once(proc: Proc) -> None:
    watch = Watch(proc)
    watch.records(proc.add(FakeProcess(100)))
    worker = proc.add(FakeProcess(110, parent=100, comm="pt_data_worker", user=5.0))
    watch.collect()
    worker.state, worker.user = "Z", 5.5
    zombie = watch.collect()
    watch.collect()
    proc.end(110)
    gone = watch.collect()

    assert value_of(zombie, "training_process_state", *LOADER, "zombie") == 1
    assert value_of(zombie, INSTANCES, *LOADER) == 0
    assert value_of(gone, CPU, *LOADER, "user") == 5.5


@pytest.mark.parametrize("name", ["stat", "status", "statm", "io"])
@pytest.mark.parametrize("content", ["garbage", "1 (x) Q -1 " + "x " * 60, "9" * 5000])
def test_garbage_costs_the_process_and_names_it(proc: Proc, name: str, content: str) -> None:
    watch = Watch(proc)
    watch.records(proc.add(FakeProcess(100)))
    watch.records(proc.add(FakeProcess(200, user=7.0)), rank=1)
    watch.collect()
    (proc.root / "100" / name).write_text(content)
    collected = watch.collector.collect()

    assert_sound(watch.collector, collected)
    assert value_of(collected, CPU, "r", "1", "trainer", "user") == 7.0
    assert {reason for reason, _ in collected.problems} == {"malformed"}
    assert "100" in collected.problems[0][1]


def test_a_run_that_is_over_lingers_and_goes(proc: Proc, keeper: StateStore) -> None:
    watch = Watch(proc, keeper, linger_seconds=60.0)
    trainer = watch.records(proc.add(FakeProcess(100)))
    watch.collect()
    proc.end(100)
    watch.died(trainer)
    watch.collect()
    assert watch.job is not None
    watch.job.clear()
    lingering = watch.collect(after=30.0)
    over = [watch.collect(after=31.0), watch.collect()][-1]

    assert value_of(lingering, CPU, *TRAINER, "user") == 1.0
    assert over == Collected()


def test_totals_that_cannot_be_saved_are_withheld(proc: Proc, tmp_path: Path) -> None:
    state = tmp_path / "state"
    watch = Watch(proc, StateStore(state, keeper="here"))
    watch.records(proc.add(FakeProcess(100)))
    withheld = watch.collect()
    state.mkdir()
    saved = watch.collect()

    assert value_of(withheld, CPU, *TRAINER, "user") is None
    assert value_of(withheld, INSTANCES, *TRAINER) == 1
    assert [reason for reason, _ in withheld.problems] == ["state"]
    assert value_of(saved, CPU, *TRAINER, "user") == 1.0


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
            st.sampled_from(["work", "fall", "end", "start", "reuse", "restart", "zombie", "step back"]),
            st.integers(0, 5),
            st.floats(0, 100),
        ),
        max_size=12,
    )
)
def test_no_counter_ever_falls(tmp_path: Path, happenings: list[tuple[str, int, float]]) -> None:
    proc = Proc(tmp_path / "proc")
    state = tmp_path / f"state{len(list(tmp_path.iterdir()))}"
    state.mkdir()
    watch = Watch(proc, StateStore(state, keeper="here"))
    watch.records(proc.add(FakeProcess(100)))
    before = counters(watch.collect())
    for what, which, amount in happenings:
        pid = 110 + which
        worker = proc.processes.get(pid)
        if what == "start" and worker is None:
            proc.add(FakeProcess(pid, parent=100, comm="pt_data_worker", user=amount, started=proc.wall))
        elif what == "restart":
            watch.restart()
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
                proc.add(FakeProcess(pid, parent=100, comm="pt_data_worker", started=proc.wall))
        after = counters(watch.collect())

        assert {name: value for name, value in before.items() if after[name] < value} == {}
        before = after
