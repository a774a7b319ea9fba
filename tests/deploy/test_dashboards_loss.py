"""Values of panels about losses, problems and exporters that are down, for synthetic series, evaluated by promtool."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from dashboards_support import SELECTED_VALUES, fill_variables, panel_queries
from rules_support import ROOT, needs_promtool, promtool

pytestmark = needs_promtool

RECORDING_RULES = [str(path) for path in sorted((ROOT / "deploy/prometheus/rules").glob("recording-*.yml"))]
RUN = 'training_{name}{{run="a",instance="n{node}"{labels}}}'
DOWN_AT_5_MIN = "1x20 0x40"


def assert_panel(
    tmp_path: Path,
    dashboard: str,
    panel: str,
    series: dict[str, str],
    expected: dict[str, float],
    *,
    query_id: str = "A",
    factor: int = 1,
    minutes: int = 15,
) -> None:
    """Compare the values of a panel's query, times *factor* and rounded; the series have a sample per 15 s."""
    query = next(
        query for query in panel_queries(dashboard) if (query.panel, query.ref_id) == (panel, query_id)
    )
    expression = fill_variables(
        query.expression, SELECTED_VALUES | ({"node": "n1"} if dashboard == "training-node" else {})
    )
    case = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f"round({factor} * ({expression}))",
                "eval_time": f"{minutes}m",
                "exp_samples": [{"labels": labels, "value": value} for labels, value in expected.items()],
            }
        ],
    }
    path = tmp_path / "case.yaml"
    path.write_text(
        yaml.safe_dump({"rule_files": RECORDING_RULES, "evaluation_interval": "15s", "tests": [case]}),
        encoding="utf-8",
    )

    completed = promtool("test", "rules", path)

    assert completed.returncode == 0, completed.stdout + completed.stderr


def run_series(name: str, values: str, node: int = 1, labels: str = "") -> dict[str, str]:
    return {RUN.format(name=name, node=node, labels=labels): values}


HANG_AND_STRAGGLER = (
    run_series("wall_seconds_total", "0+15x60")
    | run_series("badput_seconds_total", "0x39 0+15x20", labels=',cause="hang"')
    | run_series("badput_seconds_total", "0+1.5x60", labels=',cause="data_stall"')
    | run_series("steps_total", "0+15x40 600x20", labels=',rank="0",mode="train"')
    | run_series("rank_compute_seconds", "0.5x40 stale", labels=',rank="0"')
    | run_series("rank_compute_seconds", "0.9x40 stale", labels=',rank="1"')
    | run_series("rank_info", "1x60", labels=',rank="0"')
    | run_series("rank_info", "1x60", labels=',rank="1"')
    | run_series("energy_joules_total", "0+60000x60")
    | run_series("energy_joules_total", "0+60000x60", node=2)
    | run_series("wasted_energy_joules_total", "0x39 0+45000x20", labels=',cause="hang"')
    | run_series("wasted_energy_joules_total", "0+6000x60", labels=',cause="data_stall"')
    | run_series("cost_total", "0+0.15x60", labels=',kind="device_time",currency="EUR"')
)
"""Fifteen minutes of a run on two nodes: ten minutes with a slow rank, then a hang of five minutes."""


@pytest.mark.parametrize(
    ("query_id", "factor", "progress", "slowest_rank", "hang", "data_stall", "labels"),
    [
        pytest.param("A", 1, 390, 120, 300, 90, "", id="seconds"),
        pytest.param("B", 900, 390, 120, 300, 90, "", id="share of time"),
        pytest.param("C", 10200, 10140, 3120, 5100, 2040, "", id="kilowatt-hours of both nodes"),
        pytest.param("E", 100, 390, 120, 300, 90, ',currency="EUR"', id="cost"),
    ],
)
def test_time_energy_and_cost_are_divided_among_causes_that_add_up_to_the_whole(
    tmp_path: Path,
    query_id: str,
    factor: int,
    progress: int,
    slowest_rank: int,
    hang: int,
    data_stall: int,
    labels: str,
) -> None:
    values = {
        "data_stall": data_stall,
        "hang": hang,
        "progress": progress,
        "slowest_rank": slowest_rank,
    }
    expected = {f'{{cause="{cause}"{labels}}}': float(value) for cause, value in values.items()}

    assert_panel(
        tmp_path,
        "training-energy",
        "Where time, energy and money went",
        HANG_AND_STRAGGLER,
        expected,
        query_id=query_id,
        factor=factor,
    )


