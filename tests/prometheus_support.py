"""Prometheus server (Debian's package) that scrapes the servers of a test."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import run_support
from typing_extensions import Self
from waiting import PATIENCE, WAIT_LIMIT_SECONDS, wait_until

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="install Prometheus: apt-get install prometheus"
)

fetch, free_port = run_support.fetch, run_support.free_port


def query_api(url: str, endpoint: str, **parameters: object) -> list[dict[str, Any]]:
    """Return the series of a query to the HTTP API of Prometheus."""
    body = urllib.parse.urlencode(parameters).encode()
    try:
        with urllib.request.urlopen(
            f"{url}/api/v1/{endpoint}", data=body, timeout=WAIT_LIMIT_SECONDS
        ) as response:
            data = json.load(response)["data"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{parameters['query']}: {error.read().decode()}") from error
    assert data["resultType"] in {"vector", "matrix"}, f"{parameters['query']}: {data['resultType']}"
    result: list[dict[str, Any]] = data["result"]
    return result


class Prometheus:
    """Context manager of a Prometheus server with its data in a test directory.

    Args:
        directory: Directory for configuration and data.
        targets: Addresses (`host:port`) by job name.
        scrape_seconds: Scrape interval.
        features: Value of `--enable-feature`.
        extra_config: YAML that is appended to the list of jobs.
    """

    def __init__(
        self,
        directory: Path,
        targets: Mapping[str, str],
        *,
        scrape_seconds: float = 0.5,
        features: str = "",
        extra_config: str = "",
    ) -> None:
        directory.mkdir()
        jobs = "".join(
            f"  - job_name: {job}\n    static_configs: [{{targets: ['{target}']}}]\n"
            for job, target in targets.items()
        )
        interval = f"{int(scrape_seconds * 1000)}ms"
        configuration = (
            f"global: {{scrape_interval: {interval}, scrape_timeout: {interval}}}\nscrape_configs:\n{jobs}"
        )
        self._configuration_path = directory / "prometheus.yml"
        self._configuration_path.write_text(configuration + extra_config, encoding="utf-8")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [
            "prometheus",
            f"--config.file={self._configuration_path}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
            f"--enable-feature={features}",
        ]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: fetch(f"{self.url}/-/ready") or self._process.poll())
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.communicate(timeout=20 * PATIENCE)

    def stop_collection(self) -> None:
        """Stop scrapes and rules, by an empty configuration."""
        self._configuration_path.write_text("")
        self._process.send_signal(signal.SIGHUP)

    def query(self, expression: str, *, time_seconds: float | None = None) -> list[dict[str, Any]]:
        """Return the series of an instant query, with `metric` and `value`."""
        return query_api(
            self.url, "query", query=expression, **({} if time_seconds is None else {"time": time_seconds})
        )

    def value(self, expression: str, *, time_seconds: float | None = None) -> float | None:
        """Return the value of an instant query with at most one series, or None without a series."""
        series = self.query(expression, time_seconds=time_seconds)
        assert len(series) <= 1, f"{expression}: {series}"
        return float(series[0]["value"][1]) if series else None

    def range(self, expression: str, start: float, end: float, step: float = 0.25) -> dict[float, float]:
        """Return the points of a range query with at most one series. A gap has no points."""
        results = query_api(self.url, "query_range", query=expression, start=start, end=end, step=step)
        assert len(results) <= 1, f"{expression}: {[series['metric'] for series in results]}"
        return {float(moment): float(value) for series in results for moment, value in series["values"]}
