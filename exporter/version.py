"""The version, in the one place that both the package's metadata and the running code read."""

__version__ = "0.1.0"
