"""Families about the feed and the ledger themselves, each beside the code that fills it.

Runs in the sidecar, on the ledger's collecting thread; no I/O. Views of seats come in, families go out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from exporter.collectors.family import Family, FamilySpec, Sample
from exporter.ledger.identity_labels import IDENTITY_LABELS
from exporter.ledger.seats import Seat
from exporter.ledger.views import SeatView
from exporter.recording.values import StatReading

DROP_REASONS = (
    "nan",
    "infinite",
    "not_a_number",
    "out_of_range",
    "capture",
    "device",
    "shape",
    "backlog",
    "overflow",
    "write_failed",
    "too_large",
    "definition",
)
"""Every reason that this version knows; what a later one reports beside them is `other`."""
FOREMOST_DROP_REASONS = ("nan", "overflow", "write_failed")
"""Those that begin at 0: what can happen once, to a job that does nothing wrong, is then not missed by an
`increase()`. The others come from how a Stat is used, and go on as long as it is; eight ranks would have 72
series of zeros for them."""
REFUSAL_REASONS = (
    "magic",
    "version",
    "truncated",
    "checksum",
    "content",
    "name",
    "too_many",
    "too_large",
    "owner",
    "symlink",
    "links",
    "not_regular",
    "unreadable",
    "lock",
    "taken",
)
"""Every reason that the feed reader of this version gives, and the ledger's own (see `JobCollector._taken`)."""
_KNOWN = frozenset(DROP_REASONS)
_MOST_DESCRIPTIVE_LABELS = 32
_LONGEST_DESCRIPTION = 1024

ALIVE = FamilySpec(
    "training_feed_alive",
    "gauge",
    "1 while the process lives, 0 while its totals linger after its end; absent then.",
    IDENTITY_LABELS,
    source="record lock of the process on its lock file",
)
LAST_UPDATE = FamilySpec(
    "training_feed_last_update_timestamp_seconds",
    "gauge",
    "Unix time of the last snapshot that the process wrote; grows old when it hangs or is stopped, absent when"
    " its totals no longer linger.",
    IDENTITY_LABELS,
    "seconds",
    "Snapshot.written",
)
MESSAGES = FamilySpec(
    "training_feed_messages_total",
    "counter",
    "Snapshots written, over all processes that were this rank; absent when they no longer linger, or while"
    " the ledger's state cannot be written.",
    IDENTITY_LABELS,
    source="Snapshot.sequence",
)
DROPPED = FamilySpec(
    "training_feed_dropped_total",
    "counter",
    "What was recorded and lost: samples that were rejected (nan to backlog), drains that found a buffer full"
    " (overflow), snapshots that could not be written (write_failed), Stats that were left out of a snapshot"
    " for its size (too_large), readings of a Stat whose family is defined otherwise by another process or by the exporter (definition)."
    " nan, overflow and write_failed begin at 0, others are absent before the first; all are when the rank's"
    " totals are.",
    (*IDENTITY_LABELS, "reason"),
    source="StatReading.rejected and .overflows, Snapshot.dropped, admission",
)
REJECTED = FamilySpec(
    "training_stat_rejected_samples_total",
    "counter",
    "Samples of one Stat that were kept out of every aggregate; absent while there are none, since it would be"
    " a series for every Stat and reason.",
    (*IDENTITY_LABELS, "stat", "reason"),
    source="StatReading.rejected",
)
OVERFLOWS = FamilySpec(
    "training_stat_overflows_total",
    "counter",
    "Drains that found the buffer of one Stat full, so that an unknown number of samples was lost; absent while"
    " there are none, since it would be a series for every Stat.",
    (*IDENTITY_LABELS, "stat"),
    source="StatReading.overflows",
)
DRAIN_DELAY = FamilySpec(
    "training_feed_drain_delay_seconds",
    "gauge",
    "Longest time by which a window was closed after its end, since the snapshot before; absent when the"
    " process is gone or its feed is not refreshed.",
    IDENTITY_LABELS,
    "seconds",
    "Recording.drain_delay_seconds",
)
PASSIVE_STUCK = FamilySpec(
    "training_feed_passive_stuck",
    "gauge",
    "1 while a passive callback has not returned, so that no passive Stat is measured; absent when the process"
    " is gone or its feed is not refreshed.",
    IDENTITY_LABELS,
    source="Recording.passive_stuck_since",
)
RANK_INFO = FamilySpec(
    "training_rank_info",
    "info",
    "The process that is this rank now, or was last, and the GPU that it holds (gpu and uuid are absent where it holds"
    " none or several, or nobody can tell); absent when its totals no longer linger.",
    (*IDENTITY_LABELS, "local_rank", "node", "version", "gpu", "uuid"),
    source="ProcessIdentity, processes that NVML lists",
)
RANK_LABELS_INFO = FamilySpec(
    "training_rank_labels_info",
    "info",
    "What exporter.configure(labels=…) said of the process, each as label_<name>; absent without such labels.",
    IDENTITY_LABELS,
    source="ProcessIdentity.labels",
)

