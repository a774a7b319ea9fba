"""Describe the GPUs of this machine, to be replayed where there are none: what a fault needs to be understood.

A program of its own, `python -m exporter.replay.capture > our-node.yaml`, for people; the sidecar does without
it. NVIDIA's library comes in through pynvml; a description (`description.MachineDescription`) goes to standard output. Everything
is asked twice: a counter is written down with what it grew in between. It takes a few seconds, and as much of the
driver's time as a first pass of the NVML child. Serial numbers and UUIDs are left out.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from typing import Any

from exporter.collectors.gpu.nvml import gpm
from exporter.collectors.gpu.nvml.device import ARCHITECTURES, Device, DeviceDownError, LibraryDownError
from exporter.collectors.gpu.nvml.library import CallFailedError, Library
from exporter.replay.calls import BY_NUMBER, ENGINES, MEMORY_ERRORS, ONE_NUMBER, SEVERAL
from exporter.replay.library import SYMBOLS
from exporter.replay.lists import OF_LINKS, readings_of_driver

_COUNTERS = (
    "energy",
    "throttle_",
    "pcie_transmit_bytes",
    "pcie_receive_bytes",
    "nvlink_transmit_",
    "nvlink_receive_",
)
_SHARED_FIELDS = frozenset({38, 45, 52, 59, 160, *range(173, 184)})
"""One reading of a description is behind several of these."""

_UNNAMED_FIELDS = (90,)
_METRICS = ((gpm.GRAPHICS_ACTIVITY, *gpm.ACTIVITY, *gpm.ACTIVITY_DETAILS), tuple(gpm.RATES))
NEWEST = max(ARCHITECTURES.items())[1]
_MEMORY_V2 = 0x02000028
_SECONDS = 2.0
_ALL_ONES = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})

_REGISTERS = frozenset({"pcie_transmit_bytes", "pcie_receive_bytes"})
"""Counters of 32 bits."""

Values = dict[str, float]


class Card:
    """One GPU that is asked for everything.

    Args:
        library: NVML.
        index: NVML's.
        driver: Its version, by which some fields have other numbers.
        clock: Monotonic seconds.

    Raises:
        CallFailedError: It does not answer.
    """

    def __init__(self, library: Library, index: int, *, driver: str, clock: Callable[[], float]) -> None:
        named = readings_of_driver(driver)
        self._named = {number: name for number, name in named.items() if number not in _SHARED_FIELDS}
        self._library = library
        self._clock = clock
        self._handle = library.call("nvmlDeviceGetHandleByIndex", index)
        self._device = Device(library, self._handle, index=index, uuid="", reprobe_seconds=0)
        self._metrics = gpm.Metrics(self._device, "gpm", "nvmlGpmSampleGet")
        self.name = str(self._ask("nvmlDeviceGetName") or "")
        # One that is not known yet is as new as the newest.
        self.architecture = ARCHITECTURES.get(self._ask("nvmlDeviceGetArchitecture"), NEWEST)
        self.capability = ".".join(map(str, self._ask("nvmlDeviceGetCudaComputeCapability") or (0, 0)))

    def readings(self) -> Values:
        """Everything that has a name in a description."""
        found: Values = {}
        for name, value in (*self._numbers(), *self._structures(), *self._fields(), *self._links()):
            if value is not None and isfinite(value):
                found.setdefault(name, value)
        return found

    def fields(self) -> Values:
        """Fields that a description has by their number."""
        wanted = (*sorted(_SHARED_FIELDS), *_UNNAMED_FIELDS)
        return {str(number): value for number, value in self._device.fields(wanted).items()}

    def metrics(self) -> Values:
        """Performance counters since the last time; none the first time."""
        self._device.now = self._clock()
        found = self._metrics.read(*_METRICS) or {}
        return {str(number): value for number, value in found.items()}

    def processes(self) -> list[dict[str, int]]:
        """Who computes on it."""
        running = self._ask("nvmlDeviceGetComputeRunningProcesses_v3") or []
        return [{"pid": each.pid, **_known("memory", each.usedGpuMemory)} for each in running if each.pid]

    def instances(self) -> list[dict[str, Any]]:
        """Its instances while it is divided."""
        found = []
        for place in range(self._ask("nvmlDeviceGetMaxMigDeviceCount") or 0):
            handle = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", place)
            if handle is None:
                continue
            memory = self._ask("nvmlDeviceGetMemoryInfo", _MEMORY_V2, handle=handle)
            found.append(
                {
                    "gi": self._ask("nvmlDeviceGetGpuInstanceId", handle=handle) or 0,
                    "ci": self._ask("nvmlDeviceGetComputeInstanceId", handle=handle) or 0,
                    "profile": str(self._ask("nvmlDeviceGetName", handle=handle)).rpartition("MIG ")[2],
                    "memory": memory.total if memory else 0,
                }
            )
        return found

    def _ask(self, call: str, *arguments: Any, handle: Any = None) -> Any:
        try:
            return self._library.call(call, self._handle if handle is None else handle, *arguments)
        except CallFailedError:
            return None

    def _numbers(self) -> Iterator[tuple[str, float | None]]:
        for call, name in ONE_NUMBER.items():
            if name != "architecture":
                yield name, self._ask(call)
        for call, names in BY_NUMBER.items():
            for place, name in enumerate(names):
                yield name, self._ask(call, place)
        for call, names in SEVERAL.items():
            yield from zip(names, self._ask(call) or (None,) * len(names), strict=True)
        for call, name in ENGINES.items():
            yield name, (self._ask(call) or (None,))[0]

    def _structures(self) -> Iterator[tuple[str, float | None]]:
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        yield from _parts(rates, utilization="gpu", memory_utilization="memory")
        memory = self._ask("nvmlDeviceGetMemoryInfo", _MEMORY_V2) or self._ask("nvmlDeviceGetMemoryInfo")
        yield from _parts(memory, memory_total="total", memory_used="used", memory_reserved="reserved")
        yield "temperature_margin", self._ask("nvmlDeviceGetMarginTemperature")
        yield "fan_speed", self._ask("nvmlDeviceGetFanSpeed_v2", 0)
        yield "sample_buffers", 1 if self._ask("nvmlDeviceGetSamples", 0, 0) else None
        for (kind, counter, location), name in MEMORY_ERRORS.items():
            yield name, self._ask("nvmlDeviceGetMemoryErrorCounter", kind, counter, location)
        status = self._filled("c_nvmlEccSramErrorStatus_v1_t", "nvmlDeviceGetSramEccErrorStatus")
        yield from _parts(status, sram_threshold="bThresholdExceeded")
        fabric = self._filled("c_nvmlGpuFabricInfo_v2_t", "nvmlDeviceGetGpuFabricInfoV")
        yield from _parts(fabric if fabric and fabric.state else None, fabric_state="state")
        for cause, name in enumerate(("retired_pages_sbe", "retired_pages_dbe")):
            pages = self._ask("nvmlDeviceGetRetiredPages", cause)
            yield name, None if pages is None else len(pages)

    def _filled(self, structure: str, call: str) -> Any:
        made = getattr(self._library.binding, structure, None)
        if made is None:
            return None
        filled = made()
        return None if self._ask(call, ctypes.byref(filled)) is None else filled

    def _fields(self) -> Iterator[tuple[str, float | None]]:
        for number, value in self._device.fields(self._named).items():
            if isinstance(number, int) and value not in _ALL_ONES:
                yield self._named[number], value

    def _links(self) -> Iterator[tuple[str, float | None]]:
        ports = self._device.fields((91,)).get(91) or 0
        states = [self._ask("nvmlDeviceGetNvLinkState", link) for link in range(int(ports))]
        active = [link for link, state in enumerate(states) if state]
        if ports:
            yield "nvlinks_active", len(active)
        if active:
            for (number, _), value in self._device.fields([(field, active[0]) for field in OF_LINKS]).items():  # type: ignore[misc]  # all of them are pairs
                yield OF_LINKS[number], value


def capture(
    library: Library,
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Describe the machine.

    Args:
        library: NVML, initialised.
        clock: Monotonic seconds.
        wait: Lets time go by between two looks.

    Raises:
        CallFailedError: NVML does not say how many GPUs there are.
    """
    versions = _versions(library)
    count = library.call("nvmlDeviceGetCount")
    found = (_card(library, index, versions["driver"], clock) for index in range(count))
    cards = [card for card in found if card is not None]
    looks: list[list[tuple[Values, Values, Values]]] = []
    for _ in range(3):  # performance counters are known from the second on
        if looks:
            wait(_SECONDS)
        looks.append([_look(card) for card in cards])
    models: dict[str, dict[str, Any]] = {}
    gpus = []
    for card, before, after in zip(cards, looks[-2], looks[-1], strict=True):
        values, fields, metrics = (_growing(*pair) for pair in zip(before, after, strict=True))
        key = card.name.lower().replace(" ", "-")
        if key in models:
            usual = models[key]["values"]
            values = {
                name: values.get(name) for name in usual | values if usual.get(name) != values.get(name)
            }
        else:
            models[key] = {
                "name": card.name,
                "architecture": card.architecture,
                "compute_capability": card.capability,
                "values": values,
                "fields": fields,
                "gpm": metrics,
                "mig": card.instances(),
            }
            values = {}
        gpus.append({"model": key, "values": values, "processes": card.processes()})
    missing = sorted(_missing(library))
    return {
        "description": "Captured.",
        **versions,
        "missing": missing,
        "models": models,
        "gpus": gpus,
    }


