"""Problems and losses on the dashboard *GPUs*, and the same problems on *Node* and *Fleet*, for synthetic series, evaluated by promtool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from panel_support import assert_panel, assert_queries
from rules_support import needs_promtool

from dashboards.gpu_problem_table import PROBLEM_TEXTS
from dashboards.gpu_problems import MAX_GPUS, UNKNOWN_GPU_VALUE, WORST_PROBLEM_TEXTS, XID_TEXTS, Impact
from dashboards.palette import BAD, NEUTRAL, WARNING
from exporter.collectors.gpu.nvml.library import DEVICE_DOWN_ERRORS

pytestmark = needs_promtool

DOWN_AT_5_MIN = "1x20 0x40"


N1_EXPORTER_DOWN = {
    'up{job="training",instance="n1"}': DOWN_AT_5_MIN,
    'up{job="training",instance="n2"}': "1x60",
    'exporter_build_info{job="training",instance="n1"}': "1x19 stale",
}


def gpu_name(name: str, gpu: int = 0, labels: str = "") -> str:
    """Return the name of the series `gpu_NAME` of a GPU of node n1. *labels* are further labels, each after a comma."""
    return f'gpu_{name}{{instance="n1",gpu="{gpu}",uuid="G{gpu}",job="training"{labels}}}'


def gpu_series(name: str, values: str, gpu: int = 0, labels: str = "") -> dict[str, str]:
    """Return the series `gpu_NAME` of a GPU with its values."""
    return {gpu_name(name, gpu, labels): values}


def test_an_exporter_that_is_down_is_a_problem_with_its_start_and_run(tmp_path: Path) -> None:
    remedy = "check the machine and the exporter's log"
    series = N1_EXPORTER_DOWN | {
        gpu_name("up"): "1x20 stale",
        'training_process_up{run="a",rank="0",instance="n1"}': "1x20 stale",
    }

    labels = f'{{instance="n1",run="a",problem="exporter down: node, GPUs unknown",remedy="{remedy}"}}'
    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {labels: Impact.UNKNOWN})
    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {labels: 285_000}, column="Since")


@pytest.mark.parametrize(
    ("run_state", "impact"),
    [({}, Impact.ENDANGERS_WORK), ({'run:training_standstill:info{run="a"}': "1x60"}, Impact.NO_PROGRESS)],
    ids=["the run goes on", "no step"],
)
def test_a_lost_gpu_is_a_problem_with_reason_rank_and_start(
    tmp_path: Path, run_state: dict[str, str], impact: int
) -> None:
    series = run_state | {
        'up{job="training",instance="n1"}': "1x60",
        gpu_name("up"): "1x21 0x39",  # at 330 s, at which a group of rules with either interval is evaluated
        gpu_name("error_info", labels=',reason="gpu_is_lost"'): "_x21 1x40",
        'training_rank_info{run="a",rank="3",uuid="G0",instance="n1"}': "1x60",
    }

    labels = (
        '{instance="n1",gpu="0",run="a",rank="3",problem="GPU does not respond: gpu_is_lost",'
        'remedy="drain; reset the GPU or reboot"}'
    )
    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {labels: impact})
    assert_panel(
        tmp_path,
        "training-gpus",
        "What is wrong",
        series,
        {labels: 330_000},
        column="Since",
    )


@pytest.mark.parametrize(
    ("column", "labels", "value"),
    [
        (
            "Impact",
            '{instance="n1",gpu="0",run="a",rank="3",problem="Xid 48",remedy="drain; reset the GPU or reboot"}',
            Impact.ENDANGERS_WORK,
        ),
        (
            "Since",
            '{instance="n1",gpu="0",run="a",rank="3",problem="Xid 48",remedy="drain; reset the GPU or reboot"}',
            301_000,
        ),
    ],
    ids=["worst problem", "start of the worst problem, not of an earlier one"],
)
def test_a_gpu_with_several_problems_has_one_row(
    tmp_path: Path, column: str, labels: str, value: float
) -> None:
    series = {
        'up{job="training",instance="n1"}': "1x60",
        gpu_name("up"): "1x60",
        gpu_name("xid_last_timestamp_seconds", labels=',xid="48"'): "_x20 301x40",
        gpu_name("xid_last_timestamp_seconds", labels=',xid="63"'): "_x20 302x40",
        gpu_name("recovery_action"): "0x20 1x40",
        gpu_name("remapped_rows_pending"): "0x19 1x41",
        gpu_name("ecc_errors_total", labels=',kind="uncorrected"'): "0x20 2x40",
        'training_rank_info{run="a",rank="3",uuid="G0",instance="n1"}': "1x60",
    }

    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {labels: value}, column=column)


EXPORTER_AND_RANK = {
    'up{job="training",instance="n1"}': "1x60",
    'training_rank_info{run="a",rank="3",uuid="G0",instance="n1"}': "1x60",
}


def _driver_without_reading(last_reading: int) -> dict[str, str]:
    """Return the series of a node with 8 GPUs whose driver was last read at this scrape; the current scrape is 60."""
    missed, node = 60 - last_reading, 'job="training",instance="n1"'
    return {
        f"up{{{node}}}": "1x60",
        f"gpu_devices_expected{{{node}}}": "8x60",
        f"gpu_devices{{{node}}}": f"8x{last_reading} stale",
        f"gpu_nvml_up{{{node}}}": f"1x{last_reading} 0x{missed}",
        f'gpu_nvml_error_info{{{node},reason="hung"}}': f"_x{last_reading + 1} 1x{missed}",
        f'exporter_collector_success{{{node},collector="gpu"}}': f"1x{last_reading} 0x{missed}",
        **{name: f"1x{last_reading} stale" for gpu in range(8) for name in gpu_series("up", "", gpu=gpu)},
        **gpu_series("error_info", f"_x{last_reading + 1} 1x{missed}", gpu=3, labels=',reason="hung"'),
    }


@pytest.mark.parametrize("dashboard", ["training-gpus", "training-fleet"])
@pytest.mark.parametrize(
    ("last_reading", "up", "lost", "unknown"),
    [(60, 8, 0, 0), (59, 0, 0, 8), (57, 0, 0, 8)],
    ids=["read", "one scrape missed", "three scrapes missed"],
)
def test_the_gpus_of_a_driver_that_is_not_read_are_unknown_and_not_lost(
    tmp_path: Path, dashboard: str, last_reading: int, up: int, lost: int, unknown: int
) -> None:
    series = _driver_without_reading(last_reading)
    panel = "Selected GPUs" if dashboard == "training-gpus" else "GPUs"
    gpus = {"A": {"{}": up}, "B": {"{}": lost}, "C": {"{}": unknown}}

    assert_queries(tmp_path, dashboard, panel, series, gpus)


@pytest.mark.parametrize(("dashboard", "node"), [("training-gpus", 'instance="n1",'), ("training-node", "")])
def test_one_missed_reading_of_the_driver_recommends_no_reboot(
    tmp_path: Path, dashboard: str, node: str
) -> None:
    row = f'{{{node}problem="no reading of the driver for 15 s",remedy="wait; check again"}}'
    expected = {row: Impact.UNKNOWN}

    assert_panel(tmp_path, dashboard, "What is wrong", _driver_without_reading(59), expected)


def test_a_driver_that_misses_three_scrapes_does_not_respond(tmp_path: Path) -> None:
    series = _driver_without_reading(57)
    hung = {
        '{instance="n1",problem="driver does not respond: hung",remedy="nvidia-smi; reload the driver or reboot"}': Impact.ENDANGERS_WORK,
        '{instance="n1",gpu="3",problem="GPU does not respond: hung",remedy="drain; reset the GPU or reboot"}': Impact.NO_RUN,
    }

    assert_panel(tmp_path, "training-gpus", "What is wrong", series, hung)


READER_CRASHED = {
    'up{job="training",instance="n1"}': "1x60",
    'gpu_devices_expected{job="training",instance="n1"}': "8x60",
    'gpu_devices{job="training",instance="n1"}': "7x40 stale",
    'gpu_nvml_up{job="training",instance="n1"}': "1x40 0x20",
    'gpu_nvml_error_info{job="training",instance="n1",reason="crashed"}': "_x41 1x20",
    **{name: "1x40 stale" for gpu in range(1, 8) for name in gpu_series("up", "", gpu=gpu)},
    **gpu_series("up", "1x20 0x40"),
    **gpu_series("error_info", "_x21 1x40", labels=',reason="gpu_is_lost"'),
}
"""A node with 8 GPUs, one of them lost, on which the process that calls NVML crashes at 10 min."""


def test_the_other_gpus_are_unknown_and_the_lost_one_is_lost_after_a_crash_of_the_process_that_calls_nvml(
    tmp_path: Path,
) -> None:
    selected_gpus = {"A": {"{}": 0}, "B": {"{}": 1}, "C": {"{}": 7}}
    gpus_of_node = {'{name="lost"}': 1, '{name="unknown"}': 7}

    assert_queries(tmp_path, "training-gpus", "Selected GPUs", READER_CRASHED, selected_gpus)
    assert_panel(tmp_path, "training-node", "GPUs", READER_CRASHED, gpus_of_node)


def test_a_crash_of_the_process_that_calls_nvml_does_not_stop_the_run(tmp_path: Path) -> None:
    rows = {
        '{instance="n1",problem="GPUs not read: the NVML process crashed",remedy="nvidia-smi; read the exporter\'s log"}': Impact.ENDANGERS_WORK,
        '{instance="n1",gpu="0",problem="GPU does not respond: gpu_is_lost",remedy="drain; reset the GPU or reboot"}': Impact.NO_RUN,
    }
    states: dict[str, float] = {f'{{instance="n1",gpu="{gpu}"}}': UNKNOWN_GPU_VALUE for gpu in range(1, 8)}
    (lost_value,) = (
        float(value)
        for value, option in WORST_PROBLEM_TEXTS[0]["options"].items()
        if option["text"] == "GPU does not respond"
    )
    states['{instance="n1",gpu="0"}'] = lost_value

    assert_panel(tmp_path, "training-gpus", "What is wrong", READER_CRASHED, rows)
    assert_panel(
        tmp_path, "training-gpus", "Health of each GPU", READER_CRASHED, states, column="Worst problem"
    )


@pytest.mark.parametrize(("dashboard", "node"), [("training-gpus", 'instance="n1",'), ("training-node", "")])
def test_a_gpu_that_the_driver_does_not_list_is_lost_in_the_tile_and_a_problem_in_the_table(
    tmp_path: Path, dashboard: str, node: str
) -> None:
    labels = 'job="training",instance="n1"'
    series = {
        f"up{{{labels}}}": "1x60",
        f"gpu_devices_expected{{{labels}}}": "8x60",
        f"gpu_devices{{{labels}}}": "8x20 6x40",
        **gpu_series("up", "1x20 0x40"),
        **gpu_series("error_info", "_x21 1x40", labels=',reason="gpu_is_lost"'),
    }
    remedy = "read the kernel log; reboot"
    missing = f'{{{node}problem="GPUs not listed by the driver: 1",remedy="{remedy}"}}'
    lost = f'{{{node}gpu="0",problem="GPU does not respond: gpu_is_lost",remedy="drain; reset the GPU or reboot"}}'

    if dashboard == "training-gpus":
        assert_panel(tmp_path, dashboard, "Selected GPUs", series, {"{}": 2}, query_id="B")
    else:
        assert_panel(tmp_path, dashboard, "GPUs", series, {"{}": 2}, series_name="lost")
    assert_panel(
        tmp_path, dashboard, "What is wrong", series, {missing: Impact.POSSIBLE, lost: Impact.NO_RUN}
    )


def test_a_lost_gpu_is_above_a_gpu_with_several_ecc_problems(tmp_path: Path) -> None:
    series = (
        EXPORTER_AND_RANK
        | gpu_series("up", "1x20 0x40")
        | gpu_series("error_info", "_x21 1x40", labels=',reason="gpu_is_lost"')
        | gpu_series("up", "1x60", gpu=1)
        | gpu_series("ecc_errors_total", "2x60", gpu=1, labels=',kind="uncorrected"')
        | gpu_series("remapped_rows_pending", "1x60", gpu=1)
        | gpu_series("recovery_action", "1x60", gpu=1)
        | gpu_series("up", "1x60", gpu=2)
    )
    texts = WORST_PROBLEM_TEXTS[0]["options"]
    values = {option["text"]: float(value) for value, option in texts.items()}
    lost, ecc = values["GPU does not respond"], values["uncorrected memory errors"]
    rows = {f'{{instance="n1",gpu="{gpu}"}}': value for gpu, value in enumerate((lost, ecc, 0))}

    assert lost > ecc > 0
    assert_panel(tmp_path, "training-gpus", "Health of each GPU", series, rows, column="Worst problem")


@pytest.mark.parametrize(("gpus", "rows"), [(MAX_GPUS, MAX_GPUS), (MAX_GPUS + 1, 1)])
def test_only_gpus_with_a_problem_are_listed_if_there_are_too_many(
    tmp_path: Path, gpus: int, rows: int
) -> None:
    series = EXPORTER_AND_RANK | gpu_series("ecc_errors_total", "2x4", gpu=0, labels=',kind="uncorrected"')
    for gpu in range(gpus):
        series |= gpu_series("up", "1x4", gpu=gpu)
    xids = {f'{{instance="n1",gpu="{gpu}"}}': 0.0 for gpu in range(rows)}

    assert_panel(tmp_path, "training-gpus", "Health of each GPU", series, xids, column="Xids, 1 h", minutes=1)


@pytest.mark.parametrize(
    ("series", "counts"),
    [
        (gpu_series("up", "1x60"), {"no problem": 0}),
        (
            gpu_series("up", "1x60")
            | gpu_series("ecc_errors_total", "2x60", labels=',kind="uncorrected"')
            | {'up{job="training",instance="n2"}': DOWN_AT_5_MIN},
            {"endangers work": 1, "unknown": 1},
        ),
    ],
    ids=["healthy", "damaged GPU and exporter that is down"],
)
def test_nodes_and_gpus_with_a_problem_are_counted_by_impact(
    tmp_path: Path, series: dict[str, str], counts: dict[str, float]
) -> None:
    expected = {f'{{impact="{impact}"}}': count for impact, count in counts.items()}

    assert_panel(tmp_path, "training-gpus", "Problems listed below", EXPORTER_AND_RANK | series, expected)


LOSS_PANEL = "Loss of the runs listed below"
NO_LOSS_VALUE = -1
"""Value of the loss in `LOSS_PANEL` if no live run has a problem and all exporters are up."""


HOT_GPU = {
    'up{job="training",instance="n1"}': "1x60",
    gpu_name("up"): "1x60",
    gpu_name("clocks_event_seconds_total", labels=',reason="thermal"'): "0+9x60",
    'training_cost_total{run="a",instance="n1",currency="EUR"}': "0+0.15x60",
    'training_run_state{run="a",instance="n1",state="running"}': "1x60",
}


def test_a_gpu_throttled_for_half_a_minute_is_a_problem_with_the_start_of_the_throttling(
    tmp_path: Path,
) -> None:
    throttled = gpu_name("clocks_event_seconds_total", labels=',reason="thermal"')
    series = HOT_GPU | {throttled: "0x57 0.5 9 18"}
    labels = '{instance="n1",gpu="0",problem="throttled by heat",remedy="check fans, airflow and coolant"}'

    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {labels: Impact.NO_RUN})
    assert_panel(
        tmp_path,
        "training-gpus",
        "What is wrong",
        series,
        {labels: 870_000},
        column="Since",
    )


@pytest.mark.parametrize(
    ("values", "expected", "query_id"),
    [("0+9x60", {'{instance="n1",gpu="0"}': 60}, "A"), ("0x60", {"{}": 0}, "B")],
    ids=["throttled", "not throttled"],
)
def test_the_tile_names_the_most_throttled_gpu_or_none(
    tmp_path: Path, values: str, expected: dict[str, float], query_id: str
) -> None:
    throttled = gpu_name("clocks_event_seconds_total", labels=',reason="thermal"')
    series = HOT_GPU | {throttled: values}

    for ref_id in "AB":
        values_of_query = expected if ref_id == query_id else {}
        assert_panel(
            tmp_path,
            "training-gpus",
            "Throttled, 2 min",
            series,
            values_of_query,
            query_id=ref_id,
            factor=100,
        )


@pytest.mark.parametrize(
    ("rank_labels", "expected"),
    [
        ('uuid="G0"', {"A": {'{currency="EUR"}': 9}, "B": {'{currency="EUR"}': 36}, "C": {"{}": 0}}),
        ('local_rank="0"', {"A": {'{currency="EUR"}': 9}, "B": {'{currency="EUR"}': 36}, "C": {"{}": 0}}),
        ('uuid="G7"', {"A": {'{currency="EUR"}': NO_LOSS_VALUE}, "B": {}, "C": {"{}": 0}}),
        ('gpu=""', {"A": {}, "B": {}, "C": {"{}": 1}}),
    ],
    ids=["UUID of the GPU", "local rank of the GPU", "another GPU", "unknown GPU"],
)
def test_the_cost_of_a_gpu_problem_is_unknown_if_the_gpu_of_a_rank_is_unknown(
    tmp_path: Path, rank_labels: str, expected: dict[str, dict[str, float]]
) -> None:
    series = HOT_GPU | {
        f'training_rank_info{{run="a",rank="3",{rank_labels},instance="n1"}}': "1x60",
        'run:training_lost:ratio{run="a",cause="slowest_rank"}': "0.25x60",
    }

    assert_queries(tmp_path, "training-gpus", LOSS_PANEL, series, expected)


def test_the_loss_of_a_gpu_problem_is_a_share_of_the_cost_of_the_run(tmp_path: Path) -> None:
    series = HOT_GPU | {
        'training_rank_info{run="a",rank="3",uuid="G0",instance="n1"}': "1x60",
        'run:training_lost:ratio{run="a",cause="slowest_rank"}': "0.25x60",
    }

    assert_panel(tmp_path, "training-gpus", LOSS_PANEL, series, {'{currency="EUR"}': 9})
    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {'{run="a"}': 9}, column="Run lost/h")


def test_the_loss_of_a_known_run_is_no_total_while_another_gpu_problem_has_an_unknown_run(
    tmp_path: Path,
) -> None:
    hot_gpu_of_unknown_run = {
        key.replace('"n1"', '"n2"').replace('"G0"', '"G9"').replace('run="a"', 'run="b"'): values
        for key, values in HOT_GPU.items()
    }
    series = (
        HOT_GPU
        | hot_gpu_of_unknown_run
        | {
            'training_rank_info{run="a",rank="3",uuid="G0",instance="n1"}': "1x60",
            'training_rank_info{run="b",rank="3",instance="n2"}': "1x60",
            'run:training_lost:ratio{run="a",cause="slowest_rank"}': "0.25x60",
        }
    )

    assert_panel(tmp_path, "training-gpus", LOSS_PANEL, series, {})
    assert_panel(tmp_path, "training-gpus", LOSS_PANEL, series, {}, query_id="B")
    assert_panel(tmp_path, "training-gpus", LOSS_PANEL, series, {"{}": 1}, query_id="C")


def test_the_loss_of_the_runs_with_a_problem_is_the_sum_over_the_runs_of_the_table(tmp_path: Path) -> None:
    series = HOT_GPU | {
        'training_rank_info{run="a",rank="3",uuid="G0",instance="n1"}': "1x60",
        'run:training_lost:ratio{run="a",cause="slowest_rank"}': "0.25x60",
        'up{job="training",instance="n2"}': "1x60",
        'gpu_nvml_error_info{job="training",instance="n2",reason="driver_not_loaded"}': "_x41 1x20",
        'gpu_devices_expected{job="training",instance="n2"}': "8x60",
        'training_process_up{run="b",rank="0",instance="n2"}': "1x60",
        'training_cost_total{run="b",instance="n2",currency="EUR"}': "0+0.15x60",
        'training_run_state{run="b",instance="n2",state="running"}': "1x60",
        'run:training_lost:ratio{run="b",cause="standstill"}': "1x60",
    }

    assert_panel(tmp_path, "training-gpus", LOSS_PANEL, series, {'{currency="EUR"}': 45})
    assert_panel(
        tmp_path,
        "training-gpus",
        "What is wrong",
        series,
        {'{run="a"}': 9, '{run="b"}': 36},
        column="Run lost/h",
    )


def test_the_loss_of_a_node_without_a_driver_is_that_of_the_run_in_its_row(tmp_path: Path) -> None:
    series = {
        'up{job="training",instance="n2"}': "1x60",
        'gpu_nvml_error_info{job="training",instance="n2",reason="driver_not_loaded"}': "_x41 1x20",
        'gpu_devices_expected{job="training",instance="n2"}': "8x60",
    }
    for run in ("b", "c"):
        series |= {
            f'training_process_up{{run="{run}",rank="0",instance="n2"}}': "1x60",
            f'training_cost_total{{run="{run}",instance="n2",currency="EUR"}}': "0+0.15x60",
            f'training_run_state{{run="{run}",instance="n2",state="running"}}': "1x60",
            f'run:training_lost:ratio{{run="{run}",cause="standstill"}}': "1x60",
        }

    assert_panel(tmp_path, "training-gpus", LOSS_PANEL, series, {'{currency="EUR"}': 36})


def test_no_gpu_has_a_state_while_the_exporter_of_its_node_is_down(tmp_path: Path) -> None:
    series = {name: values.replace("x60", "x58 stale") for name, values in HOT_GPU.items()} | {
        'up{job="training",instance="n1"}': "1x58 0x2"
    }
    node = '{instance="n1",problem="exporter down: node, GPUs unknown",remedy="check the machine and the exporter\'s log"}'
    unknown = {'{impact="unknown"}': 1}
    gpu = {'{instance="n1",gpu="0"}': UNKNOWN_GPU_VALUE}

    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {node: Impact.UNKNOWN})
    assert_panel(tmp_path, "training-gpus", "Problems listed below", series, unknown)
    assert_panel(tmp_path, "training-gpus", "Health of each GPU", series, gpu, column="Worst problem")


@pytest.mark.parametrize(("state", "runs"), [("running", 1), ("finished", 0)])
def test_the_loss_of_a_run_without_an_exporter_is_unknown_and_not_0(
    tmp_path: Path, state: str, runs: int
) -> None:
    series = N1_EXPORTER_DOWN | {
        'training_process_up{run="a",rank="0",instance="n1"}': "1x20 stale",
        f'training_run_state{{run="a",instance="n1",state="{state}"}}': "1x20 stale",
        'training_run_state{run="b",instance="n2",state="running"}': "1x60",
        'training_cost_total{run="b",instance="n2",currency="EUR"}': "0+0.15x60",
    }

    assert_panel(tmp_path, "training-gpus", LOSS_PANEL, series, {})
    assert_panel(tmp_path, "training-gpus", LOSS_PANEL, series, {"{}": runs}, query_id="C")


def test_the_loss_on_a_node_that_does_not_exist_is_unknown(tmp_path: Path) -> None:
    series = HOT_GPU | {'training_rank_info{run="a",rank="3",uuid="G7",instance="n1"}': "1x60"}

    assert_panel(tmp_path, "training-gpus", LOSS_PANEL, series, {}, selected={"node": "n9"})


@pytest.mark.parametrize(
    ("uuid", "owner", "impact"),
    [("G0", ',run="a",rank="3"', Impact.LOSES_TIME), ("G7", "", Impact.NO_RUN)],
    ids=["held", "free"],
)
def test_a_problem_of_a_gpu_without_a_run_has_no_impact_on_a_run(
    tmp_path: Path, uuid: str, owner: str, impact: int
) -> None:
    series = HOT_GPU | {f'training_rank_info{{run="a",rank="3",uuid="{uuid}",instance="n1"}}': "1x60"}
    labels = (
        f'{{instance="n1",gpu="0"{owner},problem="throttled by heat",'
        'remedy="check fans, airflow and coolant"}'
    )

    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {labels: impact})


RANK_ON_OLD_GPU = {'training_rank_info{run="a",rank="3",uuid="G0",instance="n1"}': "1x20 stale"}


RANK_ON_NEW_GPU = {'training_rank_info{run="b",rank="5",uuid="G7",instance="n1"}': "_x20 1x40"}


@pytest.mark.parametrize(
    ("ranks", "owner", "impact"),
    [
        pytest.param(
            RANK_ON_OLD_GPU | RANK_ON_NEW_GPU,
            ',run="b",rank="5"',
            Impact.LOSES_TIME,
            id="both GPUs had a rank",
        ),
        pytest.param(RANK_ON_OLD_GPU, "", Impact.NO_RUN, id="the new GPU is free"),
    ],
)
def test_a_problem_of_a_replacement_gpu_names_its_own_rank_and_not_that_of_the_gpu_before(
    tmp_path: Path, ranks: dict[str, str], owner: str, impact: int
) -> None:
    new_gpu = {name.replace('uuid="G0"', 'uuid="G7"'): values for name, values in HOT_GPU.items()}
    series = new_gpu | ranks | {gpu_name("up"): "1x20 stale"}
    labels = (
        f'{{instance="n1",gpu="0"{owner},problem="throttled by heat",'
        'remedy="check fans, airflow and coolant"}'
    )

    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {labels: impact})


def test_nothing_is_wrong_with_healthy_gpus(tmp_path: Path) -> None:
    series = {
        'up{job="training",instance="n1"}': "1x60",
        gpu_name("up"): "1x60",
    }

    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {'{problem="no problem"}': -1})


@pytest.mark.parametrize(
    ("run", "gpus"),
    [(".*", {"A": 6, "B": 2, "C": 0}), ("a", {"A": 1, "B": 1, "C": 0}), ("b", {"A": 4, "B": 0, "C": 0})],
)
def test_the_selected_run_limits_the_number_of_gpus(tmp_path: Path, run: str, gpus: dict[str, int]) -> None:
    node = 'job="training",instance="n1"'
    series = {
        f"up{{{node}}}": "1x60",
        f"gpu_devices_expected{{{node}}}": "8x60",
        f"gpu_devices{{{node}}}": "8x20 6x40",
        'training_rank_info{run="a",rank="0",uuid="G0",instance="n1"}': "1x60",
        'training_rank_info{run="a",rank="1",uuid="G1",instance="n1"}': "1x60",
    }
    for gpu in range(8):
        series |= gpu_series("up", "1x20 0x40" if gpu in (0, 7) else "1x60", gpu=gpu)
    for gpu in range(2, 6):
        series[f'training_rank_info{{run="b",rank="{gpu}",uuid="G{gpu}",instance="n1"}}'] = "1x60"

    counts = {query_id: {"{}": count} for query_id, count in gpus.items()}
    assert_queries(tmp_path, "training-gpus", "Selected GPUs", series, counts, selected={"run": run})


@pytest.mark.parametrize(("run", "gpus"), [(".*", {"{}": 3}), ("a", {"{}": 1}), ("b", {})])
def test_the_selected_run_limits_the_number_of_unknown_gpus(
    tmp_path: Path, run: str, gpus: dict[str, float]
) -> None:
    lost = {
        gpu_name(name, gpu, label): value
        for gpu in range(3)
        for name, label, value in (("up", "", "0x60"), ("error_info", ',reason="gpu_is_lost"', "1x60"))
    }
    series = lost | {
        'up{job="training",instance="n1"}': "0x60",
        'training_rank_info{run="a",rank="3",uuid="G0",instance="n1"}': "1x60",
    }
    selected = {"run": run}

    assert_panel(tmp_path, "training-gpus", "Selected GPUs", series, gpus, query_id="C", selected=selected)


def test_a_hot_gpu_is_an_outlier_in_the_plot_of_temperatures(tmp_path: Path) -> None:
    temperatures = {
        gpu_name("temperature_celsius", gpu, ',sensor="gpu"'): values
        for gpu, values in ((0, "62x60"), (1, "62x60"), (2, "62x50 89x10"))
    }
    temperatures |= {gpu_name("up", gpu): "1x60" for gpu in range(3)}
    labels = 'job="training",sensor="gpu"'
    expected = {
        f'{{__name__="gpu_temperature_celsius",instance="n1",gpu="0",uuid="G0",{labels}}}': 62,
        f'{{__name__="gpu_temperature_celsius",instance="n1",gpu="1",uuid="G1",{labels}}}': 62,
        f'{{instance="n1",gpu="2",uuid="G2",note=": outlier",{labels}}}': 89,
    }

    unnamed = {
        name.replace('__name__="gpu_temperature_celsius",', ""): value for name, value in expected.items()
    }
    assert_panel(tmp_path, "training-gpus", "Temperature of each GPU", temperatures, unnamed)


def test_the_idle_gpu_of_a_run_that_has_ended_is_no_outlier(tmp_path: Path) -> None:
    series: dict[str, str] = {}
    for gpu in range(3):
        rank = f'run="{"ended" if gpu == 2 else "live"}",rank="{gpu}",instance="n1"'
        series |= gpu_series("up", "1x60", gpu=gpu) | gpu_series(
            "sm_activity_ratio", "80x50 0x10" if gpu == 2 else "80x60", gpu=gpu
        )
        series[f'training_rank_info{{{rank},uuid="G{gpu}"}}'] = "1x60"
        series[f"training_process_up{{{rank}}}"] = "1x50 0x10" if gpu == 2 else "1x60"
    labels = 'instance="n1",job="training"'
    expected = {
        f'{{{labels},gpu="0",uuid="G0"}}': 80,
        f'{{{labels},gpu="1",uuid="G1"}}': 80,
        f'{{{labels},gpu="2",uuid="G2",note=": no rank"}}': 0,
    }

    assert_panel(tmp_path, "training-gpus", "SM activity", series, expected)


def test_the_gpu_of_a_rank_is_no_outlier_of_idle_gpus_while_the_exporter_of_the_rank_is_down(
    tmp_path: Path,
) -> None:
    rank = 'run="a",rank="0",instance="n1"'
    series = {f'training_rank_info{{{rank},uuid="G2"}}': "1x57 stale"}
    series[f"training_process_up{{{rank}}}"] = "1x57 stale"
    for gpu in range(3):
        series |= gpu_series("up", "1x60", gpu=gpu)
        series |= gpu_series("temperature_celsius", f"{(30, 30, 60)[gpu]}x60", gpu, ',sensor="gpu"')
    expected = {'{job="training",sensor="gpu",instance="n1",gpu="2",uuid="G2"}': 60.0}

    assert_panel(tmp_path, "training-gpus", "Temperature of each GPU", series, expected)


def test_reasons_of_heat_and_usual_reasons_below_full_clock_are_in_different_panels(tmp_path: Path) -> None:
    series: dict[str, str] = {}
    for gpu in range(4):
        series |= gpu_series("up", "1x60", gpu=gpu)
        series |= gpu_series("clocks_event_seconds_total", "0+15x60", gpu, ',reason="sw_power_cap"')
        series |= gpu_series("clocks_event_seconds_total", "0+15x60", gpu, ',reason="low_utilization"')
    series |= gpu_series("clocks_event_seconds_total", "0+15x60", 3, ',reason="hw_thermal"')

    for panel, expected in (
        ("GPUs slowed by heat or the power brake, by reason", {'{reason="hw_thermal"}': 1}),
        ("GPUs at another limit of the clock, by reason", {'{reason="sw_power_cap"}': 4}),
    ):
        assert_panel(tmp_path, "training-gpus", panel, series, expected)


def test_gpus_without_a_sample_are_counted_beside_the_slowed_gpus(tmp_path: Path) -> None:
    series: dict[str, str] = {}
    for node in range(3):
        end = "x57 stale" if node == 0 else "x61"
        labels = f'instance="n{node}",gpu="0",uuid="G{node}",job="training"'
        series[f"gpu_up{{{labels}}}"] = f"1{end}"
        series[f'gpu_clocks_event_seconds_total{{{labels},reason="thermal"}}'] = f"0+15{end}"
    panel = "GPUs slowed by heat or the power brake, by reason"

    for minutes, without_sample in ((14, {}), (15.25, {"{}": 1})):
        assert_panel(tmp_path, "training-gpus", panel, series, without_sample, query_id="B", minutes=minutes)
    assert_panel(tmp_path, "training-gpus", panel, series, {'{reason="thermal"}': 2}, minutes=15.25)


def test_no_gpu_is_throttled_or_not_while_its_exporter_is_down(tmp_path: Path) -> None:
    throttled = gpu_name("clocks_event_seconds_total", labels=',reason="thermal"')
    series = HOT_GPU | {throttled: "0+9x58 stale", gpu_name("up"): "1x58 stale"}
    series |= {'up{job="training",instance="n1"}': "1x58 0x2"}

    assert_queries(tmp_path, "training-gpus", "Throttled, 2 min", series, {"A": {}, "B": {}})


def test_gpus_of_a_node_whose_exporter_is_down_are_unknown(tmp_path: Path) -> None:
    series = N1_EXPORTER_DOWN | {gpu_name("up", gpu): "1x20 stale" for gpu in range(2)}

    assert_panel(tmp_path, "training-gpus", "Selected GPUs", series, {"{}": 2}, query_id="C")


def test_the_mean_sm_activity_covers_gpus_that_live_ranks_hold(tmp_path: Path) -> None:
    activity = {gpu_name("sm_activity_ratio", gpu): f"{value}x60" for gpu, value in ((0, 0.9), (1, 0.1))}
    activity |= {gpu_name("up", gpu): "1x60" for gpu in range(2)}
    held = {
        'training_rank_info{run="a",rank="0",uuid="G0",instance="n1"}': "1x60",
        'training_rank_info{run="b",rank="0",uuid="G1",instance="n1"}': "1x60",
        'training_process_up{run="a",rank="0",instance="n1"}': "1x60",
        'training_process_up{run="b",rank="0",instance="n1"}': "0x60",
    }

    panel = "SM active"
    assert_panel(tmp_path, "training-gpus", panel, activity | held, {'{gpus="GPUs in use"}': 90}, factor=100)
    assert_panel(tmp_path, "training-gpus", panel, activity, {'{gpus="no GPU in use"}': 50}, factor=100)


@pytest.mark.parametrize(("xid", "color"), [(79, BAD), (94, WARNING), (13, NEUTRAL)])
def test_the_color_of_an_xid_is_that_of_its_alert(xid: int, color: str) -> None:
    (mapping,) = XID_TEXTS

    assert mapping["options"][str(xid)]["color"] == color


@pytest.mark.parametrize("error", sorted(DEVICE_DOWN_ERRORS))
def test_the_table_of_problems_explains_an_error_of_nvml(error: str) -> None:
    shown = json.dumps(PROBLEM_TEXTS)

    assert f'"GPU does not respond: {error}": {{' in shown


def test_a_run_whose_gpus_wait_for_data_has_a_row_with_its_start_and_remedy(tmp_path: Path) -> None:
    series = {'up{job="training",instance="n1"}': "1x60"}
    for rank in (0, 1):
        of_rank = f'run="a",rank="{rank}",instance="n1"'
        series |= gpu_series("up", "1x60", gpu=rank)
        series[f'training_rank_info{{{of_rank},uuid="G{rank}"}}'] = "1x60"
        series[f"training_process_up{{{of_rank}}}"] = "1x60"
        series[f'training_phase_seconds_total{{{of_rank},phase="data_loading"}}'] = "0x20 9+9x40"
        series[f'training_phase_seconds_total{{{of_rank},phase="forward"}}'] = "0+15x20 306+6x39"
    series['training_wall_seconds_total{run="a",instance="n1"}'] = "0+15x60"
    series['training_run_state{run="a",instance="n1",state="running"}'] = "1x60"
    labels = (
        '{run="a",problem="all ranks wait for data: at least 60 %, 2 min",'
        'remedy="check the storage; use more data workers"}'
    )

    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {labels: Impact.LOSES_TIME})
    assert_panel(tmp_path, "training-gpus", "Problems listed below", series, {'{impact="loses time"}': 1})


def _stopped_run(up: str, state: str) -> dict[str, str]:
    series = {'up{job="training",instance="n1"}': "1x60"}
    for rank in (0, 1):
        of_rank = f'run="a",rank="{rank}",instance="n1"'
        series |= gpu_series("up", "1x60", gpu=rank)
        series[f'training_rank_info{{{of_rank},gpu="{rank}",uuid="G{rank}"}}'] = "1x60"
        series[f"training_process_up{{{of_rank}}}"] = up
        series[f"training_last_progress_timestamp_seconds{{{of_rank}}}"] = "0+15x20 300x40"
    series['training_attempt_start_timestamp_seconds{run="a",instance="n1"}'] = "10x60"
    series[f'training_run_state{{run="a",instance="n1",state="{state}"}}'] = "1x60"
    return series


@pytest.mark.parametrize(
    ("series", "row", "start_ms"),
    [
        pytest.param(
            _stopped_run("1x60", "hung")
            | {'training_hang_info{run="a",rank="1",instance="n1",function="f",location="job.py:1"}': "1x60"},
            'rank="1",gpu="1",problem="no rank finishes a step: f job.py:1",remedy="read this line of the job; restart the run"',
            300_000,
            id="hang",
        ),
        pytest.param(
            _stopped_run("1x20 0x40", "failed")
            | {
                'training_rank_last_exit_timestamp_seconds{run="a",rank="1",instance="n1",reason="signal SIGKILL"}': "_x21 310x39"
            },
            'rank="1",gpu="1",problem="no rank runs; ended first: signal SIGKILL",remedy="read the log of this rank first"',
            310_000,
            id="killed",
        ),
    ],
)
def test_a_run_without_progress_has_a_row_with_the_rank_and_its_gpu(
    tmp_path: Path, series: dict[str, str], row: str, start_ms: int
) -> None:
    labels = f'{{instance="n1",run="a",{row}}}'

    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {labels: Impact.NO_PROGRESS})
    assert_panel(tmp_path, "training-gpus", "What is wrong", series, {labels: start_ms}, column="Since")
    assert_panel(tmp_path, "training-gpus", "Problems listed below", series, {'{impact="no progress"}': 1})


def test_a_gpu_is_an_outlier_of_its_own_run_and_a_lost_gpu_keeps_its_line(tmp_path: Path) -> None:
    # GPUs 0 and 1 wait for data, 2 to 4 train, and 5 is lost.
    series: dict[str, str] = {}
    for gpu, values in enumerate(("40x60", "40x60", "80x60", "80x60", "30x60", "80x50 stale")):
        rank = f'run="{"waits" if gpu < 2 else "trains"}",rank="{gpu}",instance="n1"'
        series |= gpu_series("up", "1x47 0x12" if gpu == 5 else "1x60", gpu=gpu)
        series |= gpu_series("sm_activity_ratio", values, gpu=gpu)
        series[f'training_rank_info{{{rank},uuid="G{gpu}"}}'] = "1x60"
        series[f"training_process_up{{{rank}}}"] = "1x60"
    labels = 'instance="n1",job="training"'
    notes = {4: ',run="trains",note=" (trains): outlier"'}
    expected = {
        f'{{{labels},gpu="{gpu}",uuid="G{gpu}"{notes.get(gpu, "")}}}': value
        for gpu, value in enumerate((40, 40, 80, 80, 30))
    }
    lost = {f'{{{labels},gpu="5",uuid="G5",run="trains",note=" (trains): lost"}}': 80}

    assert_panel(tmp_path, "training-gpus", "SM activity", series, expected)
    assert_panel(tmp_path, "training-gpus", "SM activity", series, expected | lost, minutes=12)


def test_all_gpus_of_a_run_that_fell_are_named_with_the_run_and_the_medians_are_those_of_the_runs(
    tmp_path: Path,
) -> None:
    series: dict[str, str] = {}
    for gpu in range(4):
        rank = f'run="{"waits" if gpu < 2 else "trains"}",rank="{gpu}",instance="n1"'
        series |= gpu_series("up", "1x60", gpu=gpu)
        series |= gpu_series("sm_activity_ratio", "80x40 40x20" if gpu < 2 else "80x60", gpu=gpu)
        series[f'training_rank_info{{{rank},uuid="G{gpu}"}}'] = "1x60"
        series[f"training_process_up{{{rank}}}"] = "1x60"
    labels = 'instance="n1",job="training"'
    fell = ',run="waits",note=" (waits): fell"'
    lines = {
        f'{{{labels},gpu="{gpu}",uuid="G{gpu}"{fell if gpu < 2 else ""}}}': value
        for gpu, value in enumerate((40, 40, 80, 80))
    }
    medians = {'{run="waits"}': 40, '{run="trains"}': 80}

    assert_panel(tmp_path, "training-gpus", "SM activity", series, lines)
    assert_panel(tmp_path, "training-gpus", "Kinds of use, median GPU", series, medians, query_id="B")


def test_the_timeline_omits_failed_scrapes_before_the_first_successful_one(tmp_path: Path) -> None:
    series = {
        'up{job="training",instance="n1"}': "0x2 1x30 0x28",
        'up{job="training",instance="n2"}': "0x60",
    }
    panel = "Exporters, drivers and GPUs with a failure"
    rows = [f'{{instance="n{node}",subject="n{node} exporter"}}' for node in (1, 2)]

    for minutes, expected in (
        (0.5, {}),
        (8, dict(zip(rows, (1, 0), strict=True))),
        (12, dict.fromkeys(rows, 0)),
    ):
        assert_panel(tmp_path, "training-gpus", panel, series, expected, minutes=minutes)


def test_the_timeline_omits_exporters_and_gpus_that_did_not_fail(tmp_path: Path) -> None:
    series = N1_EXPORTER_DOWN | {
        gpu_name("up", gpu): values for gpu, values in ((0, "1x60"), (1, "1x20 0x40"))
    }

    expected = {
        '{instance="n1",subject="n1 exporter"}': 0.0,
        '{instance="n1",gpu="1",subject="n1 GPU 1"}': 0.0,
    }
    assert_panel(tmp_path, "training-gpus", "Exporters, drivers and GPUs with a failure", series, expected)


def test_the_timeline_does_not_call_all_up_while_a_driver_does_not_respond(tmp_path: Path) -> None:
    series = {
        'up{job="training",instance="n1"}': "1x60",
        'gpu_nvml_up{job="training",instance="n1"}': DOWN_AT_5_MIN,
        'gpu_devices_expected{job="training",instance="n1"}': "8x60",
        gpu_name("up"): "1x20 stale",  # as with a driver that does not respond
    }

    expected = {'{instance="n1",subject="n1 driver"}': 0.0}
    assert_panel(tmp_path, "training-gpus", "Exporters, drivers and GPUs with a failure", series, expected)


def test_the_timeline_ignores_the_driver_of_a_node_without_gpus(tmp_path: Path) -> None:
    series = {
        'up{job="training",instance="n1"}': "1x60",
        'gpu_nvml_up{job="training",instance="n1"}': "0x60",
        'gpu_devices_expected{job="training",instance="n1"}': "0x60",
    }

    expected = {'{subject="no failure"}': 1.0}
    assert_panel(tmp_path, "training-gpus", "Exporters, drivers and GPUs with a failure", series, expected)


@pytest.mark.parametrize(
    ("exporter", "expected"),
    [
        ("1x60", {'{subject="no failure"}': 1.0}),
        ("0 1x60", {'{subject="no failure"}': 1.0}),
        ("1x20 0x4 1x36", {'{instance="n1",subject="n1 exporter"}': 1.0}),
    ],
    ids=["no failure", "first scrape failed", "one failure, now over"],
)
def test_the_timeline_is_red_only_during_a_failure(
    tmp_path: Path, exporter: str, expected: dict[str, float]
) -> None:
    series = {'up{job="training",instance="n1"}': exporter} | gpu_series("up", "1x60")

    assert_panel(tmp_path, "training-gpus", "Exporters, drivers and GPUs with a failure", series, expected)
