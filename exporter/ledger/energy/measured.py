"""Energy by phase, measured: the power of a GPU, sample by sample, integrated over the phases of the ranks on it.

Runs in the sidecar, on the energy ledger's thread; arithmetic, no I/O. Only the proportions of what comes out matter: the
ledger scales them to the energy counter.

The driver dates samples by the wall clock, the feed dates phases by the monotonic one, which all processes of a machine
share. The difference of the two is taken as a pass takes the samples: within the few seconds that they are old a clock that
is slewed moves by a fraction of a millisecond. After a step of the wall clock one interval is not measured.

What was drawn after the last that is known of phases waits for the next pass, so that both begin and end together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from exporter.recording.values import TrainingReading

Stay = tuple[float, float, str]
"""A phase of a main thread: begin and end on the monotonic clock, and its name."""
Interval = tuple[float, float, float]
"""A sample of power: begin and end on the monotonic clock, and watts."""

UNATTRIBUTED = "unattributed"

KEPT_SECONDS = 30.0
"""How long stays are remembered; the GPU collector remembers its samples for as long."""
MOST_NUMBERS = 8192
"""Numbers of one snapshot's history that are taken; no writer makes more."""
PATIENCE_SECONDS = 20.0
"""How long power waits for the phases that drew it."""
LONGEST_STEP_SECONDS = 0.2
"""Where samples are usually further apart they tell no phases."""
LONGEST_GAP_SECONDS = 1.0
"""What a sample stands for at most, and what may be missing before the first."""
USUAL_STEP_SECONDS = 0.02
CLOCK_STEP_SECONDS = 0.01
CLEAR_SAMPLES = 2.5
"""A shorter stay is mixed with its neighbours: two of 40 ms at 20 ms a sample came out as 732 and 316 W, not 784 and 142."""

PowerSource = Callable[[Mapping[str, float]], Mapping[str, Sequence[tuple[float, float]]]]
"""Gives pairs of Unix seconds and watts by UUID, those later than what is asked for; see `GpuCollector.power_samples`."""


def gone_on(stays: tuple[Stay, ...], reading: TrainingReading) -> tuple[Stay, ...]:
    """Add what a snapshot tells of the last seconds to what is known of a process."""
    history, phases, until = reading.history[-MOST_NUMBERS:], reading.history_phases, reading.history_until
    known = stays[-1][1] if stays else 0.0
    if until <= known or len(history) % 2 or any(not 0 <= place < len(phases) for place in history[::2]):
        return stays
    found = [each for each in stays if each[1] > until - KEPT_SECONDS]
    at = until - sum(history[1::2]) / 1e6
    for place, microseconds in zip(history[::2], history[1::2], strict=True):
        began, at = max(at, known), at + microseconds / 1e6
        if at <= began:
            continue
        if found and found[-1][1:] == (began, phases[place]):
            began = found.pop()[0]
        found.append((began, at, phases[place]))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Split:
    """What one GPU drew in an interval, in joules."""

    joules: Mapping[str, float]  # by phase
    blurred: Mapping[str, float]  # of them, those in stays of fewer samples than `CLEAR_SAMPLES`
    waiting: float  # drawn after the interval


class PowerSplitter:
    """What the GPUs drew since it was last divided."""

    def __init__(self) -> None:
        self._drawn: dict[str, list[Interval]] = {}
        self._asked: dict[str, float] = {}  # Unix time of the last sample
        self._divided: dict[str, float] = {}  # up to when
        self._offset: float | None = None

    def take(self, source: PowerSource, *, wall: float, now: float) -> None:
        """Take the samples that have come since the last time."""
        offset, before = wall - now, self._offset
        self._offset = offset
        if before is not None and abs(offset - before) > CLOCK_STEP_SECONDS:
            self._drawn.clear()
            self._divided.clear()
        for uuid, samples in source(self._asked).items():
            drawn, last = self._drawn.setdefault(uuid, []), self._asked.get(uuid, 0.0)
            for at, watts in samples:
                step = at - last if 0 < at - last <= LONGEST_GAP_SECONDS else USUAL_STEP_SECONDS
                drawn.append((at - step - offset, at - offset, watts))
                last = at
            self._asked[uuid] = last

    def split(self, uuid: str, ranks: Sequence[tuple[Stay, ...]], now: float) -> Split | None:
        """Divide what a GPU drew since the last time among the phases of the ranks on it.

        None where that cannot be: nothing is waiting then. Where there are no joules, all of them wait.
        """
        drawn, began = self._drawn.pop(uuid, []), self._divided.pop(uuid, None)
        if not drawn and began is None:
            return None
        newest = drawn[-1][1] if drawn else began or 0.0
        self._divided[uuid] = newest
        if began is None or not ranks or not all(ranks):
            return None
        step = sum(end - start for start, end, _ in drawn) / max(1, len(drawn))
        until = max(began, min([newest, *(stays[-1][1] for stays in ranks)]))
        late = now - until > PATIENCE_SECONDS or (drawn and drawn[0][0] > began + LONGEST_GAP_SECONDS)
        if late or step > LONGEST_STEP_SECONDS:
            return None
        self._divided[uuid] = until
        self._drawn[uuid] = [each for each in drawn if each[1] > until]
        joules: dict[str, float] = {}
        blurred: dict[str, float] = {}
        for stays in ranks:
            for stay, amount in _overlaps(drawn, stays, began, until):
                phase = UNATTRIBUTED if stay is None else stay[2]
                joules[phase] = joules.get(phase, 0.0) + amount
                if stay is not None and stay[1] - stay[0] < CLEAR_SAMPLES * step:
                    blurred[phase] = blurred.get(phase, 0.0) + amount
        return Split(
            joules, blurred, sum(watts * (end - max(start, until)) for start, end, watts in self._drawn[uuid])
        )


def _overlaps(
    drawn: Sequence[Interval], stays: Sequence[Stay], began: float, until: float
) -> Iterator[tuple[Stay | None, float]]:
    """Give the joules drawn in each stay between two moments, piece by piece; None for time of which no stay is known."""
    place = 0
    for start, stop, watts in drawn:
        at, end = max(start, began), min(stop, until)
        while at < end:
            while place < len(stays) and stays[place][1] <= at:
                place += 1
            stay = stays[place] if place < len(stays) else None
            piece = end
            if stay is not None:
                inside = stay[0] <= at
                piece = min(end, stay[1] if inside else stay[0])
                stay = stay if inside else None
            yield stay, watts * (piece - at)
            at = piece
