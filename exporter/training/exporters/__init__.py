"""Exporters of spans: where a job's spans, events and errors go besides Prometheus.

Used in the training process. Each runs on a thread of its own (`exporter.training.delivery`) and may be the user's.
"""

from __future__ import annotations

from exporter.training.exporters.base import Exporter
from exporter.training.exporters.file import FileExporter
from exporter.training.exporters.logger import LoggerExporter

__all__ = ["Exporter", "FileExporter", "LoggerExporter"]
