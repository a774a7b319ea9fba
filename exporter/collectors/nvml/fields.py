"""Field ids of the throttle counters, whose numbers depend on the driver.

Used in the NVML child. A driver version comes in. Three counters came with driver 575, under ids that had been
settings of power smoothing in 570; between 580.65 and 580.82 NVIDIA gave these back to power smoothing and moved the
counters. The same id on the wrong driver is silently another metric, so nothing is asked before 575 and between the
two; and the sidecar checks that no counter of seconds runs faster than the clock.

Source: NVML's change log (570 to 575, 575 to 580); pynvml 12.570, 12.575, 13.580.65, 13.580.82.
"""

from __future__ import annotations

STABLE = {
    74: "sw_power_cap",
    75: "thermal",
    76: "sync_boost",
    77: "board_limit",
    78: "low_utilization",
    79: "reliability",
}
"""Nanoseconds by reason, under the same id in every driver."""

STABLE_DETAILS = {80: "total_app_clocks", 81: "total_base_clocks"}

_FIRST = {251: "sw_thermal", 252: "hw_thermal", 253: "hw_power_brake"}
_MOVED = {269: "sw_thermal", 270: "hw_thermal", 271: "hw_power_brake"}
_FROM, _TO = (575, 0), (580, 65)
_MOVED_FROM = (580, 82)


def throttle_fields(driver_version: str, *, details: bool) -> dict[int, str]:
    """Give the ids to ask for, with the reason that each counts."""
    found = dict(STABLE)
    if details:
        found.update(STABLE_DETAILS)
    version = _numbers(driver_version)
    if version is None:
        return found
    if _FROM <= version <= _TO:
        found.update(_FIRST)
    elif version >= _MOVED_FROM:
        found.update(_MOVED)
    return found


def _numbers(version: str) -> tuple[int, int] | None:
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return None
    return int(parts[0]), int(parts[1])
