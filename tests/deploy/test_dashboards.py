"""Dashboards: committed JSON, layout, panel texts, names in queries, variables, links and PromQL syntax."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dashboards_support import EXPORTER_LABELS, MODELS, all_queries, fill_variables, panel_queries
from places import PROJECT
from prometheus_support import needs_prometheus
from rules_support import aggregation_labels, labels_by_name, promtool, selectors

from dashboards.__main__ import MAX_DIFF_LINES, main
from dashboards.board import COLUMNS, all_panels, read_texts
from dashboards.pictures import draw_picture

every_board = pytest.mark.parametrize("uid", sorted(MODELS))

TARGET_LABELS = {"cluster", "job", "instance", "le", *EXPORTER_LABELS}
FAMILIES_WITHOUT_RUN = {"exporter_build_info", "gpu_up"}
"""Families without the label `run`; `.*` as the value of `run` also selects these series."""
JOB_LABELS = {"label_stage"}
"""Labels that a job may add with `exporter.configure(labels=...)`."""
ALERT_LABELS = TARGET_LABELS | {"alertname", "alertstate", "severity", "run", "rank", "gpu", "xid"}
PROMETHEUS_SERIES = {
    "scrape_duration_seconds": TARGET_LABELS,
    "ALERTS": ALERT_LABELS,
    "ALERTS_FOR_STATE": ALERT_LABELS,
}
"""Series that Prometheus generates, with their labels."""


def test_the_committed_json_is_generated_from_the_code() -> None:
    command = [sys.executable, "-m", "dashboards", "--check"]
    completed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)

    assert completed.returncode == 0, f"run `python -m dashboards`\n{completed.stdout}{completed.stderr}"


def test_a_diff_that_is_cut_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dashboards.__main__.differences", lambda: iter(["+"] * (MAX_DIFF_LINES + 7)))

    assert main(["--check"]) == 1

    *diff_lines, last_line = capsys.readouterr().out.splitlines()
    assert len(diff_lines) == MAX_DIFF_LINES
    assert "7 more lines" in last_line


def test_a_picture_of_an_earlier_run_does_not_hide_that_drawing_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture_path = tmp_path / "training-run-dark.png"
    picture_path.write_bytes(b"earlier picture")

    assert not draw_picture([sys.executable, "-c", "print('no browser')"], picture_path)
    assert "no browser" in capsys.readouterr().err


@every_board
def test_panels_have_unique_titles_and_do_not_overlap(uid: str) -> None:
    occupied_cells: set[tuple[int, int]] = set()
    for panel in MODELS[uid]["panels"]:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        cells = set(itertools.product(range(x, x + w), range(y, y + h)))

        assert x + w <= COLUMNS
        assert not cells & occupied_cells, panel["title"]
        occupied_cells |= cells
    panels = all_panels(MODELS[uid])
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    assert {panel["title"] for panel in panels} == set(read_texts(uid))


@every_board
def test_a_panel_has_a_unit_a_description_and_draws_no_line_over_a_gap(uid: str) -> None:
    for panel in all_panels(MODELS[uid]):
        defaults = panel["fieldConfig"]["defaults"]
        *_content, bad, action, gap = panel["description"].split("\n\n")

        assert bad.startswith("**Bad:** ")
        assert action.startswith("**Action:** ")
        assert gap.startswith("**A gap or no data:** ")
        assert defaults["unit"]
        assert defaults["noValue"]
        # Grafana shows the text of an empty panel without interpreting Markdown.
        assert not re.search(r"[*`]", defaults["noValue"]), panel["title"]
        # A minimum interval of a panel would break $__rate_interval.
        assert "interval" not in panel, panel["title"]
        assert panel["targets"]
        if panel["type"] in {"timeseries", "state-timeline"}:
            assert defaults["custom"]["spanNulls"] is False
            assert defaults["custom"]["insertNulls"] is False
        # The last value of a range query may be an hour old.
        if panel["type"] in {"stat", "bargauge", "table"}:
            assert all(target["instant"] for target in panel["targets"])


def test_an_incomplete_panel_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# A\n\n### Loss\n\nWhat it is.\n\n**Bad:** a rise.\n\n**Text when empty:** none\n"
    )

    with pytest.raises(ValueError, match="Loss: missing Action"):
        read_texts("a", tmp_path)


def displayed_names() -> set[str]:
    """Return the names that a description may mention: dashboards, rows, panels, columns, legends and value mappings."""
    names = {model["title"].removeprefix("Training / ") for model in MODELS.values()}
    for model in MODELS.values():
        names |= {panel["title"] for panel in model["panels"]}
        for panel in all_panels(model):
            names |= {panel["title"], *(target["legendFormat"] for target in panel["targets"])}
            # The legend may show a label that `label_replace` sets.
            expressions = " ".join(target["expr"] for target in panel["targets"])
            names |= set(re.findall(r'"\w+", *"([^"$]*)", *"', expressions))
            names |= set(re.findall(r'"(?:text|[^"]*)": "([^"]*)"', json.dumps(panel)))
    return names


@every_board
def test_a_panel_that_a_description_names_exists(uid: str) -> None:
    names = displayed_names() | {"unattributed", "failed", "lost", "hung", "stalled"}
    for panel in all_panels(MODELS[uid]):
        for name in re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", panel["description"]):
            assert name in names, f"{panel['title']}: nothing on the dashboards is named {name}"


@every_board
def test_every_name_and_label_in_a_query_exists(uid: str) -> None:
    names = labels_by_name() | {name: frozenset(labels) for name, labels in PROMETHEUS_SERIES.items()}
    for query in all_queries(uid):
        query_selectors = list(selectors(fill_variables(query.expression)))
        labels = TARGET_LABELS.union(*(names.get(selector.name, set()) for selector in query_selectors))
        created_labels = re.findall(
            r'label_replace\([^"]*"(\w+)"|, "(\w+)", "|count_values(?: by \(\w+\) )?\("(\w+)"',
            query.expression,
        )

        assert query_selectors or query.panel == "$all_runs", str(query)
        for selector in query_selectors:
            assert selector.name in names, (
                f"{query}: {selector.name} is neither in docs/METRICS.md nor recorded by a rule"
            )
            optional_labels = {"run"} if selector.name in FAMILIES_WITHOUT_RUN else set()
            assert selector.labels <= names[selector.name] | TARGET_LABELS | optional_labels, (
                f"{query}: {selector}"
            )
        assert aggregation_labels(query.expression) <= labels.union(JOB_LABELS, *created_labels), str(query)


RECORDED_SERIES_OF_ANY_BOARD = {
    "run_group:training_hang_odd:count",
    "run:training_last_progress:timestamp_seconds",
    "run:training_step_overdue:seconds",
    "run:training_straggler_lost:ratio",
    "rank:training_compute:seconds",
    "rank:training_data_wait:ratio2m",
    "rank:training_gpu:info",
    "rank:training_straggler_score:ratio",
    "run:training_standstill:info",
    "run:training_odd_phase:info",
    "run:training_standstill_rank:info",
    "run:training_waiting_for_data:max2m",
    "run:training_waiting_for_data:min2m",
    "run:training_live:info",
    "run:training_lost:ratio",
    "run:training_slow_rank:ratio",
    "run:training_data_wait_rank:ratio2m",
    "run:training_observed:ratio2m",
    "run:training_observed:ratio5m",
    "run:training_cost:rate5m",
    "run:training_cost_held:rate5m",
    "run:training_verdict:urgency",
    "run:training_driver_down:info",
    "run:training_no_progress:info",
    "instance:gpu_driver_down_start:timestamp_seconds",
    "run:training_saves_failing_start:timestamp_seconds",
    "run:training_nonfinite_last:timestamp_seconds",
    "run:training_gpus:count",
    "run:training_carbon:grams_rate5m",
    "run:training_run_state:info",
    "run:training_last_sample:timestamp_seconds",
    "run:training_first_exit:timestamp_seconds",
    "run:training_exit_before_restart:timestamp_seconds",
    "run:training_nonfinite_start:timestamp_seconds",
    "run:training_slow_start:timestamp_seconds",
    "run_gpu:training_fault_rank:info",
    "instance:training_last_sample:timestamp_seconds",
    "run:training_run_state:age_seconds",
    "run:training_data_wait_start:timestamp_seconds",
    "rank:training_slow_start:timestamp_seconds",
    "gpu:gpu_xid:timestamp_seconds",
    "gpu:gpu_fault:urgency",
    "gpu:gpu_lost:timestamp_seconds",
    "gpu:gpu_lost_start:timestamp_seconds",
    "gpu:gpu_problem:urgency",
    "gpu:gpu_problem_start:timestamp_seconds",
    "gpu:gpu_throttled_temperature:celsius",
    "gpu:training_last_rank:info",
    "instance:training_ranks:count",
    "gpu:gpu_throttled:ratio2m",
    "gpu:training_run:group",
    "gpu:gpu_throttled_start:timestamp_seconds",
    "instance:exporter_last_sample:timestamp_seconds",
    "instance:gpu_lost:sum",
    "run:training_early_end:info",
    "run:training_eta:seconds",
    "run:training_last_progress:age_seconds",
    "run:training_ranks_missing:sum",
    "run:training_ranks_up:sum",
    "run:training_restarts:increase1d",
    "run:training_run:info",
    "run:training_unseen:timestamp_seconds",
    "run:training_checkpoint_last_step:max",
    "run:training_failed_saves:sum",
    "run:training_nonfinite_loss:sum",
    "run:training_ranks_unknown:sum",
    "run:training_restart_lost:ratio1h",
    "run_gpu:training_gpu_held:group",
    "run_gpu:training_gpu_lost:group",
}
"""Recorded series whose values also appear on *Fleet* or in alerts; a panel with a query of its own would show another value."""


@every_board
def test_only_the_fleet_uses_recorded_series(uid: str) -> None:
    comparison_panels = {panel["title"] for panel in MODELS["training-fleet"]["panels"][-1]["panels"]}
    for query in panel_queries(uid):
        uses_recorded_series = uid == "training-fleet" and query.panel not in comparison_panels
        for selector in selectors(fill_variables(query.expression)):
            if selector.name.startswith("ALERTS") or selector.name in RECORDED_SERIES_OF_ANY_BOARD:
                continue
            assert (":" in selector.name) == uses_recorded_series, f"{query}: {selector}"


@every_board
def test_a_single_value_variable_is_compared_literally_and_a_multi_value_one_as_a_pattern(uid: str) -> None:
    variables = [variable for variable in MODELS[uid]["templating"]["list"] if variable["type"] == "query"]
    is_multi = {variable["name"]: variable["multi"] for variable in variables}
    for query in all_queries(uid):
        for operator, name in re.findall(r'(=~|=)"\$(\w+)"', query.expression):
            # A run may be called lr+wd(3). The value of `all_runs` is a regular expression.
            assert (operator == "=~") == (is_multi[name] or name == "all_runs"), (
                f"{query}: ${name} is compared with {operator}"
            )


@every_board
def test_a_query_is_short_even_for_a_thousand_nodes(uid: str) -> None:
    names = "|".join(f"gpu-node-{index:04}" for index in range(1000))
    values = {
        variable["name"]: variable.get("allValue") or names if variable["includeAll"] else names[:13]
        for variable in MODELS[uid]["templating"]["list"]
        if variable["type"] == "query"
    }
    for query in all_queries(uid):
        # The names alone have 14,000 characters, and a query may contain them several times.
        assert len(fill_variables(query.expression, values)) < 100_000, str(query)


MAX_QUERY_BYTES = {
    "training-energy": 75_000,
    "training-fleet": 80_000,
    "training-gpus": 36_000,
    "training-node": 75_000,
    "training-ranks": 90_000,
    "training-run": 90_000,
}
"""Budget of the longest query of each dashboard, with one pattern for the values of each variable. Prometheus parses the text at each refresh."""


@every_board
def test_no_query_is_longer_than_the_budget_of_its_dashboard(uid: str) -> None:
    sizes = {str(query): len(fill_variables(query.expression).encode()) for query in all_queries(uid)}

    assert {name: size for name, size in sizes.items() if size > MAX_QUERY_BYTES[uid]} == {}


def test_the_first_screen_of_gpus_reads_the_time_range_of_nodes_and_not_of_all_gpus() -> None:
    panels = MODELS["training-gpus"]["panels"]
    (first_row, second_row, *_) = [index for index, panel in enumerate(panels) if panel["type"] == "row"]
    families_of_nodes = {"gpu_devices", "gpu_devices_expected", "gpu_nvml_up"}
    ranges = {
        (match[1], match[2])
        for panel in panels[first_row + 1 : second_row]
        for target in panel["targets"]
        for match in re.finditer(r"\b((?:gpu|training)_\w+)(\{[^}]*\})\[\$__range", target["expr"])
    }

    assert ranges
    # With all runs selected, such a matcher selects nothing.
    of_all_gpus = {family for family, matchers in ranges if 'instance!~"$all_runs"' not in matchers}
    assert of_all_gpus - families_of_nodes == set()


@every_board
def test_all_is_a_pattern_and_not_a_list_of_values(uid: str) -> None:
    for variable in MODELS[uid]["templating"]["list"]:
        if variable["includeAll"]:
            assert variable.get("allValue") in {".*", ".+"}, f"${variable['name']}"


@every_board
def test_rates_cover_an_interval_that_follows_the_zoom(uid: str) -> None:
    for query in panel_queries(uid):
        for window in re.findall(r"\b(?:rate|irate|increase)\([^[]*\[([^]]*)\]", query.expression):
            assert window in {"$__rate_interval", "$__range", "2m", "5m", "1h"}, str(query)


@every_board
def test_links_lead_to_dashboards_and_variables_that_exist(uid: str) -> None:
    for target, query in re.findall(r"/d/([\w-]+)\?([^\"]*)", json.dumps(MODELS[uid])):
        variables = {variable["name"] for variable in MODELS[target]["templating"]["list"]}

        assert set(re.findall(r"var-(\w+)=", query)) <= variables
        assert "${__url_time_range}&${datasource:queryparam}" in query
        # Without percent-encoding, `+` in a value would become a blank and `#` would start the fragment.
        assert all(value.endswith(":percentencode}") for value in re.findall(r"var-\w+=([^&\"]*)", query))


@needs_prometheus
def test_every_query_is_valid_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{index}", "expr": fill_variables(query.expression)}
        for index, query in enumerate(query for uid in MODELS for query in all_queries(uid))
    ]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}), encoding="utf-8")

    completed = promtool("check", "rules", path)

    assert completed.returncode == 0, completed.stderr
    assert f"{len(rules)} rules found" in completed.stdout


SCREEN_PIXELS, GRID_GAP_PIXELS, GRID_MARGIN_PIXELS = 1366, 8, 16
"""Width of a small screen, the distance between panels, and the margins of a dashboard on both sides."""
MIN_TEXT_PIXELS = {
    ("training-fleet", "All runs, rates over 5 min", "What is wrong"): 355,
    ("training-fleet", "Firing alerts", "What happened"): 280,
    ("training-energy", "Cost and loss of each run", "What is wrong"): 355,
    ("training-energy", "Losses now", "Reason"): 215,
}
"""Minimum widths of columns whose texts are sentences."""


@pytest.mark.parametrize("uid", ["training-energy", "training-fleet"])
def test_the_columns_of_a_table_fit_a_small_screen(uid: str) -> None:
    tables = [panel for panel in MODELS[uid]["panels"] if panel["type"] == "table"]
    grid_pixels = SCREEN_PIXELS - 2 * GRID_MARGIN_PIXELS + GRID_GAP_PIXELS
    for panel in tables:
        widths = {
            override["matcher"]["options"]: item["value"]
            for override in panel["fieldConfig"]["overrides"]
            for item in override["properties"]
            if item["id"] in {"custom.width", "custom.minWidth"}
        } | {
            column: pixels
            for (board, title, column), pixels in MIN_TEXT_PIXELS.items()
            if (board, title) == (uid, panel["title"])
        }

        assert sum(widths.values()) <= grid_pixels * panel["gridPos"]["w"] / COLUMNS - GRID_GAP_PIXELS, panel[
            "title"
        ]
