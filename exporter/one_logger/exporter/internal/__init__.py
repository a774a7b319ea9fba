"""Internal modules of one-logger's exporters with names that jobs use: compatibility module for `nv_one_logger.exporter.internal`."""
