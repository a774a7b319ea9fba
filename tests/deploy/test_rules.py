"""Prometheus rules: existing names, cases for each rule, and actionable alerts. `tests/status` evaluates the cases."""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from places import PROJECT
from rules_support import (
    CASES,
    RULES,
    Rule,
    aggregation_labels,
    alerts,
    labels_by_name,
    load_yaml,
    needs_promtool,
    parse_expression,
    promtool,
    recording_rules,
    rules,
    rules_needed_by,
    runbook_sections,
    selectors,
    thresholds,
    without_empty_operands,
)

from exporter.hangs.explanation import AUTOGRAD, COLLECTIVES
from exporter.status.conditions.gpus import CRITICAL_XIDS

TARGET_LABELS = frozenset({"cluster", "job", "instance"})
"""Labels added by Prometheus, and by an agent or federation."""

COMPUTED_LABELS = {
    "alerts-energy.yml": {"uuid"},
    "alerts-gpu.yml": {"signal"},
    "recording-fleet.yml": {"cause"},
    "recording-gpu.yml": {"uuid", "action", "problem"},
    "recording-training.yml": {"label_stage", "cause", "steps", "target"},
}
"""Labels created by label_replace in a rule, or by exporter.configure(labels=...) in a job."""


def unknown_names(rule: Rule) -> list[str]:
    """Return the selectors and labels of a rule that no family and no earlier rule has."""
    names, rule_selectors = labels_by_name(), list(selectors(rule.expr))
    assert rule_selectors, f"{rule.name}: no selector found in the expression"
    labels = frozenset().union(*(names.get(selector.name, frozenset()) for selector in rule_selectors))
    unknown_labels = (
        aggregation_labels(rule.expr) - labels - TARGET_LABELS - COMPUTED_LABELS.get(rule.file, set())
    )
    return [
        *(
            str(selector)
            for selector in rule_selectors
            if selector.name not in names or selector.labels - names[selector.name] - TARGET_LABELS
        ),
        *unknown_labels,
    ]


def test_rules_use_only_existing_families_and_labels() -> None:
    unknown_by_rule = {
        f"{rule.file}:{rule.name}": unknown_names(rule) for rule in [*alerts(), *recording_rules()]
    }

    assert {rule: names for rule, names in unknown_by_rule.items() if names} == {}


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    completed_run = promtool("check", "rules", "--lint=all", "--lint-fatal", *RULES)

    assert completed_run.returncode == 0, completed_run.stderr
    assert completed_run.stderr == ""


@functools.cache
def checks(test_type: str) -> list[dict[str, Any]]:
    """Return the checks of a promtool test type in all cases."""
    cases = (case for path in CASES for case in load_yaml(path)["tests"])
    return [check for case in cases for check in case.get(test_type, [])]


def test_an_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    outcomes = {alert.name: set[bool]() for alert in alerts()}
    for check in checks("alert_rule_test"):
        outcomes[check["alertname"]].add(bool(check["exp_alerts"]))

    assert [name for name, fired in outcomes.items() if fired != {True, False}] == []


def test_a_recording_rule_has_a_case_with_its_value() -> None:
    expressions = [check["expr"] for check in checks("promql_expr_test") if check["exp_samples"]]
    tested_names = {selector.name for expression in expressions for selector in selectors(expression)}

    assert {record.name for record in recording_rules()} - tested_names == set()


@pytest.mark.parametrize("alert", alerts(), ids=lambda rule: rule.name)
def test_an_alert_has_a_summary_and_a_runbook_link(alert: Rule) -> None:
    annotations = alert.body["annotations"]
    page, anchor = resolve_link("runbook", annotations["runbook_url"]).split("#")
    section = runbook_sections()[anchor]

    assert set(annotations) == {"title", "summary", "description", "condition", "dashboard", "runbook_url"}
    assert alert.body["labels"]["severity"] in {"info", "warning", "critical"}
    assert page == SITE_LINKS["runbook"]
    assert anchor == alert.name.lower()
    for part in ("**Means.**", "**Check.**", "**Do.**"):
        assert part in section
    address = resolve_link("grafana", annotations["dashboard"])
    match = re.fullmatch(r"https://grafana/d/([\w-]+)(?:\?(.*))?", address)
    assert match is not None
    board = json.loads((PROJECT / f"dashboards/json/{match[1]}.json").read_text(encoding="utf-8"))
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert set(re.findall(r"var-(\w+)=", match[2] or "")) <= variables


