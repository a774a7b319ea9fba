"""Rules of deploy/prometheus: parsed expressions, and expected annotations of the promtool tests."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from places import PROJECT
from run_support import child_environment, run_to_completion

PROMETHEUS = PROJECT / "deploy/prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
CASES = sorted((PROMETHEUS / "tests").glob("*.yaml"))
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="install Prometheus: apt-get install prometheus"
)

KEYWORDS = frozenset({"and", "atan2", "bool", "group_left", "group_right", "offset", "or", "unless"})
"""PromQL keywords that look like the name of a series."""
LABEL_LISTS = re.compile(r"\b(?:by|group_left|group_right|ignoring|on|without)\s*\(([^)]*)\)")
SELECTOR = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*")|(?P<range>\[[^\]]*\])|(?P<number>\b\d[\w.]*)
    |(?P<name>[a-zA-Z_:][\w:]*)(?P<function>\s*\()?(?:\{(?P<matchers>(?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?""",
    re.VERBOSE,
)
"""Tokens of an expression: texts, ranges and numbers are skipped; a name is a series, a function or a keyword."""


@dataclass(frozen=True)
class Selector:
    """Selector of an expression: name, matchers and the labels of the matchers."""

    name: str
    matchers: str
    labels: frozenset[str]

    def __str__(self) -> str:
        return f"{self.name}{{{self.matchers}}}" if self.matchers else self.name


@dataclass(frozen=True)
class Rule:
    """Alerting or recording rule."""

    file: str  # name of the file
    name: str  # name of the alert or of the recorded series
    expr: str
    is_alert: bool
    body: dict[str, Any]  # the rule as in the file
    interval_seconds: int  # of the group


def load_yaml(path: Path) -> Any:
    """Return the content of a YAML file. The C parser takes a tenth of the time of the Python parser."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)


@functools.cache
def load_rule_file(name: str) -> dict[str, Any]:
    """Return the content of a file of rules."""
    content: dict[str, Any] = load_yaml(PROMETHEUS / "rules" / name)
    return content


@functools.cache
def rules() -> tuple[Rule, ...]:
    """Return all rules of deploy/prometheus, in order."""
    return tuple(
        Rule(
            path.name,
            body.get("alert") or body["record"],
            str(body["expr"]),
            "alert" in body,
            body,
            duration_seconds(group["interval"]),
        )
        for path in RULES
        for group in load_rule_file(path.name)["groups"]
        for body in group["rules"]
    )


def alerts() -> list[Rule]:
    return [rule for rule in rules() if rule.is_alert]


def recording_rules() -> list[Rule]:
    """Return the recording rules other than thresholds, which are constant numbers."""
    return [rule for rule in rules() if not rule.is_alert and rule not in thresholds()]


def thresholds() -> list[Rule]:
    return [rule for rule in rules() if rule.file == "thresholds.yml"]


def selectors(expression: str) -> Iterator[Selector]:
    """Yield every selector of an expression."""
    for match in SELECTOR.finditer(LABEL_LISTS.sub(" ", expression)):
        if match["name"] and not match["function"] and match["name"] not in KEYWORDS:
            matchers = match["matchers"] or ""
            labels = frozenset(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            yield Selector(match["name"], matchers, labels)


@dataclass(frozen=True)
class Condition:
    """Condition for a result: all parts have a result, or any part. A part is the name of a series or another condition."""

    parts: tuple[str | Condition, ...]
    needs_all: bool = True

    def holds(self, names: AbstractSet[str]) -> bool:
        """Return True if the condition holds for the names of the available series."""
        combine = all if self.needs_all else any
        return combine(part in names if isinstance(part, str) else part.holds(names) for part in self.parts)


ALWAYS = Condition(())
TOKEN = re.compile(
    r"""(?P<range>\[[^\]]*\])|(?P<matchers>\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})|(?P<name>[a-zA-Z_:][\w:]*)|(?P<bracket>[(),])
    |(?P<other>"(?:[^"\\]|\\.)*"|\d[\w.]*|[-+*/%^@]|[<>=!][=~]?)""",
    re.VERBOSE,
)
RECORDED_NAME = re.compile(r"\b[a-z_]+:[a-z_]+:\w+")
"""Name of a recording rule, in an expression or in the query of an annotation."""
FUNCTIONS_WITH_RESULT = {"absent", "absent_over_time", "scalar", "vector"}
"""Functions that have a result also without a series."""