FEED_FILES = FamilySpec(
    "exporter_feed_files",
    "gauge",
    "Feed files in the feed directory, readable or not; absent while the directory cannot be read.",
)
FEED_REFUSED = FamilySpec(
    "exporter_feed_refused_total",
    "counter",
    "Feed files that were refused, each once for as long as it is refused for the same reason; other files are"
    " not affected.",
    ("reason",),
)
FEED_OWNER = FamilySpec(
    "exporter_feed_owner",
    "gauge",
    "1 when this sidecar owns the feed directory: it alone removes files of the dead and keeps the ledger; 0"
    " when another does and this one only looks on.",
)
STATE_WRITES = FamilySpec(
    "exporter_ledger_state_writes_total", "counter", "State files written, each holding the totals of a rank."
)
STATE_ERRORS = FamilySpec(
    "exporter_ledger_state_errors_total",
    "counter",
    "Attempts to read, write or lock a state file that failed; the totals of its rank are absent until one"
    " succeeds.",
)
STATE_DAMAGED = FamilySpec(
    "exporter_ledger_state_damaged_total",
    "counter",
    "State files that were damaged or of a later version and were moved aside; totals of their ranks began"
    " anew from what the feed still had.",
)
STATE_WITHHELD = FamilySpec(
    "exporter_ledger_withheld_ranks",
    "gauge",
    "Ranks whose totals are absent, since their state cannot be written or is kept by another sidecar.",
)
STATE_LAST_WRITE = FamilySpec(
    "exporter_ledger_state_last_write_timestamp_seconds",
    "gauge",
    "Unix time at which a state file was last written; absent before the first.",
    unit="seconds",
)
STATE_BYTES = FamilySpec(
    "exporter_ledger_state_bytes",
    "gauge",
    "Size of the state files of all ranks that this sidecar keeps now.",
    unit="bytes",
)

SPECS = (
    ALIVE,
    LAST_UPDATE,
    MESSAGES,
    DROPPED,
    REJECTED,
    OVERFLOWS,
    DRAIN_DELAY,
    PASSIVE_STUCK,
    RANK_INFO,
    RANK_LABELS_INFO,
    FEED_FILES,
    FEED_REFUSED,
    FEED_OWNER,
    STATE_WRITES,
    STATE_ERRORS,
    STATE_DAMAGED,
    STATE_WITHHELD,
    STATE_LAST_WRITE,
    STATE_BYTES,
)


def sample_names(specs: Iterable[FamilySpec]) -> frozenset[str]:
    """Every name that families take, as they collide in an exposition; no Stat may have one of them."""
    names: set[str] = set()
    for spec in specs:
        base = spec.name.removesuffix("_total").removesuffix("_info")
        names |= {spec.name, base, f"{base}_created"}
    return frozenset(names)


class SelfCounts(NamedTuple):
    """The sidecar's own numbers of one pass.

    Attributes:
        files: Feed files seen.
        refused: Refusals so far, by reason.
        owner: Whether the directory is ours.
        writes: State files written so far.
        errors: Failures so far.
        damaged: Damaged state files so far.
        withheld: Ranks without totals now.
        last_write: Unix time, None before the first.
        state_bytes: Size of the state now.
    """

    files: int
    refused: Counter[str]
    owner: bool
    writes: int
    errors: int
    damaged: int
    withheld: int
    last_write: float | None
    state_bytes: int


def self_families(counts: SelfCounts) -> list[Family]:
    """Fill what the sidecar says of its own reading and keeping."""
    singles: list[tuple[FamilySpec, float | None]] = [
        (FEED_FILES, counts.files),
        (FEED_OWNER, int(counts.owner)),
        (STATE_WRITES, counts.writes),
        (STATE_ERRORS, counts.errors),
        (STATE_DAMAGED, counts.damaged),
        (STATE_WITHHELD, counts.withheld),
        (STATE_LAST_WRITE, counts.last_write),
        (STATE_BYTES, counts.state_bytes),
    ]
    families = [Family(spec, (Sample((), value),)) for spec, value in singles if value is not None]
    by_reason = dict.fromkeys(REFUSAL_REASONS, 0) | counts.refused
    refused = tuple(Sample((reason,), count) for reason, count in by_reason.items())
    return [*families, Family(FEED_REFUSED, refused)]


