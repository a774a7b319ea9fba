"""Numbers and lists in the texts of the panels: each equals the constant or the threshold of the panel."""

from __future__ import annotations

import re
from typing import Any

import pytest
from dashboards_support import MODELS
from rules_support import rules

from dashboards import (
    cost_and_loss,
    gpu_load,
    gpu_problems,
    gpus,
    losses_now,
    rank_problems,
    unsaved_work,
)
from dashboards.board import all_panels
from exporter.status.conditions.gpus import CRITICAL_XIDS

WORDS = {2: "two", 3: "three", 6: "six", 8: "eight"}
PANELS: dict[tuple[str, str], dict[str, Any]] = {
    (uid, panel["title"]): panel for uid, model in MODELS.items() for panel in all_panels(model)
}
OTHER_PERCENTAGES = {("training-node", "Pressure"): {0.3}}
"""Percentages in the paragraph *Bad* that have no threshold: the threshold line is for all resources, and I/O has a lower limit."""


def percent(ratio: float) -> str:
    return f"{100 * ratio:g} %"


def minutes(seconds: float) -> str:
    return f"{WORDS[round(seconds / 60)]} minutes"


@pytest.mark.parametrize(
    ("uid", "title", "phrase"),
    [
        ("training-gpus", "Health of each GPU", f"more than {gpu_problems.MAX_GPUS} GPUs"),
        (
            "training-gpus",
            "Health of each GPU",
            f"the power brake (more than {percent(gpu_problems.MAX_THROTTLED_RATIO)} of the time)",
        ),
        (
            "training-gpus",
            "Exporters, drivers and GPUs with a failure",
            f"at most {WORDS[gpus.MAX_ROWS_PER_KIND]} exporters",
        ),
        ("training-gpus", "NVLink traffic", f"the {WORDS[gpu_load.MAX_LINES]} GPUs"),
        ("training-gpus", "SM activity", f"at its end, at most {WORDS[gpu_load.MAX_FREE_LINES]}"),
        (
            "training-node",
            "Ranks on this node",
            f"not reported for {rank_problems.SILENT_SECONDS} s",
        ),
        ("training-node", "Age of each rank's feed", f"the dashed line at {rank_problems.SILENT_SECONDS} s"),
        (
            "training-node",
            "Runs on this node",
            f"the largest cause above {percent(cost_and_loss.MIN_DISPLAYED_CAUSE_SHARE)}",
        ),
        (
            "training-fleet",
            "All runs, rates over 5 min",
            f"more than {percent(cost_and_loss.MIN_LOSS_SHARE)} of its time ({percent(cost_and_loss.MIN_LARGE_LOSS_SHARE)}: red)",
        ),
        ("training-fleet", "Runs", minutes(losses_now.RUNNING_WITHOUT_PROGRESS_SECONDS)),
        (
            "training-run",
            "Losses now, by cause",
            f"without a step for {minutes(losses_now.RUNNING_WITHOUT_PROGRESS_SECONDS)}",
        ),
        ("training-run", "What is wrong", f"the {WORDS[rank_problems.MAX_ROWS]} slowest"),
        ("training-ranks", "What is wrong", f"the {WORDS[rank_problems.MAX_ROWS]} slowest"),
        (
            "training-ranks",
            "All ranks, the worst first",
            f"a speed below {percent(rank_problems.SLOW_RATIO)}",
        ),
        (
            "training-run",
            "Work at risk or lost",
            f"{WORDS[unsaved_work.OVERDUE_INTERVALS]} times the usual time",
        ),
        (
            "training-energy",
            "Losses now",
            f"({percent(cost_and_loss.MIN_LARGE_LOSS_SHARE)}: red)",
        ),
        (
            "training-energy",
            "Losses now",
            f"*loses time* is at least {percent(cost_and_loss.MIN_LOSS_SHARE)} of the time",
        ),
        (
            "training-run",
            "Losses now, by cause",
            f"more than {percent(cost_and_loss.MIN_LOSS_SHARE)} of the time after the start",
        ),
    ],
)
def test_a_number_in_a_text_equals_the_constant(uid: str, title: str, phrase: str) -> None:
    assert phrase in PANELS[uid, title]["description"]


