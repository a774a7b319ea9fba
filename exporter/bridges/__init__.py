"""Bridges to training libraries, which record a job without changes to the code of the job; see docs/bridges.md.

Used in the training process and in torchrun's agent. A bridge is inactive until the library is imported. An error in a hook of a
bridge does not reach the job; a daemon thread logs the error once, to standard error. The hooks acquire no lock on the threads of
the job.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib import import_module
from types import ModuleType

from exporter.patching import when_imported
from exporter.recording.notices import log_once
from exporter.recording.signal_safety import is_from_signal_handler
from exporter_auto import BRIDGES

_requested_names: set[str] = set()


def install(*names: str) -> tuple[str, ...]:
    """Install the named bridges, or all of `exporter_auto.BRIDGES`. A repeated call has no effect.

    A bridge to a library that is not loaded yet is installed when the job imports the library.

    Returns:
        The names of all requested bridges except those that could not be installed. Empty if `EXPORTER_DISABLED=1`.

    Raises:
        ValueError: No bridge has this name.
    """
    unknown_names = [name for name in names if name not in BRIDGES]
    if unknown_names:
        raise ValueError(f"no bridge {unknown_names[0]!r}; available: {', '.join(BRIDGES)}")
    if os.environ.get("EXPORTER_DISABLED") == "1":
        return ()
    for name in names or BRIDGES:
        if name not in _requested_names:
            _requested_names.add(name)
            if BRIDGES[name] == "torch" and "torch" in sys.modules:
                # torch calls the entry point at the end of `import torch`, which is still marked as in progress.
                _install_bridge(name, sys.modules["torch"])
            else:
                when_imported(BRIDGES[name], partial(_install_bridge, name))
    return tuple([name for name in BRIDGES if name in _requested_names])


def _install_bridge(name: str, _library: ModuleType) -> None:
    try:
        import_module(f"exporter.bridges.{name}").install()
    except Exception as error:  # the job must not fail because of a bridge
        if is_from_signal_handler(error):
            raise
        _requested_names.discard(name)
        log_once(f"bridge {name}", f"the bridge {name} could not be installed: {error!r}")
