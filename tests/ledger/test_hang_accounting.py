"""Badput of a hang: counted during the open step, and deducted from the work at the end of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.ledger.goodput.accounting import Goodput
from exporter.ledger.goodput.attempt import Attempt
from exporter.ledger.goodput.hang import HangRule
from exporter.recording.values import TrainingReading

RULE = HangRule(min_seconds=10.0, step_factor=2.0)


class AccountedJob:
    """Goodput of a process whose readings a test drives."""

    def __init__(self) -> None:
        self.goodput = Goodput()
        self.goodput.start(Attempt("p", "r", 1, 0.0, 0.0), new_after_seconds=3600.0)
        self.reading = TrainingReading(phase="iteration", loop=1, first_step=0, step=0)
        self.clock_seconds = 0.0

    def work(self, seconds: float) -> None:
        """Spend time in the open iteration."""
        self.clock_seconds += seconds
        phases = {"iteration": self.reading.phases.get("iteration", 0.0) + seconds}
        self.reading = replace(self.reading, phases=phases, open_seconds=self.reading.open_seconds + seconds)
        self.update()

    def end_step(self, *, is_failed: bool = False) -> None:
        """End the open iteration."""
        reading, open_seconds = self.reading, self.reading.open_seconds
        if is_failed:
            failed_seconds = reading.failed_seconds + open_seconds
            self.reading = replace(reading, open_seconds=0.0, failed_seconds=failed_seconds)
        else:
            step, work = (reading.step or 0) + 1, reading.work_seconds + open_seconds
            self.reading = replace(
                reading, open_seconds=0.0, work_seconds=work, step=step, steps=reading.steps + 1
            )
        self.update()

    def save(self) -> None:
        """Save a checkpoint of all finished steps."""
        reading = self.reading
        self.reading = replace(reading, committed_step=reading.step, committed_seconds=reading.work_seconds)
        self.update()

    def update(self) -> None:
        is_hanging = self.reading.steps > 0 and self.reading.open_seconds > RULE.limit_seconds(self.reading)
        self.goodput.update(
            self.reading, written_at=self.clock_seconds, is_final=False, is_hanging=is_hanging
        )

    def counters(self) -> list[float]:
        """Return the values that must not decrease."""
        goodput = self.goodput
        return [goodput.wall_seconds, goodput.productive_seconds, *goodput.badput.values()]

    def check(self) -> None:
        """Check that productive, uncommitted and lost seconds add up to the wall time."""
        accounted_seconds = (
            self.goodput.productive_seconds
            + self.goodput.uncommitted_seconds
            + sum(self.goodput.badput.values())
        )
        assert self.goodput.wall_seconds == pytest.approx(accounted_seconds, abs=1e-6)
        assert self.goodput.wall_seconds == pytest.approx(self.clock_seconds, abs=1e-6)


def test_the_work_of_a_hung_step_is_counted_as_badput_immediately_and_once() -> None:
    job = AccountedJob()
    job.work(5.0)
    job.end_step()
    job.work(100.0)
    values_during_hang = [job.goodput.badput["hang"], job.goodput.uncommitted_seconds]
    job.end_step()
    job.save()

    assert values_during_hang == [100, 5]
    assert job.goodput.badput["hang"] == 100
    assert job.goodput.productive_seconds == 5


def test_a_hung_step_that_raises_is_counted_once() -> None:
    job = AccountedJob()
    job.work(5.0)
    job.end_step()
    job.work(100.0)
    job.end_step(is_failed=True)

    assert job.goodput.badput["hang"] == 100
    assert job.goodput.badput["lost_progress"] == 0


def test_an_unobserved_hang_is_counted_when_the_process_ends() -> None:
    job = AccountedJob()
    job.work(5.0)
    job.end_step()
    job.goodput.end(job.clock_seconds, "signal", is_completed=False, hang=RULE)
    badput_of_short_step = dict(job.goodput.badput)
    job.goodput.reopen()
    job.goodput.end(job.clock_seconds + 100.0, "signal", is_completed=False, hang=RULE)

    assert badput_of_short_step["hang"] == 0
    assert job.goodput.badput["hang"] == 100


def test_a_long_first_step_of_a_killed_process_is_lost_progress_and_not_a_hang() -> None:
    job = AccountedJob()
    job.work(100.0)
    job.goodput.end(job.clock_seconds, "signal", is_completed=False, hang=RULE)

    assert job.goodput.badput["hang"] == 0
    assert job.goodput.badput["lost_progress"] == 100


def test_a_process_that_is_killed_in_a_validation_does_not_hang() -> None:
    job = AccountedJob()
    job.work(5.0)
    job.end_step()
    open_seconds = 20.0
    job.reading = replace(
        job.reading,
        phase="validation",
        phases={"iteration": 5.0 + open_seconds, "validation": 1.0},
        open_seconds=open_seconds,
    )
    job.goodput.update(job.reading, written_at=26.0, is_final=False)
    job.goodput.end(26.0, "signal", is_completed=False, hang=RULE)

    assert job.goodput.badput["hang"] == 0
    assert job.goodput.badput["lost_progress"] == open_seconds


events = st.one_of(
    st.tuples(st.just("work"), st.floats(0.1, 200.0)),
    st.tuples(st.sampled_from(["end", "fail", "save"]), st.just(0.0)),
)


@given(st.lists(events, max_size=30))
def test_wall_time_is_the_sum_of_its_parts_and_no_counter_decreases_over_hangs(
    further_events: Sequence[tuple[str, float]],
) -> None:
    job = AccountedJob()
    previous_counters = job.counters()
    for event, seconds in [("work", 5.0), ("end", 0.0), *further_events]:
        if event == "work":
            job.work(seconds)
        elif event == "save":
            job.save()
        else:
            job.end_step(is_failed=event == "fail")
        job.check()
        counters = job.counters()
        assert all(
            counter >= previous - 1e-9 for previous, counter in zip(previous_counters, counters, strict=True)
        )
        previous_counters = counters
    job.goodput.end(job.clock_seconds, "signal", is_completed=False, hang=RULE)
    job.check()
