"""The page: all blocks that are published now, joined at a scrape.

Used in the sidecar. Collectors' threads publish and withdraw blocks, the web server's threads render; any
number of each at once. A scrape reads one tuple of immutable blocks, so that every body is whole and each
block in it is of one publish, and it waits for no publisher: what may take long (checking, writing,
compressing) happens in the publisher's thread, before the tuple is replaced.

Nothing is written or compressed before somebody asks, nor, once scrapes have a rhythm, while the next one is far
(`rhythm`): what was published meanwhile is written just before it, or by it, should it come early.

The exporter's own numbers are watched blocks. `refresh` makes them ahead of the scrape, in the background, so
that as a rule `prepared` only joins: it calls nobody and takes no lock, and so may run where nothing may wait.
`render` makes them anew itself; whoever calls it must be able to wait.

What holds at every moment, whatever is published:
- A body parses to its end. A line that a scraper cannot read would end the scrape there, and Prometheus
  would draw everything before it as a flat line for five minutes. So a bad sample is left out and counted.
- No name belongs to two families: who came first keeps it, and watched blocks keep theirs against all others.
- A body has at most `max_series` series. Watched blocks come first, then small families whole before large
  ones are cut, and a cut family keeps what it has shown the longest.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from exporter.collectors.family import Family, FamilySpec, Sample
from exporter.exposition.block import Block, Dropped, Source
from exporter.exposition.cap import allocate
from exporter.exposition.compression import deflate, join
from exporter.exposition.drops import SERIES_DROPPED, SERIES_DROPPED_BY_REASON, Drops
from exporter.exposition.negotiation import Format
from exporter.exposition.rhythm import Rhythm

SERIES = FamilySpec(
    "exporter_series",
    "gauge",
    "Series on the page now; a histogram's are its buckets, its sum and its count. Of the exporter's own: those "
    "when they were made before.",
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
    "Failures to make a block of the exporter's own numbers, which is missing from the page until it succeeds.",
    labels=("block",),
    source="exposition",
)
SPECS = (SERIES, SERIES_LIMIT, SERIES_DROPPED, SERIES_DROPPED_BY_REASON, BLOCK_FAILURES)
"""The families of `Page.families`."""

LOOKS_SECONDS = 15.0
"""For so long a person who has seen the page may look again; the status page does so every 3 s."""

_FRESH_SECONDS = 6.0
"""Watched blocks that are older are made anew by the scrape; `refresh` is called more often than this."""

_END = {Format.TEXT: deflate(b""), Format.OPENMETRICS: deflate(b"# EOF\n")}

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Watch:
    """A watched block; what it gave last is not written again when it gives the same object again."""

    families: Callable[[], Sequence[Family]]
    source: Source
    given: tuple[Family, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Watched:
    """The watched blocks as they were made last: when, after which news, of all of which, those that could be."""

    made_at: float = -math.inf
    news: object = None
    watches: Mapping[str, _Watch] = field(default_factory=dict)
    made: tuple[_Watch, ...] = ()
    blocks: tuple[Block, ...] = ()


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
        self._rhythm = Rhythm(clock)
        self._looked_until = -math.inf
        # Read by scrapes without a lock, replaced whole.
        self._blocks: tuple[Block, ...] = ()
        self._watches: dict[str, _Watch] = {}
        self._watched = _Watched()
        self._news = object()  # another one whenever they may have changed

        self._settling = threading.Lock()  # held while blocks are written; guards the next six
        self._sources: dict[str, Source] = {}
        self._unwritten: set[str] = set()
        self._quotas: dict[str, int] = {}
        # What watched blocks ever needed. Neither shrinks, so that a body made at the same time by another
        # thread can rely on it.
        self._reserved_names: frozenset[str] = frozenset()
        self._reserved_series = 0

        # Held while watched blocks are asked for and written, so that no number steps back to an older one.
        self._making = threading.Lock()
        self._watching = threading.Lock()  # held while they are written; guards the next two
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
            if self._rhythm.is_awaited():
                self._settle(published=name)
            else:
                self._unwritten.add(name)

    def seconds_until_wanted(self) -> float:
        """Say for how long nobody is expected to look at the page; 0 when that is not known, infinity when nobody does."""
        return 0.0 if self._clock() < self._looked_until else self._rhythm.seconds_until_near()

    def withdraw(self, name: str) -> None:
        """Take a block off the page, published or watched; nothing happens when it is not there."""
        with self._settling:
            if name in self._watches:
                self._watches = {each: watch for each, watch in self._watches.items() if each != name}
            if self._sources.pop(name, None) is not None:
                self._settle()

    def watch(self, name: str, families: Callable[[], Sequence[Family]]) -> None:
        """Put a block on the page that is made anew by `refresh` and by `render`.

        Args:
            name: The block; one watched under that name before is replaced.
            families: Gives its families from memory, on any thread, one at a time. When it raises, this block
                is missing until it succeeds.
        """
        with self._settling, self._watching:
            self._watches = {**self._watches, name: _Watch(families, Source())}
            self._failures[name] += 0

    def refresh(self) -> None:
        """Make the watched blocks anew in the background, so that scrapes find them made.

        To be called whenever they have changed, or may have: no scrape shows them as they were before. Leaves
        them to the next scrape while none is awaited, and while they are being made already: a source that
        hangs there does not cost whoever collects.
        """
        self._news = object()
        if not self._rhythm.is_awaited():
            return
        self._write_all()
        if not self._making.acquire(blocking=False):
            return
        try:
            blocks = self._make_watched()
        finally:
            self._making.release()
        self._prepare(blocks)

    def render(self, form: Format, *, compress: bool) -> bytes:
        """Make the body of a scrape.

        Args:
            form: Its format.
            compress: Whether it is gzip.
        """
        self._rhythm.note((form, compress))
        self._write_all()
        with self._making:
            watched = self._make_watched()
        # The published ones after the watched ones, which may have made them give way.
        return _body(form, (*self._blocks, *watched), compress=compress)

    def prepared(self, form: Format, *, compress: bool) -> bytes | None:
        """The body of a scrape when it only has to be joined; None when some of it must be made first.

        Waits for nothing and calls nobody.
        """
        now, watched = self._clock(), self._watched
        if watched.news is not self._news or self._unwritten:
            return None
        blocks = (*self._blocks, *watched.blocks)  # the published ones last, as in `render`
        if watched.watches is not self._watches or now - watched.made_at > _FRESH_SECONDS:
            return None
        # Looked up without a call for each block: as a rule this is all that a scrape does.
        if compress:
            fragments = [found for block in blocks if (found := block.fragments.get(form)) is not None]
            if len(fragments) < len(blocks):
                return None
            body = join([*fragments, _END[form]])
        else:
            plains = [text for block in blocks if (text := block.plains.get(form)) is not None]
            if len(plains) < len(blocks):
                return None
            body = b"".join([*plains, _END[form].plain])
        self._rhythm.note((form, compress))
        return body

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
        """All families with the samples that a scrape would show now, for a person, who looks on for a while."""
        self._looked_until = self._clock() + LOOKS_SECONDS
        self._write_all()
        with self._making:
            watched = self._make_watched()
        return tuple(family for block in (*self._blocks, *watched) for family in block.families)

    def offered(self) -> Sequence[Family]:
        """All published families as they were offered, without writing any; for whoever needs a few numbers often."""
        with self._settling:
            return tuple(family for source in self._sources.values() for family in source.accepted())

    def _make_watched(self) -> tuple[Block, ...]:
        """Make the watched blocks, and have published ones give way to them where they must."""
        news, watches, before = self._news, self._watches, self._watched
        offers = [
            (watch, families)
            for name, watch in watches.items()
            if (families := self._ask(name, watch)) is not None
        ]
        made = tuple(watch for watch, _ in offers)
        if made == before.made and all(families is watch.given for watch, families in offers):
            self._watched = _Watched(self._clock(), news, watches, made, before.blocks)
            return before.blocks
        names: frozenset[str] = frozenset()
        with self._watching:
            demands: dict[str, int] = {}
            for watch, families in offers:
                watch.given = families
                watch.source.offer(families, names)
                names |= watch.source.claims
                demands.update(watch.source.demand)
            fits = sum(demands.values()) <= self._max_series
            quotas = {} if fits else allocate(demands, self._max_series, {})
            for watch in made:
                watch.source.render(quotas)
                self._count(watch.source.refused)
                self._count(watch.source.dropped)
            blocks = tuple(watch.source.block for watch in made)
            series = self._watched_series = sum(block.series for block in blocks)
        if series > self._reserved_series or not names <= self._reserved_names:
            self._reserve(names, series)
        self._watched = _Watched(self._clock(), news, watches, made, blocks)
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

    def _write_all(self) -> None:
        """Write what was published while the next scrape was far."""
        if self._unwritten:
            with self._settling:
                self._settle()

    def _settle(self, *, published: str | None = None, displaced: Collection[str] = ()) -> None:
        """Share the room anew, write the blocks that changed thereby or are given, and show all at once."""
        room = max(0, self._max_series - self._reserved_series)
        fits = sum(source.series for source in self._sources.values()) <= room
        quotas: dict[str, int] = {}
        if not fits:
            demands: dict[str, int] = {}
            for source in self._sources.values():
                demands.update(source.demand)
            quotas = allocate(demands, room, self._quotas)
        self._quotas = quotas
        news = {*self._unwritten, published}
        written: list[Block] = []
        for name, source in self._sources.items():
            cut = {family: quotas[family] for family in source.demand if family in quotas} if quotas else {}
            if name in news or name in displaced or cut != source.cut:
                # What a block lost before was counted when it was written.
                before = Counter() if name in news else source.dropped
                source.render(cut)
                self._count(source.dropped - before)
                written.append(source.block)
        self._prepare(written)
        self._blocks = tuple(source.block for _, source in sorted(self._sources.items()))
        self._unwritten.clear()

    def _prepare(self, blocks: Iterable[Block]) -> None:
        """Make the forms that are wanted."""
        wanted = self._rhythm.wanted()
        for block in blocks:
            for form, compress in wanted:
                _ = block.fragment(form) if compress else block.plain(form)

    def _count(self, dropped: Dropped) -> None:
        for (family, reason), series in dropped.items():
            self._drops.add(family, reason, series)


def _body(form: Format, blocks: Iterable[Block], *, compress: bool) -> bytes:
    if compress:
        return join([*(block.fragment(form) for block in blocks), _END[form]])
    return b"".join([*(block.plain(form) for block in blocks), _END[form].plain])
