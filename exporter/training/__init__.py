"""The face of training telemetry: what a job does, told by blocks, callbacks and numbers; one-logger's names and more.

The job's own calls are in `exporter.training.api`; one-logger's names, of `exporter.one_logger`, are offered here too. The
first use of a name loads what it is in.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exporter.one_logger import *  # noqa: F403
    from exporter.training.api import *  # noqa: F403

    __all__: list[str]

_HOMES = ("exporter.training.api", "exporter.one_logger")


def __getattr__(name: str) -> object:
    """Load what offers a name, at its first use."""
    if name == "__all__":
        return sorted(each for home in _HOMES for each in import_module(home).__all__)
    # A module of this package is asked for here before it is imported; and the sidecar reads `phases` alone.
    if not name.startswith("__") and find_spec(f"{__name__}.{name}") is None:
        for home in _HOMES:
            module = import_module(home)
            if name in module.__all__:
                found: object = getattr(module, name)
                globals()[name] = found
                return found
    raise AttributeError(f"module 'exporter.training' has no attribute {name!r}")
