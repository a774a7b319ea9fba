"""Time, energy and cost by cause on the dashboard *Energy and cost*, for synthetic series, evaluated by promtool."""

from __future__ import annotations

from pathlib import Path

import pytest
from loss_panel_support import COSTLY_RUN, HANG
from panel_support import assert_panel, run_series
from rules_support import needs_promtool

pytestmark = needs_promtool

HANG_AND_STRAGGLER = (
    run_series("wall_seconds_total", "0+15x60")
    | run_series("badput_seconds_total", "0x39 0+15x20", labels=',cause="hang"')
    | run_series("badput_seconds_total", "0+1.5x60", labels=',cause="data_stall"')
    | run_series("steps_total", "0+15x40 600x20", labels=',rank="0",mode="train"')
    | run_series("rank_compute_seconds", "0.5x40 stale", labels=',rank="0"')
    | run_series("rank_compute_seconds", "0.9x40 stale", labels=',rank="1"')
    | run_series("rank_info", "1x60", labels=',rank="0"')
    | run_series("rank_info", "1x60", labels=',rank="1"')
    | run_series("step_duration_seconds_sum", "0+15x40 600x20", labels=',rank="0",mode="train"')
    | run_series("step_duration_seconds_count", "0+15x40 600x20", labels=',rank="0",mode="train"')
    | run_series("energy_joules_total", "0+60000x60")
    | run_series("energy_joules_total", "0+60000x60", node=2)
    | run_series("wasted_energy_joules_total", "0x39 0+45000x20", labels=',cause="hang"')
    | run_series("wasted_energy_joules_total", "0+6000x60", labels=',cause="data_stall"')
    | run_series("cost_total", "0+0.15x60", labels=',kind="device_time",currency="EUR"')
    | {'run:training_gpus:count{run="a"}': "4x60"}
)
"""Fifteen minutes of a run with four GPUs on two nodes: ten minutes with a slow rank, then a hang of five minutes."""


