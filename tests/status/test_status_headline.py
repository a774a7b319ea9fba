"""Status page: the headline, the groups of findings by GPU, run and node, and the findings of late steps and silent ranks."""

from __future__ import annotations

import re

from status_support import (
    JOB,
    NOW,
    Rows,
    finding_views_of,
    history_of,
    run_sample,
    status_page,
    view_of,
)

from exporter.status.attention import FindingStarts, Headline, finding_groups, headline
from exporter.status.conditions import findings
from exporter.status.history import History
from exporter.status.view import Hang

GPU_3 = {"gpu": "3", "uuid": "GPU-3"}
FAULTY_GPU: Rows = JOB | {
    "gpu_up": [(GPU_3, 1.0)],
    "training_rank_info": run_sample(1.0, rank="0", **GPU_3),
    "gpu_xid_last_timestamp_seconds": [({**GPU_3, "xid": "48"}, NOW - 300)],
    "gpu_recovery_action": [(GPU_3, 1.0)],
    "gpu_remapped_rows_pending": [(GPU_3, 1.0)],
    "training_rank_compute_seconds": run_sample(0.2, rank="0") + run_sample(0.4, rank="1"),
}
RUNNING: Rows = {
    "training_run_state": run_sample(1.0, state="running"),
    "training_step_longest_seconds": run_sample(2.0),
}


def headline_of(rows: Rows, history: History | None = None) -> Headline | None:
    view = view_of(rows, history)
    return headline(view, findings(view), FindingStarts())


def test_a_page_without_problems_has_no_headline() -> None:
    assert headline_of(JOB) is None
    assert "Nothing needs attention" in status_page(JOB).visible_text


def test_the_headline_counts_groups_and_names_start_and_gpu() -> None:
    page_headline = headline_of(FAULTY_GPU)

    assert page_headline is not None
    assert page_headline.text == "1 urgent problem since 1970-01-01 02:41 UTC, and 1 warning"
    assert page_headline.details == "Affected: GPU 3 (rank 0 of night)."
    assert page_headline.is_urgent


def test_the_headline_of_warnings_is_not_urgent() -> None:
    page_headline = headline_of(
        JOB | {"training_rank_compute_seconds": FAULTY_GPU["training_rank_compute_seconds"]}
    )

    assert page_headline is not None
    assert page_headline.text == "1 warning"
    assert page_headline.details == "Affected: run night."
    assert page_headline.is_urgent is False


def test_the_headline_has_the_cost_of_the_affected_runs() -> None:
    def cost(tick: int) -> Rows:
        spent = [(0.002, "electricity"), (0.008, "device_time")]
        return {
            "training_cost_total": [
                ({"run": "night", "kind": kind, "currency": "EUR"}, per_second * 5 * tick)
                for per_second, kind in spent
            ]
        }

    page_headline = headline_of(FAULTY_GPU, history_of(13, cost))

    assert page_headline is not None
    assert (
        page_headline.details
        == "Affected: GPU 3 (rank 0 of night); the affected runs cost 36.00 EUR per hour on this node."
    )


def test_all_problems_of_a_gpu_are_in_one_group_with_urgent_findings_first() -> None:
    view = view_of(FAULTY_GPU)
    groups = finding_groups(view, findings(view), FindingStarts())

    assert [(group.title, group.is_urgent, len(group.findings)) for group in groups] == [
        ("GPU 3 (rank 0 of night)", True, 3),
        ("run night", False, 1),
    ]
    assert [finding.is_urgent for finding in groups[0].findings] == [True, True, False]


def test_a_slow_rank_and_a_missing_gpu_are_in_the_group_of_their_gpu() -> None:
    view = view_of(
        FAULTY_GPU
        | {
            "gpu_up": [(GPU_3, 0.0)],
            "gpu_devices": [({}, 7.0)],
            "gpu_devices_expected": [({}, 8.0)],
            "training_rank_compute_seconds": run_sample(0.4, rank="0") + run_sample(0.2, rank="1"),
        }
    )
    groups = finding_groups(view, findings(view), FindingStarts())

    assert [(group.title, len(group.findings)) for group in groups] == [("GPU 3 (rank 0 of night)", 6)]


