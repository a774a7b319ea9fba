"""State of a rank as JSON: the definitions of the Stats, and the totals of the processes.

    {"stats": [[name, unit, help, labels, buckets, kind], ...],   each definition once
     "taken": [id, ...],                                          ids of processes in a base
     "slots": [{"slot": 0, "base": totals, "processes": [totals, ...]}, ...]}

The totals have the saved fields of their class, and three lists with an item for each Stat:

    "series": [[index in stats, count, sum, bucket counts, last sample, rejected counts, overflows], ...],
    "exponential": [[bucket, bucket, ..., count, count, ...], ...],
    "values": [value of a gauge or null, ...]

The totals of a Stat are a row (a JSON array) instead of an object, because a rank with thousands of Stats may be saved every second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from exporter.ledger.state.codec import decoding, from_json, parse, to_json
from exporter.ledger.totals import ProcessTotals, SeriesKey, StatTotals, WorkerSlot
from exporter.recording.values import NO_COUNTS, Aggregation, StatDefinition, StatReading, families_of

TotalsT = TypeVar("TotalsT", bound=StatTotals)


@dataclass(slots=True, eq=False)
class RankRecord:
    """Saved state of a rank."""

    slots: dict[int, WorkerSlot] = field(default_factory=dict)
    folded_ids: dict[str, None] = field(default_factory=dict)  # of processes in a base, oldest first


def encode_rank(slots: Mapping[int, WorkerSlot], folded_ids: Mapping[str, None]) -> bytes:
    """Return the state of a rank as a line of JSON."""
    index_by_identity: dict[int, int] = {}  # index in `distinct_definitions`, by id() of the definition
    distinct_definitions: list[StatDefinition] = []

    def encode_totals(totals: StatTotals) -> dict[str, object]:
        """Return the JSON object of totals, and collect the definitions of their Stats."""
        series, exponential, values = [], [], []
        for reading in totals.series.values():
            definition = reading.definition
            index = index_by_identity.get(id(definition))
            if index is None:
                index = index_by_identity[id(definition)] = len(distinct_definitions)
                distinct_definitions.append(definition)
            series.append(
                (
                    *(index, reading.count, reading.sum, reading.bucket_counts, reading.last_sample),
                    *(reading.rejected, reading.overflows),
                )
            )
            # Outside the rows, because earlier releases expect rows of a fixed length.
            exponential.append((*reading.exponential, *reading.exponential.values()))
            values.append(reading.value)
        return {**to_json(totals), "series": series, "exponential": exponential, "values": values}

    bodies = [
        {
            "slot": slot.number,
            "base": encode_totals(slot.base),
            "processes": [encode_totals(process) for process in slot.processes],
        }
        for slot in slots.values()
    ]
    stats = [
        (
            *(definition.name, definition.unit, definition.help),
            *(definition.labels, definition.buckets, definition.kind),
        )
        for definition in distinct_definitions
    ]
    record = {"stats": stats, "taken": list(folded_ids), "slots": bodies}
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def decode_rank(content: bytes) -> RankRecord:
    """Return the state of a rank, also from an older release. Raises ValueError for invalid content."""
    record = RankRecord()
    with decoding():
        body = parse(content)
        definitions = [_definition(*row) for row in body["stats"]]
        for slot_body in body["slots"]:
            number = from_json(int, slot_body["slot"])
            processes = [
                _totals(ProcessTotals, process_body, definitions) for process_body in slot_body["processes"]
            ]
            record.slots[number] = WorkerSlot(
                number, _totals(StatTotals, slot_body["base"], definitions), processes
            )
        record.folded_ids.update(dict.fromkeys(from_json(list[str], body["taken"])))
    return record


def _definition(  # parameters in the order of a row
    name: str, unit: str | None, help: str, labels: Any, buckets: Any, kind: str
) -> StatDefinition:
    """Return the definition of a row. Of the aggregations, only the histogram has totals and is restored."""
    return StatDefinition(
        from_json(str, name),
        frozenset({Aggregation.HISTOGRAM} if buckets else ()),
        unit=from_json(str | None, unit),
        help=from_json(str, help),
        labels=from_json(tuple[tuple[str, str], ...], labels),
        buckets=from_json(tuple[float, ...], buckets),
        kind=from_json(str, kind),
    )


def _totals(
    totals_class: type[TotalsT], body: Mapping[str, Any], definitions: Sequence[StatDefinition]
) -> TotalsT:
    """Return totals with the readings of their rows. Older releases saved no exponential buckets and no values."""
    totals: TotalsT = from_json(totals_class, body)
    rows = body["series"]
    exponential_rows = body.get("exponential") or [()] * len(rows)
    values = body.get("values") or [None] * len(rows)
    for row, buckets_and_counts, value in zip(rows, exponential_rows, values, strict=True):
        index, count, total, buckets, last_sample, rejected_counts, overflows = row
        definition = definitions[index]
        half = len(buckets_and_counts) // 2
        totals.series[SeriesKey(families_of(definition).main, definition.labels)] = StatReading(
            definition,
            count=from_json(int, count),
            sum=from_json(float | None, total),
            bucket_counts=from_json(tuple[int, ...], buckets),
            last_sample=from_json(float | None, last_sample),
            rejected=from_json(dict[str, int], rejected_counts) or NO_COUNTS,
            overflows=from_json(int, overflows),
            value=from_json(float | None, value),
            exponential=dict(
                zip(from_json(list[int], buckets_and_counts[:half]), buckets_and_counts[half:], strict=True)
            ),
        )
    return totals
