"""Internal modules of one-logger with names that jobs use. Same layout as `nv_one_logger.core.internal`."""
