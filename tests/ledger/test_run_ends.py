"""Outcomes of real jobs under `run`: state, interruptions and productive time, compared with the job's own measurement."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from bridges_support import needs
from fork_server import forked_interpreter
from run_support import child_environment, fetch_page, free_port, run_command, running_process
from waiting import wait_until

JOB = """
import os, sys, time
from exporter import training

status, work_file = int(sys.argv[1]), sys.argv[2]
while not os.path.exists(work_file + ".scraped"):
    time.sleep(0.05)
work_seconds = 0.0
with training.training_loop(train_iterations_start=0):
    for _ in range(20):
        start_time = time.monotonic()
        with training.training_iteration():
            time.sleep(0.05)
        work_seconds += time.monotonic() - start_time
if status < 0:
    time.sleep(1.5)  # the launcher kills an idle actor
with open(work_file, "w") as file:
    file.write(str(work_seconds))
if status < 0:
    time.sleep(600)
sys.exit(status)
"""
"""Job that trains 20 steps once the page was scraped, writes its seconds of work to a file, and exits with a status.

Without the wait, the job may end before the first scrape on a busy machine, and `run` then does not wait for a scraper.
Arguments: STATUS FILE. With a negative status, the job is an actor that waits until its launcher kills it.
"""

ACTOR_KILLING_LAUNCHER = """
import os, subprocess, sys, time
actor = subprocess.Popen([sys.executable, *sys.argv[1:]])
while not os.path.exists(sys.argv[-1]):
    time.sleep(0.1)
actor.kill()
actor.wait()
"""
"""Program that starts a job as an actor, kills the actor once its file exists, and exits normally."""

RENDEZVOUS = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=llama"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(JOB)
    return path


def current_states(page: str) -> list[str]:
    return re.findall(r'^training_run_state\{.*state="(\w+)"\} 1', page, re.MULTILINE)


def sum_of_series(page: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^training_{name}\{{.*\}} (\S+)$", page, re.MULTILINE))


def observe_states(tmp_path: Path, command: list[str], final_state: str) -> tuple[set[str], str]:
    """Run a job until `run` exits, and return all observed states and the last page, whose state must be *final_state*.

    The job trains once the file `work.scraped` exists.
    """
    feed, port, all_states = tmp_path / "feed", free_port(), set[str]()
    feed.mkdir()
    last_page = ""
    environment = child_environment(PYTHON_EXEC=sys.executable)  # of torchrun, whose workers need no torch
    run_arguments = run_command(feed, command, "--run.linger=60s", port=port)
    with running_process(run_arguments, feed, env=environment) as run:

        def is_over() -> bool:
            nonlocal last_page
            page = fetch_page(port)
            all_states.update(current_states(page))
            last_page = page or last_page
            if page:
                (tmp_path / "work.scraped").touch()
            return run.poll() is not None

        wait_until(is_over)
    assert current_states(last_page) == [final_state]
    return all_states, last_page


@pytest.mark.parametrize(
    "launcher",
    [
        "python",
        "bash",
        pytest.param("torchrun", marks=needs("torch")),
        pytest.param("torchrun with an id", marks=needs("torch")),
    ],
)
def test_a_job_with_a_nonzero_exit_status_is_failed_and_never_finished(
    tmp_path: Path, script: Path, launcher: str
) -> None:
    work_file = tmp_path / "work"
    job = [str(script), "3", str(work_file)]
    if launcher == "python":
        command = [sys.executable, *job]
    elif launcher == "bash":
        command = ["bash", "-c", f"{sys.executable} {' '.join(job)}; rc=$?; sleep 5; exit $rc"]
    else:
        torchrun = [forked_interpreter("torch"), "-m", "torch.distributed.run", "--nproc-per-node=1"]
        rendezvous_options = RENDEZVOUS if launcher == "torchrun with an id" else ["--standalone"]
        command = [*torchrun, *rendezvous_options, *job]
    states, last_page = observe_states(tmp_path, command, "failed")

    assert not states & {"finished", "lost"}
    assert sum_of_series(last_page, "productive_seconds_total") == 0
    assert sum_of_series(last_page, "uncommitted_seconds") == pytest.approx(
        float(work_file.read_text()), rel=0.2
    )
    assert sum_of_series(last_page, "interruptions_total") == 1
    assert re.search(r'training_interruptions_total\{reason="exit".*\} 1', last_page)
    assert re.search(r'training_run_outcome_info\{.*exit_status="3"', last_page)


def test_actors_that_a_successful_launcher_kills_have_finished(tmp_path: Path, script: Path) -> None:
    work_file = tmp_path / "work"
    launcher = [sys.executable, "-c", ACTOR_KILLING_LAUNCHER]
    states, last_page = observe_states(tmp_path, [*launcher, str(script), "-1", str(work_file)], "finished")

    assert not states & {"failed", "lost"}
    assert sum_of_series(last_page, "interruptions_total") == 0
    assert sum_of_series(last_page, "productive_seconds_total") == pytest.approx(
        float(work_file.read_text()), rel=0.2
    )
