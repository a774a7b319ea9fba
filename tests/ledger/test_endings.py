"""The rule that decides how a process ended, and the counters that wait for its decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from goodput_support import MonitoredJob, SimulatedJob, a_job, counts_by_reason, training_value
from ledger_support import Page, Sidecar, make_definition, make_process, make_reading

from exporter.feed.runs import End
from exporter.ledger.goodput.endings import ExitEvidence
from exporter.ledger.goodput.run_state import STATES

LAUNCH = "5f2c"


@pytest.fixture
def sidecar(tmp_path: Path) -> Sidecar:
    return Sidecar(tmp_path)


def trained(sidecar: Sidecar, *, start_seconds: float = 0.0) -> MonitoredJob:
    job: SimulatedJob = a_job()
    job.train(5)
    monitored = MonitoredJob(sidecar, job)
    monitored.process = monitored.process.replace(launch=LAUNCH)
    monitored.see()
    return monitored


def state(page: Page) -> str:
    return next(state for state in STATES if page.get("training_run_state", run="r", state=state) == 1)


def evidence(sidecar: Sidecar, *ends: End, launches: Sequence[str] = ()) -> None:
    sidecar.collector.endings.evidence = ExitEvidence(ends=lambda: list(ends), launches=lambda: set(launches))


def an_end(sidecar: Sidecar, status: int) -> End:
    return End(sidecar.directory, 99, status, sidecar.clock.wall, "another name", launch=LAUNCH)


def test_nothing_is_committed_until_the_launch_has_ended(sidecar: Sidecar) -> None:
    monitored = trained(sidecar)
    evidence(sidecar, launches=[LAUNCH])
    monitored.write(final=True)
    pages = [monitored.die(1.0), sidecar.after(50.0)]

    assert [state(page) for page in pages] == ["ending", "ending"]
    assert [training_value(page, "productive_seconds_total") for page in pages] == [0, 0]
    assert [training_value(page, "uncommitted_seconds") for page in pages] == [5, 5]
    assert [counts_by_reason(page) for page in pages] == [{}, {}]


@pytest.mark.parametrize(
    ("status", "final", "expected", "productive"),
    [(0, True, "finished", 5), (0, False, "finished", 5), (3, True, "failed", 0), (-15, False, "stopped", 0)],
)
def test_the_exit_status_of_the_launch_decides_for_any_run_name(
    sidecar: Sidecar, status: int, final: bool, expected: str, productive: float
) -> None:
    monitored = trained(sidecar)
    evidence(sidecar, launches=[LAUNCH])
    monitored.write(final=final)
    monitored.die(5.0)
    evidence(sidecar, an_end(sidecar, status))
    page = sidecar.after(1.0)

    assert state(page) == expected
    assert training_value(page, "productive_seconds_total") == productive
    assert bool(counts_by_reason(page)) == (productive == 0)


def test_a_launch_that_fails_hours_later_leaves_the_run_finished(sidecar: Sidecar) -> None:
    monitored = trained(sidecar)
    evidence(sidecar, launches=[LAUNCH])
    monitored.write(final=True)
    monitored.die(1.0)
    decided = sidecar.after(61.0)
    sidecar.clock.advance(600.0)
    evidence(sidecar, an_end(sidecar, 1))
    later = sidecar.after(1.0)

    assert [state(decided), state(later)] == ["finished", "finished"]
    assert training_value(later, "productive_seconds_total") == 5


def an_evaluation(sidecar: Sidecar) -> MonitoredJob:
    """A later process of the same launch that validates and does not train."""
    monitored = MonitoredJob(sidecar, SimulatedJob())
    monitored.process = monitored.process.replace(launch=LAUNCH)
    monitored.job.spend("validation", 10.0)
    monitored.see()
    return monitored


def test_an_evaluation_after_the_training_changes_neither_its_state_nor_its_account(sidecar: Sidecar) -> None:
    monitored = trained(sidecar)
    evidence(sidecar, launches=[LAUNCH])
    monitored.write(final=True)
    monitored.die(1.0)
    evaluation = an_evaluation(sidecar)
    pages = [sidecar.after(1.0), sidecar.after(61.0)]
    evaluation.job.spend("validation", 100.0)
    pages.append(evaluation.see())
    evaluation.write(final=True)
    evidence(sidecar, replace(an_end(sidecar, 1), at=sidecar.clock.wall + 1.0))
    pages += [evaluation.die(1.0), sidecar.after(70.0)]

    assert [state(page) for page in pages] == ["ending", *["finished"] * 4]
    assert {
        (training_value(page, "attempt"), training_value(page, "wall_seconds_total")) for page in pages[1:]
    } == {(1, 9)}
    assert (training_value(pages[-1], "productive_seconds_total"), counts_by_reason(pages[-1])) == (5, {})


def test_a_process_that_follows_a_failed_training_starts(sidecar: Sidecar) -> None:
    monitored = trained(sidecar)
    evidence(sidecar, launches=[LAUNCH])
    monitored.kill()
    sidecar.after(61.0)
    follower = an_evaluation(sidecar)
    follower.job.begin_loop(0)
    follower.job.train(1)
    page = follower.see()

    assert state(page) == "running"
    assert training_value(page, "attempt") == 2


def test_a_process_that_torchrun_restarts_did_not_complete(sidecar: Sidecar) -> None:
    agent = make_process(rank=None, role="agent", started=sidecar.clock.wall)
    sidecar.record(agent, 1)
    first = trained(sidecar)
    first.write(final=True)
    first.kill()
    sidecar.after(10.0)
    second = MonitoredJob(sidecar, a_job())
    page = second.see()

    assert counts_by_reason(page) == {"exit": 1}
    assert training_value(page, "productive_seconds_total") == 0


def test_an_ended_run_keeps_its_wall_time_and_its_position_and_no_last_values(sidecar: Sidecar) -> None:
    monitored = trained(sidecar)
    gauges = [
        make_reading(
            replace(make_definition(name, labels=labels), kind="gauge", aggregations=frozenset()), [7.0]
        )
        for name, labels in (("training.step", ()), ("training.loss", (("mode", "train"),)))
    ]
    monitored.write(*[gauge.replace(value=7.0) for gauge in gauges], final=True)
    pages = [monitored.die(4.0), *(sidecar.after(100.0) for _ in range(3))]
    sidecar.restart()
    pages.append(sidecar.after(1.0))

    assert {training_value(page, "wall_seconds_total") for page in pages} == {9}
    assert {page.get("training_step", run="r") for page in pages} == {7}
    assert all("training_loss" not in page.families for page in pages)
