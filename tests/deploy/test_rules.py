"""Prometheus rules: existing names, cases for each rule, and actionable alerts."""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from rules_support import (
    CASES,
    ROOT,
    RULES,
    Rule,
    aggregation_labels,
    alerts,
    fill_annotations,
    headings,
    labels_by_name,
    needs_promtool,
    promtool,
    records,
    rules,
    selectors,
    thresholds,
)

OF_TARGETS = frozenset({"cluster", "job", "instance"})
"""Labels added by Prometheus, and by an agent or federation."""

COMPUTED = {
    "alerts-energy.yml": {"uuid"},
    "alerts-gpu.yml": {"signal"},
    "recording-gpu.yml": {"uuid"},
    "recording-training.yml": {"label_stage"},
}
"""Labels created by label_replace in a rule, or by exporter.configure(labels=...) in a job."""


@pytest.mark.parametrize("rule", [*alerts(), *records()], ids=lambda rule: f"{rule.file}:{rule.name}")
def test_a_rule_uses_only_existing_families_and_labels(rule: Rule) -> None:
    names, matched = labels_by_name(), list(selectors(rule.expr))
    labels = frozenset().union(*(names.get(rule.name, frozenset()) for rule in matched)) | OF_TARGETS
    grouped = aggregation_labels(rule.expr) - labels - COMPUTED.get(rule.file, set())

    assert matched, "no selector was found: the test reads the expression wrongly"
    assert [rule.name for rule in matched if rule.name not in names] == []
    assert [str(rule) for rule in matched if rule.labels - names[rule.name] - OF_TARGETS] == []
    assert grouped == set()


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    received = promtool("check", "rules", "--lint=all", "--lint-fatal", *RULES)

    assert (received.returncode, received.stderr) == (0, "")


@needs_promtool
@pytest.mark.timeout(90)  # promtool writes each evaluation to a database on disk
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_every_case_gives_the_expected_alerts(path: Path) -> None:
    if os.environ.get("UPDATE_GOLDEN") == "1":
        fill_annotations(path)

    received = promtool("test", "rules", path)

    assert received.returncode == 0, received.stdout + received.stderr


@functools.cache
def checks(kind: str) -> list[dict[str, Any]]:
    """Every check of a kind in all cases."""
    cases = (case for path in CASES for case in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"])
    return [check for case in cases for check in case.get(kind, [])]


@pytest.mark.parametrize("alert", alerts(), ids=lambda rule: rule.name)
def test_an_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(alert: Rule) -> None:
    matched = [check for check in checks("alert_rule_test") if check["alertname"] == alert.name]

    assert {bool(alert["exp_alerts"]) for alert in matched} == {True, False}


def test_a_recording_rule_has_a_case_with_its_value() -> None:
    received = [check["expr"] for check in checks("promql_expr_test") if check["exp_samples"]]
    valued = {selector.name for text in received for selector in selectors(text)}

    assert {record.name for record in records()} - valued == set()


@pytest.mark.parametrize("alert", alerts(), ids=lambda rule: rule.name)
def test_an_alert_has_a_summary_and_a_runbook_link(alert: Rule) -> None:
    annotations = alert.body["annotations"]
    page, anchor = linked("runbook", annotations["runbook_url"]).split("#")
    section = headings()[anchor]

    assert set(annotations) == {"summary", "description", "condition", "dashboard", "runbook_url"}
    assert alert.body["labels"]["severity"] in {"info", "warning", "critical"}
    assert re.fullmatch(r"https?://[^/]+/runbook", page)  # served by each exporter
    assert anchor == alert.name.lower()
    for part in ("**Means.**", "**Check.**", "**Do.**"):
        assert part in section
    address = linked("grafana", annotations["dashboard"])
    match = re.fullmatch(r"https?://[^/]+/d/([\w-]+)(?:\?(.*))?", address)
    assert match is not None
    board = json.loads((ROOT / f"dashboards/json/{match[1]}.json").read_text(encoding="utf-8"))
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert set(re.findall(r"var-(\w+)=", match[2] or "")) <= variables


def linked(site: str, text: str) -> str:
    """An address resolved with the links of thresholds.yml."""
    [links] = [rule.body["labels"] for rule in thresholds() if rule.name == "site:links:info"]
    begins = '{{ with query "site:links:info" }}{{ . | first | label "SITE" }}{{ end }}'.replace("SITE", site)

    assert text.startswith(begins)
    return str(links[site]) + text.removeprefix(begins)


TABLE = re.compile(r"(?<=<!-- alerts -->\n\n).*?(?=\n<!-- end of alerts -->)", re.DOTALL)


def test_the_table_of_the_runbook_matches_the_alerts() -> None:
    """UPDATE_GOLDEN=1 writes it."""
    path = ROOT / "docs/runbook.md"
    rows = ["| alert | severity | for | fires when |", "|---|---|---|---|"]
    for alert in alerts():
        condition = alert.body["annotations"]["condition"].replace("|", "\\|")  # otherwise a new cell
        name, pending_time = f"[{alert.name}](#{alert.name.lower()})", alert.body.get("for", "at once")
        rows.append(f"| {name} | {alert.body['labels']['severity']} | {pending_time} | {condition} |")
    table = "\n".join([*rows, ""])
    assert set(headings()) == {alert.name.lower() for alert in alerts()}
    document = path.read_text(encoding="utf-8")
    if os.environ.get("UPDATE_GOLDEN") == "1":
        document = TABLE.sub(lambda _: table, document)
        path.write_text(document, encoding="utf-8")

    assert TABLE.findall(document) == [table]


def test_a_rule_is_defined_once_and_a_record_named_by_level_metric_and_operation() -> None:
    names = [rule.name for rule in rules()]
    recorded = [rule.name for rule in [*records(), *thresholds()]]

    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z_]+:[a-z_]+:\w+", name) for name in recorded)


def test_every_threshold_is_used_and_named_in_the_condition_of_its_alert() -> None:
    defined = {rule.name for rule in thresholds() if rule.name.startswith("threshold:")}
    used_thresholds = {name for alert in alerts() for name in re.findall(r"threshold:[a-z_:]+", alert.expr)}
    unnamed = [
        alert.name
        for alert in alerts()
        for name in re.findall(r"scalar\((threshold:[a-z_:]+)\)", alert.expr)
        if name not in alert.body["annotations"]["condition"]
    ]

    assert defined
    assert used_thresholds == defined
    assert unnamed == []
