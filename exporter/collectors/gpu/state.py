"""Registry of GPUs: latest readings and counters from the NVML child's messages.

Runs in the sidecar. The supervisor's thread delivers messages; every method may be called from any thread. Messages are
numbered by child, in order. Counters continue after the exit of a child and after the absence of a GPU, but not
over a restart of the sidecar.
"""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from exporter.collectors.gpu.counters import MonotonicCounter
from exporter.collectors.gpu.energy import (
    HISTORY_SECONDS,
    OUTAGE_SECONDS,
    GpuEnergy,
    PowerBlock,
    PowerSample,
)
from exporter.collectors.gpu.families import CHILD_COUNTER, RULES
from exporter.collectors.gpu.kernel_log import KernelXids
from exporter.collectors.job import EnergyReading, GpuListing, GpuProcessUse

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    """Compute instance of a divided GPU; None for an unavailable reading."""

    uuid: str
    gi: int  # GPU instance
    ci: int  # compute instance
    profile: str
    memory_total: int | None = None
    memory_used: int | None = None
    sm: float | None = None  # activity


@dataclass(slots=True)
class GpuState:
    """One GPU."""

    index: int  # NVML's
    number: int  # the job's
    uuid: str = ""  # "" until read
    down: str | None = None  # reason of the failure; "" if the GPU is up, None without a child
    identity: Mapping[str, str] = field(default_factory=dict)
    values: dict[str, dict[Labels, float]] = field(default_factory=dict)  # latest readings by name and labels
    counters: dict[str, dict[Labels, MonotonicCounter]] = field(default_factory=dict)
    energy: GpuEnergy = field(default_factory=GpuEnergy)
    processes: tuple[GpuProcessUse, ...] = ()
    listings: deque[GpuListing] = field(default_factory=deque)  # of the last minute, oldest first
    instances: tuple[MigInstance, ...] = ()
    xids: dict[str, MonotonicCounter] = field(default_factory=dict)  # of NVML's events, by number
    kernel_xids: dict[str, int] = field(default_factory=dict)  # of the kernel log, by number
    xid_times: dict[str, float] = field(default_factory=dict)  # Unix time of the last error, by number

    def labels(self, *more: str) -> Labels:
        """Return the values of `gpu` and `uuid`, and of further labels."""
        return str(self.number), self.uuid, *more

    def lose(self, reason: str | None) -> None:
        """Clear the readings and keep the counters; `reason` is why the GPU does not answer."""
        self.down = reason
        self.values.clear()
        self.processes, self.instances = (), ()

    def take(self, entry: Mapping[str, Any], time: float, child: int, *, paused: bool) -> None:
        """Add the readings of a pass; with `paused` the energy's total stays."""
        for reading, found in entry["replaced"].items():
            self.values.pop(reading, None)
            self._take_reading(reading, found, time, child)
        for reading, found in entry["values"].items():
            self._take_reading(reading, found, time, child)
        power = entry.get("power")
        block = None if power is None else PowerBlock(**power)
        self.energy.take(block, entry.get("energy_millijoules"), time, child, paused=paused)
        if "processes" in entry:
            self.processes = tuple(self._process(each) for each in entry["processes"] or ())
            if entry["processes"] is not None:
                self.listings.append(GpuListing(self.uuid, time, self.processes))
                while self.listings[0].at < time - HISTORY_SECONDS:
                    self.listings.popleft()
        if "instances" in entry:
            self.instances = tuple(MigInstance(**each) for each in entry["instances"])

    def take_xids(self, xids: Mapping[str, Any], time: float, child: int) -> None:
        """Add the Xids that the child has counted: number of each and time of the last one."""
        for xid, (number, last) in xids.items():
            self.xids.setdefault(xid, MonotonicCounter(CHILD_COUNTER)).advance(number, time, child)
            self.xid_times[xid] = max(last, self.xid_times.get(xid, 0.0))

    def value(self, reading: str) -> float | None:
        """Return a reading without labels."""
        return self.values.get(reading, {}).get(())

    def energy_reading(self) -> EnergyReading:
        """Return the total energy."""
        reading = self.energy.reading(
            uuid=self.uuid,
            number=self.number,
            name=self.identity.get("name", ""),
            watts=self.value("power_watts"),
            answers=self.down == "",
        )
        return replace(reading, divided=bool(self.instances))

    def _take_reading(self, reading: str, found: Any, time: float, child: int) -> None:
        values, rule = self.values.setdefault(reading, {}), RULES.get(reading)
        for names, number in found:
            labels = tuple(names)
            if number is None:
                values.pop(labels, None)
                continue
            values[labels] = number
            if rule is not None:
                counters = self.counters.setdefault(reading, {})
                counters.setdefault(labels, MonotonicCounter(rule)).advance(number, time, child)

    def _process(self, entry: Mapping[str, Any]) -> GpuProcessUse:
        return GpuProcessUse(
            pid=int(entry["pid"]),
            gpu=str(self.number),
            uuid=self.uuid,
            memory_bytes=entry["memory"],
            ratios={} if entry["sm"] is None else {"sm": entry["sm"]},
        )


