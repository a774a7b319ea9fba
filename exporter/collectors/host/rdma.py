"""RDMA: what InfiniBand and RoCE ports carry, and what goes wrong on their links.

Used in the sidecar. /sys/class/infiniband comes in. No threads. It holds which files the driver refused, so as
not to ask again soon: each refusal of mlx5 writes a line into the kernel's log.

What is in the way, and what is done about it:

- One file in an odd state costs one sample. iWARP says `N/A (no PMA)` where it has no counter, a port that
  Fabric Manager owns answers EINVAL: absent, not a failure. A file that was refused rests for ten minutes, or
  until the state of its port changes.
- The registers of the link (link_downed, symbol_error, port_rcv_errors, port_xmit_wait) are not read of a port
  that is DOWN or is not InfiniBand: they tell nothing there, and asking is what fills the kernel's log.
- port_rcv_data and port_xmit_data count words of four bytes.
- Some counters stop at their largest value instead of starting again: link_downed at 255, symbol_error and
  port_rcv_errors at 65535, port_xmit_wait at 4294967295. A rate of 0 there can be a full counter.

Source: Documentation/ABI/stable/sysfs-class-infiniband; InfiniBand Architecture Specification, PortCounters.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from exporter.collectors.kernel_files import list_directory, parse_count, read_file, source
from exporter.collectors.selection import EVERYTHING, Selection
from exporter.families import Collected, FamilySpec, family

WORD_BYTES = 4
BYTES_PER_GIGABIT = 125_000_000
REFUSED_SECONDS = 600.0
"""How long a file that the driver refused is left alone."""

_PORT = ("device", "port")
_REGISTER = "Absent where the port is down or no InfiniBand."


def _counter(name: str, help_text: str, field: str) -> FamilySpec:
    return family(f"host_rdma_{name}_total", help_text, f"/sys/class/infiniband {field}", *_PORT)


TRAFFIC: dict[FamilySpec, tuple[tuple[str, int], ...]] = {
    _counter(
        "receive_bytes",
        "Bytes received, by RDMA and otherwise.",
        "counters/port_rcv_data * 4, or hw_counters/rx_bytes",
    ): (("counters/port_rcv_data", WORD_BYTES), ("hw_counters/rx_bytes", 1)),
    _counter(
        "transmit_bytes",
        "Bytes transmitted, by RDMA and otherwise.",
        "counters/port_xmit_data * 4, or hw_counters/tx_bytes",
    ): (("counters/port_xmit_data", WORD_BYTES), ("hw_counters/tx_bytes", 1)),
}
"""Where each is found, and by what to multiply it; the second place is that of adapters without PMA (EFA)."""
REGISTERS = {
    _counter(
        "link_downed",
        f"How often the link failed and could not be saved; stops at 255. {_REGISTER}",
        "counters/link_downed",
    ): "link_downed",
    _counter(
        "symbol_errors", f"Symbols damaged on the link; stops at 65535. {_REGISTER}", "counters/symbol_error"
    ): "symbol_error",
    _counter(
        "receive_errors",
        f"Packets damaged on the link; stops at 65535. {_REGISTER}",
        "counters/port_rcv_errors",
    ): "port_rcv_errors",
    _counter(
        "transmit_wait",
        f"Ticks in which data waited because the other side had no room: congestion; stops at 4294967295. {_REGISTER}",
        "counters/port_xmit_wait",
    ): "port_xmit_wait",
}
HARDWARE = family(
    "host_rdma_hw_total",
    "What the adapter counts by itself: packets out of sequence, congestion notifications, retries. Absent where the adapter has no such counter.",
    "/sys/class/infiniband hw_counters",
    *_PORT,
    "counter",
)
STATE = family(
    "host_rdma_port_state",
    "State of the port: 1 down, 2 initialising, 3 armed, 4 active, 5 active but deferred.",
    "/sys/class/infiniband state",
    *_PORT,
)
RATE = family(
    "host_rdma_rate_bytes",
    "Bytes per second that the link was negotiated for. Absent where the port is down.",
    "/sys/class/infiniband rate",
    *_PORT,
)
SPECS = (*TRAFFIC, *REGISTERS, HARDWARE, STATE, RATE)

HW_COUNTERS = ("out_of_sequence", "packet_seq_err", "np_cnp_sent", "rnr_nak_retry_err", "roce_adp_retrans")
"""Those that tell why a collective operation is slow."""

_NO_COUNTER = "lifespan"  # among the hw_counters: how long the driver keeps their values, in milliseconds
_DOWN = 1
_NOT_AVAILABLE = "N/A"

Samples = dict[FamilySpec, dict[tuple[str, ...], float]]


class RdmaCollector:
    """Reads the ports of all RDMA devices.

    Args:
        sys: Where sysfs is mounted.
        device_include: Patterns of the devices to show.
        device_exclude: Patterns of those that must not be touched at all.
        hw_counters: Patterns of the adapters' own counters to show.
        monotonic: Clock of the rest for files that were refused, seconds.
    """

    name = "rdma"
    specs = SPECS

    def __init__(
        self,
        *,
        sys: Path = Path("/sys"),
        device_include: Sequence[str] = EVERYTHING,
        device_exclude: Sequence[str] = (),
        hw_counters: Sequence[str] = HW_COUNTERS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._class = sys / "class/infiniband"
        self._selection = Selection(device_include, device_exclude)
        self._hw_counters = Selection(hw_counters, (_NO_COUNTER,))
        self._monotonic = monotonic
        self._refused: dict[Path, float] = {}  # file → when it may be asked again
        self._states: dict[Path, int] = {}  # port → its state in the last pass

    def collect(self) -> Collected:
        """Read the sources once."""
        collected = Collected()
        samples: Samples = {spec: {} for spec in SPECS}
        ports: list[Path] = []
        for device in list_directory(self._class):
            if device in self._selection:
                with source(collected, self._class / device):
                    directory = self._class / device / "ports"
                    for port in list_directory(directory):
                        ports.append(directory / port)
                        with source(collected, directory / port):
                            self._add_port(collected, samples, directory / port, (device, port))
        self._states = {port: state for port, state in self._states.items() if port in ports}
        self._refused = {
            path: until for path, until in self._refused.items() if not set(path.parents).isdisjoint(ports)
        }
        for spec, values in samples.items():
            collected.add_family(spec, values)
        if not ports:
            collected.unsupported.append(f"{self._class}: no RDMA port, or none that is to be shown")
        return collected

    def _add_port(self, collected: Collected, samples: Samples, port: Path, labels: tuple[str, str]) -> None:
        text = self._read(port / "state")
        if text is None:
            collected.unsupported.append(f"{port}: the driver does not let it be read")
            return
        state = parse_count(text.partition(":")[0], port / "state")  # `4: ACTIVE`
        if self._states.get(port, state) != state:
            self._refused = {path: until for path, until in self._refused.items() if port not in path.parents}
        self._states[port] = state
        samples[STATE][labels] = state
        for spec, places in TRAFFIC.items():
            with source(collected, port):
                found = ((self._counter(port / name), factor) for name, factor in places)
                value = next((count * factor for count, factor in found if count is not None), None)
                if value is not None:
                    samples[spec][labels] = value
        if state != _DOWN:
            with source(collected, port / "rate"):
                rate = self._read(port / "rate")  # `100 Gb/sec (4X EDR)`
                if rate is not None:
                    samples[RATE][labels] = float(rate.split(" Gb/sec")[0]) * BYTES_PER_GIGABIT
            if self._read(port / "link_layer") == "InfiniBand":
                for spec, name in REGISTERS.items():
                    with source(collected, port):
                        self._put(samples[spec], labels, port / "counters" / name)
        with source(collected, port):
            for name in list_directory(port / "hw_counters"):
                if name in self._hw_counters:
                    self._put(samples[HARDWARE], (*labels, name), port / "hw_counters" / name)

    def _put(self, samples: dict[tuple[str, ...], float], labels: tuple[str, ...], path: Path) -> None:
        count = self._counter(path)
        if count is not None:
            samples[labels] = count

    def _counter(self, path: Path) -> int | None:
        text = self._read(path)
        return None if text is None or text.startswith(_NOT_AVAILABLE) else parse_count(text, path)

    def _read(self, path: Path) -> str | None:
        if self._refused.get(path, 0.0) > self._monotonic():
            return None
        text = read_file(path, absent=(errno.EINVAL,))
        if text is None:
            self._refused[path] = self._monotonic() + REFUSED_SECONDS
            return None
        self._refused.pop(path, None)
        return text.strip()
