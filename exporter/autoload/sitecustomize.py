"""Start-up hook of the Python processes of a job of `training-exporter run`, which installs bridges before libraries load.

`run` puts this folder first in PYTHONPATH, because most libraries look for no entry point. The environment's own
`sitecustomize` is loaded afterwards. Exceptions are swallowed here.
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
        if name not in self._libraries:
            return None
        sys.meta_path.remove(self)
        with suppress(Exception):
            __import__("exporter_auto").start()
        # The import under way does not call the finders that the bridges have just added in front.
        finders = [each.find_spec for each in sys.meta_path if hasattr(each, "find_spec")]
        return next((spec for find in finders if (spec := find(name, path, target)) is not None), None)


def _load_own_sitecustomize() -> None:
    """Load the `sitecustomize` of the environment, if there is one."""
    here, own = os.path.dirname(os.path.abspath(__file__)), sys.modules.pop("sitecustomize")  # noqa: PTH100, PTH120  # pathlib is slow to import
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != here]  # noqa: PTH100  # as above
    try:
        with suppress(ImportError):
            __import__("sitecustomize")
    finally:
        sys.modules.setdefault("sitecustomize", own)


if os.environ.get("EXPORTER_AUTO") == "1":
    with suppress(Exception):
        # `import torch` itself calls an entry point.
        sys.meta_path.insert(0, _BridgeFinder(set(__import__("exporter_auto").BRIDGES.values()) - {"torch"}))
_load_own_sitecustomize()
