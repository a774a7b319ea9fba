"""One GPU, what is known of each thing that can be asked of it, and its numbers in base units.

Used in the NVML child, by the thread that samples. A question has a name (`power`, `field.82`). What is unsupported or
forbidden is not asked again for ten minutes, since some calls take a millisecond to say no; what failed is asked the
next time. A GPU that is lost is no state of a question: `DeviceDownError` ends the whole pass over it. A driver in trouble
returns sentinels, all ones, and numbers of a structure that it did not fill: what cannot be is refused with
`GarbageError`; each bound is far above what hardware of the next years can reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf, isfinite
from typing import Any

from exporter.collectors.gpu.nvml.library import (
    DEVICE_DOWN,
    GARBAGE,
    LIBRARY_DOWN,
    UNSUPPORTED,
    CallFailedError,
    Library,
    name_of,
)

Out = dict[str, Any]
"""Readings by name; None for what is absent now."""

ALL_LINKS = 0xFFFFFFFF
"""The scope of a field value that asks for the sum over all NVLinks."""

ARCHITECTURES = dict(
    enumerate(
        ("kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"), start=2
    )
) | {13: "rubin"}
BLACKWELL = 10
"""From here on NVLink is of the fifth generation, whose counters have fields of their own."""

Field = int | tuple[int, int]
"""A field id, or one with a scope (a link)."""

_FIELDS_CALL = "nvmlDeviceGetFieldValues"
_UNION_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_LONGEST_TEXT = 128
_REPROBE_SECONDS = 600.0

_BEYOND_COUNTING = (1 << 64) - (1 << 32)
"""All ones, also as a float, and what is left of them after an addition; no counter gets there."""

Convert = Callable[[Any], Any]
"""Makes a value of what NVML gives; raises GarbageError."""


class GarbageError(ValueError):
    """A number that cannot be what it is said to be."""


class DownError(Exception):
    """Something is gone; `reason` is NVML's name of the error, or this process' own."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class DeviceDownError(DownError):
    """This GPU is gone for now."""


class LibraryDownError(DownError):
    """No GPU can be read by this process any more."""


class Device:
    """A GPU that was found; what was not there is asked for again after `reprobe_seconds`."""

    def __init__(
        self, library: Library, handle: Any, *, index: int = 0, reprobe_seconds: float = _REPROBE_SECONDS
    ) -> None:
        self.library = library
        self.handle = handle
        self.index = index
        self.now = 0.0  # monotonic time of the pass; set by the sampler
        self.answered = 0  # questions with an answer in this pass
        self.last_error = ""  # of this pass; "" while nothing failed
        self._reprobe_seconds = reprobe_seconds
        self._again: dict[str, float] = {}

    def ask(self, item: str, call: str, *arguments: Any, convert: Convert = lambda value: value) -> Any:
        """Call a function of the GPU's handle; None when there is no value now: `lacks` tells whether for long.

        Args:
            item: The question's name.
            call: pynvml's function.
            arguments: Those after the handle.
            convert: Makes the value.

        Raises:
            DownError: The GPU is gone, or all of them are; so in all that asks.
        """
        if self.lacks(item):
            return None
        try:
            value = convert(self.library.call(call, self.handle, *arguments))
        except CallFailedError as failure:
            self.fail(item, call, failure.error)
            return None
        except GarbageError:
            self.fail(item, call, GARBAGE)
            return None
        self.answered += 1
        return value

    def fields(self, wanted: Mapping[Field, Convert]) -> dict[Field, Any]:
        """Read field values in one call, which costs the sum of its members; gives those that have a value now."""
        asked = [field for field in wanted if not self.lacks(field_item(field))]
        if not asked:
            return {}
        try:
            values = self.library.call(_FIELDS_CALL, self.handle, asked)
        except CallFailedError as failure:
            for field in asked:
                self.fail(field_item(field), _FIELDS_CALL, failure.error)
            return {}
        found: dict[Field, Any] = {}
        for field, value in zip(asked, values, strict=False):
            error = member_error(value.nvmlReturn) if value.nvmlReturn else ""
            try:
                if not error:
                    found[field] = wanted[field](_number_of(value))
                    self.answered += 1
            except GarbageError:
                error = GARBAGE
            if error:
                self.fail(field_item(field), _FIELDS_CALL, error)
        return found

    def counts(self, wanted: Iterable[Field]) -> dict[Field, int]:
        """Read field values that are counters or numbers of things."""
        return self.fields(dict.fromkeys(wanted, lambda raw: count(int(raw))))

    def by_kind(self, kinds: Mapping[int, str]) -> dict[str, int]:
        """Read field values of which each counts another kind of the same."""
        found = self.counts(kinds)
        return {kind: found[field] for field, kind in kinds.items() if field in found}

    def lacks(self, item: str) -> bool:
        """Whether this GPU does not have it, or not for us, as far as was asked lately."""
        again = self._again.get(item)
        if again is None:
            return False
        if self.now < again:
            return True
        del self._again[item]
        return False

    def fail(self, item: str, call: str, error: str) -> None:
        """Note a question without an answer."""
        if error in UNSUPPORTED or error == "no_permission":
            self._again[item] = self.now + self._reprobe_seconds
        if error in UNSUPPORTED:
            return
        self.library.count_error(call, error)
        if error in DEVICE_DOWN:
            raise DeviceDownError(error)
        if error in LIBRARY_DOWN:
            raise LibraryDownError(error)
        self.last_error = error

    def architecture(self) -> int:
        """NVML's number of the architecture; 0 where it is not told, or not a generation that is known."""
        number = self.ask("architecture", "nvmlDeviceGetArchitecture")
        return number if number in ARCHITECTURES else 0

    def identity(self) -> dict[str, str]:
        """What it is, as texts for labels; what it does not tell is an empty text."""
        found = {name: self.ask(name, call, convert=make) for name, (call, make) in _IDENTITY.items()}
        return {name: "" if value is None else str(value) for name, value in found.items()}


