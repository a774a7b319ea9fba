"""Integrations of training frameworks. The layout is that of `nv_one_logger.training_telemetry.integration`."""
