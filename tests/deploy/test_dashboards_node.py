"""Problems, losses and costs on the dashboard *Node*, for synthetic series, evaluated by promtool."""

from __future__ import annotations

from pathlib import Path

import pytest
from dashboards_support import MODELS
from panel_support import assert_panel, assert_queries
from rules_support import needs_promtool

from dashboards.board import all_panels
from dashboards.gpu_problems import Impact
from dashboards.verdicts import Verdict

pytestmark = needs_promtool

NO_PROBLEM = -1
"""Value of the column *Impact* in the only row of a node without a problem."""
RANK_LABELS = 'job="training",run="a",rank="{rank}",instance="n{node}"'


def _run(state: str = "running", up: str = "1x60", steps: str = "0+15x60") -> dict[str, str]:
    """Return the series of a run with rank 0 on node n1 and rank 1 on node n2, and the same rent on both."""
    series = {
        'up{job="training",instance="n1"}': "1x60",
        'gpu_up{job="training",instance="n1",gpu="0",uuid="G0"}': "1x60",
        f'training_run_state{{job="training",run="a",instance="n2",state="{state}"}}': "1x60",
        'training_run_info{job="training",run="a",instance="n2",user="u"}': "1x60",
        'training_wall_seconds_total{job="training",run="a",instance="n2"}': "0+15x60",
    }
    for rank in (0, 1):
        labels = RANK_LABELS.format(rank=rank, node=rank + 1)
        series |= {
            f'training_rank_info{{{labels},local_rank="0"}}': "1x60",
            f"training_process_up{{{labels}}}": up if rank == 0 else "1x60",
            f"training_last_progress_timestamp_seconds{{{labels}}}": steps,
            f'training_feed_last_update_timestamp_seconds{{{labels},role="trainer"}}': "0+15x60",
            f'training_cost_total{{job="training",run="a",instance="n{rank + 1}",currency="EUR"}}': "0+0.15x60",
            f'training_step_duration_seconds_sum{{{labels},mode="train"}}': "0+15x60",
            f'training_step_duration_seconds_count{{{labels},mode="train"}}': "0+10x60",
        }
    return series


def _compute(rank: int, seconds: str) -> dict[str, str]:
    return {f"training_rank_compute_seconds{{{RANK_LABELS.format(rank=rank, node=rank + 1)}}}": seconds}


SLOW_HERE = _run() | _compute(0, "1x20 1.5x40") | _compute(1, "1x60")
SLOW_ELSEWHERE = _run() | _compute(0, "1x60") | _compute(1, "1x20 1.5x40")
HOT_GPU = {
    'gpu_clocks_event_seconds_total{job="training",instance="n1",gpu="0",uuid="G0",reason="thermal"}': "0x20 0+9x40"
}
SLOW_ROW = '{gpu="0",run="a",rank="0",problem="computes at 67 % of the fastest rank",remedy="check clocks and heat; else replace the node"}'
HOT_ROW = '{gpu="0",run="a",rank="0",problem="throttled by heat",remedy="check fans, airflow and coolant"}'
BRAKED_GPU = {
    'gpu_clocks_event_seconds_total{job="training",instance="n1",gpu="0",uuid="G0",reason="hw_power_brake"}': "0x20 0+9x40"
}
BRAKED_ROW = '{gpu="0",run="a",rank="0",problem="throttled by the power brake",remedy="check the power supply of the node"}'
NAN_ALERT = {
    'ALERTS{alertname="TrainingLossNonFinite",alertstate="firing",run="a",severity="critical"}': "1x60",
    'ALERTS_FOR_STATE{alertname="TrainingLossNonFinite",run="a",severity="critical"}': "240x60",
}
NAN_ROW = '{run="a",problem="TrainingLossNonFinite",remedy="Run has the step and the rank"}'
NOTHING_WRONG = '{problem="no problem"}'


