"""Start and end times of processes on the monotonic clock."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from waiting import wait_until

from exporter.collectors.processes.lives import RETENTION_SECONDS, ProcessLives


def errors_of_start_and_end(lives: ProcessLives) -> tuple[float, float]:
    """Return the errors in seconds of the start and the end of a process that is killed."""
    start_time = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        lives.watch([process.pid])
        process.kill()
        end_time = time.monotonic()
        wait_until(lambda: lives.watch([])[process.pid].ended_at is not None)
    life = lives.watch([])[process.pid]
    assert life.started_at is not None
    assert life.ended_at is not None
    return life.started_at - start_time, life.ended_at - end_time


def test_start_and_end_of_a_process_are_known_to_a_tenth_of_a_second() -> None:
    lives, errors = ProcessLives(), list[tuple[float, float]]()
    # A busy machine can start a process late, or wake the watching thread late.
    while len(errors) < 30 and not (errors and max(map(abs, errors[-1])) < 0.1):
        errors.append(errors_of_start_and_end(lives))
    lives.stop()

    assert max(map(abs, errors[-1])) < 0.1, errors


def test_a_process_that_does_not_exist_has_no_start_or_end() -> None:
    assert ProcessLives().watch([2**22 - 1]) == {}


def test_a_thread_that_cannot_be_started_costs_only_the_exact_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    lives, descriptor_directory = ProcessLives(), Path("/proc/self/fd")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        open_count = len(list(descriptor_directory.iterdir()))
        life_while_running = lives.watch([process.pid])[process.pid]
        leaked_count = len(list(descriptor_directory.iterdir())) - open_count
        process.kill()
    life_after_end = lives.watch([process.pid])[process.pid]

    assert life_while_running.ended_at is None
    assert life_after_end.ended_at is not None
    assert leaked_count == 0


def test_the_end_of_a_process_that_the_driver_still_lists_stays_known() -> None:
    clock = [time.monotonic()]
    lives = ProcessLives(monotonic=lambda: clock[0])
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        lives.watch([process.pid])
        process.kill()
    wait_until(lambda: lives.watch([process.pid])[process.pid].ended_at is not None)
    ended_life = lives.watch([process.pid])[process.pid]
    clock[0] += 10 * RETENTION_SECONDS
    life_while_listed = lives.watch([process.pid]).get(process.pid)
    lives_afterwards = lives.watch([])
    lives.stop()

    assert life_while_listed == ended_life
    assert lives_afterwards == {}
