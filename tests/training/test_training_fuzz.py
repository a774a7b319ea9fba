"""Any calls in any order with any arguments: nothing is raised, and the next job's numbers are right."""

from __future__ import annotations

import inspect
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from training_support import begun_anew, configured, exported, of, published

from exporter import training

CALLS = [name for name in training.__all__ if name[0].islower() and name not in {"assert_that", "batches"}]
odd: st.SearchStrategy[Any] = st.sampled_from(
    [None, 0, -1, 3, 10**30, 2.5, math.nan, math.inf, "x", "", [1], {}, b"y", True]
)
names = st.sampled_from([*CALLS, *["leave"] * 8, *["fail"] * 4])
calls = st.tuples(names, st.lists(odd, min_size=13, max_size=13))


def call(name: str, arguments: list[Any], entered: list[Any]) -> None:
    """Make a call; a block that it gives is entered until it is left."""
    if name in {"leave", "fail"}:
        if entered:
            error = ValueError("x") if name == "fail" else None
            assert not entered.pop().__exit__(error and ValueError, error, None)
        return
    function = getattr(training, name)
    made = function(**dict(zip(inspect.signature(function).parameters, arguments, strict=False)))
    if hasattr(made, "__exit__") and not name.startswith("on_"):
        assert made.__enter__() is not None
        entered.append(made)


@settings(max_examples=150, deadline=None)
@given(st.lists(calls, max_size=40), st.booleans())
def test_after_whatever_was_called_the_next_job_is_right(sequence: list[Any], asynchronous: bool) -> None:
    with begun_anew():
        strategy = "async" if asynchronous else "sync"
        memory = configured(telemetry={"save_checkpoint_strategy": strategy, "seq_length_or_fn": 8})
        training.on_app_start()
        entered: list[Any] = []

        for name, arguments in sequence:
            call(name, arguments, entered)
        while entered:
            entered.pop().__exit__(None, None, None)
        training.on_app_end()
        before = of("training.steps", mode="train") or 0
        exported(memory).records.clear()
        with training.application(), training.training_loop(train_iterations_start=10):
            for _ in range(5):
                with training.training_iteration():
                    pass

        updates = exported(memory).attributes("training_metrics_update")
        assert [update["num_iterations"] for update in updates] == [2, 4, 5]
        assert [update["current_iteration"] for update in updates] == [11, 13, 14]
        assert updates[-1]["train_tokens"] == 5 * 4 * 8
        assert of("training.steps", mode="train") == before + 5
        assert memory.kept[0] == ("start", "application")
        assert memory.kept[-1] == ("stop", "application")
        phases = [value for (name, _), value in published().items() if name == "training.phase"]
        assert all(value >= 0 for value in phases)
