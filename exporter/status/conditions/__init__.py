"""The table of conditions: each alert that the samples of one exporter can decide, and conditions of the page only."""

from __future__ import annotations

from exporter.status.condition import Condition, Finding
from exporter.status.conditions import checkpoints, energy, gpu_links, gpus, node, ranks, runs, sidecar
from exporter.status.view import View

CONDITIONS: tuple[Condition, ...] = (
    *sidecar.CONDITIONS,
    *runs.CONDITIONS,
    *ranks.CONDITIONS,
    *checkpoints.CONDITIONS,
    *gpus.CONDITIONS,
    *gpu_links.CONDITIONS,
    *node.CONDITIONS,
    *energy.CONDITIONS,
)
NOT_DECIDED = {
    "ExporterDown": "a server that answers is not down",
    "ExporterAbsent": "only Prometheus knows the targets",
    "ThresholdMissing": "only Prometheus knows the rules",
    "TrainingGoodputLow": "compares six hours",
    "TrainingGoodputVeryLow": "compares six hours",
    "TrainingCheckpointDiskFillingUp": "extrapolates six hours",
    "TensorActivityCollapse": "compares six hours",
    "GpuPowerCapped": "usual under full load; the alert is for information only",
}
"""Alerts without a condition on the page, with the reason."""


def findings(seen: View) -> list[Finding]:
    """Return all findings, the urgent first."""
    found = [Finding(condition, each) for condition in CONDITIONS for each in condition.find(seen)]
    return sorted(found, key=lambda each: (not each.is_urgent, each.found.is_past))
