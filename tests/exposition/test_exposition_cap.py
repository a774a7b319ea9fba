"""The cap on series: what a label that runs away may cost, and whom."""

from __future__ import annotations

import random

import pytest
from exposition_support import gauge, page_of, read, runaway, text_of, value
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.collectors.family import Distribution, Family, FamilySpec, Sample
from exporter.exposition.cap import allocate
from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page

_DEMANDS = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=2), st.integers(0, 60), max_size=12)


def shown(page: Page, name: str) -> set[str]:
    """The values of the label `rank` under which a family is on the page."""
    body = page.render(Format.TEXT, compress=False)
    return {dict(labels)["rank"] for family, labels in read(body, Format.TEXT) if family == name}


@settings(deadline=None)
@given(rounds=st.lists(_DEMANDS, min_size=1, max_size=5), room=st.integers(0, 100))
def test_quotas_never_give_more_than_there_is_nor_cut_who_fits(
    rounds: list[dict[str, int]], room: int
) -> None:
    quotas: dict[str, int] = {}
    for demands in rounds:
        quotas = allocate(demands, room, quotas)

        assert sum(min(demand, quotas.get(family, demand)) for family, demand in demands.items()) <= room
        modest = {family for family, demand in demands.items() if demand <= room // len(demands)}
        assert not modest & quotas.keys()
        assert allocate(demands, room, quotas) == quotas


@settings(deadline=None)
@given(demands=_DEMANDS, room=st.integers(0, 100))
def test_all_of_the_room_is_given_away(demands: dict[str, int], room: int) -> None:
    quotas = allocate(demands, room, {})

    given_away = sum(min(demand, quotas.get(family, demand)) for family, demand in demands.items())
    assert given_away == min(room, sum(demands.values()))


def test_a_small_change_elsewhere_does_not_raise_a_quota() -> None:
    first = allocate({"big": 1000, "small": 50}, 500, {})

    assert first == {"big": 450}
    assert allocate({"big": 1000, "small": 10}, 500, first) == {"big": 450}
    assert allocate({"big": 1000, "small": 60}, 500, first) == {"big": 440}
    assert allocate({"big": 4000}, 1000, first) == {"big": 1000}


def test_a_family_that_runs_away_displaces_no_other() -> None:
    page = page_of(
        gauge("small", {"0": 1.0}), runaway("wild", range(5000)), runaway("usual", range(30)), max_series=100
    )
    page.publish("later", [runaway("late", range(20))])

    assert len(read(page.render(Format.TEXT, compress=False), Format.TEXT)) == 100
    assert shown(page, "usual") == {str(each) for each in range(30)}
    assert shown(page, "late") == {str(each) for each in range(20)}
    assert len(shown(page, "wild")) == 49


def test_two_families_that_run_away_share_what_is_left() -> None:
    page = page_of(
        runaway("wild", range(500)), runaway("usual", range(20)), runaway("mad", range(900)), max_series=100
    )

    assert [len(shown(page, name)) for name in ("wild", "usual", "mad")] == [40, 20, 40]


def test_a_cut_family_keeps_the_series_that_it_showed_first() -> None:
    page = page_of(runaway("wild", range(60)), max_series=50)
    first = shown(page, "wild")
    for seed in range(5):
        everything = [*range(200)]
        random.Random(seed).shuffle(everything)
        page.publish("block", [runaway("wild", everything)])

        assert shown(page, "wild") == first


def test_a_place_that_becomes_free_goes_to_the_next_series_and_stays_its() -> None:
    page = page_of(runaway("wild", range(12)), max_series=10)
    page.publish("block", [runaway("wild", range(5, 25))])

    assert shown(page, "wild") == {str(each) for each in range(5, 15)}
    page.publish("block", [runaway("wild", range(25))])
    assert shown(page, "wild") == {str(each) for each in range(5, 15)}


def test_other_blocks_are_cut_at_once_when_a_new_one_needs_room() -> None:
    page = page_of(runaway("wild", range(90)), max_series=100)
    assert len(shown(page, "wild")) == 90

    page.publish("later", [runaway("late", range(40))])

    assert (len(shown(page, "wild")), len(shown(page, "late"))) == (60, 40)
    assert shown(page, "wild") == {str(each) for each in range(60)}


def test_everything_is_back_when_the_cause_is_gone() -> None:
    page = page_of(runaway("usual", range(90)), max_series=100)
    page.publish("later", [runaway("wild", range(1000))])
    assert len(shown(page, "usual")) == 50

    page.withdraw("later")

    assert len(shown(page, "usual")) == 90


def test_bad_samples_do_not_use_up_the_places_of_good_ones() -> None:
    bad = tuple(Sample((f"bad{each}",), float("nan")) for each in range(50))
    good = tuple(Sample((f"good{each}",), 1.0) for each in range(20))
    page = page_of(Family(FamilySpec("wild", "gauge", "", ("rank",)), (*bad, *good)), max_series=10)

    assert shown(page, "wild") == {f"good{each}" for each in range(10)}


@pytest.mark.parametrize(("kind", "series"), [("histogram", 2 + 3), ("summary", 2)])
def test_a_distribution_counts_all_of_its_series(kind: str, series: int) -> None:
    spec = FamilySpec("wild", kind, "", ("rank",))  # type: ignore[arg-type]
    buckets = ((1.0, 1), (2.0, 2)) if kind == "histogram" else ()
    samples = tuple(Sample((str(each),), Distribution(3, 1.0, buckets)) for each in range(30))
    page = page_of(Family(spec, samples), max_series=series * 10 + 1)

    assert len(read(page.render(Format.OPENMETRICS, compress=False), Format.OPENMETRICS)) == series * 10
    page.watch("self", page.families)
    page.render(Format.TEXT, compress=False)
    assert value(page, "exporter_series_dropped_total", family="wild") is not None


def test_a_publish_counts_each_series_that_it_leaves_out_once() -> None:
    page = page_of(runaway("wild", range(130)), runaway("usual", range(20)), max_series=100)
    page.render(Format.TEXT, compress=False)
    families = {family.spec.name: family.samples for family in page.families()}
    assert families["exporter_series_dropped_total"] == (Sample(("wild",), 50),)

    page.publish("block", [runaway("wild", range(130)), runaway("usual", range(20))])

    families = {family.spec.name: family.samples for family in page.families()}
    assert families["exporter_series_dropped_total"] == (Sample(("wild",), 100),)
    assert families["exporter_series"] == (Sample((), 100),)
    assert Sample(("cap",), 100) in families["exporter_series_dropped_by_reason_total"]


def test_a_block_that_is_cut_for_another_counts_only_what_that_cost_it() -> None:
    page = page_of(runaway("wild", range(120)), max_series=100)
    page.render(Format.TEXT, compress=False)

    page.publish("later", [runaway("late", range(10))])
    page.publish("later", [runaway("late", range(10))])

    (dropped,) = [
        each.samples for each in page.families() if each.spec.name == "exporter_series_dropped_total"
    ]
    assert dropped == (Sample(("wild",), 20 + 10),)


def test_the_exporters_own_numbers_have_room_before_all_others() -> None:
    page = page_of(runaway("wild", range(5000)), max_series=60)
    page.watch("self", page.families)

    found = read(page.render(Format.OPENMETRICS, compress=False), Format.OPENMETRICS)

    assert len(found) == 60
    assert value(page, "exporter_series_limit") == 60.0
    assert value(page, "exporter_series_dropped_by_reason_total", reason="value") == 0.0


def test_even_the_exporters_own_numbers_are_cut_at_the_cap() -> None:
    page = page_of(gauge("usual", {"0": 1.0}), max_series=10)
    page.watch("self", lambda: [runaway("own", range(50))])

    assert len(read(page.render(Format.TEXT, compress=False), Format.TEXT)) == 10


def test_names_that_run_away_share_one_count_and_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    page = Page()
    page.render(Format.TEXT, compress=False)
    for each in range(1000):
        page.publish("block", [gauge(f"bad_{each}", {"0": float("nan")})])
    page.watch("self", page.families)

    assert text_of(page).count("\nexporter_series_dropped_total{") == 201
    assert value(page, "exporter_series_dropped_total", family="<other>") == 800.0
    assert 0 < len(caplog.records) <= 20


def test_a_page_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="found 0"):
        Page(max_series=0)
