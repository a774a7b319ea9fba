"""Describe the GPUs of this machine, to be replayed where there are none: what a fault needs to be understood.

`python -m exporter.replay.capture > our-node.yaml`, for people. Everything is asked twice: a counter is written down with
what it grew in between. Serial numbers and UUIDs are left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite
from typing import Any

import yaml

from exporter.collectors.gpu.nvml.device import ARCHITECTURES, Device, DownError, Field, Out
from exporter.collectors.gpu.nvml.integrals import (
    ACTIVITY,
    ACTIVITY_DETAILS,
    GRAPHICS_ACTIVITY,
    RATES,
    Metrics,
)
from exporter.collectors.gpu.nvml.library import CallFailedError, Library
from exporter.collectors.gpu.nvml.mig import Mig
from exporter.collectors.gpu.nvml.readings import MEMORY_V2, sram_exceeded
from exporter.replay.calls import (
    BY_NUMBER,
    LINK_FIELDS,
    MEMORY_ERRORS,
    ONE_NUMBER,
    SEVERAL,
    fields_of_driver,
)
from exporter.replay.library import SYMBOLS

_COUNTERS = ("energy", "throttle_", "nvlink_transmit_", "nvlink_receive_")
# One reading of a description is behind several of these, so they are written down by their number.
_SHARED_FIELDS = frozenset({38, 45, 52, 59, 160, 173, 179, 180})
_SECONDS = 2.0
_ALL_ONES = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})

Look = dict[str, dict[str, float]]
"""What a card says at a moment: readings by name, `fields` and `gpm` by their number."""


class Card:
    """One GPU that is asked for everything; raises CallFailedError where it does not answer."""

    def __init__(self, library: Library, index: int, *, driver: str, clock: Callable[[], float]) -> None:
        self._named = fields_of_driver(driver)
        self._clock = clock
        handle = library.call("nvmlDeviceGetHandleByIndex", index)
        self._device = Device(library, handle, index=index, reprobe_seconds=0)
        self._metrics = Metrics(self._device, "gpm", "nvmlGpmSampleGet")
        self.name = str(self._ask("nvmlDeviceGetName") or "")
        # One that is not known yet is as new as the newest.
        newest = max(ARCHITECTURES.items())[1]
        self.architecture = ARCHITECTURES.get(self._ask("nvmlDeviceGetArchitecture"), newest)
        self.capability = ".".join(map(str, self._ask("nvmlDeviceGetCudaComputeCapability") or (0, 0)))

    def look(self) -> Look:
        """Ask for everything."""
        self._device.now = self._clock()
        try:
            values = {name: value for name, value in self._values() if value is not None and isfinite(value)}
            fields = self._fields(_SHARED_FIELDS)
            metrics = self._metrics.read((GRAPHICS_ACTIVITY, *ACTIVITY, *ACTIVITY_DETAILS), RATES) or {}
        except DownError as error:
            sys.stderr.write(f"{self.name} has gone: {error.reason}\n")
            return {"values": {}, "fields": {}, "gpm": {}}
        by_number = ({str(key): value for key, value in found.items()} for found in (fields, metrics))
        return {"values": values, **dict(zip(("fields", "gpm"), by_number, strict=True))}

    def instances(self) -> list[dict[str, Any]]:
        """Its instances while it is divided."""
        mig, out = Mig(self._device), Out()
        mig.find()
        mig.read(out)
        return [
            {**{name: each[name] for name in ("gi", "ci", "profile")}, "memory": each["memory_total"] or 0}
            for each in out["mig"] or ()
        ]

    def _ask(self, call: str, *arguments: Any) -> Any:
        return self._device.ask(call, call, *arguments)

    def _fields(self, wanted: Iterable[Field]) -> dict[Field, float]:
        return self._device.fields(dict.fromkeys(wanted, float))

    def _values(self) -> Iterator[tuple[str, float | None]]:
        for call, name in ONE_NUMBER.items():
            if name != "architecture":
                yield name, self._ask(call)
        for call, names in BY_NUMBER.items():
            for place, name in enumerate(names):
                if name:
                    yield name, self._ask(call, place)
        for call, names in SEVERAL.items():
            yield from zip(names, self._ask(call) or (None,) * len(names), strict=True)
        for which, name in MEMORY_ERRORS.items():
            yield name, self._ask("nvmlDeviceGetMemoryErrorCounter", *which)
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        yield "utilization", getattr(rates, "gpu", None)
        yield "memory_utilization", getattr(rates, "memory", None)
        memory = self._ask("nvmlDeviceGetMemoryInfo", MEMORY_V2) or self._ask("nvmlDeviceGetMemoryInfo")
        for part in ("total", "used", "reserved"):
            yield f"memory_{part}", getattr(memory, part, None)
        yield "temperature_margin", self._ask("nvmlDeviceGetMarginTemperature")
        yield "sample_buffers", 1 if self._ask("nvmlDeviceGetSamples", 0, 0) else None
        yield "sram_threshold", sram_exceeded(self._device)
        named = {field: name for field, name in self._named.items() if field not in _SHARED_FIELDS}
        for field, value in self._fields(named).items():
            if isinstance(field, int) and value not in _ALL_ONES:
                yield named[field], value
        ports = int(self._fields((91,)).get(91) or 0)
        active = [link for link in range(ports) if self._ask("nvmlDeviceGetNvLinkState", link)]
        if ports:
            yield "nvlinks_active", len(active)
        for link in active[:1]:
            for scoped, value in self._fields((field, link) for field in LINK_FIELDS).items():
                if isinstance(scoped, tuple):
                    yield LINK_FIELDS[scoped[0]], value


def capture(
    library: Library,
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Describe the machine of an initialised library; `wait` lets time go by between two looks.

    Raises:
        CallFailedError: NVML does not say how many GPUs there are.
    """
    cuda = library.call("nvmlSystemGetCudaDriverVersion_v2")
    described: dict[str, Any] = {
        "description": "Captured.",
        "driver": str(library.call("nvmlSystemGetDriverVersion")),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "missing": sorted(symbol for symbol in SYMBOLS if not hasattr(library.binding.nvmlLib, symbol)),
    }
    cards = []
    for index in range(library.call("nvmlDeviceGetCount")):
        try:
            cards.append(Card(library, index, driver=described["driver"], clock=clock))
        except (CallFailedError, DownError) as failure:  # noqa: PERF203 - it costs only itself
            sys.stderr.write(f"GPU {index} is left out: {failure}\n")
    looks: list[list[Look]] = []
    for _ in range(3):  # performance counters are known from the second on
        if looks:
            wait(_SECONDS)
        looks.append([card.look() for card in cards])
    models: dict[str, dict[str, Any]] = {}
    gpus = []
    for card, before, after in zip(cards, looks[-2], looks[-1], strict=True):
        values = _growing(before["values"], after["values"])
        key = card.name.lower().replace(" ", "-")
        model = {
            "name": card.name,
            "architecture": card.architecture,
            "compute_capability": card.capability,
            **after,
            "values": values,
            "mig": card.instances(),
        }
        usual = models.setdefault(key, model)["values"]
        differs = {name: values.get(name) for name in usual | values if usual.get(name) != values.get(name)}
        gpus.append({"model": key, "values": differs})
    return {**described, "models": models, "gpus": gpus}


def _growing(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """Numbers as a description has them; what only grows with its pace."""
    found: dict[str, Any] = dict(after)
    for name, value in after.items():
        if name.startswith(_COUNTERS):
            pace = max(0.0, value - before.get(name, value)) / _SECONDS
            found[name] = {"idle": round(pace, 3), "counter_from": int(value)}
    return found


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
    yaml.safe_dump(described, sys.stdout, sort_keys=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
