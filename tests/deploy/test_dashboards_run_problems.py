"""Table *What is wrong* of *Run* and *Ranks*, for synthetic series, evaluated by promtool."""

from __future__ import annotations

from pathlib import Path

import pytest
from dashboards_support import BUILTIN_VALUES, panel_queries
from panel_support import assert_panel, run_series
from rules_support import needs_promtool
from run_panel_support import (
    DIED,
    GPU_1,
    HUNG,
    LOST_GPU,
    PAST_NAN_LOSSES,
    RANK_1,
    RANK_1_ON_GPU_1,
    RANKS,
    STACKS_OF_HANG,
)

pytestmark = needs_promtool

PHASES_OF_HANG = {
    'training_world_size{run="a",instance="n1"}': "2x60",
    'training_phase_active{run="a",instance="n1",rank="0",phase="grad_sync"}': "1x60",
    f'training_phase_active{{run="a",{RANK_1},phase="forward"}}': "1x60",
}
REMEDIES = {
    "lost": "drain the node; restart the run; reset the GPU or reboot",
    "wait for this rank": "run training-exporter stacks on this node",
    "holds up": "read this line of the job; restart the run",
    "ended first": "read the log of this rank first",
    "outcome not known": "wait a minute; then State has the outcome",
    "no rank finishes": "run training-exporter stacks on each node",
    "saves failed": "check the free space and the quota of the checkpoints",
    "NaN": "resume from a checkpoint before the first such step",
    "exporter down": "check the node and the log of the exporter",
    "restarted": "read the log of this rank",
    "outcome not decided": "wait a minute; then State has the outcome",
    "throttled": "check fans, airflow and coolant",
    "computes at": "open GPUs, and compare clock and heat of its GPU",
    "waits longest": "check the storage; use more data workers",
    "all ranks wait": "check the storage; use more data workers",
    "Xid 48": "drain the node; restart the run; reset the GPU or reboot",
}
"""Remedy by a part of the problem."""
SATURATED = "CPUs are full: cheaper transforms, more CPUs"


IMPACTS = {
    "GPU 1 lost (Xid 79): no rank": 6,
    "no rank finishes a step": 5,
    "lost": 4,
    "wait for this rank": 6,
    "holds up": 6,
    "ended first": 6,
    "ended:": 5,
    "outcome not decided": 4.5,
    "none for": 1,
    "a later save": 1,
    "saves failed": 4,
    "NaN": 4,
    "exporter down": 3,
    "exporter was down": 1,
    "does not report": 3,
    "Xid": 4,
    "restarted": 1,
    "early": 1,
    "computes at": 2,
    "throttled": 2,
    "waits longest": 2,
    "all ranks wait": 2,
}
"""Impact by a part of the problem; the first part decides."""