@pytest.mark.parametrize(
    ("column", "series", "expected"),
    [
        pytest.param("Impact", SLOW_HERE, {SLOW_ROW: Impact.LOSES_TIME}, id="slow rank"),
        pytest.param(
            "Impact", SLOW_HERE | HOT_GPU, {HOT_ROW: Impact.LOSES_TIME}, id="hot GPU before its slow rank"
        ),
        pytest.param(
            "Impact", _run() | BRAKED_GPU, {BRAKED_ROW: Impact.LOSES_TIME}, id="GPU with the power brake"
        ),
        pytest.param("Impact", SLOW_ELSEWHERE, {NOTHING_WRONG: NO_PROBLEM}, id="slow rank on another node"),
        pytest.param(
            "Impact",
            _run() | NAN_ALERT,
            {NAN_ROW: Impact.ENDANGERS_WORK},
            id="alert of a run without a node",
        ),
        pytest.param("Since", _run() | NAN_ALERT, {'{run="a"}': 240_000}, id="start of the alert"),
        pytest.param(
            "Since",
            _run()
            | NAN_ALERT
            | {'training_nonfinite_total{run="a",instance="n1",kind="loss",value="nan"}': "0x14 3x46"},
            {'{run="a"}': 210_000},
            id="last evaluation without a NaN",
        ),
        pytest.param("Since", SLOW_HERE, {'{gpu="0",run="a",rank="0"}': 315_000}, id="start"),
        pytest.param(
            "Since",
            SLOW_HERE | HOT_GPU,
            {'{gpu="0",run="a",rank="0"}': 315_000},
            id="start of the throttling, not of the slow rank before",
        ),
        pytest.param("Lost/h here", SLOW_HERE, {'{run="a"}': 12}, id="loss on this node"),
        pytest.param(
            "Others", SLOW_HERE | HOT_GPU, {'{gpu="0",run="a",rank="0"}': 1}, id="number of other problems"
        ),
    ],
)
def test_a_problem_of_a_run_on_the_node_has_its_impact_start_loss_and_the_number_of_others(
    tmp_path: Path, column: str, series: dict[str, str], expected: dict[str, float]
) -> None:
    assert_panel(tmp_path, "training-node", "What is wrong", series, expected, column=column)


_CPU_SECONDS = f'training_process_cpu_seconds_total{{{RANK_LABELS.format(rank=0, node=1)},role="trainer"}}'
_TRAINERS = f'training_process_instances{{{RANK_LABELS.format(rank=0, node=1)},role="trainer"}}'
_DATA_WORKERS = f'training_process_instances{{{RANK_LABELS.format(rank=0, node=1)},role="dataloader"}}'
_HOST_CPUS = 'host_cpu_utilization_ratio{job="training",instance="n1"}'


@pytest.mark.parametrize(
    ("processes", "remedy"),
    [
        ({_HOST_CPUS: "0.5x60"}, "check the storage; use more data workers"),
        ({_HOST_CPUS: "1x60"}, "CPUs are full: cheaper transforms, more CPUs"),
        (
            {_HOST_CPUS: "1x60", _CPU_SECONDS: "0+15x60", _TRAINERS: "1x60"},
            "CPUs are full: cheaper transforms, more CPUs",
        ),
        (
            {_HOST_CPUS: "1x60", _CPU_SECONDS: "0+0.1x60", _TRAINERS: "1x60"},
            "no data worker processes: set num_workers",
        ),
        (
            {_HOST_CPUS: "1x60", _CPU_SECONDS: "0+0.1x60", _DATA_WORKERS: "4x60"},
            "other programs use the CPUs of the node",
        ),
    ],
    ids=["free CPUs", "full CPUs", "CPUs full of the run", "no data workers", "CPUs full of other programs"],
)
def test_a_rank_that_waits_for_data_is_a_problem_of_its_node(
    tmp_path: Path, processes: dict[str, str], remedy: str
) -> None:
    waiting = f'training_phase_seconds_total{{{RANK_LABELS.format(rank=0, node=1)},phase="data_loading"}}'
    row = f'{{gpu="0",run="a",rank="0",problem="waits longest for data: 40 %, 2 min",remedy="{remedy}"}}'

    assert_panel(
        tmp_path,
        "training-node",
        "What is wrong",
        _run() | processes | {waiting: "0+6x60"},
        {row: Impact.LOSES_TIME},
    )


