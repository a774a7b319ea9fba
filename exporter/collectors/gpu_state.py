"""What is known about the GPUs: the NVML child's messages, added up.

Used in the sidecar by the GPU collector, under its lock; no threads here. Messages of one child after another come
in. It holds the latest reading of everything, and the counters, which go on over a child's end and over a GPU's
absence. A child is known by a number that grows.
"""

from __future__ import annotations

import functools
import time as clock_module
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from exporter.collectors import gpu_activity, gpu_health, gpu_links, gpu_mig, gpu_power, gpu_use
from exporter.collectors.family import FamilySpec
from exporter.collectors.gpu_counters import Counter, CounterRule, CounterTotal
from exporter.collectors.gpu_power import ENERGY_READING, ENERGY_RULE, INTEGRAL_READING, INTEGRAL_RULE
from exporter.collectors.gpu_rows import Count, Row
from exporter.collectors.gpu_values import GpuEnergy, GpuProcess

ROWS: tuple[Row, ...] = (
    *gpu_use.ROWS,
    *gpu_power.ROWS,
    *gpu_activity.ROWS,
    *gpu_links.ROWS,
    *gpu_health.ROWS,
    *gpu_mig.ROWS,
)

_OF_CHILD = CounterRule(of_process=True)

GpuTotals = Mapping[str, Mapping[str, CounterTotal]]
"""Counters that can be kept, by the GPU's UUID, then by name."""


def _alternatives() -> dict[FamilySpec, tuple[Count, ...]]:
    """The counters of each family; where there are several, the first that a GPU offers counts."""
    found: dict[FamilySpec, list[Count]] = {}
    for row in ROWS:
        if isinstance(row, Count):
            found.setdefault(row.spec, []).append(row)
    return {spec: tuple(rows) for spec, rows in found.items()}


ALTERNATIVES = _alternatives()
_COUNTS = {row.reading: row for rows in ALTERNATIVES.values() for row in rows}


@dataclass(slots=True)
class GpuState:
    """One GPU.

    Attributes:
        index: NVML's.
        number: The job's.
        uuid: "" while it is not known.
        down: Why it does not answer; "" while it does.
        identity: What it is.
        values: The latest readings.
        counters: By reading, then by its labels.
        chains: Totals of families with several sources, by their labels.
        xid_times: By number, when the last one came.
        fallback_joules: Power integrated over time while there is no energy counter; None while there always was.
    """

    index: int
    number: int
    uuid: str = ""
    down: str = ""
    identity: Mapping[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, dict[str, Counter]] = field(default_factory=dict)
    chains: dict[FamilySpec, dict[str, float]] = field(default_factory=dict)
    xid_times: dict[str, float] = field(default_factory=dict)
    fallback_joules: float | None = None

    @property
    def labels(self) -> tuple[str, str]:
        """The values of `gpu` and `uuid`."""
        return _labels(self.number, self.uuid)

    def counter(self, reading: str, label: str, rule: CounterRule) -> Counter:
        """The counter of a reading, made when it is first asked for."""
        by_label = self.counters.setdefault(reading, {})
        if label not in by_label:
            by_label[label] = Counter(rule)
        return by_label[label]

    def lose(self, reason: str) -> None:
        """Forget what was read, but not what was counted."""
        self.down = reason
        self.values.clear()

    def counts_by(self, row: Count) -> bool:
        """Whether a row is the one that counts, of those of its family that the GPU offers."""
        offered = [each for each in ALTERNATIVES[row.spec] if self.values.get(each.reading) is not None]
        # A register that has wrapped between two looks may have done so more than once.
        sound = [each for each in offered if not self._wraps(each)]
        return row is (sound or offered)[0]

    def _wraps(self, row: Count) -> bool:
        return any("wrap" in counter.resets for counter in self.counters.get(row.reading, {}).values())


