"""Values of *Ranks* while a run makes no step, or while samples of ranks are missing, for synthetic series, evaluated by promtool."""

from __future__ import annotations

from pathlib import Path

import pytest
from panel_support import assert_panel, run_series
from rules_support import needs_promtool
from run_panel_support import DATA_STALL, DIED, HUNG, RANKS, SLOW_RANK

from dashboards import ranks

pytestmark = needs_promtool

COST = run_series("cost_total", "0+0.15x60", labels=',kind="device_time",currency="EUR"')
"""Cost of 36 EUR per hour."""
STEPPING = run_series("last_progress_timestamp_seconds", "0+15x60", labels=',rank="0"')
"""Steps at each scrape."""
RANK_TABLE = "All ranks, the worst first"


@pytest.mark.parametrize(
    ("panel", "column", "labels", "value"),
    [
        (RANK_TABLE, "Speed", '{instance="n1",rank="1"}', 67),
        (RANK_TABLE, "Compute", '{instance="n1",rank="1"}', 150),
        (RANK_TABLE, "Time slow", '{instance="n1",rank="1"}', 66),
        ("Slowness of each rank", "", '{number="00001",rank="1"}', 50),
        ("Slowness of each node's slowest rank", "", '{instance="n1"}', 50),
        ("Spread of compute time", "", "{}", 150),
        ("Compute time of a step", "", '{rank="1"}', 150),
    ],
)
@pytest.mark.parametrize("is_hung", [False, True], ids=["steps", "hung"])
def test_a_rank_has_no_speed_and_no_compute_time_while_no_step_finishes(
    tmp_path: Path, *, panel: str, column: str, labels: str, value: float, is_hung: bool
) -> None:
    rank_0 = labels.replace('rank="1"', 'rank="0"').replace("00001", "00000")
    fast = {rank_0: {"Speed": 100, "Compute": 100}.get(column, 0)}
    if panel == "Compute time of a step":
        fast = {'{rank="0"}': 100}
    expected = {} if is_hung else fast | {labels: value}

    assert_panel(
        tmp_path,
        "training-ranks",
        panel,
        SLOW_RANK | (HUNG if is_hung else RANKS | STEPPING),
        expected,
        column=column,
        factor=100,
    )


def test_no_rank_is_slow_in_the_table_while_no_step_finishes(tmp_path: Path) -> None:
    states = {f'{{instance="n1",rank="{rank}"}}': ranks.Severity.NONE for rank in (0, 1)}

    assert_panel(tmp_path, "training-ranks", RANK_TABLE, HUNG | SLOW_RANK, states, column="State")


def test_a_wait_for_data_has_no_value_and_no_cost_while_the_complete_cost_is_lost(tmp_path: Path) -> None:
    badput = run_series("badput_seconds_total", "0+5x60", labels=',cause="data_stall"')
    series = HUNG | DATA_STALL | COST | badput

    assert_panel(tmp_path, "training-ranks", "Waiting for data, last 2 min", series, {})
    assert_panel(tmp_path, "training-ranks", "Waiting for data, last 2 min", series, {}, query_id="B")
    assert_panel(
        tmp_path,
        "training-ranks",
        "Lost: slowest rank or no step",
        series,
        {'{currency="EUR"}': 36},
        query_id="C",
    )


def test_a_stalled_run_loses_all_of_its_time(tmp_path: Path) -> None:
    series = {name.replace('state="hung"', 'state="stalled"'): values for name, values in HUNG.items()}

    assert_panel(tmp_path, "training-ranks", "Lost: slowest rank or no step", series, {"{}": 100}, factor=100)


def test_the_ranks_of_a_node_without_an_exporter_are_unknown_in_the_table(tmp_path: Path) -> None:
    stall = run_series(
        "phase_seconds_total", "0+7.5x57 stale", labels=',rank="2",phase="data_loading"', node=2
    )
    live = RANKS | STEPPING
    series = live | stall | run_series("process_up", "1x57 stale", labels=',rank="2"', node=2)
    states = {
        '{instance="n1",rank="0"}': ranks.Severity.NONE,
        '{instance="n1",rank="1"}': ranks.Severity.NONE,
        '{instance="n2",rank="2"}': ranks.Severity.UNKNOWN,
    }
    rows = dict.fromkeys(states, 1.0)

    assert_panel(tmp_path, "training-ranks", RANK_TABLE, series, rows)
    assert_panel(tmp_path, "training-ranks", RANK_TABLE, series, states, column="State")
    assert_panel(tmp_path, "training-ranks", RANK_TABLE, series, {}, column="Data wait")


@pytest.mark.parametrize(("waiting", "percent"), [((0, 15), 100), ((0, 3, 6), 30), ((3, 3), 20)])
def test_the_wait_for_other_ranks_is_the_median_without_the_rank_that_waits_least(
    tmp_path: Path, waiting: tuple[int, ...], percent: int
) -> None:
    series: dict[str, str] = {}
    for rank, seconds in enumerate(waiting):
        for phase, phase_seconds in (("grad_sync", seconds), ("forward", 15 - seconds)):
            series |= run_series(
                "phase_seconds_total", f"0+{phase_seconds}x60", labels=f',rank="{rank}",phase="{phase}"'
            )

    assert_panel(
        tmp_path,
        "training-ranks",
        "Waiting for data and for other ranks",
        series,
        {"{}": percent},
        query_id="C",
        factor=100,
    )


