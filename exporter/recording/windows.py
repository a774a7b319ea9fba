"""Windows: the seconds that a clock cuts, and what the samples in one of them add up to.

Used by the recording thread of the training process alone, so nothing here locks.
"""

from __future__ import annotations

from math import floor, fsum, inf, isfinite
from operator import mul

from exporter.recording.aggregations import AGGREGATIONS, Aggregation
from exporter.recording.quantiles import Quantiles

STEP_TOLERANCE = 0.1
"""A step of the wall clock above this share of a window closes it and aligns anew."""


class WindowClock:
    """Cuts time into windows aligned to multiples of their length on the wall clock.

    All ranks' windows cover the same seconds, since all align to the same multiples; a window's end is then
    waited for on the monotonic clock, so that a slewed or stepped wall clock never stretches it.

    Attributes:
        seconds: The windows' length.
        started: Unix time at which the present window began.
        ended: Unix time at which it is to end: a multiple of `seconds`.
        due: Monotonic time of that end.
    """

    __slots__ = ("_offset", "due", "ended", "seconds", "started")

    def __init__(self, seconds: float, *, wall: float, monotonic: float) -> None:
        self.seconds = seconds
        self._offset = wall - monotonic
        self.started = wall
        self.ended = self._boundary_after(wall)
        self.due = monotonic + self.ended - wall

    def late(self, *, wall: float, monotonic: float) -> float | None:
        """Say for how many seconds the window has been over; 0 after a step of the wall clock, None if it is not."""
        if monotonic >= self.due:
            return monotonic - self.due
        return 0.0 if abs(wall - monotonic - self._offset) > STEP_TOLERANCE * self.seconds else None

    def advance(self, *, wall: float, monotonic: float) -> tuple[float, float]:
        """Begin the next window, aligned anew.

        Returns:
            Start and end of the window that is over, Unix time. After a step of the wall clock it ends now.
        """
        stepped = abs(wall - monotonic - self._offset) > STEP_TOLERANCE * self.seconds
        over = (self.started, min(wall, self.ended) if stepped else self.ended)
        self._offset = wall - monotonic
        self.ended = self._boundary_after(wall)
        # After a suspension the present window began at the last boundary, not where the old one ended.
        self.started = wall if stepped else max(over[1], self.ended - self.seconds)
        self.due = monotonic + self.ended - wall
        return over

    def _boundary_after(self, wall: float) -> float:
        # A boundary that is nearly reached is skipped: the clock was slewed while the last window ran, and a
        # window of a few milliseconds would be of no use.
        return (floor(wall / self.seconds + STEP_TOLERANCE) + 1) * self.seconds


class ExactSum:
    """A running sum in twice the precision of a float, so that no sample is lost to rounding."""

    __slots__ = ("_high", "_low")

    def __init__(self) -> None:
        self._high = 0.0
        self._low = 0.0

    def add(self, samples: list[float]) -> None:
        """Add finite samples; beyond the range of floats the sum becomes infinite."""
        try:
            high = fsum((self._high, self._low, *samples))
            self._low = fsum((self._high, self._low, -high, *samples))
            self._high = high
        except (OverflowError, ValueError):
            self._high, self._low = sum(samples, self._high), 0.0

    @property
    def value(self) -> float:
        """The sum, correctly rounded."""
        return self._high


class Window:
    """What the samples of one open window add up to.

    Args:
        aggregations: Those wanted; only what they need is computed.

    Attributes:
        samples: How many there are.
        needs_order: Whether a quantile is wanted, so that `add` needs all samples sorted.
        last: The latest.
        low: The smallest.
        high: The largest.
        deviation: Sum of their squared deviations from the mean, where STDDEV is wanted.
    """

    __slots__ = (
        "_mean",
        "_quantiles",
        "_ratios",
        "_spread",
        "_sum",
        "_wanted",
        "deviation",
        "high",
        "last",
        "low",
        "needs_order",
        "samples",
    )

    def __init__(self, aggregations: frozenset[Aggregation]) -> None:
        rows = [(each, row) for each, row in AGGREGATIONS.items() if each in aggregations]
        self._wanted = [(each, row.compute) for each, row in rows if row.compute is not None]
        self._ratios = [(each, row.ratio) for each, row in rows if row.ratio is not None]
        self.samples = 0
        self._sum = ExactSum()
        self.low = self.high = self.last = 0.0
        self._spread = Aggregation.STDDEV in aggregations
        self._mean = self.deviation = 0.0
        self.needs_order = bool(self._ratios)
        self._quantiles = Quantiles() if self._ratios else None

    @property
    def total(self) -> float:
        """Their sum."""
        return self._sum.value

    def add(self, samples: list[float], ordered: list[float]) -> None:
        """Take in at least one finite sample.

        Args:
            samples: In order of arrival.
            ordered: The same, sorted ascending; its two ends are enough where no quantile is wanted.
        """
        self.low = min(self.low, ordered[0]) if self.samples else ordered[0]
        self.high = max(self.high, ordered[-1]) if self.samples else ordered[-1]
        self.last = samples[-1]
        self._sum.add(samples)
        if self._spread:
            self._add_spread(samples)
        if self._quantiles is not None:
            self._quantiles.add(ordered)
        self.samples += len(samples)

    def values(self) -> dict[Aggregation, float]:
        """Compute each windowed aggregation; nothing when the window is empty or a value is out of range."""
        if not self.samples:
            return {}
        found = {each: compute(self) for each, compute in self._wanted}
        if self._quantiles is not None:
            answers = self._quantiles.quantiles(ratio for _, ratio in self._ratios)
            found.update(zip((each for each, _ in self._ratios), answers, strict=True))
        # A sum beyond the floating range is no number to show: absent, like every other lack of data.
        return {each: value for each, value in found.items() if isfinite(value)}

    def _add_spread(self, samples: list[float]) -> None:
        """Merge the squared deviations of a batch into the window's (Chan, Golub, LeVeque 1979)."""
        count, batch = self.samples, len(samples)
        try:
            mean = fsum(samples) / batch
        except OverflowError:
            self.deviation = inf
            return
        deviations = [sample - mean for sample in samples]
        shift = mean - self._mean
        self.deviation += sum(map(mul, deviations, deviations)) + shift * shift * count * batch / (
            count + batch
        )
        self._mean += shift * batch / (count + batch)
