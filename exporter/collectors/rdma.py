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
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import (
    FILE_REASONS,
    NOT_OFFERED,
    failure,
    parse_count,
    read_file,
    refuse,
)
from exporter.collectors.selection import EVERYTHING, Selection

WORD_BYTES = 4
BYTES_PER_GIGABIT = 125_000_000
REFUSED_SECONDS = 600.0
"""How long a file that the driver refused is left alone."""

_PORT = ("device", "port")


def _counter(name: str, help_text: str, source: str, *, unit: str = "") -> FamilySpec:
    return FamilySpec(
        f"host_rdma_{name}_total", "counter", help_text, _PORT, unit, f"/sys/class/infiniband {source}"
    )


_REGISTER = "Absent where the port is down or no InfiniBand."
RECEIVED_BYTES = _counter(
    "receive_bytes",
    "Bytes received, by RDMA and otherwise.",
    "counters/port_rcv_data * 4, or hw_counters/rx_bytes",
    unit="bytes",
)
TRANSMITTED_BYTES = _counter(
    "transmit_bytes",
    "Bytes transmitted, by RDMA and otherwise.",
    "counters/port_xmit_data * 4, or hw_counters/tx_bytes",
    unit="bytes",
)
RECEIVED_PACKETS = _counter(
    "receive_packets", "Packets received.", "counters/port_rcv_packets, or hw_counters/rx_pkts"
)
TRANSMITTED_PACKETS = _counter(
    "transmit_packets", "Packets transmitted.", "counters/port_xmit_packets, or hw_counters/tx_pkts"
)
LINK_DOWNED = _counter(
    "link_downed",
    f"How often the link failed and could not be saved; stops at 255. {_REGISTER}",
    "counters/link_downed",
)
SYMBOL_ERRORS = _counter(
    "symbol_errors", f"Symbols damaged on the link; stops at 65535. {_REGISTER}", "counters/symbol_error"
)
RECEIVE_ERRORS = _counter(
    "receive_errors", f"Packets damaged on the link; stops at 65535. {_REGISTER}", "counters/port_rcv_errors"
)
TRANSMIT_WAIT = _counter(
    "transmit_wait",
    f"Ticks in which data waited because the other side had no room: congestion; stops at 4294967295. {_REGISTER}",
    "counters/port_xmit_wait",
)
HARDWARE = FamilySpec(
    "host_rdma_hw_total",
    "counter",
    "What the adapter counts by itself: packets out of sequence, congestion notifications, retries. Absent where the adapter has no such counter.",
    (*_PORT, "counter"),
    source="/sys/class/infiniband hw_counters",
)
STATE = FamilySpec(
    "host_rdma_port_state",
    "gauge",
    "State of the port: 1 down, 2 initialising, 3 armed, 4 active, 5 active but deferred.",
    _PORT,
    source="/sys/class/infiniband state",
)
RATE = FamilySpec(
    "host_rdma_rate_bytes",
    "gauge",
    "Bytes per second that the link was negotiated for. Absent where the port is down.",
    _PORT,
    unit="bytes",
    source="/sys/class/infiniband rate",
)
SPECS = (
    RECEIVED_BYTES,
    TRANSMITTED_BYTES,
    RECEIVED_PACKETS,
    TRANSMITTED_PACKETS,
    LINK_DOWNED,
    SYMBOL_ERRORS,
    RECEIVE_ERRORS,
    TRANSMIT_WAIT,
    HARDWARE,
    STATE,
    RATE,
)

TRAFFIC: dict[FamilySpec, tuple[tuple[str, int], ...]] = {
    RECEIVED_BYTES: (("counters/port_rcv_data", WORD_BYTES), ("hw_counters/rx_bytes", 1)),
    TRANSMITTED_BYTES: (("counters/port_xmit_data", WORD_BYTES), ("hw_counters/tx_bytes", 1)),
    RECEIVED_PACKETS: (("counters/port_rcv_packets", 1), ("hw_counters/rx_pkts", 1)),
    TRANSMITTED_PACKETS: (("counters/port_xmit_packets", 1), ("hw_counters/tx_pkts", 1)),
}
"""Where each is found, and by what to multiply it; the second place is that of adapters without PMA (EFA)."""

REGISTERS = {
    LINK_DOWNED: "counters/link_downed",
    SYMBOL_ERRORS: "counters/symbol_error",
    RECEIVE_ERRORS: "counters/port_rcv_errors",
    TRANSMIT_WAIT: "counters/port_xmit_wait",
}