def test_a_hang_is_in_the_group_of_the_lost_gpu_and_has_the_remedy_of_the_gpu() -> None:
    hung_run: Rows = {
        "training_run_state": run_sample(1.0, state="hung"),
        "training_run_state_since_timestamp_seconds": run_sample(NOW - 900),
    }
    lost_gpu: Rows = {"gpu_up": [(GPU_3, 0.0)], "training_rank_info": run_sample(1.0, rank="0", **GPU_3)}
    view = view_of(JOB | hung_run | lost_gpu)
    (group,) = finding_groups(view, findings(view), FindingStarts())

    assert group.title == "GPU 3 (rank 0 of night)"
    assert [finding.text for finding in group.findings] == [
        "GPU 3 (rank 0 of night) does not answer. It is GPU-3.",
        "Run night hangs: GPU 3 (rank 0 of night) does not answer. Rank 0 in forward.",
    ]
    assert all(finding.remedy.startswith("Drain the node") for finding in group.findings)


def test_the_headline_precedes_the_state_of_the_exporter() -> None:
    page_text = status_page(FAULTY_GPU).visible_text

    assert page_text.index("1 urgent problem") < page_text.index("Exporter ready")


def test_the_table_of_gpus_names_the_faults_of_a_gpu() -> None:
    assert "up Xid 48, recovery requested" in status_page(FAULTY_GPU).visible_text


def test_the_age_of_a_new_problem_has_tenths_of_a_second() -> None:
    view = view_of(FAULTY_GPU)
    current_findings = findings(view)
    starts = FindingStarts()
    starts.record(NOW - 60, [])
    starts.record(NOW - 0.236, current_findings)

    assert any(starts.time_text(finding, NOW).startswith("for 0.2 s (") for finding in current_findings)


def test_an_xid_is_explained() -> None:
    explanations = [finding.text for finding in finding_views_of(FAULTY_GPU)]

    assert "GPU 3 (rank 0 of night) reported Xid 48 (uncorrectable memory error)." in explanations


def late_step_texts(seconds: float, phase: str = "forward", state: str = "running") -> list[str]:
    rows = (
        JOB
        | RUNNING
        | {
            "training_run_state": run_sample(1.0, state=state),
            "training_last_progress_timestamp_seconds": run_sample(NOW - seconds, rank="0"),
            "training_phase_active": run_sample(1.0, rank="0", phase=phase),
        }
    )
    return [finding.text for finding in finding_views_of(rows) if not finding.is_urgent]


def test_a_late_step_is_a_warning_before_the_run_hangs() -> None:
    assert late_step_texts(59) == []
    assert late_step_texts(61) == [
        "A step of run night is late: none has finished for 61 s. Rank 0 in forward."
    ]
    assert late_step_texts(61, state="hung") == []


def test_a_save_and_a_validation_may_take_longer_than_a_step() -> None:
    assert late_step_texts(61, phase="checkpoint_save_sync") == late_step_texts(299, phase="validation") == []
    assert len(late_step_texts(301, phase="validation")) == 1


def test_a_run_with_a_late_step_shows_the_time_since_its_last_step() -> None:
    rows = JOB | RUNNING | {"training_last_progress_timestamp_seconds": run_sample(NOW - 90, rank="0")}

    assert "night running no step for 90 s" in status_page(rows).visible_text


SILENT_RANK: Rows = {
    "training_feed_last_update_timestamp_seconds": run_sample(NOW - 1, rank="0")
    + run_sample(NOW - 60, rank="1"),
    "training_run_state": run_sample(1.0, state="running"),
}


def test_a_silent_rank_is_first_in_the_group_of_its_run_and_names_the_runbook_entry() -> None:
    hung_run = {
        "training_run_state": run_sample(1.0, state="hung"),
        "training_run_state_since_timestamp_seconds": run_sample(NOW - 900),
    }
    view = view_of(JOB | SILENT_RANK | hung_run)
    (group,) = finding_groups(view, findings(view), FindingStarts())
    silent_rank, hang = group.findings

    assert silent_rank.text == "The process of rank 1 of night is alive and silent (no new snapshot)."
    assert silent_rank.alert_name == ""
    assert silent_rank.runbook_alert == "TrainingFeedLost"
    assert silent_rank.anchor == "trainingfeedlost"
    assert hang.is_urgent
    assert hang.alert_name == "TrainingHang"
    assert "/runbook#trainingfeedlost" in status_page(JOB | SILENT_RANK).links


