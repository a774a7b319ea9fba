"""Exposition of metric families as text, OpenMetrics and protobuf."""
