"""Panels of the dashboard *Node* about the exporter itself."""

from __future__ import annotations

from dashboards.palette import BLUE, ORANGE, VERMILION
from dashboards.panels import YES_NO, Panel, time_series, warn_from
from dashboards.queries import Query, event_counts, feed_age_seconds
from dashboards.rank_problems import SILENT_SECONDS
from dashboards.tables import Column, table


def exporter_panels() -> tuple[Panel, ...]:
    """Return the panels about the exporter: collectors, feeds, lost data and refused files, series, CPU usage and NVML errors."""
    return (
        table(
            "Collectors",
            Column("collector", "Collector"),
            Column(
                "min by (collector) (exporter_collector_success{@node})", "Success", width=90, mappings=YES_NO
            ),
            Column(
                "max by (collector) (time() - exporter_collector_last_success_timestamp_seconds{@node})",
                "Since last success",
                unit="s",
                decimals=1,
                width=90,
            ),
            Column(
                "max by (collector) (exporter_collector_last_duration_seconds{@node})",
                "Last duration",
                unit="s",
                width=110,
            ),
            Column(
                "max by (collector) (exporter_collector_errors_total{@node})"
                " or max by (collector) (exporter_collector_success{@node}) * 0",
                "Errors since start",
                width=130,
                thresholds=warn_from(1),
            ),
            Column(
                "max by (collector) (exporter_collector_timeouts_total{@node})"
                " or max by (collector) (exporter_collector_success{@node}) * 0",
                "Timeouts since start",
                width=140,
                thresholds=warn_from(1),
            ),
            sort="Success",
            descending=False,
            w=24,
        ),
        time_series(
            "Age of each rank's feed",
            Query(
                feed_age_seconds("@node", "run, rank"),
                "{{run}} rank {{rank}}",
            ),
            unit="s",
            thresholds=warn_from(SILENT_SECONDS),
            legend="hidden",
            w=12,
        ),
        time_series(
            "Lost data and refused feed files",
            Query(
                f"label_replace({event_counts('training_feed_dropped_total{@node}', 'reason', starts_at_first_event=True)} > 0,"
                ' "cause", "$1", "reason", "(.*)")'
                f" or label_replace({event_counts('exporter_feed_refused_total{@node}', 'reason', starts_at_first_event=True)} > 0,"
                ' "cause", "refused: $1", "reason", "(.*)")'
                f" or {_zero_line('cause')}",
                "{{cause}}",
            ),
            unit="none",
            bars=True,
            w=12,
        ),
        time_series(
            "Exposed and dropped series",
            Query("max(exporter_series{@node})", "series", BLUE),
            Query("max(exporter_series_limit{@node})", "limit", reference=True),
            Query(
                f"{event_counts('exporter_series_dropped_total{@node}')} or 0 * max(exporter_series{{@node}})",
                "dropped",
                VERMILION,
            ),
            unit="none",
            w=8,
        ),
        time_series(
            "CPU of the exporter",
            Query("max(rate(process_cpu_seconds_total{@node}[$__rate_interval]))", "exporter", BLUE),
            Query(
                "max(rate(exporter_nvml_child_cpu_seconds_total{@node}[$__rate_interval]))",
                "NVML child process",
                ORANGE,
            ),
            unit="percentunit",
            w=8,
        ),
        time_series(
            "NVML errors",
            Query(
                f"{event_counts('exporter_nvml_errors_total{@node}', 'call, error', starts_at_first_event=True)} > 0"
                f" or {_zero_line('call')}",
                "{{call}} {{error}}",
            ),
            unit="none",
            bars=True,
            w=8,
        ),
    )


def _zero_line(label: str) -> str:
    """Return PromQL for a constant 0 with *label* set to "none".

    The line is drawn beside any events, so that a panel without events shows 0 instead of "No data".
    """
    return f'label_replace(0 * max(exporter_series{{@node}}), "{label}", "none", "", "")'
