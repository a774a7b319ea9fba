"""Timing: how long a block, a function or a coroutine took, as a sample of a Stat.

Used in the training process, on the caller's thread. A duration is recorded whether or not the block raised;
what it raised goes on its way untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    from typing_extensions import Self

    AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

_CO_GENERATOR, _CO_COROUTINE, _CO_ASYNC_GENERATOR = 0x20, 0x80, 0x200


class Timer:
    """Times one `with` block, or every call of a function that it decorates.

    As a decorator it is re-entrant and safe for threads; as a context manager one Timer times one block at a
    time (`stat.time()` makes a new one). A coroutine function is timed from its first step to its end,
    waiting included; a generator function from its first `next()` to its end.

    Args:
        add: Where the seconds go.
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
        """Decorate a function, a coroutine function, a generator function or an asynchronous one."""
        add = self._add
        flags = getattr(getattr(function, "__code__", None), "co_flags", 0)
        timed: Callable[..., Any]
        if flags & _CO_COROUTINE:

            @wraps(function)
            async def timed(*args: Any, **kwargs: Any) -> Any:
                began = perf_counter()
                try:
                    return await function(*args, **kwargs)
                finally:
                    add(perf_counter() - began)

        elif flags & _CO_ASYNC_GENERATOR:

            @wraps(function)
            async def timed(*args: Any, **kwargs: Any) -> Any:
                began = perf_counter()
                try:
                    async for item in function(*args, **kwargs):
                        yield item
                finally:
                    add(perf_counter() - began)

        elif flags & _CO_GENERATOR:

            @wraps(function)
            def timed(*args: Any, **kwargs: Any) -> Any:
                began = perf_counter()
                try:
                    return (yield from function(*args, **kwargs))
                finally:
                    add(perf_counter() - began)

        else:

            @wraps(function)
            def timed(*args: Any, **kwargs: Any) -> Any:
                began = perf_counter()
                try:
                    return function(*args, **kwargs)
                finally:
                    add(perf_counter() - began)

        return timed  # type: ignore[return-value]  # the same signature, by wraps
