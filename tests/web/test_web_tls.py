"""web.config.yml in the format of exporter-toolkit, TLS with real certificates, refused clients and changed files."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import subprocess
import time
from pathlib import Path

import pytest
from waiting import WAIT_LIMIT_SECONDS, wait_until
from web_child import sample_values
from web_support import CertificateAuthority, exchange, port_of, send_request, serving

from exporter.errors import ConfigurationError
from exporter.web.endpoints import MetricsEndpoint
from exporter.web.http import Limits
from exporter.web.protection import WebConfigFile
from exporter.web.server import Server
from exporter.web.webconfig import WebConfig, load_web_config

BCRYPT_HASH = "$2y$10$qRTBuFoULoYNA7AQ/F3ck.trZBPyjV64.oA4ZsSBCIWvXuvQlQTuu"

TOOLKIT_EXAMPLE = f"""
tls_server_config:
  cert_file: "server.crt"
  key_file: "server.key"
  client_auth_type: "RequireAndVerifyClientCert"
  client_ca_file: "client2_selfsigned.pem"
  client_allowed_sans:
    - "one"
  min_version: TLS12
  max_version: TLS13
  cipher_suites:
  - TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256
  - TLS_AES_128_GCM_SHA256
  prefer_server_cipher_suites: false
http_server_config:
  http2: false
  headers:
    X-Frame-Options: deny
    Strict-Transport-Security: max-age=31536000; includeSubDomains
    X-Content-Type-Options: nosniff
    X-XSS-Protection: 1
    Content-Security-Policy: "default-src 'self' *.test.example.net"
basic_auth_users:
  carol: {BCRYPT_HASH}
