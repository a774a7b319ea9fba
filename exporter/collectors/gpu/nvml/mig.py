"""The instances of a GPU that is divided (MIG).

Used in the NVML child. Which instances there are is asked every minute, and when the driver says that it has
changed; their memory and activity more often. What a whole GPU knows about utilisation it does not know while
it is divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from exporter.collectors.gpu.nvml.device import Device, DeviceDownError
from exporter.collectors.gpu.nvml.gpm import OF_INSTANCE, SamplePair, read_metrics, supported
from exporter.collectors.gpu.nvml.library import CallFailedError
from exporter.collectors.gpu.nvml.readings import Out
from exporter.collectors.gpu.nvml.units import GarbageError, ratio, size, small
from exporter.collectors.gpu.options import GpuOptions

_MEMORY_V2 = 0x02000028
_MOST_INSTANCES = 16


class Instance:
    """A compute instance, with the GPU instance that it is in.

    Attributes:
        asker: Asks questions of its handle.
        gpu_instance: NVML's id.
        compute_instance: NVML's id.
        profile: Such as `1g.10gb`.
        known: Whether its memory could be read the last time.
    """

    def __init__(self, asker: Device, gpu_instance: int, compute_instance: int, profile: str) -> None:
        self.asker = asker
        self.gpu_instance = gpu_instance
        self.compute_instance = compute_instance
        self.profile = profile
        self.known = False


class Mig:
    """The instances of one GPU.

    Args:
        device: The whole.
        options: Whether to sample performance counters.

    Attributes:
        changed: Whether an instance no longer answers: it is time to see which there are.
    """

    def __init__(self, device: Device, options: GpuOptions) -> None:
        self.changed = False
        self._device = device
        self._options = options
        self._instances: list[Instance] = []
        self._pairs: dict[int, SamplePair] = {}
        self._activity: dict[int, dict[str, float]] = {}

    def find(self, out: Out) -> None:
        """See which instances there are."""
        device = self._device
        modes = device.ask("mig_mode", "nvmlDeviceGetMigMode", convert=_two)
        out["mig_mode"] = None
        before = self._uuids_by_number()
        self._instances, self.changed = [], False
        if modes is not None:
            current, pending = modes
            out["mig_mode"] = {"current": current}
            if self._options.details:
                out["mig_mode"]["pending"] = pending
            if current:
                self._instances = list(self._found())
        now = self._uuids_by_number()
        for number in [each for each in self._pairs if before.get(each) != now.get(each)]:
            self._pairs.pop(number).free()
            self._activity.pop(number, None)

    def read(self, out: Out) -> None:
        """Read the memory of the instances, and put all about them together."""
        out["mig"] = [self._describe(instance) for instance in self._instances] or None

    def sample(self) -> None:
        """Take performance counters, once for each GPU instance."""
        device = self._device
        # One without a compute instance is not among them; NVML would refuse it.
        for number in {instance.gpu_instance for instance in self._instances}:
            self._activity.pop(number, None)
            if not supported(device):
                continue
            pair = self._pairs.setdefault(number, SamplePair(device.library))
            item = f"gpm.gi{number}"
            if device.lacks(item):
                continue
            try:
                taken = pair.take(device.now, self._filler(number))
            except CallFailedError as failure:
                device.fail(item, failure.call, failure.error)
                continue
            if taken is not None:
                self._activity[number] = self._ratios(item, taken)

    def uuids(self) -> list[str]:
        """Name the instances."""
        return [instance.asker.uuid for instance in self._instances]

    def free(self) -> None:
        """Give NVML's memory back."""
        for pair in self._pairs.values():
            pair.free()
        self._pairs.clear()
        self._activity.clear()

    def _uuids_by_number(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for each in self._instances:
            found.setdefault(each.gpu_instance, []).append(each.asker.uuid)
        return found

    def _found(self) -> list[Instance]:
        device = self._device
        most = device.ask("mig.most", "nvmlDeviceGetMaxMigDeviceCount", convert=small) or 0
        found = []
        for place in range(min(most, _MOST_INSTANCES)):
            try:
                handle = device.library.call("nvmlDeviceGetMigDeviceHandleByIndex", device.handle, place)
            except CallFailedError as failure:
                if failure.error not in {"not_found", "invalid_argument"}:
                    device.fail("mig.handle", failure.call, failure.error)
                continue
            asker = Device(device.library, handle, index=device.index, uuid="", reprobe_seconds=60.0)
            asker.now = device.now
            try:
                instance = self._identify(asker)
            except DeviceDownError:  # it was taken apart in this moment; the whole is judged by its own calls
                continue
            if instance is not None:
                found.append(instance)
        return found

    def _identify(self, asker: Device) -> Instance | None:
        uuid = asker.ask("uuid", "nvmlDeviceGetUUID")
        gpu_instance = asker.ask("gi", "nvmlDeviceGetGpuInstanceId", convert=small)
        compute_instance = asker.ask("ci", "nvmlDeviceGetComputeInstanceId", convert=small)
        if not isinstance(uuid, str) or gpu_instance is None or compute_instance is None:
            return None
        asker.uuid = uuid
        profile = asker.ask("name", "nvmlDeviceGetName", convert=_profile_of_name)
        if not profile:
            profile = asker.ask("attributes", "nvmlDeviceGetAttributes", convert=_profile) or ""
        return Instance(asker, gpu_instance, compute_instance, profile)

    def _filler(self, number: int) -> Callable[[Any], object]:
        device = self._device
        return lambda sample: device.library.call("nvmlGpmMigSampleGet", device.handle, number, sample)

    def _describe(self, instance: Instance) -> dict[str, Any]:
        asker = instance.asker
        asker.now = self._device.now
        try:
            memory = asker.ask("memory", "nvmlDeviceGetMemoryInfo", _MEMORY_V2, convert=_memory)
        except DeviceDownError:
            memory = None
        self.changed |= instance.known and memory is None
        instance.known = memory is not None
        total, used = memory or (None, None)
        return {
            "uuid": asker.uuid,
            "gi": instance.gpu_instance,
            "ci": instance.compute_instance,
            "profile": instance.profile,
            "memory_total": total,
            "memory_used": used,
            **self._activity.get(instance.gpu_instance, {}),
        }

    def _ratios(self, item: str, pair: tuple[Any, Any]) -> dict[str, float]:
        found = {}
        for number, value in read_metrics(self._device, item, tuple(OF_INSTANCE), *pair).items():
            try:
                found[OF_INSTANCE[number][0]] = ratio(value)
            except GarbageError:  # noqa: PERF203 - one wrong number must not cost the others
                self._device.library.count_error("nvmlGpmMetricsGet", "garbage")
        return found


def _two(pair: Any) -> tuple[int, int]:
    current, pending = pair
    return small(current), small(pending)


def _memory(info: Any) -> tuple[int, int]:
    return size(info.total), size(info.used)


def _profile_of_name(name: Any) -> str:
    _, found, profile = str(name).partition(" MIG ")
    return profile[:32] if found else ""


def _profile(attributes: Any) -> str:
    gibibytes = -(-small(attributes.memorySizeMB) // 1024)
    slices, compute = small(attributes.gpuInstanceSliceCount), small(attributes.computeInstanceSliceCount)
    own = f"{compute}c." if compute != slices else ""
    return f"{own}{slices}g.{gibibytes}gb"
