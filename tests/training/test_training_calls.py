"""Calls of the training API: blocks, callbacks, numbers and invalid calls."""

from __future__ import annotations

import asyncio
import copy
import gc
import math
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from one_logger_support import configure, wait_for_delivery
from training_support import (
    misuse_counts,
    publish_and_read,
    published_value,
    summary_values,
    train,
    values_by_label,
)
from waiting import WAIT_LIMIT_SECONDS

import exporter
from exporter import one_logger, training
from exporter.ledger.family_owners import TRAINING_FAMILIES, matches
from exporter.recording.values import families_of
from exporter.training.facts import Facts
from exporter.training.metrics import Families
from exporter.training.recorder import TRAINING

pytestmark = pytest.mark.usefixtures("unconfigured_process")

# Blocks


def test_iterations_are_steps_without_any_configuration() -> None:
    for _ in range(7):
        with training.training_iteration(), training.data_loading():
            pass
        training.record(loss=0.5, tokens=10, samples=2, grad_norm=1.5, learning_rate=0.1, epoch=1)

    assert (published_value("training.steps", mode="train"), published_value("training.step")) == (7, 7)
    assert (
        published_value("training.tokens", mode="train"),
        published_value("training.samples", mode="train"),
    ) == (70, 14)
    assert published_value("training.loss", mode="train") == 0.5
    assert (
        published_value("training.grad_norm"),
        published_value("training.learning_rate"),
        published_value("training.epoch"),
    ) == (1.5, 0.1, 1)
    assert values_by_label("training.phase_entries") == {"init": 1, "iteration": 7, "data_loading": 7}
    assert misuse_counts() == {}


def test_after_the_training_loop_no_progress_is_due_until_the_next_step() -> None:
    def is_due() -> bool:
        """Return True if both the gauge and the reading, from which the ledger detects hangs, have the last progress."""
        has_gauge = published_value("training.last_progress_timestamp") is not None
        assert (publish_and_read().last_progress is not None) == has_gauge
        return has_gauge

    due_states = []
    for _ in range(2):
        with training.training_loop(train_iterations_start=0):
            train()
            due_states.append(is_due())
        due_states.append(is_due())
    with training.validation_loop(), training.validation_iteration():
        pass
    due_states.append(is_due())
    train()

    assert [*due_states, is_due()] == [True, False, True, False, False, True]


def test_a_later_training_loop_that_completes_no_step_can_be_overdue() -> None:
    with training.training_loop(train_iterations_start=0):
        train()
    progress_after_loop = publish_and_read().last_progress
    loop_start = time.time()
    with training.training_loop(train_iterations_start=0):
        progress_in_loop = publish_and_read().last_progress

    assert progress_after_loop is None
    assert progress_in_loop == pytest.approx(loop_start, abs=1.0)


def test_an_exception_in_an_iteration_propagates_and_the_step_is_not_counted() -> None:
    train()
    with suppress(ZeroDivisionError), training.training_iteration(), training.model_forward():
        time.sleep(0.1)
        _ = 1 / 0
    train()

    reading = publish_and_read()
    assert published_value("training.steps", mode="train") == 2
    assert reading.failed_seconds >= 0.1
    assert reading.work_seconds < reading.failed_seconds
    assert reading.phase == "other"


def test_the_end_of_the_data_is_no_step_outside_of_the_iteration_or_as_an_exception() -> None:
    for _ in training.batches([1, 2, 3]):
        with training.training_iteration():
            pass
    batches = iter([4, 5])
    with suppress(StopIteration):
        while True:
            with training.training_iteration():
                next(batches)

    assert published_value("training.steps", mode="train") == 5


def test_an_iteration_that_the_job_leaves_with_break_is_a_step() -> None:
    for batch in (1, 2, None):
        with training.training_iteration():
            if batch is None:
                break

    assert published_value("training.steps", mode="train") == 3


def test_an_iteration_of_several_micro_batches_that_reports_its_step_is_one_step() -> None:
    with training.training_iteration():
        for _ in range(4):
            with training.model_forward():
                pass
            training.record(microbatches=1)
        training.step()

    assert published_value("training.steps", mode="train") == 1
    assert (
        published_value("training.microbatches")
        == published_value("training.phase_entries", phase="forward")
        == 4
    )


def test_the_time_between_reported_steps_is_work_in_a_job_without_blocks() -> None:
    start_seconds = time.monotonic()
    training.step()
    for _ in range(3):
        time.sleep(0.02)
        training.step()
    elapsed_seconds = time.monotonic() - start_seconds

    reading = publish_and_read()
    assert reading.steps == 4
    assert 0.06 <= reading.work_seconds <= elapsed_seconds


