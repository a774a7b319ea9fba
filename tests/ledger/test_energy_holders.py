"""Processes that hold GPUs: pids, lifetimes and GPUs of the processes in the feed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from exporter.collectors.job import JobProcess, ProcessLife
from exporter.ledger.energy.gpu_attribution import ReportedProcess
from exporter.ledger.energy.gpu_holders import GpuHolders
from exporter.ledger.energy.work import WorkSnapshot
from exporter.recording.values import GpuUse, ProcessIdentity

WALL_TIME, MONOTONIC = 1_700_000_100.0, 100.0
UUIDS = {0: "GPU-11111111-aaaa", 1: "GPU-11111111-bbbb"}


def job_process(
    *gpus: str,
    pid: int | None = None,
    started_at: float = 90.0,
    ended_at: float | None = None,
    has_used_cuda: bool | None = None,
    rank: int | None = 0,
) -> JobProcess:
    identity = ProcessIdentity("ab" * 16, 7, WALL_TIME - MONOTONIC + started_at, "a", rank)
    exit_time = None if ended_at is None else WALL_TIME - MONOTONIC + ended_at
    return JobProcess(identity, ended_at is None, pid, GpuUse(gpus, has_used_cuda, named=True), exit_time)


def reported_processes(
    *job: JobProcess, lives: Mapping[int, ProcessLife] | None = None
) -> dict[str, list[ReportedProcess]]:
    holders = GpuHolders()
    holders.update(job, None, WorkSnapshot(), lives or {}, wall=WALL_TIME, now=MONOTONIC)
    return holders.reported_processes(job, UUIDS, now=MONOTONIC)


@pytest.mark.parametrize("name", ["1", "GPU-11111111-bbbb", "GPU-11111111-b"])
def test_a_gpu_in_the_feed_is_found_by_number_and_by_prefix(name: str) -> None:
    assert list(reported_processes(job_process(name))) == [UUIDS[1]]


@pytest.mark.parametrize("name", ["2", "GPU-11111111", "GPU-", "MIG-11111111-aaaa", "GPU-3"])
def test_an_ambiguous_or_unknown_name_matches_no_gpu(name: str) -> None:
    assert reported_processes(job_process(name)) == {}


def test_a_process_first_read_after_its_exit_is_matched_to_a_pid_by_its_start() -> None:
    lives = {7: ProcessLife(7, 89.5, 91.2)}
    job = [job_process("0", started_at=90.0, ended_at=91.0)]
    holders = GpuHolders()
    holders.update(job, None, WorkSnapshot(), lives, wall=WALL_TIME, now=MONOTONIC)
    (holder,) = holders.reported_processes(job, UUIDS, now=MONOTONIC)[UUIDS[0]]

    assert holders.find_run(7) == "a"
    assert holder.life == lives[7]


def test_a_later_process_with_the_same_pid_is_not_matched() -> None:
    lives = {7: ProcessLife(7, 95.0)}
    (holder,) = reported_processes(job_process("0", started_at=90.0, ended_at=91.0), lives=lives)[UUIDS[0]]

    assert holder.life.pid < 0
    assert holder.life.started_at == 90.0
    assert holder.life.ended_at == 91.0


@pytest.mark.parametrize(("started_at", "run"), [(89.5, "a"), (600.0, "")])
def test_a_later_process_with_the_pid_of_an_ended_rank_has_no_run(started_at: float, run: str) -> None:
    holders = GpuHolders()
    holders.update(
        [job_process("0", pid=7)],
        None,
        WorkSnapshot(),
        {7: ProcessLife(7, 89.5)},
        wall=WALL_TIME,
        now=MONOTONIC,
    )
    lives = {7: ProcessLife(7, started_at)}
    holders.update([], None, WorkSnapshot(), lives, wall=WALL_TIME + 1000.0, now=MONOTONIC + 1000.0)

    assert holders.find_run(7) == run


def test_a_running_process_without_a_pid_is_not_listable() -> None:
    (holder,) = reported_processes(job_process("0"))[UUIDS[0]]

    assert not holder.is_listable


@pytest.mark.parametrize(
    "process",
    [
        job_process("0", has_used_cuda=False),
        job_process("0", rank=None),
        job_process("0", started_at=20.0, ended_at=30.0),
    ],
    ids=["without CUDA", "without a rank", "ended 70 s ago"],
)
def test_a_process_that_cannot_hold_its_gpu_is_not_reported(process: JobProcess) -> None:
    assert reported_processes(process) == {}
