"""The rules of deploy/prometheus: their expressions taken apart, and the expectations of their promtool tests."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
PROMETHEUS = ROOT / "deploy/prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
CASES = sorted((PROMETHEUS / "tests").glob("*.yaml"))

FUNCTIONS = frozenset(
    """abs absent and atan2 avg avg_over_time bool bottomk by ceil clamp_max clamp_min count count_over_time count_values end floor group group_left group_right
    histogram_quantile ignoring increase label_replace last_over_time log10 max max_over_time min min_over_time offset on or predict_linear
    present_over_time quantile quantile_over_time rate round scalar sort_desc sqrt sum time topk unless vector without""".split()  # noqa: SIM905 - forty words in quotes each would be read by nobody
)
"""Words of PromQL that our rules use; another one is taken for the name of a family, and fails there."""

TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*")|(?P<range>\[[^\]]*\])|(?P<number>\b\d[\w.]*)
    |(?P<name>[a-zA-Z_:][\w:]*)|(?P<sign>[{}(),=!~<>+*/^%@-]+|\S)|(?P<space>\s+)""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Selector:
    """A name in an expression, its matchers as written, and the labels that they name."""

    name: str
    matchers: str
    labels: frozenset[str]

    def __str__(self) -> str:
        return f"{self.name}{{{self.matchers}}}" if self.matchers else self.name


@dataclass(frozen=True)
class Rule:
    """One rule, with the file that it is in."""

    file: str
    name: str
    expr: str
    alert: bool
    body: dict[str, Any]


@functools.cache
def rules() -> tuple[Rule, ...]:
    """All rules as they are committed, in order."""
    return tuple(
        Rule(path.name, body.get("alert") or body["record"], str(body["expr"]), "alert" in body, body)
        for path in RULES
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for body in group["rules"]
    )


def alerts() -> list[Rule]:
    return [rule for rule in rules() if rule.alert]


def records() -> list[Rule]:
    """Everything that is computed; thresholds are numbers."""
    return [rule for rule in rules() if not rule.alert and rule not in thresholds()]


def thresholds() -> list[Rule]:
    return [rule for rule in rules() if rule.file == "thresholds.yml"]


def selectors(expression: str) -> Iterator[Selector]:
    """Every selector of an expression, read token by token."""
    tokens = [found for found in TOKEN.finditer(expression) if found.lastgroup not in {"space", "range"}]
    place = 0
    while place < len(tokens):
        token = tokens[place]
        place += 1
        if token.lastgroup != "name":
            continue
        following = tokens[place][0] if place < len(tokens) else ""
        if token[0] in FUNCTIONS:
            if token[0] in {"by", "on", "ignoring", "without", "group_left", "group_right"}:
                while tokens[place][0] not in {")", "()"}:  # a list of labels, not of families
                    place += 1
                place += 1
            continue
        if not following.startswith("{"):
            yield Selector(token[0], "", frozenset())
            continue
        begin = tokens[place].end()
        while not tokens[place][0].startswith("}"):
            place += 1
        matchers = expression[begin : tokens[place].start()]
        yield Selector(token[0], matchers, frozenset(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)))


def labels_grouped(expression: str) -> set[str]:
    """Labels in `by (…)`, `on (…)` and their like, wherever they stand."""
    lists = re.findall(r"\b(?:by|on|ignoring|without|group_left|group_right)\s*\(([^)]*)\)", expression)
    return {label.strip() for labels in lists for label in labels.split(",") if label.strip()}


def script(path: Path) -> ModuleType:
    """A script of deploy/, imported from where it is."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)


GOT = re.compile(r"Labels:\{(?P<labels>.*)\}\n\s*Annotations:\{(?P<annotations>.*)\}")
PAIR = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
EXPECTED = re.compile(r"^(?P<indent> *)- exp_labels: (?P<labels>\{.*\})$")


def fill_annotations(path: Path) -> None:
    """Write beside every expected alert the annotations that it has, as promtool tells them."""
    lines = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if not re.match(r" *exp_annotations:| {14,}\w+: \"", line)
    ]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    told = promtool("test", "rules", path)
    annotations: dict[tuple[str, str, frozenset[tuple[str, str]]], list[tuple[str, str]]] = {}
    for failure in re.split(r"\n(?= +name: )", told.stdout + told.stderr):
        where = re.search(r"name: (.*),\n\s*alertname: (\w+), time: (\w+)", failure)
        if where is None:
            continue
        for found in GOT.finditer(failure.partition("got:[")[2]):
            key = frozenset(pair for pair in PAIR.findall(found["labels"]) if pair[0] != "alertname")
            annotations[where[1] + where[2], where[3], key] = PAIR.findall(found["annotations"])
    filled = []
    name = alert = time = ""
    for line in lines:
        filled.append(line)
        if named := re.match(r" *name: (.*)", line):
            name = named[1]
        elif timed := re.match(r" *- eval_time: (\w+)", line):
            time = duration(timed[1])
        elif called := re.match(r" *alertname: (\w+)", line):
            alert = called[1]
        elif expected := EXPECTED.match(line):
            labels = yaml.safe_load(expected["labels"])
            key = frozenset((label, str(value)) for label, value in labels.items())
            inner = expected["indent"] + "  "
            filled.append(f"{inner}exp_annotations:")
            filled += [f'{inner}  {label}: "{text}"' for label, text in annotations[name + alert, time, key]]
    path.write_text("\n".join([*filled, ""]), encoding="utf-8")


def duration(text: str) -> str:
    """As Go's Prometheus writes it: 90m is 1h30m."""
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    left = sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([smhd])", text))
    told = ""
    for unit, seconds in units.items():
        number, left = divmod(left, seconds)
        told += f"{number}{unit}" if number else ""
    return told
