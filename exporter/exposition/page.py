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
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric

from exporter.exposition.negotiation import Format
from exporter.exposition.text import Reason, Refused, Written, count_series, write
from exporter.families import FamilySpec, visible_name
from exporter.recording.reserved import RESERVED, RESERVED_PREFIXES

SERIES = FamilySpec(
    "exporter_series",
    "gauge",
    "Series of the last scrape's page, those of a histogram being its buckets, its sum and its count.",
    source="exposition",
)
SERIES_LIMIT = FamilySpec(
    "exporter_series_limit",
    "gauge",
    "Series that the page shows at most; what is offered beyond it is in exporter_series_dropped_total.",
    source="configuration",
)
SERIES_DROPPED = FamilySpec(
    "exporter_series_dropped_total",
    "counter",
    "Series that were offered and left out of the page, each time that it was written. Reasons: cap (too many series), "
    "duplicate (a label set or family that was there already), labels (not text, or too long), name (a family "
    "that cannot be written), value (not a number, NaN, a counter below zero, buckets that fall). Absent while nothing "
    "was left out.",
    ("family", "reason"),
    source="exposition",
)
SPECS = (SERIES, SERIES_LIMIT, SERIES_DROPPED)
"""The families of `Page.families`."""

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


@dataclass(frozen=True, slots=True)
class _Block:
    """One publisher's families as text.

    Attributes:
        families: What was published.
        shown: What of it is on the page, with its text.
        names: What no other publisher's family may be called.
    """

    families: Families
    shown: tuple[tuple[Metric, Written], ...]
    names: frozenset[str]


