"""The vocabulary of training telemetry: names of spans, events and attributes, and the choices of its settings.

Used in the training process. Values only, one-logger's to the letter (they are what reaches a telemetry backend);
each member is a string and prints as its value.
"""

from __future__ import annotations

import enum

from exporter.training.attributes import Name, SpanName, name_of
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
    """What a telemetry call does when it is misused.

    Both count and log it. PROPAGATE_EXCEPTIONS, only where it was chosen explicitly, raises `OneLoggerError` at the
    call as well; the other goes on measuring.
    """

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
