"""Conversion of any object to a plain number, text, attribute or sample.

The functions run on the threads of the job and on the recording thread. They do not raise, do not wait for a device, and read a
bounded number of items of a container. The class of a foreign object is read with `type`, because `isinstance` would call the object's
`__class__`. Classes are compared by identity, because a metaclass may define `__hash__` and `__eq__`.
"""

from __future__ import annotations

import enum
import os
from collections import deque
from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any

from exporter.recording.introspection import (
    MAX_ITEMS,
    class_attribute,
    first_bytes,
    items_of,
    module_of_class,
    name_of_class,
    pairs_of,
    size_of,
)
from exporter.recording.signal_safety import is_from_signal_handler
from exporter.recording.value_class import Value, value_class

Datum = str | float | int | bool
"""Value of an event's data."""
AttributeValue = str | bool | int | float | list[str] | list[bool] | list[int] | list[float]
"""Value of a span's attribute."""

MAX_CONVERTED_CHARACTERS = 32_768
"""Maximum length of a text in an event or in an attribute of a span. Longer texts are cut."""
MAX_REPR_CHARACTERS = 1000
"""Default maximum length of the text of `to_repr`."""
MAX_ITEM_CHARACTERS = 200
"""Maximum length of a text, bytes or the `repr` of an object in the text of `to_repr`, without quotes."""
MAX_SAFE_REPR_CHARACTERS = 500
"""Default maximum length of the text of `safe_repr`."""
MAX_REPR_ITEMS = 50
"""Maximum number of items of a container in its text."""
MAX_SIZED_ITEMS = 10_000
"""Maximum size of a container of an unknown class whose own `__str__` or `__repr__` is called."""
MAX_DEPTH = 5
"""Maximum number of nested containers that are converted. A container may contain itself."""
INT64_LIMIT = 1 << 63
"""Integers from -`INT64_LIMIT` to below `INT64_LIMIT` have at most 64 bits."""
_MAX_SHOWN_BITS = 4096
"""Size in bits up to which an integer is written in digits. CPython refuses integers of more than 4,300 digits, about 14,000 bits."""
_NUMPY_NUMBERS = ("float", "int", "uint", "bool", "longdouble", "longlong", "ulonglong")
"""Class names of numpy's numbers, without the number of bits."""
_SHOWN_AS_STR = ("datetime", "decimal", "uuid")
"""Modules of classes whose `str` is shorter than their `repr`."""


@value_class
class Unconvertible(Value):
    """Value that cannot be converted; `text` describes the value in messages."""

    text: str


class Rejection(enum.Enum):
    """Reason for a rejected sample: a label value of `training_stat_rejected_samples_total`."""

    NAN = "nan"
    INFINITE = "infinite"
    NOT_A_NUMBER = "not_a_number"
    OUT_OF_RANGE = "out_of_range"


# Numbers -------------------------------------------------------------------------------------------------------


def to_scalar(value: object) -> Datum | Unconvertible | None:
    """Return the value as a plain str, bool, int or float; None for None, and `Unconvertible` for other values.

    Converts instances of subclasses, members of enumerations, and single-element objects with `item()`, `__index__` or
    `__float__`. An array is read only if reading waits neither for a device nor for other ranks.
    """
    value_type = type(value)
    if value is None or value_type is float or value_type is int or value_type is str or value_type is bool:
        return value  # type: ignore[return-value]  # checked above
    try:
        scalar = _scalar(value, value_type)
    except Exception as error:  # code of the object's class
        if is_from_signal_handler(error):
            raise
        scalar = None
    return Unconvertible(safe_repr(value)) if scalar is None else scalar


def to_number(value: object) -> int | float | None:
    """Return the value as a plain int or float, or None if the value is a bool or is not a number."""
    value_type = type(value)
    if value_type is float or value_type is int:
        return value  # type: ignore[return-value]  # checked above
    scalar = to_scalar(value)
    return scalar if type(scalar) is float or type(scalar) is int else None


