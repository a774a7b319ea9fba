"""Remote write: the exporter, the real Prometheus as an agent, and the real VictoriaMetrics."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import urllib.parse
from pathlib import Path

import pytest
from places import PROJECT
from prometheus_support import fetch, free_port, needs_prometheus
from run_support import running_process
from serve_support import sidecar
from waiting import wait_until

SHORT_INTERVALS = {
    "scrape_interval: 15s": "scrape_interval: 500ms",
    "scrape_timeout: 10s": "scrape_timeout: 500ms",
    "batch_send_deadline: 5s": "batch_send_deadline: 200ms",
}


@needs_prometheus
@pytest.mark.skipif(
    shutil.which("victoria-metrics") is None, reason="install it: apt-get install victoria-metrics"
)
@pytest.mark.timeout(120)
def test_a_gap_stays_a_gap_through_remote_write(tmp_path: Path) -> None:
    store_address, agent_address = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    configuration = (PROJECT / "deploy/prometheus/scrape/agent.yaml").read_text(encoding="utf-8")
    replacements = {
        "127.0.0.1:8428": store_address,
        "/etc/prometheus/hosts": str(tmp_path),
        **SHORT_INTERVALS,
    }
    for setting, replacement in replacements.items():
        configuration = configuration.replace(setting, replacement)
    (tmp_path / "agent.yml").write_text(configuration)
    store_flags = [
        f"-storageDataPath={tmp_path / 'store'}",
        f"-httpListenAddr={store_address}",
        "-loggerLevel=ERROR",
    ]
    agent_flags = [f"--config.file={tmp_path / 'agent.yml'}", f"--storage.agent.path={tmp_path / 'wal'}"]
    agent_flags += ["--enable-feature=agent", f"--web.listen-address={agent_address}", "--log.level=error"]

    def query_store(expression: str) -> list[dict[str, str]]:
        query = urllib.parse.urlencode({"query": expression, "nocache": "1"})
        body = fetch(f"http://{store_address}/api/v1/query?{query}")
        return [series["metric"] for series in json.loads(body)["data"]["result"]] if body else []

    with contextlib.ExitStack() as stack:
        exporter = stack.enter_context(sidecar(tmp_path))
        (tmp_path / "hosts.json").write_text(json.dumps([{"targets": [exporter.address]}]))
        stack.enter_context(
            running_process(
                ["victoria-metrics", *store_flags, "-search.latencyOffset=0s"], tmp_path / "store"
            )
        )
        stack.enter_context(running_process(["prometheus", *agent_flags], tmp_path / "wal"))
        wait_until(lambda: query_store("up == 1"), 60)
        (series,) = query_store("exporter_build_info")
        exporter.end()
        wait_until(lambda: query_store("up == 0"), 60)
        time.sleep(1)

        assert series["cluster"] == "CLUSTER"
        assert query_store("exporter_build_info") == []
