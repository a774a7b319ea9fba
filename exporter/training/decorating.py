"""Decorating: having each call of a function run inside a block of its own.

Used in the training process, on the caller's thread. What the function gives or raises goes on its way untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

_CO_GENERATOR, _CO_COROUTINE, _CO_ASYNC_GENERATOR = 0x20, 0x80, 0x200


def decorated(function: AnyFunction, block: Callable[[], AbstractContextManager[object]]) -> AnyFunction:
    """Wrap a function, a coroutine function, a generator function or an asynchronous one.

    Args:
        function: A coroutine is inside from its first step to its end, waiting included.
        block: Makes the block of one call.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(decorated(function.__func__, block))
    flags = getattr(getattr(function, "__code__", None), "co_flags", 0)
    wrapped: Callable[..., Any]
    if flags & _CO_COROUTINE:

        @wraps(function)
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            with block():
                return await function(*args, **kwargs)

    elif flags & _CO_ASYNC_GENERATOR:

        @wraps(function)
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            generator = function(*args, **kwargs)
            with block():
                try:
                    item = await generator.__anext__()
                    while True:
                        try:
                            sent = yield item
                        except GeneratorExit:  # noqa: PERF203  # it is what is wanted
                            await generator.aclose()
                            raise
                        except BaseException as error:  # noqa: BLE001  # it is for the generator, as with `yield from`
                            item = await generator.athrow(error)
                        else:
                            item = await generator.asend(sent)
                except StopAsyncIteration:
                    return

    elif flags & _CO_GENERATOR:

        @wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with block():
                return (yield from function(*args, **kwargs))

    else:

        @wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with block():
                return function(*args, **kwargs)

    return wrapped  # type: ignore[return-value]  # the same signature, by wraps
