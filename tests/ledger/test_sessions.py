"""Sessions: grouping of attempts over restarts of job and sidecar, runs and nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from goodput_support import Watched, a_job, badput, check_identity, of
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_support import Page, Sidecar, a_process, a_snapshot

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
    process = a_process()
    sidecar.feed.put(a_snapshot(process))
    alive = sidecar.collect()
    sidecar.feed.kill(process)
    dead = sidecar.after(60.0)

    assert goodput_names(alive) == goodput_names(dead) == set()
    assert [path.name for path in (sidecar.directory / "ledger").glob("goodput*")] == []
    assert process.id not in sidecar.feed.files


def test_a_rank_seen_before_rank_0_is_released_silently(
    sidecar: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    peer = Watched(sidecar, a_job(), rank=1)
    peer.see()
    first = Watched(sidecar, a_job())
    first.see()
    with caplog.at_level("INFO"):
        page = sidecar.after(10.0)

    assert badput(page) == {"init": 4}
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
    watched = Watched(sidecar, a_job(session_tag=tag))
    saved, page = 0, sidecar.collect()
    for number, (action, amount) in enumerate([*actions, ("finish", 0)]):
        if action == "train":
            watched.job.train(amount)
        elif action == "save":
            watched.job.save(1.0)
            saved = watched.job.step or 0
        elif action == "hold":
            watched.job.hold(float(amount))
        elif action == "loop":
            watched.job.begin_loop(amount)
        elif action in PHASES:
            watched.job.spend(action, float(amount))
        watched.job.finished = action == "finish"
        watched.write(final=watched.job.finished)
        before, page = page, sidecar.collect()
        check_identity(page)
        for name in ("wall_seconds_total", "productive_seconds_total", "lost_steps_total"):
            assert (of(page, name) or 0.0) >= (of(before, name) or 0.0) - 1e-6
        if number in restarts:
            sidecar.restart()
        if action in {"kill", "finish"}:
            watched.kill()
            sidecar.collect()
            if number in restarts:
                sidecar.restart()
            sidecar.after(4.0 + amount)
            page = sidecar.after(1.0)
        if action == "kill":
            watched = Watched(sidecar, a_job(saved, load=1.0, session_tag=tag))
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
        before, after = (page.all(name) for page in (undisturbed, disturbed))
        assert after == pytest.approx(before), name


def test_attempts_during_an_absence_of_the_sidecar_are_counted(sidecar: Sidecar) -> None:
    for first_step in (0, 10, 20):
        watched = Watched(sidecar, a_job(first_step))
        watched.job.train(12)
        watched.write()
        if first_step < 20:
            watched.kill()
    page = sidecar.collect()

    assert [of(page, "attempt"), of(page, "lost_steps_total")] == [3, 4]
    assert of(page, "productive_seconds_total") == 20
    assert of(page, "uncommitted_seconds") == 12
    check_identity(page)


@pytest.mark.parametrize("dies", [False, True])
def test_a_clock_set_back_during_an_absence_decreases_nothing(sidecar: Sidecar, dies: bool) -> None:
    job = Watched(sidecar, a_job())
    job.job.train(50)
    job.job.save(0.0)
    before = job.see()
    job.job.train(2)
    job.write()
    job.kill() if dies else None
    sidecar.restart()
    sidecar.clock.wall -= 3600.0
    if dies:
        job = Watched(sidecar, a_job(50))
    job.job.train(3)
    page = job.see()
    last = sidecar.after(30.0)

    assert [of(page, "attempt"), of(page, "lost_steps_total")] == ([2, 2] if dies else [1, 0])
    assert of(page, "uncommitted_seconds") == (3 if dies else 5)
    for name in ("wall_seconds_total", "productive_seconds_total"):
        assert (of(before, name) or 0.0) <= (of(page, name) or 0.0) <= (of(last, name) or 0.0)
    check_identity(last)


HOLD = """
import sys
from pathlib import Path
from exporter.ledger.state.store import StateStore
store = StateStore(Path(sys.argv[1]), sidecar="elsewhere")
print(store.claim(("goodput", "s", "session", "", "")), flush=True)
sys.stdin.read()
"""


def test_a_session_held_by_another_sidecar_is_awaited(sidecar: Sidecar) -> None:
    watched = Watched(sidecar, a_job(session_tag="s"))
    watched.job.train(2)
    watched.write()
    command = [sys.executable, "-c", HOLD, str(sidecar.directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        refused = sidecar.collector.collect()
        other.kill()
        other.wait()
        page = sidecar.after(1.0)

    assert [reason for reason, message in refused.problems if "another sidecar holds" in message] == ["state"]
    assert goodput_names(Page(refused)) == set()
    assert of(page, "uncommitted_seconds") == 2


def test_the_first_of_two_live_processes_of_a_session_counts(
    sidecar: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    first = Watched(sidecar, run="a", job=a_job(session_tag="s"))
    first.see()
    second = Watched(sidecar, run="b", job=a_job(session_tag="s"))
    page = second.see()
    sidecar.after(1.0)

    assert of(page, "attempt", "a") == 1
    assert of(page, "attempt", "b") is None
    assert [record.levelname for record in caplog.records if "two living processes" in record.message] == [
        "WARNING"
    ]


def test_a_late_session_tag_is_accepted(sidecar: Sidecar) -> None:
    watched = Watched(sidecar)
    watched.job.spend("init", 2.0)
    silent = watched.see()
    watched.job.facts["session_tag"] = "s"
    told_now = watched.see()

    assert goodput_names(silent) == set()
    assert of(told_now, "badput_seconds_total", cause="init") == 2
    assert (sidecar.directory / "ledger" / file_name(("goodput", "s", "session", "", ""))).exists()


@pytest.mark.parametrize("lasts", [1.0, 40.0])
def test_a_process_that_does_not_train_in_between_completes_no_task(sidecar: Sidecar, lasts: float) -> None:
    first = Watched(sidecar, a_job())
    first.job.train(5)
    first.job.save(0.0)
    first.job.train(2)
    first.see()
    first.die()
    evaluation = Watched(sidecar)
    evaluation.job.spend("init", 0.5)
    evaluation.see()
    evaluation.job.spend("test", lasts)
    evaluation.see()
    evaluation.finish()
    page = Watched(sidecar, a_job(5)).see()

    assert [of(page, "lost_steps_total"), of(page, "productive_seconds_total")] == [2, 5]
    assert of(page, "attempt") == (2 if lasts < 30 else 3)
    check_identity(page)


def test_a_changed_validation_option_applies_from_the_next_attempt(sidecar: Sidecar) -> None:
    first = Watched(sidecar, a_job())
    first.job.spend("validation", 5.0)
    first.see()
    sidecar.collector.sessions.options = GoodputOptions(validation="productive")
    first.job.spend("validation", 1.0)
    first.see()
    first.die()
    second = Watched(sidecar, a_job())
    second.job.spend("validation", 10.0)
    page = second.see()

    assert badput(page)["validation"] == 6
    assert of(page, "productive_seconds_total") == 10


def test_the_time_to_the_first_step_is_per_attempt(sidecar: Sidecar) -> None:
    watched = Watched(sidecar, a_job())
    before = watched.see()
    watched.job.train(3)
    watched.job.last_progress = watched.process.started + 7.0
    page = watched.see()

    assert of(before, "time_to_first_step_seconds") is None
    assert of(page, "time_to_first_step_seconds") == 5
    assert of(page, "attempt_start_timestamp_seconds") == watched.process.started


def test_the_start_of_a_process_comes_from_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (py) thon) S " + " ".join(["0"] * 18) + " 5000 0 0")

    def began(pid: int | None, recorded: float) -> float:
        return started_at(pid, recorded, proc=tmp_path, clock=lambda: 1000.0, boottime=lambda: 100.0)

    assert began(7, 960.0) == 950.0
    assert [began(None, 960.0), began(8, 960.0)] == [960.0, 960.0]
    assert began(7, 940.0) == 940.0, "a later process of that number"
    assert began(7, 2000.0) == 2000.0, "a notebook"
