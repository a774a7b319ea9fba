"""Internal modules of one-logger with names that jobs use. The layout is that of `nv_one_logger.core.internal`."""
