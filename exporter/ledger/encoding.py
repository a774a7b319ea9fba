"""A rank's totals to bytes and back: the content of a state file.

Runs in the sidecar, on the ledger's collecting thread; no I/O. The bytes are JSON, so that a person can read
them. Numbers survive exactly: JSON's floats are written with all their digits.

    {"taken": [id, …],
     "seats": [{"slot": 0,
                "base":    {"totals": …},
                "records": [{"process": [id, pid, started, …], "written": …, "totals": …}, …]}, …]}

    totals = {"messages": 17, "dropped": {…}, "refused": 0, "departed": null,
              "stats":  [[name, unit, help, labels, histogram, buckets(, kind)], …],
              "values": [[count, sum, bucket counts, last sample, rejected, overflows], …]}

The totals of a process that has logged events also have "events": [counts, suppressed, delivered, dropped], each
a list of rows as in the feed.

Most of it does not change from one second to the next: what the dead brought, and what the living's Stats
are. Both are kept as text, so that a save renders the living's numbers only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from exporter.feed.snapshot import ProcessIdentity
from exporter.ledger import stored
from exporter.ledger.admission import SeriesKey
from exporter.ledger.seats import Part, Record, Seat
from exporter.ledger.totals import RankTotals
from exporter.recording.naming import families_of
from exporter.recording.values import KINDS, NOTHING, Aggregation, EventsReading, StatDefinition, StatReading

_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def encode(totals: RankTotals) -> bytes:
    """Write the content of a state file."""
    seats = ",".join(_seat(seat) for seat in totals.seats.values())
    return f'{{"taken":{_dumps(list(totals.taken))},\n"seats":[{seats}]}}\n'.encode("ascii")


def decode(content: bytes) -> RankTotals:
    """Read it back.

    Raises:
        ValueError: It is not what `encode` writes.
    """
    try:
        body = json.loads(content, parse_constant=stored.refuse_constant)
        seats = [_read_seat(each) for each in body["seats"]]
        taken = [stored.text(each) for each in body["taken"]]
    # What a missing key, a value of another type or a deep nesting raises on the way.
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return RankTotals({seat.slot: seat for seat in seats}, taken)


def _seat(seat: Seat) -> str:
    records = ",".join(_record(record) for record in seat.records)
    return f'\n{{"slot":{seat.slot:d},"base":{_part(seat.base)},"records":[{records}]}}'


def _record(record: Record) -> str:
    if record.process_text is None:
        process = record.process
        who = (
            process.id,
            process.pid,
            process.started,
            process.run,
            process.rank,
            process.local_rank,
            process.role,
            process.node,
            process.labels,
            process.version,
        )
        record.process_text = _dumps(who)
    return f'\n{{"process":{record.process_text},"written":{record.written!r},"totals":{_part(record)}}}'


def _part(part: Part) -> str:
    if part.totals_text is None:
        readings = part.readings.values()
        if part.stats_text is None:
            part.stats_text = _dumps([_what(reading.definition) for reading in readings])
        rows, texts = part.row_texts, []
        for key, reading in part.readings.items():
            row = rows.get(key)
            if row is None or row[0] is not reading:
                row = rows[key] = reading, _row(reading)
            texts.append(row[1])
        values = ",".join(texts)
        dropped = _dumps(part.dropped) if part.dropped else "{}"
        departed = "null" if part.departed is None else repr(part.departed)
        part.totals_text = (
            f'\n{{"messages":{part.messages:d},"dropped":{dropped},"refused":{part.refused:d},'
            f'"departed":{departed},{_events(part.events)}\n"stats":{part.stats_text},\n"values":[{values}]}}'
        )
    return part.totals_text


def _events(events: EventsReading) -> str:
    if not events:
        return ""
    counts = [(*pair, count, events.last.get(pair)) for pair, count in events.counts.items()]
    suppressed = [(*pair, count) for pair, count in events.suppressed.items()]
    dropped = [(*pair, count) for pair, count in events.dropped.items()]
    return f'\n"events":{_dumps([counts, suppressed, list(events.delivered.items()), dropped])},'


def _row(reading: StatReading) -> str:
    # By hand: the encoder's call would cost as much as the numbers. None of them is infinite or NaN.
    total = "null" if reading.sum is None else repr(reading.sum)
    last = "null" if reading.last_sample is None else repr(reading.last_sample)
    counts = list(reading.bucket_counts) if reading.bucket_counts else "[]"
    rejected = _dumps(reading.rejected) if reading.rejected else "{}"
    return f"[{reading.count},{total},{counts},{last},{rejected},{reading.overflows}]"


def _what(definition: StatDefinition) -> tuple[object, ...]:
    return (
        definition.name,
        definition.unit,
        definition.help,
        definition.labels,
        Aggregation.HISTOGRAM in definition.aggregations,
        definition.buckets,
        *(() if definition.kind == "stat" else (definition.kind,)),
    )


def _read_seat(body: Mapping[str, Any]) -> Seat:
    base = Part()
    _read_part(body["base"], base)
    return Seat(stored.count(body["slot"]), base, [_read_record(each) for each in body["records"]])


def _read_record(body: Mapping[str, Any]) -> Record:
    identity, pid, started, run, rank, local_rank, role, node, labels, version = body["process"]
    process = ProcessIdentity(
        stored.text(identity),
        stored.count(pid),
        stored.number(started),
        stored.text(run),
        None if rank is None else stored.count(rank),
        None if local_rank is None else stored.count(local_rank),
        stored.text(role),
        stored.text(node),
        _labels(labels),
        stored.text(version),
    )
    record = Record(process=process, written=stored.number(body["written"]))
    _read_part(body["totals"], record)
    return record


def _read_part(body: Mapping[str, Any], part: Part) -> None:
    part.messages, part.refused = stored.count(body["messages"]), stored.count(body["refused"])
    part.dropped = _counts(body["dropped"])
    part.departed = None if body["departed"] is None else stored.number(body["departed"])
    if "events" in body:
        part.events = _read_events(*body["events"])
    stats, values = body["stats"], body["values"]
    if len(stats) != len(values):
        raise ValueError(f"{len(values)} values of {len(stats)} Stats")
    for what, numbers in zip(stats, values, strict=True):
        key, reading = _read_reading(what, numbers)
        part.readings[key] = reading


def _read_events(counts: Any, suppressed: Any, delivered: Any, dropped: Any) -> EventsReading:
    return EventsReading(
        {
            (stored.text(type_), stored.text(severity)): stored.count(count)
            for type_, severity, count, _ in counts
        },
        {
            (stored.text(type_), stored.text(severity)): stored.number(when)
            for type_, severity, _, when in counts
            if when is not None
        },
        {
            (stored.text(type_), stored.text(reason)): stored.count(count)
            for type_, reason, count in suppressed
        },
        {stored.text(name): stored.count(count) for name, count in delivered},
        {(stored.text(name), stored.text(reason)): stored.count(count) for name, reason, count in dropped},
    )


def _read_reading(what: Any, numbers: Any) -> tuple[SeriesKey, StatReading]:
    name, unit, text, labels, histogram, buckets, *kind = what
    count, total, counts, last_sample, rejected, overflows = numbers
    definition = StatDefinition(
        stored.text(name),
        frozenset({Aggregation.HISTOGRAM} if histogram else ()),
        unit=None if unit is None else stored.text(unit),
        help=stored.text(text),
        labels=_labels(labels),
        buckets=tuple(stored.number(bound) for bound in buckets),
        kind=KINDS[KINDS.index(kind[0])] if kind else "stat",
    )
    if len(counts) != len(buckets) or any(low >= high for low, high in pairwise(definition.buckets)):
        raise ValueError(f"{len(counts)} counts of {len(buckets)} ascending buckets")
    reading = StatReading(
        definition,
        stored.count(count),
        None if total is None else stored.number(total),
        tuple(stored.count(each) for each in counts),
        last_sample=None if last_sample is None else stored.number(last_sample),
        rejected=_counts(rejected),
        overflows=stored.count(overflows),
    )
    return (families_of(definition).main, definition.labels), reading


def _labels(found: Any) -> tuple[tuple[str, str], ...]:
    return tuple((stored.text(name), stored.text(value)) for name, value in found)


def _counts(found: Any) -> Mapping[str, int]:
    counts = {stored.text(reason): stored.count(count) for reason, count in found.items()}
    return counts or NOTHING
