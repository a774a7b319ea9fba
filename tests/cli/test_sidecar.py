"""`exporter.start_sidecar()`: the real sidecar as the child of a real job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_support import fetch, free_port, wait_for
from waiting import PATIENCE

JOB = """
import sys, time
import exporter
from exporter import Stat
sidecar = exporter.start_sidecar(f"--web.listen-address=127.0.0.1:{sys.argv[1]}", "--log.level=warn")
print(sidecar and sidecar.pid, flush=True)
Stat("train.loss", ["mean"]).add(1.0)
sys.stdin.read()
"""


def start(feed: Path, port: int) -> tuple[subprocess.Popen[str], int | None]:
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, str(port)],
        env=os.environ | {"EXPORTER_FEED_DIR": str(feed)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    word = job.stdout.readline().strip()
    return job, int(word) if word != "None" else None


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("ending", ["exit", "kill"])
def test_a_sidecar_started_by_the_job_serves_and_ends_with_it(tmp_path: Path, ending: str) -> None:
    port = free_port()
    job, sidecar = start(tmp_path, port)
    assert sidecar is not None
    try:
        wait_for(lambda: "train_loss_count" in (fetch(f"http://127.0.0.1:{port}/metrics") or ""))
    finally:
        if ending == "kill":
            job.send_signal(signal.SIGKILL)
        job.communicate(timeout=20 * PATIENCE)

    wait_for(lambda: not is_alive(sidecar), told="the sidecar outlives the job")
    assert job.returncode == (0 if ending == "exit" else -signal.SIGKILL)


def test_two_processes_that_ask_share_one_sidecar(tmp_path: Path) -> None:
    port = free_port()
    first, serving = start(tmp_path, port)
    wait_for(lambda: fetch(f"http://127.0.0.1:{port}/-/ready"))
    second, other = start(tmp_path, free_port())
    assert serving is not None
    assert other is not None
    try:
        wait_for(lambda: not is_alive(other), told="two sidecars serve one feed directory")
        first.communicate(timeout=20 * PATIENCE)
        assert is_alive(serving)
    finally:
        second.communicate(timeout=20 * PATIENCE)

    wait_for(lambda: not is_alive(serving), told="the sidecar outlives the last job")


def test_a_job_that_wants_no_exporter_starts_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPORTER_DISABLED", "1")
    job, sidecar = start(tmp_path, free_port())
    job.communicate(timeout=20 * PATIENCE)

    assert (sidecar, list(tmp_path.iterdir())) == (None, [])


def test_a_sidecar_that_cannot_be_started_is_told_and_harms_nothing(tmp_path: Path) -> None:
    job, sidecar = start(tmp_path / "missing", free_port())
    job.communicate(timeout=20 * PATIENCE)

    assert sidecar is None
    assert job.returncode == 0
