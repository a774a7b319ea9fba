"""One publisher's families: taken in, written, and kept as bytes ready to be joined.

Used in the sidecar. A `Source` stays as long as its publisher and is guarded by the lock of whoever owns it;
a `Block` is what one publish made of it, and any thread may read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from exporter.collectors.family import Family, FamilySpec
from exporter.exposition.compression import Fragment, deflate
from exporter.exposition.drops import Reason
from exporter.exposition.layout import Layout, Refused, is_metric_name
from exporter.exposition.negotiation import Format
from exporter.exposition.render import (
    DistributionRenderer,
    NumberRenderer,
    Rendered,
    count_series,
)

Dropped = Counter[tuple[str, Reason]]
"""Series left out, by family and reason."""


@dataclass(frozen=True, slots=True)
class Block:
    """What one publish put on the page.

    Attributes:
        families: With the samples that are shown.
        series: How many they are.
        parts: Metadata and lines of each family.
        plains: What `plain` has given so far.
        fragments: What `fragment` has given so far.
    """

    families: tuple[Family, ...]
    series: int
    parts: tuple[tuple[Layout, Rendered], ...]
    # Filled when first asked for. Two threads may do that at once: both make the same, and one stays.
    plains: dict[Format, bytes] = field(default_factory=dict)
    fragments: dict[Format, Fragment] = field(default_factory=dict)

    def plain(self, form: Format) -> bytes:
        """The block's text."""
        found = self.plains.get(form)
        if found is None:
            text = form is Format.TEXT
            found = "".join(
                [
                    layout.heads[form] + (lines.text if text else lines.openmetrics)
                    for layout, lines in self.parts
                ]
            ).encode("utf-8")
            self.plains[form] = found
        return found

    def fragment(self, form: Format) -> Fragment:
        """The block's text with its compressed form."""
        found = self.fragments.get(form)
        if found is None:
            found = self.fragments[form] = deflate(self.plain(form))
        return found


class _Kept:
    """A family of a publisher: as it was offered, and what was last made of it."""

    __slots__ = ("family", "lines", "quota", "renderer", "series", "shown")

    def __init__(self, family: Family, renderer: NumberRenderer | DistributionRenderer, series: int) -> None:
        self.family = family
        self.renderer = renderer
        self.series = series
        self.quota: int | None = None
        self.lines: Rendered | None = None
        self.shown = family

    def render(self, quota: int | None) -> Rendered:
        """Write it; what was made of the same object before is not made again."""
        if self.lines is None or quota != self.quota:
            self.quota = quota
            self.lines = self.renderer.render(self.family.samples, quota)
            self.shown = Family(self.family.spec, self.lines.samples)
        return self.lines


class Source:
    """What a publisher offers, and what is remembered of it from one publish to the next.

    Attributes:
        block: What the last `render` made; the same as before as long as no text has changed.
        claims: Names that no other publisher's family may use.
        demand: Series that each family offers.
        series: Series that all of them offer.
        cut: The quotas of the last `render`.
        refused: Series of whole families that the last publish left out.
        dropped: Series that the last `render` left out of the others.
    """

    def __init__(self) -> None:
        self.block = Block((), 0, ())
        self.claims: frozenset[str] = frozenset()
        self.demand: Mapping[str, int] = {}
        self.series = 0
        self.cut: Mapping[str, int] = {}
        self.refused: Dropped = Counter()
        self.dropped: Dropped = Counter()
        self._offered: tuple[object, ...] = ()
        # By the identity of the family, which is kept with it.
        self._accepted: dict[int, _Kept] = {}
        self._renderers: dict[FamilySpec, NumberRenderer | DistributionRenderer] = {}

    def offer(self, families: Iterable[Family], taken: AbstractSet[str]) -> None:
        """Take a publish in; a family that cannot be written, or whose names are taken, is left out whole.

        Args:
            families: The whole of what the publisher has.
            taken: Names that other publishers use.
        """
        self._offered = tuple(families)
        self.reconsider(taken)

    def reconsider(self, taken: AbstractSet[str]) -> None:
        """Take the last publish in again, as other names are taken now."""
        self.refused = Counter()
        claims: set[str] = set()
        renderers: dict[FamilySpec, NumberRenderer | DistributionRenderer] = {}
        demand: dict[str, int] = {}
        before, self._accepted = self._accepted, {}
        for offered in self._offered:
            kept = before.get(id(offered))
            # A list, against the contract, may have other samples now.
            if kept is None or type(kept.family.samples) is not tuple:
                try:
                    kept = self._check(offered)
                except Refused as refused:
                    self.refused[_label(offered), refused.reason] += _count(offered)
                    continue
            spec, wanted = kept.family.spec, kept.renderer.layout.claims
            if not (wanted.isdisjoint(claims) and wanted.isdisjoint(taken)):
                self.refused[spec.name, Reason.DUPLICATE] += kept.series
                continue
            claims |= wanted
            renderers[spec] = kept.renderer
            demand[spec.name] = kept.series
            self._accepted[id(offered)] = kept
        self.claims, self.demand, self._renderers = frozenset(claims), demand, renderers
        self.series = sum(demand.values())

    def accepted(self) -> list[Family]:
        """The families that were taken in, uncut."""
        return [kept.family for kept in self._accepted.values()]

    def render(self, quotas: Mapping[str, int]) -> None:
        """Write what was taken in.

        Args:
            quotas: Series that families may show, for those that must be cut.
        """
        self.dropped = Counter()
        self.cut = quotas
        families, parts, series = [], [], 0
        for kept in self._accepted.values():
            name = kept.family.spec.name
            lines = kept.render(quotas.get(name) if quotas else None)
            for reason, count in lines.dropped.items():
                self.dropped[name, reason] += count
            parts.append((kept.renderer.layout, lines))
            families.append(kept.shown)
            series += lines.series
        before = self.block.parts
        if len(parts) == len(before) and all(map(_same, parts, before)):
            return
        self.block = Block(tuple(families), series, tuple(parts))

    def _check(self, offered: object) -> _Kept:
        """Find or make the renderer of a family.

        Raises:
            Refused: It is no family, or one that cannot be written.
        """
        if not (
            isinstance(offered, Family)
            and isinstance(offered.spec, FamilySpec)
            and isinstance(offered.samples, tuple | list)
        ):
            raise Refused(Reason.NAME)
        try:
            found = self._renderers.get(offered.spec)
        except TypeError:  # a part of it that cannot be hashed, so no text
            raise Refused(Reason.NAME) from None
        if found is None:
            layout = Layout(offered.spec)
            distribution = offered.spec.type in ("histogram", "summary")
            found = DistributionRenderer(layout) if distribution else NumberRenderer(layout)
        return _Kept(offered, found, count_series(offered.spec, offered.samples))


def _same(first: tuple[Layout, Rendered], second: tuple[Layout, Rendered]) -> bool:
    return first[0] is second[0] and first[1] is second[1]


def _label(family: object) -> str:
    """The name under which a family is counted that could not be taken in."""
    name = family.spec.name if isinstance(family, Family) and isinstance(family.spec, FamilySpec) else None
    return str(name) if is_metric_name(name) else "<invalid>"


def _count(family: object) -> int:
    """Series of a family that could not be taken in, a sample of any type counted once."""
    samples = family.samples if isinstance(family, Family) else None
    return len(samples) if isinstance(samples, Sequence) else 1