@pytest.mark.parametrize(
    ("panel", "query_id", "factor", "expected"),
    [
        ("Time without progress", "A", 900, {"{}": 510}),
        ("Lost in this time range", "A", 100, {'{currency="EUR"}': 510}),
        ("Lost in this time range", "B", 10200, {"{}": 10260}),
    ],
)
def test_the_loss_is_everything_but_progress(
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


def test_energy_before_an_outage_over_the_start_of_the_time_range_is_not_energy_of_the_range(
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
        "Cost and loss of each run",
        series,
        {'{run="a"}': 720 + 660},
        query_id="F",
        factor=3600,
        minutes=100,
    )


COSTLY_RUN = (
    run_series("wall_seconds_total", "0+15x60")
    | run_series("cost_total", "0+0.15x60", labels=',kind="device_time",currency="EUR"')
    | run_series("run_state", "1x60", labels=',state="running"')
)
"""A run that costs 36 EUR per hour."""


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
            run_series("badput_seconds_total", "0x40 900x20", labels=',cause="lost_progress"'),
            "restarts",
            9,
            id="a restart lost a quarter of an hour",
        ),
        pytest.param(
            run_series("rank_compute_seconds", "0.5x60", labels=',rank="0"')
            | run_series("rank_compute_seconds", "1x60", labels=',rank="1"')
            | run_series("rank_info", "1x60", labels=',rank="0"')
            | run_series("rank_info", "1x60", labels=',rank="1"')
            | run_series("step_duration_seconds_sum", "0+15x60", labels=',mode="train"')
            | run_series("step_duration_seconds_count", "0+15x60", labels=',mode="train"'),
            "slowest_rank",
            9,
            id="ranks wait a quarter of the time",
        ),
    ],
)
def test_the_loss_per_hour_counts_every_cause(
    tmp_path: Path, series: dict[str, str], cause: str, euros_per_hour: float
) -> None:
    total = {'{currency="EUR"}': euros_per_hour}
    by_cause = {f'{{run="a",cause="{cause}",currency="EUR"}}': euros_per_hour}

    assert_panel(tmp_path, "training-energy", "Lost per hour now", COSTLY_RUN | series, total)
    assert_panel(tmp_path, "training-energy", "Losses now", COSTLY_RUN | series, by_cause)


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
        "Where time, energy and money went",
        series,
        {'{cause="hang"}': 180, '{cause="data_stall"}': 60, '{cause="progress"}': 660},
    )


@pytest.mark.parametrize("minutes", [1, 3, 15])
def test_the_cost_per_hour_is_right_in_the_first_minutes(tmp_path: Path, minutes: int) -> None:
    labels = '{kind="device_time",currency="EUR"}'
    expected = {labels: 36.0}

    assert_panel(tmp_path, "training-energy", "Cost per hour", COSTLY_RUN, expected, minutes=minutes)


GPU = 'gpu_{name}{{instance="n1",gpu="{gpu}",uuid="G{gpu}"{labels}}}'
WITH_DEAD_EXPORTER = {
    'up{job="training",instance="n1"}': DOWN_AT_5_MIN,
    'up{job="training",instance="n2"}': "1x60",
}


def test_an_exporter_that_is_down_is_a_problem_with_its_start(tmp_path: Path) -> None:
    remedy = "check the machine, then the log of the exporter"
    series = WITH_DEAD_EXPORTER | {GPU.format(name="up", gpu=0, labels=',job="training"'): "1x20 stale"}

    labels = f'{{instance="n1",problem="exporter down, node unknown",remedy="{remedy}"}}'
    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {labels: 300_000})


