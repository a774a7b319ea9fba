"""Corrected defects of one-logger that the golden vectors do not cover.

A test whose name starts with a number, such as d22, shows that row of the table of defects in docs/one-logger.md.
"""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from one_logger_support import InMemoryExporter, configure, wait_for_delivery
from training_support import misuse_counts, publish_and_read, published_value, train

from exporter import one_logger, training
from exporter.one_logger.figures import MAX_PENDING_SAVES, CheckpointFigures

pytestmark = pytest.mark.usefixtures("unconfigured_process")


@pytest.mark.parametrize("setup", ["disabled", "before configuration"])
def test_d22_d23_every_block_yields_a_span_and_runs_its_body(setup: str) -> None:
    if setup == "disabled":
        configure(telemetry={}, enable_for_current_rank=False)
    body_count = 0

    blocks: list[Any] = [
        training.application(),
        training.model_init(),
        training.training_iteration(),
        training.validation_loop(),
        training.validation_iteration(),
        training.testing_loop(),
        training.testing_iteration(),
        training.checkpoint_load(),
        training.checkpoint_save(1),
        training.training_loop(train_iterations_start=0),
        one_logger.timed_span("custom"),
        training.span("another"),
        training.phase("compile"),
    ]
    for block in blocks:
        with block as span:
            span.add_attribute("name", "value")
            span.add_attributes(one_logger.Attributes({"other": 1}))
            span.add_event(one_logger.Event.create("event"))
            training.record(loss=1.0)
            training.step()
            body_count += 1

    assert body_count == len(blocks)
    assert misuse_counts() == {}


def test_d28_only_the_latest_thousand_unconfirmed_saves_are_stored() -> None:
    configure(telemetry={"save_checkpoint_strategy": "async"})
    with training.application():
        for step in range(1500):
            training.on_save_checkpoint_start(step)
            training.on_save_checkpoint_end()
        publish_and_read()
        gc.collect()
        save_count = sum(type(candidate) is CheckpointFigures for candidate in gc.get_objects())
        training.on_save_checkpoint_success(0)
        training.on_save_checkpoint_success(1499)

    assert save_count == MAX_PENDING_SAVES
    assert misuse_counts() == {("on_save_checkpoint_success", "unknown_step"): 1}


def test_a_block_ended_by_a_callback_is_one_step() -> None:
    configure(telemetry={})
    with training.application(), training.training_loop(train_iterations_start=0):
        with training.training_iteration():
            training.on_training_single_iteration_end()
        train(1)

    assert published_value("training.steps", mode="train") == 2


def test_a_span_that_ends_also_ends_the_spans_entered_inside() -> None:
    memory = configure(telemetry={})
    application, loop = training.application(), training.training_loop(train_iterations_start=0)
    application.__enter__()
    outer, inner = training.span("outer"), training.span("inner")
    loop.__enter__()
    outer.__enter__()
    inner.__enter__()
    for block in (outer, loop, inner, application):
        block.__exit__(None, None, None)

    assert wait_for_delivery(memory).names("stop") == ["inner", "outer", "training_loop", "application"]
    assert misuse_counts() == {("span('inner')", "not_open"): 1}


def span_at_start(memory: InMemoryExporter, name: str) -> Any:
    (span,) = [span for span in wait_for_delivery(memory).records_of("start") if span.name_str == name]
    return span


INVALID_TARGETS = [[8], "8", math.nan, math.inf, True, lambda: 1 / 0, lambda: [8]]


@pytest.mark.parametrize("target", INVALID_TARGETS, ids=lambda target: type(target).__name__)
def test_d19_an_invalid_target_is_a_misuse_and_the_loop_is_exported_without_it(target: Any) -> None:
    memory = configure(telemetry={"seq_length_or_fn": 16})

    with training.application(), training.training_loop(0, None, target, target):
        train(1)

    loop = span_at_start(memory, "training_loop")
    assert loop.attributes.to_json() == {"train_iterations_start": 0, "train_samples_start": 0}
    assert sum(misuse_counts().values()) == 2
    assert len(wait_for_delivery(memory).attributes("training_metrics_update")) == 1


@pytest.mark.parametrize(
    ("target", "expected"), [(1e5, 100_000), (100, 100), (0, 0), (-1, -1), (10**400, 10**400)]
)
@pytest.mark.parametrize("source", ["called", "configured"])
def test_a_target_is_exported_as_configured(target: float, expected: int, source: str) -> None:
    names = ("train_iterations_target_or_fn", "train_samples_target_or_fn")
    memory = configure(telemetry={} if source == "called" else dict.fromkeys(names, target))
    arguments = (target, target) if source == "called" else ()

    with training.application(), training.training_loop(0, None, *arguments):
        train(1)

    loop = span_at_start(memory, "training_loop")
    attributes = loop.attributes.to_json()
    assert attributes["train_iterations_target"] == expected
    assert attributes["train_samples_target"] == expected
    assert misuse_counts() == {}


