"""Support for dashboard tests: queries of the generated JSON, values of variables, and evaluation by Prometheus."""

from __future__ import annotations

import json
import math
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from places import PROJECT
from prometheus_support import query_api
from rules_support import selectors

sys.path.insert(0, str(PROJECT))  # the dashboards are not installed with the exporter

from dashboards.board import all_panels
from dashboards.catalogue import BOARDS

MODELS: dict[str, dict[str, Any]] = {board.uid: board.model() for board in BOARDS}

BUILTIN_VALUES = {"__rate_interval": "1m", "__range": "1h", "__interval": "15s", "__range_s": "3600"}
BUILTIN_VALUES |= {"__interval_ms": "15000", "__from": "0"}
SHORT_RANGE = BUILTIN_VALUES | {"__range": "1m", "__range_s": "60"}
"""Values for queries without data: a subquery is evaluated at each step of the range, also without data."""
EXPORTER_LABELS = {"job", "namespace", "pod", "container", "endpoint"}
"""Labels that distinguish the exporters of one node."""
SELECTED_VALUES = dict.fromkeys(("job", "node", "run", "rank", "gpu", "perf_tag"), ".+")
SELECTED_VALUES |= {"cluster": ".*", "baseline": "a"}


@dataclass(frozen=True)
class DashboardQuery:
    """Query of a panel, an annotation or a variable."""

    uid: str
    panel: str
    panel_type: str
    ref_id: str
    expression: str
    is_instant: bool

    def __str__(self) -> str:
        return f"{self.uid}: {self.panel!r} {self.ref_id}"


def panel_queries(uid: str) -> Iterator[DashboardQuery]:
    """Yield the queries of a dashboard's panels."""
    for panel in all_panels(MODELS[uid]):
        for target in panel["targets"]:
            yield DashboardQuery(
                uid, panel["title"], panel["type"], target["refId"], target["expr"], target["instant"]
            )


def all_queries(uid: str) -> list[DashboardQuery]:
    """Return the queries of a dashboard's panels, annotations and variables."""
    model = MODELS[uid]
    queries = list(panel_queries(uid))
    queries.extend(
        DashboardQuery(uid, annotation["name"], "annotation", "A", annotation["expr"], is_instant=False)
        for annotation in model["annotations"]["list"]
        if "expr" in annotation
    )
    queries.extend(
        DashboardQuery(
            uid,
            f"${variable['name']}",
            "variable",
            "A",
            variable_expression(variable["query"]["query"]),
            is_instant=True,
        )
        for variable in model["templating"]["list"]
        if variable["type"] == "query"
    )
    return queries


def variable_expression(query: str) -> str:
    """Return the PromQL expression of a variable's query."""
    match = re.fullmatch(r"query_result\((.*)\)|label_values\((.*), \w+\)", query)
    assert match, query
    return match[1] or match[2]


def fill_variables(
    expression: str,
    values: Mapping[str, str] = SELECTED_VALUES,
    builtin_values: Mapping[str, str] = BUILTIN_VALUES,
) -> str:
    """Replace variables by values, as Grafana does. `all_runs` follows from `run`, as on *GPUs*."""
    all_runs = ".*" if values.get("run") == ".*" else "-"
    all_values = {"all_runs": all_runs, **values, **builtin_values}
    return re.sub(r"\$\{?([a-z_]\w*)\}?", lambda match: all_values[match[1]], expression)


def escape_value(value: str) -> str:
    """Escape a value of a multi-value variable for a regular expression in a PromQL string, as Grafana does."""
    return re.sub(r"[$^*{}\\[\\]+?.()|]", lambda match: "\\\\" + match[0], value)


def sample_values(series: Mapping[str, Any]) -> list[float]:
    """Return the sample values of a series of an instant query or a range query."""
    return [float(value) for _, value in series.get("values") or [series["value"]]]


class ScenarioPrometheus:
    """Client of a Prometheus server that scraped the scenario.

    Args:
        url: Base URL of the server.
        start: Start of the time range in Unix seconds.
        end: End of the time range in Unix seconds.
    """

    STEP_SECONDS = 2

    def __init__(self, url: str, start: float, end: float) -> None:
        self._url = url
        self._start = start
        self._end = end
        self._builtin_values = {
            "__rate_interval": "8s",
            "__range": f"{int(end - start)}s",
            "__interval": f"{self.STEP_SECONDS}s",
            "__range_s": str(int(end - start)),
            "__interval_ms": str(1000 * self.STEP_SECONDS),
            "__from": str(int(1000 * start)),
        }

    def variable_values(self, model: Mapping[str, Any]) -> dict[str, str]:
        """Return a value for each variable: All if the variable has this option, otherwise the first option."""
        values_by_name: dict[str, str] = {}
        for variable in model["templating"]["list"]:
            if variable["type"] != "query":
                continue
            options = self._options(variable, values_by_name)
            # No series has the label `cluster`; `.*`, the value of All, selects series without the label too.
            assert options or variable.get("allValue") == ".*", (
                f"{model['uid']}: ${variable['name']} is empty"
            )
            all_value = variable.get("allValue") or "|".join(escape_value(option) for option in options)
            values_by_name[variable["name"]] = all_value if variable["includeAll"] else options[0]
        return values_by_name

    def series(self, query: DashboardQuery, values: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the series of a query that have a finite value."""
        expression = fill_variables(query.expression, values, self._builtin_values)
        if query.is_instant:
            results = query_api(self._url, "query", query=expression, time=self._end)
        else:
            time_range = {"start": self._start, "end": self._end, "step": self.STEP_SECONDS}
            results = query_api(self._url, "query_range", query=expression, **time_range)
        return [series for series in results if any(map(math.isfinite, sample_values(series)))]

    def sums_by_labels(self, query: DashboardQuery, values: Mapping[str, str]) -> dict[str, float]:
        """Return the sum over the samples of each series of a query, by labels other than EXPORTER_LABELS.

        Raises:
            AssertionError: Two series differ only in EXPORTER_LABELS.
        """
        sums: dict[str, float] = {}
        for series in self.series(query, values):
            labels = {name: text for name, text in series["metric"].items() if name not in EXPORTER_LABELS}
            key = json.dumps(labels, sort_keys=True)
            assert key not in sums, f"{query}: {key} is shown twice"
            sums[key] = sum(filter(math.isfinite, sample_values(series)))
        return sums

    def uses_absent_family(self, query: DashboardQuery) -> bool:
        """Return True if a query uses a family that no exporter exposed in the time range."""
        names = [selector.name for selector in selectors(fill_variables(query.expression))]
        seconds = int(self._end - self._start)
        return not all(
            query_api(self._url, "query", query=f"count(last_over_time({name}[{seconds}s]))", time=self._end)
            for name in names
        )

    def _options(self, variable: Mapping[str, Any], values_by_name: Mapping[str, str]) -> list[str]:
        query = fill_variables(variable["query"]["query"], values_by_name, self._builtin_values)
        result = re.fullmatch(r"query_result\((.*)\)", query)
        if result:
            texts = [
                json.dumps(series["metric"]).replace('": "', '="')
                for series in query_api(self._url, "query", query=result[1], time=self._end)
            ]
            pattern = variable["regex"].strip("/")
            return [match[1] for text in texts if (match := re.search(pattern, text))]
        match = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
        assert match, query
        parameters = urllib.parse.urlencode({"match[]": match[1], "start": self._start, "end": self._end})
        with urllib.request.urlopen(
            f"{self._url}/api/v1/label/{match[2]}/values?{parameters}", timeout=60
        ) as response:
            values: list[str] = json.load(response)["data"]
        return values
