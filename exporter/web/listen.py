"""Addresses to listen on, as written on the command line, and the sockets bound to them.

Used in the sidecar when the web server starts. A taken port is one clear error here, before anything else is
running. Never SO_REUSEPORT: with it a second exporter would silently take half of the scrapes.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from exporter.errors import ConfigurationError, ListenError, Problem

FLAG = "--web.listen-address"

SEND_BUFFER_BYTES = 64 * 1024

_ADDRESS = re.compile(
    r"(?:\[(?P<bracketed>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<name>[A-Za-z0-9_.-]*)):(?P<port>[0-9]{1,5})"
)


@dataclass(frozen=True, slots=True)
class Address:
    """One address to listen on.

    Attributes:
        text: As written.
        host: Name or number; "" for every address of the machine, IPv4 and IPv6.
        port: 0 lets the kernel choose.
    """

    text: str
    host: str
    port: int


def parse_addresses(texts: Sequence[str]) -> list[Address]:
    """Read `:20909`, `127.0.0.1:0`, `[::1]:9100`, `host:port`.

    Raises:
        ConfigurationError: All that are not written so.
    """
    found: list[Address] = []
    problems: list[Problem] = []
    for text in texts:
        match = _ADDRESS.fullmatch(text)
        if match is None:
            expected = "expected host:port, :port or [IPv6 address]:port"
            problems.append(Problem(FLAG, None, None, f"{text!r} is no address to listen on, {expected}"))
        elif int(match["port"]) > 65535:
            problems.append(Problem(FLAG, None, None, f"{text!r}: a port is at most 65535"))
        else:
            found.append(Address(text, match["bracketed"] or match["name"], int(match["port"])))
    if not texts:
        problems.append(Problem(FLAG, None, None, "there must be at least one address to listen on"))
    if problems:
        raise ConfigurationError(problems)
    return found


def bind(address: Address, backlog: int) -> socket.socket:
    """A listening, non-blocking socket.

    Raises:
        ListenError: The address is taken, not of this machine, or not allowed.
    """
    try:
        if address.host in ("", "::"):
            return _bind_everywhere(address.port, backlog)
        candidates = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # A name may have addresses of both kinds; as in Go's net.Listen one of them is used, IPv4 first.
        candidates.sort(key=lambda candidate: candidate[0] != socket.AF_INET)
        family, _, _, _, sockaddr = candidates[0]
        return _bind(family, sockaddr, backlog)
    except (OSError, UnicodeError) as error:
        raise ListenError(
            f"cannot listen on {address.text}: {_reason(error)}", address=address.text
        ) from error


def url(listener: socket.socket, *, tls: bool) -> str:
    """How a client on this machine reaches a listening socket, without a path."""
    name = listener.getsockname()
    host, port = str(name[0]), int(name[1])
    ip = ipaddress.ip_address(host.partition("%")[0])
    if ip.is_unspecified:
        host = "127.0.0.1"  # both kinds of "every address" take IPv4; `::` as well
    elif ip.version == 6:
        host = f"[{host}]"
    return f"{'https' if tls else 'http'}://{host}:{port}"


def shown(listener: socket.socket, *, tls: bool) -> str:
    """Where a socket really listens, for the log: `http://[::]:20909` for every address of the machine."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _bind_everywhere(port: int, backlog: int) -> socket.socket:
    try:
        return _bind(socket.AF_INET6, ("::", port), backlog)
    except OSError as error:
        # A kernel without IPv6, or one where it is switched off.
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT):
            raise
    return _bind(socket.AF_INET, ("0.0.0.0", port), backlog)


def _bind(family: int, sockaddr: tuple[object, ...], backlog: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        # Only lets a restart take over a port whose old connections are in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            everything = sockaddr[0] == "::"
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if everything else 1)
        # Inherited by every connection: what the kernel keeps for peers that do not read is ours too in a container.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(sockaddr)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def _reason(error: OSError | UnicodeError) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        return f"the port is taken (an exporter that runs already?); choose another with {FLAG}=HOST:PORT"
    if code == errno.EADDRNOTAVAIL:
        return f"this machine does not have that address; choose another with {FLAG}=HOST:PORT"
    if code == errno.EACCES:
        return f"ports below 1024 need a privilege; choose another with {FLAG}=HOST:PORT"
    if isinstance(error, socket.gaierror):
        return f"the name is not known ({error.strerror}); choose another with {FLAG}=HOST:PORT"
    return f"{error}; choose another with {FLAG}=HOST:PORT"
