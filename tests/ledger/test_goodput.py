"""Goodput of simulated jobs: each second of a task is productive, uncommitted, or lost to a cause.

An attempt is a process of rank 0. A task is a training with all its attempts, until the training is completed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from goodput_support import (
    MonitoredJob,
    badput_seconds,
    check_seconds_add_up,
    counts_by_reason,
    job_in_loop,
    training_value,
)
from ledger_support import SimulatedSidecar
from places import PROJECT

from exporter.ledger.goodput.accounting import BADPUT_CAUSES

DAY_SECONDS = 86_400.0
RESTART_DELAY_SECONDS = 4.5
"""Time between two attempts: `MonitoredJob.die` waits 4 s, and a new `MonitoredJob` starts 0.5 s later."""


@pytest.fixture
def sidecar(tmp_path: Path) -> SimulatedSidecar:
    return SimulatedSidecar(tmp_path)


@pytest.fixture
def run_killed_at_step_100(sidecar: SimulatedSidecar) -> None:
    """Save at step 90 and kill the job after step 100, half a second into the next step and 0.25 s after the last flush."""
    first_attempt = MonitoredJob(sidecar, job_in_loop())
    first_attempt.simulated.train(90)
    first_attempt.simulated.save(2.0)
    first_attempt.simulated.train(10)
    first_attempt.simulated.hold(0.5)
    first_attempt.write_and_collect()
    sidecar.clock.advance(0.25)
    first_attempt.die()


@pytest.mark.usefixtures("run_killed_at_step_100")
def test_repeated_work_after_a_save_is_productive_once(sidecar: SimulatedSidecar) -> None:
    next_attempt = MonitoredJob(sidecar, job_in_loop(50))
    next_attempt.simulated.train(50)
    next_attempt.simulated.save(1.0)
    page = next_attempt.write_and_collect()

    assert training_value(page, "lost_steps_total") == 10 + 40
    assert training_value(page, "productive_seconds_total") == 90 + 10
    assert badput_seconds(page)["lost_progress"] == 0.75 + 10 + 40
    check_seconds_add_up(page)


@pytest.mark.usefixtures("run_killed_at_step_100")
def test_a_run_that_loads_a_checkpoint_and_counts_from_zero_continues_from_the_latest_save(
    sidecar: SimulatedSidecar,
) -> None:
    next_attempt = MonitoredJob(sidecar, job_in_loop(0, load_seconds=1.0))
    next_attempt.simulated.train(10)
    next_attempt.simulated.save(1.0)
    page = next_attempt.write_and_collect()

    assert training_value(page, "lost_steps_total") == 10
    assert training_value(page, "productive_seconds_total") == 100


@pytest.mark.usefixtures("run_killed_at_step_100")
def test_a_warm_up_does_not_decide_the_position_of_a_resumed_training(sidecar: SimulatedSidecar) -> None:
    next_attempt = MonitoredJob(sidecar, job_in_loop(0))
    next_attempt.simulated.inferred_loop = True
    next_attempt.simulated.train(3)
    page_of_warm_up = next_attempt.write_and_collect()
    next_attempt.simulated.start_loop(90)
    next_attempt.simulated.inferred_loop, next_attempt.simulated.first_step = False, 90

    assert [
        training_value(page_of_warm_up, "lost_steps_total"),
        training_value(next_attempt.write_and_collect(), "lost_steps_total"),
    ] == [0, 10]


@pytest.mark.parametrize("tag", ["", "s"], ids=["by-run", "by-tag"])
def test_only_a_session_tag_joins_launches_after_a_normal_end(sidecar: SimulatedSidecar, tag: str) -> None:
    first_attempt = MonitoredJob(sidecar, job_in_loop(session_tag=tag))
    first_attempt.simulated.train(10)
    first_attempt.finish()
    sidecar.clock.advance(DAY_SECONDS)
    next_attempt = MonitoredJob(sidecar, job_in_loop(10 if tag else 0, session_tag=tag))
    next_attempt.simulated.train(10)
    next_attempt.simulated.save(0.0)
    page = next_attempt.write_and_collect()

    assert training_value(page, "attempt") == (2 if tag else 1)
    assert training_value(page, "productive_seconds_total") == 20
    assert training_value(page, "lost_steps_total") == 0
    assert badput_seconds(page) == (
        {"init": 8, "downtime": DAY_SECONDS + RESTART_DELAY_SECONDS} if tag else {"init": 8}
    )
    assert counts_by_reason(page, "restarts") == ({"exit": 1} if tag else {})


@pytest.mark.parametrize(
    ("first_step", "load_seconds", "is_same_task"), [(0, 0.0, False), (0, 1.0, True), (90, 0.0, True)]
)
@pytest.mark.usefixtures("run_killed_at_step_100")
def test_task_identity_a_day_after_a_crash_depends_on_the_start_step_and_the_load(
    sidecar: SimulatedSidecar, first_step: int, load_seconds: float, is_same_task: bool
) -> None:
    sidecar.clock.advance(DAY_SECONDS)
    page = MonitoredJob(sidecar, job_in_loop(first_step, load_seconds=load_seconds)).write_and_collect()

    assert badput_seconds(page).get("downtime", 0.0) == (
        DAY_SECONDS + RESTART_DELAY_SECONDS if is_same_task else 0
    )
    assert training_value(page, "attempt") == (2 if is_same_task else 1)
    assert training_value(page, "lost_steps_total") == (10 if is_same_task else 0)
    assert training_value(page, "uncommitted_seconds") == 0


@pytest.mark.parametrize(("held_seconds", "cause"), [(400.0, "hang"), (200.0, "lost_progress")])
def test_an_open_step_at_the_end_is_a_hang_or_lost_work_by_its_length(
    sidecar: SimulatedSidecar, held_seconds: float, cause: str
) -> None:
    attempt = MonitoredJob(sidecar, job_in_loop())
    attempt.simulated.train(3)
    attempt.simulated.hold(held_seconds)

    assert training_value(attempt.write_and_collect(), "uncommitted_seconds") == 3 + held_seconds
    assert badput_seconds(attempt.die()) == {"init": 4, cause: held_seconds}


def test_the_time_until_a_kill_is_noticed_is_downtime_and_not_time_of_the_open_phase(
    sidecar: SimulatedSidecar,
) -> None:
    job = MonitoredJob(sidecar, job_in_loop())
    job.simulated.train(3)
    job.write_and_collect()
    job.simulated.train(1)
    job.simulated.spend("data_loading", 0.25)
    job.write().kill()
    killed_at = sidecar.clock.wall + 0.5  # half a flush interval after the last snapshot
    sidecar.collect_after(5.0)
    killed_page = sidecar.collect_after(4.0)
    sidecar.clock.advance(50.5)
    next_page = MonitoredJob(sidecar, job_in_loop()).write_and_collect()

    assert badput_seconds(killed_page) == {"init": 4, "data_stall": 0.75}
    assert training_value(killed_page, "wall_seconds_total") == 4 + 4 + 0.75
    assert training_value(killed_page, "run_state_since_timestamp_seconds") == killed_at
    assert badput_seconds(next_page)["downtime"] == 59.5
    check_seconds_add_up(next_page)


def test_the_worked_example_of_the_documentation_is_true(sidecar: SimulatedSidecar) -> None:
    document = (PROJECT / "docs" / "goodput.md").read_text(encoding="utf-8")
    first_attempt = MonitoredJob(sidecar, job_in_loop(init_seconds=20.0))
    for steps in (30, 30, 30, 10):
        first_attempt.simulated.train(steps, 1.5, data_seconds=0.5)
        if steps == 30:
            first_attempt.simulated.save(6.0)
    first_attempt.simulated.hold(0.5)
    first_attempt.write_and_collect()
    killed_page = first_attempt.die()
    sidecar.clock.advance(55.5)  # a minute after the end
    second_attempt = MonitoredJob(sidecar, job_in_loop(90, init_seconds=20.0))
    second_attempt.simulated.train(30, 1.5, data_seconds=0.5)
    second_attempt.simulated.save(6.0)
    page = second_attempt.finish()

    assert training_value(killed_page, "uncommitted_seconds") == 15
    assert training_value(killed_page, "wall_seconds_total") == 238.5
    assert training_value(page, "productive_seconds_total") == 180
    assert training_value(page, "wall_seconds_total") == 384.5
    assert training_value(page, "lost_steps_total") == 10
    assert training_value(page, "attempt") == 2
    assert training_value(page, "attempt_steps") == 30
    assert counts_by_reason(killed_page) == counts_by_reason(page, "restarts") == {"signal": 1}
    check_seconds_add_up(page)
    assert badput_seconds(page) == {
        "init": 40,
        "lost_progress": 15.5,
        "data_stall": 65,
        "checkpoint_save": 24,
        "downtime": 60,
    }
    for excerpt in (
        "**productive 180**",
        "lost_progress 15.5",
        "**wall 384.5**",
        "is 15 and the wall time is 238.5",
    ):
        assert excerpt in document
    assert all(f"| `{cause}` |" in document for cause in BADPUT_CAUSES)
