"""How a job of `run` ended: what is left for the sidecar, which tells why the training stopped."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from run_support import free_port, run_command, started
from waiting import wait_until

from exporter.feed import runs


def end_of(tmp_path: Path, program: str) -> tuple[int, list[runs.End]]:
    """The exit status of `run`, and what it has left, of a job that is this program."""
    feed = tmp_path / "feed"
    feed.mkdir(exist_ok=True)
    command = run_command(feed, [sys.executable, "-c", program], port=free_port())
    with started(command, tmp_path) as run:
        wait_until(lambda: run.poll() is not None)
    return run.returncode, runs.ends(feed)


def test_a_job_that_is_killed_leaves_the_signal_and_its_pid(tmp_path: Path) -> None:
    program = (
        f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); os.kill(os.getpid(), 9)"
    )
    status, (end,) = end_of(tmp_path, program)

    assert status == -9
    assert end.status == -9
    assert end.pid == int((tmp_path / "pid").read_text())


def test_a_job_that_fails_leaves_its_exit_status(tmp_path: Path) -> None:
    status, (end,) = end_of(tmp_path, "raise SystemExit(3)")

    assert [status, end.status] == [3, 3]


def test_a_job_that_succeeds_leaves_its_run_and_its_times(tmp_path: Path) -> None:
    before = time.time()
    status, (end,) = end_of(tmp_path, "import time; time.sleep(0.5)")

    assert (status, end.status) == (0, 0)
    assert end.run.startswith("python")
    assert before < end.started < end.at - 0.5 < time.time()


def test_a_living_launch_names_its_run_and_its_job_and_a_killed_one_does_not(tmp_path: Path) -> None:
    feed = tmp_path / "feed"
    feed.mkdir()
    command = run_command(feed, ["sleep", "60"], "--run.name=llama", port=free_port())
    with started(command, tmp_path) as run:
        wait_until(lambda: runs.jobs(feed))
        (job,) = runs.jobs(feed)
        name = Path(f"/proc/{job.pid}/comm").read_text()
        run.kill()
        run.wait()

        assert (job.run, name) == ("llama", "sleep\n")
        assert runs.jobs(feed) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"pid": 1, "status": 1, "at": "now"}',
        b'{"pid": 1, "status": true, "at": 1.0}',
        b'{"pid": 1, "status": 1, "at": NaN}',
        b"[" * 5000,
    ],
)
def test_what_cannot_be_read_is_passed_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "1-a.ended").write_bytes(content)
    (tmp_path / "runs" / "2-b.ended").write_text(json.dumps({"pid": 2, "status": -9, "at": 5.0}))
    (tmp_path / "runs" / "3-c.ended").symlink_to("2-b.ended")
    os.mkfifo(tmp_path / "runs" / "4-d.ended")

    assert [end.pid for end in runs.ends(tmp_path)] == [2]
    assert runs.ends(tmp_path / "nowhere") == []


def test_what_is_a_day_old_is_removed(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / "2-b.ended"
    path.write_text(json.dumps({"pid": 2, "status": -9, "at": 5.0}))
    runs.forget_ends(tmp_path)
    young = path.exists()
    runs.forget_ends(tmp_path, clock=lambda: path.stat().st_mtime + runs.ENDED_SECONDS + 1)

    assert young
    assert not path.exists()
