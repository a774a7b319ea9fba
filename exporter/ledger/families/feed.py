"""Families about the feed and the ledger themselves, and about who is which rank.

Runs in the sidecar, on the ledger's collecting thread; no I/O. Visible slots come in, families go out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from prometheus_client.core import Metric

from exporter.families import FamilySpec
from exporter.ledger.families.training import IDENTITY_LABELS
from exporter.ledger.visible import VisibleSlot

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
    "memory",
    "definition",
)
"""Every reason that this version knows; what a later one reports beside them is `other`."""
FOREMOST_DROP_REASONS = ("nan", "overflow", "write_failed")
"""Those that begin at 0: what can happen once, to a job that does nothing wrong, is then not missed by an `increase()`."""
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
"""Every reason that the feed reader of this version gives, and the ledger's own (`taken`)."""
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
    "Unix time of the last snapshot that the process wrote; grows old when it hangs or is stopped, absent when its"
    " totals no longer linger.",
    IDENTITY_LABELS,
    "seconds",
    "Snapshot.written",
)
DROPPED = FamilySpec(
    "training_feed_dropped_total",
    "counter",
    "What was recorded and lost: samples that were rejected (nan to backlog), drains that found a buffer full"
    " (overflow), snapshots that could not be written (write_failed), Stats that were left out of a snapshot for its"
    " size (too_large) or that the sidecar has no memory for (memory), readings of a Stat whose family is defined"
    " otherwise by another process or by the exporter (definition). nan, overflow and write_failed begin at 0, others"
    " are absent before the first; all are when the rank's totals are.",
    (*IDENTITY_LABELS, "reason"),
    source="StatReading.rejected and .overflows, Snapshot.dropped, admission",
)
REJECTED = FamilySpec(
    "training_stat_rejected_samples_total",
    "counter",
    "Samples of one Stat that were kept out of every aggregate, and drains that found its buffer full (reason:"
    " overflow), which lost an unknown number; absent while there are none, since it would be a series for every Stat"
    " and reason.",
    (*IDENTITY_LABELS, "stat", "reason"),
    source="StatReading.rejected, .overflows",
)
DRAIN_DELAY = FamilySpec(
    "training_feed_drain_delay_seconds",
    "gauge",
    "Longest time by which a window was closed after its end, since the snapshot before; absent when the process is"
    " gone or its feed is not refreshed.",
    IDENTITY_LABELS,
    "seconds",
    "Recording.drain_delay_seconds",
)
PASSIVE_STUCK = FamilySpec(
    "training_feed_passive_stuck",
    "gauge",
    "1 while a passive callback has not returned, so that no passive Stat is measured; absent when the process is gone"
    " or its feed is not refreshed.",
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
CONFLICTS = FamilySpec(
    "training_rank_conflicts",
    "gauge",
    "Living processes beyond the first that train as this rank of a run whose name was given: two jobs share the name."
    " Absent while there are none.",
    ("run", "rank"),
    source="processes of one rank that have lived together for 15 s",
)
FEED_FILES = FamilySpec(
    "exporter_feed_files",
    "gauge",
    "Feed files in the feed directory, readable or not; absent while the directory cannot be read.",
)
FEED_REFUSED = FamilySpec(
    "exporter_feed_refused_total",
    "counter",
    "Feed files that were refused, each once for as long as it is refused for the same reason; other files are not"
    " affected.",
    ("reason",),
)
FEED_OWNER = FamilySpec(
    "exporter_feed_owner",
    "gauge",
    "1 when this sidecar owns the feed directory: it alone removes files of the dead and keeps the ledger; 0 when"
    " another does and this one only looks on.",
)
STATE_ERRORS = FamilySpec(
    "exporter_ledger_state_errors_total",
    "counter",
    "Attempts to read, write or lock a state file that failed; the totals of its rank are absent until one succeeds.",
)
STATE_DAMAGED = FamilySpec(
    "exporter_ledger_state_damaged_total",
    "counter",
    "State files that were damaged or of another version and were moved aside; totals go on from what the sidecar and"
    " the feed still have.",
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

OF_PROCESSES = (
    ALIVE,
    LAST_UPDATE,
    DROPPED,
    REJECTED,
    DRAIN_DELAY,
    PASSIVE_STUCK,
    RANK_INFO,
    CONFLICTS,
)
SPECS = (
    *OF_PROCESSES,
    RANK_LABELS_INFO,
    FEED_FILES,
    FEED_REFUSED,
    FEED_OWNER,
    STATE_ERRORS,
    STATE_DAMAGED,
    STATE_WITHHELD,
    STATE_LAST_WRITE,
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
        errors: Failures so far.
        damaged: Damaged state files so far.
        withheld: Ranks without totals now.
        last_write: Unix time, None before the first.
    """

    files: int
    refused: Counter[str]
    owner: bool
    errors: int
    damaged: int
    withheld: int
    last_write: float | None


def self_families(counts: SelfCounts) -> list[Metric]:
    """Fill what the sidecar says of its own reading and keeping."""
    singles: list[tuple[FamilySpec, float | None]] = [
        (FEED_FILES, counts.files),
        (FEED_OWNER, int(counts.owner)),
        (STATE_ERRORS, counts.errors),
        (STATE_DAMAGED, counts.damaged),
        (STATE_WITHHELD, counts.withheld),
        (STATE_LAST_WRITE, counts.last_write),
    ]
    by_reason = dict.fromkeys(REFUSAL_REASONS, 0) | counts.refused
    return [
        *(spec.family({(): value}) for spec, value in singles if value is not None),
        FEED_REFUSED.family({(reason,): count for reason, count in by_reason.items()}),
    ]


def process_families(
    slots: Sequence[VisibleSlot],
    conflicts: Mapping[tuple[str, ...], float],
    gpu_of: Callable[[str], tuple[str, str] | None] = lambda _: None,
) -> list[Metric]:
    """Fill the families about the processes that write the feed.

    Args:
        slots: All that may be shown.
        conflicts: Processes too many, by run and rank.
        gpu_of: Gives index and UUID of the GPU that a process holds, by process id.
    """
    samples: dict[FamilySpec, dict[tuple[str, ...], float]] = {spec: {} for spec in OF_PROCESSES}
    samples[CONFLICTS].update(conflicts)
    for each in slots:
        process, labels = each.process, each.labels
        who, gpu = process.identity, gpu_of(process.identity.id) or ("", "")
        samples[ALIVE][labels] = int(process.living)
        samples[LAST_UPDATE][labels] = process.written
        local_rank = "" if who.local_rank is None else str(who.local_rank)
        # The role that is part of the identity is empty for a rank; here it is told in any case.
        told = (*labels[:3], who.role, local_rank, who.node, who.version, *gpu)
        samples[RANK_INFO][told] = 1
        if each.fresh and process.snapshot is not None:
            recording = process.snapshot.recording
            samples[DRAIN_DELAY][labels] = recording.drain_delay_seconds
            samples[PASSIVE_STUCK][labels] = int(recording.passive_stuck_since is not None)
        if each.counted:
            _count_losses(each, samples[DROPPED], samples[REJECTED])
    families = [spec.family(found) for spec, found in samples.items() if found]
    return [*families, *_descriptions(slots)]


def _count_losses(
    visible: VisibleSlot, dropped: dict[tuple[str, ...], float], rejected: dict[tuple[str, ...], float]
) -> None:
    """Add up what a slot has lost, by reason and by Stat."""
    by_stat: Counter[tuple[str, str]] = Counter()
    total: Counter[str] = Counter()
    for part in visible.slot.parts():
        for reading in part.series.values():
            if reading.overflows:
                by_stat[reading.definition.name, "overflow"] += reading.overflows
            for reason, count in reading.rejected.items():
                by_stat[reading.definition.name, _known(reason)] += count
        for reason, count in part.dropped.items():
            total[_known(reason)] += count
        total["definition"] += part.refused
    for (_, reason), count in by_stat.items():
        total[reason] += count
    of_slot: tuple[str, ...] = visible.labels
    for reason in (*DROP_REASONS, "other"):
        if total[reason] or reason in FOREMOST_DROP_REASONS:
            key = *of_slot, reason
            dropped[key] = total[reason]
    rejected.update({(*visible.labels, *pair): count for pair, count in by_stat.items() if count})


def _known(reason: str) -> str:
    return reason if reason in DROP_REASONS else "other"


def _descriptions(slots: Sequence[VisibleSlot]) -> list[Metric]:
    """The processes' own labels; the family has the union of their names."""
    described = [(each, dict(each.process.identity.labels)) for each in slots if each.process.identity.labels]
    names = sorted({name for _, labels in described for name in labels})[:_MOST_DESCRIPTIVE_LABELS]
    if not names:
        return []
    spec = replace(RANK_LABELS_INFO, labels=IDENTITY_LABELS + tuple(f"label_{name}" for name in names))
    return [
        spec.family(
            {
                (*each.labels, *[labels.get(name, "")[:_LONGEST_DESCRIPTION] for name in names]): 1
                for each, labels in described
            }
        )
    ]
