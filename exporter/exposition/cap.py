"""How many series each family may show when all together would be too many.

Used in the sidecar, at every publish. A pure function: small families are served whole before large ones
are cut, so that a label that runs away in one family never displaces another family's series.
"""

from __future__ import annotations

from collections.abc import Mapping

_RAISE = 1.25
"""A cut family gets more room only when it is this much more: otherwise the last series that fit would come
and go with every small change elsewhere, and each return would look like a gap."""


def allocate(demands: Mapping[str, int], room: int, before: Mapping[str, int]) -> dict[str, int]:
    """Share the room among families; the quotas of those that must be cut, none when all fit.

    Args:
        demands: Series that each family offers.
        room: Series that all may show together; not negative.
        before: What the last call returned.
    """
    quotas: dict[str, int] = {}
    families = len(demands)
    for family, demand in sorted(demands.items(), key=lambda item: (item[1], item[0])):
        share = -(-room // families)  # rounded up, so that fewer series than families still fill the room
        if demand > share:
            quotas[family] = _steady(before.get(family), share)
        room -= min(demand, share)
        families -= 1
    return quotas


def _steady(before: int | None, share: int) -> int:
    """The last quota, as long as it is within the share and not far below it."""
    if before is not None and before <= share <= before * _RAISE:
        return before
    return share
