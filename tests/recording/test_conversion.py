"""Conversion: any object becomes a plain number, text or attribute, in bounded time and without an exception."""

from __future__ import annotations

import enum
import math
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from decimal import Decimal
from time import thread_time
from types import SimpleNamespace
from typing import Any

import pytest

from exporter.recording.conversion import (
    MAX_ITEM_CHARACTERS,
    Rejection,
    Unconvertible,
    class_name,
    is_asynchronous,
    safe_repr,
    to_attribute,
    to_datum,
    to_name,
    to_number,
    to_repr,
    to_sample,
    to_scalar,
    to_str,
)
from exporter.recording.introspection import MAX_ITEMS

CONVERSIONS = (
    to_scalar,
    to_number,
    to_attribute,
    to_datum,
    to_str,
    to_repr,
    to_name,
    safe_repr,
    class_name,
    is_asynchronous,
    to_sample,
)
MILLION = 1_000_000


class HostileMeta(type):
    """Metaclass that raises on any access to its class."""

    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError("mine")

    def __hash__(cls) -> int:
        raise RuntimeError("mine")

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("mine")


def hostile_class() -> Any:
    class OfHostileClass(metaclass=HostileMeta):
        pass

    return OfHostileClass


def hostile_object() -> object:
    return hostile_class()()


