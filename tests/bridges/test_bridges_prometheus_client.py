"""Bridge to prometheus_client, with the real package: metrics of the job reach the page through the feed."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import PRINT_PAGE, run_job
from program_support import series, sum_by_labels

IMPORT_JOB = "from programs import prometheus_metrics as job\n"


def test_metrics_of_the_job_have_run_and_rank_and_continue_over_a_restart(tmp_path: Path) -> None:
    increment = "requests.labels('/a').inc(4)  # immediately before the exit"
    program = f"{IMPORT_JOB}requests = job.export_every_type(){PRINT_PAGE}{increment}"
    live_page = run_job(tmp_path, program).process.stdout
    ended_page = run_job(tmp_path, program).page

    assert sum_by_labels(live_page, "app_requests_total", run="mine", rank="0", path="/a") == 2.5
    assert sum_by_labels(live_page, "app_queue_depth", rank="0") == 7
    assert sum_by_labels(live_page, "app_own") == 3
    assert sum_by_labels(live_page, "app_build_info", version="1.2") == 1
    assert {
        labels.partition("le=")[2]: count
        for labels, count in series(live_page, "app_took_seconds_bucket").items()
    } == {
        '"0.1",rank="0",run="mine"}': 1,
        '"1.0",rank="0",run="mine"}': 2,
        '"+Inf",rank="0",run="mine"}': 3,
    }
    assert "python_info" not in live_page
    assert "gpu_energy_joules_total{rank" not in live_page
    assert sum_by_labels(ended_page, "app_requests_total", path="/a") == 2 * 6.5
    assert sum_by_labels(ended_page, "app_took_seconds_count") == 6
    assert sum_by_labels(ended_page, "app_took_seconds_sum") == pytest.approx(2 * 5.55)
    assert sum_by_labels(ended_page, "app_size_bytes_sum") == 200
    assert series(ended_page, "app_queue_depth") == {}  # an ended rank has no gauges


def test_a_forked_child_counts_separately_and_a_reset_counter_continues(tmp_path: Path) -> None:
    page = run_job(tmp_path, f"{IMPORT_JOB}job.fork_and_reset_a_counter()").page

    before_fork, of_child, after_reset = 5, 100, 3
    assert sum_by_labels(page, "app_steps_total") == before_fork + of_child + after_reset


def test_a_negative_observation_is_not_a_reset_and_ends_the_sum(tmp_path: Path) -> None:
    page = run_job(tmp_path, f"{IMPORT_JOB}job.observe_negative_values()").page

    assert sum_by_labels(page, "app_reward_count") == 3
    assert sum_by_labels(page, "app_shift_count") == 3
    assert sum_by_labels(page, "app_shift_bucket", le="0.0") == 1
    assert series(page, "app_reward_sum") == series(page, "app_shift_sum") == {}


def test_the_gauges_of_an_unregistered_collector_disappear(tmp_path: Path) -> None:
    first_page = f"gauge = job.export_two_gauges(){PRINT_PAGE}print('unregistered')\n"
    program = f"{IMPORT_JOB}{first_page}job.unregister(gauge){PRINT_PAGE}"
    page_before, _, page_after = run_job(tmp_path, program).process.stdout.partition("unregistered\n")

    assert sum_by_labels(page_before, "app_removed") == 7
    assert sum_by_labels(page_after, "app_kept") == 1
    assert series(page_after, "app_removed") == {}


def test_a_collector_that_raises_or_hangs_affects_only_itself(tmp_path: Path) -> None:
    program = f"{IMPORT_JOB}job.count_beside_a_raising_and_a_hanging_collector()"
    ended_job = run_job(tmp_path, program, check=False)

    assert ended_job.process.stdout == "2\n"
    assert "the collector RaisingCollector of prometheus_client raised" in ended_job.process.stderr
    assert "did not return" in ended_job.process.stderr
    assert sum_by_labels(ended_job.page, "app_steps_total") == 9


@pytest.mark.parametrize("call", ["wait_for_a_slow_first_call", "wait_for_a_slow_second_call"])
def test_a_collector_that_hung_has_no_gauges_although_the_call_has_returned(
    tmp_path: Path, call: str
) -> None:
    page = run_job(tmp_path, f"{IMPORT_JOB}job.{call}(){PRINT_PAGE}").process.stdout

    assert "app_trains" in page
    assert series(page, "app_slow") == {}
