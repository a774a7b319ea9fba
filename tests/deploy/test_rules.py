"""The rules of Prometheus: what they name exists, each has cases, and each alert can be acted upon."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from rules_support import (
    CASES,
    PROMETHEUS,
    ROOT,
    RULES,
    Rule,
    alerts,
    fill_annotations,
    labels_grouped,
    promtool,
    records,
    rules,
    script,
    selectors,
)

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="install Prometheus: apt-get install prometheus"
)

OF_TARGETS = frozenset({"job", "instance"})
"""Labels that Prometheus gives to every series."""

MADE = {"alerts-gpu.yml": {"signal"}, "recording-gpu.yml": {"uuid"}}
"""Labels that a rule makes with label_replace."""


def known() -> dict[str, frozenset[str]]:
    """Every name that a rule may ask for, with its labels."""
    names = {"up": frozenset[str]()}
    specs = [
        (spec.name, spec.type in {"histogram", "summary"}, frozenset(spec.labels))
        for listed in script(ROOT / "docs/generate_metrics.py").specs_by_module().values()
        for spec in listed
    ]
    for name, distribution, labels in specs:
        if distribution:
            names |= {f"{name}_sum": labels, f"{name}_count": labels, f"{name}_bucket": labels | {"le"}}
        else:
            names[name] = labels
    for rule in records():
        made = labels_grouped(rule.expr).union(*(names[each.name] for each in selectors(rule.expr)))
        names[rule.name] = frozenset(made)
    return names


@pytest.fixture(scope="module")
def names() -> dict[str, frozenset[str]]:
    return known()


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: f"{rule.file}:{rule.name}")
def test_a_rule_asks_only_for_families_and_labels_that_exist(
    rule: Rule, names: dict[str, frozenset[str]]
) -> None:
    found = list(selectors(rule.expr))
    labels = frozenset().union(*(names.get(each.name, frozenset()) for each in found)) | OF_TARGETS
    grouped = labels_grouped(rule.expr) - labels - MADE.get(rule.file, set())

    assert found, "no selector was found: the test reads the expression wrongly"
    assert [each.name for each in found if each.name not in names] == []
    assert [str(each) for each in found if each.labels - names[each.name] - OF_TARGETS] == []
    assert grouped == set()


def test_a_family_that_does_not_exist_is_noticed() -> None:
    expression = 'rate(gpu_powr_watts{gpu="0",kind=~"a|b"}[5m]) > on (run) group_left () 2 * max by (run) (b)'

    assert [str(each) for each in selectors(expression)] == ['gpu_powr_watts{gpu="0",kind=~"a|b"}', "b"]
    assert labels_grouped(expression) == {"run"}


@needs_promtool
def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    told = promtool("check", "rules", "--lint=all", "--lint-fatal", *RULES)

    assert (told.returncode, told.stderr) == (0, "")


@needs_promtool
@pytest.mark.timeout(90)  # promtool writes each evaluation to a database on disk
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_every_case_comes_out(path: Path) -> None:
    if os.environ.get("UPDATE_GOLDEN") == "1":
        fill_annotations(path)

    told = promtool("test", "rules", path)

    assert told.returncode == 0, told.stdout + told.stderr


@functools.cache
def cases() -> list[dict[str, object]]:
    return [case for path in CASES for case in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]]


@pytest.mark.parametrize("alert", alerts(), ids=lambda rule: rule.name)
def test_an_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(alert: Rule) -> None:
    outcomes = {
        bool(each["exp_alerts"])
        for case in cases()
        for each in case.get("alert_rule_test", [])  # type: ignore[attr-defined]  # YAML is untyped
        if each["alertname"] == alert.name
    }

    assert outcomes == {True, False}


@pytest.mark.parametrize("record", records(), ids=lambda rule: rule.name)
def test_a_record_has_a_case_that_knows_its_value(record: Rule) -> None:
    expressions = [
        each["expr"]
        for case in cases()
        for each in case.get("promql_expr_test", [])  # type: ignore[attr-defined]  # YAML is untyped
        if each["exp_samples"]
    ]

    assert any(each.name == record.name for text in expressions for each in selectors(text))


def test_records_are_named_by_level_metric_and_operation() -> None:
    assert [rule.name for rule in records() if not re.fullmatch(r"[a-z_]+:[a-z_]+:\w+", rule.name)] == []


def test_a_name_is_recorded_and_an_alert_defined_once() -> None:
    names = [rule.name for rule in rules()]

    assert sorted(names) == sorted(set(names))


@functools.cache
def headings() -> dict[str, str]:
    """Anchor of each section of the runbook → its text."""
    text = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    parts = re.split(r"^### (.+)$", text, flags=re.MULTILINE)
    return {name.lower(): body for name, body in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.parametrize("alert", alerts(), ids=lambda rule: rule.name)
def test_an_alert_says_what_happened_and_where_to_read_on(alert: Rule) -> None:
    annotations = alert.body["annotations"]
    page, _, anchor = annotations["runbook_url"].partition("#")
    section = headings()[anchor]

    assert set(annotations) == {"summary", "description", "condition", "dashboard", "runbook_url"}
    assert alert.body["labels"]["severity"] in {"info", "warning", "critical"}
    assert (ROOT / page).is_file()
    assert anchor == alert.name.lower()
    for part in ("**Means.**", "**Check.**", "**Do.**"):
        assert part in section


def test_the_runbook_has_no_section_of_an_alert_that_is_gone() -> None:
    assert set(headings()) == {alert.name.lower() for alert in alerts()}


@pytest.mark.parametrize("alert", alerts(), ids=lambda rule: rule.name)
def test_an_alert_leads_to_a_dashboard_that_exists_with_a_variable_that_it_has(alert: Rule) -> None:
    found = re.fullmatch(r"/d/([\w-]+)(?:\?(.*))?", alert.body["annotations"]["dashboard"])
    assert found is not None
    path = ROOT / f"dashboards/json/{found[1]}.json"
    variables = set(re.findall(r"var-(\w+)=", found[2] or ""))

    text = path.read_text(encoding="utf-8")
    there = {each["name"] for each in json.loads(text)["templating"]["list"]}

    assert variables - there == set()


def test_what_is_committed_is_what_the_thresholds_make() -> None:
    assert script(PROMETHEUS / "render.py").main(["--check"]) == 0


def test_a_row_of_the_runbooks_table_has_four_cells_whatever_is_in_them() -> None:
    table = (ROOT / "docs/runbook.md").read_text(encoding="utf-8").partition("<!-- end of alerts -->")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]

    assert len(rows) > len(alerts())
    assert [row for row in rows if len(re.findall(r"(?<!\\)\|", row)) != 5] == []


def test_a_threshold_of_ones_own_changes_the_rule_and_what_it_says(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text(
        "TrainingStraggler: {score_below: 0.6, for: 25m}\nrules: {grafana: 'https://grafana.example.org'}\n"
    )

    status = script(PROMETHEUS / "render.py").main(["--thresholds", str(own), "--output", str(tmp_path)])

    text = (tmp_path / "alerts-training.yml").read_text()
    assert status == 0
    assert "rank:training_straggler_score:ratio < 0.6\n" in text
    assert "compute time below 0.6 of a rank's own" in text
    assert "for: 25m" in text
    assert "dashboard: https://grafana.example.org/d/training-ranks?var-run=" in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("TrainingStragler: {score_below: 0.6}", "no threshold TrainingStragler.score_below; did you mean"),
        ("TrainingStraggler: 0.6", "TrainingStraggler: expected a mapping, found 0.6"),
        ("TrainingStraggler: {score_below: [1]}", "score_below: expected a number or a text, found [1]"),
        ("TrainingStraggler: {score_below: yes}", "score_below: expected a number or a text, found True"),
        ("- 1", "expected a mapping of alerts"),
        ("a: {b", "mine.yaml"),
    ],
)
def test_a_mistake_in_ones_own_thresholds_is_told(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text(text)

    status = script(PROMETHEUS / "render.py").main(["--thresholds", str(own), "--output", str(tmp_path)])

    assert (status, told in capsys.readouterr().err) == (2, True)
    assert list(tmp_path.glob("*.yml")) == []
