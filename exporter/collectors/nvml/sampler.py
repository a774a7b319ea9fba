"""The passes over all GPUs: what is asked when, which GPUs are there, what is lost and when it is tried again.

Used in the NVML child, on its one sampling thread. Options and a library come in; each pass gives one message with
what it read: values in base units, or raw counters, `null` for what is absent now. Values of a slower tier
appear in the messages of its passes only; the sidecar remembers them.

Tiers go by what calls cost, not by what they tell: everything asked each second takes microseconds, apart from
the energy counter. The slower tiers of different GPUs fall into different seconds.
"""

from __future__ import annotations

from contextlib import suppress

from exporter.collectors.nvml import health, links, power, use
from exporter.collectors.nvml.buffers import Buffers
from exporter.collectors.nvml.codes import LIBRARY_DOWN
from exporter.collectors.nvml.events import Events
from exporter.collectors.nvml.fields import throttle_fields
from exporter.collectors.nvml.gpm import Gpm
from exporter.collectors.nvml.gpu import DeviceDownError, Gpu, LibraryDownError
from exporter.collectors.nvml.identity import MOST_GPUS, read_identity
from exporter.collectors.nvml.library import CallFailedError, Library
from exporter.collectors.nvml.mig import Mig
from exporter.collectors.nvml.processes import Processes
from exporter.collectors.nvml.visible import is_chosen, is_guessed, job_numbers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from exporter.collectors.nvml.options import Options

FAST, BUFFERS, GPM, MEDIUM, SLOW = "fast", "buffers", "gpm", "medium", "slow"

PERIODS = {FAST: 1.0, BUFFERS: 2.0, GPM: 5.0, MEDIUM: 10.0, SLOW: 60.0}
"""Seconds between two passes of a tier, at a period of one second. The power ring is 2.4 s long."""

RETRIES_BEFORE_NEW_PROCESS = 10
"""A GPU that came back from a reset may need NVML to be loaded anew before it can be seen."""

NOT_OURS = "no_permission"
_STAGGER = 8


class RestartError(Exception):
    """This process should be replaced, in an orderly way.

    Attributes:
        reason: Why.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Device:
    """A place in NVML's list, with or without a GPU that answers.

    Attributes:
        index: NVML's.
        uuid: As far as it is known.
        number: What the job calls it; the index where that is not known.
        down: Why it does not answer; "" while it does.
        tried: How often in vain since it was lost.
        retry_at: When to try again.
        attached: What there is while it answers.
    """

    __slots__ = ("index", "uuid", "number", "down", "tried", "retry_at", "attached")

    def __init__(self, index: int) -> None:
        self.index = index
        self.uuid = ""
        self.number = index
        self.down = ""
        self.tried = 0
        self.retry_at = 0.0
        self.attached: Attached | None = None


class Attached:
    """A GPU that answers, with what is remembered about it between two passes."""

    def __init__(self, gpu: Gpu, options: Options, *, now: float) -> None:
        self.gpu = gpu
        self.recent: dict[str, Any] = {}
        self.told = False  # whether the sidecar knows who it is
        self.buffers = Buffers(options.window_seconds, PERIODS[BUFFERS] * options.period_seconds)
        self.gpm = Gpm(gpu, options)
        self.mig = Mig(gpu, options)
        self.processes = Processes(PERIODS[GPM] * options.period_seconds)
        self.pcie = links.PcieSampling()
        self._due = dict.fromkeys(PERIODS, now)
        self._period = options.period_seconds

    def is_due(self, tier: str, now: float) -> bool:
        """Whether it is time for a tier; then its next time is set."""
        due = self._due[tier]
        if now < due - self._period / 4:  # passes are not as regular as the clock
            return False
        period = PERIODS[tier] * self._period
        if tier == FAST:
            pass
        elif tier == GPM and not self.told:
            period = self._period  # the first sample alone tells nothing
        elif not self.told and period > 2 * self._period:
            period *= (1 + self.gpu.index % _STAGGER) / _STAGGER
        self._due[tier] = max(due + period, now + self._period / 2)
        return True

    def free(self) -> None:
        """Give NVML's memory back."""
        self.gpm.free()
        self.mig.free()


