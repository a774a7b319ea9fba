"""Core of one-logger. The layout is that of `nv_one_logger.core`."""
