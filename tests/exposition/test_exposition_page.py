"""Page of metrics: blocks published and withdrawn by any thread, and complete bodies at any time."""

from __future__ import annotations

import gzip
import logging
import random
import threading
import zlib
from collections.abc import Sequence
from typing import Any

import pytest
from exposition_support import dropped_series, gauge, page_of, parse, text_of, value, wide_gauge
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from waiting import wait_until

import exporter.exposition.page
from exporter.exposition.compression import CompressedPart
from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page
from exporter.exposition.text import FamilyText, write
from exporter.families import Distribution, Family, Precedence


def test_a_publish_replaces_the_whole_block() -> None:
    page = page_of(gauge("a", {"0": 1.0, "1": 2.0}), gauge("b", {"0": 1.0}))
    text_of(page)
    page.publish("block", [gauge("a", {"1": 3.0})])

    assert parse(page.render(Format.TEXT), Format.TEXT) == {("a", (("rank", "1"),)): 3.0}


@pytest.mark.parametrize("form", Format)
def test_a_compressed_body_is_one_gzip_member_with_the_bytes_of_the_page(form: Format) -> None:
    page = Page()
    page.watch("watched", lambda: [gauge("watched", {"0": 1.0})])
    for number in (1.0, 2.0):  # the blocks of the second round are compressed when they are published
        page.publish("a", [gauge("a", {"0": number})], early=True)
        page.publish("b", [gauge("b", {"0": number})])
        page.publish("c", [], early=True)
        page.publish("d", [gauge("d", {"0": number}), wide_gauge("e", 500)], early=True)
        decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        body = decompressor.decompress(page.render_gzip(form))

        assert body == page.render(form)
        assert decompressor.eof is True
        assert decompressor.unused_data == b""


def test_an_empty_page_is_compressed_to_an_empty_body() -> None:
    assert gzip.decompress(Page().render_gzip(Format.TEXT)) == b""


def test_a_compressed_body_has_the_values_of_the_scrape() -> None:
    page, values = Page(), iter((1.0, 2.0, 3.0, 4.0))
    page.watch("watched", lambda: [gauge("watched", {"0": next(values)})])
    page.publish("block", [gauge("a", {"0": 1.0})], early=True)
    page.render_gzip(Format.TEXT)
    page.publish("block", [gauge("a", {"0": 2.0})], early=True)
    page.render_gzip(Format.TEXT)
    page.publish("late", [gauge("b", {"0": 5.0})], early=True)

    body = parse(gzip.decompress(page.render_gzip(Format.TEXT)), Format.TEXT)

    assert {name: number for (name, _), number in body.items()} == {"a": 2.0, "b": 5.0, "watched": 3.0}


def test_an_early_block_is_compressed_when_it_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    page, compressed = Page(), []

    def compress_and_note_size(data: bytes) -> CompressedPart:
        compressed.append(len(data))
        return CompressedPart(data)

    page.publish("block", [wide_gauge("a", 500)], early=True)
    page.render_gzip(Format.TEXT)  # from now on, publications are compressed in this format
    monkeypatch.setattr(exporter.exposition.page, "CompressedPart", compress_and_note_size)
    page.publish("block", [wide_gauge("a", 500)], early=True)
    sizes_of_publication = list(compressed)
    compressed.clear()
    page.render_gzip(Format.TEXT)

    assert sizes_of_publication == [len(page.render(Format.TEXT))]
    assert sum(compressed) == 0


def test_a_withdrawn_block_disappears_and_can_be_published_again() -> None:
    page = page_of(gauge("a", {"0": 1.0}))
    page.withdraw("block")
    page.withdraw("never there")
    assert text_of(page) == ""

    page.publish("block", [gauge("a", {"0": 2.0})])

    assert value(page, "a", rank="0") == 2.0


