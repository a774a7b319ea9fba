"""Core of one-logger. Same layout as `nv_one_logger.core`."""
