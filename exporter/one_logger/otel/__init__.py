"""OpenTelemetry. Same layout as `nv_one_logger.otel`."""
