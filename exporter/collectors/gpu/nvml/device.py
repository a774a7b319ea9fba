"""NVML calls and field values of a GPU, with tracking of unsupported queries and slow calls.

Each query has a name (`power`, `field.82`). An unsupported or forbidden query is not repeated for ten minutes, since
some calls take a millisecond to refuse; a failed query is repeated in the next pass. A slow call is made less often on this
GPU, so that delays of the other GPUs are rare. A lost GPU is not a state of a query:
`DeviceDownError` ends the whole pass over it.
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

ALL_LINKS = 0xFFFFFFFF
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
    """GPU or library is down; `reason` is NVML's name of the error, or the child's."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class DeviceDownError(DownError):
    """This GPU does not answer."""


class LibraryDownError(DownError):
    """No GPU can be read by this process any more."""


class NvmlDevice:
    """GPU with an NVML handle.

    Args:
        library: The library of the sampling thread.
        handle: NVML's.
        index: NVML's.
        reprobe_seconds: When to try an unsupported query again.
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
        self._paused = dict.fromkeys(avoid, LONGEST_PAUSE_SECONDS)  # by call: until when
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
        """Call a function with the GPU's handle; pause the function if slow; raises CallFailedError."""
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
        """Return True if a query is not known as unsupported, and the call is not paused."""
        if self._avoided:  # the first pass, which has the first valid time
            self._avoided = False
            self._paused = dict.fromkeys(self._paused, self.now + LONGEST_PAUSE_SECONDS)
        return self.now >= self._paused.get(call, 0.0) and not self.is_unsupported(item)

    def read_fields(self, wanted: Mapping[Field, Convert]) -> dict[Field, Any]:
        """Read field values in a single call, at the cost of all members; return the fields with a value."""
        asked = [field for field in wanted if self.may_call(field_item(field), FIELDS_CALL)]
        if not asked:
            return {}
        try:
            values = self.call(FIELDS_CALL, asked)
        except CallFailedError as failure:
            for field in asked:
                self.fail(field_item(field), FIELDS_CALL, failure.error)
            return {}
        self.answered -= 1  # each member is counted separately
        found: dict[Field, Any] = {}
        for field, value in zip(asked, values, strict=False):
            error = member_error(value.nvmlReturn) if value.nvmlReturn else ""
            try:
                if not error:
                    self.answered += 1
                    found[field] = wanted[field](_number_of(value))
            except GarbageError:
                error = GARBAGE
            if error:
                self.fail(field_item(field), FIELDS_CALL, error)
        return found

    def counts(self, wanted: Iterable[Field]) -> dict[Field, int]:
        """Read field values that are counters or numbers of things."""
        return self.read_fields(dict.fromkeys(wanted, lambda raw: count(int(raw))))

    def by_kind(self, kinds: Mapping[int, str]) -> dict[str, int]:
        """Read field values that count kinds of the same thing."""
        found = self.counts(kinds)
        return {kind: found[field] for field, kind in kinds.items() if field in found}

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
        """Record that a query has no value; raises DownError if the GPU or the library is gone."""
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
        """Return NVML's number of the architecture; 0 if unknown."""
        number = self.query("architecture", "nvmlDeviceGetArchitecture")
        return number if number in ARCHITECTURES else 0

    def identity(self) -> dict[str, str]:
        """Return model and identity as texts for labels; "" for an unknown one."""
        found = {name: self.query(name, call, convert=make) for name, (call, make) in _IDENTITY.items()}
        return {name: "" if value is None else str(value) for name, value in found.items()}


def member_error(code: int) -> str:
    """Return the name of a member's error in a batch that succeeded."""
    name = name_of(code)
    # The member was not found, not the GPU.
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
