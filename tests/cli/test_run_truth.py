"""Launches of `run` and what is told of their jobs: ends, silence, and a real torchrun with a restart."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_support import (
    environment,
    free_port,
    page,
    processes_naming,
    run_command,
    sidecars,
    start,
    start_run,
    started,
)
from waiting import wait_until

from exporter.feed import runs

HOLD = """
import sys
from exporter.feed.files import RecordLock
lock = RecordLock.take(sys.argv[1], create_mode=0o600)
print("held", flush=True)
sys.stdin.read()
"""


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


def test_neither_writers_without_a_run_nor_an_owning_sidecar_keep_a_sidecar(tmp_path: Path) -> None:
    writer, sidecar = start(HOLD, tmp_path / f"{'a' * 32}.lock"), start(HOLD, tmp_path / "owner.lock")

    assert (runs.recording_processes(tmp_path), runs.owner(tmp_path)) == ({writer.pid}, sidecar.pid)
    assert not runs.any_active(tmp_path)
    assert runs.attached_owner(tmp_path) is None  # nothing on its command line says that it ends with a run
    kill(writer)
    kill(sidecar)
    assert (runs.recording_processes(tmp_path), runs.owner(tmp_path)) == (set(), None)


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


HANGS = """
import time
from exporter import training
with training.training_loop(train_iterations_start=0):
    for _ in range(8):
        with training.training_iteration():
            time.sleep(0.1)
            training.record(loss=7.5)
    time.sleep(600)
"""

# What was registered first ends last: as a device that torch tears down, after the feed was let go.
FAILS_SLOWLY = """
import atexit, sys, time
atexit.register(time.sleep, 2.0)
from exporter import training
with training.application(), training.training_loop(train_iterations_start=0):
    for step in range(10):
        with training.training_iteration():
            time.sleep(0.05)
        if step == 4:
            with training.checkpoint_save(step + 1):
                pass
sys.exit(3)
"""

COUNTS = """
import time
from prometheus_client import Counter
things = Counter("myjob_things", "Things.")
while True:
    things.inc()
    time.sleep(0.1)
"""


@pytest.fixture
def feed(tmp_path: Path) -> Path:
    """A feed directory."""
    directory = tmp_path / "feed"
    directory.mkdir()
    return directory


def job(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def sample(port: int, begins: str) -> float | None:
    """The value of the first series that begins so."""
    found = [line for line in page(port).splitlines() if line.startswith(begins)]
    return float(found[0].rpartition(" ")[2]) if found else None


def test_a_job_that_makes_no_more_steps_hangs_and_its_last_values_go(feed: Path, tmp_path: Path) -> None:
    port, config = free_port(), tmp_path / "exporter.yaml"
    config.write_text("goodput: {hang_after: 4s}\n")
    with started(run_command(feed, job(HANGS), f"--config.file={config}", "--run.name=r", port=port), feed):
        wait_until(lambda: sample(port, "training_loss{") == 7.5)
        wait_until(lambda: sample(port, 'training_run_state{run="r",state="hung"}') == 1)
        time.sleep(2.5)  # the process goes on to write snapshots

        assert sample(port, 'training_run_state{run="r",state="hung"}') == 1
        assert sample(port, "training_loss{") is None


def test_a_job_that_says_it_has_finished_and_fails_has_not(feed: Path) -> None:
    port = free_port()
    command = run_command(feed, job(FAILS_SLOWLY), "--run.name=r", "--run.linger=60s", port=port)
    with started(command, feed):
        wait_until(lambda: sample(port, 'training_run_state{run="r",state="failed"}') == 1)
        wait_until(lambda: sample(port, "training_interruptions_total{") == 1)

        assert sample(port, "training_uncommitted_seconds{") is not None
        assert (sample(port, "training_uncommitted_seconds{") or 0.0) > 0.2


def test_metrics_of_a_job_that_knows_prometheus_client_alone_are_on_the_page(feed: Path) -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    with started(run_command(feed, job(COUNTS), "--run.name=r", port=port), feed):
        wait_until(lambda: (sample(port, "myjob_things_total{") or 0.0) > 0)


# Three steps, then rank 1 fails; after the restart five more in both ranks.
TRAIN = """
import os, sys
import torch
import torch.distributed as dist
from exporter import Aggregation, Stat, flush

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
# A store of its own for each attempt: over torchrun's, gloo meets addresses of the attempt before.
store = f"file://{sys.argv[1]}-{attempt}"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
steps = Stat("train.steps", {Aggregation.COUNT}, window_seconds=1.0)
for _ in range(5 if attempt else 3):
    dist.all_reduce(torch.ones(1))
    steps.add(1.0)
flush()
dist.barrier()
if not attempt and rank == 1:
    sys.exit(7)
dist.barrier()
dist.destroy_process_group()
"""


def totals(text: str) -> dict[str, float]:
    """The recorded steps by rank."""
    found = re.findall(r'^train_steps_count\{(?:.*,)?rank="(\d+)".*\} (\S+)$', text, re.MULTILINE)
    return {rank: float(value) for rank, value in found}


@pytest.mark.timeout(150)
def test_the_ranks_of_torchrun_are_on_the_last_page_with_their_totals_over_the_restart(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    feed, port = tmp_path / "feed", free_port()
    feed.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    torchrun += ["--nnodes=1", "--nproc-per-node=2", "--max-restarts=1"]
    static = ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    job = [*torchrun, *static, str(script), str(tmp_path / "store")]
    command = run_command(feed, job, "--run.linger=100s", "--run.name=llama", port=port)
    pages: list[str] = []
    env = environment(OMP_NUM_THREADS="1")
    with started(command, tmp_path, env=env) as run:
        while run.poll() is None:
            pages.append(page(port) or (pages[-1] if pages else ""))  # not up yet, not ready yet, or over
            time.sleep(0.5)

    assert run.returncode == 0
    assert totals(pages[-1]) == {"0": 3 + 5, "1": 3 + 5}
    assert 'run="llama"' in pages[-1]
    assert processes_naming(str(feed)) == set()
