"""Hanging job with a real sidecar: series, log, status page and event of the hang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bridges_support import needs
from container_support import reason_to_skip, sidecar_in_namespaces
from fork_server import forked_interpreter
from hangs_support import JOBS, kill_tree, ranks_command, stall_command
from run_support import child_environment
from serve_support import Sidecar, sidecar
from waiting import wait_until

HANG_AFTER_SECONDS = 3.0
CONFIGURATION = f"""
feed: {{interval: 500ms}}
gpu: {{enabled: false}}
goodput: {{hang_after: {HANG_AFTER_SECONDS:.0f}s, hang_steps: 1}}
hang: {{interval: 500ms}}
"""

QUEUE_GET = "Queue.get" if sys.version_info >= (3, 11) else "get"
NO_NAMESPACES = reason_to_skip()
NOT_VISIBLE = 'location="process not visible (in another pid namespace)"'

pytestmark = pytest.mark.timeout(240)


@contextmanager
def job_with_sidecar(
    tmp_path: Path, *command: str, interpreter: str = sys.executable, configuration: str = CONFIGURATION
) -> Iterator[Sidecar]:
    """Run a job with a sidecar, by default with a hang limit of HANG_AFTER_SECONDS."""
    file = tmp_path / "config.yaml"
    file.write_text(configuration)
    with sidecar(tmp_path, f"--config.file={file}") as running:
        env = child_environment(EXPORTER_FEED_DIR=str(tmp_path / "feed"), EXPORTER_RUN="job", RANK="0")
        job = subprocess.Popen([interpreter, *command], env=env, start_new_session=True)
        try:
            yield running
        finally:
            kill_tree(job)


def waiting_ranks_of(running: Sidecar) -> dict[str, tuple[str, str]]:
    """Return the function and the location in which each rank waits, as on the page."""
    matches = re.findall(r"^training_hang_info\{(.*)\} 1", running.page, re.MULTILINE)
    all_labels = [dict(re.findall(r'(\w+)="([^"]*)"', match)) for match in matches]
    return {labels["rank"]: (labels["function"], labels["location"]) for labels in all_labels}


def run_state(running: Sidecar) -> str:
    """Return the state of the run, or an empty string without the family."""
    match = re.search(r'^training_run_state\{run="job",state="(\w+)"\} 1', running.page, re.MULTILINE)
    return "" if match is None else match[1]


def wait_for_explanation(running: Sidecar, ranks: int) -> dict[str, tuple[str, str]]:
    """Wait until the run hangs and the page has the stacks of a number of ranks. Return the function and the location of each rank."""
    wait_until(lambda: run_state(running))  # the import of torch is slow on a busy machine
    wait_until(lambda: run_state(running) == "hung")
    waiting_ranks = wait_until(lambda: len(waiting_ranks_of(running)) == ranks and waiting_ranks_of(running))
    return dict(waiting_ranks)


def is_logged(running: Sidecar, sentence: str) -> bool:
    """Return True if the log line of the hang has a sentence, or reports a rank without an answer.

    A hang is logged once. On a busy machine, the answer of a rank may come after the log line.
    """
    return sentence in running.log or "did not answer" in running.log


@needs("torch")
def test_the_suspected_rank_of_a_gloo_job_is_on_the_page_and_in_the_log(tmp_path: Path) -> None:
    command = ranks_command(3, "collective.py", "1", "default")
    with job_with_sidecar(tmp_path, *command, interpreter=forked_interpreter("torch")) as running:
        waiting_ranks = wait_for_explanation(running, 3)
        page = running.request("/")[1]
        wait_until(lambda: is_logged(running, "Rank 1: read_shard (collective.py:16)"))

    assert waiting_ranks["1"] == ("read_shard", "collective.py:16")
    assert {waiting_ranks["0"][0], waiting_ranks["2"][0]} == {"all_reduce"}
    assert "Rank 1: read_shard (collective.py:16)" in page
    assert re.search(
        r"<summary>Stack of rank 1: read_shard</summary>.*?<li><code>read_shard</code>", page, re.DOTALL
    )


@needs("torch")
def test_the_rank_whose_data_workers_were_killed_is_named_with_its_line(tmp_path: Path) -> None:
    command = ranks_command(3, "dead_workers.py", "2")
    with job_with_sidecar(tmp_path, *command, interpreter=forked_interpreter("torch")) as running:
        waiting_ranks = wait_for_explanation(running, 3)
        wait_until(lambda: is_logged(running, f"Rank 2: {QUEUE_GET} (dead_workers.py:24), data_loading"))

    assert waiting_ranks["2"] == (QUEUE_GET, "dead_workers.py:24")
    assert {waiting_ranks["0"][0], waiting_ranks["1"][0]} == {"all_reduce"}


@needs("torch")
def test_a_data_loader_whose_workers_were_killed_ends_the_run_with_the_reason_of_torch(
    tmp_path: Path,
) -> None:
    command = str(JOBS / "killed_loader_workers.py")
    with job_with_sidecar(tmp_path, command, interpreter=forked_interpreter("torch")) as running:
        wait_until(lambda: run_state(running))  # the import of torch is slow on a busy machine
        outcome = wait_until(
            lambda: re.search(r'^training_run_outcome_info\{(.*run="job".*)\} 1', running.page, re.MULTILINE)
        )

    assert 'exception="RuntimeError"' in outcome[1]
    assert 'outcome="failed"' in outcome[1]


@pytest.mark.slow
@pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES)
def test_a_sidecar_in_another_pid_namespace_explains_answers_and_names_missing_evidence(
    tmp_path: Path,
) -> None:
    feed = tmp_path / "feed"
    feed.mkdir(mode=0o700)
    env = child_environment(EXPORTER_FEED_DIR=str(feed), EXPORTER_RUN="job", RANK="0")
    job = subprocess.Popen([sys.executable, str(JOBS / "deadlock.py")], env=env)
    container_configuration = "\n".join(CONFIGURATION.splitlines()[2:])
    with sidecar_in_namespaces(tmp_path, feed, container_configuration) as running:
        wait_until(lambda: 'location="deadlock.py:13"' in running.page)
        os.kill(job.pid, signal.SIGSTOP)
        wait_until(lambda: NOT_VISIBLE in running.page)
        job.kill()
        job.wait()


def test_a_hang_that_ends_by_itself_is_one_event_and_leaves_no_series(tmp_path: Path) -> None:
    with job_with_sidecar(tmp_path, *stall_command(tmp_path, "hang")) as running:
        waiting_ranks = wait_until(lambda: waiting_ranks_of(running))
        wait_until(lambda: "training.hang" in running.page)
        event_count = re.search(
            r'^training_events_total\{.*type="training.hang".*\} (.*)$', running.page, re.MULTILINE
        )
        (tmp_path / "peer").open("w").close()
        wait_until(lambda: run_state(running) == "running" and not waiting_ranks_of(running))

    assert waiting_ranks == {"0": ("wait_for_peer", "stall.py:13")}
    assert event_count is not None
    assert float(event_count[1]) == 1


def test_a_save_is_not_hung_at_twice_the_limit(tmp_path: Path) -> None:
    with job_with_sidecar(tmp_path, *stall_command(tmp_path, "save")) as running:
        wait_until(
            lambda: 'training_phase_active{phase="checkpoint_save_sync",rank="0",run="job"} 1' in running.page
        )
        states = set()
        deadline = time.monotonic() + 2 * HANG_AFTER_SECONDS
        while time.monotonic() < deadline:
            states.add(run_state(running))
            time.sleep(0.5)

    assert states <= {"running", "starting"}


def test_a_first_step_is_not_hung_at_twice_the_limit(tmp_path: Path) -> None:
    with job_with_sidecar(tmp_path, *stall_command(tmp_path, "first")) as running:
        wait_until(lambda: run_state(running) == "starting")
        time.sleep(2 * HANG_AFTER_SECONDS)
        state, waiting_ranks = run_state(running), waiting_ranks_of(running)

    assert state == "starting"
    assert waiting_ranks == {}


def test_stacks_can_be_switched_off(tmp_path: Path) -> None:
    configuration = CONFIGURATION.replace("hang: {interval: 500ms}", "hang: {interval: 500ms, stacks: off}")
    with job_with_sidecar(tmp_path, *stall_command(tmp_path, "hang"), configuration=configuration) as running:
        wait_until(lambda: run_state(running) == "hung")
        time.sleep(3)
        waiting_ranks = waiting_ranks_of(running)

    assert waiting_ranks == {}
    assert not (tmp_path / "feed" / "stacks.request").exists()
