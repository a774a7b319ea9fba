"""Families of the job, next to the code that sets their values."""

from __future__ import annotations

IDENTITY_LABELS = ("run", "rank", "worker", "role")
"""Labels of every series of a process, in the order of the samples."""
RUN_LABELS = ("run",)
"""Labels of a family of a run: rank 0 provides the value."""
