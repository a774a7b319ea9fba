"""What training code imports: `from exporter import Aggregation, Stat`.

Loaded in the training process: standard library only. Importing it starts no thread and opens no file; the
first Stat starts the recording thread, and the first flush makes the feed file. Nothing here raises into the
job except the construction of a Stat that cannot be, waits on it, or outlives it.
"""

from __future__ import annotations

from exporter.errors import DefinitionError, EventsLostError, ExporterError
from exporter.process import RECORDER, configure, flush, shutdown
from exporter.recording.late import LATE_IMPORTS
from exporter.recording.stat import REGISTRY, Stat, Stats
from exporter.recording.values import Aggregation, StatDefinition, WindowReading
from exporter.sidecar import Sidecar, start_sidecar
from exporter.version import __version__

registry = Stats(REGISTRY)
"""The Stats of this process: `registry.matching("train.*")`, `registry.find(name)`, `registry.switch(pattern, …)`."""

REGISTRY.on_first(RECORDER.start)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from exporter import training
    from exporter.recording import events
    from exporter.recording.events import Event, Severity, log
    from exporter.training import span


def __getattr__(name: str) -> object:
    """Load events and training at their first use: each costs as much as a good part of all the rest."""
    found: object
    if name in {"Event", "Severity", "events", "log"}:
        with LATE_IMPORTS:
            from exporter.recording import events as module  # noqa: PLC0415  # see above

        found = module if name == "events" else getattr(module, name)
    elif name in {"span", "training"}:
        with LATE_IMPORTS:
            import exporter.training as face  # noqa: PLC0415  # see above

        found = face if name == "training" else face.span
    else:
        raise AttributeError(f"module 'exporter' has no attribute {name!r}")
    globals()[name] = found
    return found


__all__ = [
    "Aggregation",
    "DefinitionError",
    "Event",
    "EventsLostError",
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
