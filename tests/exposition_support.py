"""Families, hypothesis strategies and the parsers of prometheus_client, for the tests of the exposition."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from hypothesis import strategies as st
from prometheus_client import exposition
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page
from exporter.families import Distribution, Family, FamilyType

Series = tuple[str, tuple[tuple[str, str], ...]]


def page_of(*families: Metric, max_series: int = 15_000) -> Page:
    page = Page(max_series=max_series)
    page.publish("block", families)
    return page


def text_of(page: Page) -> str:
    return page.render(Format.TEXT).decode()


def gauge(name: str, values: dict[str, float], label: str = "rank") -> Metric:
    return Family(name=name, type="gauge", help=f"Help of {name}.", labels=(label,)).family(
        {(key,): value for key, value in values.items()}
    )


def wide_gauge(name: str, series_count: int, **labels: str) -> Metric:
    """Return a gauge with a number of series."""
    spec = Family(name=name, type="gauge", help="Many.", labels=(*labels, "rank"))
    return spec.family({(*labels.values(), str(index)): float(index) for index in range(series_count)})


def parse(body: bytes, form: Format) -> dict[Series, float]:
    """Parse a body with the parser of prometheus_client and return the values by series. A duplicate series fails the test."""
    parse_families: Callable[[str], Iterable[Metric]] = (
        parse_text if form is Format.TEXT else parse_openmetrics
    )
    values: dict[Series, float] = {}
    for sample in itertools.chain.from_iterable(metric.samples for metric in parse_families(body.decode())):
        series = (sample.name, tuple(sorted(sample.labels.items())))
        assert series not in values
        values[series] = sample.value
    return values


def value(page: Page, name: str, **labels: str) -> float | None:
    """Return the value of a series of a page, or None if absent."""
    body = page.render(Format.OPENMETRICS)
    return parse(body, Format.OPENMETRICS).get((name, tuple(sorted(labels.items()))))


def dropped_series(page: Page, family: str, reason: str) -> float:
    """Return the number of series of a family that the page has dropped for a reason."""
    samples = next(family.samples for family in page.families() if family.name == "exporter_series_dropped")
    expected = {"family": family, "reason": reason}
    return next((sample.value for sample in samples if sample.labels == expected), 0.0)


class _Families(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def library_body(families: Sequence[Metric], form: Format) -> bytes:
    """Return the bytes that prometheus_client writes for the same families."""
    if form is Format.TEXT:
        return exposition.generate_latest(_Families(families))
    body: bytes = openmetrics_exposition.generate_latest(_Families(families))  # type: ignore[no-untyped-call]  # prometheus_client is untyped here
    return body


# Without colons, which prometheus_client keeps in the metadata and replaces by underscores in the samples.
_NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True)
_LABELS = st.from_regex(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,6}", fullmatch=True).filter(
    lambda name: name not in ("le", "quantile")
)
_VALUES = st.text(max_size=12) | st.sampled_from(
    ["", "\\", '"', "\n", "a\\nb", "}", "{", " ", ",", "é€😀", "\r\0"]
)
_MAGNITUDES = st.sampled_from(
    [0.0, -0.0, 1e-320, 999999.0, 1e6, 12345678.5, 1e15, 9007199254740993.0, 1e16, 1e300]
)
_GAUGE_VALUES = st.floats(allow_nan=False) | _MAGNITUDES | st.integers(-(2**70), 2**70)
_COUNTER_VALUES = st.floats(min_value=0.0, allow_nan=False) | _MAGNITUDES | st.integers(0, 2**70)
_BOUNDS = st.floats(min_value=0.0, allow_nan=False, allow_infinity=False) | _MAGNITUDES
_COUNTS = st.integers(0, 20) | st.integers(0, 2**60)


@st.composite
def _distributions(draw: st.DrawFn, *, buckets: bool) -> Distribution:
    bounds = sorted(draw(st.sets(_BOUNDS, max_size=4))) if buckets else []
    bucket_counts = draw(st.lists(_COUNTS, min_size=len(bounds) + 1, max_size=len(bounds) + 1))
    *cumulative, count = itertools.accumulate(bucket_counts)
    total = draw(st.floats(min_value=0.0, allow_nan=False))
    return Distribution(count, total, tuple(zip(bounds, cumulative, strict=True)))


@st.composite
def _families(draw: st.DrawFn, index: int) -> Metric:
    metric_type: FamilyType = draw(st.sampled_from(["counter", "gauge", "histogram", "summary", "info"]))
    unit = draw(st.sampled_from(["", "seconds", "bytes", "x"])) if metric_type != "info" else ""
    # The index makes names unique within an example.
    name = f"{draw(_NAMES)}{index}" + (f"_{unit}" if unit else "")
    name += {"counter": "_total", "info": "_info"}.get(metric_type, "")
    labels = tuple(draw(st.lists(_LABELS, unique=True, max_size=4)))
    label_values = draw(st.lists(st.tuples(*[_VALUES for _ in labels]), unique=True, max_size=4))
    values: st.SearchStrategy[float | Distribution] = {
        "counter": _COUNTER_VALUES,
        "gauge": _GAUGE_VALUES,
        "histogram": _distributions(buckets=True),
        "summary": _distributions(buckets=False),
        "info": st.sampled_from([1, 1.0, True]),
    }[metric_type]
    return Family(name=name, type=metric_type, help=draw(_VALUES), labels=labels, unit=unit).family(
        {values_of_series: draw(values) for values_of_series in label_values}
    )


def valid_families() -> st.SearchStrategy[list[Metric]]:
    """Return a strategy for families with distinct names that both text formats can represent."""
    return st.integers(0, 4).flatmap(
        lambda size: st.tuples(*[_families(index) for index in range(size)]).map(list)
    )
