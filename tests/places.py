"""Paths of the project, its tests and test data."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parent
PROJECT = TESTS.parent
DATA = TESTS / "data"
