"""Firing alerts: PromQL for their urgency and the start of their problem, and the table with the most urgent alert first."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from dashboards.board import COLUMNS
from dashboards.palette import BAD, NEUTRAL, WARNING
from dashboards.panels import NO_VALUE, Json, Panel, link, value_mappings
from dashboards.queries import RECORDED_LAST_PROGRESS_TIME
from dashboards.tables import ZERO_AS_DASH, Column, placeholder_row, table
from exporter.status.xids import XID_MEANINGS

RULES_DIRECTORY = Path(__file__).resolve().parent.parent / "deploy" / "prometheus" / "rules"
CLOCK_TIME = "time:MMM D HH:mm:ss"
"""Grafana's unit for Unix milliseconds as a date and a clock time."""
CLOCK_TIME_WIDTH = 135
"""Width in pixels of a column with a clock time."""
NO_PROGRESS_ALERTS = "RunDied|TrainingHang"
"""Alerts about runs that make no progress."""
HARDWARE_ALERTS = "GpuLost|GpuMissing|GpuXidCritical|GpuEccUncorrected|NvmlDown"
"""Alerts about hardware that can stop a run. They are the most urgent if the run makes no progress."""


class Urgency(enum.IntEnum):
    """Urgency of an alert: tables show the largest first."""

    CAUSE_OF_STOP = 5  # about the hardware of a run that makes no progress: the hardware is the cause
    NO_PROGRESS = 4  # about a run that makes no progress
    CRITICAL = 3
    WARNING = 2
    INFO = 1
    NO_ALERT = 0  # the row *no alert fires*


URGENCY_TEXTS = value_mappings(
    {
        Urgency.CAUSE_OF_STOP.value: ("no progress", BAD),
        Urgency.NO_PROGRESS.value: ("no progress", BAD),
        Urgency.CRITICAL.value: ("critical", BAD),
        Urgency.WARNING.value: ("warning", WARNING),
        Urgency.INFO.value: ("info", NEUTRAL),
        Urgency.NO_ALERT.value: (NO_VALUE, NEUTRAL),
    }
)
"""Value mappings from urgencies to texts."""
RUNBOOK_LINK = link("Runbook", "${runbook}#${__value.raw}")
"""Data link of an alert's name. The variable `runbook` contains the address from the rules."""


@functools.cache
def titles() -> dict[str, str]:
    """Return the title of each alert of the rules by the name of the alert."""
    return {
        rule["alert"]: rule["annotations"]["title"]
        for path in sorted(RULES_DIRECTORY.glob("alerts-*.yml"))
        for group in yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)["groups"]
        for rule in group["rules"]
    }


def title_mappings() -> list[Json]:
    """Return value mappings from the names of alerts to their titles, and from Xids to their meanings."""
    texts = titles() | {f"Xid {xid}": f"Xid {xid}: {meaning}" for xid, meaning in XID_MEANINGS.items()}
    return value_mappings({name: (text, NEUTRAL) for name, text in texts.items()})


def with_xid(expression: str, label: str) -> str:
    """Return PromQL that replaces a label by the Xid of the alert, such as `Xid 48`, if the alert has an Xid, and removes the label `xid`."""
    return f'max without (xid) (label_replace({expression}, "{label}", "Xid $1", "xid", "(.+)"))'


def urgency(selector: str, labels: str, condition: str = "") -> str:
    """Return PromQL for the urgency of each firing alert, by labels.

    Args:
        selector: Matchers of the alerts.
        labels: Labels to keep.
        condition: PromQL that follows the series of the alerts, such as `and on (run) …`.
    """
    matchers = {
        Urgency.NO_PROGRESS: f'alertname=~"{NO_PROGRESS_ALERTS}"',
        Urgency.CRITICAL: f'severity="critical", alertname!~"{NO_PROGRESS_ALERTS}"',
        Urgency.WARNING: 'severity="warning"',
        Urgency.INFO: 'severity="info"',
    }
    hardware = f'ALERTS{{alertstate="firing", alertname=~"{HARDWARE_ALERTS}", run!="", {selector}}}'
    no_progress = f'ALERTS{{alertstate="firing", alertname=~"{NO_PROGRESS_ALERTS}"}}'
    causes = f"{Urgency.CAUSE_OF_STOP} * max by ({labels}) ({hardware} {condition} and on (cluster, run) {no_progress})"
    return " or ".join(
        [
            causes,
            *(
                f'{value} * max by ({labels}) (ALERTS{{alertstate="firing", {matcher}, {selector}}} {condition})'
                for value, matcher in matchers.items()
            ),
        ]
    )


def most_urgent(selector: str, labels: str, group_labels: str) -> str:
    """Return PromQL for the urgency of the most urgent alert of each group.

    Among alerts of equal urgency, an alert with an Xid is selected, because the Xid is the cause. For the selection, it counts half a level
    more; the returned urgency is the whole number.

    Args:
        selector: Matchers of the alerts.
        labels: Labels of the result.
        group_labels: Labels that alerts of a group share.
    """
    urgencies = urgency(selector, labels)
    xid_urgencies = urgency(f'{selector}, xid!=""', labels)
    with_xid_first = f"(0.5 + ({xid_urgencies}) or {urgencies})"
    return f"({urgencies}) and on ({labels}) topk by ({group_labels}) (1, {with_xid_first})"


@dataclass(frozen=True, slots=True)
class _ProblemStart:
    """Recorded start of a problem, for the alerts about it.

    The time at which such an alert becomes pending is later, and it changes if Prometheus restarts.
    """

    alerts: str  # regular expression of the names
    labels: str  # labels that join the alerts with the start
    start: str  # PromQL in Unix seconds