HANG = _run("hung", steps="0+15x20 300x40")
STATE_START = {'training_run_state_since_timestamp_seconds{run="a",instance="n1"}': "10x60"}
LOST_GPU = {
    'gpu_up{job="training",instance="n1",gpu="0",uuid="G0"}': "1x20 0x40",
    'gpu_error_info{job="training",instance="n1",gpu="0",uuid="G0",reason="gpu_is_lost"}': "_x21 1x40",
}
LOST_GPU_LABELS = '{gpu="0",run="a",rank="0"}'
LOST_ROW = '{gpu="0",run="a",rank="0",problem="GPU does not respond: gpu_is_lost",remedy="drain; reset the GPU or reboot"}'


def _hang_info(rank: int, function: str) -> dict[str, str]:
    labels = RANK_LABELS.format(rank=rank, node=rank + 1)
    return {
        f'training_hang_info{{{labels},function="{function}",location="job.py:{rank}",phase="forward"}}': "_x40 1x20"
    }


def _phases(rank_in_forward: int) -> dict[str, str]:
    """Return the series of a run in which one rank is in its forward pass, while the other rank waits for it."""
    return {'training_world_size{job="training",run="a",instance="n2"}': "2x60"} | {
        f'training_phase_active{{{RANK_LABELS.format(rank=rank, node=rank + 1)},phase="{phase}"}}': "1x60"
        for rank, phase in ((rank_in_forward, "forward"), (1 - rank_in_forward, "grad_sync"))
    }


@pytest.mark.parametrize(
    ("series", "row"),
    [
        pytest.param(
            _hang_info(0, "read"),
            '{gpu="0",run="a",rank="0",problem="this node holds up the run: read job.py:0, phase forward",remedy="read this line of the job; restart the run"}',
            id="on this node",
        ),
        pytest.param(
            _phases(0),
            '{gpu="0",run="a",rank="0",problem="this node holds up the run: phase forward",remedy="run training-exporter stacks on the node"}',
            id="on this node, before the stacks are known",
        ),
        pytest.param(
            _phases(1),
            '{run="a",problem="no rank finishes a step; the cause is rank 1 on n2",remedy="What is wrong on Run has the cause"}',
            id="on another node, before the stacks are known",
        ),
        pytest.param(
            _hang_info(1, "read"),
            '{run="a",problem="no rank finishes a step; the cause is rank 1 on n2",remedy="What is wrong on Run has the cause"}',
            id="on another node",
        ),
        pytest.param(LOST_GPU, LOST_ROW, id="lost GPU on this node"),
    ],
)
def test_a_hang_shows_whether_its_cause_is_on_the_node(
    tmp_path: Path, series: dict[str, str], row: str
) -> None:
    assert_panel(tmp_path, "training-node", "What is wrong", HANG | series, {row: Impact.NO_PROGRESS})


@pytest.mark.parametrize(
    ("panel", "column", "expected"),
    [
        ("What is wrong", "Since", {'{gpu="0",run="a",rank="0"}': 300_000}),
        (
            "Runs on this node",
            "",
            {'{run="a",state="no step",user="u",cause="standstill"}': 1},
        ),
        ("Runs on this node", "In state since", {'{run="a"}': 300_000}),
        ("Runs on this node", "Last step", {'{run="a"}': 585}),
        ("Ranks on this node", "", {'{run="a",rank="0",gpu="0",phase="forward"}': 1}),
        ("Ranks on this node", "Last step", {'{run="a",rank="0"}': 585}),
    ],
    ids=["start", "state", "start of the state", "last step of the run", "phase", "last step of the rank"],
)
def test_a_single_missed_scrape_hides_nothing_about_a_hang(
    tmp_path: Path, panel: str, column: str, expected: dict[str, float]
) -> None:
    missed = {
        name: values.replace("x60", "x59 stale") if name.startswith("training_") else values
        for name, values in (_run(steps="0+15x20 300x38 stale") | _phases(0) | STATE_START).items()
    }

    assert_panel(tmp_path, "training-node", panel, missed, expected, column=column)


def test_a_lost_gpu_does_not_stop_a_run_that_makes_steps(tmp_path: Path) -> None:
    assert_panel(
        tmp_path, "training-node", "What is wrong", _run() | LOST_GPU, {LOST_ROW: Impact.ENDANGERS_WORK}
    )
    assert_panel(
        tmp_path, "training-node", "What is wrong", _run() | LOST_GPU, {LOST_GPU_LABELS: 0}, column="Others"
    )


