"""Start-up hook of the Python processes of a job under `training-exporter run`: installs bridges before libraries load.

`run` puts this folder first in PYTHONPATH, because most libraries call no entry points. The `sitecustomize` of the environment is
loaded afterwards. Exceptions of the exporter are suppressed here.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class _BridgeFinder:
    """Import finder that calls `exporter_auto.start()` before the first import of a bridged library."""

    def __init__(self, libraries: set[str]) -> None:
        self._libraries = libraries

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return None for other modules. For a bridged library, start the bridges and return the spec of the next finder."""
        if name not in self._libraries:
            return None
        with suppress(ValueError):  # removed by the import of a library on another thread
            sys.meta_path.remove(self)
        with suppress(Exception):
            __import__("exporter_auto").start()
        # The import in progress does not call the finders that the bridges have just added before this one.
        find_functions = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
        specs = (find_spec(name, path, target) for find_spec in find_functions)
        return next((spec for spec in specs if spec is not None), None)


def _load_environment_sitecustomize() -> None:
    """Remove this folder from the module search path, and load the `sitecustomize` of the environment, if there is one."""
    this_module = sys.modules.pop("sitecustomize")
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # pathlib is slow to import
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]  # noqa: PTH100  # pathlib is slow to import
    try:
        __import__("sitecustomize")
    except ImportError as error:
        # The environment has none. Python reports any other error of its `sitecustomize`, as without `run`.
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this_module)


if os.environ.get("EXPORTER_AUTO") == "1":
    with suppress(Exception):
        # torch needs no finder, because `import torch` calls an entry point.
        sys.meta_path.insert(0, _BridgeFinder(set(__import__("exporter_auto").BRIDGES.values()) - {"torch"}))
_load_environment_sitecustomize()
