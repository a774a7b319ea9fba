"""Samples of one family to lines of text, remembered from one publish to the next.

Used in the sidecar, by whoever holds the lock of the block; not thread-safe by itself.

A line `name{labels} value` is kept for every series that was shown last. Building its first part costs ten
times what the rest does, and a value that did not change (most: a window of a minute is published sixty
times) costs nothing. The memory is also what makes a cut stable: a family over its quota keeps the series
that it has shown the longest. Series that are gone are forgotten at once.

A sample line is the same in both formats, except that a histogram without `_sum` loses its `_count` in
OpenMetrics.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from exporter.collectors.family import Distribution, FamilySpec, Sample
from exporter.exposition.drops import Reason
from exporter.exposition.layout import Layout, Refused, go_number, label_set


@dataclass(frozen=True, slots=True)
class Rendered:
    """A family's samples as text.

    Attributes:
        text: The sample lines in plain text.
        openmetrics: The sample lines in OpenMetrics; the same object wherever they are equal.
        series: Series shown.
        samples: Those shown, in their order.
        dropped: Series left out.
    """

    text: str
    openmetrics: str
    series: int
    samples: tuple[Sample, ...]
    dropped: Mapping[Reason, int]


def _unless_same(last: Rendered | None, new: Rendered) -> Rendered:
    """The last one where it has the same text: what was made of it is then not made again."""
    if last is not None and (last.text, last.openmetrics, last.dropped) == (
        new.text,
        new.openmetrics,
        new.dropped,
    ):
        return last
    return new


def count_series(spec: FamilySpec, samples: Sequence[Sample]) -> int:
    """Count the series that samples would become, the bad ones among them included."""
    fixed = _FIXED_SERIES.get(spec.type)
    return len(samples) if fixed is None else sum([_count_lines(sample, fixed) for sample in samples])


_FIXED_SERIES = {"histogram": 3, "summary": 2}
"""Series of a distribution besides its finite buckets: `+Inf`, `_count` and `_sum`; the last two."""


def _count_lines(sample: Sample, fixed: int) -> int:
    value = getattr(sample, "value", None)
    return fixed + len(value.buckets) if type(value) is Distribution and type(value.buckets) is tuple else 1


class _Line:
    """A series with one value: what is remembered of it, and whether it has been seen in this pass."""

    __slots__ = ("line", "prefix", "seen", "value")

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.value = math.nan  # equal to no value
        self.line = ""
        self.seen = 0


class NumberRenderer:
    """Lines of a counter, gauge or info family."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._known: dict[tuple[str, ...], _Line] = {}
        self._passes = 0
        self._last: Rendered | None = None
        self._dropped: Counter[Reason] = Counter()
        self._least = 0.0 if layout.spec.type == "counter" else -math.inf
        # What `repr` writes as Go does needs no closer look; an info's value always gets one, once.
        self._plain = math.inf if layout.spec.type == "info" else max(self._least, -sys.float_info.max)

    def render(self, samples: Sequence[Sample], quota: int | None = None) -> Rendered:
        """Write samples, leaving out and counting the bad ones.

        Args:
            samples: All of the family.
            quota: Series that may be shown; None for all.
        """
        self._passes += 1
        self._dropped = Counter()
        lines: list[str] = []
        shown: list[Sample] = []
        if quota is None or quota >= len(samples):
            self._write_all(samples, lines, shown)
        else:
            waiting, taken = _longest_shown_first(samples, self._known), 0
            while taken < len(waiting) and len(lines) < quota:  # again as long as bad ones leave places free
                chosen = waiting[taken : taken + quota - len(lines)]
                taken += len(chosen)
                self._write_all(chosen, lines, shown)
            self._dropped[Reason.CAP] += len(waiting) - taken
        if len(lines) != len(self._known):
            current = self._passes
            self._known = {labels: line for labels, line in self._known.items() if line.seen == current}
        text = "".join(lines)
        self._last = _unless_same(self._last, Rendered(text, text, len(lines), tuple(shown), self._dropped))
        return self._last

    def _write_all(self, samples: Sequence[Sample], lines: list[str], shown: list[Sample]) -> None:
        """Append the lines of the good samples, and those samples."""
        known, current, plain = self._known, self._passes, self._plain
        for sample in samples:
            try:
                labels = sample.labels
                value: Any = sample.value
                line = known.get(labels)
                if line is None:
                    line = self._begin(labels)
                elif line.seen == current:
                    self._dropped[Reason.DUPLICATE] += 1
                    continue
                if value.__class__ is not float:
                    value = number(value)
                if value != line.value or not value:  # zero has two signs, which are equal
                    if plain <= value < 1e6:
                        line.line = f"{line.prefix}{value!r}\n"
                    else:
                        line.line = f"{line.prefix}{self._write(value)}\n"
                    line.value = value
            except Refused as refused:
                self._dropped[refused.reason] += 1
                continue
            except AttributeError:  # not a sample
                self._dropped[Reason.VALUE] += 1
                continue
            except TypeError:  # labels that cannot be looked up, so no tuple of text
                self._dropped[Reason.LABELS] += 1
                continue
            if not line.seen:
                known[labels] = line
            line.seen = current
            lines.append(line.line)
            shown.append(sample)

    def _begin(self, labels: tuple[str, ...]) -> _Line:
        return _Line(f"{self.layout.spec.name}{label_set(self.layout.label_pairs(labels))} ")

    def _write(self, value: float) -> str:
        if not value >= self._least or (self.layout.spec.type == "info" and value != 1.0):
            raise Refused(Reason.VALUE)
        return go_number(value)


