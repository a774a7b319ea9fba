"""Families of the exporter's own that Stats fill: their names are reserved, and theirs alone.

Runs in the sidecar. A Stat whose main family has one of these names is admitted when it is just that family, so that
the type, the unit and the labels are what the metric reference says, whatever a feed contains.

A family without the label `rank` is the run's: every rank may fill it, and what rank 0's process says is published.
"""

from __future__ import annotations

from collections.abc import Mapping

from exporter.collectors.family import FamilySpec
from exporter.ledger import (
    elastic_families,
    monitor_families,
    span_families,
    training_families,
    wait_families,
)
from exporter.ledger.identity_labels import IDENTITY_LABELS
from exporter.recording.values import StatDefinition

OWN: Mapping[str, FamilySpec] = {
    spec.name: spec
    for spec in (
        *elastic_families.SPECS,
        *monitor_families.SPECS,
        *span_families.SPECS,
        *training_families.SPECS,
        *wait_families.SPECS,
    )
}


def identity_labels(spec: FamilySpec) -> tuple[str, ...]:
    """Give those of a family's labels that say whose it is."""
    return IDENTITY_LABELS if "rank" in spec.labels else IDENTITY_LABELS[:1]


def fits(definition: StatDefinition, spec: FamilySpec) -> bool:
    """Tell whether a Stat is a family of the exporter's own."""
    labels = tuple([name for name, _ in definition.labels])
    return (
        definition.kind == spec.type
        and (definition.unit or "") == spec.unit
        and labels == spec.labels[len(identity_labels(spec)) :]
    )