def test_a_lost_gpu_is_a_problem_with_reason_rank_and_start(tmp_path: Path) -> None:
    series = {
        'up{job="training",instance="n1"}': "1x60",
        GPU.format(name="up", gpu=0, labels=',job="training"'): DOWN_AT_5_MIN,
        GPU.format(name="error_info", gpu=0, labels=',job="training",reason="gpu_is_lost"'): "_x21 1x40",
        'training_rank_info{run="a",rank="3",uuid="G0",instance="n1"}': "1x60",
    }

    labels = (
        '{instance="n1",gpu="0",run="a",rank="3",problem="GPU does not respond: gpu_is_lost",'
        'remedy="drain the node, then reset the GPU"}'
    )
    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {labels: 300_000})


HOT_GPU = {
    'up{job="training",instance="n1"}': "1x60",
    GPU.format(name="up", gpu=0, labels=',job="training"'): "1x60",
    GPU.format(name="clocks_event_seconds_total", gpu=0, labels=',job="training",reason="thermal"'): "0+9x60",
    'training_cost_total{run="a",instance="n1",currency="EUR"}': "0+0.15x60",
}


@pytest.mark.parametrize(
    ("rank_info", "expected"),
    [
        ('training_rank_info{run="a",rank="3",uuid="G0",instance="n1"}', {'{currency="EUR"}': 36.0}),
        ('training_rank_info{run="a",rank="3",local_rank="0",instance="n1"}', {'{currency="EUR"}': 36.0}),
        ('training_rank_info{run="a",rank="3",uuid="G7",instance="n1"}', {'{currency="EUR"}': 0.0}),
        ('training_rank_info{run="a",rank="3",instance="n1"}', {}),
    ],
)
def test_the_cost_of_a_gpu_problem_is_unknown_if_the_gpu_of_a_rank_is_unknown(
    tmp_path: Path, rank_info: str, expected: dict[str, float]
) -> None:
    series = HOT_GPU | {rank_info: "1x60"}

    assert_panel(tmp_path, "training-gpus", "Cost of runs with a GPU problem", series, expected)


@pytest.mark.parametrize(
    ("uuid", "owner", "in_use"), [("G0", ',run="a",rank="3"', 1), ("G7", "", 0)], ids=["held", "free"]
)
def test_a_problem_of_a_gpu_that_a_run_holds_is_marked(
    tmp_path: Path, uuid: str, owner: str, in_use: int
) -> None:
    series = HOT_GPU | {f'training_rank_info{{run="a",rank="3",uuid="{uuid}",instance="n1"}}': "1x60"}
    labels = (
        f'{{instance="n1",gpu="0"{owner},problem="throttled by heat or power",'
        'remedy="check the cooling and the power supply"}'
    )

    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {labels: in_use}, query_id="C")


RANK_ON_OLD_CARD = {'training_rank_info{run="a",rank="3",uuid="G0",instance="n1"}': "1x20 stale"}
RANK_ON_NEW_CARD = {'training_rank_info{run="b",rank="5",uuid="G7",instance="n1"}': "_x20 1x40"}


@pytest.mark.parametrize(
    ("ranks", "owner", "in_use"),
    [
        pytest.param(RANK_ON_OLD_CARD | RANK_ON_NEW_CARD, ',run="b",rank="5"', 1, id="both cards had a rank"),
        pytest.param(RANK_ON_OLD_CARD, "", 0, id="the new card is free"),
    ],
)
def test_a_problem_of_a_new_card_names_the_rank_of_this_card_and_not_of_the_card_before(
    tmp_path: Path, ranks: dict[str, str], owner: str, in_use: int
) -> None:
    new_card = {name.replace('uuid="G0"', 'uuid="G7"'): values for name, values in HOT_GPU.items()}
    series = new_card | ranks | {GPU.format(name="up", gpu=0, labels=',job="training"'): "1x20 stale"}
    labels = (
        f'{{instance="n1",gpu="0"{owner},problem="throttled by heat or power",'
        'remedy="check the cooling and the power supply"}'
    )

    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {labels: in_use}, query_id="C")


