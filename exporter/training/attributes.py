"""The attributes that the standard spans and events carry, one class for each.

Used in the training process. Each class says the names, the types and the units; `create` takes them by the same names
and leaves out what is None. They are one-logger's; how the values come about is in docs/one-logger.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, overload

from exporter.errors import OneLoggerError
from exporter.training.names import ApplicationType, CheckPointStrategy
from exporter.training.types import Attribute, Attributes, plain_value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class _Optional(Generic[T]):
    """A field that may be absent; read as an attribute of the collection.

    Attributes:
        convert: Makes the field's own class of what is kept; None where that is the same.
    """

    def __init__(self, convert: Callable[[Any], T] | None = None) -> None:
        self.convert = convert
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: Attributes, owner: type) -> T | None: ...
    def __get__(self, instance: Attributes | None, owner: type) -> Self | T | None:
        if instance is None:
            return self
        found = instance.get(self.name)
        if found is None:
            return None
        value: T = found.value if self.convert is None else self.convert(found.value)
        return value


class _Required(_Optional[T]):
    """A field that `create` insists on."""

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: Attributes, owner: type) -> T: ...
    def __get__(self, instance: Attributes | None, owner: type) -> Self | T:
        found = super().__get__(instance, owner)
        if found is None:
            raise OneLoggerError(f"{self.name} is required.")
        return found


class StandardAttributes(Attributes):
    """Attributes of known names."""

    __slots__ = ()

    @classmethod
    def filled(cls, given: Mapping[str, Any]) -> Self:
        """Make one of the arguments of `create`, as `locals()` gives them.

        Raises:
            OneLoggerError: A field that is required is None.
        """
        made = cls()
        for name, value in given.items():
            if name == "cls":
                continue
            if value is not None:
                kept = value.items() if isinstance(value, Mapping) else None
                flat = value if kept is None else [f"{key}:{plain_value(item)}" for key, item in kept]
                made[name] = Attribute(name, flat)
            elif isinstance(cls.__dict__.get(name), _Required):
                raise OneLoggerError(f"{name} is required.")
        return made


class TrainingLoopAttributes(StandardAttributes):
    """Of the span `training_loop`."""

    __slots__ = ()
    train_iterations_start = _Required[int]()
    train_samples_start = _Required[int]()
    train_tokens_target = _Optional[int]()
    completed_floating_point_operations_overall = _Optional[int]()
    train_iterations_target = _Optional[int]()
    train_samples_target = _Optional[int]()

    @classmethod
    def create(
        cls,
        train_iterations_start: int,
        train_samples_start: int,
        train_tokens_target: int | None = None,
        completed_floating_point_operations_overall: int | None = None,
        train_iterations_target: int | None = None,
        train_samples_target: int | None = None,
    ) -> Self:
        """Make one; the starts are those of the whole training, so a resumed job's are not 0."""
        return cls.filled(locals())


class CheckpointSaveSpanAttributes(StandardAttributes):
    """Of the spans `checkpoint_save_sync` and `checkpoint_save_async`."""

    __slots__ = ()
    checkpoint_strategy = _Required[CheckPointStrategy](CheckPointStrategy)
    current_iteration = _Required[int]()
    save_checkpoint_attempt_count = _Required[int]()

    @classmethod
    def create(
        cls,
        checkpoint_strategy: CheckPointStrategy,
        current_iteration: int,
        save_checkpoint_attempt_count: int,
    ) -> Self:
        """Make one; the attempts include this one and those that failed."""
        return cls.filled(locals())


