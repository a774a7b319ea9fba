"""Table of runs and table of alerts of the dashboard *Fleet*, for synthetic series, evaluated by promtool."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fleet_panel_support import OTHER_ROWS, OTHER_STARTS, STRAGGLER, THREE_RUNS, assert_runs
from panel_support import assert_panel, run_series
from rules_support import needs_promtool

from dashboards.verdicts import Verdict

pytestmark = needs_promtool

STOPPED = {'{run="b"}': Verdict.NO_PROGRESS, '{run="c"}': Verdict.NO_PROGRESS}
"""Verdicts of the runs b and c of THREE_RUNS."""


def test_the_number_of_runs_without_progress_is_that_of_the_table(tmp_path: Path) -> None:
    verdicts = {'{run="a"}': Verdict.NO_PROBLEM} | STOPPED
    counts = {"no problem": 1, "problem": 0, "no progress": 2, "unknown": 0, "of": 3}
    series = {f'{{name="{name}"}}': count for name, count in counts.items()}

    assert_panel(tmp_path, "training-fleet", "Runs", THREE_RUNS, series)
    assert_runs(tmp_path, THREE_RUNS, verdicts, column="Verdict")


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
    row = '{run="a",user="u",state="no step",alertname="no rank finishes a step"}'

    assert_runs(tmp_path, series, {row: 1.0}, minutes=6.25)


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
    series = THREE_RUNS | _alerts('alertname="TrainingHang",run="b"', 'alertname="RunDied",run="c"')
    runs = OTHER_STARTS | {'{run="a"}': 0.0}
    alerts = {
        '{alertname="TrainingHang",title="TrainingHang",run="b"}': 300_000.0,
        '{alertname="RunDied",title="RunDied",run="c"}': 330_000.0,
    }

    assert_runs(tmp_path, series, runs, column="Since")
    assert_panel(tmp_path, "training-fleet", "Firing alerts", series, alerts, column="Since")


def test_a_hardware_error_is_named_by_its_xid_instead_of_the_recovery_it_needs(tmp_path: Path) -> None:
    gpu = 'run="a",instance="n1",gpu="0"'
    series = THREE_RUNS | _alerts(
        f'alertname="GpuRecoveryActionNeeded",{gpu}', f'alertname="GpuXidCritical",xid="48",{gpu}'
    )
    alert = f'{{alertname="GpuXidCritical",title="Xid 48",{gpu}}}'
    runs = OTHER_ROWS | {'{run="a",user="u",state="running",alertname="Xid 48",instance="n1",gpu="0"}': 1.0}

    assert_panel(tmp_path, "training-fleet", "Firing alerts", series, {alert: 3.0})
    assert_panel(tmp_path, "training-fleet", "Firing alerts", series, {alert: 1.0}, column="Other alerts")
    assert_runs(tmp_path, series, runs)


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
            Verdict.LOSES_A_LITTLE,
            id="slow rank",
        ),
        pytest.param(
            {
                'training_phase_seconds_total{run="a",instance="n1",rank="0",phase="data_loading"}': "0+7.5x60",
                'training_wall_seconds_total{run="a",instance="n1"}': "0+15x60",
            },
            Verdict.LOSES_A_LITTLE,
            id="data stall",
        ),
        pytest.param({}, Verdict.NO_PROBLEM, id="healthy run"),
    ],
)
def test_a_run_that_a_rank_or_its_data_slows_is_above_a_healthy_run(
    tmp_path: Path, series: dict[str, str], verdict: Verdict
) -> None:
    verdicts = {'{run="a"}': verdict} | STOPPED

    assert_runs(tmp_path, THREE_RUNS | series, verdicts, column="Verdict")


def test_a_slow_run_has_its_slow_rank_the_start_and_the_cost_of_the_loss(tmp_path: Path) -> None:
    series = THREE_RUNS | STRAGGLER
    row = '{run="a",user="u",state="running",alertname="computes at 67 % of the fastest rank",instance="n2",rank="1"}'

    assert_runs(tmp_path, series, OTHER_ROWS | {row: 1.0})
    assert_runs(tmp_path, series, OTHER_STARTS | {'{run="a"}': 315_000.0}, column="Since")
    assert_runs(tmp_path, series, {'{run="a"}': 12.0}, column="Lost/h")
    assert_runs(
        tmp_path,
        series,
        {'{run="a"}': 33.0, '{run="b"}': 100.0, '{run="c"}': 100.0},
        column="Lost",
        factor=100,
    )


@pytest.mark.parametrize(
    ("throttled", "suffix"), [({}, ""), ({"clocks_event_seconds_total": "0+9x60"}, "; GPU throttled")]
)
def test_the_text_of_a_slow_rank_does_not_change_when_a_warning_fires(
    tmp_path: Path, throttled: dict[str, str], suffix: str
) -> None:
    gpu = 'gpu="3",uuid="G3"'
    series = (
        THREE_RUNS
        | {name.replace('rank="1"', f'rank="1",{gpu}'): values for name, values in STRAGGLER.items()}
        | {f'gpu_up{{instance="n2",{gpu}}}': "1x60"}
        | {
            f'gpu_{name}{{instance="n2",{gpu},reason="hw_thermal"}}': values
            for name, values in throttled.items()
        }
    )
    text = f"computes at 67 % of the fastest rank{suffix}"
    row = f'{{run="a",user="u",state="running",alertname="{text}",instance="n2",rank="1",gpu="3"}}'
    warnings = {
        name.replace('severity="critical"', 'severity="warning"'): values
        for name, values in _alerts(
            'alertname="TrainingStraggler",run="a",instance="n2",rank="1"',
            'alertname="GpuThermalThrottle",run="a",instance="n2",gpu="3"',
        ).items()
    }

    assert_runs(tmp_path, series, OTHER_ROWS | {row: 1.0})
    assert_runs(tmp_path, series | warnings, OTHER_ROWS | {row: 1.0})


def test_an_alert_about_a_gpu_has_no_rank_that_uses_another_gpu_and_explains_a_hang(tmp_path: Path) -> None:
    slow = THREE_RUNS | STRAGGLER | _alerts('alertname="GpuThermalThrottle",run="a",instance="n2",gpu="3"')
    hang = (
        THREE_RUNS
        | _hang(run="b")
        | _alerts(
            'alertname="TrainingHang",run="b"',
            'alertname="GpuLost",run="b",instance="n1",gpu="0"',
            'alertname="GpuXidCritical",run="b",instance="n1",gpu="0",xid="79"',
        )
    )
    others = {'{run="c",user="u",state="lost"}': 1.0}

    assert_runs(
        tmp_path,
        slow,
        others
        | {
            '{run="a",user="u",state="running",alertname="GpuThermalThrottle",instance="n2",gpu="3"}': 1.0,
            '{run="b",user="u",state="hung",alertname="no rank finishes a step"}': 1.0,
        },
    )
    assert_runs(
        tmp_path,
        hang,
        others
        | {
            '{run="a",user="u",state="running"}': 1.0,
            '{run="b",user="u",state="hung",alertname="Xid 79",instance="n1",gpu="0"}': 1.0,
        },
    )


@pytest.mark.parametrize("node", ["", ',instance="n2"'], ids=["alert without a node", "alert with a node"])
def test_failing_saves_have_no_rank_although_a_rank_is_slow(tmp_path: Path, node: str) -> None:
    alert = f'alertname="TrainingCheckpointFailing",run="a"{node}'
    series = THREE_RUNS | STRAGGLER | _alerts(alert)
    failing = f'{{user="u",state="running",{alert}}}'
    rows = OTHER_ROWS | {failing: 1.0}

    assert_runs(tmp_path, series, rows)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ('training_checkpoints_total{run="a",instance="n1",kind="sync",result="failed"}', "3 saves failed"),
        (
            'training_nonfinite_total{run="a",instance="n1",rank="0",kind="loss",value="nan"}',
            "loss was NaN or infinite in 3 steps",
        ),
    ],
    ids=["failed saves", "NaN losses"],
)
def test_failed_saves_and_nan_losses_have_their_number_and_start(
    tmp_path: Path, family: str, text: str
) -> None:
    series = THREE_RUNS | {family: "0x20 3x40"}
    row = f'{{run="a",user="u",state="running",alertname="{text}"}}'
    ended = {
        'training_run_state{run="a",instance="n1",state="running"}': "1x40 0x20",
        'training_run_state{run="a",instance="n1",state="finished"}': "0x40 1x20",
    }

    assert_runs(tmp_path, series, OTHER_ROWS | {row: 1.0})
    assert_runs(tmp_path, series, OTHER_STARTS | {'{run="a"}': 300_000.0}, column="Since")
    assert_runs(tmp_path, series | ended, OTHER_ROWS | {'{run="a",user="u",state="finished"}': 1.0})


def test_a_run_that_finished_before_its_step_target_has_the_verdict_and_its_last_step(tmp_path: Path) -> None:
    series = (
        THREE_RUNS
        | run_series("run_state", "1x20 0x40", labels=',state="running"')
        | run_series("run_state", "0x20 1x40", labels=',state="finished"')
        | run_series("run_state_since_timestamp_seconds", "0x20 300x40")
        | run_series("process_up", "1x20 0x40", labels=',rank="0"')
        | run_series("step", "850x60", labels=',rank="0"')
        | run_series("step_target", "6000x60")
    )
    row = '{run="a",user="u",state="finished",alertname="finished early, at step 850 of 6000"}'

    assert_runs(tmp_path, series, OTHER_ROWS | {row: 1.0})
    assert_runs(tmp_path, series, STOPPED | {'{run="a"}': Verdict.ENDED_EARLY}, column="Verdict")
    assert_runs(tmp_path, series, OTHER_STARTS | {'{run="a"}': 300_000.0}, column="Since")


def test_a_driver_that_does_not_respond_is_the_problem_of_a_run_that_makes_progress(tmp_path: Path) -> None:
    driver = {
        'up{job="training",instance="n1"}': "1x60",
        'gpu_devices_expected{job="training",instance="n1"}': "8x60",
        'gpu_nvml_up{job="training",instance="n1"}': "1x40 0x20",
    }
    row = '{run="a",user="u",state="running",alertname="driver does not respond, GPUs unknown",instance="n1"}'

    assert_runs(tmp_path, THREE_RUNS | driver, OTHER_ROWS | {row: 1.0})
    assert_runs(tmp_path, THREE_RUNS | driver, OTHER_STARTS | {'{run="a"}': 615_000.0}, column="Since")


def test_failed_saves_name_the_step_of_the_last_checkpoint(tmp_path: Path) -> None:
    failed = 'training_checkpoints_total{run="a",instance="n1",kind="sync",result="failed"}'
    series = THREE_RUNS | {
        failed: "0x20 3x40",
        'training_checkpoint_last_step{run="a",instance="n1",rank="0"}': "400x60",
    }
    row = '{run="a",user="u",state="running",alertname="3 saves failed; last checkpoint: step 400"}'

    assert_runs(tmp_path, series, OTHER_ROWS | {row: 1.0})


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
        THREE_RUNS
        | _alerts(f'{alert},run="a",instance="n2",gpu="3"')
        | {'training_rank_info{run="a",instance="n2",rank="1",gpu="3",uuid="G3"}': "1x60"}
        | fault
    )
    rows = OTHER_ROWS | {
        f'{{run="a",user="u",state="running",alertname="{problem}",instance="n2",rank="1",gpu="3"}}': 1.0
    }

    assert_runs(tmp_path, series, rows)


def test_no_rank_is_named_while_all_ranks_wait_for_data_and_a_restart_has_a_verdict(tmp_path: Path) -> None:
    wait = 'training_phase_seconds_total{{run="a",instance="n{rank}",rank="{rank}",phase="data_loading"}}'
    series = (
        THREE_RUNS
        | {wait.format(rank=rank): "0+6x60" for rank in (1, 2)}
        | {'training_wall_seconds_total{run="a"}': "0+15x60"}
    )
    restart = THREE_RUNS | {
        'training_badput_seconds_total{run="a",cause="downtime"}': "0x20 180x40",
        'training_wall_seconds_total{run="a"}': "3600+15x60",
    }

    assert_runs(
        tmp_path,
        series,
        OTHER_ROWS | {'{run="a",user="u",state="running",alertname="all ranks wait for data: 40 %"}': 1.0},
    )
    assert_runs(tmp_path, restart, {'{run="a"}': Verdict.RESTARTED} | STOPPED, column="Verdict")


LOST_GPU_OF_B = {
    'training_rank_info{run="b",instance="n1",rank="0",gpu="3",uuid="G3"}': "1x20 stale",
    'gpu_up{instance="n1",gpu="3",uuid="G3"}': "1x20 0x40",
}


@pytest.mark.parametrize(
    ("cause", "labels"),
    [
        pytest.param(
            _hang(run="b"),
            'alertname="holds up the others: read data.py:40, phase forward",instance="n1",rank="1"',
            id="rank that holds up the others",
        ),
        pytest.param(
            LOST_GPU_OF_B,
            'alertname="GPU 3 lost: no rank finishes a step",instance="n1",rank="0",gpu="3"',
            id="lost GPU",
        ),
    ],
)
def test_a_standstill_has_its_rank_node_and_gpu_before_its_alert_fires(
    tmp_path: Path, cause: dict[str, str], labels: str
) -> None:
    series = THREE_RUNS | cause
    row = f'{{run="b",user="u",state="hung",{labels}}}'
    others = {'{run="a",user="u",state="running"}': 1.0, '{run="c",user="u",state="lost"}': 1.0}

    assert_runs(tmp_path, series, others | {row: 1.0})


def _waiting(run: str, seconds_per_scrape: float) -> dict[str, str]:
    """Return the series of a run that waits for data for a part of each scrape interval of 15 s."""
    return {
        f'training_badput_seconds_total{{run="{run}",instance="n1",cause="data_stall"}}': f"0+{seconds_per_scrape}x60",
        f'training_wall_seconds_total{{run="{run}",instance="n1"}}': "0+15x60",
    }


def test_a_large_loss_is_above_the_warnings_and_a_small_loss_is_not(tmp_path: Path) -> None:
    series = dict(THREE_RUNS)
    healthy = {name: values for name, values in series.items() if 'run="a"' in name}
    for run in ("d", "e", "f"):
        series |= {name.replace('run="a"', f'run="{run}"'): values for name, values in healthy.items()}
    series |= _waiting("d", 6.5) | _waiting("e", 3) | _waiting("f", 1)
    series |= {
        'ALERTS{alertstate="firing",severity="warning",alertname="GpuThermalThrottle",run="f"}': "_x48 1x12"
    }
    verdicts = {
        "a": Verdict.NO_PROBLEM,
        "d": Verdict.LOSES_MUCH_TIME,
        "e": Verdict.LOSES_TIME,
        "f": Verdict.WARNING,
    }

    assert_runs(
        tmp_path,
        series,
        {f'{{run="{run}"}}': verdict for run, verdict in verdicts.items()} | STOPPED,
        column="Verdict",
    )


def test_a_run_that_loses_much_time_without_an_alert_has_the_cause(tmp_path: Path) -> None:
    row = '{run="a",user="u",state="running",alertname="data_stall"}'

    assert_runs(tmp_path, THREE_RUNS | _waiting("a", 6.5), OTHER_ROWS | {row: 1.0})


def test_a_live_run_with_ranks_without_samples_is_partly_unknown_and_has_their_node(tmp_path: Path) -> None:
    series = THREE_RUNS | {
        'training_world_size{run="a",instance="n1"}': "3x60",
        'training_process_up{run="a",instance="n2",rank="1"}': "1x50 stale",
        'training_process_up{run="a",instance="n2",rank="2"}': "1x50 stale",
    }
    row = '{run="a",user="u",state="running",alertname="ranks without news: 2",instance="n2"}'
    rows = OTHER_ROWS | {row: 1.0}
    verdicts = {'{run="a"}': Verdict.PARTLY_UNKNOWN} | STOPPED

    assert_runs(tmp_path, series, rows)
    assert_runs(tmp_path, series, verdicts, column="Verdict")


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
    verdict = {'{run="a"}': Verdict.NO_PROBLEM if has_news else Verdict.UNKNOWN}
    age = "" if has_news else 'age=", no news for 2 min from ",instance="n1",'
    run_state = {f'{{{age}state="running"}}': 0.0 if has_news else 1.0}

    assert_runs(tmp_path, series, verdict, column="Verdict")
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


def test_a_run_whose_ranks_were_killed_makes_no_progress_and_a_run_that_ends_normally_is_ending(
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
        '{run="normal",user="u",state="ending",alertname="all ranks have ended, outcome not decided"}': 1.0,
        '{run="stopped",user="u",state="ending",alertname="all ranks have ended, outcome not decided"}': 1.0,
    }
    verdicts = {
        '{run="killed"}': Verdict.NO_PROGRESS,
        '{run="normal"}': Verdict.ENDING,
        '{run="stopped"}': Verdict.ENDING,
    }
    starts = {'{run="killed"}': 845_000.0, '{run="normal"}': 850_000.0, '{run="stopped"}': 850_000.0}

    assert_runs(tmp_path, series, rows)
    assert_runs(tmp_path, series, verdicts, column="Verdict")
    assert_runs(tmp_path, series, starts, column="Since")


def test_a_run_that_remains_ending_for_two_minutes_makes_no_progress(tmp_path: Path) -> None:
    series = _ending_run("a", {}) | {
        'training_run_state{run="a",instance="n1",state="running"}': "1x50 0x10",
        'training_run_state{run="a",instance="n1",state="ending"}': "0x50 1x10",
        'training_run_state_since_timestamp_seconds{run="a",instance="n1"}': "0x50 765x10",
        'training_process_up{run="a",instance="n1",rank="0"}': "1x50 0x10",
    }
    row = '{run="a",user="u",state="ending",alertname="all ranks ended, cause unknown after 2 min"}'

    assert_runs(tmp_path, series, {row: 1.0})
    assert_runs(tmp_path, series, {'{run="a"}': Verdict.NO_PROGRESS}, column="Verdict")
    assert_runs(tmp_path, series, {'{run="a"}': 765_000.0}, column="Since")


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
            300_000.0,
            id="throttling",
        ),
        pytest.param('alertname="GpuPowerCapped"', {}, 690_000.0, id="alert without a recorded start"),
    ],
)
def test_an_alert_has_the_start_of_its_problem_in_both_tables(
    tmp_path: Path, alert: str, fault: dict[str, str], start: float
) -> None:
    gpu = 'run="a",instance="n2",gpu="3"'
    series = THREE_RUNS | _alerts(f'{alert},{gpu},uuid="G3"') | fault
    name = re.findall(r'alertname="(\w+)"', alert)[0]
    title = "Xid 48" if "Xid" in name else name

    assert_runs(tmp_path, series, OTHER_STARTS | {'{run="a"}': start}, column="Since")
    assert_panel(
        tmp_path,
        "training-fleet",
        "Firing alerts",
        series,
        {f'{{alertname="{name}",title="{title}",{gpu}}}': start},
        column="Since",
    )


def test_the_first_of_equally_urgent_alerts_is_the_problem_of_the_run(tmp_path: Path) -> None:
    names = {"TrainingCheckpointOverdue": 400, "RunSlower": 500, "TrainingStartupSlow": 600}
    series = THREE_RUNS | {
        f'{name}{{run="a",alertname="{alert}",{labels}}}': values
        for alert, start in names.items()
        for name, labels, values in (
            ("ALERTS", 'severity="warning",alertstate="firing"', "_x48 1x12"),
            ("ALERTS_FOR_STATE", 'severity="warning"', f"_x48 {start}x12"),
        )
    }
    rows = OTHER_ROWS | {'{run="a",user="u",state="running",alertname="TrainingCheckpointOverdue"}': 1.0}
    starts = OTHER_STARTS | {'{run="a"}': 400_000.0}

    assert_runs(tmp_path, series, rows)
    assert_runs(tmp_path, series, starts, column="Since")


def test_a_run_that_no_exporter_reports_is_unknown_with_the_age_and_node(tmp_path: Path) -> None:
    # The recording rules bridge a missed scrape: the last samples are of 4:30, the last recorded samples of 5:00.
    series = (
        run_series("run_state", "1x18 stale", labels=',state="running"')
        | run_series("run_info", "1x18 stale", labels=',user="u"')
        | run_series("process_up", "1x18 stale", labels=',rank="0"')
    )
    row = '{run="a", user="u", state="unknown", alertname="no news for 10 min", instance="n1"}'

    assert_runs(tmp_path, series, {row: 1})
    assert_runs(tmp_path, series, {'{run="a"}': Verdict.UNKNOWN}, column="Verdict")
    assert_panel(tmp_path, "training-fleet", "Runs", series, {"{}": 1}, series_name="unknown")


def test_a_run_that_starts_after_an_exit_has_restarted_since_the_exit(tmp_path: Path) -> None:
    labels = 'run="a",instance="n1"'
    series = THREE_RUNS | {
        f'training_run_state{{{labels},state="running"}}': "1x52 0x8",
        f'training_run_state{{{labels},state="starting"}}': "0x52 1x8",
        f'training_rank_last_exit_timestamp_seconds{{{labels},rank="0",reason="signal SIGKILL"}}': "_x53 780x8",
    }

    verdicts = {'{run="a"}': Verdict.STARTING} | STOPPED
    assert_runs(tmp_path, series, verdicts, column="Verdict")
    assert_runs(tmp_path, series, OTHER_STARTS | {'{run="a"}': 780_000.0}, column="Since")