def test_validation_and_test_are_steps_of_their_own_modes() -> None:
    with training.validation_loop():
        for _ in range(3):
            with training.validation_iteration():
                training.record(loss=2.0, samples=8, mode="validation")
    with training.testing_loop(), training.testing_iteration():
        pass

    assert values_by_label("training.steps") == {"validation": 3, "test": 1}
    assert values_by_label("training.loss") == {"validation": 2.0}
    assert values_by_label("training.samples") == {"validation": 24}
    assert published_value("training.phase_entries", phase="validation") == 1


def test_decorators_make_a_block_of_each_call() -> None:
    @training.training_iteration()
    def step(number: int) -> int:
        return number + 1

    @training.checkpoint_load()
    def load() -> Iterator[int]:
        yield 1
        yield 2

    assert [step(number) for number in range(3)] == [1, 2, 3]
    assert list(load()) == [1, 2]
    assert published_value("training.steps", mode="train") == 3
    assert published_value("training.phase_entries", phase="checkpoint_load") == 1


def test_batches_count_the_wait_for_each_batch_as_data_loading() -> None:
    def slow_batches() -> Iterator[int]:
        for number in range(3):
            time.sleep(0.01)
            yield number

    assert list(training.batches(slow_batches())) == [0, 1, 2]
    assert published_value("training.phase", phase="data_loading") >= 0.03


def test_phases_by_name_and_custom_spans_are_recorded() -> None:
    with training.phase("compile"):
        time.sleep(0.01)
        with training.phase("my part"), training.span("another", split="dev"):
            time.sleep(0.01)
    with training.phase("forward"):
        pass

    assert published_value("training.phase", phase="compile") >= 0.02
    assert values_by_label("training.phase_entries") == {"init": 1, "compile": 1, "forward": 1}


def test_a_phase_makes_a_process_a_trainer_and_a_span_does_not() -> None:
    trains = []
    for block in (training.span("launching"), training.phase("compile")):
        with block:
            pass
        summary_values()
        trains.append(TRAINING.trains())

    assert trains == [False, True]


def test_background_work_is_in_no_phase() -> None:
    @training.background("checkpoint_upload")
    def upload() -> None:
        time.sleep(0.02)

    with training.application():
        thread = threading.Thread(target=upload)
        thread.start()
        thread.join()

    assert published_value("training.background", task="checkpoint_upload") >= 0.02
    assert values_by_label("training.phase_entries") == {"init": 1}


# Numbers and facts


@pytest.mark.parametrize("is_recorded_inside", [True, False])
def test_a_loss_that_is_not_finite_replaces_the_last_loss_and_names_its_first_step(
    *, is_recorded_inside: bool
) -> None:
    losses = []
    with training.training_loop(train_iterations_start=80):
        for loss in (2.5, math.nan, math.inf):
            with training.training_iteration():
                if is_recorded_inside:
                    training.record(loss=loss)
            if not is_recorded_inside:
                training.record(loss=loss)
            losses.append(values_by_label("training.loss"))
        first_step = published_value("training.nonfinite_since_step", kind="loss")
        began = published_value("training.nonfinite_since_timestamp", kind="loss")
        training.record(loss=2.0)
        after = values_by_label("training.loss")
        end_of_period = values_by_label("training.nonfinite_since_step")

    assert losses == [{"train": 2.5}, {}, {}]
    assert first_step == 82
    assert time.time() - 60 < began <= time.time()
    assert after == {"train": 2.0}
    assert end_of_period == {}


def test_invalid_numbers_are_counted_and_the_last_valid_number_stays() -> None:
    training.record(loss=math.nan, grad_norm=math.inf)
    training.record(loss=-math.inf, tokens=-3)
    training.record(loss=1.0, grad_norm=2.0, tokens=5)
    training.record(loss="much", samples=math.nan, epoch=None, microbatches=[1])  # type: ignore[arg-type]  # bad input
    training.record(loss=10**400, mode="nonsense")
    training.record(loss=10**400, accuracy=0.9)
    training.describe(model="m", color="red")

    assert values_by_label("training.loss") == {"train": 1.0}
    assert published_value("training.grad_norm") == 2.0
    assert values_by_label("training.tokens") == {"train": 5}
    assert values_by_label("training.nonfinite") == {
        ("loss", "nan"): 1,
        ("loss", "inf"): 1,
        ("grad", "inf"): 1,
    }
    assert misuse_counts() == {
        ("record", "tokens"): 1,
        ("record", "loss"): 2,
        ("record", "samples"): 1,
        ("record", "microbatches"): 1,
        ("record", "mode"): 1,
        ("record", "name"): 1,
    }


