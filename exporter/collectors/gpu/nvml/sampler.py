"""Sampler of all GPUs: readings of each pass, selection of GPUs, and retries of lost GPUs.

Runs in the NVML child, on the sampling thread. Each pass returns a message with the readings: gauges in base units, raw
counters, and `null` for a reading that has become absent. The readings of a slower tier are not part of every message; the sidecar
keeps the latest readings. The slower tiers of different GPUs are due in different seconds.
After an Xid, the slow tier of the GPU is due at once, because its error counters have probably changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from exporter.collectors.gpu.nvml import queries
from exporter.collectors.gpu.nvml.device import (
    SLOW_CALL_SECONDS,
    DeviceDownError,
    DownError,
    LibraryDownError,
    NvmlDevice,
)
from exporter.collectors.gpu.nvml.driver_samples import DriverSamples, Totals
from exporter.collectors.gpu.nvml.events import NvmlEvents
from exporter.collectors.gpu.nvml.gpm import Gpm
from exporter.collectors.gpu.nvml.library import LIBRARY_DOWN_ERRORS, CallFailedError, NvmlLibrary
from exporter.collectors.gpu.nvml.links import NvLinks
from exporter.collectors.gpu.nvml.mig import Mig
from exporter.collectors.gpu.nvml.processes import GpuProcesses
from exporter.collectors.gpu.nvml.queries import Query, Tier
from exporter.collectors.gpu.nvml.readings import PassReadings
from exporter.collectors.gpu.options import MAX_GPUS, GpuOptions, job_indices

MAX_RETRIES = 10
"""Number of failed retries after which the child is replaced, because a GPU may require a newly loaded NVML after a reset."""

NO_PERMISSION = "no_permission"
_STAGGER_COUNT = 8
"""Number of parts into which a slow tier's period is divided. GPUs with consecutive indices are due in different parts."""


class RestartError(DownError):
    """Request to shut down NVML and to replace this process."""


def _period_seconds(tier: Tier, options: GpuOptions) -> float:
    """Return the period of a tier: the tier's seconds, scaled down by a configured period below 1 s, but at least the configured period."""
    return max(options.period, tier.value * min(1.0, options.period))