def problem_row(labels: str, *, is_past: bool = False, impact: float | None = None) -> str:
    """Return the labels of a row of *What is wrong* with its impact, and with the remedy unless the problem is past or has its own."""
    has_remedy = not is_past and "remedy=" not in labels
    remedy = next((text for part, text in REMEDIES.items() if part in labels and has_remedy), "")
    impact_value = impact or next((value for part, value in IMPACTS.items() if part in labels), "")
    texts = (f'{name}="{text}"' for name, text in (("impact", impact_value), ("remedy", remedy)) if text)
    return f"{{{','.join((labels, *texts))}}}"


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        pytest.param(RANKS, {'problem="no problem"': -1}, id="healthy run"),
        pytest.param(
            RANKS
            | {
                f'training_rank_info{{run="a",{RANK_1},{GPU_1}}}': "1x20 stale",
                f'gpu_up{{instance="n1",{GPU_1}}}': "1x20 0x40",
                f'gpu_xid_last_timestamp_seconds{{instance="n1",{GPU_1},xid="79"}}': "_x21 305x39",
            },
            {f'problem="GPU 1 lost (Xid 79)",{RANK_1},gpu="1"': 305_000},
            id="lost GPU, from its Xid",
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
                f'problem="computes at 67 % of the fastest rank; throttled by heat, 89 °C",{RANK_1},gpu="1"': 300_000,
            },
            id="straggler on a hot GPU",
        ),
        pytest.param(
            RANKS
            | RANK_1_ON_GPU_1
            | run_series("rank_compute_seconds", "1x60", labels=',rank="0"')
            | run_series("rank_compute_seconds", "1x20 1.5x40", labels=',rank="1"')
            | run_series("rank_info", "1x60", labels=',rank="0",gpu="0",uuid="GPU-0"')
            | {
                'gpu_clock_hertz{instance="n1",gpu="0",uuid="GPU-0",clock="sm"}': "1.8e9x60",
                f'gpu_clock_hertz{{instance="n1",{GPU_1},clock="sm"}}': "1.2e9x60",
            },
            {
                f'problem="computes at 67 % of the fastest rank, SM clock at 67 %",{RANK_1},gpu="1"': 315_000,
            },
            id="straggler with a low clock",
        ),
        pytest.param(
            HUNG | STACKS_OF_HANG,
            {
                f'problem="holds up the others: read data.py:40, phase forward",{RANK_1}': 300_000,
            },
            id="hang",
        ),
        pytest.param(
            HUNG | STACKS_OF_HANG | RANK_1_ON_GPU_1,
            {
                f'problem="holds up the others: read data.py:40, phase forward",{RANK_1},gpu="1"': 300_000,
            },
            id="hang on a known GPU",
        ),
        pytest.param(
            RANKS
            | run_series("run_state", "1x58 0x2", labels=',state="running"')
            | run_series("run_state", "0x58 1x2", labels=',state="ending"')
            | run_series("run_state_since_timestamp_seconds", "0x58 870x2")
            | run_series("process_up", "1x58 0x2", labels=',rank="1"'),
            {'problem="all ranks have ended, outcome not decided"': 870_000},
            id="ended ranks of a run that may have finished",
        ),
        pytest.param(
            HUNG | PHASES_OF_HANG,
            {
                f'problem="all other ranks wait for this rank: phase forward",{RANK_1}': 300_000,
                'problem="no rank finishes a step"': 300_000,
            },
            id="hang before the lines of the ranks are known",
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
            {f'problem="restarted; killed or crashed",{RANK_1}': 300_000},
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
                'problem="loss was NaN or infinite in 586 steps"': 300_000,
                'problem="2 saves failed"': 300_000,
            },
            id="NaN and failing saves",
        ),
        pytest.param(
            RANKS
            | run_series("checkpoints_total", "_x21 1x18 2x20", labels=',kind="full",result="failed"')
            | run_series("checkpoint_last_success_timestamp_seconds", "301x60"),
            {'problem="2 saves failed"': 301_000},
            id="failed save within an interval after the last save",
        ),
        pytest.param(
            RANKS
            | run_series("checkpoints_total", "_x21 1x18 2x20", labels=',kind="full",result="failed"')
            | run_series("checkpoint_last_success_timestamp_seconds", "240x60")
            | run_series("checkpoint_last_step", "302x60"),
            {'problem="2 saves failed; last checkpoint: step 302"': 300_000},
            id="failing saves after a checkpoint",
        ),
        pytest.param(
            RANKS
            | run_series("steps_total", "0+15x60", labels=',rank="0",mode="train"')
            | run_series("nonfinite_total", "_x21 1+15x39", labels=',kind="loss",value="nan"'),
            {'problem="loss was NaN or infinite in 586 steps"': 300_000},
            id="NaN, from the first sample with a NaN",
        ),
        pytest.param(
            RANKS
            | run_series("phase_seconds_total", "0x20 7.5+7.5x39", labels=',rank="1",phase="data_loading"'),
            {f'problem="waits longest for data: 50 %, 2 min",{RANK_1}': 300_000},
            id="loader stall",
        ),
        pytest.param(
            RANKS
            | run_series("phase_seconds_total", "0x20 7.5+7.5x39", labels=',rank="1",phase="data_loading"')
            | {'host_cpu_utilization_ratio{instance="n1"}': "1x60"},
            {f'problem="waits longest for data: 50 %, 2 min",{RANK_1},remedy="{SATURATED}"': 300_000},
            id="loader stall with saturated CPUs",
        ),
        pytest.param(
            RANKS
            | run_series("phase_seconds_total", "0x20 7.5+7.5x39", labels=',rank="1",phase="data_loading"')
            | run_series("process_instances", "4x60", labels=',rank="1",role="dataloader"')
            | run_series("process_cpu_seconds_total", "0+1x60", labels=',rank="1",role="dataloader"'),
            {
                f'problem="waits longest for data: 50 %, 2 min",{RANK_1},remedy="data workers use little CPU: check storage"': 300_000
            },
            id="loader stall with idle data workers",
        ),
        pytest.param(
            RANKS
            | run_series("phase_seconds_total", "0x20 9+9x39", labels=',rank="0",phase="data_loading"')
            | run_series("phase_seconds_total", "0x20 7.5+7.5x39", labels=',rank="1",phase="data_loading"'),
            {'problem="all ranks wait for data: at least 50 %, 2 min"': 300_000},
            id="loader stall of all ranks",
        ),
        pytest.param(
            RANKS
            | {
                f'training_rank_info{{run="a",{RANK_1},gpu="1",uuid="G1"}}': "1x60",
                'gpu_up{instance="n1",gpu="1",uuid="G1"}': "1x60",
                'gpu_xid_last_timestamp_seconds{instance="n1",gpu="1",uuid="G1",xid="48"}': "_x20 300x40",
            },
            {f'problem="GPU 1: Xid 48",{RANK_1},gpu="1"': 300_000},
            id="Xid of the hardware",
        ),
        pytest.param(
            DIED,
            {
                f'problem="ended first: signal SIGKILL",{RANK_1}': 600_000,
                'problem="ended: exit status 1",instance="n1",rank="0"': 605_000,
            },
            id="killed rank",
        ),
        pytest.param({}, {'problem="unknown: no sample of this run"': -1}, id="unknown run"),
    ],
)
def test_a_problem_is_named_with_rank_gpu_and_start(
    tmp_path: Path, series: dict[str, str], expected: dict[str, float]
) -> None:
    rows = {problem_row(labels): value for labels, value in expected.items()}

    assert_panel(tmp_path, "training-run", "What is wrong", series, rows)


