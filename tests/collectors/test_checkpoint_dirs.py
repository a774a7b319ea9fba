"""Directories of checkpoints: how much room is left, without waiting for servers that are gone."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.collectors.host.filesystem import CHECKPOINT_AVAILABLE as AVAILABLE
from exporter.collectors.host.filesystem import CHECKPOINT_SIZE as SIZE
from exporter.collectors.host.filesystem import CheckpointDirsCollector, StatvfsPool
from exporter.collectors.host.memory import oom_kills
from exporter.families import Collected


def values(collected: Collected) -> dict[tuple[str, ...], object]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in collected
        for sample in metric.samples
    }


def test_each_run_has_the_room_of_each_path(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    collected = CheckpointDirsCollector([tmp_path], runs=lambda: {"b", "a"}).collect()

    told = values(collected)
    assert list(told) == [(spec.name, run, str(tmp_path)) for spec in (AVAILABLE, SIZE) for run in ("a", "b")]
    assert told[SIZE.name, "a", str(tmp_path)] == found.f_blocks * found.f_frsize


def test_a_path_that_is_not_there_costs_itself_alone(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    collected = CheckpointDirsCollector([missing, tmp_path], runs=lambda: {"r"}).collect()

    assert {labels[2] for labels in values(collected)} == {str(tmp_path)}
    assert collected.problems == [("read", f"{missing}: No such file or directory")]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_filesystem_that_hangs_costs_itself_alone(tmp_path: Path, gate: threading.Event) -> None:
    def statvfs(path: str) -> os.statvfs_result:
        if path == "/dead":
            gate.wait(10.0)
        return os.statvfs(tmp_path)

    pool = StatvfsPool(statvfs=statvfs, deadline_seconds=0.2)
    collector = CheckpointDirsCollector([Path("/dead"), tmp_path], runs=lambda: {"r"}, pool=pool)
    collected = collector.collect()

    assert {labels[2] for labels in values(collected)} == {str(tmp_path)}
    assert [reason for reason, _ in collected.problems] == ["timeout"]


def test_where_none_answers_the_collection_has_failed() -> None:
    collected = CheckpointDirsCollector([Path("/nowhere")], runs=lambda: {"r"}).collect()

    assert list(collected) == []
    assert "/nowhere" in collected.problems[0][1]


@pytest.mark.parametrize(("paths", "runs"), [((), {"r"}), ((Path("/"),), set()), ((Path("/"),), None)])
def test_without_paths_or_runs_there_is_nothing_to_tell(
    paths: tuple[Path, ...], runs: set[str] | None
) -> None:
    collected = CheckpointDirsCollector(paths, runs=lambda: runs).collect()

    assert not collected
    assert not collected.problems


def test_a_filesystem_that_does_not_know_its_size_is_not_full(tmp_path: Path) -> None:
    unknown = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    pool = StatvfsPool(statvfs=lambda _: unknown)
    collected = CheckpointDirsCollector([tmp_path], runs=lambda: {"r"}, pool=pool).collect()

    assert not collected
    assert collected.unsupported == [f"{tmp_path}: its filesystem does not tell its size"]


def test_the_kernel_counts_what_it_killed_for_memory(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 3\nother 1\n")

    assert oom_kills(tmp_path) == 3
    assert oom_kills(tmp_path / "nowhere") is None
    (tmp_path / "vmstat").write_text("nr_free_pages 5\n")
    assert oom_kills(tmp_path) is None
