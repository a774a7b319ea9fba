"""Jobs of `run` that have recorded nothing, and why: `run` finds out, this shows it.

A collector in the sidecar. Reads what `run` has left in the feed directory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from exporter.families import Collected, FamilySpec
from exporter.feed import runs
from exporter.feed.runs import Job

SILENT = FamilySpec(
    "training_run_silent",
    "gauge",
    f"1 for a run whose Python job, {runs.SILENT_SECONDS:.0f} s after its start, has recorded nothing, with the reason: "
    "not_installed, shadowed, turned_off, environment, feed_directory, nothing_told. Absent once it records.",
    ("run", "reason"),
    source="`training-exporter run`, which asks the job's interpreter",
)
SPECS = (SILENT,)
INTERVAL_SECONDS = 5.0


class SilentJobs:
    """Shows which jobs record nothing.

    Args:
        feed_directory: Where `run` leaves what it has found.
        recording: The runs that have recorded something; None while that is not known.

    Attributes:
        jobs: Those of the last pass.
    """

    name = "silent_jobs"
    specs = SPECS

    def __init__(self, feed_directory: Path, recording: Callable[[], Collection[str] | None]) -> None:
        self._feed_directory = feed_directory
        self._recording = recording
        self.jobs: tuple[Job, ...] = ()

    def collect(self) -> Collected:
        """Read what is said of the living jobs."""
        recording = self._recording() or ()
        self.jobs = tuple(
            job
            for job in runs.jobs(self._feed_directory)
            if job.silence is not None and job.run not in recording
        )
        collected = Collected()
        collected.add_family(SILENT, {(job.run, job.silence.reason): 1.0 for job in self.jobs if job.silence})
        return collected
