"""Invariants of a busy node over minutes or hours, with random exits, hangs and restarts.

Ranks of a run start, end, crash, are killed, stopped and restarted at random, and write each step into a diary. The sidecar and the
NVML child are killed, the wall clocks of ranks step, and the feed directory (a small file system, if the user may mount one) is full
for some seconds. A real Prometheus, if installed, scrapes the sidecar. Prints a report, and exits with status 1 unless

- the steps of a rank on /metrics equal the diary, and the samples match the steps. The last 1.5 s of a killed attempt may be
  missing, and 4.5 s for each time that the feed directory was full;
- no counter of the training decreases in Prometheus, not even when the sidecar is killed;
- memory, descriptors and threads of the sidecar and the NVML child do not grow (`Lifetime.level`);
- each scrape of this program is answered, and the feed directory contains at most two files for each rank and eight others;
- the NVML child ends with the sidecar.

    python benchmarks/soak.py              twenty minutes; SOAK=30s, SOAK=8h for other durations; SEED=7 repeats a run
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families
from report import REPOSITORY

UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
RANKS, STEPS_A_SECOND = 4, 20
RUN = "soak"
UNWRITTEN_SECONDS = 1.5
"""Time whose steps a kill may lose: since the last snapshot, which is written once a second."""
FULL_SECONDS = 3.0
"""Time for which the feed directory is full."""
MAX_GROWTH_MIB, MAX_GROWTH_MIB_PER_HOUR, MAX_GROWTH_COUNT = 4.0, 20.0, 3
"""Bounds of the growth of memory, and of descriptors and threads (in addition to one for each rank)."""
ENDINGS = ("ends", "raises", "killed", "stopped", "clock", "ends")
"""Endings of an attempt: normally, by an exception, by SIGKILL, after a SIGSTOP, or normally after a step of the wall clock."""
SAMPLES = 4
FEED_BYTES = 4 << 20


def duration(text: str) -> float:
    """Return the seconds of `30s`, `20m` or `8h`."""
    return float(text[:-1]) * UNIT_SECONDS[text[-1]]


def be_rank(diary: Path, seconds: float, ending: str) -> None:
    """Train for a number of seconds as a rank, write each finished step into the diary, and end as in `ENDINGS`."""
    started = time.monotonic()
    stop = started + seconds
    if ending == "clock":
        step_clock(started + seconds / 2, random.choice((-90.0, 90.0)))
    from exporter import training

    # Unbuffered, so that the diary contains the steps of a killed attempt.
    with diary.open("ab", buffering=0) as steps, training.training_loop(train_iterations_start=0):
        while time.monotonic() < stop:
            with training.training_iteration():
                time.sleep(1 / STEPS_A_SECOND)
                training.record(loss=2.0, samples=SAMPLES)
            steps.write(b".")
        if ending == "raises":
            raise RuntimeError("requested by the soak test")
        if ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)


def step_clock(start: float, seconds: float) -> None:
    """Make the wall clock of this process step at a monotonic time, as after a correction of the system clock."""
    system_time, system_time_ns = time.time, time.time_ns

    def offset_seconds() -> float:
        return seconds if time.monotonic() > start else 0.0

    time.time = lambda: system_time() + offset_seconds()
    time.time_ns = lambda: system_time_ns() + int(offset_seconds() * 1e9)


@dataclass
class Rank:
    """Rank with its attempts. An attempt is a process that trains for some seconds.

    Attributes:
        process: Running attempt.
        kills: Number of attempts that were killed.
        stopped_until: Monotonic time at which the stopped attempt continues; 0 if it is not stopped.
        ending: Ending of the running attempt, from `ENDINGS`.
    """

    number: int
    diary: Path
    process: subprocess.Popen[bytes] | None = None
    kills: int = 0
    attempts: int = 0
    stopped_until: float = 0.0
    ending: str = ""

    def advance(self, monotonic_now: float, feed: Path, generator: random.Random, *, may_start: bool) -> None:
        """Start an attempt if none is running, stop or continue the running attempt, and count a killed attempt."""
        if self.process is None:
            if may_start:
                self.start_attempt(feed, generator)
        elif self.stopped_until:
            if monotonic_now > self.stopped_until:
                self.process.send_signal(signal.SIGCONT)
                self.stopped_until = 0.0
        elif (status := self.process.poll()) is not None:
            self.kills += status == -signal.SIGKILL
            self.process = None
        elif self.ending == "stopped" and generator.random() < 0.05:
            self.process.send_signal(signal.SIGSTOP)
            self.stopped_until, self.ending = monotonic_now + generator.uniform(2, 6), ""

    def start_attempt(self, feed: Path, generator: random.Random) -> None:
        """Start an attempt with a random duration and ending."""
        self.ending = generator.choice(ENDINGS)
        self.attempts += 1
        self.process = subprocess.Popen(
            [sys.executable, __file__, "rank", self.diary, str(generator.uniform(3, 12)), self.ending],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "EXPORTER_FEED_DIR": str(feed),
                "EXPORTER_RUN": RUN,
                "RANK": str(self.number),
                "WORLD_SIZE": str(RANKS),
            },
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        """Kill the running attempt, if any."""
        if self.process is not None:
            self.process.kill()
            self.kills += self.process.wait() == -signal.SIGKILL
            self.process = None

    def steps(self) -> int:
        """Return the number of steps in the diary."""
        return self.diary.stat().st_size if self.diary.exists() else 0


@dataclass
class Lifetime:
    """Measurements of a process over its lifetime, one per iteration of the main loop."""

    title: str
    times: list[float] = field(default_factory=list)  # monotonic
    memory_mib: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def measure(self, process: psutil.Process, now: float) -> None:
        """Add a measurement."""
        with contextlib.suppress(psutil.Error):
            rss, descriptors, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
            self.times.append(now)
            self.memory_mib.append(rss / 2**20)
            self.descriptors.append(descriptors)
            self.threads.append(threads)

    def second_half(self, values: Sequence[float]) -> Sequence[float]:
        """Return the second half of the values, without the warm-up in the first half."""
        return values[len(values) // 2 :]

    def growth(self, values: Sequence[float]) -> float:
        """Return the difference of the minima of the last and the third quarter of the lifetime. Peaks have no influence."""
        late_values = self.second_half(values)
        return min(self.second_half(late_values)) - min(late_values[: len(late_values) // 2])

    def level(self) -> tuple[bool, str]:
        """Return True if memory, descriptors and threads do not grow, and a description.

        The growth of memory is the slope of the second half, or the growth of the minimum in a lifetime below five minutes. A lifetime
        below a minute is too short for a verdict: the result is True, without a description.
        """
        if not self.times or self.times[-1] - self.times[0] < 60:
            return True, ""
        slope = (
            statistics.linear_regression(
                self.second_half(self.times), self.second_half(self.memory_mib)
            ).slope
            * 3600
        )
        spread = max(self.second_half(self.memory_mib)) - min(self.second_half(self.memory_mib))
        count_growth = max(self.growth(self.descriptors), self.growth(self.threads))
        if self.times[-1] - self.times[0] < 300:  # in a few minutes, the slope is due to the warm-up
            is_memory_level = self.growth(self.memory_mib) < MAX_GROWTH_MIB
        else:  # an allocator takes up to 2 MiB at once
            is_memory_level = slope < MAX_GROWTH_MIB_PER_HOUR or spread < 2
        is_level = is_memory_level and count_growth <= MAX_GROWTH_COUNT + RANKS
        return is_level, (
            f"{self.title}: {self.times[-1] - self.times[0]:.0f} s, {self.memory_mib[-1]:.1f} MiB, {slope:+.1f} MiB/h, "
            f"descriptors {min(self.descriptors)} to {max(self.descriptors)}, threads {min(self.threads)} to {max(self.threads)}"
        )


class Node:
    """Node: directories, sidecar and Prometheus."""

    def __init__(self, directory: Path, feed: Path) -> None:
        self.feed, self.directory = feed, directory
        self.port, self.prometheus_port = free_port(), free_port()
        self.lifetimes: list[Lifetime] = []
        self.sidecar: subprocess.Popen[bytes] | None = None
        self.prometheus: subprocess.Popen[bytes] | None = None
        self.restarts = self.scrapes = self.failed_scrapes = self.fillings = 0
        self.full_until = 0.0  # monotonic time at which the filling is removed; 0 if not full
        self.slowest_seconds = 0.0
        (directory / "state").mkdir()

    def start_sidecar(self) -> None:
        """Start the sidecar with the port and the directories of this node, and wait until it is ready."""
        self.sidecar = subprocess.Popen(
            [sys.executable, "-m", "exporter", f"--web.listen-address=127.0.0.1:{self.port}", "--gpu.replay=h100",
             f"--feed.dir={self.feed}", f"--state.dir={self.directory / 'state'}", "--log.level=error"],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip
        self.lifetimes.append(Lifetime("sidecar"))
        wait_until(lambda: self.page("/-/ready"), "the sidecar")

    def start_prometheus(self) -> None:
        """Start a real Prometheus, which scrapes once a second."""
        (self.directory / "prometheus.yml").write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "1s"},
                    "scrape_configs": [
                        {"job_name": "training", "static_configs": [{"targets": [f"127.0.0.1:{self.port}"]}]}
                    ],
                }
            )
        )
        self.prometheus = subprocess.Popen(
            ["prometheus", f"--config.file={self.directory / 'prometheus.yml'}", "--log.level=error",
             f"--storage.tsdb.path={self.directory / 'tsdb'}", f"--web.listen-address=127.0.0.1:{self.prometheus_port}"],
        )  # fmt: skip

    def page(self, path: str = "/metrics") -> str:
        """Return the page, or an empty string without a response."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as response:
                return str(response.read(), "utf-8")
        except OSError:
            return ""

    def scrape(self) -> None:
        """Scrape in addition to Prometheus, and record the duration."""
        started = time.monotonic()
        self.scrapes += 1
        self.failed_scrapes += not self.page()
        self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - started)

    def child(self) -> psutil.Process | None:
        """Return the NVML child, if running."""
        with contextlib.suppress(psutil.Error, AttributeError):
            return next(iter(psutil.Process(self.sidecar.pid).children()), None)  # type: ignore[union-attr]
        return None

    def measure(self, now: float) -> None:
        """Measure the sidecar and the NVML child. Raises SystemExit if the sidecar has exited."""
        if self.sidecar is None or self.sidecar.poll() is not None:
            raise SystemExit(f"the sidecar ended by itself, with {self.sidecar and self.sidecar.returncode}")
        self.lifetimes[-1].measure(psutil.Process(self.sidecar.pid), now)
        if child := self.child():
            title = f"NVML child {child.pid}"
            lifetime = next((lifetime for lifetime in self.lifetimes if lifetime.title == title), None)
            if lifetime is None:
                lifetime = Lifetime(title)
                self.lifetimes.insert(0, lifetime)
            lifetime.measure(child, now)

    def fill(self, now: float) -> None:
        """Fill the feed directory for `FULL_SECONDS`."""
        self.fillings += 1
        self.full_until = now + FULL_SECONDS
        with contextlib.suppress(OSError), (self.feed / "filling").open("wb", buffering=0) as filling:
            while filling.write(bytes(1 << 12)):
                pass

    def make_room(self, now: float) -> None:
        """Remove the filling of the feed directory if its time is over."""
        if self.full_until and now > self.full_until:
            self.full_until = 0.0
            (self.feed / "filling").unlink()

    def kill_sidecar(self) -> None:
        """Kill the sidecar with SIGKILL, and start another."""
        assert self.sidecar is not None
        self.sidecar.kill()
        self.sidecar.wait()
        self.restarts += 1
        self.start_sidecar()

    def decreased_counters(self) -> list[str]:
        """Return the counters of the training that decreased in Prometheus.

        Counters of processes restart at 0 with the sidecar, and `increase()` handles the reset.
        """
        names = [
            name
            for name in self.query_prometheus("label/__name__/values")
            if re.fullmatch(r"training_(?!process_).+_(total|count|sum)", name)
        ]
        results = (
            (name, self.query_prometheus("query", query=f"resets({name}[1d]) > 0")["result"])
            for name in names
        )
        return [f"{name}{series['metric']}" for name, result in results for series in result]

    def query_prometheus(self, endpoint: str, **parameters: str) -> Any:
        """Return the data of a response of Prometheus' HTTP API."""
        address = (
            f"http://127.0.0.1:{self.prometheus_port}/api/v1/{endpoint}?{urllib.parse.urlencode(parameters)}"
        )
        with urllib.request.urlopen(address, timeout=60) as response:
            return json.load(response)["data"]

    def totals(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the steps and the samples by rank, from a single page."""
        steps: dict[str, float] = {}
        samples: dict[str, float] = {}
        totals = {"training_steps_total": steps, "training_samples_total": samples}
        for family in text_string_to_metric_families(self.page()):
            for sample in family.samples:
                if sample.name in totals and sample.labels.get("mode", "train") == "train":
                    totals[sample.name][sample.labels["rank"]] = sample.value
        return steps, samples

    def end(self) -> list[str]:
        """End the sidecar and Prometheus. Return a violation if the NVML child does not end."""
        child = self.child()
        for process in (self.sidecar, self.prometheus):
            if process is not None:
                process.terminate()
                process.wait(30)
        if child is not None:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
                child.wait(10)
        return (
            [f"the NVML child {child} has outlived the sidecar"]
            if child is not None and child.is_running()
            else []
        )


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: object, subject: str, seconds: float = 60.0) -> None:
    """Wait for a condition.

    Raises:
        SystemExit: The condition did not become true.
    """
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > end:
            raise SystemExit(f"waited {seconds:.0f} s for {subject}")
        time.sleep(0.2)


@contextlib.contextmanager
def directories() -> Iterator[tuple[Path, Path, bool]]:
    """Yield a directory on disk, the feed directory in shared memory, and True if the latter is a small file system of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as disk,
        tempfile.TemporaryDirectory(prefix="soak-", dir="/dev/shm") as memory,
    ):
        mount = ["mount", "-t", "tmpfs", "-o", f"size={FEED_BYTES},mode=700", "tmpfs", memory]
        is_mounted = subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode == 0
        try:
            yield Path(disk), Path(memory), is_mounted
        finally:
            if is_mounted:
                subprocess.run(["umount", "--lazy", memory], check=True)


