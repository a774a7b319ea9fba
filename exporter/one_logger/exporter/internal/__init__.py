"""Internal modules of one-logger's exporters with names that jobs use. Same layout as `nv_one_logger.exporter.internal`."""
