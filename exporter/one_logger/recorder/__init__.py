"""Recorders: compatibility module for `nv_one_logger.recorder`."""
