"""Alerts from end to end: the exporter's page, Prometheus with the rules of the project, Alertmanager, and a receiver."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_support import Prometheus, fetch, free_port, needs_prometheus
from rules_support import PROMETHEUS, accelerated_rules
from run_support import running_process, web_server
from serve_support import sidecar
from waiting import WAIT_LIMIT_SECONDS, wait_until

pytestmark = [
    needs_prometheus,
    pytest.mark.skipif(
        shutil.which("prometheus-alertmanager") is None,
        reason="install Alertmanager: apt-get install prometheus-alertmanager",
    ),
    pytest.mark.timeout(120),
]

MACHINE = """\
description: GPU 1 falls off the bus after four seconds and is back after fourteen
driver: "580.95.05"
models:
  l40s: {name: NVIDIA L40S, architecture: ada, values: {utilization: 90, event_types: 0x1F}}
gpus: [{model: l40s, count: 2}]
timeline:
  - {at: 3s, gpus: [1], xid: [79]}
  - {at: 4s, until: 14s, gpus: [1], lost: true}
"""


class Receiver:
    """Webhook that stores the requests of Alertmanager by path."""

    def __init__(self) -> None:
        self.url = ""
        self.messages: list[tuple[str, list[dict[str, Any]]]] = []

    def respond(self, _method: str, path: str, body: bytes) -> tuple[int, bytes]:
        self.messages.append((path, json.loads(body)["alerts"]))
        return 200, b""

    def alert(self, name: str, status: str) -> tuple[str, dict[str, Any]]:
        """Wait for an alert with this status, and return the path of the request and the alert."""

        def matching_alerts() -> list[tuple[str, dict[str, Any]]]:
            return [
                (path, alert)
                for path, alerts in list(self.messages)
                for alert in alerts
                if (alert["labels"]["alertname"], alert["status"]) == (name, status)
            ]

        path, alert = wait_until(matching_alerts, 60)[0]
        return path, alert


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    with web_server(receiver.respond) as receiver.url:
        yield receiver


@contextlib.contextmanager
def alertmanager(directory: Path, receiver: Receiver) -> Iterator[str]:
    """Run Alertmanager with the repository's configuration, short intervals and a local receiver."""
    configuration = (PROMETHEUS / "alertmanager.yaml").read_text(encoding="utf-8")
    for setting, replacement in (
        ("http://127.0.0.1:9999", receiver.url),
        ("group_wait: 30s", "group_wait: 200ms"),
        ("group_interval: 5m", "group_interval: 1s"),
    ):
        configuration = configuration.replace(setting, replacement)
    configuration_file = directory / "alertmanager.yml"
    configuration_file.write_text(configuration)
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus-alertmanager",
        f"--config.file={configuration_file}",
        f"--web.listen-address={address}",
    ]
    flags = [f"--storage.path={directory / 'alerts'}", "--cluster.listen-address=", "--log.level=error"]
    with running_process([*command, *flags], directory / "alerts") as process:
        wait_until(lambda: fetch(f"http://{address}/-/ready") or process.poll())
        yield address


def post_alerts(address: str, alerts: list[dict[str, str]]) -> None:
    """Send alerts with these labels to Alertmanager."""
    body = json.dumps([{"labels": labels} for labels in alerts]).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{address}/api/v2/alerts", body, headers)
    urllib.request.urlopen(request, timeout=WAIT_LIMIT_SECONDS).close()


def test_a_lost_switch_pages_once_for_all_its_nodes_and_a_lost_run_separately(
    tmp_path: Path, receiver: Receiver
) -> None:
    nodes = [f"node{index}:20909" for index in range(64)]
    links = [{"alertname": "IbLinkDown", "severity": "critical", "instance": node} for node in nodes]
    flaps = [{"alertname": "IbErrors", "severity": "warning", "instance": node} for node in nodes]
    hang = {"alertname": "TrainingHang", "severity": "critical", "run": "a"}
    with alertmanager(tmp_path, receiver) as address:
        post_alerts(address, [*links, *flaps, hang])
        wait_until(lambda: len(receiver.messages) >= 3, 30)
        time.sleep(2)  # a further notification would follow within the group interval of a second
        groups = [(path, alerts[0]["labels"]["alertname"], len(alerts)) for path, alerts in receiver.messages]

    assert sorted(groups) == [
        ("/chat", "IbErrors", 64),
        ("/pager", "IbLinkDown", 64),
        ("/pager", "TrainingHang", 1),
    ]


