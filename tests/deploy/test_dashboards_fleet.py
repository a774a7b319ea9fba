"""Values of the dashboard *Fleet*, for synthetic series, evaluated by promtool."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from panel_support import assert_panel, run_series
from places import PROJECT
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
    assert_panel(tmp_path, "training-fleet", "All runs, rates over 5 min", series, verdicts, query_id="B")


def test_the_state_of_a_run_is_no_step_before_the_exporter_decides_that_it_hangs(tmp_path: Path) -> None:
    labels = 'run="a",instance="n1"'
    series = {
        f'training_run_info{{{labels},user="u"}}': "1x60",
        f'training_process_up{{{labels},rank="0"}}': "1x60",
        f"training_wall_seconds_total{{{labels}}}": "0+15x60",
        f'training_run_state{{{labels},state="running"}}': "1x60",
        f'training_phase_active{{{labels},rank="0",phase="forward"}}': "1x60",
        f"training_step_longest_seconds{{{labels}}}": "0.5x60",
        f'training_last_progress_timestamp_seconds{{{labels},rank="0"}}': "0+15x20 300x40",
    }
    row = '{run="a",user="u",state="no step",alertname="no rank finishes a step",cause="standstill"}'

    assert_panel(tmp_path, "training-fleet", "All runs, rates over 5 min", series, {row: 1.0}, minutes=6.25)


def _alerts(*labels: str) -> dict[str, str]:
    """Return the series of critical alerts that fire from 12 min on."""
    return {
        name: values
        for text in labels
        for name, values in (
            (f'ALERTS{{alertstate="firing",severity="critical",{text}}}', "_x48 1x12"),
            (f"ALERTS_FOR_STATE{{{text}}}", "_x48 690x12"),
        )
    }


def _hang(run: str) -> dict[str, str]:
    """Return the series of a hang that rank 1 holds up."""
    return {
        f'training_hang_info{{run="{run}",instance="n1",rank="{rank}",{position}}}': "_x40 1x20"
        for rank, position in (
            (0, 'function="all_reduce",location="train.py:8",phase="grad_sync"'),
            (1, 'function="read",location="data.py:40",phase="forward"'),
        )
    }


def test_a_hang_starts_with_the_last_step_and_an_end_with_the_state(tmp_path: Path) -> None:
    series = _hung_lost_and_healthy_runs() | _alerts(
        'alertname="TrainingHang",run="b"', 'alertname="RunDied",run="c"'
    )
    runs = {'{run="a"}': 0.0, '{run="b"}': 300_000.0, '{run="c"}': 330_000.0}
    alerts = {
        '{alertname="TrainingHang",title="TrainingHang",run="b"}': 300_000.0,
        '{alertname="RunDied",title="RunDied",run="c"}': 330_000.0,
    }

    assert_panel(tmp_path, "training-fleet", "All runs, rates over 5 min", series, runs, query_id="C")
    assert_panel(tmp_path, "training-fleet", "Firing alerts", series, alerts, query_id="B")


def test_a_hardware_error_is_named_by_its_xid_instead_of_the_recovery_it_needs(tmp_path: Path) -> None:
    gpu = 'run="a",instance="n1",gpu="0"'
    series = _hung_lost_and_healthy_runs() | _alerts(
        f'alertname="GpuRecoveryActionNeeded",{gpu}', f'alertname="GpuXidCritical",xid="48",{gpu}'
    )
    alert = f'{{alertname="GpuXidCritical",title="Xid 48",{gpu}}}'
    runs = {
        '{run="a",user="u",state="running",alertname="Xid 48",instance="n1",gpu="0"}': 1.0,
        '{run="b",user="u",state="hung",alertname="no rank finishes a step",cause="standstill"}': 1.0,
        '{run="c",user="u",state="lost"}': 1.0,
    }

    assert_panel(tmp_path, "training-fleet", "Firing alerts", series, {alert: 3.0})
    assert_panel(tmp_path, "training-fleet", "Firing alerts", series, {alert: 1.0}, query_id="C")
    assert_panel(tmp_path, "training-fleet", "All runs, rates over 5 min", series, runs)


@pytest.mark.parametrize("uid", ["training-fleet", "training-run", "training-node"])
def test_each_critical_xid_has_its_meaning_in_the_table_of_alerts(uid: str) -> None:
    model = json.loads((PROJECT / f"dashboards/json/{uid}.json").read_text(encoding="utf-8"))
    rules = (PROJECT / "deploy/prometheus/rules/alerts-gpu.yml").read_text(encoding="utf-8")
    text = json.dumps([panel for panel in model["panels"] if panel["title"] == "Firing alerts"])

    critical = re.findall(r"condition: Xid ([\d|]+)", rules)[0].split("|")
    assert critical
    assert all(f'"Xid {xid}: ' in text for xid in critical)


@pytest.mark.parametrize(
    ("series", "verdict"),
    [
        pytest.param(
            {'training_wall_seconds_total{run="a",instance="n1"}': "0+15x60"}
            | {
                f'training_rank_{name}{{run="a",instance="n1",rank="{rank}"}}': value
                for rank, seconds in ((0, "1x60"), (1, "1.5x60"))
                for name, value in (("compute_seconds", seconds), ("info", "1x60"))
            },
            0.5,
            id="slow rank",
        ),
        pytest.param(
            {
                'training_phase_seconds_total{run="a",instance="n1",rank="0",phase="data_loading"}': "0+7.5x60",
                'training_wall_seconds_total{run="a",instance="n1"}': "0+15x60",
            },
            0.5,
            id="data stall",
        ),
        pytest.param({}, 0.0, id="healthy run"),
    ],
)
def test_a_run_that_a_rank_or_its_data_slows_is_above_a_healthy_run(
    tmp_path: Path, series: dict[str, str], verdict: float
) -> None:
    verdicts = {'{run="a"}': 2 * verdict, '{run="b"}': 8.0, '{run="c"}': 8.0}

    assert_panel(
        tmp_path,
        "training-fleet",
        "All runs, rates over 5 min",
        _hung_lost_and_healthy_runs() | series,
        verdicts,
        query_id="B",
        factor=2,
    )


def test_the_cost_names_the_number_of_runs_that_are_in_no_rate(tmp_path: Path) -> None:
    series = run_series("run_state", "1x20 stale", labels=',state="running"')

    assert_panel(tmp_path, "training-fleet", "Cost per hour, 5 min", series, {"{}": 1.0}, query_id="D")
    assert_panel(
        tmp_path,
        "training-fleet",
        "Cost per hour, 5 min",
        run_series("run_state", "1x60", labels=',state="running"'),
        {},
        query_id="D",
    )


def test_a_finished_run_has_no_age_of_its_last_step(tmp_path: Path) -> None:
    series = run_series("run_state", "1x60", labels=',state="finished"') | run_series(
        "last_progress_timestamp_seconds", "0x60"
    )

    assert_panel(
        tmp_path,
        "training-fleet",
        "Speed and progress of the runs, rates over 5 min",
        series,
        {},
        query_id="C",
    )


RANKS = ((0, "1x60"), (1, "1x20 1.5x40"))
"""Ranks of run a, and their compute times; rank 1 is slow from 5 min on."""
STRAGGLER = {
    f'training_rank_{name}{{run="a",instance="n{rank + 1}",rank="{rank}"}}': values
    for rank, seconds in RANKS
    for name, values in (("compute_seconds", seconds), ("info", "1x60"))
} | {
    'training_wall_seconds_total{run="a",instance="n1"}': "0+15x60",
    'training_step_duration_seconds_sum{run="a",instance="n1",mode="train"}': "0+15x60",
    'training_step_duration_seconds_count{run="a",instance="n1",mode="train"}': "0+10x60",
    'training_cost_total{run="a",instance="n1",currency="EUR"}': "0+0.15x60",
}
"""Series of a run with steps of 1.5 s, whose ranks wait for rank 1 for a sixth of the time, and that costs 36 EUR per hour."""


def test_a_slow_run_has_its_slow_rank_the_start_and_the_cost_of_the_loss(tmp_path: Path) -> None:
    series = _hung_lost_and_healthy_runs() | STRAGGLER
    row = '{run="a",user="u",state="running",alertname="computes at 67 % of the fastest rank",instance="n2",rank="1",cause="slowest_rank"}'
    hung = '{run="b",user="u",state="hung",alertname="no rank finishes a step",cause="standstill"}'

    assert_panel(
        tmp_path,
        "training-fleet",
        "All runs, rates over 5 min",
        series,
        {row: 1.0, hung: 1.0, '{run="c",user="u",state="lost"}': 1.0},
    )
    assert_panel(
        tmp_path,
        "training-fleet",
        "All runs, rates over 5 min",
        series,
        {'{run="a"}': 315_000.0, '{run="b"}': 300_000.0, '{run="c"}': 330_000.0},
        query_id="C",
    )
    assert_panel(
        tmp_path, "training-fleet", "All runs, rates over 5 min", series, {'{run="a"}': 6.0}, query_id="F"
    )
    assert_panel(
        tmp_path,
        "training-fleet",
        "All runs, rates over 5 min",
        series,
        {'{run="a"}': 17.0, '{run="b"}': 100.0},
        query_id="G",
        factor=100,
    )


def test_an_alert_about_a_gpu_has_no_rank_that_uses_another_gpu_and_explains_a_hang(tmp_path: Path) -> None:
    slow = (
        _hung_lost_and_healthy_runs()
        | STRAGGLER
        | _alerts('alertname="GpuThermalThrottle",run="a",instance="n2",gpu="3"')
    )
    hang = (
        _hung_lost_and_healthy_runs()
        | _hang(run="b")
        | _alerts(
            'alertname="TrainingHang",run="b"',
            'alertname="GpuLost",run="b",instance="n1",gpu="0"',
            'alertname="GpuXidCritical",run="b",instance="n1",gpu="0",xid="79"',
        )
    )
    others = {'{run="c",user="u",state="lost"}': 1.0}

    assert_panel(
        tmp_path,
        "training-fleet",
        "All runs, rates over 5 min",
        slow,
        others
        | {
            '{run="a",user="u",state="running",alertname="GpuThermalThrottle",instance="n2",gpu="3",cause="slowest_rank"}': 1.0,
            '{run="b",user="u",state="hung",alertname="no rank finishes a step",cause="standstill"}': 1.0,
        },
    )
    assert_panel(
        tmp_path,
        "training-fleet",
        "All runs, rates over 5 min",
        hang,
        others
        | {
            '{run="a",user="u",state="running"}': 1.0,
            '{run="b",user="u",state="hung",alertname="Xid 79",instance="n1",gpu="0",cause="standstill"}': 1.0,
        },
    )


@pytest.mark.parametrize("node", ["", ',instance="n2"'], ids=["alert without a node", "alert with a node"])
def test_failing_saves_have_no_rank_although_a_rank_is_slow(tmp_path: Path, node: str) -> None:
    alert = f'alertname="TrainingCheckpointFailing",run="a"{node}'
    series = _hung_lost_and_healthy_runs() | STRAGGLER | _alerts(alert)
    failing = f'{{user="u",state="running",cause="slowest_rank",{alert}}}'
    hung = '{run="b",user="u",state="hung",alertname="no rank finishes a step",cause="standstill"}'
    rows = {failing: 1.0, hung: 1.0, '{run="c",user="u",state="lost"}': 1.0}

    assert_panel(tmp_path, "training-fleet", "All runs, rates over 5 min", series, rows)


@pytest.mark.parametrize(
    ("alert", "problem", "fault"),
    [
        pytest.param(
            'alertname="GpuXidCritical",xid="48"',
            "Xid 48",
            {'gpu_xid_last_timestamp_seconds{instance="n2",gpu="3",uuid="G3",xid="48"}': "_x20 300x40"},
            id="Xid",
        ),
        pytest.param(
            'alertname="GpuThermalThrottle"',
            "GpuThermalThrottle",
            {
                'gpu_clocks_event_seconds_total{instance="n2",gpu="3",uuid="G3",reason="hw_thermal"}': "0x20 1+9x40"
            },
            id="throttling",
        ),
        pytest.param(
            'alertname="GpuEccUncorrected"',
            "GpuEccUncorrected",
            {'gpu_ecc_errors_total{instance="n2",gpu="3",uuid="G3",kind="uncorrected"}': "0x20 2x40"},
            id="memory error",
        ),
        pytest.param(
            'alertname="GpuRecoveryActionNeeded"',
            "GpuRecoveryActionNeeded",
            {'gpu_recovery_action{instance="n2",gpu="3",uuid="G3"}': "0x20 1x40"},
            id="recovery",
        ),
    ],
)
def test_an_alert_about_a_gpu_names_the_rank_that_uses_the_gpu(
    tmp_path: Path, alert: str, problem: str, fault: dict[str, str]
) -> None:
    series = (
        _hung_lost_and_healthy_runs()
        | _alerts(f'{alert},run="a",instance="n2",gpu="3"')
        | {'training_rank_info{run="a",instance="n2",rank="1",gpu="3",uuid="G3"}': "1x60"}
        | fault
    )
    rows = {
        f'{{run="a",user="u",state="running",alertname="{problem}",instance="n2",rank="1",gpu="3"}}': 1.0,
        '{run="b",user="u",state="hung",alertname="no rank finishes a step",cause="standstill"}': 1.0,
        '{run="c",user="u",state="lost"}': 1.0,
    }

    assert_panel(tmp_path, "training-fleet", "All runs, rates over 5 min", series, rows)


def test_no_rank_is_named_while_all_ranks_wait_for_data_and_a_restart_has_a_verdict(tmp_path: Path) -> None:
    wait = 'training_phase_seconds_total{{run="a",instance="n{rank}",rank="{rank}",phase="data_loading"}}'
    series = (
        _hung_lost_and_healthy_runs()
        | {wait.format(rank=rank): "0+6x60" for rank in (1, 2)}
        | {'training_wall_seconds_total{run="a"}': "0+15x60"}
    )
    restart = _hung_lost_and_healthy_runs() | {
        'training_badput_seconds_total{run="a",cause="downtime"}': "0x20 180x40",
        'training_wall_seconds_total{run="a"}': "3600+15x60",
    }

    assert_panel(
        tmp_path,
        "training-fleet",
        "All runs, rates over 5 min",
        series,
        {
            '{run="a",user="u",state="running",alertname="all ranks wait for data: 40 %"}': 1.0,
            '{run="b",user="u",state="hung",alertname="no rank finishes a step",cause="standstill"}': 1.0,
            '{run="c",user="u",state="lost"}': 1.0,
        },
    )
    assert_panel(
        tmp_path,
        "training-fleet",
        "All runs, rates over 5 min",
        restart,
        {'{run="a"}': 1.0, '{run="b"}': 4.0, '{run="c"}': 4.0},
        query_id="B",
    )


def test_the_gpus_of_a_node_without_an_exporter_are_unknown_and_not_up(tmp_path: Path) -> None:
    series = {
        'up{job="training",instance="n1"}': "1x60",
        'up{job="training",instance="n2"}': "1x50 0x10",
        'gpu_devices{instance="n1"}': "8x60",
        'gpu_devices{instance="n2"}': "8x60",
    }

    assert_panel(tmp_path, "training-fleet", "GPUs", series, {"{}": 8})
    assert_panel(tmp_path, "training-fleet", "GPUs", series, {"{}": 8}, query_id="C")


LOST_GPU_OF_B = {
    'training_rank_info{run="b",instance="n1",rank="0",gpu="3",uuid="G3"}': "1x20 stale",
    'gpu_up{instance="n1",gpu="3",uuid="G3"}': "1x20 0x40",
}


@pytest.mark.parametrize(
    ("cause", "labels"),
    [
        pytest.param(
            _hang(run="b"),
            'alertname="no rank finishes a step; this rank: read data.py:40",instance="n1",rank="1"',
            id="rank that holds up the others",
        ),
        pytest.param(
            LOST_GPU_OF_B,
            'alertname="no rank finishes a step; this rank: GPU lost",instance="n1",rank="0",gpu="3"',
            id="lost GPU",
        ),
    ],
)
def test_a_standstill_has_its_rank_node_and_gpu_before_its_alert_fires(
    tmp_path: Path, cause: dict[str, str], labels: str
) -> None:
    series = _hung_lost_and_healthy_runs() | cause
    row = f'{{run="b",user="u",state="hung",cause="standstill",{labels}}}'
    others = {'{run="a",user="u",state="running"}': 1.0, '{run="c",user="u",state="lost"}': 1.0}

    assert_panel(tmp_path, "training-fleet", "All runs, rates over 5 min", series, others | {row: 1.0})


@pytest.mark.parametrize("query_id", ["E", "F", "G"], ids=["time left", "step time", "tokens/s"])
def test_a_run_without_a_step_has_no_speed_and_no_time_left(tmp_path: Path, query_id: str) -> None:
    series = _hung_lost_and_healthy_runs() | {
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
        "Speed and progress of the runs, rates over 5 min",
        series,
        {},
        query_id=query_id,
    )


def _waiting(run: str, seconds_per_scrape: float) -> dict[str, str]:
    """Return the series of a run that waits for data for a part of each scrape interval of 15 s."""
    return {
        f'training_badput_seconds_total{{run="{run}",instance="n1",cause="data_stall"}}': f"0+{seconds_per_scrape}x60",
        f'training_wall_seconds_total{{run="{run}",instance="n1"}}': "0+15x60",
    }


def test_a_large_loss_is_above_the_warnings_and_a_small_loss_is_not(tmp_path: Path) -> None:
    series = _hung_lost_and_healthy_runs()
    healthy = {name: values for name, values in series.items() if 'run="a"' in name}
    for run in ("d", "e", "f"):
        series |= {name.replace('run="a"', f'run="{run}"'): values for name, values in healthy.items()}
    series |= _waiting("d", 6.5) | _waiting("e", 3) | _waiting("f", 1)
    series |= {
        'ALERTS{alertstate="firing",severity="warning",alertname="GpuThermalThrottle",run="f"}': "_x48 1x12"
    }
    verdicts = {"a": 0, "b": 40, "c": 40, "d": 23, "e": 22, "f": 20}

    assert_panel(
        tmp_path,
        "training-fleet",
        "All runs, rates over 5 min",
        series,
        {f'{{run="{run}"}}': verdict for run, verdict in verdicts.items()},
        query_id="B",
        factor=10,
    )


def test_a_run_that_loses_much_time_without_an_alert_has_the_cause(tmp_path: Path) -> None:
    row = '{run="a",user="u",state="running",alertname="data_stall",cause="data_stall"}'
    hung = '{run="b",user="u",state="hung",alertname="no rank finishes a step",cause="standstill"}'

    assert_panel(
        tmp_path,
        "training-fleet",
        "All runs, rates over 5 min",
        _hung_lost_and_healthy_runs() | _waiting("a", 6.5),
        {row: 1.0, hung: 1.0, '{run="c",user="u",state="lost"}': 1.0},
    )


def test_a_live_run_with_ranks_without_samples_is_partly_unknown_and_has_their_node(tmp_path: Path) -> None:
    series = _hung_lost_and_healthy_runs() | {
        'training_world_size{run="a",instance="n1"}': "3x60",
        'training_process_up{run="a",instance="n2",rank="1"}': "1x50 stale",
        'training_process_up{run="a",instance="n2",rank="2"}': "1x50 stale",
    }
    row = '{run="a",user="u",state="running",alertname="ranks without news: 2",instance="n2"}'
    hung = '{run="b",user="u",state="hung",alertname="no rank finishes a step",cause="standstill"}'
    rows = {row: 1.0, hung: 1.0, '{run="c",user="u",state="lost"}': 1.0}
    verdicts = {'{run="a"}': 5.0, '{run="b"}': 8.0, '{run="c"}': 8.0}

    assert_panel(tmp_path, "training-fleet", "All runs, rates over 5 min", series, rows)
    assert_panel(
        tmp_path,
        "training-fleet",
        "All runs, rates over 5 min",
        series,
        verdicts,
        query_id="B",
        factor=2,
    )


@pytest.mark.parametrize(
    ("state", "ranks", "has_news"),
    [
        pytest.param("1x56 stale 1x10", "1x70", True, id="exporter of rank 0 missed two scrapes"),
        pytest.param("1x50 stale", "1x70", True, id="other ranks report"),
        pytest.param("1x50 stale", "1x50 stale", False, id="no rank reports"),
    ],
)
def test_fleet_and_run_agree_on_whether_a_run_has_news(
    tmp_path: Path, state: str, ranks: str, *, has_news: bool
) -> None:
    labels = 'run="a",instance="n1"'
    series = {
        f'training_run_info{{{labels},user="u"}}': state,
        f'training_run_state{{{labels},state="running"}}': state,
        f"training_run_state_since_timestamp_seconds{{{labels}}}": state,
        'training_process_up{run="a",instance="n1",rank="0"}': state,
        'training_process_up{run="a",instance="n2",rank="1"}': ranks,
    }
    verdict = {'{run="a"}': 0.0} if has_news else {'{run="a"}': 7.0}
    age = "" if has_news else 'age=", no news for 2 min from ",instance="n1",'
    run_state = {f'{{{age}state="running"}}': 0.0 if has_news else 1.0}

    assert_panel(
        tmp_path, "training-fleet", "All runs, rates over 5 min", series, verdict, query_id="B", factor=2
    )
    assert_panel(tmp_path, "training-run", "State", series, run_state)


def _ending_run(run: str, exits: dict[str, str]) -> dict[str, str]:
    """Return the series of a run whose ranks end after 14 min, with the exits of ranks by their labels."""
    labels = f'run="{run}",instance="n1"'
    return {
        f'training_run_info{{{labels},user="u"}}': "1x60",
        f'training_process_up{{{labels},rank="0"}}': "1x56 0x4",
        f'training_run_state{{{labels},state="running"}}': "1x56 0x4",
        f'training_run_state{{{labels},state="ending"}}': "0x56 1x4",
        f"training_run_state_since_timestamp_seconds{{{labels}}}": "0x56 850x4",
        f"training_attempt_start_timestamp_seconds{{{labels}}}": "10x60",
    } | {
        f'training_rank_last_exit_timestamp_seconds{{run="{run}",{exit_labels}}}': values
        for exit_labels, values in exits.items()
    }


def test_a_run_whose_ranks_were_killed_makes_no_progress_and_a_run_that_ends_normally_has_no_alert(
    tmp_path: Path,
) -> None:
    killed = {
        'instance="n1",rank="0",reason="exit status 1"': "_x56 848x4",
        'instance="n2",rank="5",reason="signal SIGKILL"': "_x56 845x4",
    }
    stopped = {'instance="n1",rank="0",reason="signal SIGTERM"': "_x56 850x4"}
    series = _ending_run("killed", killed) | _ending_run("normal", {}) | _ending_run("stopped", stopped)
    rows = {
        '{run="killed",user="u",state="ending",alertname="ended first: signal SIGKILL",instance="n2",rank="5"}': 1.0,
        '{run="normal",user="u",state="ending"}': 1.0,
        '{run="stopped",user="u",state="ending"}': 1.0,
    }
    verdicts = {'{run="killed"}': 4.0, '{run="normal"}': 0.0, '{run="stopped"}': 0.0}
    starts = {'{run="killed"}': 845_000.0, '{run="normal"}': 850_000.0, '{run="stopped"}': 850_000.0}

    table = "All runs, rates over 5 min"
    assert_panel(tmp_path, "training-fleet", table, series, rows)
    assert_panel(tmp_path, "training-fleet", table, series, verdicts, query_id="B")
    assert_panel(tmp_path, "training-fleet", table, series, starts, query_id="C")


def test_a_run_that_remains_ending_for_two_minutes_makes_no_progress(tmp_path: Path) -> None:
    series = _ending_run("a", {}) | {
        'training_run_state{run="a",instance="n1",state="running"}': "1x50 0x10",
        'training_run_state{run="a",instance="n1",state="ending"}': "0x50 1x10",
        'training_run_state_since_timestamp_seconds{run="a",instance="n1"}': "0x50 765x10",
        'training_process_up{run="a",instance="n1",rank="0"}': "1x50 0x10",
    }
    row = '{run="a",user="u",state="ending",alertname="all ranks ended, cause unknown after 2 min"}'

    table = "All runs, rates over 5 min"
    assert_panel(tmp_path, "training-fleet", table, series, {row: 1.0})
    assert_panel(tmp_path, "training-fleet", table, series, {'{run="a"}': 4.0}, query_id="B")
    assert_panel(tmp_path, "training-fleet", table, series, {'{run="a"}': 765_000.0}, query_id="C")


@pytest.mark.parametrize(
    ("alert", "fault", "start"),
    [
        pytest.param(
            'alertname="GpuXidCritical",xid="48"',
            {'gpu_xid_last_timestamp_seconds{instance="n2",gpu="3",uuid="G3",xid="48"}': "_x20 297x40"},
            297_000.0,
            id="Xid",
        ),
        pytest.param(
            'alertname="GpuLost"',
            {'gpu_up{instance="n2",gpu="3",uuid="G3"}': "1x20 0x40"},
            315_000.0,
            id="lost GPU",
        ),
        pytest.param(
            'alertname="GpuThermalThrottle"',
            {
                'gpu_clocks_event_seconds_total{instance="n2",gpu="3",uuid="G3",reason="hw_thermal"}': "0x20 5+9x40"
            },
            315_000.0,
            id="throttling",
        ),
        pytest.param('alertname="GpuPowerCapped"', {}, 690_000.0, id="alert without a recorded start"),
    ],
)
def test_an_alert_has_the_start_of_its_problem_in_both_tables(
    tmp_path: Path, alert: str, fault: dict[str, str], start: float
) -> None:
    gpu = 'run="a",instance="n2",gpu="3"'
    series = _hung_lost_and_healthy_runs() | _alerts(f'{alert},{gpu},uuid="G3"') | fault
    name = re.findall(r'alertname="(\w+)"', alert)[0]
    title = "Xid 48" if "Xid" in name else name

    assert_panel(
        tmp_path,
        "training-fleet",
        "All runs, rates over 5 min",
        series,
        {'{run="a"}': start, '{run="b"}': 300_000.0, '{run="c"}': 330_000.0},
        query_id="C",
    )
    assert_panel(
        tmp_path,
        "training-fleet",
        "Firing alerts",
        series,
        {f'{{alertname="{name}",title="{title}",{gpu}}}': start},
        query_id="B",
    )


def test_the_first_of_equally_urgent_alerts_keeps_the_row(tmp_path: Path) -> None:
    names = {"TrainingCheckpointOverdue": 400, "RunSlower": 500, "TrainingStartupSlow": 600}
    series = _hung_lost_and_healthy_runs() | {
        f'{name}{{run="a",alertname="{alert}",{labels}}}': values
        for alert, start in names.items()
        for name, labels, values in (
            ("ALERTS", 'severity="warning",alertstate="firing"', "_x48 1x12"),
            ("ALERTS_FOR_STATE", 'severity="warning"', f"_x48 {start}x12"),
        )
    }
    rows = {
        '{run="a",user="u",state="running",alertname="TrainingCheckpointOverdue"}': 1.0,
        '{run="b",user="u",state="hung",alertname="no rank finishes a step",cause="standstill"}': 1.0,
        '{run="c",user="u",state="lost"}': 1.0,
    }
    starts = {'{run="a"}': 400_000.0, '{run="b"}': 300_000.0, '{run="c"}': 330_000.0}

    table = "All runs, rates over 5 min"
    assert_panel(tmp_path, "training-fleet", table, series, rows)
    assert_panel(tmp_path, "training-fleet", table, series, starts, query_id="C")


def test_one_cause_has_one_name_on_the_board() -> None:
    model = json.loads((PROJECT / "dashboards/json/training-fleet.json").read_text(encoding="utf-8"))
    badput = next(panel for panel in model["panels"] if panel["title"].startswith("Badput of the cluster"))
    runs = next(panel for panel in model["panels"] if panel["title"].startswith("All runs"))
    names = {
        override["matcher"]["options"]: prop["value"]
        for override in badput["fieldConfig"]["overrides"]
        for prop in override["properties"]
        if prop["id"] == "displayName"
    }

    assert names["data_stall"] == "waiting for data"
    assert '"data_stall": {"color": "text", "index": 4, "text": "waiting for data"}' in json.dumps(runs)


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
    series = _hung_lost_and_healthy_runs() | STRAGGLER
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
    assert_panel(tmp_path, "training-fleet", "All nodes, rates over 5 min", series, worst, query_id="B")
    assert_panel(tmp_path, "training-fleet", "Nodes", series, {"{}": 2.0}, query_id="D")
    assert_panel(tmp_path, "training-fleet", "Nodes", series, {"{}": 1.0}, query_id="C")


def test_the_cost_of_the_fleet_has_its_lost_part_weighted_by_gpus(tmp_path: Path) -> None:
    series = _hung_lost_and_healthy_runs() | STRAGGLER
    series |= {
        f'training_rank_info{{run="{run}",instance="n9",rank="{rank}",uuid="{run}{rank}"}}': "1x60"
        for run, ranks in (("a", 3), ("b", 1))
        for rank in range(ranks)
    }

    assert_panel(tmp_path, "training-fleet", "Cost per hour, 5 min", series, {'{currency="EUR"}': 36.0})
    assert_panel(
        tmp_path, "training-fleet", "Cost per hour, 5 min", series, {'{currency="EUR"}': 6.0}, query_id="B"
    )
    assert_panel(
        tmp_path, "training-fleet", "Cost per hour, 5 min", series, {"{}": 38.0}, query_id="C", factor=100
    )
