"""Linger period of an attached sidecar: after the last launch of `run`, the sidecar waits for a final scrape."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

POLL_SECONDS = 0.5
"""Interval of the checks while the job runs."""
LINGER_POLL_SECONDS = 0.1
"""Interval of the checks after the end of the job."""
LAST_PASSES_SECONDS = 5.0
"""Maximum wait for the last passes over the feed. A page has the final values after two passes."""
MARGIN_SECONDS = 2.0
"""Time after the expected scrape at which the sidecar stops waiting for it."""

_log = logging.getLogger(__name__)


class ScrapedSidecar(Protocol):
    """Interface of the sidecar that `LingerPeriod` needs."""

    feed_passes: int  # number of published passes over the feed

    def next_expected_scrape(self) -> float | None:
        """Return the monotonic time of the next scrape by a regular scraper, or None without a regular scraper."""

    def collect_feed(self) -> None:
        """Read the feed as soon as possible."""


class LingerPeriod:
    """Linger period of an attached sidecar, which decides when the sidecar ends.

    After the end of the last launch, a sidecar without a regular scraper ends at once. Otherwise, the sidecar waits for a scrape of the
    job's final values. It ends after this scrape, when the scrape is overdue, and at the latest after `linger_seconds`.
    """

    def __init__(
        self,
        sidecar: ScrapedSidecar,
        *,
        is_active: Callable[[], bool],
        linger_seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sidecar = sidecar
        self._is_active = is_active
        self._linger_seconds = linger_seconds
        self._monotonic = monotonic
        # Monotonic time at which the last launch ended; None while a launch is active.
        self._ended_at: float | None = None
        self._required_passes = 0  # number of passes after which the page has the final values
        # Monotonic time at which a scrape of the final values is expected; None before the page has them.
        self._final_scrape_at: float | None = None

    def wait_seconds(self) -> float:
        """Return the time until the next call of `poll`."""
        return POLL_SECONDS if self._ended_at is None else LINGER_POLL_SECONDS

    def poll(self) -> bool:
        """Record the current launches, passes and scrapes. Return True if the sidecar should end now."""
        now = self._monotonic()
        if self._is_active():  # a launch may join during the linger period
            self._ended_at = self._final_scrape_at = None
            return False
        next_scrape = self._sidecar.next_expected_scrape()
        if self._ended_at is None:
            self._ended_at = now
            # The current pass may have read a file before its last change. The next pass reads all changes.
            self._required_passes = self._sidecar.feed_passes + 2
            if next_scrape is not None:
                _log.debug("no job is left, waiting for the next scrape")
        if next_scrape is None or now - self._ended_at >= self._linger_seconds:
            return True
        if self._final_scrape_at is None:
            if (
                self._sidecar.feed_passes < self._required_passes
                and now - self._ended_at < LAST_PASSES_SECONDS
            ):
                self._sidecar.collect_feed()
                return False
            self._final_scrape_at = next_scrape
        return next_scrape > self._final_scrape_at or now >= self._final_scrape_at + MARGIN_SECONDS
