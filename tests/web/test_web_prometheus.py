"""Scrapes by a real Prometheus over http, and over https with a client certificate and basic authentication."""

from __future__ import annotations

from pathlib import Path

import bcrypt
import psutil
import pytest
from prometheus_support import Prometheus, needs_prometheus
from waiting import wait_until
from web_support import CertificateAuthority, ServerProcess

SCRAPE_CONFIG_TEMPLATE = """\
  - job_name: protected
    scheme: https
    tls_config: {{ca_file: {directory}/ca.pem, cert_file: {directory}/client.pem, key_file: {directory}/client.pem}}
    basic_auth: {{username: prometheus, password: good}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""
SERIES_COUNT = 2000
MIN_SCRAPES = 8
"""Minimum number of scrapes of each job before the assertions: about four seconds at two scrapes per second."""


def client_ports_of(process: ServerProcess) -> set[int]:
    """Return the local ports of the clients that are connected to the server."""
    connections = psutil.Process(process.pid).net_connections("tcp")
    return {
        connection.raddr.port
        for connection in connections
        if connection.raddr and connection.laddr.port == process.port
    }


def write_protected_config(authority: CertificateAuthority, directory: Path) -> Path:
    """Write a client certificate and the configuration of a server that requires the certificate and a password.

    Returns the path of the configuration.
    """
    client_certificate = authority.ca.issue_cert("prometheus")
    client_certificate.private_key_and_cert_chain_pem.write_to_path(str(directory / "client.pem"))
    client_auth_lines = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"
    password_hash = bcrypt.hashpw(b"good", bcrypt.gensalt(4)).decode()
    return authority.write_web_config(
        client_auth_lines + f"basic_auth_users: {{prometheus: {password_hash}}}\n"
    )


@needs_prometheus
@pytest.mark.timeout(60)
def test_every_scrape_of_prometheus_succeeds_on_a_single_connection(tmp_path: Path) -> None:
    config = write_protected_config(CertificateAuthority(tmp_path), tmp_path)
    with (
        ServerProcess(series=SERIES_COUNT) as plain,
        ServerProcess(series=SERIES_COUNT, web_config=str(config)) as protected,
    ):
        servers = {"plain": plain, "protected": protected}
        client_ports: dict[str, set[int]] = {job: set() for job in servers}
        scrape_config = SCRAPE_CONFIG_TEMPLATE.format(directory=tmp_path, port=protected.port)
        targets = {"plain": f"127.0.0.1:{plain.port}"}

        def collect_client_ports() -> None:
            for job, server in servers.items():
                client_ports[job] |= client_ports_of(server)

        def collect_ports_and_check_scrapes() -> bool:
            collect_client_ports()
            scrape_counts = [
                prometheus.value(f'count_over_time(up{{job="{job}"}}[1m])') or 0 for job in servers
            ]
            return min(scrape_counts) >= MIN_SCRAPES

        with Prometheus(tmp_path / "prometheus", targets, extra_config=scrape_config) as prometheus:
            wait_until(collect_ports_and_check_scrapes, 40)

            for job, ports in client_ports.items():
                assert prometheus.value(f'min_over_time(up{{job="{job}"}}[1m])') == 1
                assert prometheus.value(f'scrape_samples_scraped{{job="{job}"}}') == SERIES_COUNT
                assert len(ports) == 1
