"""Grafana dashboards: variables, annotations, links and layout.

The JSON follows the classic dashboard schema of Grafana 10.4; later versions of Grafana convert the JSON on import.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dashboards.palette import BLUE, PURPLE, VERMILION
from dashboards.panels import Json, Panel
from dashboards.queries import DATASOURCE, bridge_missed_scrape, expand

SCHEMA_VERSION = 39
"""Version of the dashboard schema in Grafana 10.4."""
TAG = "training-exporter"
"""Tag of all dashboards. Each dashboard links to the other dashboards with the tag."""
COLUMNS = 24
"""Width of a dashboard in grid columns."""
ORDER_OF_QUERY, ALPHABETICAL_SORT, NUMERICAL_SORT = 0, 1, 3
"""Grafana's sort orders of the values of a variable. Both sorts are ascending."""
HIDDEN_VARIABLE = 2
"""Grafana's display setting of a variable without a drop-down list; 0 shows the list."""
REFRESH_ON_TIME_RANGE_CHANGE = 2
"""Grafana's setting for a variable whose query runs again when the time range changes."""


@dataclass(frozen=True, slots=True)
class Variable:
    """Dashboard variable with values from a query."""

    name: str  # as in `$name`
    label: str  # text beside the drop-down list
    query: str  # `label_values(…)` or `query_result(…)` with named selectors
    multi: bool = True  # more than one value can be selected
    include_all: bool = True  # the option All exists and is selected by default, if `multi` is true
    all_value: str | None = ".+"  # regular expression for All; None joins all values
    regex: str = ""  # extracts the value from a query result; "" for the whole result
    sort: int = ALPHABETICAL_SORT
    hidden: bool = False  # no drop-down list; the value follows from other variables
    description: str = ""  # tooltip of the label

    def model(self) -> Json:
        """Return the JSON model of the variable."""
        query = expand(self.query)
        model: Json = {
            "datasource": DATASOURCE,
            "definition": query,
            "description": self.description,
            "includeAll": self.multi and self.include_all,
            "hide": HIDDEN_VARIABLE if self.hidden else 0,
            "label": self.label,
            "multi": self.multi,
            "name": self.name,
            "query": {"query": query, "refId": f"variable-{self.name}"},
            "refresh": REFRESH_ON_TIME_RANGE_CHANGE,
            "regex": self.regex,
            "sort": self.sort,
            "type": "query",
        }
        if model["includeAll"]:
            model["current"] = {"selected": True, "text": ["All"], "value": ["$__all"]}
            if self.all_value is not None:
                model["allValue"] = self.all_value
        if self.hidden:
            # Grafana would keep the value in the address of a link, although the other variables have changed.
            model["skipUrlSync"] = True
        return model


CLUSTER = Variable(
    "cluster",
    "Cluster",
    "label_values(exporter_build_info, cluster)",
    all_value=".*",
    description="The label `cluster` of external_labels; All includes series without the label.",
)
JOB = Variable(
    "job",
    "Job",
    "label_values(exporter_build_info{@cluster}, job)",
    description="Scrape job of the exporters in Prometheus, not the training job.",
)
NODE = Variable(
    "node",
    "Node",
    'label_values(exporter_build_info{@cluster, job=~"$job"}, instance)',
    description="Label `instance` of the exporter; in Kubernetes the name of the node.",
)
SINGLE_NODE = Variable(NODE.name, NODE.label, NODE.query, multi=False, description=NODE.description)
RUN = Variable(
    "run",
    "Run",
    "label_values(training_rank_info{@cluster}, run)",
    description="Training run; a run includes its restarts.",
)
SINGLE_RUN = Variable(RUN.name, RUN.label, RUN.query, multi=False, description=RUN.description)
RANK = Variable(
    "rank",
    "Rank",
    "label_values(training_rank_info{@run}, rank)",
    sort=NUMERICAL_SORT,
    description="Ranks of the run.",
)
RUNBOOK = Variable(
    "runbook",
    "Runbook",
    "label_values(site:links:info, runbook)",
    multi=False,
    hidden=True,
    description="Address of the runbook, from the rules in thresholds.yml.",
)


@dataclass(frozen=True, slots=True)
class Annotation:
    """Annotation query, drawn over all panels."""

    name: str  # label of the switch that turns the annotations on or off
    expression: str  # PromQL
    title: str  # title of an event; `{{label}}` expands to the value of the label
    color: str  # color of the line
    enabled: bool = True  # drawn by default
    use_value_for_time: bool = True  # values are Unix times in ms; False for the times of the samples

    def model(self) -> Json:
        """Return the JSON model of the annotation query."""
        return {
            "datasource": DATASOURCE,
            "enable": self.enabled,
            "expr": expand(self.expression),
            "iconColor": self.color,
            "name": self.name,
            "titleFormat": self.title,
            "useValueForTime": "on" if self.use_value_for_time else False,
        }


