"""Any calls in any order with any arguments: nothing is raised, and the next job's numbers are right."""

from __future__ import annotations

import inspect
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from training_support import begun_anew, configured, exported, of, published

from exporter import training

CALLBACKS = sorted(name for name in training.__all__ if name.startswith("on_"))
BLOCKS = """
    application model_init training_iteration validation_loop validation_iteration testing_loop testing_iteration
    checkpoint_load data_loading model_forward
"""
odd: st.SearchStrategy[Any] = st.sampled_from(
    [None, 0, -1, 3, 10**30, 2.5, math.nan, math.inf, "x", "", [1], {}, b"y", True]
)
calls = st.one_of(
    st.tuples(st.sampled_from(CALLBACKS), st.lists(odd, max_size=5)),
    st.tuples(st.sampled_from([f"enter {name}" for name in BLOCKS.split()]), st.just([])),
    st.tuples(st.sampled_from(["enter checkpoint_save", "enter phase", "enter span"]), st.lists(odd, min_size=1, max_size=1)),
    st.tuples(st.just("enter training_loop"), st.lists(odd, min_size=1, max_size=4)),
    st.tuples(st.sampled_from(["leave", "fail"]), st.just([])),
    st.tuples(st.sampled_from(["record", "describe", "checkpoint_saved"]), st.lists(odd, min_size=8, max_size=8)),
    st.tuples(st.sampled_from(["skipped_step", "interruption", "step", "background"]), st.lists(odd, min_size=1, max_size=1)),
)  # fmt: skip
NUMBERS = "loss grad_norm learning_rate samples tokens microbatches epoch mode"
FACTS = "job_name framework model precision flops_per_token peak_flops step_target world_size"


def call(name: str, arguments: list[Any], entered: list[Any]) -> None:
    if name.startswith("enter "):
        block = getattr(training, name.removeprefix("enter "))(*arguments)
        assert block.__enter__() is not None
        entered.append(block)
    elif name in {"leave", "fail"}:
        if entered:
            error = ValueError("x") if name == "fail" else None
            assert not entered.pop().__exit__(error and ValueError, error, None)
    elif name == "record":
        training.record(**dict(zip(NUMBERS.split(), arguments, strict=True)))
    elif name == "describe":
        training.describe(**dict(zip(FACTS.split(), arguments, strict=True)))
    elif name == "checkpoint_saved":
        training.checkpoint_saved(arguments[0], kind=arguments[1], ok=arguments[2], seconds=arguments[3])
    elif name == "background":
        with training.background(arguments[0]):
            pass
    else:
        takes = len(inspect.signature(getattr(training, name)).parameters)
        needs = name in {"on_train_start", "on_save_checkpoint_start", "on_save_checkpoint_success"}
        getattr(training, name)(*([*arguments, None] if needs else arguments)[:takes])


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
        assert memory.names()[0] == ("start", "application")
        assert memory.names()[-1] == ("stop", "application")
        phases = [value for (name, _), value in published().items() if name == "training.phase"]
        assert all(value >= 0 for value in phases)