def to_sample(value: Any) -> float | Rejection:
    """Return the value as a finite float, or the reason for its rejection. Runs no code of the job.

    Accepts float, int and bool, their subclasses, and numpy's real numbers. The `__float__` of another class could block the
    recording thread, which calls this function.
    """
    value_type = type(value)
    try:
        if issubclass(value_type, float):
            number = float.__add__(value, 0.0)  # `float(value)` would call a subclass's own `__float__`
        elif issubclass(value_type, int):
            number = float(int.__add__(value, 0))
        elif (
            module_of_class(value_type) == "numpy"
            and name_of_class(value_type).rstrip("_0123456789") in _NUMPY_NUMBERS
        ):
            number = float(value)
        else:
            return Rejection.NOT_A_NUMBER
    except OverflowError:
        return Rejection.OUT_OF_RANGE
    except Exception as error:  # a class that has the name of a number of numpy
        if is_from_signal_handler(error):
            raise
        return Rejection.NOT_A_NUMBER
    if isfinite(number):
        return number
    return Rejection.NAN if number != number else Rejection.INFINITE  # noqa: PLR0124  # the definition of NaN


def is_asynchronous(value: object) -> bool:
    """Return True for an array whose value may not have been computed yet, so that reading the value could wait.

    True for torch's tensors outside the host's memory, for JAX's arrays, and for an object whose device cannot be read.
    """
    value_type = type(value)
    if value_type is float or value_type is int or value_type is str or value_type is bool or value is None:
        return False
    try:
        return class_attribute(value_type, "is_ready") is not None or not _in_host_memory(value)
    except Exception as error:  # code of the object's class
        if is_from_signal_handler(error):
            raise
        return True


def _scalar(value: Any, value_type: type) -> Datum | None:
    """Return the value as a plain value, or None if it cannot be converted. Raises the exceptions of the object's class."""
    if issubclass(value_type, str):
        return str.__str__(value)
    if issubclass(value_type, int):
        return int.__int__(value)
    if issubclass(value_type, float):
        return float.__float__(value)
    if issubclass(value_type, enum.Enum):
        member_value = value.value
        return member_value if _is_scalar(member_value) else None
    if issubclass(value_type, (bytes, bytearray)) or not _is_readable(value, value_type):
        return None
    if callable(item := getattr(value, "item", None)):
        element = item()
        return element if _is_scalar(element) else _scalar(element, type(element))
    if class_attribute(value_type, "__index__") is not None:
        return int.__int__(value.__index__())
    if class_attribute(value_type, "__float__") is not None:
        return float.__float__(float(value))
    return None


def _is_scalar(value: object) -> bool:
    value_type = type(value)
    return value_type is float or value_type is int or value_type is str or value_type is bool


def _is_readable(value: Any, value_type: type) -> bool:
    """Return True if reading the value waits neither for a device nor for other ranks."""
    if class_attribute(value_type, "is_ready") is not None:
        return bool(value.is_ready())
    # `item()` of a DTensor that is not replicated would communicate with other ranks.
    placements = getattr(value, "placements", None)
    return _in_host_memory(value) and (
        placements is None or all(placement.is_replicate() for placement in placements)
    )


def _in_host_memory(value: Any) -> bool:
    """Return True unless the object names a device other than the CPU."""
    device = getattr(value, "device", None)
    if device is None:
        return True
    device_type: Any
    if type(device) is str:  # numpy and TensorFlow
        device_type = device
    else:
        device_type = getattr(device, "type", None) or getattr(device, "platform", "")
    if not issubclass(type(device_type), str):
        return False
    # "cpu" for "cpu:0" of torch, and for "/job:localhost/replica:0/task:0/device:CPU:0" of TensorFlow
    return str.lower(device_type).rpartition("device:")[2].partition(":")[0] == "cpu"


# Attributes ----------------------------------------------------------------------------------------------------


