"""TCP: segments sent again, and the sockets in use by protocol.

Used in the sidecar. /proc/net/snmp, sockstat and sockstat6 come in: a few lines each, however many
connections there are (a list of them would cost 30 ms on a busy machine). They tell about the exporter's own
network namespace. No threads, no state.

Source: RFC 4022 (tcpRetransSegs); net/ipv4/proc.c.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import FILE_REASONS, parse_count, read_file, refuse

RETRANSMITS = FamilySpec(
    "host_tcp_retransmits_total",
    "counter",
    "TCP segments sent again because nobody confirmed them; a loaded network that loses packets.",
    source="/proc/net/snmp Tcp RetransSegs",
)


def _sockets(name: str, help_text: str, source: str, *, unit: str = "") -> FamilySpec:
    return FamilySpec(
        f"host_sockstat_{name}", "gauge", help_text, unit=unit, source=f"/proc/net/sockstat{source}"
    )


SOCKETS = {
    ("sockets", "used"): _sockets("sockets_used", "Sockets of all kinds.", " sockets used"),
    ("TCP", "inuse"): _sockets("tcp_inuse", "TCP sockets that are bound or connected, IPv4.", " TCP inuse"),
    ("TCP", "orphan"): _sockets(
        "tcp_orphan", "TCP sockets that no process has any more, all address families.", " TCP orphan"
    ),
    ("TCP", "tw"): _sockets(
        "tcp_tw", "TCP connections in TIME_WAIT, all address families; many short-lived ones.", " TCP tw"
    ),
    ("TCP", "alloc"): _sockets("tcp_alloc", "TCP sockets in any state, all address families.", " TCP alloc"),
    ("TCP", "mem"): _sockets(
        "tcp_mem_bytes", "Memory of TCP's buffers.", " TCP mem * page size", unit="bytes"
    ),
    ("UDP", "inuse"): _sockets("udp_inuse", "UDP sockets that are bound, IPv4.", " UDP inuse"),
    ("UDP", "mem"): _sockets(
        "udp_mem_bytes", "Memory of UDP's buffers.", " UDP mem * page size", unit="bytes"
    ),
    ("TCP6", "inuse"): _sockets(
        "tcp6_inuse",
        "TCP sockets that are bound or connected, IPv6. Absent on machines without it.",
        "6 TCP6 inuse",
    ),
    ("UDP6", "inuse"): _sockets(
        "udp6_inuse", "UDP sockets that are bound, IPv6. Absent on machines without it.", "6 UDP6 inuse"
    ),
}
SPECS = (RETRANSMITS, *SOCKETS.values())


class TcpCollector:
    """Reads what the network stack counts of itself.

    Args:
        proc: Where procfs is mounted.
        page_size: The unit of the buffers' memory in bytes; None asks the system.
    """

    name = "tcp"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(self, *, proc: Path = Path("/proc"), page_size: int | None = None) -> None:
        self._net = proc / "net"
        self._page_size = page_size or os.sysconf("SC_PAGE_SIZE")

    def collect(self) -> Collected:
        """Read the sources once.

        Raises:
            CollectError: Nothing of them could be read.
        """
        draft = Draft()
        with draft.part():
            self._add_retransmits(draft)
        for name in ("sockstat", "sockstat6"):
            with draft.part():
                self._add_sockets(draft, self._net / name)
        return draft.finish()

    def _add_retransmits(self, draft: Draft) -> None:
        path = self._net / "snmp"
        text = read_file(path)
        if text is None:
            draft.unsupported(f"no {path}")
            return
        # Two lines per protocol: the names of the columns, then their values.
        lines = [line.split() for line in text.splitlines() if line.startswith("Tcp:")]
        if len(lines) != 2:
            refuse("", (path,), "two lines `Tcp:`")
        columns = dict(zip(*lines, strict=False))
        draft.add(RETRANSMITS, parse_count(columns.get("RetransSegs", ""), path, "RetransSegs"))

    def _add_sockets(self, draft: Draft, path: Path) -> None:
        text = read_file(path)
        if text is None:
            draft.unsupported(f"no {path}")
            return
        values = _pairs(text)
        for (protocol, name), spec in SOCKETS.items():
            # A protocol without this column (mem in a namespace of old kernels) is left out, not a failure.
            if (protocol, name) in values:
                with draft.part():
                    count = parse_count(values[protocol, name], path, protocol, name)
                    draft.add(spec, count * self._page_size if spec.unit == "bytes" else count)


def _pairs(text: str) -> Mapping[tuple[str, str], str]:
    """Split lines like `TCP: inuse 22 orphan 0`."""
    found = {}
    for line in text.splitlines():
        protocol, _, rest = line.partition(":")
        words = rest.split()
        found.update({(protocol, name): value for name, value in zip(words[::2], words[1::2], strict=False)})
    return found
