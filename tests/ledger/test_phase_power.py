"""Power by phase from a coarse counter: simulated devices whose truth is known."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest

from exporter.ledger.phase_power import BIN_SECONDS, PhasePower

STEP = (
    ("data_loading", 120.0, 0.03),
    ("forward", 600.0, 0.08),
    ("backward", 700.0, 0.16),
    ("optimizer", 300.0, 0.02),
)
"""Phase, watts, seconds: a step of 290 ms."""


@dataclass
class Simulated:
    """Ten minutes of a training whose power by phase is known."""

    scale: float = 1.0
    minutes: float = 10.0
    seed: int = 1
    duty: float = 1.0
    """Which part of each update the sensor sees."""

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        self.spans: list[tuple[float, float, str, float]] = []
        now = 100.0
        while now < 100.0 + 60 * self.minutes:
            for phase, watts, seconds in STEP:
                lasts = seconds * self.scale * chance.uniform(0.9, 1.1)
                self.spans.append((now, now + lasts, phase, watts))
                now += lasts
        self.end = now
        self.joules = {phase: 0.0 for phase, _, _ in STEP}
        for began, ended, phase, watts in self.spans:
            self.joules[phase] += (ended - began) * watts

    def bins(self) -> list[tuple[float, tuple[tuple[str, float], ...]]]:
        """The timeline, on multiples of a tenth of a second."""
        seconds: dict[int, dict[str, float]] = {}
        for began, ended, phase, _ in self.spans:
            place = int(began / BIN_SECONDS)
            while place * BIN_SECONDS < ended:
                inside = min(ended, (place + 1) * BIN_SECONDS) - max(began, place * BIN_SECONDS)
                if inside > 0:
                    parts = seconds.setdefault(place, {})
                    parts[phase] = parts.get(phase, 0.0) + inside
                place += 1
        return [
            ((place + 1) * BIN_SECONDS, tuple(parts.items())) for place, parts in sorted(seconds.items())
        ][1:-1]

    def counter(self, period: float, offset: float = 0.037) -> Iterator[tuple[float, float]]:
        """(time of the update, joules shown from then on)."""
        total, place, now = 0.0, 0, 100.0
        update = 100.0 + offset
        while update < self.end:
            seen_from = update - period * self.duty
            window = 0.0
            while place < len(self.spans) and now < update:
                _, ended, _, watts = self.spans[place]
                until = min(ended, update)
                window += max(0.0, until - max(now, seen_from)) * watts
                now = until
                place += ended <= update
            total += window / self.duty
            yield update, total
            update += period

    def readings(self, every: float, period: float = 0.1) -> Iterator[tuple[float, float]]:
        """What somebody reads who looks every so often: (joules, at)."""
        look, shown = 101.0, 0.0
        for update, joules in self.counter(period):
            while look < update:
                yield shown, look
                look += every
            shown = joules


def fitted(simulated: Simulated, every: float) -> PhasePower:
    power = PhasePower()
    bins = simulated.bins()
    place = 0
    for joules, at in simulated.readings(every):
        power.add_reading(joules, at)
        fresh = []
        while place < len(bins) and bins[place][0] <= at + 0.5:
            fresh.append(bins[place])
            place += 1
        power.add_timeline([*bins[max(0, place - len(fresh) - 5) : place - len(fresh)], *fresh])
    return power


def shares(powers: Mapping[str, float], simulated: Simulated) -> dict[str, float]:
    """The error of each phase's energy, when its share of the total is taken by these powers."""
    seconds = {phase: simulated.joules[phase] / watts for phase, watts, _ in STEP}
    estimated = {phase: powers[phase] * seconds[phase] for phase in seconds}
    scale = sum(simulated.joules.values()) / sum(estimated.values())
    return {phase: estimated[phase] * scale / simulated.joules[phase] - 1 for phase in seconds}


SECONDS_LONG = 10.0
"""Steps of 2.9 s."""


@pytest.mark.parametrize("every", [1.0, 2.0, 2.013, 5.0])
def test_least_squares_find_the_energy_of_each_phase(every: float) -> None:
    simulated = Simulated(SECONDS_LONG)
    powers = fitted(simulated, every).powers()

    assert powers is not None
    error = shares(powers, simulated)
    assert abs(error["forward"]) < 0.02
    assert abs(error["backward"]) < 0.02
    # Together six percent of the energy; one that is measured too high makes its neighbour too low.
    assert abs(error["data_loading"]) < 0.2
    assert abs(error["optimizer"]) < 0.2


def test_phases_as_long_as_the_counters_period_are_found_exactly() -> None:
    simulated = Simulated(100.0, minutes=20.0)
    power = fitted(simulated, 1.0)
    powers = power.powers()

    assert powers is not None
    assert all(abs(error) < 0.03 for error in shares(powers, simulated).values())
    assert power.quality()["backward"] > 0.8


@pytest.mark.parametrize("every", [0.1, 1.0, 2.0, 2.013, 5.0])
@pytest.mark.parametrize("duty", [1.0, 0.25])
def test_powers_of_phases_that_are_too_short_are_not_made_up(every: float, duty: float) -> None:
    assert fitted(Simulated(1.0, duty=duty), every).powers() is None


def test_a_sensor_that_looks_a_quarter_of_the_time_is_believed_only_where_it_does_not_matter() -> None:
    simulated = Simulated(SECONDS_LONG, duty=0.25)
    powers = fitted(simulated, 2.0).powers()

    if powers is not None:
        error = shares(powers, simulated)
        assert abs(error["forward"]) < 0.03
        assert abs(error["backward"]) < 0.03


def test_before_there_are_enough_increments_there_is_no_answer() -> None:
    assert fitted(Simulated(SECONDS_LONG, minutes=0.3), 1.0).powers() is None
    assert PhasePower().powers() is None
    assert PhasePower().quality() == {}


def test_a_counter_that_falls_and_a_timeline_with_holes_add_nothing() -> None:
    power = PhasePower()
    for second in range(100):
        power.add_reading(1000.0 - second, float(second))
        power.add_timeline([(second + tenth / 10, (("forward", 0.1),)) for tenth in range(1, 11)])
    holes = PhasePower()
    for second in range(100):
        holes.add_reading(100.0 * second, float(second))
        holes.add_timeline([(second + tenth / 10, (("forward", 0.1),)) for tenth in range(1, 6)])

    assert power.powers() is None
    assert holes.powers() is None


def test_one_phase_alone_draws_what_the_counter_says() -> None:
    power = PhasePower()
    for second in range(100):
        power.add_timeline([(second + tenth / 10, (("forward", 0.1),)) for tenth in range(1, 11)])
        power.add_reading(450.0 * second, float(second) + 0.5)

    powers = power.powers()
    assert powers is not None
    assert powers["forward"] == pytest.approx(450.0)
    assert power.quality() == {"forward": 1.0}