class UnboundProxy:
    """Unbound proxy, like LocalProxy of werkzeug and SimpleLazyObject of Django."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("unbound")

    def _fail(self, *_: object) -> Any:
        raise RuntimeError("unbound")

    __hash__ = __str__ = __repr__ = __float__ = __index__ = __int__ = __len__ = __iter__ = __bool__ = (
        __eq__
    ) = _fail


class HostileNumber(float):
    def _fail(self, *_: object) -> Any:
        raise RuntimeError("mine")

    __hash__ = __str__ = __repr__ = __float__ = __add__ = __eq__ = _fail


class Array:
    """Array of another library in separate memory."""

    shape = (1,)

    def __init__(self, value: float, device: object = None, *, ready: bool | None = None) -> None:
        self.value, self.device, self.ready = value, device, ready

    def item(self) -> float:
        if self.device == "cuda:0":
            raise AssertionError("this would wait for the device")
        return self.value


class JaxArray(Array):
    def is_ready(self) -> bool:
        return bool(self.ready)

    def item(self) -> float:
        assert self.ready, "this would wait for the device"
        return self.value


class Level(enum.IntEnum):
    LOW = 3


class Mode(enum.Enum):
    FAST = "fast"


class BigList(list[int]):
    pass


class BigDict(dict[int, int]):
    pass


class BigText(str):
    __slots__ = ()


@pytest.mark.parametrize("convert", CONVERSIONS)
@pytest.mark.parametrize(
    "make",
    [hostile_object, UnboundProxy, lambda: HostileNumber(1.5), hostile_class],
    ids=["object", "proxy", "number", "class"],
)
def test_no_conversion_raises_for_a_class_that_raises_on_any_access(
    convert: Any, make: Callable[[], object]
) -> None:
    value = make()
    convert(value)
    convert([value])
    convert({"x": value})


@pytest.mark.parametrize("convert", [to_scalar, to_attribute, to_datum])
def test_an_interrupt_in_the_jobs_own_code_reaches_the_job(convert: Any) -> None:
    class Interrupted:
        def item(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(Interrupted())


@pytest.mark.parametrize(
    "make",
    [
        lambda: BigList(range(MILLION)),
        lambda: BigDict.fromkeys(range(MILLION)),
        lambda: OrderedDict.fromkeys(range(MILLION)),
        lambda: deque(range(MILLION)),
        lambda: BigText("x" * 50 * MILLION),
        lambda: list(range(MILLION)),
        lambda: [[list(range(100))] * 100] * 100,
        lambda: 1 << 10 * MILLION,
    ],
    ids=["list", "dict", "OrderedDict", "deque", "str", "plain", "nested", "int"],
)
def test_the_conversion_of_a_container_of_a_million_items_is_bounded(make: Callable[[], object]) -> None:
    value = make()
    start = thread_time()
    for _ in range(MILLION):
        pass
    seconds_of_a_million = thread_time() - start
    cpu_seconds = {}
    for convert in CONVERSIONS:
        start = thread_time()
        convert(value)
        cpu_seconds[convert.__name__] = thread_time() - start

    # A call for each of a million items takes longer than ten empty loops over them.
    assert {
        name: seconds for name, seconds in cpu_seconds.items() if seconds >= 10 * seconds_of_a_million
    } == {}


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, None),
        ("1", None),
        (b"1", None),
        (Decimal("1.5"), 1.5),
        (Level.LOW, 3),
        (Array(2.5), 2.5),
        (Array(2.5, "cpu"), 2.5),
        (Array(2.5, "/job:localhost/replica:0/task:0/device:CPU:0"), 2.5),
        (Array(2.5, "cuda:0"), None),
        (JaxArray(2.5, ready=True), 2.5),
        (JaxArray(2.5, ready=False), None),
        (object(), None),
    ],
)
def test_a_number_is_read_from_objects_of_other_libraries_without_waiting(
    value: object, number: float | None
) -> None:
    assert to_number(value) == number
    assert type(to_number(value)) in {int, float, type(None)}


def test_a_number_is_read_from_arrays_of_one_element() -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")

    for scalar in (
        numpy.float32(1.5),
        numpy.array(1.5),
        numpy.array([1.5]),
        torch.tensor(1.5),
        torch.tensor([[1.5]]),
    ):
        assert to_number(scalar) == 1.5
    for array_value in (numpy.zeros(3), torch.zeros(3), torch.zeros(1, device="meta"), numpy.array([1j])):
        assert to_number(array_value) is None
        assert isinstance(to_scalar(array_value), Unconvertible)


def test_a_number_is_read_from_a_jax_array() -> None:
    jax = pytest.importorskip("jax")
    for scalar in (jax.numpy.asarray(1.5), jax.numpy.asarray([1.5])):
        jax.block_until_ready(scalar)
        assert to_number(scalar) == 1.5
        assert is_asynchronous(scalar)


def test_an_array_is_asynchronous_unless_it_is_in_host_memory() -> None:
    torch = pytest.importorskip("torch")

    assert not any(map(is_asynchronous, (1.5, "x", None, torch.zeros(1), object(), Array(1.0, "cpu"))))
    assert all(map(is_asynchronous, (torch.zeros(1, device="meta"), Array(1.0, "cuda:0"), JaxArray(1.0))))


def test_an_attribute_is_a_plain_value_or_a_list_of_one_kind() -> None:
    assert to_attribute([1, 2.5]) == [1.0, 2.5]
    assert to_attribute((1, "a", None)) == ["1", "a", "None"]
    assert to_attribute({"a": 1, "b": [2]}) == ["a:1", "b:[2]"]
    assert to_attribute(Mode.FAST) == "fast"
    assert len(to_attribute([[1] * MAX_ITEMS] * MAX_ITEMS)) <= MAX_ITEMS  # type: ignore[arg-type]  # a list


def test_safe_repr_runs_no_code_of_the_job() -> None:
    class Noisy:
        def __repr__(self) -> str:
            raise AssertionError("the job's code has run")

    assert safe_repr(Noisy()) == "<Noisy>"
    assert safe_repr([Noisy(), 1, "a"]) == "[<Noisy>, 1, 'a']"
    assert safe_repr(ValueError("bad")) == "ValueError: bad"


def test_the_type_of_a_device_is_read_without_calling_its_methods() -> None:
    calls = []

    class DeviceType:
        @property
        def __class__(self) -> type:
            calls.append("__class__ of the job")
            return str

        @__class__.setter
        def __class__(self, value: type) -> None: ...

    class DeviceTypeText(str):
        __slots__ = ()

        def lower(self) -> str:
            calls.append("lower of the job")
            return "cpu"

    assert to_number(Array(2.5, SimpleNamespace(type=DeviceType()))) is None
    assert to_number(Array(2.5, SimpleNamespace(type=DeviceTypeText("cuda")))) is None
    assert to_number(Array(2.5, SimpleNamespace(type=DeviceTypeText("CPU")))) == 2.5
    assert calls == []


def test_the_str_of_an_array_on_a_device_is_not_called() -> None:
    calls = []

    class DeviceArray(Array):
        def __str__(self) -> str:
            calls.append("__str__ waits for the device")
            return "2.5"

    assert to_str(DeviceArray(2.5, "cuda:0")) == "DeviceArray of shape (1,) on cuda:0"
    assert to_str(DeviceArray(2.5, "cpu")) == "2.5"
    assert calls == []


def test_the_str_of_an_enumeration_member_is_that_of_its_value() -> None:
    assert to_str(Mode.FAST) == "fast"
    assert to_str(Level.LOW) == "3"


def test_a_long_item_of_a_repr_is_cut() -> None:
    assert to_repr("x" * 500) == repr("x" * MAX_ITEM_CHARACTERS)
    assert to_repr([b"x" * 500]) == f"[{b'x' * MAX_ITEM_CHARACTERS!r}]"


def test_a_sample_is_finite_or_the_reason_of_its_rejection() -> None:
    assert [to_sample(value) for value in (1, 2.5, True)] == [1.0, 2.5, 1.0]
    assert to_sample(math.nan) is Rejection.NAN
    assert to_sample(-math.inf) is Rejection.INFINITE
    assert to_sample(10**400) is Rejection.OUT_OF_RANGE
    assert to_sample("1") is Rejection.NOT_A_NUMBER


def test_the_message_of_a_number_has_at_most_the_given_number_of_characters() -> None:
    assert to_str(10**1000, 20) == "1" + "0" * 19
    assert to_str(0.1 + 0.2, 5) == "0.300"


def test_the_text_of_a_container_that_contains_itself_is_finite() -> None:
    loop: list[Any] = []
    loop.append(loop)

    assert to_repr(loop) == "[[[[[...]]]]]"
    assert len(repr(to_attribute(loop))) < 100
    assert sys.getsizeof(safe_repr(loop)) < 1000