def soak(seconds: float, seed: int) -> list[str]:
    """Run the node, and return the violated invariants."""
    generator = random.Random(seed)
    violations: list[str] = []
    with directories() as (disk, feed, may_fill):
        if not may_fill:
            print("the feed directory is never full, because this user may not mount a file system")
        node = Node(disk, feed)
        ranks = [Rank(number, disk / f"diary-{number}") for number in range(RANKS)]
        try:
            node.start_sidecar()
            if shutil.which("prometheus"):
                node.start_prometheus()
            started = time.monotonic()
            while (monotonic_now := time.monotonic()) < started + seconds:
                for rank in ranks:
                    rank.advance(monotonic_now, feed, generator, may_start=generator.random() < 0.5)
                if generator.random() < 0.3:
                    node.scrape()
                node.measure(monotonic_now)
                event = generator.random()
                if event < 0.2 / 60:
                    node.kill_sidecar()
                elif event < 0.6 / 60 and (child := node.child()):
                    child.kill()
                elif event < 0.8 / 60 and may_fill and not node.full_until:
                    node.fill(monotonic_now)
                node.make_room(monotonic_now)
                time.sleep(0.2)
            node.make_room(math.inf)
            for rank in ranks:
                if rank.stopped_until and rank.process:
                    rank.process.send_signal(signal.SIGCONT)
                rank.kill()
            violations += compare(node, ranks)
        finally:
            for rank in ranks:
                rank.kill()
            violations += node.end()
    return violations


