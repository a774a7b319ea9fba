"""State of a run: start, hang and end, the process of a rank, and the outcome of unsaved work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from goodput_support import MonitoredJob, SimulatedJob, counts_by_reason, job_in_loop, training_value
from ledger_support import Page, SimulatedSidecar, make_definition, make_process, make_reading

from exporter.feed.runs import ProcessEnd
from exporter.ledger.goodput.endings import ExitEvidence
from exporter.ledger.goodput.options import GoodputOptions
from exporter.ledger.goodput.run_state import STATES
from exporter.recording.values import Ending, StatReading

RUN_LABELS = {"run": "r"}
INIT_AND_STEP_SECONDS = 4.0 + 5.0
"""Wall time of `trained_simulation`: the initialization and five steps of a second."""
GAUGES = {
    "training_loss": ("training.loss", (("mode", "train"),)),
    "training_grad_norm": ("training.grad_norm", ()),
    "training_learning_rate": ("training.learning_rate", ()),
    "training_loss_scale": ("training.loss_scale", ()),
    "training_rank_compute_seconds": ("training.rank_compute", ()),
    "training_step_ideal_seconds": ("training.step_ideal", ()),
    "training_step_longest_seconds": ("training.step_longest", ()),
    "training_step": ("training.step", ()),
}


@pytest.fixture
def sidecar(tmp_path: Path) -> SimulatedSidecar:
    return SimulatedSidecar(tmp_path)


def trained_simulation(steps: int = 5, seconds: float = 1.0) -> SimulatedJob:
    job = job_in_loop()
    job.train(steps, seconds)
    return job


def state(page: Page) -> str:
    values = {name: page.get("training_run_state", state=name, **RUN_LABELS) for name in STATES}
    assert sorted(values.values()) == [0] * (len(STATES) - 1) + [1]  # type: ignore[type-var]  # all are numbers
    return next(name for name, value in values.items() if value)


def outcome_labels(page: Page) -> dict[str, str]:
    (sample,) = page.families["training_run_outcome_info"].samples
    names = ("outcome", "reason", "exit_status", "signal", "exception")
    return {name: sample.labels.get(name, "") for name in names}


def state_start_time(page: Page) -> float | None:
    return page.get("training_run_state_since_timestamp_seconds", **RUN_LABELS)


def gauges(value: float) -> list[StatReading]:
    readings = []
    for name, (stat, labels) in GAUGES.items():
        unit = "seconds" if name.endswith("_seconds") else None
        definition = make_definition(stat, unit=unit, labels=labels).replace(
            kind="gauge", aggregations=frozenset()
        )
        readings.append(make_reading(definition, [value]).replace(value=value))
    return readings


def write_gauges_and_collect(job: MonitoredJob, **options: Any) -> Page:
    """Write a snapshot with the last values and the time of the latest step, and run a pass."""
    simulated_job = job.simulated
    if simulated_job.steps:
        # A real process computes this time for each snapshot from two clocks.
        jitter = 1e-6 * (job.sequence % 3)
        progress_seconds = simulated_job.seconds - simulated_job.open_seconds
        simulated_job.last_progress = job.process.started + progress_seconds + jitter
    job.write(*gauges(simulated_job.longest_step_seconds or 0.5), **options)
    return job.sidecar.collect()


@pytest.fixture
def running_job(sidecar: SimulatedSidecar) -> MonitoredJob:
    """Return a running job whose snapshot the sidecar has read."""
    job = MonitoredJob(sidecar, trained_simulation())
    write_gauges_and_collect(job)
    return job


def published_gauges(page: Page) -> set[str]:
    return {name for name in GAUGES if name in page.families}


def report_ends(sidecar: SimulatedSidecar, *ends: ProcessEnd) -> None:
    sidecar.collector.endings.evidence = ExitEvidence(ends=lambda: list(ends))


def test_a_run_is_starting_until_the_end_of_its_first_step(sidecar: SimulatedSidecar) -> None:
    job = MonitoredJob(sidecar, trained_simulation(0))
    initial_page = write_gauges_and_collect(job)
    job.simulated.hold(600.0)  # the first step compiles
    compiling_page = write_gauges_and_collect(job)
    job.simulated.train()

    assert [state(initial_page), state(compiling_page), state(write_gauges_and_collect(job))] == [
        "starting",
        "starting",
        "running",
    ]


def test_gauges_are_absent_during_a_hang_until_the_next_step(sidecar: SimulatedSidecar) -> None:
    job = MonitoredJob(sidecar, trained_simulation())
    running_page = write_gauges_and_collect(job)
    job.simulated.hold(299.0)
    page_before_limit = write_gauges_and_collect(job)
    job.simulated.hold(2.0)
    hung_page = write_gauges_and_collect(job)
    job.simulated.train()
    resumed_page = write_gauges_and_collect(job)

    states = [state(page) for page in (running_page, page_before_limit, hung_page, resumed_page)]
    assert states == ["running", "running", "hung", "running"]
    assert (
        published_gauges(running_page)
        == published_gauges(page_before_limit)
        == published_gauges(resumed_page)
        == set(GAUGES)
    )
    assert published_gauges(hung_page) == {"training_step"}


def test_a_hang_starts_at_the_last_step_and_not_at_the_pass_that_read_the_step(
    sidecar: SimulatedSidecar,
) -> None:
    job = MonitoredJob(sidecar, trained_simulation())
    write_gauges_and_collect(job)
    job.simulated.train()
    last_step_at = job.process.started + job.simulated.seconds
    job.simulated.last_progress = last_step_at
    job.simulated.hold(3.0)
    write_gauges_and_collect(job)
    job.simulated.hold(299.0)
    hung_page = write_gauges_and_collect(job)

    assert state(hung_page) == "hung"
    assert state_start_time(hung_page) == pytest.approx(last_step_at)


def test_a_process_that_works_after_its_training_loop_is_running(
    sidecar: SimulatedSidecar, running_job: MonitoredJob
) -> None:
    running_job.simulated.last_progress = None  # as a process reports after the loop
    running_job.simulated.spend("other", 3600.0)
    running_job.write(*gauges(1.0))
    page = sidecar.collect()

    assert state(page) == "running"
    assert published_gauges(page) == set(GAUGES)


def test_a_process_that_is_exiting_after_its_last_snapshot_is_running(
    sidecar: SimulatedSidecar, running_job: MonitoredJob
) -> None:
    # After the loop; the last snapshot repeats the time of the last step.
    running_job.simulated.spend("other", 3600.0)
    running_job.write(*gauges(1.0), final=True)

    assert state(sidecar.collect()) == "running"


def test_less_than_five_times_the_longest_step_is_not_a_hang_and_both_limits_are_configurable(
    sidecar: SimulatedSidecar,
) -> None:
    job = MonitoredJob(sidecar, trained_simulation(seconds=100.0))
    write_gauges_and_collect(job)
    job.simulated.hold(450.0)
    slow_page = write_gauges_and_collect(job)
    sidecar.collector.sessions.options = GoodputOptions(hang_after=100.0, hang_steps=4.0)

    assert [state(slow_page), state(sidecar.collect())] == ["running", "hung"]


@pytest.mark.parametrize(
    ("phase", "seconds", "expected"),
    [
        ("validation", 1400.0, "running"),
        ("validation", 1600.0, "stalled"),
        ("data_loading", 310.0, "stalled"),
    ],
)
def test_a_waiting_rank_is_stalled_and_slow_phases_have_a_longer_limit(
    running_job: MonitoredJob, phase: str, seconds: float, expected: str
) -> None:
    running_job.simulated.spend(phase, seconds)
    running_job.simulated.open_seconds = seconds

    assert state(write_gauges_and_collect(running_job)) == expected


def test_a_process_that_writes_no_snapshot_for_30_seconds_is_stalled(running_job: MonitoredJob) -> None:
    assert state(write_gauges_and_collect(running_job, age_seconds=30.0)) == "stalled"


@pytest.mark.parametrize("pid", [7, 99])  # 7 is the process of rank 0, as in the feed; 99 is its launcher
@pytest.mark.parametrize(
    ("status", "expected", "reason"),
    [
        (0, "finished", {"exit_status": "0"}),
        (3, "failed", {"exit_status": "3"}),
        (-9, "failed", {"signal": "SIGKILL"}),
        (139, "failed", {"signal": "SIGSEGV"}),
        (-15, "stopped", {"signal": "SIGTERM"}),
        (130, "stopped", {"signal": "SIGINT"}),
    ],
)
def test_the_exit_status_reported_by_the_run_command_survives_a_restart_of_the_sidecar(
    sidecar: SimulatedSidecar, status: int, expected: str, reason: dict[str, str], pid: int
) -> None:
    job = MonitoredJob(sidecar, trained_simulation())
    write_gauges_and_collect(job, final=status >= 0)
    end = ProcessEnd(sidecar.directory, pid, status, sidecar.clock.wall, run="r")
    report_ends(sidecar, end)
    exit_page = job.die(1.0)
    sidecar.collect_after(5.0)
    sidecar.restart()
    report_ends(sidecar, end)
    later_page = sidecar.collect_after(600.0)
    expired_page = sidecar.collect_after(900.0)

    assert [state(exit_page), state(later_page)] == [expected, expected]
    assert {name: outcome_labels(exit_page)[name] for name in reason} == reason
    assert outcome_labels(exit_page) == outcome_labels(later_page)
    assert (training_value(later_page, "wall_seconds_total") or 0.0) >= INIT_AND_STEP_SECONDS
    assert not {"training_run_state", "training_wall_seconds_total"} & expired_page.families.keys()


@pytest.mark.parametrize(
    ("own_report", "final", "expected", "reason"),
    [
        ({}, True, "finished", "inferred"),
        ({}, False, "lost", "inferred"),
        ({"ending": Ending("ValueError", 1.0)}, True, "failed", "exception ValueError"),
        ({"failure": "preemption"}, True, "stopped", "reported: preemption"),
        ({"failure": "gpu_memory"}, True, "failed", "reported: gpu_memory"),
    ],
)
def test_without_the_run_command_the_end_is_inferred_and_the_reason_is_labeled(
    sidecar: SimulatedSidecar,
    running_job: MonitoredJob,
    own_report: dict[str, Any],
    final: bool,
    expected: str,
    reason: str,
) -> None:
    running_job.simulated.failure = own_report.get("failure", "")
    running_job.write(final=final, ending=own_report.get("ending"))
    undecided_page = running_job.die(1.0)
    page = sidecar.collect_after(3.0)

    assert state(undecided_page) == "ending"
    assert "training_run_outcome_info" not in undecided_page.families
    assert state(page) == expected
    assert outcome_labels(page)["exception"] == ("ValueError" if "ending" in own_report else "")
    assert outcome_labels(page)["reason"].startswith(reason)


def test_a_keyboard_interrupt_outside_of_the_training_blocks_is_a_stop_by_the_user(
    sidecar: SimulatedSidecar, running_job: MonitoredJob
) -> None:
    running_job.write(final=True, ending=Ending("KeyboardInterrupt", 1.0))
    running_job.die(1.0)
    page = sidecar.collect_after(3.0)

    assert state(page) == "stopped"
    assert outcome_labels(page)["reason"] == "exception KeyboardInterrupt"
    assert counts_by_reason(page) == {"user": 1}


def test_an_exit_reported_by_the_run_command_has_its_time_and_is_decided_immediately(
    sidecar: SimulatedSidecar, running_job: MonitoredJob
) -> None:
    exited_at = sidecar.clock.wall
    report_ends(sidecar, ProcessEnd(sidecar.directory, 7, -9, exited_at))
    sidecar.clock.advance(20.0)
    running_job.kill()
    page = sidecar.collect()

    assert state_start_time(page) == exited_at
    assert counts_by_reason(page) == {"signal": 1}
    assert training_value(sidecar.collect_after(1.0), "wall_seconds_total") == INIT_AND_STEP_SECONDS


def test_the_exit_of_a_killed_rank_is_published_after_its_restart(
    sidecar: SimulatedSidecar, running_job: MonitoredJob
) -> None:
    killed_at = sidecar.clock.wall
    report_ends(sidecar, ProcessEnd(sidecar.directory, 7, -9, killed_at))
    page_before_kill = sidecar.collect()
    running_job.kill()
    sidecar.collect_after(1.0)
    successor = MonitoredJob(sidecar, trained_simulation())
    page_after_restart = write_gauges_and_collect(successor)

    name, labels = "training_rank_last_exit_timestamp_seconds", {"rank": "0", "reason": "signal SIGKILL"}
    assert page_before_kill.all(name) == {}
    assert page_after_restart.get(name, **RUN_LABELS, **labels) == killed_at


def test_a_slightly_late_exit_status_is_accepted(
    sidecar: SimulatedSidecar, running_job: MonitoredJob
) -> None:
    exited_at = sidecar.clock.wall
    lost_page = running_job.die(1.0)
    report_ends(sidecar, ProcessEnd(sidecar.directory, 7, -9, exited_at))

    assert [state(lost_page), state(sidecar.collect_after(1.0))] == ["ending", "failed"]


def test_a_helper_has_no_rank_and_is_counted_once_after_it_becomes_the_trainer(
    sidecar: SimulatedSidecar,
) -> None:
    helper = make_process(rank=None, role="helper")
    sidecar.record_loss(helper, 3)
    initial_page = sidecar.collect()
    sidecar.record_loss(helper.replace(rank=0, role="trainer", trains=True), 5, sequence=2)
    final_page = [sidecar.collect_after(1.0) for _ in range(4)][-1]

    assert initial_page.count("loss", run="r", role="helper") == 3
    assert state(initial_page) == "starting"
    assert final_page.count("loss", run="r", rank="0") == 5
    assert final_page.count("loss", run="r", role="helper") is None


def test_a_process_that_becomes_a_trainer_while_the_sidecar_restarts_is_counted_once(
    sidecar: SimulatedSidecar,
) -> None:
    helper = make_process(rank=None, role="helper")
    sidecar.record_loss(helper, 3)
    sidecar.collect()
    sidecar.record_loss(helper.replace(rank=0, role="trainer", trains=True), 5, sequence=2)
    sidecar.restart()
    for _ in range(3):
        page = sidecar.collect_after(5)

    assert page.count("loss", run="r", rank="0") == 5
    assert page.count("loss", run="r", role="helper") is None


def test_the_start_of_the_state_survives_a_restart_of_the_sidecar(running_job: MonitoredJob) -> None:
    running_job.simulated.train(5)
    page_before_restart = write_gauges_and_collect(running_job)
    running_job.simulated.train(5)
    running_job.sidecar.restart()
    page_after_restart = write_gauges_and_collect(running_job)

    assert [state(page_before_restart), state(page_after_restart)] == ["running", "running"]
    assert state_start_time(page_after_restart) == state_start_time(page_before_restart)


@pytest.mark.parametrize("restarts", [False, True], ids=["same sidecar", "restarted sidecar"])
def test_the_start_of_the_state_is_not_in_the_future_after_the_clock_is_set_back(
    running_job: MonitoredJob, *, restarts: bool
) -> None:
    sidecar = running_job.sidecar
    running_job.simulated.train(5)
    write_gauges_and_collect(running_job)
    sidecar.clock.advance(60.0)
    write_gauges_and_collect(running_job)
    sidecar.clock.wall -= 3600.0
    if restarts:
        sidecar.restart()
    page = sidecar.collect()

    assert state(page) == "running"
    seconds = sidecar.clock.wall - (state_start_time(page) or 0.0)
    assert seconds == (pytest.approx(0.0) if restarts else pytest.approx(60.0, abs=10.0))


def test_a_second_hang_after_a_restart_of_the_sidecar_has_its_own_start(running_job: MonitoredJob) -> None:
    running_job.simulated.hold(400.0)
    first_page = write_gauges_and_collect(running_job)
    running_job.simulated.train(5)  # while no sidecar runs
    running_job.simulated.hold(400.0)
    running_job.sidecar.restart()
    second_page = write_gauges_and_collect(running_job)

    assert [state(first_page), state(second_page)] == ["hung", "hung"]
    assert (state_start_time(second_page) or 0.0) >= (state_start_time(first_page) or 0.0) + 400


def test_a_damaged_state_file_of_a_run_is_moved_aside(running_job: MonitoredJob) -> None:
    write_gauges_and_collect(running_job)
    (file,) = running_job.sidecar.directory.glob("**/*_state_*.ledger")
    file.write_bytes(b"garbage")
    running_job.sidecar.restart()

    assert state(write_gauges_and_collect(running_job)) == "running"
    assert [path for path in file.parent.iterdir() if path.name.startswith(file.name) and path != file]


def test_a_new_process_of_the_run_has_its_own_start_after_a_restart_of_the_sidecar(
    running_job: MonitoredJob,
) -> None:
    page_of_first = write_gauges_and_collect(running_job)
    running_job.sidecar.restart()
    running_job.sidecar.clock.advance(60.0)
    successor = MonitoredJob(running_job.sidecar, trained_simulation())
    running_job.die(0.0)
    page_of_successor = write_gauges_and_collect(successor)

    assert state(page_of_successor) == "running"
    assert (state_start_time(page_of_successor) or 0.0) > (state_start_time(page_of_first) or 0.0)


@pytest.mark.parametrize("trainer_first", [True, False])
def test_the_process_that_trains_is_the_rank(sidecar: SimulatedSidecar, trainer_first: bool) -> None:
    wrapper = make_process(started=1.0)
    trainer = make_process(started=2.0).replace(trains=True)
    for process in (trainer, wrapper) if trainer_first else (wrapper, trainer):
        sidecar.record_loss(process, 7 if process is trainer else 3)
        page = sidecar.collect_after(1.0)

    assert page.count("loss", run="r", rank="0") == 7
    assert page.count("loss", run="r", rank="0", worker="1") == 3


@pytest.mark.parametrize(
    ("is_named", "second_trains", "conflicts"),
    [(True, True, 1), (True, False, None), (False, True, None)],
    ids=["two trainers", "a trainer and its helper", "generated run name"],
)
def test_two_trainers_of_a_rank_of_a_named_run_are_a_conflict_after_15_seconds(
    sidecar: SimulatedSidecar, is_named: bool, second_trains: bool, conflicts: float | None
) -> None:
    for trains in (True, second_trains):
        sidecar.record_loss(make_process().replace(trains=trains, run_given=is_named), 1)
    sidecar.collect()
    page_of_restart = sidecar.collect_after(14.0)  # in a restart, both processes may be alive for a moment
    later_page = sidecar.collect_after(2.0)

    assert "training_rank_conflicts" not in page_of_restart.families
    assert later_page.get("training_rank_conflicts", run="r", rank="0") == conflicts


@pytest.mark.parametrize(("status", "productive"), [(0, 5.0), (3, 0.0), (None, 5.0)])
def test_work_without_a_save_is_uncommitted_and_becomes_productive_at_a_successful_exit(
    sidecar: SimulatedSidecar, status: int | None, productive: float
) -> None:
    job = MonitoredJob(sidecar, trained_simulation())
    job.simulated.hold(3.0)  # 3 s of a step that never ends
    running_page = write_gauges_and_collect(job)
    if status is not None:
        report_ends(sidecar, ProcessEnd(sidecar.directory, 7, status, sidecar.clock.wall))
    page = job.finish()

    assert running_page.get("training_productive_seconds_total", **RUN_LABELS) == 0
    assert running_page.get("training_uncommitted_seconds", **RUN_LABELS) == 8
    assert page.get("training_productive_seconds_total", **RUN_LABELS) == productive
    lost_seconds = page.get("training_badput_seconds_total", cause="lost_progress", **RUN_LABELS)
    assert lost_seconds == (0 if productive else 3)
    unsaved_seconds = page.get("training_uncommitted_seconds", **RUN_LABELS)
    assert unsaved_seconds == (0 if productive else 5)
