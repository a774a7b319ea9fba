"""The instances of a GPU that is divided (MIG).

Used in the NVML child. Which instances there are is asked every minute, and when the driver says that it has changed;
their memory and activity more often. What a whole GPU knows about utilisation it does not know while it is divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from exporter.collectors.gpu.nvml.device import Device, DeviceDownError, Out
from exporter.collectors.gpu.nvml.gpm import Metrics
from exporter.collectors.gpu.nvml.library import CallFailedError
from exporter.collectors.gpu.nvml.readings import MEMORY, ask
from exporter.collectors.gpu.nvml.units import flag, small

_MOST_INSTANCES = 16
_SM_ACTIVITY = 2


@dataclass(slots=True)
class Instance:
    """A compute instance, whose questions `asker` asks; `known` while its memory can be read."""

    asker: Device
    gpu_instance: int
    compute_instance: int
    profile: str
    known: bool = False


class Mig:
    """The instances of one GPU.

    Attributes:
        changed: Whether an instance no longer answers: it is time to see which there are.
    """

    def __init__(self, device: Device) -> None:
        self.changed = False
        self._device = device
        self._instances: list[Instance] = []
        self._metrics: dict[int, Metrics] = {}  # by GPU instance, and what they said last
        self._sm_activity: dict[int, float | None] = {}

    def find(self, out: Out) -> None:
        """See which instances there are."""
        before = self._uuids_by_number()
        mode = self._device.ask("mig_mode", "nvmlDeviceGetMigMode", convert=lambda pair: flag(pair[0]))
        out["mig_mode"] = mode
        self._instances, self.changed = list(self._found()) if mode else [], False
        now = self._uuids_by_number()
        for number in [each for each in self._metrics if before.get(each) != now.get(each)]:
            self._metrics.pop(number).free()
            self._sm_activity.pop(number, None)

    def read(self, out: Out) -> None:
        """Read the memory of the instances, and put all about them together."""
        out["mig"] = [self._describe(instance) for instance in self._instances] or None

    def sample(self) -> None:
        """Take performance counters, once for each GPU instance."""
        # One without a compute instance is not among them; NVML would refuse it.
        for number in {instance.gpu_instance for instance in self._instances}:
            if number not in self._metrics:
                self._metrics[number] = Metrics(
                    self._device, f"gpm.gi{number}", "nvmlGpmMigSampleGet", number
                )
            found = self._metrics[number].read((_SM_ACTIVITY,))
            if found is not None:
                activity = self._metrics[number].ratios(found)
                self._sm_activity[number] = activity.get(_SM_ACTIVITY)

    def uuids(self) -> list[str]:
        """Name the instances."""
        return [instance.asker.uuid for instance in self._instances]

    def free(self) -> None:
        """Give NVML's memory back."""
        for metrics in self._metrics.values():
            metrics.free()
        self._metrics.clear()
        self._sm_activity.clear()

    def _uuids_by_number(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for each in self._instances:
            found.setdefault(each.gpu_instance, []).append(each.asker.uuid)
        return found

    def _found(self) -> Iterator[Instance]:
        device = self._device
        most = device.ask("mig.most", "nvmlDeviceGetMaxMigDeviceCount", convert=small) or 0
        for place in range(min(most, _MOST_INSTANCES)):
            try:
                handle = device.library.call("nvmlDeviceGetMigDeviceHandleByIndex", device.handle, place)
            except CallFailedError as failure:
                if failure.error not in {"not_found", "invalid_argument"}:
                    device.fail("mig.handle", failure.call, failure.error)
                continue
            asker = Device(device.library, handle, index=device.index, reprobe_seconds=60.0)
            asker.now = device.now
            try:
                instance = _identify(asker)
            except DeviceDownError:  # it was taken apart in this moment; the whole is judged by its own calls
                continue
            if instance is not None:
                yield instance

    def _describe(self, instance: Instance) -> dict[str, Any]:
        asker = instance.asker
        asker.now = self._device.now
        try:
            total, used = ask(asker, MEMORY) or (None, None)
        except DeviceDownError:
            total = used = None
        self.changed |= instance.known and total is None
        instance.known = total is not None
        return {
            "uuid": asker.uuid,
            "gi": instance.gpu_instance,
            "ci": instance.compute_instance,
            "profile": instance.profile,
            "memory_total": total,
            "memory_used": used,
            "sm": self._sm_activity.get(instance.gpu_instance),
        }


def _identify(asker: Device) -> Instance | None:
    uuid = asker.ask("uuid", "nvmlDeviceGetUUID")
    gpu_instance = asker.ask("gi", "nvmlDeviceGetGpuInstanceId", convert=small)
    compute_instance = asker.ask("ci", "nvmlDeviceGetComputeInstanceId", convert=small)
    if not isinstance(uuid, str) or gpu_instance is None or compute_instance is None:
        return None
    asker.uuid = uuid
    name = asker.ask("name", "nvmlDeviceGetName", convert=str) or ""
    return Instance(asker, gpu_instance, compute_instance, name.partition(" MIG ")[2][:32])
