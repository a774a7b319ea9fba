"""YAML configuration files: options of dataclasses, and a loader that names file, line and column of every problem.

Runs in the sidecar. `options` says what a dataclass's field may hold, `nodes` reads YAML into nodes that know their
place, `loader` puts the two together. What this exporter's own configuration holds is in `cli/configuration.py`.
"""