def test_d19_throughput_without_a_positive_target_leaves_the_targets_out() -> None:
    memory = configure(
        telemetry={
            "flops_per_sample_or_fn": 10,
            "is_log_throughput_enabled_or_fn": True,
            "train_iterations_target_or_fn": 0,
        }
    )

    with training.application(), training.training_loop(0, None, None, -1):
        train(1)

    loop = span_at_start(memory, "training_loop")
    assert not {name for name in loop.attributes if name.endswith("target")}
    assert misuse_counts() == {}


def test_d18_disabled_saves_are_no_misuse_and_no_parent() -> None:
    memory = configure(telemetry={"is_save_checkpoint_enabled_or_fn": False})
    with training.application():
        with training.training_loop(0), training.checkpoint_save(0), training.validation_loop():
            pass
        training.on_save_checkpoint_end()
        training.on_save_checkpoint_start(1)
        training.on_save_checkpoint_start(2)
        training.on_save_checkpoint_success(7)
        training.on_save_checkpoint_end()
        training.on_save_checkpoint_end()
    training.on_save_checkpoint_start(3)

    assert misuse_counts() == {}
    assert span_at_start(memory, "validation_loop").parent_span.name_str == "training_loop"
    assert wait_for_delivery(memory).names() == ["application", "training_loop", "validation_loop"]


def test_d39_each_callable_is_called_at_most_once_per_iteration() -> None:
    calls: Counter[str] = Counter()

    def counting_callable(name: str, value: Any) -> Callable[[], Any]:
        def current_value() -> Any:
            calls[name] += 1
            return value

        return current_value

    settings: dict[str, Any] = {
        "global_batch_size": 32,
        "seq_length": 128,
        "flops_per_sample": 1000,
        "is_log_throughput_enabled": True,
    }
    telemetry = {f"{name}_or_fn": counting_callable(name, value) for name, value in settings.items()}
    configure(telemetry=telemetry, world_size_or_fn=counting_callable("world_size", 4))
    with training.application(), training.training_loop(train_iterations_start=0):
        initial_calls = Counter(calls)
        train(100)
        loop_calls = calls - initial_calls

    assert loop_calls == dict.fromkeys([*settings, "world_size"], 100)


def test_d41_families_have_samples_of_the_rank_and_events_those_of_the_job() -> None:
    telemetry = {"global_batch_size_or_fn": 32, "log_every_n_train_iterations": 10}
    memory = configure(telemetry=telemetry, world_size_or_fn=4)
    with training.application(), training.training_loop(train_iterations_start=0):
        train(10)

    (update,) = wait_for_delivery(memory).attributes("training_metrics_update")
    assert update["num_train_samples"] == 320
    assert published_value("training.samples", mode="train") == 80


def test_a_short_standard_span_from_timed_span_is_its_phase_without_being_exported() -> None:
    memory = configure(telemetry={})
    with training.application(), training.training_loop(0), training.training_iteration():
        for name in (one_logger.StandardTrainingJobSpanName.MODEL_FORWARD, "model_backward"):
            with one_logger.timed_span(name) as span:
                span.add_attribute("a", 1)

    assert [published_value("training.phase_entries", phase=phase) for phase in ("forward", "backward")] == [
        1,
        1,
    ]
    assert not {"model_forward", "model_backward"} & set(wait_for_delivery(memory).names())


def test_d8_a_success_without_an_open_save_is_a_misuse_without_effect() -> None:
    memory = configure(telemetry={"save_checkpoint_strategy": "async"})
    with training.application(), training.training_loop(train_iterations_start=0):
        train(3)
        with training.checkpoint_save(global_step=3):
            pass
        training.on_save_checkpoint_success(3)
        assert misuse_counts() == {}
        for step in (3, 99, None):
            training.on_save_checkpoint_success(step)  # type: ignore[arg-type]  # invalid on purpose
        assert sum(misuse_counts().values()) == 3

    (success,) = wait_for_delivery(memory).attributes("save_checkpoint_success")
    assert success["save_checkpoint_success_count"] == 1
    assert success["productive_train_iterations"] == 3


def test_d12_a_validation_whose_only_iteration_failed_has_no_times() -> None:
    memory = configure(telemetry={})
    with (
        training.application(),
        training.validation_loop(),
        suppress(ValueError),
        training.validation_iteration(),
    ):
        raise ValueError

    (update,) = wait_for_delivery(memory).attributes("validation_metrics_update")
    assert not {name for name in update if name.endswith("_time_sec")}


def test_d20_a_first_iteration_of_no_length_is_counted() -> None:
    throughput = {"is_log_throughput_enabled_or_fn": True, "flops_per_sample_or_fn": 10}
    memory = configure(telemetry=throughput | {"log_every_n_train_iterations": 1})
    time_msec = time.time() * 1000
    with training.application(), training.training_loop(train_iterations_start=0):
        training.on_training_single_iteration_start(start_time_msec=time_msec)
        training.on_training_single_iteration_end(finish_time_msec=time_msec)

    (update,) = wait_for_delivery(memory).attributes("training_metrics_update")
    assert update["num_iterations"] == 1
    assert update["total_iteration_time_sec"] == pytest.approx(0.0, abs=1e-3)
    assert misuse_counts() == {}