def compare(node: Node, ranks: Sequence[Rank]) -> list[str]:
    """Compare the page with the diaries, and check Prometheus and the processes. Print the report, and return the violations."""
    violations = []
    steps_by_rank = {rank.number: rank.steps() for rank in ranks}

    def has_last_steps() -> bool:
        published_steps, _ = node.totals()
        return all(
            published_steps.get(str(rank.number), 0)
            >= steps_by_rank[rank.number] - possible_losses(rank, node.fillings)
            for rank in ranks
        )

    with contextlib.suppress(SystemExit):
        wait_until(has_last_steps, "the last steps", 15)
    with contextlib.suppress(SystemExit):
        wait_until(
            lambda: len(list(node.feed.glob("*.feed"))) <= RANKS,
            "the removal of the files of ended processes",
            30,
        )
    files = [path.name for path in node.feed.iterdir() if path.is_file()]
    published_steps, published_samples = node.totals()
    print("rank  attempts  killed  steps in its diary  on /metrics  samples")
    for rank in ranks:
        steps = published_steps.get(str(rank.number), 0.0)
        samples = published_samples.get(str(rank.number), 0.0)
        diary_steps = steps_by_rank[rank.number]
        print(
            f"{rank.number:4}  {rank.attempts:8}  {rank.kills:6}  {diary_steps:18}  {steps:11.0f}  {samples:7.0f}"
        )
        if not diary_steps - possible_losses(rank, node.fillings) <= steps <= diary_steps + rank.kills:
            violations.append(
                f"rank {rank.number}: {diary_steps} steps in the diary, {steps:.0f} on /metrics"
            )
        if abs(samples - SAMPLES * steps) > SAMPLES * rank.kills:
            violations.append(f"rank {rank.number}: {samples:.0f} samples for {steps:.0f} steps of {SAMPLES}")
    print(f"sidecar killed {node.restarts} times, the feed directory full {node.fillings} times; {node.scrapes} scrapes beside Prometheus, {node.failed_scrapes} failed, "
          f"the slowest {node.slowest_seconds * 1000:.0f} ms")  # fmt: skip
    print(f"{len(files)} files in the feed directory after {sum(rank.attempts for rank in ranks)} processes")
    if len(files) > 2 * RANKS + 8:
        violations.append(f"too many files in the feed directory: {sorted(files)}")
    if node.failed_scrapes:
        violations.append(f"{node.failed_scrapes} scrapes failed")
    if node.prometheus is not None:
        decreased = node.decreased_counters()
        print(f"counters that decreased in Prometheus: {len(decreased)}")
        violations += [f"the counter {name} decreased" for name in decreased]
    for lifetime in node.lifetimes:
        is_level, description = lifetime.level()
        if description:
            print(description)
        if not is_level:
            violations.append(f"memory, descriptors or threads grow: {description}")
    return violations


def possible_losses(rank: Rank, fillings: int) -> float:
    """Return the number of steps that may be missing, because of killed attempts and of a full feed directory."""
    return (rank.kills * UNWRITTEN_SECONDS + fillings * (UNWRITTEN_SECONDS + FULL_SECONDS)) * STEPS_A_SECOND


def main() -> int:
    """Run the soak test and return the exit status."""
    if sys.argv[1:2] == ["rank"]:
        be_rank(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
        return 0
    seconds = duration(os.environ.get("SOAK", "20m"))
    seed = int(os.environ.get("SEED") or random.randrange(10_000))
    print(f"{seconds:.0f} s, seed {seed}", flush=True)
    violations = soak(seconds, seed)
    print("\n".join(["violated invariants:", *violations]) if violations else "all invariants hold")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
