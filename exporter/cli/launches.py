"""Sidecar: when it is to end with the last launch of `run`, and which of their jobs record nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from exporter.families import Collected, FamilySpec
from exporter.feed import runs
from exporter.feed.runs import Job

POLL_SECONDS = 0.5
LINGER_POLL_SECONDS = 0.1
LAST_PASSES_SECONDS = 5.0
MARGIN_SECONDS = 2.0
"""How late a scrape may come."""

_log = logging.getLogger(__name__)


class Scraped(Protocol):
    """What is known of the feed and the scrapes; `serve.Sidecar`, and a test's."""

    feed_passes: int

    def next_expected_scrape(self) -> float | None:
        """When a regular scraper is due, monotonic seconds; None without one."""

    def collect_feed(self) -> None:
        """Read the feed as soon as possible."""


class Lingering:
    """Ends a sidecar when no launch is active any more.

    Not before the page has the job's final values and a regular scraper has come, or `linger_seconds` are over.
    """

    def __init__(
        self,
        sidecar: Scraped,
        *,
        active: Callable[[], bool],
        linger_seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sidecar = sidecar
        self._active = active
        self._linger_seconds = linger_seconds
        self._monotonic = monotonic
        self._ended: float | None = None  # when the last launch was found to be gone
        self._passes_wanted = 0
        self._due: float | None = None  # the scrape that is waited for; None while the page is not final

    def wait_seconds(self) -> float:
        """How long until `is_over` is worth asking again."""
        return POLL_SECONDS if self._ended is None else LINGER_POLL_SECONDS

    def is_over(self) -> bool:
        """Whether to end now."""
        now = self._monotonic()
        if self._active():  # also while lingering: a later launch has joined
            self._ended = self._due = None
            return False
        due = self._sidecar.next_expected_scrape()
        if self._ended is None:
            self._ended = now
            # The pass under way may have read a file before its last change; the one after it has not.
            self._passes_wanted = self._sidecar.feed_passes + 2
            if due is not None:
                _log.debug("no job is left, waiting for the next scrape")
        if due is None or now - self._ended >= self._linger_seconds:
            return True
        if self._due is None:
            if self._sidecar.feed_passes < self._passes_wanted and now - self._ended < LAST_PASSES_SECONDS:
                self._sidecar.collect_feed()
                return False
            self._due = due
        return due > self._due or now >= self._due + MARGIN_SECONDS


SILENT = FamilySpec(
    name="training_run_silent",
    type="gauge",
    help=f"1 for a run whose Python job, {runs.SILENT_SECONDS:.0f} s after its start, has recorded nothing, with the reason: "
    "not_installed, shadowed, turned_off, environment, feed_directory, nothing_told. Absent once it records.",
    labels=("run", "reason"),
    source="`training-exporter run`, which asks the job's interpreter",
)
SPECS = (SILENT,)
SILENT_INTERVAL_SECONDS = 5.0


class SilentJobs:
    """The collector of the jobs that record nothing; `jobs` are those of the last pass, without those now recording."""

    name = "silent_jobs"
    specs = SPECS

    def __init__(self, feed_directory: Path, recording: Callable[[], Collection[str]]) -> None:
        self._feed_directory = feed_directory
        self._recording = recording
        self.jobs: tuple[Job, ...] = ()

    def collect(self) -> Collected:
        """Read what is said of the living jobs."""
        silent = [job for job in runs.jobs(self._feed_directory) if job.silence is not None]
        self.jobs = tuple(job for job in silent if job.run not in self._recording())
        collected = Collected()
        collected.add_family(SILENT, {(job.run, job.silence.reason): 1.0 for job in self.jobs if job.silence})
        return collected
