"""All dashboards, in the order in which they are offered."""

from __future__ import annotations

from dashboards import gpus, node, own
from dashboards.board import Board

BOARDS: tuple[Board, ...] = (gpus.board(), node.board(), own.board())
