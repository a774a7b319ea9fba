"""List of all dashboards."""

from __future__ import annotations

from dashboards import energy, fleet, gpus, node, ranks, run
from dashboards.board import Board

BOARDS: tuple[Board, ...] = tuple(module.board() for module in (run, ranks, gpus, energy, node, fleet))
