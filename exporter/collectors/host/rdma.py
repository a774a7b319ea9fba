"""RDMA: what InfiniBand and RoCE ports carry, and what goes wrong on their links.

What was refused, and the link's registers of a port that is DOWN or no InfiniBand, are left alone: each refusal of mlx5
writes a line into the kernel's log. Registers stop at their largest value.
Source: Documentation/ABI/stable/sysfs-class-infiniband; InfiniBand Architecture Specification, PortCounters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from exporter.collectors.kernel_files import EVERYTHING, Selection, list_directory, read_optional, source
from exporter.families import Collected, rows, table

WORD_BYTES = 4
REFUSED_SECONDS = 600.0
"""How long a file that the driver refused is left alone."""

TRAFFIC = rows("""
host_rdma_receive_bytes_total{device,port} [port_rcv_data rx_bytes]: Bytes received, by RDMA and otherwise.
    <- /sys/class/infiniband counters/port_rcv_data * 4, or hw_counters/rx_bytes
host_rdma_transmit_bytes_total{device,port} [port_xmit_data tx_bytes]: Bytes transmitted, by RDMA and
    otherwise. <- /sys/class/infiniband counters/port_xmit_data * 4, or hw_counters/tx_bytes
""")
"""By the words of a counter, and by the bytes of adapters without PMA (EFA)."""
REGISTERS = rows("""
host_rdma_link_downed_total{device,port} [link_downed]: How often the link failed and could not be saved;
    stops at 255. Absent where the port is down or no InfiniBand. <- /sys/class/infiniband
    counters/link_downed
host_rdma_symbol_errors_total{device,port} [symbol_error]: Symbols damaged on the link; stops at 65535.
    Absent where the port is down or no InfiniBand. <- /sys/class/infiniband counters/symbol_error
host_rdma_receive_errors_total{device,port} [port_rcv_errors]: Packets damaged on the link; stops at 65535.
    Absent where the port is down or no InfiniBand. <- /sys/class/infiniband counters/port_rcv_errors
host_rdma_transmit_wait_total{device,port} [port_xmit_wait]: Ticks in which data waited because the other
    side had no room: congestion; stops at 4294967295. Absent where the port is down or no InfiniBand. <-
    /sys/class/infiniband counters/port_xmit_wait
""")
(HARDWARE, STATE) = OTHERS = table("""
host_rdma_hw_total{device,port,counter}: What the adapter counts by itself: packets out of sequence,
    congestion notifications, retries. Absent where the adapter has no such counter. <-
    /sys/class/infiniband hw_counters
host_rdma_port_state{device,port}: State of the port: 1 down, 2 initialising, 3 armed, 4 active, 5 active
    but deferred. <- /sys/class/infiniband state
""")
SPECS = (*TRAFFIC, *REGISTERS, *OTHERS)

HW_COUNTERS = ("out_of_sequence", "packet_seq_err", "np_cnp_sent", "rnr_nak_retry_err", "roce_adp_retrans")
"""Those that tell why a collective operation is slow."""

_DOWN = 1


class RdmaCollector:
    """Reads the ports of all RDMA devices."""

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
        self._class = sys / "class/infiniband"
        self._selection = Selection(device_include, device_exclude)
        self._monotonic = monotonic
        self._refused: dict[Path, float] = {}  # file → when it may be asked again

    def collect(self) -> Collected:
        """Read the sources once."""
        collected = Collected()
        ports = 0
        with source(collected, self._class):
            for device in list_directory(self._class):
                if device in self._selection:
                    directory = self._class / device / "ports"
                    for port in list_directory(directory):
                        ports += 1
                        with source(collected, directory / port):
                            self._add_port(collected, directory / port, device, port)
        if not ports:
            collected.unsupported.append(f"{self._class}: no RDMA port, or none that is to be shown")
        return collected

    def _add_port(self, collected: Collected, path: Path, *labels: str) -> None:
        text = self._read(path / "state")  # `4: ACTIVE`
        if text is None:
            collected.unsupported.append(f"{path}: the driver does not let it be read")
            return
        state = int(text.partition(":")[0])
        collected.add(STATE, state, *labels)
        for spec, names in TRAFFIC.items():
            words, octets = names.split()
            count = self._count(path / "counters" / words)
            if count is not None:
                collected.add(spec, count * WORD_BYTES, *labels)
            else:
                collected.add(spec, self._count(path / "hw_counters" / octets), *labels)
        if state != _DOWN and self._read(path / "link_layer") == "InfiniBand":
            for spec, name in REGISTERS.items():
                collected.add(spec, self._count(path / "counters" / name), *labels)
        for name in HW_COUNTERS:
            collected.add(HARDWARE, self._count(path / "hw_counters" / name), *labels, name)

    def _count(self, path: Path) -> int | None:
        text = self._read(path)
        return None if text is None or text.startswith("N/A") else int(text)

    def _read(self, path: Path) -> str | None:
        now = self._monotonic()
        if self._refused.get(path, now) > now:
            return None
        text = read_optional(path)
        if text is None:
            self._refused[path] = now + REFUSED_SECONDS
        return text
