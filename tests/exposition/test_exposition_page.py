"""The page: blocks that come, change and go, from any thread, and bodies that are whole at every moment."""

from __future__ import annotations

import logging
import random
import re
import shutil
import subprocess
import threading
from collections.abc import Sequence

import pytest
from exposition_support import gauge, page_of, read, runaway, text_of, value

from exporter.collectors.family import Distribution, Family, FamilySpec, Sample
from exporter.exposition.negotiation import Format
from exporter.exposition.page import SPECS, Page


def names(page: Page) -> list[str]:
    """The families of a page in their order."""
    return re.findall(r"^# TYPE (\S+)", text_of(page), re.MULTILINE)


def test_a_publish_replaces_the_whole_block() -> None:
    page = page_of(gauge("a", {"0": 1.0, "1": 2.0}), gauge("b", {"0": 1.0}))
    page.publish("block", [gauge("a", {"1": 3.0})])

    assert read(page.render(Format.TEXT, compress=False), Format.TEXT) == {("a", (("rank", "1"),)): 3.0}


def test_a_withdrawn_block_is_gone_and_may_come_back() -> None:
    page = page_of(gauge("a", {"0": 1.0}))
    page.withdraw("block")
    page.withdraw("never there")
    assert text_of(page) == ""

    page.publish("block", [gauge("a", {"0": 2.0})])

    assert value(page, "a", rank="0") == 2.0


def test_blocks_stand_in_the_order_of_their_names_whenever_they_came() -> None:
    page = Page()
    for name in ("c", "a", "b"):
        page.publish(name, [gauge(f"{name}1", {"0": 1.0}), gauge(f"{name}0", {"0": 1.0})])
    page.watch("aa", lambda: [gauge("own", {"0": 1.0})])

    assert names(page) == ["a1", "a0", "b1", "b0", "c1", "c0", "own"]


def test_an_openmetrics_body_ends_with_its_mark() -> None:
    page = page_of(gauge("a", {"0": 1.0}))
    page.watch("self", page.families)

    assert page.render(Format.OPENMETRICS, compress=False).endswith(b"\n# EOF\n")
    assert b"# EOF" not in page.render(Format.TEXT, compress=False)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("steps_total", "counter"), ("steps_total", "counter")),
        (("steps_total", "counter"), ("steps", "gauge")),
        (("steps", "gauge"), ("steps_total", "counter")),
        (("steps_total", "counter"), ("steps_total", "gauge")),
        (("run_info", "info"), ("run", "gauge")),
        (("run_info", "info"), ("run_info", "gauge")),
        (("size", "summary"), ("size_count", "gauge")),
        (("size_sum", "gauge"), ("size", "histogram")),
        (("size_bucket", "gauge"), ("size", "histogram")),
        (("steps_created", "gauge"), ("steps_total", "counter")),
    ],
)
def test_names_that_meet_are_served_for_the_first_family_only(
    first: tuple[str, str], second: tuple[str, str]
) -> None:
    one, two = (
        Family(FamilySpec(name, kind, "h"), (Sample((), Distribution(1, 1.0) if kind[-1] in "my" else 1.0),))  # type: ignore[arg-type]
        for name, kind in (first, second)
    )
    alone, together, apart = page_of(one), page_of(one, two), page_of(one)
    apart.publish("a later one", [two])
    body = {form: alone.render(form, compress=False) for form in Format}

    assert {form: together.render(form, compress=False) for form in Format} == body
    assert {form: apart.render(form, compress=False) for form in Format} == body
    page = apart
    page.watch("self", page.families)
    assert (value(page, "exporter_series_dropped_by_reason_total", reason="duplicate") or 0) > 0


def test_a_name_is_kept_as_long_as_its_block_has_it_and_then_free() -> None:
    page = page_of(gauge("a", {"0": 1.0}))
    page.publish("later", [gauge("a", {"0": 2.0}), gauge("b", {"0": 2.0})])
    page.publish("block", [gauge("a", {"0": 3.0})])
    assert (value(page, "a", rank="0"), value(page, "b", rank="0")) == (3.0, 2.0)

    page.publish("block", [gauge("c", {"0": 4.0})])
    page.publish("later", [gauge("a", {"0": 5.0})])

    assert value(page, "a", rank="0") == 5.0


def test_a_watched_block_is_made_anew_at_every_scrape() -> None:
    page = Page()
    made: list[float] = []

    def families() -> Sequence[Family]:
        made.append(1.0)
        return [gauge("own", {"0": float(len(made))})]

    page.watch("self", families)

    assert [value(page, "own", rank="0") for _ in range(3)] == [1.0, 2.0, 3.0]


def test_a_watched_block_that_raises_is_missing_alone_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    page = page_of(gauge("a", {"0": 1.0}))
    page.watch("broken", lambda: [gauge("b", {"0": 1 / 0})])
    page.watch("no list", lambda: None)  # type: ignore[arg-type, return-value]
    page.watch("self", page.families)

    with caplog.at_level(logging.WARNING):
        text_of(page)
        text_of(page)

    assert value(page, "a", rank="0") == 1.0
    assert value(page, "exporter_block_failures_total", block="broken") == 4.0
    assert value(page, "exporter_block_failures_total", block="no list") == 5.0
    assert value(page, "exporter_block_failures_total", block="self") == 0.0
    assert [record.args for record in caplog.records] == [("broken",), ("no list",)]