@pytest.mark.parametrize(
    ("first_name_and_type", "second_name_and_type"),
    [
        (("steps_total", "counter"), ("steps_total", "counter")),
        (("steps_total", "counter"), ("steps", "gauge")),
        (("steps", "gauge"), ("steps_total", "counter")),
        (("steps_total", "counter"), ("steps_total", "gauge")),
        (("run_info", "info"), ("run", "gauge")),
        (("size", "summary"), ("size_count", "gauge")),
        (("size_bucket", "gauge"), ("size", "histogram")),
        (("steps_created", "gauge"), ("steps_total", "counter")),
    ],
)
def test_colliding_names_are_served_for_the_first_family_only(
    first_name_and_type: tuple[str, str], second_name_and_type: tuple[str, str]
) -> None:
    first_family, second_family = (
        Family(name=name, type=metric_type, help="h").family(  # type: ignore[arg-type]
            {(): Distribution(1, 1.0) if metric_type in {"histogram", "summary"} else 1.0}
        )
        for name, metric_type in (first_name_and_type, second_name_and_type)
    )
    same_block, separate_blocks = page_of(first_family, second_family), page_of(first_family)
    separate_blocks.publish("a later one", [second_family])

    for form in Format:
        assert same_block.render(form) == separate_blocks.render(form) == page_of(first_family).render(form)
    assert dropped_series(separate_blocks, second_name_and_type[0], "duplicate") > 0


def test_a_name_is_reserved_while_its_block_uses_it() -> None:
    page = page_of(gauge("a", {"0": 1.0}))
    page.publish("later", [gauge("a", {"0": 2.0}), gauge("b", {"0": 2.0})])
    page.publish("block", [gauge("a", {"0": 3.0})])
    assert value(page, "a", rank="0") == 3.0
    assert value(page, "b", rank="0") == 2.0

    page.publish("block", [gauge("c", {"0": 4.0})])

    assert value(page, "a", rank="0") == 2.0


def test_a_published_family_gives_way_to_a_watched_one() -> None:
    page = page_of(gauge("own", {"0": 1.0}), gauge("a", {"0": 1.0}))
    assert value(page, "own", rank="0") == 1.0

    page.watch("self", lambda: [gauge("own", {"0": 2.0})])

    assert value(page, "own", rank="0") == 2.0
    assert value(page, "a", rank="0") == 1.0


def test_a_failing_watched_block_is_absent_alone_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    page = page_of(gauge("a", {"0": 1.0}))
    page.watch("broken", lambda: [gauge("b", {"0": 1 / 0})])
    page.watch("self", page.families)

    with caplog.at_level(logging.WARNING):
        text_of(page)

    assert value(page, "a", rank="0") == 1.0
    assert value(page, "b", rank="0") is None
    assert value(page, "exporter_series_limit") is not None
    assert [record.args for record in caplog.records] == [("broken",)]


def test_a_block_is_written_once_for_all_scrapes_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    written_names: list[str] = []

    def count_writes(metric: Metric, previous: FamilyText | None = None) -> FamilyText:
        written_names.append(metric.name)
        return write(metric, previous)

    monkeypatch.setattr(exporter.exposition.page, "write", count_writes)
    page = page_of(gauge("a", {"0": 1.0}))
    page.publish("other", [gauge("b", {"0": 1.0})])
    assert written_names == []

    for form in (*Format, *Format):
        page.render(form)
    page.publish("block", [gauge("a", {"0": 2.0})])
    page.publish("block", [gauge("a", {"0": 3.0})])
    page.render(Format.TEXT)

    assert written_names == ["a", "b", "a"]


def test_publishing_never_waits_for_a_scrape() -> None:
    page, is_scraping, release = page_of(gauge("a", {"0": 1.0})), threading.Event(), threading.Event()

    def hang() -> Sequence[Metric]:
        is_scraping.set()
        release.wait()
        return []

    page.watch("hanging", hang)
    scrape = threading.Thread(target=page.render, args=(Format.TEXT,), daemon=True)
    scrape.start()
    is_scraping.wait()
    page.publish("block", [gauge("a", {"0": 2.0})])
    page.withdraw("other")
    release.set()
    scrape.join()

    assert value(page, "a", rank="0") == 2.0


@pytest.mark.parametrize("form", [Format.TEXT, Format.OPENMETRICS])
@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["loss"], ["loss"]),
        (["steps_total"], ["steps_total"]),
        (["steps"], ["steps_total"]),
        (["wait_count"], ["wait_bucket", "wait_count", "wait_sum"]),
        (["lo*", "st*"], ["loss", "steps_total"]),
        (["lo?s", "[l]oss", "none"], []),
    ],
)
def test_families_can_be_selected_by_name_or_prefix(
    form: Format, patterns: list[str], expected: list[str]
) -> None:
    page = page_of(
        gauge("loss", {"0": 0.5}),
        Family(name="steps_total", type="counter", help="Steps.").family({(): 7}),
        Family(name="wait", type="histogram", help="Waits.").family({(): Distribution(3, 4.5)}),
    )

    body = page.render(form, patterns)

    assert sorted(name for name, _ in parse(body, form)) == expected


