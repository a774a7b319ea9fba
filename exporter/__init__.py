"""Public API for training code: `from exporter import Aggregation, Stat`.

The training process imports this module, which uses only the standard library. The import starts no thread and opens no file.
Invalid arguments of `Stat`, `configure` and registrations raise; recording calls do not raise. Every function that waits has a
timeout.
"""

from __future__ import annotations

from exporter import training
from exporter.errors import DefinitionError, ExporterError
from exporter.process import Sidecar, configure, flush, shutdown, start_sidecar
from exporter.recording import events
from exporter.recording.event_values import Event, Severity
from exporter.recording.events import log
from exporter.recording.stat import REGISTRY, Stat
from exporter.recording.values import Aggregation, StatDefinition, WindowReading
from exporter.training import span
from exporter.version import __version__

registry = REGISTRY
"""Registry of the Stats of this process: `matching("train.*")`, `find(name)`, `set_enabled(pattern, enabled=…)`."""


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__


__all__ = [
    "Aggregation",
    "DefinitionError",
    "Event",
    "ExporterError",
    "Severity",
    "Sidecar",
    "Stat",
    "StatDefinition",
    "WindowReading",
    "__version__",
    "configure",
    "events",
    "flush",
    "log",
    "registry",
    "shutdown",
    "span",
    "start_sidecar",
    "training",
]
