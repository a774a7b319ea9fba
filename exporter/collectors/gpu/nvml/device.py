"""NVML calls and field values of a GPU, with tracking of unsupported queries and slow calls.

Each query has a name (`nvmlDeviceGetPowerUsage`, `field.82`). An unsupported or forbidden query is skipped for ten
minutes (for a minute on a MIG device), because some calls need a millisecond to return the error. A query that failed for
another reason is repeated when its tier is due again. A slow call is made less often on this GPU, so that it rarely delays the
other GPUs. `DeviceDownError` (a lost GPU) ends the pass over this GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, isfinite
from typing import Any

from exporter.collectors.gpu.nvml.library import (
    DEVICE_DOWN_ERRORS,
    GARBAGE,
    LIBRARY_DOWN_ERRORS,
    UNSUPPORTED_ERRORS,
    CallFailedError,
    NvmlLibrary,
    name_of,
)
from exporter.collectors.gpu.nvml.units import MIN_UPPER_BITS_SET, Convert, GarbageError, count, small

SUM_OF_LINKS = 0xFFFFFFFF
"""Scope of a field value that is the sum over all NVLinks."""

ARCHITECTURES = dict(
    enumerate(
        ("kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"), start=2
    )
) | {13: "rubin"}
"""Names of the architectures by NVML's number."""
BLACKWELL = 10
"""First architecture with NVLink 5, whose counters have separate field ids."""

Field = int | tuple[int, int]
"""A field id, or a field id with a scope (a link)."""

FIELDS_CALL = "nvmlDeviceGetFieldValues"
# Members of NVML's value union, in the order of the type codes (nvmlValueType_t).
_UNION_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_MAX_NVML_TEXT_CHARACTERS = 128
"""Maximum length of a text of NVML, such as the name of a GPU, that becomes a label value."""
_REPROBE_SECONDS = 600.0
"""Time before an unsupported or forbidden query is tried again."""

SLOW_CALL_SECONDS = 0.25
"""Duration from which a call counts as slow; normal calls take at most 5 ms."""
PAUSE_PER_SECOND = 100.0
"""Seconds for which a slow call is paused, per second of its duration."""
MAX_PAUSE_SECONDS = 300.0
"""Maximum pause of a slow call."""


