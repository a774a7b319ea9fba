"""torchelastic's metrics, name for name: `import exporter.elastic.metrics as metrics`.

Used in the training process and in torchrun's agent. Every value goes to Prometheus as the family `<group>_<name>`, with
its unit where Prometheus wants it (`my_app` and `step_ms` become `my_app_step_seconds`), and to the handlers that are
configured for its group. The group `torchelastic` is torchelastic's own, and the one of whatever names no group.
"""

from __future__ import annotations

from exporter.elastic.metrics import api
from exporter.elastic.metrics.api import *  # noqa: F403  # name for name

__all__ = ["initialize_metrics"]
__all__ += api.__all__


def initialize_metrics(cfg: api.MetricsConfig | None = None) -> None:
    """Do nothing, as in torch, where launchers call it and packages replace it."""
