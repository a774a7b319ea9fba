"""`web.config.yml`: the file for TLS, passwords, headers and a rate limit, in exporter-toolkit's format.

Used in the sidecar, at the start and whenever the file has changed. Text comes in, a `WebConfig` goes out, or
one `ConfigurationError` with every problem and its place. Certificates are not opened here (`tls` does).

Deviations from exporter-toolkit, all on the side of refusing:

- Client certificates are always verified, because Python's ssl cannot ask for one without verifying it: every
  `client_auth_type` but `NoClientCert` needs a CA (exporter-toolkit falls back to the public ones), and
  `RequestClientCert` and `RequireAnyClientCert` behave as `VerifyClientCertIfGiven` and
  `RequireAndVerifyClientCert`.
- TLS 1.0 and 1.1 are not offered, and `curve_preferences` takes one curve.
- `http2: true` is accepted and noted in the log: over TLS clients are offered HTTP/1.1, which all speak.
- `tls_server_config` without a certificate is an error (exporter-toolkit serves plain HTTP if only versions
  or ciphers are given).
- `burst: 0`, which would refuse every request, is an error.

Source: github.com/prometheus/exporter-toolkit, docs/web-configuration.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from exporter.config.loader import load_file
from exporter.config.options import Duration, Hidden, Notation, Range, Secret

_BCRYPT = r"^\$2[aby]\$(0[4-9]|1[0-8])\$[./A-Za-z0-9]{53}$"


def _parse_bcrypt(text: str) -> str:
    if re.fullmatch(_BCRYPT, text) is None:
        raise ValueError(text)
    return text


BcryptHash = Annotated[
    str,
    Hidden(),
    Notation(
        "a bcrypt hash of cost 4 to 18, as `htpasswd -nBC 10 NAME` prints after the colon",
        _BCRYPT,
        _parse_bcrypt,
        str,
    ),
]
"""`$2y$10$…`; above cost 18 one check would take minutes."""

ClientAuthType = Literal[
    "",
    "NoClientCert",
    "RequestClientCert",
    "RequireAnyClientCert",
    "RequireClientCert",
    "VerifyClientCertIfGiven",
    "RequireAndVerifyClientCert",
]
TlsVersion = Literal["TLS12", "TLS13"]

# exporter-toolkit takes these of Go's names. For TLS 1.3 (None) both Go and OpenSSL always offer all three.
CIPHER_SUITES: Mapping[str, str | None] = {
    "TLS_AES_128_GCM_SHA256": None,
    "TLS_AES_256_GCM_SHA384": None,
    "TLS_CHACHA20_POLY1305_SHA256": None,
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
}

CURVES: Mapping[str, str] = {
    "CurveP256": "prime256v1",
    "CurveP384": "secp384r1",
    "CurveP521": "secp521r1",
    "X25519": "X25519",
}
"""Go's name of a curve and OpenSSL's."""

CipherSuite = Literal[
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
]


@dataclass(frozen=True, slots=True)
class TlsServerConfig:
    """`tls_server_config`; relative paths are relative to the file that names them."""

    cert: str = ""
    key: Secret = ""
    client_ca: str = ""
    cert_file: Path | None = None
    key_file: Path | None = None
    client_auth_type: ClientAuthType = "NoClientCert"
    client_ca_file: Path | None = None
    client_allowed_sans: tuple[str, ...] = ()
    min_version: TlsVersion = "TLS12"
    max_version: TlsVersion = "TLS13"
    cipher_suites: tuple[CipherSuite, ...] = ()
    prefer_server_cipher_suites: bool = True
    curve_preferences: tuple[Literal["CurveP256", "CurveP384", "CurveP521", "X25519"], ...] = ()

    @property
    def verifies_clients(self) -> Literal["no", "if given", "always"]:
        """What is asked of a client."""
        if self.client_auth_type in ("", "NoClientCert"):
            return "no"
        given = ("RequestClientCert", "VerifyClientCertIfGiven")
        return "if given" if self.client_auth_type in given else "always"

    def problems(self) -> Iterable[tuple[str, str]]:
        """(field, message) of what does not fit together."""
        for name in ("cert", "key", "client_ca"):
            if getattr(self, name) and getattr(self, f"{name}_file"):
                yield name, f"give either {name} or {name}_file"
        for name in ("cert", "key"):
            if not getattr(self, name) and not getattr(self, f"{name}_file"):
                yield f"{name}_file", f"missing: tls_server_config needs {name}_file (or {name})"
        authority = bool(self.client_ca or self.client_ca_file)
        if authority and self.verifies_clients == "no":
            where = "client_ca_file" if self.client_ca_file else "client_ca"
            yield (
                where,
                "without effect while client_auth_type is NoClientCert; set RequireAndVerifyClientCert",
            )
        if not authority and self.verifies_clients != "no":
            yield (
                "client_auth_type",
                f"{self.client_auth_type} needs client_ca_file: Python's ssl verifies every client certificate",
            )
        if self.client_allowed_sans and self.verifies_clients == "no":
            yield "client_allowed_sans", "without effect while client_auth_type is NoClientCert"
        if self.min_version > self.max_version:
            yield "min_version", f"{self.min_version} is above max_version {self.max_version}"
        if len(self.curve_preferences) > 1:
            yield (
                "curve_preferences",
                "Python's ssl can be told one curve only; leave it out for its defaults",
            )
        if self.cipher_suites and self.min_version == "TLS12" and not self.old_cipher_suites:
            yield (
                "cipher_suites",
                "holds only suites of TLS 1.3, which are always offered; add one of TLS 1.2, or set min_version: TLS13",
            )

    @property
    def old_cipher_suites(self) -> tuple[str, ...]:
        """OpenSSL's names of the chosen suites for TLS 1.2."""
        return tuple(name for suite in self.cipher_suites if (name := CIPHER_SUITES[suite]) is not None)