class _Lines:
    """A series of several lines: what is remembered of it, and whether it has been seen in this pass."""

    __slots__ = ("bounds", "braces", "bucket_prefixes", "openmetrics", "pairs", "seen", "text", "value")

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self.pairs = pairs
        self.braces = label_set(pairs)
        self.bounds: list[float] | None = None
        self.bucket_prefixes: list[str] = []
        self.value: Distribution | None = None
        self.text = ""
        self.openmetrics = ""
        self.seen = 0


class DistributionRenderer:
    """Lines of a histogram or summary family."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._fixed = _FIXED_SERIES[layout.spec.type]
        self._known: dict[tuple[str, ...], _Lines] = {}
        self._passes = 0
        self._last: Rendered | None = None

    def render(self, samples: Sequence[Sample], quota: int | None = None) -> Rendered:
        """Write samples, leaving out and counting the bad ones, each with all of its series.

        Args:
            samples: All of the family.
            quota: Series that may be shown; None for all.
        """
        known = self._known
        self._passes = current = self._passes + 1
        dropped: Counter[Reason] = Counter()
        lines: list[_Lines] = []
        shown: list[Sample] = []
        room = math.inf
        if quota is not None:
            room, samples = quota, _longest_shown_first(samples, known)
        series = 0
        for place, sample in enumerate(samples):
            weight = _count_lines(sample, self._fixed)
            if series + weight > room:
                dropped[Reason.CAP] += count_series(self.layout.spec, samples[place:])
                break
            try:
                labels, value = sample.labels, sample.value
                line = known.get(labels)
                if line is None:
                    line = _Lines(self.layout.label_pairs(labels))
                elif line.seen == current:
                    dropped[Reason.DUPLICATE] += weight
                    continue
                if value is not line.value or value is None:
                    self._write(line, value)
            except Refused as refused:
                dropped[refused.reason] += weight
                continue
            except (AttributeError, ValueError):  # not a sample, or parts that cannot be compared
                dropped[Reason.VALUE] += weight
                continue
            except TypeError:  # labels that cannot be looked up, so no tuple of text
                dropped[Reason.LABELS] += weight
                continue
            if not line.seen:
                known[labels] = line
            line.seen = current
            lines.append(line)
            shown.append(sample)
            series += weight
        if len(lines) != len(known):
            self._known = {labels: line for labels, line in known.items() if line.seen == current}
        text = openmetrics = "".join([line.text for line in lines])
        if not all(line.openmetrics is line.text for line in lines):
            openmetrics = "".join([line.openmetrics for line in lines])
        self._last = _unless_same(self._last, Rendered(text, openmetrics, series, tuple(shown), dropped))
        return self._last

    def _write(self, line: _Lines, value: object) -> None:
        """Write a distribution into its lines, which stay as they were if it cannot be."""
        if not isinstance(value, Distribution):
            raise Refused(Reason.VALUE)
        name, histogram = self.layout.spec.name, self.layout.spec.type == "histogram"
        bounds, counts = _read_buckets(value, line.bounds)
        total = value.sum
        if total is not None:
            total = number(total)
            if bounds and bounds[0] < 0.0:
                total = None  # a bucket below zero says that the sum may fall, observed or not
            elif not total >= 0.0:
                raise Refused(Reason.VALUE)
        if bounds and not histogram:
            raise Refused(Reason.VALUE)

        tail = f"{name}_count{line.braces} {counts[-1]}\n"
        if total is not None:
            written = repr(total) if total < 1e6 else go_number(total)
            tail = f"{tail}{name}_sum{line.braces} {written}\n"
        if histogram:
            if bounds is not line.bounds:
                line.bucket_prefixes = [
                    _bucket_prefix(name, line.pairs, each) for each in (*bounds, math.inf)
                ]
                line.bounds = bounds
            buckets = "".join(
                [f"{prefix}{each}\n" for prefix, each in zip(line.bucket_prefixes, counts, strict=True)]
            )
            line.text = buckets + tail
            line.openmetrics = buckets if total is None else line.text
        else:
            line.text = line.openmetrics = tail
        line.value = value


def number(value: object) -> float:
    """Take a Python number as the float that the formats know.

    Raises:
        Refused: It is no number, or beyond the floating range.
    """
    if not isinstance(value, int | float):
        raise Refused(Reason.VALUE)
    try:
        return float(value)
    except OverflowError:
        raise Refused(Reason.VALUE) from None


def _read_buckets(value: Distribution, before: list[float] | None) -> tuple[list[float], list[str]]:
    """Bounds, and the written counts of all buckets with the one of `+Inf` last.

    Args:
        value: What is offered.
        before: Sound bounds, which are given back when these are the same.

    Raises:
        Refused: Bounds that are not finite or do not rise, counts that fall or are no whole numbers.
    """
    if value.buckets == ():
        return before if before == [] else [], [_write_count(value.count, 0)]
    try:
        bounds = [number(bound) for bound, _ in value.buckets]
        numbers = [count for _, count in value.buckets]
    except (TypeError, ValueError):  # no pairs
        raise Refused(Reason.VALUE) from None
    if bounds == before:
        bounds = before
    elif not all(low < high for low, high in pairwise([-math.inf, *bounds, math.inf])):
        raise Refused(Reason.VALUE)
    counts: list[str] = []
    least = 0
    for count in (*numbers, value.count):
        counts.append(_write_count(count, least))
        least = count
    return bounds, counts


def _write_count(count: int, least: int) -> str:
    if count.__class__ is not int or count < least:
        raise Refused(Reason.VALUE)
    return f"{count}.0" if count < 1_000_000 else go_number(number(count))


def _bucket_prefix(name: str, pairs: list[tuple[str, str]], bound: float) -> str:
    before = [pair for pair in pairs if pair[0] < "le"]
    return f"{name}_bucket{label_set([*before, ('le', go_number(bound)), *pairs[len(before) :]])} "


def _longest_shown_first(
    samples: Sequence[Sample], known: dict[tuple[str, ...], _Line] | dict[tuple[str, ...], _Lines]
) -> list[Sample]:
    """Samples whose series were shown before, the longest shown first; then the new ones as they come."""
    places = {labels: place for place, labels in enumerate(known)}

    def place(sample: Sample) -> int:
        try:
            return places.get(sample.labels, len(places))
        except (AttributeError, TypeError):  # a bad one, refused when its turn comes
            return len(places)

    return sorted(samples, key=place)
