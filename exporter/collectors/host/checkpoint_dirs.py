"""Checkpoint directories: how much room is left where checkpoints go.

Used in the sidecar. The paths of the configuration, and the runs that live, come in; a filesystem that does not answer
costs its own path only (see `statvfs`). No state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from exporter.collectors.host import filesystem
from exporter.collectors.host.mounts import Mount
from exporter.collectors.host.statvfs import Silence, StatvfsPool
from exporter.errors import CollectError
from exporter.families import Collected, FamilySpec, family

_ABSENT = "absent where no path is configured or no run lives, and where its filesystem does not say or does not answer."

AVAILABLE = family(
    "training_checkpoint_dir_available_bytes",
    f"Room that is left for the job in a directory of checkpoints; {_ABSENT}",
    "statvfs: f_bavail * f_frsize",
    "run",
    "path",
)
SIZE = family(
    "training_checkpoint_dir_size_bytes",
    f"Size of the filesystem of a directory of checkpoints; {_ABSENT}",
    "statvfs: f_blocks * f_frsize",
    "run",
    "path",
)

SPECS = (AVAILABLE, SIZE)

_SOURCES = {AVAILABLE: filesystem.AVAIL, SIZE: filesystem.SIZE}


class CheckpointDirsCollector:
    """Asks the filesystems of the configured paths.

    Args:
        paths: Directories; one that is not there yet is a problem until it is.
        runs: The runs that live; None while that is not known.
        pool: Makes the calls.
    """

    name = "checkpoint_dirs"
    specs = SPECS

    def __init__(
        self,
        paths: Sequence[Path] = (),
        *,
        runs: Callable[[], Collection[str] | None] = lambda: None,
        pool: StatvfsPool | None = None,
    ) -> None:
        nothing: frozenset[str] = frozenset()
        # Each path stands for a filesystem of its own: whether it hangs does not depend on the others.
        self._places = [
            Mount(number, 0, path, "/", path, "", "", nothing, nothing)
            for number, path in enumerate(map(str, paths))
        ]
        self._runs = runs
        self._pool = pool or StatvfsPool()

    def collect(self) -> Collected:
        """Ask once."""
        collected = Collected()
        runs = sorted(self._runs() or ())
        if not runs or not self._places:
            return collected
        answers = self._pool.ask(self._places)
        samples: dict[FamilySpec, dict[tuple[str, ...], float]] = {spec: {} for spec in SPECS}
        for place in self._places:
            answer = answers[place.path]
            if isinstance(answer, OSError):
                collected.fail(CollectError(f"{place.label}: {answer.strerror or answer}", reason="read"))
                continue
            if isinstance(answer, Silence):
                collected.fail(CollectError(f"{place.label}: {answer.value}", reason="timeout"))
                continue
            told = filesystem.measured(answer)
            for spec, source in _SOURCES.items():
                if source in told:
                    samples[spec].update({(run, place.label): told[source] for run in runs})
            if not told:
                collected.unsupported.append(f"{place.label}: its filesystem does not tell its size")
        for spec, found in samples.items():
            collected.add_family(spec, found)
        return collected