class FeedBlock:
    """Makes the families about the processes that write the feed."""

    def __init__(self) -> None:
        self._settled: dict[Seat, tuple[object, _Lost]] = {}

    def families(
        self, views: Sequence[SeatView], gpu_of: Callable[[str], tuple[str, str] | None] = lambda _: None
    ) -> list[Family]:
        """Fill the families for one pass.

        Args:
            views: Of all seats.
            gpu_of: Gives index and UUID of the GPU that a process holds, by process id.
        """
        samples: dict[FamilySpec, list[Sample]] = {spec: [] for spec in SPECS[: SPECS.index(FEED_FILES)]}
        kept: dict[Seat, tuple[object, _Lost]] = {}
        for view in views:
            self._process(view, samples, gpu_of(view.record.process.id) or ("", ""))
            if view.counted:
                lost, kept[view.seat] = self._lost(view.seat)
                _count(view, lost, samples)
        self._settled = kept
        families = [Family(spec, tuple(found)) for spec, found in samples.items() if found]
        return [*families, *_descriptions(views)]

    def _process(self, view: SeatView, samples: dict[FamilySpec, list[Sample]], gpu: tuple[str, str]) -> None:
        record, labels = view.record, view.labels
        process = record.process
        samples[ALIVE].append(Sample(labels, int(record.living)))
        samples[LAST_UPDATE].append(Sample(labels, record.written))
        local_rank = "" if process.local_rank is None else str(process.local_rank)
        # The role that is part of the identity is empty for a rank; here it is told in any case.
        who = (*labels[:3], process.role, local_rank, process.node, process.version, *gpu)
        samples[RANK_INFO].append(Sample(who, 1))
        if view.fresh and record.snapshot is not None:
            recording = record.snapshot.recording
            samples[DRAIN_DELAY].append(Sample(labels, recording.drain_delay_seconds))
            stuck = recording.passive_stuck_since is not None
            samples[PASSIVE_STUCK].append(Sample(labels, int(stuck)))

    def _lost(self, seat: Seat) -> tuple[_Lost, tuple[object, _Lost]]:
        """What one seat lost; the share of the dead is kept from pass to pass."""
        settled = seat.settled()
        before = self._settled.get(seat)
        if before is None or before[0] is not settled:
            before = (settled, _Lost())
            before[1].add(settled.values())
        lost = before[1].copy()
        for record in seat.unsettled():
            lost.add(record.readings.values())
        for part in seat.parts():
            lost.total.update(part.dropped)
            lost.total["definition"] += part.refused
        return lost, before


class _Lost:
    """Losses by reason, and by Stat."""

    __slots__ = ("overflows", "rejected", "total")

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self.rejected: Counter[tuple[str, str]] = Counter()
        self.overflows: Counter[str] = Counter()

    def copy(self) -> _Lost:
        lost = _Lost()
        lost.total, lost.rejected, lost.overflows = (
            self.total.copy(),
            self.rejected.copy(),
            self.overflows.copy(),
        )
        return lost

    def add(self, readings: Iterable[StatReading]) -> None:
        for reading in readings:
            if reading.overflows:
                self.overflows[reading.definition.name] += reading.overflows
                self.total["overflow"] += reading.overflows
            if reading.rejected:
                for reason, count in reading.rejected.items():
                    known = reason if reason in _KNOWN else "other"
                    self.rejected[reading.definition.name, known] += count
                    self.total[known] += count


def _count(view: SeatView, lost: _Lost, samples: dict[FamilySpec, list[Sample]]) -> None:
    labels = view.labels
    samples[MESSAGES].append(Sample(labels, sum(part.messages for part in view.seat.parts())))
    total = lost.total
    for reason in DROP_REASONS:
        count = total.pop(reason, 0)
        if count or reason in FOREMOST_DROP_REASONS:
            samples[DROPPED].append(Sample((*labels, reason), count))
    if other := sum(total.values()):
        samples[DROPPED].append(Sample((*labels, "other"), other))
    for (stat, reason), count in lost.rejected.items():
        if count:
            samples[REJECTED].append(Sample((*labels, stat, reason), count))
    samples[OVERFLOWS].extend(Sample((*labels, stat), count) for stat, count in lost.overflows.items())


def _descriptions(views: Sequence[SeatView]) -> list[Family]:
    """The processes' own labels; the family has the union of their names."""
    described = [(view, view.record.process.labels) for view in views if view.record.process.labels]
    names = sorted({name for _, labels in described for name, _ in labels})[:_MOST_DESCRIPTIVE_LABELS]
    if not names:
        return []
    spec = replace(RANK_LABELS_INFO, labels=IDENTITY_LABELS + tuple(f"label_{name}" for name in names))
    samples = []
    for view, labels in described:
        own = dict(labels)
        values = tuple(own.get(name, "")[:_LONGEST_DESCRIPTION] for name in names)
        samples.append(Sample(view.labels + values, 1))
    return [Family(spec, tuple(samples))]
