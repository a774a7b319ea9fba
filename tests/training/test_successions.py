"""Phases and iterations that follow one another with one clock reading, compared with blocks that are left and entered."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
from training_support import fresh_recorder

from exporter import training
from exporter.training.iterations import IterationBlock
from exporter.training.kinds import TRAINING_ITERATION
from exporter.training.recorder import TRAINING
from exporter.training.records import IterationEnded
from exporter.training.successions import Phases

STEP = ("data_loading", "forward", "backward", None, "optimizer")


@pytest.fixture(autouse=True)
def _recorder() -> Iterator[None]:
    with fresh_recorder():
        yield


def train_in_succession(steps: int) -> Phases:
    """Train with a block of iterations that follow one another."""
    iteration = IterationBlock(TRAINING_ITERATION)
    phases = Phases(iteration)
    with training.training_loop(0):
        iteration.__enter__()
        for _ in range(steps):
            for name in STEP:
                phases.switch_to(name)
            phases.next_iteration()
        iteration.__exit__(None, None, None)
    return phases


def entries() -> Counter[str]:
    return Counter({name: totals.entries for name, totals in TRAINING.clock.phases.items()})


def test_phases_in_succession_are_counted_as_blocks_are() -> None:
    train_in_succession(50)
    durations = {name: sum(TRAINING.clock.phases[name].cells or ()) for name in STEP if name}

    assert entries() >= Counter({**dict.fromkeys(filter(None, STEP), 50), "iteration": 50})
    assert durations == dict.fromkeys(filter(None, STEP), 50)


def test_seconds_of_phases_in_succession_sum_to_the_wall_time() -> None:
    start = TRAINING.clock.read()
    train_in_succession(200)
    end = TRAINING.clock.read()

    phase_seconds = sum(end.seconds.values()) - sum(start.seconds.values())
    assert phase_seconds == pytest.approx(end.time - start.time, abs=1e-6)
    assert TRAINING.clock.stack == [TRAINING.clock.base]


def test_an_iteration_in_succession_ends_at_the_start_of_the_next() -> None:
    TRAINING.records.clear()
    train_in_succession(20)
    iterations = [record for record in TRAINING.records if isinstance(record, IterationEnded)]

    assert len(iterations) == 20 + 1
    assert all(earlier.end_time == later.start_time for earlier, later in pairwise(iterations))
    assert all(
        0 <= iteration.work <= iteration.end_time - iteration.start_time + 1e-9 for iteration in iterations
    )


def test_a_block_of_the_job_inside_a_phase_keeps_its_own_time() -> None:
    iteration = IterationBlock(TRAINING_ITERATION)
    phases = Phases(iteration)
    with training.training_loop(0):
        iteration.__enter__()
        slept_seconds = 0.0
        for _ in range(3):
            phases.switch_to("forward")
            block = training.phase("logging")
            block.__enter__()
            start = time.monotonic()
            time.sleep(0.01)
            slept_seconds += time.monotonic() - start
            phases.switch_to("backward")  # the job's block is still open
            block.__exit__(None, None, None)
            phases.switch_to("optimizer")
            phases.next_iteration()
        iteration.__exit__(None, None, None)

    assert TRAINING.clock.phases["logging"].seconds == pytest.approx(slept_seconds, abs=0.02)
    assert entries()["backward"] == entries()["forward"] == 3
    assert TRAINING.clock.stack == [TRAINING.clock.base]


def test_a_phase_of_the_job_around_an_edge_counts_once() -> None:
    iteration = IterationBlock(TRAINING_ITERATION)
    phases = Phases(iteration)
    with training.training_loop(0):
        iteration.__enter__()
        for _ in range(20):
            # The job's own block has the phase that the loader's hook enters.
            with training.phase("data_loading"):
                phases.switch_to("data_loading")
                phases.switch_to("forward")
            for name in ("backward", None, "optimizer"):
                phases.switch_to(name)
            phases.next_iteration()
        iteration.__exit__(None, None, None)

    for name in ("data_loading", "forward", "backward", "optimizer"):
        totals = TRAINING.clock.phases[name]
        assert sum(totals.cells or ()) == totals.entries
        assert totals.duration_seconds == pytest.approx(totals.seconds, abs=1e-6)
    assert entries()["forward"] == 20


def test_an_edge_inside_a_span_of_the_job_has_the_phase_that_follows() -> None:
    iteration = IterationBlock(TRAINING_ITERATION)
    phases = Phases(iteration)
    train_in_succession(2)
    seconds_before = TRAINING.clock.phases["backward"].seconds
    with training.training_loop(0):
        iteration.__enter__()
        phases.switch_to("forward")
        with training.span("x"):
            phases.switch_to("backward")
            with training.phase("zero_grad"):
                pass
            start = time.monotonic()
            time.sleep(0.02)
            slept_seconds = time.monotonic() - start
        phases.next_iteration()
        iteration.__exit__(None, None, None)

    assert TRAINING.clock.phases["backward"].seconds - seconds_before >= slept_seconds
