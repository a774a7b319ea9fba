"""MIG devices of a GPU.

Runs in the NVML child. The list of devices is read every minute, and after a failed read of a device; memory and
activity are read more often. While MIG is enabled, NVML reports no utilization of the whole GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from exporter.collectors.gpu.nvml.device import DeviceDownError, NvmlDevice
from exporter.collectors.gpu.nvml.gpm import ACTIVITY, SM_ACTIVITY, GpmMetrics, ratio_of
from exporter.collectors.gpu.nvml.library import CallFailedError
from exporter.collectors.gpu.nvml.queries import MEMORY, execute
from exporter.collectors.gpu.nvml.readings import PassReadings
from exporter.collectors.gpu.nvml.units import flag, small

_MAX_INSTANCES = 16
"""Maximum number of MIG devices of a GPU that are read, more than any GPU has (7)."""
_REPROBE_SECONDS = 60.0
"""Time before an unsupported or forbidden query of a MIG device is tried again."""
# The only metric of a MIG device that is published.
_SM_ROW = next(row for row in ACTIVITY if row.metric == SM_ACTIVITY)


@dataclass(slots=True)
class ListedInstance:
    """MIG device: a compute instance, with its handle and labels."""

    device: NvmlDevice
    labels: dict[str, Any]  # uuid, gi, ci and profile
    was_readable: bool = False  # True if the last read of its memory succeeded


class Mig:
    """Reader of a GPU's MIG devices."""

    def __init__(self, device: NvmlDevice) -> None:
        self.is_outdated = False  # True after a failed read of an instance: the list must be read again
        self._device = device
        self._instances: list[ListedInstance] = []
        self._metrics: dict[int, GpmMetrics] = {}  # by GPU instance
        self._sm_activity: dict[int, float | None] = {}  # last values by GPU instance

    def list_instances(self) -> None:
        """Read the list of MIG devices."""
        previous_uuids = self.uuids()
        # NVML returns the current mode, and the mode after the next reset.
        mode = self._device.query("mig_mode", "nvmlDeviceGetMigMode", convert=lambda modes: flag(modes[0]))
        self._instances = list(self._readable_instances()) if mode else []
        self.is_outdated = False
        if self.uuids() != previous_uuids:  # the samples may be of GPU instances that no longer exist
            self._sm_activity.clear()
            for metrics in self._metrics.values():
                metrics.discard_sample()

    def read(self, readings: PassReadings) -> None:
        """Read the memory of the MIG devices, and set `readings.instances`."""
        readings.instances = [self._describe(instance) for instance in self._instances]

    def sample(self) -> None:
        """Sample the performance counters of each GPU instance."""
        # A GPU instance without a compute instance cannot be sampled, and is not in the list.
        for gi in {instance.labels["gi"] for instance in self._instances}:
            if gi not in self._metrics:
                self._metrics[gi] = GpmMetrics(self._device, f"gpm.gi{gi}", "nvmlGpmMigSampleGet", gi)
            values = self._metrics[gi].read((_SM_ROW,))
            if values is not None:
                self._sm_activity[gi] = ratio_of(self._device, values, _SM_ROW)

    def uuids(self) -> list[str]:
        """Return the UUIDs of the MIG devices."""
        return [str(instance.labels["uuid"]) for instance in self._instances]

    def _readable_instances(self) -> Iterator[ListedInstance]:
        """Yield the MIG devices whose ids are readable. NVML numbers all possible devices, and some of them do not exist."""
        device = self._device
        max_count = device.query("mig.max_count", "nvmlDeviceGetMaxMigDeviceCount", convert=small) or 0
        for position in range(min(max_count, _MAX_INSTANCES)):
            try:
                handle = device.library.call("nvmlDeviceGetMigDeviceHandleByIndex", device.handle, position)
            except CallFailedError as failure:
                if failure.error not in {"not_found", "invalid_argument"}:
                    device.record_failure("mig.handle", failure.call, failure.error)
                continue
            instance = NvmlDevice(
                device.library, handle, index=device.index, reprobe_seconds=_REPROBE_SECONDS
            )
            instance.pass_time = device.pass_time
            try:
                labels = {
                    "uuid": instance.query("uuid", "nvmlDeviceGetUUID", convert=str),
                    "gi": instance.query("gi", "nvmlDeviceGetGpuInstanceId", convert=small),
                    "ci": instance.query("ci", "nvmlDeviceGetComputeInstanceId", convert=small),
                }
                name = instance.query("name", "nvmlDeviceGetName", convert=str) or ""
            except DeviceDownError:
                continue  # the instance was destroyed; calls on the whole GPU show whether the GPU is down
            if None not in labels.values():
                yield ListedInstance(instance, {**labels, "profile": name.partition(" MIG ")[2][:32]})

    def _describe(self, instance: ListedInstance) -> dict[str, Any]:
        """Read the memory of a MIG device, and return the fields of `MigInstance` with the last activity."""
        instance.device.pass_time = self._device.pass_time
        try:
            total_bytes, used_bytes = execute(instance.device, MEMORY) or (None, None)
        except DeviceDownError:
            total_bytes = used_bytes = None
        self.is_outdated |= instance.was_readable and total_bytes is None
        instance.was_readable = total_bytes is not None
        activity = self._sm_activity.get(instance.labels["gi"])
        return {
            **instance.labels,
            "memory_total_bytes": total_bytes,
            "memory_used_bytes": used_bytes,
            "sm_activity_ratio": activity,
        }
