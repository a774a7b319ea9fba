"""Checks of what the JSON of a state file holds: each takes a value as its type, or refuses it.

Used in the sidecar by what reads the ledger's files back. Pure functions: whatever one of them is given, it returns a
value of its type or raises `ValueError`, which makes the file a damaged one.
"""

from __future__ import annotations

from math import isfinite


def refuse_constant(name: str) -> None:
    """Refuse NaN and the infinities, which JSON has not and Python's reader takes.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"{name} is no number")


def text(found: object) -> str:
    """Take text."""
    if type(found) is not str:
        raise ValueError(f"{type(found).__name__} where text belongs")
    return found


def count(found: object) -> int:
    """Take a whole number that is not negative."""
    if type(found) is not int or found < 0:
        raise ValueError("not a whole number of at least 0")
    return found


def number(found: object) -> float:
    """Take a finite number."""
    if isinstance(found, bool) or not isinstance(found, int | float) or not isfinite(found):
        raise ValueError("not a finite number")
    return float(found)
