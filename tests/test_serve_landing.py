"""The landing page: what it shows, and that nothing in it can act."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from serve_support import environment, sidecar, wait_until

from exporter.cli.landing import MOST_ROWS, Landing, Rank, render_landing
from exporter.collectors.standing import CollectorStatus

JOB = """
import sys
from exporter import Stat, flush
Stat("loss").add(1.0)
flush()
print("recorded", flush=True)
sys.stdin.read()
"""
VOID = {"meta"}


class Document(HTMLParser):
    """Collects a page's tags, attributes and text; an element that is not closed in order is an error."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.text: list[str] = []
        self.feed(page.decode())
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page(**changes: object) -> bytes:
    given_values: dict[str, object] = {
        "version": "1.2.3",
        "node": "node7",
        "started": 1000.0,
        "now": 1090.0,
        "feed_directory": "/dev/shm/x",
        "telemetry_path": "/metrics",
        "series": 12,
        "not_ready": None,
        "ranks": [],
        "collectors": [],
    }
    return render_landing(Landing(**{**given_values, **changes}))  # type: ignore[arg-type]  # fields by name


def status(**changes: object) -> CollectorStatus:
    values: dict[str, object] = {
        "name": "cpu",
        "success": True,
        "reason": "",
        "message": "",
        "age_seconds": 1.0,
        "last_success": 1.0,
        "duration_seconds": 0.001,
        "interval_seconds": 5.0,
        "deadline_seconds": 4.0,
        "running": False,
        "unsupported": (),
    }
    return CollectorStatus(**{**values, **changes})  # type: ignore[arg-type]  # fields by name


def test_it_names_version_node_links_and_where_it_looks() -> None:
    document = Document(page(telemetry_path="/m"))
    text = "".join(document.text)

    for part in ("1.2.3", "node7", "ready", "up 90 s", "12 series", "/dev/shm/x"):
        assert part in text
    assert document.links == ["/m", "/-/ready", "/-/healthy", "/config"]


def test_it_loads_and_runs_nothing() -> None:
    document = Document(page(ranks=[Rank("r", "0")], collectors=[status()]))

    assert not document.tags & {"script", "link", "img", "iframe", "form", "object"}
    assert b"url(" not in page()


@given(st.text(max_size=50))
def test_foreign_text_is_shown_and_cannot_act(text: str) -> None:
    hostile = f"<script>alert(1)</script>\"'&{text}"
    made = page(
        node=hostile,
        not_ready=hostile,
        feed_directory=hostile,
        ranks=[Rank(hostile, hostile, hostile, hostile, hostile)],
        collectors=[status(name=hostile, success=False, message=hostile)],
    )

    assert "script" not in Document(made).tags
    assert "<script>alert(1)</script>" in "".join(Document(made).text)


def test_verdicts_and_remarks_of_collectors_are_shown() -> None:
    text = "".join(
        Document(
            page(
                collectors=[
                    status(success=False, message="no such file (missing)"),
                    status(name="load", success=None, age_seconds=None, duration_seconds=None),
                    status(name="edac", unsupported=("no memory controllers",)),
                ]
            )
        ).text
    )

    for part in ("failing", "no such file (missing)", "not yet", "no memory controllers"):
        assert part in text


def test_a_crowd_of_ranks_does_not_make_a_crowd_of_rows() -> None:
    text = "".join(Document(page(ranks=[Rank("r", str(n)) for n in range(MOST_ROWS + 5)])).text)

    assert "and 5 more" in text


def test_a_real_job_appears_with_its_run_and_rank(tmp_path: Path) -> None:
    run = "a<b>&run"
    with sidecar(tmp_path) as running:
        job = subprocess.Popen(
            [sys.executable, "-c", JOB],
            stdin=subprocess.PIPE,
            env=environment(EXPORTER_FEED_DIR=str(tmp_path / "feed"), EXPORTER_RUN=run, RANK="3"),
        )
        try:
            wait_until(lambda: "alive" in running.ask("/")[1])
            cells = Document(running.ask("/")[1].encode()).text
        finally:
            assert job.stdin is not None
            job.stdin.close()
            job.wait(10)

    assert [cells.count(text) for text in (run, "trainer", "alive")] == [1, 1, 1]
    assert "3" in cells
