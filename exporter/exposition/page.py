"""Metrics page: the last published families of all collectors, rendered as the body of a scrape.

A block holds the families of one publisher. A collector thread publishes or withdraws a block by replacing a reference, so that
the thread waits neither for a scrape nor for the rendering of another block. A changed block is rendered by its publisher
(`early`) or by the next scrape, while concurrent scrapes wait. Watched blocks contain the exporter's own metrics, and are
collected at each scrape.

Invariants, for any published families:
- A body can be parsed to the end (see `text`).
- A name belongs to a single family. Watched blocks win over published blocks, and earlier publishers over later ones.
- A body has at most `max_series` series. If there are more, the families with the lowest precedence are cut (see `quotas`).

Order of precedence, the highest first:
1. families about the exporter
2. other families of the exporter
3. totals and values of Stats, and families of third-party collectors
4. numbers and times of samples
5. gauges of windows
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from prometheus_client.core import Metric

from exporter.exposition.compression import CompressedPart, gzip_body
from exporter.exposition.negotiation import Format
from exporter.exposition.quotas import Quotas, compute_quotas, cut_family, samples_of
from exporter.exposition.text import FamilyText, Reason, RefusedError, write
from exporter.families import FamilySpec, visible_name

SERIES = FamilySpec(
    name="exporter_series",
    type="gauge",
    help="Number of series of the last written page. Each bucket, the sum and the count of a histogram are separate series.",
    source="exposition",
)
SERIES_LIMIT = FamilySpec(
    name="exporter_series_limit",
    type="gauge",
    help="Maximum number of series that a page may contain; exporter_series_dropped_total counts the series beyond it.",
    source="configuration",
)
SERIES_DROPPED = FamilySpec(
    name="exporter_series_dropped_total",
    type="counter",
    labels=("family", "reason"),
    help="Series omitted from the page by reason, counted each time that the page is written.",
    absent="until a series is omitted",
    source="exposition",
    details=(
        "`cap`: too many series.",
        "`duplicate`: the label set or the family exists already.",
        "`labels`: a label is not text, or is too long.",
        "`name`: not a valid family.",
        "`value`: not a number, NaN, or out of range, such as a counter below zero.",
    ),
)
SPECS = (SERIES, SERIES_LIMIT, SERIES_DROPPED)

MAX_COUNTED_FAMILIES = 200
"""Number of families with a separate count of dropped series. Further families share a count: jobs choose the names, so that
their number is unlimited."""

MAX_LOGGED_LOSSES = 20
"""Maximum number of pairs of family and reason that are logged, so that the names of a job do not fill the log."""

_log = logging.getLogger(__name__)

_END = {Format.TEXT: b"", Format.OPENMETRICS: b"# EOF\n", Format.PROTOBUF: b""}
"""End of a body, by format."""

Families = tuple[Metric, ...]


@dataclass(frozen=True)
class BlockText:
    """Texts of the families of a block, and the names that these families occupy."""

    families: tuple[FamilyText, ...]
    names: frozenset[str]
    _bodies: dict[Format, bytes] = field(default_factory=dict, init=False, compare=False, repr=False)
    _parts: dict[Format, CompressedPart] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def series_count(self) -> int:
        """Number of series in the plain text format."""
        return sum(family.series_count for family in self.families)

    def body(self, body_format: Format) -> bytes:
        """Return the texts in a format, joined on first use, because most blocks do not change between two scrapes."""
        body = self._bodies.get(body_format)
        if body is None:
            body = self._bodies[body_format] = b"".join(
                [family.body(body_format) for family in self.families]
            )
        return body

    def compress(self, body_format: Format) -> None:
        """Compress the texts in a format. `compressed` returns the result."""
        self._parts[body_format] = CompressedPart(self.body(body_format))

    def compressed(self, body_format: Format) -> CompressedPart | None:
        """Return the compressed texts in a format, or None if `compress` was not called."""
        return self._parts.get(body_format)


@dataclass(frozen=True, slots=True)
class PublishedBlock:
    """Families of one publisher, with the texts of families that were rendered early.

    Attributes:
        families: Families in the order of publication.
        early_texts: Texts in the order of the families. None for a family that the next scrape renders.
        complete_text: Text of the block if every family was rendered early without a dropped series, otherwise None.
    """

    families: Families
    early_texts: Sequence[FamilyText | None]
    complete_text: BlockText | None = None

    @property
    def series_count(self) -> int:
        """Number of published series, before the limit applies."""
        if self.complete_text is not None:
            return self.complete_text.series_count
        return sum(len(samples_of(metric)) for metric in self.families)


@dataclass(frozen=True, slots=True)
class RenderedBlock:
    """Published block and its text on the page."""

    block: PublishedBlock
    text: BlockText


class Page:
    """Published families, and the scrape bodies rendered from them.

    Args:
        max_series: Maximum number of series on the page; at least 1.
    """

    def __init__(self, *, max_series: int = 15_000) -> None:
        self._max_series = max_series
        self._lock = threading.Lock()  # guards the next four attributes; held only to read or change them
        self._published_blocks: dict[str, PublishedBlock] = {}
        self._watched_sources: dict[str, Callable[[], Iterable[Metric]]] = {}
        self._scraped_formats: frozenset[Format] = frozenset()  # formats of compressed scrapes so far
        self._dropped_series: Counter[tuple[str, Reason]] = Counter()
        self._rendering = threading.Lock()  # held by the scrape that renders; guards the attributes below
        self._failed_sources: set[str] = set()  # watched blocks whose failure was logged
        self._blocks: dict[str, RenderedBlock] = {}
        self._quotas: Quotas = {}
        self._series_count = 0

    def publish(self, name: str, families: Iterable[Metric], *, early: bool = False) -> None:
        """Replace the families of a publisher.

        With `early`, the families are rendered now, and compressed in the formats of earlier compressed scrapes, so that a
        scrape usually only joins their texts.
        """
        new_families = tuple(families)
        if early:
            block = _render_early(new_families, self._published_blocks.get(name))
            if block.complete_text is not None:
                for body_format in self._scraped_formats:
                    block.complete_text.compress(body_format)
        else:
            block = PublishedBlock(new_families, [None] * len(new_families))
        with self._lock:
            self._published_blocks[name] = block

    def withdraw(self, name: str) -> None:
        """Remove the families of a publisher from the page. An unknown publisher is ignored."""
        with self._lock:
            self._published_blocks.pop(name, None)

    def watch(self, name: str, collect: Callable[[], Iterable[Metric]]) -> None:
        """Add a block that is collected at each scrape, on the scrape's thread. The block is empty if *collect* raises."""
        with self._lock:
            self._watched_sources[name] = collect

    def render(self, body_format: Format, names: Iterable[str] = ()) -> bytes:
        """Return the body of a scrape.

        Args:
            body_format: Format of the body.
            names: Names of families or samples. The body has the families with these names; a trailing `*` matches any suffix.
                Without names, the body has all families.
        """
        blocks = self._render_blocks()
        if selected_names := frozenset(names):
            prefixes = tuple(name[:-1] for name in selected_names if name.endswith("*"))
            bodies = [
                family.body(body_format)
                for block in blocks
                for family in block.families
                if family.names & selected_names or any(name.startswith(prefixes) for name in family.names)
            ]
        else:
            bodies = [block.body(body_format) for block in blocks]
        return b"".join([*bodies, _END[body_format]])

    def render_gzip(self, body_format: Format) -> bytes:
        """Return the body of a scrape with all families, compressed with gzip.

        Blocks that were compressed when they were published are not compressed again.
        """
        if body_format not in self._scraped_formats:
            with self._lock:
                self._scraped_formats |= {body_format}
        parts: list[CompressedPart] = []
        texts: list[bytes] = []  # compressed together, because creating a compressor is slow
        for block in self._render_blocks():
            part = block.compressed(body_format)
            if part is None:
                texts.append(block.body(body_format))
            elif part.data:
                parts += [CompressedPart(b"".join(texts)), part]
                texts = []
        parts.append(CompressedPart(b"".join([*texts, _END[body_format]])))
        return gzip_body(parts)

    def snapshot(self) -> list[Metric]:
        """Return the families that a scrape would contain now."""
        return [family.metric for block in self._render_blocks() for family in block.families]

    def unrendered_families(self) -> list[Metric]:
        """Return the families of all blocks without rendering them. The families of watched blocks are collected now.

        Does not wait for a scrape.
        """
        with self._lock:
            published_blocks, watched_sources = (
                [*self._published_blocks.values()],
                dict(self._watched_sources),
            )
        watched_blocks = [self._collect(name, collect) for name, collect in watched_sources.items()]
        return [metric for block in (*published_blocks, *watched_blocks) for metric in block.families]

    def families(self) -> Families:
        """Return the families about the page itself, for a watched block. Does not wait for a scrape."""
        with self._lock:
            dropped_series = dict(self._dropped_series)
        return (
            SERIES.family({(): self._series_count}),
            SERIES_LIMIT.family({(): self._max_series}),
            SERIES_DROPPED.family(dict(sorted(dropped_series.items()))),
        )

    # Rendering -------------------------------------------------------------------------------------------------------

    def _render_blocks(self) -> list[BlockText]:
        """Render the changed blocks and return the texts of all blocks, watched blocks last."""
        with self._rendering:
            with self._lock:
                published_blocks, watched_sources = dict(self._published_blocks), dict(self._watched_sources)
            watched_blocks = {
                f"watched {name}": self._collect(name, collect)
                for name, collect in sorted(watched_sources.items())
            }
            # Of two families with the same name, the family of the earlier block is shown. Watched blocks come first.
            blocks, previous = {**watched_blocks, **published_blocks}, self._blocks
            quotas = self._quotas_of(watched_blocks.values(), published_blocks.values())
            has_changed = quotas != self._quotas or list(blocks) != list(previous)
            self._quotas, self._blocks = quotas, {}
            occupied_names: set[str] = set()
            for name, block in blocks.items():
                rendered_block = previous.get(name)
                if has_changed or rendered_block is None or rendered_block.block is not block:
                    rendered_block = self._render_block(block, occupied_names, quotas, rendered_block)
                    # If the block has other names than before, later blocks may gain or lose families.
                    has_changed = has_changed or rendered_block.text.names != previous[name].text.names
                occupied_names |= rendered_block.text.names
                self._blocks[name] = rendered_block
            self._series_count = sum(block.text.series_count for block in self._blocks.values())
            return [self._blocks[name].text for name in [*sorted(published_blocks), *watched_blocks]]

    def _collect(self, name: str, collect: Callable[[], Iterable[Metric]]) -> PublishedBlock:
        """Return a watched block, or an empty block if *collect* raises."""
        try:
            families = tuple(collect())
        except Exception:  # noqa: BLE001 - foreign code, which must not fail the scrape
            if name not in self._failed_sources:
                self._failed_sources.add(name)
                _log.exception("block %s is left out of the page because collecting it failed", name)
            families = ()
        return PublishedBlock(families, [None] * len(families))

    def _render_block(
        self, block: PublishedBlock, occupied_names: set[str], quotas: Quotas, previous: RenderedBlock | None
    ) -> RenderedBlock:
        """Return a block with the texts of the families whose names are not in *occupied_names*, cut to their quotas."""
        complete_text = block.complete_text
        if complete_text is not None and not quotas and complete_text.names.isdisjoint(occupied_names):
            return RenderedBlock(block, complete_text)
        # An unchanged family keeps its text, for example most families of a watched block.
        previous_texts = (
            {} if previous is None else {family.metric.name: family for family in previous.text.families}
        )
        names: set[str] = set()
        texts: list[FamilyText] = []
        for metric, early_text in zip(block.families, block.early_texts, strict=True):
            name = visible_name(metric)
            try:
                cut = cut_family(metric, name, quotas) if quotas else metric
                text = early_text if cut is metric else None
                if text is None:
                    text = _write_changes(cut, previous_texts.get(cut.name))
                if not (text.names.isdisjoint(occupied_names) and text.names.isdisjoint(names)):
                    raise RefusedError("duplicate")  # noqa: TRY301 - counted like a refusal of `write`
            except RefusedError as refused:
                self._count_dropped(name, refused.reason, len(metric.samples))
                continue
            except (AttributeError, TypeError):  # the published object is not a family
                self._count_dropped(name, "name", 1)
                continue
            self._count_dropped(name, "cap", len(metric.samples) - len(cut.samples))
            for reason, count in text.dropped_counts.items():
                self._count_dropped(name, reason, count)
            names |= text.names
            texts.append(text)
        return RenderedBlock(block, BlockText(tuple(texts), frozenset(names)))

    def _count_dropped(self, family: str, reason: Reason, count: int) -> None:
        """Add to the dropped series of a family, and log the first loss of each family and reason."""
        if not count:
            return
        if len({name for name, _ in self._dropped_series} - {family}) >= MAX_COUNTED_FAMILIES:
            family = "<other>"
        if (family, reason) not in self._dropped_series and len(self._dropped_series) < MAX_LOGGED_LOSSES:
            _log.warning("%d series of %s are left out of the page, reason: %s", count, family, reason)
        with self._lock:
            self._dropped_series[family, reason] += count

    def _quotas_of(
        self, watched_blocks: Collection[PublishedBlock], published_blocks: Collection[PublishedBlock]
    ) -> Quotas:
        """Return the quotas of the families, or an empty mapping if all series fit."""
        if sum(block.series_count for block in (*watched_blocks, *published_blocks)) <= self._max_series:
            return {}
        return compute_quotas(
            (metric for block in watched_blocks for metric in block.families),
            (metric for block in published_blocks for metric in block.families),
            max_series=self._max_series,
            previous_quotas=self._quotas,
        )


