"""Measures what a scrape and a publish cost: the page beside prometheus_client's `generate_latest`, same families.

Contenders take turns in one process. The library is given its families ready made, which spares it the larger
part of what a collector of it costs. `repr of every value` is the floor under any writer of decimal numbers.
Medians in milliseconds. Prints one JSON document.

    python benchmarks/bench_exposition.py [--quick]
"""

from __future__ import annotations

import gzip
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from report import report

from exporter.collectors.family import Distribution, Family, FamilySpec, Sample
from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page

QUICK = "--quick" in sys.argv
SIZES = (500, 1_000, 10_000) if QUICK else (500, 1_000, 10_000, 50_000)
BUCKETS = tuple(0.001 * 2**power for power in range(12))
LABELS = ("run", "rank", "kind")
PER_FAMILY = 50
REPOSITORY = Path(__file__).resolve().parent.parent


def families(series: int, number: Callable[[], float]) -> list[Family]:
    """Gauges and counters of 50 series each, and a tenth of the series as histograms of 15."""
    made = []
    for place in range(series * 9 // 10 // PER_FAMILY):
        counter = place % 4 == 0
        name = f"training_part_{place}_seconds{'_total' if counter else ''}"
        spec = FamilySpec(name, "counter" if counter else "gauge", "Time of a part.", LABELS, "seconds")
        samples = tuple(Sample(("run-1", str(rank), "forward"), number()) for rank in range(PER_FAMILY))
        made.append(Family(spec, samples))
    spec = FamilySpec("training_batch_latency_seconds", "histogram", "Time of a batch.", LABELS, "seconds")
    histograms = []
    for rank in range(series // 10 // (len(BUCKETS) + 3)):
        step = int(number()) + 1
        buckets = tuple((bound, step * place) for place, bound in enumerate(BUCKETS))
        value = Distribution(step * len(BUCKETS), number(), buckets)
        histograms.append(Sample(("run-1", str(rank), "all"), value))
    return [*made, Family(spec, tuple(histograms))]


class Ready(Collector):
    """prometheus_client's form of families, made before the clock starts."""

    def __init__(self, ours: Iterable[Family]) -> None:
        self._metrics = [_theirs(family) for family in ours]

    def collect(self) -> Iterable[Metric]:
        """Nothing is left to do."""
        return self._metrics


def _theirs(family: Family) -> Metric:
    spec = family.spec
    if spec.type == "histogram":
        histogram = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels, unit=spec.unit)
        for sample in family.samples:
            if isinstance(sample.value, Distribution):
                buckets: list[tuple[str, float]] = [
                    (str(bound), each) for bound, each in sample.value.buckets
                ]
                histogram.add_metric(
                    sample.labels, [*buckets, ("+Inf", sample.value.count)], sample.value.sum
                )
        return histogram
    kind = CounterMetricFamily if spec.type == "counter" else GaugeMetricFamily
    metric = kind(spec.name.removesuffix("_total"), spec.help, labels=spec.labels, unit=spec.unit)
    for sample in family.samples:
        if not isinstance(sample.value, Distribution):
            metric.add_metric(sample.labels, sample.value)
    return metric


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
    whole = [families(series, lambda: float(draw.randrange(100_000))) for _ in range(4)]
    ready = Ready(digits[0])
    page, same, counts, numbers = (Page(max_series=60_000) for _ in range(4))
    page.publish("block", digits[0])
    for form in Format:
        if page.render(form, compress=False) != library(ready, form):
            raise AssertionError(f"the bodies differ in {form}")
    # The other pages are never scraped, so that a publish only writes lines.
    page.watch("page", page.families)
    values = [[sample.value for family in each for sample in family.samples] for each in digits]

    contenders: dict[str, Callable[[int], object]] = {
        "scrape openmetrics gzip": lambda _: page.render(Format.OPENMETRICS, compress=True),
        "scrape openmetrics plain": lambda _: page.render(Format.OPENMETRICS, compress=False),
        "scrape text plain": lambda _: page.render(Format.TEXT, compress=False),
        "prometheus_client text plain": lambda _: library(ready, Format.TEXT),
        "prometheus_client openmetrics plain": lambda _: library(ready, Format.OPENMETRICS),
        "prometheus_client openmetrics gzip": lambda _: gzip.compress(library(ready, Format.OPENMETRICS)),
        "publish, no value changed": lambda _: same.publish("block", digits[0]),
        "publish, all changed, whole numbers": lambda turn: counts.publish("block", whole[turn % 4]),
        "publish, all changed, 17 digits": lambda turn: numbers.publish("block", digits[turn % 4]),
        "publish, all changed, 17 digits, compressed in two formats": lambda turn: page.publish(
            "block", digits[turn % 4]
        ),
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


def import_cost(module: str) -> dict[str, float]:
    """Memory that importing a module adds to a bare Python with what the sidecar loads anyway."""
    program = (
        "import asyncio, dataclasses, enum, json, logging, re, ssl, struct, sys, threading, zlib\n"
        "def resident():\n"
        "    with open('/proc/self/statm') as file: return int(file.read().split()[1]) * 4096\n"
        f"before = resident(); import {module}; print(resident() - before)\n"
    )
    found = [
        int(
            subprocess.run(
                [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, check=True
            ).stdout
        )
        for _ in range(5)
    ]
    return {"resident MiB": round(statistics.median(found) / 2**20, 2)}


if __name__ == "__main__":
    report(
        {
            "milliseconds by series": {str(size): measure(size) for size in SIZES},
            "import": {
                module: import_cost(module) for module in ("exporter.exposition.page", "prometheus_client")
            },
        }
    )
