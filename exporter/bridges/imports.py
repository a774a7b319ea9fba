"""Being called when a module has been imported, without importing it.

Used in the training process. A finder at the front of `sys.meta_path` knows the modules that are waited for; for every
other import it is one look into a dictionary, and when nothing is waited for any more it is gone. The module is found and
loaded by those who would have done so anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from exporter.recording.notices import tell_once

Hook = Callable[[ModuleType], None]


def when_imported(name: str, hook: Hook) -> None:
    """Call a hook with a module: now when it is there, else right after its import; what it raises is told.

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
        self.hooks: dict[str, list[Hook]] = {}

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
        self._inner.exec_module(module)
        _FINDER.loaded(module)


def _call(hook: Hook, module: ModuleType) -> None:
    try:
        hook(module)
    except Exception as error:  # noqa: BLE001  # a library that has become different must not fail for being watched
        tell_once(f"hook {module.__name__}", f"{module.__name__} is not watched: {error!r}")


_FINDER = _Finder()
