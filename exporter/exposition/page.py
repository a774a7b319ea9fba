"""The page: what all collectors published last, as one body for each scrape.

Used in the sidecar. Collectors' threads publish and withdraw metric families, which only replaces a reference: no
publisher waits for another, nor for a scrape. The web server's threads render. A block, the text of one publisher, is
written by the first scrape after it changed, while those that come meanwhile wait for it, and is kept until it changes
again. The exporter's own numbers are watched: asked for at each scrape.

What holds at every moment, whatever is published:
- A body parses to its end (`text`).
- No name belongs to two families: who came first keeps it, and watched blocks go before all others.
- A body has at most `max_series` series. The exporter's own families have room before the users' Stats, runs share
  what is left fairly, and within a run small families are shown whole before large ones are cut.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prometheus_client.core import Metric

from exporter.exposition.negotiation import Format
from exporter.exposition.text import Reason, RefusedError, Written, write
from exporter.families import FamilySpec, visible_name
from exporter.recording.reserved import RESERVED, RESERVED_PREFIXES

SERIES = FamilySpec(
    name="exporter_series",
    type="gauge",
    help="Series of the last written page; a histogram counts its buckets, its sum and its count.",
    source="exposition",
)
SERIES_LIMIT = FamilySpec(
    name="exporter_series_limit",
    type="gauge",
    help="Largest number of series on the page; exporter_series_dropped_total counts the series beyond it.",
    source="configuration",
)
SERIES_DROPPED = FamilySpec(
    name="exporter_series_dropped_total",
    type="counter",
    labels=("family", "reason"),
    help=(
        "Series left out of the page, counted each time the page is written. Reasons: cap (too many series), duplicate (a"
        " label set or family that exists already), labels (not text, or too long), name (not a valid family), value (not a"
        " number, NaN, a counter below zero, buckets that fall). Absent until a series is left out."
    ),
    source="exposition",
)
SPECS = (SERIES, SERIES_LIMIT, SERIES_DROPPED)

MAX_COUNTED_FAMILIES = 200
"""Families with a count of their own; the rest is counted together, as names may come from the job."""

MAX_LOGGED_LOSSES = 20
"""Kinds of losses that are logged, each once; a job that makes names must not fill the log either."""

_RAISE = 1.25
"""A cut family gets more room only when it is this much more: otherwise the last series that fit would come and go
with every small change elsewhere, and each return would look like a gap."""

_LOG = logging.getLogger(__name__)

Families = tuple[Metric, ...]
Quotas = Mapping[tuple[str, str], int]
"""Series that may be shown, by run and family, of those that must be cut; the run is "" for the exporter's own."""


class _Block(NamedTuple):
    """What a publisher published, what of it is on the page with its text, and the names that it takes."""

    families: Families
    shown: tuple[tuple[Metric, Written], ...]
    names: frozenset[str]


