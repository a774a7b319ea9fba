"""Free space in the configured checkpoint directories."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from exporter.collectors.host.statvfs import NOT_RETURNED, StatvfsPool, available_bytes, size_bytes
from exporter.collectors.kernel_files import failure, printable
from exporter.collectors.options import SlowOptions
from exporter.config.options import option
from exporter.errors import CollectError
from exporter.families import Collected, FamilySpec

AVAILABLE = FamilySpec(
    name="training_checkpoint_dir_available_bytes",
    type="gauge",
    unit="bytes",
    labels=("run", "path"),
    help="Free space in a checkpoint directory for users other than root.",
    absent="without configured paths, without running runs, or where statvfs fails, has not returned or reports no size",
    source="statvfs f_bavail * f_frsize",
)
SIZE = FamilySpec(
    name="training_checkpoint_dir_size_bytes",
    type="gauge",
    unit="bytes",
    labels=("run", "path"),
    help="Size of the filesystem of a checkpoint directory.",
    absent="without configured paths, without running runs, or where statvfs fails, has not returned or reports no size",
    source="statvfs f_blocks * f_frsize",
)
SPECS = (AVAILABLE, SIZE)


@dataclass(frozen=True, slots=True)
class CheckpointDirsOptions(SlowOptions):
    """Options of the checkpoint directory collector."""

    paths: tuple[Path, ...] = option((), "Directories, in the mount namespace of the exporter.")


class CheckpointDirsCollector:
    """Collector of the space in the configured checkpoint directories. Nothing is read unless a run is running."""

    name = "checkpoint_dirs"
    specs = SPECS

    def __init__(
        self,
        paths: Sequence[Path] = (),
        *,
        runs: Callable[[], Collection[str] | None] = lambda: None,
        pool: StatvfsPool | None = None,
    ) -> None:
        self._paths = {str(path): str(path) for path in paths}
        self._runs = runs
        self._pool = pool or StatvfsPool()

    def collect(self) -> Collected:
        """Call statvfs for each directory."""
        collected = Collected()
        runs = sorted(self._runs() or ())
        for path, result in self._pool.call(self._paths if runs else {}).items():
            label = printable(path)
            if isinstance(result, os.statvfs_result):
                size = size_bytes(result)
                for run in runs:
                    collected.add(AVAILABLE, available_bytes(result), run, label)
                    collected.add(SIZE, size, run, label)
                if size is None:
                    collected.unsupported.append(f"{label}: the filesystem does not report a size")
            elif result is None:
                collected.fail(CollectError(f"{label}: {NOT_RETURNED}", reason="hanging"))
            else:
                collected.fail(failure(label, result))
        return collected