def test_the_description_of_the_run_is_in_the_reading() -> None:
    training.describe(job_name="toy", framework="torch", precision="bf16", peak_flops=1e15, step_target=100)
    training.describe(flops_per_token=6.0, hardware_flops_per_token=8.0, world_size=4, model="m\n1")
    training.describe(peak_flops=-1, world_size=0, step_target=0.5, flops_per_token=math.nan)  # type: ignore[arg-type]  # bad input
    training.record(tokens=10)

    reading = publish_and_read()
    reported_facts = {
        "job_name": "toy",
        "framework": "torch",
        "precision": "bf16",
        "world_size": "4",
        "model": "m?1",
    }
    assert dict(reading.facts).items() >= reported_facts.items()
    assert (reading.flops_per_token, reading.hardware_flops_per_token, reading.peak_flops) == (6.0, 8.0, 1e15)
    assert (published_value("training.model_flops"), published_value("training.hardware_flops")) == (60, 80)
    assert published_value("training.step_target") == 100
    assert sum(misuse_counts().values()) == 4


def test_facts_of_the_launcher_apply_unless_the_job_describes_them() -> None:
    environment = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "llama", "USER": "me", "SLURM_JOB_USER": "ada"}
    facts = Facts(Families(), environment | {"WORLD_SIZE": "8"})
    initial_facts = dict(facts.pairs())
    facts.describe({"job_name": "mine", "world_size": 4})

    assert initial_facts == {"job_id": "77", "job_name": "llama", "user": "ada", "world_size": "8"}
    assert dict(facts.pairs()) == initial_facts | {"job_name": "mine", "world_size": "4"}


def test_reported_steps_are_counted_and_untimed_steps_have_no_duration() -> None:
    training.step(41)
    training.step(seconds=0.25)
    training.step(50, seconds=0.5)
    training.step(mode="validation")
    training.step(-1)
    training.step(seconds=math.nan)
    training.step(mode="other")

    reading = publish_and_read()
    assert values_by_label("training.steps") == {"train": 3, "validation": 1}
    assert values_by_label("training.step_duration") == {"train": 2}
    assert (reading.step, reading.first_step, reading.steps) == (50, 40, 3)
    assert misuse_counts() == {("step", "value"): 2, ("step", "mode"): 1}


def test_skipped_steps_and_interruptions_with_an_unknown_reason_are_refused() -> None:
    training.skipped_step("overflow")
    training.skipped_step("because")
    training.interruption("preemption")
    training.interruption("because")

    assert values_by_label("training.skipped_steps") == {"overflow": 1}
    assert publish_and_read().failure == "preemption"
    assert misuse_counts() == {("skipped_step", "value"): 1, ("interruption", "reason"): 1}


def test_flush_never_raises_once_cuda_is_in_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        def after_fork(self) -> None:
            """Keep the tensors of the parent."""

        def collect(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        def refuse_unread(self, *, is_process_ending: bool) -> None:
            """Report no lost tensor."""

    monkeypatch.setattr(TRAINING.numbers, "_tensors", {("loss", "train"): Failed()})
    training.record(loss=1.0)

    assert exporter.flush(WAIT_LIMIT_SECONDS)


# Applications, spans, threads and families


@pytest.mark.parametrize(
    ("error", "is_finished", "failure"),
    [
        (None, True, ""),
        (SystemExit(0), True, ""),
        (SystemExit(3), False, "exit"),
        (KeyboardInterrupt(), False, "user"),
        (MemoryError(), False, "host"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), False, "gpu_memory"),
        (RuntimeError("NCCL timeout"), False, "nccl_timeout"),
        (OSError(28, "No space left on device"), False, "storage"),
        (ValueError("x"), False, "exit"),
    ],
)
def test_the_outcome_of_the_application_is_reported(
    error: BaseException | None, is_finished: bool, failure: str
) -> None:
    application = training.application()
    application.__enter__()
    assert not application.__exit__(None if error is None else type(error), error, None)  # type: ignore[func-returns-value]  # the test is that it returns None

    reading = publish_and_read()
    assert (reading.finished, reading.failure) == (is_finished, failure)


