"""Replay library in place of NVIDIA's library.

Used in the NVML child of a sidecar that replays. pynvml looks up the C functions by name in `pynvml.nvmlLib`. This module replaces that
object; the rest of pynvml is unchanged. In each call, the faults of the timeline apply first, then the function runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from exporter.collectors.gpu.nvml import child
from exporter.collectors.gpu.nvml.events import XID
from exporter.collectors.gpu.nvml.gpm import MIN_INTERVAL_SECONDS
from exporter.collectors.gpu.nvml.library import CODES, SUCCESS
from exporter.replay.calls import (
    CALLS,
    CallContext,
    ReplayedError,
    check_version,
    target_of,
    to_int,
    write_number,
)
from exporter.replay.machine import EVERY_CALL, ReplayedEvents, ReplayedGpu, ReplayedMachine
from exporter.replay.readings import SAMPLE_BUFFERS

_GPU_BASE = 0x1000  # address of the handle of GPU 0
_INSTANCE_BASE = 0x100000  # address of the handle of the first MIG instance of GPU 0
_INSTANCE_ADDRESSES_PER_GPU = 0x100
_EVENT_SET_AND_SAMPLE_BASE = 0x10000000  # the handles of event sets and GPM samples have higher addresses
_MIN_INSTANCE_COUNT = 7  # a GPU reports at least this number of possible MIG devices
_POLL_SECONDS = 0.05  # interval in which a waiting or hanging call checks the timeline

_OTHER_CALLS = "*"
"""Key of the cost of calls without a cost of their own in the description."""


_LIBRARY_METHODS = {
    "nvmlInitWithFlags": "initialize",
    "nvmlShutdown": "shut_down",
    "nvmlSystemGetDriverVersion": "write_driver_version",
    "nvmlSystemGetCudaDriverVersion_v2": "write_cuda_version",
    "nvmlDeviceGetCount_v2": "write_gpu_count",
    "nvmlDeviceGetHandleByIndex_v2": "write_handle",
    "nvmlEventSetCreate": "create_event_set",
    "nvmlEventSetWait_v2": "wait_for_event",
    "nvmlGpmSampleAlloc": "allocate_sample",
    "nvmlGpmMetricsGet": "compute_metrics",
}
"""Methods of `ReplayLibrary` (without `_`) for functions whose first argument is no GPU's handle."""

_GPU_METHODS = {
    "nvmlDeviceGetMaxMigDeviceCount": "write_instance_count",
    "nvmlDeviceGetMigDeviceHandleByIndex": "write_instance_handle",
    "nvmlDeviceGetGpuInstanceId": "refuse_whole_gpu",
    "nvmlDeviceGetComputeInstanceId": "refuse_whole_gpu",
    "nvmlDeviceRegisterEvents": "register_events",
    "nvmlGpmQueryDeviceSupport": "write_gpm_support",
    "nvmlGpmSampleGet": "sample_gpu",
    "nvmlGpmMigSampleGet": "sample_instance",
}
"""Methods of `ReplayLibrary` (without `_`) for functions of a GPU. `CALLS` has the other functions of a GPU."""

SYMBOLS = frozenset({*CALLS, *_LIBRARY_METHODS, *_GPU_METHODS, "nvmlErrorString"})
"""Names of the C functions that a replay has."""

COST_KEYS = frozenset(
    {
        *SYMBOLS,
        _OTHER_CALLS,
        *(f"nvmlDeviceGetSamples/{buffer.reading}" for buffer in SAMPLE_BUFFERS.values()),
    }
)
"""Keys of a description's costs, in addition to field ids."""