SITE_LINKS = {"grafana": "https://grafana", "runbook": "https://runbook"}
"""Labels of `site:links:info` on an example site."""


def resolve_link(site: str, text: str) -> str:
    """Return the address that a link annotation has on the example site."""
    prefix = '{{ with query "site:links:info" }}{{ . | first | label "SITE" }}{{ end }}'.replace("SITE", site)

    assert text.startswith(prefix)
    return SITE_LINKS[site] + text.removeprefix(prefix)


def test_the_default_links_name_no_host_of_the_developer() -> None:
    (links,) = (rule for rule in thresholds() if rule.name == "site:links:info")

    assert "labels" not in links.body
    assert "localhost" not in links.expr


def test_a_rate_of_a_clock_limit_above_one_is_not_reported() -> None:
    """A rate above one follows a counter that restarted at a value other than 0, and is not a duration."""
    rate = re.compile(r"rate\(gpu_clocks_event_seconds_total\{[^}]*\}\[\w+\]\)( <= 1\.1)?")
    limits = [limit for rule in rules() for limit in rate.findall(rule.expr)]

    assert set(limits) == {" <= 1.1"}


def test_the_rule_of_hanging_groups_has_the_collectives_of_the_stack_explanation() -> None:
    (order,) = (rule for rule in rules() if rule.name == "run_group:training_hang_order:count")
    match = re.search(r'function!~"\(\.\*\[\.\]\)\?\(([\w|]+)\)\|([^"]+)"', order.expr)

    assert match is not None
    assert set(match[1].split("|")) == COLLECTIVES
    assert re.fullmatch(match[2], AUTOGRAD)


TABLE_PATTERN = re.compile(r"(?<=<!-- alerts -->\n\n).*?(?=\n<!-- end of alerts -->)", re.DOTALL)


def test_the_table_of_the_runbook_matches_the_alerts() -> None:
    """With UPDATE_GOLDEN=1, write the table first."""
    path = PROJECT / "docs/runbook.md"
    rows = ["| alert | severity | for | fires when |", "|---|---|---|---|"]
    for alert in alerts():
        condition = alert.body["annotations"]["condition"].replace("|", "\\|")  # otherwise a new cell
        name, pending_time = f"[{alert.name}](#{alert.name.lower()})", alert.body.get("for", "at once")
        rows.append(f"| {name} | {alert.body['labels']['severity']} | {pending_time} | {condition} |")
    table = "\n".join([*rows, ""])
    assert set(runbook_sections()) == {alert.name.lower() for alert in alerts()}
    document = path.read_text(encoding="utf-8")
    if os.environ.get("UPDATE_GOLDEN") == "1":
        document = TABLE_PATTERN.sub(lambda _: table, document)
        path.write_text(document, encoding="utf-8")

    assert TABLE_PATTERN.findall(document) == [table]


def test_the_runbook_explains_each_xid_of_the_critical_alert() -> None:
    explanation = runbook_sections()["gpuxidcritical"].split("For these,")[0]

    assert {int(number) for number in re.findall(r"\b\d+\b", explanation)} == CRITICAL_XIDS


def test_a_rule_is_defined_once_and_a_record_named_by_level_metric_and_operation() -> None:
    names = [rule.name for rule in rules()]
    record_names = [rule.name for rule in [*recording_rules(), *thresholds()]]

    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z_]+:[a-z_]+:\w+", name) for name in record_names)


def test_every_threshold_is_used_and_named_in_the_condition_of_its_alert() -> None:
    threshold_names = {rule.name for rule in thresholds() if rule.name.startswith("threshold:")}
    used_thresholds = {name for alert in alerts() for name in re.findall(r"threshold:[a-z_:]+", alert.expr)}
    unnamed_alerts = [
        alert.name
        for alert in alerts()
        for name in re.findall(r"scalar\((threshold:[a-z_:]+)\)", alert.expr)
        if name not in alert.body["annotations"]["condition"]
    ]

    assert threshold_names
    assert used_thresholds == threshold_names
    assert unnamed_alerts == []