def to_attribute(value: object) -> AttributeValue | None:
    """Return the value as an attribute of a span: a str, bool, int, float, a list of values of one of these types, or None.

    A list of int and float becomes a list of floats, and any other mixed list a list of texts. A mapping becomes a list of
    `key:value`. All nested containers together are cut after `MAX_ITEMS` items, and texts after `MAX_CONVERTED_CHARACTERS` characters.
    """
    value_type = type(value)
    if value is None or value_type is float or value_type is int or value_type is bool:
        return value  # type: ignore[return-value]  # checked above
    try:
        return _attribute_of(value, 0, iter(range(MAX_ITEMS)))  # type: ignore[no-any-return]  # recursive
    except Exception as error:  # code of the object's class
        if is_from_signal_handler(error):
            raise
        return f"<{class_name(value)}>"


def _attribute_of(value: Any, depth: int, budget: Iterator[int]) -> Any:
    """Return the result of `to_attribute` for a value inside *depth* containers. *budget* yields once for each item that may be read."""
    value_type = type(value)
    if value is None:
        return None
    if issubclass(value_type, enum.Enum) and depth < MAX_DEPTH:
        return _attribute_of(value.value, depth + 1, budget)
    if issubclass(value_type, enum.Enum):
        return f"<{class_name(value)}>"
    items = items_of(value, value_type)
    pairs = None if items is not None else pairs_of(value, value_type)
    if (items is not None or pairs is not None) and depth >= MAX_DEPTH:
        return f"<{class_name(value)}>"
    if items is not None:
        return _homogeneous([_attribute_of(item, depth + 1, budget) for item, _ in zip(items, budget)])  # noqa: B905  # the budget ends the loop
    if pairs is not None:
        inner_depth = depth + 1
        return [
            f"{_attribute_of(key, inner_depth, budget)}:{_attribute_of(item, inner_depth, budget)}"
            for (key, item), _ in zip(pairs, budget)  # noqa: B905  # the budget ends the loop
        ]
    scalar = to_scalar(value)
    if type(scalar) is str:
        return scalar[:MAX_CONVERTED_CHARACTERS]
    if not isinstance(scalar, Unconvertible):
        return scalar
    if class_attribute(value_type, "device") is not None or is_asynchronous(value):
        return f"<{class_name(value)}>"
    if size_of(value, value_type) > MAX_SIZED_ITEMS:
        return f"<{class_name(value)}>"
    return str(value)[:MAX_CONVERTED_CHARACTERS]


def _homogeneous(items: list[Any]) -> list[Any]:
    """Return items of a single type: floats for a mix of int and float, otherwise texts for mixed items."""
    kinds = {type(item) for item in items}
    if len(kinds) <= 1 and not kinds & {list, type(None)}:
        return items
    return [float(item) if kinds == {int, float} else str(item) for item in items]


# Texts ---------------------------------------------------------------------------------------------------------


def to_datum(value: object) -> Datum | None:
    """Return the value as a datum of an event, or None for None and for values whose conversion fails.

    Numbers of other libraries become plain numbers. Integers of more than 64 bits and other objects become texts.
    """
    try:
        scalar = to_scalar(value)
        if type(scalar) is str:
            return scalar[:MAX_CONVERTED_CHARACTERS]
        if type(scalar) is int and not -INT64_LIMIT <= scalar < INT64_LIMIT:
            return _integer_text(scalar)
        if not isinstance(scalar, Unconvertible):
            return scalar
        value_type = type(value)
        if issubclass(value_type, os.PathLike):
            return os.fsdecode(value)[:MAX_CONVERTED_CHARACTERS]  # type: ignore[arg-type]  # checked above
        if issubclass(value_type, (bytes, bytearray)):
            return first_bytes(value, MAX_REPR_CHARACTERS).decode("utf-8", "backslashreplace")
        if module_of_class(value_type) in _SHOWN_AS_STR:
            return str(value)[:MAX_REPR_CHARACTERS]
        return _repr_of(value, 0, iter(range(MAX_ITEMS)))[:MAX_REPR_CHARACTERS]
    except Exception as error:  # code of the object's class
        if is_from_signal_handler(error):
            raise
        return None


