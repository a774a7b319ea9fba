"""Loaded by every Python that a job of `training-exporter run` starts, since its folder is the first of PYTHONPATH.

One-logger, Keras and prometheus_client without torch look for no entry point, so their import calls `exporter_auto` here.
Whatever goes wrong stays here. The environment's own `sitecustomize` is loaded as if this one were not there.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_WATCHED = frozenset({"nv_one_logger", "keras", "prometheus_client"})


class _Finder:
    """Installs the bridges before the first of the libraries is imported, and lets those find it that then are there."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _WATCHED:
            return None
        sys.meta_path.remove(cls)
        with suppress(Exception):
            __import__("exporter_auto").start()
        # The import that is under way does not see the finders that the bridges have put first.
        finders = [each.find_spec for each in sys.meta_path if hasattr(each, "find_spec")]
        return next((spec for find in finders if (spec := find(name, path, target)) is not None), None)


def _give_way() -> None:
    """Load the sitecustomize that this one stands before, if there is one."""
    here, own = os.path.dirname(os.path.abspath(__file__)), sys.modules.pop("sitecustomize")  # noqa: PTH100, PTH120  # cheap
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != here]  # noqa: PTH100  # likewise
    try:
        with suppress(ImportError):
            __import__("sitecustomize")
    finally:
        sys.modules.setdefault("sitecustomize", own)


if os.environ.get("EXPORTER_AUTO") == "1":
    sys.meta_path.insert(0, _Finder)
_give_way()
