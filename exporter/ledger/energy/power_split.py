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
MAX_STEP_SECONDS = 0.2
"""Longest mean interval between samples at which phases can be distinguished."""
MAX_GAP_SECONDS = 1.0
"""Longest time that a sample covers, and longest gap before the first sample."""
DEFAULT_STEP_SECONDS = 0.02
CLOCK_STEP_SECONDS = 0.01
RETENTION_SECONDS = 60.0
"""Retention of samples."""
MIN_COVERED_RATIO = 0.8
"""Minimum share of an interval that samples must cover."""
MIN_CLEAR_SAMPLES = 2.5
"""Minimum length of a clearly measured phase interval, in samples.

Shorter intervals blur into their neighbours: two phases of 40 ms, sampled every 20 ms, measured 732 W and 316 W instead of
784 W and 142 W."""

PowerSource = Callable[[Mapping[str, float]], Mapping[str, Sequence[tuple[float, float]]]]
"""Function that returns (Unix seconds, watts) by UUID, later than the given times; see `GpuCollector.power_samples`."""


# Not frozen: creating a frozen instance takes three times as long, and eight GPUs have 400 samples a second.
@dataclass(slots=True)
class PowerSample:
    """Power of a GPU over an interval of the monotonic clock."""

    begin: float
    end: float
    watts: float


@dataclass(frozen=True, slots=True)
class Split:
    """Energy of a GPU in an interval, divided among phases."""

    joules_by_phase: Mapping[str, float]
    blurred_joules: Mapping[str, float]  # by phase, in intervals of fewer samples than `MIN_CLEAR_SAMPLES`
    waiting_joules: float  # used after the interval; divided later


class PowerSplitter:
    """Division of GPU power samples among phases."""

    def __init__(self) -> None:
        self._samples: dict[str, list[PowerSample]] = {}
        self._last_sample_at: dict[str, float] = {}  # Unix time of the last sample
        self._divided_until: dict[str, float] = {}  # end of the last division
        self._offset: float | None = None

    def read(self, source: PowerSource, *, wall: float, now: float) -> None:
        """Read the new samples of a source."""
        offset, previous_offset = wall - now, self._offset
        self._offset = offset
        if previous_offset is not None and abs(offset - previous_offset) > CLOCK_STEP_SECONDS:
            self._samples.clear()
            self._divided_until.clear()
        for uuid, samples in source(self._last_sample_at).items():
            stored_samples, last = self._samples.setdefault(uuid, []), self._last_sample_at.get(uuid, 0.0)
            for sampled_at, watts in samples:
                step = sampled_at - last if 0 < sampled_at - last <= MAX_GAP_SECONDS else DEFAULT_STEP_SECONDS
                stored_samples.append(PowerSample(sampled_at - step - offset, sampled_at - offset, watts))
                last = sampled_at
            self._last_sample_at[uuid] = last
            if stored_samples:
                del stored_samples[
                    : bisect_left(
                        stored_samples,
                        stored_samples[-1].end - RETENTION_SECONDS,
                        key=lambda sample: sample.end,
                    )
                ]

    def split_between(
        self, uuid: str, ranks: Sequence[Sequence[PhaseInterval]], begin: float, end: float
    ) -> Split | None:
        """Divide the energy of a GPU between two moments among the phases of the ranks on the GPU.

        Returns None if the phases are unknown, or if samples are missing or too far apart.
        """
        power_samples = [
            sample for sample in self._samples.get(uuid, ()) if sample.end > begin and sample.begin < end
        ]
        covered_seconds = sum(min(sample.end, end) - max(sample.begin, begin) for sample in power_samples)
        if not ranks or not all(ranks) or covered_seconds < MIN_COVERED_RATIO * (end - begin):
            return None
        step = sum(sample.end - sample.begin for sample in power_samples) / len(power_samples)
        if step > MAX_STEP_SECONDS:
            return None
        joules_by_phase: dict[str, float] = {}
        blurred_joules: dict[str, float] = {}
        for intervals in ranks:
            for interval, amount in _overlaps(power_samples, intervals, begin, end):
                phase = UNATTRIBUTED if interval is None else interval.phase
                joules_by_phase[phase] = joules_by_phase.get(phase, 0.0) + amount
                if interval is not None and interval.end - interval.begin < MIN_CLEAR_SAMPLES * step:
                    blurred_joules[phase] = blurred_joules.get(phase, 0.0) + amount
        return Split(joules_by_phase, blurred_joules, 0.0)

    def split(self, uuid: str, ranks: Sequence[tuple[PhaseInterval, ...]], now: float) -> Split | None:
        """Divide the energy of a GPU since the last call among the phases of the ranks on the GPU.

        Returns None if the energy cannot be divided; then no energy waits. If the result has no joules, all energy waits.
        """
        power_samples, start = self._samples.pop(uuid, []), self._divided_until.pop(uuid, None)
        if not power_samples and start is None:
            return None
        newest = power_samples[-1].end if power_samples else start or 0.0
        self._divided_until[uuid] = newest
        if start is None or not ranks or not all(ranks):
            return None
        step = sum(sample.end - sample.begin for sample in power_samples) / max(1, len(power_samples))
        end = max(start, min([newest, *(intervals[-1].end for intervals in ranks)]))
        is_late = now - end > PATIENCE_SECONDS or (
            power_samples and power_samples[0].begin > start + MAX_GAP_SECONDS
        )
        if is_late or step > MAX_STEP_SECONDS:
            return None
        self._divided_until[uuid] = end
        self._samples[uuid] = [sample for sample in power_samples if sample.end > end]
        joules_by_phase: dict[str, float] = {}
        blurred_joules: dict[str, float] = {}
        for intervals in ranks:
            for interval, amount in _overlaps(power_samples, intervals, start, end):
                phase = UNATTRIBUTED if interval is None else interval.phase
                joules_by_phase[phase] = joules_by_phase.get(phase, 0.0) + amount
                if interval is not None and interval.end - interval.begin < MIN_CLEAR_SAMPLES * step:
                    blurred_joules[phase] = blurred_joules.get(phase, 0.0) + amount
        return Split(
            joules_by_phase,
            blurred_joules,
            sum(sample.watts * (sample.end - max(sample.begin, end)) for sample in self._samples[uuid]),
        )


def _overlaps(
    samples: Sequence[PowerSample], intervals: Sequence[PhaseInterval], start: float, stop: float
) -> Iterator[tuple[PhaseInterval | None, float]]:
    """Yield the joules of each phase interval between two moments, piece by piece; None for unknown phases."""
    index = 0
    for sample in samples:
        begin, end = max(sample.begin, start), min(sample.end, stop)
        while begin < end:
            while index < len(intervals) and intervals[index].end <= begin:
                index += 1
            interval = intervals[index] if index < len(intervals) else None
            piece = end
            if interval is not None:
                inside = interval.begin <= begin
                piece = min(end, interval.end if inside else interval.begin)
                interval = interval if inside else None
            yield interval, sample.watts * (piece - begin)
            begin = piece
