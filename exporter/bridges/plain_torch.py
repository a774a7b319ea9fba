"""Bridge to training loops without a framework, which `exporter.bridges.torch_loop` infers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from exporter.bridges import torch_hooks
from exporter.bridges.loop_source import LoopSource
from exporter.bridges.sources import ACTIVE, EXIT
from exporter.patching import Around, never_raises, patch_existing


def install() -> None:
    """Report the training as an inferred loop while no other source is active.

    Raises:
        ImportError: torch is not installed.
    """
    torch_hooks.install()
    if isinstance(ACTIVE.fallback, LoopSource):
        return
    source = LoopSource()
    ACTIVE.set_fallback(source)
    EXIT.register()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=never_raises(source.reset))


def active_loop() -> LoopSource | None:
    """Return the source of the inferred loop if the source is active and reports this thread. Otherwise return None."""
    source = ACTIVE.source
    return source if isinstance(source, LoopSource) and source.is_reporting else None


def watch(owner: Any, name: str, hook: Callable[..., Around | None]) -> None:
    """Patch a method that exists in this version of the library.

    The hook receives the source of the inferred loop and the arguments of the method. If that source is not active, the hook is
    skipped.
    """

    def watched(*args: Any, **kwargs: Any) -> Around | None:
        source = active_loop()
        return None if source is None else hook(source, *args, **kwargs)

    patch_existing(owner, (name,), watched)
