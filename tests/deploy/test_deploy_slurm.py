"""Slurm prolog and epilog, run as by Slurm, and the targets that the real Prometheus discovers."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from places import PROJECT
from prometheus_support import Prometheus, needs_prometheus
from run_support import run_to_completion
from serve_support import sidecar
from waiting import wait_until

SLURM = PROJECT / "deploy/slurm"


class Node:
    """Node of a cluster: the directories that the scripts use."""

    def __init__(self, directory: Path) -> None:
        self.targets = directory / "sd"
        self.ports = directory / "ports"
        self.shm = directory / "shm"
        self.targets.mkdir()
        self.shm.mkdir()

    def run(self, script: str, job: int, **variables: str) -> subprocess.CompletedProcess[str]:
        directories = {"SD_DIR": str(self.targets), "PORT_DIR": str(self.ports), "SHM_DIR": str(self.shm)}
        user_variables = {"SLURM_JOB_USER": "ann", "SLURM_JOB_UID": str(os.getuid())}
        job_variables = {"SLURM_JOB_ID": str(job), "SLURM_JOB_PARTITION": "gpu", **user_variables}
        return run_to_completion(
            [str(SLURM / script)], env={**os.environ, **directories, **job_variables, **variables}
        )

    def target_files(self) -> list[Path]:
        return sorted(self.targets.glob("training-*.json"))

    def target_ports(self) -> list[str]:
        targets = [json.loads(path.read_text())[0]["targets"][0] for path in self.target_files()]
        return sorted(target.rpartition(":")[2] for target in targets)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_prolog_writes_a_target_with_the_labels_of_the_job(node: Node) -> None:
    completed = node.run("prolog.sh", 7)

    (path,) = node.target_files()
    (group,) = json.loads(path.read_text())
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr == ""
    assert group["targets"][0].endswith(":20909")
    assert group["labels"] == {"slurm_job_id": "7", "slurm_job_user": "ann", "slurm_partition": "gpu"}
    assert [path.name for path in node.targets.iterdir()] == [path.name]  # no temporary file remains


def test_concurrent_jobs_on_a_node_get_distinct_ports(node: Node) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda job: node.run("prolog.sh", job), range(1, 9)))

    assert node.target_ports() == [str(20909 + offset) for offset in range(8)]


def test_a_repeated_prolog_keeps_the_port_of_its_job(node: Node) -> None:
    for job in (1, 2, 1):
        node.run("prolog.sh", job)

    assert node.target_ports() == ["20909", "20910"]


def test_the_epilog_removes_only_the_files_of_its_job(node: Node) -> None:
    for job in (1, 11):
        node.run("prolog.sh", job)
        node.run("task-prolog.sh", job)

    completed = node.run("epilog.sh", 1)

    assert completed.returncode == 0, completed.stderr
    assert completed.stderr == ""
    assert [path.name.split("-")[1] for path in node.target_files()] == ["11"]
    assert [path.name for path in node.ports.iterdir()] == ["20910"]
    assert [path.name for path in node.shm.iterdir()] == [f"exporter-{os.getuid()}-11"]


def test_a_task_receives_port_and_feed_directory_of_its_job(node: Node) -> None:
    for job in (1, 2):
        node.run("prolog.sh", job)

    completed = node.run("task-prolog.sh", 2)

    feed = node.shm / f"exporter-{os.getuid()}-2"
    assert completed.stdout.splitlines() == [f"export EXPORTER_FEED_DIR={feed}", "export EXPORTER_PORT=20910"]
    assert feed.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("script", "message"), [("prolog.sh", "job 3 is not monitored"), ("epilog.sh", "")])
def test_a_prolog_or_epilog_that_fails_exits_with_status_0_and_does_not_drain_the_node(
    script: str, message: str, node: Node
) -> None:
    completed = node.run(script, 3, SD_DIR="/nowhere/at/all", PORT_DIR="/proc/nothing")

    assert completed.returncode == 0, completed.stderr
    assert message in completed.stderr


def test_a_shared_directory_that_hangs_does_not_delay_the_node(node: Node, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("chmod", "rm"):  # these commands hang on a mount that hangs
        (programs / name).write_text("#!/bin/sh\nexec sleep 1000\n")
        (programs / name).chmod(0o755)
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "PATIENCE": "0.5"}

    prolog = node.run("prolog.sh", 3, **variables)
    epilog = node.run("epilog.sh", 4, SLURM_JOB_UID="", **variables)

    assert prolog.returncode == 0, prolog.stderr
    assert epilog.returncode == 0, epilog.stderr
    assert "job 3 is not monitored" in prolog.stderr
    assert "the target of job 4 stays" in epilog.stderr


@pytest.mark.parametrize("obstacle", ["directory", "link"])
def test_a_feed_directory_of_another_user_is_not_used(node: Node, tmp_path: Path, obstacle: str) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can create files of another user")
    foreign_directory = (
        node.shm / f"exporter-{os.getuid()}-5" if obstacle == "directory" else tmp_path / "theirs"
    )
    foreign_directory.mkdir()
    os.chown(foreign_directory, 65534, 65534)
    if obstacle == "link":
        (node.shm / f"exporter-{os.getuid()}-5").symlink_to(foreign_directory)

    completed = node.run("task-prolog.sh", 5)

    assert completed.returncode == 0, completed.stderr
    assert completed.stdout == ""


def test_a_node_without_a_free_port_logs_the_reason(node: Node) -> None:
    node.run("prolog.sh", 1, EXPORTER_PORTS="1")

    completed = node.run("prolog.sh", 2, EXPORTER_PORTS="1")

    assert "no port left" in completed.stderr
    assert len(node.target_files()) == 1


def test_a_user_name_cannot_inject_json(node: Node) -> None:
    node.run("prolog.sh", 1, SLURM_JOB_USER='a","targets":["evil:1\\', SLURM_JOB_PARTITION="p\n{")

    (group,) = json.loads(node.target_files()[0].read_text())
    assert group["labels"]["slurm_job_user"] == "atargetsevil1"
    assert len(group["targets"]) == 1


@needs_prometheus
@pytest.mark.timeout(120)
def test_series_of_a_job_exist_from_prolog_to_epilog(node: Node, tmp_path: Path) -> None:
    prometheus = Prometheus(tmp_path / "prometheus", {})
    configuration = (PROJECT / "deploy/prometheus/scrape/slurm.yaml").read_text(encoding="utf-8")
    configuration = configuration.replace("/shared/prometheus/sd", str(node.targets))
    configuration = configuration.replace("15s", "500ms").replace(
        "scrape_timeout: 10s", "scrape_timeout: 500ms"
    )
    (tmp_path / "prometheus/prometheus.yml").write_text(configuration)
    with sidecar(tmp_path) as exporter, prometheus:
        node.run("prolog.sh", 42, EXPORTER_FIRST_PORT=exporter.address.rpartition(":")[2])
        (path,) = node.target_files()
        groups = json.loads(path.read_text())
        groups[0]["targets"] = [exporter.address]  # the name of this machine need not resolve
        path.with_suffix(".tmp").write_text(json.dumps(groups))
        path.with_suffix(".tmp").replace(path)
        wait_until(lambda: prometheus.value('up{slurm_job_id="42"}') == 1, 60)
        build_info = prometheus.query('exporter_build_info{slurm_job_id="42"}')
        node.run("epilog.sh", 42)
        wait_until(lambda: prometheus.value('up{slurm_job_id="42"}') is None, 60)

        assert prometheus.query('exporter_build_info{slurm_job_id="42"}') == []
        assert build_info[0]["metric"]["job"] == "training-slurm"
