"""Prometheus server of the scenario and of `dashboards.incidents`, with the rules of `deploy/prometheus/rules`."""

from __future__ import annotations

import shutil
import signal
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
RULES_DIRECTORY = ROOT / "deploy" / "prometheus" / "rules"
START_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Intervals:
    """Scrape and rule evaluation intervals of a Prometheus server."""

    scrape_seconds: float
    rule_evaluation_seconds: float | None = None  # None keeps the interval of each rule group


@dataclass(frozen=True, slots=True)
class PrometheusServer:
    """Running Prometheus server: process, base URL and configuration file."""

    process: subprocess.Popen[bytes]
    url: str
    configuration_path: Path

    def stop_collection(self) -> None:
        """Stop scrapes and rules, by an empty configuration."""
        self.configuration_path.write_text("", encoding="utf-8")
        self.process.send_signal(signal.SIGHUP)


def start_prometheus(
    directory: Path,
    job: str,
    port_by_instance: Mapping[str, int],
    intervals: Intervals,
) -> PrometheusServer:
    """Start a Prometheus server and wait until the server is ready. Earlier data in the directory is kept.

    Args:
        directory: Directory for the configuration, copies of the rules, the log and the data. Its parent must exist.
        job: Label `job` of the targets. The rules expect `training` or `training-…`.
        port_by_instance: Ports on 127.0.0.1 by the value of the label `instance`. Without ports, nothing is scraped.
        intervals: Scrape and rule evaluation intervals.

    Raises:
        FileNotFoundError: Prometheus is not on PATH, or the parent of *directory* does not exist.
        RuntimeError: Prometheus exited before it was ready, for example because another process took the port.
        TimeoutError: Prometheus was not ready within `START_TIMEOUT_SECONDS`.
    """
    prometheus_path = shutil.which("prometheus")
    if prometheus_path is None:
        raise FileNotFoundError(
            "the program prometheus is not on PATH; install it, for example with apt-get install prometheus"
        )
    directory.mkdir(exist_ok=True)
    for path in RULES_DIRECTORY.glob("*.yml"):
        rule_file = yaml.safe_load(path.read_text(encoding="utf-8"))
        if intervals.rule_evaluation_seconds is not None:
            for group in rule_file["groups"]:
                group["interval"] = f"{intervals.rule_evaluation_seconds:g}s"
        (directory / path.name).write_text(yaml.safe_dump(rule_file), encoding="utf-8")
    # The suffix is not `.yml`, so that `rule_files` of the configuration does not match it.
    configuration_path = directory / "prometheus.yaml"
    configuration_path.write_text(
        yaml.safe_dump(_configuration(directory, job, port_by_instance, intervals)), encoding="utf-8"
    )
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        prometheus_path,
        f"--config.file={configuration_path}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    log_path = directory / "prometheus.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    server = PrometheusServer(process, url, configuration_path)
    try:
        _wait_until_ready(server, log_path)
    except BaseException:  # KeyboardInterrupt, too: the caller has no server to stop
        process.kill()
        process.wait()
        raise
    return server


def _wait_until_ready(server: PrometheusServer, log_path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while not _is_ready(server.url):
        if server.process.poll() is not None:
            message = f"Prometheus has exited with status {server.process.returncode}; see {log_path}"
            raise RuntimeError(message)
        if time.monotonic() > deadline:
            message = f"Prometheus was not ready after {START_TIMEOUT_SECONDS:g} s; see {log_path}"
            raise TimeoutError(message)
        time.sleep(0.1)


def _configuration(
    directory: Path, job: str, port_by_instance: Mapping[str, int], intervals: Intervals
) -> dict[str, Any]:
    scrape_interval = f"{int(intervals.scrape_seconds * 1000)}ms"
    # Prometheus refuses a timeout above the interval; the default timeout is 10 s.
    scrape_timeout = f"{int(min(intervals.scrape_seconds, 10.0) * 1000)}ms"
    static_configs = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": instance}}
        for instance, port in port_by_instance.items()
    ]
    return {
        "global": {"scrape_interval": scrape_interval, "scrape_timeout": scrape_timeout},
        "rule_files": [str(directory / "*.yml")],
        "scrape_configs": [{"job_name": job, "static_configs": static_configs}] if static_configs else [],
    }


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=2) as response:  # noqa: S310  # the URL is built from 127.0.0.1
            return bool(response.status == 200)
    except OSError:
        return False


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free at the moment of the call."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
