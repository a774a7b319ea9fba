"""The bridge to Lightning Fabric: its job's own loop, and what it leaves to Fabric.

Used in the training process, for `lightning.fabric` and `lightning_fabric` alike. With `EXPORTER_AUTO=1` every Fabric has
one among its callbacks, by Lightning's own entry points (see `exporter_auto`); otherwise it is given:

    Fabric(callbacks=[exporter.bridges.fabric.callback()])

A Fabric loop is the job's own, and is reported as one without a framework (`exporter.bridges.torch_loop`). Fabric adds the
ranks, and what is written and read as a checkpoint.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import Any

from exporter.bridges import torch_loop
from exporter.bridges.checkpoints import holds_optimizer
from exporter.bridges.sources import set_rank
from exporter.patching import never_raises, version_of

PACKAGES = ("lightning.fabric", "lightning_fabric")


class _FabricCallback:
    """Tells which Fabric there is."""

    @never_raises
    def on_after_setup(self, fabric: Any, **_module: Any) -> None:
        set_rank(int(fabric.global_rank))
        torch_loop.describe_loop(
            framework="fabric",
            framework_version=version_of(type(fabric).__module__.split(".")[0]),
            precision=str(getattr(getattr(fabric, "_precision", None), "precision", "")) or None,
            world_size=int(fabric.world_size),
        )


def callback(package: str | None = None, *, courteous: bool = False) -> Any:
    """Make a callback for Fabric.

    Args:
        package: `lightning.fabric` or `lightning_fabric`; None for those that are loaded.
        courteous: Whether a job that uses `exporter.training` itself is left to it.

    Raises:
        ImportError: Fabric is not installed.
    """
    torch_loop.loop_source(courteous=courteous)
    for each in PACKAGES:
        if each == package or (package is None and each in sys.modules):
            fabric: Any = import_module(each).Fabric
            torch_loop.watch_saves(fabric, "save", _is_whole)
            torch_loop.watch_loads(fabric, "load")
    return _FabricCallback()


automatic = partial(callback, courteous=True)
"""Makes one that nobody has asked for."""


def _is_whole(_fabric: Any, _path: Any = None, state: Any = None, *_args: Any, **kwargs: Any) -> bool:
    saved = kwargs.get("state", state)
    values = saved.values() if hasattr(saved, "values") else ()
    return any(hasattr(each, "param_groups") for each in values) or holds_optimizer(saved)
