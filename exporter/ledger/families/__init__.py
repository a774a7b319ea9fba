"""Families of the job: specifications, and code for the families that no Stat fills."""

from __future__ import annotations

IDENTITY_LABELS = ("run", "rank", "worker", "role")
"""Labels that identify a worker slot of a rank, in the order of the label values of a sample. Successive processes share them."""
RUN_LABELS = ("run",)
"""Labels of a family whose value rank 0 provides for the whole run."""
