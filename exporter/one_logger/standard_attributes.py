"""Attribute classes of one-logger's standard spans and events.

The fields of a class are the arguments of `create`. Fields named `…_sec` are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from exporter.one_logger.names import ApplicationType, CheckPointStrategy
from exporter.recording.conversion import AttributeValue
from exporter.training.attributes import Attribute, Attributes, assert_that

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "CheckpointSaveSpanAttributes",
    "OneLoggerInitializationAttributes",
    "SaveCheckpointSuccessEventAttributes",
    "SyncCheckpointMetricsUpdateAttributes",
    "TestingMetricsUpdateAttributes",
    "TrainingLoopAttributes",
    "TrainingMetricsUpdateAttributes",
    "TrainingTelemetryAttributes",
    "ValidationMetricsUpdateAttributes",
]

Value = TypeVar("Value")


class OptionalField(Generic[Value]):
    """Field of a class of attributes: reads the attribute of the same name; None if the attribute is not set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: Attributes, owner: type) -> Value | None: ...

    def __get__(self, instance: Attributes | None, owner: type) -> Any:
        if instance is None:
            return self
        attribute = instance.get(self.name)
        if attribute is None:
            return None
        return CheckPointStrategy(attribute.value) if self.name == "checkpoint_strategy" else attribute.value


class RequiredField(OptionalField[Value]):
    """Field whose attribute must be set: reading an absent attribute raises OneLoggerError."""

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: Attributes, owner: type) -> Value: ...

    def __get__(self, instance: Attributes | None, owner: type) -> Any:
        value = super().__get__(instance, owner)
        assert_that(value is not None, f"{self.name} is required.")
        return value


class StandardAttributes(Attributes):
    """Base class of attributes whose names a derived class declares as fields."""

    @classmethod
    def create(cls, *values: Any, **fields: Any) -> Self:
        """Return attributes from values in the order of declaration, or by name. None values are omitted.

        Raises:
            TypeError: A required field is missing, a field does not exist, or there are more values than fields.
            OneLoggerError: A required field is None.
        """
        fields_by_name = {
            name: field for name, field in vars(cls).items() if isinstance(field, OptionalField)
        }
        if len(values) > len(fields_by_name):
            raise TypeError(f"{cls.__name__}.create: {len(values)} values for {len(fields_by_name)} fields")
        values_by_name = dict(zip(fields_by_name, values, strict=False)) | fields
        required_names = {name for name, field in fields_by_name.items() if isinstance(field, RequiredField)}
        missing_names = sorted(required_names - values_by_name.keys())
        unknown_names = sorted(values_by_name.keys() - fields_by_name.keys())
        if missing_names or unknown_names:
            raise TypeError(
                f"{cls.__name__}.create: missing fields {missing_names}, unknown fields {unknown_names}"
            )
        attributes = cls()
        for name, field in fields_by_name.items():
            value = values_by_name.get(name)
            assert_that(value is not None or not isinstance(field, RequiredField), f"{name} is required.")
            if value is not None:
                attributes[name] = Attribute(name, value)
        return attributes


class TrainingLoopAttributes(StandardAttributes):
    """Attributes of the span `training_loop`. The starts are above 0 if the job resumes from a checkpoint."""

    train_iterations_start = RequiredField[int]()
    train_samples_start = RequiredField[int]()
    train_tokens_target = OptionalField[int]()
    completed_floating_point_operations_overall = OptionalField[int]()
    train_iterations_target = OptionalField[int]()
    train_samples_target = OptionalField[int]()


class CheckpointSaveSpanAttributes(StandardAttributes):
    """Attributes of the spans `checkpoint_save_sync` and `checkpoint_save_async`. The attempts include failed saves."""

    checkpoint_strategy = RequiredField[CheckPointStrategy]()
    current_iteration = RequiredField[int]()
    save_checkpoint_attempt_count = RequiredField[int]()


class OneLoggerInitializationAttributes(StandardAttributes):
    """Attributes of the event `one_logger_initialization`."""

    world_size = RequiredField[int]()
    one_logger_training_telemetry_version = RequiredField[str]()
    enable_for_current_rank = RequiredField[bool]()
    session_tag = RequiredField[str]()
    is_baseline_run = RequiredField[bool]()
    summary_data_schema_version = RequiredField[str]()
    node_name = RequiredField[str]()
    rank = RequiredField[int]()
    custom_metadata = OptionalField[Mapping[str, AttributeValue]]()


