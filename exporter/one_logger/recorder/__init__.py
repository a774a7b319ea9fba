"""Recorders. The layout is that of `nv_one_logger.recorder`."""