def test_a_broken_gpu_and_the_hang_of_its_run_page_once(tmp_path: Path, receiver: Receiver) -> None:
    gpu_labels = {"severity": "critical", "instance": "n1:20909", "gpu": "1", "uuid": "GPU-1", "run": "a"}
    consequences = ("GpuEccUncorrected", "GpuRecoveryActionNeeded", "GpuXidCritical")
    alerts = [gpu_labels | {"alertname": name} for name in ("GpuLost", *consequences)]
    alerts.append({"alertname": "TrainingHang", "severity": "critical", "run": "a"})
    alerts.append(gpu_labels | {"alertname": "GpuRowRemapPending", "severity": "warning"})
    with alertmanager(tmp_path, receiver) as address:
        post_alerts(address, alerts)
        wait_until(lambda: receiver.messages, 60)
        time.sleep(2)  # a further notification would follow within the group interval of a second

    ((path, notified_alerts),) = receiver.messages
    assert path == "/pager"
    assert sorted(alert["labels"]["alertname"] for alert in notified_alerts) == ["GpuLost", "TrainingHang"]


def test_missing_energy_readings_of_gpus_are_not_sent_beside_their_cause(
    tmp_path: Path, receiver: Receiver
) -> None:
    causes = [
        {"alertname": name, "severity": "critical", "instance": node}
        for name, node in (("NvmlDown", "n1"), ("GpuLost", "n2"))
    ]
    devices = [("n1", "gpu"), ("n1", "cpu"), ("n2", "gpu"), ("n3", "gpu")]
    gaps = [
        {"alertname": "EnergyGap", "severity": "warning", "instance": node, "component": component}
        for node, component in devices
    ]
    with alertmanager(tmp_path, receiver) as address:
        post_alerts(address, causes)
        post_alerts(address, gaps)

        def processed_alerts() -> list[dict[str, Any]]:
            alerts = json.loads(fetch(f"http://{address}/api/v2/alerts") or "[]")
            is_processed = len(alerts) == 6 and all(
                alert["status"]["state"] != "unprocessed" for alert in alerts
            )
            return alerts if is_processed else []

        suppressed_labels = [
            alert["labels"] for alert in wait_until(processed_alerts) if alert["status"]["inhibitedBy"]
        ]

    assert sorted((labels["instance"], labels["component"]) for labels in suppressed_labels) == [
        ("n1", "gpu"),
        ("n2", "gpu"),
    ]


def test_a_lost_gpu_pages_and_resolves_when_it_returns(tmp_path: Path, receiver: Receiver) -> None:
    (tmp_path / "machine.yaml").write_text(MACHINE)
    config_file = tmp_path / "config.yaml"
    config_file.write_text("gpu: {retry: 500ms}\n")
    extra_config = f"rule_files: ['{accelerated_rules(tmp_path / 'rules', 0.5, at_once=True)}/*.yml']\n"
    with (
        alertmanager(tmp_path, receiver) as address,
        sidecar(
            tmp_path, "--gpu.replay=machine", f"--config.file={config_file}", machines=tmp_path
        ) as exporter,
    ):
        extra_config += f"alerting: {{alertmanagers: [{{static_configs: [{{targets: ['{address}']}}]}}]}}\n"
        with Prometheus(tmp_path / "prometheus", {"training": exporter.address}, extra_config=extra_config):
            path, firing_alert = receiver.alert("GpuLost", "firing")
            _, xid_alert = receiver.alert("GpuXidCritical", "firing")
            _, resolved_alert = receiver.alert("GpuLost", "resolved")

    assert path == "/pager"
    assert firing_alert["labels"]["instance"] == exporter.address
    # The first notification may precede the first evaluation of the rule that finds an exporter for the link.
    assert resolved_alert["annotations"]["runbook_url"] == f"http://{exporter.address}/runbook#gpulost"
    assert firing_alert["annotations"]["summary"] == f"GPU 1 on {exporter.address} does not answer."
    assert xid_alert["labels"]["xid"] == "79"
    assert resolved_alert["labels"] == firing_alert["labels"]
