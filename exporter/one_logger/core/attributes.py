"""Attributes: compatibility module for `nv_one_logger.core.attributes`."""

from __future__ import annotations

from exporter.recording.conversion import AttributeValue
from exporter.training.attributes import Attribute, Attributes

__all__ = ["Attribute", "AttributeValue", "Attributes"]
