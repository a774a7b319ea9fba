"""Being called before and after a method of another library, and hooks of ours that never raise.

Used in the training process, on the thread that calls the method. The method gets what it was given and its caller gets
what it gave or raised, whatever happens here; its signature is nobody's business, so that a library may change it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, TypeVar

from exporter.recording.notices import tell_once

Function = TypeVar("Function", bound=Callable[..., Any])

_BRACKETED = "__exporter_bracketed__"


def never_raises(hook: Function) -> Function:
    """Make a hook that tells of what goes wrong in it, once, and then gives None."""

    @wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # the job must not fail for being watched
            name = f"{hook.__module__}.{hook.__qualname__}"
            tell_once(f"{name} {type(error)}", f"a bridge has missed something, {name}: {error!r}")
            return None

    return guarded  # type: ignore[return-value]  # the same signature


def _ignore(_kept: Any, _result: Any, _error: BaseException | None) -> None:
    """The begin was all that counts."""


def bracket(
    owner: Any,
    name: str,
    before: Callable[..., Any],
    after: Callable[[Any, Any, BaseException | None], object] = _ignore,
) -> None:
    """Put two hooks around a method; a second time it is left as it is.

    Args:
        owner: The class or module that has it.
        name: The method's name.
        before: Gets the arguments; what it gives is handed to `after`, and None means that nobody wants to know.
        after: Gets that, what the method gave, and what it raised.

    Raises:
        AttributeError: There is no such method.
    """
    method = getattr(owner, name)
    if _BRACKETED in vars(method):
        return
    before, after = never_raises(before), never_raises(after)

    @wraps(method)
    def bracketed(*args: Any, **kwargs: Any) -> Any:
        kept = before(*args, **kwargs)
        if kept is None:
            return method(*args, **kwargs)
        try:
            result = method(*args, **kwargs)
        except BaseException as error:
            after(kept, None, error)
            raise
        after(kept, result, None)
        return result

    setattr(bracketed, _BRACKETED, True)
    setattr(owner, name, bracketed)
    home = sys.modules.get(method.__module__)
    if isinstance(owner, ModuleType) and getattr(home, name, None) is method:
        setattr(home, name, bracketed)  # pickle finds a function by the module that it was defined in


def bracket_what_exists(
    owner: Any,
    names: tuple[str, ...],
    before: Callable[..., Any],
    after: Callable[[Any, Any, BaseException | None], object] = _ignore,
) -> None:
    """Do the same with those of some methods that this version of the library has."""
    for name in names:
        if callable(getattr(owner, name, None)):
            bracket(owner, name, before, after)
