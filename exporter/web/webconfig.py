"""`web.config.yml`: the file for TLS and passwords, in exporter-toolkit's format.

Used in the sidecar, at the start and whenever the file has changed. Deviations from exporter-toolkit, all on the side
of refusing:

- Client certificates are always verified, because Python's ssl cannot ask for one without verifying it: every
  `client_auth_type` but `NoClientCert` needs a CA (exporter-toolkit falls back to the public ones), and
  `RequestClientCert` and `RequireAnyClientCert` behave as `VerifyClientCertIfGiven` and
  `RequireAndVerifyClientCert`.
- TLS 1.0 and 1.1, the choice of ciphers and curves (OpenSSL's defaults hold; `min_version: TLS13` narrows them),
  `client_allowed_sans`, `headers`, `rate_limit`, and certificates inside the file are not offered.
- `http2: true` is accepted and noted in the log: over TLS clients are offered HTTP/1.1, which all speak.
- `tls_server_config` without a certificate is an error (exporter-toolkit serves plain HTTP if only versions
  or ciphers are given).

Source: github.com/prometheus/exporter-toolkit, docs/web-configuration.md.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from exporter.config.loader import load_file
from exporter.config.options import Hidden, Notation
from exporter.errors import ConfigurationError, Problem

_BCRYPT = Notation(
    "a bcrypt hash of cost 4 to 18, as `htpasswd -nBC 10 NAME` prints after the colon",
    r"^\$2[aby]\$(0[4-9]|1[0-8])\$[./A-Za-z0-9]{53}$",
)
BcryptHash = Annotated[str, Hidden(), _BCRYPT]
"""`$2y$10$…`; above cost 18 one check would take minutes."""

TlsVersion = Literal["TLS12", "TLS13"]
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}

CLIENT_AUTH_TYPES: Mapping[str, ssl.VerifyMode] = {
    "": ssl.CERT_NONE,
    "NoClientCert": ssl.CERT_NONE,
    "RequestClientCert": ssl.CERT_OPTIONAL,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAnyClientCert": ssl.CERT_REQUIRED,
    "RequireClientCert": ssl.CERT_REQUIRED,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}


@dataclass(frozen=True, slots=True)
class TlsServerConfig:
    """`tls_server_config`; relative paths are relative to the file that names them."""

    cert_file: Path
    key_file: Path
    client_auth_type: str = "NoClientCert"
    client_ca_file: Path | None = None
    min_version: TlsVersion = "TLS12"
    max_version: TlsVersion = "TLS13"

    @property
    def verify_mode(self) -> ssl.VerifyMode:
        """What is asked of a client."""
        return CLIENT_AUTH_TYPES.get(self.client_auth_type, ssl.CERT_NONE)

    @property
    def files(self) -> list[Path]:
        """The files that are named."""
        return [name for name in (self.cert_file, self.key_file, self.client_ca_file) if name is not None]

    def problems(self) -> Iterable[tuple[str, str]]:
        """(field, message) of what is unknown or does not fit together."""
        if self.client_auth_type not in CLIENT_AUTH_TYPES:
            known = ", ".join(filter(None, CLIENT_AUTH_TYPES))
            yield "client_auth_type", f"{self.client_auth_type} is not one of {known}"
        verifies = self.verify_mode != ssl.CERT_NONE
        if verifies and self.client_ca_file is None:
            reason = "Python's ssl verifies every client certificate"
            yield "client_auth_type", f"{self.client_auth_type} needs client_ca_file: {reason}"
        if self.client_ca_file is not None and not verifies:
            remedy = "set RequireAndVerifyClientCert"
            yield "client_ca_file", f"without effect while client_auth_type is NoClientCert; {remedy}"
        if self.min_version > self.max_version:
            yield "min_version", f"{self.min_version} is above max_version {self.max_version}"


@dataclass(frozen=True, slots=True)
class HttpServerConfig:
    """`http_server_config`."""

    http2: bool = False


@dataclass(frozen=True, slots=True)
class WebConfig:
    """The whole file."""

    tls_server_config: TlsServerConfig | None = None
    http_server_config: HttpServerConfig = field(default_factory=HttpServerConfig)
    basic_auth_users: Mapping[str, BcryptHash] = field(default_factory=dict)

    def problems(self) -> Iterable[tuple[str, str]]:
        """(field, message) of names that cannot log in."""
        for name in self.basic_auth_users:
            if ":" in name or not name.isprintable():
                told = f"{name!r} can never log in: no colon or control character in a name"
                yield "basic_auth_users", told


def load_web_config(path: Path) -> WebConfig:
    """Read the file; certificates are not opened.

    Raises:
        ConfigurationError: It cannot be read, or has problems.
    """
    return load_file(path, WebConfig)


def make_tls(config: TlsServerConfig, source: Path) -> ssl.SSLContext:
    """Load certificates and keys, and set the rules, as `source` says.

    Raises:
        ConfigurationError: A file cannot be read or does not fit, or OpenSSL lacks what is asked.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    problems: list[Problem] = []

    @contextlib.contextmanager
    def step(key: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # SSLError is an OSError
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            problems.append(Problem(str(source), None, None, f"tls_server_config.{key}: {reason}"))

    with step("min_version"):
        context.minimum_version = _VERSIONS[config.min_version]
        context.maximum_version = _VERSIONS[config.max_version]
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    with step("cert_file"):
        certificate, key = (_readable(source.parent / file) for file in (config.cert_file, config.key_file))
        # The password: OpenSSL would ask for that of an encrypted key on the terminal, and wait.
        context.load_cert_chain(certificate, key, password="")
    context.verify_mode = config.verify_mode
    if config.client_ca_file is not None:
        with step("client_ca_file"):
            context.load_verify_locations(cafile=_readable(source.parent / config.client_ca_file))
    if problems:
        raise ConfigurationError(problems)
    return context


def _readable(path: Path) -> Path:
    """The path, if it can be opened; OpenSSL's own message names neither file nor reason."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be read: {error.strerror}") from None
    return path
