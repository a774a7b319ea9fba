"""The passes over all GPUs: what is asked when, which GPUs are there, what is lost and when it is tried again.

Used in the NVML child, on its one sampling thread. Each pass gives one message with what it read: values in base units,
or raw counters, `null` for what is absent now. Values of a slower tier appear in the messages of its passes only; the
sidecar remembers them. Tiers go by what calls cost; the slower tiers of different GPUs fall into different seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from exporter.collectors.gpu.nvml import readings
from exporter.collectors.gpu.nvml.device import Device, DeviceDownError, DownError, LibraryDownError, Out
from exporter.collectors.gpu.nvml.events import Events
from exporter.collectors.gpu.nvml.integrals import RATES, Buffers, Gpm, Totals
from exporter.collectors.gpu.nvml.library import GARBAGE, LIBRARY_DOWN, CallFailedError, Library
from exporter.collectors.gpu.nvml.links import Links
from exporter.collectors.gpu.nvml.mig import Mig
from exporter.collectors.gpu.options import MOST_GPUS, GpuOptions, job_numbers

FAST, CLOSE, ACTIVITY, MEDIUM, SLOW = "fast", "close", "activity", "medium", "slow"

PERIODS = {FAST: 1.0, CLOSE: 2.0, ACTIVITY: 5.0, MEDIUM: 10.0, SLOW: 60.0}
"""Seconds between two passes of a tier. The driver's ring of power samples is 2.4 s long."""

QUESTIONS = {FAST: readings.FAST, CLOSE: readings.CLOSE, MEDIUM: readings.MEDIUM, SLOW: readings.SLOW}

RETRIES_BEFORE_NEW_PROCESS = 10
"""A GPU that came back from a reset may need NVML to be loaded anew before it can be seen."""

NOT_OURS = "no_permission"
_STAGGER = 8


class RestartError(DownError):
    """This process should be replaced, in an orderly way."""


def _period(tier: str, options: GpuOptions) -> float:
    """Quicker in step with a period below a second, never below it."""
    return max(options.period, PERIODS[tier] * min(1.0, options.period))


class Attached:
    """A GPU that answers, with what is remembered about it between two passes."""

    def __init__(
        self, device: Device, options: GpuOptions, throttling: dict[int, str], *, now: float
    ) -> None:
        self.device = device
        self.mig = Mig(device)
        self.told = False  # whether the sidecar knows who it is
        self._options = options
        self._throttling = throttling
        self._periods = {tier: _period(tier, options) for tier in PERIODS}
        self._questions = {
            tier: tuple(each for each in questions if options.details or not each.details)
            for tier, questions in QUESTIONS.items()
        }
        totals: Totals = {}
        self._buffers = Buffers(device, self._periods[CLOSE], totals)
        self._gpm = Gpm(device, options, totals)
        self._links = Links(device)
        self._processes = readings.Processes()
        self._due = dict.fromkeys(PERIODS, now)

    def read(self, now: float, wall: float) -> Out:
        """Make a pass; gives what it read; raises DownError: the GPU is gone, or all of them are."""
        device = self.device
        device.now, device.answered, device.last_error = now, 0, ""
        out: Out = {}
        readings.read(device, self._questions[FAST], out)
        if device.answered == 0 and device.last_error != GARBAGE:
            # Not one of these calls has an answer: if it is not lost, the handle is stale.
            raise DeviceDownError(device.last_error or "invalid_argument")
        looked = self._is_due(SLOW, now) or self.mig.changed
        if looked:  # first of all: others go by what is found here
            readings.read(device, self._questions[SLOW], out)
            out["sram_ecc_threshold_exceeded"] = readings.sram_exceeded(device)
            self._links.read_slow(out)
            self.mig.find()
        medium = self._is_due(MEDIUM, now)
        # Always with the energy counter, which the integral of power goes on from.
        if self._is_due(CLOSE, now) or medium:
            readings.read(device, self._questions[CLOSE], out)
            self._buffers.read_power(wall=wall, out=out)
            if not self._gpm.counts_busy_seconds():
                self._buffers.read_utilization(wall=wall, out=out)
        active = self._is_due(ACTIVITY, now)
        if active:
            self._processes.read(device, wall=wall, out=out)
            self._gpm.read(out)
            if self._options.gpm:
                self.mig.sample()
            if self._links.traffic:  # counted by the links themselves
                out.update(dict.fromkeys((RATES[60], RATES[61])))
        if active or looked:
            self.mig.read(out)
        if medium:
            readings.read(device, self._questions[MEDIUM], out)
            out["clocks_event_seconds_total"] = device.by_kind(self._throttling) or None
            self._links.read_medium(out)
        return out

    def _is_due(self, tier: str, now: float) -> bool:
        """Whether it is time for a tier; then its next time is set."""
        due = self._due[tier]
        if now < due - self._options.period / 4:  # passes are not as regular as the clock
            return False
        period = self._periods[tier]
        if not self.told:
            if tier == ACTIVITY:
                period = self._options.period  # the first sample alone tells nothing
            elif tier in {MEDIUM, SLOW}:
                period *= (1 + self.device.index % _STAGGER) / _STAGGER
        self._due[tier] = max(due + period, now + self._options.period / 2)
        return True


