"""Metrics page: the last published families of all collectors, rendered as the body of a scrape.

Collector threads publish and withdraw families, which replaces a reference: a publisher never waits for another publisher
or for a scrape. A block is the text of one publisher. A block is rendered after each change, by its publisher (`early`) or by
the first scrape, while concurrent scrapes wait. Watched blocks, the exporter's own numbers, are collected at each scrape.

Invariants, for any published families:
- A body can be parsed to the end (see `text`).
- A name belongs to a single family: of the first publisher, after the watched blocks.
- A body has at most `max_series` series, admitted in this order: families about the exporter, its other families (states,
  totals of training, readings of the machine), totals of Stats, numbers of their samples, gauges of their windows. Runs
  share the room of a step fairly, and within a run small families are complete before large families are cut.
"""

from __future__ import annotations

import copy
import enum
import itertools
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric

from exporter.exposition.negotiation import Format
from exporter.exposition.text import Reason, RefusedError, Written, write
from exporter.families import FamilySpec, Precedence, precedence_of, visible_name
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
"""Families with a count of dropped series; the others share a count, since names may come from the job."""

MAX_LOGGED_LOSSES = 20
"""Kinds of losses that are logged, once each; the names of a job must not fill the log."""

_RAISE = 1.25
"""A cut family gets more room only if the room grows by this factor: otherwise the last series would appear and disappear
with every small change of other families, and each return would look like a gap."""

_LOG = logging.getLogger(__name__)

Families = tuple[Metric, ...]
Quotas = Mapping[tuple[str, str], int]
"""Series of the families that must be cut, by run and family; the run is "" for the exporter's own families."""


class _Tier(enum.Enum):
    """Families of equal precedence on a page that is full, in the order of admission."""

    ABOUT_THE_EXPORTER = "watched blocks, and exporter_*"
    OWN = "other families of the exporter"
    TOTALS = "totals and values of Stats, and families of third-party collectors"
    SAMPLES = "numbers and times of samples"
    WINDOWS = "gauges of windows"


@dataclass(frozen=True, slots=True)
class PublishedBlock:
    """Families of one publisher, with the text of those that were rendered early."""

    families: Families
    texts: Sequence[Written | None]  # in the order of the families; None to render at the next scrape


@dataclass(frozen=True, slots=True)
class ShownFamily:
    """A family as shown, cut to its quota, with its text."""

    metric: Metric
    text: Written


@dataclass(frozen=True, slots=True)
class RenderedBlock:
    """A published block, the families that are on the page, and the names that they occupy."""

    block: PublishedBlock
    shown: tuple[ShownFamily, ...]
    names: frozenset[str]