def test_a_silent_rank_is_urgent_if_the_run_makes_no_steps() -> None:
    standstill = {"training_last_progress_timestamp_seconds": run_sample(NOW - 40, rank="0")}
    validation = {"training_phase_active": run_sample(1.0, rank="0", phase="validation")}

    (urgent,) = (finding for finding in finding_views_of(JOB | SILENT_RANK | standstill) if finding.is_urgent)

    assert (
        urgent.text
        == "The process of rank 1 of night is alive and silent (no new snapshot), and run night makes no steps."
    )
    assert not any(finding.is_urgent for finding in finding_views_of(JOB | SILENT_RANK))
    assert not any(
        finding.is_urgent for finding in finding_views_of(JOB | SILENT_RANK | standstill | validation)
    )


STANDSTILL: Rows = {
    "training_feed_last_update_timestamp_seconds": run_sample(NOW - 96, rank="0"),
    "training_last_progress_timestamp_seconds": run_sample(NOW - 96, rank="0"),
    "training_process_state": run_sample(1.0, rank="0", role="trainer", state="stopped"),
    "training_phase_active": run_sample(1.0, rank="0", phase="validation"),
    "training_run_state": run_sample(1.0, state="stalled"),
}


def test_a_standstill_is_before_an_older_loss_that_is_not_finite() -> None:
    nonfinite: Rows = {"training_nonfinite_since_timestamp_seconds": run_sample(NOW - 600, kind="loss")}
    other_run: Rows = {
        "training_nonfinite_since_timestamp_seconds": [({"run": "early", "kind": "loss"}, NOW - 600)],
        "training_run_state": [
            *STANDSTILL["training_run_state"],
            ({"run": "early", "state": "running"}, 1.0),
        ],
    }
    rows = JOB | STANDSTILL | other_run
    view = view_of(rows)

    assert finding_views_of(rows)[0].text.startswith("The process of rank 0 of night is alive and silent")
    assert finding_views_of(JOB | STANDSTILL | nonfinite)[0].is_urgent
    assert [group.title for group in finding_groups(view, findings(view), FindingStarts())] == [
        "run night",
        "run early",
    ]
    assert re.findall('aria-label="(night|early)"', status_page(rows).html) == ["night", "early"]


def test_a_standstill_without_a_price_has_the_lost_gpu_hours_or_rank_hours() -> None:
    hung = JOB | {
        "training_run_state": run_sample(1.0, state="hung"),
        "training_run_state_since_timestamp_seconds": run_sample(NOW - 900),
    }
    gpu = {"training_rank_info": run_sample(1.0, rank="0", **GPU_3)}
    price = {"training_cost_total": run_sample(50.0, kind="device_time", currency="EUR")}

    assert "UTC), 0.50 rank hours lost on this node" in status_page(hung).visible_text
    assert "UTC), 0.25 GPU hours lost on this node" in status_page(hung | gpu).visible_text
    assert "hours lost" not in status_page(hung | price).visible_text


def test_a_rank_of_a_stalled_run_is_not_alive() -> None:
    assert (
        "alive"
        not in status_page(JOB | {"training_run_state": run_sample(1.0, state="stalled")}).visible_text
    )
    assert (
        "no step" in status_page(JOB | {"training_run_state": run_sample(1.0, state="stalled")}).visible_text
    )


def test_a_run_with_ranks_on_other_nodes_does_not_accuse_the_rank_of_this_node() -> None:
    rows = JOB | {"training_feed_alive": run_sample(1.0, rank="0"), "training_world_size": run_sample(2.0)}
    rows["training_feed_last_update_timestamp_seconds"] = run_sample(NOW - 1, rank="0")
    remote = "1 of 2 ranks is not on this node; see the pages of the other nodes."
    hung = rows | {"training_run_state": run_sample(1.0, state="hung")}
    (finding,) = finding_views_of(hung, hangs={"night": Hang("Rank 0: backward (job.py:24).")})

    assert f"holds on this node. Run night: {remote}" in status_page(rows).visible_text
    assert f"{remote} This node has rank 0 of 2" in status_page(hung).visible_text
    assert finding.text == f"Run night hangs. Rank 0: backward (job.py:24). {remote}"
    assert finding.remedy.startswith(
        "Look for ended, silent or waiting ranks on the status pages of the other nodes"
    )


def test_the_page_shows_the_cost_of_the_runs_and_of_the_lost_time_if_a_price_is_set() -> None:
    cost = {"training_cost_total": run_sample(50.0, kind="device_time", currency="EUR")}
    page_text = status_page(JOB | cost).visible_text

    assert "The runs on this node cost 50.00 EUR so far ." in page_text
    assert "lost time 6.0 % 3.00 EUR data_stall 60 s" in page_text
    assert "cost" not in status_page(JOB).visible_text
