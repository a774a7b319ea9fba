"""Bridge to torchelastic: metrics and events of torchrun's agent and workers."""

from __future__ import annotations

from exporter.elastic.bridge import install

__all__ = ["install"]
