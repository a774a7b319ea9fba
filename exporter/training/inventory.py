"""Where each name of `exporter.training` lives: read at its first use, and by the tests of the documentation.

Used in the training process. Every name of one-logger's API is here, so that any import of it may be replaced by
`from exporter.training import …`, whatever module it came from. What a job does not use is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

_NAMES: Mapping[str, str] = {
    "attributes": (
        "CheckpointSaveSpanAttributes OneLoggerInitializationAttributes SaveCheckpointSuccessEventAttributes"
        " SyncCheckpointMetricsUpdateAttributes TestingMetricsUpdateAttributes TrainingLoopAttributes"
        " TrainingMetricsUpdateAttributes TrainingTelemetryAttributes ValidationMetricsUpdateAttributes"
    ),
    "callbacks": (
        "on_app_end on_app_start on_dataloader_init_end on_dataloader_init_start on_distributed_init_end"
        " on_distributed_init_start on_load_checkpoint_end on_load_checkpoint_start on_model_init_end"
        " on_model_init_start on_optimizer_init_end on_optimizer_init_start on_save_checkpoint_end"
        " on_save_checkpoint_start on_save_checkpoint_success on_testing_end on_testing_start on_train_end"
        " on_train_start on_training_single_iteration_end on_training_single_iteration_start on_validation_end"
        " on_validation_single_iteration_end on_validation_single_iteration_start on_validation_start"
    ),
    "configuration": "LoggerConfig OneLoggerConfig TelemetryConfig TrainingTelemetryConfig",
    "contexts": (
        "application background batches checkpoint_load checkpoint_save dataloader_init distributed_init model_init"
        " optimizer_init span testing_loop training_loop validation_loop"
    ),
    "events": "ErrorEvent Event TelemetryDataError",
    "exporters.base": "BaseExporter ExportError Exporter",
    "exporters.configuration": "ExporterConfig ExporterConfigManager",
    "exporters.file": "FileExporter",
    "exporters.json_records": "BaseJsonExporter",
    "exporters.logger": "LoggerExporter",
    "hot": (
        "data_loading model_backward model_forward optimizer_update phase testing_iteration training_iteration"
        " validation_iteration zero_grad"
    ),
    "names": (
        "ApplicationType CheckPointStrategy CheckPointType DEFAULT_SPANS_EXPORT_BLACKLIST EventName"
        " ExportCustomizationMode NVTXColor OneLoggerErrorHandlingStrategy RecordType SpanName"
        " StandardEventAttributeName StandardEventName StandardSpanAttributeName StandardSpanName"
        " StandardTrainingJobEventName StandardTrainingJobSpanName"
    ),
    "provider": "OneLoggerProvider",
    "telling": "checkpoint_saved describe interruption record skipped_step step",
    "recorder": "DefaultRecorder Recorder",
    "spans": "Span",
    "timed": "timed_span",
    "timers": "MetricSummarizer MultiWindowTimer Timer",
    "training_recorder": "TrainingRecorder get_recorder",
    "training_telemetry_provider": "TrainingTelemetryProvider",
    "types": "Attribute AttributeValue Attributes OneLoggerError TracingTimestamp assert_that",
}

HOMES: Mapping[str, str] = {
    name: f"exporter.training.{module}" for module, names in _NAMES.items() for name in names.split()
}
"""Public name → module."""

PATHS: Mapping[str, str] = {
    "nv_one_logger.api": "exporter.training.config",
    "nv_one_logger.api.config": "exporter.training.config",
    "nv_one_logger.api.one_logger_provider": "exporter.training.provider",
    "nv_one_logger.api.recorder": "exporter.training.recorder",
    "nv_one_logger.api.telemetry_config": "exporter.training.config",
    "nv_one_logger.api.timed_span": "exporter.training.timed",
    "nv_one_logger.core.attributes": "exporter.training.types",
    "nv_one_logger.core.event": "exporter.training.events",
    "nv_one_logger.core.exceptions": "exporter.training.types",
    "nv_one_logger.core.internal.metric_summarizer": "exporter.training.timers",
    "nv_one_logger.core.internal.multi_window_timer": "exporter.training.timers",
    "nv_one_logger.core.span": "exporter.training.spans",
    "nv_one_logger.core.time": "exporter.training.timers",
    "nv_one_logger.exporter": "exporter.training.exporters",
    "nv_one_logger.exporter.base_json_exporter": "exporter.training.exporters.json_records",
    "nv_one_logger.exporter.export_config_manager": "exporter.training.exporters.configuration",
    "nv_one_logger.exporter.exporter": "exporter.training.exporters.base",
    "nv_one_logger.exporter.exporter_config": "exporter.training.exporters.configuration",
    "nv_one_logger.exporter.file_exporter": "exporter.training.exporters.file",
    "nv_one_logger.exporter.internal.record_type": "exporter.training.names",
    "nv_one_logger.exporter.logger_exporter": "exporter.training.exporters.logger",
    "nv_one_logger.otel.exporter.otel_exporter": "exporter.bridges.opentelemetry",
    "nv_one_logger.recorder.default_recorder": "exporter.training.recorder",
    "nv_one_logger.training_telemetry.api": "exporter.training",
    "nv_one_logger.training_telemetry.api.attributes": "exporter.training.attributes",
    "nv_one_logger.training_telemetry.api.callbacks": "exporter.training.callbacks",
    "nv_one_logger.training_telemetry.api.checkpoint": "exporter.training.checkpoint",
    "nv_one_logger.training_telemetry.api.config": "exporter.training.config",
    "nv_one_logger.training_telemetry.api.context": "exporter.training.context",
    "nv_one_logger.training_telemetry.api.events": "exporter.training.events",
    "nv_one_logger.training_telemetry.api.spans": "exporter.training.spans",
    "nv_one_logger.training_telemetry.api.training_recorder": "exporter.training.training_recorder",
    "nv_one_logger.training_telemetry.api.training_telemetry_provider": (
        "exporter.training.training_telemetry_provider"
    ),
}
"""One-logger's module → the module here that has its public names, for those who would rather keep the modules."""
