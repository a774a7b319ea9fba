"""Version of the package, read by the package's metadata and by the code."""

__version__ = "0.1.0"
