"""Goodput: what the wall time of a training goes into, and what state it is in."""
