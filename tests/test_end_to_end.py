"""From `Stat.add` to a gap in Prometheus: real ranks, the real sidecar, the real Prometheus.

Ranks are added, paused, stopped, killed and restarted, and the sidecar is killed and restarted. The totals, windows and
gaps in Prometheus are then compared with the times of these events and with the log of samples that each rank writes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_support import Prometheus, fetch, free_port, needs_prometheus
from waiting import PATIENCE, wait_until

FLUSH_SECONDS = 0.5
WINDOW_SECONDS = 1.0
STALE_SECONDS = 3.0
LINGER_SECONDS = 6.0
SCRAPE_SECONDS = 0.5

FEED_PASS = 'exporter_collector_last_success_timestamp_seconds{collector="feed"}'
MEAN = "train_loss_window_mean_ratio"
SAMPLES = "train_loss_window_samples"
COUNT = "train_loss_ratio_count"

RANK = """
import sys, threading, time
from exporter import Stat
loss = Stat("train.loss", ["mean", "max", "p95"], window_seconds=1.0, unit="ratio")
step = Stat("train.step", ["mean", "histogram"], window_seconds=1.0, unit="seconds", buckets=[0.05, 0.5])
sample_log = open(sys.argv[1], "a", buffering=1)
working, count = True, 0
def listen():
    global working
    for line in sys.stdin:
        working = line.strip() == "work"
threading.Thread(target=listen, daemon=True).start()
while True:
    if working:
        count += 1
        loss.add(0.25)
        step.add(0.01 if count % 2 else 0.1)
        sample_log.write(f"{time.time()}\\n")
    time.sleep(0.02)