def _card(library: Library, index: int, driver: str, clock: Callable[[], float]) -> Card | None:
    try:
        return Card(library, index, driver=driver, clock=clock)
    except CallFailedError as failure:
        sys.stderr.write(f"GPU {index} is left out: {failure}\n")
        return None


def _look(card: Card) -> tuple[Values, Values, Values]:
    try:
        return card.readings(), card.fields(), card.metrics()
    except (DeviceDownError, LibraryDownError) as error:
        sys.stderr.write(f"{card.name} has gone: {error.reason}\n")
        return {}, {}, {}


def _growing(before: Values, after: Values) -> dict[str, Any]:
    """Numbers as a description has them; what only grows with its pace."""
    found: dict[str, Any] = {}
    for name, value in after.items():
        if name.startswith(_COUNTERS):
            pace = max(0.0, value - before.get(name, value)) / _SECONDS
            bits = {"bits": 32} if name in _REGISTERS else {}
            found[name] = {"idle": round(pace, 3), "counter_from": int(value), **bits}
        else:
            found[name] = value
    return found


def _versions(library: Library) -> dict[str, str]:
    driver, nvml = (str(library.call(f"nvmlSystemGet{what}Version")) for what in ("Driver", "NVML"))
    cuda = library.call("nvmlSystemGetCudaDriverVersion_v2")
    return {"driver": driver, "nvml": nvml, "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}"}


