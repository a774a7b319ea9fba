"""Sessions: grouping of attempts over restarts of job and sidecar, runs and nodes; the start of an attempt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from goodput_support import MonitoredJob, badput_seconds, check_seconds_add_up, job_in_loop, training_value
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_support import Page, SimulatedSidecar, make_process, make_snapshot

from exporter.ledger.goodput.endings import find_process_start
from exporter.ledger.goodput.families import SPECS
from exporter.ledger.goodput.options import GoodputOptions
from exporter.ledger.state.files import file_name
from exporter.training.phases import PHASES


def goodput_names(page: Page) -> set[str]:
    return {spec.name for spec in SPECS} & page.families.keys()


@pytest.fixture
def sidecar(tmp_path: Path) -> SimulatedSidecar:
    return SimulatedSidecar(tmp_path)


def test_a_job_without_training_has_no_goodput_and_no_state_file(sidecar: SimulatedSidecar) -> None:
    process = make_process()
    sidecar.feed.publish(make_snapshot(process))
    running_page = sidecar.collect()
    sidecar.feed.kill(process)
    exited_page = sidecar.collect_after(60.0)

    assert goodput_names(running_page) == goodput_names(exited_page) == set()
    assert [path.name for path in (sidecar.directory / "ledger").glob("goodput*")] == []
    assert process.id not in sidecar.feed.files


def test_a_rank_read_before_rank_0_is_released_silently(
    sidecar: SimulatedSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    job_of_rank_1 = MonitoredJob(sidecar, job_in_loop(), rank=1)
    job_of_rank_1.write_and_collect()
    job_of_rank_0 = MonitoredJob(sidecar, job_in_loop())
    job_of_rank_0.write_and_collect()
    with caplog.at_level("INFO"):
        page = sidecar.collect_after(10.0)

    assert badput_seconds(page) == {"init": 4}
    assert [record.message for record in caplog.records] == []
    assert len(sidecar.collector.sessions.work_accounts()) == 1


ACTIONS = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 20)),
    st.tuples(st.just("save"), st.just(0)),
    st.tuples(st.sampled_from(["validation", "compile", "other", "hold", "loop"]), st.integers(1, 5)),
    st.tuples(st.just("kill"), st.integers(0, 200)),
)


def play_and_return_last_page(
    directory: Path, actions: list[tuple[str, int]], restarts: set[int], tag: str
) -> Page:
    """Play the actions of a task, restart the sidecar after some of them, and return the last page."""
    sidecar = SimulatedSidecar(directory)
    job = MonitoredJob(sidecar, job_in_loop(session_tag=tag))
    saved_step, page = 0, sidecar.collect()
    for index, (action, amount) in enumerate([*actions, ("finish", 0)]):
        if action == "train":
            job.simulated.train(amount)
        elif action == "save":
            job.simulated.save(1.0)
            saved_step = job.simulated.step or 0
        elif action == "hold":
            job.simulated.hold(float(amount))
        elif action == "loop":
            job.simulated.start_loop(amount)
        elif action in PHASES:
            job.simulated.spend(action, float(amount))
        job.simulated.finished = action == "finish"
        job.write(final=job.simulated.finished)
        previous_page, page = page, sidecar.collect()
        check_seconds_add_up(page)
        for name in ("wall_seconds_total", "productive_seconds_total", "lost_steps_total"):
            assert (training_value(page, name) or 0.0) >= (training_value(previous_page, name) or 0.0) - 1e-6
        if index in restarts:
            sidecar.restart()
        if action in {"kill", "finish"}:
            job.kill()
            sidecar.collect()
            if index in restarts:
                sidecar.restart()
            sidecar.collect_after(4.0 + amount)
            page = sidecar.collect_after(1.0)
        if action == "kill":
            job = MonitoredJob(sidecar, job_in_loop(saved_step, load_seconds=1.0, session_tag=tag))
    sidecar.state.close()
    return page


@pytest.mark.timeout(90)  # hundreds of saves on a disk of unknown speed
@settings(max_examples=30, deadline=None)
@given(st.lists(ACTIONS, max_size=10), st.sets(st.integers(0, 10)))
def test_restarts_of_the_sidecar_between_actions_change_no_goodput(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]], restarts: set[int]
) -> None:
    uninterrupted_page = play_and_return_last_page(tmp_path_factory.mktemp("a"), actions, set(), "s")
    interrupted_page = play_and_return_last_page(tmp_path_factory.mktemp("b"), actions, restarts, "s")

    check_seconds_add_up(interrupted_page)
    for name in goodput_names(uninterrupted_page) - {"training_attempt_start_timestamp_seconds"}:
        expected, actual = (page.all(name) for page in (uninterrupted_page, interrupted_page))
        assert actual == pytest.approx(expected), name


def test_attempts_without_a_running_sidecar_are_counted(sidecar: SimulatedSidecar) -> None:
    for first_step in (0, 10, 20):
        attempt = MonitoredJob(sidecar, job_in_loop(first_step))
        attempt.simulated.train(12)
        attempt.write()
        if first_step < 20:
            attempt.kill()
    page = sidecar.collect()

    assert training_value(page, "attempt") == 3
    assert training_value(page, "lost_steps_total") == 4
    assert training_value(page, "productive_seconds_total") == 20
    assert training_value(page, "uncommitted_seconds") == 12
    check_seconds_add_up(page)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_clock_set_back_without_a_running_sidecar_decreases_no_counter(
    sidecar: SimulatedSidecar, is_killed: bool
) -> None:
    attempt = MonitoredJob(sidecar, job_in_loop())
    attempt.simulated.train(50)
    attempt.simulated.save(0.0)
    initial_page = attempt.write_and_collect()
    attempt.simulated.train(2)
    attempt.write()
    if is_killed:
        attempt.kill()
    sidecar.restart()
    sidecar.clock.wall -= 3600.0
    if is_killed:
        attempt = MonitoredJob(sidecar, job_in_loop(50))
    attempt.simulated.train(3)
    page = attempt.write_and_collect()
    final_page = sidecar.collect_after(30.0)

    assert training_value(page, "attempt") == (2 if is_killed else 1)
    assert training_value(page, "lost_steps_total") == (2 if is_killed else 0)
    assert training_value(page, "uncommitted_seconds") == (3 if is_killed else 5)
    for name in ("wall_seconds_total", "productive_seconds_total"):
        assert (
            (training_value(initial_page, name) or 0.0)
            <= (training_value(page, name) or 0.0)
            <= (training_value(final_page, name) or 0.0)
        )
    check_seconds_add_up(final_page)


SESSION_HOLDER = """
import sys
from pathlib import Path
from exporter.ledger.state.store import StateStore
store = StateStore(Path(sys.argv[1]), sidecar="elsewhere")
print(store.claim(("goodput", "s", "session", "", "")), flush=True)
sys.stdin.read()
"""
"""Program that holds the session `s`, as a sidecar of another node, until its input closes."""


def test_a_session_locked_by_another_sidecar_is_loaded_after_its_release(sidecar: SimulatedSidecar) -> None:
    job = MonitoredJob(sidecar, job_in_loop(session_tag="s"))
    job.simulated.train(2)
    job.write()
    command = [sys.executable, "-c", SESSION_HOLDER, str(sidecar.directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other_process:
        assert other_process.stdout is not None
        assert other_process.stdout.readline() == "True\n"
        refused_families = sidecar.collector.collect()
        other_process.kill()
        other_process.wait()
        page = sidecar.collect_after(1.0)

    assert [
        reason for reason, message in refused_families.problems if "a different sidecar holds" in message
    ] == ["state"]
    assert goodput_names(Page(refused_families)) == set()
    assert training_value(page, "uncommitted_seconds") == 2


def test_the_first_of_two_live_processes_of_a_session_counts(
    sidecar: SimulatedSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    counted_job = MonitoredJob(sidecar, run="a", simulated=job_in_loop(session_tag="s"))
    counted_job.write_and_collect()
    other_job = MonitoredJob(sidecar, run="b", simulated=job_in_loop(session_tag="s"))
    page = other_job.write_and_collect()
    sidecar.collect_after(1.0)

    assert training_value(page, "attempt", "a") == 1
    assert training_value(page, "attempt", "b") is None
    assert [record.levelname for record in caplog.records if "two running processes" in record.message] == [
        "WARNING"
    ]


def test_a_late_session_tag_is_accepted(sidecar: SimulatedSidecar) -> None:
    job = MonitoredJob(sidecar)
    job.simulated.spend("init", 2.0)
    untagged_page = job.write_and_collect()
    job.simulated.facts["session_tag"] = "s"
    tagged_page = job.write_and_collect()

    assert goodput_names(untagged_page) == set()
    assert training_value(tagged_page, "badput_seconds_total", cause="init") == 2
    assert (sidecar.directory / "ledger" / file_name(("goodput", "s", "session", "", ""))).exists()


# A process that has not trained may still report a session tag for 30 s. Until then, it is no attempt.
@pytest.mark.parametrize(("duration_seconds", "attempts"), [(1.0, 2), (40.0, 3)])
def test_an_evaluation_between_attempts_does_not_complete_the_task(
    sidecar: SimulatedSidecar, duration_seconds: float, attempts: int
) -> None:
    first_attempt = MonitoredJob(sidecar, job_in_loop())
    first_attempt.simulated.train(5)
    first_attempt.simulated.save(0.0)
    first_attempt.simulated.train(2)
    first_attempt.write_and_collect()
    first_attempt.die()
    evaluation = MonitoredJob(sidecar)
    evaluation.simulated.spend("init", 0.5)
    evaluation.write_and_collect()
    evaluation.simulated.spend("test", duration_seconds)
    evaluation.write_and_collect()
    evaluation.finish()
    page = MonitoredJob(sidecar, job_in_loop(5)).write_and_collect()

    assert training_value(page, "lost_steps_total") == 2
    assert training_value(page, "productive_seconds_total") == 5
    assert training_value(page, "attempt") == attempts
    check_seconds_add_up(page)


def test_a_changed_validation_option_applies_from_the_next_attempt(sidecar: SimulatedSidecar) -> None:
    first_attempt = MonitoredJob(sidecar, job_in_loop())
    first_attempt.simulated.spend("validation", 5.0)
    first_attempt.write_and_collect()
    sidecar.collector.sessions.options = GoodputOptions(validation="productive")
    first_attempt.simulated.spend("validation", 1.0)
    first_attempt.write_and_collect()
    first_attempt.die()
    second_attempt = MonitoredJob(sidecar, job_in_loop())
    second_attempt.simulated.spend("validation", 10.0)
    page = second_attempt.write_and_collect()

    # Both validations of the first attempt are lost time, although the option changed before the second.
    assert badput_seconds(page)["validation"] == 6
    assert training_value(page, "productive_seconds_total") == 10


def test_the_time_to_the_first_step_is_per_attempt(sidecar: SimulatedSidecar) -> None:
    attempt = MonitoredJob(sidecar, job_in_loop())
    initial_page = attempt.write_and_collect()
    attempt.simulated.train(3)
    attempt.simulated.last_progress = attempt.process.started + 7.0
    page = attempt.write_and_collect()

    assert training_value(initial_page, "time_to_first_step_seconds") is None
    assert training_value(page, "time_to_first_step_seconds") == 5
    assert training_value(page, "attempt_start_timestamp_seconds") == attempt.process.started


def test_the_start_of_a_process_comes_from_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (py) thon) S " + " ".join(["0"] * 18) + " 5000 0 0")

    def process_start(pid: int | None, recorded_at: float) -> float:
        return find_process_start(
            pid, recorded_at, proc=tmp_path, clock=lambda: 1000.0, boottime=lambda: 100.0
        )

    assert process_start(7, 960.0) == 950.0
    assert [process_start(None, 960.0), process_start(8, 960.0)] == [960.0, 960.0]
    # The pid belongs to a later process.
    assert process_start(7, 940.0) == 940.0
    # The process, such as a notebook, trains long after its start.
    assert process_start(7, 2000.0) == 2000.0
