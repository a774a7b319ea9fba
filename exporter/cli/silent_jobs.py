"""Collector of silent jobs: Python jobs under `run` that have recorded nothing 20 s after their start.

`exporter.cli.silence` finds out why a job is silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from exporter.families import Collected, FamilySpec
from exporter.feed import runs
from exporter.feed.runs import Job
from exporter.recording.values import ProcessIdentity

INTERVAL_SECONDS = 5.0
"""Interval between two collections."""

RUN_SILENT = FamilySpec(
    name="training_run_silent",
    type="gauge",
    labels=("run", "reason"),
    help=f"1 for a run whose Python job has recorded nothing {runs.SILENT_SECONDS:.0f} s after its start, by reason.",
    absent="for a job that records, for a job without a Python process, or after the end of the job",
    source="`training-exporter run`, which inspects the job's interpreter",
    details=(
        "`not_installed`: the job's Python cannot import the package.",
        "`shadowed`: the job's Python would import another module named `exporter`.",
        "`turned_off`: `EXPORTER_DISABLED=1` or `EXPORTER_AUTO=0`.",
        "`environment`: the job has no `EXPORTER_FEED_DIR`, or a different one.",
        "`feed_directory`: the feed directory is full or unreadable, or the job may not write to it.",
        "`nothing_recorded`: no bridge applies, and the job calls no function of `exporter`.",
    ),
)
SPECS = (RUN_SILENT,)


def find_silent_jobs(feed_directory: Path, recording_processes: Iterable[ProcessIdentity]) -> tuple[Job, ...]:
    """Return the running jobs that `run` has diagnosed as silent. Omit a job if one of its processes has recorded since."""
    diagnosed_jobs = [job for job in runs.jobs(feed_directory) if job.silence is not None]
    processes = list(recording_processes)
    # A job may record under a run name of its own. The launch id of its processes is then the only link to the job.
    recording_runs = {process.run for process in processes}
    recording_launches = {process.launch for process in processes} - {""}
    return tuple(
        job
        for job in diagnosed_jobs
        if job.run not in recording_runs and job.launch not in recording_launches
    )


class SilentJobs:
    """Collector of silent jobs.

    Attributes:
        jobs: Silent jobs in the last pass, with the diagnosis.
    """

    name = "silent_jobs"
    specs = SPECS

    def __init__(
        self, feed_directory: Path, recording_processes: Callable[[], Iterable[ProcessIdentity]]
    ) -> None:
        self._feed_directory = feed_directory
        self._recording_processes = recording_processes
        self.jobs: tuple[Job, ...] = ()

    def collect(self) -> Collected:
        """Return a sample for each silent job."""
        self.jobs = find_silent_jobs(self._feed_directory, self._recording_processes())
        collected = Collected()
        collected.add_family(
            RUN_SILENT, {(job.run, job.silence.reason): 1.0 for job in self.jobs if job.silence}
        )
        return collected
