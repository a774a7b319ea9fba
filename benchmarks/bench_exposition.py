"""Measures what a scrape costs: the page beside prometheus_client's `generate_latest`, same families.

Contenders take turns in one process; all are given their families ready made. `repr of every value` is the floor under
any writer of decimal numbers. Medians in milliseconds. Prints one JSON document.

    python benchmarks/bench_exposition.py [--quick]
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from report import report

from exporter.exposition.negotiation import Format, compress
from exporter.exposition.page import Page
from exporter.families import Distribution, FamilySpec

QUICK = "--quick" in sys.argv
SIZES = (500, 1_500, 10_000) if QUICK else (500, 1_500, 10_000, 50_000)
BUCKETS = tuple(0.001 * 2**power for power in range(12))
LABELS = ("run", "rank", "kind")
PER_FAMILY = 50


def families(series: int, number: Callable[[], float]) -> list[Metric]:
    """Gauges and counters of 50 series each, and a tenth of the series as histograms of 15."""
    made = []
    for place in range(series * 9 // 10 // PER_FAMILY):
        counter = place % 4 == 0
        name = f"training_part_{place}_seconds{'_total' if counter else ''}"
        spec = FamilySpec(name, "counter" if counter else "gauge", "Time of a part.", LABELS, "seconds")
        made.append(spec.family({("run-1", str(rank), "forward"): number() for rank in range(PER_FAMILY)}))
    spec = FamilySpec("training_batch_latency_seconds", "histogram", "Time of a batch.", LABELS, "seconds")
    histograms: dict[tuple[str, ...], float | Distribution] = {}
    for rank in range(series // 10 // (len(BUCKETS) + 3)):
        step = int(number()) + 1
        buckets = tuple((bound, step * place) for place, bound in enumerate(BUCKETS))
        histograms["run-1", str(rank), "all"] = Distribution(step * len(BUCKETS), number(), buckets)
    return [*made, spec.family(histograms)]


class Ready(Collector):
    """prometheus_client's form of the same: a registry of these families."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Nothing is left to do."""
        return self._metrics


def library(ready: Ready, form: Format) -> bytes:
    """What prometheus_client writes."""
    if form is Format.TEXT:
        return generate_latest(ready)
    body: bytes = openmetrics.generate_latest(ready)  # type: ignore[no-untyped-call]  # theirs
    return body


def measure(series: int) -> dict[str, object]:
    """Let all contenders take turns over pages of one size."""
    draw = random.Random(series)  # a fixed order of numbers, so that runs compare
    digits = [families(series, lambda: draw.random() * 10) for _ in range(4)]
    ready = Ready(digits[0])
    page, changing = Page(max_series=60_000), Page(max_series=60_000)
    page.publish("block", digits[0])
    for form in Format:
        if page.render(form) != library(ready, form):
            raise AssertionError(f"the bodies differ in {form}")
    values = [[sample.value for family in each for sample in family.samples] for each in digits]

    def changed(turn: int, form: Format) -> bytes:
        changing.publish("block", digits[turn % 4])
        return changing.render(form)

    contenders: dict[str, Callable[[int], object]] = {
        "nothing changed, openmetrics gzip": lambda _: compress(page.render(Format.OPENMETRICS)),
        "nothing changed, openmetrics": lambda _: page.render(Format.OPENMETRICS),
        "everything changed, openmetrics": lambda turn: changed(turn, Format.OPENMETRICS),
        "everything changed, text": lambda turn: changed(turn + 1, Format.TEXT),
        "prometheus_client openmetrics": lambda _: library(ready, Format.OPENMETRICS),
        "prometheus_client text": lambda _: library(ready, Format.TEXT),
        "repr of every value": lambda turn: [repr(each) for each in values[turn % 4]],
    }
    rounds = max(7, (20_000 if QUICK else 100_000) // series)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(min(rounds, 100)):
        for name, contender in contenders.items():
            started = time.perf_counter()
            contender(turn)
            times[name].append(time.perf_counter() - started)
    return {name: round(statistics.median(each[1:]) * 1e3, 4) for name, each in times.items()}


if __name__ == "__main__":
    report({"milliseconds by series": {str(size): measure(size) for size in SIZES}})
