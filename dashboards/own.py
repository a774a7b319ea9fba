"""The dashboard *The exporter itself*: does it tell the truth, is it complete, and what does it cost."""

from __future__ import annotations

from dashboards.board import ALERTS_OF_NODE, JOB, NODE, Board, Row
from dashboards.own_inside import DOWN, LOG, cost, feed, nvml, versions, web
from dashboards.palette import BAD, BLUE, GOOD, GREY, ORANGE, PURPLE, VERMILION, named
from dashboards.panels import YES_NO, About, Panel, above, lines, stat, states, to, words
from dashboards.queries import Query, events, now
from dashboards.tables import Column, table

UID = "training-exporter"


def board() -> Board:
    """The dashboard."""
    return Board(
        uid=UID,
        title="Training / The exporter itself",
        what="Collectors, ages, cost, dropped series, feed and state of the exporters.",
        variables=(JOB, NODE),
        rows=(
            Row("At a glance", _glance()),
            Row("Do all collectors succeed?", _collectors()),
            Row("Is anything left out?", _complete()),
            Row("Feed of the training processes, and the ledger", feed()),
            Row("What does it cost?", cost()),
            Row("NVIDIA's library", nvml()),
            Row("Web server", web(), collapsed=True),
            Row("Versions", versions(), collapsed=True),
        ),
        marks=(ALERTS_OF_NODE,),
    )


def _glance() -> tuple[Panel, ...]:
    return (
        stat(
            "Exporters",
            now("sum(up{@node})", "answer"),
            now("count(up{@node})", "of"),
            now("sum(up{@node} == bool 0) > 0", "down", BAD),
            unit="none",
            text="value_and_name",
            about=About(
                "Exporters that Prometheus reaches, of those that it knows.",
                "fewer answer than there are.",
                "*Since when is which exporter silent?* names them.",
                "Prometheus knows none of these nodes.",
            ),
            empty="none known",
        ),
        stat(
            "Failing collectors",
            now("sum(exporter_collector_success{@node} == bool 0)"),
            unit="none",
            thresholds=above(1),
            about=About(
                "Collectors whose last pass did not read all of its sources.",
                "any, for longer than a minute: the families that it fills are missing.",
                f"the table below says which one; {LOG}.",
            ),
        ),
        stat(
            "Oldest data",
            now("max(time() - exporter_collector_last_success_timestamp_seconds{@node})"),
            unit="s",
            decimals=0,
            thresholds=above(120, 300),
            about=About(
                "Age of the last success of the collector that has waited longest; some look once a minute.",
                "above two minutes.",
                "the collector hangs or fails: see below.",
            ),
        ),
        stat(
            "Series dropped",
            now("sum(increase(exporter_series_dropped_total{@node}[$__range]))"),
            unit="none",
            decimals=0,
            thresholds=above(1),
            about=About(
                "Series that were offered and left out, in the time that is shown.",
                "any: something is missing from all panels.",
                "*Why were series dropped?* has the reason; a runaway label of a Stat is the usual one.",
            ),
        ),
        stat(
            "CPU, the most",
            now("max(rate(process_cpu_seconds_total{@node}[$__rate_interval]))"),
            unit="percentunit",
            decimals=2,
            thresholds=above(0.02, 0.05),
            about=About(
                "Share of one core that the most expensive of the exporters takes.",
                "above 2 %.",
                "*Which collector costs?* names it; give it a longer interval.",
            ),
        ),
        stat(
            "Memory, the most",
            now("max(process_resident_memory_bytes{@node})"),
            unit="bytes",
            thresholds=above(100e6, 200e6),
            about=About(
                "Resident memory of the largest of the exporters.",
                "above 100 MB, or growing.",
                "count the series below; report it if they do not explain it.",
            ),
        ),
    )


