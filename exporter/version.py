"""Version of the package, which the package's metadata and the code read."""

__version__ = "0.1.0"
