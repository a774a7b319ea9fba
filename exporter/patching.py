"""Patching of other libraries: hooks around functions and methods, and hooks after an import. No hook raises into the job.

Used in the training process. The patched function receives the unchanged arguments, and the caller receives the result
or the exception even if a hook fails. The wrappers' frames are removed from tracebacks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

from exporter.recording.notices import log_once

Function = TypeVar("Function", bound=Callable[..., Any])
Around = Generator[None, tuple[Any, "BaseException | None"], None]
"""Hook of a rare call: the part before its `yield` runs before the call; `yield` returns the result and the exception."""
Hook = Callable[..., "Around | None"]
"""Called with the arguments of the call; returns None to skip the part after the call."""
Before = Callable[..., Any]
"""Hook before a frequent call, called with the call's arguments; returns a token, or None to skip `After`."""
After = Callable[[Any, Any, "BaseException | None"], None]
"""Called after the call with the token of `Before`, the result and the exception."""

_PATCHED = "__exporter_patched__"


def never_raises(hook: Function) -> Function:
    """Wrap a hook so that an error in the hook is logged once and the hook returns None."""

    @wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # the job must not fail because of a bridge
            log_failure(hook, error)
            return None

    return guarded  # type: ignore[return-value]  # the same signature


def log_failure(hook: Callable[..., object], error: Exception) -> None:
    """Log once that a hook failed."""
    name = f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', hook)}"
    log_once(f"{name} {type(error)}", f"bridge hook {name} failed, event skipped: {error!r}")


def patch(owner: Any, name: str, hook: Hook) -> None:
    """Put a generator hook around a rarely called method. A patched method stays unchanged.

    Raises:
        AttributeError: The owner has no such method.
    """

    def before(*args: Any, **kwargs: Any) -> Around | None:
        around = hook(*args, **kwargs)
        if around is not None:
            next(around, None)
        return around

    def after(around: Around, result: Any, error: BaseException | None) -> None:
        with suppress(StopIteration):
            around.send((result, error))

    patch_frequent(owner, name, wraps(hook)(before), wraps(hook)(after))


def patch_frequent(owner: Any, name: str, before: Before, after: After) -> None:
    """Put two plain functions around a method that is called in every step. A patched method stays unchanged.

    Raises:
        AttributeError: The owner has no such method.
    """

    def around(method: Function) -> Function:
        def patched(*args: Any, **kwargs: Any) -> Any:
            try:
                token = before(*args, **kwargs)
            except Exception as failure:  # noqa: BLE001  # the job must not fail because of a bridge
                log_failure(before, failure)
                token = None
            try:
                result = method(*args, **kwargs)
            except BaseException as error:
                if token is not None:
                    _call_after(after, token, None, error)
                drop_frame(error)
                raise
            if token is not None:
                _call_after(after, token, result, None)
            return result

        return patched  # type: ignore[return-value]  # the same signature

    replace(owner, name, around)


def replace(owner: Any, name: str, around: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace a method by the function that *around* makes of the method. A patched method stays unchanged.

    Raises:
        AttributeError: The owner has no such method.
    """
    method = getattr(owner, name)
    if _PATCHED in vars(method):
        return
    patched = wraps(method)(around(method))
    setattr(patched, _PATCHED, True)
    setattr(owner, name, patched)
    home = sys.modules.get(method.__module__)
    if isinstance(owner, ModuleType) and getattr(home, name, None) is method:
        setattr(home, name, patched)  # pickle finds a function by the module in which it is defined


def _call_after(after: After, token: Any, result: Any, error: BaseException | None) -> None:
    try:
        after(token, result, error)
    except Exception as failure:  # noqa: BLE001  # the job must not fail because of a bridge
        log_failure(after, failure)


def patch_existing(owner: Any, names: Sequence[str], hook: Hook) -> None:
    """Patch the methods that exist in this version of the library."""
    for name in names:
        if callable(getattr(owner, name, None)):
            patch(owner, name, hook)


def drop_frame(error: BaseException) -> None:
    """Remove the calling wrapper's frame from a traceback; Python 3.10 adds the frame again at `raise`."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def version_of(package: str) -> str | None:
    """Return the version of a loaded package; None if the package has no `__version__`."""
    return str(getattr(sys.modules.get(package), "__version__", "")) or None


def when_imported(name: str, hook: Callable[[ModuleType], object]) -> None:
    """Call a hook with a module: now if the module is loaded, otherwise after the import. Errors in the hook are logged.

    The hook causes no import. A finder at the front of `sys.meta_path` holds the names of expected modules; an
    unrelated import costs a look-up. The finder is removed when no module is expected any more.
    """
    module = sys.modules.get(name)
    if module is not None and (module is _FINDER.executed or not _is_initializing(module)):
        _call(hook, module)
        return
    if module is None:
        _FINDER.expected.setdefault(name, []).append(hook)
    else:
        _FINDER.unfinished.append((module, hook))
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder:
    # Not derived from importlib.abc's class: that loads tempfile, shutil and random, 0.7 MB, into every job.
    def __init__(self) -> None:
        self.expected: dict[str, list[Callable[[ModuleType], object]]] = {}
        self.unfinished: list[tuple[ModuleType, Callable[[ModuleType], object]]] = []
        self.executed: ModuleType | None = (
            None  # complete, though the import system still marks it as initializing
        )

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self.unfinished:
            self._call_finished()
        if name not in self.expected:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                with suppress(AttributeError, TypeError):  # no loader, or an immutable loader
                    self._watch(spec.loader)
                return spec
        return None

    def _call_finished(self) -> None:
        """Call the hooks of modules whose import was under way when the hook was registered and is complete now."""
        waiting, self.unfinished = self.unfinished, []
        for module, hook in waiting:
            if _is_initializing(module):
                self.unfinished.append((module, hook))
            else:
                _call(hook, module)
        # The finder stays in `sys.meta_path`, over which the import system iterates at this moment.

    def _watch(self, loader: Any) -> None:
        """Make the loader of this import call the hooks once; the module sees the loader unchanged."""
        if "exec_module" in vars(loader):
            return  # watched already: a finder may return one loader for several searches
        execute = loader.exec_module

        def watched(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            try:
                execute(module)
            except BaseException as error:
                drop_frame(error)
                raise
            outer, self.executed = self.executed, module
            for hook in self.expected.pop(module.__name__, ()):
                _call(hook, module)
            self.executed = outer
            if not self.expected and not self.unfinished and self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = watched


def _call(hook: Callable[[ModuleType], object], module: ModuleType) -> None:
    try:
        hook(module)
    except Exception as error:  # noqa: BLE001  # an unknown version of a library must not fail because of a bridge
        log_once(f"hook {module.__name__}", f"{module.__name__} is not watched: {error!r}")


_FINDER = _Finder()