@dataclass(frozen=True)
class _Operand:
    """Operand of `or` or `unless`, with the positions of its operator, its start and its end in the text."""

    operator_start: int
    start: int
    end: int
    condition: Condition


class Expression:
    """Series that an expression reads, and the condition for a result of the expression.

    An expression without a result returns no series whatever the values: `a and b` has no result if no series a exists.

    Attributes:
        names: Names of all series.
        past_names: Names of the series that are read at earlier times: in a range, in a subquery, with an offset or with `@`.
        condition: Condition for a result. The expression may have no result although the condition holds.
    """

    def __init__(self, text: str) -> None:
        matches = list(TOKEN.finditer(LABEL_LISTS.sub(lambda match: " " * len(match[0]), text)))
        self._text = text
        self._tokens = [*((match.lastgroup, match[0]) for match in matches), ("end", "")]
        self._starts = [*(match.start() for match in matches), len(text)]
        self._position = 0
        self._alternatives_of_or: list[list[_Operand]] = []
        self._operands_of_unless: list[_Operand] = []
        self._names: list[str] = []  # in the order of the text
        self.past_names: set[str] = set()
        self.condition = self._alternatives()
        assert self._tokens[self._position][0] == "end", f"not parsed: {text}"
        self.names = frozenset(self._names)

    def without_empty_operands(self, names: AbstractSet[str]) -> str:
        """Return an expression with the same result, as the function `without_empty_operands`."""
        removed_spans = [
            (operand.operator_start, operand.end)
            for operand in self._operands_of_unless
            if not operand.condition.holds(names)
        ]
        for operands in self._alternatives_of_or:
            has_results = [operand.condition.holds(names) for operand in operands]
            if any(has_results):
                first = has_results.index(True)
                removed_spans.append((operands[0].start, operands[first].start))
                removed_spans += [
                    (operand.operator_start, operand.end)
                    for operand, has_result in zip(operands[first:], has_results[first:], strict=True)
                    if not has_result
                ]
        text, position = "", 0
        for start, end in sorted(removed_spans, key=lambda span: (span[0], -span[1])):
            if start >= position:  # not within another span
                text += self._text[position:start]
                position = end
        return text + self._text[position:]

    def _take(self, *texts: str) -> str:
        """Return the next token and advance if it is one of *texts*, otherwise return an empty text."""
        text = self._tokens[self._position][1]
        if text not in texts:
            return ""
        self._position += 1
        return text

    def _alternatives(self) -> Condition:
        """Parse operands of `or`."""
        operands = [self._operand(self._restrictions)]
        while self._take("or"):
            operands.append(self._operand(self._restrictions))
        if len(operands) == 1:
            return operands[0].condition
        self._alternatives_of_or.append(operands)
        return Condition(tuple(operand.condition for operand in operands), needs_all=False)

    def _operand(self, parse: Callable[[], Condition]) -> _Operand:
        """Parse an operand after an operator, or the first operand."""
        operator_start, start = self._starts[max(self._position - 1, 0)], self._starts[self._position]
        condition = parse()
        return _Operand(operator_start, start, self._starts[self._position], condition)

    def _restrictions(self) -> Condition:
        """Parse operands of `and` and `unless`, which have the same precedence. The series after `unless` are not needed."""
        conditions = [self._operands()]
        while operator := self._take("and", "unless"):
            operand = self._operand(self._operands)
            if operator == "and":
                conditions.append(operand.condition)
            else:
                self._operands_of_unless.append(operand)
        return conditions[0] if len(conditions) == 1 else Condition(tuple(conditions))

    def _operands(self) -> Condition:
        """Parse operands of arithmetic and comparisons, all of which are needed."""
        parts: list[str | Condition] = []
        while True:
            kind, text = self._tokens[self._position]
            if kind == "end" or text in {"or", "and", "unless", ")", ","}:
                return Condition(tuple(parts))
            self._position += 1
            first_name = len(self._names)
            if text == "(":
                parts.append(self._alternatives())
                self._close()
            elif kind == "name" and self._take("("):
                arguments = self._arguments()
                parts.append(ALWAYS if text in FUNCTIONS_WITH_RESULT else arguments)
            elif kind == "name" and text not in KEYWORDS:
                self._names.append(text)
                parts.append(text)
                if self._tokens[self._position][0] == "matchers":
                    self._position += 1
            next_kind, next_text = self._tokens[self._position]
            if next_kind == "range" or next_text in {"offset", "@"}:
                self.past_names.update(self._names[first_name:])

    def _arguments(self) -> Condition:
        """Parse the arguments of a function, all of which are needed, and the closing bracket."""
        conditions = [self._alternatives()]
        while self._take(","):
            conditions.append(self._alternatives())
        self._close()
        return Condition(tuple(conditions))

    def _close(self) -> None:
        assert self._take(")"), f"no closing bracket: {self._tokens[self._position :]}"


