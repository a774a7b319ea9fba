"""Memory, time and files of the ledger over many runs, damaged or missing state, and the caps of Stats and series."""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sized
from pathlib import Path

import pytest
from goodput_support import MonitoredJob
from ledger_support import START, SimulatedSidecar, make_definition, make_process, make_reading, make_snapshot
from waiting import PATIENCE

from exporter.collectors.job import MAX_EXITED_RUNS
from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page as ExpositionPage
from exporter.feed.encoder import encode
from exporter.ledger.state import store
from exporter.recording.values import Aggregation, WindowReading

AGGREGATIONS = (Aggregation.MEAN, Aggregation.MIN, Aggregation.MAX, Aggregation.P95)
RANK_0_LABELS = {"run": "r", "rank": "0"}


def play_short_run(sidecar: SimulatedSidecar, run: str, stat: str, *, pause_seconds: float = 600.0) -> None:
    """Play a short run with a uniquely named Stat, and pause."""
    job = MonitoredJob(sidecar, run=run)
    job.simulated.start_loop(0)
    job.simulated.train()
    job.write(make_reading(make_definition(stat), [1.0]))
    sidecar.collect()
    job.write(final=True)
    job.die()
    sidecar.clock.advance(pause_seconds)


def count_objects_in_memory(sidecar: SimulatedSidecar) -> int:
    """Return the number of objects that the ledger keeps for processes, ranks, families, sessions and runs."""
    collector = sidecar.collector
    containers: tuple[Sized, ...] = (
        collector._ranks._ranks,
        collector._ranks._key_by_process,
        collector._owners._owners,
        collector.sessions._sessions,
        collector.sessions._key_by_process,
        collector._states._runs,
        collector._undeletable_ids,
        sidecar.state._name_by_key,
    )
    return sum(len(container) for container in containers)


@pytest.mark.timeout(90)
def test_memory_time_and_files_stay_flat_over_hundreds_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = SimulatedSidecar(tmp_path)
    monkeypatch.setattr(store, "MAX_FILES", 80)
    sidecar.collector._linger_seconds = 20.0
    object_counts, cpu_seconds, file_counts = [], [], []
    for index in range(200):
        start_time = time.process_time()
        play_short_run(sidecar, f"train-{index}", f"stat.of.{index}")
        cpu_seconds.append(time.process_time() - start_time)
        object_counts.append(count_objects_in_memory(sidecar))
        file_counts.append(len(list((tmp_path / "ledger").glob("*.ledger"))))

    assert max(object_counts[150:]) <= max(object_counts[50:100])
    assert max(file_counts[150:]) <= max(file_counts[:100])
    # The CPU time of a run fluctuates on a busy machine; a time that grows with the number of runs doubles.
    assert statistics.median(cpu_seconds[150:]) < 2 * statistics.median(cpu_seconds[50:100])


def test_many_short_runs_displace_no_running_run_and_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_FILES", 40)
    sidecar = SimulatedSidecar(tmp_path)
    running_job = MonitoredJob(sidecar, run="running")
    object_counts = []
    run_count = 3 * MAX_EXITED_RUNS
    for index in range(run_count):
        running_job.write()
        play_short_run(sidecar, f"short-{index}", "reward", pause_seconds=5.0)
        object_counts.append(count_objects_in_memory(sidecar))
    page = sidecar.collect()
    short_runs = {f"short-{index}" for index in range(run_count - MAX_EXITED_RUNS, run_count)}

    for family in ("reward_count", "training_run_state", "training_wall_seconds_total"):
        assert {dict(labels)["run"] for labels in page.all(family)} - {"running"} == short_runs
    assert max(object_counts[-MAX_EXITED_RUNS:]) <= max(object_counts[MAX_EXITED_RUNS:-MAX_EXITED_RUNS])
    # Files are removed after each 40 claims of a key, so that up to 40 files are added in between.
    assert len(list((tmp_path / "ledger").glob("*.ledger"))) < 2 * 40


def count_after_restart_of_rank(sidecar: SimulatedSidecar, started_at: float = START + 50) -> object:
    """Record one sample in a new process of rank 0 and return the total of the rank."""
    sidecar.record_loss(make_process(started=started_at), 1)
    return sidecar.collect_after(1.0).count("loss", **RANK_0_LABELS)