class AttachedGpu:
    """Readers of a GPU that answers, with their state between passes."""

    def __init__(
        self,
        device: NvmlDevice,
        options: GpuOptions,
        queries_by_tier: Mapping[Tier, tuple[Query, ...]],
        *,
        now: float,
    ) -> None:
        self.device = device
        self.mig = Mig(device)
        self.has_sent_identity = False  # True after the identity was sent to the sidecar
        self._options = options
        self._queries_by_tier = queries_by_tier
        self._period_seconds = {tier: _period_seconds(tier, options) for tier in Tier}
        totals: Totals = {}
        self._samples = DriverSamples(device, self._period_seconds[Tier.FAST], totals)
        self._gpm = Gpm(device, self._samples, totals, is_enabled=options.gpm)
        self._links = NvLinks(device)
        self._processes = GpuProcesses()
        self._due_at = dict.fromkeys(Tier, now)
        self._xid_count = 0  # number of Xids at the last pass
        self._slow_read_at = now

    def read(self, now: float, wall: float, xid_count: int) -> PassReadings:
        """Read the due tiers and return the readings. Raises DownError if this GPU or all GPUs are down.

        Args:
            now: Time of the pass.
            wall: Unix time of the pass.
            xid_count: Number of Xids of the GPU since the child started. After a new Xid, the slow tier is due.
        """
        if xid_count != self._xid_count:
            self._xid_count = xid_count
            self._advance_slow_tier(now)
        device, readings = self.device, PassReadings()
        device.pass_time, device.call_count, device.result_count, device.last_error = now, 0, 0, ""
        due_tiers = {tier for tier in Tier if self._start_if_due(tier, now)}
        is_slow_due = Tier.SLOW in due_tiers or self.mig.is_outdated
        if is_slow_due:  # before the faster tiers, which require the list of links and instances
            self._slow_read_at = now
            queries.read(device, self._queries_by_tier[Tier.SLOW], readings)
            readings.set_value("sram_ecc_threshold_exceeded", queries.sram_threshold_exceeded(device))
            self._links.read_states_and_errors(readings)
            self.mig.list_instances()
        queries.read(device, self._queries_by_tier[Tier.FAST], readings)
        # Processes are read in every pass, because a run may take only a few seconds.
        self._processes.read(device, wall=wall, readings=readings)
        self._links.read_traffic(readings)
        self._samples.read_power(wall=wall, readings=readings)
        self._gpm.read(readings, nvlink=self._links.has_links and not self._links.has_traffic_counters)
        if Tier.FREQUENT in due_tiers:
            queries.read(device, self._queries_by_tier[Tier.FREQUENT], readings)
            if not self._gpm.counts_busy_seconds():
                self._samples.read_utilization(wall=wall, readings=readings)
            if self._options.gpm:
                self.mig.sample()
        if is_slow_due or Tier.FREQUENT in due_tiers:
            self.mig.read(readings)
        if Tier.MEDIUM in due_tiers:
            queries.read(device, self._queries_by_tier[Tier.MEDIUM], readings)
        if device.call_count and not device.result_count:
            self._probe(readings)
        return readings

    def _probe(self, readings: PassReadings) -> None:
        """Raise DeviceDownError if all calls of a cheap tier fail, because the GPU is then lost or the handle is stale."""
        device = self.device
        device.result_count = 0
        queries.read(device, self._queries_by_tier[Tier.FREQUENT], readings)
        if not device.result_count:
            raise DeviceDownError(device.last_error or "invalid_argument")

    def _advance_slow_tier(self, now: float) -> None:
        """Make the slow tier, with the error counters and the row remaps, due now.

        The tier is read at most once per period of the medium tier, so that a GPU with an Xid in each pass costs little.
        """
        earliest = self._slow_read_at + self._period_seconds[Tier.MEDIUM]
        self._due_at[Tier.SLOW] = min(self._due_at[Tier.SLOW], max(now, earliest))

    def _start_if_due(self, tier: Tier, now: float) -> bool:
        """Schedule the next pass of a tier that is due, and return True. Return False if the tier is not due."""
        due_at = self._due_at[tier]
        if now < due_at - self._options.period / 4:  # passes are not exactly periodic
            return False
        period_seconds = self._period_seconds[tier]
        if not self.has_sent_identity and tier in {Tier.MEDIUM, Tier.SLOW}:
            # All tiers are due in the first pass. The first period differs from GPU to GPU, so that later passes with slow calls differ.
            period_seconds *= (1 + self.device.index % _STAGGER_COUNT) / _STAGGER_COUNT
        self._due_at[tier] = max(due_at + period_seconds, now + self._options.period / 2)
        return True


@dataclass(slots=True)
class GpuSlot:
    """GPU in NVML's list, with its state in the sampler."""

    index: int  # NVML index
    job_index: int  # index of the GPU in the job; the NVML index if unknown
    uuid: str = ""  # empty before the first read
    failure: str = ""  # reason; "" if the GPU is up
    failed_retries: int = 0  # failed retries since the loss
    retry_at: float = 0.0  # time of the next retry
    attached_gpu: AttachedGpu | None = None  # None if the GPU is down
    is_selected: bool = False  # True if the GPU is monitored


