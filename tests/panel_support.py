"""Support for tests of panels: values of a panel's query for synthetic series, evaluated by promtool.

A series has a sample every 15 s from Unix time 0 on, in promtool's notation: `1x20 0x40` is 21 samples with the value 1, until 5 min, and
then 41 samples with the value 0. Columns with a clock time have Unix milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dashboards_support import BUILTIN_VALUES, MODELS, SELECTED_VALUES, all_queries, fill_variables
from rules_support import promtool, rules_needed_by, without_empty_operands

from dashboards.board import all_panels

BOARD_VALUES = {
    "training-gpus": {"run": ".*"},
    "training-node": {"node": "n1"},
    "training-run": {"run": "a"},
    "training-ranks": {"run": "a"},
}
"""Values of variables that differ from `SELECTED_VALUES`, by dashboard."""
SERIES_TEMPLATE = 'training_{name}{{run="a",instance="n{node}"{labels}}}'


def assert_panel(
    tmp_path: Path,
    dashboard: str,
    panel: str,
    series: dict[str, str],
    expected: Mapping[str, float],
    *,
    query_id: str = "A",
    column: str = "",
    series_name: str = "",
    factor: int = 1,
    minutes: float = 15,
    selected: dict[str, str] | None = None,
) -> None:
    """Check the values of a query of a panel or of a variable, at the end of the test.

    The time range of a plot starts at 0.

    Args:
        tmp_path: Directory of the test case for promtool.
        dashboard: Identifier (uid) of the dashboard.
        panel: Title of the panel, or `$NAME` for a variable.
        series: Values of each series in promtool's notation, one sample every 15 s.
        expected: Expected values by labels, multiplied by *factor* and rounded.
        query_id: Reference of the query in the panel. The first query of a table has its rows.
        column: Name of a column of a table, in place of the reference of its query.
        series_name: Name of the only checked series of a `named_values_query`; *expected* is then without the label `name`.
        factor: Factor that makes fractions comparable as integers.
        minutes: Evaluation time.
        selected: Values of variables.
    """
    if column:
        query_id = query_of_column(dashboard, panel, column)
    assert_queries(
        tmp_path,
        dashboard,
        panel,
        series,
        {query_id: expected},
        series_name=series_name,
        factor=factor,
        minutes=minutes,
        selected=selected,
    )


def assert_queries(
    tmp_path: Path,
    dashboard: str,
    panel: str,
    series: dict[str, str],
    expected_by_query: Mapping[str, Mapping[str, float]],
    *,
    series_name: str = "",
    factor: int = 1,
    minutes: float = 15,
    selected: dict[str, str] | None = None,
) -> None:
    """Check the values of several queries of a panel, by the reference of the query, at the end of the test.

    The other arguments are those of `assert_panel`.
    """
    query_expressions = {
        query.ref_id: query.expression
        for query in reversed(all_queries(dashboard))  # the first of several panels with the title
        if query.panel == panel
    }
    # Just long enough to begin before the series: promtool evaluates a subquery at each step of the range.
    range_minutes = min(math.ceil(minutes) + 1, 60)
    expressions = {
        query_id: fill_variables(
            query_expressions[query_id],
            SELECTED_VALUES | BOARD_VALUES.get(dashboard, {}) | (selected or {}),
            BUILTIN_VALUES | {"__range": f"{range_minutes}m", "__range_s": str(60 * range_minutes)},
        )
        for query_id in expected_by_query
    }
    if series_name:
        name = f'label_replace(vector(1), "name", "{series_name}", "", "")'
        expressions = {
            query_id: f"sum without (name) (({expression}) and on (name) {name})"
            for query_id, expression in expressions.items()
        }
    # The queries find an exporter by the last sample of its build information in the time range.
    build_infos = {
        name.replace("up{", "exporter_build_info{", 1): "1 stale" for name in series if name.startswith("up{")
    }
    case = _Case(tmp_path, build_infos | series, minutes)
    for query_id, expected in expected_by_query.items():
        expression = f"round({factor} * ({expressions[query_id]}))".replace("@ start()", "@ 0")
        samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
        case.queries.append(_Query(f"{dashboard}, {panel}, {query_id}", expression, samples))
    _pending_cases.append(case)


@dataclass(frozen=True)
class _Query:
    """Query of a panel: its name, its expression and the expected samples."""

    name: str
    expression: str
    expected_samples: list[dict[str, object]]


@dataclass(frozen=True)
class _Case:
    """Series, and queries that are evaluated at one time."""

    directory: Path
    series: dict[str, str]
    minutes: float
    queries: list[_Query] = field(default_factory=list)

    def write(self, name: str) -> Path:
        """Write the files of promtool with a name, and return the path of the file for `promtool test rules`."""
        series_names = {series.partition("{")[0] for series in self.series}
        needed = rules_needed_by([query.expression for query in self.queries], series_names)
        names = series_names | {rule.name for rule in needed.rules}
        # promtool parses the rules at each evaluation, and most queries are long because they name many problems.
        group = {
            "name": "rules",
            "rules": [
                rule.body | {"expr": without_empty_operands(rule.expr, names)} for rule in needed.rules
            ],
        }
        rules_path, path = self.directory / f"rules-{name}.json", self.directory / f"case-{name}.json"
        rules_path.write_text(json.dumps({"groups": [group]}), encoding="utf-8")
        # Without a rule that reads an earlier result, an evaluation at the end suffices.
        end = f"{60 * self.minutes:.0f}s"
        interval = f"{needed.interval_seconds}s" if needed.need_history or not self.minutes else end
        case = {
            "interval": "15s",
            "input_series": [{"series": name, "values": values} for name, values in self.series.items()],
            "promql_expr_test": [
                {
                    "expr": without_empty_operands(query.expression, names),
                    "eval_time": end,
                    "exp_samples": query.expected_samples,
                }
                for query in self.queries
            ],
        }
        content = {"rule_files": [rules_path.name], "evaluation_interval": interval, "tests": [case]}
        path.write_text(json.dumps(content), encoding="utf-8")  # JSON is valid YAML
        return path


_pending_cases: list[_Case] = []


@contextlib.contextmanager
def evaluated_panels() -> Iterator[None]:
    """Evaluate the panels that the body of the context checks, in one process, with one evaluation of the rules for equal series."""
    _pending_cases.clear()
    yield
    case_by_series: dict[str, _Case] = {}
    for case in _pending_cases:
        shared_case = case_by_series.setdefault(json.dumps([case.series, case.minutes]), case)
        if shared_case is not case:
            shared_case.queries.extend(case.queries)
    paths = [case.write(str(number)) for number, case in enumerate(case_by_series.values())]
    if paths:
        completed = promtool("test", "rules", *paths)

        queries = [
            f"{path.name}: {query.name}"
            for path, case in zip(paths, case_by_series.values(), strict=True)
            for query in case.queries
        ]
        assert completed.returncode == 0, "\n".join([*queries, completed.stdout, completed.stderr])


def query_of_column(dashboard: str, title: str, column: str) -> str:
    """Return the reference of the query whose values a column of a table shows."""
    panel = next(panel for panel in all_panels(MODELS[dashboard]) if panel["title"] == title)
    (names,) = (
        transformation["options"]["renameByName"]
        for transformation in panel["transformations"]
        if transformation["id"] == "organize"
    )
    (field,) = (field for field, name in names.items() if name == column and field.startswith("Value #"))
    return str(field).removeprefix("Value #")


def run_series(name: str, values: str, node: int = 1, labels: str = "") -> dict[str, str]:
    """Return the series `training_NAME` of run a on a node, with its values in promtool's notation."""
    return {SERIES_TEMPLATE.format(name=name, node=node, labels=labels): values}
