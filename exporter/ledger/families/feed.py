"""Families of ranks, feeds, lost samples and events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from exporter.families import Collected, FamilySpec
from exporter.ledger.families import IDENTITY_LABELS
from exporter.ledger.totals import VisibleSlot, sum_events
from exporter.recording.values import NO_EVENTS

ZERO_DROP_REASONS = ("nan", "overflow", "write_failed")
"""Drop reasons exported from 0, so that `increase()` counts the first drop."""
REFUSAL_REASONS = (
    *("magic", "version", "truncated", "checksum", "content", "name", "too_many", "too_large", "memory"),
    *("owner", "symlink", "links", "not_regular", "unreadable", "lock", "taken"),
)
"""Reasons of the feed reader, and of the ledger (`taken`)."""

ALIVE = FamilySpec(
    name="training_feed_alive",
    type="gauge",
    labels=IDENTITY_LABELS,
    help="1 for a running process, 0 after the exit.",
    absent="*expired*",
    source="record lock of the process on its lock file",
    details=(
        "A process that has closed the feed at exit counts as exited, also while torch still releases devices.",
    ),
)
LAST_UPDATE = FamilySpec(
    name="training_feed_last_update_timestamp_seconds",
    type="gauge",
    unit="seconds",
    labels=IDENTITY_LABELS,
    help=(
        "Unix time of the latest snapshot of the process. Advances also while the training hangs, but not while"
        " the process is stopped."
    ),
    absent="*expired*",
    source="time of the snapshot in the feed",
)
DROPPED = FamilySpec(
    name="training_feed_dropped_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "reason"),
    help="Lost data by reason.",
    absent="*expired* or *not saved*",
    source="feed of the process, ledger",
    details=(
        "The reasons of `training_stat_rejected_samples_total`.",
        "`overflow`: a buffer was full when it was read. Counts reads.",
        "`write_failed`: a snapshot could not be written.",
        "`too_large`: a Stat was omitted, because the snapshot exceeds the size limit.",
        "`memory`: a Stat was omitted, because of the sidecar's memory limit.",
        "`definition`: a reading of a Stat whose family belongs to a different definition.",
        "`nan`, `overflow` and `write_failed` start at 0.",
    ),
)
REJECTED = FamilySpec(
    name="training_stat_rejected_samples_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "stat", "reason"),
    help=(
        "Rejected samples of a Stat by reason. The samples are part of training_feed_dropped_total: do not"
        " add the two."
    ),
    absent="before the first rejected sample, *expired*, or *not saved*",
    source="feed of the process",
    details=(
        "`nan`, `infinite`, `not_a_number`: not a finite number.",
        "`out_of_range`: too large for a float.",
        "`error`: a passive callback or the copy of a tensor raised.",
        "`shape`: a tensor without exactly one element.",
        "`device`: a tensor neither on the CPU nor on CUDA.",
        "`placement`: a shard of a tensor.",
        "`capture`: a tensor during graph capture.",
        "`backlog`: too many copies of tensors.",
        "`thread_ended`: the thread or the process ended before the copy was read.",
        "`overflow`: the buffer was full when it was read. Counts reads, not samples.",
    ),
)
CONFLICTS = FamilySpec(
    name="training_rank_conflicts",
    type="gauge",
    labels=("run", "rank"),
    help="Number of extra running processes that claim the same rank of a run with a configured name.",
    absent="without a conflict",
    source="processes of a rank that overlap for 15 s",
    details=("The usual cause is one run name for two jobs.",),
)
EVENTS = FamilySpec(
    name="training_events_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "type", "severity"),
    help="Logged events of all processes of the rank, by type and severity.",
    absent="before the first event, *expired*, or *not saved*",
    source="exporter.log, exporter.monitor.log_event and the bridges",
    details=("After the first 100 types of a process, further types are counted as `other`.",),
)
EVENT_LAST = FamilySpec(
    name="training_event_last_timestamp_seconds",
    type="gauge",
    unit="seconds",
    labels=(*IDENTITY_LABELS, "type", "severity"),
    help="Unix time of the latest event by type and severity.",
    absent="before the first event or *expired*",
    source="Event.timestamp",
)
EVENTS_SUPPRESSED = FamilySpec(
    name="training_events_suppressed_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "type", "reason"),
    help="Events that were counted but not completely passed to the handlers, by type and reason.",
    absent="before the first event with the reason, *expired*, or *not saved*",
    source="exporter.events.limit",
    details=(
        "`sampled`: discarded by sampling.",
        "`rate_limit`: discarded by the rate limit.",
        "`payload`: passed without the payload, because building the payload raised.",
    ),
)
HANDLER_EVENTS = FamilySpec(
    name="training_event_handler_events_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "handler"),
    help="Events that a handler accepted.",
    absent="if no handler was registered, *expired*, or *not saved*",
    source="exporter.events.register",
)
HANDLER_DROPPED = FamilySpec(
    name="training_event_handler_dropped_total",
    type="counter",
    labels=(*IDENTITY_LABELS, "handler", "reason"),
    help="Events that a handler did not receive, by reason.",
    absent="if no handler was registered, *expired*, or *not saved*",
    source="exporter.events.register",
    details=(
        "`queue_full`: the queue of the handler was full.",
        "`error`: the handler raised, or its write failed.",
        "`unregistered`: the handler was unregistered.",
        "`exit`: the process exited.",
        "`queue_full` and `error` start at 0.",
    ),
)
RANK_INFO = FamilySpec(
    name="training_rank_info",
    type="info",
    labels=(*IDENTITY_LABELS, "local_rank", "node", "version", "gpu", "uuid"),
    help=(
        "Current or last process of the rank, with its GPU and with the labels of"
        " exporter.configure(labels=...), each as label_<name>."
    ),
    absent="*expired*",
    source="ProcessIdentity, processes listed by NVML",
    details=(
        ("The labels `gpu` and `uuid` are empty if the process uses no GPU, several GPUs or an unknown GPU."),
    ),
)
REFUSED = FamilySpec(
    name="exporter_feed_refused_total",
    type="counter",
    labels=("reason",),
    help="Feed files that were refused, by reason. `training-exporter check` explains the reason.",
    source="feed directory",
    details=(
        f"Reasons: {', '.join(f'`{reason}`' for reason in REFUSAL_REASONS)}.",
        "A file is counted once for as long as it is refused for the same reason.",
    ),
)
OWNER = FamilySpec(
    name="exporter_feed_owner",
    type="gauge",
    help=(
        "1 if this sidecar owns the feed directory, 0 if a different sidecar owns it and this sidecar only"
        " reads."
    ),
    source="owner.lock",
    details=("The owner removes the files of exited processes and saves the totals.",),
)
STATE_ERRORS = FamilySpec(
    name="exporter_ledger_state_errors_total",
    type="counter",
    labels=("reason",),
    help="Errors of state files, by reason.",
    source="state directory",
    details=(
        (
            "`failed`: a file could not be read, written or locked. The totals of the file are absent until a"
            " retry succeeds."
        ),
        (
            "`damaged`: a file was damaged, too large or of a different version, and was renamed. Its totals"
            " continue from memory and the feed; totals that only this file contains restart at 0."
        ),
    ),
)
FOREIGN = FamilySpec(
    name="exporter_feed_foreign_entry",
    type="gauge",
    labels=("entry",),
    help=(
        "1 for each entry of another user with a name of the exporter in a shared feed or state directory."
        " This sidecar ignores the entry."
    ),
    absent="without such an entry",
    source="feed directory, state directory",
    details=(
        "Names: `owner.lock`, `overrides.json`, `stacks.request`, `runs`, `ledger`.",
        "In place of the entry, this sidecar uses a name with its user id.",
    ),
)
SUPPRESSED = FamilySpec(
    name="exporter_ledger_suppressed_ranks",
    type="gauge",
    help="Ranks with suppressed totals, because the state cannot be written or is locked by a different sidecar.",
    source="state directory",
)
SPECS = (
    *(ALIVE, LAST_UPDATE, DROPPED, REJECTED, CONFLICTS),
    *(EVENTS, EVENT_LAST, EVENTS_SUPPRESSED, HANDLER_EVENTS, HANDLER_DROPPED),
    *(RANK_INFO, REFUSED, OWNER, STATE_ERRORS, FOREIGN, SUPPRESSED),
)


def add_processes(
    collected: Collected, slots: Sequence[VisibleSlot], gpu_of: Callable[[str], tuple[str, str] | None]
) -> None:
    """Add the families of the processes that write feeds. *gpu_of* returns the index and the UUID of a process's GPU."""
    names = sorted({name for slot in slots for name, _ in slot.process.identity.labels})
    info = replace(RANK_INFO, labels=RANK_INFO.labels + tuple([f"label_{name}" for name in names]))
    for slot in slots:
        process, identity = slot.process, slot.process.identity
        collected.add(ALIVE, int(process.is_alive), *slot.labels)
        collected.add(LAST_UPDATE, process.written_at, *slot.labels)
        local_rank = "" if identity.local_rank is None else str(identity.local_rank)
        # Unlike in other families, the label `role` is also set for a process with a rank.
        run, rank, worker, _ = slot.labels
        rank_labels = (run, rank, worker, identity.role, local_rank, identity.node, identity.version)
        job_labels = dict(identity.labels)
        job_label_values = [job_labels.get(name, "") for name in names]
        collected.add(info, 1, *rank_labels, *(gpu_of(identity.id) or ("", "")), *job_label_values)
        _add_events(collected, slot)
        if slot.is_saved:
            _add_losses(collected, slot)