HW_COUNTERS = ("out_of_sequence", "packet_seq_err", "np_cnp_sent", "rnr_nak_retry_err", "roce_adp_retrans")
"""Those that tell why a collective operation is slow."""

_NO_COUNTER = "lifespan"  # among the hw_counters: how long the driver keeps their values, in milliseconds
_DOWN = 1
_NOT_AVAILABLE = "N/A"
_STATE = re.compile(r"([0-9]): [A-Z_]+", re.ASCII)
_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec\b.*", re.ASCII)


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
    reasons = FILE_REASONS

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
        """Read the sources once.

        Raises:
            CollectError: Nothing of them could be read.
        """
        draft = Draft()
        samples: dict[FamilySpec, dict[tuple[str, ...], float]] = {spec: {} for spec in SPECS}
        ports: list[Path] = []
        for device in _names(self._class):
            if device not in self._selection:
                continue
            with draft.part():
                directory = self._class / device / "ports"
                for port in _names(directory):
                    ports.append(directory / port)
                    self._add_port(draft, samples, directory / port, (device, port))
        self._states = {port: state for port, state in self._states.items() if port in ports}
        self._refused = {
            path: until
            for path, until in self._refused.items()
            if any(port in ports for port in path.parents)
        }
        for spec, values in samples.items():
            draft.add_family(spec, values)
        if not ports:
            draft.unsupported(f"{self._class}: no RDMA port, or none that is to be shown")
        return draft.finish()

    def _add_port(
        self,
        draft: Draft,
        samples: dict[FamilySpec, dict[tuple[str, ...], float]],
        port: Path,
        labels: tuple[str, str],
    ) -> None:
        text = self._read(port / "state")
        if text is None:
            draft.unsupported(f"{port}: the driver does not let it be read")
            return
        found = _STATE.fullmatch(text)
        if found is None:
            refuse(text, (port / "state",), "a state like `4: ACTIVE`")
        state = int(found[1])
        if self._states.get(port, state) != state:
            self._forgive(port)
        self._states[port] = state
        samples[STATE][labels] = state
        for spec, places in TRAFFIC.items():
            for name, factor in places:
                with draft.part():
                    value = self._counter(port / name)
                    if value is not None:
                        samples[spec][labels] = value * factor
                        break
        if state != _DOWN:
            with draft.part():
                rate = self._rate(port / "rate")
                if rate is not None:
                    samples[RATE][labels] = rate
            if self._read(port / "link_layer") == "InfiniBand":
                self._add_registers(draft, samples, port, labels)
        with draft.part():
            for name in _names(port / "hw_counters"):
                if name in self._hw_counters:
                    with draft.part():
                        value = self._counter(port / "hw_counters" / name)
                        if value is not None:
                            samples[HARDWARE][labels[0], labels[1], name] = value

    def _add_registers(
        self,
        draft: Draft,
        samples: dict[FamilySpec, dict[tuple[str, ...], float]],
        port: Path,
        labels: tuple[str, str],
    ) -> None:
        for spec, name in REGISTERS.items():
            with draft.part():
                value = self._counter(port / name)
                if value is not None:
                    samples[spec][labels] = value

    def _counter(self, path: Path) -> int | None:
        text = self._read(path)
        return None if text is None or text.startswith(_NOT_AVAILABLE) else parse_count(text, path)

    def _rate(self, path: Path) -> float | None:
        text = self._read(path)
        if text is None:
            return None
        found = _RATE.fullmatch(text)
        if found is None:
            refuse(text, (path,), "a rate like `100 Gb/sec (4X EDR)`")
        return float(found[1]) * BYTES_PER_GIGABIT

    def _read(self, path: Path) -> str | None:
        if self._refused.get(path, -math.inf) > self._monotonic():
            return None
        text = read_file(path, absent=(errno.EINVAL,))
        if text is None:
            self._refused[path] = self._monotonic() + REFUSED_SECONDS
            return None
        self._refused.pop(path, None)
        return text.strip()

    def _forgive(self, port: Path) -> None:
        self._refused = {path: until for path, until in self._refused.items() if port not in path.parents}


def _names(directory: Path) -> list[str]:
    """List a directory by name; empty when there is none.

    Raises:
        CollectError: It exists and cannot be listed.
    """
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        if error.errno in NOT_OFFERED:
            return []
        raise failure(directory, error) from error
