"""Core of one-logger: compatibility module for `nv_one_logger.core`."""
