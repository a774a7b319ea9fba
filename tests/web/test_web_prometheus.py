"""The real Prometheus scrapes the server over http and https: every scrape succeeds, on one connection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bcrypt
import psutil
import pytest
from prometheus_support import Prometheus, needs_prometheus
from waiting import wait_until
from web_support import Authority, Child

pytestmark = [needs_prometheus, pytest.mark.timeout(60)]


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[tuple[Prometheus, Child, Child]]:
    authority = Authority(tmp_path)
    secret = bcrypt.hashpw(b"good", bcrypt.gensalt(4)).decode()
    lines = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"
    lines += f"basic_auth_users: {{prometheus: {secret}}}\n"
    client = authority.authority.issue_cert("prometheus")
    client.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "client.pem"))
    with Child() as plain, Child(web_config=str(authority.config(lines))) as protected:
        pem = tmp_path / "client.pem"
        prometheus = Prometheus(tmp_path / "prometheus", {"plain": f"127.0.0.1:{plain.port}"})
        with (tmp_path / "prometheus/prometheus.yml").open("a") as configuration:
            configuration.write(f"""\
  - job_name: protected
    scheme: https
    tls_config: {{ca_file: {tmp_path / "ca.pem"}, cert_file: {pem}, key_file: {pem}}}
    basic_auth: {{username: prometheus, password: good}}
    static_configs: [{{targets: ["127.0.0.1:{protected.port}"]}}]
""")
        with prometheus:
            yield prometheus, plain, protected


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
        return all((prometheus.value(f'count_over_time(up{{job="{job}"}}[1m])') or 0) >= 8 for job in seen)

    wait_until(enough, 40)

    for job, ports in seen.items():
        assert prometheus.value(f'min_over_time(up{{job="{job}"}}[1m])') == 1
        assert prometheus.value(f'scrape_samples_scraped{{job="{job}"}}') == 2000
        assert len(ports) == 1
