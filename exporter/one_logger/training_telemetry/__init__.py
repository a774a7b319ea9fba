"""Training telemetry. The layout is that of `nv_one_logger.training_telemetry`."""
