"""Tiles, plots and further tables of the dashboard *Fleet*, for synthetic series, evaluated by promtool."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fleet_panel_support import STRAGGLER, THREE_RUNS
from panel_support import assert_panel, run_series
from places import PROJECT
from rules_support import needs_promtool

from dashboards.fleet_nodes import CONDITION_TEXTS

pytestmark = needs_promtool


def test_the_cost_names_the_number_of_runs_that_are_in_no_rate(tmp_path: Path) -> None:
    series = run_series("run_state", "1x20 stale", labels=',state="running"')

    assert_panel(
        tmp_path,
        "training-fleet",
        "Cost per hour, 5 min",
        series,
        {"{}": 1.0},
        query_id="C",
        series_name="runs unknown",
    )
    assert_panel(
        tmp_path,
        "training-fleet",
        "Cost per hour, 5 min",
        run_series("run_state", "1x60", labels=',state="running"'),
        {},
        query_id="C",
        series_name="runs unknown",
    )


def test_a_finished_run_has_no_age_of_its_last_step(tmp_path: Path) -> None:
    series = run_series("run_state", "1x60", labels=',state="finished"') | run_series(
        "last_progress_timestamp_seconds", "0x60"
    )

    assert_panel(
        tmp_path,
        "training-fleet",
        "Speed and progress of the runs",
        series,
        {},
        column="Last step",
    )


def test_the_gpus_of_a_node_without_an_exporter_are_unknown_and_not_up(tmp_path: Path) -> None:
    series = {
        'up{job="training",instance="n1"}': "1x60",
        'up{job="training",instance="n2"}': "1x50 0x10",
        'gpu_devices{instance="n1"}': "8x60",
        'gpu_devices{instance="n2"}': "8x60",
        'gpu_devices_expected{instance="n2"}': "8x50 stale",
    }

    assert_panel(tmp_path, "training-fleet", "GPUs", series, {"{}": 8})
    assert_panel(tmp_path, "training-fleet", "GPUs", series, {"{}": 8}, query_id="C")


@pytest.mark.parametrize(
    "column", ["Time left", "Step time", "Tokens/s"], ids=["time left", "step time", "tokens/s"]
)
def test_a_run_without_a_step_has_no_speed_and_no_time_left(tmp_path: Path, column: str) -> None:
    series = THREE_RUNS | {
        f'training_{name}{{run="b",instance="n1"{labels}}}': values
        for name, labels, values in (
            ("wall_seconds_total", "", "0+15x60"),
            ("step", "", "0+15x58 900x2"),
            ("step_target", "", "2000x60"),
            ("steps_total", ',mode="train",rank="0"', "0+15x58 900x2"),
            ("tokens_total", ',mode="train",rank="0"', "0+15x58 900x2"),
            ("step_duration_seconds_sum", ',mode="train",rank="0"', "0+15x58 900x2"),
            ("step_duration_seconds_count", ',mode="train",rank="0"', "0+15x58 900x2"),
        )
    }

    assert_panel(
        tmp_path,
        "training-fleet",
        "Speed and progress of the runs",
        series,
        {},
        column=column,
    )


@pytest.mark.parametrize(
    ("panel", "query_id"),
    [
        ("Power of the cluster", "A"),
        ("Cost and loss per hour, 5 min", "A"),
        ("Cost and loss per hour, 5 min", "B"),
    ],
)
def test_a_sum_over_the_cluster_is_blank_while_an_exporter_does_not_answer(
    tmp_path: Path, panel: str, query_id: str
) -> None:
    series = THREE_RUNS | STRAGGLER
    series |= {
        'up{job="training",instance="n1"}': "1x60",
        'up{job="training",instance="n2"}': "1x54 0x6",
        'gpu_power_watts{job="training",instance="n1",gpu="0",uuid="A"}': "600x60",
        'gpu_power_watts{job="training",instance="n2",gpu="0",uuid="B"}': "600x54 stale",
        'training_run_state{run="d",instance="n2",state="running"}': "1x54 stale",
        'training_process_up{run="d",instance="n2",rank="0"}': "1x54 stale",
    }

    assert_panel(tmp_path, "training-fleet", panel, series, {}, query_id=query_id)


def test_a_node_has_its_worst_problem_and_the_tile_counts_nodes_with_a_problem(tmp_path: Path) -> None:
    series = {
        'up{job="training",instance="n1"}': "1x60",
        'up{job="training",instance="n2"}': "1x20 0x40",
        'up{job="training",instance="n3"}': "1x60",
        'gpu_devices_expected{instance="n1"}': "8x60",
        'gpu_devices{instance="n1"}': "7x60",
        'gpu_nvml_up{instance="n1"}': "1x60",
        'gpu_xid_last_timestamp_seconds{instance="n1",gpu="1",uuid="G1",xid="79"}': "300x60",
        'gpu_nvml_up{instance="n3"}': "1x60",
    }

    worst = {'{instance="n1"}': 5.0, '{instance="n2"}': 3.0, '{instance="n3"}': 0.0}
    assert_panel(
        tmp_path, "training-fleet", "All nodes, rates over 5 min", series, worst, column="Worst problem"
    )
    assert_panel(tmp_path, "training-fleet", "Nodes", series, {"{}": 2.0}, query_id="D")
    assert_panel(tmp_path, "training-fleet", "Nodes", series, {"{}": 1.0}, query_id="C")


def test_the_cost_of_the_fleet_has_its_lost_part_weighted_by_gpus(tmp_path: Path) -> None:
    series = THREE_RUNS | STRAGGLER
    series |= {
        f'training_rank_info{{run="{run}",instance="n9",rank="{rank}",uuid="{run}{rank}"}}': "1x60"
        for run, ranks in (("a", 3), ("b", 1))
        for rank in range(ranks)
    }

    assert_panel(tmp_path, "training-fleet", "Cost per hour, 5 min", series, {'{currency="EUR"}': 36.0})
    assert_panel(
        tmp_path, "training-fleet", "Cost per hour, 5 min", series, {'{currency="EUR"}': 12.0}, query_id="B"
    )
    assert_panel(
        tmp_path,
        "training-fleet",
        "Cost per hour, 5 min",
        series,
        {'{name="GPU time lost"}': 50.0},
        query_id="C",
        factor=100,
    )


def test_the_goodput_of_the_fleet_is_weighted_by_gpu_time_and_a_run_without_gpus_counts_as_one(
    tmp_path: Path,
) -> None:
    # Run a has 3 GPUs and loses half of its time, run b has no GPU and loses nothing.
    series = {
        f'training_{name}{{run="{run}",instance="n1"{labels}}}': values
        for run, lost_seconds in (("a", 7.5), ("b", 0))
        for name, labels, values in (
            ("wall_seconds_total", "", "0+15x60"),
            ("badput_seconds_total", ',cause="data_stall"', f"0+{lost_seconds}x60"),
            ("run_state", ',state="running"', "1x60"),
            ("last_progress_timestamp_seconds", ',rank="0"', "0+15x60"),
        )
    } | {
        f'training_rank_info{{run="a",instance="n1",rank="{rank}",uuid="G{rank}"}}': "1x60"
        for rank in range(3)
    }
    goodput = {'{note="in the first hour"}': 63}  # (3 * 0.5 + 1) / 4, rounded

    assert_panel(tmp_path, "training-fleet", "Goodput if work is saved, 6 h", series, goodput, factor=100)


@pytest.mark.parametrize("uid", ["training-fleet", "training-run", "training-node"])
def test_each_critical_xid_has_its_meaning_in_the_table_of_alerts(uid: str) -> None:
    model = json.loads((PROJECT / f"dashboards/json/{uid}.json").read_text(encoding="utf-8"))
    rules = (PROJECT / "deploy/prometheus/rules/alerts-gpu.yml").read_text(encoding="utf-8")
    text = json.dumps([panel for panel in model["panels"] if panel["title"] == "Firing alerts"])

    critical = re.findall(r"condition: Xid ([\d|]+)", rules)[0].split("|")
    assert critical
    assert all(f'"Xid {xid}: ' in text for xid in critical)


@pytest.mark.parametrize(("last_success", "nodes"), [(59, 0), (57, 1)], ids=["one scrape", "three scrapes"])
def test_a_collector_that_fails_at_one_scrape_is_no_problem_of_a_node(
    tmp_path: Path, last_success: int, nodes: int
) -> None:
    node = 'job="training",instance="n1"'
    series = {
        f"up{{{node}}}": "1x60",
        f"exporter_build_info{{{node}}}": "1x60",
        f'exporter_collector_success{{{node},collector="gpu"}}': f"1x{last_success} 0x{60 - last_success}",
    }

    assert_panel(tmp_path, "training-fleet", "Nodes", series, {"{}": nodes}, query_id="D")


def test_the_gpus_of_a_driver_that_does_not_respond_are_unknown_and_not_missing(tmp_path: Path) -> None:
    series = {
        'up{job="training",instance="n1"}': "1x60",
        'gpu_devices_expected{instance="n1"}': "8x60",
        'gpu_devices{instance="n1"}': "8x20 stale",
        'gpu_nvml_up{instance="n1"}': "1x20 0x40",
    }

    assert_panel(tmp_path, "training-fleet", "GPUs", series, {"{}": 0}, query_id="B")
    assert_panel(tmp_path, "training-fleet", "GPUs", series, {"{}": 8}, query_id="C")
    worst = {'{instance="n1"}': len(CONDITION_TEXTS[0]["options"]) - 1}
    assert_panel(
        tmp_path, "training-fleet", "All nodes, rates over 5 min", series, worst, column="Worst problem"
    )
