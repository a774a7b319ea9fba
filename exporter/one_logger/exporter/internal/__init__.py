"""Internal modules of one-logger's exporters with names that jobs use. The layout is that of `nv_one_logger.exporter.internal`."""
