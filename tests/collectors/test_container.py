"""The sidecar in a container next to the container of the job."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_support import ContainedSidecar, reason_to_skip, sidecar_in_namespaces
from run_support import child_environment
from waiting import wait_until

SKIP_REASON = reason_to_skip()
pytestmark = pytest.mark.skipif(bool(SKIP_REASON), reason=SKIP_REASON)

JOB = """
import time
from exporter import training
with training.training_loop(train_iterations_start=0):
    while True:
        with training.training_iteration():
            time.sleep(0.05)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a job in the namespaces of the test, which stand for the container of the job."""
    (tmp_path / "feed").mkdir(mode=0o700)
    env = child_environment(EXPORTER_FEED_DIR=str(tmp_path / "feed"), EXPORTER_RUN="r", RANK="0")
    with subprocess.Popen([sys.executable, "-c", JOB], env=env) as process:
        yield process
        process.kill()


@pytest.fixture
def sidecar(tmp_path: Path, job: subprocess.Popen[bytes]) -> Iterator[ContainedSidecar]:
    assert job.poll() is None
    with sidecar_in_namespaces(tmp_path, tmp_path / "feed") as running:
        yield running


def test_a_job_in_another_container_is_recorded_until_it_is_killed(
    sidecar: ContainedSidecar, job: subprocess.Popen[bytes]
) -> None:
    process_up = 'training_process_up{rank="0",run="r"}'
    wait_until(lambda: (sidecar.sample('training_steps_total{mode="train",rank="0",run="r"}') or 0) > 20)
    wait_until(lambda: sidecar.sample(process_up) == 1)
    job.kill()
    wait_until(lambda: sidecar.sample(process_up) == 0)

    assert sidecar.sample('training_feed_alive{rank="0",run="r"}') == 0


def test_sources_that_the_container_hides_are_absent_with_a_reason_and_no_error(
    sidecar: ContainedSidecar,
) -> None:
    wait_until(lambda: "processes of the job are not visible" in sidecar.log)
    page = wait_until(lambda: sidecar.page)
    failed_collectors = re.findall(r'exporter_collector_success\{collector="(\w+)"\} 0\.0', page)

    assert failed_collectors == []
    assert "exporter_collector_errors_total{" not in page
    assert "level=error" not in sidecar.log
    assert "level=warn" not in sidecar.log
    assert "network: /proc/net/dev: no interface, or none selected" in sidecar.log
    for hidden_name in (
        "training_process_instances{",
        "training_process_cpu_seconds_total{",
        "host_network_up{",
    ):
        assert hidden_name not in page
    for published_name in ("host_memory_total_bytes ", "host_cpu_seconds_total{", "training_run_info{"):
        assert published_name in page
