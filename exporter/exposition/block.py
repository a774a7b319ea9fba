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
    """

    families: tuple[Family, ...]
    series: int
    parts: tuple[tuple[Layout, Rendered], ...]
    # Filled when first asked for. Two threads may do that at once: both make the same, and one stays.
    _plain: dict[Format, bytes] = field(default_factory=dict)
    _fragments: dict[Format, Fragment] = field(default_factory=dict)

    def plain(self, form: Format) -> bytes:
        """The block's text."""
        found = self._plain.get(form)
        if found is None:
            text = form is Format.TEXT
            found = "".join(
                [
                    layout.heads[form] + (lines.text if text else lines.openmetrics)
                    for layout, lines in self.parts
                ]
            ).encode("utf-8")
            self._plain[form] = found
        return found

    def fragment(self, form: Format) -> Fragment:
        """The block's text with its compressed form."""
        found = self._fragments.get(form)
        if found is None:
            found = self._fragments[form] = deflate(self.plain(form))
        return found


class Source:
    """What a publisher offers, and what is remembered of it from one publish to the next.

    Attributes:
        block: What the last `render` made.
        claims: Names that no other publisher's family may use.
        demand: Series that each family offers.
        cut: The quotas of the last `render`.
        refused: Series of whole families that the last publish left out.
        dropped: Series that the last `render` left out of the others.
    """

    def __init__(self) -> None:
        self.block = Block((), 0, ())
        self.claims: frozenset[str] = frozenset()
        self.demand: Mapping[str, int] = {}
        self.cut: Mapping[str, int] = {}
        self.refused: Dropped = Counter()
        self.dropped: Dropped = Counter()
        self._offered: tuple[object, ...] = ()
        self._accepted: list[tuple[NumberRenderer | DistributionRenderer, Family]] = []
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
        self._accepted = []
        for offered in self._offered:
            try:
                family, renderer = self._check(offered)
            except Refused as refused:
                self.refused[_label(offered), refused.reason] += _count(offered)
                continue
            spec, wanted, series = (
                family.spec,
                renderer.layout.claims,
                count_series(family.spec, family.samples),
            )
            if not (wanted.isdisjoint(claims) and wanted.isdisjoint(taken)):
                self.refused[spec.name, Reason.DUPLICATE] += series
                continue
            claims |= wanted
            renderers[spec] = renderer
            demand[spec.name] = series
            self._accepted.append((renderer, family))
        self.claims, self.demand, self._renderers = frozenset(claims), demand, renderers

    def render(self, quotas: Mapping[str, int]) -> None:
        """Write what was taken in.

        Args:
            quotas: Series that families may show, for those that must be cut.
        """
        self.dropped = Counter()
        self.cut = quotas
        families, parts, series = [], [], 0
        for renderer, family in self._accepted:
            spec = family.spec
            lines = renderer.render(family.samples, quotas.get(spec.name))
            for reason, count in lines.dropped.items():
                self.dropped[spec.name, reason] += count
            parts.append((renderer.layout, lines))
            families.append(Family(spec, lines.samples))
            series += lines.series
        self.block = Block(tuple(families), series, tuple(parts))

    def _check(self, offered: object) -> tuple[Family, NumberRenderer | DistributionRenderer]:
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
        return offered, found


def _label(family: object) -> str:
    """The name under which a family is counted that could not be taken in."""
    name = family.spec.name if isinstance(family, Family) and isinstance(family.spec, FamilySpec) else None
    return str(name) if is_metric_name(name) else "<invalid>"


def _count(family: object) -> int:
    """Series of a family that could not be taken in, a sample of any type counted once."""
    samples = family.samples if isinstance(family, Family) else None
    return len(samples) if isinstance(samples, Sequence) else 1
