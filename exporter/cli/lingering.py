"""When a sidecar that `run` has started is to end.

Used in the sidecar, on the main thread, which asks now and then. After the last launch it reads the feed once more, so
that the page has the job's final values, and waits for a regular scraper's next scrape; not where there is none, and no
longer than it was told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

POLL_SECONDS = 0.5
LINGER_POLL_SECONDS = 0.1
LAST_PASSES_SECONDS = 5.0
MARGIN_SECONDS = 2.0
"""How late a scrape may come."""

_log = logging.getLogger(__name__)


class Scraped(Protocol):
    """What is known of the feed and the scrapes; `serve.Sidecar`."""

    @property
    def feed_passes(self) -> int:
        """Passes over the feed that were published."""
        ...

    def next_expected_scrape(self) -> float | None:
        """When a regular scraper is due, monotonic seconds; None without one."""
        ...

    def collect_feed(self) -> None:
        """Read the feed as soon as possible."""
        ...


class Lingering:
    """Follows the launches, and sees to the last scrape.

    Args:
        sidecar: Whose end it is.
        active: Whether a launch is left.
        linger_seconds: Longest wait for the last scrape.
        monotonic: Seconds.
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
