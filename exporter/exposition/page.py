"""The page: all blocks that are published now, joined at a scrape.

Used in the sidecar. Collectors' threads publish and withdraw blocks, the web server's threads render; any
number of each at once. A scrape reads one tuple of immutable blocks, so that every body is whole and each
block in it is of one publish, and it waits for no publisher: what may take long (checking, writing,
compressing) happens in the publisher's thread, before the tuple is replaced.

What holds at every moment, whatever is published:
- A body parses to its end. A line that a scraper cannot read would end the scrape there, and Prometheus
  would draw everything before it as a flat line for five minutes. So a bad sample is left out and counted.
- No name belongs to two families: who came first keeps it, and blocks made at the scrape (the exporter's
  own numbers) keep theirs against all others.
- A body has at most `max_series` series. Blocks made at the scrape come first, then small families whole
  before large ones are cut, and a cut family keeps what it has shown the longest.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from exporter.collectors.family import Family, FamilySpec, Sample
from exporter.exposition.block import Block, Dropped, Source
from exporter.exposition.cap import allocate
from exporter.exposition.compression import deflate, join
from exporter.exposition.drops import SERIES_DROPPED, SERIES_DROPPED_BY_REASON, Drops
from exporter.exposition.negotiation import Format

SERIES = FamilySpec(
    "exporter_series",
    "gauge",
    "Series on the page now; a histogram's are its buckets, its sum and its count. Of blocks made at the scrape: "
    "those of the scrape before.",
    source="exposition",
)
SERIES_LIMIT = FamilySpec(
    "exporter_series_limit",
    "gauge",
    "Series that the page shows at most; what is offered beyond it is in exporter_series_dropped_total.",
    source="configuration",
)
BLOCK_FAILURES = FamilySpec(
    "exporter_block_failures_total",
    "counter",
    "Scrapes from which a block that is made at the scrape is missing, because making it failed.",
    labels=("block",),
    source="exposition",
)
SPECS = (SERIES, SERIES_LIMIT, SERIES_DROPPED, SERIES_DROPPED_BY_REASON, BLOCK_FAILURES)
"""The families of `Page.families`."""

_WANTED_SECONDS = 60.0
"""A form that was asked for this lately is made at each publish; others when they are asked for."""

_END = {Format.TEXT: b"", Format.OPENMETRICS: b"# EOF\n"}

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Watch:
    families: Callable[[], Sequence[Family]]
    source: Source


class Page:
    """Blocks of families by name, and the bodies made of them.

    Args:
        max_series: Series on the page at most.
        clock: Monotonic seconds.
    """

    def __init__(self, *, max_series: int = 15_000, clock: Callable[[], float] = time.monotonic) -> None:
        if max_series < 1:
            raise ValueError(f"max_series must be at least 1, found {max_series}")
        self._max_series = max_series
        self._clock = clock
        self._drops = Drops()
        self._requested = {(form, compress): -math.inf for form in Format for compress in (False, True)}
        # Read by scrapes without a lock, replaced whole.
        self._blocks: tuple[Block, ...] = ()
        self._watches: dict[str, _Watch] = {}

        self._settling = threading.Lock()  # held while blocks are written; guards the next five
        self._sources: dict[str, Source] = {}
        self._quotas: dict[str, int] = {}
        # What blocks made at the scrape ever needed. Neither shrinks, so that a body made at the same time
        # by another thread can rely on it.
        self._reserved_names: frozenset[str] = frozenset()
        self._reserved_series = 0

        self._watching = threading.Lock()  # held while watched blocks are written; guards the next two
        self._watched_series = 0
        self._failures: Counter[str] = Counter()

    def publish(self, name: str, families: Sequence[Family]) -> None:
        """Put a block on the page, in place of the one of that name.

        Args:
            name: The publisher.
            families: All that it has. What cannot be shown is left out and counted.
        """
        offered = tuple(families)
        with self._settling:
            source = self._sources.setdefault(name, Source())
            source.offer(offered, self._taken_beside(name))
            self._count(source.refused)
            self._settle(published=name)

    def withdraw(self, name: str) -> None:
        """Take a block off the page, published or watched; nothing happens when it is not there."""
        with self._settling:
            self._watches = {each: watch for each, watch in self._watches.items() if each != name}
            if self._sources.pop(name, None) is not None:
                self._settle()

    def watch(self, name: str, families: Callable[[], Sequence[Family]]) -> None:
        """Put a block on the page that is made anew at every scrape.

        Args:
            name: The block; one watched under that name before is replaced.
            families: Gives its families from memory: it runs in the scrape, on any thread, on several at
                once. When it raises, this block is missing from that scrape.
        """
        with self._settling, self._watching:
            self._watches = {**self._watches, name: _Watch(families, Source())}
            self._failures[name] += 0

    def render(self, form: Format, *, compress: bool) -> bytes:
        """Make the body of a scrape.

        Args:
            form: Its format.
            compress: Whether it is gzip.
        """
        self._requested[form, compress] = self._clock()
        watched = self._make_watched()
        blocks = self._blocks  # after the watched ones, which may have made others give way
        live = b"".join([*(block.plain(form) for block in watched), _END[form]])
        if compress:
            return join([*(block.fragment(form) for block in blocks), deflate(live)])
        return b"".join([*(block.plain(form) for block in blocks), live])

    def families(self) -> Sequence[Family]:
        """What the page knows of itself, to be watched by it."""
        with self._watching:
            series = self._watched_series
            failures = [Sample((name,), count) for name, count in sorted(self._failures.items())]
        series += sum(block.series for block in self._blocks)
        return (
            Family(SERIES, (Sample((), series),)),
            Family(SERIES_LIMIT, (Sample((), self._max_series),)),
            *self._drops.families(),
            Family(BLOCK_FAILURES, tuple(failures)),
        )

    def snapshot(self) -> Sequence[Family]:
        """All families with the samples that a scrape would show now."""
        watched = self._make_watched()
        return tuple(family for block in (*self._blocks, *watched) for family in block.families)

    def _make_watched(self) -> tuple[Block, ...]:
        """Make the watched blocks, and have published ones give way to them where they must."""
        offers = [
            (watch.source, families)
            for name, watch in self._watches.items()
            if (families := self._ask(name, watch)) is not None
        ]
        names: frozenset[str] = frozenset()
        with self._watching:
            demands: dict[str, int] = {}
            for source, families in offers:
                source.offer(families, names)
                names |= source.claims
                demands.update(source.demand)
            fits = sum(demands.values()) <= self._max_series
            quotas = {} if fits else allocate(demands, self._max_series, {})
            for source, _ in offers:
                source.render(quotas)
                self._count(source.refused)
                self._count(source.dropped)
            blocks = tuple(source.block for source, _ in offers)
            series = self._watched_series = sum(block.series for block in blocks)
        if series > self._reserved_series or not names <= self._reserved_names:
            self._reserve(names, series)
        return blocks

    def _ask(self, name: str, watch: _Watch) -> tuple[Family, ...] | None:
        """The families of a watched block; None, and counted, when making them failed."""
        try:
            return tuple(watch.families())
        except Exception:  # noqa: BLE001  foreign code, of which a scrape must not fail
            with self._watching:
                self._failures[name] += 1
                first = self._failures[name] == 1
            if first:
                _LOG.exception("block %s is left out of the page, as making it failed", name)
            return None

    def _reserve(self, names: frozenset[str], series: int) -> None:
        """Keep names and room for watched blocks, and have published ones give way."""
        with self._settling:
            self._reserved_names = self._reserved_names | names
            self._reserved_series = max(self._reserved_series, series)
            displaced = {
                name for name, source in self._sources.items() if not source.claims.isdisjoint(names)
            }
            for name in displaced:
                source = self._sources[name]
                before = source.refused
                source.reconsider(self._taken_beside(name))
                self._count(source.refused - before)
            self._settle(displaced=displaced)

    def _taken_beside(self, name: str) -> frozenset[str]:
        """Names that a publisher may not use."""
        others = (source.claims for each, source in self._sources.items() if each != name)
        return self._reserved_names.union(*others)

    def _settle(self, *, published: str | None = None, displaced: Collection[str] = ()) -> None:
        """Share the room anew, write the blocks that changed thereby or are given, and show all at once."""
        room = max(0, self._max_series - self._reserved_series)
        demands: dict[str, int] = {}
        for source in self._sources.values():
            demands.update(source.demand)
        fits = sum(demands.values()) <= room
        self._quotas = {} if fits else allocate(demands, room, self._quotas)
        now = self._clock()
        wanted = [each for each, when in self._requested.items() if now - when < _WANTED_SECONDS]
        for name, source in self._sources.items():
            cut = {family: self._quotas[family] for family in source.demand if family in self._quotas}
            if name == published or name in displaced or cut != source.cut:
                # What a block lost before was counted when it was published.
                before = Counter() if name == published else source.dropped
                source.render(cut)
                self._count(source.dropped - before)
            for form, compress in wanted:
                _ = source.block.fragment(form) if compress else source.block.plain(form)
        self._blocks = tuple(source.block for _, source in sorted(self._sources.items()))

    def _count(self, dropped: Dropped) -> None:
        for (family, reason), series in dropped.items():
            self._drops.add(family, reason, series)
