"""Checks of what the JSON of a feed file holds: each takes a value as its type, or refuses it.

Used in the sidecar by the decoders. Pure functions: whatever one of them is given, it returns a value that keeps its
promise or raises `FeedFormatError` (`UnicodeEncodeError` for half of a surrogate pair, which the decoder turns into
one).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, NoReturn, TypeVar

from exporter.errors import FeedFormatError
from exporter.feed.layout import MAX_COUNT

Parsed = TypeVar("Parsed")

LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
SLUG = re.compile(r"[a-z][a-z0-9_]{0,63}")

# Wider than what recording accepts: an older sidecar is to read a newer job.
MAX_NAME = 512
MAX_TEXT = 4096
MAX_LABELS = 64
MAX_REASONS = 64
MAX_TIME = 1e11
"""Three thousand years on either side of 1970: differences and sums of what is within stay finite."""


def refuse(message: str) -> NoReturn:
    """Say why a content makes no sense.

    Raises:
        FeedFormatError: `content`.
    """
    raise FeedFormatError(message, reason="content")


def take_counts(found: object) -> Mapping[str, int]:
    """Take counts by reason."""
    body = take_object(found)
    if len(body) > MAX_REASONS:
        refuse(f"more than {MAX_REASONS} reasons")
    return {take_matching(reason, SLUG): take_whole(count) for reason, count in body.items()}


def take_labels(found: object) -> tuple[tuple[str, str], ...]:
    """Take labels, each once."""
    pairs = []
    for pair in take_list(found, MAX_LABELS):
        name, value = take_list(pair, 2)
        pairs.append((take_matching(name, LABEL_NAME), take_text(value, MAX_TEXT)))
    if len(dict(pairs)) < len(pairs):
        refuse("a label twice")
    return tuple(pairs)


def take_object(found: object) -> dict[str, Any]:
    """Take an object."""
    if type(found) is not dict:
        refuse(f"{type(found).__name__} where an object belongs")
    return found


def take_list(found: object, at_most: int) -> list[Any]:
    """Take a list of a bounded length."""
    if type(found) is not list or len(found) > at_most:
        refuse(f"not a list of at most {at_most}")
    return found


def take_text(found: object, at_most: int) -> str:
    """Take text of a bounded length that can be published."""
    if type(found) is not str or len(found) > at_most:
        refuse(f"not a text of at most {at_most} characters")
    if "\0" in found:  # legal in an exposition, but tools take a page with it for a binary file
        refuse("a NUL character")
    found.encode()  # half of a surrogate pair raises
    return found


def take_matching(found: object, pattern: re.Pattern[str]) -> str:
    """Take a name."""
    if pattern.fullmatch(take_text(found, MAX_NAME)) is None:
        refuse(f"{str(found)[:80]!a} is no such name")
    return str(found)


def take_whole(found: object, *, at_least: int = 0) -> int:
    """Take a whole number."""
    if type(found) is not int or not at_least <= found <= MAX_COUNT:
        refuse(f"not a whole number from {at_least} to {MAX_COUNT}")
    return found


def take_number(found: object) -> float:
    """Take a finite number."""
    if type(found) is float and isfinite(found):
        return found
    if type(found) is int:
        return float(found)
    refuse("not a finite number")


def take_time(found: object) -> float:
    """Take a Unix time."""
    number = take_number(found)
    return number if abs(number) <= MAX_TIME else refuse("a time that is thousands of years away")


def take_at_least_zero(found: object) -> float:
    """Take a number that is not negative."""
    number = take_number(found)
    return number if number >= 0 else refuse("a negative number where none belongs")


def take_positive(found: object) -> float:
    """Take a number above 0."""
    number = take_number(found)
    return number if number > 0 else refuse("a number that is not above 0")


def take_flag(found: object) -> bool:
    """Take true or false."""
    return found if type(found) is bool else refuse("neither true nor false")


def take_optional(found: object, convert: Callable[[Any], Parsed]) -> Parsed | None:
    """Take what `convert` takes, or null."""
    return None if found is None else convert(found)