@pytest.mark.parametrize(
    ("column", "factor", "progress", "slowest_rank", "hang", "data_stall"),
    [
        pytest.param("GPU hours", 3600 // 4, 306, 204, 300, 90, id="hours of four GPUs"),
        pytest.param("of GPU time", 900, 306, 204, 300, 90, id="share of GPU time"),
        pytest.param("Energy", 1, 780, 520, 500, 200, id="watt-hours of both nodes"),
        pytest.param("Cost", 100, 306, 204, 300, 90, id="cost"),
    ],
)
def test_time_energy_and_cost_are_divided_among_causes_that_add_up_to_the_whole(
    tmp_path: Path,
    column: str,
    factor: int,
    progress: int,
    slowest_rank: int,
    hang: int,
    data_stall: int,
) -> None:
    values = {
        "data_stall": data_stall,
        "hang": hang,
        "progress": progress,
        "slowest_rank": slowest_rank,
    }
    expected = {f'{{cause="{cause}"}}': float(value) for cause, value in values.items()}

    assert_panel(
        tmp_path,
        "training-energy",
        "Where time, energy and money went, in this time range",
        HANG_AND_STRAGGLER,
        expected,
        column=column,
        factor=factor,
    )


@pytest.mark.parametrize(
    ("panel", "query_id", "factor", "expected"),
    [
        ("Lost in this time range", "A", 100, {'{currency="EUR"}': 594}),
        ("Lost in this time range", "B", 1, {"{}": 1220}),
    ],
)
def test_the_loss_is_the_time_energy_and_cost_without_progress(
    tmp_path: Path, panel: str, query_id: str, factor: int, expected: dict[str, float]
) -> None:
    assert_panel(
        tmp_path,
        "training-energy",
        panel,
        HANG_AND_STRAGGLER,
        expected,
        query_id=query_id,
        factor=factor,
    )


def test_energy_before_the_time_range_is_not_counted_if_the_exporter_was_down_at_its_start(
    tmp_path: Path,
) -> None:
    series = (
        run_series("run_state", "1x400", labels=',state="running"')
        | run_series("energy_joules_total", "3.6e6+3000x400")
        | run_series("energy_joules_total", "3.6e6+3000x40 stale _x138 3.72e6+3000x220", node=2)
    )

    assert_panel(
        tmp_path,
        "training-energy",
        "Cost, loss and energy of each run, in this time range",
        series,
        {'{run="a"}': 10 * (720 + 660)},
        column="Energy",
        factor=36,
        minutes=100,
    )


@pytest.mark.parametrize(
    ("joules", "expected"),
    [("1", {}), ("7200", {'{cause="init"}': 2})],
    ids=["the exporter started after the start of the run", "the exporter measured the start"],
)
def test_the_energy_of_a_cause_is_blank_and_not_tiny_if_it_was_not_measured(
    tmp_path: Path, joules: str, expected: dict[str, float]
) -> None:
    series = (
        run_series("wall_seconds_total", "120x60")
        | run_series("badput_seconds_total", "120x60", labels=',cause="init"')
        | run_series("energy_joules_total", f"{joules}x60")
        | run_series("wasted_energy_joules_total", f"{joules}x60", labels=',cause="init"')
    )

    assert_panel(
        tmp_path,
        "training-energy",
        "Where time, energy and money went, in this time range",
        series,
        expected,
        column="Energy",
    )


def test_the_loss_of_a_run_includes_its_start(tmp_path: Path) -> None:
    series = (
        run_series("wall_seconds_total", "600x60")
        | run_series("badput_seconds_total", "100x60", labels=',cause="init"')
        | run_series("badput_seconds_total", "20x60", labels=',cause="compile"')
        | run_series("badput_seconds_total", "120x60", labels=',cause="data_stall"')
    )

    assert_panel(
        tmp_path,
        "training-energy",
        "Cost, loss and energy of each run, in this time range",
        series,
        {'{run="a"}': 40},
        column="of it lost",
        factor=100,
    )


DECISION_MINUTES = 10.75
"""Time at which the ledger decides that the run hangs."""


@pytest.mark.parametrize(
    ("minutes", "data_stall", "hang"),
    [(1, 6, 0), (9, 36, 180), (DECISION_MINUTES, 36, 285), (15, 36, 540)],
    ids=["first minute", "standstill", "decision", "hang"],
)
def test_time_energy_and_cost_agree_with_the_ledger_before_and_after_its_decision(
    tmp_path: Path, minutes: float, data_stall: int, hang: int
) -> None:
    seconds = {"data_stall": data_stall} | ({"hang": hang} if hang else {})
    watts = {"data_stall": 8000, "hang": 8000}
    joules = {f'{{cause="{cause}"}}': value * watts[cause] for cause, value in seconds.items()}
    shares = {f'{{cause="{cause}"}}': value for cause, value in seconds.items()}
    progress = 60 * minutes - data_stall - hang
    panel = "Where time, energy and money went, in this time range"

    assert_panel(
        tmp_path,
        "training-energy",
        panel,
        HANG,
        shares | {'{cause="progress"}': progress},
        factor=3600,
        minutes=minutes,
    )
    assert_panel(
        tmp_path,
        "training-energy",
        "Wasted energy by cause",
        HANG,
        joules,
        factor=3600,
        minutes=minutes,
    )
    assert_panel(
        tmp_path,
        "training-energy",
        panel,
        HANG,
        joules | {'{cause="progress"}': progress * 8000},
        column="Energy",
        factor=3600,
        minutes=minutes,
    )
    assert_panel(
        tmp_path,
        "training-energy",
        "Cost, loss and energy of each run, in this time range",
        HANG,
        {'{run="a"}': data_stall + hang},
        column="of it lost",
        factor=round(60 * minutes),
        minutes=minutes,
    )


def test_the_time_lost_to_the_slowest_rank_is_wasted_energy(tmp_path: Path) -> None:
    ratio = {'run:training_straggler_lost:ratio{run="a"}': "0.25x60"}
    energy = run_series("energy_joules_total", "0+60000x60") | run_series("wall_seconds_total", "0+15x60")
    energy |= run_series("wasted_energy_joules_total", "0x60", labels=',cause="hang"')

    assert_panel(
        tmp_path,
        "training-energy",
        "Wasted energy by cause",
        ratio | energy,
        {'{cause="slowest_rank"}': 900_000},
        factor=3600,
    )


def test_the_waste_of_a_run_that_ended_before_the_time_range_is_not_drawn(tmp_path: Path) -> None:
    series = (
        run_series("wall_seconds_total", "900x10 stale")
        | run_series("energy_joules_total", "3600000x10 stale")
        | run_series("wasted_energy_joules_total", "360000x10 stale", labels=',cause="data_stall"')
    )

    assert_panel(tmp_path, "training-energy", "Wasted energy by cause", series, {})


def test_a_minute_of_a_large_run_counts_more_than_a_minute_of_a_small_run(tmp_path: Path) -> None:
    series = {
        f'training_wall_seconds_total{{run="{run}",instance="n1"}}': "0+15x60" for run in ("large", "small")
    }
    series |= {
        'training_badput_seconds_total{run="large",instance="n1",cause="data_stall"}': "0+7.5x60",
        'training_badput_seconds_total{run="small",instance="n1",cause="data_stall"}': "0x60",
        'run:training_gpus:count{run="large"}': "63x60",
    }
    work = {
        '{cause="data_stall"}': round(1000 * 63 / 2 / 64),
        '{cause="progress"}': round(1000 * (63 / 2 + 1) / 64),
    }

    assert_panel(
        tmp_path,
        "training-energy",
        "Where time, energy and money went, in this time range",
        series,
        work,
        column="of GPU time",
        factor=1000,
    )


def test_a_standstill_is_lost_time_before_the_ledger_counts_a_hang(tmp_path: Path) -> None:
    series = (
        COSTLY_RUN
        | run_series("last_progress_timestamp_seconds", "0+15x48 720x12", labels=',rank="0"')
        | run_series("step_longest_seconds", "1x60")
        | run_series("phase_active", "1x60", labels=',rank="0",phase="backward"')
        | run_series("badput_seconds_total", "0+1x60", labels=',cause="data_stall"')
        | run_series("steps_total", "0+15x48 720x12", labels=',rank="0",mode="train"')
    )

    assert_panel(
        tmp_path,
        "training-energy",
        "Where time, energy and money went, in this time range",
        series,
        {'{cause="hang"}': 180, '{cause="data_stall"}': 60, '{cause="progress"}': 660},
        factor=3600,
    )
