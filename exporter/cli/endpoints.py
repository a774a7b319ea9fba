"""Table of the sidecar's endpoints, and the data of the status page."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import Metric

from exporter.cli.configuration import Configuration
from exporter.cli.silent_jobs import SilentJobs
from exporter.collectors.status import CollectorStatus
from exporter.config.dump import dump
from exporter.exposition.page import Page
from exporter.hangs.collector import HangReport
from exporter.hangs.explanation import RankGroup, location_of, ranks_text
from exporter.status.attention import FindingStarts
from exporter.status.conditions import findings
from exporter.status.document import content_security_policy
from exporter.status.document import render as render_status
from exporter.status.history import History
from exporter.status.runbook import render as render_runbook
from exporter.status.samples import SampleIndex
from exporter.status.view import ExporterInfo, Hang, StackFrame, StackGroup, View, build_view
from exporter.version import __version__
from exporter.web.endpoints import (
    Content,
    DocumentEndpoint,
    Endpoint,
    HealthEndpoint,
    MetricsEndpoint,
    Readiness,
    ReadinessEndpoint,
    ReloadEndpoint,
)

HTML = "text/html; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSources:
    """Parts of the sidecar from which the status page is rendered."""

    page: Page
    history: History
    finding_starts: FindingStarts
    silent_jobs: SilentJobs
    hangs: Callable[[], Sequence[HangReport]]
    collectors: Callable[[], Sequence[CollectorStatus]]
    configuration: Callable[[], Configuration]
    not_ready: Readiness
    feed_directory: Path
    started_at: float  # Unix time

    def document(self) -> Content:
        """Render the status page."""
        headers = {"Content-Security-Policy": content_security_policy(), "Cache-Control": "no-store"}
        return Content(render_status(self._view(self.page.snapshot()), self.finding_starts), HTML, headers)

    def record(self) -> None:
        """If the next point of the history is due, record the point, the ranks that use each GPU, and the findings."""
        now = time.monotonic()
        if self.history.is_due(now):
            families = self.page.unrendered_families()
            self.history.record(now, SampleIndex(families))
            view = self._view(families)
            self.history.record_holders({gpu.uuid: gpu.last_holders for gpu in view.gpus})
            self.finding_starts.record(view.exporter.now, findings(view))

    def _view(self, families: Sequence[Metric]) -> View:
        """Build the view model of the page from the families and the current state of the sidecar."""
        exporter = ExporterInfo(
            version=__version__,
            node=socket.gethostname(),
            start_time=self.started_at,
            now=time.time(),
            feed_directory=str(self.feed_directory),
            not_ready=self.not_ready(),
            silent_jobs=self.silent_jobs.jobs,
            hangs={report.run.run: hang_of(report) for report in self.hangs()},
        )
        return build_view(exporter, SampleIndex(families), self.history, self.collectors())

    def configuration_text(self) -> Content:
        """Render the configuration in force as YAML, without secrets."""
        return Content(dump(self.configuration()).encode("utf-8", "replace"))


def runbook() -> Content:
    """Render the runbook of the alerts."""
    return Content(render_runbook(), HTML, {"Content-Security-Policy": content_security_policy()})


def hang_of(report: HangReport) -> Hang:
    """Return the explanation of a hang for the status page, with the stack of one rank of each group."""
    groups = (_stack_group(report, group) for group in report.explanation.groups)
    stacks = tuple(group for group in groups if group is not None)
    explanation = report.explanation
    return Hang(explanation.sentence(), stacks, report.run.step, has_odd_group=explanation.has_odd_group)


def _stack_group(report: HangReport, group: RankGroup) -> StackGroup | None:
    """Return the group with the stack of its first rank that has frames, or None without such a rank."""
    answers = (answer for answer in report.answers if answer.rank in group.ranks and answer.main.frames)
    answer = next(answers, None)
    if answer is None or answer.rank is None:
        return None
    ranks = f"rank{'s' if len(group.ranks) > 1 else ''} {ranks_text(group.ranks)}"
    frames = (StackFrame(frame.function, location_of(frame)) for frame in answer.main.frames)
    return StackGroup(f"Stack of {ranks}: {group.function}", answer.rank, tuple(frames))


def sidecar_endpoints(
    sources: StatusSources, *, reload: Callable[[], None], enable_lifecycle: bool, missing_gpus: Readiness
) -> tuple[Endpoint, ...]:
    """Return the endpoints of the sidecar."""
    return (
        DocumentEndpoint("/", sources.document),
        DocumentEndpoint("/runbook", runbook),
        DocumentEndpoint("/config", sources.configuration_text),
        MetricsEndpoint(sources.page.render, sources.not_ready, render_gzip=sources.page.render_gzip),
        HealthEndpoint(),
        ReadinessEndpoint(sources.not_ready, missing_gpus),
        ReloadEndpoint(reload, enabled=enable_lifecycle),
    )
