"""Compatibility module of torchelastic's metrics: `import exporter.elastic.metrics as metrics`.

Values are recorded for Prometheus (the group `my_app` and the name `step_ms` as `my_app_step_seconds`), and delivered to the handlers
of the group.
"""

from __future__ import annotations

from exporter.elastic.metrics import api
from exporter.elastic.metrics.api import *  # noqa: F403  # the same names as in torch

__all__ = ["initialize_metrics"]
__all__ += api.__all__


def initialize_metrics(cfg: api.MetricsConfig | None = None) -> None:
    """Do nothing, as in torch. Launchers call this function, and packages may replace it."""