class GpuRegistry:
    """All GPUs of the machine."""

    def __init__(self, *, outage_seconds: float = OUTAGE_SECONDS) -> None:
        self.lock = threading.RLock()  # guards every attribute; held by readers of several of them
        self.gpus: dict[int, GpuState] = {}  # by NVML's index
        self.machine: Mapping[str, Any] = {}  # first message of the child, or empty
        self.resident_bytes: float | None = (
            None  # of the child; None before the first message, and without a child
        )
        self.most_seen = 0  # devices listed at once, lost ones included
        self.energy_paused = False  # True if a different exporter counts the energy
        self.time = 0.0  # monotonic time of the last sample
        self.calls = MonotonicCounter(CHILD_COUNTER)
        self.call_seconds = MonotonicCounter(CHILD_COUNTER)
        self.cpu_seconds = MonotonicCounter(CHILD_COUNTER)
        self.errors: dict[Labels, MonotonicCounter] = {}  # by call and error
        self._outage_seconds = outage_seconds
        self._gone: dict[str, GpuState] = {}  # by UUID
        self._received: set[str] = set()  # readings, since the last `take_changes`
        self._rearranged = True  # a GPU came, went or changed state since then

    def take_sample(self, message: Mapping[str, Any], child: int) -> bool:
        """Add a pass of a child; return whether a GPU was lost or has returned.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: The message is not a child's.
        """
        with self.lock:
            self.time = time = float(message["time"])
            entries = message["gpus"]
            # First: after the loss of a GPU, later GPUs have new indices.
            changed = self._remove_moved({entry["index"]: entry["uuid"] for entry in entries})
            for entry in entries:
                changed |= self._take_gpu(entry, time + entry.get("late", 0.0), child)
            self.most_seen = max(self.most_seen, len(self.gpus))
            cost = message.get("cost")
            if cost is not None:
                self.calls.advance(cost["calls"], time, child)
                self.call_seconds.advance(cost["seconds"], time, child)
                for call, error, number in cost["errors"]:
                    counter = self.errors.setdefault((call, error), MonotonicCounter(CHILD_COUNTER))
                    counter.advance(number, time, child)
            own = message.get("own")
            if own is not None:
                self.resident_bytes = own["resident_bytes"]
                self.cpu_seconds.advance(own["cpu_seconds"], time, child)
            return changed

    def take_changes(self) -> set[str] | None:
        """Return the readings received since the last call; None if a GPU came, went or changed state."""
        with self.lock:
            received = None if self._rearranged else self._received
            self._received, self._rearranged = set(), False
            return received

    def take_kernel_xids(self, logged: KernelXids) -> None:
        """Add the Xids of the kernel log, counted since the sidecar started."""
        for gpu in self.gpus.values():
            for xid, (number, last) in logged.get(gpu.identity.get("pci_bus_id", ""), {}).items():
                gpu.kernel_xids[xid] = number
                gpu.xid_times[xid] = max(last, gpu.xid_times.get(xid, 0.0))

    def clear_readings(self, *, hanging: int | None = None) -> None:
        """Clear the readings of all GPUs, because the child is down; `hanging` is the GPU of a hanging call."""
        with self.lock:
            for gpu in self.gpus.values():
                gpu.lose("hung" if gpu.index == hanging else gpu.down or None)
            self.resident_bytes = None
            self._rearranged = True

    def resets(self) -> Mapping[str, int]:
        """Return the number of corrections of counters by reason, over all GPUs."""
        found: Tally[str] = Tally()
        for gpu in (*self.gpus.values(), *self._gone.values()):
            found.update(gpu.energy.resets)
            for by_label in gpu.counters.values():
                for counter in by_label.values():
                    found.update(counter.resets)
        return found

    def new_energy_gaps(self) -> list[tuple[int, float]]:
        """Return the joules of gaps that were not returned before, by the GPU's number."""
        with self.lock:
            found = [
                (gpu.number, gpu.energy.new_gap_joules)
                for gpu in self.gpus.values()
                if gpu.energy.new_gap_joules
            ]
            for gpu in self.gpus.values():
                gpu.energy.new_gap_joules = 0.0
            return found

    def processes(self) -> tuple[GpuProcessUse, ...]:
        """Return the processes on all GPUs in the child's last pass; pids are in the host's namespace."""
        with self.lock:
            return tuple(process for gpu in self.gpus.values() for process in gpu.processes)

    def listings(self) -> tuple[GpuListing, ...]:
        """Return the lists of processes of the last minute, without GPUs whose driver has no list."""
        with self.lock:
            return tuple(listing for gpu in self.gpus.values() for listing in gpu.listings)

    def uuids(self) -> dict[int, str]:
        """Return the known UUIDs by NVML's index."""
        with self.lock:
            return {gpu.index: gpu.uuid for gpu in self.gpus.values() if gpu.uuid}

    def energies(self) -> tuple[EnergyReading, ...]:
        """Return the total energy of each GPU."""
        with self.lock:
            return tuple(gpu.energy_reading() for gpu in self.gpus.values() if gpu.uuid)

    def power_samples(self, after: Mapping[str, float]) -> dict[str, list[PowerSample]]:
        """Return the last power samples of each GPU by UUID, oldest first, later than the times in `after`.

        With driver samples every 20 ms, otherwise a sample per pass; the last 30 s are kept.
        """
        with self.lock:
            found = {
                gpu.uuid: gpu.energy.samples_after(after.get(gpu.uuid, 0.0)) for gpu in self.gpus.values()
            }
        return {uuid: samples for uuid, samples in found.items() if samples}

    def _remove_moved(self, uuids: Mapping[int, str]) -> bool:
        """Set aside GPUs that are no longer at their index; return True if any."""
        moved = [
            index
            for index, gpu in self.gpus.items()
            if index not in uuids or (gpu.uuid and uuids[index] not in {"", gpu.uuid})
        ]
        for index in moved:
            gone = self.gpus.pop(index)
            self._gone[gone.uuid] = gone
            self._rearranged = True
        return bool(moved)

    def _take_gpu(self, entry: Mapping[str, Any], time: float, child: int) -> bool:
        index, uuid = int(entry["index"]), str(entry["uuid"])
        gpu = self.gpus.get(index)
        if gpu is None:
            new = GpuState(index, index, energy=GpuEnergy(outage_seconds=self._outage_seconds))
            gpu = self.gpus[index] = self._gone.pop(uuid, new)
            gpu.index = index
            self._rearranged = True
        labels, before = gpu.labels(), gpu.down
        gpu.uuid = uuid or gpu.uuid
        gpu.number = int(entry["number"])
        gpu.take_xids(entry.get("xids", {}), time, child)
        if "down" in entry:
            gpu.lose(str(entry["down"]))
        else:
            gpu.down = ""
            if "identity" in entry:
                gpu.identity = dict(entry["identity"])
            gpu.take(entry, time, child, paused=self.energy_paused)
            self._received.update(entry["replaced"], entry["values"])
        self._rearranged |= labels != gpu.labels() or before != gpu.down
        return before != gpu.down if gpu.down else bool(before)
