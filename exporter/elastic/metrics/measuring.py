"""Measuring calls: what `prof` wraps a function in, whichever kind of function it is.

Used in the training process and in torchrun's agent, on the thread that calls. The function returns and raises what it
would without.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any, TypeVar

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
Put = Callable[[str, float], None]

_GENERATOR, _COROUTINE, _ASYNC_GENERATOR = 0x20, 0x80, 0x200
"""Flags of a function's code."""


class _Teller:
    """Publishes the outcome and the duration of calls.

    Args:
        name: What the metrics' names begin with.
        put: Takes a name and a value.
        endings: Exceptions that end a call as it should.
    """

    def __init__(self, name: str, put: Put, *endings: type[BaseException]) -> None:
        self._put = put
        self._outcomes = (f"{name}.failure", f"{name}.success")
        self._duration = f"{name}.duration.ms"
        self._endings = (None, *endings)

    def __call__(self) -> _Measured:
        return _Measured(self)

    def tell(self, began: float, ending: type[BaseException] | None) -> None:
        elapsed = perf_counter() - began
        self._put(self._outcomes[ending in self._endings], 1)
        self._put(self._duration, round(elapsed * 1000, 3))


class _Measured:
    """One call."""

    __slots__ = ("_began", "_teller")

    def __init__(self, teller: _Teller) -> None:
        self._teller = teller

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, ending: type[BaseException] | None, *_: object) -> None:
        self._teller.tell(self._began, ending)


def measured(function: AnyFunction, name: str, put: Put) -> AnyFunction:
    """Wrap a function so that every call is told of."""
    flags = getattr(getattr(function, "__code__", None), "co_flags", 0)
    if flags & _COROUTINE:
        return _coroutine(function, _Teller(name, put))
    if flags & _ASYNC_GENERATOR:
        return _async_generator(function, _Teller(name, put, GeneratorExit))
    if flags & _GENERATOR:
        return _generator(function, _Teller(name, put, GeneratorExit))
    return _call(function, _Teller(name, put))


def _call(function: AnyFunction, measure: _Teller) -> AnyFunction:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with measure():
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]  # the same signature, by wraps


def _coroutine(function: AnyFunction, measure: _Teller) -> AnyFunction:
    @wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with measure():
            return await function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]  # the same signature, by wraps


def _generator(function: AnyFunction, measure: _Teller) -> AnyFunction:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with measure():
            return (yield from function(*args, **kwargs))

    return wrapper  # type: ignore[return-value]  # the same signature, by wraps


def _async_generator(function: AnyFunction, measure: _Teller) -> AnyFunction:
    @wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with measure():
            generator = function(*args, **kwargs)
            try:
                item = await generator.__anext__()
                while True:  # what `yield from` does, which there is not for these
                    try:
                        sent = yield item
                    except GeneratorExit:  # noqa: PERF203  # each item may be thrown at
                        await generator.aclose()
                        raise
                    except BaseException as error:  # noqa: BLE001  # handed on to whom it was meant for
                        item = await generator.athrow(error)
                    else:
                        item = await generator.asend(sent)
            except StopAsyncIteration:
                pass

    return wrapper  # type: ignore[return-value]  # the same signature, by wraps
