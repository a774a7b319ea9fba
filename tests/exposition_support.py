"""What the tests of the exposition share: the library's rendering of our families, strategies, readers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from hypothesis import strategies as st
from prometheus_client import exposition
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from exporter.collectors.family import Distribution, Family, FamilySpec, FamilyType, Sample
from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page

Series = tuple[str, tuple[tuple[str, str], ...]]


def page_of(*families: Family, max_series: int = 15_000) -> Page:
    page = Page(max_series=max_series)
    page.publish("block", families)
    return page


def text_of(page: Page) -> str:
    return page.render(Format.TEXT, compress=False).decode()


def gauge(name: str, values: dict[str, float], label: str = "rank") -> Family:
    return Family(
        FamilySpec(name, "gauge", f"Help of {name}.", labels=(label,)),
        tuple(Sample((each,), value) for each, value in values.items()),
    )


def runaway(name: str, series: Iterable[int]) -> Family:
    return gauge(name, {str(each): float(each) for each in series})


def read(body: bytes, form: Format) -> dict[Series, float]:
    """Every series of a body, by the official parser; fails on a duplicate."""
    parse: Callable[[str], Iterable[Metric]] = parse_text if form is Format.TEXT else parse_openmetrics
    found: dict[Series, float] = {}
    for sample in itertools.chain.from_iterable(metric.samples for metric in parse(body.decode())):
        series = (sample.name, tuple(sorted(sample.labels.items())))
        assert series not in found
        found[series] = sample.value
    return found


def value(page: Page, name: str, **labels: str) -> float | None:
    """One series of a page, None when it is not there."""
    body = page.render(Format.OPENMETRICS, compress=False)
    return read(body, Format.OPENMETRICS).get((name, tuple(sorted(labels.items()))))


class _Families(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def library_body(families: Iterable[Family], form: Format) -> bytes:
    """What prometheus_client writes for the same families."""
    collector = _Families([_library_family(family, form) for family in families])
    if form is Format.TEXT:
        return exposition.generate_latest(collector)
    body: bytes = openmetrics_exposition.generate_latest(collector)  # type: ignore[no-untyped-call]  # theirs
    return body


def _library_family(family: Family, form: Format) -> Metric:
    spec = family.spec
    suffix = {"counter": "_total", "info": "_info"}.get(spec.type, "")
    base = spec.name.removesuffix(suffix)
    unit = spec.unit if spec.type != "info" and base.endswith(f"_{spec.unit}") else ""
    metric = Metric(base, spec.help, spec.type, unit)
    for sample in family.samples:
        labels = {name: text for name, text in zip(spec.labels, sample.labels, strict=True) if text}
        metric.samples += _library_samples(spec.type, base, labels, sample.value, form)
    return metric


def _library_samples(
    kind: FamilyType, base: str, labels: dict[str, str], value: float | Distribution, form: Format
) -> list[exposition.openmetrics.Sample]:  # type: ignore[name-defined]  # a named tuple of theirs
    names, values = list(labels), list(labels.values())
    if isinstance(value, Distribution) and kind == "histogram":
        histogram = HistogramMetricFamily(base, "", labels=names)
        buckets: list[tuple[str, float]] = [(_go(bound), count) for bound, count in value.buckets]
        histogram.add_metric(values, [*buckets, ("+Inf", value.count)], value.sum)
        if form is Format.TEXT and not any(each.name.endswith("_count") for each in histogram.samples):
            histogram.add_sample(f"{base}_count", labels, value.count)  # the documented difference
        return histogram.samples
    if isinstance(value, Distribution):
        summary = SummaryMetricFamily(base, "", labels=names)
        summary.add_metric(values, value.count, value.sum or 0.0)
        return summary.samples if value.sum is not None else summary.samples[:1]
    if kind == "info":
        info = InfoMetricFamily(base, "")
        info.add_metric([], labels)
        return info.samples
    plain = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(base, "", labels=names)
    plain.add_metric(values, value)
    return plain.samples


def _go(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]  # theirs


# No colons: the library writes them in the metadata, and underscores in the samples below it.
_WORDS = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True)
_LABELS = st.from_regex(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,6}", fullmatch=True).filter(
    lambda name: name not in ("le", "quantile")
)
_VALUES = st.text(max_size=12) | st.sampled_from(
    ["", "\\", '"', "\n", "a\\nb", "}", "{", " ", ",", "é€😀", "\r\0"]
)
_FINITE = st.floats(allow_nan=False, allow_infinity=False)
_MAGNITUDES = st.sampled_from(
    [0.0, -0.0, 1e-320, 999999.0, 1e6, 12345678.5, 1e15, 9007199254740993.0, 1e16, 1e300]
)
_NUMBERS = st.floats(allow_nan=False) | _MAGNITUDES | st.integers(-(2**70), 2**70)
_AMOUNTS = st.floats(min_value=0.0, allow_nan=False) | _MAGNITUDES | st.integers(0, 2**70)
_COUNTS = st.integers(0, 20) | st.integers(0, 2**60)


@st.composite
def _distributions(draw: st.DrawFn, *, buckets: bool) -> Distribution:
    bounds = sorted(draw(st.sets(_FINITE | _MAGNITUDES, max_size=4))) if buckets else []
    steps = draw(st.lists(_COUNTS, min_size=len(bounds) + 1, max_size=len(bounds) + 1))
    *cumulative, count = itertools.accumulate(steps)
    total = draw(st.none() | st.floats(min_value=0.0, allow_nan=False))
    return Distribution(count, total, tuple(zip(bounds, cumulative, strict=True)))


@st.composite
def _families(draw: st.DrawFn, place: int) -> Family:
    kind: FamilyType = draw(st.sampled_from(["counter", "gauge", "histogram", "summary", "info"]))
    unit = draw(st.sampled_from(["", "seconds", "bytes", "x"]))
    # The place makes names that no other family of the example has, whatever follows.
    name = f"{draw(_WORDS)}{place}"
    if unit and draw(st.booleans()):
        name += f"_{unit}"
    name += {"counter": "_total", "info": "_info"}.get(kind, "")
    labels = tuple(draw(st.lists(_LABELS, unique=True, max_size=4)))
    sets = draw(st.lists(st.tuples(*[_VALUES for _ in labels]), unique=True, max_size=4))
    values: st.SearchStrategy[float | Distribution] = {
        "counter": _AMOUNTS,
        "gauge": _NUMBERS,
        "histogram": _distributions(buckets=True),
        "summary": _distributions(buckets=False),
        "info": st.sampled_from([1, 1.0, True]),
    }[kind]
    samples = tuple(Sample(each, draw(values)) for each in sets)
    return Family(FamilySpec(name, kind, draw(_VALUES), labels, unit), samples)


def valid_blocks() -> st.SearchStrategy[list[Family]]:
    """Any families that both formats can carry, with names that do not meet."""
    return st.integers(0, 4).flatmap(
        lambda size: st.tuples(*[_families(place) for place in range(size)]).map(list)
    )