def _add_events(collected: Collected, slot: VisibleSlot) -> None:
    """Add the events of a slot, summed over its processes."""
    total = NO_EVENTS
    for part in slot.worker_slot.parts():
        total = sum_events(total, part.events)
    for type_and_severity, timestamp in total.last.items():
        collected.add(EVENT_LAST, timestamp, *slot.labels, *type_and_severity)
    if not slot.is_saved:
        return
    for type_and_severity, count in total.counts.items():
        collected.add(EVENTS, count, *slot.labels, *type_and_severity)
    for type_and_reason, count in total.suppressed.items():
        collected.add(EVENTS_SUPPRESSED, count, *slot.labels, *type_and_reason)
    zero_counts = {(handler, reason): 0 for handler in total.delivered for reason in ("queue_full", "error")}
    for handler, count in total.delivered.items():
        collected.add(HANDLER_EVENTS, count, *slot.labels, handler)
    for handler_and_reason, count in {**zero_counts, **total.dropped}.items():
        collected.add(HANDLER_DROPPED, count, *slot.labels, *handler_and_reason)


def _add_losses(collected: Collected, slot: VisibleSlot) -> None:
    """Add the lost data of a slot, by reason and by Stat."""
    counts_by_stat: Counter[tuple[str, str]] = Counter()  # by Stat and reason
    counts_by_reason: Counter[str] = Counter(dict.fromkeys(ZERO_DROP_REASONS, 0))
    for part in slot.worker_slot.parts():
        for reading in part.series.values():
            if reading.overflows or reading.rejected:
                for reason, count in (("overflow", reading.overflows), *reading.rejected.items()):
                    if count:
                        counts_by_stat[reading.definition.name, reason] += count
                        counts_by_reason[reason] += count
        for reason, count in (("definition", part.refused_readings), *part.dropped_counts.items()):
            if count:
                counts_by_reason[reason] += count
    for reason, count in sorted(counts_by_reason.items()):
        collected.add(DROPPED, count, *slot.labels, reason)
    for stat_and_reason, count in counts_by_stat.items():
        collected.add(REJECTED, count, *slot.labels, *stat_and_reason)
