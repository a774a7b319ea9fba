"""Listen addresses and listening sockets.

SO_REUSEPORT is not set: with this option, a second exporter would silently receive half of the scrapes.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from dataclasses import dataclass

from exporter.errors import ListenError

ADDRESS_FLAG = "--web.listen-address"

SEND_BUFFER_BYTES = 64 * 1024
"""Size of the kernel's send buffer of a connection."""

ADDRESS_PATTERN = r"^(\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_]+)?\]|[A-Za-z0-9_.-]*):[0-9]{1,5}$"
"""Pattern of an address: `:20909`, `127.0.0.1:0`, `[::1]:9100`, `host:port`."""
_REASONS = {
    errno.EADDRINUSE: "the port is in use (by another exporter?)",
    errno.EADDRNOTAVAIL: "no interface of this machine has this address",
    errno.EACCES: "ports below 1024 require root or CAP_NET_BIND_SERVICE",
}


@dataclass(frozen=True, slots=True)
class Address:
    """Address to listen on."""

    text: str  # as configured
    host: str  # name or number; "" means all addresses, IPv4 and IPv6
    port: int  # 0 lets the kernel choose


def parse_address(text: str) -> Address:
    """Parse an address. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if re.fullmatch(ADDRESS_PATTERN, text) is None or int(port) > 65535:
        raise ValueError(f"{text!r} is not a listen address")
    return Address(text, host.strip("[]"), int(port))


def bind(address: Address, backlog: int) -> socket.socket:
    """Return a listening, non-blocking socket. Raises ListenError."""
    try:
        if address.host in ("", "::"):
            is_dual_stack = socket.has_dualstack_ipv6()
            family, host = (socket.AF_INET6, "::") if is_dual_stack else (socket.AF_INET, "0.0.0.0")
            listener = socket.create_server(
                (host, address.port), family=family, backlog=backlog, dualstack_ipv6=is_dual_stack
            )
        else:
            # As in Go's net.Listen, only one address of a host name is used; IPv4 is preferred.
            candidates = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            family, _, _, _, sockaddr = min(candidates, key=lambda info: info[0] != socket.AF_INET)
            listener = socket.create_server(sockaddr, family=family, backlog=backlog)
    except (OSError, UnicodeError) as error:
        reason = _REASONS.get(getattr(error, "errno", None) or 0, str(error))
        message = f"cannot listen on {address.text}: {reason}; choose another with {ADDRESS_FLAG}=HOST:PORT"
        raise ListenError(message, address=address.text) from error
    listener.setblocking(False)
    # Accepted connections inherit the limit: a container is charged for the kernel's send buffers of peers that do not read.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return listener


def url(listener: socket.socket, *, tls: bool, is_destination: bool = True) -> str:
    """Return the URL of a listening socket, without a path.

    With *is_destination*, 127.0.0.1 replaces a wildcard address, to which a client cannot connect.
    """
    host, port = listener.getsockname()[:2]
    if is_destination and ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = "127.0.0.1"
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
