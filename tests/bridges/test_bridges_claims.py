"""What the bridges share: brackets around methods, the claim to tell, and the course that closes what hooks leave open."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bridges_support import job

from exporter.bridges.batches import samples_and_tokens
from exporter.bridges.brackets import bracket, bracket_what_exists, never_raises
from exporter.bridges.claims import INSTRUMENTED, LEADING, NOBODY, WATCHING, Claims, Teller


class Library:
    """A method of somebody else's."""

    def work(self, number: int, *, fail: bool = False) -> int:
        if fail:
            raise KeyError("the job's own")
        return number + 1


@pytest.fixture
def library() -> type[Library]:
    return type("Copy", (), dict(vars(Library)))  # the same method, of a class of its own


def test_a_bracketed_method_gives_and_raises_what_it_did_before(library: type[Library]) -> None:
    told: list[Any] = []
    bracket(library, "work", lambda _self, number, **_rest: number, lambda *end: told.append(end))

    assert library().work(1) == 2
    with pytest.raises(KeyError, match="the job's own"):
        library().work(3, fail=True)
    assert told[0] == (1, 2, None)
    assert told[1][:2] == (3, None)
    assert isinstance(told[1][2], KeyError)


def test_hooks_that_raise_change_nothing(library: type[Library]) -> None:
    def broken(*_args: Any, **_kwargs: Any) -> object:
        raise RuntimeError("a bridge's own")

    bracket(library, "work", broken, broken)
    assert library().work(1) == 2

    other = type("Other", (), dict(vars(Library)))
    bracket(other, "work", lambda *_args, **_kwargs: True, broken)
    assert other().work(1) == 2
    assert never_raises(broken)() is None


def test_a_method_is_bracketed_once_and_an_end_that_is_not_wanted_is_not_told(library: type[Library]) -> None:
    told: list[Any] = []
    for _ in range(2):
        bracket(
            library, "work", lambda *_args, **_kwargs: told.append("begin"), lambda *_end: told.append("end")
        )

    assert library().work(1) == 2
    assert told == ["begin"]


def test_a_function_that_is_bracketed_where_it_is_reexported_can_still_be_pickled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home, face = ModuleType("exporter_test_home"), ModuleType("exporter_test_face")
    exec("def work(): return 1", vars(home))
    vars(face)["work"] = vars(home)["work"]
    monkeypatch.setitem(sys.modules, home.__name__, home)
    bracket(face, "work", lambda: None)

    assert pickle.loads(pickle.dumps(vars(face)["work"])) is vars(face)["work"]


def test_what_a_version_does_not_have_is_left_out(library: type[Library]) -> None:
    bracket_what_exists(library, ("missing", "work"), lambda *_args, **_kwargs: None, lambda *_end: None)

    assert hasattr(library.work, "__wrapped__")
    with pytest.raises(AttributeError):
        bracket(library, "missing", lambda *_args: None, lambda *_end: None)


# The claim ----------------------------------------------------------------------------------------------------


class Named(Teller):
    def __init__(self, strength: int) -> None:
        self.strength = strength
        self.yielded = 0

    def yields(self) -> None:
        self.yielded += 1


def test_who_knows_more_takes_the_claim_and_it_returns_to_who_stands() -> None:
    claims, standing = Claims(), Named(WATCHING)
    leading, instrumented, other = Named(LEADING), Named(INSTRUMENTED), Named(LEADING)
    claims.stand(standing)

    assert claims.holder is standing
    assert claims.take(instrumented)
    assert claims.take(leading)
    assert claims.take(leading)
    assert not claims.take(instrumented)
    assert not claims.take(other)
    claims.release(other)
    assert claims.holder is leading
    claims.release(leading)
    assert claims.holder is standing
    assert (standing.yielded, instrumented.yielded, leading.yielded) == (1, 1, 0)


def test_nobody_holds_the_claim_where_nobody_stands() -> None:
    claims, teller = Claims(), Named(LEADING)

    assert claims.take(teller)
    claims.release(teller)
    assert claims.holder is NOBODY
    assert not NOBODY.fetch_begins()
    assert not NOBODY.backward_begins(None)
    assert not NOBODY.save_begins({}, at_once=True)


# The course ---------------------------------------------------------------------------------------------------

ANY_ORDER = """
import random
from exporter.bridges.course import BATCH, EVALUATION, ITERATION, LOAD, LOOP, SAVE, Course
from exporter.training.recording import TRAINING

class Counted(Course):
    completed = 0
    def _close(self, error):
        kind = super()._close(error)
        self.completed += kind == ITERATION and error is None
        return kind

chance = random.Random(5)
course = Counted()
for _ in range(300):
    for _ in range(chance.randrange(30)):
        what = chance.randrange(12)
        error = ValueError("amid") if chance.random() < 0.2 else None
        if what == 0:
            course.begin_loop(chance.randrange(9))
        elif what in (1, 2):
            course.begin_iteration()
        elif what == 3:
            course.end(ITERATION, error)
        elif what in (4, 5):
            course.phase(chance.choice(["forward", "backward", "compile", None]))
        elif what == 6:
            course.abandon_iteration()
        elif what == 7 and not course.is_open(EVALUATION):
            course.begin(EVALUATION, course.training.validation_loop())
        elif what == 8:
            course.end(chance.choice([BATCH, SAVE, LOAD]), error)
        elif what == 9 and not course.is_open(SAVE):
            course.begin_save(3)
        elif what == 10 and not course.is_open(BATCH):
            course.begin(BATCH, course.training.validation_iteration())
        elif what == 11:
            course.phase(None)
    course.end_all(KeyError("end"))
    assert not any(map(course.is_open, (LOOP, ITERATION, EVALUATION, BATCH, SAVE, LOAD)))
exporter.flush()
print("completed", course.completed)
"""


def test_whatever_order_hooks_have_nothing_stays_open_and_every_step_is_counted(tmp_path: Path) -> None:
    told = job(tmp_path, ANY_ORDER)

    completed = int(told.done.stdout.rpartition(" ")[2])
    assert completed > 50
    assert told.value("training_steps_total", mode="train") == completed
    assert told.value("training_misuse_total") in {None, 0}


# Batches ------------------------------------------------------------------------------------------------------


class Shaped:
    def __init__(self, *shape: int) -> None:
        self.shape = shape


@pytest.mark.parametrize(
    ("batch", "counted"),
    [
        (Shaped(4, 3), (4, None)),
        ([Shaped(5, 3), Shaped(5)], (5, None)),
        ((Shaped(5, 3), {"y": Shaped(5)}), (5, None)),
        ({"input_ids": Shaped(2, 8), "labels": Shaped(2, 8)}, (2, 16)),
        ({"image": Shaped(6, 3, 8, 8)}, (6, None)),
        (["a", "b", "c"], (3, None)),
        ([[Shaped(7)], [Shaped(7)]], (7, None)),
        (Shaped(), (None, None)),
        (None, (None, None)),
        (object(), (None, None)),
        ({}, (None, None)),
        ([], (None, None)),
        ("text", (None, None)),
        (5, (None, None)),
        ({"input_ids": Shaped(16)}, (16, None)),
    ],
)
def test_a_batch_is_counted_by_its_shapes(batch: object, counted: tuple[int | None, int | None]) -> None:
    assert samples_and_tokens(batch) == counted


def test_a_batch_that_raises_is_not_counted() -> None:
    class Odd:
        @property
        def shape(self) -> object:
            raise ValueError("no shape yet")

    assert samples_and_tokens(Odd()) == (None, None)