@pytest.mark.parametrize("silent_node", [1, 2])
def test_ranks_without_a_sample_are_a_band_of_their_own(tmp_path: Path, silent_node: int) -> None:
    series: dict[str, str] = {}
    for node in (1, 2):
        end = "x40 stale" if node == silent_node else "x60"
        for rank in (2 * node, 2 * node + 1):
            series |= run_series("phase_seconds_total", f"0+15{end}", node, f',rank="{rank}",phase="forward"')
            series |= run_series("process_up", f"1{end}", node, f',rank="{rank}"')
    series |= run_series("world_size", "4x40 stale" if silent_node == 1 else "4x60")

    for minutes, work, unknown in ((9, 4, 0), (10.75, 2, 2), (12, 2, 2)):
        for query_id, ranks_in_band in (("A", work), ("G", unknown)):
            assert_panel(
                tmp_path,
                "training-ranks",
                "Ranks by phase",
                series,
                {"{}": ranks_in_band},
                query_id=query_id,
                minutes=minutes,
            )


def test_a_rank_that_waits_all_of_the_time_waits_for_at_most_100_percent(tmp_path: Path) -> None:
    late_scrapes = run_series("phase_seconds_total", "0+20x60", labels=',rank="0",phase="grad_sync"')
    panel = "Waiting for data and for other ranks"

    assert_panel(tmp_path, "training-ranks", panel, late_scrapes, {"{}": 100}, query_id="C", factor=100)


def test_ranks_in_one_line_of_different_phases_hang_at_different_positions(tmp_path: Path) -> None:
    position = 'function="wait",location="job.py:50",phase="{}"'
    series = {
        f'training_hang_info{{run="a",instance="n1",rank="{rank}",{position.format(phase)}}}': "1x60"
        for rank, phase in enumerate(("forward", "grad_sync", "grad_sync"))
    }
    expected = {
        f'{{instance="n1",rank="{rank}",{position.format(phase)}}}': count
        for rank, phase, count in ((0, "forward", 1), (1, "grad_sync", 2), (2, "grad_sync", 2))
    }

    assert_panel(
        tmp_path,
        "training-ranks",
        "Where hanging ranks wait",
        series,
        expected,
        column="Ranks here",
    )


def test_the_ranks_are_not_alike_while_a_rank_is_unknown(tmp_path: Path) -> None:
    series = RANKS | STEPPING
    for rank in (0, 1):
        series |= run_series("rank_compute_seconds", "1x60", labels=f',rank="{rank}"')

    for world_size, expected in ((2, {'{who="all ranks alike"}': 100}), (3, {})):
        series |= run_series("world_size", f"{world_size}x60")
        assert_panel(tmp_path, "training-ranks", "Slowest rank", series, expected, factor=100)


def test_no_rank_is_named_if_all_ranks_wait_for_data(tmp_path: Path) -> None:
    series = RANKS | STEPPING
    for rank, seconds in ((0, 6), (1, 9)):
        series |= run_series(
            "phase_seconds_total", f"0+{seconds}x60", labels=f',rank="{rank}",phase="data_loading"'
        )
    panel = "Waiting for data, last 2 min"

    assert_panel(tmp_path, "training-ranks", panel, series, {'{whose="each rank, at least"}': 40}, factor=100)


def test_a_rank_that_ended_has_no_speed_and_a_hanging_rank_has_its_phase_and_the_start_of_the_phase(
    tmp_path: Path,
) -> None:
    phase = run_series("phase_active", "1x60", labels=',rank="0",phase="grad_sync"')
    start = run_series("phase_active_since_timestamp_seconds", "300x60", labels=',rank="0"')
    ended = RANKS | STEPPING | SLOW_RANK | run_series("process_up", "1x59 0", labels=',rank="1"')
    rows = {'{instance="n1",rank="0",phase="grad_sync"}': 1, '{instance="n1",rank="1"}': 1}

    assert_panel(
        tmp_path,
        "training-ranks",
        RANK_TABLE,
        ended,
        {'{instance="n1",rank="0"}': 100},
        column="Speed",
        factor=100,
    )
    assert_panel(tmp_path, "training-ranks", RANK_TABLE, HUNG | phase | start, rows)
    assert_panel(
        tmp_path,
        "training-ranks",
        RANK_TABLE,
        HUNG | phase | start,
        {'{instance="n1",rank="0"}': 300_000},
        column="In phase since",
    )


def test_a_run_that_died_loses_its_usual_cost(tmp_path: Path) -> None:
    panel = "Lost: slowest rank or no step"

    assert_panel(tmp_path, "training-ranks", panel, DIED, {"{}": 100}, factor=100)
    assert_panel(tmp_path, "training-ranks", panel, DIED, {'{currency="EUR"}': 36}, query_id="C")
