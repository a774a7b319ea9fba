"""Dashboard queries, their names and variables, for the tests of the dashboards."""

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

from prometheus_support import ask
from rules_support import ROOT, selectors

sys.path.insert(0, str(ROOT))  # the dashboards are not installed with the exporter

from dashboards.board import all_panels
from dashboards.catalogue import BOARDS

MODELS: dict[str, dict[str, Any]] = {board.uid: board.model() for board in BOARDS}

BUILTIN = {"__rate_interval": "1m", "__range": "1h", "__interval": "15s", "__range_s": "3600"}
FEW_LABELS = {"job", "namespace", "pod", "container", "endpoint"}
"""Labels that distinguish the exporters of one machine."""
CHOSEN = dict.fromkeys(("job", "node", "run", "rank", "gpu", "uuid", "perf_tag"), ".+")
CHOSEN |= {"cluster": ".*", "baseline": "a"}


@dataclass(frozen=True)
class Asked:
    """Query with its panel."""

    uid: str
    panel: str
    kind: str
    letter: str
    expression: str
    instant: bool

    def __str__(self) -> str:
        return f"{self.uid}: {self.panel!r} {self.letter}"


def asked(uid: str) -> Iterator[Asked]:
    """All queries of a dashboard's panels."""
    for panel in all_panels(MODELS[uid]):
        for target in panel["targets"]:
            yield Asked(
                uid, panel["title"], panel["type"], target["refId"], target["expr"], target["instant"]
            )


def everything(uid: str) -> list[Asked]:
    """All queries of a dashboard: panels, variables and annotations."""
    model = MODELS[uid]
    found = list(asked(uid))
    found.extend(
        Asked(uid, mark["name"], "annotation", "A", mark["expr"], instant=False)
        for mark in model["annotations"]["list"]
        if "expr" in mark
    )
    found.extend(
        Asked(uid, f"${variable['name']}", "variable", "A", inner(variable["query"]["query"]), instant=True)
        for variable in model["templating"]["list"]
        if variable["type"] == "query"
    )
    return found


def inner(query: str) -> str:
    """The expression of a variable's query."""
    match = re.fullmatch(r"query_result\((.*)\)|label_values\((.*), \w+\)", query)
    assert match, query
    return match[1] or match[2]


def filled(expression: str, values: Mapping[str, str] = CHOSEN, builtin: Mapping[str, str] = BUILTIN) -> str:
    """Put values in the place of variables, as Grafana does."""
    return re.sub(r"\$\{?([a-z_]\w*)\}?", lambda name: {**values, **builtin}[name[1]], expression)


def escaped(value: str) -> str:
    """A value inside a regular expression inside a string of PromQL, as Grafana writes it."""
    return re.sub(r"[$^*{}\\[\\]+?.()|]", lambda found: "\\\\" + found[0], value)


def values_of(series: Mapping[str, Any]) -> list[float]:
    """The values of a series, of an instant or of a range."""
    return [float(value) for _, value in series.get("values") or [series["value"]]]


class Served:
    """A Prometheus that has scraped the scenario.

    Args:
        url: Of it.
        begin: Of the time range, Unix seconds.
        end: Of the time range.
    """

    STEP = 2

    def __init__(self, url: str, begin: float, end: float) -> None:
        self._url = url
        self._begin = begin
        self._end = end
        self._builtin = {
            "__rate_interval": "8s",
            "__range": f"{int(end - begin)}s",
            "__interval": f"{self.STEP}s",
            "__range_s": str(int(end - begin)),
        }

    def values(self, model: Mapping[str, Any]) -> dict[str, str]:
        """Value of each variable: All where offered, otherwise the first."""
        chosen: dict[str, str] = {}
        for variable in model["templating"]["list"]:
            if variable["type"] != "query":
                continue
            options = self._options(variable, chosen)
            # With one cluster, no series has the label: All also selects series without it.
            assert options or variable.get("allValue") == ".*", (
                f"{model['uid']}: ${variable['name']} is empty"
            )
            every = variable.get("allValue") or "|".join(escaped(option) for option in options)
            chosen[variable["name"]] = every if variable["includeAll"] else options[0]
        return chosen

    def answer(self, one: Asked, values: Mapping[str, str]) -> list[dict[str, Any]]:
        """Series of a query with a finite value."""
        expression = filled(one.expression, values, self._builtin)
        if one.instant:
            found = ask(self._url, "query", query=expression, time=self._end)
        else:
            span = {"start": self._begin, "end": self._end, "step": self.STEP}
            found = ask(self._url, "query_range", query=expression, **span)
        return [series for series in found if any(map(math.isfinite, values_of(series)))]

    def shown(self, one: Asked, values: Mapping[str, str]) -> dict[str, float]:
        """Sum of each series of a query, by labels without target labels.

        Raises:
            AssertionError: Two series differ by their target only.
        """
        found: dict[str, float] = {}
        for series in self.answer(one, values):
            labels = {name: text for name, text in series["metric"].items() if name not in FEW_LABELS}
            key = json.dumps(labels, sort_keys=True)
            assert key not in found, f"{one}: {key} is shown twice"
            found[key] = sum(filter(math.isfinite, values_of(series)))
        return found

    def lacks(self, one: Asked) -> bool:
        """Whether a query uses a family without a series from any exporter."""
        names = [each.name for each in selectors(filled(one.expression))]
        seconds = int(self._end - self._begin)
        return not all(
            ask(self._url, "query", query=f"count(last_over_time({name}[{seconds}s]))", time=self._end)
            for name in names
        )

    def _options(self, variable: Mapping[str, Any], chosen: Mapping[str, str]) -> list[str]:
        query = filled(variable["query"]["query"], chosen, self._builtin)
        result = re.fullmatch(r"query_result\((.*)\)", query)
        if result:
            texts = [
                json.dumps(series["metric"]).replace('": "', '="')
                for series in ask(self._url, "query", query=result[1])
            ]
            pattern = variable["regex"].strip("/")
            return [found[1] for text in texts if (found := re.search(pattern, text))]
        match = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
        assert match, query
        parameters = urllib.parse.urlencode({"match[]": match[1], "start": self._begin, "end": self._end})
        with urllib.request.urlopen(
            f"{self._url}/api/v1/label/{match[2]}/values?{parameters}", timeout=30
        ) as answer:
            values: list[str] = json.load(answer)["data"]
        return values