def test_before_configuration_only_an_invalid_value_is_reported_as_misuse() -> None:
    training.on_training_single_iteration_end()
    training.on_train_end()
    with training.training_iteration(), training.training_iteration():
        pass
    training.on_train_start(-1)

    assert published_value("training.steps", mode="train") == 1
    assert misuse_counts() == {("on_train_start", "invalid_start"): 1}


def test_open_spans_accept_attributes_and_events() -> None:
    memory = configure(telemetry={}, export=(one_logger.ExportCustomizationMode.EXPORT_ALL_SPANS,))
    with training.application() as application:
        application.add_attribute("color", "green")
        with training.training_loop(train_iterations_start=0) as loop:
            loop.add_event(one_logger.Event.create("noticed", one_logger.Attributes({"what": 1})))
            with training.training_iteration() as iteration:
                iteration.add_attribute("size", 3)
                iteration.add_attributes(one_logger.Attributes({"more": 4}))
                iteration.add_event(one_logger.Event.create("inside"))
                assert (iteration.active, iteration.name) == (True, "training_single_iteration")
                identity = iteration.id
                with training.data_loading():
                    pass
            assert not iteration.active

    stopped_spans = {span.name_str: span for span in wait_for_delivery(memory).records_of("stop")}
    events = {name: [event.name for event in span.events] for name, span in stopped_spans.items()}
    assert stopped_spans["application"].attributes.to_json()["color"] == "green"
    assert stopped_spans["training_single_iteration"].attributes.to_json().keys() >= {"size", "more"}
    assert (
        stopped_spans["training_single_iteration"].id
        == stopped_spans["data_loading"].parent_span.id
        == identity
    )
    assert "noticed" in events["training_loop"]
    assert "inside" in events["training_single_iteration"]
    assert {"noticed", "inside"} <= set(memory.names("event"))


def test_every_recorded_family_is_declared_by_the_sidecar() -> None:
    with training.application(), training.training_loop(0, None, 100):
        for number in range(3):
            with training.training_iteration():
                training.record(loss=1.0, grad_norm=1.0, learning_rate=0.1, loss_scale=2.0, epoch=number)
                training.record(samples=1, tokens=1, microbatches=1)
        with training.validation_loop(), training.validation_iteration():
            training.record(loss=math.nan, mode="validation")
        training.record(loss=math.nan, grad_norm=math.nan)
        training.describe(flops_per_token=1, hardware_flops_per_token=2)
        training.record(tokens=3)
        for step in (1, 2):
            with training.checkpoint_save(step):
                pass
        training.checkpoint_saved(3, bytes=3, seconds=1)
        with training.background("x"):
            pass
        training.record(mode="x")

    TRAINING.drain()
    definitions = [reading.definition for reading in TRAINING.stat_readings()]
    assert len(definitions) > 40
    assert [
        definition
        for definition in definitions
        if not matches(definition, TRAINING_FAMILIES[families_of(definition).main])
    ] == []


def test_error_counters_start_at_zero() -> None:
    train()
    training.record(loss=1.0, grad_norm=1.0)
    training.on_save_checkpoint_start(1)

    zero_counters = {name for (name, _), value in summary_values().items() if value == 0}
    assert {"training.nonfinite", "training.skipped_steps", "training.checkpoints"} <= zero_counters
    assert published_value("training.slow_step_excess") == 0


def test_tasks_and_threads_have_separate_span_trees_that_are_released() -> None:
    configure(telemetry={})

    async def iterate(times: int) -> None:
        for _ in range(times):
            with training.training_iteration():
                await asyncio.sleep(0)
                with training.data_loading():
                    await asyncio.sleep(0)
                with training.span("part"):
                    await asyncio.sleep(0.0001)

    async def main() -> None:
        with training.span("outer"):
            await asyncio.gather(*(iterate(5) for _ in range(40)))

    with training.application(), training.training_loop(train_iterations_start=0):
        asyncio.run(main())
        for _ in range(50):
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
    gc.collect()

    assert published_value("training.steps", mode="train") == 250
    assert misuse_counts() == {}
    assert len(TRAINING.clock.stack) == 1
    assert not TRAINING.open_rare_blocks


def test_blocks_that_are_not_entered_can_be_copied_and_pickled() -> None:
    blocks = {
        "step": training.training_iteration(),
        "own": training.phase("my own"),
        "logs": training.phase("logging"),
    }

    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer))"
    completed = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(blocks), capture_output=True, check=True
    )
    for block in copy.deepcopy(blocks).values():
        with block:
            pass

    assert completed.stdout.decode().strip() == str(blocks)
    assert published_value("training.steps", mode="train") == 1
    assert published_value("training.phase_entries", phase="logging") == 1
