"""The cases of the alerts (deploy/prometheus/tests), and the conditions of the status page over the same series.

promtool evaluates each file of cases once. The page is drawn from the samples that each exporter has at the times of a case.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.core import Metric
from rules_support import (
    CASES,
    alerts,
    fill_annotations,
    load_yaml,
    needs_promtool,
    promtool,
    runbook_sections,
    thresholds,
    write_alert_rules,
)

from exporter.families import Distribution, Family, FamilyType
from exporter.status.condition import Finding
from exporter.status.conditions import (
    CONDITIONS,
    NOT_DECIDED,
    checkpoints,
    findings,
    gpu_links,
    gpus,
    ranks,
    runs,
)
from exporter.status.history import History
from exporter.status.samples import SampleIndex
from exporter.status.thresholds import THRESHOLD_BY_SERIES
from exporter.status.view import ExporterInfo, build_view

SERIES = re.compile(r"^(?P<name>[\w:]+)\{(?P<labels>.*)\}$")
LABEL = re.compile(r'(\w+)="([^"]*)"')
VALUE_RANGE = re.compile(r"^(?P<start>-?[\d.e+]+?)(?P<by>[+-][\d.e+]+)?x(?P<times>\d+)$")
ACTUAL_SERIES = re.compile(r"\{([^{}]*)\} 1E\+00")
"""Series with the value 1 as promtool prints it."""
TARGET_LABELS = {"cluster", "job", "instance", "pod"}
RUN_ALERTS = {
    condition.alert_name for module in (runs, ranks, checkpoints) for condition in module.CONDITIONS
}
GPU_ALERTS = {condition.alert_name for module in (gpus, gpu_links) for condition in module.CONDITIONS}
CROSS_NODE_ALERTS = {"GpuStraggler", "TrainingStraggler"}
"""Alerts that compare the ranks or GPUs of all nodes, whereas a page compares the ranks or GPUs of its node."""


@dataclass(frozen=True)
class Series:
    """A series of a case, with a value for each scrape."""

    name: str
    labels: dict[str, str]
    values: tuple[float | None, ...]

    @property
    def target(self) -> tuple[str, str]:
        """Cluster and address of the exporter that exposes the series."""
        return self.labels.get("cluster", ""), self.labels.get("instance", "")


@dataclass(frozen=True, order=True)
class ActiveCondition:
    """An alert, or the condition of a page, that holds: for a run, for a GPU, or for a node."""

    alert: str
    instance: str
    subject: str  # a run or the UUID of a GPU

    @classmethod
    def from_labels(cls, alert: str, instance: str, run: str, uuid: str) -> ActiveCondition:
        """Return the alert with the labels that identify its subject. Alerts of runs are not bound to a node."""
        if alert in RUN_ALERTS:
            return cls(alert, "", run)
        return cls(alert, instance, uuid if alert in GPU_ALERTS else "")


@dataclass(frozen=True)
class Case:
    """A case of the alerts."""

    path: Path
    index: int  # position in the file

    def __str__(self) -> str:
        return f"{self.path.stem}-{self.index}"

    @property
    def body(self) -> dict[str, Any]:
        """The case as written in the file."""
        return load_tests(self.path)["tests"][self.index]  # type: ignore[no-any-return]  # YAML

    @property
    def times(self) -> list[float]:
        """Times at which the case checks an alert, in seconds."""
        return sorted({seconds_of(check["eval_time"]) for check in self.body.get("alert_rule_test", ())})

    @property
    def series(self) -> list[Series]:
        """Series of the exporters in the case."""
        series = []
        for entry in self.body.get("input_series", ()):
            match = SERIES.match(entry["series"])
            assert match, entry["series"]
            labels = dict(LABEL.findall(match["labels"]))
            if labels.get("job", "training").startswith("training"):
                series.append(Series(match["name"], labels, expand_series(entry["values"])))
        return series

    def runs(self, time_seconds: float) -> set[str]:
        """Return the runs that have a state at a time."""
        scrape = int(time_seconds // seconds_of(self.body["interval"]))
        states = [series for series in self.series if series.name == "training_run_state"]
        return {series.labels["run"] for series in states if 1.0 in series.values[scrape : scrape + 1]}


def seconds_of(duration: str) -> float:
    """Return the seconds of a duration in Prometheus' notation."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"(\d+)([smhd])", duration))


def expand_series(notation: str) -> tuple[float | None, ...]:
    """Return the values of promtool's notation, with None where the series has no sample."""
    values: list[float | None] = []
    for token in notation.split():
        if token in {"stale", "_"}:
            values.append(None)
        elif token.startswith("_x"):
            values += [None] * int(token[2:])
        elif match := VALUE_RANGE.match(token):
            start, increment = float(match["start"]), float(match["by"] or 0)
            values += [start + increment * step for step in range(int(match["times"]) + 1)]
        else:
            values.append(float(token))
    return tuple(values)