class OneLoggerInitializationAttributes(StandardAttributes):
    """Of the event `one_logger_initialization`."""

    __slots__ = ()
    world_size = _Required[int]()
    one_logger_training_telemetry_version = _Required[str]()
    enable_for_current_rank = _Required[bool]()
    session_tag = _Required[str]()
    is_baseline_run = _Required[bool]()
    summary_data_schema_version = _Required[str]()
    node_name = _Required[str]()
    rank = _Required[int]()
    custom_metadata = _Optional["list[str]"]()

    @classmethod
    def create(
        cls,
        world_size: int,
        one_logger_training_telemetry_version: str,
        enable_for_current_rank: bool,
        session_tag: str,
        is_baseline_run: bool,
        summary_data_schema_version: str,
        node_name: str,
        rank: int,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> Self:
        """Make one; the metadata becomes a list of `key:value`."""
        return cls.filled(locals())


class TrainingTelemetryAttributes(StandardAttributes):
    """Of the event `update_training_telemetry_config`."""

    __slots__ = ()
    perf_tag = _Required["str | list[str]"]()
    global_batch_size = _Required[int]()
    log_every_n_train_iterations = _Required[int]()
    micro_batch_size = _Optional[int]()
    seq_length = _Optional[int]()
    flops_per_sample = _Optional[int]()
    train_iterations_target = _Optional[int]()
    train_samples_target = _Optional[int]()
    checkpoint_strategy = _Optional[CheckPointStrategy](CheckPointStrategy)
    is_train_iterations_enabled = _Optional[bool]()
    is_validation_iterations_enabled = _Optional[bool]()
    is_test_iterations_enabled = _Optional[bool]()
    is_save_checkpoint_enabled = _Optional[bool]()
    is_log_throughput_enabled = _Optional[bool]()
    custom_metadata = _Optional["list[str]"]()

    @property
    def app_type(self) -> str:
        """What the application does; a training job's is not exported."""
        return self.get_str_value("app_type") or ApplicationType.TRAINING.value

    @classmethod
    def create(
        cls,
        perf_tag: str | list[str],
        global_batch_size: int,
        log_every_n_train_iterations: int,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        flops_per_sample: int | None = None,
        train_iterations_target: int | None = None,
        train_samples_target: int | None = None,
        checkpoint_strategy: CheckPointStrategy | None = None,
        is_train_iterations_enabled: bool | None = None,
        is_validation_iterations_enabled: bool | None = None,
        is_test_iterations_enabled: bool | None = None,
        is_save_checkpoint_enabled: bool | None = None,
        is_log_throughput_enabled: bool | None = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> Self:
        """Make one; the metadata becomes a list of `key:value`."""
        return cls.filled(locals())


class TrainingMetricsUpdateAttributes(StandardAttributes):
    """Of the event `training_metrics_update`: figures of the training loop so far.

    Times are in seconds, throughput in TFLOP/s per GPU. The first seven optional fields are one-logger's too, which
    never fills them; nor does this package: what they would tell is in the families (`training_loss` …).
    """

    __slots__ = ()
    train_iterations_start = _Required[int]()
    current_iteration = _Required[int]()
    num_iterations = _Required[int]()
    train_samples_start = _Required[int]()
    num_train_samples = _Required[int]()
    interval = _Required[int]()
    avg_iteration_time_sec = _Required[float]()
    min_iteration_time_sec = _Required[float]()
    max_iteration_time_sec = _Required[float]()
    total_iteration_time_sec = _Required[float]()
    avg_forward_time_sec = _Optional[float]()
    avg_backward_time_sec = _Optional[float]()
    avg_dataloader_time_sec = _Optional[float]()
    avg_tflops = _Optional[float]()
    train_tokens = _Optional[int]()
    avg_tokens_per_second = _Optional[float]()
    latest_loss = _Optional[float]()
    avg_batch_size = _Optional[int]()
    completed_floating_point_operations_overall = _Optional[int]()
    total_flops = _Optional[int]()
    train_throughput_per_gpu = _Optional[float]()
    train_throughput_per_gpu_max = _Optional[float]()
    train_throughput_per_gpu_min = _Optional[float]()
    first_logged_train_iterations_finish_timestamp_sec = _Optional[float]()
    last_logged_train_iterations_finish_timestamp_sec = _Optional[float]()

    @classmethod
    def create(
        cls,
        train_iterations_start: int,
        current_iteration: int,
        num_iterations: int,
        train_samples_start: int,
        num_train_samples: int,
        interval: int,
        avg_iteration_time_sec: float,
        min_iteration_time_sec: float,
        max_iteration_time_sec: float,
        total_iteration_time_sec: float,
        avg_forward_time_sec: float | None = None,
        avg_backward_time_sec: float | None = None,
        avg_dataloader_time_sec: float | None = None,
        avg_tflops: float | None = None,
        train_tokens: int | None = None,
        avg_tokens_per_second: float | None = None,
        latest_loss: float | None = None,
        avg_batch_size: int | None = None,
        completed_floating_point_operations_overall: int | None = None,
        total_flops: int | None = None,
        train_throughput_per_gpu: float | None = None,
        train_throughput_per_gpu_max: float | None = None,
        train_throughput_per_gpu_min: float | None = None,
        first_logged_train_iterations_finish_timestamp_sec: float | None = None,
        last_logged_train_iterations_finish_timestamp_sec: float | None = None,
    ) -> Self:
        """Make one."""
        return cls.filled(locals())


class ValidationMetricsUpdateAttributes(StandardAttributes):
    """Of the event `validation_metrics_update`; the times, in seconds, are absent where no iteration was completed."""

    __slots__ = ()
    current_iteration = _Required[int]()
    interval = _Required[int]()
    avg_iteration_time_sec = _Optional[float]()
    min_iteration_time_sec = _Optional[float]()
    max_iteration_time_sec = _Optional[float]()
    total_iteration_time_sec = _Optional[float]()

    @classmethod
    def create(
        cls,
        current_iteration: int,
        interval: int,
        avg_iteration_time_sec: float | None = None,
        min_iteration_time_sec: float | None = None,
        max_iteration_time_sec: float | None = None,
        total_iteration_time_sec: float | None = None,
    ) -> Self:
        """Make one."""
        return cls.filled(locals())


class TestingMetricsUpdateAttributes(StandardAttributes):
    """Of the event `testing_metrics_update`."""

    __slots__ = ()
    __test__ = False  # pytest collects every class of such a name
    current_iteration = _Required[int]()
    interval = _Required[int]()

    @classmethod
    def create(cls, current_iteration: int, interval: int) -> Self:
        """Make one."""
        return cls.filled(locals())


class SaveCheckpointSuccessEventAttributes(StandardAttributes):
    """Of the event `save_checkpoint_success`: what is safe now.

    Timestamps are Unix seconds; `productive_train_tflops` is an amount in 10¹² operations, not a rate; the size is in
    bytes.
    """

    __slots__ = ()
    checkpoint_strategy = _Required[CheckPointStrategy](CheckPointStrategy)
    current_iteration = _Required[int]()
    first_successful_save_checkpoint_timestamp_sec = _Required[float]()
    latest_successful_save_checkpoint_timestamp_sec = _Required[float]()
    save_checkpoint_success_count = _Required[int]()
    productive_train_iterations = _Required[int]()
    productive_train_samples = _Required[int]()
    productive_train_iterations_sec = _Required[float]()
    productive_validation_iterations_sec = _Required[float]()
    productive_train_tflops = _Optional[float]()
    checkpoint_size = _Optional[int]()
    checkpoint_directory = _Optional[str]()
    training_start_timestamp_sec = _Optional[float]()

    @classmethod
    def create(
        cls,
        checkpoint_strategy: CheckPointStrategy,
        current_iteration: int,
        first_successful_save_checkpoint_timestamp_sec: float,
        latest_successful_save_checkpoint_timestamp_sec: float,
        save_checkpoint_success_count: int,
        productive_train_iterations: int,
        productive_train_samples: int,
        productive_train_iterations_sec: float,
        productive_validation_iterations_sec: float,
        productive_train_tflops: float | None = None,
        checkpoint_size: int | None = None,
        checkpoint_directory: str | None = None,
        training_start_timestamp_sec: float | None = None,
    ) -> Self:
        """Make one."""
        return cls.filled(locals())


class SyncCheckpointMetricsUpdateAttributes(StandardAttributes):
    """Of the event `sync_checkpoint_metrics_update`: the saves' seconds on the main thread, of either strategy."""

    __slots__ = ()
    save_checkpoint_sync_time_total_sec = _Required[float]()
    save_checkpoint_sync_time_min_sec = _Required[float]()
    save_checkpoint_sync_time_max_sec = _Required[float]()

    @classmethod
    def create(
        cls,
        save_checkpoint_sync_time_total_sec: float,
        save_checkpoint_sync_time_min_sec: float,
        save_checkpoint_sync_time_max_sec: float,
    ) -> Self:
        """Make one."""
        return cls.filled(locals())
