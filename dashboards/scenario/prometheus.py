"""Prometheus server of a scenario, with the rules of `deploy/prometheus/rules`."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules"
START_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Intervals:
    """Intervals of a Prometheus server in seconds."""

    scrape: float  # between two scrapes of a target
    rules: float | None = None  # between two evaluations; None for the interval of each group


@dataclass(frozen=True, slots=True)
class Server:
    """Running Prometheus server."""

    process: subprocess.Popen[bytes]
    url: str


def start_prometheus(
    directory: Path, job: str, targets: Mapping[str, int], intervals: Intervals, *, keep: str = "15d"
) -> Server:
    """Start a server that scrapes ports of this machine by instance; existing data of the directory stays.

    Raises:
        FileNotFoundError: Prometheus is not installed.
        TimeoutError: Prometheus does not become ready.
    """
    program = shutil.which("prometheus")
    if program is None:
        raise FileNotFoundError("the scenario needs Prometheus: apt-get install prometheus")
    directory.mkdir(exist_ok=True)
    for path in RULES.glob("*.yml"):
        rules = yaml.safe_load(path.read_text(encoding="utf-8"))
        for group in rules["groups"]:
            group["interval"] = f"{intervals.rules:g}s" if intervals.rules else group["interval"]
        (directory / path.name).write_text(yaml.safe_dump(rules), encoding="utf-8")
    configured = directory / "prometheus.yaml"
    configured.write_text(
        yaml.safe_dump(_configuration(directory, job, targets, intervals)), encoding="utf-8"
    )
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        program,
        f"--config.file={configured}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--storage.tsdb.retention.time={keep}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (directory / "prometheus.log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    end = time.monotonic() + START_SECONDS
    while not _ready(url):
        if time.monotonic() > end or process.poll() is not None:
            raise TimeoutError(f"Prometheus is not ready: see {directory / 'prometheus.log'}")
        time.sleep(0.1)
    return Server(process, url)


def _configuration(
    directory: Path, job: str, targets: Mapping[str, int], intervals: Intervals
) -> dict[str, Any]:
    interval = f"{int(intervals.scrape * 1000)}ms"
    timeout = f"{int(min(intervals.scrape, 10.0) * 1000)}ms"
    static = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}} for name, port in targets.items()
    ]
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": timeout},
        "rule_files": [str(directory / "*.yml")],
        "scrape_configs": [{"job_name": job, "static_configs": static}] if static else [],
    }


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=2) as answer:  # noqa: S310  # a URL of this module
            return bool(answer.status == 200)
    except OSError:
        return False


def free_port() -> int:
    """Return a free port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
