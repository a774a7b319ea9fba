"""Energy of a GPU: the card's counter, with integrated power between the counter's readings.

Runs in the sidecar; pure. The counter is read every 10 s, since a reading costs milliseconds; the integral of the driver's
power samples grows with every pass. A reading of the counter replaces the integral since the reading before. Energy of a
time without counter and power (an outage) is not added to the total, but counted as a gap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from exporter.collectors.gpu.counters import CounterRule, MonotonicCounter
from exporter.collectors.job import EnergyPoint, EnergyReading

COUNTER_SOURCE, INTEGRAL_SOURCE = "nvml_counter", "nvml_power"

NO_READING = "no_reading"
"""Reason of a gap: neither the counter nor power was read."""

OUTAGE_SECONDS = 12.0
"""Longest time without energy readings that the next reading of the counter still fills; covers a restart of the child."""

POWER_SAMPLES_SECONDS = 30.0
"""Retention of power samples, for the attribution of energy to phases."""

HISTORY_SECONDS = 60.0
"""Retention of totals, for the attribution of energy to processes."""

CLOCK_STEP_SECONDS = 5.0
"""Minimum age of samples, relative to the last samples, that is regarded as a step of the wall clock."""

# No card draws 10 kW; a counter that grows faster is not the energy.
_RULE = CounterRule(scale=0.001, most_per_second=10_000.0, from_zero=True)

PowerSample = tuple[float, float]
"""Unix seconds by the driver's clock, and the mean watts since the sample before."""


@dataclass(frozen=True, slots=True)
class PowerBlock:
    """Power of a pass, as sent by the child."""

    integral_joules: float  # since the child started
    until: float  # monotonic time of the last sample in the integral
    first: int  # microseconds of Unix time before the first step
    steps: Sequence[int] = ()  # microseconds between samples
    milliwatts: Sequence[int] = ()


