"""Patching of other libraries: hooks around functions and methods, and hooks after an import.

Runs in the training process. An error in a hook does not reach the job: the patched function receives its arguments unchanged,
and the caller receives its result or exception. An exception that a signal handler of the job raises during a hook does reach
the job. The frames of the wrappers are removed from tracebacks.
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
from exporter.recording.signal_safety import is_from_signal_handler

Function = TypeVar("Function", bound=Callable[..., Any])
Around = Generator[None, tuple[Any, "BaseException | None"], None]
"""Generator of a rare call, suspended at its `yield` during the call. The `yield` returns the result and the exception."""
Hook = Callable[..., "Around | None"]
"""Hook of a rare call. It receives the arguments of the call, and returns a generator, or None if nothing runs after the call."""
BeforeHook = Callable[..., Any]
"""Hook before a frequent call. It receives the arguments of the call, and returns a token, or None to skip the `AfterHook`."""
AfterHook = Callable[[Any, Any, "BaseException | None"], None]
"""Hook after a frequent call. It receives the token of the `BeforeHook`, the result of the call and its exception."""

_PATCH_MARKER = "__exporter_patched__"
"""Attribute that marks a patched method."""


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
    """Log once that a hook failed. An error that a signal handler of the job has raised is raised again instead."""
    if is_from_signal_handler(error):
        raise error
    name = f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', hook)}"
    log_once(f"{name} {type(error)}", f"bridge hook {name} failed, event skipped: {error!r}")


def patch(owner: Any, name: str, hook: Hook) -> None:
    """Wrap a rarely called method with a generator hook. A method that is already patched is not patched again.

    Raises:
        AttributeError: The owner has no such method.
    """

    def before(*args: Any, **kwargs: Any) -> Around | None:
        generator = hook(*args, **kwargs)
        if generator is not None:
            next(generator, None)
        return generator

    def after(generator: Around, result: Any, error: BaseException | None) -> None:
        with suppress(StopIteration):
            generator.send((result, error))

    patch_frequent(owner, name, wraps(hook)(before), wraps(hook)(after))


def patch_frequent(owner: Any, name: str, before: BeforeHook, after: AfterHook) -> None:
    """Wrap a frequently called method with a hook before and a hook after the call.

    A method that is already patched is not patched again.

    Raises:
        AttributeError: The owner has no such method.
    """

    def wrap(method: Function) -> Function:
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

    replace(owner, name, wrap)


def replace(owner: Any, name: str, wrap: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace a method by the function that *wrap* returns for the method. A method that is already patched is not replaced again.

    Raises:
        AttributeError: The owner has no such method.
        TypeError: The method is built in, or the owner is immutable.
    """
    method = getattr(owner, name)
    if _PATCH_MARKER in vars(method):
        return
    patched = wraps(method)(wrap(method))
    setattr(patched, _PATCH_MARKER, True)
    setattr(owner, name, patched)
    defining_module = sys.modules.get(method.__module__)
    if isinstance(owner, ModuleType) and getattr(defining_module, name, None) is method:
        setattr(defining_module, name, patched)  # pickle looks a function up in the module that defines it


def _call_after(after: AfterHook, token: Any, result: Any, error: BaseException | None) -> None:
    """Call the hook after a call. An error in the hook is logged once."""
    try:
        after(token, result, error)
    except Exception as failure:  # noqa: BLE001  # the job must not fail because of a bridge
        log_failure(after, failure)


def patch_existing(owner: Any, names: Sequence[str], hook: Hook) -> None:
    """Patch the methods of *names* that exist in this version of the library."""
    for name in names:
        if callable(getattr(owner, name, None)):
            patch(owner, name, hook)


def drop_frame(error: BaseException) -> None:
    """Remove the frame of the calling wrapper from a traceback. Python 3.10 adds the frame again at the next `raise`."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def version_of(package: str) -> str | None:
    """Return the version of a package, or None if the package is not loaded or has no `__version__`."""
    return str(getattr(sys.modules.get(package), "__version__", "")) or None


def when_imported(name: str, hook: Callable[[ModuleType], object]) -> None:
    """Call a hook with a module: now if the module is loaded, otherwise after its import. Errors in the hook are logged.

    This function imports nothing. A finder at the front of `sys.meta_path` recognizes the imports of the expected modules; each
    other import costs a look-up. The finder is removed after the import of the last expected module.
    """
    module = sys.modules.get(name)
    if module is not None and (module is _FINDER.executing_module or not _is_initializing(module)):
        _call(hook, module)
        return
    if module is None:
        _FINDER.expected_modules.setdefault(name, []).append(hook)
    else:
        _FINDER.unfinished_imports.append((module, hook))
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _is_initializing(module: ModuleType) -> bool:
    """Return True while the import system executes a module, which is in `sys.modules` before it is complete."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder:
    """Finder that calls hooks after the import of expected modules."""

    # Not derived from `importlib.abc.MetaPathFinder`, whose import would cost 0.7 MB in every job.
    def __init__(self) -> None:
        self.expected_modules: dict[str, list[Callable[[ModuleType], object]]] = {}
        self.unfinished_imports: list[tuple[ModuleType, Callable[[ModuleType], object]]] = []
        # Module whose hooks are running. The module is complete, but the import system still marks it as initializing.
        self.executing_module: ModuleType | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec from the other finders, with a loader that calls the hooks. Return None for a module without hooks."""
        if self.unfinished_imports:
            self._call_finished()
        if name not in self.expected_modules:
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
        """Call the hooks of modules that were incomplete when the hooks were registered, and are complete now."""
        candidates, self.unfinished_imports = self.unfinished_imports, []
        for module, hook in candidates:
            if _is_initializing(module):
                self.unfinished_imports.append((module, hook))
            else:
                _call(hook, module)
        # The finder is not removed here, because the import system is iterating over `sys.meta_path`.

    def _watch(self, loader: Any) -> None:
        """Replace the loader's `exec_module` for one call, after which the hooks of the module are called."""
        if "exec_module" in vars(loader):
            return  # already replaced: a finder may return the same loader for several searches
        execute = loader.exec_module

        def execute_and_call_hooks(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            try:
                execute(module)
            except BaseException as error:
                drop_frame(error)
                raise
            outer, self.executing_module = self.executing_module, module
            for hook in self.expected_modules.pop(module.__name__, ()):
                _call(hook, module)
            self.executing_module = outer
            if not self.expected_modules and not self.unfinished_imports and self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = execute_and_call_hooks


def _call(hook: Callable[[ModuleType], object], module: ModuleType) -> None:
    """Call a hook with a module. An error is logged once per module."""
    try:
        hook(module)
    except Exception as error:  # the import must not fail because of a bridge
        if is_from_signal_handler(error):
            raise
        log_once(f"hook {module.__name__}", f"{module.__name__} is not watched: {error!r}")


_FINDER = _Finder()
