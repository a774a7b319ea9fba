"""Content of the status page, its history, and the format of its numbers. Foreign text cannot run as a script."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import PROJECT
from status_support import (
    JOB,
    NOW,
    Document,
    Rows,
    collector_status,
    exporter_info,
    families_of,
    history_of,
    run_sample,
    status_page,
    step_durations,
)

from exporter.status.document import template_environment
from exporter.status.elements import MAX_ROWS, plot
from exporter.status.formatting import duration, energy, number, rank_names, size
from exporter.status.history import History
from exporter.status.runs import run_sections
from exporter.status.samples import SampleIndex
from exporter.status.sections import MAX_UNFOLDED_RANKS
from exporter.status.view import build_view


def executed_steps(count: float) -> Rows:
    return {"training_steps_total": run_sample(count, mode="train")}


HISTORY = history_of(4, lambda tick: step_durations(10 * tick, 20.0 * tick) | executed_steps(2.5 * tick))
UNSAVED: Rows = {
    **JOB,
    "training_productive_seconds_total": run_sample(0.0),
    "training_uncommitted_seconds": run_sample(850.0),
}
IN_A_PHASE: Rows = {
    **JOB,
    "training_feed_last_update_timestamp_seconds": run_sample(NOW - 4, rank="0"),
    "training_phase_active_since_timestamp_seconds": run_sample(NOW - 4.05, rank="0"),
}
ON_A_GPU: Rows = {
    **JOB,
    "gpu_up": [({"gpu": str(rank), "uuid": f"GPU-{rank}"}, 1.0) for rank in range(2)],
    "training_rank_info": run_sample(1.0, rank="0", gpu="1", uuid="GPU-1"),
}
GAPS: Rows = {
    "loss_window_samples": run_sample(3.0, rank="0") + run_sample(0.0, rank="1"),
    "loss_window_mean": run_sample(1.5, rank="0"),
}
NO_JOB = (
    "1.2.3",
    "node7",
    "ready",
    "up 90 s",
    "/dev/shm/x",
    "No job has recorded anything yet",
    "GPUs No GPU.",
)
RUN_POSITION = (
    "model llama",
    "step 250 of 1,000",
    "25 %",
    "2.0 s",
    "about 25 min left",
    "90 %",
    "data_stall 60 s",
    "steps per second 2",
)
NOTHING_SAVED = ("goodput, committed 0 % no save yet", "goodput, if saved 85 % if all work were saved now")


@pytest.mark.parametrize(
    ("rows", "history", "shown", "not_shown"),
    [
        pytest.param({}, None, NO_JOB, (), id="no job"),
        pytest.param(JOB, HISTORY, RUN_POSITION, (), id="a run"),
        pytest.param(
            {"training_feed_alive": run_sample(1.0, rank="0")},
            None,
            ("night Ranks (1)",),
            ("loss", "goodput"),
            id="no data",
        ),
        pytest.param(IN_A_PHASE, None, ("forward 50 ms", "3.0 s ago"), ("worker",), id="a rank in a phase"),
        pytest.param(
            UNSAVED, HISTORY, (*NOTHING_SAVED, "steps per second 2"), (), id="before the first save"
        ),
        pytest.param(
            UNSAVED | {"training_checkpoint_last_success_timestamp_seconds": run_sample(NOW - 5)},
            None,
            ("goodput, committed 0 %",),
            ("no save yet",),
            id="after the first save",
        ),
        pytest.param(
            UNSAVED | {"training_run_state": run_sample(1.0, state="hung")},
            HISTORY,
            ("night hung",),
            ("steps per second", "if saved", "loss"),
            id="a hung run has no rates and no loss",
        ),
        pytest.param(ON_A_GPU, None, ("GPU rank state 0 up 1 0 up",), (), id="a rank on a GPU"),
        pytest.param(
            GAPS,
            None,
            ("loss_window_mean 1.5 no data on 1 of 2", "1 with gaps"),
            (),
            id="a statistic with gaps",
        ),
    ],
)
def test_the_page_shows_known_values_and_omits_unknown_ones(
    rows: Rows, history: History | None, shown: tuple[str, ...], not_shown: tuple[str, ...]
) -> None:
    page_text = status_page(rows, history=history).visible_text

    assert [text for text in shown if text not in page_text] == []
    assert [text for text in not_shown if text in page_text] == []


def test_the_remaining_time_includes_the_waits_between_the_steps() -> None:
    def slow_loader(tick: int) -> Rows:  # a step of 0.25 s every 2 s, after a start of 60 s
        count = max(0, tick - 12) * 5 // 2
        return step_durations(count, 0.25 * count) | executed_steps(count)

    page_text = status_page(JOB, history=history_of(33, slow_loader)).visible_text

    assert "step 250 of 1,000 · 25 % · about 25 min left at this pace" in page_text


def test_the_remaining_time_is_at_the_pace_of_the_current_attempt() -> None:
    history = history_of(
        40, lambda tick: executed_steps(50.0 * tick if tick < 20 else 950.0 + 2.5 * (tick - 19))
    )
    attempt = {"training_attempt_start_timestamp_seconds": run_sample(NOW - 5 * 19)}

    assert "about 25 min left" in status_page(JOB | attempt, history=history).visible_text
    assert "about 25 min left" not in status_page(JOB, history=history).visible_text


def test_a_microsecond_without_a_save_is_shown_as_no_time_at_risk() -> None:
    page_text = status_page(JOB | {"training_uncommitted_seconds": run_sample(6.97e-6)}).visible_text

    assert "at risk, unsaved 0 s" in page_text


CRASHED: Rows = {
    "training_run_state": run_sample(1.0, state="lost"),
    "training_run_state_since_timestamp_seconds": run_sample(NOW - 30),
    "training_run_outcome_info": run_sample(
        1.0, outcome="lost", reason="inferred: the process was killed or crashed"
    ),
    "training_feed_alive": run_sample(0.0, rank="0") + run_sample(0.0, rank="1"),
    "training_feed_last_update_timestamp_seconds": run_sample(NOW - 30, rank="1"),
    "training_rank_last_exit_timestamp_seconds": [
        ({"run": "night", "rank": "1", "reason": "signal SIGKILL"}, NOW - 30),
        ({"run": "night", "rank": "0", "reason": "exit status 1, RuntimeError"}, NOW - 29),
    ],
    "training_uncommitted_seconds": run_sample(40.0),
    "training_checkpoint_last_step": run_sample(230.0),
    "training_cost_total": run_sample(20.0, currency="EUR"),
}


def test_the_page_of_a_crashed_run_shows_the_lost_work_and_the_rank_that_ended_first() -> None:
    page_text = status_page(JOB | CRASHED).visible_text

    # 90 % are committed, 6 % are lost time, and 4 % are lost with the crash.
    finding = (
        "Run night ended without a report: rank 1 killed by SIGKILL, then rank 0 exit status 1, RuntimeError; "
        "it has not restarted. 40 s of work are lost (20 steps since the save of step 230)."
    )
    for text in (
        finding,
        "goodput, committed 90 %",
        "lost time 6.0 %",
        "lost with the crash 40 s 20 steps since the save of step 230 4.0 % of the time 0.80 EUR",
    ):
        assert text in page_text
    assert "at risk" not in page_text


def test_a_restart_names_the_rank_and_the_signal() -> None:
    restarts: Rows = {
        "training_restarts_total": run_sample(1.0, reason="signal"),
        "training_run_state": run_sample(1.0, state="ending"),
        "training_rank_last_exit_timestamp_seconds": [
            ({"run": "night", "rank": "1", "reason": "signal SIGKILL"}, NOW - 30),
            ({"run": "night", "rank": "0", "reason": "signal SIGTERM"}, NOW - 29),
        ],
    }
    page = status_page(JOB | restarts)

    assert "restarts 1 killed by a signal: once last exit: rank 1 killed by SIGKILL" in page.visible_text
    assert '<span class="warn">ending</span>' in page.html


def test_the_plots_of_a_run_end_at_its_last_step_during_a_standstill() -> None:
    def values(tick: int) -> Rows:
        count = min(tick, 20)
        tokens = run_sample(500.0 * count, rank="0", mode="train")
        loss = run_sample(2.5 - 0.01 * count, mode="train")
        return step_durations(count, 2.0 * count) | {"training_tokens_total": tokens, "training_loss": loss}

    stalled = {
        "training_run_state": run_sample(1.0, state="stalled"),
        "training_last_progress_timestamp_seconds": run_sample(NOW - 100, rank="0"),
    }
    view = build_view(
        exporter_info(), SampleIndex(families_of(JOB | values(40) | stalled)), history_of(40, values)
    )
    (section,) = run_sections(view, [])

    assert [plot.title for plot in section.plots] == ["loss", "step time", "tokens per second"]
    for run_plot in section.plots:
        times, numbers = run_plot.data.data
        assert numbers[-1] is None
        assert max(time for time, value in zip(times, numbers, strict=True) if time and value) == NOW - 100


def test_rates_name_their_time_range() -> None:
    page_text = status_page(JOB, history=HISTORY).visible_text

    assert "step time 2.0 s last minute steps per second 2 last minute" in page_text


def overdue_step(seconds: float) -> Rows:
    """Return the families of a run with 100 s of unsaved work, whose step is open for a time."""
    return JOB | {
        "training_run_state": run_sample(1.0, state="running"),
        "training_feed_last_update_timestamp_seconds": run_sample(NOW, rank="0"),
        "training_last_progress_timestamp_seconds": run_sample(NOW - seconds, rank="0"),
        "training_step_longest_seconds": run_sample(0.5),
        "training_productive_seconds_total": run_sample(500.0),
        "training_badput_seconds_total": run_sample(200.0, cause="init"),
        "training_wall_seconds_total": run_sample(800.0 + seconds),
        "training_uncommitted_seconds": run_sample(100.0 + seconds),
    }


@pytest.mark.parametrize(
    ("seconds", "shown", "not_shown"),
    [
        (20.0, ("if saved 76 %", "at risk, unsaved 2 min", "lost time 24 %", "loss 2.5"), ("overdue",)),
        (
            200.0,
            ("if saved 60 %", "at risk, unsaved 100 s", "lost time 40 %", "step overdue 3 min"),
            ("loss 2.5",),
        ),
    ],
)
def test_the_time_of_an_overdue_step_is_neither_work_nor_at_risk(
    seconds: float, shown: tuple[str, ...], not_shown: tuple[str, ...]
) -> None:
    page_text = status_page(overdue_step(seconds)).visible_text

    assert [text for text in shown if text not in page_text] == []
    assert [text for text in not_shown if text in page_text] == []


def test_an_ended_run_shows_no_rates_and_no_loss_but_its_totals() -> None:
    final_state = run_sample(1.0, state="finished")
    state_since = {"training_run_state_since_timestamp_seconds": run_sample(NOW - 600)}
    page_text = status_page(
        JOB | {"training_run_state": final_state} | state_since, history=HISTORY
    ).visible_text

    assert "night finished 10 min ago" in page_text
    assert "goodput, committed 90 %" in page_text
    assert not [
        text for text in ("loss 2.5", "steps per second", "step time", "left at") if text in page_text
    ]


def test_a_run_with_saves_of_unknown_time_does_not_show_no_save_yet() -> None:
    rows = UNSAVED | {"training_checkpoints_total": run_sample(14.0, kind="sync", result="ok")}

    assert "no save yet" not in status_page(rows).visible_text


def test_sums_of_a_run_on_several_nodes_are_labeled_as_those_of_this_node() -> None:
    def tokens(tick: int) -> Rows:
        return {"training_tokens_total": run_sample(500.0 * tick, rank="8", mode="train")}

    rows: Rows = {
        "training_feed_alive": run_sample(1.0, rank="8"),
        "training_world_size": run_sample(16.0),
        "training_energy_joules_total": run_sample(5400.0),
    }
    page_text = status_page(rows, history=history_of(3, tokens)).visible_text

    assert "tokens per second (this node) 100 last minute energy (this node) 1.5 Wh" in page_text
    assert "Rank 0 runs on a different node" in page_text


def test_the_gpus_of_two_runs_name_rank_and_run() -> None:
    gpus = [({"gpu": str(rank), "uuid": f"GPU-{rank}"}, 1.0) for rank in range(2)]
    runs = ("day", "night")
    rows: Rows = {
        "gpu_up": [*gpus],
        "training_feed_alive": [({"run": run, "rank": "0"}, 1.0) for run in runs],
        "training_rank_info": [
            ({"run": run, "rank": "0", **gpu}, 1.0) for run, (gpu, _) in zip(runs, gpus, strict=True)
        ],
    }

    assert "0 0 of day up 1 0 of night up" in status_page(rows).visible_text


def test_a_rate_without_some_ranks_names_the_number_of_ranks() -> None:
    def tokens(tick: int) -> Rows:
        return {"training_tokens_total": run_sample(500.0 * tick, rank="0", mode="train")}

    silent: Rows = {"training_feed_last_update_timestamp_seconds": run_sample(NOW - 60, rank="1")}
    page_text = status_page(JOB | silent, history=history_of(3, tokens)).visible_text

    assert "tokens per second (1 of 2 ranks) 100" in page_text
    assert "night 1 of 2 ranks report" in page_text


def test_a_node_without_rank_0_explains_its_part() -> None:
    rows: Rows = {
        "training_feed_alive": run_sample(1.0, rank="8") + run_sample(1.0, rank="9"),
        "training_world_size": run_sample(16.0),
    }
    page_text = status_page(rows).visible_text

    assert "night 2 ranks alive" in page_text
    assert "This node has ranks 8-9 of 16. Rank 0 runs on a different node" in page_text


def test_figure_and_plot_of_the_processors_agree() -> None:
    history = history_of(5, lambda _: {"host_cpu_utilization_ratio": [({}, 0.59)]})
    document = status_page({"host_cpu_utilization_ratio": [({}, 1.0)]}, history=history)

    assert document.visible_text.count("CPU 100 %") == 2
    assert "CPU 59 %" not in document.visible_text


def test_a_machine_without_a_gpu_shows_the_reason() -> None:
    page_text = status_page(
        {}, collector_status(name="gpu", unsupported=("GPUs are not monitored (library_not_found)",))
    ).visible_text

    assert "GPUs No GPU. GPUs are not monitored (library_not_found)" in page_text


def test_a_run_shows_state_and_phases_of_the_last_minute() -> None:
    def phases(tick: int) -> Rows:
        loading = run_sample(1.0 * tick, rank="1", phase="data_loading")
        return {"training_phase_seconds_total": run_sample(3.0 * tick, rank="0", phase="forward") + loading}

    history = history_of(4, lambda tick: phases(tick) | step_durations(10 * tick, 20.0 * tick))
    page_text = status_page(
        {**JOB, "training_run_state": run_sample(1.0, state="running")}, history=history
    ).visible_text

    assert "night running" in page_text
    assert "last minute of all ranks: forward 75 % data_loading 25 %" in page_text
    assert "steps per second 2" in page_text


def test_the_machine_shows_memory_disks_network_and_shared_memory() -> None:
    names = ("network_receive_bytes", "network_transmit_bytes", "disk_read_bytes")
    history = history_of(
        3, lambda tick: {f"host_{name}_total": [({"device": "x"}, 2**20 * 5.0 * tick)] for name in names}
    )
    mounts = [("/", 2.0**40, 2.0**39), ("/data", 2.0**40, 2.0**38), ("/tiny", 4096.0, 0.0)]
    rows: Rows = {
        "host_filesystem_size_bytes": [({"mountpoint": name}, size_bytes) for name, size_bytes, _ in mounts],
        "host_filesystem_avail_bytes": [({"mountpoint": name}, free_bytes) for name, _, free_bytes in mounts],
        "host_shm_size_bytes": [({}, 2.0**30)],
        "host_shm_used_bytes": [({}, 2.0**28)],
        "host_memory_total_bytes": [({}, 2.0**35)],
        "host_memory_available_bytes": [({}, 0.0)],
    }
    page_text = status_page(rows, history=history).visible_text

    assert " memory used 100 % of 32 GiB" in page_text
    assert "fullest disk, /data 75 % of 1 TiB" in page_text
    assert "shared memory used 25 % of 1 GiB" in page_text
    assert "disks, read and written 1 MiB/s network, in and out 2 MiB/s" in page_text


def test_failing_collectors_are_listed_first_with_the_reason() -> None:
    failing = collector_status(name="rapl", success=False, message="permission denied (energy_uj)")
    document = status_page({}, collector_status(unsupported=("no memory controllers",)), failing)

    assert "permission denied (energy_uj)" in document.visible_text
    assert document.visible_text.index("rapl") < document.visible_text.index("no memory controllers")


@given(st.text(max_size=40))
def test_foreign_text_is_escaped(text: str) -> None:
    hostile = f"<script>alert(1)</script>\"'&--><img src=x onerror=y>{text}"
    rows = {
        name: [
            ({label: hostile if label != "mode" else "train" for label in labels}, value)
            for labels, value in samples
        ]
        for name, samples in JOB.items()
    }
    rows["gpu_up"] = [({"gpu": hostile, "uuid": hostile}, 0.0)]
    rows["gpu_info"] = [({"gpu": hostile, "uuid": hostile, "name": hostile}, 1.0)]
    rows["training_rank_info"] = [
        ({"run": hostile, "rank": "", "role": hostile, "node": hostile, "gpu": hostile}, 1.0)
    ]
    rows["training_cost_total"] = [({"run": hostile, "currency": hostile, "kind": hostile}, 1.0)]
    rows["gpu_power_watts"] = [({"gpu": hostile, "uuid": hostile}, 500.0)]
    history = History(interval_seconds=5, clock=lambda: NOW - 5)
    for tick in range(2):
        history.record(5.0 * tick, SampleIndex(families_of(rows)))
    failing_collector = collector_status(name=hostile, success=False, message=hostile)
    document = status_page(
        rows, failing_collector, history=history, node=hostile, not_ready=hostile, feed_directory=hostile
    )

    assert document.tags.count("script") == 2
    assert document.tags.count("figure") == 2
    pages = ["/metrics", "/-/ready", "/-/healthy", "/config", "/runbook"]
    assert document.links == ["data:,", "/runbook#gpulost", *pages]
    assert "img" not in document.tags
    assert not [name for name in document.attribute_names if name.startswith("on")]
    assert "<script>alert(1)</script>" in document.visible_text


def test_many_ranks_are_shortened_to_a_bounded_number_of_rows() -> None:
    rows: Rows = {
        "training_feed_alive": [({"run": "r", "rank": str(rank)}, 1.0) for rank in range(MAX_ROWS + 50)]
    }
    document = status_page(rows)

    assert document.visible_text.count(" alive ") == MAX_UNFOLDED_RANKS + MAX_ROWS
    assert f"and {50 - MAX_UNFOLDED_RANKS} more" in document.visible_text


def test_slow_and_silent_ranks_are_listed_first() -> None:
    ranks = range(64)
    rows: Rows = {
        "training_feed_alive": [({"run": "night", "rank": str(rank)}, 1.0) for rank in ranks],
        "training_rank_compute_seconds": [
            ({"run": "night", "rank": str(rank)}, 0.5 if rank == 47 else 0.2) for rank in ranks
        ],
        "training_feed_last_update_timestamp_seconds": run_sample(NOW - 60, rank="33"),
    }
    table = status_page(rows).visible_text.split("Ranks (64)")[1]

    assert re.findall(r"(\d+) (silent|slow|alive)", table)[:3] == [
        ("33", "silent"),
        ("47", "slow"),
        ("0", "alive"),
    ]
    assert "48 more ranks" in table


def test_a_plot_has_axes_gaps_and_data_for_the_script() -> None:
    points = [(NOW - 1800 + 300 * index, value) for index, value in enumerate([1.0, 2.0, None, 2.0, 1.5])]
    (step_time_plot,) = plot("step time", {"step time": points}, "seconds", NOW, owner="<night>", latest=1.5)
    template = template_environment().from_string(
        '{% import "elements.html" as elements %}{{ elements.plot(step_time_plot) }}'
    )
    html = template.render(step_time_plot=step_time_plot)
    document = Document(html.encode())

    assert "step time 1.5 s 2.0 s 1.5 s 1.0 s 30 min ago 15 min now" in document.visible_text
    path = html.split('class="c0" d="')[1].split('"', maxsplit=1)[0]
    assert "".join(re.findall(r"[ML]", path)) == "MLML"  # moves and lines: the gap splits the line
    assert 'id="step time-&lt;night&gt;"' in html
    assert "[1.0,2.0,null,2.0,1.5]" in html
    assert plot("x", {"x": [(NOW - 5, None), (NOW, 3.0)]}, "", NOW) == []


def test_a_gpu_has_the_color_of_its_line_if_an_earlier_gpu_has_no_line() -> None:
    history = history_of(4, lambda _: {"gpu_power_watts": [({"uuid": "GPU-1"}, 350.0)]})
    html = status_page(ON_A_GPU, history=history).html
    plot_data = json.loads(html.split('id="GPU power-" data-plot=\'')[1].split("'", maxsplit=1)[0])
    svg = html.split('id="GPU power-"')[1].split("</svg>", maxsplit=1)[0]

    assert '<i class="c1"></i>1' in html.replace("\n", "")
    assert re.findall(r'path class="(c\d)"', svg) == ["c1"]
    assert plot_data["names"] == ["GPU 1"]
    assert plot_data["colors"] == [1]


def test_the_plots_of_gpus_end_with_the_numbers_of_the_table_and_a_gap_for_a_lost_gpu() -> None:
    def powers(_: int) -> Rows:
        return {"gpu_power_watts": [({"uuid": "GPU-1"}, 350.0), ({"uuid": "GPU-2"}, 300.0)]}

    rows: Rows = {
        "gpu_up": [({"gpu": "1", "uuid": "GPU-1"}, 1.0), ({"gpu": "2", "uuid": "GPU-2"}, 0.0)],
        "gpu_power_watts": [({"uuid": "GPU-1"}, 610.0)],
    }
    document = status_page(rows, history=history_of(4, powers))
    plot_data = json.loads(document.html.split('id="GPU power-" data-plot=\'')[1].split("'", maxsplit=1)[0])

    assert "610 W" in document.visible_text
    assert [line[-1] for line in plot_data["data"]] == [NOW, 610.0, None]


def test_history_has_gaps_where_a_counter_fell_or_was_missing() -> None:
    clock_seconds = [0.0]
    history = History(interval_seconds=5, clock=lambda: NOW + clock_seconds[0])
    for seconds, tokens in ((0, 0.0), (5, 50.0), (10, None), (15, 100.0), (20, 20.0), (25, 70.0)):
        rows: Rows = (
            {} if tokens is None else {"training_tokens_total": [({"run": "r", "mode": "train"}, tokens)]}
        )
        clock_seconds[0] = seconds
        history.record(clock_seconds[0], SampleIndex(families_of(rows)))

    assert history.compute_rates("tokens", "r") == [
        (NOW + 5, 10.0),
        (NOW + 10, None),
        (NOW + 15, None),
        (NOW + 20, None),
        (NOW + 25, 10.0),
    ]


def test_a_gap_at_the_start_of_the_time_range_adds_nothing_to_the_increase_of_a_counter() -> None:
    def xids(tick: int) -> Rows:
        errors = 5.0 if tick < 55 else 6.0
        return {} if tick == 48 else {"gpu_xid_errors_total": [({"uuid": "GPU-3", "xid": "48"}, errors)]}

    history = history_of(60, xids)
    increase = history.compute_increase("xid", "GPU-3", "48", seconds=5.0 * (59 - 48))

    assert increase is not None
    assert increase.amount == 1.0
    assert increase.first_at == NOW - 25
    assert increase.last_at == NOW - 25


def test_history_of_many_runs_keeps_the_latest_runs() -> None:
    history = History(interval_seconds=5, retention_seconds=500)
    for tick in range(300):
        runs = range(10 * tick, 10 * tick + 10)
        rows: Rows = {"training_loss": [({"run": str(run), "mode": "train"}, 1.0) for run in runs]}
        history.record(5.0 * tick, SampleIndex(families_of(rows)))

    assert [value for _, value in history.read_levels("loss", "2999")][-2:] == [None, 1.0]
    assert history.read_levels("loss", "2300") == []


@pytest.mark.parametrize(
    ("formatted_text", "expected"),
    [
        (duration(0.0021), "2.1 ms"),
        (duration(0.21), "0.21 s"),
        (duration(None), "\N{EN DASH}"),
        (duration(86400 * 9), "9 d"),
        (size(80 * 1024**3), "80 GiB"),
        (size(1010 * 1024), "1010 KiB"),
        (number(999_700.0), "1000k"),
        (number(5130.0, "W"), "5130 W"),
        (number(1.5e9), "1.5G"),
        (number(float("nan")), "\N{EN DASH}"),
        (energy(7.2e6), "2 kWh"),
        (energy(7.2e9), "2 MWh"),
        (energy(36.0), "0.01 Wh"),
        (rank_names([3, 3]), "rank 3"),
        (rank_names([4, 0, 1, 2]), "ranks 0-2, 4"),
    ],
)
def test_numbers_are_formatted_for_people(formatted_text: str, expected: str) -> None:
    assert formatted_text == expected


def test_every_family_of_the_status_page_exists() -> None:
    sources = "".join(path.read_text() for path in (PROJECT / "exporter/status").rglob("*.py"))
    displayed_families = set(re.findall(r'"((?:training|gpu|host|exporter)_[a-z0-9_]+)"', sources))
    metrics_document = (PROJECT / "docs/METRICS.md").read_text()

    assert len(displayed_families) > 30
    assert {name for name in displayed_families if f"`{name}`" not in metrics_document} == set()