def to_str(value: object, limit: int = MAX_CONVERTED_CHARACTERS) -> str:
    """Return the `str` of the scalar of the value (see `to_scalar`), otherwise of the value, cut after *limit* characters.

    Containers, objects of more than `MAX_SIZED_ITEMS` items, and arrays whose `str` could wait for a device become the text of
    `to_repr`. An object whose `__str__` raises becomes the name of its class.
    """
    value_type = type(value)
    if value_type is str:
        return value[:limit]  # type: ignore[index,no-any-return]  # checked above
    try:
        if issubclass(value_type, str):
            return str.__str__(value)[:limit]  # runs no code of the subclass
        if issubclass(value_type, BaseException):
            return str(value)[:limit]
        scalar = to_scalar(value)
        if not isinstance(scalar, Unconvertible):
            return (_integer_text(scalar) if type(scalar) is int else str(scalar))[:limit]
        if (
            items_of(value, value_type) is None
            and pairs_of(value, value_type) is None
            and not is_asynchronous(value)
            and size_of(value, value_type) <= MAX_SIZED_ITEMS
        ):
            return str(value)[:limit]
    except Exception as error:  # the job's own `__str__`
        if is_from_signal_handler(error):
            raise
        return class_name(value)
    return to_repr(value, limit)


def to_repr(value: object, limit: int = MAX_REPR_CHARACTERS) -> str:
    """Return the `repr` of the value, cut after *limit* characters. An array becomes its class, shape and device.

    Containers are cut after `MAX_REPR_ITEMS` items, and texts, bytes and the `repr` of other objects after `MAX_ITEM_CHARACTERS`.
    An object whose `__repr__` raises becomes `<Class>`.
    """
    try:
        return _repr_of(value, 0, iter(range(MAX_ITEMS)))[:limit]
    except Exception as error:  # the job's own `__repr__`
        if is_from_signal_handler(error):
            raise
        return f"<{class_name(value)}>"


def to_name(value: object) -> str:
    """Return the text of a name: a str, or the value of an enumeration member if it is a str. Other values become `<Class>`."""
    value_type = type(value)
    if value_type is str:
        return value  # type: ignore[return-value]  # checked above
    try:
        name: Any = value.value if issubclass(value_type, enum.Enum) else value  # type: ignore[attr-defined]  # an Enum
    except Exception as error:  # an enumeration with a `value` of its own
        if is_from_signal_handler(error):
            raise
        name = value
    return str.__str__(name) if issubclass(type(name), str) else f"<{class_name(name)}>"


def safe_repr(value: object, limit: int = MAX_SAFE_REPR_CHARACTERS) -> str:
    """Return a text for messages, cut after *limit* characters. Runs no code of the job except `__str__` of an exception.

    An exception becomes `Class: text`, but `<Class>` in a container. Objects other than plain values, members of enumerations and
    built-in containers of these become `<Class>`.
    """
    value_type = type(value)
    try:
        if value_type is Unconvertible:
            return value.text[:limit]  # type: ignore[attr-defined,no-any-return]  # checked above
        if issubclass(value_type, BaseException):
            return f"{class_name(value)}: {value}"[:limit]
        return _safe_repr_of(value, 0, iter(range(MAX_ITEMS)))[:limit]
    except Exception as error:  # the exception's own `__str__`
        if is_from_signal_handler(error):
            raise
        return class_name(value) if issubclass(value_type, BaseException) else f"<{class_name(value)}>"


def class_name(value: object) -> str:
    """Return the name of the value's class, without running code of a metaclass."""
    return name_of_class(type(value))


