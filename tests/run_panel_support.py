"""Series of a run of two ranks with problems, for tests of the panels of *Run* and *Ranks*."""

from __future__ import annotations

from panel_support import run_series

RANKS = (
    run_series("run_state", "1x60", labels=',state="running"')
    | run_series("wall_seconds_total", "0+15x60")
    | run_series("process_up", "1x60", labels=',rank="0"')
    | run_series("process_up", "1x60", labels=',rank="1"')
    | run_series("rank_info", "1x60", labels=',rank="0"')
    | run_series("rank_info", "1x60", labels=',rank="1"')
)
"""A live run of two ranks on n1."""
RANK_1 = 'instance="n1",rank="1"'
"""Labels of rank 1."""
GPU_1 = 'gpu="1",uuid="G1"'
"""Labels of the GPU of rank 1."""
RANK_1_ON_GPU_1 = {f'training_rank_info{{run="a",{RANK_1},{GPU_1}}}': "1x60"}
STACKS_OF_HANG = {
    f'training_hang_info{{run="a",{RANK_1},function="read",location="data.py:40",phase="forward"}}': "_x40 1x20",
    'training_hang_info{run="a",instance="n1",rank="0",function="all_reduce",location="train.py:8",phase="grad_sync"}': "_x40 1x20",
}
"""Stacks of a hang from 10 min on: rank 0 waits in a collective, and rank 1 reads data."""
DIED = (
    run_series("run_state", "1x40 0x20", labels=',state="running"')
    | run_series("run_state", "0x40 1x20", labels=',state="lost"')
    | run_series("process_up", "1x40 0x20", labels=',rank="0"')
    | run_series("process_up", "1x40 0x20", labels=',rank="1"')
    | run_series("rank_last_exit_timestamp_seconds", "_x41 605x20", labels=',rank="0",reason="exit status 1"')
    | run_series(
        "rank_last_exit_timestamp_seconds", "_x41 600x20", labels=',rank="1",reason="signal SIGKILL"'
    )
    | run_series("cost_total", "0+0.15x40 6x20", labels=',kind="device_time",currency="EUR"')
    | run_series("uncommitted_seconds", "600x60")
    | run_series("rank_compute_seconds", "1x60", labels=',rank="0"')
    | run_series("rank_compute_seconds", "1x60", labels=',rank="1"')
)
"""A run at 36 EUR per hour whose rank 1 is killed after 10 min; rank 0 fails five seconds later."""
PAST_NAN_LOSSES = run_series("nonfinite_total", "_x21 1+15x9 136x30", labels=',kind="loss",value="nan"')
"""Steps with a NaN loss, the last of them seven minutes before the end of the time range."""
SLOW_RANK = (
    run_series("rank_compute_seconds", "1x60", labels=',rank="0"')
    | run_series("rank_compute_seconds", "1x20 1.5x40", labels=',rank="1"')
    | run_series("rank_info", "1x60", labels=',rank="0"')
    | run_series("rank_info", "1x60", labels=',rank="1"')
)
"""A run whose rank 1 computes at two thirds of the speed of rank 0 from 5 min on."""
HOT_GPU = RANK_1_ON_GPU_1 | {
    f'gpu_clocks_event_seconds_total{{instance="n1",{GPU_1},reason="thermal"}}': "0x20 9+9x40"
}
"""Heat slows GPU 1 for nine of each 15 s from 5 min on."""
DATA_STALL = run_series("phase_seconds_total", "0x20 7.5+7.5x39", labels=',rank="1",phase="data_loading"')
"""Rank 1 waits for data for half of the time from 5 min on."""
HUNG = (
    RANKS
    | run_series("run_state", "1x39 0x20", labels=',state="running"')
    | run_series("run_state", "0x39 1x20", labels=',state="hung"')
    | run_series("run_state_since_timestamp_seconds", "0x39 600x20")
    | run_series("last_progress_timestamp_seconds", "0+15x20 300x40", labels=',rank="0"')
)
"""A run that makes no step from 5 min on, and hangs from 10 min on."""
LOST_GPU = {
    f'training_rank_info{{run="a",{RANK_1},{GPU_1}}}': "1x20 stale",
    f'gpu_up{{instance="n1",{GPU_1}}}': "1x20 0x40",
    f'gpu_xid_last_timestamp_seconds{{instance="n1",{GPU_1},xid="79"}}': "_x21 305x39",
}
"""GPU of rank 1, lost after 5 min."""