def test_the_snapshot_has_the_content_of_a_scrape() -> None:
    page = page_of(gauge("a", {"0": 1.0}), Metric("a-b", "", "gauge"))
    page.watch("self", lambda: [gauge("own", {"0": 1.0})])

    assert page.snapshot() == [gauge("a", {"0": 1.0}), gauge("own", {"0": 1.0})]
    assert [metric.name for metric in page.unrendered_families()] == ["a", "a-b", "own"]


def test_dropped_series_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        page = page_of(gauge("a", {"0": float("nan"), "1": float("nan")}))
        text_of(page)
        page.publish("block", [gauge("a", {"0": float("nan")})])
        text_of(page)

    assert [record.getMessage() for record in caplog.records] == [
        "2 series of a are left out of the page, reason: value"
    ]
    assert dropped_series(page, "a", "value") == 3


def test_unbounded_names_share_one_counter_and_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    page = page_of(*(gauge(f"bad_{index}", {"0": float("nan")}) for index in range(1000)))
    text_of(page)

    counter = next(family for family in page.families() if family.name == "exporter_series_dropped")
    assert len(counter.samples) == 200 + 1  # 200 names, and the other names together
    assert dropped_series(page, "<other>", "value") == 800
    assert 0 < len(caplog.records) <= 20


def publish_and_withdraw(page: Page, name: str, stop: threading.Event, failures: list[BaseException]) -> None:
    """Publish and withdraw a block. All values of a publication are equal."""
    source = random.Random(name)
    try:
        while not stop.wait(0.001):
            value = float(source.randrange(1_000_000))
            size = source.choice([0, 1, 30, 60])
            page.publish(
                name, [gauge(f"{name}_{part}", dict.fromkeys(map(str, range(size)), value)) for part in "xy"]
            )
            if source.random() < 0.2:
                page.withdraw(name)
    except BaseException as failure:
        failures.append(failure)
        raise


def test_bodies_are_whole_while_many_threads_publish_withdraw_and_render() -> None:
    page = Page(max_series=250)
    page.watch("self", page.families)
    stop, failures = threading.Event(), list[BaseException]()
    publishers = [
        threading.Thread(target=publish_and_withdraw, args=(page, name, stop, failures))
        for name in ("a", "b", "c")
    ]
    bodies: list[dict[str, set[float]]] = []
    series_counts: list[int] = []

    def scrape(form: Format) -> None:
        """Scrape at least 25 times, and until a publication was on the page: a busy machine may run no publisher for long."""
        scrape_count, has_values = 0, False
        while not stop.is_set() and (scrape_count < 25 or not has_values):
            series_values = parse(page.render(form), form)
            blocks: dict[str, set[float]] = {"a": set(), "b": set(), "c": set()}
            for (name, _labels), series_value in series_values.items():
                blocks.get(name[0], set()).add(series_value)
            bodies.append(blocks)
            series_counts.append(len(series_values))
            scrape_count, has_values = scrape_count + 1, has_values or any(blocks.values())

    scrapers = [
        threading.Thread(target=scrape, args=(form,))
        for form in (Format.TEXT, Format.OPENMETRICS, Format.OPENMETRICS)
    ]
    for publisher in publishers:
        publisher.start()
    for scraper in scrapers:
        scraper.start()
    try:
        wait_until(lambda: not any(scraper.is_alive() for scraper in scrapers))
    finally:
        stop.set()
    for thread in publishers:
        thread.join()

    assert failures == []
    assert len(bodies) >= 75
    assert all(len(values) <= 1 for blocks in bodies for values in blocks.values())
    assert max(series_counts) <= 250


# The cap on series ----------------------------------------------------------------------------------------------------


def stat_gauge(name: str, series_count: int, precedence: Precedence) -> Metric:
    spec = Family(name=name, type="gauge", help="", labels=("run",), precedence=precedence)
    return spec.lazy_family({(f"r{index}",): 1.0 for index in range(series_count)})


