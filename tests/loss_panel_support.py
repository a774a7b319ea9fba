"""Series of runs that lose time, for tests of the panels of *Energy and cost*."""

from __future__ import annotations

from panel_support import run_series

HANG = (
    run_series("wall_seconds_total", "0+15x60")
    | run_series("badput_seconds_total", "0x42 285+15x17", labels=',cause="hang"')
    | run_series("badput_seconds_total", "0+1.5x24 36x36", labels=',cause="data_stall"')
    | run_series("run_state", "1x42 0x18", labels=',state="running"')
    | run_series("run_state", "0x42 1x18", labels=',state="hung"')
    | run_series("last_progress_timestamp_seconds", "0+15x24 360x36", labels=',rank="0"')
    | run_series("step_longest_seconds", "1x60", labels=',rank="0"')
    | run_series("phase_active", "1x60", labels=',rank="0",phase="backward"')
    | run_series("energy_joules_total", "0+60000x60")
    | run_series("energy_joules_total", "0+60000x60", node=2)
    | run_series("wasted_energy_joules_total", "0x42 1140000+60000x17", labels=',cause="hang"')
    | run_series("wasted_energy_joules_total", "0+6000x24 144000x36", labels=',cause="data_stall"')
    | run_series("cost_total", "0+0.15x60", labels=',kind="device_time",currency="EUR"')
)
"""A run on two nodes of 4 kW each, without a step from 6:00 on; the ledger on node 1 decides at 10:45 that the run hangs."""
COSTLY_RUN = (
    run_series("wall_seconds_total", "0+15x60")
    | run_series("cost_total", "0+0.15x60", labels=',kind="device_time",currency="EUR"')
    | run_series("run_state", "1x60", labels=',state="running"')
)
"""A run that costs 36 EUR per hour."""
