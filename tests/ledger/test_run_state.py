"""The state of a run, and what goes while it hangs: what somebody sees first who looks at a job."""

from __future__ import annotations

from pathlib import Path

import pytest
from goodput_support import PaperJob, Watched, steps, told
from goodput_support import a_job as new_job
from ledger_support import Page, Sidecar, a_definition, a_process, a_reading

from exporter.feed.runs import End
from exporter.ledger.goodput.run_state import STATES, Witnesses
from exporter.ledger.goodput.sessions import GoodputOptions
from exporter.recording.values import Ending, StatReading

RUN = {"run": "r"}
GAUGES = {
    "training_loss": ("training.loss", (("mode", "train"),)),
    "training_grad_norm": ("training.grad_norm", ()),
    "training_learning_rate": ("training.learning_rate", ()),
    "training_step_longest_seconds": ("training.step_longest", ()),
    "training_step": ("training.step", ()),
}


@pytest.fixture
def sidecar(tmp_path: Path) -> Sidecar:
    return Sidecar(tmp_path)


def a_job(count: int = 5, seconds: float = 1.0) -> PaperJob:
    job = new_job()
    steps(job, count, seconds)
    return job


def state(page: Page, run: str = "r") -> str:
    values = {each: page.get("training_run_state", run=run, state=each) for each in STATES}
    assert sorted(values.values()) == [0] * (len(STATES) - 1) + [1]  # type: ignore[type-var]  # all are numbers
    return next(each for each, value in values.items() if value)


def why(page: Page) -> dict[str, str]:
    ((labels, _),) = page.families["training_run_state_info"].samples
    return {name: labels.get(name, "") for name in ("reason", "exit_status", "signal", "exception")}


def gauges() -> list[StatReading]:
    readings = []
    for name, (stat, labels) in GAUGES.items():
        unit = "seconds" if name.endswith("_seconds") else None
        definition = a_definition(stat, unit=unit, labels=labels).replace(
            kind="gauge", aggregations=frozenset()
        )
        readings.append(a_reading(definition, [0.5]).replace(value=0.5))
    return readings


def put(
    watched: Watched, *, age_seconds: float = 0.5, ending: Ending | None = None, final: bool = False
) -> None:
    """Write what it tells, with its last values, and the time of its latest step."""
    watched.catch_up()
    watched.sequence += 1
    snapshot = told(watched.process, watched.job, sequence=watched.sequence, final=final)
    training = watched.job.reading()
    if watched.job.steps:
        seconds = watched.job.seconds - watched.job.open
        # A real process works it out anew for each snapshot, from two clocks.
        jitter = 1e-6 * (watched.sequence % 3)
        training = training.replace(last_progress=watched.process.started + seconds + jitter)
    recording = snapshot.recording.replace(training=training, stats=tuple(gauges()), ending=ending)
    watched.sidecar.feed.put(snapshot.replace(recording=recording), age_seconds=age_seconds)


def shown(page: Page) -> set[str]:
    return {name for name in GAUGES if name in page.families}


def ended(sidecar: Sidecar, *ends: End) -> None:
    sidecar.collector.sessions.witnesses = Witnesses(ends=lambda: list(ends))


def test_a_run_starts_and_runs(sidecar: Sidecar) -> None:
    watched = Watched(sidecar, job=a_job(0))
    put(watched)
    before = sidecar.collect()
    watched.job.hold(600.0)  # the first step compiles
    put(watched)
    compiling = sidecar.collect()
    watched.job.open = 0.0
    watched.job.train(1.0)
    put(watched)

    assert [state(before), state(compiling), state(sidecar.collect())] == ["starting", "starting", "running"]


def test_a_hang_is_a_gap_that_ends_with_the_next_step(sidecar: Sidecar) -> None:
    watched = Watched(sidecar, job=a_job())
    put(watched)
    running = sidecar.collect()
    watched.job.hold(59.0)
    put(watched)
    not_yet = sidecar.collect()
    watched.job.hold(2.0)
    put(watched)
    hung = sidecar.collect()
    watched.job.open = 0.0
    watched.job.train(1.0)
    put(watched)
    again = sidecar.collect()

    states = [state(each) for each in (running, not_yet, hung, again)]
    assert states == ["running", "running", "hung", "running"]
    assert shown(running) == shown(not_yet) == shown(again) == set(GAUGES)
    assert shown(hung) == {"training_step"}


def test_ten_usual_steps_are_no_hang_and_both_numbers_are_configured(sidecar: Sidecar) -> None:
    watched = Watched(sidecar, job=a_job(seconds=30.0))
    put(watched)
    sidecar.collect()
    watched.job.hold(250.0)
    put(watched)
    slow = sidecar.collect()
    sidecar.collector.sessions.options = GoodputOptions(hang_seconds=100.0, hang_steps=5.0)

    assert [state(slow), state(sidecar.collect())] == ["running", "hung"]


@pytest.mark.parametrize(
    ("phase", "seconds", "expected"),
    [("validation", 200.0, "running"), ("validation", 400.0, "stalled"), ("data_loading", 70.0, "stalled")],
)
def test_who_waits_is_stalled_and_a_long_phase_has_longer(
    sidecar: Sidecar, phase: str, seconds: float, expected: str
) -> None:
    watched = Watched(sidecar, job=a_job())
    put(watched)
    sidecar.collect()
    watched.job.spend(phase, seconds)
    watched.job.open = seconds
    put(watched)

    assert state(sidecar.collect()) == expected


