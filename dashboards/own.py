"""The dashboard *The exporter itself*: does it tell the truth, is it complete, and what does it cost."""

from __future__ import annotations

from dashboards.board import ALERTS_OF_NODE, JOB, NODE, Board, Row
from dashboards.palette import (
    BAD,
    BLUE,
    GOOD,
    GREY,
    ORANGE,
    PLAIN,
    PURPLE,
    VERMILION,
    WARNING,
    bound,
    by_last_character,
    by_query,
    named,
    shades,
)
from dashboards.panels import (
    YES_NO,
    About,
    Column,
    Panel,
    above,
    lines,
    stat,
    states,
    steps,
    table,
    to,
    words,
)
from dashboards.queries import Query, events, now, rows

UID = "training-exporter"
LOG = "the exporter's log names the reason once for each change"
DOWN = "No exporter answers: is it running, and in Prometheus' scrape configuration?"


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
            Row("Feed of the training processes, and the ledger", _feed()),
            Row("What does it cost?", _cost()),
            Row("NVIDIA's library", _nvml()),
            Row("Web server", _web(), collapsed=True),
            Row("Versions", _versions(), collapsed=True),
        ),
        marks=(ALERTS_OF_NODE,),
    )


def _glance() -> tuple[Panel, ...]:
    return (
        stat(
            "Exporters",
            now("sum(up{@node})", "answer"),
            now("count(up{@node})", "of"),
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
            now("sum(increase(exporter_series_dropped_by_reason_total{@node}[$__range]))"),
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
            rows("min by (instance, collector) (exporter_collector_success{@node})"),
            rows(
                "max by (instance, collector) (time() - exporter_collector_last_success_timestamp_seconds{@node})"
            ),
            rows("max by (instance, collector) (exporter_collector_interval_seconds{@node})"),
            rows("max by (instance, collector) (exporter_collector_last_duration_seconds{@node})"),
            rows(
                "sum by (instance, collector) (rate(exporter_collector_duration_seconds_total{@node}[$__rate_interval]))"
            ),
            rows("sum by (instance, collector) (exporter_collector_errors_total{@node})"),
            rows("sum by (instance, collector) (exporter_collector_timeouts_total{@node})"),
            rows("max by (instance, collector) (exporter_collector_unsupported_sources{@node})"),
            columns=(
                Column(
                    "instance",
                    "Node",
                    links=(to("training-node", "Node and container", node="${__value.raw}"),),
                ),
                Column("collector", "Collector"),
                Column("A", "Success", width=90, mappings=YES_NO),
                Column("B", "Age", unit="s", decimals=1, width=90),
                Column("C", "Interval", unit="s", width=90),
                Column("D", "Last pass", unit="s", width=110),
                Column("E", "Share of a core", unit="percentunit", decimals=3, width=130),
                Column("F", "Errors", unit="none", width=90, thresholds=above(1)),
                Column("G", "Timeouts", unit="none", width=100, thresholds=above(1)),
                Column("H", "Not on this machine", unit="none", width=160),
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
            Query("max(exporter_series_limit{@node})", "limit"),
            unit="none",
            overrides=[*by_last_character(), bound("limit")],
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
            Query(
                events("exporter_series_dropped_by_reason_total{@node}", "reason"),
                "{{reason}}",
            ),
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
            rows(
                "topk(20, sum by (instance, family) (increase(exporter_series_dropped_total{@node}[$__range])) > 0)"
            ),
            columns=(
                Column("instance", "Node"),
                Column("family", "Family"),
                Column("A", "Dropped", unit="none", decimals=0, width=100),
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


def _feed() -> tuple[Panel, ...]:
    return (
        lines(
            "How old is the news of each training process?",
            Query(
                "time() - max by (instance, run, rank) (training_feed_last_update_timestamp_seconds{@node})",
                "{{run}} rank {{rank}}",
            ),
            unit="s",
            overrides=by_last_character(),
            thresholds=steps((None, PLAIN), (10, WARNING)),
            legend="hidden",
            about=About(
                "Each process writes about once a second. Beyond the dashed line its windowed values are gone.",
                "a line that climbs: the process is stopped, hangs with no thread running, or is dead.",
                "`py-spy dump` on the process; *Training run* says whether the others wait for it.",
                "no process of a job writes into the feed directory.",
            ),
            empty="No training process has written: is EXPORTER_FEED_DIR the same for both?",
            w=8,
        ),
        lines(
            "Was anything of the job lost?",
            Query(
                events("training_feed_dropped_total{@node}", "reason"),
                "{{reason}}",
            ),
            Query(
                events("exporter_feed_refused_total{@node}", "reason"),
                "refused: {{reason}}",
            ),
            unit="none",
            color=shades(VERMILION),
            legend="hidden",
            about=About(
                "Samples, snapshots and files that were recorded and lost, by reason.",
                "`overflow`: more was added than fits. `write_failed`: the shared memory is full. `nan`, `infinite`: "
                "what the job gave was no number.",
                "`write_failed`: `docker run --shm-size`. `nan`: look at the loss. `refused`: files of another version.",
            ),
            empty="Nothing has been recorded by a job.",
            w=8,
        ),
        lines(
            "How late are windows closed?",
            Query(
                "max by (instance, run) (training_feed_drain_delay_seconds{@node})", "{{run}} {{instance}}"
            ),
            unit="s",
            overrides=by_last_character(),
            about=About(
                "Longest time by which a window was closed after its end: how long the recording thread was kept from "
                "running.",
                "above a second: C code in the job holds the GIL, or the machine is full.",
                "it harms no count; windows may hold a neighbour's samples.",
            ),
            empty="Nothing has been recorded by a job.",
            w=8,
        ),
        stat(
            "Ranks without totals",
            now("sum(exporter_ledger_withheld_ranks{@node})"),
            unit="none",
            w=6,
            thresholds=above(1, 1),
            about=About(
                "Ranks whose totals are withheld, since their state cannot be written or another exporter keeps it.",
                "any.",
                "is `--state.dir` full, read-only, or shared by two exporters?",
            ),
        ),
        stat(
            "Failures to keep state",
            now(
                "sum(increase(exporter_ledger_state_errors_total{@node}[$__range])"
                " + increase(exporter_ledger_state_damaged_total{@node}[$__range]))"
            ),
            unit="none",
            decimals=0,
            w=6,
            thresholds=above(1, 1),
            about=About(
                "Reads and writes of state files that failed, and files that were damaged.",
                "any: totals may begin anew.",
                "the disk of `--state.dir`.",
            ),
        ),
        stat(
            "Age of the oldest state",
            now("max(time() - exporter_ledger_state_last_write_timestamp_seconds{@node})"),
            unit="s",
            decimals=0,
            w=6,
            thresholds=above(120),
            about=About(
                "Time since each exporter last wrote its ledger; the largest.",
                "minutes, while a job runs.",
                "see the failures beside.",
                "no job has run yet.",
            ),
            empty="no job yet",
        ),
        stat(
            "Only looking on",
            now("sum(exporter_feed_owner{@node} == bool 0)"),
            unit="none",
            w=6,
            thresholds=above(1),
            about=About(
                "Exporters whose feed directory is owned by another one: they show windows, but keep no totals.",
                "more than you meant to start.",
                "end the second one on that node.",
            ),
        ),
    )


def _cost() -> tuple[Panel, ...]:
    return (
        lines(
            "CPU",
            Query("rate(process_cpu_seconds_total{@node}[$__rate_interval])", "{{instance}} exporter"),
            Query(
                "rate(exporter_nvml_child_cpu_seconds_total{@node}[$__rate_interval])",
                "{{instance}} NVML process",
            ),
            unit="percentunit",
            overrides=by_query((BLUE, ORANGE)),
            about=About(
                "Share of a core: the exporter, and its process that calls NVIDIA's library.",
                "above 2 %.",
                "longer intervals for what costs most (beside).",
            ),
            empty=DOWN,
            w=8,
        ),
        lines(
            "Memory",
            Query("process_resident_memory_bytes{@node}", "{{instance}} exporter"),
            Query("exporter_nvml_child_resident_memory_bytes{@node}", "{{instance}} NVML process"),
            unit="bytes",
            overrides=by_query((BLUE, ORANGE)),
            about=About(
                "Resident memory of the two.",
                "a climb that does not end.",
                "count the series; else report it.",
            ),
            empty=DOWN,
            w=8,
        ),
        lines(
            "Which collector costs?",
            Query(
                "sum by (collector) (rate(exporter_collector_duration_seconds_total{@node}[$__rate_interval]))"
                " and topk(6, sum by (collector)"
                " (rate(exporter_collector_duration_seconds_total{@node}[$__range] @ end())))",
                "{{collector}}",
            ),
            unit="percentunit",
            color=shades(BLUE),
            about=About(
                "Share of the time in which a collector is at work, over all exporters: mostly waiting for the kernel, "
                "not computing.",
                "one that is at work all of the time.",
                "a hanging mount or device: its timeouts say so. Else a longer interval.",
            ),
            empty=DOWN,
            w=8,
        ),
        lines(
            "How long does a scrape take?",
            Query(
                "rate(exporter_scrape_duration_seconds_total{@node}[$__rate_interval])"
                " / rate(exporter_scrapes_total{@node}[$__rate_interval])",
                "{{instance}} in the exporter",
            ),
            Query("scrape_duration_seconds{@node}", "{{instance}} as Prometheus sees it"),
            unit="s",
            overrides=by_query((BLUE, ORANGE)),
            about=About(
                "Time of an answer, here and with the network.",
                "seconds: Prometheus' timeout is near, and then all is lost.",
                "the difference is the network or a busy machine.",
            ),
            empty=DOWN,
            w=12,
        ),
        lines(
            "How large is it?",
            Query("exporter_response_bytes{@node}", "{{instance}}"),
            unit="bytes",
            overrides=by_last_character(),
            about=About(
                "Size of an answer, compressed where Prometheus asks for it.",
                "near `body_size_limit`.",
                "fewer series.",
            ),
            empty=DOWN,
            w=12,
        ),
    )


def _nvml() -> tuple[Panel, ...]:
    none = "No GPU is asked here (`exporter_nvml_…` is absent), or the exporter is down."
    return (
        lines(
            "What went wrong with NVIDIA's library?",
            Query(events("exporter_nvml_errors_total{@node}", "error", born=True), "{{error}}"),
            Query(
                events("exporter_nvml_child_restarts_total{@node}", "reason"),
                "restart: {{reason}}",
            ),
            Query(
                events("exporter_nvml_resets_total{@node}", "reason"),
                "counter: {{reason}}",
            ),
            unit="none",
            overrides=by_query((ORANGE, VERMILION, PURPLE)),
            legend="hidden",
            about=About(
                "Calls that failed, restarts of the process that makes them, and counters that were corrected.",
                "restarts for *hung* or *crashed*: the driver does not answer.",
                "`dmesg | grep -i nvrm`; drain and reboot the node if it comes again.",
            ),
            empty=none,
            w=12,
        ),
        lines(
            "How much time do its calls take?",
            Query(
                "sum by (instance) (rate(exporter_nvml_call_seconds_total{@node}[$__rate_interval]))",
                "{{instance}}",
            ),
            unit="percentunit",
            overrides=by_last_character(),
            about=About(
                "Share of the time that the NVML process spends inside the library.",
                "above 20 %: a slow driver, or no persistence mode.",
                "`nvidia-smi -pm 1`; a longer `gpu.interval`.",
            ),
            empty=none,
            w=12,
        ),
    )


def _web() -> tuple[Panel, ...]:
    return (
        lines(
            "Requests",
            Query(
                "sum by (route, code) (rate(exporter_http_requests_total{@node}[$__rate_interval]))",
                "{{route}} {{code}}",
            ),
            unit="reqps",
            color=shades(BLUE),
            about=About(
                "Requests by path and status.",
                "401 (wrong password), 503 (not ready, or the state is not loaded).",
                "503 goes away by itself after a start; else see the log.",
            ),
            empty=DOWN,
            w=8,
        ),
        lines(
            "Connections turned away or broken",
            Query(events("exporter_http_connections_refused_total{@node}"), "refused"),
            Query(events("exporter_http_connections_evicted_total{@node}"), "evicted"),
            Query(
                events("exporter_http_peer_errors_total{@node}", "reason"),
                "{{reason}}",
            ),
            Query(
                events("exporter_http_render_timeouts_total{@node}"),
                "answer too late",
            ),
            unit="none",
            overrides=by_query((VERMILION, ORANGE, GREY, PURPLE)),
            about=About(
                "Connections that were closed to protect the others, or ended by the peer's fault.",
                "many: somebody scans or attacks the port.",
                "close the port to all but Prometheus.",
            ),
            empty=DOWN,
            w=8,
        ),
        lines(
            "Warnings and errors in the log",
            Query(
                events('exporter_log_messages_total{@node, level=~"warn|error"}', "level"),
                "{{level}}",
            ),
            unit="none",
            bars=True,
            overrides=named({"warn": ORANGE, "error": VERMILION}),
            about=About("Lines by level.", "errors.", "read them."),
            empty=DOWN,
            w=8,
        ),
    )


def _versions() -> tuple[Panel, ...]:
    return (
        table(
            "Versions",
            rows("max by (instance, version, python, nvidia_ml_py) (exporter_build_info{@node})"),
            rows("max by (instance) (process_start_time_seconds{@node}) * 1000"),
            rows("min by (instance) (exporter_config_last_reload_successful{@node})"),
            columns=(
                Column("instance", "Node"),
                Column("version", "Version", width=110),
                Column("python", "Python", width=110),
                Column("nvidia_ml_py", "NVML binding", width=130),
                Column("B", "Started", unit="dateTimeAsIso", width=180),
                Column("C", "Configuration in force is the file's", mappings=YES_NO),
            ),
            about=About(
                "Versions of the exporter and of what it runs on.",
                "different versions on nodes of one run; a configuration that could not be read.",
                f"bring them together; {LOG}.",
            ),
            empty=DOWN,
            h=8,
        ),
    )
