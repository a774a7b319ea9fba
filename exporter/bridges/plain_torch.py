"""Bridge to training loops without a framework."""

from __future__ import annotations

from exporter.bridges.torch_loop import install

__all__ = ["install"]