def _exit(rank: int, seconds: int) -> dict[str, str]:
    labels = RANK_LABELS.format(rank=rank, node=rank + 1)
    return {
        f'training_rank_last_exit_timestamp_seconds{{{labels},reason="inferred: the process was killed or crashed"}}': f"_x20 {seconds}x40"
    }


ENDED_FIRST = '{gpu="0",run="a",rank="0",problem="process ended first: killed or crashed",remedy="read the log of this rank first"}'
ENDED = '{gpu="0",run="a",rank="0",problem="process ended: killed or crashed",remedy="read its log; Run has all exits"}'


@pytest.mark.parametrize(
    ("state", "exit_of_other", "row"),
    [("lost", 302, ENDED_FIRST), ("lost", 300, ENDED), ("finished", 302, None)],
    ids=["first", "after the rank on the other node", "finished run"],
)
def test_the_end_of_a_rank_is_a_problem_unless_its_run_has_finished(
    tmp_path: Path, state: str, exit_of_other: int, row: str | None
) -> None:
    series = _run(state, up="1x20 0x40", steps="0+15x20 300x40") | _exit(0, 301) | _exit(1, exit_of_other)
    series |= {f"training_process_up{{{RANK_LABELS.format(rank=1, node=2)}}}": "1x20 0x40"}

    assert_panel(
        tmp_path,
        "training-node",
        "What is wrong",
        series,
        {row: Impact.NO_PROGRESS} if row else {NOTHING_WRONG: NO_PROBLEM},
    )


def test_a_restart_is_a_past_problem_of_the_node_of_the_rank_that_ended_first(tmp_path: Path) -> None:
    attempt_start = {
        'training_attempt_start_timestamp_seconds{job="training",run="a",instance="n2"}': "10x22 330x38"
    }
    series = _run() | attempt_start | _exit(0, 301) | _exit(1, 302)
    restarted = '{gpu="0",run="a",rank="0"}'
    row = '{gpu="0",run="a",rank="0",problem="the run restarted after: killed or crashed",remedy="read the log of this rank"}'

    assert_queries(
        tmp_path,
        "training-node",
        "What is wrong",
        series,
        {"A": {row: Impact.PAST}, "B": {restarted: 301_000}},
    )


def test_the_rank_that_ended_first_has_no_other_problem_and_its_row_is_first(tmp_path: Path) -> None:
    series = _run("lost", up="1x20 0x40", steps="0+15x20 300x40") | _exit(0, 301) | _exit(1, 302)
    series |= {f"training_process_up{{{RANK_LABELS.format(rank=1, node=2)}}}": "1x20 0x40"}

    assert_panel(
        tmp_path, "training-node", "What is wrong", series, {'{gpu="0",run="a",rank="0"}': 0}, column="Others"
    )
    panel = next(panel for panel in all_panels(MODELS["training-node"]) if panel["title"] == "What is wrong")
    assert panel["options"]["sortBy"] == [
        {"displayName": "Impact", "desc": True},
        {"displayName": "Since", "desc": False},
    ]


@pytest.mark.parametrize(
    ("column", "factor", "expected"),
    [
        ("", 1, {'{run="a",state="running",user="u",cause="slowest_rank"}': 1}),
        ("Slowest here", 100, {'{run="a"}': 67}),
        ("elsewhere", 100, {'{run="a"}': 100}),
        ("Cost/h here", 1, {'{run="a"}': 36}),
        ("Lost/h here", 1, {'{run="a"}': 12}),
        ("Lost", 100, {'{run="a"}': 33}),
        ("Verdict", 1, {'{run="a"}': Verdict.LOSES_MUCH_TIME}),
    ],
    ids=["row", "slowest here", "slowest elsewhere", "cost here", "lost here", "lost time", "verdict"],
)
def test_a_run_on_the_node_has_its_slowest_rank_here_and_elsewhere_and_its_loss(
    tmp_path: Path, column: str, factor: int, expected: dict[str, float]
) -> None:
    assert_panel(
        tmp_path,
        "training-node",
        "Runs on this node",
        SLOW_HERE,
        expected,
        column=column,
        factor=factor,
    )


