"""Table of conditions: the alerts that a single exporter can evaluate, and conditions without an alert."""

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
    "TrainingStalled": "the page reports a stalled run at once, by a condition without an alert",
    "TrainingRankEnded": "the page reports each ended rank of the node at once, by conditions without an alert",
    "ThresholdMissing": "only Prometheus knows the rules",
    "TrainingGoodputLow": "compares six hours",
    "TrainingGoodputVeryLow": "compares six hours",
    "TrainingCheckpointDiskFillingUp": "extrapolates six hours",
    "TensorActivityCollapse": "compares six hours",
    "GpuPowerCapped": "normal under full load; the alert is informational",
}
"""Alerts without a condition on the page, with the reason."""


def findings(view: View) -> list[Finding]:
    """Return all findings, urgent findings first.

    Among findings of the same urgency, findings about ended runs are last, and findings about runs at a standstill are first.
    """

    def is_over(finding: Finding) -> bool:
        run = view.runs.get(finding.match.subject[0]) if finding.match.subject else None
        return run is not None and run.is_ended

    holding = [
        Finding(condition, match) for condition in CONDITIONS for match in condition.find_matches(view)
    ]
    return sorted(
        holding,
        key=lambda finding: (
            not finding.is_urgent,
            finding.match.is_past,
            is_over(finding),
            not finding.condition.stops_run,
        ),
    )
