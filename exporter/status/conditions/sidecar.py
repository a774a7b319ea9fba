"""Conditions of the exporter itself."""

from __future__ import annotations

from collections.abc import Iterator

from exporter import diagnoses
from exporter.status.condition import AlertSeverity, Condition, Found
from exporter.status.numbers import share
from exporter.status.view import View

STALE_INTERVALS, STALE_SECONDS = 3.0, 60.0
RATE_SECONDS = 300.0
CORE_RATIO, CORE_RATIO_PER_RANK = 0.02, 0.002


def _not_ready(seen: View) -> Iterator[Found]:
    if seen.about.not_ready is not None:
        yield Found((), {"reason": seen.about.not_ready})


def _silent_jobs(seen: View) -> Iterator[Found]:
    for job in seen.about.silent_jobs:
        if job.silence is not None:
            facts = {"run": job.run, "found": job.silence.found, "remedy": job.silence.remedy}
            yield Found((job.run,), facts)


def _stale_collectors(seen: View) -> Iterator[Found]:
    intervals = {
        labels["collector"]: value
        for labels, value in seen.readings.rows("exporter_collector_interval_seconds")
    }
    succeeded = {
        labels["collector"]: value
        for labels, value in seen.readings.rows("exporter_collector_last_success_timestamp_seconds")
    }
    messages = {status.name: status.message or status.reason for status in seen.collectors}
    for labels, success in seen.readings.rows("exporter_collector_success"):
        name = labels["collector"]
        last = succeeded.get(name)
        limit = max(STALE_INTERVALS * intervals.get(name, 0.0), STALE_SECONDS)
        if success == 0 if last is None else seen.about.now - last > limit:
            reason = messages.get(name) or "no success"
            yield Found((name,), {"collector": name, "reason": reason}, since=last)


def _dropped_series(seen: View) -> Iterator[Found]:
    for (reason,) in seen.past.owners("dropped series"):
        if seen.past.rate("dropped series", reason, seconds=RATE_SECONDS):
            count = seen.readings.total("exporter_series_dropped_total", reason=reason) or 0
            yield Found((reason,), {"count": f"{count:.0f}", "reason": reason})


def _cost(seen: View) -> Iterator[Found]:
    used = seen.past.rate("exporter CPU", seconds=RATE_SECONDS)
    ranks = sum(rank.alive == 1 for rank in seen.ranks)
    if used is not None and used > CORE_RATIO + CORE_RATIO_PER_RANK * ranks:
        yield Found((), {"share": share(used), "ranks": ranks})


def _reload(seen: View) -> Iterator[Found]:
    for family, file in (
        ("exporter_config_last_reload_successful", "--config.file"),
        ("exporter_web_config_last_reload_successful", "--web.config.file"),
    ):
        if seen.readings.value(family) == 0:
            yield Found((file,), {"file": file})


def _suppressed(seen: View) -> Iterator[Found]:
    if count := seen.readings.value("exporter_ledger_suppressed_ranks"):
        yield Found((), {"count": f"{count:.0f}"})


def _foreign_entries(seen: View) -> Iterator[Found]:
    for labels, value in seen.readings.rows("exporter_feed_foreign_entry"):
        if value:
            yield Found((labels["entry"],), {"entry": labels["entry"]})


CONDITIONS = (
    Condition(
        condition=diagnoses.NOT_READY.condition,
        severity=AlertSeverity.CRITICAL,
        sentence=diagnoses.NOT_READY.sentence,
        remedy=diagnoses.NOT_READY.remedy,
        find=_not_ready,
    ),
    Condition(
        condition="a job of `run` without a feed",
        severity=AlertSeverity.CRITICAL,
        sentence="run {run} records nothing: {found}",
        remedy="{remedy}",
        find=_silent_jobs,
    ),
    Condition(
        alert="CollectorStale",
        condition="no success for 3 intervals and 60 s, or never",
        sentence=diagnoses.COLLECTOR_FAILS.sentence,
        remedy="fix the reason, or switch the collector off in the configuration; its series are absent",
        find=_stale_collectors,
    ),
    Condition(
        alert="ExporterSeriesDropped",
        condition="any series dropped, for 15m",
        sentence=diagnoses.SERIES_DROPPED.sentence + " ({reason})",
        remedy=diagnoses.SERIES_DROPPED.remedy,
        find=_dropped_series,
    ),
    Condition(
        alert="ExporterCostHigh",
        condition="more than 0.02 of a core, and 0.002 more for each living rank",
        sentence="the exporter uses {share} of a core for {ranks} ranks",
        remedy="lengthen the interval of the most expensive collector, or reduce the number of scrapers",
        find=_cost,
    ),
    Condition(
        alert="ExporterReloadFailed",
        condition="a configuration that could not be read",
        sentence="{file} could not be reloaded; the previous configuration stays in force",
        remedy=diagnoses.NOT_RELOADED.remedy,
        find=_reload,
    ),
    Condition(
        alert="ExporterTotalsSuppressed",
        condition="totals that cannot be saved",
        sentence=diagnoses.TOTALS_SUPPRESSED.sentence,
        remedy=diagnoses.TOTALS_SUPPRESSED.remedy,
        find=_suppressed,
    ),
    Condition(
        condition=diagnoses.FOREIGN_ENTRY_SHOWN.condition,
        sentence=diagnoses.FOREIGN_ENTRY_SHOWN.sentence,
        remedy=diagnoses.FOREIGN_ENTRY_SHOWN.remedy,
        find=_foreign_entries,
    ),
)
