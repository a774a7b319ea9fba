"""One GPU, and what is known of each thing that can be asked of it.

Used in the NVML child, by the thread that samples. A question has a name (`power`, `clock.sm`,
`field.186`) and one of these states, which stay apart: supported (the value may be zero), unsupported, failed,
forbidden. What is unsupported or forbidden is not asked again for ten minutes, since some calls take a
millisecond to say no; what failed is asked the next time. A GPU that is lost is no state of a question:
`DeviceDownError` ends the whole pass over it.
"""

from __future__ import annotations

from math import isfinite

from exporter.collectors.nvml.codes import DEVICE_DOWN, GARBAGE, LIBRARY_DOWN, UNSUPPORTED, name_of
from exporter.collectors.nvml.conversions import BEYOND_COUNTING, GarbageError
from exporter.collectors.nvml.library import CallFailedError, Library

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

SUPPORTED, UNSUPPORTED_STATE, FAILED, FORBIDDEN = "supported", "unsupported", "failed", "forbidden"
STATES = (SUPPORTED, UNSUPPORTED_STATE, FAILED, FORBIDDEN)

ALL_LINKS = 0xFFFFFFFF
"""The scope of a field value that asks for the sum over all NVLinks."""

_FIELDS_CALL = "nvmlDeviceGetFieldValues"
_UNION_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_LONGEST_LATENCY_SECONDS = 60.0
_SIGNED_FIELDS = frozenset({193, 194, 195, 196})
_SIGNED = {1: 5, 2: 4, 3: 4}
"""Limits of temperature are negative, also where the driver says that they are unsigned."""


class DeviceDownError(Exception):
    """This GPU is gone for now.

    Attributes:
        reason: NVML's name of the error.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class LibraryDownError(Exception):
    """No GPU can be read by this process any more.

    Attributes:
        reason: NVML's name of the error.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Gpu:
    """A GPU that was found.

    Args:
        library: Of the thread that samples.
        handle: NVML's.
        index: NVML's.
        uuid: NVML's.
        reprobe_seconds: When to ask again for what was not there.

    Attributes:
        now: Monotonic time of the pass; set by the sampler.
        answered: Questions with an answer in this pass.
        last_error: Of this pass; "" while nothing failed.
    """

    __slots__ = (
        "library",
        "handle",
        "index",
        "uuid",
        "now",
        "answered",
        "last_error",
        "_reprobe_seconds",
        "_states",
        "_again",
    )

    def __init__(
        self, library: Library, handle: Any, *, index: int, uuid: str, reprobe_seconds: float
    ) -> None:
        self.library = library
        self.handle = handle
        self.index = index
        self.uuid = uuid
        self.now = 0.0
        self.answered = 0
        self.last_error = ""
        self._reprobe_seconds = reprobe_seconds
        self._states: dict[str, str] = {}
        self._again: dict[str, float] = {}

    def ask(self, item: str, call: str, *arguments: Any, convert: Callable[[Any], Any] | None = None) -> Any:
        """Call a function of the GPU's handle.

        Args:
            item: The question's name.
            call: pynvml's function; its first argument is the handle.
            arguments: Those after it.
            convert: Makes the value; raises GarbageError.

        Returns:
            None when there is no value now; `lacks` tells whether that is for good.

        Raises:
            DeviceDownError: The GPU is gone.
            LibraryDownError: All of them are.
        """
        if self.lacks(item):
            return None
        try:
            value = self.library.call(call, self.handle, *arguments)
            value = value if convert is None else convert(value)
        except CallFailedError as failure:
            self.fail(item, call, failure.error)
            return None
        except GarbageError:
            self.fail(item, call, GARBAGE)
            return None
        self.succeed(item)
        return value

    def fields(self, wanted: Iterable[int | tuple[int, int]]) -> dict[int | tuple[int, int], float]:
        """Read field values in one call, which costs the sum of its members.

        Args:
            wanted: Field ids, or pairs of a field id and a scope (a link).

        Returns:
            Those that have a value now, as NVML gives them.

        Raises:
            DeviceDownError: The GPU is gone.
            LibraryDownError: All of them are.
        """
        asked = [field for field in wanted if not self.lacks(field_item(field))]
        if not asked:
            return {}
        try:
            values = self.library.call(_FIELDS_CALL, self.handle, asked)
        except CallFailedError as failure:
            for field in asked:
                self.fail(field_item(field), _FIELDS_CALL, failure.error)
            return {}
        found: dict[int | tuple[int, int], float] = {}
        for field, value in zip(asked, values, strict=False):
            item = field_item(field)
            latency = value.latencyUsec / 1e6
            if 0 < latency < _LONGEST_LATENCY_SECONDS:
                self.library.field_seconds += latency
            if value.nvmlReturn:
                self.fail(item, _FIELDS_CALL, member_error(value.nvmlReturn))
                continue
            number = _number_of(value)
            if number is None:
                self.fail(item, _FIELDS_CALL, GARBAGE)
            else:
                self.succeed(item)
                found[field] = number
        return found

    def lacks(self, item: str) -> bool:
        """Whether this GPU does not have it, or not for us, as far as was asked lately."""
        again = self._again.get(item)
        if again is None:
            return False
        if self.now < again:
            return True
        del self._again[item]
        return False

    def succeed(self, item: str) -> None:
        """Note an answer."""
        self.answered += 1
        self._states[item] = SUPPORTED

    def fail(self, item: str, call: str, error: str) -> None:
        """Note a question without an answer.

        Raises:
            DeviceDownError: The GPU is gone.
            LibraryDownError: All of them are.
        """
        if error in DEVICE_DOWN or error in LIBRARY_DOWN:
            self.library.count_error(call, error)
            raise DeviceDownError(error) if error in DEVICE_DOWN else LibraryDownError(error)
        if error in UNSUPPORTED:
            self._states[item] = UNSUPPORTED_STATE
            self._again[item] = self.now + self._reprobe_seconds
            return
        self.last_error = error
        self.library.count_error(call, error)
        if error == "no_permission":
            self._states[item] = FORBIDDEN
            self._again[item] = self.now + self._reprobe_seconds
        else:
            self._states[item] = FAILED

    def states(self) -> dict[str, str]:
        """The state of every question that was asked."""
        return dict(self._states)


def member_error(code: int) -> str:
    """Name the error of one member of a batch that as a whole went through."""
    name = name_of(code)
    # It is the member that was not found.
    return "not_supported" if name in {"not_found", "gpu_not_found"} else name


def field_item(field: int | tuple[int, int]) -> str:
    """Name the question for a field value."""
    return f"field.{field[0]}.{field[1]}" if isinstance(field, tuple) else f"field.{field}"


def decode(value_type: int, union: Any) -> float | None:
    """Take the member of NVML's value union that a type code names; None where that is no number."""
    if not 0 <= value_type < len(_UNION_MEMBERS):
        return None
    number: float = getattr(union, _UNION_MEMBERS[value_type])
    return number if isfinite(number) and abs(number) < BEYOND_COUNTING else None


def _number_of(value: Any) -> float | None:
    kind = value.valueType
    return decode(_SIGNED.get(kind, kind) if value.fieldId in _SIGNED_FIELDS else kind, value.value)
