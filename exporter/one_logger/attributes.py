"""The attributes that the standard spans and events carry: one class for each, one line for each field.

Used in the training process. `create` takes the fields by name or in their order and leaves out what is None; a field
without a default is required. They are one-logger's; how the values come about is in docs/one-logger.md.
"""

from __future__ import annotations

from inspect import Parameter, Signature, get_annotations
from typing import TYPE_CHECKING, Any

from exporter.errors import OneLoggerError
from exporter.one_logger.names import ApplicationType, CheckPointStrategy
from exporter.training.attributes import Attribute, Attributes

if TYPE_CHECKING:
    from typing_extensions import Self


class StandardAttributes(Attributes):
    """Attributes of known names: the annotations of the class, each of which becomes a property."""

    __test__ = False  # pytest would collect those that are named after tests

    if TYPE_CHECKING:

        @classmethod
        def create(cls, *given: Any, **fields: Any) -> Self:
            """Make one; `OneLoggerError` where a field that is required is None."""

    def __init_subclass__(cls) -> None:
        kind, required = Parameter.POSITIONAL_OR_KEYWORD, Parameter.empty
        defaults = {name: cls.__dict__.get(name, required) for name in get_annotations(cls)}
        parameters = [Parameter(name, kind, default=default) for name, default in defaults.items()]
        signature = Signature(parameters)

        def create(cls: type[StandardAttributes], *given: Any, **fields: Any) -> StandardAttributes:
            made = cls()
            for name, value in signature.bind(*given, **fields).arguments.items():
                if value is not None:
                    made[name] = Attribute(name, value)
                elif defaults[name] is required:
                    raise OneLoggerError(f"{name} is required.")
            return made

        create.__signature__ = Signature([Parameter("cls", kind), *parameters])  # type: ignore[attr-defined]  # it may have one
        if not TYPE_CHECKING:
            cls.create = classmethod(create)
        for name, default in defaults.items():
            setattr(cls, name, _field(name, required=default is required))


def _field(name: str, *, required: bool) -> property:
    def value(self: Attributes) -> Any:
        found = self.get(name)
        if found is None:
            if required:
                raise OneLoggerError(f"{name} is required.")
            return None
        return CheckPointStrategy(found.value) if name == "checkpoint_strategy" else found.value

    return property(value)


class TrainingLoopAttributes(StandardAttributes):
    """Of the span `training_loop`; the starts are those of the whole training, so a resumed job's are not 0."""

    train_iterations_start: int
    train_samples_start: int
    train_tokens_target: int | None = None
    completed_floating_point_operations_overall: int | None = None
    train_iterations_target: int | None = None
    train_samples_target: int | None = None


class CheckpointSaveSpanAttributes(StandardAttributes):
    """Of the spans `checkpoint_save_sync` and `checkpoint_save_async`; the attempts include those that failed."""

    checkpoint_strategy: CheckPointStrategy
    current_iteration: int
    save_checkpoint_attempt_count: int


class OneLoggerInitializationAttributes(StandardAttributes):
    """Of the event `one_logger_initialization`; the metadata becomes a list of `key:value`."""

    world_size: int
    one_logger_training_telemetry_version: str
    enable_for_current_rank: bool
    session_tag: str
    is_baseline_run: bool
    summary_data_schema_version: str
    node_name: str
    rank: int
    custom_metadata: list[str] | None = None


class TrainingTelemetryAttributes(StandardAttributes):
    """Of the event `update_training_telemetry_config`; the metadata becomes a list of `key:value`."""

    perf_tag: str | list[str]
    global_batch_size: int
    log_every_n_train_iterations: int
    micro_batch_size: int | None = None
    seq_length: int | None = None
    flops_per_sample: int | None = None
    train_iterations_target: int | None = None
    train_samples_target: int | None = None
    checkpoint_strategy: CheckPointStrategy | None = None
    is_train_iterations_enabled: bool | None = None
    is_validation_iterations_enabled: bool | None = None
    is_test_iterations_enabled: bool | None = None
    is_save_checkpoint_enabled: bool | None = None
    is_log_throughput_enabled: bool | None = None
    custom_metadata: list[str] | None = None

    @property
    def app_type(self) -> str:
        """What the application does; a training job's is not exported."""
        return self.get_str_value("app_type") or ApplicationType.TRAINING.value


class TrainingMetricsUpdateAttributes(StandardAttributes):
    """Of the event `training_metrics_update`: figures of the training loop so far.

    Times are in seconds, throughput in TFLOP/s per GPU. The first optional fields up to `avg_batch_size`, without
    `train_tokens`, are never filled, as in one-logger: what they would tell is in the families (`training_loss` …).
    """

    train_iterations_start: int
    current_iteration: int
    num_iterations: int
    train_samples_start: int
    num_train_samples: int
    interval: int
    avg_iteration_time_sec: float
    min_iteration_time_sec: float
    max_iteration_time_sec: float
    total_iteration_time_sec: float
    avg_forward_time_sec: float | None = None
    avg_backward_time_sec: float | None = None
    avg_dataloader_time_sec: float | None = None
    avg_tflops: float | None = None
    train_tokens: int | None = None
    avg_tokens_per_second: float | None = None
    latest_loss: float | None = None
    avg_batch_size: int | None = None
    completed_floating_point_operations_overall: int | None = None
    total_flops: int | None = None
    train_throughput_per_gpu: float | None = None
    train_throughput_per_gpu_max: float | None = None
    train_throughput_per_gpu_min: float | None = None
    first_logged_train_iterations_finish_timestamp_sec: float | None = None
    last_logged_train_iterations_finish_timestamp_sec: float | None = None


class ValidationMetricsUpdateAttributes(StandardAttributes):
    """Of the event `validation_metrics_update`; the times, in seconds, are absent where no iteration was completed."""

    current_iteration: int
    interval: int
    avg_iteration_time_sec: float | None = None
    min_iteration_time_sec: float | None = None
    max_iteration_time_sec: float | None = None
    total_iteration_time_sec: float | None = None


class TestingMetricsUpdateAttributes(StandardAttributes):
    """Of the event `testing_metrics_update`."""

    current_iteration: int
    interval: int


class SaveCheckpointSuccessEventAttributes(StandardAttributes):
    """Of the event `save_checkpoint_success`: what is safe now.

    Timestamps are Unix seconds; `productive_train_tflops` is an amount in 10¹² operations; the size is in bytes.
    """

    checkpoint_strategy: CheckPointStrategy
    current_iteration: int
    first_successful_save_checkpoint_timestamp_sec: float
    latest_successful_save_checkpoint_timestamp_sec: float
    save_checkpoint_success_count: int
    productive_train_iterations: int
    productive_train_samples: int
    productive_train_iterations_sec: float
    productive_validation_iterations_sec: float
    productive_train_tflops: float | None = None
    checkpoint_size: int | None = None
    checkpoint_directory: str | None = None
    training_start_timestamp_sec: float | None = None


class SyncCheckpointMetricsUpdateAttributes(StandardAttributes):
    """Of the event `sync_checkpoint_metrics_update`: the saves' seconds on the main thread, of either strategy."""

    save_checkpoint_sync_time_total_sec: float
    save_checkpoint_sync_time_min_sec: float
    save_checkpoint_sync_time_max_sec: float