class Page:
    """Families by publisher, and the bodies rendered from them.

    Args:
        max_series: Largest number of series on the page; at least 1.
    """

    def __init__(self, *, max_series: int = 15_000) -> None:
        self._max_series = max_series
        self._lock = threading.Lock()  # guards the next two; held for a look-up only
        self._published: dict[str, PublishedBlock] = {}
        self._watched: dict[str, Callable[[], Iterable[Metric]]] = {}
        self._writing = threading.RLock()  # held by the scrape that renders; guards the rest
        self._dropped: Counter[tuple[str, Reason]] = Counter()
        self._failing: set[str] = set()
        self._blocks: dict[str, RenderedBlock] = {}
        self._quotas: Quotas = {}
        self._series = 0

    def publish(self, name: str, families: Iterable[Metric], *, early: bool = False) -> None:
        """Replace the families of a publisher; `early` renders them now, so that a scrape only joins texts."""
        made = tuple(families)
        if early:
            before = self._published.get(name)
            block = PublishedBlock(made, _render_early(made, before))
        else:
            block = PublishedBlock(made, [None] * len(made))
        with self._lock:
            self._published[name] = block

    def withdraw(self, name: str) -> None:
        """Remove the families of a publisher from the page; an unknown publisher is ignored."""
        with self._lock:
            self._published.pop(name, None)

    def watch(self, name: str, families: Callable[[], Iterable[Metric]]) -> None:
        """Add a block that is collected at each scrape, on any thread; the block is absent if the call raises."""
        with self._lock:
            self._watched[name] = families

    def render(self, form: Format, names: Iterable[str] = ()) -> bytes:
        """Return the body of a scrape.

        `names` selects families by the name of the family or of a sample; a trailing `*` matches all names with that
        beginning. Without names, the body has all families.
        """
        written = [each.text for block in self._write() for each in block.shown]
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
        """Return all families that a scrape would show now."""
        return [each.metric for block in self._write() for each in block.shown]

    def offered(self) -> list[Metric]:
        """Return all published families without rendering them."""
        with self._lock:
            return [metric for block in self._published.values() for metric in block.families]

    def families(self) -> Families:
        """Return the families about the page, to be watched by the page."""
        with self._writing:
            return (
                SERIES.family({(): self._series}),
                SERIES_LIMIT.family({(): self._max_series}),
                SERIES_DROPPED.family(dict(sorted(self._dropped.items()))),
            )

    # Rendering -------------------------------------------------------------------------------------------------------

    def _write(self) -> list[RenderedBlock]:
        """Return all blocks, after rendering the changed ones; the watched ones last."""
        with self._writing:
            with self._lock:
                published, watched = dict(self._published), dict(self._watched)
            own = {f"watched {name}": self._collect(name, call) for name, call in sorted(watched.items())}
            # The first publisher of a name keeps the name, and watched blocks precede all others.
            offers, before = {**own, **published}, self._blocks
            quotas = self._share(own.values(), published.values())
            changed = quotas != self._quotas or list(offers) != list(before)
            self._quotas, self._blocks = quotas, {}
            taken: set[str] = set()
            for name, offer in offers.items():
                block = before.get(name)
                if changed or block is None or block.block is not offer:
                    block = self._write_block(offer, taken, quotas, block)
                    changed = (
                        changed or block.names != before[name].names
                    )  # later blocks may lose or gain names
                taken |= block.names
                self._blocks[name] = block
            self._series = sum(each.text.series for block in self._blocks.values() for each in block.shown)
            return [self._blocks[name] for name in [*sorted(published), *own]]

    def _collect(self, name: str, families: Callable[[], Iterable[Metric]]) -> PublishedBlock:
        """Return a watched block; an empty block if the call raises."""
        try:
            made = tuple(families())
        except Exception:  # noqa: BLE001 - foreign code, which must not fail the scrape
            if name not in self._failing:
                self._failing.add(name)
                _LOG.exception("block %s is left out of the page because collecting it failed", name)
            made = ()
        return PublishedBlock(made, [None] * len(made))

    def _write_block(
        self, offer: PublishedBlock, taken: set[str], quotas: Quotas, before: RenderedBlock | None
    ) -> RenderedBlock:
        # An unchanged family keeps its text: most of the exporter's own families, at every scrape.
        had = {} if before is None else {each.metric.name: each for each in before.shown}
        names: set[str] = set()
        shown = []
        for metric, early in zip(offer.families, offer.texts, strict=True):
            name = visible_name(metric)
            try:
                kept = _cut(metric, name, quotas) if quotas else metric
                written = early if kept is metric else None
                if written is None:
                    same = had.get(kept.name)
                    if same is None:
                        written = write(kept)
                    elif not same.text.dropped and (same.metric is kept or same.metric == kept):
                        written = same.text
                    else:
                        written = write(kept, same.text)
                if not (written.names.isdisjoint(taken) and written.names.isdisjoint(names)):
                    raise RefusedError("duplicate")  # noqa: TRY301 - counted like a refusal of `write`
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
            shown.append(ShownFamily(kept, written))
        return RenderedBlock(offer, tuple(shown), frozenset(names))

    def _count(self, family: str, reason: Reason, series: int) -> None:
        if not series:
            return
        if len({name for name, _ in self._dropped} - {family}) >= MAX_COUNTED_FAMILIES:
            family = "<other>"
        if (family, reason) not in self._dropped and len(self._dropped) < MAX_LOGGED_LOSSES:
            _LOG.warning("%d series of %s are left out of the page, reason: %s", series, family, reason)
        self._dropped[family, reason] += series

    def _share(self, watched: Iterable[PublishedBlock], published: Iterable[PublishedBlock]) -> Quotas:
        """Return quotas if the series exceed the cap; a tier has the room that the tiers before it leave."""
        blocks = [
            *((True, each.families) for each in watched),
            *((False, each.families) for each in published),
        ]
        if sum(len(metric.samples) for _, families in blocks for metric in families) <= self._max_series:
            return {}
        tiers: dict[_Tier, dict[str, Counter[str]]] = {
            tier: {} for tier in _Tier
        }  # by run, series of families
        for is_watched, metric in (
            (is_watched, metric) for is_watched, families in blocks for metric in families
        ):
            name = visible_name(metric)
            tier = _Tier.ABOUT_THE_EXPORTER if is_watched else _tier(name, metric)
            if tier in {_Tier.ABOUT_THE_EXPORTER, _Tier.OWN}:
                tiers[tier].setdefault("", Counter())[name] += len(metric.samples)
            else:
                for run, series in Counter(sample.labels.get("run", "") for sample in metric.samples).items():
                    tiers[tier].setdefault(run, Counter())[name] += series
        quotas: dict[tuple[str, str], int] = {}
        room = self._max_series
        for runs in tiers.values():
            demands = {run: families.total() for run, families in runs.items()}
            shares = allocate(demands, room)
            for run, families in runs.items():
                for name, quota in allocate(families, shares.get(run, demands[run])).items():
                    before = self._quotas.get((run, name), 0)
                    steady = before <= quota <= before * _RAISE
                    quotas[run, name] = before if steady else quota
            room -= min(room, sum(demands.values()))
        return quotas


