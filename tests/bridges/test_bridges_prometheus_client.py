"""Bridge to prometheus_client, with the real package: metrics of the job reach the page through the feed."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import PRINT_PAGE, run_job
from program_support import series, sum_by_labels

PRELUDE = """
import os, time
import prometheus_client as prom
from exporter.bridges import prometheus_client as bridge
bridge.POLL_SECONDS, bridge.HANG_SECONDS = 0.2, 0.5
exporter.configure(run="mine")
"""
EXPORT_METRICS = """
bridge.install()
requests = prom.Counter("app_requests", "Requests.", ["path"])
depth = prom.Gauge("app_queue_depth", "Depth of\\nthe queue.")
durations = prom.Histogram("app_took_seconds", "Time.", buckets=(0.1, 1.0))
sizes = prom.Summary("app_size_bytes", "Size.")
prom.Info("app_build", "Build.").info({"version": "1.2"})
prom.Counter("gpu_energy_joules", "The exporter's own name.")
own_registry = prom.CollectorRegistry()
prom.Gauge("app_own", "Of a registry of the job's own.", registry=own_registry).set(3)
bridge.export(own_registry)
requests.labels("/a").inc(2.5)
depth.set(7)
for seconds in (0.05, 0.5, 5.0):
    durations.observe(seconds)
sizes.observe(100)
exporter.Stat("app.trains").add(1.0)
time.sleep(1.5)
"""


def test_metrics_of_the_job_have_run_and_rank_and_continue_over_a_restart(tmp_path: Path) -> None:
    program = (
        f"{PRELUDE}{EXPORT_METRICS}{PRINT_PAGE}requests.labels('/a').inc(4)  # immediately before the exit"
    )
    live_page = run_job(tmp_path, program).process.stdout
    ended_page = run_job(tmp_path, program).page

    assert sum_by_labels(live_page, "app_requests_total", run="mine", rank="0", path="/a") == 2.5
    assert sum_by_labels(live_page, "app_queue_depth", rank="0") == 7
    assert sum_by_labels(live_page, "app_own") == 3
    assert sum_by_labels(live_page, "app_build_info", version="1.2") == 1
    assert {
        labels.partition("le=")[2]: count
        for labels, count in series(live_page, "app_took_seconds_bucket").items()
    } == {
        '"0.1",rank="0",run="mine"}': 1,
        '"1.0",rank="0",run="mine"}': 2,
        '"+Inf",rank="0",run="mine"}': 3,
    }
    assert "python_info" not in live_page
    assert "gpu_energy_joules_total{rank" not in live_page
    assert sum_by_labels(ended_page, "app_requests_total", path="/a") == 2 * 6.5
    assert sum_by_labels(ended_page, "app_took_seconds_count") == 6
    assert sum_by_labels(ended_page, "app_took_seconds_sum") == pytest.approx(2 * 5.55)
    assert sum_by_labels(ended_page, "app_size_bytes_sum") == 200
    assert series(ended_page, "app_queue_depth") == {}  # an ended rank has no gauges


def test_a_forked_child_counts_separately_and_a_reset_counter_continues(tmp_path: Path) -> None:
    program = """
bridge.install()
counter = prom.Counter("app_steps", "Steps.")
counter.inc(5)
time.sleep(1)
if os.fork() == 0:
    time.sleep(1)
    counter.inc(100)
    raise SystemExit(0)
os.wait()
counter.reset()
counter.inc(2)
time.sleep(1)
counter.inc(1)
"""
    page = run_job(tmp_path, PRELUDE + program).page

    before_fork, of_child, after_reset = 5, 100, 3
    assert sum_by_labels(page, "app_steps_total") == before_fork + of_child + after_reset


def test_a_negative_observation_is_not_a_reset_and_ends_the_sum(tmp_path: Path) -> None:
    program = """
bridge.install()
reward = prom.Summary("app_reward", "Reward.")
shift = prom.Histogram("app_shift", "Shift.", buckets=(0, 10))
for value in (5, -3, 4):
    reward.observe(value)
    shift.observe(value)
    time.sleep(0.5)
