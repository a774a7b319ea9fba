"""`web.config.yml`: the file for TLS, passwords and headers, in exporter-toolkit's format.

The sidecar reads the file at the start and whenever it has changed. Differences from exporter-toolkit:

- Client certificates are always verified, because Python's ssl verifies every requested certificate. Every
  `client_auth_type` except `NoClientCert` therefore requires `client_ca_file`.
- TLS 1.0 and 1.1, `curve_preferences`, `rate_limit` and inline certificates are not supported.
- `http2: true` is logged; clients are served with HTTP/1.1.
- `tls_server_config` requires a certificate.

Source: github.com/prometheus/exporter-toolkit, docs/web-configuration.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from exporter.config.loader import load_file
from exporter.config.options import Notation, Secret
from exporter.errors import ConfigurationError, Problem

_BCRYPT = Notation(
    "a bcrypt hash of cost 4 to 18, as `htpasswd -nBC 10 NAME` prints after the colon",
    r"^\$2[aby]\$(0[4-9]|1[0-8])\$[./A-Za-z0-9]{53}$",
)
BcryptHash = Annotated[str, Secret(), _BCRYPT]
"""Hash such as `$2y$10$…`. With a cost above 18, a check would take minutes."""

TlsVersion = Literal["TLS12", "TLS13"]
_SSL_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}

CLIENT_AUTH_TYPES: Mapping[str, ssl.VerifyMode] = {
    **dict.fromkeys(("", "NoClientCert"), ssl.CERT_NONE),
    **dict.fromkeys(("RequestClientCert", "VerifyClientCertIfGiven"), ssl.CERT_OPTIONAL),
    **dict.fromkeys(
        ("RequireAnyClientCert", "RequireClientCert", "RequireAndVerifyClientCert"), ssl.CERT_REQUIRED
    ),
}
"""Verification mode by `client_auth_type`."""
_TLS13_SUITES = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
_OPENSSL_CIPHERS = {  # by the end of Go's name
    "AES_128_CBC_SHA": "AES128-SHA",
    "AES_256_CBC_SHA": "AES256-SHA",
    "AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    "CHACHA20_POLY1305_SHA256": "CHACHA20-POLY1305",
}
CIPHER_SUITES: Mapping[str, str | None] = dict.fromkeys(_TLS13_SUITES) | {
    f"TLS_ECDHE_{key}_WITH_{name}": f"ECDHE-{key}-{cipher}"
    for key in ("ECDSA", "RSA")
    for name, cipher in _OPENSSL_CIPHERS.items()
}
"""OpenSSL's name of each cipher suite that exporter-toolkit accepts; None for the TLS 1.3 suites, which are always offered."""


@dataclass(frozen=True, slots=True)
class TlsServerConfig:
    """Section `tls_server_config`. Relative paths are relative to the directory of the file."""

    cert_file: Path
    key_file: Path
    client_auth_type: str = "NoClientCert"
    client_ca_file: Path | None = None
    client_allowed_sans: tuple[str, ...] = ()
    min_version: TlsVersion = "TLS12"
    max_version: TlsVersion = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True

    @property
    def verify_mode(self) -> ssl.VerifyMode:
        """Verification mode of client certificates."""
        return CLIENT_AUTH_TYPES.get(self.client_auth_type, ssl.CERT_NONE)

    @property
    def files(self) -> list[Path]:
        """Configured certificate and key files."""
        return [path for path in (self.cert_file, self.key_file, self.client_ca_file) if path is not None]

    def problems(self) -> Iterable[tuple[str, str]]:
        """Yield (field, message) for unknown and conflicting values."""
        if self.client_auth_type not in CLIENT_AUTH_TYPES:
            allowed_types = ", ".join(filter(None, CLIENT_AUTH_TYPES))
            yield "client_auth_type", f"{self.client_auth_type} is not one of {allowed_types}"
        for suite in set(self.cipher_suites) - set(CIPHER_SUITES):
            yield "cipher_suites", f"{suite} is not one of {', '.join(CIPHER_SUITES)}"
        verifies_clients = self.verify_mode != ssl.CERT_NONE
        if verifies_clients and self.client_ca_file is None:
            reason = "Python's ssl verifies every client certificate"
            yield "client_auth_type", f"{self.client_auth_type} needs client_ca_file: {reason}"
        for name in ("client_ca_file", "client_allowed_sans"):
            if getattr(self, name) and not verifies_clients:
                reason = "without effect while client_auth_type is NoClientCert"
                yield name, f"{reason}; set RequireAndVerifyClientCert"
        if self.min_version > self.max_version:
            yield "min_version", f"{self.min_version} is above max_version {self.max_version}"
        has_tls12_suite = any(map(CIPHER_SUITES.get, self.cipher_suites))
        if self.cipher_suites and self.min_version == "TLS12" and not has_tls12_suite:
            remedy = "add a TLS 1.2 suite, or set min_version: TLS13"
            yield "cipher_suites", f"has only TLS 1.3 suites, which are always offered; {remedy}"