class DownError(Exception):
    """Failure of a GPU or of NVML."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason  # name of the NVML error, or a reason of the child such as `memory`


class DeviceDownError(DownError):
    """Failure of a single GPU."""


class LibraryDownError(DownError):
    """Failure of NVML: this process can no longer read any GPU."""


class NvmlDevice:
    """GPU with an NVML handle.

    Args:
        library: The library of the sampling thread.
        handle: NVML handle.
        index: NVML index.
        reprobe_seconds: Time before an unsupported or forbidden query is tried again.
        avoid: Calls that have hung on this GPU; they are paused at the start.
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
        self.pass_time = 0.0  # monotonic time; set by the sampler in each pass
        self.pass_started_at = 0.0  # `pass_time` on the library's clock; set by the sampler
        self.call_count = 0  # in this pass; set by the sampler
        self.result_count = 0  # calls and field values with a result, in this pass
        self.last_error = ""  # of this pass; "" without a failed call
        self._reprobe_seconds = reprobe_seconds
        self._architecture = 0  # 0 before the first result
        # Time of the next attempt by unsupported or forbidden query.
        self._retry_times: dict[str, float] = {}
        # End of the pause by call. `avoid` is paused from the first pass on; `pass_time` is not set earlier.
        self._paused_until = dict.fromkeys(avoid, MAX_PAUSE_SECONDS)
        self._is_before_first_pass = bool(self._paused_until)

    def query(
        self, query_name: str, call: str, *arguments: Any, convert: Convert = lambda value: value
    ) -> Any:
        """Call a function with the GPU's handle and return the converted result, or None without a value.

        Args:
            query_name: Name by which the support of the query is tracked.
            call: pynvml's function.
            arguments: Arguments after the handle.
            convert: Converts the result.

        Raises:
            DownError: The GPU or all GPUs are down.
        """
        if not self.may_call(query_name, call):
            return None
        try:
            return convert(self.call(call, *arguments))
        except CallFailedError as failure:
            self.record_failure(query_name, call, failure.error)
        except GarbageError:
            self.record_failure(query_name, call, GARBAGE)
        return None

    def call(self, call: str, *arguments: Any) -> Any:
        """Call a function with the GPU's handle, and pause the function after a slow call. Raises CallFailedError."""
        self.call_count += 1
        try:
            result = self.library.call(call, self.handle, *arguments)
            self.result_count += 1
            return result
        finally:
            seconds = self.library.last_seconds
            if seconds >= SLOW_CALL_SECONDS:
                self._paused_until[call] = (
                    self.pass_time + seconds + min(MAX_PAUSE_SECONDS, PAUSE_PER_SECOND * seconds)
                )

    @property
    def last_call_delay(self) -> float:
        """Seconds from `pass_time` to the end of the last call. On a busy machine, a pass takes long."""
        return self.library.last_ended_at - self.pass_started_at

    def may_call(self, query_name: str, call: str) -> bool:
        """Return True unless the query is skipped as unsupported or forbidden, or the call is paused."""
        if self._is_before_first_pass:
            self._is_before_first_pass = False
            self._paused_until = dict.fromkeys(self._paused_until, self.pass_time + MAX_PAUSE_SECONDS)
        return self.pass_time >= self._paused_until.get(call, 0.0) and not self.is_unsupported(query_name)

    def read_fields(self, conversions: Mapping[Field, Convert]) -> dict[Field, Any]:
        """Read field values in a single call. Fields without a value are omitted from the result. Raises DownError."""
        fields = [field for field in conversions if self.may_call(query_name_of(field), FIELDS_CALL)]
        if not fields:
            return {}
        try:
            values = self.call(FIELDS_CALL, fields)
        except CallFailedError as failure:
            for field in fields:
                self.record_failure(query_name_of(field), FIELDS_CALL, failure.error)
            return {}
        self.result_count -= 1  # each field value is counted separately
        results: dict[Field, Any] = {}
        for field, value in zip(fields, values, strict=False):
            error = member_error(value.nvmlReturn) if value.nvmlReturn else ""
            try:
                if not error:
                    self.result_count += 1
                    results[field] = conversions[field](_number_of(value))
            except GarbageError:
                error = GARBAGE
            if error:
                self.record_failure(query_name_of(field), FIELDS_CALL, error)
        return results

    def read_counts(self, fields: Iterable[Field]) -> dict[Field, int]:
        """Read field values that are counts. Fields without a value are omitted from the result. Raises DownError."""
        return self.read_fields(dict.fromkeys(fields, lambda raw: count(int(raw))))

    def read_counts_by_kind(self, kinds: Mapping[int, str]) -> dict[str, int]:
        """Read field values that count the kinds of an event, and return the counts by kind. Raises DownError."""
        counts = self.read_counts(kinds)
        return {event_kind: counts[field] for field, event_kind in kinds.items() if field in counts}

    def is_unsupported(self, query_name: str) -> bool:
        """Return True if the GPU did not support or permit the query at the last attempt, less than `reprobe_seconds` ago."""
        retry_time = self._retry_times.get(query_name)
        if retry_time is None:
            return False
        if self.pass_time < retry_time:
            return True
        del self._retry_times[query_name]
        return False

    def record_failure(self, query_name: str, call: str, error: str) -> None:
        """Skip an unsupported or forbidden query for `reprobe_seconds`, and count the error unless the query is unsupported.

        Raises DownError if the GPU or NVML is down.
        """
        if error in UNSUPPORTED_ERRORS or error == "no_permission":
            self._retry_times[query_name] = self.pass_time + self._reprobe_seconds
        if error in UNSUPPORTED_ERRORS:
            return
        self.library.count_error(call, error)
        if error in DEVICE_DOWN_ERRORS:
            raise DeviceDownError(error)
        if error in LIBRARY_DOWN_ERRORS:
            raise LibraryDownError(error)
        self.last_error = error

    def architecture(self) -> int:
        """Return NVML's number of the architecture, or 0 if unknown. NVML is not called again once the number is known."""
        if not self._architecture:
            number = self.query("architecture", "nvmlDeviceGetArchitecture")
            self._architecture = number if number in ARCHITECTURES else 0
        return self._architecture

    def identity(self) -> dict[str, str]:
        """Return model and identity as label values. Unknown values are empty."""
        values = {
            name: self.query(name, call, convert=convert) for name, (call, convert) in _IDENTITY.items()
        }
        return {name: "" if value is None else str(value) for name, value in values.items()}


def member_error(code: int) -> str:
    """Return the error name of a single value in a call for several values that succeeded."""
    name = name_of(code)
    # Here, these errors refer to the value and not to the GPU.
    return "not_supported" if name in {"not_found", "gpu_not_found"} else name


def query_name_of(field: Field) -> str:
    """Return the name of the query of a field value."""
    if isinstance(field, tuple):
        field_id, scope = field
        return f"field.{field_id}.{scope}"
    return f"field.{field}"


def _number_of(value: Any) -> float:
    """Return the number in NVML's value union, as named by the type code. Raises GarbageError for invalid numbers."""
    value_type = value.valueType
    number: float = (
        getattr(value.value, _UNION_MEMBERS[value_type]) if 0 <= value_type < len(_UNION_MEMBERS) else inf
    )
    if not isfinite(number) or abs(number) >= MIN_UPPER_BITS_SET:
        raise GarbageError(number)
    return number


def _text(text: Any) -> str:
    """Return the printable start of a text, which may have the bytes of an uninitialized buffer."""
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
    printable_text = "".join(character for character in text if character.isprintable())
    return printable_text[:_MAX_NVML_TEXT_CHARACTERS].strip()


# Function and conversion of each label of gpu_info.
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
