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
    """

    def __init__(self, name: str, put: Put) -> None:
        self._put = put
        self._outcomes = (f"{name}.failure", f"{name}.success")
        self._duration = f"{name}.duration.ms"

    def __call__(self, began: float, *, success: bool) -> None:
        elapsed = perf_counter() - began
        self._put(self._outcomes[success], 1)
        self._put(self._duration, round(elapsed * 1000, 3))


def measured(function: AnyFunction, name: str, put: Put) -> AnyFunction:
    """Wrap a function so that every call is told of."""
    tell = _Teller(name, put)
    flags = getattr(getattr(function, "__code__", None), "co_flags", 0)
    if flags & _COROUTINE:
        return _coroutine(function, tell)
    if flags & _ASYNC_GENERATOR:
        return _async_generator(function, tell)
    if flags & _GENERATOR:
        return _generator(function, tell)
    return _call(function, tell)


def _call(function: AnyFunction, tell: _Teller) -> AnyFunction:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        try:
            result = function(*args, **kwargs)
        except BaseException:
            tell(began, success=False)
            raise
        tell(began, success=True)
        return result

    return wrapper  # type: ignore[return-value]  # the same signature, by wraps


def _coroutine(function: AnyFunction, tell: _Teller) -> AnyFunction:
    @wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        try:
            result = await function(*args, **kwargs)
        except BaseException:
            tell(began, success=False)
            raise
        tell(began, success=True)
        return result

    return wrapper  # type: ignore[return-value]  # the same signature, by wraps


def _generator(function: AnyFunction, tell: _Teller) -> AnyFunction:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        try:
            result = yield from function(*args, **kwargs)
        except GeneratorExit:
            tell(began, success=True)
            raise
        except BaseException:
            tell(began, success=False)
            raise
        tell(began, success=True)
        return result

    return wrapper  # type: ignore[return-value]  # the same signature, by wraps


def _async_generator(function: AnyFunction, tell: _Teller) -> AnyFunction:
    @wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        began, success = perf_counter(), False
        generator = function(*args, **kwargs)
        try:
            item = await generator.__anext__()
            while True:  # what `yield from` does, which there is not for these
                try:
                    sent = yield item
                except GeneratorExit:  # noqa: PERF203  # each item may be thrown at
                    await generator.aclose()
                    success = True
                    raise
                except BaseException as error:  # noqa: BLE001  # handed on to whom it was meant for
                    item = await generator.athrow(error)
                else:
                    item = await generator.asend(sent)
        except StopAsyncIteration:
            success = True
        finally:
            tell(began, success=success)

    return wrapper  # type: ignore[return-value]  # the same signature, by wraps
