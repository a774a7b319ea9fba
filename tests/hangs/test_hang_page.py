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
from bridges_support import wanted
from container_support import contained, reason_to_skip
from hangs_support import kill_tree
from places import PROJECT
from serve_support import Sidecar, environment, sidecar
from waiting import wait_until

JOBS = PROJECT / "tests" / "hangs" / "jobs"
HANG_AFTER_SECONDS = 3.0
CONFIGURATION = f"""
feed: {{interval: 500ms}}
goodput: {{hang_after: {HANG_AFTER_SECONDS:.0f}s, hang_steps: 1}}
hang: {{interval: 500ms}}
"""

NO_NAMESPACES = reason_to_skip()
NOT_VISIBLE = 'location="its process is not visible from here (another pid namespace)"'

pytestmark = pytest.mark.timeout(240)


@contextmanager
def watched(tmp_path: Path, *command: str, configuration: str = CONFIGURATION) -> Iterator[Sidecar]:
    """Run a job with a sidecar whose hang limit is three seconds."""
    file = tmp_path / "config.yaml"
    file.write_text(configuration)
    with sidecar(tmp_path, f"--config.file={file}") as running:
        env = environment(EXPORTER_FEED_DIR=str(tmp_path / "feed"), EXPORTER_RUN="job", RANK="0")
        if "torch.distributed.run" in command:
            del env["RANK"]
        job = subprocess.Popen([sys.executable, *command], env=env, start_new_session=True)
        try:
            yield running
        finally:
            kill_tree(job)


def hanging(running: Sidecar) -> dict[str, tuple[str, str]]:
    """Return function and location by rank, from the page."""
    found = re.findall(r"^training_hang_info\{(.*)\} 1", running.page, re.MULTILINE)
    labels = [dict(re.findall(r'(\w+)="([^"]*)"', each)) for each in found]
    return {each["rank"]: (each["function"], each["location"]) for each in labels}


def state(running: Sidecar) -> str:
    """Return the state of the run."""
    found = re.search(r'^training_run_state\{run="job",state="(\w+)"\} 1', running.page, re.MULTILINE)
    return "" if found is None else found[1]


@wanted("torch")
def test_the_odd_rank_of_a_gloo_job_is_on_the_page_in_the_log_and_in_the_events(tmp_path: Path) -> None:
    job = str(JOBS / "collective.py")
    with watched(
        tmp_path, "-m", "torch.distributed.run", "--nproc-per-node=3", job, "1", "default"
    ) as running:
        wait_until(lambda: state(running) == "hung")
        hung_at = time.monotonic()
        found = wait_until(lambda: hanging(running))
        explained_seconds = time.monotonic() - hung_at
        page, log = running.ask("/")[1], running.log

    assert found["1"] == ("read_shard", "collective.py:16")
    assert {found["0"][0], found["2"][0]} == {"all_reduce"}
    assert explained_seconds < 10 or os.getloadavg()[0] > 2
    assert "Rank 1: read_shard (collective.py:16)" in log
    assert "Rank 1: read_shard (collective.py:16)" in page
    assert re.search(
        r"<summary>Stack of rank 1: read_shard</summary>.*?<li><code>read_shard</code>", page, re.DOTALL
    )


@pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES)
def test_a_sidecar_in_another_pid_namespace_explains_answers_and_names_missing_evidence(
    tmp_path: Path,
) -> None:
    feed = tmp_path / "feed"
    feed.mkdir(mode=0o700)
    env = environment(EXPORTER_FEED_DIR=str(feed), EXPORTER_RUN="job", RANK="0")
    job = subprocess.Popen([sys.executable, str(JOBS / "deadlock.py")], env=env)
    shorter = "\n".join(CONFIGURATION.splitlines()[2:])
    with contained(tmp_path, feed, shorter) as running:
        wait_until(lambda: 'location="deadlock.py:13"' in running.page)
        os.kill(job.pid, signal.SIGSTOP)
        wait_until(lambda: NOT_VISIBLE in running.page)
        job.kill()
        job.wait()


def test_a_hang_that_ends_by_itself_leaves_no_series(tmp_path: Path) -> None:
    with watched(tmp_path, str(JOBS / "stall.py"), "hang") as running:
        found = wait_until(lambda: hanging(running))
        wait_until(lambda: state(running) == "running" and not hanging(running))
        events = running.sample(
            'training_events_total{run="job",rank="0",type="training.hang",severity="warning"}'
        )

    assert found == {"0": ("wait_for_peer", "stall.py:13")}
    assert events is None or events >= 1


def test_a_save_is_not_hung_before_five_times_the_limit(tmp_path: Path) -> None:
    with watched(tmp_path, str(JOBS / "stall.py"), "save") as running:
        wait_until(
            lambda: 'training_phase_active{phase="checkpoint_save_sync",rank="0",run="job"} 1' in running.page
        )
        seen = set()
        until = time.monotonic() + 2 * HANG_AFTER_SECONDS
        while time.monotonic() < until:
            seen.add(state(running))
            time.sleep(0.5)

    assert seen <= {"running", "starting"}


def test_a_first_step_of_minutes_is_not_a_hang(tmp_path: Path) -> None:
    with watched(tmp_path, str(JOBS / "stall.py"), "first") as running:
        wait_until(lambda: state(running) == "starting")
        time.sleep(2 * HANG_AFTER_SECONDS)
        found = state(running), hanging(running)

    assert found == ("starting", {})


def test_stacks_can_be_switched_off(tmp_path: Path) -> None:
    off = CONFIGURATION + "\n" + "hang: {stacks: off}\n"
    with watched(
        tmp_path, str(JOBS / "stall.py"), "hang", configuration=off.replace("hang: {interval: 500ms}\n", "")
    ) as running:
        wait_until(lambda: state(running) == "hung")
        time.sleep(3)
        found = hanging(running)

    assert found == {}
    assert not (tmp_path / "feed" / "stacks.request").exists()
