"""Enumerations of one-logger: names of spans, events and attributes, and settings."""

from __future__ import annotations

import enum

from exporter.training.attributes import SpanName, StrEnum

__all__ = [
    "DEFAULT_SPANS_EXPORT_BLACKLIST",
    "ApplicationType",
    "CheckPointStrategy",
    "CheckPointType",
    "ExportCustomizationMode",
    "NVTXColor",
    "OneLoggerErrorHandlingStrategy",
    "RecordType",
    "StandardEventAttributeName",
    "StandardEventName",
    "StandardSpanAttributeName",
    "StandardSpanName",
    "StandardTrainingJobEventName",
    "StandardTrainingJobSpanName",
]


class StandardSpanName(StrEnum):
    """Names of spans of any application."""

    APPLICATION = "application"


class StandardTrainingJobSpanName(StrEnum):
    """Names of spans of a training job."""

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
    TESTING_SINGLE_ITERATION = "TESTING_SINGLE_ITERATION"  # upper case in one-logger, too
    DATA_LOADING = "data_loading"
    MODEL_FORWARD = "model_forward"
    ZERO_GRAD = "zero_grad"
    MODEL_BACKWARD = "model_backward"
    OPTIMIZER_UPDATE = "optimizer_update"


class StandardEventName(StrEnum):
    """Names of events of any span."""

    SPAN_START = "span_start"
    SPAN_STOP = "span_stop"
    ERROR = "error"
    TELEMETRY_DATA_ERROR = "telemetry_data_error"


class StandardTrainingJobEventName(StrEnum):
    """Names of events of a training job."""

    ONE_LOGGER_INITIALIZATION = "one_logger_initialization"
    UPDATE_TRAINING_TELEMETRY_CONFIG = "update_training_telemetry_config"
    TRAINING_METRICS_UPDATE = "training_metrics_update"
    VALIDATION_METRICS_UPDATE = "validation_metrics_update"
    TESTING_METRICS_UPDATE = "testing_metrics_update"
    SAVE_CHECKPOINT_SUCCESS = "save_checkpoint_success"
    SYNC_CHECKPOINT_METRICS_UPDATE = "sync_checkpoint_metrics_update"


class StandardSpanAttributeName(StrEnum):
    """Names of attributes of any span."""

    DURATION_MSEC = "duration_msec"
    NVTX_COLOR = "nvtx_color"


class StandardEventAttributeName(StrEnum):
    """Names of attributes of any event."""

    TIMESTAMP_MSEC = "timestamp_msec"
    ERROR_MESSAGE = "error_message"
    EXCEPTION_TYPE = "exception_type"
    EXCEPTION_MESSAGE = "exception_message"
    EXCEPTION_TRACEBACK = "exception_traceback"
    TELEMETRY_DATA_ERROR_TYPE = "telemetry_data_error_type"


class NVTXColor(StrEnum):
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


class CheckPointStrategy(StrEnum):
    """Strategy of a save. SYNC: the checkpoint is complete when the span of the save ends. ASYNC: later."""

    SYNC = "sync"
    ASYNC = "async"


class CheckPointType(StrEnum):
    """Storage of a checkpoint. GLOBAL: storage shared by all nodes. LOCAL: storage of the node."""

    GLOBAL = "global"
    LOCAL = "local"


class ApplicationType(StrEnum):
    """Kinds of applications; a training job is TRAINING."""

    TRAINING = "training"
    VALIDATION = "validation"
    BATCH_INFERENCE = "batch_inference"
    ONLINE_INFERENCE = "online_inference"
    DATA_PROCESSING = "data_processing"


class OneLoggerErrorHandlingStrategy(enum.Enum):
    """Reaction to an invalid call: raise OneLoggerError, or ignore the call. The call is counted and logged in both cases."""

    PROPAGATE_EXCEPTIONS = "propagate_exceptions"
    DISABLE_QUIETLY_AND_REPORT_METRIC_ERROR = "disable_quietly_and_report_metric_error"


class ExportCustomizationMode(enum.Enum):
    """Selection of the spans that are exported together with their events."""

    EXPORT_ALL_SPANS = 1
    WHITELIST_SPANS = 2
    BLACKLIST_SPANS = 3


class RecordType(enum.Enum):
    """Values of the field `type` of a JSON record."""

    START = "start"
    STOP = "stop"
    COMPLETE = "complete"
    EVENT = "event"
    APPLICATION_ERROR = "application_error"
    TELEMETRY_DATA_ERROR = "telemetry_data_error"


DEFAULT_SPANS_EXPORT_BLACKLIST: list[SpanName] = [
    StandardTrainingJobSpanName.TESTING_SINGLE_ITERATION,
    StandardTrainingJobSpanName.DATA_LOADING,
    StandardTrainingJobSpanName.MODEL_BACKWARD,
    StandardTrainingJobSpanName.MODEL_FORWARD,
    StandardTrainingJobSpanName.OPTIMIZER_UPDATE,
    StandardTrainingJobSpanName.TRAINING_SINGLE_ITERATION,
    StandardTrainingJobSpanName.VALIDATION_SINGLE_ITERATION,
    StandardTrainingJobSpanName.ZERO_GRAD,
]
"""Short and frequent spans that are not exported by default."""
