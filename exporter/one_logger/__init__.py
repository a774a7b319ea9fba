"""One-logger's module, name for name, without its dependencies; `exporter.training` offers all of it too.

What is told goes the way of `exporter.training`, which knows this package only as its telemetry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from exporter.errors import ExportError as ExportError
from exporter.errors import OneLoggerError as OneLoggerError
from exporter.one_logger import callbacks as _callbacks
from exporter.one_logger.callbacks import *  # noqa: F403  # made from the table of kinds
from exporter.one_logger.config import *  # noqa: F403
from exporter.one_logger.exporters import *  # noqa: F403
from exporter.one_logger.names import *  # noqa: F403
from exporter.one_logger.provider import *  # noqa: F403
from exporter.one_logger.recorder import *  # noqa: F403
from exporter.one_logger.timers import *  # noqa: F403
from exporter.training.attributes import *  # noqa: F403
from exporter.training.spans import *  # noqa: F403

_NAMES = """
    ApplicationType Attribute AttributeValue Attributes BaseExporter BaseJsonExporter CheckPointStrategy CheckPointType
    CheckpointSaveSpanAttributes DEFAULT_SPANS_EXPORT_BLACKLIST DefaultRecorder ErrorEvent Event EventName
    ExportCustomizationMode ExportError Exporter ExporterConfig ExporterConfigManager FileExporter LoggerConfig
    LoggerExporter MetricSummarizer MultiWindowTimer NVTXColor OneLoggerConfig OneLoggerError
    OneLoggerErrorHandlingStrategy OneLoggerInitializationAttributes OneLoggerProvider RecordType Recorder
    SaveCheckpointSuccessEventAttributes Span SpanName StandardEventAttributeName StandardEventName
    StandardSpanAttributeName StandardSpanName StandardTrainingJobEventName StandardTrainingJobSpanName
    SyncCheckpointMetricsUpdateAttributes TelemetryConfig TelemetryDataError TestingMetricsUpdateAttributes Timer
    TracingTimestamp TrainingLoopAttributes TrainingMetricsUpdateAttributes TrainingRecorder
    TrainingTelemetryAttributes TrainingTelemetryConfig TrainingTelemetryProvider ValidationMetricsUpdateAttributes
    assert_that get_recorder timed_span
"""
if not TYPE_CHECKING:
    __all__ = [name for names in (_NAMES.split(), _callbacks.__all__) for name in names]
