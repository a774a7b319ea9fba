"""Status pages and findings computed from rows of samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from prometheus_client.core import Metric

from exporter.collectors.status import CollectorStatus
from exporter.families import Distribution, Family, FamilyType
from exporter.status.attention import FindingStarts, FindingView, finding_views
from exporter.status.conditions import findings
from exporter.status.document import render
from exporter.status.history import History
from exporter.status.samples import SampleIndex
from exporter.status.view import ExporterInfo, View, build_view

NOW = 10_000.0
"""Time of the page, Unix time."""
VOID_ELEMENTS = {"meta", "link", "path", "rect"}
Rows = dict[str, list[tuple[dict[str, str], float | Distribution]]]
"""Samples by family name: pairs of labels and value."""


def run_sample(
    value: float | Distribution, **labels: str
) -> list[tuple[dict[str, str], float | Distribution]]:
    """Return the samples of a family with a single sample, of the run "night"."""
    return [({"run": "night", **labels}, value)]


JOB: Rows = {
    "training_feed_alive": run_sample(1.0, rank="0") + run_sample(1.0, rank="1"),
    "training_feed_last_update_timestamp_seconds": run_sample(NOW - 1, rank="0")
    + run_sample(NOW - 2, rank="1"),
    "training_phase_active": run_sample(1.0, rank="0", phase="forward"),
    "training_last_progress_timestamp_seconds": run_sample(NOW - 3, rank="0"),
    "training_run_info": run_sample(1.0, model="llama"),
    "training_step": run_sample(250.0),
    "training_step_target": run_sample(1000.0),
    "training_loss": run_sample(2.5, mode="train"),
    "training_wall_seconds_total": run_sample(1000.0),
    "training_productive_seconds_total": run_sample(900.0),
    "training_badput_seconds_total": run_sample(60.0, cause="data_stall"),
}
"""Families of a run with two ranks."""

GPU_3_LABELS = {"gpu": "3", "uuid": "GPU-3"}
GPU_3: Rows = {
    "gpu_up": [(GPU_3_LABELS, 1.0)],
    "training_rank_info": run_sample(1.0, rank="5", **GPU_3_LABELS),
    "training_feed_alive": run_sample(1.0, rank="5"),
}
"""Families of a GPU, and of the rank that holds the GPU."""


def uncorrected_errors(count: float) -> Rows:
    """Return the family of the ECC errors of GPU 3, with the number of uncorrected errors."""
    return {"gpu_ecc_errors_total": [({**GPU_3_LABELS, "kind": "uncorrected", "location": "dram"}, count)]}


class Document(HTMLParser):
    """Parsed page with its tags, attributes and text. Unbalanced elements fail the test.

    Attributes:
        open: Open elements, outermost first.
        tags: Names of all elements, in order.
        attribute_names: Names of all attributes, in order.
        links: Values of the attributes `href`, `src` and `action`.
        text: Texts outside of styles and scripts.
        html: The whole document.
    """

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.attribute_names: list[str] = []
        self.text: list[str] = []
        self.html = page.decode()
        self.feed(self.html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert self.open[-2:] != ["dl", "div"] or tag in {"dt", "dd"}
        self.tags.append(tag)
        self.attribute_names += [name for name, _ in attrs]
        self.links += [value or "" for name, value in attrs if name in {"href", "src", "action"}]
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID_ELEMENTS:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.text.append(data)

    @property
    def visible_text(self) -> str:
        return " ".join(" ".join(self.text).split())


def families_of(rows: Rows) -> list[Metric]:
    """Return the families of rows: histograms for distributions, otherwise gauges."""
    families = []
    for name, samples in rows.items():
        family_type: FamilyType = "histogram" if isinstance(samples[0][1], Distribution) else "gauge"
        labels = tuple(sorted({label for sample_labels, _ in samples for label in sample_labels}))
        values = {
            tuple(sample_labels.get(label, "") for label in labels): value for sample_labels, value in samples
        }
        families.append(Family(name=name, type=family_type, help="", labels=labels).family(values))
    return families


def history_of(ticks: int, rows: Callable[[int], Rows], interval_seconds: float = 5.0) -> History:
    """Return a history of five-second points with the rows of each tick.

    The ticks are an interval apart, and the last is an interval old. With a longer interval than five seconds, a short test has a
    history of minutes.
    """
    times = iter(NOW - interval_seconds * (ticks - tick) for tick in range(ticks))
    history = History(interval_seconds=5, clock=lambda: next(times))
    for tick in range(ticks):
        history.record(interval_seconds * tick, SampleIndex(families_of(rows(tick))))
    return history


def step_durations(count: int, seconds: float) -> Rows:
    return {"training_step_duration_seconds": run_sample(Distribution(count, seconds), mode="train")}


def exporter_info(**changes: Any) -> ExporterInfo:
    return replace(ExporterInfo("1.2.3", "node7", NOW - 90, NOW, "/dev/shm/x"), **changes)


def collector_status(**changes: Any) -> CollectorStatus:
    return replace(CollectorStatus("cpu", True, "", "", 1.0, 1.0, 0.001, 5.0, 4.0, False, ()), **changes)


def view_of(rows: Rows, history: History | None = None) -> View:
    return build_view(exporter_info(), SampleIndex(families_of(rows)), history or History())


def status_page(
    rows: Rows, *collectors: CollectorStatus, history: History | None = None, **changes: Any
) -> Document:
    status_view = build_view(
        exporter_info(**changes), SampleIndex(families_of(rows)), history or History(), collectors
    )
    return Document(render(status_view, FindingStarts()))


def finding_views_of(
    rows: Rows,
    *collectors: CollectorStatus,
    history: History | None = None,
    starts: FindingStarts | None = None,
    **changes: Any,
) -> list[FindingView]:
    """Return the findings that a page shows."""
    status_view = build_view(
        exporter_info(**changes), SampleIndex(families_of(rows)), history or History(), collectors
    )
    return finding_views(findings(status_view), starts or FindingStarts(), status_view.exporter.now)


def finding_texts(
    rows: Rows, *collectors: CollectorStatus, history: History | None = None, **changes: Any
) -> list[str]:
    """Return the sentences of the findings that a page shows."""
    return [finding.text for finding in finding_views_of(rows, *collectors, history=history, **changes)]
