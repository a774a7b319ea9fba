"""From `tls_server_config` to the context of TLS sessions.

Used in the sidecar, on the main thread at the start and on a worker thread when files have changed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exporter.errors import ConfigurationError, Problem
from exporter.web.webconfig import CURVES, TlsServerConfig

_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_VERIFY = {"no": ssl.CERT_NONE, "if given": ssl.CERT_OPTIONAL, "always": ssl.CERT_REQUIRED}


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What new connections are to agree on.

    Attributes:
        context: Certificate, versions, ciphers, what is asked of clients.
        verifies: Whether clients must show a certificate.
        allowed_names: Alternative names of which a client's certificate must have one; empty allows all.
    """

    context: ssl.SSLContext
    verifies: Literal["no", "if given", "always"]
    allowed_names: frozenset[str]

    def admits(self, names: frozenset[str]) -> bool:
        """Whether a verified client certificate with these alternative names may pass."""
        return not self.allowed_names or not self.allowed_names.isdisjoint(map(_normal, names))


def files_of(config: TlsServerConfig, directory: Path) -> list[Path]:
    """The files that a configuration names; relative ones are in the configuration's directory."""
    names = (config.cert_file, config.key_file, config.client_ca_file)
    return [directory / name for name in names if name is not None]


def make_tls(config: TlsServerConfig, source: Path) -> ServerTls:
    """Load certificates and keys, and set the rules.

    Args:
        config: Checked by its loader.
        source: The file it came from.

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
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    if config.prefer_server_cipher_suites:
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    else:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    if config.old_cipher_suites:
        with step("cipher_suites"):
            context.set_ciphers(":".join(config.old_cipher_suites))
    for curve in config.curve_preferences:
        with step("curve_preferences"):
            context.set_ecdh_curve(CURVES[curve])
    with step("cert_file"), _opened(config, source.parent) as (certificate, key):
        # The password: OpenSSL would ask for that of an encrypted key on the terminal, and wait.
        context.load_cert_chain(certificate, key, password="")
    if config.client_ca_file is not None or config.client_ca:
        context.verify_mode = _VERIFY[config.verifies_clients]
        with step("client_ca_file" if config.client_ca_file else "client_ca"):
            _load_authority(context, config, source.parent)
    if problems:
        raise ConfigurationError(problems)
    names = frozenset(map(_normal, config.client_allowed_sans))
    return ServerTls(context, config.verifies_clients, names)


def _load_authority(context: ssl.SSLContext, config: TlsServerConfig, directory: Path) -> None:
    if config.client_ca_file is None:
        context.load_verify_locations(cadata=config.client_ca)
    else:
        context.load_verify_locations(cafile=_readable(directory / config.client_ca_file))


@contextlib.contextmanager
def _opened(config: TlsServerConfig, directory: Path) -> Iterator[tuple[str, str]]:
    """Paths of certificate and key; text from the configuration is given a path in memory only."""
    with contextlib.ExitStack() as stack:
        paths = []
        for text, file in ((config.cert, config.cert_file), (config.key, config.key_file)):
            if file is not None:
                paths.append(_readable(directory / file))
            else:
                memory = stack.enter_context(os.fdopen(os.memfd_create("tls"), "w+b"))
                memory.write(text.encode())
                memory.flush()
                paths.append(f"/proc/self/fd/{memory.fileno()}")
        yield paths[0], paths[1]


def _readable(path: Path) -> str:
    """The path, if the file can be opened: OpenSSL's own message names neither file nor reason.

    Raises:
        OSError: It cannot be.
    """
    try:
        with path.open("rb"):
            return str(path)
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be read: {error.strerror}") from None


def _normal(name: str) -> str:
    """IP addresses have many spellings; other names are compared as they are."""
    try:
        return ipaddress.ip_address(name.strip()).compressed
    except ValueError:
        return name