class Clock:
    """Clock of a replay: the machine's time."""

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Return Unix seconds."""
        return time.time()

    def delay(self, seconds: float) -> None:
        """Sleep, like a slow call."""
        time.sleep(seconds)

    def work(self, seconds: float, start: float) -> None:
        """Use CPU time until this thread has used `seconds` of CPU time since the thread time `start`."""
        while time.thread_time() - start < seconds:
            pass


@dataclass(frozen=True, slots=True)
class GpmSample:
    """Sample of the performance counters, of a GPU or of an instance."""

    moment: float
    gpu: ReplayedGpu
    instance: int | None  # id of the GPU instance; None for the whole GPU


class ReplayLibrary:
    """Replacement for `pynvml.nvmlLib` that replays a machine. The timeline starts at `origin`."""

    def __init__(self, description: dict[str, Any], *, clock: Clock, origin: float) -> None:
        self._machine = ReplayedMachine(description)
        self._description = description
        # Milliseconds of CPU time by function or field; the replay's own CPU time counts towards the cost.
        self._costs: dict[str, float] = description["costs"]
        self._clock = clock
        self._origin = origin
        self._initialized_at: float | None = None
        self._samples: dict[int, GpmSample | None] = {}  # by address; None before the first sample
        self._events = ReplayedEvents(self._machine)
        self._next_address = _EVENT_SET_AND_SAMPLE_BASE

    def __getattr__(self, symbol: str) -> Callable[..., Any]:
        """Return the replayed C function of a name. Raises AttributeError for a function that the machine's library lacks."""
        if symbol not in SYMBOLS or symbol in self._description["missing"]:
            raise AttributeError(symbol)
        if symbol == "nvmlErrorString":
            return lambda code: f"NVML error {to_int(code)}".encode()

        # A plain function, because pynvml sets attributes of some functions.
        def call(*arguments: Any) -> int:
            start = time.thread_time()
            try:
                self._call(symbol, arguments)
                code = SUCCESS
            except ReplayedError as error:
                code = CODES.get(str(error), SUCCESS)  # the timeline may also name the error `success`
            if self._costs and symbol != "nvmlEventSetWait_v2":
                self._clock.work(self._cost_milliseconds(symbol, arguments) / 1000, start)
            return code

        return call

    @property
    def _moment(self) -> float:
        """Seconds on the timeline."""
        return self._clock.now() - self._origin

    def _cost_milliseconds(self, symbol: str, arguments: tuple[Any, ...]) -> float:
        """Return the CPU time of a call: the sum over the fields of a field query, or the cost of the function."""
        default_cost = self._costs.get(_OTHER_CALLS, 0.0)
        if symbol == "nvmlDeviceGetFieldValues":
            _, count, array = arguments
            values = target_of(array)[: to_int(count)]
            return sum(self._costs.get(str(value.fieldId), default_cost) for value in values)
        if symbol == "nvmlDeviceGetSamples":
            # pynvml calls this function twice: without an array for the number of samples, and with an array. Only the latter has a cost.
            _, sample_type, *_, array = arguments
            buffer = SAMPLE_BUFFERS.get(to_int(sample_type))
            if array is None or buffer is None:
                return 0.0
            return self._costs.get(f"{symbol}/{buffer.reading}", default_cost)
        return self._costs.get(symbol, default_cost)

    def _call(self, symbol: str, arguments: tuple[Any, ...]) -> None:
        """Apply the faults to a function, and call the function. Raises ReplayedError."""
        if not self._description["library"]:
            raise ReplayedError("library_not_found")
        gpu, instance = None, None
        index = None
        if symbol not in _LIBRARY_METHODS:
            gpu, instance = self._resolve(arguments[0])
            index = gpu.index
        elif symbol == "nvmlDeviceGetHandleByIndex_v2":  # this function has an index instead of a handle
            gpus = self._machine.listed_gpus(self._moment)
            position = to_int(arguments[0])
            index = gpus[position].index if 0 <= position < len(gpus) else None
        self._apply_faults(symbol, index)
        if symbol != "nvmlInitWithFlags":
            if self._initialized_at is None:
                raise ReplayedError("uninitialized")
            if self._machine.driver(self._moment) != self._machine.driver(self._initialized_at):
                raise ReplayedError("lib_rm_version_mismatch")
        if gpu is None:
            getattr(self, f"_{_LIBRARY_METHODS[symbol]}")(*arguments)
            return
        moment = self._moment
        context = CallContext(
            gpu=gpu, moment=moment, wall=self._clock.wall(), driver=self._machine.driver(moment)
        )
        _, *other_arguments = arguments
        if instance is not None:
            self._call_instance(symbol, instance, context, other_arguments[0])
        elif symbol in CALLS:
            CALLS[symbol](context, *other_arguments)
        else:
            getattr(self, f"_{_GPU_METHODS[symbol]}")(context, *other_arguments)

    def _apply_faults(self, symbol: str, index: int | None) -> None:
        """Apply the faults of the timeline to a call: crash, hang, delay or error."""
        for fault in self._machine.active_faults(index, self._moment):
            entry = fault.entry
            if symbol in entry["crash"]:
                os.kill(os.getpid(), signal.SIGSEGV)
            if symbol in entry["hang"] or (EVERY_CALL in entry["hang"] and index is not None):
                while self._moment < fault.end:
                    time.sleep(_POLL_SECONDS)
            if symbol in entry["delay"]:
                self._clock.delay(entry["delay"][symbol])
            error = fault.errors.get(symbol)
            if error is None and index is not None:
                error = fault.errors.get(EVERY_CALL, "gpu_is_lost" if entry["removed"] else None)
            if error is not None:
                raise ReplayedError(error)

    # Handles are addresses that encode the GPU or MIG instance; pynvml does not dereference a handle.

    def _resolve(self, handle: Any) -> tuple[ReplayedGpu, dict[str, Any] | None]:
        """Return the GPU of a handle, and the MIG instance or None for a handle of the whole GPU. Raises ReplayedError."""
        address, gpus = _address(handle), self._machine.gpus
        if _GPU_BASE <= address < _GPU_BASE + len(gpus):
            return gpus[address - _GPU_BASE], None
        index, position = divmod(address - _INSTANCE_BASE, _INSTANCE_ADDRESSES_PER_GPU)
        if 0 <= index < len(gpus) and position < len(gpus[index].all_instances):
            return gpus[index], gpus[index].all_instances[position]
        raise ReplayedError("invalid_argument")

    def _new_address(self, result: Any) -> int:
        """Let a handle point to an address that no other handle has, and return the address."""
        self._next_address += 1
        _point(result, self._next_address)
        return self._next_address

    # Functions of the library.

    def _initialize(self, _flags: Any) -> None:
        self._initialized_at = self._moment

    def _shut_down(self) -> None:
        self._initialized_at = None

    def _write_driver_version(self, buffer: Any, _length: Any) -> None:
        buffer.value = self._machine.driver(self._moment).encode()

    def _write_cuda_version(self, result: Any) -> None:
        major, _, minor = self._description["cuda"].partition(".")
        write_number(result, int(major) * 1000 + int(minor or 0) * 10)

    def _write_gpu_count(self, result: Any) -> None:
        write_number(result, len(self._machine.listed_gpus(self._moment)))

    def _write_handle(self, position: Any, result: Any) -> None:
        gpus = self._machine.listed_gpus(self._moment)
        if not 0 <= to_int(position) < len(gpus):
            raise ReplayedError("invalid_argument")
        _point(result, _GPU_BASE + gpus[to_int(position)].index)

    # MIG instances.

    def _write_instance_count(self, context: CallContext, result: Any) -> None:
        context.reading("mig_mode")
        write_number(result, max(_MIN_INSTANCE_COUNT, len(context.gpu.instances(context.moment))))

    def _write_instance_handle(self, context: CallContext, position: Any, result: Any) -> None:
        instances = context.gpu.instances(context.moment)
        if not 0 <= to_int(position) < len(instances):
            raise ReplayedError("not_found")
        instance_index = context.gpu.all_instances.index(instances[to_int(position)])
        _point(result, _INSTANCE_BASE + context.gpu.index * _INSTANCE_ADDRESSES_PER_GPU + instance_index)

    def _call_instance(
        self, symbol: str, instance: dict[str, Any], context: CallContext, result: Any
    ) -> None:
        """Call a function of a MIG instance, which supports only its ids, UUID, name and memory."""
        gpu = context.gpu
        id_keys = {"nvmlDeviceGetGpuInstanceId": "gi", "nvmlDeviceGetComputeInstanceId": "ci"}
        if instance not in gpu.instances(context.moment):
            raise ReplayedError("invalid_argument")  # the instance was destroyed
        if symbol in id_keys:
            write_number(result, instance[id_keys[symbol]])
        elif symbol == "nvmlDeviceGetUUID":
            result.value = _instance_uuid(gpu, instance).encode()
        elif symbol == "nvmlDeviceGetName":
            result.value = f"{gpu.description['name']} MIG {instance['profile']}".encode()
        elif symbol == "nvmlDeviceGetMemoryInfo_v2":
            info = target_of(result)
            info.total = instance["memory"]
            # A description has no used memory of an instance: 10 % while idle, 70 % at full load.
            info.used = int(info.total * (0.1 + 0.6 * gpu.readings.load.level_at(context.moment)))
            info.free = info.total - info.used
        else:
            raise ReplayedError("not_supported")

    def _refuse_whole_gpu(self, _context: CallContext, _result: Any) -> None:
        raise ReplayedError("invalid_argument")  # only a MIG instance has these ids

    # Events.

    def _create_event_set(self, result: Any) -> None:
        self._new_address(result)

    def _register_events(self, context: CallContext, mask: Any, event_set: Any) -> None:
        if to_int(mask) & ~int(context.reading("event_types")):
            raise ReplayedError("not_supported")
        self._events.register(context.gpu, context.moment, event_set=_address(event_set))

    def _wait_for_event(self, event_set: Any, result: Any, milliseconds: Any) -> None:
        """Wait for the next event of a set.

        Raises ReplayedError after the timeout, or once a GPU of the set is lost and all earlier events are delivered.
        """
        end = time.monotonic() + to_int(milliseconds) / 1000
        address = _address(event_set)
        while True:
            next_event = self._events.next(address, self._moment)
            if next_event is not None:
                gpu, xid = next_event
                event = target_of(result)
                event.device = ctypes.cast(_GPU_BASE + gpu.index, type(event.device))
                event.eventType, event.eventData = XID, xid
                return
            if self._events.broken_since(address, self._moment) is not None:
                raise ReplayedError("gpu_is_lost")
            if time.monotonic() >= end:
                raise ReplayedError("timeout")
            time.sleep(min(_POLL_SECONDS, max(0.0, end - time.monotonic())))

    # Performance counters.

    def _write_gpm_support(self, context: CallContext, result: Any) -> None:
        support = target_of(result)
        check_version(support, 1)
        support.isSupportedDevice = int(bool(context.gpu.description["gpm"]))

    def _allocate_sample(self, result: Any) -> None:
        self._samples[self._new_address(result)] = None

    def _sample_gpu(self, context: CallContext, sample: Any) -> None:
        """Take a sample of the whole GPU, which is not supported while MIG is enabled."""
        if not context.gpu.description["gpm"] or context.optional_reading("mig_mode"):
            raise ReplayedError("not_supported")
        self._samples[_address(sample)] = GpmSample(context.moment, context.gpu, None)

    def _sample_instance(self, context: CallContext, instance: Any, sample: Any) -> None:
        """Take a sample of a GPU instance, given by its id."""
        if not any(
            candidate["gi"] == to_int(instance) for candidate in context.gpu.instances(context.moment)
        ):
            raise ReplayedError("not_found")
        self._samples[_address(sample)] = GpmSample(context.moment, context.gpu, to_int(instance))

    def _compute_metrics(self, request: Any) -> None:
        """Compute metrics between two samples. A metric is NaN if the samples are too close, as with NVML."""
        metrics = target_of(request)
        check_version(metrics, 1)
        earlier, later = (
            self._samples.get(_address(sample)) for sample in (metrics.sample1, metrics.sample2)
        )
        if earlier is None or later is None:
            raise ReplayedError("invalid_argument")
        if (earlier.gpu, earlier.instance) != (later.gpu, later.instance):
            raise ReplayedError("invalid_argument")
        start, end, gpu = earlier.moment, later.moment, earlier.gpu
        metric_requests = [metrics.metrics[position] for position in range(metrics.numMetrics)]
        max_metric_id = self._description["newest_metric"]
        if max_metric_id is not None and any(metric.metricId > max_metric_id for metric in metric_requests):
            raise ReplayedError("invalid_argument")
        for metric in metric_requests:
            value = gpu.readings.mean(f"gpm.{metric.metricId}", start, max(end, start + 1e-6))
            metric.nvmlReturn = SUCCESS if value is not None else CODES["not_supported"]
            if value is not None:
                metric.value = value if end - start >= MIN_INTERVAL_SECONDS else float("nan")


