"""Dashboards: variables, annotations, links and layout.

The JSON follows the first dashboard schema, in the version of Grafana 10.4; later versions of Grafana convert it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dashboards.palette import BLUE, PURPLE, VERMILION
from dashboards.panels import Json, Panel
from dashboards.queries import DATASOURCE, expand

SCHEMA_VERSION = 39
TAG = "training-exporter"
COLUMNS = 24
NUMERICAL = 3
"""Grafana's sort order: numerical, ascending."""


@dataclass(frozen=True, slots=True)
class Variable:
    """Variable of a dashboard."""

    name: str  # as in `$name`
    label: str  # for readers
    query: str  # `label_values(…)` with named selectors
    several: bool = True  # several values may be selected
    all_of_them: bool = True  # All is offered, and selected first
    every: str | None = ".+"  # matcher for All; None for the list of all values
    regex: str = ""  # extracts the value from a result; "" for the whole result
    sort: int = 1  # Grafana's sort order; 0 for the order of the query
    hidden: bool = False  # derived from other variables
    what: str = ""  # description

    def model(self) -> Json:
        """Return the JSON model."""
        query = expand(self.query)
        made: Json = {
            "datasource": DATASOURCE,
            "definition": query,
            "description": self.what,
            "includeAll": self.several and self.all_of_them,
            "hide": 2 if self.hidden else 0,
            "label": self.label,
            "multi": self.several,
            "name": self.name,
            "query": {"query": query, "refId": f"variable-{self.name}"},
            "refresh": 2,
            "regex": self.regex,
            "sort": self.sort,
            "type": "query",
        }
        if made["includeAll"]:
            made["current"] = {"selected": True, "text": ["All"], "value": ["$__all"]}
            if self.every:
                made["allValue"] = self.every
        return made


CLUSTER = Variable(
    "cluster",
    "Cluster",
    "label_values(exporter_build_info, cluster)",
    every=".*",
    what="The label `cluster` of external_labels; All includes series without the label.",
)
JOB = Variable(
    "job",
    "Job",
    "label_values(exporter_build_info{@cluster}, job)",
    every=None,
    what="Scrape job of the exporters in Prometheus, not the training job.",
)
NODE = Variable(
    "node",
    "Node",
    'label_values(exporter_build_info{@cluster, job=~"$job"}, instance)',
    what="Address of the exporter; in Kubernetes the node.",
)
ONE_NODE = Variable(NODE.name, NODE.label, NODE.query, several=False, what=NODE.what)
RUN = Variable(
    "run",
    "Run",
    "label_values(training_rank_info{@cluster}, run)",
    what="Training run, over its restarts.",
)
ONE_RUN = Variable(RUN.name, RUN.label, RUN.query, several=False, what=RUN.what)
RANK = Variable(
    "rank", "Rank", "label_values(training_rank_info{@run}, rank)", sort=NUMERICAL, what="Ranks of the run."
)
RUNBOOK = Variable(
    "runbook",
    "Runbook",
    "label_values(site:links:info, runbook)",
    several=False,
    hidden=True,
    what="Address of the runbook, from thresholds.yml of the rules.",
)


@dataclass(frozen=True, slots=True)
class Mark:
    """Annotation over all panels."""

    name: str  # name of the switch
    expression: str  # PromQL; the value is the time in milliseconds
    title: str  # title of the event
    color: str  # colour of the line
    shown: bool = True  # on by default
    at_value: bool = True  # False: the event lasts as long as the series exists

    def model(self) -> Json:
        """Return the JSON model."""
        return {
            "datasource": DATASOURCE,
            "enable": self.shown,
            "expr": expand(self.expression),
            "iconColor": self.color,
            "name": self.name,
            "titleFormat": self.title,
            "useValueForTime": "on" if self.at_value else False,
        }


