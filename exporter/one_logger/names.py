"""The vocabulary of training telemetry, one-logger's to the letter: names, choices, and the attributes of standard spans.

`create` of a class of attributes takes the fields by name or in their order and leaves out what is None. Times are in
seconds, throughput in TFLOP/s per GPU; how the values come about is in docs/one-logger.md.
"""

from __future__ import annotations

import enum
from inspect import Parameter, Signature
from typing import Any

from exporter.training.attributes import Attribute, Attributes, Name, SpanName, assert_that, name_of
from exporter.training.span_kinds import SHORT, STEPS


class StandardSpanName(Name):
    """Spans of any application."""

    APPLICATION = "application"


class StandardTrainingJobSpanName(Name):
    """Spans of a training job."""

    TRAINING_LOOP = "training_loop"
    VALIDATION_LOOP = "validation_loop"
    TESTING_LOOP = "testing_loop"
    DIST_INIT = "distributed_code_initialization"
    DATA_LOADER_INIT = "data_loader_initialization"
    MODEL_INIT = "model_initialization"
    OPTIMIZER_INIT = "optimizer_initialization"
    CHECKPOINT_LOAD = "checkpoint_load"
    CHECKPOINT_SAVE_SYNC = "checkpoint_save_sync"
    CHECKPOINT_SAVE_ASYNC = "checkpoint_save_async"
    CHECKPOINT_SAVE_FINALIZATION = "checkpoint_save_finalization"
    TRAINING_SINGLE_ITERATION = "training_single_iteration"
    VALIDATION_SINGLE_ITERATION = "validation_single_iteration"
    TESTING_SINGLE_ITERATION = "TESTING_SINGLE_ITERATION"  # upper case there too
    DATA_LOADING = "data_loading"
    MODEL_FORWARD = "model_forward"
    ZERO_GRAD = "zero_grad"
    MODEL_BACKWARD = "model_backward"
    OPTIMIZER_UPDATE = "optimizer_update"


class StandardEventName(Name):
    """Events of any span."""

    SPAN_START = "span_start"
    SPAN_STOP = "span_stop"
    ERROR = "error"
    TELEMETRY_DATA_ERROR = "telemetry_data_error"


class StandardTrainingJobEventName(Name):
    """Events of a training job's spans."""

    ONE_LOGGER_INITIALIZATION = "one_logger_initialization"
    UPDATE_TRAINING_TELEMETRY_CONFIG = "update_training_telemetry_config"
    TRAINING_METRICS_UPDATE = "training_metrics_update"
    VALIDATION_METRICS_UPDATE = "validation_metrics_update"
    TESTING_METRICS_UPDATE = "testing_metrics_update"
    SAVE_CHECKPOINT_SUCCESS = "save_checkpoint_success"
    SYNC_CHECKPOINT_METRICS_UPDATE = "sync_checkpoint_metrics_update"


class StandardSpanAttributeName(Name):
    """Attributes of any span."""

    DURATION_MSEC = "duration_msec"
    NVTX_COLOR = "nvtx_color"


class StandardEventAttributeName(Name):
    """Attributes of any event."""

    TIMESTAMP_MSEC = "timestamp_msec"
    ERROR_MESSAGE = "error_message"
    EXCEPTION_TYPE = "exception_type"
    EXCEPTION_MESSAGE = "exception_message"
    EXCEPTION_TRACEBACK = "exception_traceback"
    TELEMETRY_DATA_ERROR_TYPE = "telemetry_data_error_type"


class NVTXColor(Name):
    """Values of the attribute `nvtx_color`."""

    UNSET = "unset"
    GREEN = "green"
    BLUE = "blue"
    YELLOW = "yellow"
    PURPLE = "purple"
    RAPIDS = "rapids"
    CYAN = "cyan"
    RED = "red"
    WHITE = "white"
    DARK_GREEN = "darkgreen"
    ORANGE = "orange"


class CheckPointStrategy(Name):
    """Whether a save is done when its span ends."""

    SYNC = "sync"
    ASYNC = "async"


class CheckPointType(Name):
    """Where a checkpoint goes: remote and persistent, or local and not."""

    GLOBAL = "global"
    LOCAL = "local"


class ApplicationType(Name):
    """What an application does; a training job's is TRAINING."""

    TRAINING = "training"
    VALIDATION = "validation"
    BATCH_INFERENCE = "batch_inference"
    ONLINE_INFERENCE = "online_inference"
    DATA_PROCESSING = "data_processing"


class OneLoggerErrorHandlingStrategy(enum.Enum):
    """What a call does that is misused, beside counting and logging it: raise where that was chosen, or nothing."""

    PROPAGATE_EXCEPTIONS = "propagate_exceptions"
    DISABLE_QUIETLY_AND_REPORT_METRIC_ERROR = "disable_quietly_and_report_metric_error"


class ExportCustomizationMode(enum.Enum):
    """Which spans, with their events, go to the exporters."""

    EXPORT_ALL_SPANS = 1
    WHITELIST_SPANS = 2
    BLACKLIST_SPANS = 3


class RecordType(enum.Enum):
    """The field `type` of a JSON record."""

    START = "start"
    STOP = "stop"
    COMPLETE = "complete"
    EVENT = "event"
    APPLICATION_ERROR = "application_error"
    TELEMETRY_DATA_ERROR = "telemetry_data_error"


DEFAULT_SPANS_EXPORT_BLACKLIST: list[SpanName] = [
    StandardTrainingJobSpanName(name) for name in sorted({name_of(kind.name) for kind in (*STEPS, *SHORT)})
]
"""Short and frequent spans, not exported unless the job asks."""