def stat_summary(name: str, series_count: int) -> Metric:
    spec = Family(name=name, type="summary", help="", labels=("run",))
    return spec.lazy_family({(f"r{index}",): Distribution(1, 1.0) for index in range(series_count)})


def shown_series(page: Page, name: str, **labels: str) -> int:
    """Return the number of series of a family with these labels on the page."""
    body = parse(page.render(Format.TEXT), Format.TEXT)
    return sum(family == name and labels.items() <= dict(pairs).items() for family, pairs in body)


def test_an_unbounded_family_displaces_no_other_family() -> None:
    page = page_of(wide_gauge("small", 1), wide_gauge("wild", 5000), wide_gauge("usual", 30), max_series=100)
    page.publish("later", [wide_gauge("late", 20)])

    assert [shown_series(page, name) for name in ("small", "usual", "late", "wild")] == [1, 30, 20, 49]
    assert dropped_series(page, "wild", "cap") >= 4951


def test_families_of_the_exporter_precede_stats_of_users_under_the_cap() -> None:
    stats = [wide_gauge(f"user_stat_{index}", 40, run="a") for index in range(50)]
    exporter_families = [
        wide_gauge(name, 30) for name in ("host_cpu_seconds", "cgroup_memory_bytes", "training_attempt")
    ]
    page = page_of(*stats, *exporter_families, max_series=200)

    assert [shown_series(page, family.name) for family in exporter_families] == [30, 30, 30]
    assert sum(shown_series(page, stat.name) for stat in stats) == 110


@given(
    cap=st.integers(1, 60),
    totals=st.lists(st.integers(1, 12), max_size=4),
    samples=st.lists(st.integers(1, 12), max_size=4),
    windows=st.lists(st.integers(1, 12), max_size=4),
    host_series=st.integers(0, 10),
)
def test_no_window_gauge_is_shown_while_a_total_is_left_out(
    cap: int, totals: list[int], samples: list[int], windows: list[int], host_series: int
) -> None:
    gauges = [stat_gauge(f"window_{index}", size, Precedence.WINDOW) for index, size in enumerate(windows)]
    counts = [stat_gauge(f"samples_{index}", size, Precedence.SAMPLES) for index, size in enumerate(samples)]
    page = page_of(
        *gauges, *counts, *[stat_summary(f"total_{index}", size) for index, size in enumerate(totals)]
    )
    page = page_of(*page.unrendered_families(), wide_gauge("host_memory_bytes", host_series), max_series=cap)
    body = parse(page.render(Format.TEXT), Format.TEXT)
    shown = [
        sum(name.startswith(prefix) for name, _ in body) for prefix in ("host", "total", "samples", "window")
    ]

    expected = [host_series, 2 * sum(totals), sum(samples), sum(windows)]
    # After the first kind that is left out in part, no series of the following kinds are shown.
    incomplete_kinds = [
        index for index, (count, total) in enumerate(zip(shown, expected, strict=True)) if count < total
    ]
    if incomplete_kinds:
        assert not any(shown[incomplete_kinds[0] + 1 :])


def test_runs_share_the_series_cap_fairly() -> None:
    wild = [wide_gauge(f"wild_{index}", 10, run="wild") for index in range(100)]
    page = page_of(*wild, wide_gauge("modest", 40, run="modest"), max_series=100)

    assert shown_series(page, "modest", run="modest") == 40
    assert sum(shown_series(page, family.name) for family in wild) == 60


def test_only_the_unbounded_run_of_a_shared_stat_is_cut() -> None:
    spec = Family(name="stat", type="gauge", help="A stat.", labels=("run", "rank"))
    runs: dict[tuple[str, ...], float | Distribution] = {("wild", str(index)): 1.0 for index in range(500)}
    runs.update({("modest", str(index)): 1.0 for index in range(20)})
    page = page_of(spec.family(runs), max_series=100)

    assert shown_series(page, "stat", run="modest") == 20
    assert shown_series(page, "stat", run="wild") == 80


def test_a_cut_family_keeps_its_first_series_while_others_change_a_little() -> None:
    page = page_of(wide_gauge("wild", 500), wide_gauge("usual", 50), max_series=100)
    initial_series = parse(page.render(Format.TEXT), Format.TEXT).keys()
    page.publish("block", [wide_gauge("wild", 500), wide_gauge("usual", 45)])

    assert initial_series - parse(page.render(Format.TEXT), Format.TEXT).keys() == {
        ("usual", (("rank", str(index)),)) for index in range(45, 50)
    }


