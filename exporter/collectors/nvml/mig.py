"""The instances of a GPU that is divided (MIG).

Used in the NVML child. Which instances there are is asked every minute, and when the driver says that it has
changed; their memory and activity more often. What a whole GPU knows about utilisation it does not know while
it is divided.
"""

from __future__ import annotations

from exporter.collectors.nvml.conversions import GarbageError, ratio, size, small
from exporter.collectors.nvml.gpm import OF_INSTANCE, SamplePair, read_metrics, supported
from exporter.collectors.nvml.gpu import DeviceDownError, Gpu
from exporter.collectors.nvml.library import CallFailedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from exporter.collectors.nvml.options import Options

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

    __slots__ = ("asker", "gpu_instance", "compute_instance", "profile", "known")

    def __init__(self, asker: Gpu, gpu_instance: int, compute_instance: int, profile: str) -> None:
        self.asker = asker
        self.gpu_instance = gpu_instance
        self.compute_instance = compute_instance
        self.profile = profile
        self.known = False


class Mig:
    """The instances of one GPU.

    Args:
        gpu: The whole.
        options: Whether to sample performance counters.

    Attributes:
        changed: Whether an instance no longer answers: it is time to see which there are.
    """

    def __init__(self, gpu: Gpu, options: Options) -> None:
        self.changed = False
        self._gpu = gpu
        self._options = options
        self._instances: list[Instance] = []
        self._pairs: dict[int, SamplePair] = {}
        self._activity: dict[int, dict[str, float]] = {}

    def find(self, out: dict[str, Any]) -> None:
        """See which instances there are."""
        gpu = self._gpu
        modes = gpu.ask("mig_mode", "nvmlDeviceGetMigMode", convert=_two)
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

    def read(self, out: dict[str, Any]) -> None:
        """Read the memory of the instances, and put all about them together."""
        out["mig"] = [self._describe(instance) for instance in self._instances] or None

    def sample(self) -> None:
        """Take performance counters, once for each GPU instance."""
        gpu = self._gpu
        # One without a compute instance is not among them; NVML would refuse it.
        for number in {instance.gpu_instance for instance in self._instances}:
            self._activity.pop(number, None)
            if not supported(gpu):
                continue
            pair = self._pairs.setdefault(number, SamplePair(gpu.library))
            item = f"gpm.gi{number}"
            if gpu.lacks(item):
                continue
            try:
                taken = pair.take(gpu.now, self._filler(number))
            except CallFailedError as failure:
                gpu.fail(item, failure.call, failure.error)
                continue
            gpu.succeed(item)
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
        gpu = self._gpu
        most = gpu.ask("mig.most", "nvmlDeviceGetMaxMigDeviceCount", convert=small) or 0
        found = []
        for place in range(min(most, _MOST_INSTANCES)):
            try:
                handle = gpu.library.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu.handle, place)
            except CallFailedError as failure:
                if failure.error not in {"not_found", "invalid_argument"}:
                    gpu.fail("mig.handle", failure.call, failure.error)
                continue
            asker = Gpu(gpu.library, handle, index=gpu.index, uuid="", reprobe_seconds=60.0)
            asker.now = gpu.now
            try:
                instance = self._identify(asker)
            except DeviceDownError:  # it was taken apart in this moment; the whole is judged by its own calls
                continue
            if instance is not None:
                found.append(instance)
        return found

    def _identify(self, asker: Gpu) -> Instance | None:
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
        gpu = self._gpu
        return lambda sample: gpu.library.call("nvmlGpmMigSampleGet", gpu.handle, number, sample)

    def _describe(self, instance: Instance) -> dict[str, Any]:
        asker = instance.asker
        asker.now = self._gpu.now
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
        for number, value in read_metrics(self._gpu, item, tuple(OF_INSTANCE), *pair).items():
            try:
                found[OF_INSTANCE[number][0]] = ratio(value)
            except GarbageError:  # noqa: PERF203 - one wrong number must not cost the others
                self._gpu.library.count_error("nvmlGpmMetricsGet", "garbage")
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