class Page:
    """Families by publisher, and the bodies made of them.

    Args:
        max_series: Series on the page at most; at least 1.
    """

    def __init__(self, *, max_series: int = 15_000) -> None:
        self._max_series = max_series
        self._lock = threading.Lock()  # guards the next two; held for a look-up, never while anything is made
        self._published: dict[str, Families] = {}
        self._watched: dict[str, Callable[[], Iterable[Metric]]] = {}
        self._writing = threading.RLock()  # held by the scrape that writes; guards the rest
        self._dropped: Counter[tuple[str, Reason]] = Counter()
        self._failing: set[str] = set()
        self._blocks: dict[str, _Block] = {}
        self._quotas: Quotas = {}
        self._series = 0

    def publish(self, name: str, families: Iterable[Metric]) -> None:
        """Put families on the page, in place of those that `name` published before."""
        made = tuple(families)
        with self._lock:
            self._published[name] = made

    def withdraw(self, name: str) -> None:
        """Take a published block off the page; nothing happens when it is not there."""
        with self._lock:
            self._published.pop(name, None)

    def watch(self, name: str, families: Callable[[], Iterable[Metric]]) -> None:
        """Put a block on the page that is asked for at each scrape, on any thread; while it raises, it is missing."""
        with self._lock:
            self._watched[name] = families

    def render(self, form: Format, names: Iterable[str] = ()) -> bytes:
        """Make the body of a scrape.

        `names` are families, or samples that stand for theirs, to show alone; one that ends in `*` stands for all that
        begin so. Empty for all.
        """
        written = [text for block in self._write() for _, text in block.shown]
        if wanted := frozenset(names):
            beginnings = tuple(name[:-1] for name in wanted if name.endswith("*"))
            written = [
                text
                for text in written
                if text.names & wanted or any(name.startswith(beginnings) for name in text.names)
            ]
        end = b"# EOF\n" if form is Format.OPENMETRICS else b""
        return b"".join([*(text.body(form) for text in written), end])

    def snapshot(self) -> list[Metric]:
        """All families that a scrape would show now."""
        return [metric for block in self._write() for metric, _ in block.shown]

    def offered(self) -> list[Metric]:
        """All published families, without writing any; for whoever needs a few numbers often."""
        with self._lock:
            return [metric for families in self._published.values() for metric in families]

    def families(self) -> Families:
        """What the page knows of itself, to be watched by it."""
        with self._writing:
            return (
                SERIES.family({(): self._series}),
                SERIES_LIMIT.family({(): self._max_series}),
                SERIES_DROPPED.family(dict(sorted(self._dropped.items()))),
            )

    # Writing --------------------------------------------------------------------------------------------------------

    def _write(self) -> list[_Block]:
        """All blocks, those that changed written anew; the watched ones last."""
        with self._writing:
            with self._lock:
                published, watched = dict(self._published), dict(self._watched)
            own = {f"watched {name}": self._ask(name, ask) for name, ask in sorted(watched.items())}
            # Who came first keeps its names, and watched blocks come before all others.
            offers, before = {**own, **published}, self._blocks
            quotas = self._share(own.values(), published.values())
            anew = quotas != self._quotas or list(offers) != list(before)
            self._quotas, self._blocks = quotas, {}
            taken: set[str] = set()
            for name, families in offers.items():
                block = before.get(name)
                if anew or block is None or block.families is not families:
                    block = self._write_block(families, taken, quotas, block)
                    anew = anew or block.names != before[name].names  # those after it may have to give way
                taken |= block.names
                self._blocks[name] = block
            self._series = sum(text.series for block in self._blocks.values() for _, text in block.shown)
            return [self._blocks[name] for name in [*sorted(published), *own]]

    def _ask(self, name: str, families: Callable[[], Iterable[Metric]]) -> Families:
        """The families of a watched block; none when making them failed."""
        try:
            return tuple(families())
        except Exception:  # noqa: BLE001  foreign code, of which a scrape must not fail
            if name not in self._failing:
                self._failing.add(name)
                _LOG.exception("block %s is left out of the page, as making it failed", name)
            return ()

    def _write_block(
        self, families: Families, taken: set[str], quotas: Quotas, before: _Block | None
    ) -> _Block:
        # What a pass has found as it was keeps its text: most of the exporter's own families, at every scrape.
        had = {} if before is None else {each.name: (each, text) for each, text in before.shown}
        names: set[str] = set()
        shown = []
        for metric in families:
            name = visible_name(metric)
            try:
                kept = _cut(metric, name, quotas) if quotas else metric
                same, written = had.get(kept.name, (None, None))
                if written is None or same != kept or written.dropped:
                    written = write(kept)
                if not (written.names.isdisjoint(taken) and written.names.isdisjoint(names)):
                    raise RefusedError("duplicate")  # noqa: TRY301  counted as what `write` refuses
            except RefusedError as refused:
                self._count(name, refused.reason, len(metric.samples))
                continue
            except (AttributeError, TypeError):  # no family at all
                self._count(name, "name", 1)
                continue
            self._count(name, "cap", len(metric.samples) - len(kept.samples))
            for reason, series in written.dropped.items():
                self._count(name, reason, series)
            names |= written.names
            shown.append((kept, written))
        return _Block(families, tuple(shown), frozenset(names))

    def _count(self, family: str, reason: Reason, series: int) -> None:
        if not series:
            return
        if len({name for name, _ in self._dropped} - {family}) >= MAX_COUNTED_FAMILIES:
            family = "<other>"
        if (family, reason) not in self._dropped and len(self._dropped) < MAX_LOGGED_LOSSES:
            _LOG.warning("%d series of %s are left out of the page, reason: %s", series, family, reason)
        self._dropped[family, reason] += series

    def _share(self, watched: Iterable[Families], published: Iterable[Families]) -> Quotas:
        """Share the room when there is not enough: watched blocks first, then our own families, then users' Stats."""
        blocks = [*((0, families) for families in watched), *((1, families) for families in published)]
        if sum(len(metric.samples) for _, families in blocks for metric in families) <= self._max_series:
            return {}
        tiers: tuple[dict[str, Counter[str]], ...] = ({}, {}, {})  # by run, series of each family
        for tier, metric in ((tier, metric) for tier, families in blocks for metric in families):
            name = visible_name(metric)
            if tier == 0 or name in RESERVED or name.startswith(RESERVED_PREFIXES):
                tiers[tier].setdefault("", Counter())[name] += len(metric.samples)
            else:
                for run, series in Counter(sample.labels.get("run", "") for sample in metric.samples).items():
                    tiers[2].setdefault(run, Counter())[name] += series
        quotas: dict[tuple[str, str], int] = {}
        room = self._max_series
        for runs in tiers:
            demands = {run: families.total() for run, families in runs.items()}
            shares = allocate(demands, room)
            for run, families in runs.items():
                for name, quota in allocate(families, shares.get(run, demands[run])).items():
                    before = self._quotas.get((run, name), 0)
                    steady = before <= quota <= before * _RAISE
                    quotas[run, name] = before if steady else quota
            room -= min(room, sum(demands.values()))
        return quotas


def allocate(demands: Mapping[str, int], room: int) -> dict[str, int]:
    """Share room so that small demands are met whole before large ones are cut; gives what those that are cut get."""
    quotas: dict[str, int] = {}
    sharers = len(demands)
    for name, demand in sorted(demands.items(), key=lambda item: (item[1], item[0])):
        share = -(-room // sharers)  # rounded up, so that fewer series than sharers still fill the room
        if demand > share:
            quotas[name] = share
        room -= min(demand, share)
        sharers -= 1
    return quotas


def _cut(metric: Metric, name: str, quotas: Quotas) -> Metric:
    """Cut a family to its quotas, each histogram or summary as a whole."""
    own = ("", name) in quotas
    left: dict[str, float] = {}
    kept = []
    for _, group in itertools.groupby(
        metric.samples, lambda sample: [each for each in sample.labels.items() if each[0] != "le"]
    ):
        samples = list(group)
        run = "" if own else samples[0].labels.get("run", "")
        room = left.get(run, quotas.get((run, name), math.inf))
        fits = len(samples) <= room
        kept += samples if fits else []
        left[run] = room - len(samples) if fits else 0  # a smaller one further on must not come and go
    if len(kept) == len(metric.samples):
        return metric
    shown = copy.copy(metric)
    shown.samples = kept
    return shown
