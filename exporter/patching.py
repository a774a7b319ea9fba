"""Patching other libraries: hooks around a method, hooks after an import, and the promise that no hook raises.

Used in the training process. The method gets the arguments it was given, whatever its signature, and its caller what it
returned or raised, whatever happens in a hook; the wrappers' frames are taken out of the tracebacks that pass through them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

from exporter.recording.notices import tell_once

Function = TypeVar("Function", bound=Callable[..., Any])
Around = Generator[None, tuple[Any, "BaseException | None"], None]
"""What happens around a call: up to its `yield` before, then after; the `yield` gives the result and what was raised."""
Hook = Callable[..., "Around | None"]
"""Called with the arguments of the call; gives None where the end of it does not matter."""

_PATCHED = "__exporter_patched__"


def never_raises(hook: Function) -> Function:
    """Wrap a hook so that an error in it is reported once, and the hook then returns None."""

    @wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # the job must not fail for being watched
            name = f"{hook.__module__}.{hook.__qualname__}"
            tell_once(f"{name} {type(error)}", f"a bridge has missed something, {name}: {error!r}")
            return None

    return guarded  # type: ignore[return-value]  # the same signature


def patch(owner: Any, name: str, hook: Hook) -> None:
    """Put a hook around a method, unless it has one already; AttributeError where there is no such method."""
    method = getattr(owner, name)
    if _PATCHED in vars(method):
        return

    @never_raises
    @wraps(hook)
    def begin(*args: Any, **kwargs: Any) -> Around | None:
        around = hook(*args, **kwargs)
        if around is not None:
            next(around, None)
        return around

    @never_raises
    @wraps(hook)
    def end(around: Around, result: Any, error: BaseException | None) -> None:
        with suppress(StopIteration):
            around.send((result, error))

    @wraps(method)
    def patched(*args: Any, **kwargs: Any) -> Any:
        around = begin(*args, **kwargs)
        try:
            result = method(*args, **kwargs)
        except BaseException as error:
            if around is not None:
                end(around, None, error)
            drop_frame(error)
            raise
        if around is not None:
            end(around, result, None)
        return result

    setattr(patched, _PATCHED, True)
    setattr(owner, name, patched)
    home = sys.modules.get(method.__module__)
    if isinstance(owner, ModuleType) and getattr(home, name, None) is method:
        setattr(home, name, patched)  # pickle finds a function by the module that it was defined in


def patch_existing(owner: Any, names: Sequence[str], hook: Hook) -> None:
    """Patch those of some methods that this version of the library has."""
    for name in names:
        if callable(getattr(owner, name, None)):
            patch(owner, name, hook)


def drop_frame(error: BaseException) -> None:
    """Take the calling wrapper's frame out of a traceback that is raised on; in Python 3.10 `raise` adds it again."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def version_of(package: str) -> str | None:
    """Return the version of a loaded package; None where it does not say."""
    return str(getattr(sys.modules.get(package), "__version__", "")) or None


def when_imported(name: str, hook: Callable[[ModuleType], object]) -> None:
    """Call a hook with a module: now if it is loaded, else right after its import; an error in it is reported.

    Nothing is imported for it. A finder at the front of `sys.meta_path` knows the modules that are waited for; for each
    other import it is one look into a dictionary, and it goes when nothing is waited for any more.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _call(hook, module)
        return
    _FINDER.hooks.setdefault(name, []).append(hook)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder:
    # Not importlib.abc's: that loads tempfile, shutil and random, two thirds of a megabyte, into every job.
    def __init__(self) -> None:
        self.hooks: dict[str, list[Callable[[ModuleType], object]]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.hooks:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                with suppress(AttributeError):  # no loader, or one that cannot be changed
                    self._watch(spec.loader)
                return spec
        return None

    def _watch(self, loader: Any) -> None:
        """Have a module's loader, made for this import, call the hooks once; the module sees it as it was."""
        execute = loader.exec_module

        def watched(module: ModuleType) -> None:
            del loader.exec_module
            try:
                execute(module)
            except BaseException as error:
                drop_frame(error)
                raise
            for hook in self.hooks.pop(module.__name__, ()):
                _call(hook, module)
            if not self.hooks and self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = watched


def _call(hook: Callable[[ModuleType], object], module: ModuleType) -> None:
    try:
        hook(module)
    except Exception as error:  # noqa: BLE001  # a library that has become different must not fail for being watched
        tell_once(f"hook {module.__name__}", f"{module.__name__} is not watched: {error!r}")


_FINDER = _Finder()
