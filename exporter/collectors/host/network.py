"""Network: what the interfaces carry and lose, their links, and TCP's retransmissions.

A bond or a VLAN counts the same bytes once more than the interfaces below it do: sum over one level only.
Source: Documentation/networking/statistics.rst; RFC 4022 (tcpRetransSegs).
"""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from exporter.collectors.kernel_files import EVERYTHING, Selection, procfs, read_file, source
from exporter.families import Collected, rows, table

COUNTERS = rows("""
host_network_receive_bytes_total{device} [bytes_recv]: Bytes received. <- /proc/net/dev
host_network_receive_errors_total{device} [errin]: Packets that were not received because something was
    wrong with them or with the link. <- /proc/net/dev
host_network_receive_dropped_total{device} [dropin]: Packets that were not received because somebody had no
    room for them. <- /proc/net/dev
host_network_transmit_bytes_total{device} [bytes_sent]: Bytes transmitted. <- /proc/net/dev
host_network_transmit_errors_total{device} [errout]: Packets that were not transmitted because something was
    wrong with them or with the link. <- /proc/net/dev
host_network_transmit_dropped_total{device} [dropout]: Packets that were not transmitted because somebody
    had no room for them. <- /proc/net/dev
""")
"""Family, and psutil's name of it."""
(UP, RETRANSMITS) = OTHERS = table("""
host_network_up{device}: Whether the interface is switched on and has a link (1) or not (0). <- SIOCGIFFLAGS
    IFF_UP, IFF_RUNNING
host_tcp_retransmits_total: TCP segments sent again because nobody confirmed them; a loaded network that
    loses packets. <- /proc/net/snmp Tcp RetransSegs
""")
SPECS = (*COUNTERS, *OTHERS)

DEVICE_EXCLUDE = (
    # Interfaces that lead to containers and virtual machines of the same host.
    *("br-*", "cali*", "cilium*", "cni*", "docker*", "flannel*", "kube-*", "lxc*", "nodelocaldns", "veth*"),
    *("tap*", "virbr*", "vnet*"),
    # Those that lead nowhere, and tunnels, whose packets count once more below.
    *("lo", "dummy*", "ifb*", "sit[0-9]*", "tunl[0-9]*", "vxlan*"),
)


class NetworkCollector:
    """Reads the counters and the state of the interfaces, and TCP's."""

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
            links = psutil.net_if_stats()
            # nowrap would keep what a removed interface has counted for the next one of its name.
            for device, counters in psutil.net_io_counters(pernic=True, nowrap=False).items():
                if device in self._selection:
                    for spec, field in COUNTERS.items():
                        collected.add(spec, getattr(counters, field), device)
                    collected.add(UP, int(links[device].isup) if device in links else None, device)
            if not collected:
                collected.unsupported.append(
                    f"{self._net / 'dev'}: no interface, or none that is to be shown"
                )
        with source(collected, self._net / "snmp"):
            # Two lines per protocol: the names of the columns, then their values.
            lines = read_file(self._net / "snmp").splitlines()
            names, values = (line.split() for line in lines if line.startswith("Tcp:"))
            collected.add(RETRANSMITS, int(dict(zip(names, values, strict=True))["RetransSegs"]))
        return collected
