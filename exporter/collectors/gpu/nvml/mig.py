"""MIG instances of a divided GPU.

Runs in the NVML child. The list of instances is read every minute, and after a failed read of an instance; memory and activity
are read more often. A divided GPU has no utilization as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from exporter.collectors.gpu.nvml.device import DeviceDownError, NvmlDevice
from exporter.collectors.gpu.nvml.gpm import ACTIVITY, SM_ACTIVITY, GpmMetrics, ratio_of
from exporter.collectors.gpu.nvml.library import CallFailedError
from exporter.collectors.gpu.nvml.queries import MEMORY, make
from exporter.collectors.gpu.nvml.readings import PassReadings
from exporter.collectors.gpu.nvml.units import flag, small

_MAX_INSTANCES = 16
_REPROBE_SECONDS = 60.0
_SM = tuple(row for row in ACTIVITY if row.metric == SM_ACTIVITY)


@dataclass(slots=True)
class ListedInstance:
    """Compute instance with a handle."""

    device: NvmlDevice
    labels: dict[str, Any]  # uuid, gi, ci and profile
    was_readable: bool = False  # True if the last read of the memory succeeded


class Mig:
    """Reader of a GPU's MIG instances."""

    def __init__(self, device: NvmlDevice) -> None:
        self.changed = False  # True after a failed read of an instance: the list is out of date
        self._device = device
        self._instances: list[ListedInstance] = []
        self._metrics: dict[int, GpmMetrics] = {}  # by GPU instance
        self._sm_activity: dict[int, float | None] = {}  # last values by GPU instance

    def find(self) -> None:
        """List the instances."""
        previous_uuids = self.uuids()
        mode = self._device.query("mig_mode", "nvmlDeviceGetMigMode", convert=lambda pair: flag(pair[0]))
        self._instances, self.changed = list(self._list_instances()) if mode else [], False
        if self.uuids() != previous_uuids:
            self._sm_activity.clear()
            for metrics in self._metrics.values():
                metrics.restart()

    def read(self, readings: PassReadings) -> None:
        """Read the memory of the instances and add all of their readings."""
        readings.instances = [self._describe(instance) for instance in self._instances]

    def sample(self) -> None:
        """Sample performance counters, once for each GPU instance."""
        # NVML refuses a GPU instance without a compute instance, which the list does not contain.
        for number in {instance.labels["gi"] for instance in self._instances}:
            if number not in self._metrics:
                metrics = GpmMetrics(self._device, f"gpm.gi{number}", "nvmlGpmMigSampleGet", number)
                self._metrics[number] = metrics
            values = self._metrics[number].read(_SM)
            if values is not None:
                self._sm_activity[number] = ratio_of(self._device, values, _SM[0])

    def uuids(self) -> list[str]:
        """Return the UUIDs of the instances."""
        return [str(instance.labels["uuid"]) for instance in self._instances]

    def _list_instances(self) -> Iterator[ListedInstance]:
        device = self._device
        max_count = device.query("mig.most", "nvmlDeviceGetMaxMigDeviceCount", convert=small) or 0
        for position in range(min(max_count, _MAX_INSTANCES)):
            try:
                handle = device.library.call("nvmlDeviceGetMigDeviceHandleByIndex", device.handle, position)
            except CallFailedError as failure:
                if failure.error not in {"not_found", "invalid_argument"}:
                    device.fail("mig.handle", failure.call, failure.error)
                continue
            instance = NvmlDevice(
                device.library, handle, index=device.index, reprobe_seconds=_REPROBE_SECONDS
            )
            instance.now = device.now
            try:
                labels = {
                    "uuid": instance.query("uuid", "nvmlDeviceGetUUID", convert=str),
                    "gi": instance.query("gi", "nvmlDeviceGetGpuInstanceId", convert=small),
                    "ci": instance.query("ci", "nvmlDeviceGetComputeInstanceId", convert=small),
                }
                name = instance.query("name", "nvmlDeviceGetName", convert=str) or ""
            except (
                DeviceDownError
            ):  # the instance was destroyed; the calls on the GPU itself decide whether the GPU is down
                continue
            if None not in labels.values():
                yield ListedInstance(instance, {**labels, "profile": name.partition(" MIG ")[2][:32]})

    def _describe(self, instance: ListedInstance) -> dict[str, Any]:
        instance.device.now = self._device.now
        try:
            total, used = make(instance.device, MEMORY) or (None, None)
        except DeviceDownError:
            total = used = None
        self.changed |= instance.was_readable and total is None
        instance.was_readable = total is not None
        activity = self._sm_activity.get(instance.labels["gi"])
        return {**instance.labels, "memory_total": total, "memory_used": used, "sm": activity}
