"""Families to bytes: the same as prometheus_client, and never a body that a scraper cannot read."""

from __future__ import annotations

from typing import Any

import pytest
from exposition_support import gauge, library_body, page_of, read, text_of, valid_blocks, value
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.collectors.family import Distribution, Family, FamilySpec, Sample
from exporter.exposition.layout import LABEL_NAMES, LABEL_VALUE_BYTES, Layout
from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page
from exporter.exposition.render import DistributionRenderer, NumberRenderer

FORMS = pytest.mark.parametrize("form", list(Format))

STEPS = Family(
    FamilySpec(
        "training_steps_total", "counter", 'Steps done, "all" of them.\nSince the start.', ("run", "rank")
    ),
    (Sample(("a\\b", "0"), 12), Sample(('say "hi"\n', ""), 2.5e9)),
)
LATENCY = Family(
    FamilySpec("training_latency_seconds", "histogram", "Time of a batch.", ("zone", "card"), "seconds"),
    (Sample(("z", "c"), Distribution(7, 1.25, ((0.1, 2), (2500000.0, 7)))),),
)
SIZE = Family(
    FamilySpec("training_size_bytes", "summary", "Size of a batch.", (), "bytes"),
    (Sample((), Distribution(3, 4096.0)),),
)
LOSS = Family(FamilySpec("training_loss", "gauge", "Loss.", ("rank",), "seconds"), (Sample(("0",), -0.5),))
RUN = Family(FamilySpec("training_run_info", "info", "The run.", ("name",)), (Sample(("é",), 1),))

TEXT_BODY = r"""# HELP training_steps_total Steps done, "all" of them.\nSince the start.
# TYPE training_steps_total counter
training_steps_total{rank="0",run="a\\b"} 12.0
training_steps_total{run="say \"hi\"\n"} 2.5e+09
# HELP training_latency_seconds Time of a batch.
# TYPE training_latency_seconds histogram
training_latency_seconds_bucket{card="c",le="0.1",zone="z"} 2.0
training_latency_seconds_bucket{card="c",le="2.5e+06",zone="z"} 7.0
training_latency_seconds_bucket{card="c",le="+Inf",zone="z"} 7.0
training_latency_seconds_count{card="c",zone="z"} 7.0
training_latency_seconds_sum{card="c",zone="z"} 1.25
# HELP training_size_bytes Size of a batch.
# TYPE training_size_bytes summary
training_size_bytes_count 3.0
training_size_bytes_sum 4096.0
# HELP training_loss Loss.
# TYPE training_loss gauge
training_loss{rank="0"} -0.5
# HELP training_run_info The run.
# TYPE training_run_info gauge
training_run_info{name="é"} 1.0
"""

OPENMETRICS_BODY = r"""# HELP training_steps Steps done, \"all\" of them.\nSince the start.
# TYPE training_steps counter
training_steps_total{rank="0",run="a\\b"} 12.0
training_steps_total{run="say \"hi\"\n"} 2.5e+09
# HELP training_latency_seconds Time of a batch.
# TYPE training_latency_seconds histogram
# UNIT training_latency_seconds seconds
training_latency_seconds_bucket{card="c",le="0.1",zone="z"} 2.0
training_latency_seconds_bucket{card="c",le="2.5e+06",zone="z"} 7.0
training_latency_seconds_bucket{card="c",le="+Inf",zone="z"} 7.0
training_latency_seconds_count{card="c",zone="z"} 7.0
training_latency_seconds_sum{card="c",zone="z"} 1.25
# HELP training_size_bytes Size of a batch.
# TYPE training_size_bytes summary
# UNIT training_size_bytes bytes
training_size_bytes_count 3.0
training_size_bytes_sum 4096.0
# HELP training_loss Loss.
# TYPE training_loss gauge
training_loss{rank="0"} -0.5
# HELP training_run The run.
# TYPE training_run info
training_run_info{name="é"} 1.0
# EOF
"""


def test_a_plain_text_body_is_written_to_the_byte_as_expected() -> None:
    page = page_of(STEPS, LATENCY, SIZE, LOSS, RUN)

    assert text_of(page) == TEXT_BODY


def test_an_openmetrics_body_is_written_to_the_byte_as_expected() -> None:
    page = page_of(STEPS, LATENCY, SIZE, LOSS, RUN)

    assert page.render(Format.OPENMETRICS, compress=False).decode() == OPENMETRICS_BODY


@FORMS
@settings(deadline=None)
@given(families=valid_blocks())
def test_every_byte_is_that_of_prometheus_client(form: Format, families: list[Family]) -> None:
    body = page_of(*families).render(form, compress=False)

    assert body == library_body(families, form)


