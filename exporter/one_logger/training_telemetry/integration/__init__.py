"""Integrations of training frameworks. Same layout as `nv_one_logger.training_telemetry.integration`."""