def _missing(library: Library) -> Iterator[str]:
    loaded = library.binding.nvmlLib
    for symbol in SYMBOLS:
        try:
            getattr(loaded, symbol)
        except AttributeError:  # noqa: PERF203 - that is the question
            yield symbol


def _parts(structure: Any, **names: str) -> Iterator[tuple[str, float | None]]:
    for name, member in names.items():
        yield name, getattr(structure, member, None)


def _known(name: str, value: int | None) -> dict[str, int]:
    return {} if value is None else {name: value}


def write(value: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """YAML lines of a description; what is below the readings is written as JSON, which is YAML too."""
    for key, inner in value.items():
        name = key if key.replace("_", "").replace("-", "").isalpha() else json.dumps(key)
        if isinstance(inner, Mapping) and inner and not {"idle", "pid"} & inner.keys():
            yield f"{indent}{name}:"
            yield from write(inner, indent + "  ")
        elif isinstance(inner, list) and inner and isinstance(inner[0], Mapping):
            yield f"{indent}{name}:"
            yield from (f"{indent}  - {json.dumps(each)}" for each in inner)
        else:
            yield f"{indent}{name}: {json.dumps(inner)}"


def main() -> int:
    """Describe this machine."""
    import pynvml  # noqa: PLC0415 - nobody else of the sidecar's side may load it

    library = Library(pynvml, clock=time.monotonic)
    try:
        library.call("nvmlInit")
        described = capture(library)
    except CallFailedError as failure:
        sys.stderr.write(f"NVML does not answer: {failure}\n")
        return 1
    sys.stdout.write("\n".join((*write(described), "")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
