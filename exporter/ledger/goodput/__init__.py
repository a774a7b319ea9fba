"""Goodput: wall time of a training by purpose, and the state of the run."""