RECORDED_STATE_START = "max by (cluster, run) (timestamp(run:training_run_state:age_seconds) - run:training_run_state:age_seconds)"
"""PromQL for the start of the current state of each run in Unix seconds, by cluster and run."""
_MEMORY_XIDS = "48|63|64|92|94|95"
"""Regular expression of the Xids of memory errors."""
_PROBLEM_STARTS = (
    _ProblemStart("TrainingHang", "cluster, run", RECORDED_LAST_PROGRESS_TIME),
    _ProblemStart(
        "RunDied",
        "cluster, run",
        f"run:training_first_exit:timestamp_seconds or on (cluster, run) {RECORDED_STATE_START}",
    ),
    _ProblemStart("GpuXidCritical|GpuXidWarning", "cluster, uuid, xid", "gpu:gpu_xid:timestamp_seconds"),
    _ProblemStart(
        "GpuEccUncorrected|GpuRecoveryActionNeeded",
        "cluster, uuid",
        f'min by (cluster, uuid) (gpu:gpu_xid:timestamp_seconds{{xid=~"{_MEMORY_XIDS}"}})',
    ),
    _ProblemStart("GpuLost", "cluster, uuid", "gpu:gpu_lost_start:timestamp_seconds"),
    _ProblemStart(
        "GpuThermalThrottle|GpuPowerBrake", "cluster, uuid", "gpu:gpu_throttled_start:timestamp_seconds"
    ),
    _ProblemStart("TrainingStraggler", "cluster, run, rank", "rank:training_slow_start:timestamp_seconds"),
    _ProblemStart("TrainingDataStall", "cluster, run", "run:training_data_wait_start:timestamp_seconds"),
    _ProblemStart("TrainingLossNonFinite", "cluster, run", "run:training_nonfinite_start:timestamp_seconds"),
    _ProblemStart(
        "TrainingCheckpointFailing", "cluster, run", "run:training_saves_failing_start:timestamp_seconds"
    ),
    _ProblemStart("NvmlDown", "cluster, instance", "instance:gpu_driver_down_start:timestamp_seconds"),
)
"""Recorded starts. Alerts about other problems have none."""


def alert_starts(selector: str) -> str:
    """Return PromQL for the start of the problem of each alert that matches a selector, in Unix seconds, with the labels of the alert.

    Without a recorded start, the result is the time at which the alert became pending.
    """
    starts = [
        f'0 * ALERTS_FOR_STATE{{alertname=~"{problem.alerts}", {selector}}}'
        f" + on ({problem.labels}) group_left () max by ({problem.labels}) ({problem.start})"
        for problem in _PROBLEM_STARTS
    ]
    return " or ".join([*starts, f"ALERTS_FOR_STATE{{{selector}}}"])


def firing_alerts(
    selector: str,
    columns: Sequence[Column],
    w: int,
    h: int,
    *,
    group_by: Sequence[str] = (),
    condition: str = "",
    unknown_if: str,
    unknown_text: str,
) -> Panel:
    """Return the table of firing alerts, the most urgent first. If no alert fires, the table has one row that says so.

    Args:
        selector: Matchers of the alerts.
        columns: Columns of labels between the title and the start of the alert.
        w: Width in grid columns.
        h: Height in grid rows.
        group_by: Labels of a group of alerts. The table then has only the most urgent alert of each group, with the number of
            the other alerts. Empty for all alerts.
        condition: PromQL that follows the series of the alerts, such as `and on (run) …`. Only without `group_by`.
        unknown_if: PromQL with a value while samples are missing, because most alerts then cannot fire.
        unknown_text: Text of the row that replaces *no alert fires* while samples are missing.
    """
    labels = ", ".join(["alertname", "xid", *(column.source for column in columns)])
    group_labels = ", ".join(group_by)
    urgencies = urgency(selector, labels, condition)
    rows = most_urgent(selector, labels, group_labels) if group_by else urgencies
    no_alert_query = placeholder_row(
        f'ALERTS{{alertstate="firing", {selector}}} {condition}',
        "title",
        "no alert fires",
        unknown_if=unknown_if,
        unknown_text=unknown_text,
    )

    def with_title(expression: str) -> str:
        """Return PromQL that adds the label `title`, the Xid or the name of the alert, and the row for no alert."""
        title = f'label_replace({expression}, "title", "$1", "alertname", "(.+)")'
        return f"{with_xid(title, 'title')} or {no_alert_query}"

    other_alerts = f"(count by ({group_labels}) ({urgencies}) - 1)"
    count_column = Column(
        with_title(f"({rows}) * 0 + on ({group_labels}) group_left () {other_alerts}"),
        "Other alerts",
        decimals=0,
        width=100,
        mappings=ZERO_AS_DASH,
    )
    panel = table(
        "Firing alerts",
        Column(with_title(rows), "Urgency", decimals=0, width=100, mappings=URGENCY_TEXTS),
        Column("alertname", "Alert", width=200 if w == COLUMNS else 195, links=(RUNBOOK_LINK,)),
        Column("title", "What happened", mappings=title_mappings()),
        *columns,
        Column(
            with_title(f"1000 * max by ({labels}) ({alert_starts(selector)}) and on ({labels}) ({rows})"),
            "Since",
            unit=CLOCK_TIME,
            width=CLOCK_TIME_WIDTH,
            mappings=ZERO_AS_DASH,
        ),
        *((count_column,) if group_by else ()),
        sort="Urgency",
        w=w,
        h=h,
    )
    panel.body["options"]["sortBy"].append({"displayName": "Since", "desc": False})
    return panel
