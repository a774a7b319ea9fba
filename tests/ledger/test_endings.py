"""Outcomes of exited processes, and the counters that wait for the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from goodput_support import MonitoredJob, SimulatedJob, counts_by_reason, job_in_loop, training_value
from ledger_support import Page, SimulatedSidecar, make_definition, make_process, make_reading

from exporter.feed.runs import ProcessEnd
from exporter.ledger.goodput.endings import ExitEvidence
from exporter.ledger.goodput.run_state import STATES

LAUNCH = "5f2c"
"""Launch id in the environment of the job's processes."""
WALL_SECONDS = 4.0 + 5.0
"""Wall time of `trained_job`: the initialization and five steps of a second."""


@pytest.fixture
def sidecar(tmp_path: Path) -> SimulatedSidecar:
    return SimulatedSidecar(tmp_path)


def trained_job(sidecar: SimulatedSidecar) -> MonitoredJob:
    """Return a job of the launch. The sidecar has read five steps; no checkpoint was saved."""
    simulated_job: SimulatedJob = job_in_loop()
    simulated_job.train(5)
    job = MonitoredJob(sidecar, simulated_job)
    job.process = job.process.replace(launch=LAUNCH)
    job.write_and_collect()
    return job


def state_of(page: Page) -> str:
    return next(state for state in STATES if page.get("training_run_state", run="r", state=state) == 1)


def set_evidence(sidecar: SimulatedSidecar, *ends: ProcessEnd, launches: Sequence[str] = ()) -> None:
    sidecar.collector.endings.evidence = ExitEvidence(ends=lambda: list(ends), launches=lambda: set(launches))


def launch_end(sidecar: SimulatedSidecar, status: int) -> ProcessEnd:
    """Return an exit of the launch, whose run name differs from the name of the job's run."""
    return ProcessEnd(sidecar.directory, 99, status, sidecar.clock.wall, run="another name", launch=LAUNCH)


def test_no_work_is_committed_while_the_launch_is_running(sidecar: SimulatedSidecar) -> None:
    training = trained_job(sidecar)
    set_evidence(sidecar, launches=[LAUNCH])
    training.write(final=True)
    pages = [training.die(1.0), sidecar.collect_after(50.0)]

    assert [state_of(page) for page in pages] == ["ending", "ending"]
    assert [training_value(page, "productive_seconds_total") for page in pages] == [0, 0]
    assert [training_value(page, "uncommitted_seconds") for page in pages] == [5, 5]
    assert [counts_by_reason(page) for page in pages] == [{}, {}]


@pytest.mark.parametrize(
    ("status", "is_final", "final_state", "productive_seconds"),
    [(0, True, "finished", 5), (0, False, "finished", 5), (3, True, "failed", 0), (-15, False, "stopped", 0)],
)
def test_the_exit_status_of_the_launch_decides_for_a_run_with_a_different_name(
    sidecar: SimulatedSidecar, status: int, is_final: bool, final_state: str, productive_seconds: float
) -> None:
    training = trained_job(sidecar)
    set_evidence(sidecar, launches=[LAUNCH])
    training.write(final=is_final)
    training.die(5.0)
    set_evidence(sidecar, launch_end(sidecar, status))
    page = sidecar.collect_after(1.0)

    assert state_of(page) == final_state
    assert training_value(page, "productive_seconds_total") == productive_seconds
    assert bool(counts_by_reason(page)) == (productive_seconds == 0)


def test_a_launch_that_fails_ten_minutes_after_the_run_leaves_the_run_finished(
    sidecar: SimulatedSidecar,
) -> None:
    training = trained_job(sidecar)
    set_evidence(sidecar, launches=[LAUNCH])
    training.write(final=True)
    training.die(1.0)
    decided_page = sidecar.collect_after(61.0)
    sidecar.clock.advance(600.0)
    set_evidence(sidecar, launch_end(sidecar, 1))
    later_page = sidecar.collect_after(1.0)

    assert [state_of(decided_page), state_of(later_page)] == ["finished", "finished"]
    assert training_value(later_page, "productive_seconds_total") == 5


