"""Bridge to Lightning Fabric of `lightning.fabric` and `lightning_fabric`: a callback, saves and loads.

Used in the training process. The loop is inferred (`exporter.bridges.torch_loop`).
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from exporter import training
from exporter.bridges import plain_torch
from exporter.bridges.checkpoints import holds_optimizer
from exporter.bridges.loop_source import LoopSource
from exporter.bridges.sources import set_rank
from exporter.patching import Around, never_raises, version_of

PACKAGES = ("lightning.fabric", "lightning_fabric")


class _FabricCallback:
    """Callback that records rank, world size, version and precision of Fabric."""

    @never_raises
    def on_after_setup(self, fabric: Any, **_module: Any) -> None:
        set_rank(int(fabric.global_rank))
        if plain_torch.active_loop() is not None:
            training.describe(
                framework="fabric",
                framework_version=version_of(type(fabric).__module__.split(".")[0]),
                precision=str(getattr(getattr(fabric, "_precision", None), "precision", "")) or None,
                world_size=int(fabric.world_size),
            )


def callback(package: str | None = None) -> Any:
    """Return a callback for Fabric, and install the bridge to plain loops and the hooks on `save` and `load` of Fabric.

    The hooks apply to every `Fabric` of the package.

    Args:
        package: Name in `PACKAGES`. The package is imported if it is not loaded. None stands for the packages that are loaded now;
            checkpoints of a package that the job imports later are not recorded.

    Raises:
        ImportError: The named package, or torch, is not installed.
    """
    plain_torch.install()
    for name in PACKAGES:
        if name == package or (package is None and name in sys.modules):
            fabric: Any = import_module(name).Fabric
            plain_torch.watch(fabric, "save", _save)
            plain_torch.watch(fabric, "load", _load)
    return _FabricCallback()


def _save(
    source: LoopSource, _fabric: Any, _path: Any = None, state: Any = None, *_: Any, **kwargs: Any
) -> Around:
    # The state holds objects of the job, such as the optimizer, or their state dictionaries.
    contents = kwargs.get("state", state)
    values = contents.values() if hasattr(contents, "values") else ()
    is_resumable = any(hasattr(value, "param_groups") for value in values) or holds_optimizer(contents)
    return source.checkpoint(is_resumable=is_resumable)


def _load(source: LoopSource, *_args: Any, **_kwargs: Any) -> Around:
    return source.load()