def _render_early(families: Families, previous: PublishedBlock | None) -> PublishedBlock:
    """Return a block with the texts of the families that `write` accepts. Unchanged families keep their text."""
    previous_texts: dict[str, FamilyText] = {}
    if previous is not None:
        previous_texts = {text.metric.name: text for text in previous.early_texts if text is not None}
    texts = [_write_if_accepted(metric, previous_texts) for metric in families]
    complete_texts = tuple(text for text in texts if text is not None and not text.dropped_counts)
    names = frozenset().union(*(text.names for text in complete_texts))
    has_unique_names = len(names) == sum(len(text.names) for text in complete_texts)
    is_complete = has_unique_names and len(complete_texts) == len(families)
    return PublishedBlock(families, texts, BlockText(complete_texts, names) if is_complete else None)


def _write_if_accepted(metric: Metric, previous_texts: Mapping[str, FamilyText]) -> FamilyText | None:
    """Return the text of a family, or None if `write` refuses the family, which the next scrape reports."""
    try:
        return _write_changes(metric, previous_texts.get(metric.name))
    except (RefusedError, AttributeError, TypeError):
        return None


def _write_changes(metric: Metric, previous: FamilyText | None) -> FamilyText:
    """Return the previous text of an unchanged family, or a new text. Raises RefusedError."""
    if previous is not None and not previous.dropped_counts and _is_unchanged(previous.metric, metric):
        return previous
    return write(metric, previous)


def _is_unchanged(old: Metric, new: Metric) -> bool:
    """Return True if two families are equal."""
    try:
        return old is new or old == new
    except Exception:  # noqa: BLE001 - labels of a third-party collector, which `write` refuses
        return False
