"""The instances of a GPU that is divided (MIG).

Used in the NVML child. Which instances there are is asked every minute, and when one no longer answers; their memory and
activity more often. What a whole GPU knows about utilisation it does not know while it is divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from exporter.collectors.gpu.nvml.device import Device, DeviceDownError, Out, flag, small
from exporter.collectors.gpu.nvml.integrals import Metrics
from exporter.collectors.gpu.nvml.library import CallFailedError
from exporter.collectors.gpu.nvml.readings import MEMORY, ask

_MOST_INSTANCES = 16
_SM_ACTIVITY = 2
_REPROBE_SECONDS = 60.0


@dataclass(slots=True)
class Instance:
    """A compute instance, of which a device can be asked; `known` while its memory can be read."""

    device: Device
    uuid: str
    gpu_instance: int
    compute_instance: int
    profile: str
    known: bool = False


class Mig:
    """The instances of one GPU."""

    def __init__(self, device: Device) -> None:
        self.changed = False  # whether an instance no longer answers: it is time to see which there are
        self._device = device
        self._instances: list[Instance] = []
        self._metrics: dict[int, Metrics] = {}  # by GPU instance, and what they said last
        self._sm_activity: dict[int, float | None] = {}

    def find(self) -> None:
        """See which instances there are."""
        before = self.uuids()
        mode = self._device.ask("mig_mode", "nvmlDeviceGetMigMode", convert=lambda pair: flag(pair[0]))
        self._instances, self.changed = list(self._found()) if mode else [], False
        if self.uuids() != before:
            self.free()

    def read(self, out: Out) -> None:
        """Read the memory of the instances, and put all about them together."""
        out["mig"] = [self._describe(instance) for instance in self._instances] or None

    def sample(self) -> None:
        """Take performance counters, once for each GPU instance."""
        # One without a compute instance is not among them; NVML would refuse it.
        for number in {instance.gpu_instance for instance in self._instances}:
            if number not in self._metrics:
                made = Metrics(self._device, f"gpm.gi{number}", "nvmlGpmMigSampleGet", number)
                self._metrics[number] = made
            found = self._metrics[number].read((_SM_ACTIVITY,))
            if found is not None:
                activity = self._metrics[number].ratios(found)
                self._sm_activity[number] = activity.get(_SM_ACTIVITY)

    def uuids(self) -> list[str]:
        """Name the instances."""
        return [instance.uuid for instance in self._instances]

    def free(self) -> None:
        """Give NVML's memory back."""
        for metrics in self._metrics.values():
            metrics.free()
        self._metrics.clear()
        self._sm_activity.clear()

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
            part = Device(device.library, handle, index=device.index, reprobe_seconds=_REPROBE_SECONDS)
            part.now = device.now
            try:
                uuid = part.ask("uuid", "nvmlDeviceGetUUID", convert=str)
                gpu_instance = part.ask("gi", "nvmlDeviceGetGpuInstanceId", convert=small)
                compute_instance = part.ask("ci", "nvmlDeviceGetComputeInstanceId", convert=small)
                name = part.ask("name", "nvmlDeviceGetName", convert=str) or ""
            except DeviceDownError:  # it was taken apart in this moment; the whole is judged by its own calls
                continue
            if uuid is not None and gpu_instance is not None and compute_instance is not None:
                profile = name.partition(" MIG ")[2][:32]
                yield Instance(part, uuid, gpu_instance, compute_instance, profile)

    def _describe(self, instance: Instance) -> dict[str, Any]:
        instance.device.now = self._device.now
        try:
            total, used = ask(instance.device, MEMORY) or (None, None)
        except DeviceDownError:
            total = used = None
        self.changed |= instance.known and total is None
        instance.known = total is not None
        return {
            "uuid": instance.uuid,
            "gi": instance.gpu_instance,
            "ci": instance.compute_instance,
            "profile": instance.profile,
            "memory_total": total,
            "memory_used": used,
            "sm": self._sm_activity.get(instance.gpu_instance),
        }
