"""Feeds of training processes: forks, many iterations, a changed identity, and a kill after a save."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
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
    run(
        """
        import os, sys
        import exporter
        from exporter import one_logger, training
        settings = one_logger.OneLoggerConfig(application_name="a", world_size_or_fn=1, session_tag_or_fn="s")
        one_logger.TrainingTelemetryProvider.instance().with_base_config(settings).configure_provider()
        for _ in range(5):
            with training.training_iteration():
                pass
        with training.training_iteration():
            child = os.fork()
            if not child:
                for _ in range(3):
                    with training.phase("compile"):
                        pass
                exporter.shutdown()
                os._exit(0)
            os.waitpid(child, 0)
        """,
        tmp_path,
    )

    by_pid = sorted(snapshots(tmp_path / "feed"), key=lambda snapshot: snapshot.process.pid)
    steps = [total(snapshot, "training.steps", mode="train") for snapshot in by_pid]
    compile_entries = [total(snapshot, "training.phase_entries", phase="compile") for snapshot in by_pid]
    assert sorted(steps, key=str) == [6, None]
    assert sorted(compile_entries, key=str) == [3, None]


@pytest.mark.timeout(60)
def test_many_iterations_are_counted_exactly_in_constant_memory(
    tmp_path: Path,
) -> None:
    growth_bytes = run(
        """
        import os
        import exporter
        from exporter import training

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        def train(times):
            for _ in range(times):
                with training.training_iteration():
                    with training.data_loading():
                        pass
                    with training.model_forward():
                        pass
                    training.record(loss=0.5, tokens=7, grad_norm=1.0)

        with training.application(), training.training_loop(train_iterations_start=5):
            # Flushed explicitly: on a busy machine, the recording thread runs late and its queue grows.
            train(10_000)
            exporter.flush()
            before = resident()
            for _ in range(4):
                train(10_000)
                exporter.flush()
            print(resident() - before)
            train(10)
        """,
        tmp_path,
    )

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
        """
        import os, signal, time
        from pathlib import Path
        from exporter import training
        from exporter.feed.decoder import decode

        with training.application(), training.training_loop(train_iterations_start=0):
            for _ in range(7):
                with training.training_iteration():
                    pass
            with training.checkpoint_save(7):
                pass
            for _ in range(1200):  # a minute
                feeds = list(Path(os.environ["EXPORTER_FEED_DIR"]).glob("*.feed"))
                if feeds and decode(feeds[0].read_bytes()).recording.training.committed_step == 7:
                    break
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
        status=-signal.SIGKILL,
        EXPORTER_FLUSH_SECONDS="60",
    )

    (snapshot,) = snapshots(tmp_path / "feed")
    reading = snapshot.recording.training
    assert reading is not None
    assert (reading.steps, reading.committed_step, reading.segments) == (7, 7, ())
