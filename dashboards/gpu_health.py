"""Panels of the dashboard *GPUs*: health of each GPU, new errors, and Xids."""

from __future__ import annotations

import dataclasses

from dashboards.gpu_problems import (
    GPUS_AND_LAST_RANKS,
    GPUS_OF_HEALTH_TABLE,
    RECOVERY_ACTION_TEXTS,
    THROTTLED_RATIO_FAMILY,
    WORST_PROBLEM_TEXTS,
    XID_PROBLEM_SECONDS,
    XID_TEXTS,
)
from dashboards.palette import (
    BAD,
    GREY,
    KHAKI,
    NEUTRAL,
    PURPLE,
    RED,
    SKY_BLUE,
    WARNING,
    colors_by_pattern,
)
from dashboards.panels import (
    RUN_LINK,
    Panel,
    bad_from,
    time_series,
    value_mappings,
    warn_from,
)
from dashboards.queries import Query, event_counts
from dashboards.tables import ZERO_AS_DASH, Column, percent_column, placeholder_row, table
from exporter.status.conditions.gpus import CRITICAL_XIDS


def health_panels() -> tuple[Panel, ...]:
    """Return the panels about the health and the errors of the GPUs. The health table has the GPU with the worst problem first."""
    return (_health_table(), _new_errors(), _xid_table())


def _health_table() -> Panel:
    """Return the table of the GPUs: those of `GPUS_OF_HEALTH_TABLE`, the GPU with the worst problem first."""
    in_table = f"and on (instance, gpu) {GPUS_OF_HEALTH_TABLE}"
    # A value of a GPU without a row would be a row of its own.
    columns = [
        dataclasses.replace(column, source=f"({column.source}) {in_table}") if column.is_query else column
        for column in _health_columns()
    ]
    panel = table(
        "Health of each GPU",
        *columns,
        row_query=f"({GPUS_AND_LAST_RANKS}) {in_table}",
        sort="Worst problem",
        h=8,
    )
    # GPUs with a run precede free GPUs.
    panel.body["options"]["sortBy"] += [
        {"displayName": "Run", "desc": True},
        {"displayName": "Node", "desc": False},
    ]
    return panel


def _health_columns() -> tuple[Column, ...]:
    """Return the columns of the table *Health of each GPU*, for all selected GPUs."""
    return (
        Column("instance", "Node", width=90),
        Column("gpu", "GPU", width=60),
        Column("run", "Run", links=(RUN_LINK,)),
        Column("rank", "Rank", width=70),
        Column(
            GPUS_OF_HEALTH_TABLE,
            "Worst problem",
            width=252,
            mappings=WORST_PROBLEM_TEXTS,
        ),
        Column(
            f"count by (instance, gpu) (time() - gpu_xid_last_timestamp_seconds{{@gpu}} < {XID_PROBLEM_SECONDS})"
            " or on (instance, gpu) max by (instance, gpu) (gpu_up{@gpu} * 0)",
            "Xids, 1 h",
            decimals=0,
            width=80,
            thresholds=warn_from(1),
        ),
        percent_column(
            f"max by (instance, gpu) ({THROTTLED_RATIO_FAMILY}{{@gpu}}) and on (instance, gpu) gpu_up{{@gpu}} == 1",
            "Throttled, 2 min",
            130,
            warn_from(0.01, 0.1),
        ),
        Column(
            "max by (instance, gpu) (gpu_recovery_action{@gpu})",
            "Recovery",
            width=98,
            mappings=RECOVERY_ACTION_TEXTS,
        ),
        Column(
            'sum by (instance, gpu) (gpu_ecc_errors_total{@gpu, kind="uncorrected"})',
            "Uncorr. ECC",
            width=100,
            thresholds=bad_from(1),
        ),
        # Two flags in one number: 2 for a failed remap, 1 for a remap that waits for a reset, 3 for both.
        Column(
            "2 * max by (instance, gpu) (gpu_remapped_rows_failed{@gpu})"
            " + max by (instance, gpu) (gpu_remapped_rows_pending{@gpu})",
            "Row remap",
            width=100,
            mappings=value_mappings(
                {0: ("none", NEUTRAL), 1: ("pending", WARNING), 2: ("failed", BAD), 3: ("failed", BAD)}
            ),
        ),
        Column(
            'sum by (instance, gpu) (gpu_nvlink_links{@gpu, state="inactive"})',
            "NVLinks down",
            width=100,
            thresholds=warn_from(1),
        ),
        Column(
            'max by (instance, gpu) (gpu_pcie_link_width{@gpu, kind="max"} - ignoring (kind)'
            ' gpu_pcie_link_width{@gpu, kind="current"})',
            "Lanes lost",
            width=100,
            thresholds=warn_from(1),
        ),
    )


def _new_errors() -> Panel:
    """Return the plot of new errors by kind.

    The series `no error` is 0 while a GPU has a sample. It distinguishes a time without errors from a time without samples.
    """
    errors = [
        f'label_replace({event_counts(f"{family}{{@gpu}}", label, starts_at_first_event=True)} > 0, "error", "{text}", "{label}", "(.*)")'
        for family, label, text in (
            ("gpu_xid_errors_total", "xid", "Xid $1"),
            ("gpu_ecc_errors_total", "kind", "ECC $1"),
            ("gpu_pcie_errors_total", "kind", "PCIe $1"),
            ("gpu_pcie_replays_total", "gpu", "PCIe replay, GPU $1"),
            ("gpu_nvlink_errors_total", "kind", "NVLink $1"),
        )
    ]
    no_error = 'label_replace(0 * max(gpu_up{@gpu}), "error", "no error", "", "")'
    return time_series(
        "New errors",
        Query(f"{' or '.join(errors)} or {no_error}", "{{error}}"),
        unit="none",
        overrides=colors_by_pattern(
            {
                "Xid": WARNING,
                f"Xid ({'|'.join(str(xid) for xid in sorted(CRITICAL_XIDS))})$": BAD,  # replaces the warning
                "ECC corrected": SKY_BLUE,
                "ECC uncorrected": RED,
                "PCIe": KHAKI,
                "NVLink": PURPLE,
                "no": GREY,
            }
        ),
        bars=True,
        w=10,
        h=6,
    )


def _xid_table() -> Panel:
    """Return the table of the Xids of each GPU since its exporter started.

    Without an Xid, the table has one row: *none*, or *unknown* if the GPUs have no sample.
    """
    no_xid = placeholder_row(
        "gpu_xid_errors_total{@gpu}",
        "xid",
        "none",
        unknown_if="absent(gpu_up{@gpu})",
        unknown_text="unknown: no sample of these GPUs",
    )
    return table(
        "Xid errors",
        Column("instance", "Node", width=110),
        Column("gpu", "GPU", width=60),
        Column("xid", "Xid and meaning", mappings=XID_TEXTS),
        Column(
            f"sum by (instance, gpu, xid) (gpu_xid_errors_total{{@gpu}}) or {no_xid}",
            "Count",
            width=70,
            mappings=ZERO_AS_DASH,
        ),
        Column(
            f"max by (instance, gpu, xid) (gpu_xid_last_timestamp_seconds{{@gpu}}) * 1000 or {no_xid}",
            "Last time",
            unit="dateTimeAsIso",
            width=170,
            mappings=ZERO_AS_DASH,
        ),
        sort="Last time",
        w=14,
        h=6,
    )
