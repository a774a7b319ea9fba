"""NVML calls and field values of a GPU, with tracking of unsupported queries and slow calls.

Each query has a name (`power`, `field.82`). An unsupported or forbidden query is not repeated for ten minutes, because
some calls need a millisecond to return the error; a failed query is repeated in the next pass. A slow call is made less often on this
GPU, so that the other GPUs are rarely delayed. `DeviceDownError` (a lost GPU) ends the whole pass over this GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, isfinite
from typing import Any

from exporter.collectors.gpu.nvml.library import (
    DEVICE_DOWN,
    GARBAGE,
    LIBRARY_DOWN,
    UNSUPPORTED,
    CallFailedError,
    NvmlLibrary,
    name_of,
)
from exporter.collectors.gpu.nvml.units import BEYOND_COUNTING, Convert, GarbageError, count, small

SUM_OF_LINKS = 0xFFFFFFFF
"""Scope of a field value: the sum over all NVLinks."""

ARCHITECTURES = dict(
    enumerate(
        ("kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"), start=2
    )
) | {13: "rubin"}
BLACKWELL = 10
"""First architecture with NVLink 5, which has separate counter fields."""

Field = int | tuple[int, int]
"""A field id, or a field id with a scope (a link)."""

FIELDS_CALL = "nvmlDeviceGetFieldValues"
_UNION_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_LONGEST_TEXT = 128
_REPROBE_SECONDS = 600.0

SLOW_CALL_SECONDS = 0.25
"""Duration from which a call counts as slow; usual calls take 5 ms at most."""
PAUSE_PER_SECOND = 100.0
LONGEST_PAUSE_SECONDS = 300.0


class DownError(Exception):
    """Failure of a GPU or of NVML; `reason` is the name of the NVML error, or a reason of the child."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class DeviceDownError(DownError):
    """Failure of a single GPU."""


class LibraryDownError(DownError):
    """Failure of NVML: this process can read no GPU any more."""