"""


@dataclass
class Rank:
    """Training process that pauses on request and logs the time of each sample."""

    number: int
    directory: Path
    cleanup: ExitStack
    sample_logs: list[Path] = field(default_factory=list)
    """One log for each start of the rank."""

    def start(self) -> float:
        """Start the process, and return the time of its first sample."""
        sample_log = self.directory / f"rank{self.number}-{len(self.sample_logs)}"
        self.sample_logs.append(sample_log)
        environment = os.environ | {
            "EXPORTER_FEED_DIR": str(self.directory / "feed"),
            "EXPORTER_FLUSH_SECONDS": str(FLUSH_SECONDS),
            "EXPORTER_RUN": "trial",
            "RANK": str(self.number),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(sample_log)], env=environment, stdin=subprocess.PIPE, text=True
        )
        self.cleanup.callback(self.process.communicate)
        self.cleanup.callback(self.process.kill)
        wait_until(lambda: sample_log.exists() and sample_log.stat().st_size)
        return self.recorded_times()[0]

    def command(self, line: str) -> float:
        print(line, file=self.process.stdin, flush=True)
        return time.time()

    def send(self, signal_number: signal.Signals) -> float:
        self.process.send_signal(signal_number)
        return time.time()

    def recorded_times(self, start_index: int = -1) -> list[float]:
        """Return the Unix times of the samples after a start, by default after the last one."""
        return [float(line) for line in self.sample_logs[start_index].read_text().splitlines() if line]


class Sidecar:
    """Real sidecar on a fixed port, for kill and restart."""

    def __init__(self, directory: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        configuration = directory / "config.yaml"
        configuration.write_text(
            f"feed: {{interval: 250ms, stale_after: {STALE_SECONDS:.0f}s, linger: {LINGER_SECONDS:.0f}s}}\ngpu: {{enabled: false}}\n"
        )
        self._command = [
            *(sys.executable, "-m", "exporter", f"--web.listen-address={self.address}"),
            *(f"--feed.dir={directory / 'feed'}", f"--config.file={configuration}", "--log.level=warn"),
        ]

    def start(self) -> None:
        self.process = subprocess.Popen(self._command)
        wait_until(lambda: fetch(f"http://{self.address}/-/ready"))

    def end(self, signal_number: signal.Signals = signal.SIGTERM) -> float:
        self.process.send_signal(signal_number)
        self.process.wait(timeout=20 * PATIENCE)
        return time.time()


@dataclass
class Scenario:
    """Processes of the scenario, and the Unix times of its events by name."""

    ranks: list[Rank]
    sidecar: Sidecar
    prometheus: Prometheus
    times: dict[str, float] = field(default_factory=dict)


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenario]:
    """Play the scenario once. The tests then query Prometheus."""
    directory = tmp_path_factory.mktemp("scenario")
    (directory / "feed").mkdir()
    with ExitStack() as cleanup:
        sidecar = Sidecar(directory)
        cleanup.callback(sidecar.end)
        sidecar.start()
        targets = {"exporter": sidecar.address}
        prometheus = Prometheus(directory / "prometheus", targets, scrape_seconds=SCRAPE_SECONDS)
        cleanup.enter_context(prometheus)
        wait_until(lambda: prometheus.query("up == 1"))
        scenario = Scenario([Rank(number, directory, cleanup) for number in range(3)], sidecar, prometheus)
        play(scenario)
        yield scenario


def play(scenario: Scenario) -> None:
    """Execute the events of the scenario. Each event waits until Prometheus has scraped the effect of the event before."""
    paused_rank, killed_rank, late_rank = scenario.ranks
    times = scenario.times
    times["start"] = paused_rank.start()
    killed_rank.start()
    wait_for_series(scenario, MEAN, 0, 1)
    times["windows"] = time.time()
    time.sleep(4)
    times["pause"] = paused_rank.command("pause")
    times["kill"] = killed_rank.send(signal.SIGKILL)
    wait_for_passes(scenario, times["kill"] + 2 * FLUSH_SECONDS)
    wait_until(lambda: value_of_rank(scenario, SAMPLES, 0) == 0.0)
    times["empty windows"] = time.time()
    time.sleep(2)
    times["restart"] = killed_rank.start()
    time.sleep(1)
    times["resume"] = paused_rank.command("work")
    times["join"] = late_rank.start()
    wait_for_series(scenario, MEAN, 0, 1, 2)
    times["all windows"] = time.time()
    time.sleep(2)
    times["stop"] = late_rank.send(signal.SIGSTOP)
    wait_for_passes(scenario, times["stop"] + STALE_SECONDS)
    time.sleep(2)
    times["continue"] = late_rank.send(signal.SIGCONT)
    times["sidecar killed"] = scenario.sidecar.end(signal.SIGKILL)
    wait_until(lambda: scenario.prometheus.query("up == 0"))
    scenario.sidecar.start()
    wait_for_series(scenario, MEAN, 2)
    times["leave"] = late_rank.send(signal.SIGKILL)
    wait_for_passes(scenario, times["leave"] + LINGER_SECONDS)
    wait_until(lambda: value_of_rank(scenario, COUNT, 2) is None)
    times["totals ended"] = time.time()
    paused_rank.command("pause")
    killed_rank.command("pause")
    time.sleep(1)
    # The last flush of a rank contains all samples of its log.
    wait_until(lambda: value_of_rank(scenario, COUNT, 0) == len(paused_rank.recorded_times()))
    wait_for_passes(scenario, time.time() + FLUSH_SECONDS)
    times["end"] = time.time()


def value_of_rank(scenario: Scenario, family: str, rank: int) -> float | None:
    """Return the last value that Prometheus has scraped for a rank, or None without a series."""
    return scenario.prometheus.value(f'{family}{{rank="{rank}"}}')


def wait_for_series(scenario: Scenario, family: str, *ranks: int) -> None:
    """Wait until Prometheus has a family for each of the ranks."""
    wait_until(lambda: all(value_of_rank(scenario, family, rank) is not None for rank in ranks))


def wait_for_passes(scenario: Scenario, moment: float) -> None:
    """Wait until Prometheus has scraped the results of two passes over the feed that ended after a Unix time.

    The first of them may have begun before that time.
    """

    def pass_after(earlier_pass: float) -> float | None:
        last_pass = scenario.prometheus.value(FEED_PASS)
        return last_pass if last_pass is not None and last_pass > earlier_pass else None

    first_pass = wait_until(lambda: pass_after(moment))
    wait_until(lambda: pass_after(first_pass))


def time_of_passes(scenario: Scenario, moment: float) -> float:
    """Return the time from which Prometheus has the results of two passes over the feed that ended after a Unix time."""
    last_passes = scenario.prometheus.range(FEED_PASS, scenario.times["start"], scenario.times["end"])
    _first_pass, second_pass = sorted({end for end in last_passes.values() if end > moment})[:2]
    return min(scraped_at for scraped_at, end in last_passes.items() if end >= second_pass)


def successful_scrapes(scenario: Scenario, start: float, end: float) -> list[float]:
    """Return the points of a time range at which the last scrape was successful. On a busy machine, some scrapes fail."""
    up_values = scenario.prometheus.range(
        'up{job="exporter"}', scenario.times["start"], scenario.times["end"]
    )
    return [moment for moment, value in up_values.items() if value == 1 and start <= moment <= end]


def has_points(
    scenario: Scenario, points: dict[float, float], start: float, end: float, *, min_ratio: float = 1.0
) -> bool:
    """Return True if a series has points at *min_ratio* of the successful scrapes in a time range, by default at all of them."""
    scrapes = successful_scrapes(scenario, start, end)
    return bool(scrapes) and len([moment for moment in scrapes if moment in points]) >= min_ratio * len(
        scrapes
    )


def is_gap(points: dict[float, float], start: float, end: float) -> bool:
    """Return True if a series has no points in a time range."""
    return end > start and not [moment for moment in points if start <= moment <= end]


pytestmark = [needs_prometheus, pytest.mark.timeout(180)]


def points_of(scenario: Scenario, family: str, rank: int) -> dict[float, float]:
    expression = f'{family}{{run="trial",rank="{rank}"}}'
    return scenario.prometheus.range(expression, scenario.times["start"], scenario.times["end"])


def test_window_values_match_the_recorded_values(scenario: Scenario) -> None:
    points = points_of(scenario, MEAN, 0)
    counts = [
        value for moment, value in points_of(scenario, SAMPLES, 0).items() if moment < scenario.times["pause"]
    ]

    assert set(points.values()) == {0.25}
    # A rank on a busy machine closes a window late.
    assert has_points(scenario, points, scenario.times["windows"], scenario.times["pause"], min_ratio=0.5)
    times = [moment for moment in scenario.ranks[0].recorded_times() if moment < scenario.times["pause"]]
    busiest = max(counts)
    # A window has at most 50 samples a second. The gauges of a rank that closes a window later than the limit end.
    max_samples = 50 * (WINDOW_SECONDS + STALE_SECONDS)
    assert 0.5 * len(times) / (scenario.times["pause"] - scenario.times["start"]) < busiest <= max_samples


def test_a_rank_that_stops_adding_has_a_gap_and_keeps_its_totals(scenario: Scenario) -> None:
    gap_start, gap_end = scenario.times["empty windows"], scenario.times["resume"]
    points, samples, totals = (points_of(scenario, family, 0) for family in (MEAN, SAMPLES, COUNT))

    assert is_gap(points, gap_start, gap_end)
    assert has_points(scenario, samples, gap_start, gap_end, min_ratio=0.5)
    assert {value for moment, value in samples.items() if gap_start <= moment <= gap_end} == {0.0}
    assert points.keys().isdisjoint(moment for moment, value in samples.items() if value == 0.0)
    assert has_points(scenario, totals, gap_start, gap_end)
    assert has_points(scenario, points, scenario.times["all windows"], scenario.times["stop"], min_ratio=0.5)
    assert scenario.prometheus.value(f'absent({MEAN}{{rank="0"}})', time_seconds=gap_end - 0.1) == 1


def test_window_gauges_of_a_killed_rank_end_within_two_flushes_and_totals_linger(
    scenario: Scenario,
) -> None:
    gap_start = time_of_passes(scenario, scenario.times["kill"] + 2 * FLUSH_SECONDS)
    points, samples, totals = (points_of(scenario, family, 1) for family in (MEAN, SAMPLES, COUNT))

    assert is_gap(points, gap_start, scenario.times["restart"])
    assert is_gap(samples, gap_start, scenario.times["restart"])
    # On a busy machine, the restart may be later than the linger time.
    linger_end = scenario.times["kill"] + LINGER_SECONDS - 1
    assert has_points(scenario, totals, scenario.times["kill"], min(scenario.times["restart"], linger_end))


def test_the_totals_of_a_killed_rank_end_after_the_linger_time(scenario: Scenario) -> None:
    totals = points_of(scenario, COUNT, 2)

    assert has_points(scenario, totals, scenario.times["leave"], scenario.times["leave"] + LINGER_SECONDS / 2)
    assert is_gap(totals, scenario.times["totals ended"], scenario.times["end"])


def test_totals_continue_over_a_restart_and_lose_at_most_one_flush_interval(scenario: Scenario) -> None:
    rank = scenario.ranks[1]
    times_before, times_after = rank.recorded_times(0), rank.recorded_times(1)
    sample_count = len(times_before) + len(times_after)
    update_time = scenario.prometheus.value(
        # Also after the linger time, which may end before the restart on a busy machine.
        'last_over_time(training_feed_last_update_timestamp_seconds{rank="1"}[5m])',
        time_seconds=scenario.times["restart"] - 0.1,
    )
    assert update_time is not None
    # A busy machine flushes late. Without the tolerance, a sample at the time of the flush counts as flushed.
    last_flush = min(scenario.times["kill"] - FLUSH_SECONDS, update_time) - 0.3
    max_lost_samples = len([moment for moment in times_before if moment > last_flush])

    total = scenario.prometheus.value(f'{COUNT}{{rank="1"}}', time_seconds=scenario.times["end"])
    increase = scenario.prometheus.value(
        f'increase({COUNT}{{rank="1"}}[15s])', time_seconds=scenario.times["restart"] + 3
    )

    assert total is not None
    assert increase is not None
    assert sample_count - max_lost_samples <= total <= sample_count
    # At most 50 samples per second. After a reset of the counter, `increase` would add the whole new value.
    assert increase < 15 * 50 * 1.2
    assert (
        scenario.prometheus.value(f'resets({COUNT}{{rank="1"}}[2m])', time_seconds=scenario.times["end"]) == 0
    )


def test_totals_of_a_rank_without_restarts_are_exact(scenario: Scenario) -> None:
    sample_count = len(scenario.ranks[0].recorded_times())

    def value_at_end(expression: str) -> float | None:
        return scenario.prometheus.value(expression, time_seconds=scenario.times["end"])

    assert value_at_end(f'{COUNT}{{rank="0"}}') == sample_count
    assert value_at_end('train_loss_ratio_sum{rank="0"}') == pytest.approx(0.25 * sample_count)
    assert value_at_end('train_step_seconds_bucket{rank="0",le="0.05"}') == (sample_count + 1) // 2
    assert value_at_end('train_step_seconds_bucket{rank="0",le="+Inf"}') == sample_count


def test_a_stopped_process_loses_its_window_gauges_and_shows_its_age(scenario: Scenario) -> None:
    stale_time = time_of_passes(scenario, scenario.times["stop"] + STALE_SECONDS)
    points, totals = points_of(scenario, MEAN, 2), points_of(scenario, COUNT, 2)
    update_time = 'training_feed_last_update_timestamp_seconds{rank="2"}'
    age_time = scenario.times["continue"] - 0.5
    age = scenario.prometheus.value(f"time() - {update_time}", time_seconds=age_time)

    assert is_gap(points, stale_time, scenario.times["continue"])
    assert has_points(scenario, totals, stale_time, scenario.times["continue"])
    assert age is not None
    # The last update was before the stop, and after the windows of the rank were scraped.
    assert age_time - scenario.times["stop"] - 0.1 <= age < age_time - scenario.times["join"]


def test_a_killed_sidecar_is_a_gap_and_no_counter_decreases(scenario: Scenario) -> None:
    up_values = scenario.prometheus.range(
        'up{job="exporter"}', scenario.times["start"], scenario.times["end"]
    )
    failed_scrapes = {moment for moment, value in up_values.items() if value == 0}
    values_before = [
        value for moment, value in up_values.items() if moment < scenario.times["sidecar killed"] - 0.5
    ]

    assert 1.0 in values_before  # on a busy machine, a scrape can exceed its timeout
    assert up_values[max(up_values)] == 1.0
    assert max(failed_scrapes) > scenario.times["sidecar killed"]
    assert failed_scrapes.isdisjoint(points_of(scenario, MEAN, 0))
    for family in (COUNT, "train_step_seconds_count"):
        assert (
            scenario.prometheus.query(f"resets({family}[2m]) > 0", time_seconds=scenario.times["end"]) == []
        )
