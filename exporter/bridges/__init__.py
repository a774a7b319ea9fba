"""Bridges: what other libraries do in the job, recorded without any change to the job; docs/bridges.md describes them.

Used in the training process and in torchrun's agent. A bridge costs nothing before its library is loaded, never raises,
takes no lock on the job's path and writes nothing to its output.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from exporter.bridges import (
    accelerate,
    keras,
    one_logger,
    prometheus_client,
    torch_loop,
    torch_monitor,
    torch_stats,
    transformers,
)
from exporter.elastic import bridge as elastic
from exporter.recording.notices import tell_once

BRIDGES: dict[str, Callable[[], None]] = {
    "elastic": elastic.install,
    "monitor": torch_monitor.install,
    "wait_counters": torch_stats.install_wait_counters,
    "cuda_memory": torch_stats.install_cuda_memory,
    "plain_torch": torch_loop.install,
    "transformers": transformers.install,
    "accelerate": accelerate.install,
    "keras": keras.install,
    "one_logger": one_logger.install,
    "prometheus_client": prometheus_client.install,
}
"""Every bridge by name; those to Lightning are its own entry points (see `exporter_auto`)."""

LOAD_TORCH = frozenset({"monitor", "wait_counters", "cuda_memory", "plain_torch"})

_installed: set[str] = set()


def install_into_running() -> None:
    """Install all but those that would load torch into a job that has not: it asks again at `import torch`."""
    install(*[name for name in BRIDGES if name not in LOAD_TORCH or "torch" in sys.modules])


def install(*names: str) -> tuple[str, ...]:
    """Install these bridges, or all; again is harmless.

    Returns the names of those that are installed now. Raises ValueError: There is no such bridge.
    """
    unknown = [name for name in names if name not in BRIDGES]
    if unknown:
        raise ValueError(f"no bridge {unknown[0]!r}; known: {', '.join(BRIDGES)}")
    if os.environ.get("EXPORTER_DISABLED") == "1":
        return ()
    for name in names or BRIDGES:
        if name in _installed:
            continue
        _installed.add(name)
        try:
            BRIDGES[name]()
        except Exception as error:  # noqa: BLE001  # the job must not fail for being watched
            _installed.discard(name)
            tell_once(f"bridge {name}", f"the bridge {name} could not be installed: {error!r}")
    return tuple([name for name in BRIDGES if name in _installed])
