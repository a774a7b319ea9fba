"""Summaries of numbers: compatibility module for `nv_one_logger.core.internal.metric_summarizer`."""

from __future__ import annotations

from exporter.one_logger.timers import MetricSummarizer

__all__ = ["MetricSummarizer"]
