"""Sessions: grouping of attempts over restarts of job and sidecar, runs and nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from goodput_support import MonitoredJob, a_job, badput_seconds, check_identity, training_value
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_support import Page, Sidecar, make_process, make_snapshot

from exporter.ledger.goodput.endings import started_at
from exporter.ledger.goodput.families import SPECS
from exporter.ledger.goodput.options import GoodputOptions
from exporter.ledger.state.files import file_name
from exporter.training.phases import PHASES


def goodput_names(page: Page) -> set[str]:
    return {spec.name for spec in SPECS} & page.families.keys()


@pytest.fixture
def sidecar(tmp_path: Path) -> Sidecar:
    return Sidecar(tmp_path)


def test_a_job_without_training_has_no_goodput_and_no_state_file(sidecar: Sidecar) -> None:
    process = make_process()
    sidecar.feed.put(make_snapshot(process))
    alive = sidecar.collect()
    sidecar.feed.kill(process)
    dead = sidecar.after(60.0)

    assert goodput_names(alive) == goodput_names(dead) == set()
    assert [path.name for path in (sidecar.directory / "ledger").glob("goodput*")] == []
    assert process.id not in sidecar.feed.files


def test_a_rank_seen_before_rank_0_is_released_silently(
    sidecar: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    peer = MonitoredJob(sidecar, a_job(), rank=1)
    peer.see()
    first = MonitoredJob(sidecar, a_job())
    first.see()
    with caplog.at_level("INFO"):
        page = sidecar.after(10.0)

    assert badput_seconds(page) == {"init": 4}
    assert [record.message for record in caplog.records] == []
    assert len(sidecar.collector.sessions.work_accounts()) == 1


ACTIONS = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 20)),
    st.tuples(st.just("save"), st.just(0)),
    st.tuples(st.sampled_from(["validation", "compile", "other", "hold", "loop"]), st.integers(1, 5)),
    st.tuples(st.just("kill"), st.integers(0, 200)),
)


def lived(directory: Path, actions: list[tuple[str, int]], restarts: set[int], tag: str) -> Page:
    """The last page of a task to which this happened, when the sidecar was killed after these actions."""
    sidecar = Sidecar(directory)
    monitored = MonitoredJob(sidecar, a_job(session_tag=tag))
    saved, page = 0, sidecar.collect()
    for number, (action, amount) in enumerate([*actions, ("finish", 0)]):
        if action == "train":
            monitored.job.train(amount)
        elif action == "save":
            monitored.job.save(1.0)
            saved = monitored.job.step or 0
        elif action == "hold":
            monitored.job.hold(float(amount))
        elif action == "loop":
            monitored.job.begin_loop(amount)
        elif action in PHASES:
            monitored.job.spend(action, float(amount))
        monitored.job.finished = action == "finish"
        monitored.write(final=monitored.job.finished)
        previous, page = page, sidecar.collect()
        check_identity(page)
        for name in ("wall_seconds_total", "productive_seconds_total", "lost_steps_total"):
            assert (training_value(page, name) or 0.0) >= (training_value(previous, name) or 0.0) - 1e-6
        if number in restarts:
            sidecar.restart()
        if action in {"kill", "finish"}:
            monitored.kill()
            sidecar.collect()
            if number in restarts:
                sidecar.restart()
            sidecar.after(4.0 + amount)
            page = sidecar.after(1.0)
        if action == "kill":
            monitored = MonitoredJob(sidecar, a_job(saved, load=1.0, session_tag=tag))
    sidecar.state.close()
    return page


@pytest.mark.timeout(90)  # hundreds of saves on a disk of unknown speed
@settings(max_examples=60, deadline=None)
@given(st.lists(ACTIONS, max_size=10), st.sets(st.integers(0, 10)))
def test_killing_the_sidecar_at_any_time_gives_the_same_result(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]], restarts: set[int]
) -> None:
    undisturbed = lived(tmp_path_factory.mktemp("a"), actions, set(), "s")
    disturbed = lived(tmp_path_factory.mktemp("b"), actions, restarts, "s")

    check_identity(disturbed)
    for name in goodput_names(undisturbed) - {"training_attempt_start_timestamp_seconds"}:
        expected, actual = (page.all(name) for page in (undisturbed, disturbed))
        assert actual == pytest.approx(expected), name


def test_attempts_during_an_absence_of_the_sidecar_are_counted(sidecar: Sidecar) -> None:
    for first_step in (0, 10, 20):
        monitored = MonitoredJob(sidecar, a_job(first_step))
        monitored.job.train(12)
        monitored.write()
        if first_step < 20:
            monitored.kill()
    page = sidecar.collect()

    assert [training_value(page, "attempt"), training_value(page, "lost_steps_total")] == [3, 4]
    assert training_value(page, "productive_seconds_total") == 20
    assert training_value(page, "uncommitted_seconds") == 12
    check_identity(page)


@pytest.mark.parametrize("dies", [False, True])
def test_a_clock_set_back_during_an_absence_decreases_nothing(sidecar: Sidecar, dies: bool) -> None:
    monitored = MonitoredJob(sidecar, a_job())
    monitored.job.train(50)
    monitored.job.save(0.0)
    initial_page = monitored.see()
    monitored.job.train(2)
    monitored.write()
    monitored.kill() if dies else None
    sidecar.restart()
    sidecar.clock.wall -= 3600.0
    if dies:
        monitored = MonitoredJob(sidecar, a_job(50))
    monitored.job.train(3)
    page = monitored.see()
    final_page = sidecar.after(30.0)

    assert [training_value(page, "attempt"), training_value(page, "lost_steps_total")] == (
        [2, 2] if dies else [1, 0]
    )
    assert training_value(page, "uncommitted_seconds") == (3 if dies else 5)
    for name in ("wall_seconds_total", "productive_seconds_total"):
        assert (
            (training_value(initial_page, name) or 0.0)
            <= (training_value(page, name) or 0.0)
            <= (training_value(final_page, name) or 0.0)
        )
    check_identity(final_page)


HOLD = """
import sys
from pathlib import Path
from exporter.ledger.state.store import StateStore
store = StateStore(Path(sys.argv[1]), sidecar="elsewhere")
print(store.claim(("goodput", "s", "session", "", "")), flush=True)
sys.stdin.read()
"""


def test_a_session_held_by_another_sidecar_is_awaited(sidecar: Sidecar) -> None:
    monitored = MonitoredJob(sidecar, a_job(session_tag="s"))
    monitored.job.train(2)
    monitored.write()
    command = [sys.executable, "-c", HOLD, str(sidecar.directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other_process:
        assert other_process.stdout is not None
        assert other_process.stdout.readline() == "True\n"
        refused = sidecar.collector.collect()
        other_process.kill()
        other_process.wait()
        page = sidecar.after(1.0)

    assert [reason for reason, message in refused.problems if "another sidecar holds" in message] == ["state"]
    assert goodput_names(Page(refused)) == set()
    assert training_value(page, "uncommitted_seconds") == 2


def test_the_first_of_two_live_processes_of_a_session_counts(
    sidecar: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    first = MonitoredJob(sidecar, run="a", job=a_job(session_tag="s"))
    first.see()
    second = MonitoredJob(sidecar, run="b", job=a_job(session_tag="s"))
    page = second.see()
    sidecar.after(1.0)

    assert training_value(page, "attempt", "a") == 1
    assert training_value(page, "attempt", "b") is None
    assert [record.levelname for record in caplog.records if "two living processes" in record.message] == [
        "WARNING"
    ]


def test_a_late_session_tag_is_accepted(sidecar: Sidecar) -> None:
    monitored = MonitoredJob(sidecar)
    monitored.job.spend("init", 2.0)
    silent = monitored.see()
    monitored.job.facts["session_tag"] = "s"
    told_now = monitored.see()

    assert goodput_names(silent) == set()
    assert training_value(told_now, "badput_seconds_total", cause="init") == 2
    assert (sidecar.directory / "ledger" / file_name(("goodput", "s", "session", "", ""))).exists()


@pytest.mark.parametrize("lasts", [1.0, 40.0])
def test_a_process_that_does_not_train_in_between_completes_no_task(sidecar: Sidecar, lasts: float) -> None:
    first = MonitoredJob(sidecar, a_job())
    first.job.train(5)
    first.job.save(0.0)
    first.job.train(2)
    first.see()
    first.die()
    evaluation = MonitoredJob(sidecar)
    evaluation.job.spend("init", 0.5)
    evaluation.see()
    evaluation.job.spend("test", lasts)
    evaluation.see()
    evaluation.finish()
    page = MonitoredJob(sidecar, a_job(5)).see()

    assert [training_value(page, "lost_steps_total"), training_value(page, "productive_seconds_total")] == [
        2,
        5,
    ]
    assert training_value(page, "attempt") == (2 if lasts < 30 else 3)
    check_identity(page)


def test_a_changed_validation_option_applies_from_the_next_attempt(sidecar: Sidecar) -> None:
    first = MonitoredJob(sidecar, a_job())
    first.job.spend("validation", 5.0)
    first.see()
    sidecar.collector.sessions.options = GoodputOptions(validation="productive")
    first.job.spend("validation", 1.0)
    first.see()
    first.die()
    second = MonitoredJob(sidecar, a_job())
    second.job.spend("validation", 10.0)
    page = second.see()

    assert badput_seconds(page)["validation"] == 6
    assert training_value(page, "productive_seconds_total") == 10


def test_the_time_to_the_first_step_is_per_attempt(sidecar: Sidecar) -> None:
    monitored = MonitoredJob(sidecar, a_job())
    initial_page = monitored.see()
    monitored.job.train(3)
    monitored.job.last_progress = monitored.process.started + 7.0
    page = monitored.see()

    assert training_value(initial_page, "time_to_first_step_seconds") is None
    assert training_value(page, "time_to_first_step_seconds") == 5
    assert training_value(page, "attempt_start_timestamp_seconds") == monitored.process.started


def test_the_start_of_a_process_comes_from_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (py) thon) S " + " ".join(["0"] * 18) + " 5000 0 0")

    def process_start(pid: int | None, recorded: float) -> float:
        return started_at(pid, recorded, proc=tmp_path, clock=lambda: 1000.0, boottime=lambda: 100.0)

    assert process_start(7, 960.0) == 950.0
    assert [process_start(None, 960.0), process_start(8, 960.0)] == [960.0, 960.0]
    assert process_start(7, 940.0) == 940.0, "a later process of that number"
    assert process_start(7, 2000.0) == 2000.0, "a notebook"