parse_expression = functools.cache(Expression)


def without_empty_operands(text: str, names: AbstractSet[str]) -> str:
    """Return an expression with the same result that lacks the operands of `or` and `unless` without a result.

    Args:
        text: Expression.
        names: Names of the available series.
    """
    return parse_expression(text).without_empty_operands(names)


@dataclass(frozen=True)
class NeededRules:
    """Recording rules that an evaluation needs.

    Attributes:
        rules: Rules, each after the rules that it reads.
        need_history: True if an earlier result of a rule is read.
    """

    rules: list[Rule]
    need_history: bool

    @property
    def interval_seconds(self) -> int:
        """Return the shortest interval of the groups of the rules, at which a test evaluates all of them."""
        return min((rule.interval_seconds for rule in self.rules), default=30)


def rules_with_result(candidates: Iterable[Rule], series_names: Iterable[str]) -> list[Rule]:
    """Return the rules that have a result.

    Prometheus parses each rule at each evaluation, so that a rule without a result takes as much time as another.

    Args:
        candidates: Rules that may read each other's results.
        series_names: Names of the scraped series.
    """
    pending_rules, found_rules, names = list(candidates), list[Rule](), set(series_names)
    number_before = -1
    while len(found_rules) > number_before:
        number_before = len(found_rules)
        remaining_rules = []
        for rule in pending_rules:
            if parse_expression(rule.expr).condition.holds(names):
                found_rules.append(rule)
                names.add("ALERTS" if rule.is_alert else rule.name)
            else:
                remaining_rules.append(rule)
        pending_rules = remaining_rules
    return found_rules


@functools.cache
def _recording_rules_with_result(series_names: frozenset[str]) -> dict[str, Rule]:
    candidates = (rule for rule in rules() if not rule.is_alert)
    return {rule.name: rule for rule in rules_with_result(candidates, series_names)}


