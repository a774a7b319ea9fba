"""Values of the first screens of *Run* and *Ranks*, for synthetic series, evaluated by promtool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dashboards_support import panel_queries
from panel_support import assert_panel, run_series
from rules_support import ROOT, needs_promtool

pytestmark = needs_promtool

RANKS = (
    run_series("run_state", "1x60", labels=',state="running"')
    | run_series("wall_seconds_total", "0+15x60")
    | run_series("process_up", "1x60", labels=',rank="0"')
    | run_series("process_up", "1x60", labels=',rank="1"')
)
"""A live run of two ranks on n1."""
RANK_1 = 'instance="n1",rank="1"'
GPU_1 = 'gpu="1",uuid="G1"'
RANK_1_ON_GPU_1 = {f'training_rank_info{{run="a",{RANK_1},{GPU_1}}}': "1x60"}
HANG = {
    f'training_hang_info{{run="a",{RANK_1},function="read",location="data.py:40",phase="forward"}}': "_x40 1x20",
    'training_hang_info{run="a",instance="n1",rank="0",function="all_reduce",location="train.py:8",phase="grad_sync"}': "_x40 1x20",
}
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
NONFINITE_BEFORE = run_series("nonfinite_total", "_x21 1+15x9 136x30", labels=',kind="loss",value="nan"')
"""Steps with a NaN loss, the last of them seven minutes before the end of the time range."""
SLOW_RANK = run_series("rank_compute_seconds", "1x60", labels=',rank="0"') | run_series(
    "rank_compute_seconds", "1x20 1.5x40", labels=',rank="1"'
)
HOT_GPU = RANK_1_ON_GPU_1 | {
    f'gpu_clocks_event_seconds_total{{instance="n1",{GPU_1},reason="thermal"}}': "0x20 9+9x40"
}
DATA_STALL = run_series("phase_seconds_total", "0x20 7.5+7.5x39", labels=',rank="1",phase="data_loading"')
HUNG = (
    RANKS
    | run_series("run_state", "1x39 0x20", labels=',state="running"')
    | run_series("run_state", "0x39 1x20", labels=',state="hung"')
    | run_series("run_state_since_timestamp_seconds", "0x39 600x20")
    | run_series("last_progress_timestamp_seconds", "0+15x20 300x40", labels=',rank="0"')
)
"""A run that makes no step from 5 min on, and hangs from 10 min on."""


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        pytest.param(RANKS, {'problem="no problem found"': -1}, id="healthy run"),
        pytest.param(
            RANKS
            | {
                f'training_rank_info{{run="a",{RANK_1},{GPU_1}}}': "1x20 stale",
                f'gpu_up{{instance="n1",{GPU_1}}}': "1x20 0x40",
                f'gpu_xid_last_timestamp_seconds{{instance="n1",{GPU_1},xid="79"}}': "_x21 305x39",
            },
            {f'problem="GPU 1 lost, Xid 79",{RANK_1},gpu="1"': 300_000},
            id="lost GPU",
        ),
        pytest.param(
            RANKS
            | RANK_1_ON_GPU_1
            | run_series("rank_compute_seconds", "1x60", labels=',rank="0"')
            | run_series("rank_compute_seconds", "1x20 1.5x40", labels=',rank="1"')
            | {
                f'gpu_clocks_event_seconds_total{{instance="n1",{GPU_1},reason="thermal"}}': "0x20 9+9x40",
                f'gpu_temperature_celsius{{instance="n1",{GPU_1},sensor="gpu"}}': "60x20 89x40",
            },
            {
                f'problem="computes at 67 % of the fastest rank",{RANK_1},gpu="1"': 300_000,
                f'problem="GPU 1 throttled by heat or the power brake, 89 °C",{RANK_1},gpu="1"': 300_000,
            },
            id="straggler on a hot GPU",
        ),
        pytest.param(
            HUNG | HANG,
            {
                f'problem="holds up the others: read data.py:40",{RANK_1}': 600_000,
                'problem="no rank finishes a step"': 300_000,
            },
            id="hang",
        ),
        pytest.param(
            RANKS
            | run_series("run_state", "1x39 0x20", labels=',state="running"')
            | run_series("run_state", "0x39 1x20", labels=',state="failed"')
            | run_series("process_up", "1x39 0x20", labels=',rank="1"')
            | run_series(
                "rank_last_exit_timestamp_seconds", "_x40 590x20", labels=',rank="1",reason="exit status 1"'
            ),
            {f'problem="ended first: exit status 1",{RANK_1}': 590_000},
            id="ended rank",
        ),
        pytest.param(
            RANKS
            | run_series(
                "rank_last_exit_timestamp_seconds",
                "_x21 300x40",
                labels=',rank="1",reason="inferred: the process was killed or crashed"',
            )
            | run_series(
                "rank_last_exit_timestamp_seconds", "_x21 301x40", labels=',rank="0",reason="signal SIGTERM"'
            ),
            {f'problem="restarted after: killed or crashed",{RANK_1}': 300_000},
            id="kill and restart",
        ),
        pytest.param(
            run_series("run_state", "1x20 stale", labels=',state="running"')
            | run_series("process_up", "1x20 stale", labels=',rank="0"')
            | run_series("process_up", "1x20 stale", labels=',rank="1"'),
            {'problem="exporter down, ranks unknown: 2",instance="n1"': 300_000},
            id="exporter down",
        ),
        pytest.param(
            RANKS
            | run_series("nonfinite_total", "_x21 1+15x39", labels=',kind="loss",value="nan"')
            | run_series("checkpoints_total", "_x21 1x18 2x20", labels=',kind="full",result="failed"')
            | run_series("checkpoint_last_success_timestamp_seconds", "240x60"),
            {
                'problem="loss was NaN or infinite in 586 steps"': 330_000,
                'problem="no checkpoint: 2 saves failed"': 240_000,
            },
            id="NaN and failing saves",
        ),
        pytest.param(
            RANKS
            | run_series("phase_seconds_total", "0x20 7.5+7.5x39", labels=',rank="1",phase="data_loading"'),
            {f'problem="waits longest for data: 50 % of the time",{RANK_1}': 300_000},
            id="loader stall",
        ),
        pytest.param(
            DIED,
            {
                f'problem="ended first: signal SIGKILL",{RANK_1}': 600_000,
                'problem="ended: exit status 1",instance="n1",rank="0"': 605_000,
            },
            id="killed rank",
        ),
        pytest.param(
            RANKS | NONFINITE_BEFORE,
            {'problem="loss was NaN or infinite in 136 steps, none recently"': 330_000},
            id="NaN in the past",
        ),
        pytest.param({}, {'problem="unknown: no sample of this run"': -1}, id="unknown run"),
    ],
)
def test_a_problem_is_named_with_rank_gpu_and_start(
    tmp_path: Path, series: dict[str, str], expected: dict[str, float]
) -> None:
    rows = {f"{{{labels}}}": value for labels, value in expected.items()}

    assert_panel(tmp_path, "training-run", "What is wrong", series, rows, query_id="B")


def test_both_dashboards_name_the_same_problems() -> None:
    run, ranks = (
        [query.expression for query in panel_queries(uid) if query.panel == "What is wrong"]
        for uid in ("training-run", "training-ranks")
    )

    assert run == ranks


def test_problems_that_stop_the_run_are_first(tmp_path: Path) -> None:
    waiting = run_series("phase_seconds_total", "0x20 7.5+7.5x39", labels=',rank="1",phase="data_loading"')
    effects = {
        f'{{problem="holds up the others: read data.py:40",{RANK_1}}}': 6.0,
        '{problem="no rank finishes a step"}': 5.0,
        f'{{problem="waits longest for data: 50 % of the time",{RANK_1}}}': 2.0,
    }

    assert_panel(tmp_path, "training-run", "What is wrong", HUNG | HANG | waiting, effects)


def test_the_state_names_the_rank_that_holds_up_a_hang(tmp_path: Path) -> None:
    expected = {'{state="hung",culprit=", rank 1 on n1"}': 10.0}

    assert_panel(tmp_path, "training-run", "State", HUNG | HANG, expected)


def test_the_state_names_the_rank_of_a_lost_gpu(tmp_path: Path) -> None:
    lost = {
        f'training_rank_info{{run="a",{RANK_1},{GPU_1}}}': "1x20 stale",
        f'gpu_up{{instance="n1",{GPU_1}}}': "1x20 0x40",
    }
    expected = {'{state="running",culprit=", GPU of rank 1 on n1 lost"}': 0.0}

    assert_panel(tmp_path, "training-run", "State", RANKS | lost, expected)


def test_the_row_of_a_rank_names_the_lost_gpu(tmp_path: Path) -> None:
    series = RANKS | {
        f'training_rank_info{{run="a",{RANK_1},{GPU_1}}}': "1x20 stale",
        'training_rank_info{run="a",instance="n1",rank="0",gpu="0",uuid="G0"}': "1x60",
        f'gpu_up{{instance="n1",{GPU_1}}}': "1x20 0x40",
    }
    rows = {
        f'{{{RANK_1},gpu="1",problem="GPU 1 lost"}}': 300.0,
        '{instance="n1",rank="0",gpu="0"}': 1.0,
    }

    assert_panel(tmp_path, "training-ranks", "All ranks, the slowest first", series, rows)


def test_the_rank_that_holds_up_a_hang_is_selected_first(tmp_path: Path) -> None:
    series = HUNG | HANG | run_series("rank_info", "1x60", labels=',rank="0"')

    assert_panel(tmp_path, "training-ranks", "$rank", series, {'{rank="1"}': 1e6, '{rank="0"}': 0.0})


@pytest.mark.parametrize(("query_id", "expected"), [("A", {}), ("B", {"{}": 1.0})])
def test_a_rank_that_hangs_in_a_phase_of_work_is_not_shown_as_work(
    tmp_path: Path, query_id: str, expected: dict[str, float]
) -> None:
    series = HUNG | run_series("phase_seconds_total", "0+15x60", labels=',rank="1",phase="forward"')

    assert_panel(tmp_path, "training-ranks", "Ranks by phase", series, expected, query_id=query_id)


COSTLY_RUN = RANKS | run_series("cost_total", "0+0.15x60", labels=',kind="device_time",currency="EUR"')
"""A run that costs 36 EUR per hour."""
TWO_GPUS = RANK_1_ON_GPU_1 | {'training_rank_info{run="a",instance="n1",rank="0",gpu="0",uuid="G0"}': "1x60"}


@pytest.mark.parametrize(
    ("query_id", "value", "labels"), [("A", 50, ""), ("B", 100, ""), ("C", 1800, ',currency="EUR"')]
)
def test_steps_with_a_nan_loss_are_lost_in_time_gpu_hours_and_money(
    tmp_path: Path, query_id: str, value: float, labels: str
) -> None:
    series = (
        COSTLY_RUN
        | TWO_GPUS
        | run_series("steps_total", "0+15x60", labels=',rank="0",mode="train"')
        | run_series("nonfinite_total", "0+7.5x60", labels=',kind="loss",value="nan"')
    )
    expected = {f'{{cause="nonfinite_loss"{labels}}}': value}

    assert_panel(
        tmp_path, "training-run", "Lost per hour, by cause", series, expected, query_id=query_id, factor=100
    )


@pytest.mark.parametrize(
    ("series", "cause"),
    [
        (RANKS, "nothing"),
        (run_series("run_state", "1x60", labels=',state="finished"'), "ended"),
        ({}, "unknown"),
    ],
)
def test_a_run_without_a_loss_says_why(tmp_path: Path, series: dict[str, str], cause: str) -> None:
    assert_panel(tmp_path, "training-run", "Lost per hour, by cause", series, {f'{{cause="{cause}"}}': 0})


@pytest.mark.parametrize(
    ("interval_seconds", "query_id", "value", "labels"),
    [
        (300, "A", 600, '{note="unsaved"}'),
        (100, "A", 600, '{note="unsaved, save overdue"}'),
        (300, "B", 6, '{currency="EUR"}'),
    ],
)
def test_unsaved_work_has_a_cost_and_is_bad_after_three_intervals(
    tmp_path: Path, interval_seconds: int, query_id: str, value: float, labels: str
) -> None:
    series = (
        COSTLY_RUN
        | run_series("uncommitted_seconds", "600x60")
        | run_series("checkpoint_interval_seconds", f"{interval_seconds}x60")
    )

    assert_panel(tmp_path, "training-run", "Work at risk or lost", series, {labels: value}, query_id=query_id)


@pytest.mark.parametrize(
    ("query_id", "value", "labels"), [("A", 100, "{}"), ("B", 200, "{}"), ("C", 3600, '{currency="EUR"}')]
)
def test_all_gpus_of_a_hung_run_wait_and_a_lost_gpu_too(
    tmp_path: Path, query_id: str, value: float, labels: str
) -> None:
    lost = {
        f'training_rank_info{{run="a",{RANK_1},{GPU_1}}}': "1x20 stale",
        f'gpu_up{{instance="n1",{GPU_1}}}': "1x20 0x40",
    }
    series = COSTLY_RUN | HUNG | TWO_GPUS | lost

    assert_panel(
        tmp_path,
        "training-ranks",
        "Cost of the slowest rank",
        series,
        {labels: value},
        query_id=query_id,
        factor=100,
    )


def test_without_a_sample_of_the_run_it_is_unknown_whether_a_rank_hangs(tmp_path: Path) -> None:
    for series, text in ((RANKS, "no rank hangs"), ({}, "unknown: no sample of this run")):
        assert_panel(
            tmp_path, "training-ranks", "Rank that holds up a hang", series, {f'{{odd="{text}"}}': 0}
        )


def test_the_rank_that_ended_first_is_above_the_ranks_that_follow(tmp_path: Path) -> None:
    effects = {
        f'{{problem="ended first: signal SIGKILL",{RANK_1}}}': 6.0,
        '{problem="ended: exit status 1",instance="n1",rank="0"}': 5.0,
    }

    assert_panel(tmp_path, "training-run", "What is wrong", DIED, effects)


@pytest.mark.parametrize(
    ("panel", "query_id", "expected"),
    [
        ("Work at risk or lost", "A", {'{note="lost"}': 600}),
        ("Work at risk or lost", "B", {'{currency="EUR"}': 6}),
        ("Slowest rank", "A", {}),
    ],
)
def test_a_run_that_died_has_lost_its_unsaved_work_and_has_no_slowest_rank(
    tmp_path: Path, panel: str, query_id: str, expected: dict[str, float]
) -> None:
    assert_panel(tmp_path, "training-run", panel, DIED, expected, query_id=query_id)


@pytest.mark.parametrize(("alert", "effect"), [("1x60", 4), ("1x20 stale", 1)])
def test_a_nan_loss_endangers_work_until_its_alert_ends(tmp_path: Path, alert: str, effect: int) -> None:
    series = (
        RANKS
        | NONFINITE_BEFORE
        | {'ALERTS{alertname="TrainingLossNonFinite",alertstate="firing",severity="critical",run="a"}': alert}
    )
    expected = {'{problem="loss was NaN or infinite in 136 steps, none recently"}': effect}

    assert_panel(tmp_path, "training-run", "What is wrong", series, expected)


@pytest.mark.parametrize(
    ("series", "cause"),
    [
        (SLOW_RANK, "slowed by rank 1 on n1"),
        (DATA_STALL, "slowed by the data of rank 1 on n1"),
        (HOT_GPU, "GPU of rank 1 on n1 throttled"),
    ],
    ids=["straggler", "data stall", "hot GPU"],
)
def test_the_state_of_a_slow_run_is_a_warning_that_names_the_rank(
    tmp_path: Path, series: dict[str, str], cause: str
) -> None:
    expected = {f'{{state="running",culprit=", {cause}"}}': 1.0}

    assert_panel(tmp_path, "training-run", "State", RANKS | series, expected)


@pytest.mark.parametrize(("state", "expected"), [("running", {"{}": 600}), ("finished", {})])
def test_only_a_run_that_has_not_finished_has_an_age_of_its_last_step(
    tmp_path: Path, state: str, expected: dict[str, float]
) -> None:
    series = run_series("run_state", "1x60", labels=f',state="{state}"') | run_series(
        "last_progress_timestamp_seconds", "300x60", labels=',rank="0"'
    )

    assert_panel(tmp_path, "training-run", "Last step", series, expected)


@pytest.mark.parametrize("uid", ["training-run", "training-ranks"])
def test_the_table_of_problems_has_the_meaning_of_an_xid_and_is_sorted_by_effect_and_start(uid: str) -> None:
    model = json.loads((ROOT / f"dashboards/json/{uid}.json").read_text(encoding="utf-8"))
    panel = next(panel for panel in model["panels"] if panel["title"] == "What is wrong")
    texts = json.dumps(panel["fieldConfig"]["overrides"])

    assert '"/Xid 79$/", "result": {"text": "Xid 79 (GPU has fallen off the bus)"}' in texts
    assert [column["displayName"] for column in panel["options"]["sortBy"]] == ["Effect", "Since"]
