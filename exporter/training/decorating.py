"""Decorating: having each call of a function run inside a block of its own.

Used in the training process, on the caller's thread. What the function gives or raises goes on its way untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

_CO_GENERATOR, _CO_COROUTINE, _CO_ASYNC_GENERATOR = 0x20, 0x80, 0x200


def decorated(function: AnyFunction, block: Callable[[], AbstractContextManager[object]]) -> AnyFunction:
    """Wrap a function, a coroutine function, a generator function or an asynchronous one.

    Args:
        function: A coroutine is inside from its first step to its end, waiting included.
        block: Makes the block of one call.
    """
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
            with block():
                async for item in function(*args, **kwargs):
                    yield item

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
