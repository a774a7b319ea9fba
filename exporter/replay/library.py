"""A replayed machine in the place of NVIDIA's library.

Used in the NVML child: an object assigned to `pynvml.nvmlLib` before `nvmlInit`. pynvml looks functions up on it
by their C names and calls them with ctypes arguments, so that all of pynvml is the real thing: structures and
their versions, two-call protocols, exceptions. What happens to a call is decided in one place, `_enter`: faults of
the timeline come first, then the function itself. Where the description says what calls cost, each keeps the
processor busy for as long as it does on the real card.

A function that the described driver does not have is an AttributeError, which is how pynvml finds out.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

from exporter.collectors.gpu.nvml.library import CODES, SUCCESS
from exporter.replay.calls import CALLS, INVALID, NOT_SUPPORTED, Asked, behind, number, put
from exporter.replay.lists import LISTS, SAMPLES, field_values
from exporter.replay.timeline import EVERY_CALL, ReplayedEvents, ReplayedGpu, ReplayedMachine

_GPU_BASE = 0x1000
_INSTANCE_BASE = 0x100000
_INSTANCES_PER_GPU = 0x100
_MOST_INSTANCES = 7
_OTHER_BASE = 0x10000000

_NOT_FOUND = CODES["not_found"]
_TIMEOUT = CODES["timeout"]

DEVICE_CALLS = {**CALLS, **LISTS}
"""Functions whose first argument is a GPU's handle, and that need nothing but the GPU."""

_LOOK_SECONDS = 0.05
_GPM_LEAST_SECONDS = 0.1

_LIBRARY_CALLS = (
    "nvmlInitWithFlags",
    "nvmlShutdown",
    "nvmlErrorString",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetNVMLVersion",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlEventSetCreate",
    "nvmlEventSetWait_v2",
    "nvmlGpmSampleAlloc",
    "nvmlGpmSampleFree",
    "nvmlGpmMetricsGet",
)
_HANDLE_CALLS = (
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetAttributes_v2",
    "nvmlDeviceRegisterEvents",
    "nvmlGpmQueryDeviceSupport",
    "nvmlGpmSampleGet",
    "nvmlGpmMigSampleGet",
)
"""Methods below whose first argument is a GPU's handle."""

SYMBOLS = frozenset({*DEVICE_CALLS, *_LIBRARY_CALLS, *_HANDLE_CALLS})
"""Every function of NVML that a replay has."""

OTHERS = "*"
"""What a call costs that the description does not name."""

COST_KEYS = frozenset(
    {*SYMBOLS, OTHERS, *(f"nvmlDeviceGetSamples/{name}" for name, _, _ in SAMPLES.values())}
)
"""What a description may say the cost of, beside field ids."""


class Clock(Protocol):
    """The time of a replay."""

    def now(self) -> float:
        """Monotonic seconds."""

    def wall(self) -> float:
        """Unix seconds."""

    def delay(self, seconds: float) -> None:
        """Let time go by, as a call does that takes long."""

    def work(self, seconds: float, since: float) -> None:
        """Keep the processor busy, until this thread has had so much of it since a moment of its own time."""


