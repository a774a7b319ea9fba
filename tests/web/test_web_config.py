"""web.config.yml: what exporter-toolkit's users write is read, and what is wrong has its place."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from web_support import fetch, port_of, serving

from exporter.errors import ConfigurationError
from exporter.web.webconfig import WebConfig, load_web_config

HASH = "$2y$10$qRTBuFoULoYNA7AQ/F3ck.trZBPyjV64.oA4ZsSBCIWvXuvQlQTuu"

TOOLKIT = f"""
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
  carol: {HASH}
"""


def load(directory: Path, text: str) -> WebConfig:
    path = directory / "web.config.yml"
    path.write_text(text)
    return load_web_config(path)


def test_the_format_of_exporter_toolkit_is_read_in_full(tmp_path: Path) -> None:
    config = load(tmp_path, TOOLKIT)

    assert config.tls_server_config is not None
    assert config.tls_server_config.verify_mode == ssl.CERT_REQUIRED
    assert dict(config.basic_auth_users) == {"carol": HASH}
    assert config.http_server_config.headers.fields()["X-XSS-Protection"] == "1"


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("tls_server_confg: {}\n", "1:1", 'did you mean "tls_server_config"'),
        ("tls_server_config:\n  cert_file: a\n  key_fil: b\n", "3:3", 'did you mean "key_file"'),
        ("tls_server_config:\n  cert_file: a\n", "2:3", 'missing key "key_file"'),
        ("tls_server_config: {min_version: TLS13}\n", "1:20", 'missing key "cert_file"'),
        ("http_server_config:\n  headers:\n    Server: x\n", "3:5", 'unknown key "Server"'),
        ("http_server_config:\n  headers:\n    X-Frame-Options: maybe\n", "3:22", "maybe"),
        ('http_server_config:\n  headers:\n    X-XSS-Protection: "a\\nb"\n', "3:23", "printable"),
        ("basic_auth_users:\n  alice: plain-text\n", "2:10", "bcrypt hash"),
        (f"basic_auth_users:\n  alice: {HASH.replace('$10$', '$31$')}\n", "2:10", "cost 4 to 18"),
        *(
            (f"tls_server_config:\n  cert_file: a\n  key_file: b\n  {line}\n", f"4:{column}", message)
            for line, column, message in (
                ("client_auth_type: RequireAnyClientCert", 21, "needs client_ca_file"),
                ("client_auth_type: Sometimes", 21, "Sometimes is not one of"),
                ("client_ca_file: ca.pem", 19, "client_auth_type is NoClientCert"),
                ("client_allowed_sans: [a]", 24, "client_auth_type is NoClientCert"),
                ("min_version: TLS10", 16, "TLS10"),
                ("min_version: TLS13\n  max_version: TLS12", 16, "above max_version"),
                ("cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]", 18, "TLS_RSA_WITH_RC4_128_SHA"),
                ("cipher_suites: [TLS_AES_128_GCM_SHA256]", 18, "only suites of TLS 1.3"),
            )
        ),
        (f'basic_auth_users:\n  "a:b": {HASH}\n', "2:3", "can never log in"),
        ("rate_limit: {interval: 1s, burst: 1}\n", "1:1", 'unknown key "rate_limit"'),
    ],
)
def test_what_is_wrong_has_its_place(tmp_path: Path, text: str, place: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, text)

    assert f"web.config.yml:{place}: " in str(caught.value)
    assert message in str(caught.value)


def test_all_problems_are_told_at_once_and_no_secret_is_shown(tmp_path: Path) -> None:
    text = "basic_auth_users:\n  alice: hunter2\nbasic_auth: {}\nhttp_server_config: {http2: maybe}\n"
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, text)

    assert [problem.line for problem in caught.value.problems] == [2, 3, 4]
    assert "hunter2" not in str(caught.value)


def test_a_file_that_is_not_there_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"), serving(web_config=tmp_path / "none.yml"):
        pass


def test_configured_headers_are_on_every_answer(tmp_path: Path) -> None:
    path = tmp_path / "web.config.yml"
    path.write_text("http_server_config: {headers: {X-Frame-Options: deny, Content-Security-Policy: own}}\n")
    with serving(web_config=path) as server:
        replies = [fetch(port_of(server), target) for target in ("/metrics", "/", "/nothing")]

    assert {reply.headers["x-frame-options"] for reply in replies} == {"deny"}
    assert {reply.headers["content-security-policy"] for reply in replies} == {"own"}
