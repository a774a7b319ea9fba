"""torchelastic's metrics, name for name: `import exporter.elastic.metrics as metrics`.

Values go to Prometheus (`my_app` and `step_ms` as `my_app_step_seconds`), and to the handlers of their group.
"""

from __future__ import annotations

from exporter.elastic.metrics import api
from exporter.elastic.metrics.api import *  # noqa: F403  # name for name

__all__ = ["initialize_metrics"]
__all__ += api.__all__


def initialize_metrics(cfg: api.MetricsConfig | None = None) -> None:
    """Do nothing, as in torch, where launchers call it and packages replace it."""