class ReplayLibrary:
    """What `pynvml.nvmlLib` is during a replay.

    Args:
        description: See `description.Machine.plain`.
        clock: The child's.
        origin: When the timeline began, on that clock.
    """

    def __init__(self, description: dict[str, Any], *, clock: Clock, origin: float) -> None:
        self._machine = ReplayedMachine(description)
        self._missing = frozenset(description["missing"])
        self._newest_field: int | None = description["newest_field"]
        self._newest_metric: int | None = description["newest_metric"]
        # Milliseconds of processor time by function or field; as far as the replay itself takes less.
        self._costs: dict[str, float] = description["costs"]
        self._clock = clock
        self._origin = origin
        self._initialised_at: float | None = None
        self._samples: dict[int, tuple[float, ReplayedGpu, int | None] | None] = {}
        self._events = ReplayedEvents(self._machine)
        self._next_address = _OTHER_BASE

    def __getattr__(self, symbol: str) -> Callable[..., Any]:
        if symbol not in SYMBOLS or symbol in self._missing:
            raise AttributeError(symbol)
        if symbol == "nvmlErrorString":
            return _error_string

        # A plain function: pynvml sets attributes on some.
        def call(*arguments: Any) -> int:
            return self._enter(symbol, arguments)

        return call

    @property
    def _moment(self) -> float:
        return self._clock.now() - self._origin

    def _enter(self, symbol: str, arguments: tuple[Any, ...]) -> int:
        began = time.thread_time()
        code = self._answer(symbol, arguments)
        if self._costs and symbol != "nvmlEventSetWait_v2":
            self._clock.work(self._cost(symbol, arguments) / 1000, began)
        return code

    def _cost(self, symbol: str, arguments: tuple[Any, ...]) -> float:
        others = self._costs.get(OTHERS, 0.0)
        if symbol == "nvmlDeviceGetFieldValues":
            asked = behind(arguments[2])[: number(arguments[1])]
            return sum(self._costs.get(str(value.fieldId), others) for value in asked)
        if symbol == "nvmlDeviceGetSamples":
            # Called twice by the binding: for the number, and for the samples.
            name = SAMPLES.get(number(arguments[1]), ("",))[0]
            return 0.0 if arguments[5] is None else self._costs.get(f"{symbol}/{name}", others)
        return self._costs.get(symbol, others)

    def _answer(self, symbol: str, arguments: tuple[Any, ...]) -> int:
        if not self._machine.library_is_there():
            return CODES["library_not_found"]
        gpu, instance = None, None
        if symbol in DEVICE_CALLS or symbol in _HANDLE_CALLS:
            gpu, instance = self._resolve(arguments[0])
            if gpu is None:
                return INVALID
        index = self._index_of(symbol, arguments) if gpu is None else gpu.index
        code, returned = self._suffer(symbol, index)
        if code is not None:
            return code
        if symbol != "nvmlInitWithFlags":
            if self._initialised_at is None:
                return CODES["uninitialized"]
            if self._machine.driver(self._moment) != self._machine.driver(self._initialised_at):
                return CODES["lib_rm_version_mismatch"]
        if gpu is None:
            return int(getattr(self, f"_{symbol}")(*arguments))
        asked = Asked(gpu, self._moment, self._clock.wall(), returned)
        if instance is not None:
            return self._on_instance(symbol, gpu, instance, asked, arguments[1:])
        if symbol in DEVICE_CALLS:
            return int(DEVICE_CALLS[symbol](asked, *arguments[1:]))
        return int(getattr(self, f"_{symbol}")(asked, *arguments[1:]))

    def _index_of(self, symbol: str, arguments: tuple[Any, ...]) -> int | None:
        """The GPU that a call concerns which has no handle of it yet."""
        if symbol != "nvmlDeviceGetHandleByIndex_v2":
            return None
        present = self._machine.present(self._moment)
        place = number(arguments[0])
        return present[place].index if 0 <= place < len(present) else None

    def _suffer(self, symbol: str, index: int | None) -> tuple[int | None, float | None]:
        """What the timeline does to a call: a code that ends it, or else what it gives."""
        returned = None
        for fault in self._machine.under_way(index, self._moment):
            if symbol in fault.crashes:
                os.kill(os.getpid(), signal.SIGSEGV)
            if symbol in fault.hangs or (EVERY_CALL in fault.hangs and index is not None):
                while self._moment < fault.until:
                    time.sleep(_LOOK_SECONDS)
            if symbol in fault.delays:
                self._clock.delay(fault.delays[symbol])
            code = fault.errors.get(symbol)
            if code is None and (fault.removed or EVERY_CALL in fault.errors) and index is not None:
                code = fault.errors.get(EVERY_CALL, CODES["gpu_is_lost"])
            if code is not None:
                return code, None
            if returned is None:
                returned = fault.returns.get(symbol)
        return None, returned

    # Handles: an address that says what it is, as no one looks behind it.

    def _resolve(self, handle: Any) -> tuple[ReplayedGpu | None, dict[str, Any] | None]:
        address = ctypes.cast(handle, ctypes.c_void_p).value or 0
        if _GPU_BASE <= address < _GPU_BASE + len(self._machine.gpus):
            return self._machine.gpus[address - _GPU_BASE], None
        index, place = divmod(address - _INSTANCE_BASE, _INSTANCES_PER_GPU)
        if 0 <= index < len(self._machine.gpus) and place < len(self._machine.gpus[index].all_instances):
            gpu = self._machine.gpus[index]
            return gpu, gpu.all_instances[place]
        return None, None

    def _new_address(self) -> int:
        self._next_address += 1
        return self._next_address

    # The library itself.

    def _nvmlInitWithFlags(self, _flags: Any) -> int:  # noqa: N802 - NVML's names, so that they are found
        self._initialised_at = self._moment
        return SUCCESS

    def _nvmlShutdown(self) -> int:  # noqa: N802
        self._initialised_at = None
        return SUCCESS

    def _nvmlSystemGetDriverVersion(self, buffer: Any, _length: Any) -> int:  # noqa: N802
        buffer.value = self._machine.driver(self._moment).encode()
        return SUCCESS

    def _nvmlSystemGetNVMLVersion(self, buffer: Any, _length: Any) -> int:  # noqa: N802
        buffer.value = self._machine.description["nvml"].encode()
        return SUCCESS

    def _nvmlSystemGetCudaDriverVersion_v2(self, result: Any) -> int:  # noqa: N802
        major, _, minor = self._machine.description["cuda"].partition(".")
        put(result, int(major) * 1000 + int(minor or 0) * 10)
        return SUCCESS

    def _nvmlDeviceGetCount_v2(self, result: Any) -> int:  # noqa: N802
        put(result, len(self._machine.present(self._moment)))
        return SUCCESS

    def _nvmlDeviceGetHandleByIndex_v2(self, place: Any, result: Any) -> int:  # noqa: N802
        present = self._machine.present(self._moment)
        if not 0 <= number(place) < len(present):
            return INVALID
        _point(result, _GPU_BASE + present[number(place)].index)
        return SUCCESS

    def _nvmlDeviceGetFieldValues(self, asked: Asked, count: Any, array: Any) -> int:  # noqa: N802
        driver = self._machine.driver(self._moment)
        return field_values(asked, count, array, driver=driver, newest=self._newest_field)

    # Instances of a divided GPU.

    def _nvmlDeviceGetMaxMigDeviceCount(self, asked: Asked, result: Any) -> int:  # noqa: N802
        if asked.reading("mig_mode") is None:
            return NOT_SUPPORTED
        put(result, max(_MOST_INSTANCES, len(asked.gpu.instances(asked.moment))))
        return SUCCESS

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, asked: Asked, place: Any, result: Any) -> int:  # noqa: N802
        there = asked.gpu.instances(asked.moment)
        if not 0 <= number(place) < len(there):
            return _NOT_FOUND
        which = asked.gpu.all_instances.index(there[number(place)])
        _point(result, _INSTANCE_BASE + asked.gpu.index * _INSTANCES_PER_GPU + which)
        return SUCCESS

    def _on_instance(
        self,
        symbol: str,
        gpu: ReplayedGpu,
        instance: dict[str, Any],
        asked: Asked,
        arguments: tuple[Any, ...],
    ) -> int:
        numbers = {"nvmlDeviceGetGpuInstanceId": "gi", "nvmlDeviceGetComputeInstanceId": "ci"}
        if instance not in gpu.instances(asked.moment):
            return INVALID  # it was destroyed
        if symbol in numbers:
            put(arguments[0], instance[numbers[symbol]])
        elif symbol == "nvmlDeviceGetUUID":
            own = f"{gpu.index:02x}{instance['gi']:x}{instance['ci']:x}"
            which = gpu.all_instances.index(instance)
            made = which - len(gpu.description["mig"]) + 1  # each that is made later has a UUID of its own
            first = f"{made:08x}" if made > 0 else gpu.description["uuid"][4:12]
            arguments[0].value = f"MIG-{first}{gpu.description['uuid'][12:-4]}{own}".encode()
        elif symbol == "nvmlDeviceGetName":
            arguments[0].value = f"{gpu.description['name']} MIG {instance['profile']}".encode()
        elif symbol == "nvmlDeviceGetMemoryInfo_v2":
            info = behind(arguments[0])
            level = gpu.readings.load.at(asked.moment)
            info.total = instance["memory"]
            info.used = int(instance["memory"] * min(0.9, 0.1 + 0.6 * level))
            info.free = info.total - info.used
        else:
            return NOT_SUPPORTED
        return SUCCESS

    def _nvmlDeviceGetGpuInstanceId(self, _asked: Asked, _result: Any) -> int:  # noqa: N802
        return INVALID  # of a whole GPU

    def _nvmlDeviceGetComputeInstanceId(self, _asked: Asked, _result: Any) -> int:  # noqa: N802
        return INVALID

    def _nvmlDeviceGetAttributes_v2(self, _asked: Asked, _result: Any) -> int:  # noqa: N802
        return INVALID

    # Events.

    def _nvmlEventSetCreate(self, result: Any) -> int:  # noqa: N802
        _point(result, self._new_address())
        return SUCCESS

    def _nvmlDeviceRegisterEvents(self, asked: Asked, mask: Any, event_set: Any) -> int:  # noqa: N802
        supported = asked.reading("event_types")
        if supported is None or number(mask) & ~int(supported):
            return NOT_SUPPORTED
        self._events.register(asked.gpu, number(mask), asked.moment, event_set=_address(event_set))
        return SUCCESS

    def _nvmlEventSetWait_v2(self, event_set: Any, result: Any, milliseconds: Any) -> int:  # noqa: N802
        end = time.monotonic() + number(milliseconds) / 1000
        address = _address(event_set)
        while True:
            happened = self._events.next(address, self._moment)
            if happened is not None:
                event = behind(result)
                event.device = ctypes.cast(_GPU_BASE + happened[0].index, type(event.device))
                event.eventType, event.eventData = happened[1:]
                return SUCCESS
            if self._events.broken_since(address, self._moment) is not None:
                return CODES["gpu_is_lost"]
            if time.monotonic() >= end:
                return _TIMEOUT
            time.sleep(min(_LOOK_SECONDS, max(0.0, end - time.monotonic())))

    # Performance counters.

    def _nvmlGpmQueryDeviceSupport(self, asked: Asked, result: Any) -> int:  # noqa: N802
        support = behind(result)
        if support.version != 1:
            return CODES["argument_version_mismatch"]
        support.isSupportedDevice = int(bool(asked.gpu.description["gpm"]))
        return SUCCESS

    def _nvmlGpmSampleAlloc(self, result: Any) -> int:  # noqa: N802
        address = self._new_address()
        self._samples[address] = None
        _point(result, address)
        return SUCCESS

    def _nvmlGpmSampleFree(self, sample: Any) -> int:  # noqa: N802
        return SUCCESS if self._samples.pop(_address(sample), 0) != 0 else INVALID

    def _nvmlGpmSampleGet(self, asked: Asked, sample: Any) -> int:  # noqa: N802
        if _address(sample) not in self._samples:
            return INVALID
        if not asked.gpu.description["gpm"] or asked.reading("mig_mode"):
            return NOT_SUPPORTED
        self._samples[_address(sample)] = (asked.moment, asked.gpu, None)
        return SUCCESS

    def _nvmlGpmMigSampleGet(self, asked: Asked, instance: Any, sample: Any) -> int:  # noqa: N802
        if _address(sample) not in self._samples:
            return INVALID
        if not any(each["gi"] == number(instance) for each in asked.gpu.instances(asked.moment)):
            return _NOT_FOUND
        self._samples[_address(sample)] = (asked.moment, asked.gpu, number(instance))
        return SUCCESS

    def _nvmlGpmMetricsGet(self, request: Any) -> int:  # noqa: N802
        metrics = behind(request)
        if metrics.version != 1:
            return CODES["argument_version_mismatch"]
        earlier = self._samples.get(_address(metrics.sample1))
        later = self._samples.get(_address(metrics.sample2))
        if earlier is None or later is None or earlier[1:] != later[1:]:
            return INVALID
        begin, gpu, _ = earlier
        end = later[0]
        asked = [metrics.metrics[place] for place in range(metrics.numMetrics)]
        if self._newest_metric is not None and any(each.metricId > self._newest_metric for each in asked):
            return INVALID
        for metric in asked:
            value = gpu.readings.mean(f"gpm.{metric.metricId}", begin, max(end, begin + 1e-6))
            metric.nvmlReturn = SUCCESS if value is not None else NOT_SUPPORTED
            if value is not None:
                metric.value = value if end - begin >= _GPM_LEAST_SECONDS else float("nan")
        return SUCCESS


def _error_string(code: Any) -> bytes:
    return f"NVML error {number(code)}".encode()


def _point(reference: Any, address: int) -> None:
    """Let an opaque handle point to an address."""
    ctypes.cast(reference, ctypes.POINTER(ctypes.c_void_p))[0] = address


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
