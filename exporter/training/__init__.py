"""The face of training telemetry: what a job does, told by blocks, callbacks and numbers; one-logger's names and more.

Used in the training process; `import exporter` does not load it, the first use of `exporter.training` does. A job written
for one-logger runs with only its imports changed. Blocks and callbacks note marks (`exporter.training.hot`,
`exporter.training.calls`); the recording thread interprets them (`exporter.training.interpreter`), fills the families and
hands spans and events to the exporters. Nothing here raises into the job, unless it chose so, waits, or touches a file.
"""

from __future__ import annotations

from importlib import import_module

from exporter.recording.late import LATE_IMPORTS
from exporter.training.callbacks import (
    on_app_end,
    on_app_start,
    on_dataloader_init_end,
    on_dataloader_init_start,
    on_distributed_init_end,
    on_distributed_init_start,
    on_load_checkpoint_end,
    on_load_checkpoint_start,
    on_model_init_end,
    on_model_init_start,
    on_optimizer_init_end,
    on_optimizer_init_start,
    on_save_checkpoint_end,
    on_save_checkpoint_start,
    on_save_checkpoint_success,
    on_testing_end,
    on_testing_start,
    on_train_end,
    on_train_start,
    on_training_single_iteration_end,
    on_training_single_iteration_start,
    on_validation_end,
    on_validation_single_iteration_end,
    on_validation_single_iteration_start,
    on_validation_start,
)
from exporter.training.contexts import (
    application,
    background,
    batches,
    checkpoint_load,
    checkpoint_save,
    dataloader_init,
    distributed_init,
    model_init,
    optimizer_init,
    span,
    testing_loop,
    training_loop,
    validation_loop,
)
from exporter.training.hot import (
    data_loading,
    model_backward,
    model_forward,
    optimizer_update,
    phase,
    testing_iteration,
    training_iteration,
    validation_iteration,
    zero_grad,
)
from exporter.training.inventory import HOMES
from exporter.training.recording import TRAINING as _TRAINING  # noqa: F401  # the process's recording begins with it
from exporter.training.telling import (
    checkpoint_saved,
    describe,
    interruption,
    record,
    skipped_step,
    step,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from exporter.training.attributes import (
        CheckpointSaveSpanAttributes,
        OneLoggerInitializationAttributes,
        SaveCheckpointSuccessEventAttributes,
        SyncCheckpointMetricsUpdateAttributes,
        TestingMetricsUpdateAttributes,
        TrainingLoopAttributes,
        TrainingMetricsUpdateAttributes,
        TrainingTelemetryAttributes,
        ValidationMetricsUpdateAttributes,
    )
    from exporter.training.configuration import (
        LoggerConfig,
        OneLoggerConfig,
        TelemetryConfig,
        TrainingTelemetryConfig,
    )
    from exporter.training.events import (
        ErrorEvent,
        Event,
        TelemetryDataError,
    )
    from exporter.training.exporters.base import (
        BaseExporter,
        Exporter,
        ExportError,
    )
    from exporter.training.exporters.configuration import (
        ExporterConfig,
        ExporterConfigManager,
    )
    from exporter.training.exporters.file import (
        FileExporter,
    )
    from exporter.training.exporters.json_records import (
        BaseJsonExporter,
    )
    from exporter.training.exporters.logger import (
        LoggerExporter,
    )
    from exporter.training.names import (
        DEFAULT_SPANS_EXPORT_BLACKLIST,
        ApplicationType,
        CheckPointStrategy,
        CheckPointType,
        EventName,
        ExportCustomizationMode,
        NVTXColor,
        OneLoggerErrorHandlingStrategy,
        RecordType,
        SpanName,
        StandardEventAttributeName,
        StandardEventName,
        StandardSpanAttributeName,
        StandardSpanName,
        StandardTrainingJobEventName,
        StandardTrainingJobSpanName,
    )
    from exporter.training.provider import (
        OneLoggerProvider,
    )
    from exporter.training.recorder import (
        DefaultRecorder,
        Recorder,
    )
    from exporter.training.spans import (
        Span,
    )
    from exporter.training.timed import (
        timed_span,
    )
    from exporter.training.timers import (
        MetricSummarizer,
        MultiWindowTimer,
        Timer,
    )
    from exporter.training.training_recorder import (
        TrainingRecorder,
        get_recorder,
    )
    from exporter.training.training_telemetry_provider import (
        TrainingTelemetryProvider,
    )
    from exporter.training.types import (
        Attribute,
        Attributes,
        AttributeValue,
        OneLoggerError,
        TracingTimestamp,
        assert_that,
    )


def __getattr__(name: str) -> object:
    """Load what only some jobs use at its first use."""
    home = HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'exporter.training' has no attribute {name!r}")
    with LATE_IMPORTS:
        found: object = getattr(import_module(home), name)
    globals()[name] = found
    return found


__all__ = [
    "DEFAULT_SPANS_EXPORT_BLACKLIST",
    "ApplicationType",
    "Attribute",
    "AttributeValue",
    "Attributes",
    "BaseExporter",
    "BaseJsonExporter",
    "CheckPointStrategy",
    "CheckPointType",
    "CheckpointSaveSpanAttributes",
    "DefaultRecorder",
    "ErrorEvent",
    "Event",
    "EventName",
    "ExportCustomizationMode",
    "ExportError",
    "Exporter",
    "ExporterConfig",
    "ExporterConfigManager",
    "FileExporter",
    "LoggerConfig",
    "LoggerExporter",
    "MetricSummarizer",
    "MultiWindowTimer",
    "NVTXColor",
    "OneLoggerConfig",
    "OneLoggerError",
    "OneLoggerErrorHandlingStrategy",
    "OneLoggerInitializationAttributes",
    "OneLoggerProvider",
    "RecordType",
    "Recorder",
    "SaveCheckpointSuccessEventAttributes",
    "Span",
    "SpanName",
    "StandardEventAttributeName",
    "StandardEventName",
    "StandardSpanAttributeName",
    "StandardSpanName",
    "StandardTrainingJobEventName",
    "StandardTrainingJobSpanName",
    "SyncCheckpointMetricsUpdateAttributes",
    "TelemetryConfig",
    "TelemetryDataError",
    "TestingMetricsUpdateAttributes",
    "Timer",
    "TracingTimestamp",
    "TrainingLoopAttributes",
    "TrainingMetricsUpdateAttributes",
    "TrainingRecorder",
    "TrainingTelemetryAttributes",
    "TrainingTelemetryConfig",
    "TrainingTelemetryProvider",
    "ValidationMetricsUpdateAttributes",
    "application",
    "assert_that",
    "background",
    "batches",
    "checkpoint_load",
    "checkpoint_save",
    "checkpoint_saved",
    "data_loading",
    "dataloader_init",
    "describe",
    "distributed_init",
    "get_recorder",
    "interruption",
    "model_backward",
    "model_forward",
    "model_init",
    "on_app_end",
    "on_app_start",
    "on_dataloader_init_end",
    "on_dataloader_init_start",
    "on_distributed_init_end",
    "on_distributed_init_start",
    "on_load_checkpoint_end",
    "on_load_checkpoint_start",
    "on_model_init_end",
    "on_model_init_start",
    "on_optimizer_init_end",
    "on_optimizer_init_start",
    "on_save_checkpoint_end",
    "on_save_checkpoint_start",
    "on_save_checkpoint_success",
    "on_testing_end",
    "on_testing_start",
    "on_train_end",
    "on_train_start",
    "on_training_single_iteration_end",
    "on_training_single_iteration_start",
    "on_validation_end",
    "on_validation_single_iteration_end",
    "on_validation_single_iteration_start",
    "on_validation_start",
    "optimizer_init",
    "optimizer_update",
    "phase",
    "record",
    "skipped_step",
    "span",
    "step",
    "testing_iteration",
    "testing_loop",
    "timed_span",
    "training_iteration",
    "training_loop",
    "validation_iteration",
    "validation_loop",
    "zero_grad",
]
