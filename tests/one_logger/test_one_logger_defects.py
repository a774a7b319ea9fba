"""One-logger's defects that show only in a whole recording: callables, shares, memory, and what one exporter costs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
from one_logger_support import KeepingExporter, fresh_provider

import exporter
from exporter.one_logger.records import current
from exporter.training import (
    OneLoggerConfig,
    StandardTrainingJobSpanName,
    TrainingTelemetryProvider,
    application,
    checkpoint_save,
    on_save_checkpoint_success,
    on_training_single_iteration_end,
    on_training_single_iteration_start,
    timed_span,
    training_iteration,
    training_loop,
    validation_iteration,
    validation_loop,
)
from exporter.training.recording import TRAINING

SOON = 10.0


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_provider():
        yield


def configure(*exporters: Any, world_size: Any = 4, **training: Any) -> None:
    given = {"perf_tag_or_fn": "p", "global_batch_size_or_fn": 32} | training
    built = TrainingTelemetryProvider.instance().with_base_config(
        OneLoggerConfig(
            application_name="app",
            world_size_or_fn=world_size,
            session_tag_or_fn="s",
            telemetry_config=given,
        )
    )
    for each in exporters:
        built.with_exporter(each)
    built.configure_provider()


def settled() -> None:
    assert exporter.flush(SOON)
    found = current()
    assert found is not None
    assert found.delivery.flush(SOON)


def totals() -> dict[str, float]:
    TRAINING.drain()
    return {
        ".".join((each.definition.name, *(value for _, value in each.definition.labels))): each.sum or 0.0
        for each in TRAINING.series()
    }


def test_d39_each_callable_is_asked_at_most_once_per_iteration() -> None:
    asked = dict.fromkeys(("batch", "length", "flops", "throughput", "world"), 0)

    def ask(name: str, value: Any) -> Any:
        asked[name] += 1
        return value

    configure(
        world_size=lambda: ask("world", 4),
        global_batch_size_or_fn=lambda: ask("batch", 32),
        seq_length_or_fn=lambda: ask("length", 128),
        flops_per_sample_or_fn=lambda: ask("flops", 1000),
        is_log_throughput_enabled_or_fn=lambda: ask("throughput", value=True),
    )
    with application(), training_loop(train_iterations_start=0):
        before = dict(asked)
        for _ in range(100):
            with training_iteration():
                pass
        after = dict(asked)

    assert {name: after[name] - before[name] for name in asked} == dict.fromkeys(asked, 100)


def test_d41_a_ranks_samples_are_its_own_share_and_the_events_tell_the_jobs() -> None:
    keeping = KeepingExporter()
    configure(keeping, log_every_n_train_iterations=10)
    with application(), training_loop(train_iterations_start=0):
        for _ in range(10):
            with training_iteration():
                pass
    settled()

    loop = next(span for span in reversed(keeping.spans) if span.name_str == "training_loop")
    (update,) = [event for event in loop.events if event.name_str == "training_metrics_update"]
    assert update.attributes.get_int_value("num_train_samples") == 320
    assert totals()["training.samples.train"] == 80


def test_a_short_standard_span_by_hand_is_its_phase_whether_it_is_exported_or_not() -> None:
    keeping = KeepingExporter()
    configure(keeping)
    with application(), training_loop(train_iterations_start=0), training_iteration():
        for name in (StandardTrainingJobSpanName.MODEL_FORWARD, "model_backward"):
            with timed_span(name) as span:
                span.add_attribute("a", 1)
    settled()

    entries = {name: value for name, value in totals().items() if "phase" in name}
    assert entries["training.phase_entries.forward"] == entries["training.phase_entries.backward"] == 1, (
        entries
    )
    assert not {"model_forward", "model_backward"} & {name for _, name in keeping.kept}


def events_of(keeping: KeepingExporter, name: str) -> list[dict[str, Any]]:
    """The attributes of every event of a name, in the order of their arrival."""
    settled()
    found: dict[int, dict[str, Any]] = {}
    for span in keeping.spans:
        for event in span.events:
            if event.name_str == name:
                found[id(event)] = event.attributes.to_json()
    return list(found.values())


def misuses() -> float:
    return sum(value for name, value in totals().items() if name.startswith("training.misuse"))


def test_d8_a_success_of_a_save_that_never_began_or_was_confirmed_is_a_misuse_without_effect() -> None:
    keeping = KeepingExporter()
    configure(keeping, save_checkpoint_strategy="async")
    with application(), training_loop(train_iterations_start=0):
        for _ in range(3):
            with training_iteration():
                pass
        with checkpoint_save(global_step=3):
            pass
        before = misuses()
        on_save_checkpoint_success(3)
        assert misuses() == before
        on_save_checkpoint_success(3)
        on_save_checkpoint_success(99)
        on_save_checkpoint_success(None)  # type: ignore[arg-type]  # bad input
        assert misuses() == before + 3

    (success,) = events_of(keeping, "save_checkpoint_success")
    assert (success["save_checkpoint_success_count"], success["productive_train_iterations"]) == (1, 3)


def test_d12_a_validation_whose_only_iteration_failed_tells_no_times() -> None:
    keeping = KeepingExporter()
    configure(keeping)
    with application(), validation_loop(), contextlib.suppress(ValueError), validation_iteration():
        raise ValueError

    (update,) = events_of(keeping, "validation_metrics_update")
    assert not {name for name in update if name.endswith("_time_sec")}


def test_d20_a_first_iteration_of_no_length_is_counted() -> None:
    keeping = KeepingExporter()
    configure(
        keeping,
        log_every_n_train_iterations=1,
        is_log_throughput_enabled_or_fn=True,
        flops_per_sample_or_fn=10,
    )
    now = time.time() * 1000
    with application(), training_loop(train_iterations_start=0):
        on_training_single_iteration_start(start_time_msec=now)
        on_training_single_iteration_end(finish_time_msec=now)

    (update,) = events_of(keeping, "training_metrics_update")
    assert update["num_iterations"] == 1
    assert update["total_iteration_time_sec"] == pytest.approx(0.0, abs=1e-3)
    assert misuses() == 0