def test_a_process_that_is_stopped_is_stalled(sidecar: Sidecar) -> None:
    watched = Watched(sidecar, job=a_job())
    put(watched)
    sidecar.collect()
    put(watched, age_seconds=30.0)

    assert state(sidecar.collect()) == "stalled"


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
def test_run_knows_how_it_ended_also_after_a_restart_of_the_sidecar(
    sidecar: Sidecar, status: int, expected: str, reason: dict[str, str]
) -> None:
    watched = Watched(sidecar, job=a_job())
    put(watched, final=status >= 0)
    sidecar.collect()
    ended(sidecar, End(sidecar.directory, 7, status, sidecar.clock.wall))
    watched.kill()
    dead = sidecar.after(1.0)
    sidecar.after(5.0)
    witnesses = sidecar.collector.sessions.witnesses
    sidecar.restart()
    sidecar.collector.sessions.witnesses = witnesses
    later = sidecar.after(600.0)
    over = sidecar.after(900.0)

    assert [state(dead), state(later)] == [expected, expected]
    assert {name: why(dead)[name] for name in reason} == reason
    assert why(dead) == why(later)
    assert "training_run_state" not in over.families


@pytest.mark.parametrize(
    ("final", "ending", "expected"),
    [(True, None, "finished"), (True, Ending("ValueError", 1.0), "failed"), (False, None, "lost")],
)
def test_without_run_the_end_is_deduced_and_that_is_said(
    sidecar: Sidecar, final: bool, ending: Ending | None, expected: str
) -> None:
    watched = Watched(sidecar, job=a_job())
    put(watched)
    sidecar.collect()
    put(watched, final=final, ending=ending)
    watched.kill()
    page = sidecar.after(1.0)

    assert state(page) == expected
    assert why(page)["exception"] == ("ValueError" if ending else "")
    assert why(page)["reason"].startswith("exception ValueError" if ending else "deduced")


def test_a_status_that_comes_a_little_later_is_believed(sidecar: Sidecar) -> None:
    watched = Watched(sidecar, job=a_job())
    put(watched)
    sidecar.collect()
    at = sidecar.clock.wall
    watched.kill()
    lost = sidecar.after(1.0)
    ended(sidecar, End(sidecar.directory, 7, -9, at))

    assert [state(lost), state(sidecar.after(1.0))] == ["lost", "failed"]


def test_a_helper_takes_no_rank_and_one_that_begins_to_train_is_counted_once(sidecar: Sidecar) -> None:
    helper = a_process(rank=None, role="helper")
    sidecar.record(helper, 3)
    before = sidecar.collect()
    sidecar.record(helper.replace(rank=0, role="trainer", trains=True), 5, sequence=2)
    after = [sidecar.after(1.0) for _ in range(4)][-1]

    assert before.count("loss", run="r", role="helper") == 3
    assert state(before) == "starting"
    assert after.count("loss", run="r", rank="0") == 5
    assert after.count("loss", run="r", role="helper") is None


@pytest.mark.parametrize("trainer_first", [True, False])
def test_the_process_that_trains_is_the_rank(sidecar: Sidecar, trainer_first: bool) -> None:
    wrapper = a_process(started=1.0)
    trainer = a_process(started=2.0).replace(trains=True)
    for process in (trainer, wrapper) if trainer_first else (wrapper, trainer):
        sidecar.record(process, 7 if process is trainer else 3)
        page = sidecar.after(1.0)

    assert page.count("loss", run="r", rank="0") == 7
    assert page.count("loss", run="r", rank="0", worker="1") == 3


def test_two_jobs_that_share_a_given_name_are_told_and_a_restart_is_not(sidecar: Sidecar) -> None:
    def conflicts(given: bool, run: str) -> object:
        for _ in range(2):
            process = a_process(run=run).replace(trains=True, run_given=given)
            sidecar.record(process, 1)
            at_once = sidecar.after(1.0)
            assert "training_rank_conflicts" not in at_once.families
        return sidecar.after(20.0).get("training_rank_conflicts", run=run, rank="0")

    made = conflicts(given=False, run="made")
    named = conflicts(given=True, run="named")

    assert [made, named] == [None, 1]


@pytest.mark.parametrize(("status", "productive"), [(0, 5.0), (3, 0.0), (None, 5.0)])
def test_a_run_without_a_save_is_unsaved_while_it_runs_and_productive_when_it_ends_well(
    sidecar: Sidecar, status: int | None, productive: float
) -> None:
    watched = Watched(sidecar, job=a_job())
    watched.job.hold(3.0)  # its last accumulation is not full
    put(watched)
    living = sidecar.collect()
    if status is not None:
        ended(sidecar, End(sidecar.directory, 7, status, sidecar.clock.wall))
    watched.job.finished = True
    put(watched, final=True)
    page = watched.die()

    assert living.get("training_productive_seconds_total", **RUN) == 0
    assert living.get("training_uncommitted_seconds", **RUN) == 8
    assert page.get("training_productive_seconds_total", **RUN) == productive
    lost = page.get("training_badput_seconds_total", cause="lost_progress", **RUN)
    unsaved = page.get("training_uncommitted_seconds", **RUN)
    assert (lost, unsaved) == ((0, 0) if productive else (3, 5))
