"""What is known about the GPUs: the NVML child's messages, added up.

Used in the sidecar by the GPU collector, under its lock; no threads here. Messages of one child after another come
in. It holds the latest reading of everything, and the counters, which go on over a child's end and over a GPU's
absence. A child is known by a number that grows.
"""

from __future__ import annotations

import time as clock_module
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from exporter.collectors.gpu import health_families, use_families
from exporter.collectors.gpu.counters import Counter, CounterTotal
from exporter.collectors.gpu.families import OF_CHILD, Count, Row
from exporter.collectors.gpu.use_families import (
    COUNTER_SOURCE,
    ENERGY_READING,
    ENERGY_RULE,
    INTEGRAL_READING,
    INTEGRAL_SOURCE,
)
from exporter.collectors.job import EnergyReading, GpuProcessUse
from exporter.families import FamilySpec

ROWS: tuple[Row, ...] = (*use_families.ROWS, *health_families.ROWS)

POWER_SAMPLES_SECONDS = 30.0
"""How long samples of power are remembered for whoever divides energy."""

GpuTotals = Mapping[str, Mapping[str, CounterTotal]]
"""Counters that can be kept, by the GPU's UUID, then by name."""

_ENGINES = {"sm": "sm", "mem": "memory", "enc": "encoder", "dec": "decoder"}
_FALLBACK, _SHOWN = "fallback_joules|", "shown_joules|"


def _alternatives() -> dict[FamilySpec, tuple[Count, ...]]:
    found: dict[FamilySpec, list[Count]] = {}
    for row in ROWS:
        if isinstance(row, Count):
            found.setdefault(row.spec, []).append(row)
    return {spec: tuple(rows) for spec, rows in found.items()}


ALTERNATIVES = _alternatives()
"""The counters of each family; where there are several, the first that a GPU offers counts."""

_COUNTS = {row.reading: row for rows in ALTERNATIVES.values() for row in rows}
_RULES = {
    **{reading: row.rule for reading, row in _COUNTS.items()},
    ENERGY_READING: ENERGY_RULE,
    INTEGRAL_READING: OF_CHILD,
    "events": OF_CHILD,
    "xids": OF_CHILD,
}


@dataclass(frozen=True, slots=True)
class PowerSample:
    """The power of a card at an instant, which stands for the time since the sample before.

    Attributes:
        at: Unix seconds, by the driver's clock, which is the machine's.
        watts: Of the card.
    """

    at: float
    watts: float


