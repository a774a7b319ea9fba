"""Listen addresses and listening sockets.

Without SO_REUSEPORT: with this option a second exporter would silently receive half of the scrapes.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from dataclasses import dataclass

from exporter.errors import ListenError

FLAG = "--web.listen-address"

SEND_BUFFER_BYTES = 64 * 1024

ADDRESS = r"^(\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_]+)?\]|[A-Za-z0-9_.-]*):[0-9]{1,5}$"
"""Pattern of an address: `:20909`, `127.0.0.1:0`, `[::1]:9100`, `host:port`."""
_REASONS = {
    errno.EADDRINUSE: "the port is in use (by another exporter?)",
    errno.EADDRNOTAVAIL: "this machine does not have this address",
    errno.EACCES: "ports below 1024 require a privilege",
}


@dataclass(frozen=True, slots=True)
class Address:
    """Address to listen on."""

    text: str  # as written
    host: str  # name or number; "" means all addresses, IPv4 and IPv6
    port: int  # 0 lets the kernel choose


def parse_address(text: str) -> Address:
    """Parse an address; raises ValueError."""
    host, _, port = text.rpartition(":")
    if re.fullmatch(ADDRESS, text) is None or int(port) > 65535:
        raise ValueError(f"{text!r} is not a listen address")
    return Address(text, host.strip("[]"), int(port))


def bind(address: Address, backlog: int) -> socket.socket:
    """Return a listening, non-blocking socket; raises ListenError."""
    try:
        if address.host in ("", "::"):
            both = socket.has_dualstack_ipv6()
            family, host = (socket.AF_INET6, "::") if both else (socket.AF_INET, "0.0.0.0")
            listener = socket.create_server(
                (host, address.port), family=family, backlog=backlog, dualstack_ipv6=both
            )
        else:
            # As in Go's net.Listen, a single address of a name is used, IPv4 first.
            candidates = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            family, _, _, _, place = min(candidates, key=lambda each: each[0] != socket.AF_INET)
            listener = socket.create_server(place, family=family, backlog=backlog)
    except (OSError, UnicodeError) as error:
        reason = _REASONS.get(getattr(error, "errno", None) or 0, str(error))
        message = f"cannot listen on {address.text}: {reason}; choose another with {FLAG}=HOST:PORT"
        raise ListenError(message, address=address.text) from error
    listener.setblocking(False)
    # Inherited by every connection: in a container, the kernel's buffers for peers that do not read count as ours.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return listener


def url(listener: socket.socket, *, tls: bool, reachable: bool = True) -> str:
    """Return the URL of a listening socket, without a path; `reachable` replaces the wildcard address by 127.0.0.1."""
    host, port = listener.getsockname()[:2]
    if reachable and ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = "127.0.0.1"
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
