"""A dashboard as a whole: variables, annotations, links, and the place of every panel.

The model is Grafana's first, at the version of Grafana 10.4: Grafana 10 reads it, and all later ones convert it.
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
"""Order of a variable's values: as numbers, ascending."""


@dataclass(frozen=True, slots=True)
class Variable:
    """What the reader can choose."""

    name: str  # as in `$name`
    label: str  # as the reader sees it
    query: str  # `label_values(…)`, with selectors by name
    several: bool = True  # whether several can be chosen at once
    all_of_them: bool = True  # whether All can be, and is at first
    every: str | None = ".+"  # what All stands for in a matcher; None for the list of all of them
    regex: str = ""  # what of each result is the value; "" for all of it
    sort: int = 1  # Grafana's number for the order; 0 leaves it as the query has it
    hidden: bool = False  # it follows from the others
    what: str = ""  # its description

    def model(self) -> Json:
        """What Grafana reads."""
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
    what="The label `cluster` of external_labels; All also where there is none.",
)
JOB = Variable(
    "job",
    "Job",
    "label_values(exporter_build_info{@cluster}, job)",
    every=None,
    what="Prometheus' scrape job of the exporters; not the training job.",
)
NODE = Variable(
    "node",
    "Node",
    'label_values(exporter_build_info{@cluster, job=~"$job"}, instance)',
    what="The exporter's address; in Kubernetes the node.",
)
ONE_NODE = Variable(NODE.name, NODE.label, NODE.query, several=False, what=NODE.what)
RUN = Variable(
    "run",
    "Run",
    "label_values(training_rank_info{@cluster}, run)",
    what="The training run, over its restarts.",
)
ONE_RUN = Variable(RUN.name, RUN.label, RUN.query, several=False, what=RUN.what)
RANK = Variable(
    "rank", "Rank", "label_values(training_rank_info{@run}, rank)", sort=NUMERICAL, what="Ranks of the run."
)


@dataclass(frozen=True, slots=True)
class Mark:
    """A kind of event that is drawn over all panels."""

    name: str  # as the reader can switch it
    expression: str  # of a series whose value is the time in milliseconds
    title: str  # Of the event
    color: str  # of its line
    shown: bool = True  # whether it is on at first
    at_value: bool = True  # whether the value is the time; else the series is there while the event lasts

    def model(self) -> Json:
        """What Grafana reads."""
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
    "Alerts", 'ALERTS{alertstate="firing", @run}', "{{alertname}} {{rank}}", BLUE, shown=False, at_value=False
)
ALERTS_OF_NODE = Mark(
    "Alerts", 'ALERTS{alertstate="firing", @node}', "{{alertname}} {{gpu}}", BLUE, shown=False, at_value=False
)


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading, which says what question they answer."""

    title: str  # the heading; "" for none
    panels: Sequence[Panel]  # from left to right, in as many lines as they need
    collapsed: bool = False  # opened by the reader


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard."""

    uid: str  # its name in links: for good
    title: str  # its name for people
    what: str  # its description
    variables: Sequence[Variable]  # beside the data source
    rows: Sequence[Row]  # its panels
    marks: Sequence[Mark] = ()  # its annotations
    span: str = "now-1h"  # how far back it shows at first
    refresh: str = "30s"

    def model(self) -> Json:
        """What Grafana reads.

        Raises:
            KeyError: A panel has no text.
        """
        single = [variable.name for variable in self.variables if not variable.several]
        model: Json = _exact(self._model(), single)
        texts = texts_of(self.uid)
        for panel in panels_of(model):
            panel["description"], panel["fieldConfig"]["defaults"]["noValue"] = texts[panel["title"]]
        return model

    def _model(self) -> Json:
        kinds = sorted({panel.body["type"] for row in self.rows for panel in row.panels})
        return {
            # For Grafana's import and grafana.com; the data source is a variable, so that none has to be put in.
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
    """Compare variables of one value as they are: Grafana escapes a name like `lr+wd` for a pattern only in the others."""
    if isinstance(value, dict):
        return {key: _exact(inner, single) for key, inner in value.items()}
    if isinstance(value, list):
        return [_exact(inner, single) for inner in value]
    if isinstance(value, str):
        for name in single:
            value = value.replace(f'=~"${name}"', f'="${name}"')
    return value


def _placed(rows: Sequence[Row]) -> list[Json]:
    """Lay the panels out; ids follow the order, so that a new panel changes those after it only."""
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
    """Widen, then heighten the panels of a row until nothing of its rectangle is empty beside or below one of them."""
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
    """The first column from which a panel of this width stands highest on the page."""
    return min(range(COLUMNS - width + 1), key=lambda left: max(skyline[left : left + width]))


def panels_of(model: dict[str, Any]) -> list[Json]:
    """All panels of a dashboard but the headings, those of closed rows included."""
    return [
        panel
        for outer in model["panels"]
        for panel in (outer, *outer.get("panels", ()))
        if panel["type"] != "row"
    ]


TEXTS = Path(__file__).resolve().parent / "text"
GAP = "nothing was measured then: the exporter was down, or its source was; no line is drawn over it, and a rate beside it reads low."
PARTS = ("**Bad:** ", "**Action:** ", "**A gap or no data:** ", "**Empty:** ")


def texts_of(uid: str, directory: Path = TEXTS) -> dict[str, tuple[str, str]]:
    """Read the description of each panel of a dashboard, as Markdown, and what the panel says when it is empty, by title.

    A panel has a paragraph on what it shows, one on what a bad value looks like, one on what to do then, and one on what a
    gap means where it means more than that nothing was measured.

    Raises:
        ValueError: A panel lacks one of its parts.
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
        raise ValueError(f"{title}: missing {', '.join(missing) or 'what it shows'}")
    description = "\n\n".join([paragraphs[0], *(found[part] for part in PARTS[:3])])
    return description, found["**Empty:** "].removeprefix("**Empty:** ")
