"""Recorders. Same layout as `nv_one_logger.recorder`."""