def _instance_uuid(gpu: ReplayedGpu, instance: dict[str, Any]) -> str:
    """Return the UUID of a MIG instance, which no other GPU and no other instance of the timeline has."""
    suffix = f"{gpu.index:02x}{instance['gi']:x}{instance['ci']:x}"
    # An instance of the timeline may have the ids of an earlier instance.
    later_count = gpu.all_instances.index(instance) - len(gpu.description["mig"]) + 1
    # Of the GPU's UUID, `GPU-` and eight digits, then the part that all its instances have, then four digits.
    gpu_prefix, common_part = gpu.description["uuid"][4:12], gpu.description["uuid"][12:-4]
    prefix = f"{later_count:08x}" if later_count > 0 else gpu_prefix
    return f"MIG-{prefix}{common_part}{suffix}"


def _point(reference: Any, address: int) -> None:
    """Let the opaque handle behind a `byref()` reference point to an address."""
    ctypes.cast(reference, ctypes.POINTER(ctypes.c_void_p))[0] = address


def _address(handle: Any) -> int:
    """Return the address to which an opaque handle points."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def install(binding: Any, replay: dict[str, Any], *, clock: Clock, origin: float) -> None:
    """Replace NVIDIA's library by a replayed machine (see `MachineDescription.plain`).

    The timeline starts at `origin`.
    """
    binding.nvmlLib = ReplayLibrary(replay, clock=clock, origin=origin)
    binding._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - the cache would keep functions of an earlier replay


def run() -> None:
    """Run the NVML child of a sidecar that replays. Does not return."""
    child.run(_install)


def _install(binding: Any, start: Mapping[str, Any]) -> None:
    """Replace NVIDIA's library by the machine of the message `start`. A later child continues the timeline of the first."""
    clock, origin = Clock(), start.get("origin")
    install(binding, start["replay"], clock=clock, origin=clock.now() if origin is None else origin)