@dataclass(slots=True)
class GpuState:
    """One GPU.

    Attributes:
        index: NVML's.
        number: The job's.
        uuid: "" while it is not known.
        down: Why it does not answer; "" while it does, None while there is nobody to ask.
        identity: What it is.
        values: The latest readings.
        counters: By reading, then by its labels.
        chains: Totals of families with several sources, by their labels.
        xid_times: By number, when the last one came.
        fallback_joules: Power integrated over time while there is no energy counter; None while there always was.
        shown_joules: The energy so far: what the counter said last, and power integrated since.
        power_samples: The last ones, the oldest first.
    """

    index: int
    number: int
    uuid: str = ""
    down: str | None = None
    identity: Mapping[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, dict[str, Counter]] = field(default_factory=dict)
    chains: dict[FamilySpec, dict[str, float]] = field(default_factory=dict)
    xid_times: dict[str, float] = field(default_factory=dict)
    fallback_joules: float | None = None
    shown_joules: float = 0.0
    power_samples: deque[PowerSample] = field(default_factory=deque)
    _integral_at_counter: float = 0.0

    @property
    def labels(self) -> tuple[str, str]:
        """The values of `gpu` and `uuid`."""
        return str(self.number), self.uuid

    def counter(self, reading: str, label: str = "") -> Counter:
        """The counter of a reading, made when it is first asked for."""
        by_label = self.counters.setdefault(reading, {})
        if label not in by_label:
            by_label[label] = Counter(_RULES[reading])
        return by_label[label]

    def lose(self, reason: str | None) -> None:
        """Forget what was read, but not what was counted."""
        self.down = reason
        self.values.clear()

    def counts_by(self, row: Count) -> bool:
        """Whether a row is the one that counts, of those of its family that the GPU offers."""
        offered = [each for each in ALTERNATIVES[row.spec] if self.values.get(each.reading) is not None]
        # A register that has wrapped between two looks may have done so more than once.
        sound = [each for each in offered if not self._wraps(each)]
        return row is (sound or offered)[0]

    def joules(self) -> dict[str, float]:
        """The energy so far, by source; only one of them grows at a time, so that the sum is right."""
        found = {} if self.fallback_joules is None else {INTEGRAL_SOURCE: self.fallback_joules}
        if ENERGY_READING in self.counters:
            found[COUNTER_SOURCE] = self.shown_joules
        return found

    def energy(self, *, at: float) -> EnergyReading:
        """The energy so far; absent while the GPU does not answer."""
        joules, number = self.joules(), str(self.number)
        counted = ENERGY_READING in self.counters
        return EnergyReading(
            component="gpu",
            device=self.uuid,
            source=COUNTER_SOURCE if counted else INTEGRAL_SOURCE,
            measured=True,
            joules=sum(joules.values()) if self.down == "" and joules else None,
            watts=self.values.get("power"),
            at=at,
            name=self.identity.get("name", ""),
            index=number,
            # Without a counter the integral is what counts already.
            power_joules=self._integral if counted else None,
            resets=dict(self.counter(ENERGY_READING).resets) if counted else {},
        )

    def count_energy(self, reading: str, number: float, time: float, child: int, *, rests: bool) -> None:
        """Take a number of the energy counter, or the integral of power.

        Args:
            reading: Which.
            number: As the child gave it.
            time: When, monotonic seconds.
            child: Which.
            rests: Whether somebody else counts, so that nothing is added.
        """
        counter = self.counter(reading)
        before = counter.total
        grown = counter.advance(number, time, child)
        if rests:
            counter.total, grown = before, 0.0
        if ENERGY_READING not in self.counters:
            self.fallback_joules = (self.fallback_joules or 0.0) + grown
            return
        if reading == ENERGY_READING:
            self._integral_at_counter = self._integral

    def add_up_energy(self) -> None:
        """Bring the total up to date: what the counter said, and power integrated since then."""
        if ENERGY_READING not in self.counters:
            return
        since = max(0.0, self._integral - self._integral_at_counter)
        # The counter corrects the integral; a total never falls.
        total = self.counter(ENERGY_READING).total * ENERGY_RULE.scale + since
        self.shown_joules = max(self.shown_joules, total)

    @property
    def _integral(self) -> float:
        counter = self.counters.get(INTEGRAL_READING, {}).get("")
        return 0.0 if counter is None else counter.total

    def _wraps(self, row: Count) -> bool:
        return any("wrap" in counter.resets for counter in self.counters.get(row.reading, {}).values())


