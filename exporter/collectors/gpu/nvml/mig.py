"""The instances of a GPU that is divided (MIG).

Used in the NVML child. Which instances there are is asked every minute, and when one no longer answers; their memory and
activity more often. What a whole GPU knows about utilisation it does not know while it is divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from exporter.collectors.gpu.nvml.device import Device, DeviceDownError, Out, flag, small
from exporter.collectors.gpu.nvml.integrals import Metrics, in_base_units
from exporter.collectors.gpu.nvml.library import CallFailedError
from exporter.collectors.gpu.nvml.readings import MEMORY, ask

_MOST_INSTANCES = 16
_SM_ACTIVITY = 2
_REPROBE_SECONDS = 60.0


@dataclass(slots=True)
class Instance:
    """A compute instance, of which a device can be asked; `known` while its memory can be read."""

    device: Device
    about: dict[str, Any]  # its UUID, the numbers of its GPU instance and compute instance, its profile
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
            self._sm_activity.clear()
            for metrics in self._metrics.values():
                metrics.restart()

    def read(self, out: Out) -> None:
        """Read the memory of the instances, and put all about them together."""
        out["mig"] = [self._describe(instance) for instance in self._instances] or None

    def sample(self) -> None:
        """Take performance counters, once for each GPU instance."""
        # One without a compute instance is not among them; NVML would refuse it.
        for number in {instance.about["gi"] for instance in self._instances}:
            if number not in self._metrics:
                made = Metrics(self._device, f"gpm.gi{number}", "nvmlGpmMigSampleGet", number)
                self._metrics[number] = made
            found = self._metrics[number].read((_SM_ACTIVITY,))
            if found is not None:
                self._sm_activity[number] = in_base_units(self._device, found).get(_SM_ACTIVITY)

    def uuids(self) -> list[str]:
        """Name the instances."""
        return [str(instance.about["uuid"]) for instance in self._instances]

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
                about = {
                    "uuid": part.ask("uuid", "nvmlDeviceGetUUID", convert=str),
                    "gi": part.ask("gi", "nvmlDeviceGetGpuInstanceId", convert=small),
                    "ci": part.ask("ci", "nvmlDeviceGetComputeInstanceId", convert=small),
                }
                name = part.ask("name", "nvmlDeviceGetName", convert=str) or ""
            except DeviceDownError:  # it was taken apart in this moment; the whole is judged by its own calls
                continue
            if None not in about.values():
                yield Instance(part, {**about, "profile": name.partition(" MIG ")[2][:32]})

    def _describe(self, instance: Instance) -> dict[str, Any]:
        instance.device.now = self._device.now
        try:
            total, used = ask(instance.device, MEMORY) or (None, None)
        except DeviceDownError:
            total = used = None
        self.changed |= instance.known and total is None
        instance.known = total is not None
        activity = self._sm_activity.get(instance.about["gi"])
        return {**instance.about, "memory_total": total, "memory_used": used, "sm": activity}