def member_error(code: int) -> str:
    """Name the error of one member of a batch that as a whole went through."""
    name = name_of(code)
    # It is the member that was not found.
    return "not_supported" if name in {"not_found", "gpu_not_found"} else name


def field_item(field: Field) -> str:
    """Name the question for a field value."""
    return f"field.{field[0]}.{field[1]}" if isinstance(field, tuple) else f"field.{field}"


def _number_of(value: Any) -> float:
    """The member of NVML's value union that its type code names; raises GarbageError where that is no number."""
    kind = value.valueType
    number: float = getattr(value.value, _UNION_MEMBERS[kind]) if 0 <= kind < len(_UNION_MEMBERS) else inf
    if not isfinite(number) or abs(number) >= _BEYOND_COUNTING:
        raise GarbageError(number)
    return number


def _text(text: Any) -> str:
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
    return "".join(character for character in text if character.isprintable())[:_LONGEST_TEXT].strip()


def bounded(least: float, most: float, convert: Callable[[Any], Any] = lambda number: number) -> Convert:
    """Make what brings a number of NVML's into its base unit; it raises GarbageError for one beyond the bounds."""

    def checked(number: Any) -> Any:
        if not least <= number <= most:  # neither is NaN within
            raise GarbageError(number)
        return convert(number)

    return checked


count = bounded(0, _BEYOND_COUNTING - 1)
"""A counter."""
small = bounded(0, 0x7FFFFFFE)
"""A number of things, a mode or a generation."""
flag = bounded(0, 1)
size = bounded(0, 1 << 50)
"""Bytes, below 1 PiB."""
watts = bounded(0, 1e8, lambda milliwatts: milliwatts / 1000)
hertz = bounded(0, 5e4, lambda megahertz: megahertz * 1e6)
ratio = bounded(-0.5, 150, lambda percent: min(max(percent / 100, 0.0), 1.0))
"""Averages of the driver exceed 100 % by a little; more is not a percentage."""
celsius = bounded(-300, 300)
"""A temperature, or a distance between two."""


def temperature(degrees: float) -> float:
    """Check a temperature; -1 is all ones, which NVML gives for one that it does not have."""
    if degrees == -1:
        raise GarbageError(degrees)
    return float(celsius(degrees))


_IDENTITY: dict[str, tuple[str, Convert]] = {
    "name": ("nvmlDeviceGetName", _text),
    "pci_bus_id": ("nvmlDeviceGetPciInfo", lambda info: _text(info.busId)),
    "serial": ("nvmlDeviceGetSerial", _text),
    "vbios": ("nvmlDeviceGetVbiosVersion", _text),
    "board": ("nvmlDeviceGetBoardPartNumber", _text),
    "minor": ("nvmlDeviceGetMinorNumber", small),
    "numa_node": ("nvmlDeviceGetNumaNodeId", small),
    "compute_capability": ("nvmlDeviceGetCudaComputeCapability", lambda pair: ".".join(map(str, pair))),
    "architecture": ("nvmlDeviceGetArchitecture", lambda number: ARCHITECTURES.get(number, "other")),
}
