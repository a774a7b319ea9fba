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


class _Call:
    """One call, whose outcome and duration are published."""

    __slots__ = ("_began", "_endings", "_name", "_put")

    def __init__(self, name: str, put: Put, endings: tuple[object, ...]) -> None:
        self._name, self._put, self._endings = name, put, endings

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, ending: type[BaseException] | None, *_: object) -> None:
        elapsed = perf_counter() - self._began
        self._put(f"{self._name}.{'success' if ending in self._endings else 'failure'}", 1)
        self._put(f"{self._name}.duration.ms", round(elapsed * 1000, 3))


def measured(function: AnyFunction, name: str, put: Put) -> AnyFunction:
    """Wrap a function so that every call is published; leaving a generator early is no failure.

    Args:
        function: Of any kind.
        name: What the metrics' names begin with.
        put: Takes a name and a value.
    """
    flags = getattr(getattr(function, "__code__", None), "co_flags", 0)
    wrapper: Callable[..., Any]
    if flags & _COROUTINE:

        @wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            with _Call(name, put, (None,)):
                return await function(*args, **kwargs)

    elif flags & _ASYNC_GENERATOR:

        @wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            with _Call(name, put, (None, GeneratorExit)):
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

    elif flags & _GENERATOR:

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with _Call(name, put, (None, GeneratorExit)):
                return (yield from function(*args, **kwargs))

    else:

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with _Call(name, put, (None,)):
                return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]  # the same signature, by wraps
