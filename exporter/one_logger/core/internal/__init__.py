"""Internal modules of one-logger with names that jobs use: compatibility module for `nv_one_logger.core.internal`."""
