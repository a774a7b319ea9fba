"""Attachment: when a sidecar that `run` has started is to end.

Used in the sidecar, on the main thread. It asks now and then whether a run is left. After the last one it
reads the feed once more, so that the page has the job's final values, and gives Prometheus time for one more
scrape; not when nobody has ever scraped, and no longer than it was told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

POLL_SECONDS = 0.5
LINGER_POLL_SECONDS = 0.1
LAST_PASSES_SECONDS = 5.0

_log = logging.getLogger(__name__)


class Scraped(Protocol):
    """What is known of the feed and the scrapes; `serve.Sidecar`."""

    @property
    def scrapes(self) -> int:
        """Metrics pages that were sent completely."""
        ...

    @property
    def renders(self) -> int:
        """Metrics pages whose making has begun."""
        ...

    @property
    def feed_passes(self) -> int:
        """Passes over the feed that were published."""
        ...

    def collect_feed(self) -> None:
        """Read the feed as soon as possible."""
        ...


class Attachment:
    """Follows the runs, and sees to the last scrape.

    Args:
        sidecar: Whose end it is.
        active: Whether a run is left.
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
        self._ended: float | None = None  # when the last run was found to be gone
        self._passes_wanted = 0
        self._renders_then: int | None = None  # when the page had the final values
        self._scrapes_then = 0

    def wait_seconds(self) -> float:
        """How long until `is_over` is worth asking again."""
        return POLL_SECONDS if self._ended is None else LINGER_POLL_SECONDS

    def is_over(self) -> bool:
        """Whether to end now."""
        now = self._monotonic()
        if self._active():  # also while lingering: a later run has joined
            if self._ended is not None:
                _log.debug("another run has joined")
            self._ended = self._renders_then = None
            return False
        if self._ended is None:
            if self._sidecar.scrapes == 0:
                return True
            self._ended = now
            # The pass under way may have read a file before its last change; the one after it has not.
            self._passes_wanted = self._sidecar.feed_passes + 2
            _log.debug("no run is left, waiting for the last scrape")
        if self._renders_then is None:
            late = now - self._ended >= LAST_PASSES_SECONDS
            if self._sidecar.feed_passes < self._passes_wanted and not late:
                self._sidecar.collect_feed()
                return now - self._ended >= self._linger_seconds
            self._renders_then, self._scrapes_then = self._sidecar.renders, self._sidecar.scrapes
        made = self._sidecar.renders > self._renders_then and self._sidecar.scrapes > self._scrapes_then
        return made or now - self._ended >= self._linger_seconds
