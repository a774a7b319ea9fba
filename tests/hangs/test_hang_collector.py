"""Collector that requests stacks from the ranks of hanging runs: real request and answer files, and a simulated clock."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest
from waiting import wait_until

from exporter.collectors.job import InspectedRank, InspectedRun
from exporter.feed.stacks import REQUEST, StackAnswer, read_request, write_answer
from exporter.hangs import kernel_state
from exporter.hangs.collector import HangCollector
from exporter.recording.stacks import Frame, StackDetail, ThreadStack

FIRST_PROCESS, SECOND_PROCESS = "a" * 32, "b" * 32


@dataclass
class HangingRun:
    """A hanging run of two ranks in a feed directory."""

    directory: Path
    detail: StackDetail | None = StackDetail.FULL
    clock_seconds: float = 1000.0
    runs: list[InspectedRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        ranks = (InspectedRank(0, FIRST_PROCESS, None), InspectedRank(1, SECOND_PROCESS, None))
        self.runs = [InspectedRun("llama", "hung", 900.0, 1204, ranks)]
        self.collector = HangCollector(
            self.directory,
            lambda: self.runs,
            detail=self.detail,
            monotonic=lambda: self.clock_seconds,
            clock=lambda: self.clock_seconds,
        )

    def series(self, seconds: float = 0.0) -> set[tuple[str, str, str]]:
        """Advance the clock, collect, and return rank, function and location of each series."""
        self.clock_seconds += seconds
        return {
            (sample.labels["rank"], sample.labels["function"], sample.labels["location"])
            for family in self.collector.collect()
            for sample in family.samples
        }

    def respond(self, process: str, rank: int, function: str, line: int, collective_count: int) -> None:
        """Write the answer of a rank that waits in a function of train.py.

        *collective_count* is the number of collectives that the rank has entered.
        """
        request = read_request(str(self.directory))
        assert request is not None
        main = ThreadStack("MainThread", (Frame("/job/train.py", line, function),))
        answer = StackAnswer(
            request.id,
            process,
            1,
            self.clock_seconds,
            "llama",
            rank,
            main,
            collective_counts={"default": collective_count},
        )
        write_answer(str(self.directory), answer)


@pytest.fixture
def hanging_run(tmp_path: Path) -> HangingRun:
    return HangingRun(tmp_path)


def test_a_hang_is_explained_once_all_ranks_have_answered(
    hanging_run: HangingRun, caplog: pytest.LogCaptureFixture
) -> None:
    assert hanging_run.series() == set()
    hanging_run.respond(FIRST_PROCESS, 0, "all_reduce", 88, 1234)
    hanging_run.respond(SECOND_PROCESS, 1, "read_shard", 40, 1233)
    with caplog.at_level(logging.WARNING):
        series = hanging_run.series(1.0)

    assert series == {("0", "all_reduce", "train.py:88"), ("1", "read_shard", "train.py:40")}
    assert [record.getMessage() for record in caplog.records] == [
        (
            "run llama hung for 101 s at step 1,204. Rank 1: read_shard (train.py:40), 1,233 collectives."
            " Rank 0: all_reduce (train.py:88), 1,234 collectives."
        )
    ]


def test_a_rank_without_an_answer_is_explained_after_three_seconds(hanging_run: HangingRun) -> None:
    hanging_run.series()
    hanging_run.respond(FIRST_PROCESS, 0, "all_reduce", 88, 6)

    assert hanging_run.series(1.0) == set()
    assert ("1", "no_answer", "process not visible (in another pid namespace)") in hanging_run.series(2.5)


@pytest.mark.parametrize("seconds_before_answer", [1.0, 61.0], ids=["same request", "next request"])
def test_a_late_answer_replaces_the_missing_answer_in_the_series_and_in_the_log(
    hanging_run: HangingRun, caplog: pytest.LogCaptureFixture, seconds_before_answer: float
) -> None:
    hanging_run.series()
    hanging_run.respond(FIRST_PROCESS, 0, "all_reduce", 88, 6)
    hanging_run.series(4.0)
    hanging_run.series(seconds_before_answer)
    for process, rank, function in ((FIRST_PROCESS, 0, "all_reduce"), (SECOND_PROCESS, 1, "read_shard")):
        hanging_run.respond(process, rank, function, 40, 6)
    series = hanging_run.series(1.0)
    hanging_run.series(61.0)
    hanging_run.series(4.0)  # no rank answers

    assert ("1", "read_shard", "train.py:40") in series
    assert ["Rank 1 did not answer" in record.getMessage() for record in caplog.records] == [True, False]


def test_stacks_of_a_run_are_requested_again_after_a_minute_and_at_most_ten_times(
    hanging_run: HangingRun,
) -> None:
    requests = []
    for _ in range(15):
        hanging_run.series(61.0)
        hanging_run.series(4.0)
        request = read_request(str(hanging_run.directory))
        assert request is not None
        requests.append(request)

    assert len({request.id for request in requests}) == 10
    # The processes of the run log the hang at the first request only.
    assert [request.hang_of for request in requests] == ["llama", *[""] * 14]


def test_the_series_end_with_the_hang(hanging_run: HangingRun) -> None:
    hanging_run.series()
    series_of_hang = hanging_run.series(4.0)
    hanging_run.runs.clear()

    assert series_of_hang
    assert hanging_run.series(1.0) == set()


def test_a_second_hang_of_a_run_is_explained_again(
    hanging_run: HangingRun, caplog: pytest.LogCaptureFixture
) -> None:
    hanging_run.series()
    hanging_run.series(4.0)
    hanging_run.series(4.0)
    initial_count = len(caplog.records)
    hanging_run.runs = [replace(hanging_run.runs[0], since_timestamp=1003.0)]
    hanging_run.series(1.0)
    hanging_run.series(4.0)

    assert initial_count == 1
    assert len(caplog.records) == 2


def report_stalled_then_hang(hanging_run: HangingRun) -> None:
    """Let the collector report the run as stalled, and change the state to hung before the next collection."""
    hanging_run.runs = [replace(hanging_run.runs[0], state="stalled")]
    hanging_run.series()
    hanging_run.series(4.0)
    hanging_run.runs = [replace(hanging_run.runs[0], state="hung")]


def test_a_change_from_stalled_to_hung_is_explained_again(
    hanging_run: HangingRun, caplog: pytest.LogCaptureFixture
) -> None:
    report_stalled_then_hang(hanging_run)
    hanging_run.series(61.0)
    hanging_run.series(4.0)

    assert [record.getMessage().partition(" for ")[0] for record in caplog.records] == [
        "run llama stalled",
        "run llama hung",
    ]


def test_a_late_answer_is_not_logged_as_the_first_report_on_a_changed_state(
    hanging_run: HangingRun, caplog: pytest.LogCaptureFixture
) -> None:
    report_stalled_then_hang(hanging_run)
    hanging_run.respond(FIRST_PROCESS, 0, "read_shard", 40, 6)
    series = hanging_run.series(1.0)
    count_after_late_answer = len(caplog.records)
    hanging_run.series(61.0)
    hanging_run.respond(FIRST_PROCESS, 0, "all_reduce", 88, 6)
    hanging_run.series(4.0)

    assert ("0", "read_shard", "train.py:40") in series
    assert count_after_late_answer == 1
    assert "hung" in caplog.records[1].getMessage()
    assert "all_reduce" in caplog.records[1].getMessage()


def test_a_run_that_alternates_between_hung_and_stalled_is_explained_once_a_minute(
    hanging_run: HangingRun, caplog: pytest.LogCaptureFixture
) -> None:
    request_ids = set()
    for index in range(12):
        state: Literal["hung", "stalled"] = "hung" if index % 2 else "stalled"
        hanging_run.runs = [replace(hanging_run.runs[0], state=state, since_timestamp=900.0 + index / 1e6)]
        hanging_run.series(5.0)
        request = read_request(str(hanging_run.directory))
        assert request is not None
        request_ids.add(request.id)

    assert (len(request_ids), len(caplog.records)) == (1, 1)


def test_reports_are_read_by_another_thread_while_hangs_start_and_end(hanging_run: HangingRun) -> None:
    runs = [replace(hanging_run.runs[0], run=f"run-{index}") for index in range(100)]
    is_done = threading.Event()

    def read_reports() -> int:
        read_count = 0
        while not is_done.is_set():
            hanging_run.collector.reports()
            read_count += 1
        return read_count

    with ThreadPoolExecutor(max_workers=1) as executor:
        read_count = executor.submit(read_reports)
        try:
            for _ in range(100):
                for hanging_run.runs in (runs, []):
                    hanging_run.series()
        finally:
            is_done.set()

        assert read_count.result() > 0


def test_no_stack_is_requested_with_stacks_off(tmp_path: Path) -> None:
    hanging_run = HangingRun(tmp_path, detail=None)

    assert hanging_run.series() == set()
    assert not (tmp_path / REQUEST).exists()


def test_a_stopped_process_is_described_by_its_kernel_state() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: "stopped by a signal" in kernel_state.describe(process.pid))
        process.kill()


def test_an_ended_process_is_described_as_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()

    assert kernel_state.describe(process.pid) == "process has ended"


def test_a_process_that_ends_while_its_state_is_read_is_described_as_ended(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with Path(f"/proc/{process.pid}/task/{process.pid}/stat").open() as open_file:
        process.kill()
        process.wait()
        task = tmp_path / f"{process.pid}" / "task" / f"{process.pid}"
        task.mkdir(parents=True)
        (task / "stat").symlink_to(f"/proc/self/fd/{open_file.fileno()}")  # a read raises ProcessLookupError

        assert kernel_state.describe(process.pid, tmp_path) == "process has ended"