def test_a_published_family_gives_way_to_a_watched_one() -> None:
    page = page_of(gauge("own", {"0": 1.0}), gauge("a", {"0": 1.0}))
    assert value(page, "own", rank="0") == 1.0

    page.watch("self", lambda: [gauge("own", {"0": 2.0})])
    assert value(page, "own", rank="0") == 2.0
    page.publish("block", [gauge("own", {"0": 3.0}), gauge("a", {"0": 4.0})])

    assert value(page, "own", rank="0") == 2.0
    assert value(page, "a", rank="0") == 4.0


def test_a_block_that_gives_way_counts_what_that_cost_it_only() -> None:
    page = page_of(gauge("own", {"0": 1.0}), gauge("a", {"0": float("nan")}))
    page.watch("self", lambda: [gauge("own", {"0": 2.0})])
    text_of(page)

    (dropped,) = [
        each.samples for each in page.families() if each.spec.name == "exporter_series_dropped_total"
    ]
    assert dropped == (Sample(("a",), 1), Sample(("own",), 1))


def test_a_watched_block_can_be_replaced_and_withdrawn() -> None:
    page = Page()
    page.watch("self", lambda: [gauge("own", {"0": 1.0})])
    page.watch("self", lambda: [gauge("own", {"0": 2.0})])
    assert value(page, "own", rank="0") == 2.0

    page.withdraw("self")

    assert text_of(page) == ""


def test_the_snapshot_has_what_a_scrape_would_show() -> None:
    page = page_of(gauge("a", {"0": 1.0, "1": float("nan")}), gauge("a-b", {"0": 1.0}))
    page.watch("self", lambda: [gauge("own", {"0": 1.0})])

    assert page.snapshot() == (gauge("a", {"0": 1.0}), gauge("own", {"0": 1.0}))


def test_the_pages_own_families_are_those_that_are_documented() -> None:
    page = page_of(gauge("a", {"0": float("nan")}))

    assert tuple(family.spec for family in page.families()) == SPECS


def test_the_forms_of_the_last_minute_are_made_at_the_publish() -> None:
    now = [1000.0]
    page = Page(clock=lambda: now[0])
    page.publish("block", [gauge("a", {"0": 1.0})])
    assert not page._blocks

    page.render(Format.OPENMETRICS, compress=True)
    page.publish("block", [gauge("a", {"0": 2.0})])
    assert (*page._blocks[0].fragments,) == (Format.OPENMETRICS,)
    assert Format.TEXT not in page._blocks[0].plains

    written, now[0] = page._blocks, now[0] + 61.0
    page.publish("block", [gauge("a", {"0": 3.0})])
    assert page._blocks is written
    assert page.render(Format.OPENMETRICS, compress=False).count(b"3.0") == 1


def test_what_is_left_out_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        page = page_of(gauge("a", {"0": float("nan"), "1": float("nan")}))
        page.render(Format.TEXT, compress=False)
        page.publish("block", [gauge("a", {"0": float("nan")})])

    assert [record.getMessage() for record in caplog.records] == [
        "2 series of a are left out of the page, reason: value"
    ]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_wrong_with_a_page() -> None:
    latency = FamilySpec("training_latency_seconds", "histogram", "Time of a batch.", ("rank",), "seconds")
    page = page_of(
        gauge("training_loss", {'"\\\n é\0\r': -1e300, "1": float("inf")}),
        Family(latency, (Sample(("0",), Distribution(3, 1.5, ((0.5, 1), (1.0, 2)))),)),
        gauge("training_nothing", {"0": float("nan")}),
    )
    page.publish("two", [Family(FamilySpec("training_steps_total", "counter", "Steps."), (Sample((), 7),))])
    page.watch("self", page.families)

    answer = subprocess.run(
        ["promtool", "check", "metrics"],
        input=page.render(Format.TEXT, compress=False),
        capture_output=True,
        check=False,
    )

    assert (answer.returncode, answer.stdout, answer.stderr) == (0, b"", b"")


def _churn(page: Page, name: str, stop: threading.Event, failures: list[BaseException]) -> None:
    """Publish and withdraw one block; every value of a publish is the same number."""
    source = random.Random(name)
    try:
        while not stop.is_set():
            mark = float(source.randrange(1_000_000))
            size = source.choice([0, 1, 30, 60])
            page.publish(
                name, [gauge(f"{name}_{part}", dict.fromkeys(map(str, range(size)), mark)) for part in "xy"]
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
        threading.Thread(target=_churn, args=(page, name, stop, failures)) for name in ("a", "b", "c")
    ]
    bodies: list[dict[str, set[float]]] = []

    def scrape(form: Format) -> None:
        for _ in range(25):
            found = read(page.render(form, compress=False), form)
            blocks: dict[str, set[float]] = {"a": set(), "b": set(), "c": set()}
            for (name, _labels), number in found.items():
                blocks.get(name[0], set()).add(number)
            bodies.append(blocks)
            assert len(found) <= 250

    scrapers = [threading.Thread(target=scrape, args=(form,)) for form in (*Format, Format.OPENMETRICS)]
    for thread in (*publishers, *scrapers):
        thread.start()
    for thread in scrapers:
        thread.join()
    stop.set()
    for thread in publishers:
        thread.join()

    assert failures == []
    assert len(bodies) == 75
    assert all(len(marks) <= 1 for blocks in bodies for marks in blocks.values())
    assert any(marks for blocks in bodies for marks in blocks.values())


def test_a_scrape_does_not_wait_for_a_publisher() -> None:
    page = page_of(runaway("a", range(10)))
    page.render(Format.TEXT, compress=False)

    with page._settling:  # as while another thread writes a large block
        answers: list[bytes] = []
        scrape = threading.Thread(target=lambda: answers.append(page.render(Format.TEXT, compress=True)))
        scrape.start()
        scrape.join(10.0)
        assert len(answers) == 1
