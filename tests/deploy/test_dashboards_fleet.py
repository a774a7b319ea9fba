"""Values of the dashboard *Fleet*, for synthetic series, evaluated by promtool."""

from __future__ import annotations

from pathlib import Path

import pytest
from panel_support import assert_panel
from rules_support import needs_promtool

pytestmark = needs_promtool


def _hung_lost_and_healthy_runs() -> dict[str, str]:
    """Return the series of a healthy run, a run that hangs, and a run whose ranks were killed, from 5 min on."""
    series: dict[str, str] = {}
    for run, state, up in (("a", "running", "1x60"), ("b", "hung", "1x60"), ("c", "lost", "1x20 0x40")):
        labels = f'run="{run}",instance="n1"'
        last_step = "0+15x60" if run == "a" else "0+15x20 300x40"
        series |= {
            f'training_run_info{{{labels},user="u"}}': "1x60",
            f'training_process_up{{{labels},rank="0"}}': up,
            f"training_last_progress_timestamp_seconds{{{labels}}}": last_step,
            f'training_run_state{{{labels},state="{state}"}}': "1x60" if run == "a" else "0x20 1x40",
            f"training_run_state_since_timestamp_seconds{{{labels}}}": "0x60"
            if run == "a"
            else "0x20 330x40",
        }
    return series


@pytest.mark.parametrize(("query_id", "runs"), [("A", 1), ("B", 3), ("C", 2), ("D", 0)])
def test_the_number_of_runs_without_progress_is_that_of_the_table(
    tmp_path: Path, query_id: str, runs: int
) -> None:
    series = _hung_lost_and_healthy_runs()
    verdicts = {'{run="a"}': 0.0, '{run="b"}': 4.0, '{run="c"}': 4.0}

    assert_panel(tmp_path, "training-fleet", "Runs that progress", series, {"{}": runs}, query_id=query_id)
    assert_panel(tmp_path, "training-fleet", "All runs", series, verdicts, query_id="B")


def test_the_age_of_the_last_step_grows_between_evaluations_of_the_rules(tmp_path: Path) -> None:
    ages = {'{run="a"}': 10.0, '{run="b"}': 610.0, '{run="c"}': 610.0}

    assert_panel(
        tmp_path,
        "training-fleet",
        "All runs",
        _hung_lost_and_healthy_runs(),
        ages,
        query_id="H",
        minutes=15 + 1 / 6,
    )
