"""The families of the job, each beside the code that fills it."""

from __future__ import annotations

IDENTITY_LABELS = ("run", "rank", "worker", "role")
"""The labels that the ledger puts on every series of a process, in the order of the samples."""
