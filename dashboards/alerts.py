"""Tables of firing alerts, the most urgent alert first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from dashboards.palette import BAD, NEUTRAL, WARNING
from dashboards.panels import NO_VALUE, Json, Panel, link, value_mappings
from dashboards.tables import ZERO_AS_DASH, Column, placeholder_row, table

RULES_DIRECTORY = Path(__file__).resolve().parent.parent / "deploy" / "prometheus" / "rules"
CLOCK_TIME = "time:MMM D HH:mm"
"""Grafana's unit for Unix milliseconds as a date and a clock time."""
NO_PROGRESS_ALERTS = "RunDied|TrainingHang"
"""Alerts about runs that make no progress, the most urgent alerts."""
URGENCY_NO_PROGRESS, URGENCY_CRITICAL, URGENCY_WARNING, URGENCY_INFO = 4, 3, 2, 1
"""Urgencies of alerts."""
URGENCIES = value_mappings(
    {
        URGENCY_NO_PROGRESS: ("no progress", BAD),
        URGENCY_CRITICAL: ("critical", BAD),
        URGENCY_WARNING: ("warning", WARNING),
        URGENCY_INFO: ("info", NEUTRAL),
        0: (NO_VALUE, NEUTRAL),
    }
)
RUNBOOK = link("Runbook", "${runbook}#${__value.raw}")
"""Data link of an alert's name. The variable `runbook` contains the address from the rules."""


def titles() -> dict[str, str]:
    """Return the title of each alert of the rules by the name of the alert."""
    return {
        rule["alert"]: rule["annotations"]["title"]
        for path in sorted(RULES_DIRECTORY.glob("alerts-*.yml"))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    }


def title_mappings() -> list[Json]:
    """Return value mappings from the names of alerts to their titles."""
    return value_mappings({name: (title, NEUTRAL) for name, title in titles().items()})


def urgency(selector: str, labels: str) -> str:
    """Return PromQL for the urgency of the firing alerts, by labels."""
    matchers = {
        URGENCY_NO_PROGRESS: f'alertname=~"{NO_PROGRESS_ALERTS}"',
        URGENCY_CRITICAL: f'severity="critical", alertname!~"{NO_PROGRESS_ALERTS}"',
        URGENCY_WARNING: 'severity="warning"',
        URGENCY_INFO: 'severity="info"',
    }
    return " or ".join(
        f'{value} * max by ({labels}) (ALERTS{{alertstate="firing", {matcher}, {selector}}})'
        for value, matcher in matchers.items()
    )


def firing_alerts(
    selector: str,
    columns: Sequence[Column],
    w: int,
    h: int,
    *,
    group_by: Sequence[str] = (),
    unknown_if: str = "",
) -> Panel:
    """Return the table of firing alerts, the most urgent first; if no alert fires, a row says so.

    Args:
        selector: Matchers of the alerts.
        columns: Columns of labels between the title and the start of the alert.
        w: Width in grid columns.
        h: Height in grid rows.
        group_by: Labels of a group of alerts. The table then has only the most urgent alert of each group, with the number of
            the other alerts. Empty for all alerts.
        unknown_if: PromQL with a value while the exporters are down, because alerts about their nodes cannot fire; "" for none.
    """
    labels = ", ".join(["alertname", *(column.source for column in columns)])
    group_labels = ", ".join(group_by)
    urgencies = urgency(selector, labels)
    rows = f"topk by ({group_labels}) (1, {urgencies})" if group_by else urgencies
    no_alert_query = placeholder_row(
        f'ALERTS{{alertstate="firing", {selector}}}', "alertname", "no alert fires"
    )
    if unknown_if:
        unknown_node_query = (
            f'label_replace({no_alert_query} and on () {unknown_if}, "alertname", "node unknown", "", "")'
        )
        no_alert_query = f"({no_alert_query} unless on () {unknown_if} or {unknown_node_query})"

    def with_title(expression: str) -> str:
        return f'label_replace({expression}, "title", "$1", "alertname", "(.+)") or {no_alert_query}'

    other_alerts = f"(count by ({group_labels}) ({urgencies}) - 1)"
    count_column = Column(
        with_title(f"({rows}) * 0 + on ({group_labels}) group_left () {other_alerts}"),
        "Other alerts",
        decimals=0,
        width=100,
        mappings=ZERO_AS_DASH,
    )
    return table(
        "Firing alerts",
        Column(with_title(rows), "Urgency", decimals=0, width=100, mappings=URGENCIES),
        Column("alertname", "Alert", width=200, links=(RUNBOOK,)),
        Column("title", "What happened", mappings=title_mappings()),
        *columns,
        Column(
            with_title(
                f"1000 * max by ({labels}) (ALERTS_FOR_STATE{{{selector}}}) and on ({labels}) ({rows})"
            ),
            "Since",
            unit=CLOCK_TIME,
            width=115,
            mappings=ZERO_AS_DASH,
        ),
        *((count_column,) if group_by else ()),
        sort="Urgency",
        w=w,
        h=h,
    )
