"""State of a run, absent series during a hang, and the reason of the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from goodput_support import MonitoredJob, SimulatedJob, counts_by_reason, training_value
from goodput_support import a_job as new_job
from ledger_support import Clock, Page, Sidecar, make_definition, make_process, make_reading

from exporter.feed.runs import End
from exporter.ledger.goodput.attempt import MachineIdentity
from exporter.ledger.goodput.endings import ExitEvidence
from exporter.ledger.goodput.options import GoodputOptions
from exporter.ledger.goodput.run_state import STATES
from exporter.recording.values import Ending, StatReading

RUN = {"run": "r"}
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
def sidecar(tmp_path: Path) -> Sidecar:
    return Sidecar(tmp_path)


def a_job(steps: int = 5, seconds: float = 1.0) -> SimulatedJob:
    job = new_job()
    job.train(steps, seconds)
    return job


def state(page: Page) -> str:
    values = {state: page.get("training_run_state", state=state, **RUN) for state in STATES}
    assert sorted(values.values()) == [0] * (len(STATES) - 1) + [1]  # type: ignore[type-var]  # all are numbers
    return next(labels for labels, value in values.items() if value)


def reason_labels(page: Page) -> dict[str, str]:
    (sample,) = page.families["training_run_outcome_info"].samples
    names = ("outcome", "reason", "exit_status", "signal", "exception")
    return {name: sample.labels.get(name, "") for name in names}


def since_seconds(page: Page) -> float | None:
    return page.get("training_run_state_since_timestamp_seconds", **RUN)


def gauges(value: float) -> list[StatReading]:
    readings = []
    for name, (stat, labels) in GAUGES.items():
        unit = "seconds" if name.endswith("_seconds") else None
        definition = make_definition(stat, unit=unit, labels=labels).replace(
            kind="gauge", aggregations=frozenset()
        )
        readings.append(make_reading(definition, [value]).replace(value=value))
    return readings


def look(monitored: MonitoredJob, **options: Any) -> Page:
    """Write a snapshot with the last values and the time of the latest step, and run a pass."""
    job = monitored.job
    if job.steps:
        # A real process computes this time for each snapshot from two clocks.
        jitter = 1e-6 * (monitored.sequence % 3)
        job.last_progress = monitored.process.started + job.seconds - job.open_seconds + jitter
    monitored.write(*gauges(job.longest_step_seconds or 0.5), **options)
    return monitored.sidecar.collect()


@pytest.fixture
def running(sidecar: Sidecar) -> MonitoredJob:
    """A job that trains, at which the sidecar has looked."""
    monitored = MonitoredJob(sidecar, a_job())
    look(monitored)
    return monitored


def published_states(page: Page) -> set[str]:
    return {name for name in GAUGES if name in page.families}


def report_ends(sidecar: Sidecar, *ends: End) -> None:
    sidecar.collector.endings.evidence = ExitEvidence(ends=lambda: list(ends))


def test_a_run_starts_and_runs(sidecar: Sidecar) -> None:
    monitored = MonitoredJob(sidecar, a_job(0))
    initial_page = look(monitored)
    monitored.job.hold(600.0)  # the first step compiles
    compiling = look(monitored)
    monitored.job.train()

    assert [state(initial_page), state(compiling), state(look(monitored))] == [
        "starting",
        "starting",
        "running",
    ]


def test_gauges_are_absent_during_a_hang_until_the_next_step(sidecar: Sidecar) -> None:
    monitored = MonitoredJob(sidecar, a_job())
    running = look(monitored)
    monitored.job.hold(299.0)
    not_yet = look(monitored)
    monitored.job.hold(2.0)
    hung = look(monitored)
    monitored.job.train()
    restarted_page = look(monitored)

    states = [state(job) for job in (running, not_yet, hung, restarted_page)]
    assert states == ["running", "running", "hung", "running"]
    assert (
        published_states(running)
        == published_states(not_yet)
        == published_states(restarted_page)
        == set(GAUGES)
    )
    assert published_states(hung) == {"training_step"}


def test_five_times_the_longest_step_is_not_a_hang_and_both_limits_are_configurable(sidecar: Sidecar) -> None:
    monitored = MonitoredJob(sidecar, a_job(seconds=100.0))
    look(monitored)
    monitored.job.hold(450.0)
    slow_page = look(monitored)
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
def test_a_waiting_rank_is_stalled_and_long_phases_have_a_longer_limit(
    running: MonitoredJob, phase: str, seconds: float, expected: str
) -> None:
    running.job.spend(phase, seconds)
    running.job.open_seconds = seconds

    assert state(look(running)) == expected


def test_a_stopped_process_is_stalled(running: MonitoredJob) -> None:
    assert state(look(running, age_seconds=30.0)) == "stalled"


@pytest.mark.parametrize("pid", [7, 99])  # the process or its launcher
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
def test_the_exit_status_seen_by_run_survives_a_restart_of_the_sidecar(
    sidecar: Sidecar, status: int, expected: str, reason: dict[str, str], pid: int
) -> None:
    monitored = MonitoredJob(sidecar, a_job())
    look(monitored, final=status >= 0)
    end = End(sidecar.directory, pid, status, sidecar.clock.wall, run="r")
    report_ends(sidecar, end)
    dead = monitored.die(1.0)
    sidecar.after(5.0)
    sidecar.restart()
    report_ends(sidecar, end)
    later = sidecar.after(600.0)
    expired_page = sidecar.after(900.0)

    assert [state(dead), state(later)] == [expected, expected]
    assert {name: reason_labels(dead)[name] for name in reason} == reason
    assert reason_labels(dead) == reason_labels(later)
    assert (training_value(later, "wall_seconds_total") or 0.0) >= 9
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
def test_without_run_the_end_is_inferred_and_the_reason_is_labelled(
    sidecar: Sidecar,
    running: MonitoredJob,
    own_report: dict[str, Any],
    final: bool,
    expected: str,
    reason: str,
) -> None:
    running.job.failure = own_report.get("failure", "")
    running.write(final=final, ending=own_report.get("ending"))
    undecided = running.die(1.0)
    page = sidecar.after(3.0)

    assert state(undecided) == "ending"
    assert "training_run_outcome_info" not in undecided.families
    assert state(page) == expected
    assert reason_labels(page)["exception"] == ("ValueError" if "ending" in own_report else "")
    assert reason_labels(page)["reason"].startswith(reason)


def test_a_death_seen_by_run_has_its_time_and_is_decided_at_once(
    sidecar: Sidecar, running: MonitoredJob
) -> None:
    wall_seconds = sidecar.clock.wall
    report_ends(sidecar, End(sidecar.directory, 7, -9, wall_seconds))
    sidecar.clock.advance(20.0)
    running.kill()
    page = sidecar.collect()

    assert since_seconds(page) == wall_seconds
    assert counts_by_reason(page) == {"signal": 1}
    assert training_value(sidecar.after(1.0), "wall_seconds_total") == 9


def test_a_slightly_late_exit_status_is_accepted(sidecar: Sidecar, running: MonitoredJob) -> None:
    wall_seconds = sidecar.clock.wall
    lost_page = running.die(1.0)
    report_ends(sidecar, End(sidecar.directory, 7, -9, wall_seconds))

    assert [state(lost_page), state(sidecar.after(1.0))] == ["ending", "failed"]


def test_a_helper_has_no_rank_and_a_late_trainer_is_counted_once(sidecar: Sidecar) -> None:
    helper = make_process(rank=None, role="helper")
    sidecar.record(helper, 3)
    initial_page = sidecar.collect()
    sidecar.record(helper.replace(rank=0, role="trainer", trains=True), 5, sequence=2)
    final_page = [sidecar.after(1.0) for _ in range(4)][-1]

    assert initial_page.count("loss", run="r", role="helper") == 3
    assert state(initial_page) == "starting"
    assert final_page.count("loss", run="r", rank="0") == 5
    assert final_page.count("loss", run="r", role="helper") is None


@pytest.mark.parametrize("trainer_first", [True, False])
def test_the_process_that_trains_is_the_rank(sidecar: Sidecar, trainer_first: bool) -> None:
    wrapper = make_process(started=1.0)
    trainer = make_process(started=2.0).replace(trains=True)
    for process in (trainer, wrapper) if trainer_first else (wrapper, trainer):
        sidecar.record(process, 7 if process is trainer else 3)
        page = sidecar.after(1.0)

    assert page.count("loss", run="r", rank="0") == 7
    assert page.count("loss", run="r", rank="0", worker="1") == 3


def test_two_live_jobs_with_one_name_are_reported_and_a_restart_is_not(sidecar: Sidecar) -> None:
    def conflicts(run: str, *, named: bool = True, helper: bool = False) -> object:
        for trains in (True, not helper):
            sidecar.record(make_process(run=run).replace(trains=trains, run_given=named), 1)
            assert "training_rank_conflicts" not in sidecar.after(1.0).families
        return sidecar.after(20.0).get("training_rank_conflicts", run=run, rank="0")

    published = [conflicts("made", named=False), conflicts("helped", helper=True), conflicts("named")]
    assert published == [None, None, 1]


@pytest.mark.parametrize(("status", "productive"), [(0, 5.0), (3, 0.0), (None, 5.0)])
def test_a_run_without_a_save_is_unsaved_while_it_runs_and_productive_when_it_ends_well(
    sidecar: Sidecar, status: int | None, productive: float
) -> None:
    monitored = MonitoredJob(sidecar, a_job())
    monitored.job.hold(3.0)  # the last accumulation is incomplete
    living = look(monitored)
    if status is not None:
        report_ends(sidecar, End(sidecar.directory, 7, status, sidecar.clock.wall))
    page = monitored.finish()

    assert living.get("training_productive_seconds_total", **RUN) == 0
    assert living.get("training_uncommitted_seconds", **RUN) == 8
    assert page.get("training_productive_seconds_total", **RUN) == productive
    lost_seconds = page.get("training_badput_seconds_total", cause="lost_progress", **RUN)
    unsaved = page.get("training_uncommitted_seconds", **RUN)
    assert (lost_seconds, unsaved) == ((0, 0) if productive else (3, 5))


# Exit reasons: reports of processes, of observers, and of the kernel ------------------------------


def killed(
    directory: Path,
    *,
    failure: str = "",
    final: bool = False,
    peer_reasons: Sequence[str] = (),
    others_final: bool = False,
    status: int | None = None,
    pid: int = 7,
    oom_kills: Sequence[float] = (),
) -> dict[str, float]:
    """Return the exit reason of an attempt killed during a step, given this evidence."""
    directory.mkdir(exist_ok=True)
    sidecar, counts = Sidecar(directory), iter(oom_kills)
    ends = [] if status is None else [End(directory, pid, status, Clock().wall + 6.0)]
    sidecar.collector.endings.evidence = ExitEvidence(lambda: next(counts, None), lambda: ends)
    first = MonitoredJob(sidecar, new_job())
    first.job.hold(0.5)
    peers = [MonitoredJob(sidecar, rank=rank, job=new_job()) for rank in range(1, 1 + len(peer_reasons))]
    first.see()
    for peer, reason in zip(peers, peer_reasons, strict=True):
        peer.job.failure = reason
        peer.write(final=others_final)
        peer.kill()
    first.job.failure = failure
    first.write(final=final)
    return counts_by_reason(first.die())


@pytest.mark.parametrize("failure", ["network", "nccl_timeout", ""])
def test_a_silently_killed_rank_is_the_cause_of_errors_in_other_ranks(tmp_path: Path, failure: str) -> None:
    assert killed(tmp_path, failure=failure, final=True, peer_reasons=[""]) == {"signal": 1}


def test_exit_reasons_of_processes_are_ranked_by_evidence(tmp_path: Path) -> None:
    killed_state = killed(tmp_path / "a", failure="gpu_memory", final=True)
    by_others = killed(tmp_path / "b", failure="nccl_timeout", peer_reasons=["gpu", "network"])
    left_before = killed(tmp_path / "c", failure="network", final=True, peer_reasons=[""], others_final=True)

    assert [killed_state, by_others, left_before] == [{"gpu_memory": 1}, {"gpu": 1}, {"exit": 1}]


def test_an_oom_kill_is_recognised_from_kernel_counters(tmp_path: Path) -> None:
    assert killed(tmp_path, oom_kills=[3.0, 4.0]) == {"oom_kill": 1}  # during the process, and after its end


@pytest.mark.parametrize(
    ("status", "pid", "expected"),
    [
        *((-9, 7, "signal"), (137, 7, "signal"), (-2, 7, "user"), (-11, 7, "signal"), (1, 7, "exit")),
        # A shell or launcher only passes on a signal.
        *((137, 99, "signal"), (1, 99, "signal")),
    ],
)
def test_the_exit_status_seen_by_run_is_the_evidence(
    tmp_path: Path, status: int, pid: int, expected: str
) -> None:
    assert killed(tmp_path, status=status, pid=pid) == {expected: 1}


def test_a_normal_exit_is_accepted_unless_the_exit_status_contradicts(tmp_path: Path) -> None:
    assert killed(tmp_path / "a", final=True) == {}
    assert killed(tmp_path / "b", final=True, status=3) == {"exit": 1}


@pytest.mark.parametrize(("boot", "expected"), [("boot-1", "unknown"), ("boot-2", "host")])
def test_processes_that_ended_before_a_reboot_ended_with_the_machine(
    tmp_path: Path, boot: str, expected: str
) -> None:
    sidecar = Sidecar(tmp_path)
    sidecar.collector.endings.evidence = ExitEvidence(machine=MachineIdentity("node", "boot-1"))
    MonitoredJob(sidecar, new_job()).see()
    sidecar.feed.files.clear()
    sidecar.restart()
    sidecar.collector.endings.evidence = ExitEvidence(machine=MachineIdentity("node", boot))
    page = MonitoredJob(sidecar, new_job()).see()

    assert counts_by_reason(page) == counts_by_reason(page, "restarts") == {expected: 1}