ATTEMPTS = Annotation(
    "Attempts",
    "max by (run) (training_attempt_start_timestamp_seconds{@run}) * 1000",
    "{{run}}: attempt started",
    VERMILION,
)
CHECKPOINTS = Annotation(
    "Checkpoints",
    "max by (run) (training_checkpoint_last_success_timestamp_seconds{@run}) * 1000",
    "{{run}}: checkpoint saved",
    PURPLE,
)
ALERTS_OF_RUN = Annotation(
    "Alerts", 'ALERTS{alertstate="firing", @run}', "{{alertname}} {{rank}}", BLUE, use_value_for_time=False
)
ALERTS_OF_NODE = Annotation(
    "Alerts",
    'ALERTS{alertstate="firing", @node_any_job}',
    "{{alertname}} {{gpu}}",
    BLUE,
    use_value_for_time=False,
)


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a dashboard: panels under a heading."""

    title: str  # "" for no heading
    panels: Sequence[Panel]  # in reading order
    collapsed: bool = False  # closed by default


@dataclass(frozen=True, slots=True)
class Board:
    """Dashboard of panels that read one Prometheus data source."""

    uid: str  # identifier in links and provisioning; must never change
    title: str
    description: str  # text in the list of dashboards
    variables: Sequence[Variable]  # in addition to the data source and the cluster
    rows: Sequence[Row]  # from top to bottom
    annotations: Sequence[Annotation] = ()
    time_from: str = "now-1h"  # start of the default time range
    refresh: str = "30s"  # refresh interval
    bridges_missed_scrapes: bool = False  # apply `bridge_missed_scrape` to instant queries

    def model(self) -> Json:
        """Return the JSON model of the dashboard, with the panel texts from `text/`.

        Raises:
            KeyError: A panel has no text.
        """
        single_value_names = [
            variable.name for variable in self.variables if not variable.multi and not variable.hidden
        ]
        model: Json = _compare_single_values_literally(self._model(), single_value_names)
        texts = read_texts(self.uid)
        for panel in all_panels(model):
            panel["description"], panel["fieldConfig"]["defaults"]["noValue"] = texts[panel["title"]]
            for target in panel["targets"]:
                if self.bridges_missed_scrapes and target["instant"]:
                    target["expr"] = bridge_missed_scrape(target["expr"])
        return model

    def _model(self) -> Json:
        """Return the JSON model without the panel texts, with regular expressions for all variables."""
        panel_types = sorted({panel.body["type"] for row in self.rows for panel in row.panels})
        return {
            # Grafana's import dialog reads these keys. No input is necessary, because the data source is a variable.
            "__inputs": [],
            "__requires": [
                {"type": "grafana", "id": "grafana", "name": "Grafana", "version": "10.4.0"},
                {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"},
                *(
                    {"type": "panel", "id": panel_type, "name": panel_type, "version": ""}
                    for panel_type in panel_types
                ),
            ],
            "annotations": {
                "list": [_BUILT_IN_ANNOTATIONS, *(annotation.model() for annotation in self.annotations)]
            },
            "description": self.description,
            "editable": True,
            "graphTooltip": 1,
            "id": None,
            "links": [_DASHBOARD_LINKS],
            "panels": _lay_out(self.rows),
            "refresh": self.refresh,
            "schemaVersion": SCHEMA_VERSION,
            "tags": [TAG],
            "templating": {
                "list": [_DATASOURCE_VARIABLE, *(variable.model() for variable in (CLUSTER, *self.variables))]
            },
            "time": {"from": self.time_from, "to": "now"},
            "timezone": "browser",
            "title": self.title,
            "uid": self.uid,
            "version": 1,
        }


_DATASOURCE_VARIABLE: Json = {
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
_BUILT_IN_ANNOTATIONS: Json = {
    "builtIn": 1,
    "datasource": {"type": "grafana", "uid": "-- Grafana --"},
    "enable": True,
    "hide": True,
    "iconColor": "rgba(0, 211, 255, 1)",
    "name": "Annotations & Alerts",
    "type": "dashboard",
}
_DASHBOARD_LINKS: Json = {
    "icon": "external link",
    "includeVars": True,
    "keepTime": True,
    "tags": [TAG],
    "title": "",
    "type": "dashboards",
}


def _compare_single_values_literally(model: Any, single_value_names: Sequence[str]) -> Any:
    """Return a part of a JSON model with `=` instead of `=~` before single-value variables.

    Grafana does not escape the value of such a variable for regular expressions.
    """
    if isinstance(model, dict):
        return {
            key: _compare_single_values_literally(child, single_value_names) for key, child in model.items()
        }
    if isinstance(model, list):
        return [_compare_single_values_literally(child, single_value_names) for child in model]
    if isinstance(model, str):
        for name in single_value_names:
            model = model.replace(f'=~"${name}"', f'="${name}"')
    return model


def _lay_out(rows: Sequence[Row]) -> list[Json]:
    """Return the panels with positions and ids, the panels of a collapsed row within its heading. A new panel changes only the ids of later panels."""
    laid_out: list[Json] = []
    top, panel_id = 0, 0
    for row in rows:
        row_panels: list[Json] = []
        if row.title:
            panel_id += 1
            heading: Json = {
                "collapsed": row.collapsed,
                "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": top},
                "id": panel_id,
                "panels": [],
                "title": row.title,
                "type": "row",
            }
            laid_out.append(heading)
            top += 1
        skyline = [top] * COLUMNS
        for panel in row.panels:
            x = _leftmost_column(skyline, panel.width)
            y = max(skyline[x : x + panel.width])
            skyline[x : x + panel.width] = [y + panel.height] * panel.width
            panel_id += 1
            position = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            row_panels.append({"gridPos": position, "id": panel_id} | panel.body)
        _stretch([row_panel["gridPos"] for row_panel in row_panels])
        if row.title and row.collapsed:
            heading["panels"] = row_panels
        else:
            laid_out.extend(row_panels)
            top = max(skyline)
    return laid_out


def _stretch(positions: Sequence[Json]) -> None:
    """Increase in place the widths, then the heights of panels to fill the empty cells of a row."""
    bottom = max(position["y"] + position["h"] for position in positions)

    def is_free(x: int, top: int, width: int, height: int, ignored: Json) -> bool:
        return all(
            other is ignored
            or other["x"] >= x + width
            or x >= other["x"] + other["w"]
            or other["y"] >= top + height
            or top >= other["y"] + other["h"]
            for other in positions
        )

    for position in positions:
        right, height = position["x"] + position["w"], position["h"]
        while right < COLUMNS and is_free(
            position["x"], position["y"], right + 1 - position["x"], height, position
        ):
            right += 1
        position["w"] = right - position["x"]
    for position in positions:
        while position["y"] + position["h"] < bottom and is_free(
            position["x"], position["y"], position["w"], position["h"] + 1, position
        ):
            position["h"] += 1


def _leftmost_column(skyline: Sequence[int], width: int) -> int:
    """Return the leftmost column at which a panel of this width is closest to the top."""
    return min(range(COLUMNS - width + 1), key=lambda x: max(skyline[x : x + width]))


def all_panels(model: dict[str, Any]) -> list[Json]:
    """Return the panels of a dashboard's JSON model, including those of collapsed rows, without row headings."""
    return [
        panel
        for outer in model["panels"]
        for panel in (outer, *outer.get("panels", ()))
        if panel["type"] != "row"
    ]


