"""Short constructors of snapshots, and an in-memory feed directory, for the tests of the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from prometheus_client.core import Metric

from exporter.families import visible_name
from exporter.feed.ownership import DirectoryOwnership
from exporter.feed.reader import FeedEntry, FeedReader, Scan
from exporter.feed.snapshot import ProcessIdentity, Snapshot
from exporter.ledger.collector import JobCollector
from exporter.ledger.state.store import StateStore
from exporter.recording.values import Aggregation, Recording, StatDefinition, StatReading, WindowReading

START = 1_700_000_000.0
"""Start of the simulated processes, Unix time."""
_process_numbers = count(1 << 64)  # above the ids that tests write themselves, such as rank 1's f"{1:032x}"


def make_process(*, rank: int | None = 0, **fields: object) -> ProcessIdentity:
    default = ProcessIdentity(
        id=f"{next(_process_numbers):032x}",
        pid=7,
        started=START,
        run="r",
        rank=rank,
        local_rank=rank,
        role="trainer",
        node="node-a",
        labels=(),
        version="0.1.0",
    )
    return default.replace(**fields)


def make_definition(
    name: str = "loss",
    *aggregations: Aggregation,
    unit: str | None = None,
    buckets: tuple[float, ...] = (),
    labels: tuple[tuple[str, str], ...] = (),
    window_seconds: float | None = 60.0,
    help: str = "",
) -> StatDefinition:
    all_aggregations = {
        *(aggregations or (Aggregation.MEAN,)),
        *((Aggregation.HISTOGRAM,) if buckets else ()),
    }
    window_samples = None if window_seconds else 10
    return StatDefinition(
        name, frozenset(all_aggregations), window_seconds, window_samples, unit, help, labels, buckets
    )


def make_reading(
    definition: StatDefinition,
    samples: Sequence[float],
    *,
    window: WindowReading | None = None,
    sampled_at: float = START,
    rejected: Mapping[str, int] | None = None,
    overflows: int = 0,
) -> StatReading:
    """Return the reading of a Stat to which these samples were added."""
    return StatReading(
        definition,
        count=len(samples),
        sum=None if any(sample < 0 for sample in samples) else float(sum(samples)),
        bucket_counts=tuple(sum(sample <= bound for sample in samples) for bound in definition.buckets),
        window=window,
        last_sample=sampled_at if samples else None,
        rejected=rejected or {},
        overflows=overflows,
    )


def make_snapshot(
    process: ProcessIdentity,
    *stats: StatReading,
    sequence: int = 1,
    written: float = START,
    dropped: Mapping[str, int] | None = None,
    final: bool = False,
) -> Snapshot:
    return Snapshot(process, sequence, written, 1.0, Recording(stats, final), dropped or {})


class HeldOwnership(DirectoryOwnership):
    """Ownership of an in-memory feed directory."""

    def __init__(self) -> None:
        super().__init__(Path("memory"))

    def acquire(self) -> bool:
        return True


@dataclass
class MemoryFeed(FeedReader):
    """In-memory feed directory in place of `FeedReader`."""

    files: dict[str, FeedEntry] = field(default_factory=dict)
    refused_files: tuple[tuple[str, str], ...] = ()
    is_removable: bool = True
    ownership: DirectoryOwnership = field(default_factory=HeldOwnership)

    def publish(
        self, snapshot: Snapshot, *, alive: bool = True, age_seconds: float = 0.5, pid: int | None = None
    ) -> None:
        self.files[snapshot.process.id] = FeedEntry(snapshot, alive, age_seconds, pid)

    def kill(self, process: ProcessIdentity) -> None:
        self.files[process.id] = replace(self.files[process.id], is_alive=False)

    def scan(self) -> Scan:
        return Scan(tuple(self.files.values()), self.refused_files)

    def remove(self, process_id: str) -> bool:
        if not self.is_removable:
            return False
        assert not self.files[process_id].is_alive
        del self.files[process_id]
        return True


@dataclass
class Clock:
    """Wall clock and monotonic clock that advance only on request."""

    wall: float = START + 1.0
    monotonic: float = 100.0

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


class SimulatedSidecar:
    """Ledger of a feed. `restart` simulates SIGKILL and a new start."""

    def __init__(self, directory: Path, feed: MemoryFeed | None = None, clock: Clock | None = None) -> None:
        self.directory = directory
        self.feed = feed or MemoryFeed()
        self.clock = clock or Clock()
        self.start()

    def start(self) -> None:
        self.state = StateStore(self.directory, sidecar="here", clock=lambda: self.clock.wall)
        self.collector = JobCollector(
            self.feed, self.state, clock=lambda: self.clock.wall, monotonic=lambda: self.clock.monotonic
        )

    def restart(self) -> None:
        self.state.close()
        self.start()

    def replace_state_by_file(self) -> None:
        (self.directory / "ledger").rename(self.directory / "away")
        (self.directory / "ledger").write_text("a file instead of the directory")

    def restore_state(self) -> None:
        (self.directory / "ledger").unlink()
        (self.directory / "away").rename(self.directory / "ledger")

    def collect(self) -> Page:
        return Page(self.collector.collect())

    def collect_after(self, seconds: float) -> Page:
        self.clock.advance(seconds)
        return self.collect()

    def record_loss(
        self,
        process: ProcessIdentity,
        samples: int,
        *,
        sequence: int = 1,
        alive: bool = True,
        value: float = 2.0,
    ) -> None:
        """Write a snapshot of a process with a number of samples in its only Stat, `loss`."""
        reading = make_reading(make_definition(), [value] * samples)
        snapshot = make_snapshot(process, reading, sequence=sequence, written=self.clock.wall)
        self.feed.publish(snapshot, alive=alive)


class Page:
    """Published families, selected by name and labels. Histograms and summaries are selected by sample name."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.families = {visible_name(metric): metric for metric in metrics}
        self._values: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
        for sample in (sample for metric in metrics for sample in metric.samples):
            series = self._values.setdefault(sample.name, {})
            assert frozenset(sample.labels.items()) not in series
            series[frozenset(sample.labels.items())] = sample.value
        assert len(self.families) == len(metrics)

    def get(self, name: str, /, **labels: str) -> float | None:
        """Return the value of the series with exactly these labels (further labels empty), or None if absent."""
        return self._values.get(name, {}).get(frozenset(labels.items()))

    def all(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Return the values of all series of a name, by sorted labels."""
        return {tuple(sorted(labels)): value for labels, value in self._values.get(name, {}).items()}

    def count(self, name: str, /, **labels: str) -> float | None:
        return self.get(f"{name}_count", **labels)
