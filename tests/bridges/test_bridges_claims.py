"""Shared parts of the bridges: method hooks, claims, and the tracker that closes open blocks."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from bridges_support import STEPS, job

from exporter.bridges.batches import samples_and_tokens
from exporter.bridges.sources import ActiveSource, Source, Strength
from exporter.patching import Around, Hook, patch, patch_existing


class Library:
    """A method of another library."""

    def work(self, number: int, *, fail: bool = False) -> int:
        if fail:
            raise KeyError("the job's own")
        return number + 1


@pytest.fixture
def library() -> type[Library]:
    return type("Copy", (), dict(vars(Library)))  # the same method in a separate class


def bracket(observed_values: list[Any]) -> Hook:
    def hook(_self: object, number: int, **_rest: object) -> Around:
        observed_values.append(number)
        observed_values.append((yield))

    return hook


def broken_before(*_args: Any, **_kwargs: Any) -> Around:
    raise RuntimeError("a bridge's own")


def broken_after(*_args: Any, **_kwargs: Any) -> Around:
    yield
    raise RuntimeError("a bridge's own")


def test_a_patched_method_returns_and_raises_as_before(library: type[Library]) -> None:
    observed_values: list[Any] = []
    for _ in range(2):  # the second patch changes nothing
        patch(library, "work", bracket(observed_values))

    assert library().work(1) == 2
    with pytest.raises(KeyError, match="the job's own") as raised:
        library().work(3, fail=True)
    assert observed_values[:3] == [1, (2, None), 3]
    assert isinstance(observed_values[3][1], KeyError)
    if sys.version_info >= (3, 11):  # before 3.11, a bare raise repeats the frame
        files = {Path(frame.filename).name for frame in traceback.extract_tb(raised.value.__traceback__)}
        assert files == {Path(__file__).name}


@pytest.mark.parametrize("hook", [broken_before, broken_after, lambda *_args: None])
def test_hooks_that_raise_or_skip_the_end_change_nothing(library: type[Library], hook: Hook) -> None:
    patch_existing(library, ("missing", "work"), hook)  # names that the library lacks are skipped

    assert hasattr(library.work, "__wrapped__")
    assert library().work(1) == 2


# Claims -------------------------------------------------------------------------------------------------------


class CountingSource(Source):
    def __init__(self, strength: Strength) -> None:
        self.strength = strength
        self.yielded = 0

    def yields(self) -> None:
        self.yielded += 1


def test_the_bridge_with_more_information_claims_the_loop_and_releases_it() -> None:
    active, fallback = ActiveSource(), CountingSource(Strength.WATCHING)
    leading, instrumented, other = (
        CountingSource(Strength.LEADING),
        CountingSource(Strength.INSTRUMENTED),
        CountingSource(Strength.LEADING),
    )
    active.fall_back_to(fallback)

    assert active.source is fallback
    assert active.take(instrumented)
    assert active.take(leading)
    assert active.take(leading)
    assert not active.take(instrumented)
    assert not active.take(other)
    active.release(other)
    assert active.source is leading
    active.release(leading)
    assert active.source is fallback
    assert (fallback.yielded, instrumented.yielded, leading.yielded) == (1, 1, 0)


# The tracker ---------------------------------------------------------------------------------------------------

ANY_ORDER = """
import random
from exporter.bridges.loop import Level, LoopTracker
from exporter import training

class CountingTracker(LoopTracker):
    completed = 0
    def _close(self, error):
        level = super()._close(error)
        self.completed += level is Level.ITERATION and error is None
        return level
    def discard_iteration(self):
        before = self.completed
        super().discard_iteration()
        self.completed = before

chance, tracker = random.Random(5), CountingTracker()
open_levels = set()
def error():
    return ValueError("amid") if chance.random() < 0.2 else None
actions = [
    lambda: tracker.begin_loop(chance.randrange(9)),
    tracker.begin_iteration,
    tracker.begin_iteration,
    lambda: tracker.end(Level.ITERATION, error()),
    lambda: tracker.phase(chance.choice(["forward", "backward", "compile", None])),
    lambda: tracker.phase(chance.choice(["forward", "backward", "compile", None])),
    lambda: tracker.phase(None),
    tracker.discard_iteration,
    lambda: tracker.is_open(Level.EVALUATION) or tracker.begin(Level.EVALUATION, training.validation_loop()),
    lambda: tracker.is_open(Level.BATCH) or tracker.begin(Level.BATCH, training.validation_iteration()),
    lambda: tracker.is_open(Level.SAVE) or tracker.begin_save(3),
    lambda: tracker.end(chance.choice([Level.BATCH, Level.SAVE, Level.LOAD]), error()),
]
for _ in range(300):
    for _ in range(chance.randrange(30)):
        chance.choice(actions)()
    tracker.end_all(KeyError("end"))
    open_levels |= set(filter(tracker.is_open, Level))
print(tracker.completed, len(open_levels))
"""


def test_in_any_order_of_hooks_no_block_stays_open_and_every_step_is_counted(tmp_path: Path) -> None:
    recorded = job(tmp_path, ANY_ORDER)
    steps, open_level_count = map(int, recorded.process.stdout.split())

    assert open_level_count == 0
    assert steps > 50
    assert recorded.differences({STEPS: steps, "misuse_total": None}) == {}


# Batches ------------------------------------------------------------------------------------------------------


class Shaped:
    def __init__(self, *shape: int) -> None:
        self.shape = shape


@pytest.mark.parametrize(
    ("batch", "samples_and_tokens_of_batch"),
    [
        (Shaped(4, 3), (4, None)),
        ([Shaped(5, 3), Shaped(5)], (5, None)),
        ((Shaped(5, 3), {"y": Shaped(5)}), (5, None)),
        ({"input_ids": Shaped(2, 8), "labels": Shaped(2, 8)}, (2, 16)),
        ({"image": Shaped(6, 3, 8, 8)}, (6, None)),
        (["a", "b", "c"], (3, None)),
        ([[Shaped(7)], [Shaped(7)]], (7, None)),
        *((nothing, (None, None)) for nothing in (Shaped(), None, object(), {}, [], "text", 5)),
        ({"input_ids": Shaped(16)}, (16, None)),
    ],
)
def test_the_samples_of_a_batch_are_counted_from_its_shapes(
    batch: object, samples_and_tokens_of_batch: tuple[int | None, int | None]
) -> None:
    assert samples_and_tokens(batch) == samples_and_tokens_of_batch
