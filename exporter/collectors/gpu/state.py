"""What is known about the GPUs: the NVML child's messages, added up.

Used in the sidecar: the GPU supervisor's thread brings messages, anything may be asked from any thread. Messages of one
child after another come in; a child is known by a number that grows. It holds the latest reading of everything, and the
counters, which go on over a child's end and over a GPU's absence.
"""

from __future__ import annotations

import threading
import time as clock_module
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from exporter.collectors.gpu.counters import Counter
from exporter.collectors.gpu.families import ENERGY_READING, ENERGY_RULE, INTEGRAL_READING, OF_CHILD, RULES
from exporter.collectors.gpu.kernel_log import KernelXids
from exporter.collectors.job import EnergyReading, GpuProcessUse, Rows

POWER_SAMPLES_SECONDS = 30.0
"""How long samples of power are remembered for whoever divides energy."""

_CLOCK_STEP_SECONDS = 5.0
"""Samples that are so much older than the last ones are those of a clock that was set back."""

PowerSample = tuple[float, float]
"""Unix seconds, by the driver, and the watts that a card drew since the sample before."""

COUNTER_SOURCE, INTEGRAL_SOURCE = "nvml_counter", "nvml_power"


@dataclass(slots=True)
class GpuState:
    """One GPU."""

    index: int  # NVML's
    number: int  # the job's
    uuid: str = ""  # "" while it is not known
    down: str | None = None  # why it does not answer; "" while it does, None while there is nobody to ask
    identity: Mapping[str, str] = field(default_factory=dict)  # what it is
    values: dict[str, Any] = field(default_factory=dict)  # the latest readings
    counters: dict[str, dict[str, Counter]] = field(default_factory=dict)  # by reading, then by its labels
    xid_times: dict[str, float] = field(default_factory=dict)  # by number, when the last one came
    # The energy so far by source: power integrated while there is no energy counter; what the counter said last, and
    # power integrated since. Only one of them grows at a time, so that the sum is right.
    joules: dict[str, float] = field(default_factory=dict)
    power_samples: deque[PowerSample] = field(default_factory=deque)  # the last ones, the oldest first
    _integral_at_counter: float = 0.0

    def labelled(self, *more: str) -> tuple[str, ...]:
        """The values of `gpu` and `uuid`, and of further labels."""
        return str(self.number), self.uuid, *more

    def counter(self, reading: str, label: str = "") -> Counter:
        """The counter of a reading, made when it is first asked for."""
        by_label = self.counters.setdefault(reading, {})
        if label not in by_label:
            by_label[label] = Counter(RULES[reading])
        return by_label[label]

    def lose(self, reason: str | None) -> None:
        """Forget what was read, but not what was counted."""
        self.down = reason
        self.values.clear()

    def take(self, values: dict[str, Any], time: float, child: int, *, rests: bool) -> None:
        """Take the readings of a pass; with `rests` no energy is counted."""
        if values.get(ENERGY_READING) is not None:
            self.counter(ENERGY_READING)  # known before power is integrated, which then stands in for nothing
        self._take_power(values.pop("power_samples", None))
        self.values = {name: value for name, value in {**self.values, **values}.items() if value is not None}
        for reading, value in values.items():
            if value is None:
                continue
            if reading in {ENERGY_READING, INTEGRAL_READING}:
                self._count_energy(reading, value, time, child, rests=rests)
            elif reading in RULES:
                for label, raw in value.items() if isinstance(value, dict) else (("", value),):
                    self.counter(reading, label).advance(raw, time, child)
        if ENERGY_READING in self.counters:
            since = max(0.0, self._integral - self._integral_at_counter)
            # The counter corrects the integral; a total never falls.
            total = self.counter(ENERGY_READING).total * ENERGY_RULE.scale + since
            self.joules[COUNTER_SOURCE] = max(self.joules.get(COUNTER_SOURCE, 0.0), total)

    def energy(self, *, at: float) -> EnergyReading:
        """The energy so far; absent while the GPU does not answer."""
        counted = ENERGY_READING in self.counters
        return EnergyReading(
            component="gpu",
            device=self.uuid,
            source=COUNTER_SOURCE if counted else INTEGRAL_SOURCE,
            measured=True,
            joules=sum(self.joules.values()) if self.down == "" and self.joules else None,
            watts=self.values.get("power_watts"),
            at=at,
            name=self.identity.get("name", ""),
            index=str(self.number),
            # Without a counter the integral is what counts already.
            power_joules=self._integral if counted else None,
            resets=dict(self.counter(ENERGY_READING).resets) if counted else {},
        )

    def rows(self, now: float, wall: float) -> Rows:
        """The counters, to be kept over a restart of the sidecar; the times are the children's and Unix time."""
        found: Rows = {}
        for reading, by_label in self.counters.items():
            for label, counter in by_label.items():
                kept = counter.keep()
                if kept is not None:
                    found[self.uuid, f"{reading}|{label}"] = *kept[:2], round(wall - now + kept[2], 3)
        for source, joules in self.joules.items():
            found[self.uuid, f"joules|{source}"] = joules, 0.0, wall
        return found

    def resume(self, kept: Mapping[str, tuple[float, float, float]]) -> None:
        """Go on from counters that were kept."""
        for key, (total, raw, time) in kept.items():
            name, _, label = key.partition("|")
            if name == "joules":
                self.joules[label] = total
            elif name in RULES:
                self.counter(name, label).resume(total, raw, time)
        self._integral_at_counter = self._integral

    def _take_power(self, samples: tuple[int, list[int], list[int]] | None) -> None:
        """Remember samples: a time in microseconds, then steps of time and milliwatts."""
        if samples is None:
            return
        at, steps, milliwatts = samples
        kept, newest = self.power_samples, (at + sum(steps)) / 1e6
        if kept and newest < kept[-1][0] - _CLOCK_STEP_SECONDS:
            kept.clear()
        last = kept[-1][0] if kept else 0.0
        for step, power in zip(steps, milliwatts, strict=True):
            at += step
            if at / 1e6 > last:  # a new child begins with a ring that the one before has read
                kept.append((at / 1e6, power / 1000))
        while kept[0][0] < newest - POWER_SAMPLES_SECONDS:
            kept.popleft()

    def _count_energy(self, reading: str, number: float, time: float, child: int, *, rests: bool) -> None:
        counter = self.counter(reading)
        before = counter.total
        grown = counter.advance(number, time, child)
        if rests:
            counter.total, grown = before, 0.0
        if ENERGY_READING not in self.counters:
            self.joules[INTEGRAL_SOURCE] = self.joules.get(INTEGRAL_SOURCE, 0.0) + grown
        elif reading == ENERGY_READING:
            self._integral_at_counter = self._integral

    @property
    def _integral(self) -> float:
        counter = self.counters.get(INTEGRAL_READING, {}).get("")
        return 0.0 if counter is None else counter.total


