"""Network: what the interfaces carry and lose, and what kind of link they have.

Used in the sidecar. /proc/net/dev and sysfs come in: those of the exporter's own network namespace. No
threads. It holds speed and MTU, which cost a lock of the kernel's network configuration to read and hardly
ever change: they are read again after a minute, and when the link went up or down.

A bond or a VLAN counts the same bytes once more than the interfaces below it do: sum over one level only.

Source: Documentation/networking/statistics.rst; Documentation/ABI/testing/sysfs-class-net.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import FILE_REASONS, parse_count, parse_signed, read_file, refuse
from exporter.collectors.selection import EVERYTHING, Selection

BYTES_PER_MEGABIT = 125_000
SPEED_UNKNOWN = 2**32 - 1
REFRESH_SECONDS = 60.0

_FIELDS = (
    ("bytes", 0, "Bytes {}."),
    ("packets", 1, "Packets {}."),
    ("errors", 2, "Packets that were not {} because something was wrong with them or with the link."),
    ("dropped", 3, "Packets that were not {} because somebody had no room for them."),
)
_COLUMNS = {"receive": (0, "received"), "transmit": (8, "transmitted")}


def _counter(direction: str, word: str, help_text: str) -> FamilySpec:
    return FamilySpec(
        f"host_network_{direction}_{word}_total",
        "counter",
        help_text.format(_COLUMNS[direction][1]),
        ("device",),
        unit="bytes" if word == "bytes" else "",
        source=f"/proc/net/dev {direction} {word}",
    )


COUNTERS = {
    _counter(direction, word, text): first + offset
    for direction, (first, _) in _COLUMNS.items()
    for word, offset, text in _FIELDS
}
UP = FamilySpec(
    "host_network_up",
    "gauge",
    "Whether the interface can carry packets (1) or not (0); one that does not tell its state counts by its carrier. Absent where sysfs does not show it.",
    ("device",),
    source="/sys/class/net/*/operstate, carrier",
)
SPEED = FamilySpec(
    "host_network_speed_bytes",
    "gauge",
    "Bytes per second that the link was negotiated for. Absent where the interface does not know (virtual ones, links that are down).",
    ("device",),
    unit="bytes",
    source="/sys/class/net/*/speed * 125000",
)
MTU = FamilySpec(
    "host_network_mtu_bytes",
    "gauge",
    "Largest packet that the interface takes. Absent where sysfs does not show it.",
    ("device",),
    unit="bytes",
    source="/sys/class/net/*/mtu",
)
SPECS = (*COUNTERS, UP, SPEED, MTU)

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

_STATES = frozenset(("unknown", "notpresent", "down", "lowerlayerdown", "testing", "dormant", "up"))
_NO_LINK = (errno.EINVAL,)
"""How an interface that is down, or has no such thing as a speed, answers."""


@dataclass(frozen=True, slots=True)
class _Link:
    """What is kept of an interface.

    Attributes:
        up: Whether it could carry packets then.
        read_at: When, monotonic seconds; minus infinity when something of it was missing for a fault.
        values: Speed and MTU, as far as it has them.
    """

    up: int | None
    read_at: float
    values: Mapping[FamilySpec, float]


class NetworkCollector:
    """Reads the counters and the state of the interfaces.

    Args:
        proc: Where procfs is mounted.
        sys: Where sysfs is mounted.
        device_include: Patterns of the interfaces to show.
        device_exclude: Patterns of those to leave out.
        monotonic: Clock for what is not read every time, seconds.
    """

    name = "network"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        device_include: Sequence[str] = EVERYTHING,
        device_exclude: Sequence[str] = DEVICE_EXCLUDE,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = proc / "net/dev"
        self._class = sys / "class/net"
        self._selection = Selection(device_include, device_exclude)
        self._monotonic = monotonic
        self._links: dict[str, _Link] = {}

    def collect(self) -> Collected:
        """Read the sources once.

        Raises:
            CollectError: Nothing of them could be read.
        """
        draft = Draft()
        text = read_file(self._path)
        if text is None:
            draft.unsupported(f"no {self._path}")
            return draft.finish()
        samples: dict[FamilySpec, dict[tuple[str, ...], float]] = {spec: {} for spec in SPECS}
        links: dict[str, _Link] = {}
        # Two lines of headings; a name may hold other ends of lines, of those Python knows.
        for line in filter(None, text.split("\n")[2:]):
            # Old kernels print no blank behind the colon; no interface has a colon in its name.
            device, _, rest = line.partition(":")
            device = device.strip()
            if device not in self._selection:
                continue
            with draft.part():
                words = rest.split()
                if len(words) < 16:
                    refuse(line, (self._path,), "an interface and sixteen numbers")
                counts = {
                    spec: parse_count(words[column], self._path, device) for spec, column in COUNTERS.items()
                }
                for spec, count in counts.items():
                    samples[spec][device,] = count
            links[device] = self._link(draft, device)
        for device, link in links.items():
            if link.up is not None:
                samples[UP][device,] = link.up
            for spec, value in link.values.items():
                samples[spec][device,] = value
        self._links = links
        for spec, values in samples.items():
            draft.add_family(spec, values)
        if not links:
            draft.unsupported(f"{self._path}: no interface, or none that is to be shown")
        return draft.finish()

    def _link(self, draft: Draft, device: str) -> _Link:
        directory = self._class / device
        up: int | None = None
        with draft.part():
            up = _is_up(directory)
        now = self._monotonic()
        before = self._links.get(device)
        if before is not None and before.up == up and now < before.read_at + REFRESH_SECONDS:
            return before
        values: dict[FamilySpec, float] = {}
        complete = False
        with draft.part():
            mtu = read_file(directory / "mtu")
            if mtu is not None:
                values[MTU] = parse_count(mtu.strip(), directory / "mtu")
            speed = _speed(directory / "speed")
            if speed is not None:
                values[SPEED] = speed
            complete = True
        return _Link(up, now if complete else -math.inf, values)


def _is_up(directory: Path) -> int | None:
    path = directory / "operstate"
    text = read_file(path)
    if text is None:
        return None
    state = text.strip()
    if state not in _STATES:
        refuse(text, (path,), "the state of an interface")
    if state != "unknown":
        return int(state == "up")
    carrier = read_file(directory / "carrier", absent=_NO_LINK)
    return int(carrier is not None and carrier.strip() == "1")


def _speed(path: Path) -> int | None:
    text = read_file(path, absent=_NO_LINK)
    if text is None:
        return None
    megabits = parse_signed(text.strip(), path)
    # Drivers say -1, the same without its sign, or 0 when they do not know.
    return megabits * BYTES_PER_MEGABIT if 0 < megabits < SPEED_UNKNOWN else None
