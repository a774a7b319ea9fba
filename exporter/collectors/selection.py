"""Selection: which devices, mounts or counters a user wants to see.

Used in the sidecar by collectors whose sources have names that only the machine knows. Shell-style patterns
come in. No threads, no state.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

EVERYTHING = ("*",)
"""The include list that leaves nothing out."""


class Selection:
    """Names that match a pattern of one list and none of another.

    Args:
        include: Patterns (`*`, `?`, `[…]`; `*` also stands for `/`), one of which a name must match.
        exclude: Patterns of which it must match none.
    """

    def __init__(self, include: Sequence[str], exclude: Sequence[str] = ()) -> None:
        self._include = _any_of(include)
        self._exclude = _any_of(exclude)

    def __contains__(self, name: str) -> bool:
        return self._include.match(name) is not None and self._exclude.match(name) is None


def _any_of(patterns: Sequence[str]) -> re.Pattern[str]:
    # An empty list matches nothing, not even the empty name.
    return re.compile("|".join(f"(?:{fnmatch.translate(pattern)})" for pattern in patterns) or r"(?!)")
