"""Text formats: negotiation, equality with prometheus_client's bytes, and parsable bodies."""

from __future__ import annotations

from typing import Any

import pytest
from exposition_support import (
    dropped_series,
    gauge,
    library_body,
    page_of,
    parse,
    text_of,
    valid_families,
    value,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import Metric, StateSetMetricFamily
from prometheus_client.samples import Exemplar, Sample

from exporter.exposition.negotiation import Format, accepts_gzip, negotiate
from exporter.exposition.text import MAX_LABEL_VALUE_BYTES, MAX_SERIES_LABELS
from exporter.families import Distribution, Family, with_values

OM = "application/openmetrics-text"
PROMETHEUS_2_42 = f"{OM};version=1.0.0,{OM};version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
PROMETHEUS_3 = (
    f"{OM};version=1.0.0;escaping=allow-utf-8;q=0.6,{OM};version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROTOBUF = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
PROMETHEUS_3_NATIVE = PROTOBUF + ";q=0.7," + PROMETHEUS_3
PROMETHEUS_3_TEXT_ONLY = "text/plain;version=0.0.4;q=0.6,*/*;q=0.5"
VICTORIA_METRICS = "text/plain;version=0.0.4;q=1,*/*;q=0.1"
TELEGRAF = f"{PROTOBUF};q=0.7,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/webp,*/*;q=0.8"


def test_the_content_types_are_those_that_prometheus_3_requires() -> None:
    assert Format.TEXT.value == "text/plain; version=0.0.4; charset=utf-8"
    assert Format.OPENMETRICS.value == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert Format.PROTOBUF.value.replace(" ", "") == PROTOBUF


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (PROMETHEUS_2_42, Format.OPENMETRICS),
        (PROMETHEUS_3, Format.OPENMETRICS),
        (PROMETHEUS_3_NATIVE, Format.PROTOBUF),
        (f"{PROTOBUF};q=0.2,{OM};q=0.1,text/plain;q=0.3", Format.TEXT),
        (f"{PROTOBUF.replace('delimited', 'text')},{OM};q=0.1,text/plain;q=0.3", Format.TEXT),
        (TELEGRAF, Format.TEXT),
        (f'{OM}; version="1.0.0"; charset=utf-8', Format.OPENMETRICS),
        ("APPLICATION/OpenMetrics-Text;VERSION=1.0.0", Format.OPENMETRICS),
        (f"text/plain;q=0.2, {OM};q=0.3", Format.OPENMETRICS),
        (f"{OM};version=99.0.0;q=1.0,{OM};version=1.0.0;q=0.2,text/plain;q=0.1", Format.OPENMETRICS),
        (None, Format.TEXT),
        ("*/*", Format.TEXT),
        (BROWSER, Format.TEXT),
        (VICTORIA_METRICS, Format.TEXT),
        (PROMETHEUS_3_TEXT_ONLY, Format.TEXT),
        (f"{OM};q=0.2,text/plain;version=0.0.4;q=0.8", Format.TEXT),
        (f"{OM};q=0,*/*", Format.TEXT),
        (f"{OM};version=2.0.0", Format.TEXT),
        (f"{OM};version=1.0.0;q=abc", Format.TEXT),
        (f"{OM};version=1.0.0;q=nan", Format.TEXT),
        (";;,,;q=1;=,", Format.TEXT),
    ],
)
def test_the_accept_header_decides_the_format_and_plain_text_is_the_default(
    accept: str | None, expected: Format
) -> None:
    assert negotiate(accept) is expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        *((value, True) for value in ("gzip", "GZIP", "deflate, gzip;q=0.5", "*", "br, *;q=0.1")),
        *((value, False) for value in (None, "", "identity", "br", "gzip;q=0", "*;q=0", "gzip;q=nan")),
        ("identity, gzip;q=0.5", False),
    ],
)
def test_gzip_is_used_when_accepted_and_not_less_preferred(header: str | None, expected: bool) -> None:
    assert accepts_gzip(header) is expected


_PIECES = st.sampled_from(
    [*'",;=\\/* \t', OM, "text/plain", "gzip", "version", "q", "1.0.0", "0.5", "é", "\0"]
)


@settings(deadline=None)
@given(header=st.lists(_PIECES | st.text(max_size=3)).map("".join))
def test_no_header_raises(header: str) -> None:
    assert negotiate(header) in Format
    assert accepts_gzip(header) in (True, False)


FORMS = pytest.mark.parametrize("form", [Format.TEXT, Format.OPENMETRICS])

LATENCY = Family(
    name="training_latency_seconds",
    type="histogram",
    help="Time of a batch.",
    labels=("zone", "card"),
    unit="seconds",
)


@FORMS
@settings(deadline=None)
@given(families=valid_families())
def test_every_byte_equals_the_output_of_prometheus_client(form: Format, families: list[Metric]) -> None:
    assert page_of(*families).render(form) == library_body(families, form)