def write_alert_rules(
    path: Path, rule_files: Iterable[str], series_names: Collection[str], expressions: Iterable[str] = ()
) -> list[str]:
    """Write the alerts of some files that have a result, and the recording rules that they need, in one file.

    Args:
        path: File to write.
        rule_files: Names of the files with the rules.
        series_names: Names of the scraped series.
        expressions: Expressions that are evaluated too, such as those of the expected series.

    Returns:
        Names of the groups in the order of the files.
    """
    bodies_by_name = {name: load_rule_file(name) for name in rule_files}
    candidates = [rule for rule in rules() if rule.file in bodies_by_name]
    alerts_with_result = [rule for rule in rules_with_result(candidates, series_names) if rule.is_alert]
    alert_names = {name for rule in alerts_with_result for name in RECORDED_NAME.findall(str(rule.body))}
    needed_rules = rules_needed_by([*expressions, *sorted(alert_names)], series_names).rules
    names = {rule.name for rule in [*alerts_with_result, *needed_rules]}
    groups = []
    for body in bodies_by_name.values():
        for group in body["groups"]:
            group_rules = [rule for rule in group["rules"] if (rule.get("alert") or rule["record"]) in names]
            groups.append(group | {"rules": group_rules})
    path.write_text(json.dumps({"groups": groups}), encoding="utf-8")
    return [group["name"] for group in groups]


def rules_needed_by(expressions: Iterable[str], series_names: Iterable[str]) -> NeededRules:
    """Return the recording rules that expressions read, directly or through other rules, and that have a result.

    Args:
        expressions: Expressions, such as those of panels.
        series_names: Names of the scraped series.
    """
    rules_by_name = _recording_rules_with_result(frozenset(series_names))
    past_by_name: dict[str, bool] = {}  # True if an earlier result of the rule is read
    ordered_rules: list[Rule] = []

    def add_rules(text: str, *, is_past: bool) -> None:
        expression = parse_expression(text)
        for name in sorted(expression.names & rules_by_name.keys()):
            is_read_in_past = is_past or name in expression.past_names
            if past_by_name.get(name, False) >= is_read_in_past and name in past_by_name:
                continue
            is_new = name not in past_by_name
            past_by_name[name] = is_read_in_past
            add_rules(rules_by_name[name].expr, is_past=is_read_in_past)
            if is_new:
                ordered_rules.append(rules_by_name[name])

    for text in expressions:
        add_rules(text, is_past=False)
    return NeededRules(ordered_rules, any(past_by_name.values()))


def aggregation_labels(expression: str) -> set[str]:
    """Return the labels in `by (…)`, `on (…)` and similar clauses of an expression."""
    return {label.strip() for labels in LABEL_LISTS.findall(expression) for label in labels.split(",")} - {""}


def load_script(path: Path) -> ModuleType:
    """Import a script that is not part of the package, and return its module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def runbook_sections() -> dict[str, str]:
    """Return the text of each section of the runbook by its anchor."""
    text = (PROJECT / "docs/runbook.md").read_text(encoding="utf-8")
    parts = re.split(r"^### (.+)$", text, flags=re.MULTILINE)
    return {name.lower(): body for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool to its end. With a higher GOGC, Go collects garbage less often, which saves a fifth of the CPU time."""
    return run_to_completion(["promtool", *map(str, arguments)], env=child_environment(GOGC="800"))


@functools.cache
def labels_by_name() -> dict[str, frozenset[str]]:
    """Return the labels of every series available to rules, by name."""
    names = {
        "up": frozenset[str](),
        "ALERTS": frozenset({"alertname", "alertstate", "instance", "run", "severity"}),
    }
    specs = [
        (spec.name, spec.type in {"histogram", "summary"}, frozenset(spec.labels))
        for specs_of_module in load_script(PROJECT / "docs/generate_metrics.py").load_specs().values()
        for spec in specs_of_module
    ]
    for name, is_distribution, labels in specs:
        if is_distribution:
            names |= {f"{name}_sum": labels, f"{name}_count": labels, f"{name}_bucket": labels | {"le"}}
        else:
            names[name] = labels
    names |= {rule.name: frozenset[str]() for rule in thresholds()}
    pending_rules = list(recording_rules())
    while pending_rules:  # a rule may read the series of a rule in a later file
        ready = [
            rule
            for rule in pending_rules
            if all(selector.name in names | {rule.name: None} for selector in selectors(rule.expr))
        ]
        if not ready:
            raise KeyError(f"{pending_rules[0].name} reads a series that does not exist")
        for rule in ready:
            labels_of_rule = aggregation_labels(rule.expr).union(
                *(names.get(selector.name, frozenset()) for selector in selectors(rule.expr))
            )
            names[rule.name] = frozenset(labels_of_rule)
            pending_rules.remove(rule)
    return names


