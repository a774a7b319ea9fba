"""Data of the status page in the sidecar: the history and the findings include the metrics about the exporter itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from exposition_support import page_of, wide_gauge
from status_support import Document

from exporter.cli.configuration import Configuration
from exporter.cli.endpoints import StatusSources
from exporter.cli.silent_jobs import SilentJobs
from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page
from exporter.families import FamilySpec
from exporter.status.attention import FindingStarts
from exporter.status.history import History

RELOAD_SUCCESS = FamilySpec(
    name="exporter_config_last_reload_successful", type="gauge", help="Success.", source="test"
)


@pytest.fixture
def page() -> Page:
    """Return a page whose largest family exceeds the limit, with metrics about the exporter in watched blocks."""
    page = page_of(wide_gauge("wild", 50), max_series=20)
    page.watch("exporter.page", page.families)
    page.watch("exporter.configuration", lambda: [RELOAD_SUCCESS.family({(): 0})])
    return page


def status_text(tmp_path: Path, page: Page) -> str:
    """Return the text of the status page after three passes over the feed, with a scrape before each pass."""
    sources = StatusSources(
        page=page,
        history=History(interval_seconds=0.0001, retention_seconds=0.01),
        finding_starts=FindingStarts(),
        silent_jobs=SilentJobs(tmp_path, list),
        hangs=tuple,
        collectors=tuple,
        configuration=Configuration,
        not_ready=lambda: None,
        feed_directory=tmp_path,
        started_at=0.0,
    )
    for _ in range(3):
        page.render(Format.TEXT)
        sources.record()
    return Document(sources.document().body).visible_text


def test_the_status_page_reports_series_that_do_not_fit(tmp_path: Path, page: Page) -> None:
    assert "The metrics page omits series of wild, because" in status_text(tmp_path, page)


def test_a_finding_about_the_exporter_has_a_start(tmp_path: Path, page: Page) -> None:
    text = status_text(tmp_path, page)

    assert "the previous configuration stays in force. for at least 0.1 s (since" in text
