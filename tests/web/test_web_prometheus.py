"""The real Prometheus scrapes the server over http and https: every scrape succeeds, on one connection."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import bcrypt
import psutil
import pytest
from web_support import Authority, Child, eventually

pytestmark = pytest.mark.timeout(60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Prometheus:
    """Debian's Prometheus with a configuration of its own."""

    def __init__(self, directory: Path, jobs: str) -> None:
        config = directory / "prometheus.yml"
        config.write_text(
            f"global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}\nscrape_configs:\n{jobs}"
        )
        self._place = f"http://127.0.0.1:{free_port()}"
        address = self._place.removeprefix("http://")
        flags = [f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}", "--log.level=error"]
        command = ["prometheus", *flags, f"--web.listen-address={address}"]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def value(self, expression: str) -> float:
        """The one value of an expression; 0 while there is none."""
        query = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"{self._place}/api/v1/query?{query}", timeout=5) as answer:
                result = json.load(answer)["data"]["result"]
        except OSError:
            return 0.0  # not up yet
        return float(result[0]["value"][1]) if result else 0.0


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[tuple[Prometheus, Child, Child]]:
    if shutil.which("prometheus") is None:
        pytest.skip("the prometheus binary is not installed")
    authority = Authority(tmp_path)
    secret = bcrypt.hashpw(b"good", bcrypt.gensalt(4)).decode()
    lines = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"
    lines += f"basic_auth_users: {{prometheus: {secret}}}\n"
    client = authority.authority.issue_cert("prometheus")
    client.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "client.pem"))
    with Child() as plain, Child(web_config=str(authority.config(lines))) as protected:
        pem = tmp_path / "client.pem"
        jobs = f"""
  - job_name: plain
    static_configs: [{{targets: ["127.0.0.1:{plain.port}"]}}]
  - job_name: protected
    scheme: https
    tls_config: {{ca_file: {tmp_path / "ca.pem"}, cert_file: {pem}, key_file: {pem}}}
    basic_auth: {{username: prometheus, password: good}}
    static_configs: [{{targets: ["127.0.0.1:{protected.port}"]}}]
"""
        prometheus = Prometheus(tmp_path, jobs)
        try:
            yield prometheus, plain, protected
        finally:
            prometheus.process.kill()
            prometheus.process.wait()


def peers(child: Child) -> set[int]:
    """The ports from which the server is being talked to."""
    found = psutil.Process(child.pid).net_connections("tcp")
    return {entry.raddr.port for entry in found if entry.raddr and entry.laddr.port == child.port}


def test_prometheus_finds_every_scrape_good_and_keeps_one_connection(
    targets: tuple[Prometheus, Child, Child],
) -> None:
    prometheus, plain, protected = targets
    seen: dict[str, set[int]] = {"plain": set(), "protected": set()}

    def enough() -> bool:
        seen["plain"] |= peers(plain)
        seen["protected"] |= peers(protected)
        return all(prometheus.value(f'count_over_time(up{{job="{job}"}}[1m])') >= 8 for job in seen)

    done = eventually(enough, 40)

    assert done
    for job, ports in seen.items():
        assert prometheus.value(f'min_over_time(up{{job="{job}"}}[1m])') == 1
        assert prometheus.value(f'scrape_samples_scraped{{job="{job}"}}') == 2000
        assert len(ports) == 1
