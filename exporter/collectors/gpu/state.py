"""Registry of GPUs: latest readings and counters from the messages of the NVML child.

Runs in the sidecar. The supervisor's thread delivers the messages; the methods of `GpuRegistry` may be called from any
thread. `child` is the sequence number of the child that sent a message. Counters continue after a restart of the child and
after the absence of a GPU, but not after a restart of the sidecar.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from exporter.collectors.gpu.counters import MonotonicCounter
from exporter.collectors.gpu.energy import (
    HISTORY_SECONDS,
    OUTAGE_SECONDS,
    DriverPowerSample,
    GpuEnergy,
    PassPower,
)
from exporter.collectors.gpu.families import ALTERNATIVE_LINK_READINGS, COUNTER_RULES
from exporter.collectors.gpu.family import CHILD_COUNTER
from exporter.collectors.gpu.kernel_log import KernelXids
from exporter.collectors.job import EnergyReading, GpuListing, GpuProcessUse

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    """MIG device: a compute instance within a GPU instance. An unavailable reading is None."""

    uuid: str
    gi: int  # GPU instance
    ci: int  # compute instance
    profile: str
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    sm_activity_ratio: float | None = None


@dataclass(slots=True)
class GpuState:
    """Latest readings and counters of a GPU."""

    index: int  # NVML index
    job_index: int  # index in the job's numbering; the label `gpu`
    uuid: str = ""  # empty before the first read
    failure: str | None = None  # reason; "" if the GPU is up, None if unknown because no child works
    identity: Mapping[str, str] = field(default_factory=dict)  # model and identity by label of gpu_info
    values: dict[str, dict[Labels, float]] = field(default_factory=dict)  # latest readings by name and labels
    counters: dict[str, dict[Labels, MonotonicCounter]] = field(default_factory=dict)  # by name and labels
    energy: GpuEnergy = field(default_factory=GpuEnergy)
    processes: tuple[GpuProcessUse, ...] = ()  # as of the last list
    listings: deque[GpuListing] = field(default_factory=deque)  # of the last minute, oldest first
    instances: tuple[MigInstance, ...] = ()
    xids: dict[str, MonotonicCounter] = field(default_factory=dict)  # number of NVML's events by Xid
    kernel_xids: dict[str, int] = field(default_factory=dict)  # number of records in the kernel log by Xid
    xid_times: dict[str, float] = field(default_factory=dict)  # Unix time of the last error by Xid

    def labels(self, *label_values: str) -> Labels:
        """Return the values of the labels `gpu` and `uuid`, followed by *label_values*."""
        return str(self.job_index), self.uuid, *label_values

    def lose(self, reason: str | None) -> None:
        """Record that the GPU does not answer (a reason) or that no child works (None). Clear the readings, keep the counters."""
        self.failure = reason
        self.values.clear()
        self.processes, self.instances = (), ()

    def add_readings(self, entry: Mapping[str, Any], time: float, child: int, *, is_paused: bool) -> None:
        """Add the readings of a pass from the GPU's entry in a message `sample`, and discard readings that became absent.

        `time` is the monotonic time of the pass. With `is_paused`, the total energy does not grow.
        """
        for reading, values in entry["replaced"].items():
            self.values.pop(reading, None)
            self._set_reading(reading, values, time, child)
        for reading, values in entry["values"].items():
            self._set_reading(reading, values, time, child)
        power = entry.get("power")
        pass_power = None if power is None else PassPower(**power)
        energy_time = time + entry.get("energy_delay", 0.0)
        self.energy.add(pass_power, entry.get("energy_millijoules"), energy_time, child, is_paused=is_paused)
        if "processes" in entry:
            self.processes = tuple(self._process(process) for process in entry["processes"] or ())
            if entry["processes"] is not None:
                self.listings.append(GpuListing(self.uuid, time, self.processes))
                while self.listings[0].time < time - HISTORY_SECONDS:
                    self.listings.popleft()
        if "instances" in entry:
            self.instances = tuple(MigInstance(**instance) for instance in entry["instances"])

    def add_xids(self, xids: Mapping[str, Any], time: float, child: int) -> None:
        """Add the Xids that the child has counted: the count and the Unix time of the last error, by Xid."""
        for xid, (count, unix_time) in xids.items():
            self.xids.setdefault(xid, MonotonicCounter(CHILD_COUNTER)).advance(count, time, child)
            self.xid_times[xid] = max(unix_time, self.xid_times.get(xid, 0.0))

    def value(self, reading: str) -> float | None:
        """Return the value of a reading without labels."""
        return self.values.get(reading, {}).get(())

    def energy_reading(self) -> EnergyReading:
        """Return the energy reading of the GPU."""
        reading = self.energy.reading(
            uuid=self.uuid,
            job_index=self.job_index,
            name=self.identity.get("name", ""),
            watts=self.value("power_watts"),
            is_up=self.failure == "",
        )
        return replace(reading, is_mig=bool(self.instances))

    def _set_reading(self, reading: str, pairs: Any, time: float, child: int) -> None:
        """Set the values of a reading, and advance its counters. A pair has label values, and a number or None if the value is absent.

        A counter of an NVLink that appears after the sum over the links was published starts at 0. Otherwise, the first number of the
        counter would appear as an increase of the sum.
        """
        values, rule = self.values.setdefault(reading, {}), COUNTER_RULES.get(reading)
        summed_series = self._summed_series(reading)
        for label_values, value in pairs:
            labels = tuple(label_values)
            if value is None:
                values.pop(labels, None)
                continue
            values[labels] = value
            if rule is not None:
                counters = self.counters.setdefault(reading, {})
                if labels not in counters:
                    joins_sum = labels[1:] in summed_series
                    counters[labels] = MonotonicCounter(
                        replace(rule, starts_at_zero=True) if joins_sum else rule
                    )
                counters[labels].advance(value, time, child)

    def _summed_series(self, reading: str) -> set[Labels]:
        """Return the labels without the link of all counters of a sum over the NVLinks. Empty for other readings."""
        readings = ALTERNATIVE_LINK_READINGS.get(reading, ())
        return {labels[1:] for name in readings for labels in self.counters.get(name, ())}

    def _process(self, entry: Mapping[str, Any]) -> GpuProcessUse:
        return GpuProcessUse(
            pid=int(entry["pid"]),
            gpu=str(self.job_index),
            uuid=self.uuid,
            memory_bytes=entry["memory"],
            ratios={} if entry["sm"] is None else {"sm": entry["sm"]},
        )


class GpuRegistry:
    """Registry of all GPUs of the machine, updated from the child's messages."""

    def __init__(self, *, outage_seconds: float = OUTAGE_SECONDS) -> None:
        self.lock = threading.RLock()  # guards the other attributes
        self.gpus: dict[int, GpuState] = {}  # by NVML's index
        self.machine: Mapping[str, Any] = {}  # first message of the child, or empty
        self.resident_bytes: float | None = None  # of the child; None without a child or message
        self.max_gpu_count = 0  # largest number of GPUs in a message, including lost GPUs
        self.energy_is_paused = False  # True while another exporter counts the energy
        self.time = 0.0  # monotonic time of the last pass
        # Cost of NVML calls and of the child, over all children.
        self.calls = MonotonicCounter(CHILD_COUNTER)
        self.call_seconds = MonotonicCounter(CHILD_COUNTER)
        self.cpu_seconds = MonotonicCounter(CHILD_COUNTER)
        self.errors: dict[Labels, MonotonicCounter] = {}  # by call and error
        self._outage_seconds = outage_seconds
        self._removed_gpus: dict[str, GpuState] = {}  # by UUID
        # Since the last `take_changes`: names of the received readings, and whether a GPU was added, removed, lost, renumbered
        # or has returned.
        self._updated_readings: set[str] = set()
        self._have_gpus_changed = True

    def add_sample(self, message: Mapping[str, Any], child: int) -> bool:
        """Add a pass of a child. Return True if a GPU was added, removed or lost, has returned, or is down for another reason.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: The message is invalid.
        """
        with self.lock:
            self.time = time = float(message["time"])
            entries = message["gpus"]
            # Before the readings, because the loss of a GPU changes the indices of later GPUs.
            has_changed = self._remove_moved({entry["index"]: entry["uuid"] for entry in entries})
            for entry in entries:
                has_changed |= self._add_gpu_entry(entry, time + entry.get("delay", 0.0), child)
            self.max_gpu_count = max(self.max_gpu_count, len(self.gpus))
            cost = message.get("cost")
            if cost is not None:
                self.calls.advance(cost["calls"], time, child)
                self.call_seconds.advance(cost["seconds"], time, child)
                for call, error, number in cost["errors"]:
                    counter = self.errors.setdefault((call, error), MonotonicCounter(CHILD_COUNTER))
                    counter.advance(number, time, child)
            own_cost = message.get("own")
            if own_cost is not None:
                self.resident_bytes = own_cost["resident_bytes"]
                self.cpu_seconds.advance(own_cost["cpu_seconds"], time, child)
            return has_changed

    def take_changes(self) -> set[str] | None:
        """Return the names of the readings received since the last call.

        Returns None if a GPU has changed since then, so that all families must be computed again.
        """
        with self.lock:
            updated_readings = None if self._have_gpus_changed else self._updated_readings
            self._updated_readings, self._have_gpus_changed = set(), False
            return updated_readings

    def add_kernel_xids(self, kernel_xids: KernelXids) -> None:
        """Set the numbers of Xids in the kernel log, counted since the log was opened, for the listed GPUs."""
        with self.lock:
            for gpu in self.gpus.values():
                for xid, (count, unix_time) in kernel_xids.get(
                    gpu.identity.get("pci_bus_id", ""), {}
                ).items():
                    gpu.kernel_xids[xid] = count
                    gpu.xid_times[xid] = max(unix_time, gpu.xid_times.get(xid, 0.0))

    def clear_readings(self, *, hanging: int | None = None) -> None:
        """Clear the readings of all GPUs, because no child works. A GPU that was down stays down; `hanging` is the GPU of a hanging call."""
        with self.lock:
            for gpu in self.gpus.values():
                gpu.lose("hung" if gpu.index == hanging else gpu.failure or None)
            self.resident_bytes = None
            self._have_gpus_changed = True

    def corrections(self) -> Mapping[str, int]:
        """Return the number of corrections of counters by reason, over all GPUs that NVML has listed."""
        corrections_by_reason: Counter[str] = Counter()
        with self.lock:
            for gpu in (*self.gpus.values(), *self._removed_gpus.values()):
                counters = [counter for by_label in gpu.counters.values() for counter in by_label.values()]
                # Called every second for hundreds of counters, nearly all of which were never corrected.
                all_corrections = [gpu.energy.corrections, *[counter.corrections for counter in counters]]
                for corrections in filter(None, all_corrections):
                    corrections_by_reason.update(corrections)
        return corrections_by_reason

    def new_energy_gaps(self) -> list[tuple[int, float]]:
        """Return each GPU with new gaps since the last call: the job's index, and the joules of these gaps."""
        with self.lock:
            gaps = [
                (gpu.job_index, gpu.energy.new_gap_joules)
                for gpu in self.gpus.values()
                if gpu.energy.new_gap_joules
            ]
            for gpu in self.gpus.values():
                gpu.energy.new_gap_joules = 0.0
            return gaps

    def processes(self) -> tuple[GpuProcessUse, ...]:
        """Return the processes on all GPUs as of the latest lists. Their pids are in the pid namespace of the host."""
        with self.lock:
            return tuple(process for gpu in self.gpus.values() for process in gpu.processes)

    def listings(self) -> tuple[GpuListing, ...]:
        """Return the process lists of the last minute of all GPUs. A GPU whose driver does not list processes has none."""
        with self.lock:
            return tuple(listing for gpu in self.gpus.values() for listing in gpu.listings)

    def uuids(self) -> dict[int, str]:
        """Return the known UUIDs by NVML's index."""
        with self.lock:
            return {gpu.index: gpu.uuid for gpu in self.gpus.values() if gpu.uuid}

    def count_energy_gaps(self, now: float) -> None:
        """Count the outages of the energy readings up to the monotonic time *now*."""
        with self.lock:
            for gpu in self.gpus.values():
                gpu.energy.count_gap(now)

    def energies(self) -> tuple[EnergyReading, ...]:
        """Return the energy reading of each GPU with a known UUID."""
        with self.lock:
            return tuple(gpu.energy_reading() for gpu in self.gpus.values() if gpu.uuid)

    def power_samples(self, since_by_uuid: Mapping[str, float]) -> dict[str, list[DriverPowerSample]]:
        """Return the power samples of each GPU by UUID, oldest first, after the Unix times in `since_by_uuid`.

        The driver takes a sample every 20 ms; without a sample buffer, there is one sample per pass. The samples of the
        last 30 s are retained.
        """
        with self.lock:
            samples_by_uuid = {
                gpu.uuid: gpu.energy.samples_after(since_by_uuid.get(gpu.uuid, 0.0))
                for gpu in self.gpus.values()
            }
        return {uuid: samples for uuid, samples in samples_by_uuid.items() if samples}

    def _remove_moved(self, uuids: Mapping[int, str]) -> bool:
        """Remove GPUs that are no longer listed or whose index has changed. Return True if any GPU was removed."""
        moved_indices = [
            index
            for index, gpu in self.gpus.items()
            if index not in uuids or (gpu.uuid and uuids[index] not in {"", gpu.uuid})
        ]
        for index in moved_indices:
            gpu = self.gpus.pop(index)
            self._removed_gpus[gpu.uuid] = gpu
            self._have_gpus_changed = True
        return bool(moved_indices)

    def _add_gpu_entry(self, entry: Mapping[str, Any], time: float, child: int) -> bool:
        """Add the entry of a GPU, and the GPU if it is new. Return True for a new, lost or returned GPU, or another reason of a loss."""
        index, uuid = int(entry["index"]), str(entry["uuid"])
        gpu = self.gpus.get(index)
        is_new = gpu is None
        if gpu is None:
            new_gpu = GpuState(index, index, energy=GpuEnergy(outage_seconds=self._outage_seconds))
            gpu = self.gpus[index] = self._removed_gpus.pop(uuid, new_gpu)
            gpu.index = index
            self._have_gpus_changed = True
        previous_labels, previous_reason = gpu.labels(), gpu.failure
        gpu.uuid = uuid or gpu.uuid
        gpu.job_index = int(entry["job_index"])
        gpu.add_xids(entry.get("xids", {}), time, child)
        if "failure" in entry:
            gpu.lose(str(entry["failure"]))
        else:
            gpu.failure = ""
            if "identity" in entry:
                gpu.identity = dict(entry["identity"])
            gpu.add_readings(entry, time, child, is_paused=self.energy_is_paused)
            self._updated_readings.update(entry["replaced"], entry["values"])
        self._have_gpus_changed |= previous_labels != gpu.labels() or previous_reason != gpu.failure
        if gpu.failure:
            return is_new or previous_reason != gpu.failure
        return is_new or bool(previous_reason)  # after None, no GPU has returned: the child was replaced