@pytest.mark.parametrize(
    ("sample_count", "interval_seconds", "age_seconds"),
    [(3, 60, 120), (50, 60, None), (2100, 300, 604800)],
    ids=["a new problem starts with its first sample", "an older one has no start", "a week ago"],
)
@pytest.mark.parametrize(
    "start", [rule for rule in recording_rules() if "_onset:" in rule.expr], ids=lambda rule: rule.name
)
@needs_promtool
def test_the_start_of_a_problem_without_a_recorded_onset_is_never_too_early(
    tmp_path: Path, start: Rule, sample_count: int, interval_seconds: int, age_seconds: int | None
) -> None:
    """The onset may be missing: the database has deleted it, or writes a sample after the next rule has read it."""
    problem = start.expr.rsplit("and ", 1)[1]
    values = f"_x20 {20 * interval_seconds}+{interval_seconds}x{sample_count - 1}"
    end = interval_seconds * (19 + sample_count)
    ages = [] if age_seconds is None else [{"labels": "{}", "value": age_seconds}]
    age = f"time() - ({start.expr})"
    case = {
        "interval": f"{interval_seconds}s",
        "input_series": [{"series": problem, "values": values}],
        "promql_expr_test": [{"expr": age, "eval_time": f"{end}s", "exp_samples": ages}],
    }
    path = tmp_path / "case.json"
    path.write_text(json.dumps({"evaluation_interval": "5m", "tests": [case]}), encoding="utf-8")

    completed = promtool("test", "rules", path)

    assert completed.returncode == 0, completed.stdout + completed.stderr


@pytest.mark.parametrize(
    ("expression", "has_result"),
    [
        ('present{run="a"}', True),
        ("absence", False),
        ("sum by (run) (absence) or on (run) present", True),
        ("present and on (run) absence", False),
        ("present unless absence", True),
        ("absence unless present", False),
        ("present and (absence or present)", True),
        ("100 * present / on (run) group_left (node) rate(absence[5m])", False),
        ("present > bool scalar(absence) - 1e-3", True),
        ('label_replace(absence, "a", "present", "", "")', False),
        ("present * on () vector(1) unless present", True),
        ("absent(absence)", True),
        ("present + topk by (run) (3, (absence offset 5m))", False),
    ],
)
def test_an_expression_has_no_result_if_a_needed_series_is_absent(
    expression: str, *, has_result: bool
) -> None:
    assert parse_expression(expression).condition.holds({"present"}) == has_result


@pytest.mark.parametrize(
    ("expression", "shortened"),
    [
        ("present or absence", "present "),
        ("absence or on (run) absence or on (run) present", "present"),
        ("present or on (run) present * absence or present", "present or present"),
        ("present unless on (run) absence", "present "),
        ("absence or absence", "absence or absence"),
        ("absence unless present", "absence unless present"),
        ("sum(absence or present[5m]) + (present or (absence or absence))", "sum(present[5m]) + (present )"),
        (
            'label_replace((absence or present) or vector(1), "a", "b", "", "")',
            'label_replace((present) or vector(1), "a", "b", "", "")',
        ),
    ],
)
def test_the_operands_of_or_and_unless_without_a_result_are_left_out(expression: str, shortened: str) -> None:
    assert without_empty_operands(expression, {"present"}) == shortened


@pytest.mark.parametrize(
    ("expression", "past_names"),
    [
        ("a + on (b) c", set()),
        ("rate(a[5m]) + c", {"a"}),
        ('(a + max_over_time((b + c{run="[x"})[5m:15s])) * d', {"b", "c"}),
        ('a{run="r"} offset 5m or b @ 0', {"a", "b"}),
    ],
)
def test_an_expression_reads_the_past_in_ranges_in_subqueries_and_with_an_offset(
    expression: str, past_names: set[str]
) -> None:
    assert parse_expression(expression).past_names == past_names


def test_a_problem_needs_the_history_of_its_onset_and_only_rules_with_a_result() -> None:
    start = rules_needed_by(["run:training_nonfinite_start:timestamp_seconds"], ["training_nonfinite_total"])
    nothing = rules_needed_by(["run:training_nonfinite_start:timestamp_seconds"], ["gpu_up"])

    assert start.need_history
    assert "run:training_nonfinite_onset:timestamp_seconds" in {rule.name for rule in start.rules}
    assert nothing.rules == []
