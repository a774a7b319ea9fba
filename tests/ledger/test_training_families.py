"""Families of the training that the job's processes fill: whose they are, and that no two collide."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_support import Sidecar, a_process, a_reading, a_snapshot

from exporter.families import FamilySpec
from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.ledger.families import IDENTITY_LABELS
from exporter.ledger.families.training import TRAINING as SPECS
from exporter.recording.values import Aggregation, StatDefinition, StatReading, families_of


def definition_of(spec: FamilySpec) -> StatDefinition:
    """The Stat that a training process makes for a family."""
    name = spec.name.removesuffix("_total").replace("_", ".", 1)
    labels = tuple((label, "x") for label in spec.labels if label not in IDENTITY_LABELS)
    histogram = spec.type == "histogram"
    return StatDefinition(
        name,
        frozenset({Aggregation.HISTOGRAM} if histogram else ()),
        unit=spec.unit or None,
        labels=labels,
        buckets=(1.0, 2.0) if histogram else (),
        kind=spec.type,
    )


def everything(process: ProcessIdentity, value: float) -> Snapshot:
    readings = []
    for spec in SPECS:
        reading = a_reading(definition_of(spec), [value])
        readings.append(reading.replace(value=value if spec.type == "gauge" else None))
    return a_snapshot(process, *readings)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_stat_can_be_each_family(spec: FamilySpec) -> None:
    definition = definition_of(spec)

    assert families_of(definition).main == spec.name
    assert [name for name, _ in definition.labels] == sorted(name for name, _ in definition.labels)


def test_a_family_without_a_rank_is_rank_0s_alone(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path)
    for rank in (3, 0, 1):
        sidecar.feed.put(everything(a_process(rank=rank), 1.0 + rank))
    page = sidecar.collect()

    for spec in SPECS:
        samples = page.families[spec.name].samples
        by_rank = "rank" in spec.labels
        assert len(samples) == (3 if by_rank else 1), spec.name
        assert (page.families[spec.name].type, page.families[spec.name].help) == (spec.type, spec.help)
    assert page.get("training_step", run="r") == 1.0
    assert page.sum("training_step_duration_seconds", run="r", mode="x") == 1.0
    assert page.get("training_steps_total", run="r", rank="3", mode="x") == 4.0


def test_a_second_process_of_rank_0_does_not_speak_for_the_run(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path)
    sidecar.feed.put(everything(a_process(), 1.0))
    sidecar.collect()
    sidecar.feed.put(everything(a_process(), 2.0))
    page = sidecar.after(1)

    assert page.get("training_loss", run="r", mode="x") == 1.0
    assert page.get("training_skipped_steps_total", run="r", reason="x") == 1.0
    assert page.get("training_steps_total", run="r", rank="0", worker="1", mode="x") == 2.0


def reading_with(definition: StatDefinition, **changes: object) -> StatReading:
    return a_reading(definition.replace(**changes), [1.0]).replace(value=1.0)


@pytest.mark.parametrize("changes", [{"kind": "counter"}, {"labels": ()}, {"unit": "seconds"}])
def test_what_only_looks_like_such_a_family_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    loss = next(spec for spec in SPECS if spec.name == "training_loss")
    sidecar = Sidecar(tmp_path)
    sidecar.feed.put(a_snapshot(a_process(), reading_with(definition_of(loss), **changes)))
    page = sidecar.collect()

    assert "training_loss" not in page.families
