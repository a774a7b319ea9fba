"""Addresses to listen on, as written on the command line, and the sockets bound to them.

Never SO_REUSEPORT: with it a second exporter would silently take half of the scrapes.
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
"""How one is written: `:20909`, `127.0.0.1:0`, `[::1]:9100`, `host:port`."""
_REASONS = {
    errno.EADDRINUSE: "the port is taken (an exporter that runs already?)",
    errno.EADDRNOTAVAIL: "this machine does not have that address",
    errno.EACCES: "ports below 1024 need a privilege",
}


@dataclass(frozen=True, slots=True)
class Address:
    """One address to listen on."""

    text: str  # as written
    host: str  # name or number; "" for all addresses of the machine, IPv4 and IPv6
    port: int  # 0 lets the kernel choose


def parse_address(text: str) -> Address:
    """Read an address; raises ValueError for what is none."""
    host, _, port = text.rpartition(":")
    if re.fullmatch(ADDRESS, text) is None or int(port) > 65535:
        raise ValueError(f"{text!r} is no address to listen on")
    return Address(text, host.strip("[]"), int(port))


def bind(address: Address, backlog: int) -> socket.socket:
    """A listening, non-blocking socket; raises ListenError where it cannot be had."""
    try:
        if address.host in ("", "::"):
            both = socket.has_dualstack_ipv6()
            family, host = (socket.AF_INET6, "::") if both else (socket.AF_INET, "0.0.0.0")
            listener = socket.create_server(
                (host, address.port), family=family, backlog=backlog, dualstack_ipv6=both
            )
        else:
            # A name may have addresses of both kinds; as in Go's net.Listen one of them is used, IPv4 first.
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            family, _, _, _, place = min(found, key=lambda each: each[0] != socket.AF_INET)
            listener = socket.create_server(place, family=family, backlog=backlog)
    except (OSError, UnicodeError) as error:
        reason = _REASONS.get(getattr(error, "errno", None) or 0, str(error))
        message = f"cannot listen on {address.text}: {reason}; choose another with {FLAG}=HOST:PORT"
        raise ListenError(message, address=address.text) from error
    listener.setblocking(False)
    # Inherited by every connection: what the kernel keeps for peers that do not read is ours too in a container.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return listener


def url(listener: socket.socket, *, tls: bool, reachable: bool = True) -> str:
    """Where a socket listens, without a path; `reachable` by a client on this machine, 127.0.0.1 for all addresses."""
    host, port = listener.getsockname()[:2]
    if reachable and ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = "127.0.0.1"
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
