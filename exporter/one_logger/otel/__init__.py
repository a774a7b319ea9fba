"""OpenTelemetry: compatibility module for `nv_one_logger.otel`."""
