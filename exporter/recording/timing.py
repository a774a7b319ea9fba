"""Timing of blocks, functions, coroutines and generators, whose durations are samples of a Stat."""

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
    """Timer of a `with` block, or decorator that times each call of a function. Blocks and calls that raise are timed too.

    A decorator is reentrant and thread-safe. A context manager times a single block at a time; `stat.time()` returns a new Timer.
    A coroutine is timed from its first step to its end, including waits, and a generator from its first `next()` to its end.
    """

    __slots__ = ("_add", "_start_seconds")

    def __init__(self, add: Callable[[float], object]) -> None:
        self._add = add
        self._start_seconds = 0.0

    def __enter__(self) -> Self:
        self._start_seconds = perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self._add(perf_counter() - self._start_seconds)

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function, coroutine function or generator function."""
        return within(lambda: Timer(self._add), function)


def within(block: Callable[[], AbstractContextManager[object]], function: AnyFunction) -> AnyFunction:
    """Return a function whose calls each run in a new `with` block.

    The function may be a coroutine function or a generator function, also an asynchronous one. Values and exceptions that the caller
    sends or throws into the generator reach the generator.
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
                        except GeneratorExit:  # noqa: PERF203  # the `yield` raises the caller's exceptions
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
