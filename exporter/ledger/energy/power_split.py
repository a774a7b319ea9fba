"""Split of measured GPU power among phases.

The power of a GPU is integrated sample by sample over the phases of the ranks on the GPU. The caller scales the result to the
energy counter. Samples have wall clock times, and phases have monotonic times. After a step of the wall clock, the earlier samples are
discarded, and the interval that contains the step is not split.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from exporter.ledger.energy.work import PhaseInterval

UNATTRIBUTED = "unattributed"

MAX_SAMPLE_WAIT_SECONDS = 20.0
"""Maximum time for which power samples wait for the phases of the same time."""
MAX_SAMPLE_INTERVAL_SECONDS = 0.2
"""Longest mean interval between samples at which phases can be distinguished."""
MAX_GAP_SECONDS = 1.0
"""Longest time that a sample covers, and longest gap before the first sample."""
DEFAULT_SAMPLE_SECONDS = 0.02
"""Length of the first sample, and of a sample after a gap."""
MIN_CLOCK_STEP_SECONDS = 0.01
"""Minimum change of the offset between the clocks that counts as a step of the wall clock."""
RETENTION_SECONDS = 60.0
"""Retention of samples, longer than the default time between two splits (5 s). Older energy is split by time."""
MIN_COVERED_RATIO = 0.8
"""Minimum share of an interval that samples must cover."""
MIN_ACCURATE_SAMPLES = 2.5
"""Minimum length of a phase interval whose energy is accurate, in samples.

Samples of a shorter interval overlap its neighbors: for two phases of 40 ms, samples every 20 ms gave 732 W and 316 W instead of
784 W and 142 W."""

PowerSource = Callable[[Mapping[str, float]], Mapping[str, Sequence[tuple[float, float]]]]
"""Function that returns the samples (Unix seconds, watts) of each GPU, by UUID; see `GpuCollector.power_samples`.