@pytest.mark.parametrize(
    ("query_id", "factor", "expected"),
    [("A", 1, {'{currency="EUR"}': 36}), ("B", 1, {'{currency="EUR"}': 12}), ("C", 100, {"{}": 33})],
    ids=["cost", "lost cost", "lost share"],
)
def test_the_cost_of_the_node_has_its_lost_part(
    tmp_path: Path, query_id: str, factor: int, expected: dict[str, float]
) -> None:
    assert_panel(
        tmp_path,
        "training-node",
        "Cost per hour, 5 min",
        SLOW_HERE,
        expected,
        query_id=query_id,
        factor=factor,
    )


def test_a_run_that_finished_before_its_step_target_has_the_verdict_and_its_last_step(tmp_path: Path) -> None:
    of_run = 'job="training",run="a",instance="n2"'
    series = _run("finished", up="1x20 0x40", steps="0+15x20 300x40") | {
        f"training_process_up{{{RANK_LABELS.format(rank=1, node=2)}}}": "1x20 0x40",
        f"training_step{{{of_run}}}": "850x60",
        f"training_step_target{{{of_run}}}": "6000x60",
    }
    row = {'{run="a",user="u",state="ended early, step 850 of 6000"}': 1}
    verdict = {'{run="a"}': Verdict.ENDED_EARLY}

    assert_panel(tmp_path, "training-node", "Runs on this node", series, row)
    assert_panel(tmp_path, "training-node", "Runs on this node", series, verdict, column="Verdict")


STOPPED_RUN = {
    name: values.replace("1x60", "1x40 0x20").replace("0+0.15x60", "0+0.15x40 6x20")
    for name, values in _run().items()
    if not name.startswith("training_run_state")
} | {
    'training_run_state{job="training",run="a",instance="n2",state="running"}': "1x40 0x20",
    'training_run_state{job="training",run="a",instance="n2",state="lost"}': "0x40 1x20",
    'training_world_size{job="training",run="a",instance="n2"}': "2x60",
    'up{job="training",instance="n1"}': "1x60",
    f'training_phase_seconds_total{{{RANK_LABELS.format(rank=0, node=1)},phase="data_loading"}}': "0+6x40 240x20",
}
"""Series of a run on n1 and n2 whose ranks end after 10 min."""


@pytest.mark.parametrize(
    ("panel", "column", "factor", "expected"),
    [
        ("Runs on this node", "Cost/h here", 1, {'{run="a"}': 36}),
        ("Runs on this node", "Lost/h here", 1, {'{run="a"}': 36}),
        ("Runs on this node", "Lost", 100, {'{run="a"}': 100}),
        ("Ranks on this node", "Data wait", 100, {}),
    ],
    ids=["cost", "lost cost", "lost share", "wait for data"],
)
def test_a_stopped_run_loses_its_usual_cost_on_the_node(
    tmp_path: Path, panel: str, column: str, factor: int, expected: dict[str, float]
) -> None:
    assert_panel(
        tmp_path,
        "training-node",
        panel,
        STOPPED_RUN,
        expected,
        column=column,
        factor=factor,
        minutes=12,
    )


EXPORTER_DOWN = {
    name: values.replace("x60", "x30 stale") if 'instance="n1"' in name else values
    for name, values in _run().items()
} | {
    'up{job="training",instance="n1"}': "1x30 0x30",
    # A recorded series remains for minutes without a staleness marker, as after a restart of Prometheus.
    'rank:training_straggler_score:ratio{run="a",instance="n1",rank="0"}': "1x60",
}
"""Series of a run on n1 and n2 whose exporter on n1 is down from 7.5 min on."""
UNKNOWN = -1
"""Value that the columns of *Runs on this node* show as *unknown*."""


