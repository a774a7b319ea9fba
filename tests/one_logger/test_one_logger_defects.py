"""One-logger's defects that show only in a whole recording: callables, shares, memory, and what one exporter costs."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from one_logger_support import KeepingExporter, fresh_provider

import exporter
from exporter import training
from exporter.one_logger.state import current
from exporter.training import (
    OneLoggerConfig,
    StandardTrainingJobSpanName,
    TrainingTelemetryProvider,
    application,
    checkpoint_save,
    on_app_end,
    on_app_start,
    on_save_checkpoint_success,
    on_train_end,
    on_train_start,
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


def test_a_callable_that_begins_to_raise_costs_its_own_figures_only() -> None:
    lengths = iter([128] * 5)
    keeping = KeepingExporter()
    configure(keeping, seq_length_or_fn=lambda: next(lengths), log_every_n_train_iterations=1)
    with application(), training_loop(train_iterations_start=0):
        for _ in range(10):
            with training_iteration():
                pass
    settled()

    updates = [
        span
        for (method, name), span in zip(keeping.kept[1:], keeping.spans, strict=True)
        if method == "event"
    ]
    assert len(updates) >= 10
    assert totals()["training.steps.train"] == 10


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


def test_d42_d43_a_loop_of_many_updates_takes_no_more_memory_and_no_more_time() -> None:
    configure(KeepingNothing(), log_every_n_train_iterations=1)

    def some(iterations: int) -> float:
        began = time.process_time()
        for _ in range(iterations):
            with training_iteration():
                pass
        settled()
        return time.process_time() - began

    with application(), training_loop(train_iterations_start=0):
        some(100)
        tracemalloc.start()
        first, memory_first = some(400), tracemalloc.get_traced_memory()[0]
        some(400)
        last, memory_last = some(400), tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()

    assert memory_last - memory_first < 500_000  # theirs: 2.9 kB for each of 800 updates
    assert last < 5 * first + 1.0


class KeepingNothing(KeepingExporter):
    def _take(self, method: str, name: str = "", *arguments: Any) -> None:
        pass


def test_a_failing_exporter_does_not_slow_the_job() -> None:
    refusing = KeepingExporter(lambda method: method != "initialize")
    configure(refusing, log_every_n_train_iterations=1)
    began = time.monotonic()
    with application(), training_loop(train_iterations_start=0):
        for _ in range(1000):
            with training_iteration():
                pass
    seconds = time.monotonic() - began

    assert seconds < SOON  # the first record alone is offered for 1.5 s
    assert totals()["training.steps.train"] == 1000


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


def test_d13_a_loop_that_is_begun_twice_stays_as_it_was() -> None:
    keeping = KeepingExporter()
    configure(keeping, log_every_n_train_iterations=1)
    on_app_start()
    on_train_start(train_iterations_start=5, train_samples_start=7)
    on_train_start(train_iterations_start=80, train_samples_start=90)
    with training_iteration():
        pass
    on_train_end()
    on_app_end()

    (update,) = events_of(keeping, "training_metrics_update")
    assert (update["train_iterations_start"], update["train_samples_start"]) == (5, 7)
    assert update["current_iteration"] == 5
    assert misuses() == 1


def test_d17_a_job_that_tells_of_its_start_hours_later_is_believed() -> None:
    keeping = KeepingExporter()
    configure(keeping)
    on_app_start(start_time_msec=(time.time() - 7200) * 1000)
    on_app_end()
    settled()

    stopped = keeping.spans[-1]
    assert stopped.duration_msec() == pytest.approx(7_200_000, abs=60_000)
    assert misuses() == 0


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


def test_d28_saves_that_fail_leave_nothing_behind() -> None:
    configure(KeepingNothing())

    def fail(saves: int, first: int) -> int:
        for number in range(saves):
            with contextlib.suppress(OSError), checkpoint_save(global_step=first + number):
                raise OSError(28, "no space")
        settled()
        return tracemalloc.get_traced_memory()[0]

    with application(), training_loop(train_iterations_start=0):
        fail(50, 0)
        tracemalloc.start()
        before = fail(50, 50)
        after = fail(500, 100)
        tracemalloc.stop()

    assert after - before < 100_000
    assert [value for name, value in totals().items() if "checkpoints" in name and "fail" in name] == [600], (
        totals()
    )


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __str__ = __repr__


ODD = [5, "text", [1], {"a": 1}, None, Unprintable(), float("nan"), -1]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: type(odd).__name__)
def test_d14_no_block_callback_or_number_raises_whatever_it_is_given(odd: Any) -> None:
    keeping = KeepingExporter()
    configure(keeping)
    blocks: list[Any] = [
        *(lambda make=make: make() for make in (training_iteration, training.model_forward, application)),
        lambda: training.span(odd),
        lambda: training.phase(odd),
        lambda: training.background(odd),
        lambda: training_loop(odd, odd, odd, odd),
        lambda: checkpoint_save(odd),
    ]
    ran = 0
    for block in blocks:
        with block() as span:
            ran += 1
            for call in ("add_attributes", "add_event"):
                getattr(span, call, lambda value: value)(odd)
    calls: list[Any] = [
        lambda: training.record(loss=odd, grad_norm=odd, samples=odd, tokens=odd, epoch=odd, mode=odd),
        lambda: training.describe(model=odd, world_size=odd, flops_per_token=odd),
        lambda: training.skipped_step(odd),
        lambda: training.interruption(odd),
        lambda: training.checkpoint_saved(odd, kind=odd, ok=odd, seconds=odd, bytes=odd),
        lambda: training.step(odd, seconds=odd, mode=odd),
        lambda: on_app_start(odd),
        lambda: on_train_start(odd, odd, odd, odd, odd),
        lambda: on_save_checkpoint_success(odd, odd),
        lambda: on_train_end(odd),
        lambda: on_app_end(odd),
    ]
    for call in calls:
        call()
    before = totals()["training.steps.train"]
    with application(), training_loop(train_iterations_start=0), training_iteration():
        pass

    assert ran == len(blocks)
    assert totals()["training.steps.train"] == before + 1
    settled()
    assert ("stop", "application") in keeping.kept


def test_no_defect_of_ours_is_met_on_the_way(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for odd in ODD:
        training.record(loss=odd, mode=odd)  # type: ignore[arg-type]  # that is the point
        training.skipped_step(odd)  # type: ignore[arg-type]  # likewise
        on_train_start(odd, odd, odd, odd, odd)  # type: ignore[arg-type]  # likewise
    totals()
    time.sleep(0.2)  # notices are told by threads of their own

    assert "defect" not in caplog.text + capfd.readouterr().err