def test_a_file_damaged_at_runtime_removes_nothing_from_memory(tmp_path: Path) -> None:
    sidecar = SimulatedSidecar(tmp_path)
    process = make_process()
    sidecar.record_loss(process, 3, alive=False)
    sidecar.collect()
    sidecar.collect_after(4.0)  # the end is decided: the rank is released
    sidecar.collect_after(1.0)
    (path,) = (tmp_path / "ledger").glob("rank*.ledger")
    path.write_bytes(b"damaged")

    assert count_after_restart_of_rank(sidecar) == 4
    assert sidecar.state.damaged_files == 1
    sidecar.restart()
    assert sidecar.collect_after(1.0).count("loss", **RANK_0_LABELS) == 4


@pytest.mark.parametrize("missing_bytes", [0, 20], ids=["whole", "damaged"])
def test_a_copied_state_file_affects_only_the_replaced_rank(tmp_path: Path, missing_bytes: int) -> None:
    sidecar = SimulatedSidecar(tmp_path)
    for rank in (0, 1):
        sidecar.record_loss(make_process(rank=rank), 3 + rank, alive=False)
    sidecar.collect()
    file_of_rank_0, file_of_rank_1 = sorted((tmp_path / "ledger").glob("rank*.ledger"))
    state_of_rank_1 = file_of_rank_1.read_bytes()
    file_of_rank_0.write_bytes(state_of_rank_1[: len(state_of_rank_1) - missing_bytes])
    sidecar.restart()
    page = sidecar.collect_after(1.0)

    assert page.count("loss", **RANK_0_LABELS) is None
    assert page.count("loss", run="r", rank="1") == 4
    assert count_after_restart_of_rank(sidecar) == 1
    assert sidecar.state.damaged_files == 1
    assert file_of_rank_1.read_bytes() == state_of_rank_1


def test_a_removed_state_directory_is_written_again_from_memory(tmp_path: Path) -> None:
    sidecar = SimulatedSidecar(tmp_path)
    process = make_process()
    for sequence in (1, 2):
        sidecar.record_loss(process, sequence, sequence=sequence)
        page = sidecar.collect_after(1.0)
        if sequence == 1:
            shutil.rmtree(tmp_path / "ledger")
    sidecar.feed.files.clear()
    sidecar.restart()

    assert page.count("loss", **RANK_0_LABELS) == 2
    assert page.get("exporter_ledger_suppressed_ranks") == 0
    assert sidecar.collect_after(1.0).count("loss", **RANK_0_LABELS) == 2


def write_many_stats(directory: Path, *, processes: int, stats: int) -> None:
    """Write the feed files of processes that record many Stats."""
    for rank in range(processes):
        process = make_process(rank=rank)
        readings = []
        for index in range(stats):
            definition = make_definition(
                f"stat.number{index}.{'x' * 60}", *AGGREGATIONS, help="A text of some length."
            )
            window = WindowReading(START - 60, START, 3, dict.fromkeys(AGGREGATIONS, 0.5))
            readings.append(make_reading(definition, [0.5, 1.5], window=window))
        (directory / f"{process.id}.feed").write_bytes(encode(make_snapshot(process, *readings)))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("processes", "stats"), [(1, 5000), (8, 6_000)], ids=["names", "files"])
def test_stats_beyond_the_cap_are_dropped_and_counted(tmp_path: Path, processes: int, stats: int) -> None:
    write_many_stats(tmp_path, processes=processes, stats=stats)
    command = [sys.executable, str(Path(__file__).parent / "crowd_child.py"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110 * PATIENCE)

    assert result.returncode == 0, result.stderr[-2000:]
    peak_mebibytes, process_count, dropped_count = map(int, result.stdout.split())
    assert peak_mebibytes <= 256  # the memory limit of the sidecar in docs/operations.md
    assert process_count == processes
    assert 0 < dropped_count < processes * stats


def test_a_full_page_has_the_totals_of_all_stats_before_any_window_gauge(tmp_path: Path) -> None:
    sidecar = SimulatedSidecar(tmp_path)
    window = WindowReading(START - 60, START, 1, dict.fromkeys([Aggregation.MEAN, Aggregation.MAX], 1.0))
    readings = [make_reading(make_definition(f"stat{index}"), [0.5], window=window) for index in range(100)]
    sidecar.feed.publish(make_snapshot(make_process(), *readings))
    page = ExpositionPage(max_series=400)
    page.publish("job", sidecar.collector.collect())
    exposition = page.render(Format.TEXT).decode()

    totals, windows = (
        re.findall(rf"^stat\d+_{suffix}{{", exposition, re.MULTILINE) for suffix in ("count", "window_mean")
    )
    assert len(totals) == 100
    assert windows == []
