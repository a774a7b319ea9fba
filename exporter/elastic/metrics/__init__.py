"""Compatibility module of torchelastic's metrics: `import exporter.elastic.metrics as metrics`.

Values are published to Prometheus (`my_app` and `step_ms` as `my_app_step_seconds`) and delivered to the handlers of the group.
"""

from __future__ import annotations

from exporter.elastic.metrics import api
from exporter.elastic.metrics.api import *  # noqa: F403  # the same names as in torch

__all__ = ["initialize_metrics"]
__all__ += api.__all__


def initialize_metrics(cfg: api.MetricsConfig | None = None) -> None:
    """Do nothing, as in torch, where launchers call this function and packages replace it."""
