"""Values of the first screens of *Run* and *Ranks*, for synthetic series, evaluated by promtool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dashboards_support import MODELS
from panel_support import assert_panel, run_series
from places import PROJECT
from rules_support import needs_promtool
from run_panel_support import (
    DATA_STALL,
    DIED,
    GPU_1,
    HOT_GPU,
    HUNG,
    LOST_GPU,
    RANK_1,
    RANK_1_ON_GPU_1,
    RANKS,
    SLOW_RANK,
    STACKS_OF_HANG,
)

from dashboards import ranks
from dashboards.board import all_panels

pytestmark = needs_promtool


def test_the_state_names_the_rank_that_causes_a_hang(tmp_path: Path) -> None:
    expected = {'{state="hung",overdue=", no step for 10 min",culprit=", rank 1 on n1"}': 11.0}

    assert_panel(tmp_path, "training-run", "State", HUNG | STACKS_OF_HANG, expected)


OVERDUE = (
    RANKS
    | run_series("last_progress_timestamp_seconds", "0+15x20 300x40", labels=',rank="0"')
    | run_series("step_longest_seconds", "0.5x60")
    | run_series("phase_active", "1x60", labels=',rank="1",phase="forward"')
)
"""A run that makes no step from 5 min on, before the exporter decides that the run hangs."""


@pytest.mark.parametrize(
    ("minutes", "overdue", "level"),
    [(5.5, {}, 0), (5.75, {"overdue": "45 s"}, 1), (6.5, {"overdue": "2 min"}, 10)],
    ids=["not overdue", "warning", "bad"],
)
def test_the_state_of_a_run_with_an_overdue_step_is_a_warning_and_bad_after_a_minute(
    tmp_path: Path, minutes: float, overdue: dict[str, str], level: int
) -> None:
    label = "".join(f',overdue=", no step for {age}"' for age in overdue.values())
    expected = {f'{{state="running"{label}}}': level}

    assert_panel(tmp_path, "training-run", "State", OVERDUE, expected, minutes=minutes)


def test_the_power_of_a_run_is_blank_at_the_first_scrape_without_the_samples_of_a_node(
    tmp_path: Path,
) -> None:
    series = RANKS | run_series("world_size", "2x60")
    for rank, values in ((0, "1x60"), (1, "1x20 stale")):
        labels = f'instance="n{rank + 1}",gpu="0",uuid="G{rank}"'
        series[f'training_rank_info{{run="a",rank="{rank}",{labels}}}'] = values
        series[f"gpu_power_watts{{{labels}}}"] = values.replace("1x", "600x")

    for minutes, watts in ((5, {"{}": 1200}), (5.25, {})):
        assert_panel(
            tmp_path,
            "training-run",
            "GPUs of the run",
            series,
            watts,
            query_id="B",
            minutes=minutes,
        )


def test_a_run_with_an_overdue_step_loses_all_of_its_time_before_the_rule_is_evaluated(
    tmp_path: Path,
) -> None:
    stall = run_series("phase_seconds_total", "0+5x60", labels=',rank="1",phase="data_loading"')
    expected = {'{cause="standstill"}': 100}

    assert_panel(
        tmp_path,
        "training-run",
        "Losses now, by cause",
        OVERDUE | stall,
        expected,
        factor=100,
        minutes=5.75,
    )


def test_the_state_names_the_rank_of_a_lost_gpu(tmp_path: Path) -> None:
    lost = {
        f'training_rank_info{{run="a",{RANK_1},{GPU_1}}}': "1x20 stale",
        f'gpu_up{{instance="n1",{GPU_1}}}': "1x20 0x40",
    }
    expected = {'{state="running",culprit=": GPU 1 of rank 1 on n1 lost"}': 1.0}

    assert_panel(tmp_path, "training-run", "State", RANKS | lost, expected)


def test_the_row_of_a_rank_names_the_lost_gpu(tmp_path: Path) -> None:
    series = RANKS | {
        f'training_rank_info{{run="a",{RANK_1},{GPU_1}}}': "1x20 stale",
        'training_rank_info{run="a",instance="n1",rank="0",gpu="0",uuid="G0"}': "1x60",
        f'gpu_up{{instance="n1",{GPU_1}}}': "1x20 0x40",
    }
    rows = {
        f'{{{RANK_1},gpu="1"}}': 330.0,
        '{instance="n1",rank="0",gpu="0"}': 1.0,
    }

    assert_panel(tmp_path, "training-ranks", "All ranks, the worst first", series, rows)


def test_the_worst_ranks_are_first_in_the_table_of_all_ranks(tmp_path: Path) -> None:
    series = (
        RANKS
        | LOST_GPU
        | SLOW_RANK
        | run_series("process_up", "1x40 0x20", labels=',rank="2"')
        | run_series("process_up", "1x60", labels=',rank="3"')
        | run_series("rank_compute_seconds", "2x60", labels=',rank="3"')
        | run_series("rank_info", "1x60", labels=',rank="3"')
    )
    severities = {
        f"{{{RANK_1}}}": ranks.Severity.GPU_LOST,
        '{instance="n1",rank="2"}': ranks.Severity.ENDED,
        '{instance="n1",rank="3"}': ranks.Severity.SLOW,
        '{instance="n1",rank="0"}': ranks.Severity.NONE,
    }

    assert_panel(tmp_path, "training-ranks", "All ranks, the worst first", series, severities, column="State")
    panel = next(
        panel
        for panel in all_panels(MODELS["training-ranks"])
        if panel["title"] == "All ranks, the worst first"
    )
    assert panel["options"]["sortBy"] == [
        {"displayName": "State", "desc": True},
        {"displayName": "Speed", "desc": False},
    ]


def test_the_rank_that_causes_a_hang_is_selected_first(tmp_path: Path) -> None:
    series = HUNG | STACKS_OF_HANG | run_series("rank_info", "1x60", labels=',rank="0"')

    assert_panel(tmp_path, "training-ranks", "$rank", series, {'{rank="1"}': 1e6, '{rank="0"}': 0.0})


@pytest.mark.parametrize(("query_id", "expected"), [("A", {}), ("B", {"{}": 1.0})])
def test_a_rank_that_hangs_in_a_phase_of_work_is_not_shown_as_work(
    tmp_path: Path, query_id: str, expected: dict[str, float]
) -> None:
    series = HUNG | run_series("phase_seconds_total", "0+15x60", labels=',rank="1",phase="forward"')

    assert_panel(tmp_path, "training-ranks", "Ranks by phase", series, expected, query_id=query_id)


@pytest.mark.parametrize(("query_id", "ranks"), [("A", 3), ("D", 1)])
def test_the_phases_of_all_ranks_add_up_to_the_number_of_ranks(
    tmp_path: Path, query_id: str, ranks: int
) -> None:
    phases = {"forward": "0+15x60", "data_loading": "0+5x60"}  # 20 s in 15 s, because the scrapes are late
    series = {
        f'training_phase_seconds_total{{run="a",instance="n1",rank="{rank}",phase="{phase}"}}': values
        for rank in range(4)
        for phase, values in phases.items()
    }
    for rank in range(4):
        series |= run_series("process_up", "1x60", labels=f',rank="{rank}"')

    assert_panel(tmp_path, "training-ranks", "Ranks by phase", series, {"{}": ranks}, query_id=query_id)


FINISHED = (
    run_series("run_state", "1x20 0x40", labels=',state="running"')
    | run_series("run_state", "0x20 1x40", labels=',state="finished"')
    | run_series("process_up", "1x20 0x40", labels=',rank="0"')
    | run_series("feed_last_update_timestamp_seconds", "0+15x20 300x40", labels=',rank="0"')
    | run_series("world_size", "1x60")
    | {'exporter_build_info{instance="n1"}': "1x60"}
)


@pytest.mark.parametrize(
    ("panel", "column", "expected"),
    [
        ("Nodes of the run", "Ended", {'{instance="n1"}': 0}),
        ("All ranks, the worst first", "Feed age", {}),
    ],
)
def test_ranks_of_a_finished_run_are_no_problem(
    tmp_path: Path, panel: str, column: str, expected: dict[str, float]
) -> None:
    assert_panel(tmp_path, "training-ranks", panel, FINISHED, expected, column=column)


def test_ranks_of_a_finished_run_have_finished(tmp_path: Path) -> None:
    finished = {'{end="finished"}': 1}

    assert_panel(tmp_path, "training-ranks", "Ranks alive", FINISHED, finished, query_id="C")


def test_live_ranks_of_a_node_without_an_exporter_are_unknown(tmp_path: Path) -> None:
    series = run_series("process_up", "1x20 stale", labels=',rank="0"') | run_series(
        "process_up", "1x60", labels=',rank="1"', node=2
    )
    series |= {'exporter_build_info{instance="n2"}': "1x60"}

    assert_panel(
        tmp_path, "training-ranks", "Nodes of the run", series, {'{instance="n2"}': 1}, column="Alive"
    )


COSTLY_RUN = RANKS | run_series("cost_total", "0+0.15x60", labels=',kind="device_time",currency="EUR"')
"""A run that costs 36 EUR per hour."""


def test_waiting_for_data_has_a_cost(tmp_path: Path) -> None:
    panel = "Waiting for data, last 2 min"

    badput = run_series("badput_seconds_total", "0+5x60", labels=',cause="data_stall"')
    series = COSTLY_RUN | DATA_STALL | badput

    assert_panel(tmp_path, "training-ranks", panel, series, {'{currency="EUR"}': 12}, query_id="B")
    losses = {'{cause="data_stall",currency="EUR"}': 12}
    assert_panel(tmp_path, "training-run", "Losses now, by cause", series, losses, column="Cost/h")


TWO_GPUS = RANK_1_ON_GPU_1 | {'training_rank_info{run="a",instance="n1",rank="0",gpu="0",uuid="G0"}': "1x60"}


@pytest.mark.parametrize(
    ("column", "value", "labels"),
    [("of time", 50, ""), ("GPU h/h", 100, ""), ("Cost/h", 1800, ',currency="EUR"')],
)
def test_steps_with_a_nan_loss_are_lost_in_time_gpu_hours_and_money(
    tmp_path: Path, column: str, value: float, labels: str
) -> None:
    series = (
        COSTLY_RUN
        | TWO_GPUS
        | run_series("steps_total", "0+15x60", labels=',rank="0",mode="train"')
        | run_series("nonfinite_total", "0+7.5x60", labels=',kind="loss",value="nan"')
    )
    expected = {f'{{cause="nonfinite_loss"{labels}}}': value}

    assert_panel(
        tmp_path,
        "training-run",
        "Losses now, by cause",
        series,
        expected,
        column=column,
        factor=100,
    )


@pytest.mark.parametrize(
    ("column", "value", "labels"), [("GPU h/h", 100, ""), ("Cost/h", 1800, ',currency="EUR"')]
)
def test_the_lost_gpu_hours_count_the_gpus_of_the_cost_while_the_samples_of_a_gpu_are_missing(
    tmp_path: Path, column: str, value: float, labels: str
) -> None:
    series = (
        COSTLY_RUN
        | TWO_GPUS
        | {'training_rank_info{run="a",instance="n1",rank="0",gpu="0",uuid="G0"}': "1x50 stale"}
        | run_series("badput_seconds_total", "0+7.5x60", labels=',cause="data_stall"')
    )
    expected = {f'{{cause="data_stall"{labels}}}': value}

    assert_panel(
        tmp_path, "training-run", "Losses now, by cause", series, expected, column=column, factor=100
    )


@pytest.mark.parametrize(
    ("series", "cause", "share"),
    [
        (RANKS, "nothing", 0),
        (run_series("run_state", "1x60", labels=',state="finished"'), "ended", 0),
        (run_series("run_state", "1x60", labels=',state="ending"'), "ending", 1),
        (run_series("run_state", "1x60", labels=',state="lost"'), "failed", 1),
        ({}, "unknown", 0),
    ],
)
def test_a_stopped_run_loses_all_of_its_time_and_a_run_without_a_loss_says_why(
    tmp_path: Path, series: dict[str, str], cause: str, share: int
) -> None:
    assert_panel(tmp_path, "training-run", "Losses now, by cause", series, {f'{{cause="{cause}"}}': share})


@pytest.mark.parametrize(
    ("interval_seconds", "query_id", "value", "labels"),
    [
        (300, "A", 600, '{note="unsaved"}'),
        (100, "A", 600, '{note="unsaved, save overdue"}'),
        (300, "B", 6, '{currency="EUR"}'),
    ],
)
def test_unsaved_work_has_a_cost_and_its_save_is_overdue_after_three_intervals(
    tmp_path: Path, interval_seconds: int, query_id: str, value: float, labels: str
) -> None:
    series = (
        COSTLY_RUN
        | run_series("uncommitted_seconds", "600x60")
        | run_series("checkpoint_interval_seconds", f"{interval_seconds}x60")
    )

    assert_panel(tmp_path, "training-run", "Work at risk or lost", series, {labels: value}, query_id=query_id)


def test_the_work_since_a_nan_loss_is_at_risk_although_it_is_saved(tmp_path: Path) -> None:
    series = (
        COSTLY_RUN
        | run_series("uncommitted_seconds", "60x60")
        | run_series("nonfinite_total", "0x39 3x21", labels=',kind="loss",value="nan"')
    )

    panel = "Work at risk or lost"
    assert_panel(tmp_path, "training-run", panel, series, {'{note="since the save before NaN"}': 315})
    assert_panel(tmp_path, "training-run", panel, series, {'{currency="EUR"}': 315}, query_id="B", factor=100)


@pytest.mark.parametrize(
    ("save", "expected"),
    [
        (run_series("checkpoint_last_step", "514x60"), {'{note="steps after the last save"}': 52}),
        ({}, {'{note="steps, no save reported"}': 266}),
        (run_series("checkpoint_last_step", "566x60"), {'{note="unsaved"}': 0}),
    ],
    ids=["early save", "no save", "last step saved"],
)
def test_a_finished_run_has_the_steps_without_a_checkpoint(
    tmp_path: Path, save: dict[str, str], expected: dict[str, float]
) -> None:
    series = (
        {name: values for name, values in COSTLY_RUN.items() if "run_state" not in name}
        | run_series("run_state", "1x50 0x10", labels=',state="running"')
        | run_series("run_state", "0x50 1x10", labels=',state="finished"')
        | run_series("uncommitted_seconds", "0x60")
        | run_series("attempt_steps", "266x60")
        | run_series("step", "566x60", labels=',rank="0"')
        | save
    )
    cost = {'{currency="EUR"}': 0} if '{note="unsaved"}' in expected else {}

    assert_panel(tmp_path, "training-run", "Work at risk or lost", series, expected)
    assert_panel(tmp_path, "training-run", "Work at risk or lost", series, cost, query_id="B")


@pytest.mark.parametrize("end", ["", " stale"], ids=["each scrape", "the last scrape missed"])
def test_the_time_of_a_hang_is_no_unsaved_work_before_the_exporter_decides(tmp_path: Path, end: str) -> None:
    samples = 18 if end else 20
    series = (
        RANKS
        | run_series("uncommitted_seconds", f"0+15x{41 + samples}{end}")
        | run_series("last_progress_timestamp_seconds", f"0+15x40 600x{samples}{end}", labels=',rank="0"')
        | run_series("step_longest_seconds", f"1x{41 + samples}{end}", labels=',rank="0"')
        | run_series("phase_active", f"1x{41 + samples}{end}", labels=',rank="0",phase="forward"')
    )

    assert_panel(tmp_path, "training-run", "Work at risk or lost", series, {'{note="unsaved"}': 600})


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
        "Lost: slowest rank or no step",
        series,
        {labels: value},
        query_id=query_id,
        factor=100,
    )


def test_without_a_sample_of_the_run_it_is_unknown_whether_a_rank_hangs(tmp_path: Path) -> None:
    for series, text in ((RANKS, "no rank hangs"), ({}, "unknown: no sample of this run")):
        assert_panel(tmp_path, "training-ranks", "Cause of the hang", series, {f'{{cause_text="{text}"}}': 0})


def test_without_a_step_no_table_says_that_no_rank_hangs(tmp_path: Path) -> None:
    text = "no step, no stack yet"

    assert_panel(tmp_path, "training-ranks", "Cause of the hang", HUNG, {f'{{cause_text="{text}"}}': 1})
    assert_panel(
        tmp_path,
        "training-ranks",
        "Where hanging ranks wait",
        HUNG,
        {f'{{function="{text}"}}': 0},
    )


def test_the_rank_for_which_the_others_wait_is_named_before_the_lines_of_the_ranks_are_known(
    tmp_path: Path,
) -> None:
    series = HUNG | {
        'training_world_size{run="a",instance="n1"}': "2x60",
        'training_phase_active{run="a",instance="n1",rank="0",phase="grad_sync"}': "1x60",
        'training_phase_active{run="a",instance="n1",rank="1",phase="forward"}': "1x60",
    }
    rank = '{cause_text="rank 1:",function="phase forward",phase="forward",instance="n1",rank="1"}'

    assert_panel(tmp_path, "training-ranks", "Cause of the hang", series, {rank: 1})


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


def test_the_state_and_the_rank_of_a_hang_name_its_lost_gpu(tmp_path: Path) -> None:
    series = HUNG | STACKS_OF_HANG | LOST_GPU
    state = {
        '{state="hung",overdue=", no step for 10 min",culprit=": GPU 1 of rank 1 on n1 lost (Xid 79)"}': 11
    }
    odd_rank = {
        f'{{cause_text="rank 1: GPU 1 lost (Xid 79)",problem="GPU 1 lost (Xid 79)",note=" (Xid 79)",xid="79",{RANK_1},{GPU_1}}}': 1
    }

    assert_panel(tmp_path, "training-run", "State", series, state)
    assert_panel(tmp_path, "training-ranks", "Cause of the hang", series, odd_rank)


def test_the_rank_of_a_lost_gpu_is_selected_before_the_rank_that_causes_a_hang(tmp_path: Path) -> None:
    series = (
        HUNG
        | STACKS_OF_HANG
        | {name.replace('rank="1"', 'rank="0"'): value for name, value in LOST_GPU.items()}
    )

    assert_panel(tmp_path, "training-ranks", "$rank", series, {'{rank="0"}': 2e6, '{rank="1"}': 1e6})


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


@pytest.mark.parametrize(
    ("state", "expected"), [("running", {'{name="at the last scrape"}': 600}), ("finished", {})]
)
def test_only_a_run_that_has_not_finished_has_an_age_of_its_last_step(
    tmp_path: Path, state: str, expected: dict[str, float]
) -> None:
    series = run_series("run_state", "1x60", labels=f',state="{state}"') | run_series(
        "last_progress_timestamp_seconds", "300x60", labels=',rank="0"'
    )

    assert_panel(tmp_path, "training-run", "Last step", series, expected)


@pytest.mark.parametrize("uid", ["training-run", "training-ranks"])
def test_the_table_of_problems_has_the_meaning_of_an_xid_and_is_sorted_by_effect_and_start(uid: str) -> None:
    model = json.loads((PROJECT / f"dashboards/json/{uid}.json").read_text(encoding="utf-8"))
    panel = next(panel for panel in model["panels"] if panel["title"] == "What is wrong")
    texts = json.dumps(panel["fieldConfig"]["overrides"])

    assert r'"/Xid 79\\b/", "result": {"text": "Xid 79: GPU has fallen off the bus"}' in texts
    assert [column["displayName"] for column in panel["options"]["sortBy"]] == ["Effect", "Since"]


@pytest.mark.parametrize(
    ("series", "cause"),
    [
        (
            run_series("nonfinite_total", "_x21 1+15x39", labels=',kind="loss",value="nan"'),
            "loss was NaN or infinite",
        ),
        (
            run_series("checkpoints_total", "_x21 1x18 2x20", labels=',kind="full",result="failed"'),
            "saves fail",
        ),
    ],
)
def test_the_state_names_a_nan_loss_and_failing_saves(
    tmp_path: Path, series: dict[str, str], cause: str
) -> None:
    expected = {f'{{state="running",culprit=", {cause}"}}': 1}

    assert_panel(tmp_path, "training-run", "State", RANKS | series, expected)


XID_48 = RANK_1_ON_GPU_1 | {
    f'gpu_xid_last_timestamp_seconds{{instance="n1",{GPU_1},xid="48"}}': "_x20 300x40"
}
STATE_SINCE = 'training_run_state_since_timestamp_seconds{run="a",instance="n1"}'


def test_the_state_names_the_gpu_of_an_xid(tmp_path: Path) -> None:
    expected = {'{state="running",culprit=", Xid 48 on GPU 1 of rank 1 on n1"}': 1}

    assert_panel(tmp_path, "training-run", "State", RANKS | XID_48, expected)


@pytest.mark.parametrize(
    ("series", "state_since", "start", "seconds"),
    [
        pytest.param(RANKS | SLOW_RANK, 605, "problem", 315, id="slow rank"),
        pytest.param(
            RANKS
            | SLOW_RANK
            | run_series("phase_seconds_total", "0x12 7.5+7.5x47", labels=',rank="1",phase="data_loading"'),
            605,
            "problem",
            315,
            id="slow rank after an earlier wait for data",
        ),
        pytest.param(HUNG, 605, "problem", 300, id="last step before a hang"),
        pytest.param(RANKS | XID_48, 605, "problem", 300, id="Xid"),
        pytest.param(RANKS, 60, "state", 60, id="no problem"),
        pytest.param(DIED, 605, "state", 605, id="run that died"),
    ],
)
def test_the_start_is_that_of_the_worst_problem_or_of_the_state(
    tmp_path: Path, series: dict[str, str], state_since: int, start: str, seconds: int
) -> None:
    series = series | {STATE_SINCE: f"{state_since}x60"}

    assert_panel(tmp_path, "training-run", "Since", series, {f'{{start="{start}"}}': 1000 * seconds})


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        pytest.param("1x60", {}, id="equal to the only known rank"),
        pytest.param("1.5x60", {'{who="rank 1 on n1"}': 67}, id="slow among the known ranks"),
    ],
)
def test_while_ranks_are_unknown_only_a_slow_rank_is_the_slowest(
    tmp_path: Path, compute: str, expected: dict[str, float]
) -> None:
    series = (
        RANKS
        | run_series("world_size", "4x60")
        | run_series("rank_compute_seconds", "1x60", labels=',rank="0"')
        | run_series("rank_compute_seconds", compute, labels=',rank="1"')
    )

    assert_panel(tmp_path, "training-run", "Slowest rank", series, expected, factor=100)


def test_an_early_end_is_a_past_problem_as_in_the_state(tmp_path: Path) -> None:
    series = (
        run_series("run_state", "1x60", labels=',state="finished"')
        | run_series("run_state_since_timestamp_seconds", "600x60")
        | run_series("step", "850x60")
        | run_series("step_target", "6000x60")
    )
    remedy = "read the log of the job, unless the early end is intended"
    row = f'{{impact="1",problem="finished early, at step 850 of 6000",remedy="{remedy}"}}'

    assert_panel(
        tmp_path,
        "training-run",
        "State",
        series,
        {'{state="finished",note=" early, at step 850 of 6000"}': 1},
    )
    assert_panel(tmp_path, "training-run", "What is wrong", series, {row: 600_000})


def test_the_alert_about_the_gpu_is_above_the_hang_that_it_causes(tmp_path: Path) -> None:
    firing = 'ALERTS{{alertname="{name}",alertstate="firing",severity="critical",run="{run}"{labels}}}'
    gpu = ',instance="n1",gpu="1"'
    series = {
        firing.format(name="TrainingHang", run="a", labels=""): "1x60",
        firing.format(name="GpuLost", run="a", labels=gpu): "1x60",
        firing.format(name="TrainingLossNonFinite", run="a", labels=""): "1x60",
    }
    urgencies = {
        f'{{alertname="GpuLost",title="GpuLost"{gpu}}}': 5,
        '{alertname="TrainingHang",title="TrainingHang"}': 4,
        '{alertname="TrainingLossNonFinite",title="TrainingLossNonFinite"}': 3,
    }

    assert_panel(tmp_path, "training-run", "Firing alerts", series, urgencies)
    assert_panel(
        tmp_path,
        "training-run",
        "Firing alerts",
        {name: values for name, values in series.items() if "TrainingHang" not in name},
        {
            f'{{alertname="GpuLost",title="GpuLost"{gpu}}}': 3,
            '{alertname="TrainingLossNonFinite",title="TrainingLossNonFinite"}': 3,
        },
    )


def test_a_former_state_without_a_staleness_marker_is_not_shown_beside_the_current_state(
    tmp_path: Path,
) -> None:
    states = {
        'run:training_run_state:info{run="a",state="running"}': "1x58",
        'run:training_run_state:info{run="a",state="ending"}': "_x58 1x2",
    }

    assert_panel(tmp_path, "training-run", "State", states, {'{state="ending"}': 1})


def test_the_last_known_state_has_the_firing_alerts(tmp_path: Path) -> None:
    series = run_series("run_state", "1x53 stale", labels=',state="running"') | {
        'ALERTS{alertname="GpuXidCritical",alertstate="firing",severity="critical",run="a"}': "1x60"
    }
    expected = {
        '{state="running",alerts=", 1 critical",age=", no news for 105 s from ",instance="n1"}': 11,
    }

    assert_panel(tmp_path, "training-run", "State", series, expected)


def test_without_a_sample_of_the_run_no_rank_is_the_slowest(tmp_path: Path) -> None:
    series = SLOW_RANK | run_series("run_state", "1x56 stale", labels=',state="running"')

    assert_panel(tmp_path, "training-run", "Slowest rank", series, {})


MISSED_SCRAPES = (
    run_series("run_state", "1x{last} stale", labels=',state="running"')
    | run_series("process_up", "1x{last} stale", labels=',rank="0"')
    | run_series("world_size", "1x{last} stale")
    | run_series("step", "0+1x{last} stale")
    | run_series("last_progress_timestamp_seconds", "-3+15x{last} stale", labels=',rank="0"')
)
"""A healthy run whose last samples are stale; the last step is 3 s older than each sample."""


@pytest.mark.parametrize(
    ("panel", "query_id", "after_one", "after_seven"),
    [
        pytest.param(
            "State",
            "A",
            {'{state="running"}': 0},
            {'{state="running",age=", no news for 105 s from ",instance="n1"}': 1},
            id="state",
        ),
        pytest.param(
            "What is wrong",
            "A",
            {'{problem="no problem"}': -1},
            {
                '{impact="3",problem="exporter down, ranks unknown: 1",instance="n1",remedy="check the node and the log of the exporter"}': 795_000
            },
            id="problems",
        ),
        pytest.param(
            "Ranks",
            "A",
            {'{name="alive"}': 1, '{name="of"}': 1, '{name="missing"}': 0},
            {},
            id="ranks",
        ),
        pytest.param("Step", "A", {"{}": 59}, {}, id="step"),
        pytest.param(
            "Last step",
            "A",
            {'{name="at the last scrape"}': 3},
            {'{name="exporter silent"}': 108},
            id="age of the last step",
        ),
    ],
)
def test_one_missed_scrape_changes_no_tile_and_seven_make_the_run_silent(
    tmp_path: Path, panel: str, query_id: str, after_one: dict[str, float], after_seven: dict[str, float]
) -> None:
    for last, expected in ((59, after_one), (53, after_seven)):
        series = {name: values.format(last=last) for name, values in MISSED_SCRAPES.items()}

        assert_panel(tmp_path, "training-run", panel, series, expected, query_id=query_id)


@pytest.mark.parametrize(("seconds", "cause"), [("0.1", "nothing"), ("0.3", "data_stall")])
def test_a_loss_below_one_percent_is_no_loss(tmp_path: Path, seconds: str, cause: str) -> None:
    stall = run_series("badput_seconds_total", f"0+{seconds}x60", labels=',cause="data_stall"')
    share = round(100 * float(seconds) / 15) if cause != "nothing" else 0

    assert_panel(
        tmp_path,
        "training-run",
        "Losses now, by cause",
        RANKS | stall,
        {f'{{cause="{cause}"}}': share},
        factor=100,
    )
