"""Timing of blocks, functions, coroutines and generators; each duration is a sample of a Stat."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


class Timer:
    """Timer of a `with` block or of each call of a decorated function, whether or not the block or call raises.

    A decorator is re-entrant and thread-safe; a context manager times a single block at a time (`stat.time()` returns a new
    Timer). A coroutine function is timed from its first step to its end, including waits; a generator function from its first
    `next()` to its end.
    """

    __slots__ = ("_add", "_began")

    def __init__(self, add: Callable[[float], object]) -> None:
        self._add = add
        self._began = 0.0

    def __enter__(self) -> Self:
        self._began = perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self._add(perf_counter() - self._began)

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function, coroutine function or generator function."""
        return within(lambda: Timer(self._add), function)


def within(block: Callable[[], AbstractContextManager[object]], function: AnyFunction) -> AnyFunction:
    """Run each call of a function, coroutine function or (asynchronous) generator function in a new `with` block.

    Values and exceptions that the caller sends or throws into a generator reach the generator.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(within(block, function.__func__))
    wrapper: Callable[..., Any]
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            with block():
                return await function(*args, **kwargs)

    elif inspect.isasyncgenfunction(function):

        @wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            with block():
                generator = function(*args, **kwargs)
                try:
                    item = await generator.__anext__()
                    while True:
                        try:
                            value = yield item
                        except GeneratorExit:  # noqa: PERF203  # the yield raises exceptions of the caller
                            await generator.aclose()
                            raise
                        except BaseException as error:  # noqa: BLE001  # passes an exception of the caller to the generator
                            item = await generator.athrow(error)
                        else:
                            item = await generator.asend(value)
                except StopAsyncIteration:
                    return

    elif inspect.isgeneratorfunction(function):

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with block():
                return (yield from function(*args, **kwargs))

    else:

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with block():
                return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]  # the same signature, by wraps
