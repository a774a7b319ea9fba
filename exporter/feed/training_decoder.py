"""What a process tells of its training, read back from the JSON of a feed file.

Used in the sidecar by the decoder, whose promises hold here too: a value of the contract comes out, or
`FeedFormatError` does. How the numbers of one reading belong together is not checked: the ledger believes none of
them blindly.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from exporter.feed.content import (
    SLUG,
    refuse,
    take_at_least_zero,
    take_flag,
    take_list,
    take_matching,
    take_number,
    take_object,
    take_optional,
    take_text,
    take_time,
    take_whole,
)
from exporter.feed.layout import MAX_COUNT, MAX_IDENTITY_TEXT
from exporter.recording.values import TrainingReading

# Several times what a writer makes.
MAX_FACTS = 64
MAX_PHASES = 64
MAX_SEGMENTS = 256
MAX_BINS = 256
MAX_SECONDS = 1e10
"""Three centuries: sums of what is below this stay finite."""


def take_training(found: object) -> TrainingReading:
    """Read the key `training`.

    Raises:
        FeedFormatError: `content`.
    """
    body = take_object(found)
    return TrainingReading(
        facts=_facts(body.get("facts", [])),
        phase=_phase(body.get("phase", "other")),
        phase_since=take_time(body.get("phase_since", 0.0)),
        phases=_phases(body.get("phases", {})),
        last_progress=take_optional(body.get("last_progress"), take_time),
        first_step=take_optional(body.get("first_step"), _step),
        loop=take_whole(body.get("loop", 0)),
        step=take_optional(body.get("step"), _step),
        steps=take_whole(body.get("steps", 0)),
        work_seconds=_seconds(body.get("work_seconds", 0.0)),
        open_seconds=_seconds(body.get("open_seconds", 0.0)),
        failed_seconds=_seconds(body.get("failed_seconds", 0.0)),
        committed_step=take_optional(body.get("committed_step"), _step),
        committed_seconds=_seconds(body.get("committed_seconds", 0.0)),
        segments=tuple([_segment(each) for each in take_list(body.get("segments", []), MAX_SEGMENTS)]),
        finished=take_flag(body.get("finished", False)),
        failure=_reason(body.get("failure", "")),
        longest_step_seconds=take_optional(body.get("longest_step_seconds"), _seconds),
        timeline=_timeline(body.get("timeline", [])),
        flops_per_token=take_optional(body.get("flops_per_token"), take_at_least_zero),
        hardware_flops_per_token=take_optional(body.get("hardware_flops_per_token"), take_at_least_zero),
        peak_flops=take_optional(body.get("peak_flops"), take_at_least_zero),
    )


def _facts(found: object) -> tuple[tuple[str, str], ...]:
    facts = []
    for pair in take_list(found, MAX_FACTS):
        name, value = take_list(pair, 2)
        facts.append((take_matching(name, SLUG), take_text(value, MAX_IDENTITY_TEXT)))
    if any(first >= second for (first, _), (second, _) in pairwise(facts)):
        refuse("facts that are not sorted, or there twice")
    return tuple(facts)


def _phases(found: object) -> dict[str, float]:
    body = take_object(found)
    if len(body) > MAX_PHASES:
        refuse(f"more than {MAX_PHASES} phases")
    return {_phase(name): _seconds(seconds) for name, seconds in body.items()}


def _phase(found: object) -> str:
    return take_matching(found, SLUG)


def _reason(found: object) -> str:
    return "" if found == "" else take_matching(found, SLUG)


def _step(found: object) -> int:
    """A step may be negative where the job counts so."""
    if type(found) is not int or not -MAX_COUNT <= found <= MAX_COUNT:
        refuse(f"not a whole number of at most {MAX_COUNT}")
    return found


def _seconds(found: object) -> float:
    seconds = take_at_least_zero(found)
    return seconds if seconds <= MAX_SECONDS else refuse("a time of centuries")


def _segment(found: object) -> tuple[int, int, int, float]:
    loop, first, last, seconds = take_list(found, 4)
    if _step(first) > _step(last):
        refuse("a segment that ends before it begins")
    return take_whole(loop), first, last, _seconds(seconds)


def _timeline(found: object) -> tuple[tuple[float, tuple[tuple[str, float], ...]], ...]:
    bins = tuple([_bin(each) for each in take_list(found, MAX_BINS)])
    if any(first >= second for (first, _), (second, _) in pairwise(bins)):
        refuse("bins that are not in order")
    return bins


def _bin(found: Any) -> tuple[float, tuple[tuple[str, float], ...]]:
    end, parts = take_list(found, 2)
    return take_number(end), tuple([_part(part) for part in take_list(parts, MAX_PHASES)])


def _part(found: Any) -> tuple[str, float]:
    phase, seconds = take_list(found, 2)
    return _phase(phase), _seconds(seconds)