@functools.cache
def load_tests(path: Path) -> dict[str, Any]:
    test_file: dict[str, Any] = load_yaml(path)
    return test_file


@functools.cache
def cases() -> tuple[Case, ...]:
    all_cases = [Case(path, index) for path in CASES for index in range(len(load_tests(path)["tests"]))]
    return tuple(case for case in all_cases if case.times and case.series)


ACTIVE_ALERTS = "group by (alertname, instance, run, uuid) (ALERTS)"
"""Query for the alerts that are pending or fire."""


@dataclass(frozen=True)
class Evaluation:
    """Result of the evaluation of a file of cases."""

    failed_checks: list[str]
    alerts: dict[Case, list[set[ActiveCondition]]]
    """Alerts that are pending or fire at each time of a case."""


@functools.cache
def evaluate(path: Path) -> Evaluation:
    """Evaluate the cases of a file with promtool, each with the rules that it needs."""
    test_file = load_tests(path)
    rule_files = [Path(name).name for name in test_file["rule_files"]]
    cases_by_index = {case.index: case for case in cases() if case.path == path}
    cases_of_file = list(cases_by_index.values())
    with tempfile.TemporaryDirectory() as directory:
        case_paths = []
        for index, body in enumerate(test_file["tests"]):
            case = cases_by_index.get(index)
            queries = [
                {
                    "expr": ACTIVE_ALERTS,
                    "eval_time": f"{time_seconds:.0f}s",
                    # The expectation fails, so that promtool prints the actual series.
                    "exp_samples": [{"labels": '{alertname="none"}', "value": 0}],
                }
                for time_seconds in (case.times if case else ())
            ]
            rules_path = Path(directory) / f"rules-{index}.json"
            series_names = [entry["series"].partition("{")[0] for entry in body.get("input_series", ())]
            expressions = [check["expr"] for check in body.get("promql_expr_test", ())]
            group_order = write_alert_rules(rules_path, rule_files, series_names, expressions)
            case_paths.append(Path(directory) / f"case-{index}.yaml")
            case_file = test_file | {
                "rule_files": [rules_path.name],
                # promtool evaluates groups in random order otherwise: an alert would see a recorded series one evaluation later or not.
                "group_eval_order": group_order,
                "tests": [body | {"promql_expr_test": [*body.get("promql_expr_test", ()), *queries]}],
            }
            case_paths[-1].write_text(yaml.dump(case_file, Dumper=yaml.CSafeDumper), encoding="utf-8")
        completed = promtool("test", "rules", *case_paths)
    output = completed.stdout + completed.stderr
    failures = re.split(r"\n(?= +(?:name|expr): )", output)[1:]
    results = [failure for failure in failures if f'expr: "{ACTIVE_ALERTS}"' in failure]
    times = [(case, time_seconds) for case in cases_of_file for time_seconds in case.times]
    assert len(results) == len(times), output
    active_alerts: dict[Case, list[set[ActiveCondition]]] = {case: [] for case in cases_of_file}
    for (case, _), result in zip(times, results, strict=True):
        active_alerts[case].append(
            {
                ActiveCondition.from_labels(
                    alert_labels["alertname"],
                    *(alert_labels.get(label, "") for label in ("instance", "run", "uuid")),
                )
                for labels in ACTUAL_SERIES.findall(result.partition("got:")[2])
                for alert_labels in [dict(LABEL.findall(labels))]
            }
        )
    return Evaluation([failure for failure in failures if failure not in results], active_alerts)


def families(all_series: list[Series], index: int) -> list[Metric]:
    """Return the families of one exporter at one scrape.

    Recorded series and `up` are those of Prometheus. `_sum` and `_count` become the samples of a histogram without its buckets, which
    no condition reads.
    """
    samples_by_family: dict[str, dict[tuple[tuple[str, str], ...], float | Distribution]] = {}
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], dict[str, float]] = {}
    for series in all_series:
        value = series.values[index] if index < len(series.values) else None
        if value is None or ":" in series.name or series.name == "up":
            continue
        labels = tuple(
            sorted((label, text) for label, text in series.labels.items() if label not in TARGET_LABELS)
        )
        stem, _, suffix = series.name.rpartition("_")
        if suffix in {"sum", "count"}:
            sums.setdefault((stem, labels), {})[suffix] = value
        elif suffix != "bucket":
            samples_by_family.setdefault(series.name, {})[labels] = value
            if series.name == "training_process_up":  # both families follow the process's lock in the feed
                samples_by_family.setdefault("training_feed_alive", {})[labels] = value
    for (stem, labels), sum_and_count in sums.items():
        if len(sum_and_count) == 2:
            distribution = Distribution(round(sum_and_count["count"]), sum_and_count["sum"])
            samples_by_family.setdefault(stem, {})[labels] = distribution
    return [family(name, samples) for name, samples in samples_by_family.items()]


