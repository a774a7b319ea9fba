"""Patching other libraries: hooks around a method, hooks after an import, and the promise that no hook raises.

Used in the training process, on the thread that calls the method or imports the module. The method gets the arguments
it was given, and its caller gets what it returned or raised, whatever happens in a hook; the signature does not matter,
so that a library may change it. The frames of the wrappers are taken out of the tracebacks that pass through them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

from exporter.recording.notices import tell_once

Function = TypeVar("Function", bound=Callable[..., Any])
Before = Callable[..., Any]
After = Callable[[Any, Any, BaseException | None], object]
ImportHook = Callable[[ModuleType], None]

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


def _ignore(_kept: Any, _result: Any, _error: BaseException | None) -> None:
    """Do nothing after the call."""


def patch(owner: Any, name: str, before: Before, after: After = _ignore) -> None:
    """Put two hooks around a method; one that has them already is left as it is.

    Args:
        owner: The class or module that has the method.
        name: The method's name.
        before: Called with the arguments; what it returns is handed to `after`, which is not called for None.
        after: Called with that, what the method returned, and what it raised.

    Raises:
        AttributeError: There is no such method.
    """
    method = getattr(owner, name)
    if _PATCHED in vars(method):
        return
    before, after = never_raises(before), never_raises(after)

    @wraps(method)
    def patched(*args: Any, **kwargs: Any) -> Any:
        kept = before(*args, **kwargs)
        try:
            result = method(*args, **kwargs)
        except BaseException as error:
            if kept is not None:
                after(kept, None, error)
            drop_frame(error)
            raise
        if kept is not None:
            after(kept, result, None)
        return result

    setattr(patched, _PATCHED, True)
    setattr(owner, name, patched)
    home = sys.modules.get(method.__module__)
    if isinstance(owner, ModuleType) and getattr(home, name, None) is method:
        setattr(home, name, patched)  # pickle finds a function by the module that it was defined in


def patch_existing(owner: Any, names: Sequence[str], before: Before, after: After = _ignore) -> None:
    """Patch those of some methods that this version of the library has."""
    for name in names:
        if callable(getattr(owner, name, None)):
            patch(owner, name, before, after)


def drop_frame(error: BaseException) -> None:
    """Take the calling wrapper's frame, the outermost one so far, out of a traceback that is about to be raised on.

    A bare `raise` does not add it again from Python 3.11 on; 3.10 shows one line of the wrapper.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def when_imported(name: str, hook: ImportHook) -> None:
    """Call a hook with a module: now if it is loaded, else right after its import; an error in it is reported.

    Nothing is imported for it. A finder at the front of `sys.meta_path` knows the modules that are waited for; for every
    other import it is one look into a dictionary, and it goes when nothing is waited for any more.

    Args:
        name: The module's full name.
        hook: Called on the thread that imports, before anybody has the module.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _call(hook, module)
        return
    _FINDER.hooks.setdefault(name, []).append(hook)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.hooks: dict[str, list[ImportHook]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.hooks:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None

    def loaded(self, module: ModuleType) -> None:
        """Call the hooks of a module that has been executed."""
        for hook in self.hooks.pop(module.__name__, ()):
            _call(hook, module)
        if not self.hooks and self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader(Loader):
    """Loads as another loader does, and gives its place back to it before the module can see this one."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        try:
            self._inner.exec_module(module)
        except BaseException as error:
            drop_frame(error)
            raise
        _FINDER.loaded(module)


def _call(hook: ImportHook, module: ModuleType) -> None:
    try:
        hook(module)
    except Exception as error:  # noqa: BLE001  # a library that has become different must not fail for being watched
        tell_once(f"hook {module.__name__}", f"{module.__name__} is not watched: {error!r}")


_FINDER = _Finder()