def accelerated_rules(directory: Path, seconds: float, *, at_once: bool = False) -> Path:
    """Write the rules with short evaluation intervals and, with `at_once`, without pending times."""
    directory.mkdir(exist_ok=True)
    interval = f"    interval: {int(1000 * seconds)}ms"
    for path in RULES:
        text = re.sub(r"^    interval: .*", interval, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if at_once:
            text = re.sub(r"^        (for|keep_firing_for): .*\n", "", text, flags=re.MULTILINE)
        (directory / path.name).write_text(text)
    return directory


ACTUAL_ALERT = re.compile(r"Labels:\{(?P<labels>.*)\}\n\s*Annotations:\{(?P<annotations>.*)\}")
PAIR = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
EXPECTED_ALERT = re.compile(r"^(?P<indent> *)- exp_labels: (?P<labels>\{.*\})$")


def fill_annotations(path: Path) -> None:
    """Write the annotations computed by promtool into every expected alert of a file of cases.

    Without annotations, each case fails, and promtool prints the alerts with their annotations:

        name: a case,
        alertname: GpuLost, time: 2m,
            exp:[...]
            got:[0: Labels:{alertname="GpuLost", gpu="1"}
                 Annotations:{summary="GPU 1 does not answer."}]

    An alert of the file is found again by case, alert, time and labels.
    """
    lines = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if not re.match(r" *exp_annotations:| {14,}\w+: \"", line)
    ]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    completed = promtool("test", "rules", path)
    annotations: dict[tuple[str, str, frozenset[tuple[str, str]]], list[tuple[str, str]]] = {}
    for failure in re.split(r"\n(?= +name: )", completed.stdout + completed.stderr):
        failure_match = re.search(r"name: (.*),\n\s*alertname: (\w+), time: (\w+)", failure)
        if failure_match is None:
            continue
        for match in ACTUAL_ALERT.finditer(failure.partition("got:[")[2]):
            key = frozenset(pair for pair in PAIR.findall(match["labels"]) if pair[0] != "alertname")
            annotations[failure_match[1] + failure_match[2], failure_match[3], key] = PAIR.findall(
                match["annotations"]
            )
    output_lines = []
    name = alert = time = ""
    for line in lines:
        output_lines.append(line)
        if name_match := re.match(r" *name: (.*)", line):
            name = name_match[1]
        elif time_match := re.match(r" *- eval_time: (\w+)", line):
            time = prometheus_duration(time_match[1])
        elif alert_match := re.match(r" *alertname: (\w+)", line):
            alert = alert_match[1]
        elif expected_match := EXPECTED_ALERT.match(line):
            labels = yaml.safe_load(expected_match["labels"])
            key = frozenset((label, str(value)) for label, value in labels.items())
            inner = expected_match["indent"] + "  "
            output_lines.append(f"{inner}exp_annotations:")
            output_lines += [
                f'{inner}  {label}: "{text}"'
                for label, text in annotations.get((name + alert, time, key), [])
            ]
    path.write_text("\n".join([*output_lines, ""]), encoding="utf-8")


_SECONDS_BY_UNIT = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def duration_seconds(text: str) -> int:
    """Return the seconds of a duration in the notation of Prometheus, such as 1h30m."""
    return sum(int(number) * _SECONDS_BY_UNIT[unit] for number, unit in re.findall(r"(\d+)([smhd])", text))


def prometheus_duration(text: str) -> str:
    """Return a duration in the form in which Prometheus prints it: 1h30m for 90m."""
    remaining_seconds = duration_seconds(text)
    formatted = ""
    for unit, seconds in _SECONDS_BY_UNIT.items():
        number, remaining_seconds = divmod(remaining_seconds, seconds)
        formatted += f"{number}{unit}" if number else ""
    return formatted
