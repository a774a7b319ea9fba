"""Conditions of the exporter itself."""

from __future__ import annotations

from collections.abc import Iterator

from exporter import diagnoses
from exporter.status.condition import AlertSeverity, Condition, Match
from exporter.status.formatting import share
from exporter.status.view import View

STALE_INTERVALS = 3.0
"""Number of a collector's intervals since its last success after which the collector is stale."""
STALE_SECONDS = 60.0
"""Minimum time since the last success after which a collector is stale, however short its interval is."""
RATE_SECONDS = 300.0
"""Time range of rates."""
CORE_RATIO = 0.02
"""Share of a CPU core that the exporter may use without ranks."""
CORE_RATIO_PER_RANK = 0.002
"""Addition to `CORE_RATIO` for each living rank."""
MAX_NAMED_FAMILIES = 3
"""Maximum number of families in the sentence about omitted series."""
CAP_REMEDY = (
    "find the label with many values, often on a Stat of the job; otherwise raise exposition.max_series"
)
INVALID_SERIES_REMEDY = "correct the Stat or the collector; the exporter's log names the family"


def _not_ready(view: View) -> Iterator[Match]:
    if view.exporter.not_ready is not None:
        yield Match((), {"reason": view.exporter.not_ready})


def _silent_jobs(view: View) -> Iterator[Match]:
    for job in view.exporter.silent_jobs:
        if job.silence is not None:
            facts = {"run": job.run, "found": job.silence.found, "remedy": job.silence.remedy}
            yield Match((job.run,), facts)


def _stale_collectors(view: View) -> Iterator[Match]:
    """Yield a match for each collector whose last success is too old, or which has failed without any success."""
    intervals = {
        labels["collector"]: value
        for labels, value in view.samples.select("exporter_collector_interval_seconds")
    }
    success_times = {
        labels["collector"]: value
        for labels, value in view.samples.select("exporter_collector_last_success_timestamp_seconds")
    }
    messages = {status.name: status.message or status.reason for status in view.collectors}
    now = view.exporter.now
    for labels, success in view.samples.select("exporter_collector_success"):
        name = labels["collector"]
        last_success_at = success_times.get(name)
        limit_seconds = max(STALE_INTERVALS * intervals.get(name, 0.0), STALE_SECONDS)
        is_stale = success == 0 if last_success_at is None else now - last_success_at > limit_seconds
        if is_stale:
            reason = messages.get(name) or "no success"
            yield Match((name,), {"collector": name, "reason": reason}, start=last_success_at)


def _dropped_series(view: View) -> Iterator[Match]:
    for (reason,) in view.history.list_owners("dropped series"):
        if not view.history.compute_mean_rate("dropped series", reason, seconds=RATE_SECONDS):
            continue
        dropped_counts = view.samples.select("exporter_series_dropped_total", reason=reason)
        families = sorted(labels.get("family", "") for labels, count in dropped_counts if count)
        more = f" and {len(families) - MAX_NAMED_FAMILIES} more" if len(families) > MAX_NAMED_FAMILIES else ""
        facts = {
            "families": ", ".join(families[:MAX_NAMED_FAMILIES]) + more,
            "cause": "it has reached the maximum number of series" if reason == "cap" else "they are invalid",
            "reason": reason,
            "remedy": CAP_REMEDY if reason == "cap" else INVALID_SERIES_REMEDY,
        }
        yield Match((reason,), facts)


def _high_cost(view: View) -> Iterator[Match]:
    cpu_ratio = view.history.compute_mean_rate("exporter CPU", seconds=RATE_SECONDS)
    rank_count = sum(rank.alive == 1 for rank in view.ranks)
    if cpu_ratio is not None and cpu_ratio > CORE_RATIO + CORE_RATIO_PER_RANK * rank_count:
        ranks = f"for {rank_count} rank{'s' if rank_count > 1 else ''}" if rank_count else "without ranks"
        yield Match((), {"share": share(cpu_ratio), "ranks": ranks})


def _failed_reloads(view: View) -> Iterator[Match]:
    for family, file in (
        ("exporter_config_last_reload_successful", "--config.file"),
        ("exporter_web_config_last_reload_successful", "--web.config.file"),
    ):
        if view.samples.value(family) == 0:
            yield Match((file,), {"file": file})


def _suppressed_totals(view: View) -> Iterator[Match]:
    if count := view.samples.value("exporter_ledger_suppressed_ranks"):
        yield Match((), {"count": f"{count:.0f}"})


def _foreign_entries(view: View) -> Iterator[Match]:
    for labels, value in view.samples.select("exporter_feed_foreign_entry"):
        if value:
            yield Match((labels["entry"],), {"entry": labels["entry"]})


CONDITIONS = (
    Condition(
        criterion=diagnoses.NOT_READY.criterion,
        severity=AlertSeverity.CRITICAL,
        sentence=diagnoses.NOT_READY.sentence,
        remedy=diagnoses.NOT_READY.remedy,
        find_matches=_not_ready,
    ),
    Condition(
        criterion="a Python job under `run` has recorded nothing 20 s after its start",
        severity=AlertSeverity.CRITICAL,
        sentence="run {run} records nothing: {found}",
        remedy="{remedy}",
        find_matches=_silent_jobs,
    ),
    Condition(
        alert_name="CollectorStale",
        criterion="no success for 3 intervals and 60 s, or never",
        sentence=diagnoses.COLLECTOR_FAILS.sentence,
        remedy="fix the reason, or switch the collector off in the configuration; its series are absent",
        find_matches=_stale_collectors,
    ),
    Condition(
        alert_name="ExporterSeriesDropped",
        criterion="any series dropped, for 15m",
        sentence="the metrics page omits series of {families}, because {cause} ({reason})",
        remedy="{remedy}",
        find_matches=_dropped_series,
    ),
    Condition(
        alert_name="ExporterCostHigh",
        criterion="more than 0.02 of a core, and 0.002 more for each running rank",
        sentence="the exporter uses {share} of a core {ranks}",
        remedy="lengthen the interval of the most expensive collector, or reduce the number of scrapers",
        find_matches=_high_cost,
    ),
    Condition(
        alert_name="ExporterReloadFailed",
        criterion="a configuration that could not be read",
        sentence="{file} could not be reloaded; the previous configuration stays in force",
        remedy=diagnoses.NOT_RELOADED.remedy,
        find_matches=_failed_reloads,
    ),
    Condition(
        alert_name="ExporterTotalsSuppressed",
        criterion="totals that cannot be saved",
        sentence=diagnoses.TOTALS_SUPPRESSED.sentence,
        remedy=diagnoses.TOTALS_SUPPRESSED.remedy,
        find_matches=_suppressed_totals,
    ),
    Condition(
        criterion=diagnoses.FOREIGN_ENTRY_SHOWN.criterion,
        sentence=diagnoses.FOREIGN_ENTRY_SHOWN.sentence,
        remedy=diagnoses.FOREIGN_ENTRY_SHOWN.remedy,
        find_matches=_foreign_entries,
    ),
)