def _tier(name: str, metric: Metric) -> _Tier:
    match precedence_of(metric):
        case Precedence.WINDOW:
            return _Tier.WINDOWS
        case Precedence.SAMPLES:
            return _Tier.SAMPLES
        case Precedence.TOTAL if name.startswith("exporter_"):
            return _Tier.ABOUT_THE_EXPORTER
        case Precedence.TOTAL if name in RESERVED or name.startswith(RESERVED_PREFIXES):
            return _Tier.OWN
        case Precedence.TOTAL:
            return _Tier.TOTALS


def allocate(demands: Mapping[str, int], room: int) -> dict[str, int]:
    """Return the share of each demand that must be cut: small demands are met completely before large ones are cut."""
    quotas: dict[str, int] = {}
    sharers = len(demands)
    for name, demand in sorted(demands.items(), key=lambda item: (item[1], item[0])):
        share = -(-room // sharers)  # rounded up, so that fewer series than sharers still fill the room
        if demand > share:
            quotas[name] = share
        room -= min(demand, share)
        sharers -= 1
    return quotas


def _render_early(families: Families, before: PublishedBlock | None) -> list[Written | None]:
    """Return the text of each family, reusing the texts of unchanged families; None for a family that `write` refuses."""
    had = {}
    if before is not None:
        had = {
            metric.name: (metric, text) for metric, text in zip(before.families, before.texts, strict=True)
        }
    texts: list[Written | None] = []
    for metric in families:
        known, text = had.get(metric.name, (None, None))
        if text is None or text.dropped or not (known is metric or known == metric):
            try:
                text = write(metric, text)
            except (RefusedError, AttributeError, TypeError):  # reported at the next scrape
                text = None
        texts.append(text)
    return texts


def _cut(metric: Metric, name: str, quotas: Quotas) -> Metric:
    """Return a family cut to its quotas; a histogram or summary is shown completely or not at all."""
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
        left[run] = room - len(samples) if fits else 0  # a later, smaller group must not appear and disappear
    if len(kept) == len(metric.samples):
        return metric
    shown = copy.copy(metric)
    shown.samples = kept
    return shown
