"""The command `stacks` with real jobs: gloo ranks, locks, data workers, C calls and stopped processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bridges_support import needs
from fork_server import forked_interpreter
from hangs_support import JOBS, kill_tree, ranks_command, stall_command
from places import PROJECT
from waiting import wait_until

from exporter.cli.main import main

LOADER_FUNCTION = "_BaseDataLoaderIter.__next__" if sys.version_info >= (3, 11) else "__next__"

pytestmark = pytest.mark.timeout(180)


@contextlib.contextmanager
def job_process(
    feed: Path, *command: str, interpreter: str = sys.executable, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a job that records into a feed directory, and kill the process group of the job at the end."""
    feed.mkdir(mode=0o700, exist_ok=True)
    environment = os.environ | {
        "EXPORTER_FEED_DIR": str(feed),
        "EXPORTER_RUN": "job",
        "PYTHONPATH": str(PROJECT),
        **variables,
    }
    process = subprocess.Popen([interpreter, *command], env=environment, start_new_session=True)
    try:
        yield process
    finally:
        kill_tree(process)


def read_stacks(feed: Path) -> dict[str, Any] | None:
    """Return the output of `stacks --json` for the run, or None without a live rank."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = main(["stacks", "--json", f"--feed.dir={feed}"])
    run: dict[str, Any] | None = json.loads(output.getvalue())[0] if status == 0 else None
    return run


def wait_for_groups(feed: Path, ranks: int, function: str) -> dict[str, Any]:
    """Wait until `stacks` reports all ranks, and a first group that waits in a function. Return the output of `stacks`."""
    output: dict[str, Any] = {}

    def is_grouped() -> bool:
        nonlocal output
        output = read_stacks(feed) or {}
        groups = output.get("groups", [])
        return sum(len(group["ranks"]) for group in groups) == ranks and groups[0]["function"] == function

    wait_until(is_grouped)
    return output


@needs("torch")
@pytest.mark.parametrize("hanging_rank", [0, 1])
@pytest.mark.parametrize("group", ["default", "new"])
def test_the_rank_outside_the_collective_is_named(tmp_path: Path, hanging_rank: int, group: str) -> None:
    command = ranks_command(3, "collective.py", str(hanging_rank), group)
    with job_process(tmp_path / "feed", *command, interpreter=forked_interpreter("torch")):
        output = wait_for_groups(tmp_path / "feed", 3, "read_shard")

    suspected_group, waiting_group = output["groups"]
    assert suspected_group["ranks"] == [hanging_rank]
    assert suspected_group["location"] == "collective.py:16"
    assert suspected_group["phase"] == "data_loading"
    assert waiting_group["function"] == "all_reduce"
    assert len(waiting_group["ranks"]) == 2
    assert suspected_group["collective_count"] == waiting_group["collective_count"] - 1


def test_stacks_are_printed_before_the_first_step(tmp_path: Path) -> None:
    with job_process(tmp_path / "feed", *stall_command(tmp_path, "first")):
        output = wait_for_groups(tmp_path / "feed", 1, "wait_for_peer")

    assert output["step"] is None
    assert output["groups"][0]["location"] == "stall.py:13"


def test_two_groups_that_no_rule_separates_are_printed_as_a_tie(tmp_path: Path) -> None:
    feed = tmp_path / "feed"
    with (
        job_process(feed, *stall_command(tmp_path, "first"), RANK="0", WORLD_SIZE="2"),
        job_process(feed, str(JOBS / "deadlock.py"), RANK="1", WORLD_SIZE="2"),
    ):
        wait_until(lambda: len((read_stacks(feed) or {}).get("groups", [])) == 2)
        command = [sys.executable, "-m", "exporter", "stacks", f"--feed.dir={feed}"]
        stdout = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PROJECT).stdout

    assert "rank 0: wait_for_peer (stall.py:13)" in stdout
    assert "rank 1: save_state (deadlock.py:13)" in stdout
    assert "The stacks do not show which of these groups the others wait for." in stdout


def test_a_lock_that_is_taken_twice_is_shown_with_its_line(tmp_path: Path) -> None:
    with job_process(tmp_path / "feed", str(JOBS / "deadlock.py")):
        output = wait_for_groups(tmp_path / "feed", 1, "save_state")

    assert output["groups"][0]["location"] == "deadlock.py:13"


def test_a_stopped_process_does_not_answer_and_its_state_is_shown(tmp_path: Path) -> None:
    feed = tmp_path / "feed"
    with job_process(feed, str(JOBS / "deadlock.py")) as process:
        wait_for_groups(feed, 1, "save_state")
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: "T" in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0])
        output = read_stacks(feed)

    assert output is not None
    assert output["silent"] == {"0": "main thread stopped by a signal"}


def test_a_process_whose_c_call_holds_the_interpreter_lock_does_not_answer_and_is_shown_as_running(
    tmp_path: Path,
) -> None:
    feed = tmp_path / "feed"
    with job_process(feed, str(JOBS / "holds_lock.py")):
        output: dict[str, Any] = {}

        def has_not_answered() -> bool:
            nonlocal output
            output = read_stacks(feed) or {}
            return bool(output.get("silent"))

        wait_until(has_not_answered)

    assert output["silent"] == {"0": "main thread running; a C call may hold the interpreter lock"}


@needs("torch")
def test_a_job_whose_data_workers_hang_waits_in_its_loader(tmp_path: Path) -> None:
    command = str(JOBS / "stuck_loader.py")
    with job_process(tmp_path / "feed", command, interpreter=forked_interpreter("torch")):
        output = wait_for_groups(tmp_path / "feed", 1, LOADER_FUNCTION)

    assert output["groups"][0]["location"].startswith("stuck_loader.py:")
    assert output["groups"][0]["phase"] == "data_loading"


def test_the_command_fails_for_a_missing_run_and_names_the_run(tmp_path: Path) -> None:
    (tmp_path / "feed").mkdir(mode=0o700)
    command = [sys.executable, "-m", "exporter", "stacks", "--run=none", f"--feed.dir={tmp_path / 'feed'}"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PROJECT)

    assert completed.returncode == 1
    assert "no rank of run none is running" in completed.stderr