def test_a_problem_of_the_past_has_no_remedy(tmp_path: Path) -> None:
    row = problem_row('problem="loss was NaN or infinite in 136 steps, none for 7 min"', is_past=True)

    assert_panel(tmp_path, "training-run", "What is wrong", RANKS | PAST_NAN_LOSSES, {row: 300_000})


def test_an_outage_of_an_exporter_is_a_past_problem_from_the_first_sample_of_the_run_on_the_node(
    tmp_path: Path,
) -> None:
    # The exporter answers neither before the run starts on the node nor for two minutes from 10 min on.
    series = {name: values.replace("1x60", "_x10 1x29 stale _x7 1x12") for name, values in RANKS.items()}
    series['up{job="training",instance="n1"}'] = "0x9 1x29 0x7 1x12"
    row = problem_row(
        'problem="exporter was down for 120 s, no samples of its ranks",instance="n1"', is_past=True
    )

    assert_panel(tmp_path, "training-run", "What is wrong", series, {row: 600_000})


def test_a_problem_between_two_points_of_a_long_time_range_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILTIN_VALUES, "__interval", "7h")
    nonfinite = run_series("nonfinite_total", "_x21 1+15x39", labels=',kind="loss",value="nan"')
    row = problem_row('problem="loss was NaN or infinite in 586 steps"')

    assert_panel(tmp_path, "training-run", "What is wrong", RANKS | nonfinite, {row: 300_000})


def test_of_exits_at_the_same_time_that_of_the_oldest_step_is_the_first(tmp_path: Path) -> None:
    series = DIED | run_series(
        "rank_last_exit_timestamp_seconds", "_x41 600x20", labels=',rank="0",reason="exit status 1"'
    )
    steps = run_series("last_progress_timestamp_seconds", "598x60", labels=',rank="0"') | run_series(
        "last_progress_timestamp_seconds", "597x60", labels=',rank="1"'
    )
    attempt = run_series("attempt_start_timestamp_seconds", "0x60")
    rows = {
        problem_row(f'problem="ended first: signal SIGKILL",{RANK_1}'): 600_000,
        problem_row('problem="ended: exit status 1",instance="n1",rank="0"'): 600_000,
    }

    assert_panel(tmp_path, "training-run", "What is wrong", series | steps | attempt, rows)


def test_both_dashboards_name_the_same_problems() -> None:
    run, ranks = (
        [query.expression for query in panel_queries(uid) if query.panel == "What is wrong"]
        for uid in ("training-run", "training-ranks")
    )

    assert run == ranks