class TrainingTelemetryAttributes(StandardAttributes):
    """Attributes of the event `update_training_telemetry_config`."""

    perf_tag = RequiredField[str | list[str]]()
    global_batch_size = RequiredField[int]()
    log_every_n_train_iterations = RequiredField[int]()
    micro_batch_size = OptionalField[int]()
    seq_length = OptionalField[int]()
    flops_per_sample = OptionalField[int]()
    train_iterations_target = OptionalField[int]()
    train_samples_target = OptionalField[int]()
    checkpoint_strategy = OptionalField[CheckPointStrategy]()
    is_train_iterations_enabled = OptionalField[bool]()
    is_validation_iterations_enabled = OptionalField[bool]()
    is_test_iterations_enabled = OptionalField[bool]()
    is_save_checkpoint_enabled = OptionalField[bool]()
    is_log_throughput_enabled = OptionalField[bool]()
    custom_metadata = OptionalField[Mapping[str, AttributeValue]]()

    @property
    def app_type(self) -> str:
        """Kind of the application; "training" if absent."""
        return self.get_str_value("app_type") or ApplicationType.TRAINING.value


class TrainingMetricsUpdateAttributes(StandardAttributes):
    """Attributes of the event `training_metrics_update`.

    Throughput is in TFLOP/s per GPU. Of the fields from `avg_forward_time_sec` to `avg_batch_size`, this package and one-logger set
    `train_tokens` alone.
    """

    train_iterations_start = RequiredField[int]()
    current_iteration = RequiredField[int]()
    num_iterations = RequiredField[int]()
    train_samples_start = RequiredField[int]()
    num_train_samples = RequiredField[int]()
    interval = RequiredField[int]()
    avg_iteration_time_sec = RequiredField[float]()
    min_iteration_time_sec = RequiredField[float]()
    max_iteration_time_sec = RequiredField[float]()
    total_iteration_time_sec = RequiredField[float]()
    avg_forward_time_sec = OptionalField[float]()
    avg_backward_time_sec = OptionalField[float]()
    avg_dataloader_time_sec = OptionalField[float]()
    avg_tflops = OptionalField[float]()
    train_tokens = OptionalField[int]()
    avg_tokens_per_second = OptionalField[float]()
    latest_loss = OptionalField[float]()
    avg_batch_size = OptionalField[float]()
    completed_floating_point_operations_overall = OptionalField[int]()
    total_flops = OptionalField[int]()
    train_throughput_per_gpu = OptionalField[float]()
    train_throughput_per_gpu_max = OptionalField[float]()
    train_throughput_per_gpu_min = OptionalField[float]()
    first_logged_train_iterations_finish_timestamp_sec = OptionalField[float]()
    last_logged_train_iterations_finish_timestamp_sec = OptionalField[float]()


class ValidationMetricsUpdateAttributes(StandardAttributes):
    """Attributes of the event `validation_metrics_update`. The times are absent before the first completed iteration."""

    current_iteration = RequiredField[int]()
    interval = RequiredField[int]()
    avg_iteration_time_sec = OptionalField[float]()
    min_iteration_time_sec = OptionalField[float]()
    max_iteration_time_sec = OptionalField[float]()
    total_iteration_time_sec = OptionalField[float]()


class TestingMetricsUpdateAttributes(StandardAttributes):
    """Attributes of the event `testing_metrics_update`."""

    __test__ = False  # pytest collects classes whose names start with Test

    current_iteration = RequiredField[int]()
    interval = RequiredField[int]()


class SaveCheckpointSuccessEventAttributes(StandardAttributes):
    """Attributes of the event `save_checkpoint_success`. `productive_*` is the training that the checkpoints preserve."""

    checkpoint_strategy = RequiredField[CheckPointStrategy]()
    current_iteration = RequiredField[int]()
    first_successful_save_checkpoint_timestamp_sec = RequiredField[float]()
    latest_successful_save_checkpoint_timestamp_sec = RequiredField[float]()
    save_checkpoint_success_count = RequiredField[int]()
    productive_train_iterations = RequiredField[int]()
    productive_train_samples = RequiredField[int]()
    productive_train_iterations_sec = RequiredField[float]()
    productive_validation_iterations_sec = RequiredField[float]()
    productive_train_tflops = OptionalField[float]()
    checkpoint_size = OptionalField[int]()
    checkpoint_directory = OptionalField[str]()
    training_start_timestamp_sec = OptionalField[float]()

    @classmethod
    def create(cls, *values: Any, **fields: Any) -> Self:
        """Return the attributes, without a `training_start_timestamp_sec` of 0, which means unknown as in one-logger."""
        attributes = super().create(*values, **fields)
        if not attributes.training_start_timestamp_sec:
            attributes.pop("training_start_timestamp_sec", None)
        return attributes


class SyncCheckpointMetricsUpdateAttributes(StandardAttributes):
    """Attributes of the event `sync_checkpoint_metrics_update`: the time for which saves blocked the training."""

    save_checkpoint_sync_time_total_sec = RequiredField[float]()
    save_checkpoint_sync_time_min_sec = RequiredField[float]()
    save_checkpoint_sync_time_max_sec = RequiredField[float]()
