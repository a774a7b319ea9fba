"""Regular scrapers: who comes back at an interval, and when the next of their scrapes is due.

Used in the sidecar. The web server's loop notes each complete scrape; any thread asks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from itertools import pairwise

MAX_CLIENTS = 64
REMEMBERED_SCRAPES = 3
TOLERANCE_RATIO = 0.2
TOLERANCE_SECONDS = 0.5
"""Two gaps between scrapes are one interval when they differ by no more than the larger of both."""


class Scrapers:
    """Complete scrapes by client: an address and a user agent, so that a person's curl beside a Prometheus is apart."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: OrderedDict[tuple[str, str], tuple[float, ...]] = OrderedDict()

    def note(self, peer: str, agent: str, now: float) -> None:
        """Note one scrape; `now` is monotonic."""
        client = (peer, agent)
        with self._lock:
            times = self._times.pop(client, ())
            self._times[client] = (*times, now)[-REMEMBERED_SCRAPES:]
            if len(self._times) > MAX_CLIENTS:
                # Who came once goes first: user agents cost nothing, and must not push a scraper out.
                once = (key for key, seen in self._times.items() if len(seen) == 1)
                del self._times[next(once, next(iter(self._times)))]

    def next_expected(self, now: float) -> float | None:
        """Give the monotonic time at which the next scrape of a regular scraper is due; None without one.

        A client is one when it came at least twice, and with the same gap where it came more often. It is gone
        when its next scrape is late by a whole interval; until then the time may have passed already.
        """
        with self._lock:
            seen = list(self._times.values())
        expected = [(times[-1], interval) for times in seen if (interval := _interval(times)) is not None]
        return min((last + gap for last, gap in expected if now < last + 2 * gap), default=None)


def _interval(times: tuple[float, ...]) -> float | None:
    gaps = [later - earlier for earlier, later in pairwise(times)]
    if not gaps:
        return None
    shortest, longest = min(gaps), max(gaps)
    regular = longest - shortest <= max(TOLERANCE_SECONDS, TOLERANCE_RATIO * longest)
    return gaps[-1] if regular else None
