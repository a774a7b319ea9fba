"""The families of the job, each beside the code that fills it."""

from __future__ import annotations

IDENTITY_LABELS = ("run", "rank", "worker", "role")
"""Labels of every series of a process, in the order of the samples."""
RUN_LABELS = ("run",)
"""Labels of a family of a run: rank 0 provides the value."""