@FORMS
@settings(deadline=None)
@given(families=valid_families(), number=(st.floats() | st.integers(-2, 2**70)).filter(bool))
def test_new_values_of_the_same_series_are_written_as_in_a_new_family(
    form: Format, families: list[Metric], number: float
) -> None:
    new_families = [with_values(family, [number] * len(family.samples)) for family in families]
    page = page_of(*families)
    page.render(form)
    page.publish("block", new_families)

    assert page.render(form) == page_of(*new_families).render(form)


@FORMS
@settings(deadline=None)
@given(families=valid_families(), number=(st.floats() | st.integers(-2, 2**70)).filter(bool))
def test_new_values_with_equal_labels_are_written_as_in_a_new_family(
    form: Format, families: list[Metric], number: float
) -> None:
    changed_families = [with_values(family, [number] * len(family.samples)) for family in families]
    for family in changed_families:
        family.samples = [Sample(sample.name, dict(sample.labels), sample.value) for sample in family.samples]
    page = page_of(*families)
    page.render(form)
    page.publish("block", changed_families)

    assert page.render(form) == page_of(*changed_families).render(form)


class Array:
    """Label value of a third-party collector whose comparison has no truth value, as with NumPy."""

    def __eq__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    __hash__ = None  # type: ignore[assignment]  # as with NumPy


def test_a_label_that_cannot_be_compared_is_dropped_alone() -> None:
    page = page_of(gauge("cards", {"0": 1.0, "1": 2.0}))
    page.render(Format.TEXT)
    later = gauge("cards", {"0": 3.0, "1": 4.0})
    later.samples[0] = Sample("cards", {"rank": Array()}, 3.0)  # type: ignore[dict-item]  # not text
    page.publish("block", [later])

    assert parse(page.render(Format.TEXT), Format.TEXT) == {("cards", (("rank", "1"),)): 4.0}
    assert dropped_series(page, "cards", "labels") == 1.0


@FORMS
@settings(deadline=None)
@given(families=valid_families())
def test_the_official_parser_reads_back_what_was_published(form: Format, families: list[Metric]) -> None:
    values = parse(page_of(*families).render(form), form)

    samples = [sample for family in families for sample in family.samples]
    assert values == {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value) for sample in samples
    }


def test_a_histogram_without_a_sum_keeps_its_count_in_plain_text_only() -> None:
    page = page_of(LATENCY.family({("z", "c"): Distribution(7, None, ((0.1, 2),))}))

    text = parse(page.render(Format.TEXT), Format.TEXT)
    openmetrics = parse(page.render(Format.OPENMETRICS), Format.OPENMETRICS)

    assert {name for name, _ in text} == {"training_latency_seconds_bucket", "training_latency_seconds_count"}
    assert {name for name, _ in openmetrics} == {"training_latency_seconds_bucket"}


def test_a_histogram_with_a_bound_below_zero_has_no_sum() -> None:
    page = page_of(LATENCY.family({("z", "c"): Distribution(7, 3.0, ((-0.1, 2),))}))

    assert "_sum" not in text_of(page)
    assert value(page, "training_latency_seconds_bucket", zone="z", card="c", le="-0.1") == 2.0


@pytest.mark.parametrize("bounds", [(-0.0, 0.0), (0.0, -0.0)])
def test_the_text_of_the_bound_zero_has_no_sign(bounds: tuple[float, float]) -> None:
    spec = Family(name="shift", type="histogram", help="")
    text = "".join(
        text_of(page_of(spec.family({(): Distribution(1, None, ((bound, 1),))}))) for bound in bounds
    )

    assert text.count('le="0.0"') == 2


def test_a_state_set_whose_label_has_another_name_is_a_gauge_in_openmetrics() -> None:
    state = Family(name="training_run_state", type="stateset", help="State.", labels=("run", "state"))
    page = page_of(
        state.family({("a", "running"): 1, ("a", "hung"): 0}),
        StateSetMetricFamily("of_the_library", "State.", {"on": True, "off": False}),
    )

    assert value(page, "training_run_state", run="a", state="running") == 1.0
    assert value(page, "of_the_library", of_the_library="on") == 1.0
    assert b"# TYPE of_the_library stateset\n" in page.render(Format.OPENMETRICS)


def test_timestamps_exemplars_and_times_of_creation_are_not_written() -> None:
    metric = Metric("foreign", "Foreign.", "counter")
    metric.add_sample("foreign_total", {}, 3.0, timestamp=17.0, exemplar=Exemplar({"trace": "1"}, 2.0))
    metric.add_sample("foreign_created", {}, 17.0)

    assert text_of(page_of(metric)).splitlines()[2:] == ["foreign_total 3.0"]