@pytest.mark.parametrize(
    ("panel", "column", "expected"),
    [
        ("Cost per hour, 5 min", "", {'{currency="unknown"}': 0}),
        ("Runs on this node", "", {'{run="a",state="running, here unknown",user="u"}': 1}),
        ("Runs on this node", "Alive", {'{run="a"}': UNKNOWN}),
        ("Runs on this node", "Slowest here", {'{run="a"}': UNKNOWN}),
        ("Runs on this node", "Cost/h here", {'{run="a"}': UNKNOWN}),
        ("GPUs", "", {'{name="unknown"}': 1}),
    ],
    ids=[
        "cost",
        "state",
        "ranks alive",
        "slowest rank",
        "cost of the run",
        "GPUs",
    ],
)
def test_without_its_exporter_the_runs_and_costs_of_a_node_are_unknown(
    tmp_path: Path, panel: str, column: str, expected: dict[str, float]
) -> None:
    assert_panel(tmp_path, "training-node", panel, EXPORTER_DOWN, expected, column=column)


def test_the_cost_of_a_node_is_that_of_five_minutes_also_while_a_gpu_is_lost(tmp_path: Path) -> None:
    cost = 'training_cost_total{job="training",run="a",instance="n1",currency="EUR"}'
    restart_booked_at_once = {cost: "0+0.15x20 9+0.15x40"}
    series = _run() | LOST_GPU | restart_booked_at_once

    assert_panel(tmp_path, "training-node", "Cost per hour, 5 min", series, {'{currency="EUR"}': 36})


def test_the_cost_of_a_node_is_its_usual_cost_until_five_minutes_after_a_restart(tmp_path: Path) -> None:
    run, cost = (
        'job="training",run="a"',
        'training_cost_total{{job="training",run="a",instance="{}",currency="EUR"}}',
    )
    series = _run() | {
        f'training_attempt_start_timestamp_seconds{{{run},instance="n1"}}': "10x24 375x35",
        f'training_restarts_total{{{run},instance="n1",reason="signal"}}': "0x24 1x35",
        **{cost.format(node): "0+0.15x20 3x4 3+0.15x35" for node in ("n1", "n2")},
    }

    for minutes in (8.0, 12.0):
        assert_panel(
            tmp_path,
            "training-node",
            "Cost per hour, 5 min",
            series,
            {'{currency="EUR"}': 36},
            minutes=minutes,
        )


def test_a_hot_gpu_is_unknown_while_the_exporter_is_down(tmp_path: Path) -> None:
    series = {
        name: values.replace("x60", "x58 stale").replace("x40", "x38 stale")
        if 'instance="n1"' in name
        else values
        for name, values in (SLOW_HERE | HOT_GPU).items()
    } | {'up{job="training",instance="n1"}': "1x58 0x2"}
    row = '{problem="exporter down: node, GPUs unknown",remedy="check the machine and the exporter\'s log"}'

    assert_panel(tmp_path, "training-node", "What is wrong", series, {row: Impact.UNKNOWN})


def test_a_thread_that_waits_for_a_cpu_for_most_of_the_time_is_a_warning(tmp_path: Path) -> None:
    waiting = {'host_pressure_cpu_waiting_seconds_total{job="training",instance="n1"}': "0+12x60"}

    assert_panel(
        tmp_path,
        "training-node",
        "CPU",
        waiting | _run(),
        {'{note="waiting, 5 min"}': 80},
        query_id="B",
        factor=100,
    )


NO_DRIVER = {
    'gpu_nvml_error_info{job="training",instance="n1",reason="driver_not_loaded"}': "_x41 1x20",
    'gpu_nvml_up{job="training",instance="n1"}': "1x40 0x20",
    'gpu_devices_expected{job="training",instance="n1"}': "1x60",
}
NO_DRIVER_ROW = (
    '{problem="driver does not respond: driver_not_loaded",remedy="nvidia-smi; reload the driver or reboot"}'
)


def test_a_driver_that_does_not_respond_stops_only_a_run_without_a_step(tmp_path: Path) -> None:
    hang = {
        NO_DRIVER_ROW: Impact.NO_PROGRESS,
        '{run="a",problem="no rank finishes a step; the cause is not known yet",remedy="run training-exporter stacks on the node"}': Impact.NO_PROGRESS,
    }

    assert_panel(
        tmp_path, "training-node", "What is wrong", _run() | NO_DRIVER, {NO_DRIVER_ROW: Impact.ENDANGERS_WORK}
    )
    assert_panel(tmp_path, "training-node", "What is wrong", HANG | NO_DRIVER, hang)


