"""Row of the dashboard *Node*: the exporter itself."""

from __future__ import annotations

from dashboards.palette import BLUE, GREY, ORANGE, PLAIN, PURPLE, VERMILION, WARNING, named
from dashboards.panels import YES_NO, Panel, above, lines, steps
from dashboards.queries import Query, events
from dashboards.tables import Column, table


def itself() -> tuple[Panel, ...]:
    """Give the panels about the exporter: whether it tells the truth, is complete, and what it costs."""
    return (
        table(
            "Collectors",
            Column("collector", "Collector"),
            Column(
                "min by (collector) (exporter_collector_success{@node})", "Success", width=90, mappings=YES_NO
            ),
            Column(
                "max by (collector) (time() - exporter_collector_last_success_timestamp_seconds{@node})",
                "Age",
                unit="s",
                decimals=1,
                width=90,
            ),
            Column(
                "max by (collector) (exporter_collector_last_duration_seconds{@node})",
                "Last pass",
                unit="s",
                width=110,
            ),
            Column(
                "sum by (collector) (exporter_collector_errors_total{@node})",
                "Errors",
                width=90,
                thresholds=above(1),
            ),
            Column(
                "sum by (collector) (exporter_collector_timeouts_total{@node})",
                "Timeouts",
                width=100,
                thresholds=above(1),
            ),
            sort="Success",
            descending=False,
            w=12,
        ),
        lines(
            "Age of the feed",
            Query(
                "time() - max by (run, rank) (training_feed_last_update_timestamp_seconds{@node})",
                "{{run}} rank {{rank}}",
            ),
            unit="s",
            thresholds=steps((None, PLAIN), (10, WARNING)),
            legend="hidden",
            w=6,
            h=9,
        ),
        lines(
            "Samples and files lost",
            Query(events("training_feed_dropped_total{@node}", "reason") + " > 0", "{{reason}}"),
            Query(events("exporter_feed_refused_total{@node}", "reason") + " > 0", "refused: {{reason}}"),
            unit="none",
            bars=True,
            w=6,
            h=9,
        ),
        lines(
            "Series, and those dropped",
            Query("max(exporter_series{@node})", "series", BLUE),
            Query("max(exporter_series_limit{@node})", "limit", bound=True),
            Query(events("exporter_series_dropped_total{@node}", "reason"), "dropped: {{reason}}"),
            unit="none",
            overrides=named(
                {
                    f"dropped: {reason}": color
                    for reason, color in {
                        "cap": ORANGE,
                        "duplicate": PURPLE,
                        "labels": GREY,
                        "name": GREY,
                        "value": VERMILION,
                    }.items()
                }
            ),
            w=8,
        ),
        lines(
            "CPU of the exporter",
            Query("max(rate(process_cpu_seconds_total{@node}[$__rate_interval]))", "exporter", BLUE),
            Query(
                "max(rate(exporter_nvml_child_cpu_seconds_total{@node}[$__rate_interval]))", "NVML", ORANGE
            ),
            unit="percentunit",
            w=8,
        ),
        lines(
            "Errors of NVIDIA's library",
            Query(
                events("exporter_nvml_errors_total{@node}", "call, error", born=True), "{{call}}: {{error}}"
            ),
            unit="none",
            bars=True,
            w=8,
        ),
    )
