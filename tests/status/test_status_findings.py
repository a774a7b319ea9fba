"""Findings of the status page: sentence, time, rank or GPU, remedy and runbook entry."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from status_support import (
    GPU_3,
    JOB,
    NOW,
    Rows,
    collector_status,
    finding_texts,
    finding_views_of,
    history_of,
    run_sample,
    status_page,
    uncorrected_errors,
    view_of,
)

from exporter.cli.endpoints import hang_of
from exporter.collectors.job import InspectedRun
from exporter.families import Distribution
from exporter.feed.stacks import StackAnswer
from exporter.hangs.collector import HangReport
from exporter.hangs.explanation import Explanation, RankGroup
from exporter.recording.stacks import Frame, ThreadStack
from exporter.status.attention import FindingStarts
from exporter.status.condition import Finding, Match
from exporter.status.conditions import CONDITIONS
from exporter.status.view import Hang, StackFrame, StackGroup


def progress(age_seconds: float, phase: str = "forward") -> Rows:
    """Return the samples of a rank whose last step is some time ago."""
    return {
        "training_last_progress_timestamp_seconds": run_sample(NOW - age_seconds, rank="0"),
        "training_phase_active": run_sample(1.0, rank="0", phase=phase),
    }


def dead_run(state: str) -> Rows:
    return {
        "training_run_state": run_sample(0.0, state="running") + run_sample(1.0, state=state),
        "training_run_state_since_timestamp_seconds": run_sample(NOW - 90),
        "training_run_outcome_info": run_sample(1.0, outcome=state, reason="killed by SIGKILL"),
    }


def long_save(save_seconds: float) -> Rows:
    return {
        "training_phase_active": run_sample(1.0, rank="0", phase="checkpoint_save_sync"),
        "training_phase_active_since_timestamp_seconds": run_sample(NOW - save_seconds, rank="0"),
        "training_checkpoint_duration_seconds": run_sample(Distribution(5, 50.0), kind="sync", part="total"),
    }


RANK_1_ENDED: Rows = {"training_feed_alive": run_sample(1.0, rank="0") + run_sample(0.0, rank="1")}
# An agent without a rank waits for other nodes.
ALL_ENDED: Rows = {
    "training_feed_alive": run_sample(0.0, rank="0")
    + run_sample(0.0, rank="1")
    + run_sample(1.0, role="agent"),
}
SILENT: Rows = {"training_feed_last_update_timestamp_seconds": run_sample(NOW - 60, rank="0")}
OUTDATED_FEED: Rows = {"training_feed_last_update_timestamp_seconds": run_sample(NOW - 600, rank="0")}
SLOW_RANK: Rows = {"training_rank_compute_seconds": run_sample(0.25, rank="0") + run_sample(0.4, rank="1")}
SLOW_RANK_OF_A_STAGE: Rows = {
    "training_feed_alive": [sample for rank in "012" for sample in run_sample(1.0, rank=rank)],
    "training_rank_compute_seconds": run_sample(0.25, rank="0")
    + run_sample(1.0, rank="1")
    + run_sample(1.6, rank="2"),
    "training_rank_info": run_sample(1.0, rank="0", label_stage="first")
    + run_sample(1.0, rank="1", label_stage="last")
    + run_sample(1.0, rank="2", label_stage="last"),
}
SAVING = "Rank 0 of night is still saving a checkpoint; a save usually takes 10 s. for 101 s"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (RANK_1_ENDED, ["Rank 1 of night ended before the other ranks. for 2.0 s"]),
        (ALL_ENDED, []),
        (SILENT, ["The process of rank 0 of night is alive and silent (no new snapshot). for 60 s"]),
        (OUTDATED_FEED, ["The process of rank 0 of night is alive and silent (no new snapshot). for 10 min"]),
        (progress(5000), []),  # a hang is decided by the ledger, not by the page
        (dead_run("failed"), ["Run night failed: killed by SIGKILL; it has not restarted. for 90 s"]),
        (
            dead_run("lost"),
            ["Run night ended without a report: killed by SIGKILL; it has not restarted. for 90 s"],
        ),
        (SLOW_RANK | {"training_rank_info": run_sample(1.0, rank="1", label_stage="last")}, []),
        (
            SLOW_RANK,
            [
                "A step takes 0.4 s of compute time on rank 1 of night, and 0.25 s on the fastest rank. just now"
            ],
        ),
        (
            SLOW_RANK_OF_A_STAGE,
            [
                "A step takes 1.6 s of compute time on rank 2 of night, and 1.0 s on the fastest rank. just now"
            ],
        ),
        (long_save(101.0), [SAVING]),
        (long_save(99.0), []),
        (
            {"training_rank_conflicts": run_sample(1.0, rank="0")},
            ["A second process trains as rank 0 of night. just now"],
        ),
    ],
)
def test_a_problem_of_a_run_is_a_finding_with_a_time(rows: Rows, expected: list[str]) -> None:
    views = finding_views_of({**JOB, **rows})

    assert [f"{finding.text} {finding.time_text.partition(' (')[0]}" for finding in views] == expected


HUNG: Rows = {
    "training_run_state": run_sample(1.0, state="hung"),
    "training_run_state_since_timestamp_seconds": run_sample(NOW - 900),
}


def test_a_hung_run_names_ranks_and_phases_before_the_stacks_are_known() -> None:
    (finding,) = finding_views_of({**JOB, **progress(900), **HUNG})

    assert finding.text == "Run night hangs. Rank 0 in forward."
    assert finding.time_text == "for 15 min (since 1970-01-01 02:31 UTC)"
    assert finding.anchor == "traininghang"


def test_a_hang_is_explained_with_a_fold_of_the_stack_of_each_group() -> None:
    frames = (StackFrame("ShardReader.read", "data.py:40"), StackFrame("<module>", "train.py:9"))
    hang = Hang("Rank 0: read (data.py:40).", (StackGroup("Stack of rank 0: read", 0, frames),), 1200)
    rows = {**JOB, **progress(900), **HUNG}

    assert finding_texts(rows, hangs={"night": hang}) == [
        "Run night hangs at step 1,200. Rank 0: read (data.py:40)."
    ]
    document = status_page(rows, hangs={"night": hang})
    stack = "Stack of rank 0: read Main thread of rank 0, innermost call first"
    assert f"{stack} ShardReader.read data.py:40 <module> train.py:9" in document.visible_text
    assert document.tags.count("li") == 2


@pytest.mark.parametrize(
    ("has_odd_group", "remedy"),
    [
        (True, "Fix the wait of the rank that is listed first"),
        (False, "Check storage, network and GPUs of all ranks"),
    ],
)
def test_the_remedy_of_a_hang_names_a_rank_only_if_a_group_is_odd(
    *, has_odd_group: bool, remedy: str
) -> None:
    hang = Hang("Ranks 0-1: train (t.py:1).", has_odd_group=has_odd_group)

    (finding,) = finding_views_of({**JOB, **progress(900), **HUNG}, hangs={"night": hang})

    assert finding.remedy.startswith(remedy)


def test_the_stack_of_a_group_is_the_one_of_its_first_rank_with_an_answer() -> None:
    frame = Frame("/job/data.py", 40, "ShardReader.read")
    response = StackAnswer("1", "p", 7, NOW, "night", 1, ThreadStack("MainThread", (frame,)))
    group = RankGroup("read", "data.py:40", (0, 1), "data_loading", None, is_in_collective=False)
    explanation = Explanation((group,), is_tie=False, kernel_states={0: "no answer"})
    run = InspectedRun("night", "hung", NOW - 60, 5, ())

    hang = hang_of(HangReport(run, explanation, (), (response,)))

    assert hang.groups == (
        StackGroup("Stack of ranks 0-1: read", 1, (StackFrame("ShardReader.read", "data.py:40"),)),
    )


def test_many_ranks_with_the_same_problem_are_one_finding() -> None:
    ranks = {
        "training_feed_alive": [
            sample for rank in range(64) for sample in run_sample(float(rank < 60), rank=str(rank))
        ]
    }

    assert finding_texts(ranks) == ["Ranks 60-63 of night ended before the other ranks."]


def exit_of_rank_1(reason: str, exited_seconds: float = 30.0) -> Rows:
    """Return the families of a node that has rank 1 of two, whose process exited some time ago and wrote its feed until 30 s ago."""
    return {
        "training_feed_alive": run_sample(0.0, rank="1"),
        "training_rank_info": run_sample(1.0, rank="1", role="trainer"),
        "training_feed_last_update_timestamp_seconds": run_sample(NOW - 30, rank="1"),
        "training_rank_last_exit_timestamp_seconds": run_sample(
            NOW - exited_seconds, rank="1", reason=reason
        ),
        "training_world_size": run_sample(2.0),
    }


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("signal SIGKILL", "killed by SIGKILL"),
        ("inferred: the process was killed or crashed", "killed or crashed, signal unknown"),
        ("exit status 1, RuntimeError", "exit status 1, RuntimeError"),
    ],
)
def test_a_killed_rank_is_urgent_on_its_node_while_rank_0_is_on_another_node(reason: str, text: str) -> None:
    rows = exit_of_rank_1(reason)

    (finding,) = finding_views_of(rows)
    page = status_page(rows)

    assert finding.is_urgent
    assert finding.text.startswith(f"Rank 1 of night ended without completing the training: {text}. ")
    assert finding.time_text.startswith("for 30 s (")
    assert finding.runbook_alert == "TrainingRankEnded"
    assert "night ended early 30 s ago" in page.visible_text
    assert f"trainer ended, {text}" in page.visible_text


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(exit_of_rank_1("signal SIGTERM"), id="stopped"),
        pytest.param(exit_of_rank_1("signal SIGKILL", 500.0), id="an earlier process of the rank"),
    ],
)
def test_a_rank_whose_last_process_did_not_fail_is_not_urgent_on_its_node(rows: Rows) -> None:
    assert finding_texts(rows) == []


def test_a_rank_that_ended_before_the_other_ranks_has_the_signal() -> None:
    rows = (
        JOB
        | RANK_1_ENDED
        | {
            "training_rank_last_exit_timestamp_seconds": run_sample(
                NOW - 2, rank="1", reason="signal SIGKILL"
            )
        }
    )

    assert finding_texts(rows) == ["Rank 1 of night ended before the other ranks: killed by SIGKILL."]


def test_a_run_that_finished_before_its_target_is_a_warning_with_the_steps_that_no_checkpoint_contains() -> (
    None
):
    rows: Rows = JOB | {
        "training_run_state": run_sample(1.0, state="finished"),
        "training_run_state_since_timestamp_seconds": run_sample(NOW - 60),
        "training_checkpoint_last_step": run_sample(240.0),
    }

    (finding,) = finding_views_of(rows)
    text = status_page(rows).visible_text

    assert finding.text == "Run night finished at step 250 of 1,000."
    assert not finding.is_urgent
    assert "night finished 60 s ago before its target" in text
    assert "steps after the last save 10 after step 240, in no reported checkpoint" in text
    assert finding_texts(rows | {"training_step": run_sample(1000.0)}) == []


@pytest.mark.parametrize(("cpu", "text"), [(0.95, "The CPU is full"), (0.3, "Add workers")])
def test_more_workers_are_advised_only_if_the_cpu_is_not_full(cpu: float, text: str) -> None:
    def phases(tick: int) -> Rows:
        waits = run_sample(10.0 * tick, rank="0", phase="data_loading")
        return {"training_phase_seconds_total": waits + run_sample(5.0 * tick, rank="0", phase="forward")}

    history = history_of(61, phases)
    (finding,) = finding_views_of(
        JOB | phases(61) | {"host_cpu_utilization_ratio": [({}, cpu)]}, history=history
    )

    assert finding.remedy.startswith(text)


@pytest.mark.parametrize(("own_cpus", "text"), [(0.1, "Processes outside the run"), (7.5, "The CPU is full")])
def test_a_cpu_that_other_processes_fill_is_not_that_of_the_data_loader(own_cpus: float, text: str) -> None:
    def phases(tick: int) -> Rows:
        waits = run_sample(10.0 * tick, rank="0", phase="data_loading")
        cpu = run_sample(5 * own_cpus * tick, rank="0", role="dataloader", mode="user")
        return {"training_phase_seconds_total": waits, "training_process_cpu_seconds_total": cpu}

    machine: Rows = {
        "host_cpu_utilization_ratio": [({}, 0.99)],
        "host_cpus": [({"kind": "online"}, 8.0)],
    }
    history = history_of(61, phases)
    (finding,) = finding_views_of(JOB | machine, history=history)
    stalled = JOB | machine | {"training_run_state": run_sample(1.0, state="stalled")}

    assert finding.remedy.startswith(text)
    assert [text for text in finding_texts(stalled, history=history) if "waits for data" in text] == []


def test_saves_that_still_fail_name_their_start_the_last_good_step_and_the_work_at_risk() -> None:
    def saves(
        tick: int,
    ) -> Rows:  # a failed save at every second point
        steps = {"training_steps_total": run_sample(10.0 * tick, mode="train")}
        return steps | {
            "training_checkpoints_total": run_sample(float(tick // 2), kind="sync", result="failed")
        }

    history = history_of(12, saves)
    rows = JOB | {
        "training_checkpoint_last_success_timestamp_seconds": run_sample(NOW - 28),
        "training_checkpoint_last_step": run_sample(40.0),
        "training_uncommitted_seconds": run_sample(108.0),
    }
    saved = rows | {"training_checkpoint_last_success_timestamp_seconds": run_sample(NOW - 1)}
    (finding,) = finding_views_of(rows, history=history)

    assert finding.is_urgent
    assert finding.text == (
        "The last 2 saves of run night failed, since 1970-01-01 02:46 UTC. 108 s of work are at risk (210 steps since the save of step 40)."
    )
    assert '<span class="bad">108 s</span>' in status_page(rows, history=history).html
    assert finding_texts(saved, history=history) == ["5 saves of run night failed."]


def test_problems_and_sections_of_live_runs_come_before_those_of_ended_runs() -> None:
    def run(name: str, state: str, since: float) -> list[Rows]:
        return [
            {"training_run_state": [({"run": name, "state": state}, 1.0)]},
            {"training_run_state_since_timestamp_seconds": [({"run": name}, since)]},
        ]

    rows: Rows = {}
    for part in [*run("a", "failed", NOW - 900), *run("b", "failed", NOW - 60), *run("c", "hung", NOW - 600)]:
        for family, samples in part.items():
            rows[family] = rows.get(family, []) + samples
    page = status_page(rows)

    assert [text[:5] for text in finding_texts(rows)] == ["Run c", "Run a", "Run b"]
    assert re.findall('aria-label="([abc])"', page.html) == ["c", "b", "a"]
    assert re.findall('<details id="run-(.)"', page.html) == ["b", "a"]


def test_living_ranks_are_listed_before_ended_ranks() -> None:
    rows: Rows = {"training_feed_alive": [({"run": "a", "rank": "0"}, 0.0), ({"run": "b", "rank": "0"}, 1.0)]}

    assert [rank.run for rank in view_of(rows).ranks] == ["b", "a"]


def saving_ranks(*ranks: str) -> Rows:
    samples = [
        sample for rank in ranks for sample in run_sample(1.0, rank=rank, phase="checkpoint_save_sync")
    ]
    times = [sample for rank in ranks for sample in run_sample(NOW - 101.0, rank=rank)]
    return long_save(0.0) | {
        "training_phase_active": samples,
        "training_phase_active_since_timestamp_seconds": times,
    }


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (("0",), "Rank 0 of night is"),
        (("0", "1", "3"), "Ranks 0-1, 3 of night are"),
        (("",), "A process of night is"),
    ],
)
def test_a_hanging_save_names_one_rank_several_ranks_or_a_process(ranks: tuple[str, ...], names: str) -> None:
    assert finding_texts(saving_ranks(*ranks)) == [
        f"{names} still saving a checkpoint; a save usually takes 10 s."
    ]


@pytest.mark.parametrize(
    "counter",
    [
        pytest.param(uncorrected_errors(2.0), id="ECC errors"),
        pytest.param({"cgroup_memory_events_total": [({"event": "oom_kill"}, 3.0)]}, id="OOM kills"),
        pytest.param(
            {"host_rdma_link_downed_total": [({"device": "mlx5_0", "port": "1"}, 2.0)]}, id="link failures"
        ),
        pytest.param({"training_restarts_total": run_sample(5.0, reason="exit")}, id="restarts"),
        pytest.param(
            {"exporter_energy_gap_seconds_total": [({"component": "gpu", "reason": "lost"}, 500.0)]},
            id="energy gap",
        ),
    ],
)
def test_a_counter_whose_source_is_read_after_the_first_point_adds_no_event_of_the_past(
    counter: Rows,
) -> None:
    late_history = history_of(3, lambda tick: {} if tick == 0 else counter)
    constant_history = history_of(3, lambda _: counter)
    late, constant = (
        [
            (finding.text, finding.is_urgent)
            for finding in finding_views_of(GPU_3 | JOB | counter, history=history)
        ]
        for history in (late_history, constant_history)
    )

    assert late == constant


def checkpoint_room(free_bytes: float) -> Rows:
    return {
        "training_checkpoint_dir_available_bytes": run_sample(free_bytes, path="/ckpt"),
        "training_checkpoint_dir_size_bytes": run_sample(1e13, path="/ckpt"),
    }


def working_set(used_bytes: float) -> Rows:
    return {
        "cgroup_memory_working_set_bytes": [({}, used_bytes)],
        "cgroup_memory_limit_bytes": [({}, 1e10)],
    }


@pytest.mark.parametrize(
    ("rows", "text", "sufficient_ticks"),
    [
        # A save of 5 GB in each half minute, and a job that allocates 1 % of its limit in each half minute.
        (lambda tick: checkpoint_room(1.9e12 - 5e9 * tick), "will be full within four hours", 62),
        (lambda tick: working_set(5.1e9 + 1e8 * tick), "and exceeds it within the hour", 20),
    ],
    ids=["disk", "memory"],
)
def test_a_trend_is_a_finding_only_after_a_sufficient_time(
    rows: Callable[[int], Rows], text: str, sufficient_ticks: int
) -> None:
    def has_finding(ticks: int) -> bool:
        history = history_of(ticks, rows, interval_seconds=30.0)
        return any(text in finding for finding in finding_texts(rows(ticks), history=history))

    assert not has_finding(4)
    assert has_finding(sufficient_ticks)


def nonfinite(minute: int) -> Rows:
    """Return the families of a run that has a loss of NaN in each minute from 28 on."""
    counts: Rows = {"training_nonfinite_total": run_sample(float(max(0, minute - 27)), kind="loss")}
    return (
        JOB
        | {"training_steps_total": run_sample(minute, rank="0", mode="train")}
        | (counts if minute > 27 else {})
    )


def test_a_nan_of_eleven_minutes_ago_has_its_age_and_ends_with_the_run() -> None:
    # The last minute, 39, is a minute ago.
    history = history_of(40, lambda minute: nonfinite(min(minute, 29)), interval_seconds=60.0)
    (finding,) = finding_views_of(JOB, history=history)

    assert finding.text == "Run night has had 2 losses of NaN or infinity."
    assert finding.time_text.startswith("11 min ago (")
    assert finding.is_urgent
    finished: Rows = {
        "training_run_state": run_sample(1.0, state="finished"),
        "training_step": run_sample(1000.0),
    }
    assert finding_views_of(JOB | finished, history=history) == []


NAN_SINCE_STEP_82: Rows = {
    "training_nonfinite_since_timestamp_seconds": run_sample(NOW - 90, kind="loss"),
    "training_nonfinite_since_step": run_sample(82.0, kind="loss"),
    "training_checkpoint_last_step": run_sample(240.0),
    "training_nonfinite_total": run_sample(114.0, kind="loss") + run_sample(3.0, kind="grad"),
}


def test_a_loss_that_is_nan_names_its_first_step_and_the_last_save_before_it() -> None:
    job = {name: samples for name, samples in JOB.items() if name != "training_loss"} | NAN_SINCE_STEP_82

    def past(tick: int) -> Rows:
        saved: Rows = {"training_checkpoint_last_step": run_sample((60.0, 80.0, 100.0)[tick])}
        return JOB | saved if tick < 2 else job | saved

    history = history_of(3, past, interval_seconds=30.0)
    (finding,) = finding_views_of(job, history=history)
    text = status_page(job, history=history).visible_text

    assert finding.is_urgent
    assert finding.text.startswith("Each loss of run night is NaN or infinite since step 82 (")
    assert finding.time_text.startswith("for 90 s (")
    assert finding.remedy.startswith("Return to the last save before it, of step 80, ")
    assert "loss NaN or infinite since step 82 (" in text
    assert "last save before it: step 80 last finite loss: 2.5" in text
    assert "NaN or infinite so far 114 losses, 3 gradient norms" in text
    assert "after the first NaN or infinite loss, of step 82" in text
    assert "includes saves after the first NaN or infinite loss" in text


def test_a_run_that_died_after_its_loss_was_nan_names_the_save_before_the_nan() -> None:
    job = {name: samples for name, samples in JOB.items() if name != "training_loss"} | NAN_SINCE_STEP_82
    dead = job | {"training_run_state": run_sample(1.0, state="lost")}

    def past(tick: int) -> Rows:
        saved: Rows = {"training_checkpoint_last_step": run_sample((60.0, 80.0, 100.0)[tick])}
        return JOB | saved if tick < 2 else job | saved

    history = history_of(3, past, interval_seconds=30.0)
    texts = [finding.text for finding in finding_views_of(dead, history=history)]

    assert any("Each loss was NaN or infinite since step 82 (" in text for text in texts)
    assert any("return to the save of step 80" in text for text in texts)


def test_a_nan_is_not_urgent_when_its_alert_has_ended() -> None:
    history = history_of(60, lambda minute: nonfinite(min(minute, 29)), interval_seconds=60.0)

    assert [finding.is_urgent for finding in finding_views_of(JOB, history=history)] == [False]


def test_a_collector_that_fails_is_a_finding_with_its_reason() -> None:
    failing = collector_status(name="rapl", success=False, message="permission denied (energy_uj)")
    rows: Rows = {"exporter_collector_success": [({"collector": "rapl"}, 0.0)]}

    assert finding_texts(rows, failing) == ["Collector rapl fails: permission denied (energy_uj)."]


def dropped_series(reason: str, count: float) -> Rows:
    return {"exporter_series_dropped_total": [({"family": "loss", "reason": reason}, count)]}


@pytest.mark.parametrize(
    ("reason", "sentence", "remedy"),
    [
        (
            "cap",
            "The metrics page omits series of loss, because it has reached the maximum number of series (cap).",
            "Find the label with many values, often on a Stat of the job; otherwise raise exposition.max_series.",
        ),
        (
            "value",
            "The metrics page omits series of loss, because they are invalid (value).",
            "Correct the Stat or the collector; the exporter's log names the family.",
        ),
    ],
)
def test_dropped_series_are_a_finding_with_the_family_and_the_remedy_of_the_reason(
    reason: str, sentence: str, remedy: str
) -> None:
    history = history_of(4, lambda tick: dropped_series(reason, 2.0 * tick))

    (finding,) = finding_views_of(dropped_series(reason, 8.0), history=history)

    assert finding.text == sentence
    assert finding.remedy == remedy


@pytest.mark.parametrize(
    ("rows", "ranks"),
    [
        ({"host_load1": [({}, 1.0)]}, "without ranks"),
        ({"training_feed_alive": run_sample(1.0, rank="0")}, "for 1 rank"),
        ({"training_feed_alive": JOB["training_feed_alive"]}, "for 2 ranks"),
    ],
)
def test_the_cost_of_the_exporter_names_the_number_of_ranks(rows: Rows, ranks: str) -> None:
    history = history_of(4, lambda tick: {"process_cpu_seconds_total": [({}, 2.5 * tick)]})

    assert finding_texts(rows, history=history) == [f"The exporter uses 50 % of a core {ranks}."]


GPU_LOST_CONDITION = next(condition for condition in CONDITIONS if condition.alert_name == "GpuLost")
LOST_GPU_FINDING = Finding(
    GPU_LOST_CONDITION, Match(("GPU-3",), {"gpu": "GPU 3", "index": "3", "reason": ""})
)


def test_a_condition_without_a_time_starts_when_the_exporter_first_finds_it() -> None:
    starts = FindingStarts()
    for clock_seconds, current in (
        (NOW - 100, []),
        (NOW - 60, [LOST_GPU_FINDING]),
        (NOW - 10, [LOST_GPU_FINDING]),
    ):
        starts.record(clock_seconds, current)

    assert starts.time_text(LOST_GPU_FINDING, NOW).startswith("for 60 s (")


def test_a_condition_found_at_the_start_of_the_exporter_has_a_lower_bound_of_its_age() -> None:
    starts = FindingStarts()
    starts.record(NOW - 60, [LOST_GPU_FINDING])

    assert starts.time_text(LOST_GPU_FINDING, NOW).startswith("for at least 60 s (")


def test_a_condition_that_returns_has_a_new_start() -> None:
    starts = FindingStarts()
    for clock_seconds, current in (
        (NOW - 100, [LOST_GPU_FINDING]),
        (NOW - 60, []),
        (NOW - 20, [LOST_GPU_FINDING]),
    ):
        starts.record(clock_seconds, current)

    assert starts.time_text(LOST_GPU_FINDING, NOW).startswith("for 20 s (")