TEXT_DIRECTORY = Path(__file__).resolve().parent / "text"
DEFAULT_GAP_TEXT = (
    "The exporter or its source was down. No line spans a gap, and a rate next to a gap is too low."
)
DEFAULT_EMPTY_TEXT = "Prometheus does not respond."
GAP_LABEL = "**A gap or no data:** "
EMPTY_LABEL = "**Text when empty:** "
LABELS_IN_DESCRIPTION = ("**Bad:** ", "**Action:** ", GAP_LABEL)
PARAGRAPH_LABELS = (*LABELS_IN_DESCRIPTION, EMPTY_LABEL)
"""Labels of the paragraphs after the content of a panel's text, in this order."""


def read_texts(uid: str, directory: Path = TEXT_DIRECTORY) -> dict[str, tuple[str, str]]:
    """Return the description (Markdown) and the text of an empty panel, by panel title.

    The text below a panel's heading has paragraphs or lists for the content, and a paragraph for each label of `PARAGRAPH_LABELS`.
    `DEFAULT_GAP_TEXT` replaces a missing paragraph about gaps. `DEFAULT_EMPTY_TEXT` replaces a missing text when empty, for a panel that has
    a value even without data.

    Raises:
        ValueError: A panel lacks a paragraph.
    """
    content = (directory / f"{uid}.md").read_text(encoding="utf-8")
    # re.split returns the text before the first heading, then each heading and its body.
    sections = re.split(r"^### (.+)\n", content, flags=re.MULTILINE)
    return {
        title: _parse_text(title, re.split(r"^## ", body, flags=re.MULTILINE)[0])
        for title, body in zip(sections[1::2], sections[2::2], strict=True)
    }


def _parse_text(title: str, body: str) -> tuple[str, str]:
    """Return the description and the text of an empty panel from the Markdown below a panel's heading."""
    paragraphs = [
        paragraph if paragraph.startswith("- ") else " ".join(paragraph.split())
        for paragraph in body.strip().split("\n\n")
    ]
    labelled = {
        label: paragraph
        for label in PARAGRAPH_LABELS
        for paragraph in paragraphs
        if paragraph.startswith(label)
    }
    labelled.setdefault(GAP_LABEL, f"{GAP_LABEL}{DEFAULT_GAP_TEXT}")
    labelled.setdefault(EMPTY_LABEL, f"{EMPTY_LABEL}{DEFAULT_EMPTY_TEXT}")
    missing = [label.strip("* ") for label in PARAGRAPH_LABELS if label not in labelled]
    content = list(itertools.takewhile(lambda paragraph: paragraph not in labelled.values(), paragraphs))
    if missing or not content:
        raise ValueError(f"{title}: missing {', '.join(missing) or 'description'}")
    description = "\n\n".join([*content, *(labelled[label] for label in LABELS_IN_DESCRIPTION)])
    return description, labelled[EMPTY_LABEL].removeprefix(EMPTY_LABEL)
