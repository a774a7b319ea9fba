"""Network: what the interfaces carry and lose, their links, and the TCP sockets in use.

Used in the sidecar. psutil reads /proc/net/dev and asks the kernel about the links; /proc/net/snmp and sockstat come
in: a few lines each, however many connections there are. All of it is that of the exporter's own network namespace. No
threads, no state.

A bond or a VLAN counts the same bytes once more than the interfaces below it do: sum over one level only.

Source: Documentation/networking/statistics.rst; RFC 4022 (tcpRetransSegs).
"""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from exporter.collectors.kernel_files import parse_count, procfs, read_existing, source
from exporter.collectors.selection import EVERYTHING, Selection
from exporter.families import Collected, FamilySpec, family

BYTES_PER_MEGABIT = 125_000


def _counter(name: str, help_text: str) -> FamilySpec:
    return family(f"host_network_{name}_total", help_text, "/proc/net/dev", "device")


COUNTERS = {
    _counter("receive_bytes", "Bytes received."): "bytes_recv",
    _counter(
        "receive_errors",
        "Packets that were not received because something was wrong with them or with the link.",
    ): "errin",
    _counter(
        "receive_dropped", "Packets that were not received because somebody had no room for them."
    ): "dropin",
    _counter("transmit_bytes", "Bytes transmitted."): "bytes_sent",
    _counter(
        "transmit_errors",
        "Packets that were not transmitted because something was wrong with them or with the link.",
    ): "errout",
    _counter(
        "transmit_dropped", "Packets that were not transmitted because somebody had no room for them."
    ): "dropout",
}
"""Family and psutil's name of it."""
UP = family(
    "host_network_up",
    "Whether the interface is switched on and has a link (1) or not (0).",
    "SIOCGIFFLAGS IFF_UP, IFF_RUNNING",
    "device",
)
SPEED = family(
    "host_network_speed_bytes",
    "Bytes per second that the link was negotiated for. Absent where the interface does not know (virtual ones, links that are down).",
    "SIOCETHTOOL speed * 125000",
    "device",
)
RETRANSMITS = family(
    "host_tcp_retransmits_total",
    "TCP segments sent again because nobody confirmed them; a loaded network that loses packets.",
    "/proc/net/snmp Tcp RetransSegs",
)
TCP_INUSE = family(
    "host_sockstat_tcp_inuse",
    "TCP sockets that are bound or connected, IPv4.",
    "/proc/net/sockstat TCP inuse",
)
TCP_TIME_WAIT = family(
    "host_sockstat_tcp_tw",
    "TCP connections in TIME_WAIT, all address families; many short-lived ones.",
    "/proc/net/sockstat TCP tw",
)
SPECS = (*COUNTERS, UP, SPEED, RETRANSMITS, TCP_INUSE, TCP_TIME_WAIT)

DEVICE_EXCLUDE = (
    "lo",
    "br-*",
    "cali*",
    "cilium*",
    "cni*",
    "docker*",
    "dummy*",
    "flannel*",
    "ifb*",
    "kube-*",
    "lxc*",
    "nodelocaldns",
    "sit[0-9]*",
    "tap*",
    "tunl[0-9]*",
    "veth*",
    "virbr*",
    "vnet*",
    "vxlan*",
)
"""Interfaces that lead to containers and virtual machines of the same host."""


class NetworkCollector:
    """Reads the counters and the state of the interfaces, and TCP's.

    Args:
        device_include: Patterns of the interfaces to show.
        device_exclude: Patterns of those to leave out.
    """

    name = "network"
    specs = SPECS

    def __init__(
        self,
        *,
        device_include: Sequence[str] = EVERYTHING,
        device_exclude: Sequence[str] = DEVICE_EXCLUDE,
    ) -> None:
        self._net = procfs() / "net"
        self._selection = Selection(device_include, device_exclude)

    def collect(self) -> Collected:
        """Read the sources once."""
        collected = Collected()
        with source(collected, self._net / "dev"):
            self._add_interfaces(collected)
        with source(collected, self._net / "snmp"):
            # Two lines per protocol: the names of the columns, then their values.
            text = read_existing(self._net / "snmp")
            names, values = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
            columns = dict(zip(names, values, strict=True))
            collected.add(RETRANSMITS, parse_count(columns["RetransSegs"], self._net / "snmp"))
        with source(collected, self._net / "sockstat"):
            text = read_existing(self._net / "sockstat")
            words = next(line for line in text.splitlines() if line.startswith("TCP:")).split()[1:]
            columns = dict(zip(words[::2], words[1::2], strict=True))
            collected.add(TCP_INUSE, parse_count(columns["inuse"], self._net / "sockstat"))
            collected.add(TCP_TIME_WAIT, parse_count(columns["tw"], self._net / "sockstat"))
        return collected

    def _add_interfaces(self, collected: Collected) -> None:
        # nowrap would keep what a removed interface has counted for the next one of its name.
        counters = psutil.net_io_counters(pernic=True, nowrap=False)
        shown = {device: found for device, found in counters.items() if device in self._selection}
        for spec, field in COUNTERS.items():
            collected.add_family(spec, {(device,): getattr(found, field) for device, found in shown.items()})
        links = {device: link for device, link in psutil.net_if_stats().items() if device in shown}
        collected.add_family(UP, {(device,): float(link.isup) for device, link in links.items()})
        speeds: dict[tuple[str, ...], float] = {
            (device,): float(link.speed * BYTES_PER_MEGABIT) for device, link in links.items() if link.speed
        }
        collected.add_family(SPEED, speeds)
        if not shown:
            collected.unsupported.append(f"{self._net / 'dev'}: no interface, or none that is to be shown")
