"""Training telemetry: compatibility module for `nv_one_logger.training_telemetry`."""
