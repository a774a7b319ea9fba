"""Traffic, link errors and congestion of InfiniBand and RoCE ports.

The mlx5 driver refuses some reads, and writes a line to the kernel log each time. The collector therefore does not read the link
registers of ports that are down or not InfiniBand, and reads a refused file again only after ten minutes. Link registers do not wrap:
they stop at their maximum.
Source: Documentation/ABI/stable/sysfs-class-infiniband; InfiniBand Architecture Specification, PortCounters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from exporter.collectors.kernel_files import (
    EVERYTHING,
    Selection,
    list_directory,
    parse,
    read_optional,
    source,
)
from exporter.collectors.options import CollectorOptions, Patterns
from exporter.config.options import option
from exporter.families import Collected, FamilySpec

WORD_BYTES = 4
"""Unit of the counters port_rcv_data and port_xmit_data."""
RETRY_SECONDS = 600.0
"""Time between two attempts to read a file that is missing or that the driver refuses."""

RECEIVE_BYTES = FamilySpec(
    name="host_rdma_receive_bytes_total",
    type="counter",
    unit="bytes",
    labels=("device", "port"),
    help="Bytes received, RDMA and other traffic.",
    absent="without RDMA devices",
    source="/sys/class/infiniband counters/port_rcv_data * 4, or hw_counters/rx_bytes",
)
TRANSMIT_BYTES = FamilySpec(
    name="host_rdma_transmit_bytes_total",
    type="counter",
    unit="bytes",
    labels=("device", "port"),
    help="Bytes transmitted, RDMA and other traffic.",
    absent="without RDMA devices",
    source="/sys/class/infiniband counters/port_xmit_data * 4, or hw_counters/tx_bytes",
)
LINK_DOWNED = FamilySpec(
    name="host_rdma_link_downed_total",
    type="counter",
    labels=("device", "port"),
    help="Times that the link failed to recover and went down; the register stops at 255.",
    absent="where the port is down or not InfiniBand",
    source="/sys/class/infiniband counters/link_downed",
)
SYMBOL_ERRORS = FamilySpec(
    name="host_rdma_symbol_errors_total",
    type="counter",
    labels=("device", "port"),
    help="Symbol errors of the link; the register stops at 65535.",
    absent="where the port is down or not InfiniBand",
    source="/sys/class/infiniband counters/symbol_error",
)
RECEIVE_ERRORS = FamilySpec(
    name="host_rdma_receive_errors_total",
    type="counter",
    labels=("device", "port"),
    help="Received packets with errors; the register stops at 65535.",
    absent="where the port is down or not InfiniBand",
    source="/sys/class/infiniband counters/port_rcv_errors",
)
TRANSMIT_WAIT_TICKS = FamilySpec(
    name="host_rdma_transmit_wait_ticks_total",
    type="counter",
    labels=("device", "port"),
    help="Ticks of the port's clock in which data waited for buffer space of the receiver (congestion).",
    absent="where the port is down or not InfiniBand",
    source="/sys/class/infiniband counters/port_xmit_wait",
    details=(
        "The length of a tick depends on the device.",
        "The register stops at 4294967295.",
    ),
)
HARDWARE = FamilySpec(
    name="host_rdma_hw_total",
    type="counter",
    labels=("device", "port", "counter"),
    help="Events that the adapter counts, by the name of the kernel's file (counter).",
    absent="where the adapter has no such counter",
    source="/sys/class/infiniband hw_counters",
    details=("Examples are packets out of sequence, congestion notifications and retries.",),
)
PORT_STATE = FamilySpec(
    name="host_rdma_port_state",
    type="gauge",
    labels=("device", "port"),
    help="State of the port: 1 down, 2 initializing, 3 armed, 4 active, 5 active but deferred.",
    absent="without RDMA devices",
    source="/sys/class/infiniband state",
)
SPECS = (
    *(RECEIVE_BYTES, TRANSMIT_BYTES, LINK_DOWNED, SYMBOL_ERRORS, RECEIVE_ERRORS, TRANSMIT_WAIT_TICKS),
    *(HARDWARE, PORT_STATE),
)

HW_COUNTERS = ("out_of_sequence", "packet_seq_err", "np_cnp_sent", "rnr_nak_retry_err", "roce_adp_retrans")
"""Hardware counters that can explain a slow collective operation."""

_STATE_DOWN = 1
"""Number of the state of a port that is down (IB_PORT_DOWN)."""


@dataclass(frozen=True, slots=True)
class RdmaOptions(CollectorOptions):
    """Options of the RDMA collector."""

    device_include: Patterns = option(EVERYTHING, "Patterns of devices to show.")
    device_exclude: Patterns = option((), "Patterns of devices to exclude.")


class RdmaCollector:
    """Collector of the ports of the selected RDMA devices."""

    name = "rdma"
    specs = SPECS

    def __init__(
        self,
        *,
        sys: Path = Path("/sys"),
        device_include: Sequence[str] = EVERYTHING,
        device_exclude: Sequence[str] = (),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._devices_path = sys / "class/infiniband"
        self._selection = Selection(device_include, device_exclude)
        self._monotonic = monotonic
        self._retry_times: dict[Path, float] = {}  # monotonic time of the next attempt, by refused file
        self._word_counters: set[Path] = set()  # counters of 4-byte words that were read at least once

    def collect(self) -> Collected:
        """Read the ports of the selected devices."""
        collected = Collected()
        port_count = 0
        with source(collected, self._devices_path):
            for device in list_directory(self._devices_path):
                if device in self._selection:
                    directory = self._devices_path / device / "ports"
                    for port in list_directory(directory):
                        port_count += 1
                        with source(collected, directory / port):
                            self._add_port(collected, directory / port, device, port)
        if not port_count:
            collected.unsupported.append(f"{self._devices_path}: no RDMA port, or none selected")
        return collected

    def _add_port(self, collected: Collected, path: Path, device: str, port: str) -> None:
        """Read a port. The registers of the link are read only on an InfiniBand port that is not down."""
        text = self._read(path / "state")  # `4: ACTIVE`
        if text is None:
            collected.unsupported.append(f"{path}: the driver refuses to read the state")
            return
        state = parse(path / "state", _parse_state, text)
        counters, hw_counters = path / "counters", path / "hw_counters"
        collected.add(PORT_STATE, state, device, port)
        collected.add(
            RECEIVE_BYTES,
            self._read_bytes(counters / "port_rcv_data", hw_counters / "rx_bytes"),
            device,
            port,
        )
        collected.add(
            TRANSMIT_BYTES,
            self._read_bytes(counters / "port_xmit_data", hw_counters / "tx_bytes"),
            device,
            port,
        )
        if state != _STATE_DOWN and self._read(path / "link_layer") == "InfiniBand":
            collected.add(LINK_DOWNED, self._read_count(counters / "link_downed"), device, port)
            collected.add(SYMBOL_ERRORS, self._read_count(counters / "symbol_error"), device, port)
            collected.add(RECEIVE_ERRORS, self._read_count(counters / "port_rcv_errors"), device, port)
            collected.add(TRANSMIT_WAIT_TICKS, self._read_count(counters / "port_xmit_wait"), device, port)
        for name in HW_COUNTERS:
            collected.add(HARDWARE, self._read_count(hw_counters / name), device, port, name)

    def _read_bytes(self, words_path: Path, bytes_path: Path) -> int | None:
        """Return the number of bytes, from a counter of 4-byte words.

        An adapter without this counter (EFA) has a counter of bytes, at *bytes_path*. Once a counter of words was read, the counter of
        bytes is not used: the counters may have started at different times, and the result must not jump.
        """
        count = self._read_count(words_path)
        if count is not None:
            self._word_counters.add(words_path)
            return count * WORD_BYTES
        return None if words_path in self._word_counters else self._read_count(bytes_path)

    def _read_count(self, path: Path) -> int | None:
        """Return the number in a file, or None if the file is missing or refused, or the adapter has no such counter (N/A)."""
        text = self._read(path)
        return None if text is None or text.startswith("N/A") else parse(path, int, text)

    def _read(self, path: Path) -> str | None:
        """Return the content of a file, or None if the file is missing or was refused less than `RETRY_SECONDS` ago."""
        now = self._monotonic()
        if self._retry_times.get(path, now) > now:
            return None
        text = read_optional(path)
        if text is None:
            self._retry_times[path] = now + RETRY_SECONDS
        return text


def _parse_state(text: str) -> int:
    return int(text.partition(":")[0])