def test_the_losses_now_name_no_time_range_that_the_rule_does_not_read() -> None:
    (expression,) = [rule.expr for rule in rules() if rule.name == "run:training_lost_unlimited:ratio"]
    description = PANELS["training-run", "Losses now, by cause"]["description"]
    (sentence,) = re.findall(r"Waiting for data[^.]*\.", description)

    assert ("last hour" in sentence) == ("1h" in expression)


def test_the_worst_problems_of_a_gpu_are_listed_in_their_order() -> None:
    text = PANELS["training-gpus", "Health of each GPU"]["description"]

    positions = [text.find(problem.name) for problem in gpu_problems.GPU_PROBLEMS]
    assert min(positions) > 0
    assert positions == sorted(positions)


def test_the_numbers_and_names_of_the_problems_of_a_gpu_are_those_of_the_rule() -> None:
    (expression,) = [rule.expr for rule in rules() if rule.name == "gpu:gpu_fault:urgency"]
    critical, others = (f"Xid {xid}" for xid in (min(CRITICAL_XIDS), 13))
    recorded = {
        int(number): text for number, text in re.findall(r'\+ (\d+),\s+"problem", "([^"]+)"', expression)
    }
    examples = {509: critical, 202: others}

    values = gpu_problems.gpu_problem_values()
    assert recorded.keys() == values.keys()
    for number, text in recorded.items():
        problem = examples.get(number, text.replace("$1", "gpu_is_lost"))
        assert next(name for name in values.values() if re.fullmatch(name.matcher, problem)) == values[number]
    for xids in re.findall(r'xid[=!]~"([\d|]+)"', expression):
        assert {int(xid) for xid in xids.split("|")} == CRITICAL_XIDS


PANELS_WITH_OUTLIERS = [
    title
    for (uid, title), panel in PANELS.items()
    if uid == "training-gpus" and " the median" in panel["description"]
]


def test_every_panel_that_marks_outliers_explains_them() -> None:
    marking_panels = {
        title
        for (_, title), panel in PANELS.items()
        if any(gpu_load.OUTLIER_NOTE in target["expr"] for target in panel["targets"])
    }

    assert marking_panels
    assert marking_panels <= set(PANELS_WITH_OUTLIERS)


@pytest.mark.parametrize("title", PANELS_WITH_OUTLIERS)
def test_the_distance_of_an_outlier_is_that_of_the_query(title: str) -> None:
    panel = PANELS["training-gpus", title]
    distances = re.findall(
        r"> (?:on \(run\) group_left \(\) \()?([\d.]+)(?:\)| \* quantile)", panel["targets"][0]["expr"]
    )
    texts = re.findall(r"outliers, GPUs (?:throttled for )?more than ([\d.]+) (%|°C)", panel["description"])
    unit = panel["fieldConfig"]["defaults"]["unit"]

    expected = {
        (
            f"{float(number) * (1 if unit == 'celsius' else 100):g}",
            "°C" if unit == "celsius" else "%",
        )
        for number in distances
        if gpu_load.OUTLIER_NOTE in panel["targets"][0]["expr"]
    }
    assert set(texts) == expected


@pytest.mark.parametrize(("uid", "title"), PANELS)
def test_a_percentage_that_is_called_bad_is_a_threshold_if_the_panel_has_thresholds_of_ratios(
    uid: str, title: str
) -> None:
    panel = PANELS[uid, title]
    properties = [entry for override in panel["fieldConfig"]["overrides"] for entry in override["properties"]]
    thresholds = [entry["value"] for entry in properties if entry["id"] == "thresholds"]
    thresholds.append(panel["fieldConfig"]["defaults"]["thresholds"])
    bounds = {step["value"] for threshold in thresholds for step in threshold["steps"]}
    ratios = {bound for bound in bounds if bound is not None and 0 < bound < 1}
    bad_paragraph = panel["description"].split("\n\n")[-3]

    stated = {float(number) / 100 for number in re.findall(r"(?:above|below|than) (\d+) %", bad_paragraph)}
    if ratios:
        assert stated <= ratios | OTHER_PERCENTAGES.get((uid, title), set())
