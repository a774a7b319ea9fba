"""Traffic, losses and links of network interfaces, and TCP retransmissions.

A bond or a VLAN repeats the bytes of the underlying interfaces: sum only over interfaces of one level.
Source: Documentation/networking/statistics.rst; RFC 4022 (tcpRetransSegs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from exporter.collectors.kernel_files import (
    EVERYTHING,
    Selection,
    from_psutil,
    parse_file,
    procfs,
    source,
)
from exporter.collectors.options import CollectorOptions, Patterns
from exporter.config.options import option
from exporter.families import Collected, FamilySpec

RECEIVE_BYTES = FamilySpec(
    name="host_network_receive_bytes_total",
    type="counter",
    unit="bytes",
    labels=("device",),
    help="Bytes received.",
    source="/proc/net/dev",
)
RECEIVE_ERRORS = FamilySpec(
    name="host_network_receive_errors_total",
    type="counter",
    labels=("device",),
    help="Receive errors: packets that the interface rejected, for example after a checksum or link error.",
    source="/proc/net/dev",
)
RECEIVE_DROPPED = FamilySpec(
    name="host_network_receive_dropped_total",
    type="counter",
    labels=("device",),
    help="Received packets that were not processed, for example because a buffer was full or the protocol is unknown.",
    source="/proc/net/dev",
)
TRANSMIT_BYTES = FamilySpec(
    name="host_network_transmit_bytes_total",
    type="counter",
    unit="bytes",
    labels=("device",),
    help="Bytes transmitted.",
    source="/proc/net/dev",
)
TRANSMIT_ERRORS = FamilySpec(
    name="host_network_transmit_errors_total",
    type="counter",
    labels=("device",),
    help="Transmit errors: packets that the interface could not send, for example after a link error.",
    source="/proc/net/dev",
)
TRANSMIT_DROPPED = FamilySpec(
    name="host_network_transmit_dropped_total",
    type="counter",
    labels=("device",),
    help="Packets dropped before transmission, for example because a buffer was full.",
    source="/proc/net/dev",
)
UP = FamilySpec(
    name="host_network_up",
    type="gauge",
    labels=("device",),
    help="1 if the interface is enabled and has a link, else 0.",
    source="SIOCGIFFLAGS IFF_UP, IFF_RUNNING",
)
RETRANSMITS = FamilySpec(
    name="host_tcp_retransmits_total",
    type="counter",
    help="Retransmitted TCP segments; the rate rises on a congested network.",
    source="/proc/net/snmp Tcp RetransSegs",
)
SPECS = (
    *(RECEIVE_BYTES, RECEIVE_ERRORS, RECEIVE_DROPPED, TRANSMIT_BYTES, TRANSMIT_ERRORS, TRANSMIT_DROPPED),
    *(UP, RETRANSMITS),
)

DEVICE_EXCLUDE = (
    # Interfaces of containers and virtual machines on the same host.
    *("br-*", "cali*", "cilium*", "cni*", "docker*", "flannel*", "kube-*", "lxc*", "nodelocaldns", "veth*"),
    *("tap*", "virbr*", "vnet*"),
    # Interfaces without a network, and tunnels, whose packets are also counted by the underlying interface.
    *("lo", "dummy*", "ifb*", "sit[0-9]*", "tunl[0-9]*", "vxlan*"),
)


@dataclass(frozen=True, slots=True)
class NetworkOptions(CollectorOptions):
    """Options of the network collector."""

    device_include: Patterns = option(EVERYTHING, "Patterns of devices to show.")
    device_exclude: Patterns = option(DEVICE_EXCLUDE, "Patterns of devices to exclude.")


class NetworkCollector:
    """Collector of the counters and links of network interfaces, and of TCP."""

    name = "network"
    specs = SPECS

    def __init__(
        self,
        *,
        device_include: Sequence[str] = EVERYTHING,
        device_exclude: Sequence[str] = DEVICE_EXCLUDE,
    ) -> None:
        self._directory = procfs() / "net"
        self._selection = Selection(device_include, device_exclude)

    def collect(self) -> Collected:
        """Read the counters of the selected interfaces and of TCP."""
        collected = Collected()
        path = self._directory / "dev"
        with source(collected, path):
            links = psutil.net_if_stats()
            # With nowrap=True, psutil adds the counts of a removed interface to the next interface of the same name.
            interfaces = from_psutil(path, lambda: psutil.net_io_counters(pernic=True, nowrap=False))
            for device, counters in interfaces.items():
                if device in self._selection:
                    collected.add(RECEIVE_BYTES, counters.bytes_recv, device)
                    collected.add(RECEIVE_ERRORS, counters.errin, device)
                    collected.add(RECEIVE_DROPPED, counters.dropin, device)
                    collected.add(TRANSMIT_BYTES, counters.bytes_sent, device)
                    collected.add(TRANSMIT_ERRORS, counters.errout, device)
                    collected.add(TRANSMIT_DROPPED, counters.dropout, device)
                    collected.add(UP, int(links[device].isup) if device in links else None, device)
            if not collected:
                collected.unsupported.append(f"{path}: no interface, or none selected")
        path = self._directory / "snmp"
        with source(collected, path):
            collected.add(RETRANSMITS, parse_file(path, _parse_retransmits))
        return collected


def _parse_retransmits(text: str) -> int:
    """Return the number of retransmitted segments in /proc/net/snmp. Raises ValueError and LookupError."""
    # Two lines per protocol: the names of the columns, then their values.
    names, values = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
    return int(dict(zip(names, values, strict=True))["RetransSegs"])
