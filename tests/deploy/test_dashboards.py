"""Dashboards: the JSON is the code's, every panel is complete, every name in a query exists, links resolve."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dashboards_support import FEW_LABELS, MODELS, asked, everything, filled
from prometheus_support import needs_prometheus
from rules_support import ROOT, known, labels_grouped, promtool, selectors

from dashboards.board import COLUMNS, all_panels, read_texts

every_board = pytest.mark.parametrize("uid", sorted(MODELS))

OF_TARGETS = {"cluster", "job", "instance", "le", *FEW_LABELS}
OF_NO_RUN = {"exporter_build_info", "gpu_up"}
"""These series have no run label, and a matcher for every run also selects them."""
OF_ALERTS = OF_TARGETS | {"alertname", "alertstate", "severity", "run", "rank", "gpu"}
OF_PROMETHEUS = {"scrape_duration_seconds": OF_TARGETS, "ALERTS": OF_ALERTS, "ALERTS_FOR_STATE": OF_ALERTS}
"""Series that Prometheus writes itself, with their labels."""


def test_the_committed_json_is_generated_from_the_code() -> None:
    command = [sys.executable, "-m", "dashboards", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, f"run `python -m dashboards`\n{done.stdout}{done.stderr}"


@every_board
def test_panels_have_unique_titles_and_do_not_overlap(uid: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in MODELS[uid]["panels"]:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        cells = set(itertools.product(range(x, x + w), range(y, y + h)))

        assert x + w <= COLUMNS
        assert not cells & taken, panel["title"]
        taken |= cells
    panels = all_panels(MODELS[uid])
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    assert {panel["title"] for panel in panels} == set(read_texts(uid))


@every_board
def test_a_panel_has_a_unit_a_description_and_draws_no_line_over_a_gap(uid: str) -> None:
    for panel in all_panels(MODELS[uid]):
        defaults = panel["fieldConfig"]["defaults"]
        _, bad, do, gap = panel["description"].split("\n\n")

        assert bad.startswith("**Bad:** ")
        assert do.startswith("**Action:** ")
        assert gap.startswith("**A gap or no data:** ")
        assert defaults["unit"]
        assert defaults["noValue"]
        assert "interval" not in panel, "a panel's minimal step breaks $__rate_interval"
        assert panel["targets"]
        if panel["type"] in {"timeseries", "state-timeline"}:
            assert (defaults["custom"]["spanNulls"], defaults["custom"]["insertNulls"]) == (False, False)
        if panel["type"] in {"stat", "bargauge", "table"}:  # the last of a series may be an hour old
            assert all(target["instant"] for target in panel["targets"])


def test_an_incomplete_panel_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A\n\n### Loss\n\nWhat it is.\n\n**Bad:** a rise.\n\n**Empty:** none\n")

    with pytest.raises(ValueError, match="Loss: missing Action"):
        read_texts("a", tmp_path)


def names_on_boards() -> set[str]:
    """Names that a description may mention: boards, rows, panels, columns, legends and texts of values."""
    found = {model["title"].removeprefix("Training / ") for model in MODELS.values()}
    for model in MODELS.values():
        found |= {panel["title"] for panel in model["panels"]}
        for panel in all_panels(model):
            found |= {panel["title"], *(target["legendFormat"] for target in panel["targets"])}
            found |= set(re.findall(r'"(?:text|[^"]*)": "([^"]*)"', json.dumps(panel)))
    return found


@every_board
def test_a_panel_that_a_description_names_exists(uid: str) -> None:
    names = names_on_boards() | {"unattributed", "failed", "lost", "hung", "stalled"}
    for panel in all_panels(MODELS[uid]):
        for name in re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", panel["description"]):
            assert name in names, f"{panel['title']}: there is no {name}"


@every_board
def test_every_name_and_label_in_a_query_exists(uid: str) -> None:
    names = known() | {name: frozenset(labels) for name, labels in OF_PROMETHEUS.items()}
    for one in everything(uid):
        found = list(selectors(filled(one.expression)))
        labels = OF_TARGETS.union(*(names.get(each.name, set()) for each in found))
        made = re.findall(
            r'label_replace\([^"]*"(\w+)"|, "(\w+)", "|count_values by \(\w+\) \("(\w+)"', one.expression
        )

        assert found, str(one)
        for each in found:
            assert each.name in names, f"{one}: {each.name} is neither in docs/METRICS.md nor made by a rule"
            none = {"run"} if each.name in OF_NO_RUN else set()
            assert each.labels <= names[each.name] | OF_TARGETS | none, f"{one}: {each}"
        assert labels_grouped(one.expression) <= labels.union(*made), str(one)


@every_board
def test_only_the_fleet_uses_recorded_series(uid: str) -> None:
    of_chosen_runs = {panel["title"] for panel in MODELS["training-fleet"]["panels"][-1]["panels"]}
    for one in asked(uid):
        recorded = uid == "training-fleet" and one.panel not in of_chosen_runs
        for each in selectors(filled(one.expression)):
            assert each.name.startswith("ALERTS") or (":" in each.name) == recorded, f"{one}: {each}"


@every_board
def test_a_single_value_variable_is_compared_literally_and_a_multi_value_one_as_a_pattern(uid: str) -> None:
    variables = [each for each in MODELS[uid]["templating"]["list"] if each["type"] == "query"]
    several = {variable["name"]: variable["multi"] for variable in variables}
    for one in everything(uid):
        for sign, name in re.findall(r'(=~|=)"\$(\w+)"', one.expression):
            assert (sign == "=~") == several[name], f"{one}: a run may be called lr+wd(3)"


@every_board
def test_rates_cover_an_interval_that_follows_the_zoom(uid: str) -> None:
    for one in asked(uid):
        for window in re.findall(r"\b(?:rate|irate|increase)\([^[]*\[([^]]*)\]", one.expression):
            assert window in {"$__rate_interval", "$__range", "5m"}, str(one)


@every_board
def test_links_lead_to_dashboards_and_variables_that_exist(uid: str) -> None:
    for target, query in re.findall(r"/d/([\w-]+)\?([^\"]*)", json.dumps(MODELS[uid])):
        variables = {variable["name"] for variable in MODELS[target]["templating"]["list"]}

        assert set(re.findall(r"var-(\w+)=", query)) <= variables
        assert "${__url_time_range}&${datasource:queryparam}" in query
        # Grafana inserts a value without escaping: `+` would become a blank, `#` the end.
        assert all(value.endswith(":percentencode}") for value in re.findall(r"var-\w+=([^&\"]*)", query))


@needs_prometheus
def test_every_query_is_valid_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{place}", "expr": filled(one.expression)}
        for place, one in enumerate(one for uid in MODELS for one in everything(uid))
    ]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}), encoding="utf-8")

    done = promtool("check", "rules", path)

    assert done.returncode == 0, done.stderr
    assert f"{len(rules)} rules found" in done.stdout
