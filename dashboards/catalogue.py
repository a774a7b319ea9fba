"""All dashboards, in the order in which they are offered."""

from __future__ import annotations

from dashboards import energy, fleet, gpus, node, ranks, run
from dashboards.board import Board

BOARDS: tuple[Board, ...] = tuple(each.board() for each in (run, ranks, gpus, energy, node, fleet))
