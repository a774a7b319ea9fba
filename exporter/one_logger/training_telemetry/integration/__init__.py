"""Integrations of training frameworks: compatibility module for `nv_one_logger.training_telemetry.integration`."""
