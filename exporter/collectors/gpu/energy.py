"""Energy of a GPU: the GPU's counter, with integrated power between two readings of the counter.

Runs in the sidecar and performs no I/O. The counter is read about every 10 s, because a reading takes milliseconds. In
between, the total grows by the integral of the driver's power samples; the next reading of the counter replaces this
integral. A GPU without a counter has the integral only. The energy of an outage, in which neither the counter nor the power
was read, is counted as a gap and is not part of the total.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from exporter.collectors.gpu.counters import CounterRule, MonotonicCounter
from exporter.collectors.job import EnergyPoint, EnergyReading

COUNTER_SOURCE = "nvml_counter"
"""Source of energy: the energy counter of the GPU."""
INTEGRAL_SOURCE = "nvml_power"
"""Source of energy: the integral of the power, for a GPU without an energy counter."""

NO_READING = "no_reading"
"""Reason of a gap: neither the counter nor the power was read."""

OUTAGE_SECONDS = 12.0
"""Minimum time without energy readings that counts as an outage. Longer than a restart of the child."""

POWER_SAMPLES_SECONDS = 30.0
"""Retention of power samples, for the attribution of energy to phases."""

HISTORY_SECONDS = 60.0
"""Retention of totals, for the attribution of energy to processes."""

MAX_LATER_SECONDS = 5.0
"""Longest time between the last sample and the reading of the counter for which the energy in between is estimated."""

CLOCK_STEP_SECONDS = 5.0
"""If a sample is earlier than the last sample by more than this time, the wall clock was set back."""

# No GPU draws 10 kW: a counter that grows faster does not count energy.
_RULE = CounterRule(scale=0.001, max_per_second=10_000.0, starts_at_zero=True)


class DriverPowerSample(NamedTuple):
    """Power of a GPU as the driver has sampled it."""

    unix_time: float  # on the driver's clock
    watts: float  # mean since the previous sample


@dataclass(frozen=True, slots=True)
class PassPower:
    """Power samples of a pass, as sent by the child.

    The steps (0, 20000) after 5000000 stand for samples at the Unix times 5.00 s and 5.02 s.
    """

    integral_joules: float  # since the child started
    end_time: float  # monotonic time of the last sample in the integral
    start_microseconds: int  # Unix time at which the first step starts
    step_microseconds: Sequence[int] = ()  # time from the previous sample to each sample
    milliwatts: Sequence[int] = ()  # power of each sample


@dataclass(slots=True)
class GpuEnergy:
    """Energy of a GPU since the exporter started to count.

    With a counter, the published total is `_base_joules` plus the growth of the power integral since the last reading of the counter. A
    reading of the counter adds the increase of the counter to the base, in place of this growth.
    """

    outage_seconds: float = OUTAGE_SECONDS
    joules: dict[str, float] = field(default_factory=dict)  # by source; only one source grows at a time
    time: float = 0.0  # monotonic time of the last reading
    corrections: dict[str, int] = field(default_factory=dict)  # of the counter, by reason
    gap_seconds: float = 0.0  # time of outages, including the current outage up to `_gap_end`
    gap_joules: float = 0.0  # energy of outages, measured by the counter
    new_gap_joules: float = 0.0  # part of gap_joules that is not logged yet
    power_samples: deque[DriverPowerSample] = field(default_factory=deque)  # oldest first
    history: deque[EnergyPoint] = field(default_factory=deque)  # totals, oldest first
    _counter: MonotonicCounter | None = None
    _integral_joules: float = 0.0  # of the power, over all children
    _base_joules: float = 0.0  # total at the last reading of the counter
    _integral_at_base_joules: float = 0.0  # `_integral_joules` at the time of that reading
    _integral_time: float = 0.0  # monotonic time of the last sample in `_integral_joules`
    _last_watts: float | None = None  # power of that sample
    _child_integral_joules: float = 0.0  # of the power, as the current child reported it last
    _child: int | None = None  # the current child; None before the first power samples
    _counter_time: float = 0.0  # monotonic time of the counter's last accepted reading
    _has_outage: bool = False  # since the last reading of the counter
    _gap_end: float = 0.0  # monotonic time up to which `gap_seconds` is counted

    @property
    def total_joules(self) -> float | None:
        """Energy by all sources; None before the first reading."""
        return sum(self.joules.values()) if self.joules else None

    @property
    def register_joules(self) -> float | None:
        """Value of the GPU's counter, extended by the power integral up to the last reading.

        None without a counter, and while its value is in doubt.
        """
        raw = None if self._counter is None else self._counter.raw
        if raw is None:
            return None
        return raw * _RULE.scale + self._joules_since_counter

    @property
    def _joules_since_counter(self) -> float:
        """Power integral since the last reading of the counter."""
        return max(0.0, self._integral_joules - self._integral_at_base_joules)

    def add(
        self, power: PassPower | None, millijoules: float | None, time: float, child: int, *, is_paused: bool
    ) -> None:
        """Add the readings of a pass: power samples, and the energy counter in millijoules. Either may be None.

        `time` is the monotonic time at which the counter was read. With `is_paused`, the total does not grow.
        """
        is_first_counter = millijoules is not None and self._counter is None
        if is_first_counter:
            self._counter = MonotonicCounter(_RULE)
            self._integral_at_base_joules = self._integral_joules
        if power is not None:
            self._add_power(power, child, is_paused=is_paused)
        if is_first_counter:
            # The counter counts from its first reading. The energy of this pass before the reading is the power integral.
            self._base_joules += self._joules_since_counter
            self._integral_at_base_joules = self._integral_joules
        if millijoules is not None and self._counter is not None:
            self._add_counter(self._counter, millijoules, time, child, is_paused=is_paused)
        self._add_to_history()

    def _add_power(self, pass_power: PassPower, child: int, *, is_paused: bool) -> None:
        """Add the samples, and the growth of the integral since the previous pass. The integral of a new child starts at 0."""
        self._add_power_samples(pass_power)
        previous_joules = self._child_integral_joules if child == self._child else 0.0
        if child != self._child or pass_power.end_time > self.time:
            self._record_reading(pass_power.end_time)
        if child != self._child:  # the samples of a new child begin after the last reading of the counter
            self._integral_at_base_joules = min(self._integral_at_base_joules, self._integral_joules)
        joules_since_counter = self._joules_since_counter
        increase_joules = max(0.0, pass_power.integral_joules - previous_joules)
        self._child_integral_joules, self._child = pass_power.integral_joules, child
        self._integral_joules += increase_joules
        self._integral_time = pass_power.end_time
        if pass_power.milliwatts:
            self._last_watts = pass_power.milliwatts[-1] / 1000
        if self._counter is not None and is_paused:
            # The growth since the last reading of the counter includes the pause: the base decreases by the same amount.
            self._base_joules -= self._joules_since_counter - joules_since_counter
        if self._counter is None:
            self.joules[INTEGRAL_SOURCE] = self.joules.get(INTEGRAL_SOURCE, 0.0) + (
                0.0 if is_paused else increase_joules
            )
        else:
            self._publish_counter()

    def _add_counter(
        self, counter: MonotonicCounter, millijoules: float, time: float, child: int, *, is_paused: bool
    ) -> None:
        """Add a reading of the counter in place of the power integral since the last reading.

        After an outage, the increase is divided. The total receives the energy of the power samples before and after the outage, and the
        gap receives the rest.
        """
        increase_joules = counter.advance(millijoules, time, child) * _RULE.scale
        self.corrections = counter.corrections
        if counter.raw is None:  # the number is in doubt until the next reading
            return
        self._record_reading(time)
        self._counter_time = time
        # On a busy machine, the counter is read later than the last sample. The energy in between is part of the counter, and the
        # samples of the next pass contain this energy again.
        later_seconds = min(max(0.0, time - self._integral_time), MAX_LATER_SECONDS)
        later_joules = (self._last_watts or 0.0) * later_seconds
        if is_paused:
            self._base_joules += self._joules_since_counter
        elif self._has_outage:
            gap_joules = max(0.0, increase_joules - self._joules_since_counter - later_joules)
            self.gap_joules += gap_joules
            self.new_gap_joules += gap_joules
            self._base_joules += increase_joules - gap_joules
        else:
            self._base_joules += increase_joules
        self._has_outage = False
        self._integral_at_base_joules = self._integral_joules + later_joules
        self._publish_counter()

    def count_gap(self, now: float) -> None:
        """Add the time of an outage up to the monotonic time *now* to `gap_seconds`.

        Called during an outage too, because the next reading may come hours later or never.
        """
        if self.joules and now - self.time >= self.outage_seconds:
            self.gap_seconds += max(0.0, now - max(self.time, self._gap_end))
            self._gap_end = max(self._gap_end, now)

    def reading(
        self, *, uuid: str, job_index: int, name: str, watts: float | None, is_up: bool
    ) -> EnergyReading:
        """Return the energy reading of the GPU. The field `joules` is None unless the GPU is up and a reading has been accepted."""
        has_counter = self._counter is not None
        return EnergyReading(
            component="gpu",
            device=uuid,
            source=COUNTER_SOURCE if has_counter else INTEGRAL_SOURCE,
            is_measured=True,
            joules=self.total_joules if is_up else None,
            watts=watts,
            time=self.time,
            name=name,
            index=str(job_index),
            # Without a counter the integral is `joules` itself.
            power_joules=self._integral_joules if has_counter else None,
            corrections=dict(self.corrections),
            gap_seconds={NO_READING: self.gap_seconds} if self.gap_seconds else {},
            gap_joules={NO_READING: self.gap_joules} if self.gap_joules else {},
            register_joules=self.register_joules,
            history=tuple(self.history),
        )

    def is_current(self, now: float) -> bool:
        """Return True if the last readings are recent enough to publish the total."""
        # At the default period the power is read in every pass, and the counter in every tenth pass.
        is_recent = (
            now - self.time < self.outage_seconds / 4 or now - self._counter_time < self.outage_seconds
        )
        return bool(self.joules) and is_recent

    def samples_after(self, after: float) -> list[DriverPowerSample]:
        """Return the power samples after a Unix time, or all samples if the wall clock was set back."""
        if self.power_samples and after > self.power_samples[-1].unix_time + CLOCK_STEP_SECONDS:
            after = 0.0
        return [sample for sample in self.power_samples if sample.unix_time > after]

    def _record_reading(self, time: float) -> None:
        """Record the time of an accepted reading, and an outage if the previous reading is at least `outage_seconds` older."""
        self.count_gap(time)
        if self.joules and time - self.time >= self.outage_seconds:
            self._has_outage = True
        self.time = max(self.time, time)

    def _publish_counter(self) -> None:
        """Set the total of the counter."""
        # A total never decreases: after a downward correction it stays constant until the counter has caught up.
        previous_joules = self.joules.get(COUNTER_SOURCE, 0.0)
        self.joules[COUNTER_SOURCE] = max(previous_joules, self._base_joules + self._joules_since_counter)

    def _add_to_history(self) -> None:
        """Add the total at the time of the last reading, unless the history has this time already."""
        total_joules = self.total_joules
        if total_joules is None or (self.history and self.history[-1].time >= self.time):
            return
        self.history.append(EnergyPoint(self.time, total_joules))
        while self.history[0].time < self.time - HISTORY_SECONDS:
            self.history.popleft()

    def _add_power_samples(self, pass_power: PassPower) -> None:
        """Add the samples after the last one, and discard old ones. If the wall clock was set back, discard all earlier samples."""
        samples, microseconds = self.power_samples, pass_power.start_microseconds
        if not pass_power.step_microseconds:
            return
        newest_time = (microseconds + sum(pass_power.step_microseconds)) / 1e6
        if samples and newest_time < samples[-1].unix_time - CLOCK_STEP_SECONDS:
            samples.clear()
        last_time = samples[-1].unix_time if samples else 0.0
        for step_microseconds, milliwatts in zip(
            pass_power.step_microseconds, pass_power.milliwatts, strict=True
        ):
            microseconds += step_microseconds
            if microseconds / 1e6 > last_time:  # the previous child may have sent earlier samples
                samples.append(DriverPowerSample(microseconds / 1e6, milliwatts / 1000))
        while samples[0].unix_time < newest_time - POWER_SAMPLES_SECONDS:
            samples.popleft()
