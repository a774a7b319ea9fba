"""Which Stats may share a family, and what happens to those that may not."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_support import START, Sidecar, a_definition, a_process, a_reading, a_snapshot

from exporter.recording.values import Aggregation, StatDefinition, WindowReading

WINDOW = WindowReading(START - 60, START, 1, {Aggregation.MEAN: 0.5})


@pytest.fixture
def sidecar(tmp_path: Path) -> Sidecar:
    return Sidecar(tmp_path)


def runs(
    sidecar: Sidecar, rank: int, *definitions: StatDefinition, sequence: int = 1, started: float = START
) -> None:
    """Let a rank's process show these Stats, with as many samples each as its number and one."""
    process = a_process(rank=rank, id=f"{rank:032x}", started=started + rank)
    readings = [a_reading(each, [0.5] * (rank + 1), window=WINDOW) for each in definitions]
    sidecar.feed.put(a_snapshot(process, *readings, sequence=sequence))


def dropped(sidecar: Sidecar, rank: int) -> object:
    page = sidecar.after(1)
    return page.get("training_feed_dropped_total", run="r", rank=str(rank), reason="definition")


CONFLICTS = {
    "unit": (a_definition("a", unit="seconds"), a_definition("a_seconds")),
    "buckets": (a_definition("a", buckets=(1.0,)), a_definition("a", buckets=(2.0,))),
    "type": (a_definition("a", buckets=(1.0,)), a_definition("a")),
    "sample name": (a_definition("a", buckets=(1.0,)), a_definition("a.bucket")),
    "sum and family": (a_definition("a"), a_definition("a.sum")),
    "window gauge and family": (a_definition("a"), a_definition("a.window.mean")),
    "window gauges of two": (a_definition("a", unit="seconds"), a_definition("a")),
}


@pytest.mark.parametrize(("first", "second"), CONFLICTS.values(), ids=CONFLICTS)
def test_the_first_living_definition_stands_and_the_other_is_counted(
    sidecar: Sidecar, first: StatDefinition, second: StatDefinition
) -> None:
    runs(sidecar, 1, second)
    runs(sidecar, 0, first)

    page = sidecar.collect()

    ranks = {
        labels["rank"]
        for family in page.families.values()
        if family.name.startswith("a")
        for labels, _ in family.samples
    }
    assert ranks == {"0"}
    assert page.get("training_feed_dropped_total", run="r", rank="1", reason="definition") == 1
    assert page.get("training_feed_dropped_total", run="r", rank="0", reason="definition") is None


def test_a_holder_stays_whoever_comes_later(sidecar: Sidecar) -> None:
    runs(sidecar, 1, a_definition("a", buckets=(1.0,)))
    sidecar.collect()
    runs(sidecar, 0, a_definition("a", buckets=(2.0,)))

    page = sidecar.after(1)

    assert page.count("a", run="r", rank="1") == 2
    assert page.count("a", run="r", rank="0") is None


def test_when_the_holder_has_died_the_other_takes_the_family_with_all_it_counted(sidecar: Sidecar) -> None:
    runs(sidecar, 0, a_definition("a", buckets=(1.0,)))
    runs(sidecar, 1, a_definition("a", buckets=(2.0,)))
    sidecar.collect()
    sidecar.feed.kill(sidecar.feed.files[f"{0:032x}"].snapshot.process)
    sidecar.after(1)
    runs(sidecar, 1, a_definition("a", buckets=(2.0,)), sequence=2)

    page = sidecar.after(1)

    assert page.count("a", run="r", rank="1") == 2
    assert page.count("a", run="r", rank="0") is None, "what lingers gives way to the living"


def test_help_may_differ_and_the_first_is_shown(sidecar: Sidecar) -> None:
    runs(sidecar, 0, a_definition("a", help="First."))
    runs(sidecar, 1, a_definition("a", help="Second."))

    page = sidecar.collect()

    assert page.families["a"].help == "First."
    assert len(page.families["a"].samples) == 2


def test_a_family_has_the_union_of_the_labels_of_its_stats(sidecar: Sidecar) -> None:
    runs(sidecar, 0, a_definition("a", labels=(("split", "dev"),)), a_definition("a"))
    runs(sidecar, 1, a_definition("a", labels=(("data", "x"), ("split", "dev"))))

    page = sidecar.collect()

    assert page.count("a", run="r", rank="0") == 1
    assert page.count("a", run="r", rank="0", split="dev") == 1
    assert page.count("a", run="r", rank="1", data="x", split="dev") == 2


def test_two_stats_of_one_process_that_become_one_series_are_not_both_published(sidecar: Sidecar) -> None:
    runs(sidecar, 0, a_definition("a.b"), a_definition("a_b"))

    page = sidecar.collect()

    assert page.count("a_b", run="r", rank="0") == 1
    assert page.get("training_feed_dropped_total", run="r", rank="0", reason="definition") == 1


@pytest.mark.parametrize(
    "definition",
    [
        a_definition("host.cpu"),
        a_definition("training.feed.alive"),
        a_definition("training.feed.dropped_total"),
        a_definition("training.rank.info"),
        a_definition("training.stat.rejected_samples.total"),
        a_definition("a", labels=(("role", "x"),)),
    ],
    ids=lambda definition: definition.name,
)
def test_names_of_the_exporter_are_refused_whoever_asks(sidecar: Sidecar, definition: StatDefinition) -> None:
    runs(sidecar, 0, definition, a_definition("good"))

    page = sidecar.after(1)

    assert page.get("training_feed_dropped_total", run="r", rank="0", reason="definition") == 1
    assert page.count("good", run="r", rank="0") == 1
    own = {name for name in page.families if name.startswith("good")}
    assert page.families.keys() - own <= {spec.name for spec in sidecar.collector.specs}