@dataclass(slots=True)
class GpuEnergy:
    """Energy of a GPU since the exporter started to count."""

    outage_seconds: float = OUTAGE_SECONDS
    joules: dict[str, float] = field(default_factory=dict)  # by source; only a single source grows at a time
    at: float = 0.0  # monotonic time of the last reading
    resets: dict[str, int] = field(default_factory=dict)
    gap_seconds: float = 0.0  # time of outages
    gap_joules: float = 0.0  # energy of outages, measured by the counter
    new_gap_joules: float = 0.0  # not yet logged part of gap_joules
    power_samples: deque[PowerSample] = field(default_factory=deque)  # oldest first
    history: deque[EnergyPoint] = field(default_factory=deque)  # totals, oldest first
    _counter: MonotonicCounter | None = None
    _integral: float = 0.0  # joules, over all children
    _base_joules: float = 0.0  # of the counter, at the last reading
    _integral_at_base: float = 0.0
    _raw_integral: float = 0.0  # of the present child
    _child: int | None = None
    _counter_at: float = 0.0  # monotonic time of the counter's last accepted reading
    _outage: bool = False  # since the last reading of the counter

    @property
    def total_joules(self) -> float | None:
        """Energy by all sources; None before the first reading."""
        return sum(self.joules.values()) if self.joules else None

    @property
    def register_joules(self) -> float | None:
        """Energy of the card's counter, extended by the integral up to the last reading; None without a counter."""
        raw = None if self._counter is None else self._counter.raw
        return None if raw is None else raw * _RULE.scale + self._integral - self._integral_at_base

    def take(
        self, power: PowerBlock | None, millijoules: float | None, time: float, child: int, *, paused: bool
    ) -> None:
        """Add the readings of a pass: power, and the counter at a monotonic time; with `paused` nothing is counted."""
        first = millijoules is not None and self._counter is None
        if first:
            self._counter = MonotonicCounter(_RULE)
        if power is not None:
            self._take_power(power, child, paused=paused)
        if first:
            self._integral_at_base = self._integral
        if millijoules is not None and self._counter is not None:
            self._take_counter(self._counter, millijoules, time, child, paused=paused)
        self._keep_total()

    def _take_power(self, block: PowerBlock, child: int, *, paused: bool) -> None:
        self._keep_samples(block)
        previous_integral = self._raw_integral if child == self._child else 0.0
        if child != self._child or block.until > self.at:
            self._read(block.until)
        grown = max(0.0, block.integral_joules - previous_integral)
        self._raw_integral, self._child = block.integral_joules, child
        self._integral += grown
        if paused:
            self._base_joules -= grown
        if self._counter is None:
            self.joules[INTEGRAL_SOURCE] = self.joules.get(INTEGRAL_SOURCE, 0.0) + (0.0 if paused else grown)
        else:
            self._publish_counter()

    def _take_counter(
        self, counter: MonotonicCounter, millijoules: float, time: float, child: int, *, paused: bool
    ) -> None:
        previous_raw = counter.raw
        grown = counter.advance(millijoules, time, child) * _RULE.scale
        self.resets = counter.resets
        if counter.raw is None:  # in doubt until the next number
            return
        self._read(time)
        self._counter_at = time
        measured = self._integral - self._integral_at_base
        if paused:
            self._base_joules += measured
        elif self._outage and previous_raw is not None:
            missed = max(0.0, grown - measured)
            self.gap_joules += missed
            self.new_gap_joules += missed
            self._base_joules += grown - missed
        else:
            self._base_joules += grown
        self._outage = False
        self._integral_at_base = self._integral
        self._publish_counter()

    def reading(
        self, *, uuid: str, number: int, name: str, watts: float | None, answers: bool
    ) -> EnergyReading:
        """Return the energy so far; without joules if the GPU is down or no reading was accepted."""
        counted = self._counter is not None
        return EnergyReading(
            component="gpu",
            device=uuid,
            source=COUNTER_SOURCE if counted else INTEGRAL_SOURCE,
            measured=True,
            joules=self.total_joules if answers else None,
            watts=watts,
            at=self.at,
            name=name,
            index=str(number),
            # Without a counter the integral is `joules` itself.
            power_joules=self._integral if counted else None,
            resets=dict(self.resets),
            gap_seconds={NO_READING: self.gap_seconds} if self.gap_seconds else {},
            gap_joules={NO_READING: self.gap_joules} if self.gap_joules else {},
            register_joules=self.register_joules,
            history=tuple(self.history),
        )

    def is_current(self, now: float) -> bool:
        """Return True if the last readings are recent enough to publish the total."""
        recent = now - self.at < self.outage_seconds / 4 or now - self._counter_at < self.outage_seconds
        return bool(self.joules) and recent

    def samples_after(self, since: float) -> list[PowerSample]:
        """Return the power samples after a Unix time; all of them if the wall clock was set back."""
        if self.power_samples and since > self.power_samples[-1][0] + CLOCK_STEP_SECONDS:
            since = 0.0
        return [sample for sample in self.power_samples if sample[0] > since]

    def _read(self, time: float) -> None:
        """Record the time of an accepted reading; a long time after the previous reading is an outage."""
        if self.joules and time - self.at >= self.outage_seconds:
            self.gap_seconds += time - self.at
            self._outage = True
        self.at = max(self.at, time)

    def _publish_counter(self) -> None:
        since = max(0.0, self._integral - self._integral_at_base)
        # A correction downwards waits until the total has caught up: a total never falls.
        previous_joules = self.joules.get(COUNTER_SOURCE, 0.0)
        self.joules[COUNTER_SOURCE] = max(previous_joules, self._base_joules + since)

    def _keep_total(self) -> None:
        total = self.total_joules
        if total is None or (self.history and self.history[-1].at >= self.at):
            return
        self.history.append(EnergyPoint(self.at, total))
        while self.history[0].at < self.at - HISTORY_SECONDS:
            self.history.popleft()

    def _keep_samples(self, block: PowerBlock) -> None:
        samples, at = self.power_samples, block.first
        if not block.steps:
            return
        newest = (at + sum(block.steps)) / 1e6
        if samples and newest < samples[-1][0] - CLOCK_STEP_SECONDS:
            samples.clear()
        last = samples[-1][0] if samples else 0.0
        for step, power in zip(block.steps, block.milliwatts, strict=True):
            at += step
            if at / 1e6 > last:  # not already sent by the previous child
                samples.append((at / 1e6, power / 1000))
        while samples[0][0] < newest - POWER_SAMPLES_SECONDS:
            samples.popleft()
