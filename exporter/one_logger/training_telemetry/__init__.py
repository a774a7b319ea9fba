"""Training telemetry. Same layout as `nv_one_logger.training_telemetry`."""
