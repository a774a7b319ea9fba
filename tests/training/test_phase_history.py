"""Phase history: the intervals of the phases in the last seconds."""

from __future__ import annotations

from itertools import chain

import pytest
from training_support import SimulatedTraining

from exporter.training import kinds


def test_the_history_has_the_interval_of_each_phase_of_the_last_seconds() -> None:
    job = SimulatedTraining(start_seconds=0.0)
    job.enter(kinds.TRAINING_ITERATION, 10.0)
    job.run_block(kinds.MODEL_FORWARD, 10.25, 10.32)
    job.publish(17.25)

    assert history(job)[-3:] == [
        (10.0, 10.25, "iteration"),
        (10.25, 10.32, "forward"),
        (10.32, 17.24, "iteration"),
    ]


def test_the_history_of_hundreds_of_changes_a_second_has_the_share_of_each_phase() -> None:
    job = SimulatedTraining(start_seconds=0.0)
    for step in range(200):
        step_start = step / 100
        job.run_block(kinds.MODEL_FORWARD, step_start, step_start + 0.002)
        job.run_block(kinds.MODEL_BACKWARD, step_start + 0.002, step_start + 0.008)
    job.publish(2.0)

    seconds_by_phase = dict.fromkeys(("forward", "backward", "init"), 0.0)
    for start_seconds, end_seconds, phase in history(job):
        seconds_by_phase[phase] += end_seconds - start_seconds
    assert seconds_by_phase == pytest.approx({"forward": 0.4, "backward": 1.2, "init": 0.4}, abs=0.03)


def test_the_history_is_bounded_in_time_and_reuses_its_complete_groups() -> None:
    job = SimulatedTraining(start_seconds=0.0)
    for step in range(2000):
        job.run_block(kinds.MODEL_FORWARD, step / 100, step / 100 + 0.005)
        if step == 1500:
            job.publish(15.005)
            initial_intervals = job.last_published().intervals
    job.publish(20.0)

    final_intervals = job.last_published().intervals
    assert 7.0 <= sum(sum(group[1::2]) for group in final_intervals) / 1e6 <= 9.0
    assert len({*map(id, initial_intervals)} & {*map(id, final_intervals)}) >= 2


def history(job: SimulatedTraining) -> list[tuple[float, float, str]]:
    """Return start, end and phase of each interval in the reading."""
    reading = job.last_published()
    indices_and_microseconds = tuple(chain.from_iterable(reading.intervals))
    phase_indices, durations = indices_and_microseconds[::2], indices_and_microseconds[1::2]
    start_seconds = reading.history_until - sum(durations) / 1e6
    intervals = []
    for index, microseconds in zip(phase_indices, durations, strict=True):
        end_seconds = start_seconds + microseconds / 1e6
        intervals.append((round(start_seconds, 6), round(end_seconds, 6), reading.history_phases[index]))
        start_seconds = end_seconds
    return intervals