def _header(name: str) -> Any:
    """Return a field of `HttpHeaders` whose key in the file is the name of the header field."""
    return field(default="", metadata={"key": name})


@dataclass(frozen=True, slots=True)
class HttpHeaders:
    """Additional header fields of responses; "" omits the field."""

    strict_transport_security: str = _header("Strict-Transport-Security")
    x_content_type_options: Literal["", "nosniff"] = _header("X-Content-Type-Options")
    x_frame_options: Literal["", "deny", "sameorigin"] = _header("X-Frame-Options")
    x_xss_protection: str | int = _header("X-XSS-Protection")
    content_security_policy: str = _header("Content-Security-Policy")

    def problems(self) -> Iterable[tuple[str, str]]:
        """Yield (field, message) for values that are not valid header values."""
        for name in self.__slots__:
            if re.fullmatch(r"[\x20-\x7e]*", str(getattr(self, name))) is None:
                yield name, "a header's value is printable ASCII on one line"

    def fields(self) -> dict[str, str]:
        """Return the configured header fields by name."""
        values = {
            str(header.metadata["key"]): str(getattr(self, header.name)).strip()
            for header in dataclasses.fields(self)
        }
        return {name: value for name, value in values.items() if value}


@dataclass(frozen=True, slots=True)
class HttpServerConfig:
    """`http_server_config`: HTTP/2 and additional header fields."""

    http2: bool = False
    headers: HttpHeaders = field(default_factory=HttpHeaders)


@dataclass(frozen=True, slots=True)
class WebConfig:
    """Content of `web.config.yml`."""

    tls_server_config: TlsServerConfig | None = None
    http_server_config: HttpServerConfig = field(default_factory=HttpServerConfig)
    basic_auth_users: Mapping[str, BcryptHash] = field(default_factory=dict)

    def problems(self) -> Iterable[tuple[str, str]]:
        """Yield (field, message) for user names with which a client cannot log in."""
        for name in self.basic_auth_users:
            if ":" in name or not name.isprintable():
                problem = f"{name!r} cannot log in: a user name must not have a colon or a control character"
                yield "basic_auth_users", problem


def load_web_config(path: Path) -> WebConfig:
    """Read the file without opening the certificates. Raises ConfigurationError."""
    return load_file(path, WebConfig)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """TLS settings of new connections."""

    context: ssl.SSLContext
    allowed_names: frozenset[str]  # names of allowed client certificates; empty allows all

    def admits(self, names: frozenset[str]) -> bool:
        """Return True if a verified client certificate with these alternative names is allowed."""
        return not self.allowed_names or not self.allowed_names.isdisjoint(map(_normalize, names))


def make_tls(config: TlsServerConfig, source: Path) -> ServerTls:
    """Load certificates and keys, and return the TLS settings of the file `source`. Raises ConfigurationError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    problems: list[Problem] = []

    @contextlib.contextmanager
    def collect_problem(key: str) -> Iterator[None]:
        """Add an error of the body to the problems, under a key of the section."""
        try:
            yield
        except (OSError, ValueError) as error:  # SSLError is an OSError
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            problems.append(Problem(str(source), None, None, f"tls_server_config.{key}: {reason}"))

    with collect_problem("min_version"):
        context.minimum_version = _SSL_VERSIONS[config.min_version]
        context.maximum_version = _SSL_VERSIONS[config.max_version]
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
    if not config.prefer_server_cipher_suites:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    if suites := [name for suite in config.cipher_suites if (name := CIPHER_SUITES[suite]) is not None]:
        with collect_problem("cipher_suites"):
            context.set_ciphers(":".join(suites))
    with collect_problem("cert_file"):
        certificate, key = (_readable(source.parent / file) for file in (config.cert_file, config.key_file))
        # With an empty password, OpenSSL fails for an encrypted key, and does not prompt on the terminal.
        context.load_cert_chain(certificate, key, password="")
    context.verify_mode = config.verify_mode
    if config.client_ca_file is not None:
        with collect_problem("client_ca_file"):
            context.load_verify_locations(cafile=_readable(source.parent / config.client_ca_file))
    if problems:
        raise ConfigurationError(problems)
    return ServerTls(context, frozenset(map(_normalize, config.client_allowed_sans)))


def _readable(path: Path) -> Path:
    """Return the path if it is readable. Raises OSError with the path, which OpenSSL's message lacks."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be read: {error.strerror}") from None
    return path


def _normalize(name: str) -> str:
    """Return the canonical form of an IP address, which has many spellings. Other names are unchanged."""
    try:
        return ipaddress.ip_address(name.strip()).compressed
    except ValueError:
        return name