def test_problems_that_stop_the_run_have_a_larger_impact_than_a_wait_for_data(tmp_path: Path) -> None:
    waiting = run_series("phase_seconds_total", "0x20 7.5+7.5x39", labels=',rank="1",phase="data_loading"')
    effects = {
        problem_row(f'problem="holds up the others: read data.py:40, phase forward",{RANK_1}'): 0,
        problem_row(f'problem="waits longest for data: 50 %, 2 min",{RANK_1}'): 0,
    }

    assert_panel(
        tmp_path, "training-run", "What is wrong", HUNG | STACKS_OF_HANG | waiting, effects, factor=0
    )


def test_the_rank_that_ended_first_has_a_larger_impact_than_the_ranks_that_follow(tmp_path: Path) -> None:
    effects = {
        problem_row(f'problem="ended first: signal SIGKILL",{RANK_1}'): 0,
        problem_row('problem="ended: exit status 1",instance="n1",rank="0"'): 0,
    }

    assert_panel(tmp_path, "training-run", "What is wrong", DIED, effects, factor=0)


PAST_FAILED_SAVES = run_series(
    "checkpoints_total", "_x21 1x18 2x20", labels=',kind="full",result="failed"'
) | run_series("checkpoint_last_success_timestamp_seconds", "240x45 660x15")
"""Failed saves, and a save that succeeded after them."""


@pytest.mark.parametrize(("alert", "is_past"), [("1x60", False), ("1x20 stale", True)])
@pytest.mark.parametrize(
    ("alert_name", "series", "impact", "problem"),
    [
        (
            "TrainingLossNonFinite",
            PAST_NAN_LOSSES,
            1.5,
            "loss was NaN or infinite in 136 steps, none for 7 min",
        ),
        ("TrainingCheckpointFailing", PAST_FAILED_SAVES, 4, "2 saves failed; a later save succeeded"),
    ],
    ids=["NaN loss", "failed saves"],
)
def test_a_problem_endangers_work_until_its_alert_ends(
    tmp_path: Path,
    alert_name: str,
    series: dict[str, str],
    impact: float,
    problem: str,
    alert: str,
    *,
    is_past: bool,
) -> None:
    alerts = {f'ALERTS{{alertname="{alert_name}",alertstate="firing",severity="critical",run="a"}}': alert}
    expected = {problem_row(f'problem="{problem}"', is_past=is_past, impact=1 if is_past else impact): 0}

    assert_panel(tmp_path, "training-run", "What is wrong", RANKS | series | alerts, expected, factor=0)


@pytest.mark.parametrize("before", ["_x21", "0x20"], ids=["no sample before", "0 before"])
def test_a_nan_loss_names_the_last_finite_step(tmp_path: Path, before: str) -> None:
    nonfinite = run_series("nonfinite_total", f"{before} 1+15x39", labels=',kind="loss",value="nan"')
    steps = run_series("step", "0+10x60", labels=',rank="0"')
    row = problem_row('problem="loss was NaN or infinite in 586 steps, the first after step 200"')

    assert_panel(tmp_path, "training-run", "What is wrong", RANKS | nonfinite | steps, {row: 0}, factor=0)


def test_a_nan_loss_names_the_last_checkpoint_before_it(tmp_path: Path) -> None:
    nonfinite = run_series("nonfinite_total", "0x20 1+15x39", labels=',kind="loss",value="nan"')
    saves = run_series("checkpoint_last_step", "0x10 100x10 300x40")
    steps = run_series("step", "0+10x60", labels=',rank="0"')
    row = problem_row(
        'problem="loss was NaN or infinite in 586 steps, the first after step 200, safe checkpoint: step 100"'
    )

    assert_panel(
        tmp_path, "training-run", "What is wrong", RANKS | nonfinite | saves | steps, {row: 0}, factor=0
    )


def test_a_hang_by_a_lost_gpu_is_one_problem_with_the_drain_as_its_remedy(tmp_path: Path) -> None:
    row = problem_row(f'problem="GPU 1 lost (Xid 79): no rank finishes a step",{RANK_1},gpu="1"')

    assert_panel(
        tmp_path, "training-run", "What is wrong", HUNG | STACKS_OF_HANG | LOST_GPU, {row: 0}, factor=0
    )
