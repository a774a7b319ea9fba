"""Panels without data: a Prometheus server without series, and a node or run that does not exist."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from dashboards_support import MODELS, SELECTED_VALUES, SHORT_RANGE, fill_variables, panel_queries
from panel_support import BOARD_VALUES, assert_panel
from prometheus_support import Prometheus, needs_prometheus
from rules_support import needs_promtool

from dashboards.board import DEFAULT_EMPTY_TEXT, all_panels

every_board = pytest.mark.parametrize("uid", sorted(MODELS))


@pytest.fixture(scope="module")
def empty_prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with Prometheus(tmp_path_factory.mktemp("empty") / "prometheus", {}) as prometheus:
        yield prometheus


@functools.cache
def labels_without_data(prometheus: Prometheus, uid: str) -> dict[str, list[Mapping[str, str]]]:
    """Return the labels of the series that the queries of a dashboard return without data, by panel."""
    values = SELECTED_VALUES | BOARD_VALUES.get(uid, {})
    labels: dict[str, list[Mapping[str, str]]] = {}
    for query in panel_queries(uid):
        for series in prometheus.query(fill_variables(query.expression, values, SHORT_RANGE)):
            labels.setdefault(query.panel, []).append(series["metric"])
    return labels


@needs_prometheus
@every_board
def test_a_panel_has_a_text_for_no_data_if_it_can_be_empty(uid: str, empty_prometheus: Prometheus) -> None:
    panels_with_default_text = {
        panel["title"]
        for panel in all_panels(MODELS[uid])
        if panel["fieldConfig"]["defaults"]["noValue"] == DEFAULT_EMPTY_TEXT
    }

    assert set(labels_without_data(empty_prometheus, uid)) == panels_with_default_text


@needs_prometheus
@every_board
def test_without_data_every_row_of_a_panel_says_unknown(uid: str, empty_prometheus: Prometheus) -> None:
    for panel, rows in labels_without_data(empty_prometheus, uid).items():
        for labels in rows:
            assert any("unknown" in text for text in labels.values()), f"{panel}: {labels}"


HEALTHY_NODE = {
    'up{job="training",instance="n1"}': "1x60",
    'gpu_up{job="training",instance="n1",gpu="0",uuid="G0"}': "1x60",
    'gpu_devices{job="training",instance="n1"}': "1x60",
}


@needs_promtool
@pytest.mark.parametrize(
    ("uid", "panel", "query_id", "row"),
    [
        ("training-node", "What is wrong", "A", {'{problem="no problem"}': -1}),
        ("training-gpus", "What is wrong", "A", {'{problem="no problem"}': -1}),
        ("training-gpus", "Problems listed below", "A", {'{impact="no problem"}': 0}),
        ("training-gpus", "Exporters", "A", {"{}": 1}),
        ("training-gpus", "Selected GPUs", "A", {"{}": 1}),
        ("training-gpus", "Selected GPUs", "C", {"{}": 0}),
        ("training-gpus", "Xid errors", "A", {'{xid="none"}': 0}),
    ],
)
def test_a_node_that_does_not_exist_is_not_reported_as_healthy(
    tmp_path: Path, uid: str, panel: str, query_id: str, row: dict[str, float]
) -> None:
    unknown_row = {'{xid="unknown: no sample of these GPUs"}': 0.0} if panel == "Xid errors" else {}
    for node, expected in (("n1", row), ("n2", unknown_row)):
        directory = tmp_path / node
        directory.mkdir()
        selected = {"node": node}

        assert_panel(directory, uid, panel, HEALTHY_NODE, expected, query_id=query_id, selected=selected)


@needs_promtool
def test_the_xids_of_a_gpu_are_unknown_while_its_exporter_is_down(tmp_path: Path) -> None:
    series = dict.fromkeys(HEALTHY_NODE, "1x20 stale") | {'up{job="training",instance="n1"}': "1x20 0x40"}

    labels = '{xid="unknown: no sample of these GPUs"}'
    assert_panel(tmp_path, "training-gpus", "Xid errors", series, {labels: 0})


@needs_promtool
@pytest.mark.parametrize(
    ("uid", "panel", "label", "known", "unknown"),
    [
        (
            "training-ranks",
            "Where hanging ranks wait",
            "function",
            "no rank hangs",
            "unknown: no sample of this run",
        ),
        (
            "training-run",
            "Where hanging ranks wait",
            "function",
            "no rank hangs",
            "unknown: no sample of this run",
        ),
        ("training-run", "Firing alerts", "title", "no alert fires", "unknown: no sample"),
    ],
)
def test_a_run_that_does_not_exist_has_neither_hangs_nor_alerts_that_are_known(
    tmp_path: Path, uid: str, panel: str, label: str, known: str, unknown: str
) -> None:
    series = {'training_run_state{run="a",instance="n1",state="running"}': "1x60"}

    for run, row in (("a", known), ("b", unknown)):
        directory = tmp_path / run
        directory.mkdir()
        assert_panel(directory, uid, panel, series, {f'{{{label}="{row}"}}': 0}, selected={"run": run})
