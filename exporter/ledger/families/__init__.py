"""Families of the job: specifications, and the code that adds the families that no Stat fills."""

from __future__ import annotations

IDENTITY_LABELS = ("run", "rank", "worker", "role")
"""Labels that identify a process, in the order of the label values of a sample."""
RUN_LABELS = ("run",)
"""Labels of a family whose value rank 0 provides for the whole run."""