def test_the_alerts_of_a_node_include_those_of_its_runs_without_a_node(tmp_path: Path) -> None:
    other_run = {
        name.replace('run="a"', 'run="b"'): values for name, values in NAN_ALERT.items() if "ALERTS{" in name
    }
    nan = '{alertname="TrainingLossNonFinite",title="TrainingLossNonFinite",run="a"}'

    assert_panel(tmp_path, "training-node", "Firing alerts", _run() | NAN_ALERT | other_run, {nan: 3})
    assert_panel(
        tmp_path, "training-node", "Firing alerts", _run() | other_run, {'{title="no alert fires"}': 0}
    )


def test_failing_saves_endanger_the_work_of_a_node(tmp_path: Path) -> None:
    series = _run() | {
        name.replace("TrainingLossNonFinite", "TrainingCheckpointFailing"): values
        for name, values in NAN_ALERT.items()
    }
    row = '{run="a",problem="TrainingCheckpointFailing",remedy="Run has the error and the work at risk"}'

    assert_panel(tmp_path, "training-node", "What is wrong", series, {row: Impact.ENDANGERS_WORK})


def test_the_end_of_a_process_is_a_problem_before_its_outcome_is_known(tmp_path: Path) -> None:
    row = '{gpu="0",run="a",rank="0",problem="process ended, outcome not known yet",remedy="wait a minute; then Run has the outcome"}'
    series = _run("ending", up="1x58 0x2", steps="0+15x58 870x2")

    assert_panel(tmp_path, "training-node", "What is wrong", series, {row: Impact.UNKNOWN})


@pytest.mark.parametrize(("exporter", "text"), [("1x20 0x40", "node unknown"), ("1x60", "no alert fires")])
def test_without_an_exporter_the_alerts_of_a_node_are_unknown(
    tmp_path: Path, exporter: str, text: str
) -> None:
    series = {'up{job="training",instance="n1"}': exporter}

    assert_panel(tmp_path, "training-node", "Firing alerts", series, {f'{{title="{text}"}}': 0})


NODE_WITH_LOST_GPU = LOST_GPU | {
    'up{job="training",instance="n1"}': "1x60",
    'training_rank_info{job="training",run="a",rank="3",gpu="0",uuid="G0",instance="n1"}': "1x60",
    'training_process_up{job="training",run="a",rank="3",instance="n1"}': "1x60",
    'exporter_collector_success{job="training",collector="rapl",instance="n1"}': "1x20 0x40",
}


@pytest.mark.parametrize(
    ("panel", "query_id", "expected"),
    [
        (
            "What is wrong",
            "A",
            {
                '{gpu="0",run="a",rank="3",problem="GPU does not respond: gpu_is_lost",'
                'remedy="drain; reset the GPU or reboot"}': Impact.ENDANGERS_WORK,
                '{problem="collector rapl fails",remedy="read the log of the exporter"}': Impact.UNKNOWN,
            },
        ),
        ("What is wrong", "B", {'{gpu="0",run="a",rank="3"}': 315_000, "{}": 300_000}),
        ("Ranks on this node", "B", {'{run="a",rank="3"}': 0}),
        ("Working collectors", "B", {'{collector="rapl"}': 1}),
    ],
    ids=["problems", "starts", "GPU of the rank", "failed collector"],
)
def test_a_node_shows_its_lost_gpu_and_its_failed_collector(
    tmp_path: Path, panel: str, query_id: str, expected: dict[str, float]
) -> None:
    assert_panel(tmp_path, "training-node", panel, NODE_WITH_LOST_GPU, expected, query_id=query_id)


def test_a_healthy_node_has_no_problem(tmp_path: Path) -> None:
    series = {
        'up{job="training",instance="n1"}': "1x60",
        'exporter_collector_success{job="training",collector="rapl",instance="n1"}': "1x60",
    }

    assert_panel(tmp_path, "training-node", "What is wrong", series, {'{problem="no problem"}': -1})


PROCESS_ALIVE, PROCESS_ENDED, PROCESS_UNKNOWN, PROCESS_SILENT = 1, 0, -1, 2
"""Values of the column *Process*."""


