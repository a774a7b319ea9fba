"""Real Prometheus over http and https: every scrape succeeds on a single connection."""

from __future__ import annotations

from pathlib import Path

import bcrypt
import psutil
import pytest
from prometheus_support import Prometheus, needs_prometheus
from waiting import wait_until
from web_support import Authority, Child

SCRAPE_CONFIG = """\
  - job_name: protected
    scheme: https
    tls_config: {{ca_file: {directory}/ca.pem, cert_file: {directory}/client.pem, key_file: {directory}/client.pem}}
    basic_auth: {{username: prometheus, password: good}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def ports_of_clients(child: Child) -> set[int]:
    """Return the local ports of the clients that are connected to the server."""
    connections = psutil.Process(child.pid).net_connections("tcp")
    return {entry.raddr.port for entry in connections if entry.raddr and entry.laddr.port == child.port}


@needs_prometheus
@pytest.mark.timeout(60)
def test_every_scrape_of_prometheus_succeeds_on_a_single_connection(tmp_path: Path) -> None:
    authority, secret = Authority(tmp_path), bcrypt.hashpw(b"good", bcrypt.gensalt(4)).decode()
    lines = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"
    config = authority.config(lines + f"basic_auth_users: {{prometheus: {secret}}}\n")
    client = authority.authority.issue_cert("prometheus")
    client.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "client.pem"))
    client_ports: dict[str, set[int]] = {"plain": set(), "protected": set()}
    with Child() as unprotected, Child(web_config=str(config)) as protected:
        scrape_config = SCRAPE_CONFIG.format(directory=tmp_path, port=protected.port)
        targets = {"plain": f"127.0.0.1:{unprotected.port}"}

        def has_both_jobs() -> bool:
            for name, child in (("plain", unprotected), ("protected", protected)):
                client_ports[name] |= ports_of_clients(child)
            return all(
                (prometheus.value(f'count_over_time(up{{job="{job}"}}[1m])') or 0) >= 8
                for job in client_ports
            )

        with Prometheus(tmp_path / "prometheus", targets, extra_config=scrape_config) as prometheus:
            wait_until(has_both_jobs, 40)

            for job, ports in client_ports.items():
                assert prometheus.value(f'min_over_time(up{{job="{job}"}}[1m])') == 1
                assert prometheus.value(f'scrape_samples_scraped{{job="{job}"}}') == 2000
                assert len(ports) == 1