def test_a_lone_surrogate_in_a_help_text_is_written_as_a_question_mark() -> None:
    page = page_of(Family(name="x", type="gauge", help="a\udc80b").family({(): 1}))

    assert "# HELP x a?b\n" in text_of(page)


@pytest.mark.parametrize(
    ("metric_type", "invalid_sample", "reason"),
    [
        ("gauge", ({"rank": "1"}, float("nan")), "value"),
        ("gauge", ({"rank": "1"}, "5"), "value"),
        ("gauge", ({"rank": "1"}, None), "value"),
        ("gauge", ({"rank": "1"}, 10**400), "value"),
        ("gauge", ({"rank": "0"}, 6.0), "duplicate"),
        ("gauge", ({"rank": 1}, 6.0), "labels"),
        ("gauge", ({"rank": ["1"]}, 6.0), "labels"),
        ("gauge", ({"rank": "\udcff"}, 6.0), "labels"),
        ("gauge", ({"rank": "é" * (MAX_LABEL_VALUE_BYTES // 2) + "x"}, 6.0), "labels"),
        ("gauge", ({"a-b": "1"}, 6.0), "labels"),
        ("gauge", ({"a\n": "1"}, 6.0), "labels"),
        ("gauge", ({"__name__": "1"}, 6.0), "labels"),
        (
            "gauge",
            (dict.fromkeys([f"l{index}" for index in range(MAX_SERIES_LABELS + 1)], "1"), 6.0),
            "labels",
        ),
        ("gauge", (None, 6.0), "labels"),
        ("counter", ({"rank": "1"}, -1.0), "value"),
        ("info", ({"rank": "1"}, 2), "value"),
    ],
)
def test_an_invalid_sample_is_dropped_and_counted_and_others_stay(
    metric_type: Any, invalid_sample: tuple[Any, Any], reason: str
) -> None:
    name = {"counter": "good_total", "info": "good_info"}.get(metric_type, "good")
    spec = Family(name=name, type=metric_type, help="Good.", labels=("rank",))
    clean, family = spec.family({("0",): 1.0, ("2",): 1.0}), spec.family({("0",): 1.0, ("2",): 1.0})
    family.samples.insert(1, Sample(name, *invalid_sample))
    page = page_of(family)

    assert text_of(page) == text_of(page_of(clean))
    assert dropped_series(page, name, reason) == 1


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Distribution(9, 1.0, ((1.0, 1), (float("inf"), 9))), "duplicate"),
        (Distribution(-1, 1.0), "value"),
        (Distribution(1, -1.0), "value"),
        (Distribution(1, float("nan")), "value"),
    ],
)
def test_a_histogram_with_an_invalid_sample_is_dropped_completely(value: Distribution, reason: str) -> None:
    page = page_of(LATENCY.family({("z", "c"): value}), gauge("after", {"0": 1.0}))

    assert set(parse(page.render(Format.OPENMETRICS), Format.OPENMETRICS)) == {("after", (("rank", "0"),))}
    assert dropped_series(page, "training_latency_seconds", reason) >= 3


@pytest.mark.parametrize("name", ["a-b", "é", "a" * 300, "a.b", "1a"])
def test_a_family_with_an_invalid_name_is_dropped(name: str) -> None:
    page = page_of(gauge("before", {"0": 1.0}), Metric(name, "", "gauge"), gauge("after", {"0": 1.0}))

    values = parse(page.render(Format.OPENMETRICS), Format.OPENMETRICS)

    assert [name for name, _ in values] == ["before", "after"]


_TEXTS = st.text(st.characters(codec=None), max_size=4) | st.sampled_from(
    ["a", "a_total", "a_info", "a_count"]
)


@st.composite
def possibly_invalid_families(draw: st.DrawFn) -> Metric:
    metric = Metric(
        "a", draw(_TEXTS), draw(st.sampled_from(["counter", "gauge", "histogram", "summary", "info"]))
    )
    metric.name = draw(_TEXTS)
    for _ in range(draw(st.integers(0, 4))):
        labels = draw(st.dictionaries(_TEXTS, _TEXTS, max_size=2))
        metric.add_sample(
            metric.name + draw(st.sampled_from(["", "_total", "_info", "_count", "_sum", "_bucket", "_x"])),
            labels,
            draw(st.floats() | st.none() | st.integers(-1, 5)),  # type: ignore[arg-type]  # invalid on purpose
        )
    return metric


@settings(deadline=None)
@given(families=st.lists(possibly_invalid_families(), max_size=4))
def test_the_plain_text_always_parses_to_its_end(families: list[Metric]) -> None:
    page = page_of(*families)
    page.watch("the same families", lambda: families)
    page.watch("self", page.families)

    assert "exporter_series" in {name for name, _ in parse(page.render(Format.TEXT), Format.TEXT)}