The argument is the Unix time of the last known sample of each GPU; only later samples are returned."""


# Not frozen: creating a frozen instance takes three times as long, and eight GPUs have 400 samples a second.
@dataclass(slots=True)
class PowerSample:
    """Power of a GPU over an interval of the monotonic clock."""

    start: float
    end: float
    watts: float


@dataclass(frozen=True, slots=True)
class PhaseSplit:
    """Split of the energy of a GPU among phases in an interval, as weights.

    Each rank on the GPU adds the full energy of the GPU to the weights of its phases. The share of a phase is its weight, divided by
    the sum of all weights.
    """

    weight_by_phase: Mapping[str, float]  # joules, summed over the ranks; empty if no time was split
    # part of the weights that is from intervals of fewer samples than `MIN_ACCURATE_SAMPLES`
    inaccurate_weight_by_phase: Mapping[str, float]
    waiting_joules: float  # energy of the GPU after the interval, which a later split contains


class PowerSplitter:
    """Splitter of GPU power samples among phases."""

    def __init__(self) -> None:
        self._samples: dict[str, list[PowerSample]] = {}  # by UUID, as the other mappings
        self._last_sample_at: dict[str, float] = {}  # Unix time of the last sample
        self._split_until: dict[str, float] = {}  # monotonic end of the last split
        self._wall_clock_offset: float | None = None

    def read(self, source: PowerSource, *, wall: float, now: float) -> None:
        """Read the new samples of a source; *wall* is Unix time, *now* is monotonic.

        A sample covers the time since the previous sample. If the wall clock was set, all earlier samples are discarded.
        """
        offset, previous_offset = wall - now, self._wall_clock_offset
        self._wall_clock_offset = offset
        if previous_offset is not None and abs(offset - previous_offset) > MIN_CLOCK_STEP_SECONDS:
            self._samples.clear()
            self._split_until.clear()
        for uuid, samples in source(self._last_sample_at).items():
            stored_samples = self._samples.setdefault(uuid, [])
            previous_at = self._last_sample_at.get(uuid, 0.0)
            for sampled_at, watts in samples:
                sample_seconds = sampled_at - previous_at
                if not 0 < sample_seconds <= MAX_GAP_SECONDS:
                    sample_seconds = DEFAULT_SAMPLE_SECONDS
                end = sampled_at - offset
                stored_samples.append(PowerSample(end - sample_seconds, end, watts))
                previous_at = sampled_at
            self._last_sample_at[uuid] = previous_at
            if stored_samples:
                oldest_end = stored_samples[-1].end - RETENTION_SECONDS
                del stored_samples[: bisect_left(stored_samples, oldest_end, key=lambda sample: sample.end)]

    def split_interval(
        self, uuid: str, rank_intervals: Sequence[Sequence[PhaseInterval]], start: float, end: float
    ) -> PhaseSplit | None:
        """Split the energy of a GPU between two moments among the phases of the ranks on the GPU.

        Returns None if the phases are unknown, or if samples are missing or too far apart: split the energy by time instead.
        """
        power_samples = [
            sample for sample in self._samples.get(uuid, ()) if sample.end > start and sample.start < end
        ]
        covered_seconds = sum(min(sample.end, end) - max(sample.start, start) for sample in power_samples)
        if (
            not rank_intervals
            or not all(rank_intervals)
            or covered_seconds < MIN_COVERED_RATIO * (end - start)
        ):
            return None
        mean_sample_seconds = sum(sample.end - sample.start for sample in power_samples) / len(power_samples)
        if mean_sample_seconds > MAX_SAMPLE_INTERVAL_SECONDS:
            return None
        return _split(
            power_samples,
            rank_intervals,
            start,
            end,
            min_accurate_seconds=MIN_ACCURATE_SAMPLES * mean_sample_seconds,
        )

    def split_since_last_call(
        self, uuid: str, rank_intervals: Sequence[tuple[PhaseInterval, ...]], now: float
    ) -> PhaseSplit | None:
        """Split the energy of a GPU since the last call among the phases of the ranks on the GPU.

        Returns None in the first call and for an incomplete measurement: split all pending energy by time instead. The next call
        then starts after the newest sample. If `weight_by_phase` of the result is empty, the phases of the samples are not known
        yet: keep all energy for the next call.
        """
        power_samples, start = self._samples.pop(uuid, []), self._split_until.pop(uuid, None)
        if not power_samples and start is None:
            return None
        newest_end = power_samples[-1].end if power_samples else start or 0.0
        self._split_until[uuid] = newest_end
        if start is None or not rank_intervals or not all(rank_intervals):
            return None
        mean_sample_seconds = sum(sample.end - sample.start for sample in power_samples) / max(
            1, len(power_samples)
        )
        end = max(start, min([newest_end, *(intervals[-1].end for intervals in rank_intervals)]))
        are_phases_late = now - end > MAX_SAMPLE_WAIT_SECONDS
        has_gap = bool(power_samples) and power_samples[0].start > start + MAX_GAP_SECONDS
        if are_phases_late or has_gap or mean_sample_seconds > MAX_SAMPLE_INTERVAL_SECONDS:
            return None
        self._split_until[uuid] = end
        self._samples[uuid] = [sample for sample in power_samples if sample.end > end]
        waiting_joules = sum(
            sample.watts * (sample.end - max(sample.start, end)) for sample in self._samples[uuid]
        )
        min_accurate_seconds = MIN_ACCURATE_SAMPLES * mean_sample_seconds
        split = _split(power_samples, rank_intervals, start, end, min_accurate_seconds=min_accurate_seconds)
        return replace(split, waiting_joules=waiting_joules)


def _split(
    samples: Sequence[PowerSample],
    rank_intervals: Sequence[Sequence[PhaseInterval]],
    start: float,
    end: float,
    *,
    min_accurate_seconds: float,
) -> PhaseSplit:
    """Split the energy of samples between two moments among the phases of the ranks, with `waiting_joules` of 0."""
    weight_by_phase: dict[str, float] = {}
    inaccurate_weight_by_phase: dict[str, float] = {}
    for intervals in rank_intervals:
        for interval, joules in _joules_by_piece(samples, intervals, start, end):
            phase = UNATTRIBUTED if interval is None else interval.phase
            weight_by_phase[phase] = weight_by_phase.get(phase, 0.0) + joules
            if interval is not None and interval.end - interval.start < min_accurate_seconds:
                inaccurate_weight_by_phase[phase] = inaccurate_weight_by_phase.get(phase, 0.0) + joules
    return PhaseSplit(weight_by_phase, inaccurate_weight_by_phase, waiting_joules=0.0)


def _joules_by_piece(
    samples: Sequence[PowerSample], intervals: Sequence[PhaseInterval], start: float, end: float
) -> Iterator[tuple[PhaseInterval | None, float]]:
    """Yield (interval, joules) for each overlap of a sample and a phase interval between two moments.

    The interval is None where the phase is unknown.
    """
    index = 0
    for sample in samples:
        piece_start, sample_end = max(sample.start, start), min(sample.end, end)
        while piece_start < sample_end:
            while index < len(intervals) and intervals[index].end <= piece_start:
                index += 1
            interval = intervals[index] if index < len(intervals) else None
            piece_end = sample_end
            if interval is not None:
                is_inside = interval.start <= piece_start
                piece_end = min(sample_end, interval.end if is_inside else interval.start)
                interval = interval if is_inside else None
            yield interval, sample.watts * (piece_end - piece_start)
            piece_start = piece_end