class Page:
    """Families by publisher, and the bodies made of them.

    Args:
        max_series: Series on the page at most.
    """

    def __init__(self, *, max_series: int = 15_000) -> None:
        if max_series < 1:
            raise ValueError(f"max_series must be at least 1, found {max_series}")
        self._max_series = max_series
        self._lock = (
            threading.Lock()
        )  # guards the next five; held for a look-up, never while anything is made
        self._published: dict[str, Families] = {}
        self._watched: dict[str, Callable[[], Iterable[Metric]]] = {}
        self._dropped: Counter[tuple[str, Reason]] = Counter()
        self._failing: set[str] = set()
        self._logged: set[tuple[str, Reason]] = set()
        self._writing = threading.Lock()  # held by the scrape that writes; guards the rest
        self._blocks: dict[str, _Block] = {}
        self._quotas: dict[tuple[str, str], int] = {}
        self._series = 0

    def publish(self, name: str, families: Iterable[Metric]) -> None:
        """Put families on the page, in place of those that `name` published before."""
        made = tuple(families)
        with self._lock:
            self._published[name] = made

    def withdraw(self, name: str) -> None:
        """Take a block off the page, published or watched; nothing happens when it is not there."""
        with self._lock:
            self._published.pop(name, None)
            self._watched.pop(name, None)

    def watch(self, name: str, families: Callable[[], Iterable[Metric]]) -> None:
        """Put a block on the page that is asked for at each scrape.

        Args:
            name: The block; one watched under that name before is replaced.
            families: Gives them from memory, on any thread, one at a time. While it raises, the block is missing.
        """
        with self._lock:
            self._watched[name] = families

    def render(self, form: Format, names: Iterable[str] = ()) -> bytes:
        """Make the body of a scrape.

        Args:
            form: Its format.
            names: Families, or samples that stand for theirs, to show alone; one that ends in `*` stands for all that
                begin so. Empty for all.
        """
        written = [text for block in self._write() for _, text in block.shown]
        if names := tuple(names):
            is_wanted = _selection(names)
            written = [text for text in written if is_wanted(text.names)]
        parts = [text.text[form] for text in written]
        if form is Format.OPENMETRICS:
            parts.append("# EOF\n")
        return "".join(parts).encode()

    def snapshot(self) -> list[Metric]:
        """All families that a scrape would show now."""
        return [metric for block in self._write() for metric, _ in block.shown]

    def offered(self) -> list[Metric]:
        """All published families, without writing any; for whoever needs a few numbers often."""
        with self._lock:
            return [metric for families in self._published.values() for metric in families]

    def families(self) -> Families:
        """What the page knows of itself, to be watched by it."""
        with self._lock:
            dropped: dict[tuple[str, ...], float] = dict(sorted(self._dropped.items()))
        return (
            SERIES.family({(): self._series}),
            SERIES_LIMIT.family({(): self._max_series}),
            SERIES_DROPPED.family(dropped),
        )

    # Writing --------------------------------------------------------------------------------------------------------

    def _write(self) -> list[_Block]:
        """All blocks, those that changed written anew; the watched ones last."""
        with self._writing:
            with self._lock:
                published, watched = dict(self._published), dict(self._watched)
            own = {
                name: families
                for name, ask in watched.items()
                if (families := self._ask(name, ask)) is not None
            }
            # Who came first keeps its names, and watched blocks come before all others.
            offers = {**{f"watched {name}": made for name, made in own.items()}, **published}
            before = self._blocks
            quotas = self._share(own.values(), published.values())
            anew = quotas != self._quotas or list(offers) != list(before)
            self._quotas, self._blocks = quotas, {}
            taken: set[str] = set()
            for name, families in offers.items():
                block = before.get(name)
                if anew or block is None or block.families is not families:
                    block = self._write_block(families, taken, quotas)
                    anew = anew or block.names != before[name].names  # those after it may have to give way
                taken |= block.names
                self._blocks[name] = block
            self._series = sum(text.series for block in self._blocks.values() for _, text in block.shown)
            order = sorted(published) + [f"watched {name}" for name in sorted(own)]
            return [self._blocks[name] for name in order]

    def _ask(self, name: str, families: Callable[[], Iterable[Metric]]) -> Families | None:
        """The families of a watched block; None when making them failed."""
        try:
            found = families()
            return found if isinstance(found, tuple) else tuple(found)
        except Exception:  # noqa: BLE001  foreign code, of which a scrape must not fail
            if name not in self._failing:
                self._failing.add(name)
                _LOG.exception("block %s is left out of the page, as making it failed", name)
            return None

    def _write_block(self, families: Families, taken: set[str], quotas: Quotas) -> _Block:
        names: set[str] = set()
        shown = []
        for metric in families:
            name = visible_name(metric)
            try:
                kept = _cut(metric, name, quotas) if quotas else metric
                written = write(kept)
                if not (written.names.isdisjoint(taken) and written.names.isdisjoint(names)):
                    raise Refused("duplicate")  # noqa: TRY301  counted as what `write` refuses
            except Refused as refused:
                self._count(name, refused.reason, count_series([metric]))
                continue
            except (AttributeError, TypeError):  # no family at all
                self._count(name, "name", 1)
                continue
            if kept is not metric:
                self._count(name, "cap", len(metric.samples) - len(kept.samples))
            for reason, series in written.dropped.items():
                self._count(name, reason, series)
            names |= written.names
            shown.append((kept, written))
        return _Block(families, tuple(shown), frozenset(names))

    def _count(self, family: str, reason: Reason, series: int) -> None:
        if not series:
            return
        with self._lock:
            if len({name for name, _ in self._dropped} - {family}) >= MAX_COUNTED_FAMILIES:
                family = "<other>"
            self._dropped[family, reason] += series
            first = (family, reason) not in self._logged and len(self._logged) < MAX_LOGGED_LOSSES
            if first:
                self._logged.add((family, reason))
        if first:
            _LOG.warning("%d series of %s are left out of the page, reason: %s", series, family, reason)

    def _share(
        self, watched: Iterable[Families], published: Iterable[Families]
    ) -> dict[tuple[str, str], int]:
        """Share the room when there is not enough: watched blocks first, then our own families, then users' Stats."""
        watched, published = list(watched), list(published)
        if sum(map(count_series, itertools.chain(watched, published))) <= self._max_series:
            return {}
        tiers: tuple[dict[str, Counter[str]], ...] = ({}, {}, {})
        for tier, metric in itertools.chain(
            ((0, metric) for families in watched for metric in families),
            ((1, metric) for families in published for metric in families),
        ):
            name = visible_name(metric)
            if tier == 0 or is_own(name):
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
                quotas.update(
                    ((run, family), self._steady((run, family), quota))
                    for family, quota in allocate(families, shares.get(run, demands[run])).items()
                )
            room -= min(room, sum(demands.values()))
        return quotas

    def _steady(self, place: tuple[str, str], share: int) -> int:
        before = self._quotas.get(place)
        return before if before is not None and before <= share <= before * _RAISE else share


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


def is_own(name: str) -> bool:
    """Whether a family is the exporter's, by its name, which no Stat may have."""
    return name in RESERVED or name.startswith(RESERVED_PREFIXES)


def _cut(metric: Metric, name: str, quotas: Quotas) -> Metric:
    """Cut a family to its quotas, each histogram or summary as a whole."""
    own = ("", name) in quotas
    left: dict[str, int | None] = {}
    kept = []
    for _, group in itertools.groupby(
        metric.samples, lambda sample: [each for each in sample.labels.items() if each[0] != "le"]
    ):
        samples = list(group)
        run = "" if own else samples[0].labels.get("run", "")
        room = left.setdefault(run, quotas.get((run, name)))
        if room is None:
            kept += samples
        elif len(samples) <= room:
            kept += samples
            left[run] = room - len(samples)
        else:
            left[run] = 0  # a smaller one further on must not come and go
    if len(kept) == len(metric.samples):
        return metric
    shown = copy.copy(metric)
    shown.samples = kept
    return shown


def _selection(wanted: Iterable[str]) -> Callable[[frozenset[str]], bool]:
    names = frozenset(wanted)
    beginnings = tuple(name[:-1] for name in names if name.endswith("*"))
    return lambda own: not own.isdisjoint(names) or any(name.startswith(beginnings) for name in own)