class Sampler:
    """All GPUs of the machine.

    Args:
        library: Of this thread.
        events: Takes the GPUs that are found.
        options: What to ask for.
        progress: Told before each step of the start that may take long.
    """

    def __init__(
        self, library: Library, events: Events, options: Options, *, progress: Callable[[str], None]
    ) -> None:
        self._library = library
        self._events = events
        self._options = options
        self._progress = progress
        self._devices: list[Device] = []
        self._count = 0
        self._throttle: dict[int, str] = {}
        self._selected: set[int] = set()
        self._skip = set(options.skip)
        self._cost_due = 0.0

    def start(self, now: float) -> dict[str, Any]:
        """Initialise NVML and find the GPUs.

        Returns:
            The message `machine`.

        Raises:
            CallFailedError: NVML does not come up.
            LibraryDownError: It has gone down again.
        """
        self._progress("nvmlInit")
        self._library.call("nvmlInit")
        versions = {
            "driver_version": self._text("nvmlSystemGetDriverVersion"),
            "nvml_version": self._text("nvmlSystemGetNVMLVersion"),
            "cuda_version": self._cuda_version(),
        }
        self._throttle = throttle_fields(versions["driver_version"], details=self._options.details)
        self._count = min(self._library.call("nvmlDeviceGetCount"), MOST_GPUS)
        self._devices = [Device(index) for index in range(self._count)]
        for device in self._devices:
            self._attach(device, now)
        guessed = self._select(now)
        return {"kind": "machine", **versions, "devices": self._count, "guessed": guessed}

    def sample(self, now: float, wall: float) -> dict[str, Any]:
        """Make one pass.

        Returns:
            The message `sample`.

        Raises:
            LibraryDownError: No GPU can be read by this process any more.
            RestartError: A new process is needed to go on.
        """
        entries = []
        unknown = 0
        selected = [device for device in self._devices if device.index in self._selected]
        for device in selected:
            self._library.subject = device.index
            if device.down and now >= device.retry_at:
                self._attach(device, now)
                if device.attached is not None:
                    self._name(device, now)
            entry: dict[str, Any] = {"index": device.index, "uuid": device.uuid, "number": device.number}
            if device.attached is not None:
                try:
                    entry.update(self._read(device.attached, now, wall))
                except DeviceDownError as error:
                    self._lose(device, error.reason, now)
                    unknown += error.reason == "unknown"
            entry["counts"] = self._events.counts(device.index)
            if device.down:
                entry["down"] = device.down
            entries.append(entry)
        self._library.subject = None
        attached = (device.attached for device in self._devices)
        self._events.renew(self._library, [each.gpu for each in attached if each is not None])
        if unknown and (unknown > 1 or all(device.down for device in selected)):
            raise LibraryDownError("unknown")
        message: dict[str, Any] = {"kind": "sample", "time": now, "wall": wall, "gpus": entries}
        if now >= self._cost_due - self._options.period_seconds / 4:
            self._cost_due = now + PERIODS[MEDIUM] * self._options.period_seconds
            message["cost"] = self._cost()
            self._look_for_change()
        return message

    def admit(self, index: int, now: float) -> None:
        """Try a GPU that was left out; whatever hung on it has returned."""
        self._skip.discard(index)
        for device in self._devices:
            if device.index == index and device.down == "hung":
                device.retry_at = now

    def stop(self) -> None:
        """Give everything back to NVML."""
        for device in self._devices:
            if device.attached is not None:
                device.attached.free()
        with suppress(CallFailedError):  # it never came up, or is gone
            self._library.call("nvmlShutdown")

    def _read(self, attached: Attached, now: float, wall: float) -> dict[str, Any]:
        gpu, options = attached.gpu, self._options
        gpu.now = now
        gpu.answered, gpu.last_error = 0, ""
        out: dict[str, Any] = {}
        if attached.is_due(FAST, now):
            use.read_fast(gpu, out)
            power.read_fast(gpu, options, self._throttle, out)
            if gpu.answered == 0:
                # Not one of a dozen cheap calls has an answer: if it is not lost, the handle is stale.
                raise DeviceDownError(gpu.last_error or "invalid_argument")
            power.read_energy(gpu, out)
        attached.recent.update(out)
        if attached.is_due(MEDIUM, now):
            use.read_medium(gpu, options, out)
            power.read_medium(gpu, out)
            links.read_medium(gpu, options, out)
            health.read_medium(gpu, out)
            if options.pcie_sampling and out.get("pcie_transmit") is None:
                attached.pcie.read(gpu, out)
        looked = attached.is_due(SLOW, now) or self._events.mig_changed(gpu.index) or attached.mig.changed
        if looked:
            attached.mig.find(out)
            use.read_slow(gpu, options, out)
            power.read_slow(gpu, options, out)
            links.read_slow(gpu, options, out)
            health.read_slow(gpu, options, out)
            attached.processes.read_slow(gpu, options, out)
        attached.recent.update(out)
        if attached.is_due(BUFFERS, now):
            attached.buffers.read(gpu, wall=wall, recent=attached.recent, out=out)
        if attached.is_due(GPM, now):
            attached.processes.read(gpu, wall=wall, out=out)
            if options.gpm:
                attached.gpm.read(out)
                attached.mig.sample()
            attached.mig.read(out)
        elif looked:
            attached.mig.read(out)
        entry: dict[str, Any] = {"values": out}
        if not attached.told:
            entry["identity"] = read_identity(gpu)
            attached.told = True
        return entry

    def _attach(self, device: Device, now: float) -> None:
        if device.index in self._skip:
            device.down, device.retry_at = "hung", float("inf")
            return
        self._library.subject = device.index
        self._progress(f"GPU {device.index}")
        try:
            handle = self._library.call("nvmlDeviceGetHandleByIndex", device.index)
            uuid = self._library.call("nvmlDeviceGetUUID", handle)
        except CallFailedError as failure:
            if failure.error in LIBRARY_DOWN:
                raise LibraryDownError(failure.error) from None
            if failure.error != NOT_OURS:
                self._library.count_error(failure.call, failure.error)
            self._lose(device, failure.error, now)
            return
        finally:
            self._library.subject = None
        device.uuid, device.down, device.tried = str(uuid), "", 0
        gpu = Gpu(
            self._library,
            handle,
            index=device.index,
            uuid=device.uuid,
            reprobe_seconds=self._options.reprobe_seconds,
        )
        gpu.now = now
        device.attached = Attached(gpu, self._options, now=now)
        try:
            self._events.register(gpu)
        except DeviceDownError as error:
            self._lose(device, error.reason, now)

    def _lose(self, device: Device, reason: str, now: float) -> None:
        if device.attached is not None:
            device.attached.free()
            device.attached = None
        elif device.down:
            device.tried += 1
        device.down = reason
        device.retry_at = now + self._options.retry_seconds
        if device.tried >= RETRIES_BEFORE_NEW_PROCESS and reason != NOT_OURS:
            raise RestartError("gpu_lost")

    def _select(self, now: float) -> bool:
        """Choose the GPUs to sample, now that all are known; whether it is a guess which ones the job means."""
        options = self._options
        # To a container or job with some of the GPUs NVML may list all; CUDA numbers those that it can use.
        ours = [device for device in self._devices if device.down != NOT_OURS] or self._devices
        uuids: dict[int, list[str]] = {}
        for place, device in enumerate(ours):
            uuids[place] = [device.uuid]
            if options.visible and "MIG-" in options.visible and device.attached is not None:
                try:
                    device.attached.mig.find({})
                    uuids[place] += device.attached.mig.uuids()
                except DeviceDownError as error:
                    self._lose(device, error.reason, now)
        numbers = job_numbers(options.visible, uuids)
        if not numbers and len(ours) < len(self._devices):
            numbers = None  # those that may be used are the job's, whatever it calls them
        for place, device in enumerate(ours):
            if numbers is None or place in numbers:
                device.number = place if numbers is None else numbers[place]
                self._selected.add(device.index)
        if options.include or options.exclude:
            for device in self._devices:
                self._name(device, now)
        if options.visible is None or options.pci_order:
            return False
        attached = [device.attached.gpu for device in ours if device.attached is not None]
        return is_guessed(options.visible, [str(gpu.ask("name", "nvmlDeviceGetName")) for gpu in attached])

    def _name(self, device: Device, now: float) -> None:
        """Apply the patterns to a GPU of which only now is known what it is called."""
        options = self._options
        if device.attached is None or not (options.include or options.exclude):
            return
        try:
            identity = read_identity(device.attached.gpu)
        except DeviceDownError as error:
            self._lose(device, error.reason, now)
            return
        names = (str(device.index), device.uuid, identity["pci_bus_id"], identity["name"])
        if not is_chosen(names, options.include, options.exclude):
            self._selected.discard(device.index)

    def _look_for_change(self) -> None:
        try:
            count = self._library.call("nvmlDeviceGetCount")
        except CallFailedError as failure:
            if failure.error in LIBRARY_DOWN:
                raise LibraryDownError(failure.error) from None
            return
        if min(count, MOST_GPUS) != self._count:
            raise RestartError("devices_changed")

    def _cost(self) -> dict[str, Any]:
        errors: dict[str, int] = {}
        for library in (self._library, self._events.library):
            for (call, error), number in list(library.errors.items()):
                key = f"{call}/{error}"
                errors[key] = errors.get(key, 0) + number
        states: dict[str, int] = {}
        for device in self._devices:
            if device.attached is not None:
                for state in device.attached.gpu.states().values():
                    states[state] = states.get(state, 0) + 1
        return {
            # Without those of the events' thread, which only waits.
            "calls": self._library.costs,
            "errors": errors,
            "states": states,
            "field_seconds": self._library.field_seconds,
        }

    def _text(self, call: str) -> str:
        try:
            return str(self._library.call(call))[:64]
        except CallFailedError:
            return ""

    def _cuda_version(self) -> str:
        try:
            number = self._library.call("nvmlSystemGetCudaDriverVersion_v2")
        except CallFailedError:
            return ""
        return f"{number // 1000}.{number % 1000 // 10}"