# Attributes -----------------------------------------------------------------------------------------------


def _kind(name: str, required: str, optional: str = "", doc: str = "") -> Any:
    """Make a class of attributes, each of which is a property; `OneLoggerError` where one that is required is None."""
    place, needed = Parameter.POSITIONAL_OR_KEYWORD, required.split()
    parameters = [Parameter(each, place) for each in needed]
    parameters += [Parameter(each, place, default=None) for each in optional.split()]
    signature = Signature(parameters)

    def create(cls: type[Attributes], *given: Any, **fields: Any) -> Attributes:
        made = cls()
        for field, value in signature.bind(*given, **fields).arguments.items():
            known = value or field != "training_start_timestamp_sec"  # which is not known where it is 0
            if value is not None and known:
                made[field] = Attribute(field, value)
            assert_that(value is not None or field not in needed, f"{field} is required.")
        return made

    create.__signature__ = Signature([Parameter("cls", place), *parameters])  # type: ignore[attr-defined]  # it may have one
    properties = {each: _field(each, required=each in needed) for each in signature.parameters}
    # `__test__`, since pytest would collect those that are named after tests.
    more = {"__doc__": doc, "__module__": __name__, "__test__": False, "create": classmethod(create)}
    return type(name, (Attributes,), properties | more)


def _field(name: str, *, required: bool) -> property:
    def value(self: Attributes) -> Any:
        found = self.get(name)
        if found is None:
            assert_that(not required, f"{name} is required.")
            return None
        return CheckPointStrategy(found.value) if name == "checkpoint_strategy" else found.value

    return property(value)


_ITERATION_TIMES = """
    avg_iteration_time_sec min_iteration_time_sec max_iteration_time_sec total_iteration_time_sec
"""
_SWITCHES = """
    is_train_iterations_enabled is_validation_iterations_enabled is_test_iterations_enabled is_save_checkpoint_enabled
    is_log_throughput_enabled
"""

TrainingLoopAttributes = _kind(
    "TrainingLoopAttributes",
    "train_iterations_start train_samples_start",
    """
    train_tokens_target completed_floating_point_operations_overall train_iterations_target train_samples_target
    """,
    "Of the span `training_loop`; the starts are those of the whole training, so a resumed job's are not 0.",
)
CheckpointSaveSpanAttributes = _kind(
    "CheckpointSaveSpanAttributes",
    "checkpoint_strategy current_iteration save_checkpoint_attempt_count",
    doc="Of the spans `checkpoint_save_sync` and `checkpoint_save_async`; the attempts include those that failed.",
)
OneLoggerInitializationAttributes = _kind(
    "OneLoggerInitializationAttributes",
    """
    world_size one_logger_training_telemetry_version enable_for_current_rank session_tag is_baseline_run
    summary_data_schema_version node_name rank
    """,
    "custom_metadata",
    "Of the event `one_logger_initialization`.",
)
TrainingTelemetryAttributes = _kind(
    "TrainingTelemetryAttributes",
    "perf_tag global_batch_size log_every_n_train_iterations",
    f"""
    micro_batch_size seq_length flops_per_sample train_iterations_target train_samples_target checkpoint_strategy
    {_SWITCHES} custom_metadata
    """,
    "Of the event `update_training_telemetry_config`.",
)
TrainingTelemetryAttributes.app_type = property(
    lambda self: self.get_str_value("app_type") or ApplicationType.TRAINING.value
)
TrainingMetricsUpdateAttributes = _kind(
    "TrainingMetricsUpdateAttributes",
    f"""
    train_iterations_start current_iteration num_iterations train_samples_start num_train_samples interval
    {_ITERATION_TIMES}
    """,
    """
    avg_forward_time_sec avg_backward_time_sec avg_dataloader_time_sec avg_tflops train_tokens avg_tokens_per_second
    latest_loss avg_batch_size completed_floating_point_operations_overall total_flops train_throughput_per_gpu
    train_throughput_per_gpu_max train_throughput_per_gpu_min first_logged_train_iterations_finish_timestamp_sec
    last_logged_train_iterations_finish_timestamp_sec
    """,
    "Of the event `training_metrics_update`; those up to `avg_batch_size` are never filled, but for `train_tokens`.",
)
ValidationMetricsUpdateAttributes = _kind(
    "ValidationMetricsUpdateAttributes",
    "current_iteration interval",
    _ITERATION_TIMES,
    "Of the event `validation_metrics_update`; the times are absent where no iteration was completed.",
)
TestingMetricsUpdateAttributes = _kind(
    "TestingMetricsUpdateAttributes",
    "current_iteration interval",
    doc="Of the event `testing_metrics_update`.",
)
SaveCheckpointSuccessEventAttributes = _kind(
    "SaveCheckpointSuccessEventAttributes",
    """
    checkpoint_strategy current_iteration first_successful_save_checkpoint_timestamp_sec
    latest_successful_save_checkpoint_timestamp_sec save_checkpoint_success_count productive_train_iterations
    productive_train_samples productive_train_iterations_sec productive_validation_iterations_sec
    """,
    "productive_train_tflops checkpoint_size checkpoint_directory training_start_timestamp_sec",
    "Of the event `save_checkpoint_success`: what is safe now.",
)
SyncCheckpointMetricsUpdateAttributes = _kind(
    "SyncCheckpointMetricsUpdateAttributes",
    """
    save_checkpoint_sync_time_total_sec save_checkpoint_sync_time_min_sec save_checkpoint_sync_time_max_sec
    """,
    doc="Of the event `sync_checkpoint_metrics_update`: the saves' seconds on the main thread, of either strategy.",
)
