"""Rows of the dashboard *The exporter itself*: feed and ledger, cost, NVML, web server, versions."""

from __future__ import annotations

from dashboards.palette import BLUE, GREY, ORANGE, PLAIN, PURPLE, VERMILION, WARNING, named, shades
from dashboards.panels import YES_NO, About, Panel, above, lines, stat, steps
from dashboards.queries import Query, events, now
from dashboards.tables import Column, table

LOG = "the exporter's log names the reason once for each change"
MOST = 4
"""Of a thousand exporters, so many are drawn where each would be a line."""
DOWN = "No exporter answers: is it running, and in Prometheus' scrape configuration?"


def feed() -> tuple[Panel, ...]:
    """Give the panels about the feed and the ledger."""
    return (
        lines(
            "How old is the news of each training process?",
            Query(
                "time() - max by (instance, run, rank) (training_feed_last_update_timestamp_seconds{@node})",
                "{{run}} rank {{rank}}",
            ),
            unit="s",
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
            Query(events("training_feed_dropped_total{@node}", "reason") + " > 0", "{{reason}}"),
            Query(events("exporter_feed_refused_total{@node}", "reason") + " > 0", "refused: {{reason}}"),
            unit="none",
            bars=True,
            about=About(
                "Samples, snapshots and files that were recorded and lost, by reason.",
                "`overflow`: more was added than fits. `write_failed`: the shared memory is full. `nan`, `infinite`: "
                "what the job gave was no number.",
                "`write_failed`: `docker run --shm-size`. `nan`: look at the loss. `refused`: files of another version.",
            ),
            empty="Nothing was lost in this time, or nothing was recorded.",
            w=8,
        ),
        lines(
            "How late are windows closed?",
            Query(
                "max by (instance, run) (training_feed_drain_delay_seconds{@node})", "{{run}} {{instance}}"
            ),
            unit="s",
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


def cost() -> tuple[Panel, ...]:
    """Give the panels about what the exporter costs."""
    return (
        lines(
            "CPU",
            _busiest("process_cpu_seconds_total", "exporter of {{instance}}"),
            _busiest("exporter_nvml_child_cpu_seconds_total", "NVML of {{instance}}", dashed=True),
            unit="percentunit",
            about=About(
                "Share of a core: the exporter, and, dashed, its process that calls NVIDIA's library, on the four nodes where each "
                "takes most.",
                "above 2 %.",
                "longer intervals for what costs most (beside).",
            ),
            empty=DOWN,
            w=8,
        ),
        lines(
            "Memory",
            _largest("process_resident_memory_bytes", "exporter of {{instance}}"),
            _largest("exporter_nvml_child_resident_memory_bytes", "NVML of {{instance}}", dashed=True),
            unit="bytes",
            about=About(
                "Resident memory of the two, on the four nodes where each has most.",
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
                " / rate(exporter_scrapes_total{@node}[$__rate_interval])"
                f" and topk({MOST}, rate(exporter_scrape_duration_seconds_total{{@node}}[$__range] @ end()))",
                "exporter of {{instance}}",
            ),
            _largest("scrape_duration_seconds", "Prometheus, of {{instance}}", dashed=True),
            unit="s",
            about=About(
                "Time of an answer, in the exporter and, dashed, as Prometheus sees it, of the four slowest each.",
                "seconds: Prometheus' timeout is near, and then all is lost.",
                "the difference is the network or a busy machine.",
            ),
            empty=DOWN,
            w=12,
        ),
        lines(
            "How large is it?",
            _largest("exporter_response_bytes", "{{instance}}"),
            unit="bytes",
            about=About(
                "Size of the four largest answers, compressed where Prometheus asks for it.",
                "near `body_size_limit`.",
                "fewer series.",
            ),
            empty=DOWN,
            w=12,
        ),
    )


def _busiest(counter: str, legend: str, *, dashed: bool = False) -> Query:
    """The rate of a counter where it is highest over the whole time."""
    return Query(
        f"rate({counter}{{@node}}[$__rate_interval])"
        f" and topk({MOST}, rate({counter}{{@node}}[$__range] @ end()))",
        legend,
        dashed=dashed,
    )


def _largest(gauge: str, legend: str, *, dashed: bool = False) -> Query:
    """A gauge where it is highest over the whole time."""
    return Query(
        f"{gauge}{{@node}} and topk({MOST}, max_over_time({gauge}{{@node}}[$__range] @ end()))",
        legend,
        dashed=dashed,
    )


def nvml() -> tuple[Panel, ...]:
    """Give the panels about NVIDIA's library."""
    none = "No GPU is asked here (`exporter_nvml_…` is absent), or the exporter is down."
    return (
        lines(
            "What went wrong with NVIDIA's library?",
            Query(
                events("exporter_nvml_errors_total{@node}", "error", born=True) + " > 0", "{{error}}", ORANGE
            ),
            Query(
                events("exporter_nvml_child_restarts_total{@node}", "reason") + " > 0",
                "restart: {{reason}}",
                VERMILION,
            ),
            Query(
                events("exporter_nvml_resets_total{@node}", "reason") + " > 0",
                "counter: {{reason}}",
                PURPLE,
            ),
            unit="none",
            bars=True,
            about=About(
                "Calls that failed, restarts of the process that makes them, and counters that were corrected.",
                "restarts for *hung* or *crashed*: the driver does not answer.",
                "`dmesg | grep -i nvrm`; drain and reboot the node if it comes again.",
            ),
            empty="Nothing went wrong in this time, or no GPU is asked here.",
            w=12,
        ),
        lines(
            "How much time do its calls take?",
            Query(
                "sum by (instance) (rate(exporter_nvml_call_seconds_total{@node}[$__rate_interval]))",
                "{{instance}}",
            ),
            unit="percentunit",
            about=About(
                "Share of the time that the NVML process spends inside the library.",
                "above 20 %: a slow driver, or no persistence mode.",
                "`nvidia-smi -pm 1`; a longer `gpu.interval`.",
            ),
            empty=none,
            w=12,
        ),
    )


def web() -> tuple[Panel, ...]:
    """Give the panels about the web server and the log."""
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
            Query(events("exporter_http_connections_refused_total{@node}"), "refused", VERMILION),
            Query(events("exporter_http_connections_evicted_total{@node}"), "evicted", ORANGE),
            Query(events("exporter_http_peer_errors_total{@node}", "reason"), "{{reason}}", GREY),
            Query(events("exporter_http_render_timeouts_total{@node}"), "answer too late", PURPLE),
            unit="none",
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
            Query(events('exporter_log_messages_total{@node, level=~"warn|error"}', "level"), "{{level}}"),
            unit="none",
            bars=True,
            overrides=named({"warn": ORANGE, "error": VERMILION}),
            about=About("Lines by level.", "errors.", "read them."),
            empty=DOWN,
            w=8,
        ),
    )


def versions() -> tuple[Panel, ...]:
    """Give the table of versions."""
    return (
        table(
            "Versions",
            Column("instance", "Node"),
            Column("version", "Version", width=110),
            Column("python", "Python", width=110),
            Column("nvidia_ml_py", "NVML binding", width=130),
            Column(
                "max by (instance) (process_start_time_seconds{@node}) * 1000",
                "Started",
                unit="dateTimeAsIso",
                width=180,
            ),
            Column(
                "min by (instance) (exporter_config_last_reload_successful{@node})",
                "Configuration in force is the file's",
                mappings=YES_NO,
            ),
            of="max by (instance, version, python, nvidia_ml_py) (exporter_build_info{@node})",
            about=About(
                "Versions of the exporter and of what it runs on.",
                "different versions on nodes of one run; a configuration that could not be read.",
                f"bring them together; {LOG}.",
            ),
            empty=DOWN,
            h=8,
        ),
    )
