"""Goodput on paper: every second of a task is productive, at risk, or lost to a cause."""

from __future__ import annotations

import pytest
from goodput_support import Books, a_job, steps
from places import PROJECT

from exporter.ledger.goodput.task import CAUSES


def killed_at_100() -> Books:
    """Saved at 90, killed at 100, and half a second into the next step."""
    books, job = Books(), a_job()
    books.begin(job)
    steps(job, 90)
    job.save(2.0)
    steps(job, 10)
    job.hold(0.5)
    books.end(job, after=0.25, reason="oom_kill")
    return books


def test_work_that_is_repeated_from_behind_a_save_is_not_productive_twice() -> None:
    books = killed_at_100()
    again = a_job(50)
    books.begin(again)
    steps(again, 50)
    again.save(1.0)
    books.see(again)

    assert books.goodput.lost_steps == 10 + 40
    assert books.goodput.productive == 90 + 10
    assert books.lost()["lost_progress"] == 0.75 + 10 + 40


def test_one_that_loads_a_checkpoint_and_counts_from_zero_goes_on_from_the_latest_save() -> None:
    books = killed_at_100()
    again = a_job(0, load=1.0)
    books.begin(again)
    steps(again, 10)
    again.save(1.0)
    books.see(again)

    assert books.goodput.lost_steps == 10
    assert books.goodput.productive == 100


def test_a_warm_up_does_not_settle_where_a_training_goes_on() -> None:
    books = killed_at_100()
    again = a_job(0)
    again.guessed = True
    books.begin(again)
    steps(again, 3)
    books.see(again)
    again.begin_loop(90)
    again.guessed, again.first_step = False, 90
    books.see(again)

    assert books.goodput.lost_steps == 10


def test_a_run_that_ended_in_order_and_begins_again_is_another_task() -> None:
    books, job = Books(), a_job()
    books.begin(job)
    steps(job, 10)
    job.finished = True
    books.end(job, final=True)
    books.now += 86400
    again = a_job(0)
    books.begin(again)
    steps(again, 10)
    again.save(0.0)
    books.see(again)

    assert books.goodput.attempt is not None
    assert books.goodput.attempt.number == 1
    assert books.goodput.productive == 20
    assert books.goodput.lost_steps == 0
    assert sum(books.goodput.restarts.values()) == 0
    assert books.lost() == {"init": 8}


def test_a_session_that_is_split_in_order_counts_the_time_between() -> None:
    books, job = Books(), a_job()
    books.begin(job, tagged=True)
    steps(job, 10)
    job.finished = True
    books.end(job, final=True)
    books.now += 86400
    again = a_job(10)
    books.begin(again, tagged=True)
    steps(again, 10)
    again.save(0.0)
    books.see(again)

    assert books.lost() == {"init": 8, "downtime": 86400}
    assert books.goodput.productive == 20
    assert books.goodput.lost_steps == 0
    assert books.goodput.restarts["exit"] == 1


@pytest.mark.parametrize(("first_step", "load", "same"), [(0, 0.0, False), (0, 1.0, True), (90, 0.0, True)])
def test_a_crash_long_ago_is_another_task_where_the_training_begins_from_nothing(
    first_step: int, load: float, same: bool
) -> None:
    books = killed_at_100()
    books.now += 86400
    books.begin(a_job(first_step, load=load))

    assert books.lost().get("downtime", 0.0) == (86400 if same else 0)
    assert books.goodput.attempt is not None
    assert books.goodput.attempt.number == (2 if same else 1)
    assert books.goodput.lost_steps == (10 if same else 0)
    assert books.goodput.uncommitted == 0


def test_a_step_that_never_ended_hung_and_a_short_one_was_lost() -> None:
    for held, cause in ((400.0, "hang"), (200.0, "lost_progress")):
        books, job = Books(), a_job()
        books.begin(job)
        steps(job, 3)
        job.hold(held)
        books.see(job)
        at_risk = books.goodput.uncommitted
        books.end(job)

        assert at_risk == 3 + held
        assert books.lost() == {"init": 4, cause: held}


def test_the_worked_example_of_the_documentation_is_true() -> None:
    text = (PROJECT / "docs" / "goodput.md").read_text(encoding="utf-8")
    books, first = Books(), a_job(init=20.0)
    books.begin(first)
    for step in range(100):
        first.train(1.5, data=0.5)
        first.save(6.0) if step % 30 == 29 else None
    first.hold(0.5)
    books.end(first)
    books.wait(60.0)
    before = [books.goodput.uncommitted, books.goodput.wall]
    second = a_job(90, init=20.0)
    books.begin(second)
    for _ in range(30):
        second.train(1.5, data=0.5)
    second.save(6.0)
    second.finished = True
    books.end(second, final=True)

    goodput = books.goodput
    assert [goodput.productive, goodput.wall, goodput.lost_steps] == [180, 384.5, 10]
    assert books.lost() == {
        "init": 40,
        "lost_progress": 15.5,
        "data_stall": 65,
        "checkpoint_save": 24,
        "downtime": 60,
    }
    assert before == [15, 238.5]
    for words in ("**productive 180**", "lost_progress 15.5", "**wall 384.5**", "was 15 and wall 238.5"):
        assert words in text
    assert all(f"| `{cause}` |" in text for cause in CAUSES)