"""


def load_text(directory: Path, text: str) -> WebConfig:
    path = directory / "web.config.yml"
    path.write_text(text)
    return load_web_config(path)


def test_an_example_of_exporter_toolkit_is_accepted(tmp_path: Path) -> None:
    config = load_text(tmp_path, TOOLKIT_EXAMPLE)

    assert config.tls_server_config is not None
    assert config.tls_server_config.verify_mode == ssl.CERT_REQUIRED
    assert dict(config.basic_auth_users) == {"carol": BCRYPT_HASH}
    assert config.http_server_config.headers.fields()["X-XSS-Protection"] == "1"


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("tls_server_confg: {}\n", "1:1", 'did you mean "tls_server_config"'),
        ("tls_server_config:\n  cert_file: a\n", "2:3", 'missing key "key_file"'),
        ("http_server_config:\n  headers:\n    Server: x\n", "3:5", 'unknown key "Server"'),
        ('http_server_config:\n  headers:\n    X-XSS-Protection: "a\\nb"\n', "3:23", "printable"),
        ("basic_auth_users:\n  alice: hunter2\n", "2:10", "bcrypt hash"),
        (f"basic_auth_users:\n  alice: {BCRYPT_HASH.replace('$10$', '$31$')}\n", "2:10", "cost 4 to 18"),
        (f'basic_auth_users:\n  "a:b": {BCRYPT_HASH}\n', "2:3", "cannot log in"),
        ("rate_limit: {interval: 1s, burst: 1}\n", "1:1", 'unknown key "rate_limit"'),
    ],
)
def test_errors_of_the_web_configuration_have_a_position(
    tmp_path: Path, text: str, position: str, message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_text(tmp_path, text)

    assert f"web.config.yml:{position}: " in str(caught.value)
    assert message in str(caught.value)


def test_a_password_instead_of_a_hash_is_not_in_the_error_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="bcrypt hash") as caught:
        load_text(tmp_path, "basic_auth_users:\n  alice: hunter2\n")

    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "column", "message"),
    [
        ("client_auth_type: RequireAnyClientCert", 21, "needs client_ca_file"),
        ("client_auth_type: Sometimes", 21, "Sometimes is not one of"),
        ("client_ca_file: ca.pem", 19, "client_auth_type is NoClientCert"),
        ("client_allowed_sans: [a]", 24, "client_auth_type is NoClientCert"),
        ("min_version: TLS10", 16, "TLS10"),
        ("min_version: TLS13\n  max_version: TLS12", 16, "above max_version"),
        ("cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]", 18, "TLS_RSA_WITH_RC4_128_SHA"),
        ("cipher_suites: [TLS_AES_128_GCM_SHA256]", 18, "only TLS 1.3 suites"),
    ],
)
def test_errors_of_the_tls_settings_have_a_position(
    tmp_path: Path, line: str, column: int, message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_text(tmp_path, f"tls_server_config:\n  cert_file: a\n  key_file: b\n  {line}\n")

    assert f"web.config.yml:4:{column}: " in str(caught.value)
    assert message in str(caught.value)


def test_configured_headers_are_also_in_error_replies(tmp_path: Path) -> None:
    path = tmp_path / "web.config.yml"
    path.write_text("http_server_config: {headers: {X-Frame-Options: deny, Content-Security-Policy: own}}\n")
    with serving(web_config=path) as server:
        port = port_of(server)
        replies = [send_request(port, target) for target in ("/metrics", "/metrics?x=y", "/nothing")]
        replies.append(send_request(port, method="POST"))

    assert [reply.status for reply in replies] == [200, 400, 404, 405]
    assert {reply.headers["x-frame-options"] for reply in replies} == {"deny"}
    assert {reply.headers["content-security-policy"] for reply in replies} == {"own"}


FREQUENT_CHECKS = Limits(file_check_seconds=0.05)
REFUSAL = (ssl.SSLError, ConnectionError)
"""Errors of a refused client. With TLS 1.3, the handshake of the client ends before the refusal, so the connection may be reset."""


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path)


def server_certificate(port: int, client_context: ssl.SSLContext) -> bytes | None:
    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_LIMIT_SECONDS)
    with client_context.wrap_socket(connection, server_hostname="127.0.0.1") as tls_connection:
        return tls_connection.getpeercert(binary_form=True)


def reload_success_of(server: Server) -> float:
    return sample_values(server)["exporter_web_config_last_reload_successful"]


def test_a_large_page_arrives_completely_over_tls(authority: CertificateAuthority) -> None:
    body = os.urandom(3_000_000)
    page = MetricsEndpoint(lambda _format, _names: body)

    with serving(page, web_config=authority.write_web_config()) as server:
        assert send_request(port_of(server), tls_context=authority.client_context()).body == body


def test_plain_http_on_the_tls_port_gets_an_error(authority: CertificateAuthority) -> None:
    with serving(web_config=authority.write_web_config()) as server:
        plaintext_reply = exchange(port_of(server), b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        noise_reply = exchange(port_of(server), b"\0" * 100)
        # The plain request gets a reply of status 400, so only the noise counts as a TLS error.
        wait_until(lambda: sample_values(server)["exporter_http_connection_errors_total{tls}"] == 1)

    assert noise_reply == b"" or noise_reply[:1] == b"\x15"  # the type of a TLS record with an alert
    assert plaintext_reply.startswith(b"HTTP/1.1 400 ")
    assert plaintext_reply.endswith(b"this port requires HTTPS\n")


def test_a_session_below_the_minimum_version_is_refused(authority: CertificateAuthority) -> None:
    old_client = authority.client_context()
    old_client.maximum_version = ssl.TLSVersion.TLSv1_2
    with serving(web_config=authority.write_web_config("  min_version: TLS13\n")) as server:
        new_reply = send_request(port_of(server), tls_context=authority.client_context())
        with pytest.raises(ssl.SSLError):
            send_request(port_of(server), tls_context=old_client)

    assert new_reply.status == 200


def test_only_the_configured_cipher_suites_are_negotiated(authority: CertificateAuthority) -> None:
    suites = "  max_version: TLS12\n  cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256]\n"
    other_client = authority.client_context()
    other_client.set_ciphers("ECDHE-ECDSA-AES256-GCM-SHA384")
    with serving(web_config=authority.write_web_config(suites)) as server:
        port = port_of(server)
        reply = send_request(port, tls_context=authority.client_context())
        with pytest.raises(ssl.SSLError, match="HANDSHAKE_FAILURE"):
            send_request(port, tls_context=other_client)

    assert reply.status == 200


# exporter-toolkit does not verify the certificates of RequireAnyClientCert, its synonym RequireClientCert, and RequestClientCert;
# this server verifies each certificate.
REQUIRING_TYPES = ("RequireAndVerifyClientCert", "RequireAnyClientCert", "RequireClientCert")
OPTIONAL_TYPES = ("VerifyClientCertIfGiven", "RequestClientCert")


@pytest.mark.parametrize("client_auth_type", [*REQUIRING_TYPES, *OPTIONAL_TYPES])
def test_client_certificates_are_verified(
    authority: CertificateAuthority, tmp_path: Path, client_auth_type: str
) -> None:
    (tmp_path / "foreign").mkdir()
    foreign_certificate = CertificateAuthority(tmp_path / "foreign").ca.issue_cert("client")
    foreign_client = authority.client_context()
    foreign_certificate.configure_cert(foreign_client)
    config = authority.write_web_config(f"  client_auth_type: {client_auth_type}\n  client_ca_file: ca.pem\n")
    with serving(web_config=config) as server:
        port = port_of(server)
        reply = send_request(port, tls_context=authority.client_context("client"))
        with pytest.raises(REFUSAL):
            send_request(port, tls_context=foreign_client)
        if client_auth_type in REQUIRING_TYPES:
            with pytest.raises(REFUSAL):
                send_request(port, tls_context=authority.client_context())
        else:
            assert send_request(port, tls_context=authority.client_context()).status == 200

    assert reply.status == 200


def test_a_client_certificate_needs_an_allowed_alternative_name(authority: CertificateAuthority) -> None:
    allowed_names = "  client_allowed_sans: [prometheus.example, '::1', 10.0.0.9]\n"
    client_options = (
        "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n" + allowed_names
    )
    with serving(web_config=authority.write_web_config(client_options)) as server:
        port = port_of(server)
        allowed_statuses = [
            send_request(port, tls_context=authority.client_context(*names)).status
            for names in (["prometheus.example"], ["x.example", "10.0.0.9"], ["0:0:0:0:0:0:0:1"])
        ]
        with pytest.raises(REFUSAL):
            send_request(port, tls_context=authority.client_context("sub.prometheus.example"))
        refused_count = sample_values(server)["exporter_http_connection_errors_total{certificate}"]

    assert allowed_statuses == [200, 200, 200]
    assert refused_count == 1


def test_an_unusable_private_key_is_refused_at_startup(authority: CertificateAuthority) -> None:
    config, key = authority.write_web_config(), authority.directory / "key.pem"
    command = ["openssl", "pkcs8", "-topk8", "-v2", "aes-256-cbc", "-passout", "pass:secret", "-in", str(key)]
    encrypted_key = subprocess.run(command, capture_output=True, check=True).stdout
    key.unlink()
    with pytest.raises(ConfigurationError, match=r"key\.pem cannot be read: No such file"):
        Server((), listen=["127.0.0.1:0"], web_config=config)

    for key_bytes in (authority.ca.issue_cert("other").private_key_pem.bytes(), encrypted_key):
        key.write_bytes(key_bytes)
        with pytest.raises(ConfigurationError, match=r"tls_server_config\.cert_file"):
            Server((), listen=["127.0.0.1:0"], web_config=config)


def test_a_new_certificate_is_used_for_new_connections(authority: CertificateAuthority) -> None:
    old_certificate = authority.issue_server_certificate()
    with serving(web_config=authority.write_web_config(), limits=FREQUENT_CHECKS) as server:
        initial_certificate = server_certificate(port_of(server), authority.client_context())
        new_certificate = authority.issue_server_certificate()
        wait_until(lambda: server_certificate(port_of(server), authority.client_context()) == new_certificate)
        reload_success = reload_success_of(server)

    assert (initial_certificate, reload_success) == (old_certificate, 1)


def test_a_broken_new_file_keeps_the_old_settings_and_is_logged_once(
    authority: CertificateAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    config = authority.write_web_config()
    with serving(web_config=config, limits=FREQUENT_CHECKS) as server, caplog.at_level(logging.ERROR):
        port = port_of(server)
        config.write_text("tls_server_config: {cert_fil: cert.pem}\n")
        statuses = []

        def reload_fails_after_a_request() -> bool:
            """Send a request, which starts a check of the file, and return True if the last reload has failed."""
            statuses.append(send_request(port, tls_context=authority.client_context()).status)
            return not reload_success_of(server)

        wait_until(reload_fails_after_a_request)
        for _ in range(5):
            time.sleep(0.1)  # the file is checked at most every 0.05 s
            reload_fails_after_a_request()
        authority.write_web_config()  # writes the valid configuration again
        wait_until(
            lambda: (
                send_request(port, tls_context=authority.client_context()).status == 200
                and reload_success_of(server)
            )
        )

    assert set(statuses) == {200}
    assert len(caplog.records) == 1
    assert "cert_fil" in caplog.text


@pytest.mark.parametrize(
    "text", ["", "http_server_config: {}\n", None], ids=["empty", "no_tls_section", "missing"]
)
def test_a_changed_file_cannot_disable_protection(authority: CertificateAuthority, text: str | None) -> None:
    client_options = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"
    config = authority.write_web_config(client_options)
    with serving(web_config=config, limits=FREQUENT_CHECKS) as server:
        port = port_of(server)
        if text is None:
            config.unlink()
        else:
            config.write_text(text)
        time.sleep(0.1)  # the file is checked at most every 0.05 s
        accepted_status = send_request(port, tls_context=authority.client_context("c")).status
        wait_until(lambda: not reload_success_of(server))
        with pytest.raises(REFUSAL):
            send_request(port, tls_context=authority.client_context())
        plaintext_reply = exchange(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")

    assert accepted_status == 200
    assert b"this port requires HTTPS" in plaintext_reply


def test_scrapes_are_answered_while_the_configuration_file_hangs(authority: CertificateAuthority) -> None:
    config = authority.write_web_config()
    with serving(web_config=config, limits=FREQUENT_CHECKS) as server:
        send_request(port_of(server), tls_context=authority.client_context())
        config.unlink()
        os.mkfifo(config)  # opening the file waits for a writer, as on a network share that hangs
        time.sleep(0.1)  # the file is checked at most every 0.05 s
        replies = [send_request(port_of(server), tls_context=authority.client_context()) for _ in range(4)]
        with config.open("w"):
            pass  # releases the thread that opens the file

    assert [reply.status for reply in replies] == [200] * 4


def test_only_one_request_waits_for_a_configuration_file_that_hangs(authority: CertificateAuthority) -> None:
    config = authority.write_web_config()
    file = WebConfigFile(config, FREQUENT_CHECKS)
    config.unlink()
    os.mkfifo(config)

    async def later_request_waits() -> bool:
        await file.current()
        later_request = file.current()
        try:
            later_request.send(None)  # runs until the first wait
        except StopIteration:
            return False
        later_request.close()
        return True

    waits = asyncio.run(later_request_waits())
    with config.open("w"):
        pass  # releases the thread that opens the file
    file.stop()

    assert not waits