@FORMS
@settings(deadline=None)
@given(families=valid_blocks(), later=valid_blocks())
def test_what_is_remembered_of_an_earlier_publish_never_shows(
    form: Format, families: list[Family], later: list[Family]
) -> None:
    page = page_of(*families)
    page.publish("block", later)
    page.publish("block", families)

    assert page.render(form, compress=False) == library_body(families, form)


@FORMS
@settings(deadline=None)
@given(families=valid_blocks())
def test_the_official_parser_reads_back_what_was_published(form: Format, families: list[Family]) -> None:
    page = page_of(*families)

    found = read(page.render(form, compress=False), form)

    numbers = {
        (family.spec.name, tuple(sorted((n, v) for n, v in zip(family.spec.labels, sample.labels, strict=True) if v))):
        float(sample.value)
        for family in families
        for sample in family.samples
        if not isinstance(sample.value, Distribution)
    }  # fmt: skip
    assert {series: found.get(series) for series in numbers} == numbers


def test_a_histogram_without_a_sum_keeps_its_count_in_plain_text_only() -> None:
    family = Family(LATENCY.spec, (Sample(("z", "c"), Distribution(7, None, ((0.1, 2),))),))
    page = page_of(family)

    text = read(page.render(Format.TEXT, compress=False), Format.TEXT)
    openmetrics = read(page.render(Format.OPENMETRICS, compress=False), Format.OPENMETRICS)

    assert {name for name, _ in text} == {"training_latency_seconds_bucket", "training_latency_seconds_count"}
    assert {name for name, _ in openmetrics} == {"training_latency_seconds_bucket"}


def test_a_histogram_with_a_bound_below_zero_has_no_sum() -> None:
    family = Family(LATENCY.spec, (Sample(("z", "c"), Distribution(7, 3.0, ((-0.1, 2),))),))
    page = page_of(family)

    assert "_sum" not in text_of(page)
    assert value(page, "training_latency_seconds_bucket", zone="z", card="c", le="-0.1") == 2.0


def test_a_summary_without_a_sum_has_its_count_in_both_formats() -> None:
    page = page_of(Family(SIZE.spec, (Sample((), Distribution(3, None)),)))

    assert value(page, "training_size_bytes_count") == 3.0
    assert "training_size_bytes_count 3.0\n" in text_of(page)
    assert "_sum" not in text_of(page)


def test_a_colon_in_a_name_stays_in_openmetrics_where_the_library_loses_it() -> None:
    page = page_of(gauge("a:b", {"0": 1.0}))

    assert value(page, "a:b", rank="0") == 1.0


def test_a_unit_line_is_left_out_when_the_name_does_not_carry_the_unit() -> None:
    body = page_of(LOSS).render(Format.OPENMETRICS, compress=False)

    assert b"# UNIT" not in body


def test_a_lone_surrogate_in_a_help_text_costs_one_character() -> None:
    page = page_of(Family(FamilySpec("x", "gauge", "a\udc80b"), (Sample((), 1),)))

    assert "# HELP x a?b\n" in text_of(page)
    assert value(page, "x") == 1.0


SPEC = FamilySpec("good", "gauge", "Good.", ("rank",))
COUNTER = FamilySpec("good_total", "counter", "Good.", ("rank",))
HISTOGRAM = FamilySpec("good", "histogram", "Good.", ("rank",))
SUMMARY = FamilySpec("good", "summary", "Good.", ("rank",))
INFO = FamilySpec("good_info", "info", "Good.", ("rank",))
GOOD: dict[str, float | Distribution] = {
    "counter": 5.0,
    "gauge": 5.0,
    "histogram": Distribution(2, 1.0, ((1.0, 1),)),
    "summary": Distribution(2, 1.0),
    "info": 1.0,
}


