"""Jobs instrumented with NVIDIA's one-logger, which is the package `nv_one_logger`. The jobs do not use the exporter."""

# ruff: noqa: TRY301 - jobs as users write them

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nv_one_logger.api.config import OneLoggerConfig
from nv_one_logger.api.timed_span import timed_span
from nv_one_logger.training_telemetry.api import callbacks
from nv_one_logger.training_telemetry.api.checkpoint import CheckPointStrategy
from nv_one_logger.training_telemetry.api.config import TrainingTelemetryConfig
from nv_one_logger.training_telemetry.api.context import (
    application,
    checkpoint_load,
    checkpoint_save,
    model_init,
    testing_loop,
    training_iteration,
    training_loop,
    validation_iteration,
    validation_loop,
)
from nv_one_logger.training_telemetry.api.spans import StandardTrainingJobSpanName as Name
from nv_one_logger.training_telemetry.api.training_telemetry_provider import TrainingTelemetryProvider


def provider_with_base_config(*, saves_asynchronously: bool = False, **options: Any) -> Any:
    """Return the provider with a base configuration, before `configure_provider`.

    Args:
        saves_asynchronously: True if the job confirms a save after its end.
        options: Further fields of the base configuration.
    """
    strategy = CheckPointStrategy.ASYNC if saves_asynchronously else CheckPointStrategy.SYNC
    telemetry = TrainingTelemetryConfig(
        perf_tag_or_fn="perf",
        global_batch_size_or_fn=8,
        seq_length_or_fn=16,
        log_every_n_train_iterations=2,
        save_checkpoint_strategy=strategy,
        train_iterations_target_or_fn=20,
    )
    config = OneLoggerConfig(
        application_name="app",
        session_tag_or_fn="tag",
        world_size_or_fn=1,
        telemetry_config=telemetry,
        **options,
    )
    return TrainingTelemetryProvider.instance().with_base_config(config)


def train_validate_save_and_test(print_gauges: Callable[[], object]) -> None:
    """Load, train four steps from step 5, validate, save, and test. A save and a further step fail.

    *print_gauges* is called before the end of the application.
    """
    with application():
        with model_init():
            pass
        with checkpoint_load():
            pass
        with training_loop(train_iterations_start=5):
            for _ in range(4):
                with training_iteration():
                    for name in (Name.DATA_LOADING, Name.MODEL_FORWARD, Name.MODEL_BACKWARD):
                        with timed_span(name):
                            pass
            with validation_loop():
                for _ in range(3):
                    with validation_iteration():
                        pass
            with checkpoint_save(global_step=9):
                pass
            try:
                with checkpoint_save(global_step=9):
                    raise OSError("full")
            except OSError:
                pass
            try:
                with training_iteration():
                    raise ZeroDivisionError("amid an iteration")
            except ZeroDivisionError as error:
                print("raised", error)
            print_gauges()
        with testing_loop():
            pass


def save_asynchronously() -> None:
    """Start a save after each of three steps. Confirm the second save, and then the first."""
    callbacks.on_app_start(start_time_msec=(time.time() - 5) * 1000)
    callbacks.on_train_start(train_iterations_start=0)
    for step in range(3):
        callbacks.on_training_single_iteration_start()
        callbacks.on_training_single_iteration_end()
        callbacks.on_save_checkpoint_start(global_step=step + 1)
        callbacks.on_save_checkpoint_end()
    callbacks.on_save_checkpoint_success(global_step=2)
    callbacks.on_save_checkpoint_success(global_step=1)
    with timed_span(Name.OPTIMIZER_UPDATE):
        pass
    callbacks.on_train_end()
    callbacks.on_app_end()


def start_a_second_iteration_in_an_iteration() -> None:
    """Misuse one-logger, which raises an error."""
    with application(), training_loop(train_iterations_start=0):
        for _ in range(2):
            callbacks.on_training_single_iteration_start()


def train_one_iteration() -> None:
    with training_loop(train_iterations_start=0), training_iteration():
        pass


def train_with_lightning() -> None:
    """Train with a Trainer of PyTorch Lightning whose callback calls one-logger for each batch. Two batches are a step."""
    from programs.lightning_parts import Module, loader, pl, quiet_trainer

    class InstrumentedCallback(pl.Callback):  # type: ignore[misc]  # Lightning has no types here
        def on_train_start(self, trainer: Any, module: Any) -> None:
            callbacks.on_train_start(train_iterations_start=trainer.global_step)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            callbacks.on_train_end()

        def on_train_batch_start(self, *batch: Any) -> None:
            callbacks.on_training_single_iteration_start()

        def on_train_batch_end(self, *batch: Any) -> None:
            callbacks.on_training_single_iteration_end()

    with application():
        with model_init():
            module = Module()
        trainer = quiet_trainer(
            max_epochs=1,
            accumulate_grad_batches=2,
            enable_checkpointing=False,
            callbacks=[InstrumentedCallback()],
        )
        trainer.fit(module, loader(16, 2))
