"""Series of the runs of a fleet, and values of the table of runs, for tests of the panels of *Fleet*."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from panel_support import assert_panel

from dashboards.panels import NO_VALUE


def _three_runs() -> dict[str, str]:
    series: dict[str, str] = {}
    for run, state, up in (("a", "running", "1x60"), ("b", "hung", "1x60"), ("c", "lost", "1x20 0x40")):
        labels = f'run="{run}",instance="n1"'
        last_step, since = ("0+15x60", "0x60") if run == "a" else ("0+15x20 300x40", "0x20 330x40")
        series |= {
            f'training_run_info{{{labels},user="u"}}': "1x60",
            f'training_process_up{{{labels},rank="0"}}': up,
            f"training_last_progress_timestamp_seconds{{{labels}}}": last_step,
            f'training_run_state{{{labels},state="{state}"}}': "1x60" if run == "a" else "0x20 1x40",
            f"training_run_state_since_timestamp_seconds{{{labels}}}": since,
        }
    return series


THREE_RUNS = _three_runs()
"""Series of three runs. Run a is healthy. From 5 min on, run b hangs, and the ranks of run c are dead."""
OTHER_ROWS = {
    '{run="b",user="u",state="hung",alertname="no rank finishes a step"}': 1.0,
    '{run="c",user="u",state="lost"}': 1.0,
}
"""Rows of the runs b and c of THREE_RUNS."""
OTHER_STARTS = {'{run="b"}': 300_000.0, '{run="c"}': 330_000.0}
"""Starts of the problems of the runs b and c of THREE_RUNS."""
_RANKS = ((0, "1x60"), (1, "1x20 1.5x40"))
"""Ranks of run a, and their compute times; rank 1 is slow from 5 min on."""
STRAGGLER = {
    f'training_rank_{name}{{run="a",instance="n{rank + 1}",rank="{rank}"}}': values
    for rank, seconds in _RANKS
    for name, values in (("compute_seconds", seconds), ("info", "1x60"))
} | {
    'training_wall_seconds_total{run="a",instance="n1"}': "0+15x60",
    'training_step_duration_seconds_sum{run="a",instance="n1",mode="train"}': "0+15x60",
    'training_step_duration_seconds_count{run="a",instance="n1",mode="train"}': "0+10x60",
    'training_cost_total{run="a",instance="n1",currency="EUR"}': "0+0.15x60",
}
"""Series of a run that costs 36 EUR per hour. Because of rank 1, a step takes 1.5 s instead of 1 s: a third of the time is lost."""


def assert_runs(
    tmp_path: Path,
    series: dict[str, str],
    expected: Mapping[str, float],
    *,
    column: str = "",
    factor: int = 1,
    minutes: float = 15,
) -> None:
    """Check the rows of the table of runs, or the values of one of its columns, like `assert_panel`.

    An expected row without a problem needs no label `alertname`: the table shows a dash.
    """
    if not column:
        expected = {
            row if "alertname=" in row else row.replace("{", f'{{alertname="{NO_VALUE}",', 1): value
            for row, value in expected.items()
        }
    assert_panel(
        tmp_path,
        "training-fleet",
        "All runs, rates over 5 min",
        series,
        expected,
        column=column,
        factor=factor,
        minutes=minutes,
    )
