"""Field ids of the throttle counters, whose numbers depend on the driver.

Used in the NVML child. A driver version comes in. NVIDIA renumbered ids 251 to 273 between the drivers
580.65 and 580.82: what was a throttle counter became a setting of power smoothing. The same id on the wrong driver
is silently another metric, so between the two nothing is asked; and the sidecar checks that no counter
of seconds runs faster than the clock.
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

_OLD = {251: "sw_thermal", 252: "hw_thermal", 253: "hw_power_brake"}
_NEW = {269: "sw_thermal", 270: "hw_thermal", 271: "hw_power_brake"}
_LAST_OLD = (580, 65)
_FIRST_NEW = (580, 82)


def throttle_fields(driver_version: str, *, details: bool) -> dict[int, str]:
    """Give the ids to ask for, with the reason that each counts."""
    found = dict(STABLE)
    if details:
        found.update(STABLE_DETAILS)
    version = _numbers(driver_version)
    if version is None:
        return found
    if version <= _LAST_OLD:
        found.update(_OLD)
    elif version >= _FIRST_NEW:
        found.update(_NEW)
    return found


def _numbers(version: str) -> tuple[int, int] | None:
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return None
    return int(parts[0]), int(parts[1])
