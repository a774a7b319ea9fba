"""PyTorch Lightning: compatibility module for `nv_one_logger.training_telemetry.integration.pytorch_lightning`.

The module has the Trainer and the callback of the package `nv-one-logger-pytorch-lightning-integration`, based on the bridge to
Lightning. An iteration is an optimizer step. The bridge records saves, so that a failed save does not affect the next save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from exporter.bridges import lightning
from exporter.one_logger.provider import TrainingTelemetryProvider
from exporter.training import callbacks

__all__ = ["OneLoggerPTLTrainer", "TimeEventCallback", "hook_trainer_cls"]

_MODULES = lightning.import_packages()
_BASES = tuple(module.Callback for module in _MODULES)
_TRAINER: Any = _MODULES[0].Trainer


class TimeEventCallback(lightning.LightningCallback, *_BASES):  # type: ignore[misc]  # bases of the installed package
    """Lightning callback that records the training. The job calls the methods below for its own work.

    Args:
        training_telemetry_provider: Provider of the process.
        call_on_app_start: True to start the application.
    """

    records_sanity_check = True

    def __init__(
        self,
        training_telemetry_provider: TrainingTelemetryProvider,
        call_on_app_start: bool = True,
    ) -> None:
        self._provider = training_telemetry_provider
        if call_on_app_start:
            callbacks.on_app_start()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without state: another process creates a new callback with its own provider."""
        return _restored, ()

    def on_save_checkpoint_start(self, global_step: int) -> None:
        """Report the start of a save that Lightning's Trainer does not perform."""
        callbacks.on_save_checkpoint_start(global_step)

    def on_save_checkpoint_success(self, global_step: int) -> None:
        """Report the success of a save that Lightning's Trainer does not perform."""
        callbacks.on_save_checkpoint_success(global_step)

    def on_save_checkpoint_end(self, global_step: int | None = None) -> None:  # noqa: ARG002  # one-logger has it
        """Report the end of a save that Lightning's Trainer does not perform."""
        callbacks.on_save_checkpoint_end()

    def on_app_end(self) -> None:
        """Report the end of the application."""
        callbacks.on_app_end()

    def on_model_init_start(self) -> None:
        """Report the start of the model initialization."""
        callbacks.on_model_init_start()

    def on_model_init_end(self) -> None:
        """Report the end of the model initialization."""
        callbacks.on_model_init_end()

    def on_dataloader_init_start(self) -> None:
        """Report the start of the data loader initialization."""
        callbacks.on_dataloader_init_start()

    def on_dataloader_init_end(self) -> None:
        """Report the end of the data loader initialization."""
        callbacks.on_dataloader_init_end()

    def on_optimizer_init_start(self) -> None:
        """Report the start of the optimizer initialization."""
        callbacks.on_optimizer_init_start()

    def on_optimizer_init_end(self) -> None:
        """Report the end of the optimizer initialization."""
        callbacks.on_optimizer_init_end()

    def on_load_checkpoint_start(self) -> None:
        """Report the start of loading a checkpoint outside of Lightning."""
        callbacks.on_load_checkpoint_start()

    def on_load_checkpoint_end(self) -> None:
        """Report the end of loading a checkpoint outside of Lightning."""
        callbacks.on_load_checkpoint_end()

    def on_testing_start(self) -> None:
        """Report the start of a test outside of Lightning."""
        callbacks.on_testing_start()

    def on_testing_end(self) -> None:
        """Report the end of a test outside of Lightning."""
        callbacks.on_testing_end()


def _restored() -> TimeEventCallback:
    """Return the callback of an unpickled Trainer."""
    return TimeEventCallback(TrainingTelemetryProvider.instance(), call_on_app_start=False)


def _callback_list(argument: object) -> list[Any]:
    """Return the argument `callbacks` of a Trainer (a callback, a list, or None) as a list."""
    if argument is None:
        return []
    return list(argument) if isinstance(argument, (list, tuple)) else [argument]


def hook_trainer_cls(
    cls: type[Any],
    training_telemetry_provider: TrainingTelemetryProvider,
    telemetry_callback: TimeEventCallback | None = None,
) -> tuple[type[Any], TimeEventCallback]:
    """Add a callback to the Trainers of a class, and the property `nv_one_logger_callback` to the class.

    Returns the class and the callback.
    """
    callback = telemetry_callback or TimeEventCallback(training_telemetry_provider)
    initialize: Callable[..., None] = cls.__init__

    @wraps(initialize)
    def initialize_with_callback(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["callbacks"] = [callback, *_callback_list(kwargs.get("callbacks"))]
        initialize(self, *args, **kwargs)

    cls.__init__ = initialize_with_callback
    cls.nv_one_logger_callback = property(lambda _self: callback)
    return cls, callback


class OneLoggerPTLTrainer(_TRAINER):  # type: ignore[misc]  # a class of the installed package
    """Lightning Trainer with a TimeEventCallback.

    Args:
        trainer_config: Keyword arguments of the Trainer.
        training_telemetry_provider: Provider of the process.
    """

    def __init__(
        self, trainer_config: Mapping[str, Any], training_telemetry_provider: TrainingTelemetryProvider
    ) -> None:
        self._nv_one_logger_callback = TimeEventCallback(training_telemetry_provider)
        arguments = dict(trainer_config)
        arguments["callbacks"] = [self._nv_one_logger_callback, *_callback_list(arguments.get("callbacks"))]
        super().__init__(**arguments)

    @property
    def nv_one_logger_callback(self) -> TimeEventCallback:
        """Callback of the Trainer."""
        return self._nv_one_logger_callback