class Untrue:
    """Refuses to be compared, as an array does."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("spec", "bad", "reason"),
    [
        (SPEC, Sample(("1",), float("nan")), "value"),
        (SPEC, Sample(("1",), "5"), "value"),  # type: ignore[arg-type]
        (SPEC, Sample(("1",), None), "value"),  # type: ignore[arg-type]
        (SPEC, Sample(("1",), 1j), "value"),  # type: ignore[arg-type]
        (SPEC, Sample(("1",), Untrue()), "value"),  # type: ignore[arg-type]
        (SPEC, Sample(("1",), 10**400), "value"),
        (SPEC, Sample(("1",), Distribution(1, 1.0)), "value"),
        (SPEC, None, "value"),
        (SPEC, Sample(("0",), 6.0), "duplicate"),
        (SPEC, Sample((), 6.0), "labels"),
        (SPEC, Sample(("1", "2"), 6.0), "labels"),
        (SPEC, Sample(["1"], 6.0), "labels"),  # type: ignore[arg-type]
        (SPEC, Sample((["1"],), 6.0), "labels"),  # type: ignore[arg-type]
        (SPEC, Sample((1,), 6.0), "labels"),  # type: ignore[arg-type]
        (SPEC, Sample((None,), 6.0), "labels"),  # type: ignore[arg-type]
        (SPEC, Sample(("\udcff",), 6.0), "labels"),
        (SPEC, Sample(("é" * (LABEL_VALUE_BYTES // 2) + "x",), 6.0), "labels"),
        (COUNTER, Sample(("1",), -1.0), "value"),
        (COUNTER, Sample(("1",), float("-inf")), "value"),
        (COUNTER, Sample(("1",), float("nan")), "value"),
        (INFO, Sample(("1",), 0.0), "value"),
        (INFO, Sample(("1",), 2), "value"),
        (HISTOGRAM, Sample(("1",), 6.0), "value"),
        (HISTOGRAM, Sample(("1",), Untrue()), "value"),  # type: ignore[arg-type]
        (HISTOGRAM, Sample(("1",), Distribution(2, Untrue(), ((1.0, 1),))), "value"),  # type: ignore[arg-type]
        (HISTOGRAM, Sample(("1",), Distribution(1, 1.0, ((1.0, 2),))), "value"),
        (HISTOGRAM, Sample(("1",), Distribution(9, 1.0, ((1.0, 2), (2.0, 1)))), "value"),
        (HISTOGRAM, Sample(("1",), Distribution(9, 1.0, ((2.0, 1), (1.0, 2)))), "value"),
        (HISTOGRAM, Sample(("1",), Distribution(9, 1.0, ((1.0, 1), (1.0, 2)))), "value"),
        (HISTOGRAM, Sample(("1",), Distribution(9, 1.0, ((1.0, 1), (float("inf"), 9)))), "value"),
        (HISTOGRAM, Sample(("1",), Distribution(9, 1.0, ((float("nan"), 1),))), "value"),
        (HISTOGRAM, Sample(("1",), Distribution(9, 1.0, ((1.0, 1.5),))), "value"),  # type: ignore[arg-type]
        (HISTOGRAM, Sample(("1",), Distribution(9, 1.0, (1.0, 2.0))), "value"),  # type: ignore[arg-type]
        (HISTOGRAM, Sample(("1",), Distribution(9, 1.0, None)), "value"),  # type: ignore[arg-type]
        (HISTOGRAM, Sample(("1",), Distribution(-1, 1.0)), "value"),
        (HISTOGRAM, Sample(("1",), Distribution(1, -1.0)), "value"),
        (HISTOGRAM, Sample(("1",), Distribution(1, float("nan"))), "value"),
        (HISTOGRAM, Sample(("0",), Distribution(1, 1.0)), "duplicate"),
        (SUMMARY, Sample(("1",), Distribution(2, 1.0, ((1.0, 1),))), "value"),
        (SUMMARY, Sample(("1",), Distribution(True, 1.0)), "value"),
        (SUMMARY, Sample(("\ud800",), Distribution(1, 1.0)), "labels"),
        (SUMMARY, object(), "value"),
    ],
)  # fmt: skip
def test_a_bad_sample_is_left_out_and_counted_and_its_neighbours_stay(
    spec: FamilySpec, bad: Any, reason: str
) -> None:
    good = Sample(("0",), GOOD[spec.type]), Sample(("2",), GOOD[spec.type])
    clean, page = page_of(Family(spec, good)), page_of(Family(spec, (good[0], bad, good[1])))
    before = {form: clean.render(form, compress=False) for form in Format}

    assert {form: page.render(form, compress=False) for form in Format} == before
    page.watch("self", page.families)
    assert (value(page, "exporter_series_dropped_total", family=spec.name) or 0) >= 1
    assert (value(page, "exporter_series_dropped_by_reason_total", reason=reason) or 0) >= 1


def test_a_label_value_of_the_longest_length_is_shown() -> None:
    page = page_of(gauge("x", {"é" * (LABEL_VALUE_BYTES // 2): 1.0}))

    assert text_of(page).count("é") == LABEL_VALUE_BYTES // 2


@pytest.mark.parametrize(
    "spec",
    [
        FamilySpec("a-b", "gauge", ""),
        FamilySpec("é", "gauge", ""),
        FamilySpec("a\n", "gauge", ""),
        FamilySpec("", "gauge", ""),
        FamilySpec("1a", "gauge", ""),
        FamilySpec("a" * 300, "gauge", ""),
        FamilySpec("\udcff", "gauge", ""),
        FamilySpec("a", "counter", ""),
        FamilySpec("_total", "counter", ""),
        FamilySpec("a", "info", ""),
        FamilySpec("a", "enum", ""),  # type: ignore[arg-type]
        FamilySpec("a", [], ""),  # type: ignore[arg-type]
        FamilySpec(None, "gauge", ""),  # type: ignore[arg-type]
        FamilySpec("a", "gauge", None),  # type: ignore[arg-type]
        FamilySpec("a", "gauge", "", ("x", "x")),
        FamilySpec("a", "gauge", "", ("__x",)),
        FamilySpec("a", "gauge", "", ("x\n",)),
        FamilySpec("a", "gauge", "", ("x-y",)),
        FamilySpec("a", "gauge", "", ("",)),
        FamilySpec("a", "gauge", "", "x"),  # type: ignore[arg-type]
        FamilySpec("a", "gauge", "", ["x"]),  # type: ignore[arg-type]
        FamilySpec("a", "gauge", "", tuple(f"l{each}" for each in range(LABEL_NAMES + 1))),
        FamilySpec("a", "histogram", "", ("le",)),
        FamilySpec("a", "summary", "", ("quantile",)),
        None,
        "a",
    ],
)
def test_a_family_that_cannot_be_written_is_left_out_whole(spec: Any) -> None:
    page = page_of(gauge("before", {"0": 1.0}), Family(spec, (Sample((), 1.0),)), gauge("after", {"0": 1.0}))

    body = page.render(Format.OPENMETRICS, compress=False)

    assert [name for name, _ in read(body, Format.OPENMETRICS)] == ["before", "after"]
    page.watch("self", page.families)
    assert value(page, "exporter_series_dropped_by_reason_total", reason="name") == 1.0


_ANYTHING = (
    st.none() | st.booleans() | st.floats() | st.integers() | st.binary(max_size=3) | st.just([]) | st.just(object())
)  # fmt: skip
_TEXTS = st.text(st.characters(codec=None), max_size=4) | st.sampled_from(
    ["a", "a_total", "a_info", "a_count", "b"]
)


def _maybe(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return good | good | good | _ANYTHING


_WILD = st.builds(
    Family,
    _maybe(
        st.builds(
            FamilySpec,
            _maybe(_TEXTS),
            _maybe(st.sampled_from(["counter", "gauge", "histogram", "summary", "info"])),
            _maybe(_TEXTS),
            _maybe(st.lists(_maybe(_TEXTS), max_size=2).map(tuple)),
            _maybe(_TEXTS),
        )
    ),
    _maybe(
        st.lists(
            _maybe(
                st.builds(
                    Sample,
                    _maybe(st.lists(_maybe(_TEXTS), max_size=2).map(tuple)),
                    _maybe(
                        st.floats()
                        | st.builds(
                            Distribution,
                            _maybe(st.integers(-1, 5)),
                            _maybe(st.floats()),
                            _maybe(st.lists(_maybe(st.tuples(st.floats(), st.integers(-1, 5)))).map(tuple)),
                        )
                    ),
                )
            ),
            max_size=4,
        )
    ),
)


@settings(deadline=None)
@given(families=st.lists(_maybe(_WILD), max_size=4))
def test_whatever_is_published_the_body_parses_to_its_end(families: list[Any]) -> None:
    page = Page()
    page.publish("wild", families)
    page.watch("wild too", lambda: families)
    page.watch("self", page.families)

    for form in Format:
        assert "exporter_series" in {name for name, _ in read(page.render(form, compress=False), form)}


def test_series_that_are_gone_are_forgotten() -> None:
    renderer = NumberRenderer(Layout(SPEC))
    for publish in range(10):
        renderer.render([Sample((f"{publish}-{each}",), 1.0) for each in range(5)])

    assert len(renderer._known) == 5


def test_a_histogram_whose_bounds_changed_is_written_with_the_new_ones() -> None:
    renderer = DistributionRenderer(Layout(HISTOGRAM))
    renderer.render([Sample(("0",), Distribution(2, 1.0, ((1.0, 1), (2.0, 2))))])

    rendered = renderer.render([Sample(("0",), Distribution(2, 1.0, ((3.0, 1),)))])

    assert rendered.text.splitlines()[:2] == [
        'good_bucket{le="3.0",rank="0"} 1.0',
        'good_bucket{le="+Inf",rank="0"} 2.0',
    ]


def test_a_distribution_whose_parts_cannot_be_compared_is_left_out() -> None:
    page = page_of(Family(SUMMARY, (Sample(("0",), Distribution(2, 1.0)),)))
    page.publish("block", [Family(SUMMARY, (Sample(("0",), Distribution(2, Untrue())),))])  # type: ignore[arg-type]

    assert value(page, "good_count", rank="0") is None


def test_a_zero_that_changes_its_sign_is_written_as_it_is() -> None:
    page = page_of(gauge("x", {"0": 0.0}))
    page.publish("block", [gauge("x", {"0": -0.0})])

    assert text_of(page).endswith("} -0.0\n")
