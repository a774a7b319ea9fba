"""Families about who is which rank, its feed and its events, and about the ledger itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from exporter.families import Collected, table
from exporter.ledger.totals import VisibleSlot, added_events
from exporter.recording.values import NO_EVENTS

FOREMOST_DROP_REASONS = ("nan", "overflow", "write_failed")
"""Those that begin at 0: what can happen once, to a job that does nothing wrong, is then not missed by an `increase()`."""
REFUSAL_REASONS = (
    *("magic", "version", "truncated", "checksum", "content", "name", "too_many", "too_large", "memory"),
    *("owner", "symlink", "links", "not_regular", "unreadable", "lock", "taken"),
)
"""Every reason that the feed reader of this version gives, and the ledger's own (`taken`)."""

SPECS = table("""
training_feed_alive{run,rank,worker,role}: 1 while the process lives, 0 while its totals linger after its
    end; absent then. <- record lock of the process on its lock file
training_feed_last_update_timestamp_seconds{run,rank,worker,role}: Unix time of the last snapshot that the
    process wrote; grows old when it hangs or is stopped, absent when its totals no longer linger. <-
    Snapshot.written
training_feed_dropped_total{run,rank,worker,role,reason}: What was recorded and lost: samples that were
    rejected (nan to backlog), drains that found a buffer full (overflow), snapshots that could not be
    written (write_failed), Stats that were left out of a snapshot for its size (too_large) or that the
    sidecar has no memory for (memory), readings of a Stat whose family is defined otherwise by another
    process or by the exporter (definition). nan, overflow and write_failed begin at 0, others are absent
    before the first; all are when the rank's totals are. <- StatReading.rejected and .overflows,
    Snapshot.dropped, admission
training_stat_rejected_samples_total{run,rank,worker,role,stat,reason}: Samples of one Stat that were kept
    out of every aggregate, and drains that found its buffer full (reason: overflow), which lost an
    unknown number; absent while there are none, since it would be a series for every Stat and reason. <-
    StatReading.rejected, .overflows
training_rank_conflicts{run,rank}: Living processes beyond the first that train as this rank of a run
    whose name was given: two jobs share the name. Absent while there are none. <- processes of one rank
    that have lived together for 15 s
training_events_total{run,rank,worker,role,type,severity}: Events that were logged, over all processes
    that were this rank; types beyond the first 100 of a process, or not on its list, are `other`; absent
    before the first, and when the rank's totals are. <- exporter.log, exporter.monitor.log_event and the
    bridges
training_event_last_timestamp_seconds{run,rank,worker,role,type,severity}: Unix time at which the event
    that was logged last happened; absent before the first, and when the rank's totals no longer linger.
    <- Event.timestamp
training_events_suppressed_total{run,rank,worker,role,type,reason}: Events that were counted, but not
    handed to the handlers, since only a share of them is (sampled) or since there were too many of their
    kind in one second (rate_limit); payload counts those that went to the handlers without their payload,
    which could not be made; absent while there are none. <- exporter.events.limit
training_event_handler_events_total{run,rank,worker,role,handler}: Events that a handler took; absent
    where none is registered. <- exporter.events.register
training_event_handler_dropped_total{run,rank,worker,role,handler,reason}: Events that a handler missed:
    its queue was full (queue_full), it raised or could not write (error), or had not taken them
    when it was unregistered or its process ended (unregistered, exit); 0 from the start for queue_full
    and error, absent for the others while there are none. <- exporter.events.register
training_rank_info{run,rank,worker,role,local_rank,node,version,gpu,uuid}: The process that is this rank
    now, or was last, the GPU that it holds (gpu and uuid are absent where it holds none or several, or
    nobody can tell), and what exporter.configure(labels=...) said of it, each as label_<name>; absent
    when its totals no longer linger. <- ProcessIdentity, processes that NVML lists
exporter_feed_refused_total{reason}: Feed files that were refused, each once for as long as it is refused
    for the same reason; other files are not affected. <- feed directory
exporter_feed_owner: 1 when this sidecar owns the feed directory: it alone removes files of the dead and
    keeps the ledger; 0 when another does and this one only looks on. <- owner.lock
exporter_ledger_state_errors_total{reason}: Attempts to read, write or lock a state file that failed
    (failed): the totals of its rank are absent until one succeeds. State files that were damaged or of
    another version and were moved aside (damaged): totals go on from what the sidecar and the feed still
    have. <- state directory
exporter_ledger_withheld_ranks: Ranks whose totals are absent, since their state cannot be written or is
    kept by another sidecar. <- state directory
""")

OF = {spec.name: spec for spec in SPECS}


def tell_processes(
    collected: Collected, slots: Sequence[VisibleSlot], gpu_of: Callable[[str], tuple[str, str] | None]
) -> None:
    """Fill the families about the processes that write the feed; `gpu_of` gives index and UUID, by process id."""
    names = sorted({name for each in slots for name, _ in each.process.identity.labels})
    info = OF["training_rank_info"]
    info = replace(info, labels=info.labels + tuple([f"label_{name}" for name in names]))
    for each in slots:
        process, who = each.process, each.process.identity
        collected.add(OF["training_feed_alive"], int(process.living), *each.labels)
        written = OF["training_feed_last_update_timestamp_seconds"]
        collected.add(written, process.written, *each.labels)
        local_rank = "" if who.local_rank is None else str(who.local_rank)
        # The role that is part of the identity is empty for a rank; here it is told in any case.
        told = (*each.labels[:3], who.role, local_rank, who.node, who.version)
        described = [dict(who.labels).get(name, "") for name in names]
        collected.add(info, 1, *told, *(gpu_of(who.id) or ("", "")), *described)
        _tell_events(collected, each)
        if each.counted:
            _tell_losses(collected, each)


def _tell_events(collected: Collected, visible: VisibleSlot) -> None:
    """Add up what has become of the events of a slot."""
    total = NO_EVENTS
    for part in visible.slot.parts():
        total = added_events(total, part.events)
    none = {(handler, reason): 0 for handler in total.delivered for reason in ("queue_full", "error")}
    delivered = [((handler,), count) for handler, count in total.delivered.items()]
    values: dict[str, Iterable[tuple[tuple[str, ...], float]]] = {
        "training_event_last_timestamp_seconds": total.last.items()
    }
    if visible.counted:
        values["training_events_total"] = total.counts.items()
        values["training_events_suppressed_total"] = total.suppressed.items()
        values["training_event_handler_events_total"] = delivered
        values["training_event_handler_dropped_total"] = {**none, **total.dropped}.items()
    for name, found in values.items():
        for labels, value in found:
            collected.add(OF[name], value, *visible.labels, *labels)


def _tell_losses(collected: Collected, visible: VisibleSlot) -> None:
    """Add up what a slot has lost, by reason and by Stat."""
    by_stat: Counter[tuple[str, str]] = Counter()
    total: Counter[str] = Counter(dict.fromkeys(FOREMOST_DROP_REASONS, 0))
    for part in visible.slot.parts():
        for reading in part.series.values():
            for reason, count in (("overflow", reading.overflows), *reading.rejected.items()):
                if count:
                    by_stat[reading.definition.name, reason] += count
                    total[reason] += count
        for reason, count in (("definition", part.refused), *part.dropped.items()):
            if count:
                total[reason] += count
    for reason, count in sorted(total.items()):
        collected.add(OF["training_feed_dropped_total"], count, *visible.labels, reason)
    for pair, count in by_stat.items():
        collected.add(OF["training_stat_rejected_samples_total"], count, *visible.labels, *pair)