def _collectors() -> tuple[Panel, ...]:
    return (
        states(
            "Since when is which exporter silent?",
            Query("up{@node}", "{{instance}}"),
            mappings=words({1: ("answers", GOOD), 0: ("down", BAD)}),
            about=About(
                "Prometheus' own verdict on each scrape. While it is *down* all series of that node are gone, not flat.",
                "*down*.",
                "on the node: is the process there, does `curl localhost:20909/-/healthy` answer?",
                "Prometheus did not know the node then.",
            ),
            empty="Prometheus knows none of these nodes.",
            w=12,
            h=7,
        ),
        states(
            "Which collector failed, and when?",
            Query(
                "min by (instance, collector) (exporter_collector_success{@node}) == 0",
                "{{instance}} {{collector}}",
            ),
            mappings=words({0: ("failed", BAD), 1: ("succeeded", GOOD)}),
            about=About(
                "A bar wherever a collector did not read all of its sources.",
                "any bar that lasts.",
                f"*Errors by reason* says why; {LOG}.",
                "no bar is good: all collectors succeeded, or the exporter was down (see beside).",
            ),
            empty="No collector failed in this time.",
            w=12,
            h=7,
        ),
        table(
            "Collectors",
            Column(
                "instance", "Node", links=(to("training-node", "Node and container", node="${__value.raw}"),)
            ),
            Column("collector", "Collector"),
            Column(
                "min by (instance, collector) (exporter_collector_success{@node})",
                "Success",
                width=90,
                mappings=YES_NO,
            ),
            Column(
                "max by (instance, collector) (time() - exporter_collector_last_success_timestamp_seconds{@node})",
                "Age",
                unit="s",
                decimals=1,
                width=90,
            ),
            Column(
                "max by (instance, collector) (exporter_collector_interval_seconds{@node})",
                "Interval",
                unit="s",
                width=90,
            ),
            Column(
                "max by (instance, collector) (exporter_collector_last_duration_seconds{@node})",
                "Last pass",
                unit="s",
                width=110,
            ),
            Column(
                "sum by (instance, collector) (rate(exporter_collector_duration_seconds_total{@node}[$__rate_interval]))",
                "Share of a core",
                unit="percentunit",
                decimals=3,
                width=130,
            ),
            Column(
                "sum by (instance, collector) (exporter_collector_errors_total{@node})",
                "Errors",
                width=90,
                thresholds=above(1),
            ),
            Column(
                "sum by (instance, collector) (exporter_collector_timeouts_total{@node})",
                "Timeouts",
                width=100,
                thresholds=above(1),
            ),
            Column(
                "max by (instance, collector) (exporter_collector_unsupported_sources{@node})",
                "Not on this machine",
                width=160,
            ),
            sort="Success",
            descending=False,
            about=About(
                "Each collector: its verdict, the age of its data, what it costs. *Not on this machine* counts sources "
                "that the machine does not have: no fault.",
                "success *no*; an age of several intervals; timeouts that grow (a hanging mount, a hanging driver).",
                f"{LOG}; `python -m exporter check` on the node says what to do.",
            ),
            empty=DOWN,
            h=11,
        ),
    )


def _complete() -> tuple[Panel, ...]:
    return (
        lines(
            "How many series are there?",
            Query("exporter_series{@node}", "{{instance}}"),
            Query("max(exporter_series_limit{@node})", "limit", bound=True),
            unit="none",
            about=About(
                "Series on the page, and the most that it shows (dashed).",
                "a climb that does not end: a label with ever new values.",
                "look for the family with the most series; the Stat's labels must be constant.",
            ),
            empty=DOWN,
            w=8,
        ),
        lines(
            "Why were series dropped?",
            Query(events("exporter_series_dropped_total{@node}", "reason"), "{{reason}}"),
            unit="none",
            bars=True,
            overrides=named(
                {"cap": ORANGE, "duplicate": PURPLE, "labels": BLUE, "name": GREY, "value": VERMILION}
            ),
            about=About(
                "Series left out, by reason. One that stays out counts each time it is collected.",
                "any.",
                "`cap`: too many series. `duplicate`: two sources say the same. Others: a Stat with a bad name, label "
                "or value; the log names it.",
            ),
            empty=DOWN,
            w=8,
        ),
        table(
            "Which families lost series?",
            Column("instance", "Node"),
            Column("family", "Family"),
            Column(
                "topk(20, sum by (instance, family) (increase(exporter_series_dropped_total{@node}[$__range])) > 0)",
                "Dropped",
                decimals=0,
                width=100,
            ),
            sort="Dropped",
            about=About(
                "Families that were cut, in the time that is shown.",
                "any.",
                "fewer label values, or a larger `exposition.max_series`.",
                "nothing was dropped.",
            ),
            empty="Nothing was dropped in this time.",
            w=8,
            h=8,
        ),
    )
