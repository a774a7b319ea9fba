"""Which runs are active: what tells an attached sidecar that its work is done."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from run_support import environment, free_port, page, run_command, sidecars, started
from waiting import wait_until

from exporter.feed import runs

REGISTER = """
import sys
from pathlib import Path
from exporter.feed import runs
registration = runs.Registration(Path(sys.argv[1]))
print("registered", flush=True)
sys.stdin.read()
registration.release()
"""
HOLD = """
import sys
from exporter.feed.files import RecordLock
lock = RecordLock.take(sys.argv[1], create_mode=0o600)
print("held", flush=True)
sys.stdin.read()
"""


def start_run(feed: Path) -> subprocess.Popen[str]:
    """Another process that is registered."""
    return start(REGISTER, feed)


def start(program: str, path: Path) -> subprocess.Popen[str]:
    """A program that has said its line, and ends when its input closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL, and nothing left open."""
    process.kill()
    process.communicate()


def test_a_run_is_active_until_it_ends_in_order_and_leaves_no_file(tmp_path: Path) -> None:
    assert not runs.any_active(tmp_path)
    first, second = start_run(tmp_path), start_run(tmp_path)
    first.communicate()

    assert runs.any_active(tmp_path)
    second.communicate()
    assert not runs.any_active(tmp_path)
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_killed_run_stays_active_while_its_job_records(tmp_path: Path) -> None:
    kill(start_run(tmp_path))
    writer = start(HOLD, tmp_path / f"{'a' * 32}.lock")

    assert runs.any_active(tmp_path)
    kill(writer)
    assert not runs.any_active(tmp_path)


def test_a_killed_run_is_forgotten_once_nobody_records_so_that_later_writers_do_not_revive_it(
    tmp_path: Path,
) -> None:
    kill(start_run(tmp_path))

    assert not runs.any_active(tmp_path)
    writer = start(HOLD, tmp_path / f"{'a' * 32}.lock")
    assert not runs.any_active(tmp_path)
    kill(writer)


def test_writers_without_a_run_keep_no_sidecar(tmp_path: Path) -> None:
    writer = start(HOLD, tmp_path / f"{'a' * 32}.lock")

    assert bool(runs.recording_processes(tmp_path))
    assert not runs.any_active(tmp_path)
    kill(writer)


def test_the_lock_of_the_owning_sidecar_is_no_writer(tmp_path: Path) -> None:
    sidecar = start(HOLD, tmp_path / "owner.lock")

    assert (runs.owner(tmp_path), bool(runs.recording_processes(tmp_path))) == (sidecar.pid, False)
    assert runs.attached_owner(tmp_path) is None  # nothing on its command line says that it ends with a run
    kill(sidecar)
    assert runs.owner(tmp_path) is None


def test_a_feed_directory_that_is_emptied_under_a_run_costs_neither_its_sidecar_nor_its_numbers(
    tmp_path: Path,
) -> None:
    feed, port = tmp_path / "feed", free_port()
    feed.mkdir()
    job = "import time\nfrom exporter import Stat\nfor _ in range(600):\n    Stat('train.loss', ['mean']).add(1.0)\n    time.sleep(0.1)"
    with started(run_command(feed, [sys.executable, "-c", job], "--run.name=llama", port=port), feed):
        wait_until(lambda: "train_loss_count{" in page(port))
        before = sidecars(feed)
        for path in feed.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        wait_until(lambda: runs.jobs(feed) and runs.owner(feed) == before[0])

        assert [each.run for each in runs.jobs(feed)] == ["llama"]
        assert sidecars(feed) == before
        wait_until(lambda: 'training_feed_alive{rank="0",run="llama"} 1' in page(port))