def family(name: str, samples: dict[tuple[tuple[str, str], ...], float | Distribution]) -> Metric:
    labels = tuple(sorted({label for pairs in samples for label, _ in pairs}))
    is_histogram = isinstance(next(iter(samples.values())), Distribution)
    family_type: FamilyType = "histogram" if is_histogram else "gauge"
    values = {
        tuple(dict(pairs).get(label, "") for label in labels): value for pairs, value in samples.items()
    }
    return Family(name=name, type=family_type, help="", labels=labels).family(values)


def conditions_on_pages(case: Case) -> list[set[ActiveCondition]]:
    """Return the conditions that hold on the page of any exporter, at each time of a case."""
    interval = seconds_of(case.body["interval"])
    conditions: dict[float, set[ActiveCondition]] = {time_seconds: set() for time_seconds in case.times}
    by_target: dict[tuple[str, str], list[Series]] = {}
    for series in case.series:
        by_target.setdefault(series.target, []).append(series)
    for (_, instance), target_series in by_target.items():
        scrapes = count()
        history = History(interval_seconds=interval, clock=lambda scrapes=scrapes: interval * next(scrapes))  # type: ignore[misc]
        for scrape in range(int(case.times[-1] // interval) + 1):
            samples = SampleIndex(families(target_series, scrape))
            history.record(interval * scrape, samples)
            for time_seconds in case.times:
                if int(time_seconds // interval) == scrape:
                    status_view = build_view(ExporterInfo("", "", 0.0, time_seconds, ""), samples, history)
                    conditions[time_seconds] |= {
                        condition_of(finding, instance)
                        for finding in findings(status_view)
                        if not finding.match.is_past
                    }
    return [conditions[time_seconds] for time_seconds in case.times]


def condition_of(finding: Finding, instance: str) -> ActiveCondition:
    """Return the condition of a finding. The first part of its subject is the run or the UUID of the GPU, depending on the alert."""
    run_or_uuid = finding.match.subject[0] if finding.match.subject else ""
    return ActiveCondition.from_labels(finding.condition.alert_name, instance, run_or_uuid, run_or_uuid)


@needs_promtool
@pytest.mark.timeout(90)  # promtool writes each evaluation to a database on disk
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_every_case_gives_the_expected_alerts(path: Path) -> None:
    """With UPDATE_GOLDEN=1, write the annotations of the expected alerts first."""
    if os.environ.get("UPDATE_GOLDEN") == "1":
        fill_annotations(path)
        load_tests.cache_clear()
        evaluate.cache_clear()

    assert evaluate(path).failed_checks == []


@needs_promtool
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_page_and_alerts_find_the_same_conditions(case: Case) -> None:
    alerts_with_condition = {condition.alert_name for condition in CONDITIONS} - {""}
    if len({series.target for series in case.series}) > 1:
        alerts_with_condition -= CROSS_NODE_ALERTS

    alerts_by_time, pages_by_time = evaluate(case.path).alerts[case], conditions_on_pages(case)
    for time_seconds, by_alert, by_page in zip(case.times, alerts_by_time, pages_by_time, strict=True):
        # RunDied fires for an hour after the state of a run is absent, when the page no longer has the run.
        runs_on_page = case.runs(time_seconds)
        expected = {key for key in by_alert if key.alert != "RunDied" or key.subject in runs_on_page}
        assert sorted(key for key in by_page if key.alert in alerts_with_condition) == sorted(
            key for key in expected if key.alert in alerts_with_condition
        ), f"after {time_seconds:.0f} s"


def test_every_alert_is_in_the_table_of_conditions_or_has_a_reason() -> None:
    alerts_with_condition = [condition.alert_name for condition in CONDITIONS if condition.alert_name]

    assert len(alerts_with_condition) == len(set(alerts_with_condition))
    assert {rule.name for rule in alerts()} == {*alerts_with_condition, *NOT_DECIDED}
    assert not {*alerts_with_condition} & NOT_DECIDED.keys()


@pytest.mark.parametrize(
    "condition",
    [condition for condition in CONDITIONS if condition.alert_name],
    ids=lambda condition: condition.alert_name,
)
def test_a_condition_has_text_severity_and_runbook_entry_of_its_alert(condition: Any) -> None:
    (alert,) = (rule for rule in alerts() if rule.name == condition.alert_name)

    assert condition.criterion == alert.body["annotations"]["condition"]
    assert condition.severity.value == alert.body["labels"]["severity"]
    assert condition.anchor in runbook_sections()


def test_the_thresholds_of_the_page_are_those_of_the_rules() -> None:
    expected_thresholds = {
        rule.name: float(rule.expr.removeprefix("vector(").removesuffix(")"))
        for rule in thresholds()
        if rule.name.startswith("threshold:")
    }

    assert {name: expected_thresholds.get(name) for name in THRESHOLD_BY_SERIES} == THRESHOLD_BY_SERIES