class GpuRegistry:
    """All GPUs; `monotonic` is the clock on which the children's times are."""

    def __init__(self, *, monotonic: Callable[[], float] = clock_module.monotonic) -> None:
        self.lock = threading.RLock()  # guards all of it; held by whoever reads more than a method gives
        self.gpus: dict[int, GpuState] = {}  # by NVML's index
        self.machine: Mapping[str, Any] = {}  # what a child found when it started; empty before it said
        # Memory of the child; None before it said, and while there is none.
        self.resident_bytes: float | None = None
        self.most_seen = 0  # devices that were up at once
        self.rests = False  # whether no energy is counted: another exporter does
        self.time = 0.0  # of the last sample, on the children's clock
        self._monotonic = monotonic
        self._costs: dict[tuple[str, ...], Counter] = {}
        self._kept: dict[str, dict[str, tuple[float, float, float]]] = {}
        self._gone: dict[str, GpuState] = {}

    def take_sample(self, message: Mapping[str, Any], child: int) -> bool:
        """Take a pass of a child; tells whether a GPU was lost or has returned.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: The message is not one of a child's.
        """
        with self.lock:
            self.time = time = float(message["time"])
            entries = message["gpus"]
            # First of all: where one falls off the bus, those after it move up, each into the place of another.
            changed = self._make_room({entry["index"]: entry["uuid"] for entry in entries})
            for entry in entries:
                changed |= self._take_gpu(entry, time, child)
            self.most_seen = max(self.most_seen, sum(gpu.down == "" for gpu in self.gpus.values()))
            costs: dict[tuple[str, ...], float] = {}
            if "cost" in message:
                for call, (number, seconds) in message["cost"]["calls"].items():
                    costs |= {("calls", call): number, ("seconds", call): seconds}
                for key, number in message["cost"]["errors"].items():
                    call, error = key.split("/", 1)
                    costs["errors", call, error] = number
            if "own" in message:
                self.resident_bytes = message["own"]["resident_bytes"]
                costs["cpu",] = message["own"]["cpu_seconds"]
            for which, number in costs.items():
                self._costs.setdefault(which, Counter(OF_CHILD)).advance(number, time, child)
            return changed

    def take_kernel_xids(self, logged: KernelXids) -> None:
        """Take what the kernel's log says, which has counted since this sidecar began."""
        for gpu in self.gpus.values():
            for xid, (number, last) in logged.get(gpu.identity.get("pci_bus_id", ""), {}).items():
                gpu.counter("kernel_xids", xid).advance(number, self.time, 0)
                gpu.xid_times[xid] = max(last, gpu.xid_times.get(xid, 0.0))

    def forget_readings(self, *, hanging: int | None = None) -> None:
        """Know nothing of any GPU: there is no child to ask. One that a call does not return from is down."""
        with self.lock:
            for gpu in self.gpus.values():
                gpu.lose("hung" if gpu.index == hanging else gpu.down or None)
            self.resident_bytes = None

    def costs(self, kind: str) -> dict[tuple[str, ...], float]:
        """Counters of the children's own cost, by their labels."""
        return {key[1:]: self._costs[key].total for key in sorted(self._costs) if key[0] == kind}

    def resets(self) -> Mapping[str, int]:
        """How often counters did not go on where they were, over all GPUs."""
        found: Tally[str] = Tally()
        for gpu in (*self.gpus.values(), *self._gone.values()):
            for by_label in gpu.counters.values():
                for counter in by_label.values():
                    found.update(counter.resets)
        return found

    def processes(self) -> tuple[GpuProcessUse, ...]:
        """The processes that hold GPUs, as of the child's last look, and what each uses; pids are the host's."""
        with self.lock:
            return tuple(
                GpuProcessUse(
                    pid=int(pid),
                    gpu=str(gpu.number),
                    uuid=gpu.uuid,
                    memory_bytes=about["memory"],
                    ratios={"sm": about["sm"]} if "sm" in about else {},
                )
                for gpu in self.gpus.values()
                for pid, about in (gpu.values.get("process_use") or {}).items()
            )

    def energies(self) -> tuple[EnergyReading, ...]:
        """The energy of each GPU so far."""
        with self.lock:
            return tuple(gpu.energy(at=self.time) for gpu in self.gpus.values() if gpu.uuid)

    def power_samples(self, after: Mapping[str, float]) -> dict[str, list[PowerSample]]:
        """What each GPU drew lately, by UUID: pairs of a time and watts, the oldest first, later than those of `after`.

        There is one every 20 ms where the driver keeps samples, else one every 2 s; the last 30 s are remembered. Where
        `after` is in the future (the clock was set back), all are given.
        """
        found = {}
        with self.lock:
            for gpu in self.gpus.values():
                since = after.get(gpu.uuid, 0.0)
                if gpu.power_samples and since > gpu.power_samples[-1][0] + _CLOCK_STEP_SECONDS:
                    since = 0.0
                found[gpu.uuid] = [sample for sample in gpu.power_samples if sample[0] > since]
        return {uuid: samples for uuid, samples in found.items() if samples}

    def rows(self, wall: float) -> Rows:
        """The counters, to be kept over a restart of the sidecar; `wall` is Unix time.

        By the GPU's UUID and the counter: the total, the last raw number, and when that was read, Unix time.
        """
        with self.lock:
            now, gpus = self._monotonic(), (*self._gone.values(), *self.gpus.values())
            return {name: row for gpu in gpus if gpu.uuid for name, row in gpu.rows(now, wall).items()}

    def restore(self, rows: Rows, wall: float) -> None:
        """Go on from counters that were kept, in place of what was counted meanwhile."""
        with self.lock:
            now = self._monotonic()
            for (uuid, name), (total, raw, at) in rows.items():
                if total is not None and raw is not None and at is not None:
                    self._kept.setdefault(uuid, {})[name] = total, raw, min(now, now + at - wall)
            for gpu in (*self._gone.values(), *self.gpus.values()):
                gpu.counters.clear()
                gpu.joules.clear()
                gpu.resume(self._kept.pop(gpu.uuid, {}))

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
            gpu.resume(self._kept.pop(uuid, {}))
        gpu.number = int(entry["number"])
        before = gpu.down
        for xid, (number, last) in entry.get("xids", {}).items():
            gpu.counter("xids", xid).advance(number, time, child)
            gpu.xid_times[xid] = max(last, gpu.xid_times.get(xid, 0.0))
        if "down" in entry:
            gpu.lose(str(entry["down"]))
            return before != gpu.down
        gpu.down = ""
        if "identity" in entry:
            gpu.identity = dict(entry["identity"])
        gpu.take(dict(entry["values"]), time, child, rests=self.rests)
        return bool(before)
