"""Collector of the jobs of `run` that record nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from exporter.families import Collected, FamilySpec
from exporter.feed import runs
from exporter.feed.runs import Job
from exporter.recording.values import ProcessIdentity

INTERVAL_SECONDS = 5.0

RUN_SILENT = FamilySpec(
    name="training_run_silent",
    type="gauge",
    labels=("run", "reason"),
    help=(
        f"1 for a run whose Python job has recorded nothing {runs.SILENT_SECONDS:.0f} s after its start. Reasons: "
        "not_installed, shadowed, turned_off, environment, feed_directory, nothing_recorded. Absent once the job records."
    ),
    source="`training-exporter run`, which inspects the job's interpreter",
)
SPECS = (RUN_SILENT,)


class SilentJobs:
    """Collector of silent jobs; `jobs` are the silent jobs of the last pass."""

    name = "silent_jobs"
    specs = SPECS

    def __init__(self, feed_directory: Path, recording: Callable[[], Iterable[ProcessIdentity]]) -> None:
        self._feed_directory = feed_directory
        self._recording = recording
        self.jobs: tuple[Job, ...] = ()

    def collect(self) -> Collected:
        """Read the reports of `run`, without jobs that record now."""
        silent = [job for job in runs.jobs(self._feed_directory) if job.silence is not None]
        recording = list(self._recording())
        # A job may record under a name of its own: the launch id is the same.
        runs_now, launches = {each.run for each in recording}, {each.launch for each in recording} - {""}
        self.jobs = tuple(job for job in silent if job.run not in runs_now and job.launch not in launches)
        collected = Collected()
        collected.add_family(
            RUN_SILENT, {(job.run, job.silence.reason): 1.0 for job in self.jobs if job.silence}
        )
        return collected
