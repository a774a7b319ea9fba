"""Division of measured GPU power among phases.

The power of a GPU is integrated sample by sample over the phases of the ranks on the GPU and scaled to the energy counter.
Samples have wall clock times, and phases have monotonic times: after a step of the wall clock, one interval is not divided.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from exporter.ledger.energy.work import PhaseInterval

UNATTRIBUTED = "unattributed"

PATIENCE_SECONDS = 20.0
"""Maximum time for which power samples wait for the matching phases."""
LONGEST_STEP_SECONDS = 0.2
"""Longest mean interval between samples at which phases can be distinguished."""
LONGEST_GAP_SECONDS = 1.0
"""Longest time that a sample covers, and longest gap before the first sample."""
USUAL_STEP_SECONDS = 0.02
CLOCK_STEP_SECONDS = 0.01
RETENTION_SECONDS = 60.0
"""Retention of samples."""
MIN_COVERED = 0.8
"""Minimum share of an interval that samples must cover."""
CLEAR_SAMPLES = 2.5
"""Minimum length of a clearly measured phase interval, in samples.

Shorter intervals blur into their neighbours: two phases of 40 ms, sampled every 20 ms, measured 732 W and 316 W instead of
784 W and 142 W."""

PowerSource = Callable[[Mapping[str, float]], Mapping[str, Sequence[tuple[float, float]]]]
"""Function that returns (Unix seconds, watts) by UUID, later than the given times; see `GpuCollector.power_samples`."""


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
    """Division of GPU power samples among phases."""

    def __init__(self) -> None:
        self._samples: dict[str, list[PowerSample]] = {}
        self._last_sample_at: dict[str, float] = {}  # Unix time of the last sample
        self._divided: dict[str, float] = {}  # end of the last division
        self._offset: float | None = None

    def read(self, source: PowerSource, *, wall: float, now: float) -> None:
        """Read the new samples of a source."""
        offset, previous_offset = wall - now, self._offset
        self._offset = offset
        if previous_offset is not None and abs(offset - previous_offset) > CLOCK_STEP_SECONDS:
            self._samples.clear()
            self._divided.clear()
        for uuid, samples in source(self._last_sample_at).items():
            stored, last = self._samples.setdefault(uuid, []), self._last_sample_at.get(uuid, 0.0)
            for at, watts in samples:
                step = at - last if 0 < at - last <= LONGEST_GAP_SECONDS else USUAL_STEP_SECONDS
                stored.append(PowerSample(at - step - offset, at - offset, watts))
                last = at
            self._last_sample_at[uuid] = last
            if stored:
                del stored[
                    : bisect_left(stored, stored[-1].end - RETENTION_SECONDS, key=lambda sample: sample.end)
                ]

    def between(
        self, uuid: str, ranks: Sequence[Sequence[PhaseInterval]], begin: float, end: float
    ) -> Split | None:
        """Divide the energy of a GPU between two moments among the phases of the ranks on the GPU.

        Returns None if the phases are unknown, or if samples are missing or too far apart.
        """
        power_samples = [
            sample for sample in self._samples.get(uuid, ()) if sample.end > begin and sample.begin < end
        ]
        covered = sum(min(sample.end, end) - max(sample.begin, begin) for sample in power_samples)
        if not ranks or not all(ranks) or covered < MIN_COVERED * (end - begin):
            return None
        step = sum(sample.end - sample.begin for sample in power_samples) / len(power_samples)
        if step > LONGEST_STEP_SECONDS:
            return None
        joules: dict[str, float] = {}
        blurred: dict[str, float] = {}
        for intervals in ranks:
            for interval, amount in _overlaps(power_samples, intervals, begin, end):
                phase = UNATTRIBUTED if interval is None else interval.phase
                joules[phase] = joules.get(phase, 0.0) + amount
                if interval is not None and interval.end - interval.begin < CLEAR_SAMPLES * step:
                    blurred[phase] = blurred.get(phase, 0.0) + amount
        return Split(joules, blurred, 0.0)

    def split(self, uuid: str, ranks: Sequence[tuple[PhaseInterval, ...]], now: float) -> Split | None:
        """Divide the energy of a GPU since the last call among the phases of the ranks on the GPU.

        Returns None if the energy cannot be divided; then no energy waits. If the result has no joules, all energy waits.
        """
        power_samples, start = self._samples.pop(uuid, []), self._divided.pop(uuid, None)
        if not power_samples and start is None:
            return None
        newest = power_samples[-1].end if power_samples else start or 0.0
        self._divided[uuid] = newest
        if start is None or not ranks or not all(ranks):
            return None
        step = sum(sample.end - sample.begin for sample in power_samples) / max(1, len(power_samples))
        end = max(start, min([newest, *(intervals[-1].end for intervals in ranks)]))
        late = now - end > PATIENCE_SECONDS or (
            power_samples and power_samples[0].begin > start + LONGEST_GAP_SECONDS
        )
        if late or step > LONGEST_STEP_SECONDS:
            return None
        self._divided[uuid] = end
        self._samples[uuid] = [sample for sample in power_samples if sample.end > end]
        joules: dict[str, float] = {}
        blurred: dict[str, float] = {}
        for intervals in ranks:
            for interval, amount in _overlaps(power_samples, intervals, start, end):
                phase = UNATTRIBUTED if interval is None else interval.phase
                joules[phase] = joules.get(phase, 0.0) + amount
                if interval is not None and interval.end - interval.begin < CLEAR_SAMPLES * step:
                    blurred[phase] = blurred.get(phase, 0.0) + amount
        return Split(
            joules,
            blurred,
            sum(sample.watts * (sample.end - max(sample.begin, end)) for sample in self._samples[uuid]),
        )


def _overlaps(
    samples: Sequence[PowerSample], intervals: Sequence[PhaseInterval], start: float, stop: float
) -> Iterator[tuple[PhaseInterval | None, float]]:
    """Yield the joules of each phase interval between two moments, piece by piece; None for unknown phases."""
    place = 0
    for sample in samples:
        at, end = max(sample.begin, start), min(sample.end, stop)
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