@dataclass(slots=True)
class Slot:
    """A place in NVML's list, with or without a GPU that answers."""

    index: int  # NVML's
    number: int  # what the job calls it; the index where that is not known
    uuid: str = ""  # as far as it is known
    down: str = ""  # why it does not answer; "" while it does
    tried: int = 0  # how often in vain since it was lost
    retry_at: float = 0.0  # when to try again
    attached: Attached | None = None  # what there is while it answers
    selected: bool = False  # whether it is sampled


class Sampler:
    """All GPUs of the machine.

    Args:
        start: The message that this process began with: which GPUs the job sees, which to leave out.
        progress: Told before each step of the start that may take long.
    """

    def __init__(
        self,
        library: Library,
        events: Events,
        options: GpuOptions,
        start: Mapping[str, Any],
        *,
        progress: Callable[[str], None],
    ) -> None:
        self._library = library
        self._events = events
        self._options = options
        self._visible: str | None = start.get("visible")
        self._skip: set[int] = set(start.get("skip", ()))
        self._progress = progress
        self._slots: list[Slot] = []
        self._throttling: dict[int, str] = {}
        self._cost_due = 0.0

    def start(self, now: float) -> dict[str, Any]:
        """Initialise NVML and find the GPUs; gives the message `machine`.

        Raises CallFailedError where NVML does not come up, LibraryDownError where it has gone down again.
        """
        self._progress("nvmlInit")
        self._library.call("nvmlInit")
        driver = self._text("nvmlSystemGetDriverVersion")
        cuda = self._text("nvmlSystemGetCudaDriverVersion_v2")
        self._throttling = readings.throttle_fields(driver)
        count = min(self._library.call("nvmlDeviceGetCount"), MOST_GPUS)
        self._slots = [Slot(index, index) for index in range(count)]
        for slot in self._slots:
            self._attach(slot, now)
        self._events.watch(self._library, self._devices())
        self._select(now)
        cuda_version = f"{int(cuda) // 1000}.{int(cuda) % 1000 // 10}" if cuda else ""
        return {"kind": "machine", "driver_version": driver, "cuda_version": cuda_version}

    def sample(self, now: float, wall: float) -> dict[str, Any]:
        """Make one pass; gives the message `sample`, or raises LibraryDownError or RestartError."""
        selected = [slot for slot in self._slots if slot.selected]
        before = [slot.down for slot in selected]
        entries = [self._entry(slot, now, wall) for slot in selected]
        self._library.subject = None
        self._events.watch(self._library, self._devices())
        lost = [slot.down for slot, was in zip(selected, before, strict=True) if not was]
        if "unknown" in lost and (lost.count("unknown") > 1 or all(slot.down for slot in selected)):
            raise LibraryDownError("unknown")
        message: dict[str, Any] = {"kind": "sample", "time": now, "gpus": entries}
        if now >= self._cost_due - self._options.period / 4:
            self._cost_due = now + _period(MEDIUM, self._options)
            message["cost"] = self._cost()
            self._look_for_change()
        return message

    def admit(self, index: int, now: float) -> None:
        """Try a GPU that was left out; whatever hung on it has returned."""
        self._skip.discard(index)
        for slot in self._slots:
            if slot.index == index and slot.down == "hung":
                slot.retry_at = now

    def stop(self) -> None:
        """Give everything back to NVML."""
        with suppress(CallFailedError):  # it never came up, or is gone
            self._library.call("nvmlShutdown")

    def _entry(self, slot: Slot, now: float, wall: float) -> dict[str, Any]:
        """What one GPU says in this pass."""
        self._library.subject = slot.index
        if slot.down and now >= slot.retry_at:
            self._attach(slot, now)
        entry: dict[str, Any] = {"index": slot.index, "uuid": slot.uuid, "number": slot.number}
        attached = slot.attached
        if attached is not None:
            try:
                entry["values"] = attached.read(now, wall)
                if not attached.told:
                    entry["identity"] = attached.device.identity()
                    attached.told = True
            except DeviceDownError as error:
                self._lose(slot, error.reason, now)
        entry["xids"] = self._events.xids(slot.index)
        if slot.down:
            entry["down"] = slot.down
        return entry

    def _attach(self, slot: Slot, now: float) -> None:
        if slot.index in self._skip:
            slot.down, slot.retry_at = "hung", float("inf")
            return
        self._library.subject = slot.index
        self._progress(f"GPU {slot.index}")
        try:
            handle = self._library.call("nvmlDeviceGetHandleByIndex", slot.index)
            uuid = self._library.call("nvmlDeviceGetUUID", handle)
        except CallFailedError as failure:
            if failure.error in LIBRARY_DOWN:
                raise LibraryDownError(failure.error) from None
            if failure.error != NOT_OURS:
                self._library.count_error(failure.call, failure.error)
            self._lose(slot, failure.error, now)
            return
        finally:
            self._library.subject = None
        slot.uuid, slot.down, slot.tried = str(uuid), "", 0
        device = Device(self._library, handle, index=slot.index)
        device.now = now
        slot.attached = Attached(device, self._options, self._throttling, now=now)

    def _lose(self, slot: Slot, reason: str, now: float) -> None:
        slot.tried += slot.attached is None and slot.down != ""
        slot.attached, slot.down = None, reason
        slot.retry_at = now + self._options.retry
        if slot.tried >= RETRIES_BEFORE_NEW_PROCESS and reason != NOT_OURS:
            raise RestartError("gpu_lost")

    def _select(self, now: float) -> None:
        """Choose the GPUs to sample, now that all are known."""
        # To a container or job with some of the GPUs NVML may list all; CUDA numbers those that it can use.
        ours = [slot for slot in self._slots if slot.down != NOT_OURS] or self._slots
        uuids: dict[int, list[str]] = {}
        for place, slot in enumerate(ours):
            uuids[place] = [slot.uuid]
            if self._visible and "MIG-" in self._visible and slot.attached is not None:
                try:
                    slot.attached.mig.find()
                    uuids[place] += slot.attached.mig.uuids()
                except DeviceDownError as error:
                    self._lose(slot, error.reason, now)
        numbers = job_numbers(self._visible, uuids)
        if numbers is None or (not numbers and len(ours) < len(self._slots)):
            # Those that may be used are the job's, whatever it calls them.
            numbers = {place: place for place in range(len(ours))}
        for place, number in numbers.items():
            ours[place].number, ours[place].selected = number, True

    def _look_for_change(self) -> None:
        try:
            count = self._library.call("nvmlDeviceGetCount")
        except CallFailedError as failure:
            if failure.error in LIBRARY_DOWN:
                raise LibraryDownError(failure.error) from None
            return
        if min(count, MOST_GPUS) != len(self._slots):
            raise RestartError("devices_changed")

    def _cost(self) -> dict[str, Any]:
        errors = Counter(self._library.errors) + Counter(self._events.library.errors.copy())
        # Without the calls of the events' thread, which only waits.
        return {
            "calls": self._library.costs,
            "errors": {f"{call}/{error}": number for (call, error), number in errors.items()},
        }

    def _devices(self) -> list[Device]:
        return [slot.attached.device for slot in self._slots if slot.attached]

    def _text(self, call: str) -> str:
        try:
            return str(self._library.call(call))[:64]
        except CallFailedError:
            return ""