@dataclass(frozen=True, slots=True)
class HttpHeaders:
    """The header fields that may be added; "" leaves one out."""

    strict_transport_security: str = field(default="", metadata={"key": "Strict-Transport-Security"})
    x_content_type_options: Literal["", "nosniff"] = field(
        default="", metadata={"key": "X-Content-Type-Options"}
    )
    x_frame_options: Literal["", "deny", "sameorigin"] = field(
        default="", metadata={"key": "X-Frame-Options"}
    )
    x_xss_protection: str | int = field(default="", metadata={"key": "X-XSS-Protection"})
    content_security_policy: str = field(default="", metadata={"key": "Content-Security-Policy"})

    def problems(self) -> Iterable[tuple[str, str]]:
        """(field, message) of values that no header can carry."""
        for name in self.__slots__:
            if re.fullmatch(r"[\x20-\x7e]*", str(getattr(self, name))) is None:
                yield name, "a header's value is printable ASCII on one line"

    def fields(self) -> dict[str, str]:
        """Header fields by name."""
        pairs = {
            "Strict-Transport-Security": self.strict_transport_security,
            "X-Content-Type-Options": self.x_content_type_options,
            "X-Frame-Options": self.x_frame_options,
            "X-XSS-Protection": str(self.x_xss_protection),
            "Content-Security-Policy": self.content_security_policy,
        }
        return {name: value.strip() for name, value in pairs.items() if value.strip()}


@dataclass(frozen=True, slots=True)
class HttpServerConfig:
    """`http_server_config`."""

    http2: bool = False
    headers: HttpHeaders = field(default_factory=HttpHeaders)


@dataclass(frozen=True, slots=True)
class RateLimit:
    """`rate_limit`: one request per interval, and `burst` of them at once; interval 0 is no limit."""

    interval: Duration = 0.0
    burst: Annotated[int, Range(0, 1_000_000)] = 0

    def problems(self) -> Iterable[tuple[str, str]]:
        """(field, message) of a limit that lets nothing through."""
        if self.interval and not self.burst:
            yield "burst", "must be at least 1, else every request is refused"


@dataclass(frozen=True, slots=True)
class WebConfig:
    """The whole file."""

    tls_server_config: TlsServerConfig | None = None
    http_server_config: HttpServerConfig = field(default_factory=HttpServerConfig)
    basic_auth_users: Mapping[str, BcryptHash] = field(default_factory=dict)
    rate_limit: RateLimit = field(default_factory=RateLimit)

    def problems(self) -> Iterable[tuple[str, str]]:
        """(field, message) of names that cannot log in."""
        for name in self.basic_auth_users:
            if ":" in name or not name.isprintable():
                yield (
                    "basic_auth_users",
                    f"{name!r} can never log in: no colon or control character in a name",
                )


def load_web_config(path: Path) -> WebConfig:
    """Read the file.

    Raises:
        ConfigurationError: It cannot be read, or has problems.
    """
    return load_file(path, WebConfig)
