"""Feeds of training processes: forks, many iterations, a changed identity, and a kill after a save."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import programs.training
import pytest
from programs import code_of
from training_support import run_python

from exporter.feed.decoder import decode
from exporter.feed.snapshot import Snapshot


def run(program: str, directory: Path, *, status: int = 0, **environment: str) -> str:
    """Run a program with a temporary feed directory and return its output."""
    directory.mkdir(exist_ok=True)
    environment.setdefault("EXPORTER_FLUSH_SECONDS", "1")
    completed = run_python(program, directory, timeout=60, **environment)
    assert completed.returncode == status, completed.stdout + completed.stderr
    return completed.stdout


def snapshots(feed: Path) -> list[Snapshot]:
    return [decode(path.read_bytes()) for path in feed.glob("*.feed")]


def total(snapshot: Snapshot, name: str, **labels: str) -> Any:
    """Return the value of a series: a gauge's value, a counter's total or a histogram's count; None if absent."""
    for stat in snapshot.recording.stats:
        if (stat.definition.name, dict(stat.definition.labels)) == (name, labels):
            return {"gauge": stat.value, "counter": stat.sum}.get(stat.definition.kind, stat.count)
    return None


def test_a_forked_child_never_counts_values_of_its_parent(tmp_path: Path) -> None:
    run(code_of(programs.training.fork_in_an_iteration), tmp_path)

    steps_and_compile_entries = {
        (
            total(snapshot, "training.steps", mode="train"),
            total(snapshot, "training.phase_entries", phase="compile"),
        )
        for snapshot in snapshots(tmp_path / "feed")
    }
    assert steps_and_compile_entries == {(6, None), (None, 3)}  # of the parent and of the child


@pytest.mark.timeout(60)
def test_many_iterations_are_counted_exactly_in_bounded_memory(
    tmp_path: Path,
) -> None:
    growth_bytes = run(code_of(programs.training.train_many_iterations), tmp_path)

    (snapshot,) = snapshots(tmp_path / "feed")
    assert snapshot.recording.final
    assert total(snapshot, "training.steps", mode="train") == 50_010
    assert total(snapshot, "training.tokens", mode="train") == 350_070
    assert total(snapshot, "training.phase_entries", phase="data_loading") == 50_010
    assert total(snapshot, "training.step_duration", mode="train") == 50_010
    reading = snapshot.recording.training
    assert reading is not None
    assert (reading.finished, reading.step, reading.first_step) == (True, 50_015, 5)
    assert int(growth_bytes) < 4 << 20


def test_a_new_identity_restarts_the_totals_while_blocks_stay_open(tmp_path: Path) -> None:
    run(
        """
        import exporter
        from exporter import training
        with training.application(), training.training_loop(train_iterations_start=0):
            for _ in range(4):
                with training.training_iteration():
                    pass
            exporter.flush()
            exporter.configure(run="second")
            for _ in range(3):
                with training.training_iteration():
                    pass
        """,
        tmp_path,
    )

    steps = {
        snapshot.process.run if snapshot.process.run_given else "generated name": total(
            snapshot, "training.steps", mode="train"
        )
        for snapshot in snapshots(tmp_path / "feed")
    }
    assert steps == {"generated name": 4, "second": 3}


def test_records_that_find_the_queue_full_are_counted_and_logged_with_their_number(tmp_path: Path) -> None:
    completed = run_python(
        """
        import exporter
        from exporter import training
        from exporter.training import recorder
        recorder.MAX_RECORDS = 0
        for _ in range(5):
            with training.span("tokenize"):
                pass
        """,
        tmp_path,
    )

    (snapshot,) = snapshots(tmp_path / "feed")
    notice = r"exporter: [1-9]\d* training records were dropped, because the queue was full \(logged once;"
    assert re.match(notice, completed.stderr)
    assert total(snapshot, "training.misuse", call="records", rule="dropped") == 1


def test_a_save_is_published_before_the_next_flush(tmp_path: Path) -> None:
    run(
        code_of(programs.training.save_and_be_killed),
        tmp_path,
        status=-signal.SIGKILL,
        EXPORTER_FLUSH_SECONDS="60",
    )

    (snapshot,) = snapshots(tmp_path / "feed")
    reading = snapshot.recording.training
    assert reading is not None
    assert (reading.steps, reading.committed_step, reading.segments) == (7, 7, ())
