"""Exporter to OpenTelemetry. The layout is that of `nv_one_logger.otel.exporter`."""
