"""Real Prometheus (Debian's package) that scrapes the servers of a test."""

from __future__ import annotations

import json
import shutil
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
from waiting import PATIENCE, wait_until

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="install Prometheus: apt-get install prometheus"
)

fetch, free_port = run_support.fetch, run_support.free_port


def ask(url: str, endpoint: str, **parameters: object) -> list[dict[str, Any]]:
    """Series of a query, with the parameters of the Prometheus API."""
    body = urllib.parse.urlencode(parameters).encode()
    try:
        with urllib.request.urlopen(f"{url}/api/v1/{endpoint}", data=body, timeout=30) as response:
            data = json.load(response)["data"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{parameters['query']}: {error.read().decode()}") from error
    assert data["resultType"] in {"vector", "matrix"}, f"{parameters['query']}: {data['resultType']}"
    result: list[dict[str, Any]] = data["result"]
    return result


class Prometheus:
    """Prometheus server with data in a test directory; a context manager.

    Args:
        directory: Configuration and data.
        targets: Job name → `host:port`.
        scrape_seconds: Scrape interval.
        features: Value of `--enable-feature`.
        more: Remaining configuration, after the last job.
    """

    def __init__(
        self,
        directory: Path,
        targets: Mapping[str, str],
        *,
        scrape_seconds: float = 0.5,
        features: str = "",
        more: str = "",
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
        (directory / "prometheus.yml").write_text(configuration + more, encoding="utf-8")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [
            "prometheus",
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
            f"--enable-feature={features}",
        ]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: fetch(f"{self.url}/-/ready") or self._process.poll(), 15)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.communicate(timeout=20 * PATIENCE)

    def query(self, expression: str, *, at: float | None = None) -> list[dict[str, Any]]:
        """An instant query: the series with their `metric` and `value`."""
        return ask(self.url, "query", query=expression, **({} if at is None else {"time": at}))

    def value(self, expression: str, *, at: float | None = None) -> float | None:
        """Value of an instant query with at most one series; None without a series."""
        found = self.query(expression, at=at)
        assert len(found) <= 1, f"{expression}: {found}"
        return float(found[0]["value"][1]) if found else None

    def range(self, expression: str, start: float, end: float, step: float = 0.25) -> dict[float, float]:
        """Points of the only series of a range query; a gap has no points."""
        found = ask(self.url, "query_range", query=expression, start=start, end=end, step=step)
        assert len(found) <= 1, f"{expression}: {[series['metric'] for series in found]}"
        return {float(at): float(value) for series in found for at, value in series["values"]}
