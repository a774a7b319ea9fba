"""Values of panels for synthetic series, evaluated by promtool."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from dashboards_support import SELECTED_VALUES, fill_variables, panel_queries
from rules_support import needs_promtool, promtool

RANK = 'training_{name}{{run="a",instance="n{node}",rank="{rank}"{more}}}'
OUTAGE = "stale _x11"
"""Staleness marker and eleven intervals without samples, three minutes in total."""


def failures(
    tmp_path: Path,
    panel: str,
    series: dict[str, str],
    minutes: dict[str, float | None],
    *,
    dashboard: str = "training-run",
    query_id: str = "A",
    labels: str = "{}",
) -> str:
    """Return promtool's failure messages for a query of a panel, "" if all values match.

    Args:
        tmp_path: Directory for the test case.
        panel: Title of the panel.
        series: Input series with their values in promtool's notation, one per 15 s.
        minutes: Expected value by evaluation time; None for no value.
        dashboard: UID of the dashboard.
        query_id: Reference of the query in the panel.
        labels: Labels of the expected series.
    """
    query = next(
        query for query in panel_queries(dashboard) if (query.panel, query.ref_id) == (panel, query_id)
    )
    expression = f"round({fill_variables(query.expression, SELECTED_VALUES | {'run': 'a'})})"
    case = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": expression,
                "eval_time": at,
                "exp_samples": [] if value is None else [{"labels": labels, "value": value}],
            }
            for at, value in minutes.items()
        ],
    }
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}), encoding="utf-8")
    completed = promtool("test", "rules", path)
    return "" if completed.returncode == 0 else completed.stdout + completed.stderr


@needs_promtool
def test_throughput_is_blank_while_the_exporter_of_a_rank_is_down(tmp_path: Path) -> None:
    series = {
        RANK.format(name="tokens_total", node=1, rank=0, more=',mode="train"'): "0+15000x60",
        RANK.format(
            name="tokens_total", node=2, rank=1, more=',mode="train"'
        ): f"0+15000x20 {OUTAGE} 495000+15000x27",
        RANK.format(name="process_up", node=1, rank=0, more=""): "1x60",
        RANK.format(name="process_up", node=2, rank=1, more=""): f"1x20 {OUTAGE} 1x27",
        'training_world_size{run="a",instance="n1"}': "2x60",
    }

    messages = failures(tmp_path, "Throughput", series, {"4m": 2000, "6m": None, "8m": None, "12m": 2000})

    assert not messages, messages


@needs_promtool
def test_throughput_of_a_job_that_reports_no_world_size_is_shown(tmp_path: Path) -> None:
    series = {
        RANK.format(name="tokens_total", node=1, rank=0, more=',mode="train"'): "0+15000x60",
        RANK.format(name="process_up", node=1, rank=0, more=""): "1x60",
    }

    messages = failures(tmp_path, "Throughput", series, {"4m": 1000})

    assert not messages, messages


@needs_promtool
def test_time_left_is_right_in_the_first_minutes_and_ends_with_the_run(tmp_path: Path) -> None:
    series = {
        'training_step{run="a"}': "0+15x40 600x20",
        'training_step_target{run="a"}': "10000x60",
        'training_steps_total{run="a",rank="0",mode="train"}': "0+15x40 600x20",
        'training_wall_seconds_total{run="a"}': "0+15x40 600x20",
        'training_run_state{run="a",state="running"}': "1x40 0x20",
        'training_run_state{run="a",state="failed"}': "0x40 1x20",
    }

    messages = failures(tmp_path, "Time left", series, {"1m": 9940, "2m": 9880, "8m": 9520, "11m": None})

    assert not messages, messages


@needs_promtool
@pytest.mark.parametrize("dashboard", ["training-run", "training-energy"])
def test_cost_so_far_does_not_decrease_while_the_exporter_of_a_node_is_down(
    tmp_path: Path, dashboard: str
) -> None:
    cost = 'training_cost_total{{run="a",instance="n{}",currency="EUR"}}'
    series = {cost.format(1): "100x60", cost.format(2): f"50x20 {OUTAGE} 50x27"}

    messages = failures(
        tmp_path,
        "Cost so far",
        series,
        {"4m": 150, "6m": 150, "8m": 150, "12m": 150},
        dashboard=dashboard,
        labels='{currency="EUR"}',
    )

    assert not messages, messages


@needs_promtool
def test_ranks_of_a_node_without_an_exporter_are_not_seen_rather_than_ended(tmp_path: Path) -> None:
    series = {
        RANK.format(name="process_up", node=1, rank=0, more=""): "1x60",
        RANK.format(name="process_up", node=2, rank=1, more=""): f"1x20 {OUTAGE} 1x27",
        'training_world_size{run="a",instance="n1"}': "2x60",
    }
    not_seen: dict[str, float | None] = {"4m": 0, "7m": 1, "12m": 0}
    ended: dict[str, float | None] = {"4m": 0, "7m": 0, "12m": 0}

    for query_id, minutes in (("D", not_seen), ("C", ended)):
        messages = failures(
            tmp_path, "Ranks alive", series, minutes, dashboard="training-ranks", query_id=query_id
        )
        assert not messages, messages
