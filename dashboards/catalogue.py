"""All dashboards, in the order in which they are offered."""

from __future__ import annotations

from dashboards import energy, fleet, gpus, node, ranks, run
from dashboards.board import Board

BOARDS: tuple[Board, ...] = (
    run.board(),
    ranks.board(),
    gpus.board(),
    energy.board(),
    node.board(),
    fleet.board(),
)