def evaluation_job(sidecar: SimulatedSidecar) -> MonitoredJob:
    """Return a later process of the same launch that validates and does not train."""
    evaluation = MonitoredJob(sidecar, SimulatedJob())
    evaluation.process = evaluation.process.replace(launch=LAUNCH)
    evaluation.simulated.spend("validation", 10.0)
    evaluation.write_and_collect()
    return evaluation


def test_an_evaluation_after_the_training_changes_neither_state_nor_goodput(
    sidecar: SimulatedSidecar,
) -> None:
    training = trained_job(sidecar)
    set_evidence(sidecar, launches=[LAUNCH])
    training.write(final=True)
    training.die(1.0)
    evaluation = evaluation_job(sidecar)
    pages = [sidecar.collect_after(1.0), sidecar.collect_after(61.0)]
    evaluation.simulated.spend("validation", 100.0)
    pages.append(evaluation.write_and_collect())
    evaluation.write(final=True)
    set_evidence(sidecar, replace(launch_end(sidecar, 1), noticed_at=sidecar.clock.wall + 1.0))
    pages += [evaluation.die(1.0), sidecar.collect_after(70.0)]

    assert [state_of(page) for page in pages] == ["ending", *["finished"] * 4]
    assert {training_value(page, "attempt") for page in pages[1:]} == {1}
    assert {training_value(page, "wall_seconds_total") for page in pages[1:]} == {WALL_SECONDS}
    assert training_value(pages[-1], "productive_seconds_total") == 5
    assert counts_by_reason(pages[-1]) == {}


def test_a_process_that_trains_after_a_failed_attempt_is_the_next_attempt(sidecar: SimulatedSidecar) -> None:
    training = trained_job(sidecar)
    set_evidence(sidecar, launches=[LAUNCH])
    training.kill()
    sidecar.collect_after(61.0)
    follower = evaluation_job(sidecar)
    follower.simulated.start_loop(0)
    follower.simulated.train(1)
    page = follower.write_and_collect()

    assert state_of(page) == "running"
    assert training_value(page, "attempt") == 2


def test_a_process_that_torchrun_restarts_is_an_interruption_without_productive_time(
    sidecar: SimulatedSidecar,
) -> None:
    agent = make_process(rank=None, role="agent", started=sidecar.clock.wall)
    sidecar.record_loss(agent, 1)
    restarted_job = trained_job(sidecar)
    restarted_job.write(final=True)
    restarted_job.kill()
    sidecar.collect_after(10.0)
    next_attempt = MonitoredJob(sidecar, job_in_loop())
    page = next_attempt.write_and_collect()

    assert counts_by_reason(page) == {"exit": 1}
    assert training_value(page, "productive_seconds_total") == 0


def test_an_exited_run_keeps_the_wall_time_and_the_step_and_drops_the_last_loss(
    sidecar: SimulatedSidecar,
) -> None:
    training = trained_job(sidecar)
    gauges = [
        make_reading(
            replace(make_definition(name, labels=labels), kind="gauge", aggregations=frozenset()), [7.0]
        )
        for name, labels in (("training.step", ()), ("training.loss", (("mode", "train"),)))
    ]
    values = [gauge.replace(value=7.0) for gauge in gauges]
    training.write(*values)
    running_page = sidecar.collect()
    training.write(*values, final=True)
    pages = [training.die(4.0), *(sidecar.collect_after(100.0) for _ in range(3))]
    sidecar.restart()
    pages.append(sidecar.collect_after(1.0))

    assert running_page.get("training_loss", run="r", mode="train") == 7
    assert {training_value(page, "wall_seconds_total") for page in pages} == {WALL_SECONDS}
    assert {page.get("training_step", run="r") for page in pages} == {7}
    assert all("training_loss" not in page.families for page in pages)
