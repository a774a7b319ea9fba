"""Jobs with metrics of prometheus_client, which the bridge exports."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import prometheus_client as prom
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from waiting import wait_until

import exporter
from exporter.bridges import prometheus_client as bridge

bridge.POLL_SECONDS = 0.2
exporter.configure(run="mine")


class PollCounter(Collector):
    """Collector that returns no metrics and counts the polls of the bridge."""

    calls = 0

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.calls += 1
        return iter(())


POLL_COUNTER = PollCounter()
prom.REGISTRY.register(POLL_COUNTER)


def wait_for_poll(counter: PollCounter = POLL_COUNTER) -> None:
    """Wait until the bridge has polled the metrics as they are now. *counter* is a collector of their registry."""
    calls = counter.calls
    # The first poll may have begun before the call of this function, and the third begins after the end of the second.
    wait_until(lambda: counter.calls >= calls + 3)


def export_every_type() -> prom.Counter:
    """Export metrics of each type, of the default registry and of a registry of the job, and return the counter of requests."""
    bridge.install()
    requests = prom.Counter("app_requests", "Requests.", ["path"])
    depth = prom.Gauge("app_queue_depth", "Depth of\nthe queue.")
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
    wait_for_poll()
    return requests


def fork_and_reset_a_counter() -> None:
    """Count 5, fork a child that counts 100, reset the counter, and count 3."""
    bridge.install()
    counter = prom.Counter("app_steps", "Steps.")
    counter.inc(5)
    wait_for_poll()
    if os.fork() == 0:
        wait_for_poll()
        counter.inc(100)
        raise SystemExit(0)
    os.wait()
    counter.reset()
    counter.inc(2)
    wait_for_poll()
    counter.inc(1)


def observe_negative_values() -> None:
    """Observe 5, -3 and 4 in a summary and in a histogram."""
    bridge.install()
    reward = prom.Summary("app_reward", "Reward.")
    shift = prom.Histogram("app_shift", "Shift.", buckets=(0, 10))
    for value in (5, -3, 4):
        reward.observe(value)
        shift.observe(value)
        wait_for_poll()


def export_two_gauges() -> prom.Gauge:
    """Export two gauges, and return the gauge that `unregister` removes."""
    bridge.install()
    removed_gauge, kept_gauge = prom.Gauge("app_removed", "Removed."), prom.Gauge("app_kept", "Kept.")
    removed_gauge.set(7)
    kept_gauge.set(1)
    exporter.Stat("app.trains").add(1.0)
    wait_for_poll()
    return removed_gauge


def unregister(gauge: prom.Gauge) -> None:
    """Unregister a gauge, and wait until the bridge has polled the others."""
    prom.REGISTRY.unregister(gauge)
    wait_for_poll()


class RaisingCollector(Collector):
    """Collector that raises."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        raise ValueError("the job's own")


class SlowCollector(Collector):
    """Collector of a gauge that sleeps before or after the gauge.

    Attributes:
        seconds_before: Sleep before the gauge of a slow call.
        seconds_after: Sleep after the gauge of a slow call.
        first_slow_call: Number of the first slow call, such as 2 for the second call. All later calls are slow, too.
        calls: Number of calls.
        returned_calls: Number of calls that have ended.
    """

    def __init__(
        self, *, seconds_before: float = 0.0, seconds_after: float = 0.0, first_slow_call: int = 1
    ) -> None:
        self.seconds_before, self.seconds_after = seconds_before, seconds_after
        self.first_slow_call = first_slow_call
        self.calls = self.returned_calls = 0

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.calls += 1
        is_slow = self.calls >= self.first_slow_call
        try:
            if is_slow:
                time.sleep(self.seconds_before)
            yield GaugeMetricFamily("app_slow", "Slow.", value=self.calls)
            if is_slow:
                time.sleep(self.seconds_after)
        finally:
            self.returned_calls += 1


def export_collectors(*collectors: Collector) -> prom.CollectorRegistry:
    """Export a registry with these collectors, of which a call may last a second, and return the registry.

    The registration calls no collector.
    """
    bridge.HANG_SECONDS = 1.0
    registry = prom.CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry._collector_to_names[collector] = []
    bridge.export(registry)
    exporter.Stat("app.trains").add(1.0)
    return registry


def count_beside_a_raising_and_a_hanging_collector() -> None:
    """Export a counter with a collector that raises and a collector that hangs in the second call. Print the calls of the latter."""
    hanging_collector = SlowCollector(seconds_after=3600, first_slow_call=2)
    poll_counter = PollCounter()
    registry = export_collectors(RaisingCollector(), hanging_collector, poll_counter)
    counter = prom.Counter("app_steps", "Steps.", registry=registry)
    wait_until(lambda: hanging_collector.calls == 2)
    wait_for_poll(poll_counter)
    counter.inc(9)
    wait_for_poll(poll_counter)
    exporter.flush()
    print(hanging_collector.calls, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_a_slow_second_call() -> None:
    """Export a collector of which every call after the first lasts longer than the limit. Wait for the end of the second call."""
    collector = SlowCollector(seconds_before=3, first_slow_call=2)
    export_collectors(collector)
    wait_until(lambda: collector.returned_calls == 2)


def wait_for_a_slow_first_call() -> None:
    """Export a collector that yields a gauge and then lasts longer than the limit. Wait for the end of the first call."""
    collector = SlowCollector(seconds_after=3)
    export_collectors(collector)
    wait_until(lambda: collector.returned_calls == 1)