def _safe_repr_of(value: Any, depth: int, budget: Iterator[int]) -> str:
    """Return the text of `safe_repr` for a value inside *depth* containers; *budget* as in `_attribute_of`."""
    value_type = type(value)
    if value_type is str or value_type is bytes:
        return repr(value[:MAX_SAFE_REPR_CHARACTERS])
    if value_type is int:
        return _integer_text(value)
    if value is None or value_type is float or value_type is bool:
        return repr(value)
    if issubclass(value_type, enum.Enum):
        return f"<{class_name(value)}.{value._name_}: {_safe_repr_of(value._value_, depth + 1, budget)}>"
    if depth < MAX_DEPTH and (
        value_type is list
        or value_type is tuple
        or value_type is set
        or value_type is frozenset
        or value_type is dict
    ):
        return _container(value, value_type, budget, lambda item: _safe_repr_of(item, depth + 1, budget))
    return f"<{class_name(value)}>"


def _repr_of(value: Any, depth: int, budget: Iterator[int]) -> str:
    """Return the text of `to_repr` for a value inside *depth* containers; *budget* as in `_attribute_of`."""
    value_type = type(value)
    if issubclass(value_type, str):
        return repr(str.__getitem__(value, slice(MAX_ITEM_CHARACTERS)))
    if issubclass(value_type, (bytes, bytearray)):
        return repr(first_bytes(value, MAX_ITEM_CHARACTERS))
    if issubclass(value_type, int) and not issubclass(value_type, (bool, enum.Enum)):
        return _integer_text(int.__int__(value))
    if _is_array(value, value_type):
        device = getattr(value, "device", "")
        return f"{class_name(value)} of shape {tuple(value.shape)} on {str(device) or 'a device'}"
    if items_of(value, value_type) is not None or pairs_of(value, value_type) is not None:
        if depth >= MAX_DEPTH:
            return "..."
        return _container(value, value_type, budget, lambda item: _repr_of(item, depth + 1, budget))
    size = size_of(value, value_type)
    return (
        f"<{class_name(value)} of {size} items>"
        if size > MAX_SIZED_ITEMS
        else repr(value)[:MAX_ITEM_CHARACTERS]
    )


def _container(value: Any, value_type: type, budget: Iterator[int], repr_of: Callable[[Any], str]) -> str:
    """Return the text of the first items of a list, tuple, set or mapping in the notation of the built-in base class."""
    items, pairs = items_of(value, value_type), pairs_of(value, value_type)
    if pairs is not None:
        parts = [f"{repr_of(key)}: {repr_of(item)}" for (key, item), _ in zip(pairs[:MAX_REPR_ITEMS], budget)]  # noqa: B905  # the budget ends the loop
    else:
        parts = [repr_of(item) for item, _ in zip((items or [])[:MAX_REPR_ITEMS], budget)]  # noqa: B905  # the budget ends the loop
    omission = ["..."] if size_of(value, value_type) > MAX_REPR_ITEMS else []
    body = ", ".join(parts + omission)
    if pairs is not None:
        return f"{{{body}}}"
    if issubclass(value_type, tuple):
        return f"({body},)" if len(parts) == 1 else f"({body})"
    if issubclass(value_type, frozenset):
        return f"frozenset({{{body}}})" if parts else "frozenset()"
    if issubclass(value_type, set):
        return f"{{{body}}}" if parts else "set()"
    return f"deque([{body}])" if issubclass(value_type, deque) else f"[{body}]"


def _integer_text(value: int) -> str:
    """Return the digits of an integer, or its number of bits from `_MAX_SHOWN_BITS` on."""
    bits = value.bit_length()
    return str(value) if bits < _MAX_SHOWN_BITS else f"an integer of {bits} bits"


def _is_array(value: Any, value_type: type) -> bool:
    """Return True for an object with a shape that has a device or may not have been computed yet."""
    return class_attribute(value_type, "shape") is not None and (
        class_attribute(value_type, "device") is not None or is_asynchronous(value)
    )