@pytest.mark.parametrize(
    ("process_up", "snapshots", "process"),
    [
        ("1x60", "0+15x60", PROCESS_ALIVE),
        ("1x60", "0+15x40 600x20", PROCESS_SILENT),
        ("1x20 0x40", "0+15x20 300x40", PROCESS_ENDED),
        ("1x20 stale", "0+15x20 stale", PROCESS_UNKNOWN),
    ],
    ids=["alive", "silent", "ended", "exporter down"],
)
def test_a_rank_on_the_node_is_alive_silent_ended_or_unknown(
    tmp_path: Path, process_up: str, snapshots: str, process: int
) -> None:
    series = {
        'training_process_up{job="training",run="a",rank="0",instance="n1"}': process_up,
        'training_feed_last_update_timestamp_seconds{job="training",run="a",rank="0",role="trainer",instance="n1"}': snapshots,
    }

    assert_panel(
        tmp_path,
        "training-node",
        "Ranks on this node",
        series,
        {'{run="a",rank="0"}': process},
        column="Process",
    )


def test_the_ranks_of_a_node_have_their_wait_for_data_and_the_cpus_of_their_loaders(tmp_path: Path) -> None:
    rank = 'job="training",run="a",rank="0",instance="n1"'
    series = {
        f"training_process_up{{{rank}}}": "1x60",
        f'training_phase_seconds_total{{{rank},role="trainer",phase="data_loading"}}': "0+6x60",
        f'training_phase_seconds_total{{{rank},role="trainer",phase="forward"}}': "0+9x60",
        f'training_process_cpu_seconds_total{{{rank},role="dataloader",mode="user"}}': "0+30x60",
        'training_run_state{job="training",run="a",instance="n1",state="running"}': "1x60",
        'training_wall_seconds_total{job="training",run="a",instance="n1"}': "0+15x60",
        'up{job="training",instance="n1"}': "1x60",
    }

    for column, factor, value in (("Data wait", 100, 40), ("Worker CPUs", 1, 2)):
        assert_panel(
            tmp_path,
            "training-node",
            "Ranks on this node",
            series,
            {'{run="a",rank="0"}': value},
            column=column,
            factor=factor,
        )


def test_a_rate_of_five_minutes_is_blank_while_the_exporter_of_the_node_is_down(tmp_path: Path) -> None:
    waiting = f'training_phase_seconds_total{{{RANK_LABELS.format(rank=0, node=1)},phase="data_loading"}}'
    series = EXPORTER_DOWN | {waiting: "0+6x30 stale"}

    assert_panel(
        tmp_path,
        "training-node",
        "Ranks on this node",
        series,
        {},
        column="Data wait",
        minutes=9,
    )


@pytest.mark.parametrize(
    ("exporter", "state", "seconds"),
    [("1x20 0x40", "down for", 615), ("1x60", "up for", 893), ("1x20 stale", "not scraped for", 600)],
)
def test_the_exporter_is_up_from_its_start_or_down_from_its_last_scrape(
    tmp_path: Path, exporter: str, state: str, seconds: int
) -> None:
    series = {
        'up{job="training",instance="n1"}': exporter,
        'process_start_time_seconds{job="training",instance="n1"}': "7x60",
        'exporter_build_info{job="training",instance="n1"}': "1x60" if state == "up for" else "1x19 stale",
    }

    labels = f'{{instance="n1",state="{state}"}}'
    assert_panel(tmp_path, "training-node", "Exporter", series, {labels: seconds})


@pytest.mark.parametrize(("gpu_up", "expected"), [("1x60", {'{run="a",rank="0"}': 60}), ("1x58 0x2", {})])
def test_the_share_of_time_in_which_a_gpu_is_busy_is_blank_while_the_gpu_is_lost(
    tmp_path: Path, gpu_up: str, expected: dict[str, float]
) -> None:
    gpu = 'job="training",instance="n1",gpu="0",uuid="G0"'
    series = _run() | {f"gpu_up{{{gpu}}}": gpu_up, f"gpu_utilization_busy_seconds_total{{{gpu}}}": "0+9x60"}

    assert_panel(
        tmp_path, "training-node", "Ranks on this node", series, expected, column="GPU busy", factor=100
    )
