"""All dashboards, in the order in which they are offered."""

from __future__ import annotations

from dashboards import compare, energy, fleet, gpus, node, own, ranks, run
from dashboards.board import Board

BOARDS: tuple[Board, ...] = (
    run.board(),
    ranks.board(),
    gpus.board(),
    energy.board(),
    node.board(),
    compare.board(),
    own.board(),
    fleet.board(),
)
