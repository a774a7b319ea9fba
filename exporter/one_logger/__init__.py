"""One-logger's module, name for name, without its dependencies; `exporter.training` offers all of it too.

Used in the training process. Configuration and providers say who a job is and what is exported; callbacks, blocks and
recorders tell what it does; exporters take spans and events elsewhere. What is told goes the way of
`exporter.training`, which knows this package only as its telemetry.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from exporter.errors import ExportError as ExportError
from exporter.errors import OneLoggerError as OneLoggerError
from exporter.one_logger.attributes import CheckpointSaveSpanAttributes as CheckpointSaveSpanAttributes
from exporter.one_logger.attributes import (
    OneLoggerInitializationAttributes as OneLoggerInitializationAttributes,
)
from exporter.one_logger.attributes import (
    SaveCheckpointSuccessEventAttributes as SaveCheckpointSuccessEventAttributes,
)
from exporter.one_logger.attributes import (
    SyncCheckpointMetricsUpdateAttributes as SyncCheckpointMetricsUpdateAttributes,
)
from exporter.one_logger.attributes import TestingMetricsUpdateAttributes as TestingMetricsUpdateAttributes
from exporter.one_logger.attributes import TrainingLoopAttributes as TrainingLoopAttributes
from exporter.one_logger.attributes import TrainingMetricsUpdateAttributes as TrainingMetricsUpdateAttributes
from exporter.one_logger.attributes import TrainingTelemetryAttributes as TrainingTelemetryAttributes
from exporter.one_logger.attributes import (
    ValidationMetricsUpdateAttributes as ValidationMetricsUpdateAttributes,
)
from exporter.one_logger.callbacks import *  # noqa: F403  # made from the table of kinds
from exporter.one_logger.config import LoggerConfig as LoggerConfig
from exporter.one_logger.config import OneLoggerConfig as OneLoggerConfig
from exporter.one_logger.config import TelemetryConfig as TelemetryConfig
from exporter.one_logger.config import TrainingTelemetryConfig as TrainingTelemetryConfig
from exporter.one_logger.exporter_config import ExporterConfig as ExporterConfig
from exporter.one_logger.exporter_config import ExporterConfigManager as ExporterConfigManager
from exporter.one_logger.exporters import BaseExporter as BaseExporter
from exporter.one_logger.exporters import BaseJsonExporter as BaseJsonExporter
from exporter.one_logger.exporters import Exporter as Exporter
from exporter.one_logger.exporters import FileExporter as FileExporter
from exporter.one_logger.exporters import LoggerExporter as LoggerExporter
from exporter.one_logger.names import DEFAULT_SPANS_EXPORT_BLACKLIST as DEFAULT_SPANS_EXPORT_BLACKLIST
from exporter.one_logger.names import ApplicationType as ApplicationType
from exporter.one_logger.names import CheckPointStrategy as CheckPointStrategy
from exporter.one_logger.names import CheckPointType as CheckPointType
from exporter.one_logger.names import ExportCustomizationMode as ExportCustomizationMode
from exporter.one_logger.names import NVTXColor as NVTXColor
from exporter.one_logger.names import OneLoggerErrorHandlingStrategy as OneLoggerErrorHandlingStrategy
from exporter.one_logger.names import RecordType as RecordType
from exporter.one_logger.names import StandardEventAttributeName as StandardEventAttributeName
from exporter.one_logger.names import StandardEventName as StandardEventName
from exporter.one_logger.names import StandardSpanAttributeName as StandardSpanAttributeName
from exporter.one_logger.names import StandardSpanName as StandardSpanName
from exporter.one_logger.names import StandardTrainingJobEventName as StandardTrainingJobEventName
from exporter.one_logger.names import StandardTrainingJobSpanName as StandardTrainingJobSpanName
from exporter.one_logger.provider import OneLoggerProvider as OneLoggerProvider
from exporter.one_logger.provider import TrainingTelemetryProvider as TrainingTelemetryProvider
from exporter.one_logger.recorder import DefaultRecorder as DefaultRecorder
from exporter.one_logger.recorder import Recorder as Recorder
from exporter.one_logger.recorder import TrainingRecorder as TrainingRecorder
from exporter.one_logger.recorder import get_recorder as get_recorder
from exporter.one_logger.recorder import timed_span as timed_span
from exporter.one_logger.timers import MetricSummarizer as MetricSummarizer
from exporter.one_logger.timers import MultiWindowTimer as MultiWindowTimer
from exporter.one_logger.timers import Timer as Timer
from exporter.training.attributes import Attribute as Attribute
from exporter.training.attributes import Attributes as Attributes
from exporter.training.attributes import AttributeValue as AttributeValue
from exporter.training.attributes import EventName as EventName
from exporter.training.attributes import SpanName as SpanName
from exporter.training.attributes import TracingTimestamp as TracingTimestamp
from exporter.training.attributes import assert_that as assert_that
from exporter.training.events import ErrorEvent as ErrorEvent
from exporter.training.events import Event as Event
from exporter.training.events import TelemetryDataError as TelemetryDataError
from exporter.training.spans import Span as Span

if not TYPE_CHECKING:
    __all__ = [
        name
        for name, value in sorted(globals().items())
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and name not in {"TYPE_CHECKING", "ModuleType", "annotations"}
    ]
