"""Values of panels while series start, end or are missing, and equal values on all dashboards, for synthetic series, evaluated by promtool."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from dashboards_support import SELECTED_VALUES, fill_variables, panel_queries
from panel_support import assert_panel
from rules_support import needs_promtool, promtool, rules_needed_by

pytestmark = needs_promtool

STATE_SERIES = 'training_run_state{{run="a",instance="n1",state="{}"}}'
"""Series of a state of the run."""
OUTAGE = "stale _x11"
"""Staleness marker and eleven intervals without samples, three minutes in total."""


def rank_series(name: str, node: int, rank: int, labels: str = "") -> str:
    """Return the name of a series of a rank of run a. *labels* are further labels, each after a comma."""
    return f'training_{name}{{run="a",instance="n{node}",rank="{rank}"{labels}}}'


def assert_values(
    tmp_path: Path,
    panel: str,
    series: dict[str, str],
    expected: dict[str, float | None],
    *,
    dashboard: str = "training-run",
    query_id: str = "A",
    labels: str = "{}",
    factor: int = 1,
    comparison: str = "",
) -> None:
    """Check the values of a query of a panel at several times.

    Args:
        tmp_path: Directory for the test case.
        panel: Title of the panel.
        series: Input series with their values in promtool's notation, one per 15 s.
        expected: Expected value by evaluation time; None for no value.
        dashboard: UID of the dashboard.
        query_id: Reference of the query in the panel.
        labels: Labels of the expected series.
        factor: Factor of the values before they are rounded.
        comparison: Comparison that selects series, such as ` > 0`.
    """
    query = next(
        query for query in panel_queries(dashboard) if (query.panel, query.ref_id) == (panel, query_id)
    )
    expression = fill_variables(query.expression, SELECTED_VALUES | {"run": "a"})
    expression = f"round({factor} * ({expression})){comparison}"
    case = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": expression,
                "eval_time": eval_time,
                "exp_samples": [] if value is None else [{"labels": labels, "value": value}],
            }
            for eval_time, value in expected.items()
        ],
    }
    needed = rules_needed_by([expression], [name.partition("{")[0] for name in series])
    group = {"name": "rules", "rules": [rule.body for rule in needed.rules]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [group]}), encoding="utf-8")
    test = {"rule_files": ["rules.yaml"], "evaluation_interval": "15s", "tests": [case]}
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(test), encoding="utf-8")

    completed = promtool("test", "rules", path)

    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_throughput_is_blank_while_the_exporter_of_a_rank_is_down(tmp_path: Path) -> None:
    series = {
        rank_series("tokens_total", 1, 0, ',mode="train"'): "0+15000x60",
        rank_series("tokens_total", 2, 1, ',mode="train"'): f"0+15000x20 {OUTAGE} 495000+15000x27",
        rank_series("process_up", 1, 0): "1x60",
        rank_series("process_up", 2, 1): f"1x20 {OUTAGE} 1x27",
        'training_world_size{run="a",instance="n1"}': "2x60",
    }

    assert_values(tmp_path, "Throughput", series, {"4m": 2000, "6m": None, "8m": None, "12m": 2000})


@pytest.mark.parametrize(
    ("panel", "counter", "joules"),
    [("Joules per step and GPU", "steps_total", 400), ("Joules per token", "tokens_total", 200)],
)
def test_energy_per_unit_of_work_is_blank_after_a_start_and_while_the_window_contains_an_outage(
    tmp_path: Path, panel: str, counter: str, joules: float
) -> None:
    series = {
        rank_series(counter, 1, 0, ',mode="train"'): "15+15x60",
        rank_series(counter, 2, 1, ',mode="train"'): f"15+15x20 {OUTAGE} 510+15x27",
        'training_energy_joules_total{run="a",instance="n1"}': "0+3000x60",
        'training_energy_joules_total{run="a",instance="n2"}': f"0+3000x20 {OUTAGE} 99000+3000x27",
        rank_series("process_up", 1, 0): "1x60",
        rank_series("process_up", 2, 1): f"1x20 {OUTAGE} 1x27",
        'training_world_size{run="a",instance="n1"}': "2x60",
        'training_run_state{run="a",instance="n1",state="running"}': "1x60",
        'run:training_gpus:count{run="a"}': "1x60",
    }

    assert_values(
        tmp_path,
        panel,
        series,
        {"4m": None, "5m": joules, "6m": None, "8m": None, "12m": None, "14m": joules},
        dashboard="training-energy",
        labels='{run="a"}',
    )


@pytest.mark.parametrize("panel", ["Joules per step and GPU", "Joules per token"])
@pytest.mark.parametrize(
    "fault",
    [
        {'run_gpu:training_gpu_lost:group{run="a",uuid="G1"}': "_x30 1x10 _x20"},
        {
            'exporter_energy_crosscheck{instance="n1",device="G1"}': "1x30 1.5x10 1x20",
            'training_energy_share_ratio{run="a",instance="n1",device="G1"}': "1x60",
        },
    ],
    ids=["lost GPU", "suspect counter"],
)
def test_energy_per_unit_of_work_is_blank_while_the_energy_of_a_gpu_is_unknown_or_wrong(
    tmp_path: Path, panel: str, fault: dict[str, str]
) -> None:
    series = {
        rank_series("steps_total", 1, 0, ',mode="train"'): "15+15x60",
        rank_series("tokens_total", 1, 0, ',mode="train"'): "15+15x60",
        'training_energy_joules_total{run="a",instance="n1"}': "0+3000x60",
        rank_series("process_up", 1, 0): "1x60",
        'training_world_size{run="a",instance="n1"}': "1x60",
        'training_run_state{run="a",instance="n1",state="running"}': "1x60",
        'run:training_gpus:count{run="a"}': "1x60",
    }

    assert_values(
        tmp_path,
        panel,
        series | fault,
        {"7m": 200, "9m": None},
        dashboard="training-energy",
        labels='{run="a"}',
    )


def test_throughput_is_blank_while_the_only_exporter_of_a_run_is_down(tmp_path: Path) -> None:
    series = {
        rank_series("tokens_total", 1, 0, ',mode="train"'): f"0+15000x20 {OUTAGE} 495000+15000x27",
        rank_series("process_up", 1, 0): f"1x20 {OUTAGE} 1x27",
        rank_series("world_size", 1, 0): f"1x20 {OUTAGE} 1x27",
    }

    expected: dict[str, float | None] = {"4m": 1000, "5m15s": None, "5m30s": None, "5m45s": None, "12m": 1000}
    assert_values(tmp_path, "Throughput", series, expected)


def test_throughput_of_a_job_that_reports_no_world_size_is_shown(tmp_path: Path) -> None:
    series = {
        rank_series("tokens_total", 1, 0, ',mode="train"'): "0+15000x60",
        rank_series("process_up", 1, 0): "1x60",
    }

    assert_values(tmp_path, "Throughput", series, {"4m": 1000})


def test_time_left_is_right_in_the_first_minutes_and_ends_with_the_run(tmp_path: Path) -> None:
    series = {
        'training_step{run="a"}': "0+15x40 600x20",
        'training_step_target{run="a"}': "10000x60",
        'training_steps_total{run="a",rank="0",mode="train"}': "0+15x40 600x20",
        'training_wall_seconds_total{run="a"}': "0+15x40 600x20",
        'training_run_state{run="a",state="running"}': "1x40 0x20",
        'training_run_state{run="a",state="failed"}': "0x40 1x20",
    }

    assert_values(tmp_path, "Time left", series, {"1m": 9940, "2m": 9880, "8m": 9520, "11m": None})


def test_time_left_is_blank_while_a_step_is_overdue(tmp_path: Path) -> None:
    series = {
        'training_step{run="a"}': "0+15x20 300x40",
        'training_step_target{run="a"}': "10000x60",
        'training_steps_total{run="a",rank="0",mode="train"}': "0+15x20 300x40",
        'training_wall_seconds_total{run="a"}': "0+15x60",
        'training_run_state{run="a",state="running"}': "1x60",
        'training_last_progress_timestamp_seconds{run="a",rank="0"}': "0+15x20 300x40",
        'training_step_longest_seconds{run="a",rank="0"}': "1x60",
    }

    assert_values(tmp_path, "Time left", series, {"4m": 9760, "6m": None})


def test_cost_so_far_does_not_decrease_while_the_exporter_of_a_node_is_down(tmp_path: Path) -> None:
    cost = 'training_cost_total{{run="a",instance="n{}",currency="EUR"}}'
    series = {cost.format(1): "100x60", cost.format(2): f"50x20 {OUTAGE} 50x27"}

    assert_values(
        tmp_path,
        "Cost so far",
        series,
        {"4m": 150, "6m": 150, "8m": 150, "12m": 150},
        labels='{currency="EUR"}',
    )


def test_ranks_of_a_node_without_an_exporter_are_not_seen_rather_than_ended(tmp_path: Path) -> None:
    series = {
        rank_series("process_up", 1, 0): "1x60",
        rank_series("process_up", 2, 1): f"1x20 {OUTAGE} 1x27",
        'training_world_size{run="a",instance="n1"}': "2x60",
    }
    not_seen: dict[str, float | None] = {"4m": 0, "7m": 1, "12m": 0}
    ended: dict[str, float | None] = {"4m": 0, "7m": 0, "12m": 0}

    for query_id, expected, labels in (("D", not_seen, "{}"), ("C", ended, '{end="ended"}')):
        assert_values(
            tmp_path,
            "Ranks alive",
            series,
            expected,
            dashboard="training-ranks",
            query_id=query_id,
            labels=labels,
        )


@pytest.mark.parametrize(
    ("gpus", "suffix"),
    [((0,), ", GPU 0"), ((0, 1), "")],
    ids=["one GPU", "two GPUs"],
)
@pytest.mark.parametrize("dashboard", ["training-run", "training-ranks"])
def test_the_slowest_rank_has_the_index_of_its_gpu_if_it_uses_only_one(
    tmp_path: Path, dashboard: str, gpus: tuple[int, ...], suffix: str
) -> None:
    memory = 'training_process_gpu_memory_bytes{{run="a",instance="n2",rank="1",gpu="{0}",uuid="G{0}"}}'
    series = {
        rank_series("rank_compute_seconds", 1, 0): "1x20",
        rank_series("rank_compute_seconds", 2, 1): "2x20",
        rank_series("rank_info", 1, 0): "1x20",
        rank_series("rank_info", 2, 1): "1x20",
        'training_run_state{run="a",instance="n1",state="running"}': "1x20",
        **{memory.format(gpu): "1x20" for gpu in gpus},
    }
    expected = {f'{{who="rank 1 on n2{suffix}"}}': 50}

    assert_panel(tmp_path, dashboard, "Slowest rank", series, expected, factor=100, minutes=4)


STAGES = {
    rank_series(name, 1, rank, labels): values
    for rank, stage, seconds in ((0, 0, 1), (1, 0, 1), (2, 1, 2), (3, 1, 3))
    for name, labels, values in (
        ("rank_compute_seconds", "", f"{seconds}x60"),
        ("rank_info", f',label_stage="{stage}"', "1x60"),
    )
}
"""Two pipeline stages: two ranks that take 1 s for a step, and two that take 2 and 3 s."""


def test_ranks_of_one_pipeline_stage_do_not_wait_for_the_slower_ranks_of_another(tmp_path: Path) -> None:
    duration = 'training_step_duration_seconds_{}{{run="a",rank="0",mode="train"}}'
    series = STAGES | {duration.format("sum"): "0+10x60", duration.format("count"): "0+2x60"}

    # Rank 3 makes the steps of 5 s a second longer than rank 2 of its stage would.
    assert_panel(
        tmp_path,
        "training-ranks",
        "Lost: slowest rank or no step",
        series,
        {"{}": 20},
        factor=100,
        minutes=4,
    )


@pytest.mark.parametrize("dashboard", ["training-run", "training-ranks"])
@pytest.mark.parametrize(
    ("seconds", "expected"),
    [("1.25", {'{who="rank 1 on n2"}': 80}), ("1.01", {'{who="all ranks alike"}': 99})],
    ids=["slow rank", "all ranks alike"],
)
def test_ranks_of_equal_speed_have_no_slowest_rank(
    tmp_path: Path, dashboard: str, seconds: str, expected: dict[str, float]
) -> None:
    series = {
        rank_series("rank_compute_seconds", 1, 0): "1x20",
        rank_series("rank_compute_seconds", 2, 1): f"{seconds}x20",
        rank_series("rank_info", 1, 0): "1x20",
        rank_series("rank_info", 2, 1): "1x20",
        rank_series("process_up", 1, 0): "1x20",
        rank_series("process_up", 2, 1): "1x20",
        'training_run_state{run="a",instance="n1",state="running"}': "1x20",
    }

    assert_panel(tmp_path, dashboard, "Slowest rank", series, expected, factor=100, minutes=4)


@pytest.mark.parametrize(
    ("dashboard", "panel", "column", "label"),
    [
        ("training-run", "Slowest rank", "", 'who="rank 3 on n1"'),
        ("training-ranks", "Slowest rank", "", 'who="rank 3 on n1"'),
        ("training-ranks", "Nodes of the run", "Slowest rank", 'instance="n1"'),
        ("training-fleet", "Speed and progress of the runs", "Slowest", 'run="a"'),
    ],
)
def test_all_dashboards_show_the_same_slowest_rank(
    tmp_path: Path, dashboard: str, panel: str, column: str, label: str
) -> None:
    state = {STATE_SERIES.format("running"): "1x60"}
    live = {rank_series("process_up", 1, 3): "1x60"}

    assert_panel(
        tmp_path,
        dashboard,
        panel,
        STAGES | state | live,
        {f"{{{label}}}": 67},
        column=column,
        factor=100,
        minutes=4,
    )


@pytest.mark.parametrize(
    ("dashboard", "panel", "column", "labels"),
    [
        ("training-run", "Last step", "", '{name="at the last scrape"}'),
        ("training-node", "Runs on this node", "Last step", '{run="a"}'),
        ("training-node", "Ranks on this node", "Last step", '{run="a",rank="0"}'),
        ("training-fleet", "Speed and progress of the runs", "Last step", '{run="a"}'),
    ],
)
def test_all_dashboards_show_the_age_of_the_last_step_at_the_last_scrape(
    tmp_path: Path, dashboard: str, panel: str, column: str, labels: str
) -> None:
    series = {
        'training_run_state{job="training",run="a",instance="n1",state="running"}': "1x60",
        'training_process_up{job="training",run="a",instance="n1",rank="0"}': "1x60",
        # Three seconds before each scrape.
        'training_last_progress_timestamp_seconds{job="training",run="a",instance="n1",rank="0"}': "_ 12+15x60",
        'up{job="training",instance="n1"}': "1x60",
    }

    assert_panel(tmp_path, dashboard, panel, series, {labels: 3}, column=column, minutes=10 + 1 / 6)


def test_the_state_of_a_run_names_its_critical_alerts(tmp_path: Path) -> None:
    alert = 'ALERTS{{alertname="{}",alertstate="firing",severity="{}",run="a"}}'
    series = {
        STATE_SERIES.format("running"): "1x60",
        STATE_SERIES.format("hung"): "0x60",
        alert.format("GpuLost", "critical"): "_x20 1x40",
        alert.format("GpuXidCritical", "critical"): "_x20 1x40",
        alert.format("GpuStraggler", "warning"): "_x20 1x40",
    }

    assert_values(tmp_path, "State", series, {"4m": 0}, labels='{state="running"}')
    assert_values(tmp_path, "State", series, {"10m": 10}, labels='{state="running", alerts=", 2 critical"}')


def test_the_state_of_a_silent_run_is_the_last_known_state_with_the_age_of_the_news(tmp_path: Path) -> None:
    series = {STATE_SERIES.format("running"): "1x20 stale", STATE_SERIES.format("failed"): "0x20 stale"}
    labels = '{state="running", age=", no news for $AGE from ", instance="n1"}'

    for time, age in (("6m30s", "90 s"), ("12m", "7 min")):
        assert_values(tmp_path, "State", series, {time: 1}, labels=labels.replace("$AGE", age))


def test_the_state_of_a_run_that_finished_before_its_target_is_a_warning(tmp_path: Path) -> None:
    outcome = (
        'training_run_outcome_info{run="a",outcome="finished",reason="inferred: the process exited normally"}'
    )
    series = {
        STATE_SERIES.format("finished"): "1x60",
        outcome: "1x60",
        'training_step{run="a"}': "562x20 5000x40",
        'training_step_target{run="a"}': "5000x60",
    }

    assert_values(
        tmp_path, "State", series, {"4m": 1}, labels='{state="finished", note=" early, at step 562 of 5000"}'
    )
    assert_values(
        tmp_path,
        "State",
        series,
        {"10m": 0},
        labels='{state="finished", note=": the process exited normally"}',
    )


def test_goodput_falls_while_a_run_makes_no_step_before_the_exporter_decides(tmp_path: Path) -> None:
    series = {
        STATE_SERIES.format("running"): "1x480",
        'training_last_progress_timestamp_seconds{run="a",rank="0"}': "0+15x240 3600x240",
        'training_step_longest_seconds{run="a"}': "1x480",
        'training_phase_active{run="a",rank="0",phase="backward"}': "1x480",
        'training_wall_seconds_total{run="a"}': "0+15x480",
        'training_badput_seconds_total{run="a",cause="hang",instance="n1"}': "0x480",
    }

    assert_values(
        tmp_path,
        "Goodput if work is saved",
        series,
        {"60m": 100, "90m": 67},
        labels='{note="since the start"}',
        factor=100,
    )


def test_the_rank_that_causes_a_hang_is_that_of_the_alert(tmp_path: Path) -> None:
    stack_labels = 'function="read_shard",location="data.py:40",phase="data_loading"'
    series = {
        f'training_hang_info{{run="a",{stack_labels},instance="n2",rank="3"}}': "1x20",
        'training_hang_info{run="a",function="all_reduce",location="train.py:8",phase="backward",instance="n1",rank="0"}': "1x20",
        f'run_group:training_hang_odd:count{{run="a",{stack_labels}}}': "1x20",
    }

    assert_values(
        tmp_path,
        "Cause of the hang",
        series,
        {"4m": 1},
        dashboard="training-ranks",
        labels='{function="read_shard",location="data.py:40, phase data_loading",in_phase=", phase data_loading",phase="data_loading",instance="n2",rank="3",cause_text="rank 3:"}',
    )


def test_the_node_of_unknown_ranks_is_named(tmp_path: Path) -> None:
    series = {
        'exporter_build_info{instance="n1"}': "1x60",
        rank_series("process_up", 1, 0): "1x60",
        rank_series("process_up", 2, 1): f"1x20 {OUTAGE} 1x27",
    }

    assert_values(
        tmp_path,
        "Nodes of the run",
        series,
        {"7m": 1},
        dashboard="training-ranks",
        query_id="D",
        labels='{instance="n2"}',
        comparison=" > 0",
    )


def test_the_state_of_a_run_counts_the_ranks_whose_exporter_is_down(tmp_path: Path) -> None:
    series = {
        STATE_SERIES.format("running"): "1x60",
        rank_series("process_up", 1, 0): "1x60",
        rank_series("process_up", 2, 1): f"1x20 {OUTAGE} 1x27",
        'training_world_size{run="a",instance="n1"}': "2x60",
    }

    assert_values(
        tmp_path, "State", series, {"7m": 1}, labels='{state="running", missing=", 1 rank unknown"}'
    )
    assert_values(tmp_path, "State", series, {"12m": 0}, labels='{state="running"}')
