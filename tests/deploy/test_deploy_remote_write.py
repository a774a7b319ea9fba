"""A large fleet in small: the exporter, the real Prometheus as an agent, the real VictoriaMetrics."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
from pathlib import Path

import pytest
from prometheus_support import fetch, free_port, needs_prometheus, wait_for
from rules_support import ROOT
from serve_support import sidecar

pytestmark = [
    needs_prometheus,
    pytest.mark.skipif(
        shutil.which("victoria-metrics") is None, reason="install it: apt-get install victoria-metrics"
    ),
    pytest.mark.timeout(120),
]


def test_a_gap_stays_a_gap_through_remote_write(tmp_path: Path) -> None:
    store, agent = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    text = (ROOT / "deploy/prometheus/scrape/agent.yaml").read_text(encoding="utf-8")
    text = text.replace("127.0.0.1:8428", store).replace("/etc/prometheus/hosts", str(tmp_path))
    text = text.replace("scrape_interval: 15s", "scrape_interval: 500ms").replace(
        "scrape_timeout: 10s", "scrape_timeout: 500ms"
    )
    (tmp_path / "agent.yml").write_text(text.replace("batch_send_deadline: 5s", "batch_send_deadline: 200ms"))
    commands = [
        [
            "victoria-metrics",
            f"-storageDataPath={tmp_path / 'store'}",
            f"-httpListenAddr={store}",
            "-loggerLevel=ERROR",
            "-search.latencyOffset=0s",
        ],
        [
            "prometheus",
            "--enable-feature=agent",
            f"--config.file={tmp_path / 'agent.yml'}",
            f"--storage.agent.path={tmp_path / 'wal'}",
            f"--web.listen-address={agent}",
            "--log.level=error",
        ],
    ]

    def found(expression: str) -> list[dict[str, str]]:
        query = urllib.parse.urlencode({"query": expression, "nocache": "1"})
        body = fetch(f"http://{store}/api/v1/query?{query}")
        return [each["metric"] for each in json.loads(body)["data"]["result"]] if body else []

    with sidecar(tmp_path) as exporter:
        (tmp_path / "hosts.json").write_text(json.dumps([{"targets": [exporter.address]}]))
        processes = [subprocess.Popen(command) for command in commands]
        try:
            wait_for(lambda: found("up == 1"), seconds=60, told="nothing arrived")
            (series,) = found("exporter_build_info")
            exporter.end()
            wait_for(lambda: found("up == 0"), seconds=60)
            time.sleep(1)

            assert series["cluster"] == "CLUSTER"
            assert found("exporter_build_info") == []
        finally:
            for process in processes:
                process.kill()  # an agent asked to end waits a minute for a store that ends too
                process.wait(20)
