"""Idle power of a device."""

from __future__ import annotations

import pytest

from exporter.collectors.energy.idle_power import IdlePower


@pytest.mark.parametrize("damaged", [0.0, -5.0, 1e-3, 1e9])
def test_one_damaged_reading_changes_no_idle_power(damaged: float) -> None:
    idle = IdlePower()
    for watts in [300.0] * 15 + [damaged] + [300.0] * 15:
        idle.record(watts, is_working=False)
    for _ in range(3):
        idle.record(700.0, is_working=True)

    assert idle.by_method() == {"before_start": 300.0, "min_seen": 300.0}