class NvmlSampler:
    """Sampler of the selected GPUs of the machine.

    Args:
        library: The library of the sampling thread.
        events: Counter of Xids.
        options: Selection of GPUs and period.
        start: Message `start` of the sidecar, with the visible GPUs, the GPUs to skip and the calls to avoid.
        progress: Called with a name before each call of NVML that may be slow.
    """

    def __init__(
        self,
        library: NvmlLibrary,
        events: NvmlEvents,
        options: GpuOptions,
        start: Mapping[str, Any],
        *,
        progress: Callable[[str], None],
    ) -> None:
        self._library = library
        self._events = events
        self._options = options
        self._visible: str | None = start.get("visible")
        self._skipped_gpus: set[int] = set(start.get("skip", ()))
        self._avoided_calls: dict[int, set[str]] = {}
        for gpu, call in start.get("avoid", ()):
            self._avoided_calls.setdefault(gpu, set()).add(call)
        self._progress = progress
        self._slots: list[GpuSlot] = []
        self._queries_by_tier: Mapping[Tier, tuple[Query, ...]] = {}
        self._cost_due_at = 0.0

    def start(self, now: float) -> dict[str, Any]:
        """Initialize NVML, list the GPUs, and return the message `machine`.

        Raises:
            CallFailedError: NVML cannot be initialized.
            LibraryDownError: NVML failed after the initialization.
        """
        self._progress("nvmlInit")
        self._library.call("nvmlInit")
        driver = self._text("nvmlSystemGetDriverVersion")
        cuda = self._text("nvmlSystemGetCudaDriverVersion_v2")
        self._queries_by_tier = queries.queries_of(driver)
        count = min(self._library.call("nvmlDeviceGetCount"), MAX_GPUS)
        self._slots = [GpuSlot(index, index) for index in range(count)]
        for slot in self._slots:
            self._attach(slot, now)
        self._select(now)
        self._library.current_gpu = None
        self._events.register(self._library, self._devices())
        cuda_version = f"{int(cuda) // 1000}.{int(cuda) % 1000 // 10}" if cuda else ""
        return {"kind": "machine", "driver_version": driver, "cuda_version": cuda_version}

    def sample(self, now: float, wall: float) -> dict[str, Any]:
        """Read all selected GPUs and return the message `sample`. Raises LibraryDownError and RestartError."""
        selected_slots = [slot for slot in self._slots if slot.is_selected]
        previous_reasons = [slot.failure for slot in selected_slots]
        entries = []
        start_seconds, started_at = self._library.seconds, self._library.now()
        for slot in selected_slots:
            seconds = self._library.seconds
            # A slow call on a previous GPU delays the readings of this GPU.
            delay = seconds - start_seconds if seconds - start_seconds >= SLOW_CALL_SECONDS else 0.0
            entry = self._entry(slot, now + delay, wall + delay, started_at + delay)
            entries.append({**entry, "delay": delay} if delay else entry)
            if self._library.seconds - seconds >= SLOW_CALL_SECONDS:
                # Reset the supervisor's deadline, because the calls on the next GPU may be slow, too.
                self._progress(f"GPU {slot.index}")
        self._library.current_gpu = None
        self._events.register(self._library, self._devices())
        new_reasons = [
            slot.failure
            for slot, previous_reason in zip(selected_slots, previous_reasons, strict=True)
            if not previous_reason
        ]
        # A new unknown error of several GPUs at once, or of the last GPU that answered, is a failure of NVML and not of a GPU.
        has_no_gpu = all(slot.failure for slot in selected_slots)
        if new_reasons.count("unknown") > (0 if has_no_gpu else 1):
            raise LibraryDownError("unknown")
        message: dict[str, Any] = {"kind": "sample", "time": now, "gpus": entries}
        if now >= self._cost_due_at - self._options.period / 4:
            self._cost_due_at = now + _period_seconds(Tier.MEDIUM, self._options)
            message["cost"] = self._cost()
            self._check_device_count()
        return message

    def reattach(self, index: int, calls: Iterable[str], now: float) -> None:
        """Retry a skipped GPU, whose hanging call has returned. Avoid the slow `calls` on this GPU from now on."""
        self._skipped_gpus.discard(index)
        self._avoided_calls.setdefault(index, set()).update(calls)
        for slot in self._slots:
            if slot.index == index and slot.failure == "hung":
                slot.retry_at = now

    def stop(self) -> None:
        """Shut NVML down."""
        with suppress(CallFailedError):  # NVML is not initialized, or is unloaded
            self._library.call("nvmlShutdown")

    def _entry(self, slot: GpuSlot, now: float, wall: float, started_at: float) -> dict[str, Any]:
        """Read a GPU, or retry a lost GPU that is due, and return the entry of the GPU in the message.

        Args:
            slot: The GPU.
            now: Monotonic time of the pass.
            wall: Unix time of the pass.
            started_at: Start of the pass on the library's clock.
        """
        self._library.current_gpu = slot.index
        if slot.failure and now >= slot.retry_at:
            self._attach(slot, now)
        entry: dict[str, Any] = {"index": slot.index, "uuid": slot.uuid, "job_index": slot.job_index}
        attached_gpu = slot.attached_gpu
        if attached_gpu is not None:
            try:
                attached_gpu.device.pass_started_at = started_at
                xid_count = sum(count for count, _ in self._events.xids(slot.index).values())
                entry |= attached_gpu.read(now, wall, xid_count).message()
                if not attached_gpu.has_sent_identity:
                    entry["identity"] = attached_gpu.device.identity()
                    attached_gpu.has_sent_identity = True
            except DeviceDownError as error:
                self._lose(slot, error.reason, now)
        entry["xids"] = self._events.xids(slot.index)
        if slot.failure:
            entry["failure"] = slot.failure
        return entry

    def _attach(self, slot: GpuSlot, now: float) -> None:
        """Create the readers of a GPU. Mark a GPU that is skipped or does not answer as down.

        The caller resets `current_gpu` of the library afterwards.

        Raises:
            LibraryDownError: NVML is down.
            RestartError: The GPU has not answered `MAX_RETRIES` retries.
        """
        if slot.index in self._skipped_gpus:
            slot.failure, slot.retry_at = "hung", float("inf")
            return
        self._library.current_gpu = slot.index
        self._progress(f"GPU {slot.index}")
        try:
            handle = self._library.call("nvmlDeviceGetHandleByIndex", slot.index)
            uuid = self._library.call("nvmlDeviceGetUUID", handle)
        except CallFailedError as failure:
            if failure.error in LIBRARY_DOWN_ERRORS:
                raise LibraryDownError(failure.error) from None
            if failure.error != NO_PERMISSION:
                self._library.count_error(failure.call, failure.error)
            self._lose(slot, failure.error, now)
            return
        slot.uuid, slot.failure, slot.failed_retries = str(uuid), "", 0
        avoid = self._avoided_calls.get(slot.index, ())
        device = NvmlDevice(self._library, handle, index=slot.index, avoid=avoid)
        device.pass_time = now
        slot.attached_gpu = AttachedGpu(device, self._options, self._queries_by_tier, now=now)

    def _lose(self, slot: GpuSlot, reason: str, now: float) -> None:
        """Mark a GPU as down, and schedule a retry.

        Raises RestartError after `MAX_RETRIES` failed retries, unless the permission is missing.
        """
        was_lost = slot.attached_gpu is None and slot.failure != ""
        if was_lost:
            slot.failed_retries += 1
        slot.attached_gpu, slot.failure = None, reason
        slot.retry_at = now + self._options.retry
        if slot.failed_retries >= MAX_RETRIES and reason != NO_PERMISSION:
            raise RestartError("gpu_lost")

    def _select(self, now: float) -> None:
        """Select the GPUs in the job's CUDA_VISIBLE_DEVICES.

        In two cases, all accessible GPUs are selected: the variable names no GPU, or NVML lists inaccessible GPUs and the variable names
        none of the accessible ones.
        """
        # In a container, NVML may list GPUs that are not accessible. CUDA numbers only the accessible GPUs.
        accessible = [slot for slot in self._slots if slot.failure != NO_PERMISSION] or self._slots
        uuids: dict[int, list[str]] = {}
        for position, slot in enumerate(accessible):
            uuids[position] = [slot.uuid]
            if self._visible and "MIG-" in self._visible and slot.attached_gpu is not None:
                self._library.current_gpu = slot.index
                try:
                    slot.attached_gpu.mig.list_instances()
                    uuids[position] += slot.attached_gpu.mig.uuids()
                except DeviceDownError as error:
                    self._lose(slot, error.reason, now)
        job_index_by_position = job_indices(self._visible, uuids)
        if job_index_by_position is None or (
            not job_index_by_position and len(accessible) < len(self._slots)
        ):
            # All accessible GPUs belong to the job.
            job_index_by_position = {position: position for position in range(len(accessible))}
        for position, job_index in job_index_by_position.items():
            accessible[position].job_index, accessible[position].is_selected = job_index, True

    def _check_device_count(self) -> None:
        """Raise RestartError if NVML lists more or fewer GPUs than at the start."""
        try:
            count = self._library.call("nvmlDeviceGetCount")
        except CallFailedError as failure:
            if failure.error in LIBRARY_DOWN_ERRORS:
                raise LibraryDownError(failure.error) from None
            return
        if min(count, MAX_GPUS) != len(self._slots):
            raise RestartError("devices_changed")

    def _cost(self) -> dict[str, Any]:
        """Return the number, the duration and the errors of the calls since the child started.

        The calls of the event thread wait for events. Therefore only their errors are counted.
        """
        errors = Counter(self._library.errors) + Counter(self._events.library.errors.copy())
        return {
            "calls": self._library.calls,
            "seconds": self._library.seconds,
            "errors": [(call, error, count) for (call, error), count in errors.items()],
        }

    def _devices(self) -> list[NvmlDevice]:
        """Return the GPUs that are up, including those that are not selected."""
        return [slot.attached_gpu.device for slot in self._slots if slot.attached_gpu]

    def _text(self, call: str) -> str:
        """Return the result of a call as text, or "" if the call fails."""
        try:
            return str(self._library.call(call))[:64]
        except CallFailedError:
            return ""