def test_nothing_is_wrong_with_healthy_gpus(tmp_path: Path) -> None:
    series = {
        'up{job="training",instance="n1"}': "1x60",
        GPU.format(name="up", gpu=0, labels=',job="training"'): "1x60",
    }

    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {'{problem="nothing is wrong"}': -1})


def test_gpus_of_a_node_whose_exporter_is_down_are_unknown(tmp_path: Path) -> None:
    series = WITH_DEAD_EXPORTER | {
        GPU.format(name="up", gpu=gpu, labels=',job="training"'): "1x20 stale" for gpu in range(2)
    }

    assert_panel(tmp_path, "training-gpus", "GPUs", series, {"{}": 2}, query_id="C")


def test_the_mean_sm_activity_covers_gpus_that_a_run_holds(tmp_path: Path) -> None:
    activity = {
        GPU.format(name="sm_activity_ratio", gpu=gpu, labels=',job="training"'): f"{value}x60"
        for gpu, value in ((0, 0.9), (1, 0.1))
    }
    held = {'training_rank_info{run="a",rank="0",uuid="G0",instance="n1"}': "1x60"}

    panel = "Mean SM activity of used GPUs"
    assert_panel(tmp_path, "training-gpus", panel, activity | held, {"{}": 90}, factor=100)
    assert_panel(tmp_path, "training-gpus", panel, activity, {"{}": 50}, factor=100)


@pytest.mark.parametrize(("exporter", "text"), [(DOWN_AT_5_MIN, "node unknown"), ("1x60", "no alert fires")])
def test_without_an_exporter_the_alerts_of_a_node_are_unknown(
    tmp_path: Path, exporter: str, text: str
) -> None:
    series = {'up{job="training",instance="n1"}': exporter}

    assert_panel(tmp_path, "training-node", "Firing alerts", series, {f'{{alertname="{text}"}}': 0})


@pytest.mark.parametrize(
    ("exporter", "state", "seconds"),
    [(DOWN_AT_5_MIN, "down for", 600), ("1x60", "up for", 893), ("1x20 stale", "not scraped for", 600)],
)
def test_the_exporter_is_up_from_its_start_or_down_from_its_last_scrape(
    tmp_path: Path, exporter: str, state: str, seconds: int
) -> None:
    series = {
        'up{job="training",instance="n1"}': exporter,
        'process_start_time_seconds{job="training",instance="n1"}': "7x60",
    }

    labels = f'{{instance="n1",state="{state}"}}'
    assert_panel(tmp_path, "training-node", "Exporter", series, {labels: seconds})


def test_the_timeline_has_only_exporters_and_gpus_that_failed(tmp_path: Path) -> None:
    series = WITH_DEAD_EXPORTER | {
        GPU.format(name="up", gpu=gpu, labels=',job="training"'): values
        for gpu, values in ((0, "1x60"), (1, "1x20 0x40"))
    }

    expected = {
        '{subject="all exporters and GPUs"}': 0.0,
        '{instance="n1",subject="n1 exporter"}': 0.0,
        '{instance="n1",gpu="1",subject="n1 GPU 1"}': 0.0,
    }
    assert_panel(tmp_path, "training-gpus", "Exporters, drivers and GPUs with a failure", series, expected)


def test_a_run_that_no_exporter_reports_is_below_critical_with_the_age_and_node(tmp_path: Path) -> None:
    series = (
        run_series("run_state", "1x20 stale", labels=',state="running"')
        | run_series("run_info", "1x20 stale", labels=',user="u"')
        | run_series("process_up", "1x20 stale", labels=',rank="0"')
    )
    row = '{run="a", user="u", state="unknown", alertname="no news for 10 min from n1"}'

    assert_panel(tmp_path, "training-fleet", "All runs", series, {row: 1})
    assert_panel(tmp_path, "training-fleet", "All runs", series, {'{run="a"}': 5}, query_id="B", factor=2)
    assert_panel(tmp_path, "training-fleet", "Runs that progress", series, {"{}": 1}, query_id="D")