"""
    page = run_job(tmp_path, PRELUDE + program).page

    assert sum_by_labels(page, "app_reward_count") == 3
    assert sum_by_labels(page, "app_shift_count") == 3
    assert sum_by_labels(page, "app_shift_bucket", le="0.0") == 1
    assert series(page, "app_reward_sum") == series(page, "app_shift_sum") == {}


def test_the_gauges_of_an_unregistered_collector_disappear(tmp_path: Path) -> None:
    program = """
bridge.install()
removed_gauge, kept_gauge = prom.Gauge("app_removed", "Removed."), prom.Gauge("app_kept", "Kept.")
removed_gauge.set(7)
kept_gauge.set(1)
exporter.Stat("app.trains").add(1.0)
time.sleep(1)
prom.REGISTRY.unregister(removed_gauge)
time.sleep(1)
"""
    page = run_job(tmp_path, PRELUDE + program + PRINT_PAGE).process.stdout

    assert sum_by_labels(page, "app_kept") == 1
    assert series(page, "app_removed") == {}


def test_a_collector_that_raises_or_hangs_affects_only_itself(tmp_path: Path) -> None:
    program = """
class Raising:
    def collect(self):
        raise ValueError("the job's own")
class Hanging:
    calls = 0
    def collect(self):
        self.calls += 1
        yield prom.metrics_core.GaugeMetricFamily("app_hanging", "Hangs.", value=1)
        if self.calls > 1:
            time.sleep(3600)
registry, hanging = prom.CollectorRegistry(auto_describe=False), Hanging()
for collector in (Raising(), hanging):
    registry._collector_to_names[collector] = []
counter = prom.Counter("app_steps", "Steps.", registry=registry)
bridge.export(registry)
time.sleep(3)
counter.inc(9)
time.sleep(1)
print(hanging.calls)
os.kill(os.getpid(), 9)
"""
    ended_job = run_job(tmp_path, PRELUDE + program, check=False)

    assert ended_job.process.stdout == "2\n"
    assert "the collector Raising of prometheus_client raised" in ended_job.process.stderr
    assert "did not return" in ended_job.process.stderr
    assert sum_by_labels(ended_job.page, "app_steps_total") == 9


def test_a_collector_that_hung_has_no_gauges_after_it_returns(tmp_path: Path) -> None:
    program = """
class Slow:
    calls = 0
    def collect(self):
        self.calls += 1
        if self.calls > 1:
            time.sleep(2)
        try:
            yield prom.metrics_core.GaugeMetricFamily("app_slow", "Slow.", value=self.calls)
        finally:
            self.has_returned = True
registry, slow = prom.CollectorRegistry(auto_describe=False), Slow()
registry._collector_to_names[slow] = []
bridge.export(registry)
exporter.Stat("app.trains").add(1.0)
while slow.calls < 2:
    time.sleep(0.05)
slow.has_returned = False
while not slow.has_returned:
    time.sleep(0.05)
"""
    page = run_job(tmp_path, PRELUDE + program + PRINT_PAGE).process.stdout

    assert "app_trains" in page
    assert series(page, "app_slow") == {}


def test_a_gauge_that_first_appears_in_a_poll_that_hangs_is_not_published(tmp_path: Path) -> None:
    program = """
class Slow:
    has_returned = False
    def collect(self):
        try:
            yield prom.metrics_core.GaugeMetricFamily("app_slow", "Slow.", value=7)
            time.sleep(2)
        finally:
            self.has_returned = True
registry, slow = prom.CollectorRegistry(auto_describe=False), Slow()
registry._collector_to_names[slow] = []
bridge.export(registry)
exporter.Stat("app.trains").add(1.0)
while not slow.has_returned:
    time.sleep(0.05)
"""
    page = run_job(tmp_path, PRELUDE + program + PRINT_PAGE).process.stdout

    assert "app_trains" in page
    assert series(page, "app_slow") == {}
