"""Division of measured GPU power among phases.

The power of a GPU is integrated sample by sample over the phases of the ranks on the GPU and scaled to the energy counter.
Samples have wall clock times, phases monotonic times; after a step of the wall clock a single interval is not divided.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from exporter.ledger.energy.work import PhaseInterval

UNATTRIBUTED = "unattributed"

PATIENCE_SECONDS = 20.0
"""Maximum wait of power for the phases in which the power was drawn."""
LONGEST_STEP_SECONDS = 0.2
"""Samples with a longer mean distance do not distinguish phases."""
LONGEST_GAP_SECONDS = 1.0
"""Longest time that a sample covers, and longest gap before the first sample."""
USUAL_STEP_SECONDS = 0.02
CLOCK_STEP_SECONDS = 0.01
KEPT_SECONDS = 60.0
"""Retention of samples."""
MIN_COVERED = 0.8
"""Least part of an interval that samples must cover."""
CLEAR_SAMPLES = 2.5
"""Shorter intervals mix with their neighbours: two of 40 ms at 20 ms a sample measured 732 and 316 W, not 784 and 142."""

PowerSource = Callable[[Mapping[str, float]], Mapping[str, Sequence[tuple[float, float]]]]
"""Returns (Unix seconds, watts) by UUID, later than the given times; see `GpuCollector.power_samples`."""


@dataclass(
    slots=True
)  # not frozen, which makes an instance three times as expensive: eight GPUs have 400 a second
class PowerSample:
    """Power of a GPU over an interval of the monotonic clock."""

    begin: float
    end: float
    watts: float


@dataclass(frozen=True, slots=True)
class Split:
    """Energy of a GPU in an interval, in joules."""

    joules: Mapping[str, float]  # by phase
    blurred: Mapping[str, float]  # part in phase intervals of fewer samples than `CLEAR_SAMPLES`
    waiting: float  # after the interval


class PowerSplitter:
    """Power samples of all GPUs since the last division."""

    def __init__(self) -> None:
        self._drawn: dict[str, list[PowerSample]] = {}
        self._read: dict[str, float] = {}  # Unix time of the last sample
        self._divided: dict[str, float] = {}  # end of the last division
        self._offset: float | None = None

    def read(self, source: PowerSource, *, wall: float, now: float) -> None:
        """Read the new samples of a source."""
        offset, before = wall - now, self._offset
        self._offset = offset
        if before is not None and abs(offset - before) > CLOCK_STEP_SECONDS:
            self._drawn.clear()
            self._divided.clear()
        for uuid, samples in source(self._read).items():
            drawn, last = self._drawn.setdefault(uuid, []), self._read.get(uuid, 0.0)
            for at, watts in samples:
                step = at - last if 0 < at - last <= LONGEST_GAP_SECONDS else USUAL_STEP_SECONDS
                drawn.append(PowerSample(at - step - offset, at - offset, watts))
                last = at
            self._read[uuid] = last
            if drawn:
                del drawn[: bisect_left(drawn, drawn[-1].end - KEPT_SECONDS, key=lambda each: each.end)]

    def between(
        self, uuid: str, ranks: Sequence[Sequence[PhaseInterval]], begin: float, end: float
    ) -> Split | None:
        """Divide the energy of a GPU between two moments among the phases of the ranks on the GPU.

        Returns None without phases, or if samples are missing or too far apart.
        """
        drawn = [each for each in self._drawn.get(uuid, ()) if each.end > begin and each.begin < end]
        covered = sum(min(each.end, end) - max(each.begin, begin) for each in drawn)
        if not ranks or not all(ranks) or covered < MIN_COVERED * (end - begin):
            return None
        step = sum(each.end - each.begin for each in drawn) / len(drawn)
        if step > LONGEST_STEP_SECONDS:
            return None
        joules: dict[str, float] = {}
        blurred: dict[str, float] = {}
        for intervals in ranks:
            for interval, amount in _overlaps(drawn, intervals, begin, end):
                phase = UNATTRIBUTED if interval is None else interval.phase
                joules[phase] = joules.get(phase, 0.0) + amount
                if interval is not None and interval.end - interval.begin < CLEAR_SAMPLES * step:
                    blurred[phase] = blurred.get(phase, 0.0) + amount
        return Split(joules, blurred, 0.0)

    def split(self, uuid: str, ranks: Sequence[tuple[PhaseInterval, ...]], now: float) -> Split | None:
        """Divide the energy of a GPU since the last call among the phases of the ranks on it.

        Returns None if impossible; then no energy waits. Without joules in the result, all energy waits.
        """
        drawn, began = self._drawn.pop(uuid, []), self._divided.pop(uuid, None)
        if not drawn and began is None:
            return None
        newest = drawn[-1].end if drawn else began or 0.0
        self._divided[uuid] = newest
        if began is None or not ranks or not all(ranks):
            return None
        step = sum(each.end - each.begin for each in drawn) / max(1, len(drawn))
        until = max(began, min([newest, *(intervals[-1].end for intervals in ranks)]))
        late = now - until > PATIENCE_SECONDS or (drawn and drawn[0].begin > began + LONGEST_GAP_SECONDS)
        if late or step > LONGEST_STEP_SECONDS:
            return None
        self._divided[uuid] = until
        self._drawn[uuid] = [each for each in drawn if each.end > until]
        joules: dict[str, float] = {}
        blurred: dict[str, float] = {}
        for intervals in ranks:
            for interval, amount in _overlaps(drawn, intervals, began, until):
                phase = UNATTRIBUTED if interval is None else interval.phase
                joules[phase] = joules.get(phase, 0.0) + amount
                if interval is not None and interval.end - interval.begin < CLEAR_SAMPLES * step:
                    blurred[phase] = blurred.get(phase, 0.0) + amount
        return Split(
            joules,
            blurred,
            sum(each.watts * (each.end - max(each.begin, until)) for each in self._drawn[uuid]),
        )


def _overlaps(
    samples: Sequence[PowerSample], intervals: Sequence[PhaseInterval], began: float, until: float
) -> Iterator[tuple[PhaseInterval | None, float]]:
    """Yield the joules of each phase interval between two moments, piece by piece; None for unknown phases."""
    place = 0
    for sample in samples:
        at, end = max(sample.begin, began), min(sample.end, until)
        while at < end:
            while place < len(intervals) and intervals[place].end <= at:
                place += 1
            interval = intervals[place] if place < len(intervals) else None
            piece = end
            if interval is not None:
                inside = interval.begin <= at
                piece = min(end, interval.end if inside else interval.begin)
                interval = interval if inside else None
            yield interval, sample.watts * (piece - at)
            at = piece
