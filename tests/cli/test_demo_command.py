"""`training-exporter demo`: the simulated job, its page, and the clean-up."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import DATA
from run_support import (
    child_environment,
    fetch_page,
    free_port,
    processes_naming,
    run_to_completion,
    running_process,
    sidecar_command,
)
from waiting import WAIT_LIMIT_SECONDS, wait_until

from exporter.cli.simulated_job import CHECKPOINT_STEPS, CRASH_STEP, RANKS

STEPS = re.compile(r'^demo_step_duration_seconds_count\{(?:.*,)?rank="(\d)".*\} (\S+)$', re.MULTILINE)
PHASES = re.compile(r'^training_phase_seconds_total\{phase="(\w+)"', re.MULTILINE)
WINDOW = re.compile(r'^demo_step_duration_window_mean_seconds\{(?:.*,)?rank="(\d)"', re.MULTILINE)
GPU_AND_RANK = re.compile(r'^training_rank_info\{.*gpu="(\d)".*rank="(\d)"', re.MULTILINE)


def demo_command(*flags: str, port: int = 0) -> list[str]:
    """Return the command line of the demo."""
    return [sys.executable, "-m", "exporter", "demo", f"--web.listen-address=127.0.0.1:{port}", *flags]


@contextlib.contextmanager
def demo(tmp_path: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a demo in a temporary directory, and yield the process and the port."""
    env = child_environment(TMPDIR=str(tmp_path), EXPORTER_FEED_DIR=str(tmp_path / "unused"))
    command = demo_command(f"--feed.dir={tmp_path}", *flags)
    with running_process(
        command, tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        address = None
        while address is None:
            line = process.stdout.readline()
            assert line, "the demo ended before it printed its address"
            address = re.search(r"http://127\.0\.0\.1:(\d+)/metrics", line)
        yield process, int(address[1])


def steps_by_rank(page: str) -> dict[str, int]:
    """Return the number of steps by rank on a page of metrics."""
    return {rank: int(float(count)) for rank, count in STEPS.findall(page)}


def test_the_printed_address_serves_both_ranks_and_the_gpus_of_a_described_machine_until_ctrl_c(
    tmp_path: Path,
) -> None:
    with demo(tmp_path) as (process, port):
        wait_until(
            lambda: (
                set(WINDOW.findall(fetch_page(port))) == set(steps_by_rank(fetch_page(port))) == {"0", "1"}
            )
        )
        wait_until(lambda: fetch_page(port).count("\ngpu_up{") == RANKS)
        page = fetch_page(port)
        os.killpg(process.pid, signal.SIGINT)
        output = process.stdout.read() if process.stdout else ""

        assert process.wait() == 0
        assert processes_naming(str(tmp_path)) == set()
    assert "demo_loss_window_mean" in page
    assert "demo_memory_resident_bytes" in page
    assert f"curl -s http://127.0.0.1:{port}/metrics | grep '^gpu_'" in output
    assert "replayed machine h100" in output
    assert "Prices and carbon intensity are examples" in output


def test_each_rank_holds_a_gpu_and_has_energy_carbon_and_cost(tmp_path: Path) -> None:
    prefixes = ("training_energy_joules_total{", "training_carbon_grams_total{", "training_cost_total{")
    with demo(tmp_path) as (_, port):
        wait_until(lambda: all(f"\n{name}" in fetch_page(port) for name in prefixes))
        gpus_and_ranks = wait_until(
            lambda: pairs if len(pairs := set(GPU_AND_RANK.findall(fetch_page(port)))) == RANKS else None
        )

    assert sorted(rank for _, rank in gpus_and_ranks) == ["0", "1"]
    assert len({gpu for gpu, _ in gpus_and_ranks}) == RANKS


def value(page: str, series: str) -> float:
    """Return the value of the first series that starts with this text, or 0 if absent."""
    match = re.search(rf"^{re.escape(series)}.*? (\S+)$", page, re.MULTILINE)
    return 0.0 if match is None else float(match[1])


def is_past_the_crash(pages: list[str]) -> bool:
    """Return True once the second attempt has passed the step of the crash, and the lost steps are counted."""
    if not pages or len(counts := steps_by_rank(pages[-1])) != 2:
        return False
    return min(counts.values()) > CRASH_STEP and value(pages[-1], "training_lost_steps_total") > 0


@pytest.mark.timeout(90)
def test_a_cycle_shows_a_gap_phases_a_nan_checkpoints_and_a_crash_that_loses_steps(tmp_path: Path) -> None:
    pages: list[str] = []
    # At this speed, the gap lasts two seconds.
    flags = ["--demo.speed=6", f"--config.file={DATA / 'quick-gpus.yml'}"]
    with demo(tmp_path, *flags) as (process, port):
        # On a busy machine, the start, the gap and the crash may each take as long as a wait.
        deadline = time.monotonic() + 3 * WAIT_LIMIT_SECONDS
        while time.monotonic() < deadline and not is_past_the_crash(pages):
            pages.append(fetch_page(port))
            time.sleep(0.15)
        process.send_signal(signal.SIGINT)
        process.wait()
        introduction = process.stdout.read() if process.stdout else ""
        output = process.stderr.read() if process.stderr else ""

    assert "Prices and carbon intensity are examples" not in introduction  # the file of the flag sets them
    pages_with_ranks = [page for page in pages if len(steps_by_rank(page)) == 2]
    assert any(not WINDOW.findall(page) for page in pages_with_ranks[5:]), "no gap"
    assert "rank 1 exited; all ranks restart" in output
    rank_1_steps = [steps_by_rank(page)["1"] for page in pages_with_ranks]
    assert rank_1_steps == sorted(rank_1_steps)
    assert rank_1_steps[-1] > CRASH_STEP
    final_page = pages_with_ranks[-1]
    assert {"forward", "backward", "grad_sync", "validation", "checkpoint_load"} <= set(
        PHASES.findall(final_page)
    )
    assert value(final_page, 'training_nonfinite_total{kind="loss"') >= 1
    assert value(final_page, 'training_checkpoints_total{kind="sync",result="ok"') >= 5
    attempts = value(final_page, "training_attempt{")
    assert attempts >= 2  # on a busy machine, the first page may be served after the second crash
    # Steps of rank 0 after the last flush are not in the feed. On a busy machine, rank 0 is several steps ahead of rank 1.
    lost_steps = (CRASH_STEP - 1) % CHECKPOINT_STEPS
    assert 0 < value(final_page, "training_lost_steps_total") <= (attempts - 1) * (lost_steps + 8)


def test_a_killed_demo_leaves_no_process(tmp_path: Path) -> None:
    rank_marker = '"directory": '  # in the arguments of each simulated rank
    initial_ranks = processes_naming(rank_marker)
    with demo(tmp_path) as (process, port):
        wait_until(lambda: len(steps_by_rank(fetch_page(port))) == 2)
        ranks = processes_naming(rank_marker) - initial_ranks
        process.kill()
        process.wait()

        assert len(ranks) >= 2
        wait_until(lambda: processes_naming(str(tmp_path)) == set())
        wait_until(lambda: not ranks & processes_naming(rank_marker))


def test_the_directory_of_the_demo_is_removed_and_old_directories_after_a_day(tmp_path: Path) -> None:
    shared_memory = Path("/dev/shm")
    old_directory, recent_directory = (
        shared_memory / f"exporter-demo-{age}{os.getpid()}" for age in ("old", "new")
    )
    for directory in (old_directory, recent_directory):
        (directory / "checkpoint").mkdir(parents=True)
    os.utime(old_directory, (0, 0))
    initial_directories = set(shared_memory.iterdir()) - {old_directory}
    try:
        with demo(tmp_path) as (process, _):
            new_directories = set(shared_memory.glob("exporter-demo-*")) - initial_directories
            process.send_signal(signal.SIGINT)
            process.wait()
        final_directories = set(shared_memory.glob("exporter-demo-*"))
    finally:
        shutil.rmtree(old_directory, ignore_errors=True)
        shutil.rmtree(recent_directory, ignore_errors=True)

    assert old_directory not in new_directories
    assert len(new_directories) == 1
    assert not new_directories & final_directories
    assert recent_directory in final_directories
    assert not (tmp_path / "unused").exists()  # the feed directory of the environment stays unused


def test_a_port_in_use_ends_the_demo_with_one_line_and_status_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        result = run_to_completion(demo_command(port=port))

    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert f"127.0.0.1:{port}" in result.stderr


def test_a_directory_served_by_another_exporter_is_refused(tmp_path: Path) -> None:
    port = free_port()
    with running_process(sidecar_command(tmp_path, "--log.level=error", port=port), tmp_path):
        wait_until(lambda: fetch_page(port))
        result = run_to_completion(demo_command(f"--feed.dir={tmp_path}"))

    assert result.returncode == 2
    assert "another exporter serves this feed directory" in result.stderr