class Fleet:
    """All GPUs.

    Args:
        monotonic: The clock on which the children's times are.

    Attributes:
        gpus: By NVML's index.
        machine: Versions and number of devices; empty before a child said.
        states: How many questions are in which state.
        resident_bytes: Memory of the child; None before it said, and while there is none.
        time: Of the last sample, on the children's clock.
        most_seen: Devices that were up at once.
        rests: Whether no energy is counted: another exporter does.
    """

    def __init__(self, *, monotonic: Callable[[], float] = clock_module.monotonic) -> None:
        self._monotonic = monotonic
        self.gpus: dict[int, GpuState] = {}
        self.machine: Mapping[str, Any] = {}
        self.states: Mapping[str, int] = {}
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
        time = float(message["time"])
        self.time = time
        entries = message["gpus"]
        # First of all: where one falls off the bus, those after it move up, each into the place of another.
        changed = self._make_room({entry["index"]: entry["uuid"] for entry in entries})
        for entry in entries:
            changed |= self._take_gpu(entry, time, child)
        self.most_seen = max(self.most_seen, sum(not gpu.down for gpu in self.gpus.values()))
        if "cost" in message:
            self._take_cost(message["cost"], time, child)
        if "own" in message:
            self.resident_bytes = message["own"]["resident_bytes"]
            self._cost(("cpu",), message["own"]["cpu_seconds"], time, child)
        return changed

    def forget_readings(self, reason: str) -> None:
        """Let every GPU be down: there is no child to ask."""
        for gpu in self.gpus.values():
            gpu.lose(reason)
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

    def processes(self) -> tuple[GpuProcess, ...]:
        """The processes that hold GPUs now."""
        return tuple(self._processes())

    def energies(self) -> tuple[GpuEnergy, ...]:
        """The energy of each GPU so far."""
        return tuple(energy_of(gpu, at=self.time) for gpu in self.gpus.values())

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
        self._take_counts(gpu, entry.get("counts") or {}, time, child)
        if "down" in entry:
            gpu.lose(str(entry["down"]))
            return before != gpu.down
        gpu.down = ""
        if "identity" in entry:
            gpu.identity = dict(entry["identity"])
        for reading, value in entry["values"].items():
            if value is None:
                gpu.values.pop(reading, None)
            else:
                gpu.values[reading] = value
        for reading, value in entry["values"].items():
            if value is not None:
                self._count(gpu, reading, value, time, child)
        return bool(before)

    def _take_counts(self, gpu: GpuState, counts: Mapping[str, Any], time: float, child: int) -> None:
        for name, number in (counts.get("events") or {}).items():
            gpu.counter("events", name, gpu_health.EVENTS_RULE).advance(number, time, child)
        for xid, (number, last) in (counts.get("xids") or {}).items():
            gpu.counter("xids", xid, gpu_health.EVENTS_RULE).advance(number, time, child)
            gpu.xid_times[xid] = last

    def _count(self, gpu: GpuState, reading: str, value: Any, time: float, child: int) -> None:
        if reading in {ENERGY_READING, INTEGRAL_READING}:
            counter = gpu.counter(reading, "", ENERGY_RULE if reading == ENERGY_READING else INTEGRAL_RULE)
            before = counter.total
            grown = counter.advance(value, time, child)
            if self.rests:
                counter.total, grown = before, 0.0
            if ENERGY_READING not in gpu.counters:
                gpu.fallback_joules = (gpu.fallback_joules or 0.0) + grown
            return
        row = _COUNTS.get(reading)
        if row is None:
            return
        several = len(ALTERNATIVES[row.spec]) > 1
        for label, raw in value.items() if isinstance(value, dict) else (("", value),):
            counter = gpu.counter(reading, label, row.rule)
            grown = counter.advance(raw, time, child)
            if several and gpu.counts_by(row):
                chain = gpu.chains.setdefault(row.spec, {})
                # The first number of the first source is where the family begins.
                chain[label] = (
                    chain[label] + grown * row.rule.scale
                    if label in chain
                    else counter.total * row.rule.scale
                )

    def _take_cost(self, cost: Mapping[str, Any], time: float, child: int) -> None:
        for call, (number, seconds) in cost["calls"].items():
            self._cost(("calls", call), number, time, child)
            self._cost(("seconds", call), seconds, time, child)
        for key, number in cost["errors"].items():
            call, _, error = key.partition("/")
            self._cost(("errors", call, error), number, time, child)
        self._cost(("fields",), cost["field_seconds"], time, child)
        self.states = dict(cost["states"])

    def _cost(self, key: tuple[str, ...], number: float, time: float, child: int) -> None:
        self._costs.setdefault(key, Counter(_OF_CHILD)).advance(number, time, child)

    def _resume(self, gpu: GpuState) -> None:
        kept = self._kept.pop(gpu.uuid, {})
        now = self._monotonic()
        specs = {spec.name: spec for spec in ALTERNATIVES}
        for key, total in kept.items():
            name, _, label = key.partition("|")
            if key == _FALLBACK:
                gpu.fallback_joules = total.total
            elif name in specs:
                gpu.chains.setdefault(specs[name], {})[label] = total.total
            elif (rule := _rule_of(name)) is not None:
                gpu.counter(name, label, rule).resume(total, now)

    def _processes(self) -> Iterable[GpuProcess]:
        for gpu in self.gpus.values():
            number, uuid = gpu.labels
            for pid, about in (gpu.values.get("processes") or {}).items():
                get = about.get
                yield GpuProcess(
                    int(pid),
                    number,
                    uuid,
                    get("memory"),
                    get("sm"),
                    get("mem"),
                    get("enc"),
                    get("dec"),
                    get("sm_seconds"),
                )


_FALLBACK = "fallback_joules|"


@functools.lru_cache(maxsize=256)
def _labels(number: int, uuid: str) -> tuple[str, str]:
    """Made once: every pass asks for them in every row of every GPU."""
    return str(number), uuid


def energy_of(gpu: GpuState, *, at: float) -> GpuEnergy:
    """The energy of a GPU so far."""
    number, uuid = gpu.labels
    joules = {}
    counter = gpu.counters.get(ENERGY_READING, {}).get("")
    if gpu.fallback_joules is not None:
        joules[gpu_power.INTEGRAL_SOURCE] = gpu.fallback_joules
    if counter is not None:
        joules[gpu_power.COUNTER_SOURCE] = counter.total * ENERGY_RULE.scale
    integral = gpu.counters.get(INTEGRAL_READING, {}).get("")
    return GpuEnergy(
        number,
        uuid,
        not gpu.down,
        gpu_power.INTEGRAL_SOURCE if counter is None else gpu_power.COUNTER_SOURCE,
        joules,
        0.0 if integral is None else integral.total,
        {} if counter is None else dict(counter.resets),
        watts=gpu.values.get("power"),
        at=at,
        name=str(gpu.identity.get("name", "")),
    )


def _rule_of(reading: str) -> CounterRule | None:
    if reading in _COUNTS:
        return _COUNTS[reading].rule
    return {
        ENERGY_READING: ENERGY_RULE,
        INTEGRAL_READING: INTEGRAL_RULE,
        "events": gpu_health.EVENTS_RULE,
        "xids": gpu_health.EVENTS_RULE,
    }.get(reading)