RESTARTS = Mark(
    "Attempts",
    "max by (run) (training_attempt_start_timestamp_seconds{@run}) * 1000",
    "{{run}}: an attempt begins",
    VERMILION,
)
CHECKPOINTS = Mark(
    "Checkpoints",
    "max by (run) (training_checkpoint_last_success_timestamp_seconds{@run}) * 1000",
    "{{run}}: checkpoint saved",
    PURPLE,
)
ALERTS_OF_RUN = Mark(
    "Alerts", 'ALERTS{alertstate="firing", @run}', "{{alertname}} {{rank}}", BLUE, at_value=False
)
ALERTS_OF_NODE = Mark(
    "Alerts", 'ALERTS{alertstate="firing", @machine}', "{{alertname}} {{gpu}}", BLUE, at_value=False
)


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading."""

    title: str  # "" for no heading
    panels: Sequence[Panel]  # in reading order
    collapsed: bool = False  # closed by default


@dataclass(frozen=True, slots=True)
class Board:
    """Dashboard."""

    uid: str  # name in links; never changes
    title: str  # title
    what: str  # description
    variables: Sequence[Variable]  # besides the data source
    rows: Sequence[Row]  # rows of panels
    marks: Sequence[Mark] = ()  # annotations
    span: str = "now-1h"  # default time range
    refresh: str = "30s"

    def model(self) -> Json:
        """Return the JSON model; raises KeyError for a panel without a text."""
        single = [variable.name for variable in self.variables if not variable.several]
        model: Json = _exact(self._model(), single)
        texts = texts_of(self.uid)
        for panel in panels_of(model):
            panel["description"], panel["fieldConfig"]["defaults"]["noValue"] = texts[panel["title"]]
        return model

    def _model(self) -> Json:
        kinds = sorted({panel.body["type"] for row in self.rows for panel in row.panels})
        return {
            # For Grafana's import dialog; the data source is a variable, so the dialog asks for none.
            "__inputs": [],
            "__requires": [
                {"type": "grafana", "id": "grafana", "name": "Grafana", "version": "10.4.0"},
                {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"},
                *({"type": "panel", "id": kind, "name": kind, "version": ""} for kind in kinds),
            ],
            "annotations": {"list": [_OWN_ANNOTATIONS, *(mark.model() for mark in self.marks)]},
            "description": self.what,
            "editable": True,
            "graphTooltip": 1,
            "id": None,
            "links": [_TO_OTHERS],
            "panels": _placed(self.rows),
            "refresh": self.refresh,
            "schemaVersion": SCHEMA_VERSION,
            "tags": [TAG],
            "templating": {"list": [_DATASOURCE, *(each.model() for each in (CLUSTER, *self.variables))]},
            "time": {"from": self.span, "to": "now"},
            "timezone": "browser",
            "title": self.title,
            "uid": self.uid,
            "version": 1,
        }


_DATASOURCE: Json = {
    "current": {},
    "includeAll": False,
    "label": "Data source",
    "multi": False,
    "name": "datasource",
    "query": "prometheus",
    "refresh": 1,
    "regex": "",
    "type": "datasource",
}
_OWN_ANNOTATIONS: Json = {
    "builtIn": 1,
    "datasource": {"type": "grafana", "uid": "-- Grafana --"},
    "enable": True,
    "hide": True,
    "iconColor": "rgba(0, 211, 255, 1)",
    "name": "Annotations & Alerts",
    "type": "dashboard",
}
_TO_OTHERS: Json = {
    "icon": "external link",
    "includeVars": True,
    "keepTime": True,
    "tags": [TAG],
    "title": "",
    "type": "dashboards",
}


def _exact(value: Any, single: Sequence[str]) -> Any:
    """Replace `=~` by `=` for single-value variables, whose values Grafana does not escape for patterns."""
    if isinstance(value, dict):
        return {key: _exact(inner, single) for key, inner in value.items()}
    if isinstance(value, list):
        return [_exact(inner, single) for inner in value]
    if isinstance(value, str):
        for name in single:
            value = value.replace(f'=~"${name}"', f'="${name}"')
    return value


def _placed(rows: Sequence[Row]) -> list[Json]:
    """Return the panels with positions; ids follow the order, so a new panel changes only later ids."""
    found: list[Json] = []
    top, number = 0, 0
    for row in rows:
        inside: list[Json] = []
        if row.title:
            number += 1
            heading: Json = {
                "collapsed": row.collapsed,
                "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": top},
                "id": number,
                "panels": [],
                "title": row.title,
                "type": "row",
            }
            found.append(heading)
            top += 1
        skyline = [top] * COLUMNS
        for panel in row.panels:
            left = _lowest(skyline, panel.width)
            start = max(skyline[left : left + panel.width])
            skyline[left : left + panel.width] = [start + panel.height] * panel.width
            number += 1
            place = {"h": panel.height, "w": panel.width, "x": left, "y": start}
            inside.append({"gridPos": place, "id": number} | panel.body)
        _stretch([each["gridPos"] for each in inside])
        if row.title and row.collapsed:
            heading["panels"] = inside
        else:
            found.extend(inside)
            top = max(skyline)
    return found


def _stretch(places: Sequence[Json]) -> None:
    """Widen, then heighten panels until the rectangle of the row has no empty cells."""
    bottom = max(place["y"] + place["h"] for place in places)

    def is_free(left: int, top: int, width: int, height: int, besides: Json) -> bool:
        return all(
            other is besides
            or other["x"] >= left + width
            or left >= other["x"] + other["w"]
            or other["y"] >= top + height
            or top >= other["y"] + other["h"]
            for other in places
        )

    for place in places:
        right, height = place["x"] + place["w"], place["h"]
        while right < COLUMNS and is_free(place["x"], place["y"], right + 1 - place["x"], height, place):
            right += 1
        place["w"] = right - place["x"]
    for place in places:
        while place["y"] + place["h"] < bottom and is_free(
            place["x"], place["y"], place["w"], place["h"] + 1, place
        ):
            place["h"] += 1


def _lowest(skyline: Sequence[int], width: int) -> int:
    """Return the leftmost column in which a panel of this width has the highest position."""
    return min(range(COLUMNS - width + 1), key=lambda left: max(skyline[left : left + width]))


def panels_of(model: dict[str, Any]) -> list[Json]:
    """Return all panels of a dashboard without headings, panels of closed rows included."""
    return [
        panel
        for outer in model["panels"]
        for panel in (outer, *outer.get("panels", ()))
        if panel["type"] != "row"
    ]


TEXTS = Path(__file__).resolve().parent / "text"
GAP = "the exporter or its source was down. No line spans a gap, and a rate next to a gap is too low."
PARTS = ("**Bad:** ", "**Action:** ", "**A gap or no data:** ", "**Empty:** ")


def texts_of(uid: str, directory: Path = TEXTS) -> dict[str, tuple[str, str]]:
    """Return description (Markdown) and empty-panel text of each panel by title.

    A description has paragraphs for the content, for a bad value, for the action, and for the meaning of a gap if the
    default meaning does not apply.

    Raises:
        ValueError: A panel lacks a paragraph.
    """
    content = (directory / f"{uid}.md").read_text(encoding="utf-8")
    parts = re.split(r"^### (.+)\n", content, flags=re.MULTILINE)
    return {
        title: _text(title, re.split(r"^## ", body, flags=re.MULTILINE)[0])
        for title, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def _text(title: str, body: str) -> tuple[str, str]:
    paragraphs = [" ".join(paragraph.split()) for paragraph in body.strip().split("\n\n")]
    found = {part: paragraph for part in PARTS for paragraph in paragraphs if paragraph.startswith(part)}
    found.setdefault("**A gap or no data:** ", f"**A gap or no data:** {GAP}")
    missing = [part.strip("* ") for part in PARTS if part not in found]
    if missing or paragraphs[0] in found.values():
        raise ValueError(f"{title}: missing {', '.join(missing) or 'description'}")
    description = "\n\n".join([paragraphs[0], *(found[part] for part in PARTS[:3])])
    return description, found["**Empty:** "].removeprefix("**Empty:** ")