class GpuRegistry:
    """All GPUs.

    Args:
        monotonic: The clock on which the children's times are.

    Attributes:
        gpus: By NVML's index.
        machine: Versions and number of devices; empty before a child said.
        resident_bytes: Memory of the child; None before it said, and while there is none.
        time: Of the last sample, on the children's clock.
        most_seen: Devices that were up at once.
        rests: Whether no energy is counted: another exporter does.
    """

    def __init__(self, *, monotonic: Callable[[], float] = clock_module.monotonic) -> None:
        self._monotonic = monotonic
        self.gpus: dict[int, GpuState] = {}
        self.machine: Mapping[str, Any] = {}
        self.resident_bytes: float | None = None
        self.most_seen = 0
        self.rests = False
        self.time = 0.0
        self._costs: dict[tuple[str, ...], Counter] = {}
        self._kept: dict[str, dict[str, CounterTotal]] = {}
        self._gone: dict[str, GpuState] = {}

    def take_machine(self, message: Mapping[str, Any]) -> None:
        """Note what a child found when it started."""
        self.machine = dict(message)

    def take_sample(self, message: Mapping[str, Any], child: int) -> bool:
        """Take a pass of a child.

        Returns:
            Whether a GPU was lost or has returned.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: The message is not one of a child's.
        """
        self.time = time = float(message["time"])
        entries = message["gpus"]
        # First of all: where one falls off the bus, those after it move up, each into the place of another.
        changed = self._make_room({entry["index"]: entry["uuid"] for entry in entries})
        for entry in entries:
            changed |= self._take_gpu(entry, time, child)
        self.most_seen = max(self.most_seen, sum(gpu.down == "" for gpu in self.gpus.values()))
        if "cost" in message:
            for call, (number, seconds) in message["cost"]["calls"].items():
                self._cost(("calls", call), number, time, child)
                self._cost(("seconds", call), seconds, time, child)
            for key, number in message["cost"]["errors"].items():
                self._cost(("errors", *key.split("/", 1)), number, time, child)
        if "own" in message:
            self.resident_bytes = message["own"]["resident_bytes"]
            self._cost(("cpu",), message["own"]["cpu_seconds"], time, child)
        return changed

    def forget_readings(self, *, hanging: int | None = None) -> None:
        """Know nothing of any GPU: there is no child to ask.

        Args:
            hanging: The GPU that a call does not return from; it alone is down.
        """
        for gpu in self.gpus.values():
            gpu.lose("hung" if gpu.index == hanging else gpu.down or None)
        self.resident_bytes = None

    def cost(self, *key: str) -> float:
        """A counter of the children's own cost."""
        counter = self._costs.get(key)
        return counter.total if counter else 0

    def cost_keys(self, kind: str) -> Iterator[tuple[str, ...]]:
        """The labels of the counters of a kind."""
        return (key[1:] for key in sorted(self._costs) if key[0] == kind)

    def resets(self) -> dict[str, int]:
        """How often counters did not go on where they were, over all GPUs."""
        found: dict[str, int] = {}
        for gpu in (*self.gpus.values(), *self._gone.values()):
            for by_label in gpu.counters.values():
                for counter in by_label.values():
                    for reason, number in counter.resets.items():
                        found[reason] = found.get(reason, 0) + number
        return found

    def processes(self) -> tuple[GpuProcessUse, ...]:
        """The processes that hold GPUs now, and what each uses; pids are the host's."""
        return tuple(
            GpuProcessUse(
                pid=int(pid),
                gpu=str(gpu.number),
                uuid=gpu.uuid,
                memory_bytes=about.get("memory"),
                ratios={name: about[engine] for engine, name in _ENGINES.items() if engine in about},
                sm_seconds=about.get("sm_seconds"),
            )
            for gpu in self.gpus.values()
            for pid, about in (gpu.values.get("processes") or {}).items()
        )

    def energies(self) -> tuple[EnergyReading, ...]:
        """The energy of each GPU so far."""
        return tuple(gpu.energy(at=self.time) for gpu in self.gpus.values() if gpu.uuid)

    def power_samples(self) -> Mapping[str, tuple[PowerSample, ...]]:
        """What each GPU drew in the last half minute, by UUID; without those that have no samples."""
        return {gpu.uuid: tuple(gpu.power_samples) for gpu in self.gpus.values() if gpu.power_samples}

    def totals(self) -> GpuTotals:
        """The counters, to be kept over a restart of the sidecar."""
        now = self._monotonic()
        found: dict[str, dict[str, CounterTotal]] = {}
        for gpu in (*self._gone.values(), *self.gpus.values()):
            if not gpu.uuid:
                continue
            totals = found.setdefault(gpu.uuid, {})
            for reading, by_label in gpu.counters.items():
                for label, counter in by_label.items():
                    kept = counter.keep(now)
                    if kept is not None:
                        totals[f"{reading}|{label}"] = kept
            if gpu.fallback_joules is not None:
                totals[_FALLBACK] = CounterTotal(gpu.fallback_joules, 0, 0)
            if gpu.shown_joules:
                totals[_SHOWN] = CounterTotal(gpu.shown_joules, 0, 0)
            for spec, chain in gpu.chains.items():
                totals.update(
                    (f"{spec.name}|{label}", CounterTotal(total, 0, 0)) for label, total in chain.items()
                )
        return found

    def restore(self, totals: GpuTotals) -> None:
        """Go on from counters that were kept; to be called before the first message."""
        self._kept = {uuid: dict(kept) for uuid, kept in totals.items()}

    def _make_room(self, uuids: Mapping[int, str]) -> bool:
        """Put aside what is no longer where it was; whether there was anything."""
        moved = [
            index
            for index, gpu in self.gpus.items()
            if index not in uuids or (gpu.uuid and uuids[index] not in {"", gpu.uuid})
        ]
        for index in moved:
            gone = self.gpus.pop(index)
            self._gone[gone.uuid] = gone
        return bool(moved)

    def _take_gpu(self, entry: Mapping[str, Any], time: float, child: int) -> bool:
        index, uuid = int(entry["index"]), str(entry["uuid"])
        gpu = self.gpus.get(index)
        if gpu is None:
            # One that was there before, in this place or another.
            gpu = self._gone.pop(uuid) if uuid in self._gone else GpuState(index, index)
            self.gpus[index] = gpu
            gpu.index = index
        if uuid and not gpu.uuid:
            gpu.uuid = uuid
            self._resume(gpu)
        gpu.number = int(entry["number"])
        before = gpu.down
        counts = entry.get("counts") or {}
        for name, number in (counts.get("events") or {}).items():
            gpu.counter("events", name).advance(number, time, child)
        for xid, (number, last) in (counts.get("xids") or {}).items():
            gpu.counter("xids", xid).advance(number, time, child)
            gpu.xid_times[xid] = last
        if "down" in entry:
            gpu.lose(str(entry["down"]))
            return before != gpu.down
        gpu.down = ""
        if "identity" in entry:
            gpu.identity = dict(entry["identity"])
        values = dict(entry["values"])
        if values.get(ENERGY_READING) is not None:
            gpu.counter(ENERGY_READING)  # known before power is integrated, which then stands in for nothing
        self._take_power(gpu, values.pop("power_samples", None))
        for reading, value in values.items():
            if value is None:
                gpu.values.pop(reading, None)
            else:
                gpu.values[reading] = value
        for reading, value in values.items():
            if value is not None:
                self._count(gpu, reading, value, time, child)
        gpu.add_up_energy()
        return bool(before)

    @staticmethod
    def _take_power(gpu: GpuState, samples: tuple[int, list[int], list[int]] | None) -> None:
        """Remember samples: a time in microseconds, then steps of time and milliwatts."""
        if samples is None:
            return
        at, steps, milliwatts = samples
        for step, power in zip(steps, milliwatts, strict=True):
            at += step
            gpu.power_samples.append(PowerSample(at / 1e6, power / 1000))
        while gpu.power_samples and gpu.power_samples[0].at < at / 1e6 - POWER_SAMPLES_SECONDS:
            gpu.power_samples.popleft()

    def _count(self, gpu: GpuState, reading: str, value: Any, time: float, child: int) -> None:
        if reading in {ENERGY_READING, INTEGRAL_READING}:
            gpu.count_energy(reading, value, time, child, rests=self.rests)
            return
        row = _COUNTS.get(reading)
        if row is None:
            return
        several = len(ALTERNATIVES[row.spec]) > 1
        for label, raw in value.items() if isinstance(value, dict) else (("", value),):
            counter = gpu.counter(reading, label)
            grown = counter.advance(raw, time, child)
            if several and gpu.counts_by(row):
                chain = gpu.chains.setdefault(row.spec, {})
                # The first number of the first source is where the family begins.
                chain[label] = (
                    chain[label] + grown * row.rule.scale
                    if label in chain
                    else counter.total * row.rule.scale
                )

    def _cost(self, key: tuple[str, ...], number: float, time: float, child: int) -> None:
        self._costs.setdefault(key, Counter(OF_CHILD)).advance(number, time, child)

    def _resume(self, gpu: GpuState) -> None:
        now = self._monotonic()
        specs = {spec.name: spec for spec in ALTERNATIVES}
        for key, total in self._kept.pop(gpu.uuid, {}).items():
            name, _, label = key.partition("|")
            if key == _FALLBACK:
                gpu.fallback_joules = total.total
            elif key == _SHOWN:
                gpu.shown_joules = total.total
            elif name in specs:
                gpu.chains.setdefault(specs[name], {})[label] = total.total
            elif name in _RULES:
                gpu.counter(name, label).resume(total, now)