def test_all_series_return_after_the_cause_is_removed() -> None:
    page = page_of(wide_gauge("usual", 90), max_series=100)
    page.publish("later", [wide_gauge("wild", 1000)])
    assert shown_series(page, "usual") == 50

    page.withdraw("later")

    assert shown_series(page, "usual") == 90


@pytest.mark.parametrize(("metric_type", "series"), [("histogram", 2 + 3), ("summary", 2)])
def test_a_distribution_is_shown_whole_or_not_at_all(metric_type: str, series: int) -> None:
    spec = Family(name="wild", type=metric_type, help="", labels=("rank",))  # type: ignore[arg-type]
    buckets = ((1.0, 1), (2.0, 2)) if metric_type == "histogram" else ()
    page = page_of(
        spec.family({(str(index),): Distribution(3, 1.0, buckets) for index in range(30)}),
        max_series=series * 10 + 1,
    )

    assert len(parse(page.render(Format.OPENMETRICS), Format.OPENMETRICS)) == series * 10


def test_a_summary_of_a_third_party_collector_keeps_its_quantiles_or_is_not_shown() -> None:
    summary = Metric("wild", "", "summary")
    for rank in range(30):
        for quantile in ("0.5", "0.9", "0.99"):
            summary.add_sample("wild", {"rank": str(rank), "quantile": quantile}, 1.0)
        summary.add_sample("wild_count", {"rank": str(rank)}, 3.0)
        summary.add_sample("wild_sum", {"rank": str(rank)}, 1.0)
    page = page_of(summary, max_series=5 * 10 + 3)

    assert len(parse(page.render(Format.TEXT), Format.TEXT)) == 5 * 10


def test_metrics_about_the_exporter_have_the_highest_priority() -> None:
    page = page_of(wide_gauge("host_wild", 5000), max_series=60)
    page.watch("self", page.families)
    text_of(page)

    assert len(parse(page.render(Format.OPENMETRICS), Format.OPENMETRICS)) <= 60
    assert value(page, "exporter_series_limit") == 60.0
    assert (value(page, "exporter_series_dropped_total", family="host_wild", reason="cap") or 0) > 0


@pytest.mark.parametrize(
    "invalid_samples",
    [
        pytest.param([Sample("wild", None, 1.0)], id="no labels"),  # type: ignore[arg-type]  # invalid on purpose
        pytest.param(
            [Sample("wild", {"run": 1, "rank": str(rank)}, 1.0) for rank in range(30)],  # type: ignore[dict-item]
            id="number as the run",
        ),
        pytest.param([Sample("wild", {"run": ["a"]}, 1.0)], id="list as the run"),  # type: ignore[dict-item]
        pytest.param([1.0], id="no sample"),
        pytest.param(None, id="no samples"),
    ],
)
def test_a_full_page_shows_the_other_families_of_an_invalid_collector(invalid_samples: Any) -> None:
    wild = Metric("wild", "Wild.", "gauge")
    wild.samples = invalid_samples and [*invalid_samples, *wide_gauge("wild", 30, run="a").samples]
    page = page_of(wild, wide_gauge("usual", 1, run="a"), wide_gauge("many", 30, run="b"), max_series=20)

    assert shown_series(page, "usual") == 1
    assert 0 < shown_series(page, "many") < 20
    assert len(parse(page.render(Format.TEXT), Format.TEXT)) <= 20


def test_a_block_published_early_is_not_rendered_by_the_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    written_names: list[str] = []

    def count_writes(metric: Metric, previous: FamilyText | None = None) -> FamilyText:
        written_names.append(metric.name)
        return write(metric, previous)

    monkeypatch.setattr(exporter.exposition.page, "write", count_writes)
    page = Page()
    page.publish("block", [gauge("a", {"0": 1.0}), gauge("b", {"0": 1.0})], early=True)
    page.publish("block", [gauge("a", {"0": 2.0}), gauge("b", {"0": 1.0})], early=True)
    early_names = list(written_names)

    assert value(page, "a", rank="0") == 2.0
    assert early_names == ["a", "b", "a"]
    assert written_names == early_names
