"""The rhythm of scrapes: which forms of the page are wanted, and whether the next scrape is still far.

Used in the sidecar; scrapes are noted on any thread, and any thread may ask. A page of 4,000 series changes every
second and is scraped every fifteen: writing and compressing it only when a scrape is near costs a fifth, and only
when somebody asks at all costs nothing. A scrape out of rhythm finds everything all the same, it only takes longer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise, product

from exporter.exposition.negotiation import Format

Form = tuple[Format, bool]
"""A format, and whether it is compressed."""

WANTED_SECONDS = 60.0
"""A form is wanted until its next scrape is late by so much; then nobody is expected any more."""

AHEAD_SECONDS = 1.1
"""From when on before a scrape is expected the page is kept ready: one pass over the feed, and some jitter."""

_REMEMBERED = 5
"""Scrapes of a form that count; of the time between them the shortest does, since there may be several scrapers."""


class Rhythm:
    """When each form was asked for.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        # All keys from the start and values replaced whole, so that it can be read while it is written.
        self._asked: dict[Form, tuple[float, ...]] = dict.fromkeys(product(Format, (False, True)), ())

    def note(self, form: Form) -> None:
        """Note a scrape."""
        self._asked[form] = (*self._asked[form][1 - _REMEMBERED :], self._clock())

    def wanted(self) -> list[Form]:
        """Say which forms are likely to be asked for again."""
        now = self._clock()
        return [form for form, asked in self._asked.items() if asked and _next(asked) + WANTED_SECONDS > now]

    def is_awaited(self) -> bool:
        """Say whether the page is to be kept ready: somebody asks for it, and may do so again at any moment."""
        return bool(self.wanted()) and self.seconds_until_near() == 0.0

    def seconds_until_near(self) -> float:
        """Say for how long nobody is expected: 0 near a scrape, infinity when for long nobody has asked.

        In its first minute anybody may come at any moment.
        """
        now = self._clock()
        expected = [_next(self._asked[form]) for form in self.wanted()]
        if expected:
            return max(0.0, min(expected) - AHEAD_SECONDS - now)
        return 0.0 if now < self._began + WANTED_SECONDS else math.inf


def _next(asked: tuple[float, ...]) -> float:
    """When a form is expected to be asked for; at once while there was one scrape only."""
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    return asked[-1] + min(gaps, default=0.0)