class NvmlDevice:
    """GPU with an NVML handle.

    Args:
        library: The library of the sampling thread.
        handle: NVML handle.
        index: NVML index.
        reprobe_seconds: Time before an unsupported query is retried.
        avoid: Calls that have hung on this GPU; paused at the start.
    """

    def __init__(
        self,
        library: NvmlLibrary,
        handle: Any,
        *,
        index: int = 0,
        reprobe_seconds: float = _REPROBE_SECONDS,
        avoid: Iterable[str] = (),
    ) -> None:
        self.library = library
        self.handle = handle
        self.index = index
        self.now = 0.0  # monotonic time of the pass; set by the sampler
        self.attempted = 0  # calls of this pass
        self.answered = 0  # of the attempted calls, with a result
        self.last_error = ""  # of this pass; "" without a failed call
        self._reprobe_seconds = reprobe_seconds
        self._again: dict[str, float] = {}  # time of the next attempt by query
        self._paused = dict.fromkeys(avoid, LONGEST_PAUSE_SECONDS)  # end of the pause by call
        self._avoided = bool(self._paused)

    def query(self, item: str, call: str, *arguments: Any, convert: Convert = lambda value: value) -> Any:
        """Call a function with the GPU's handle and return the converted result; None without a value.

        Args:
            item: Name of the query.
            call: pynvml's function.
            arguments: Arguments after the handle.
            convert: Converts the result.

        Raises:
            DownError: The GPU or all GPUs are down.
        """
        if not self.may_call(item, call):
            return None
        try:
            return convert(self.call(call, *arguments))
        except CallFailedError as failure:
            self.fail(item, call, failure.error)
        except GarbageError:
            self.fail(item, call, GARBAGE)
        return None

    def call(self, call: str, *arguments: Any) -> Any:
        """Call a function with the GPU's handle, and pause the function after a slow call; raises CallFailedError."""
        self.attempted += 1
        try:
            result = self.library.call(call, self.handle, *arguments)
            self.answered += 1
            return result
        finally:
            seconds = self.library.last_seconds
            if seconds >= SLOW_CALL_SECONDS:
                self._paused[call] = (
                    self.now + seconds + min(LONGEST_PAUSE_SECONDS, PAUSE_PER_SECOND * seconds)
                )

    def may_call(self, item: str, call: str) -> bool:
        """Return True if neither the query is unsupported nor the call paused."""
        if self._avoided:  # in the first pass, because `now` is not set before
            self._avoided = False
            self._paused = dict.fromkeys(self._paused, self.now + LONGEST_PAUSE_SECONDS)
        return self.now >= self._paused.get(call, 0.0) and not self.is_unsupported(item)

    def read_fields(self, conversions: Mapping[Field, Convert]) -> dict[Field, Any]:
        """Read field values in a single call and return the fields that have a value."""
        fields = [field for field in conversions if self.may_call(field_item(field), FIELDS_CALL)]
        if not fields:
            return {}
        try:
            values = self.call(FIELDS_CALL, fields)
        except CallFailedError as failure:
            for field in fields:
                self.fail(field_item(field), FIELDS_CALL, failure.error)
            return {}
        self.answered -= 1  # each member counts separately
        numbers: dict[Field, Any] = {}
        for field, value in zip(fields, values, strict=False):
            error = member_error(value.nvmlReturn) if value.nvmlReturn else ""
            try:
                if not error:
                    self.answered += 1
                    numbers[field] = conversions[field](_number_of(value))
            except GarbageError:
                error = GARBAGE
            if error:
                self.fail(field_item(field), FIELDS_CALL, error)
        return numbers

    def counts(self, fields: Iterable[Field]) -> dict[Field, int]:
        """Read field values that are counts."""
        return self.read_fields(dict.fromkeys(fields, lambda raw: count(int(raw))))

    def by_kind(self, kinds: Mapping[int, str]) -> dict[str, int]:
        """Read field values that count the kinds of an event; return the counts by kind."""
        numbers = self.counts(kinds)
        return {kind: numbers[field] for field, kind in kinds.items() if field in numbers}

    def is_unsupported(self, item: str) -> bool:
        """Return True if a recent attempt showed that the GPU does not support or refuses a query."""
        again = self._again.get(item)
        if again is None:
            return False
        if self.now < again:
            return True
        del self._again[item]
        return False

    def fail(self, item: str, call: str, error: str) -> None:
        """Record a failed query; raises DownError if the GPU or NVML is down."""
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
        """Return the NVML number of the architecture; 0 if unknown."""
        number = self.query("architecture", "nvmlDeviceGetArchitecture")
        return number if number in ARCHITECTURES else 0

    def identity(self) -> dict[str, str]:
        """Return model and identity as label values; unknown values are empty."""
        values = {name: self.query(name, call, convert=make) for name, (call, make) in _IDENTITY.items()}
        return {name: "" if value is None else str(value) for name, value in values.items()}


def member_error(code: int) -> str:
    """Return the name of a member's error in a batch that succeeded."""
    name = name_of(code)
    # In a batch, these errors refer to the member, not to the GPU.
    return "not_supported" if name in {"not_found", "gpu_not_found"} else name


def field_item(field: Field) -> str:
    """Return the name of the query of a field value."""
    return f"field.{field[0]}.{field[1]}" if isinstance(field, tuple) else f"field.{field}"


def _number_of(value: Any) -> float:
    """Return the number in NVML's value union, as named by the type code; raises GarbageError for invalid numbers."""
    kind = value.valueType
    number: float = getattr(value.value, _UNION_MEMBERS[kind]) if 0 <= kind < len(_UNION_MEMBERS) else inf
    if not isfinite(number) or abs(number) >= BEYOND_COUNTING:
        raise GarbageError(number)
    return number


def _text(text: Any) -> str:
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
    return "".join(character for character in text if character.isprintable())[:_LONGEST_TEXT].strip()


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
