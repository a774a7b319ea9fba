"""YAML configuration files: options of dataclasses, and a loader that names file, line and column of a problem."""
