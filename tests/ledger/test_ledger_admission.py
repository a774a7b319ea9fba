"""Ownership of families: Stats of several processes in one family, and refused Stats."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_support import (
    START,
    Page,
    SimulatedSidecar,
    make_definition,
    make_process,
    make_reading,
    make_snapshot,
)

from exporter.families import FamilySpec
from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.ledger.families import IDENTITY_LABELS
from exporter.ledger.family_owners import TRAINING_FAMILIES
from exporter.recording.values import Aggregation, StatDefinition, StatReading, WindowReading

WINDOW = WindowReading(START - 60, START, 1, {Aggregation.MEAN: 0.5})


@pytest.fixture
def sidecar(tmp_path: Path) -> SimulatedSidecar:
    return SimulatedSidecar(tmp_path)


def record_stats(
    sidecar: SimulatedSidecar,
    rank: int,
    *definitions: StatDefinition,
    sequence: int = 1,
    started_at: float = START,
) -> None:
    """Let the process of a rank publish these Stats, each with rank + 1 samples."""
    process = make_process(rank=rank, id=f"{rank:032x}", started=started_at + rank)
    readings = [make_reading(definition, [0.5] * (rank + 1), window=WINDOW) for definition in definitions]
    sidecar.feed.publish(make_snapshot(process, *readings, sequence=sequence))


def dropped_readings(page: Page, rank: int) -> object:
    return page.get("training_feed_dropped_total", run="r", rank=str(rank), reason="definition")


CONFLICTS = {
    "unit": (make_definition("a", unit="seconds"), make_definition("a_seconds")),
    "buckets": (make_definition("a", buckets=(1.0,)), make_definition("a", buckets=(2.0,))),
    "type": (make_definition("a", buckets=(1.0,)), make_definition("a")),
    "sample name": (make_definition("a", buckets=(1.0,)), make_definition("a.bucket")),
    "sum and family": (make_definition("a"), make_definition("a.sum")),
    "window gauge and family": (make_definition("a"), make_definition("a.window.mean")),
    "two window gauges": (make_definition("a", unit="seconds"), make_definition("a")),
}


@pytest.mark.parametrize(("accepted", "conflicting"), CONFLICTS.values(), ids=CONFLICTS)
def test_the_definition_of_the_process_that_started_first_wins_and_the_other_is_counted(
    sidecar: SimulatedSidecar, accepted: StatDefinition, conflicting: StatDefinition
) -> None:
    record_stats(sidecar, 1, conflicting)
    record_stats(sidecar, 0, accepted)
    page = sidecar.collect()

    ranks = {
        sample.labels["rank"]
        for name, family in page.families.items()
        if name.startswith("a")
        for sample in family.samples
    }
    assert ranks == {"0"}
    assert dropped_readings(page, 1) == 1
    assert dropped_readings(page, 0) is None


def test_a_family_owner_keeps_the_family(sidecar: SimulatedSidecar) -> None:
    record_stats(sidecar, 1, make_definition("a", buckets=(1.0,)))
    sidecar.collect()
    record_stats(sidecar, 0, make_definition("a", buckets=(2.0,)))
    page = sidecar.collect_after(1)

    assert page.count("a", run="r", rank="1") == 2
    assert page.count("a", run="r", rank="0") is None


def test_a_family_passes_with_its_totals_when_the_owner_ends(sidecar: SimulatedSidecar) -> None:
    record_stats(sidecar, 0, make_definition("a", buckets=(1.0,)))
    record_stats(sidecar, 1, make_definition("a", buckets=(2.0,)))
    sidecar.collect()
    sidecar.feed.kill(sidecar.feed.files[f"{0:032x}"].snapshot.process)
    sidecar.collect_after(1)
    record_stats(sidecar, 1, make_definition("a", buckets=(2.0,)), sequence=2)
    page = sidecar.collect_after(1)

    assert page.count("a", run="r", rank="1") == 2
    assert page.count("a", run="r", rank="0") is None, "the series of the ended owner still have the family"


def test_differing_help_texts_are_accepted_and_the_first_is_shown(sidecar: SimulatedSidecar) -> None:
    record_stats(sidecar, 0, make_definition("a", help="First."))
    record_stats(sidecar, 1, make_definition("a", help="Second."))
    page = sidecar.collect()

    assert page.families["a"].documentation == "First."
    assert len(page.all("a_count")) == 2


def test_a_family_has_the_union_of_the_labels_of_its_stats(sidecar: SimulatedSidecar) -> None:
    record_stats(sidecar, 0, make_definition("a", labels=(("split", "dev"),)), make_definition("a"))
    record_stats(sidecar, 1, make_definition("a", labels=(("data", "x"), ("split", "dev"))))
    page = sidecar.collect()

    assert page.count("a", run="r", rank="0") == 1
    assert page.count("a", run="r", rank="0", split="dev") == 1
    assert page.count("a", run="r", rank="1", data="x", split="dev") == 2


def test_two_stats_of_one_process_that_become_one_series_are_not_both_published(
    sidecar: SimulatedSidecar,
) -> None:
    record_stats(sidecar, 0, make_definition("a.b"), make_definition("a_b"))
    page = sidecar.collect()

    assert page.count("a_b", run="r", rank="0") == 1
    assert dropped_readings(page, 0) == 1


@pytest.mark.parametrize(
    "definition",
    [
        make_definition("host.cpu"),
        make_definition("training.feed.alive"),
        make_definition("training.feed.dropped_total"),
        make_definition("training.rank.info"),
        make_definition("training.stat.rejected_samples.total"),
        make_definition("a", labels=(("role", "x"),)),
    ],
    ids=lambda definition: definition.name,
)
def test_reserved_names_are_refused_and_counted(
    sidecar: SimulatedSidecar, definition: StatDefinition
) -> None:
    record_stats(sidecar, 0, definition, make_definition("good"))
    page = sidecar.collect_after(1)

    assert dropped_readings(page, 0) == 1
    assert page.count("good", run="r", rank="0") == 1
    admitted_names = {name for name in page.families if name.startswith("good")}
    assert page.families.keys() - admitted_names <= {spec.name for spec in sidecar.collector.specs}


# Ownership of the training families -------------------------------------


def definition_of(spec: FamilySpec) -> StatDefinition:
    """Return the definition of the Stat that a training process creates for a family."""
    name = spec.name.removesuffix("_total").replace("_", ".", 1)
    labels = tuple((label, "x") for label in spec.labels if label not in IDENTITY_LABELS)
    is_histogram = spec.type == "histogram"
    return StatDefinition(
        name,
        frozenset({Aggregation.HISTOGRAM} if is_histogram else ()),
        unit=spec.unit or None,
        labels=labels,
        buckets=(1.0, 2.0) if is_histogram else (),
        kind=spec.type,
    )


def complete_snapshot(process: ProcessIdentity, sample: float) -> Snapshot:
    """Return a snapshot with all training families, each with the same sample."""
    readings = []
    for spec in TRAINING_FAMILIES.values():
        reading = make_reading(definition_of(spec), [sample])
        readings.append(reading.replace(value=sample if spec.type == "gauge" else None))
    return make_snapshot(process, *readings)


def test_a_family_without_a_rank_label_comes_from_rank_0(sidecar: SimulatedSidecar) -> None:
    for rank in (3, 0, 1):
        sidecar.feed.publish(complete_snapshot(make_process(rank=rank), 1.0 + rank))
    page = sidecar.collect()

    for spec in TRAINING_FAMILIES.values():
        family = page.families[spec.name]
        published_ranks = {sample.labels.get("rank", "") for sample in family.samples}
        assert published_ranks == ({"0", "1", "3"} if "rank" in spec.labels else {""}), spec.name
        assert family.type == spec.type
        assert family.documentation == spec.help
    assert page.get("training_step", run="r") == 1.0
    assert page.get("training_step_duration_seconds_sum", run="r", mode="x") == 1.0
    assert page.get("training_steps_total", run="r", rank="3", mode="x") == 4.0


def test_a_second_process_of_rank_0_does_not_report_for_the_run(sidecar: SimulatedSidecar) -> None:
    sidecar.feed.publish(complete_snapshot(make_process(), 1.0))
    sidecar.collect()
    sidecar.feed.publish(complete_snapshot(make_process(), 2.0))
    page = sidecar.collect_after(1)

    assert page.get("training_loss", run="r", mode="x") == 1.0
    assert page.get("training_skipped_steps_total", run="r", reason="x") == 1.0
    assert page.get("training_steps_total", run="r", rank="0", worker="1", mode="x") == 2.0


def reading_with(definition: StatDefinition, **changes: object) -> StatReading:
    return make_reading(definition.replace(**changes), [1.0]).replace(value=1.0)


@pytest.mark.parametrize("changes", [{"kind": "counter"}, {"labels": ()}, {"unit": "seconds"}])
def test_a_stat_that_imitates_a_run_family_is_refused(
    sidecar: SimulatedSidecar, changes: dict[str, object]
) -> None:
    loss = next(spec for spec in TRAINING_FAMILIES.values() if spec.name == "training_loss")
    sidecar.feed.publish(make_snapshot(make_process(), reading_with(definition_of(loss), **changes)))
    page = sidecar.collect()

    assert "training_loss" not in page.families
