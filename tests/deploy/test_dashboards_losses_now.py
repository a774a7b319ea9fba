"""Current losses and costs of runs on the dashboard *Energy and cost*, for synthetic series, evaluated by promtool."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from loss_panel_support import COSTLY_RUN, HANG
from panel_support import assert_panel, assert_queries, run_series
from rules_support import needs_promtool
from run_panel_support import SLOW_RANK

from dashboards.energy import ReadingQuality
from dashboards.energy_overview import UNKNOWN_WATTS
from dashboards.verdicts import ENDANGERS_WORK, LOSES_TIME, NO_PROBLEM, NO_PROGRESS, Verdict

pytestmark = needs_promtool


def test_a_loss_has_its_start(tmp_path: Path) -> None:
    stall = run_series("badput_seconds_total", "0x20 0+7.5x40", labels=',cause="data_stall"')

    assert_panel(
        tmp_path,
        "training-energy",
        "Losses now",
        COSTLY_RUN | stall,
        {
            '{run="a",cause="data_stall"}': 315_000
        },  # the first point at which the stall is above 5 % of two minutes is 15 s later
        column="Since",
    )
    assert_panel(
        tmp_path,
        "training-energy",
        "Losses now",
        HANG,
        {'{run="a",cause="standstill"}': 360_000},
        column="Since",
    )


@pytest.mark.parametrize(
    ("series", "cause", "euros_per_hour"),
    [
        pytest.param(
            run_series("last_progress_timestamp_seconds", "0+15x50 750x10", labels=',rank="0"'),
            "standstill",
            36,
            id="no step for two minutes",
        ),
        pytest.param(
            run_series("badput_seconds_total", "0+7.5x60", labels=',cause="data_stall"'),
            "data_stall",
            18,
            id="half of the time is a data stall",
        ),
        pytest.param(
            run_series("rank_compute_seconds", "0.5x60", labels=',rank="0"')
            | run_series("rank_compute_seconds", "1x60", labels=',rank="1"')
            | run_series("rank_info", "1x60", labels=',rank="0"')
            | run_series("rank_info", "1x60", labels=',rank="1"')
            | run_series("step_duration_seconds_sum", "0+15x60", labels=',mode="train"')
            | run_series("step_duration_seconds_count", "0+15x60", labels=',mode="train"'),
            "slowest_rank",
            18,
            id="a rank needs half of each step longer than the other rank",
        ),
    ],
)
def test_the_loss_per_hour_counts_a_standstill_a_stall_and_a_slow_rank(
    tmp_path: Path, series: dict[str, str], cause: str, euros_per_hour: float
) -> None:
    total = {'{currency="EUR"}': euros_per_hour}
    by_cause = {f'{{run="a",cause="{cause}"}}': euros_per_hour}

    assert_panel(
        tmp_path, "training-energy", "Cost per hour, 5 min", COSTLY_RUN | series, total, query_id="B"
    )
    assert_panel(tmp_path, "training-energy", "Losses now", COSTLY_RUN | series, by_cause, column="Lost/h")


def test_a_planned_loss_has_no_start(tmp_path: Path) -> None:
    saves = COSTLY_RUN | run_series("badput_seconds_total", "0+1.2x60", labels=',cause="checkpoint_save"')

    assert_panel(tmp_path, "training-energy", "Losses now", saves, {}, column="Since")


def test_a_wait_has_no_loss_since_its_start(tmp_path: Path) -> None:
    stall = COSTLY_RUN | run_series("badput_seconds_total", "0x20 0+7.5x40", labels=',cause="data_stall"')

    assert_panel(tmp_path, "training-energy", "Losses now", stall, {}, column="Lost")


def test_the_lost_share_is_weighted_by_cost_and_without_a_price_by_gpus(tmp_path: Path) -> None:
    stall = run_series("badput_seconds_total", "0+7.5x60", labels=',cause="data_stall"')
    healthy = {name.replace('run="a"', 'run="b"'): values for name, values in COSTLY_RUN.items()}
    gpus = {
        'run:training_gpus:count{run="a"}': "4x60",
        'run:training_gpus:count{run="b"}': "12x60",
    }
    series = COSTLY_RUN | stall | healthy | gpus
    without_price = {name: values for name, values in series.items() if "cost_total" not in name}
    panel = "Cost per hour, 5 min"

    of_cost, of_gpu_time = {'{text="of it lost"}': 25}, {'{text="of the GPU time lost"}': 13}
    assert_panel(tmp_path, "training-energy", panel, series, of_cost, query_id="C", factor=100)
    assert_panel(tmp_path, "training-energy", panel, without_price, of_gpu_time, query_id="C", factor=100)


def test_a_run_that_has_ended_loses_nothing_more(tmp_path: Path) -> None:
    series = COSTLY_RUN | run_series("badput_seconds_total", "0+7.5x60", labels=',cause="validation"')
    ended = {name: values for name, values in series.items() if "run_state" not in name} | run_series(
        "run_state", "1x60", labels=',state="finished"'
    )

    row = {'{cause="ended"}': 0}
    assert_panel(tmp_path, "training-energy", "Losses now", ended, row)
    assert_panel(tmp_path, "training-energy", "Losses now", ended, {}, column="Lost/h")


def test_a_run_whose_outcome_is_not_known_yet_is_ending_and_has_not_ended(tmp_path: Path) -> None:
    ending = {name.replace("running", "ending"): values for name, values in COSTLY_RUN.items()}

    row = {'{run="a",cause="ending"}': 0}
    assert_panel(tmp_path, "training-energy", "Losses now", ending, row)


def test_a_killed_run_loses_all_of_its_usual_cost_since_its_exit(tmp_path: Path) -> None:
    killed = (
        {name: values for name, values in COSTLY_RUN.items() if "run_state" not in name}
        | run_series("run_state", "1x59 0", labels=',state="running"')
        | run_series("run_state", "0x59 1", labels=',state="lost"')
        | run_series("badput_seconds_total", "0+1.2x60", labels=',cause="checkpoint_save"')
        | run_series("last_progress_timestamp_seconds", "0+15x59 885", labels=',rank="0"')
        | run_series("attempt_start_timestamp_seconds", "0x60")
        | run_series("uncommitted_seconds", "300x60")
        | run_series(
            "rank_last_exit_timestamp_seconds", "_x60 895", labels=',rank="1",reason="signal SIGKILL"'
        )
    )

    rows: dict[str, dict[str, float]] = {
        "A": {'{run="a",instance="n1",rank="1",cause="failed",reason="signal SIGKILL"}': 0},
        "B": {'{run="a",cause="failed"}': Verdict.NO_PROGRESS},
        "C": {'{run="a",cause="failed"}': 1},  # share
        "D": {'{run="a",cause="failed"}': 36},  # cost while the job holds the GPUs
        "F": {'{run="a",cause="failed"}': 895_000},  # since the exit
    }
    assert_queries(tmp_path, "training-energy", "Losses now", killed, rows)


KILLED_RUN = (
    {name: values for name, values in COSTLY_RUN.items() if "run_state" not in name}
    | run_series("run_state", "1x40 0x20", labels=',state="running"')
    | run_series("run_state", "0x40 1x20", labels=',state="lost"')
    | run_series("wall_seconds_total", "0+15x40 600x20")
    | run_series("cost_total", "0+0.15x40 6x20", labels=',kind="device_time",currency="EUR"')
    | run_series("last_progress_timestamp_seconds", "0+15x40 600x20", labels=',rank="0"')
    | run_series("uncommitted_seconds", "300x60")
    | run_series("energy_joules_total", "0+15000x40 600000x20")
    | run_series(
        "rank_last_exit_timestamp_seconds", "_x41 600x20", labels=',rank="1",reason="signal SIGKILL"'
    )
    | run_series("rank_info", "1x40 stale", labels=',rank="1",gpu="3",uuid="G3"')
    | {'gpu_power_watts{instance="n1",gpu="3",uuid="G3"}': "700x40 70x20"}
)
"""Series of a run that is killed after 10 min of work, of which 5 min are not saved."""


@pytest.mark.parametrize(
    ("panel", "query", "factor", "expected"),
    [
        ("Losses now", {"column": "Lost"}, 1, {'{run="a",cause="failed"}': 6}),
        ("Cost per hour, 5 min", {"query_id": "A"}, 1, {'{currency="EUR"}': 36}),
        ("Cost per hour, 5 min", {"query_id": "B"}, 1, {'{currency="EUR"}': 36}),
        ("Cost per hour, 5 min", {"query_id": "C"}, 1, {'{text="of it lost"}': 1}),
        ("GPU power now", {"query_id": "A"}, 1, {'{gpus="1"}': 70}),
        ("Cost and loss of each run", {"column": "Power"}, 1, {'{run="a"}': 70}),
        ("Cost and loss of each run", {"column": "Lost now"}, 100, {'{run="a"}': 100}),
        ("Cost, loss and energy of each run, in this time range", {"column": "Lost"}, 1, {'{run="a"}': 6}),
        ("Cost, loss and energy of each run, in this time range", {"column": "Cost"}, 1, {'{run="a"}': 9}),
        ("Lost in this time range", {"query_id": "A"}, 1, {'{currency="EUR"}': 6}),
        (
            "Where time, energy and money went, in this time range",
            {"column": "Cost"},
            1,
            {'{cause="downtime"}': 3, '{cause="lost_progress"}': 3, '{cause="progress"}': 3},
        ),
        (
            "Where time, energy and money went, in this time range",
            {"column": "Energy"},
            36,
            {'{cause="lost_progress"}': 3000, '{cause="progress"}': 3000},
        ),
    ],
)
def test_a_killed_run_costs_its_usual_rate_draws_idle_power_and_has_lost_its_unsaved_work(
    tmp_path: Path, panel: str, query: dict[str, str], factor: int, expected: dict[str, float]
) -> None:
    assert_panel(
        tmp_path,
        "training-energy",
        panel,
        KILLED_RUN,
        expected,
        query_id=query.get("query_id", "A"),
        column=query.get("column", ""),
        factor=factor,
    )


@pytest.mark.parametrize(
    ("state", "cost"), [("lost", 195), ("stopped", 0)], ids=["the job holds the GPUs", "stopped on purpose"]
)
def test_the_time_between_attempts_costs_the_usual_rate_while_the_job_holds_the_gpus(
    tmp_path: Path, state: str, cost: int
) -> None:
    restarted = (
        run_series("run_state", "1x40 0x12 1x8", labels=',state="running"')
        | run_series("run_state", "0x40 1x12 0x8", labels=f',state="{state}"')
        | run_series("wall_seconds_total", "0+15x40 600x12 795+15x7")
        | run_series("badput_seconds_total", "0x53 195x7", labels=',cause="downtime"')
        | run_series("cost_total", "0+0.15x40 6x12 6+0.15x7", labels=',kind="device_time",currency="EUR"')
    )

    assert_panel(
        tmp_path,
        "training-energy",
        "Lost in this time range",
        restarted,
        {'{currency="EUR"}': cost},
        factor=100,
    )


def test_a_small_loss_to_a_slow_rank_is_not_usual_and_has_its_start(tmp_path: Path) -> None:
    durations = run_series("step_duration_seconds_sum", "0+75x60", labels=',mode="train"') | run_series(
        "step_duration_seconds_count", "0+15x60", labels=',mode="train"'
    )

    row = '{run="a",cause="slowest_rank"}'
    values = {"B": {row: 1}, "F": {row: 315_000}}

    assert_queries(tmp_path, "training-energy", "Losses now", COSTLY_RUN | SLOW_RANK | durations, values)


@pytest.mark.parametrize("end", ["x120", "x20 stale"], ids=["reported", "not reported any more"])
def test_the_totals_of_an_ended_run_are_its_last_values_marked_as_ended(tmp_path: Path, end: str) -> None:
    series = (
        run_series("run_state", f"1x4 0{end}", labels=',state="running"')
        | run_series("run_state", f"0x4 1{end}", labels=',state="finished"')
        | run_series("cost_total", f"0x4 5{end}", labels=',kind="device_time",currency="EUR"')
        | run_series("energy_joules_total", f"0x4 7200{end}")
    )
    panel = "Since the start of the runs, without downtime"

    assert_panel(
        tmp_path, "training-energy", panel, series, {'{currency="EUR",note=", ended"}': 5}, minutes=30
    )
    assert_panel(
        tmp_path, "training-energy", panel, series, {'{note=", ended"}': 2}, query_id="B", minutes=30
    )
    assert_panel(
        tmp_path,
        "training-energy",
        "Cost, loss and energy of each run, in this time range",
        series,
        {'{run="a",state="finished"}': 1},
        minutes=30,
    )
    assert_panel(
        tmp_path,
        "training-energy",
        "Cost per hour, 5 min",
        series,
        {'{currency="EUR"}': 0},
        minutes=30,
    )


def test_a_share_below_one_percent_is_no_loss(tmp_path: Path) -> None:
    wait = run_series("badput_seconds_total", "0+0.12x60", labels=',cause="data_stall"')

    assert_panel(tmp_path, "training-energy", "Losses now", COSTLY_RUN | wait, {'{cause="nothing"}': 0})


def test_ended_runs_cost_and_lose_nothing_per_hour(tmp_path: Path) -> None:
    ended = {name: values for name, values in COSTLY_RUN.items() if "run_state" not in name} | run_series(
        "run_state", "1x60", labels=',state="finished"'
    )
    zero = {'{currency="EUR"}': 0}

    panel = "Cost per hour, 5 min"
    assert_panel(tmp_path, "training-energy", panel, ended, zero, query_id="B")
    assert_panel(tmp_path, "training-energy", panel, ended, zero)
    assert_panel(tmp_path, "training-energy", panel, NO_EXPORTER, {})


def test_the_plot_of_the_total_cost_has_a_gap_while_the_cost_of_a_run_is_unknown(tmp_path: Path) -> None:
    other_run = {name.replace('run="a"', 'run="b"'): values for name, values in COSTLY_RUN.items()}
    total = {'{kind="device_time",currency="EUR"}': 36}
    series = NO_EXPORTER | other_run

    assert_panel(tmp_path, "training-energy", "Cost per hour", series, {}, minutes=7)
    assert_panel(tmp_path, "training-energy", "Cost per hour", series, total, minutes=15)


def test_a_run_without_a_loss_has_a_row_that_says_so(tmp_path: Path) -> None:
    row = {'{cause="nothing"}': 0}

    assert_panel(tmp_path, "training-energy", "Losses now", COSTLY_RUN, row)
    assert_panel(tmp_path, "training-energy", "Losses now", {}, {})


def test_a_run_that_makes_no_step_is_not_shown_as_running(tmp_path: Path) -> None:
    panel = "Cost, loss and energy of each run, in this time range"
    stands_still = COSTLY_RUN | run_series(
        "last_progress_timestamp_seconds", "0+15x20 300x40", labels=',rank="0"'
    )

    assert_panel(tmp_path, "training-energy", panel, stands_still, {'{run="a",state="no step"}': 1})
    assert_panel(tmp_path, "training-energy", panel, COSTLY_RUN, {'{run="a",state="running"}': 1})


@pytest.mark.parametrize("minutes", [1, 3, 15])
def test_the_cost_per_hour_is_right_in_the_first_minutes(tmp_path: Path, minutes: int) -> None:
    labels = '{kind="device_time",currency="EUR"}'
    expected = {labels: 36.0}

    assert_panel(tmp_path, "training-energy", "Cost per hour", COSTLY_RUN, expected, minutes=minutes)


LOST_GPU = {
    'training_rank_info{run="a",instance="n1",rank="1",gpu="3",uuid="G3"}': "1x20 stale",
    'gpu_up{instance="n1",gpu="3",uuid="G3"}': "1x20 0x40",
    'gpu_xid_last_timestamp_seconds{instance="n1",gpu="3",uuid="G3",xid="79"}': "_x21 305x39",
}
HUNG_RANK = {
    'training_hang_info{run="a",instance="n1",rank="1",function="wait",location="job.py:39",phase="forward"}': "_x40 1x20"
}
STRAGGLER = (
    run_series("rank_compute_seconds", "0.5x60", labels=',rank="0"')
    | run_series("rank_compute_seconds", "1x60", labels=',rank="1"')
    | run_series("rank_info", "1x60", labels=',rank="0"')
    | run_series("rank_info", "1x60", labels=',rank="1",gpu="3",uuid="G3"')
    | run_series("step_duration_seconds_sum", "0+15x60", labels=',mode="train"')
    | run_series("step_duration_seconds_count", "0+15x60", labels=',mode="train"')
)
PIPELINE_STRAGGLER = {
    name: values
    for rank, stage, seconds in ((0, 0, 0.52), (1, 0, 1), (2, 1, 3), (3, 1, 3))
    for series in (
        run_series("rank_compute_seconds", f"{seconds}x60", labels=f',rank="{rank}"'),
        run_series("rank_info", "1x60", labels=f',rank="{rank}",label_stage="{stage}"'),
        run_series("step_duration_seconds_sum", "0+15x60", labels=',mode="train"'),
        run_series("step_duration_seconds_count", "0+15x60", labels=',mode="train"'),
    )
    for name, values in series.items()
}
"""Two pipeline stages: rank 1 of the first stage is slow, the ranks of the second stage need longer by design."""
RANK_1 = 'run="a",instance="n1",rank="1"'


@pytest.mark.parametrize(
    ("series", "labels", "share"),
    [
        pytest.param(
            run_series("last_progress_timestamp_seconds", "0+15x20 300x40", labels=',rank="0"')
            | run_series("process_up", "1x60", labels=',rank="1"')
            | LOST_GPU
            | HUNG_RANK,
            f'{RANK_1},cause="standstill",gpu="3",reason="GPU lost, Xid 79"',
            100,
            id="a lost GPU instead of the line at which its rank hangs",
        ),
        pytest.param(
            run_series("last_progress_timestamp_seconds", "0+15x20 300x40", labels=',rank="0"') | HUNG_RANK,
            f'{RANK_1},cause="standstill",reason="wait job.py:39"',
            100,
            id="hang",
        ),
        pytest.param(
            run_series("last_progress_timestamp_seconds", "0+15x20 300x40", labels=',rank="0"')
            | run_series("world_size", "2x60")
            | run_series("phase_active", "1x60", labels=',rank="0",phase="grad_sync"')
            | run_series("phase_active", "1x60", labels=',rank="1",phase="forward"'),
            f'{RANK_1},cause="standstill",reason="phase forward"',
            100,
            id="all other ranks wait for a rank",
        ),
        pytest.param(
            STRAGGLER
            | {'gpu_clocks_event_seconds_total{instance="n1",uuid="G3",reason="thermal"}': "0x20 9+9x40"},
            f'{RANK_1},cause="slowest_rank",gpu="3",reason="GPU throttled"',
            50,
            id="hot GPU of the slowest rank",
        ),
        pytest.param(
            PIPELINE_STRAGGLER,
            f'{RANK_1},cause="slowest_rank"',
            48,
            id="the slowest rank of its pipeline stage, not the rank with the longest compute time",
        ),
        pytest.param(
            run_series("last_progress_timestamp_seconds", "0+15x20 300x40", labels=',rank="0"')
            | HUNG_RANK
            | run_series("rank_info", "1x10 stale", labels=',rank="1",local_rank="3",uuid=""')
            | run_series("rank_info", "_x11 1x49", labels=',rank="1",local_rank="3",gpu="3"')
            | {'gpu_up{instance="n1",gpu="3",uuid="G3"}': "1x60"},
            f'{RANK_1},cause="standstill",gpu="3",reason="wait job.py:39"',
            100,
            id="GPU from the local rank, whose labels change",
        ),
    ],
)
def test_a_loss_names_rank_gpu_and_reason(
    tmp_path: Path, series: dict[str, str], labels: str, share: int
) -> None:
    assert_panel(
        tmp_path,
        "training-energy",
        "Losses now",
        COSTLY_RUN | series,
        {f"{{{labels}}}": share},
        factor=100,
    )


def test_a_standstill_names_one_rank_if_the_recorded_rank_has_changed(tmp_path: Path) -> None:
    series = (
        COSTLY_RUN
        | run_series("last_progress_timestamp_seconds", "0+15x20 300x40", labels=',rank="0"')
        | {
            f'run:training_odd_phase:info{{run="a",instance="n1",rank="{rank}",phase="forward"}}': samples
            for rank, samples in (("0", "1x59"), ("1", "_x59 2"))
        }
    )
    row = {f'{{{RANK_1},cause="standstill",reason="phase forward"}}': 1}

    assert_panel(tmp_path, "training-energy", "Losses now", series, row)


HELD_GPU = run_series("rank_info", "1x60", labels=',rank="0",gpu="0",uuid="G0"') | {
    'gpu_power_watts{instance="n1",gpu="0",uuid="G0"}': "400x60"
}


def test_a_standstill_has_its_cost_since_the_start(tmp_path: Path) -> None:
    series = (
        COSTLY_RUN
        | run_series("last_progress_timestamp_seconds", "0+15x20 300x40", labels=',rank="0"')
        | run_series("process_up", "1x60", labels=',rank="0"')
        | HELD_GPU
    )

    row = {'{run="a",cause="standstill"}': 6}
    assert_panel(tmp_path, "training-energy", "Losses now", series, row, column="Lost")


NO_EXPORTER = {name: values.replace("x60", "x20 stale") for name, values in COSTLY_RUN.items()} | run_series(
    "process_up", "1x20 stale", labels=',rank="0"'
)
ONE_OF_TWO_EXPORTERS = (
    COSTLY_RUN
    | run_series("world_size", "2x60", labels=',rank="0"')
    | run_series("process_up", "1x60", labels=',rank="0"')
    | run_series("process_up", "1x20 stale", node=2, labels=',rank="1"')
)


@pytest.mark.parametrize(
    ("series", "cause", "node", "euros_per_hour"),
    [(NO_EXPORTER, "no_news", "n1", 36), (ONE_OF_TWO_EXPORTERS, "partly_unknown", "n2", 18)],
)
def test_a_run_without_an_exporter_is_counted_and_has_a_row_with_node_and_last_sample(
    tmp_path: Path, series: dict[str, str], cause: str, node: str, euros_per_hour: float
) -> None:
    panel = "Cost per hour, 5 min"
    row = {f'{{run="a",instance="{node}",cause="{cause}"}}': 300}
    cost = {f'{{run="a",cause="{cause}"}}': euros_per_hour}

    assert_panel(tmp_path, "training-energy", "Losses now", series, cost, column="Unknown/h")
    has_known_ranks = cause == "partly_unknown"
    known_share = {'{text="of it lost"}': 0} if has_known_ranks else {}
    unknown_cost = {'{currency="EUR",text="EUR unknown"}': euros_per_hour}
    assert_panel(tmp_path, "training-energy", panel, series, known_share | unknown_cost, query_id="C")
    without_price = {name: values for name, values in series.items() if "cost_total" not in name}
    known_share = {'{text="of the GPU time lost"}': 0} if has_known_ranks else {}
    count = {'{text="runs not fully known"}': 1}
    assert_panel(tmp_path, "training-energy", panel, without_price, known_share | count, query_id="C")
    assert_panel(tmp_path, "training-energy", panel, COSTLY_RUN, {'{text="of it lost"}': 0}, query_id="C")
    assert_panel(tmp_path, "training-energy", "Losses now", series, row)


def test_the_power_of_a_run_is_unknown_while_a_gpu_has_no_power(tmp_path: Path) -> None:
    lost_gpu = HELD_GPU | {
        'gpu_power_watts{instance="n1",gpu="0",uuid="G0"}': "400x40 stale",
        'gpu_up{instance="n1",gpu="0",uuid="G0"}': "1x40 0x20",
    }
    stall = run_series("badput_seconds_total", "0+7.5x60", labels=',cause="data_stall"')
    series = COSTLY_RUN | stall | lost_gpu
    unknown = {'{run="a"}': UNKNOWN_WATTS}
    unread = {'{name="GPUs not read"}': 1}

    assert_panel(tmp_path, "training-energy", "Cost and loss of each run", series, unknown, column="Power")
    assert_panel(tmp_path, "training-energy", "GPU power now", series, unread, query_id="B")


def test_the_share_of_the_power_limits_counts_gpus_with_both_samples(tmp_path: Path) -> None:
    gpu = 'gpu_{}{{instance="n1",gpu="{}",uuid="GPU-{}"{}}}'
    series = (
        COSTLY_RUN
        | {gpu.format("power_watts", index, index, ""): "600x60" for index in (0, 1)}
        | {gpu.format("power_limit_watts", 0, 0, ',limit="enforced"'): "800x60"}
        | {
            f'training_process_gpu_memory_bytes{{run="a",instance="n1",uuid="GPU-{index}"}}': "1x60"
            for index in (0, 1)
        }
    )

    share = {'{name="of the limits"}': 75}
    assert_panel(tmp_path, "training-energy", "GPU power now", series, share, query_id="B", factor=100)


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(0.06, Verdict.NO_PROBLEM), (0.2, Verdict.LOSES_TIME), (0.6, Verdict.LOSES_MUCH_TIME)],
    ids=["usual", "loss", "large loss"],
)
def test_the_verdict_of_a_loss_depends_on_its_share_of_the_time(
    tmp_path: Path, share: float, verdict: Verdict
) -> None:
    stall = run_series("badput_seconds_total", f"0+{15 * share:g}x60", labels=',cause="data_stall"')
    row = {'{run="a",cause="data_stall"}': verdict}

    assert_panel(tmp_path, "training-energy", "Losses now", COSTLY_RUN | stall, row, column="Impact")


def _critical_xid() -> dict[str, str]:
    """Return the series of run a whose rank 1 uses a GPU with a critical Xid."""
    alert = 'alertname="GpuXidCritical",run="a",instance="n1",gpu="1",uuid="G1",xid="48"'
    return {
        f'ALERTS{{alertstate="firing",severity="critical",{alert}}}': "_x48 1x12",
        f"ALERTS_FOR_STATE{{{alert}}}": "_x48 690x12",
        'gpu:gpu_xid:timestamp_seconds{instance="n1",gpu="1",uuid="G1",xid="48"}': "_x45 675x15",
        'gpu_xid_last_timestamp_seconds{instance="n1",gpu="1",uuid="G1",xid="48"}': "_x45 675x15",
        'training_rank_info{run="a",instance="n1",rank="1",gpu="1",uuid="G1"}': "1x60",
    } | run_series("uncommitted_seconds", "300x60")


@pytest.mark.parametrize(
    ("panel", "column", "expected"),
    [
        ("Cost and loss of each run", "Verdict", {'{run="a"}': Verdict.ENDANGERS_WORK}),
        ("Cost and loss of each run", "Work at risk", {'{run="a"}': 3}),
        ("Losses now", "Impact", {}),
    ],
)
def test_a_run_with_a_critical_alert_endangers_work_and_loses_nothing_yet(
    tmp_path: Path, panel: str, column: str, expected: dict[str, float]
) -> None:
    assert_panel(tmp_path, "training-energy", panel, COSTLY_RUN | _critical_xid(), expected, column=column)


def test_a_run_that_endangers_work_has_the_problem_the_gpu_and_the_start_as_on_fleet(tmp_path: Path) -> None:
    running = COSTLY_RUN | _critical_xid() | run_series("run_info", "1x60")
    problem = 'run="a",alertname="Xid 48",instance="n1",rank="1",gpu="1"'

    assert_panel(
        tmp_path,
        "training-energy",
        "Cost and loss of each run",
        running,
        {f"{{{problem}}}": 675_000},
        column="Since",
    )
    fleet = "All runs, rates over 5 min"
    assert_panel(tmp_path, "training-fleet", fleet, running, {f'{{{problem},state="running"}}': 1})
    assert_panel(tmp_path, "training-fleet", fleet, running, {'{run="a"}': 675_000}, column="Since")


@pytest.mark.parametrize(
    ("series", "verdict"),
    [
        (COSTLY_RUN, NO_PROBLEM),
        (COSTLY_RUN | _critical_xid(), ENDANGERS_WORK),
        (HANG, NO_PROGRESS),
        (COSTLY_RUN | run_series("badput_seconds_total", "0+3x60", labels=',cause="data_stall"'), LOSES_TIME),
    ],
    ids=["no loss", "critical alert", "hang", "data stall"],
)
def test_each_run_counts_with_its_worst_verdict(tmp_path: Path, series: dict[str, str], verdict: str) -> None:
    running = series | run_series("run_info", "1x60")

    assert_panel(tmp_path, "training-energy", "Runs by verdict", running, {f'{{name="{verdict}"}}': 1})


def test_the_start_of_a_run_is_a_loss_and_no_problem(tmp_path: Path) -> None:
    starting = {name.replace('"running"', '"starting"'): values for name, values in COSTLY_RUN.items()}

    panel = "Losses now"
    share, verdict = {'{run="a",cause="init"}': 1}, {'{run="a",cause="init"}': Verdict.NO_PROBLEM}
    assert_panel(tmp_path, "training-energy", panel, starting, share, column="Lost now")
    assert_panel(tmp_path, "training-energy", panel, starting, verdict, column="Impact")


def test_a_run_without_an_exporter_ranks_below_large_losses_and_has_the_state_unknown(tmp_path: Path) -> None:
    verdict = {'{run="a",cause="no_news"}': Verdict.UNKNOWN}
    state = {'{run="a",state="unknown"}': 1}
    panel = "Cost, loss and energy of each run, in this time range"

    assert_panel(tmp_path, "training-energy", "Losses now", NO_EXPORTER, verdict, column="Impact")
    assert_panel(tmp_path, "training-energy", panel, NO_EXPORTER, state)
    start = {'{run="a",alertname="no news for 10 min",instance="n1"}': 300_000}
    assert_panel(tmp_path, "training-energy", "Cost and loss of each run", NO_EXPORTER, start, column="Since")


@pytest.mark.parametrize(
    ("panel", "query_id", "expected"),
    [
        ("Cost per hour, 5 min", "B", {'{currency="EUR"}': 19}),
        ("Cost per hour, 5 min", "C", {'{text="of it lost"}': 1}),
        ("Losses now", "D", {'{run="a",cause="data_stall"}': 19}),
        ("Cost, loss and energy of each run, in this time range", "A", {'{run="a",state="running"}': 1}),
    ],
)
def test_no_loss_disappears_and_no_run_is_unknown_if_two_scrapes_of_its_exporter_fail(
    tmp_path: Path, panel: str, query_id: str, expected: dict[str, float]
) -> None:
    # The last sample is 30 s old at the end of the time range.
    stall = run_series("badput_seconds_total", "0+8x60", labels=',cause="data_stall"')
    missed = {name: values.replace("x60", "x58 stale") for name, values in (COSTLY_RUN | stall).items()}

    assert_panel(tmp_path, "training-energy", panel, missed, expected, query_id=query_id)


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [((1, 7), ',rank="2",instance="n2"'), ((7, 7), ',reason="all ranks wait"')],
    ids=["one rank", "all ranks"],
)
def test_a_data_stall_names_a_rank_only_if_another_rank_does_not_wait(
    tmp_path: Path, seconds: tuple[int, int], labels: str
) -> None:
    stall = run_series("badput_seconds_total", "0+7.5x60", labels=',cause="data_stall"')
    phases = {
        f'training_phase_seconds_total{{run="a",instance="n{rank}",rank="{rank}",phase="data_loading"}}': f"0+{rate}x60"
        for rank, rate in enumerate(seconds, 1)
    }
    row = {f'{{run="a",cause="data_stall"{labels}}}': 50}

    assert_panel(tmp_path, "training-energy", "Losses now", COSTLY_RUN | stall | phases, row, factor=100)


def test_the_source_of_each_number_has_a_verdict(tmp_path: Path) -> None:
    device = '{{instance="n1",device="{}"{}}}'
    sources = {
        "exporter_energy_source_info" + device.format(name, f',measured="{measured}"'): "1x60"
        for name, measured in (("good", "true"), ("bad", "true"), ("cpu", "false"))
    }
    ratios = {
        "exporter_energy_crosscheck" + device.format(name, ""): f"{ratio}x60"
        for name, ratio in (("good", 1), ("bad", 0.5))
    }
    counting = {
        'training_energy_joules_total{run="a",instance="n1"}': "0+1x60",
    }
    verdicts = {
        device.format(name, "").replace("{{", "{"): verdict
        for name, verdict in (("good", 0), ("bad", 2), ("cpu", 1))
    }

    assert_panel(
        tmp_path,
        "training-energy",
        "Source of each number",
        sources | ratios | counting,
        verdicts,
        column="Reading",
    )


def read_gpus(run: str, node: str, indexes: tuple[int, ...]) -> dict[str, str]:
    """Return the series of a run that holds GPUs of a node whose energy is read."""
    series = {
        f'training_run_state{{run="{run}",instance="{node}",state="running"}}': "1x60",
        f'training_energy_joules_total{{run="{run}",instance="{node}"}}': "0+100x60",
        f'gpu_nvml_up{{instance="{node}"}}': "1x60",
    }
    for index in indexes:
        gpu, device = (
            f'instance="{node}",gpu="{index}",uuid="{node}-u{index}"',
            f'instance="{node}",device="{node}-u{index}"',
        )
        series |= {
            f"gpu_up{{{gpu}}}": "1x60",
            f"gpu_power_watts{{{gpu}}}": "400x60",
            f'exporter_energy_source_info{{{device},component="gpu",index="{index}",measured="true"}}': "1x60",
            f'training_energy_share_ratio{{{device},component="gpu",run="{run}"}}': "1x60",
        }
    return series


READ_GPUS = read_gpus("a", "n2", (0, 1)) | read_gpus("b", "n2", (2, 3))
"""Two runs on a node with two GPUs each, whose energy is read."""


def _lost_gpu(index: int) -> dict[str, str]:
    """Return replacements in `READ_GPUS`: a GPU is lost after five minutes, and has no energy reading from then on."""
    gpu, device = f'instance="n2",gpu="{index}",uuid="n2-u{index}"', f'instance="n2",device="n2-u{index}"'
    run = "a" if index < 2 else "b"
    return {
        f"gpu_up{{{gpu}}}": "1x20 0x40",
        f"gpu_power_watts{{{gpu}}}": "400x20 stale",
        f'training_energy_share_ratio{{{device},component="gpu",run="{run}"}}': "1x20 stale",
        f"exporter_energy_gap_seconds_total{{{device}}}": "0x20 15+15x39",
    }


DRIVER_DOWN = {
    name: "0x60" if name.startswith("gpu_nvml_up") else values.replace("x60", "x20 stale")
    for name, values in READ_GPUS.items()
    if re.match("gpu_(nvml_up|up|power)", name)
}
"""Replacements in `READ_GPUS`: the driver of the node does not respond from five minutes on."""
SUSPECT = {'exporter_energy_crosscheck{instance="n2",device="n2-u0"}': "0.5x60"}
GAP = {'exporter_energy_gap_seconds_total{instance="n2",device="n2-u0"}': "0x20 30x40"}


@pytest.mark.parametrize(
    ("changes", "counts_of_run", "counts_of_other_run"),
    [
        ({}, {"all devices": 0}, {"all devices": 0}),
        (_lost_gpu(1), {"GPUs lost": 1, "with gaps": 1}, {"all devices": 0}),
        (DRIVER_DOWN, {"GPUs unknown": 2}, {"GPUs unknown": 2}),
        (
            DRIVER_DOWN | _lost_gpu(1),
            {"GPUs lost": 1, "GPUs unknown": 1, "with gaps": 1},
            {"GPUs unknown": 2},
        ),
        (SUSPECT, {"suspect": 1}, {"all devices": 0}),
        (GAP, {"with gaps": 1}, {"all devices": 0}),
    ],
    ids=["all read", "lost", "driver down", "lost and driver down", "suspect", "gap"],
)
def test_the_readings_of_a_run_do_not_count_the_gpus_of_another_run_and_agree_with_the_power(
    tmp_path: Path,
    changes: dict[str, str],
    counts_of_run: dict[str, int],
    counts_of_other_run: dict[str, int],
) -> None:
    series = READ_GPUS | changes
    for run, counts in (("a", counts_of_run), ("b", counts_of_other_run)):
        selected = {"run": run}
        readings = {f'{{name="{name}"}}': count for name, count in counts.items()}
        unread = counts.get("GPUs lost", 0) + counts.get("GPUs unknown", 0)
        assert_panel(tmp_path, "training-energy", "Energy readings", series, readings, selected=selected)
        assert_panel(
            tmp_path,
            "training-energy",
            "GPU power now",
            series,
            {"{}": unread} if unread else {},
            query_id="B",
            series_name="GPUs not read",
            selected=selected,
        )


def test_lost_devices_and_devices_with_gaps_are_above_suspect_devices_and_have_gpu_and_run(
    tmp_path: Path,
) -> None:
    series = (
        READ_GPUS
        | _lost_gpu(1)
        | SUSPECT
        | {name.replace("n2-u0", "n2-u2"): values for name, values in GAP.items()}
    )
    device = '{{instance="n2",device="n2-u{}"}}'
    row = '{{component="gpu",device="n2-u{0}",index="{0}",instance="n2",run="{1}"}}'
    readings_by_run = {
        "a": {0: ReadingQuality.SUSPECT, 1: ReadingQuality.LOST},
        "b": {2: ReadingQuality.GAP, 3: ReadingQuality.MEASURED},
    }

    for run, readings in readings_by_run.items():
        assert_queries(
            tmp_path,
            "training-energy",
            "Source of each number",
            series,
            {
                "A": {row.format(index, run): 1 for index in readings},
                "B": {device.format(index): reading for index, reading in readings.items()},
            },
            selected={"run": run},
        )


def test_a_device_of_a_run_whose_exporter_is_down_has_an_unknown_reading(tmp_path: Path) -> None:
    free_gpu = 'instance="n2",device="n2-u9",component="gpu",index="9",measured="true"'
    series = read_gpus("a", "n2", (0,)) | {f"exporter_energy_source_info{{{free_gpu}}}": "1x60"}
    down = {name: values.replace("x60", "x20 stale") for name, values in series.items()}
    unknown = {'{instance="n2",device="n2-u0"}': ReadingQuality.UNKNOWN}

    assert_panel(tmp_path, "training-energy", "Source of each number", down, unknown, column="Reading")


def test_a_run_pays_the_rent_of_a_lost_gpu_until_the_run_ends(tmp_path: Path) -> None:
    price = {'training_gpu_price_per_second{instance="n2"}': "0.01x60"}
    series = READ_GPUS | _lost_gpu(1) | price
    rent = {f'{{instance="n2",gpu="{index}"}}': 9 for index in range(4)}

    panel = "Energy and rent of each GPU, in this time range"
    assert_panel(tmp_path, "training-energy", panel, series, rent, column="Rent charged")


def test_the_loss_to_a_slow_rank_starts_at_the_recorded_start_of_its_slowness(tmp_path: Path) -> None:
    durations = run_series("step_duration_seconds_sum", "0+15x60", labels=',mode="train"') | run_series(
        "step_duration_seconds_count", "0+10x60", labels=',mode="train"'
    )
    row = {'{run="a",cause="slowest_rank"}': 315_000}

    assert_panel(
        tmp_path,
        "training-energy",
        "Losses now",
        COSTLY_RUN | SLOW_RANK | durations,
        row,
        column="Since",
    )
