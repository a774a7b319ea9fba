"""What a framework knows of this process's place among the ranks, where the environment says nothing or something else.

Used in the training process. Lightning's own launchers, for one, start ranks without `RANK`.
"""

from __future__ import annotations

import exporter
from exporter.recording.identity import identity


def tell_rank(rank: int) -> None:
    """Record under a rank from now on."""
    if identity().rank != rank:
        exporter.configure(rank=rank)
