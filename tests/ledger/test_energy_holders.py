"""Processes that hold GPUs: pids, lives and GPUs of the processes in the feed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from exporter.collectors.job import JobProcess, ProcessLife
from exporter.ledger.energy.gpu_attribution import ReportedProcess
from exporter.ledger.energy.gpu_holders import GpuHolders
from exporter.ledger.energy.work import WorkUse
from exporter.recording.values import GpuUse, ProcessIdentity

WALL, NOW = 1_700_000_100.0, 100.0
UUIDS = {0: "GPU-11111111-aaaa", 1: "GPU-11111111-bbbb"}


def process(
    *gpus: str,
    pid: int | None = None,
    started: float = 90.0,
    ended: float | None = None,
    used: bool | None = None,
    rank: int | None = 0,
) -> JobProcess:
    identity = ProcessIdentity("ab" * 16, 7, WALL - NOW + started, "a", rank)
    exited = None if ended is None else WALL - NOW + ended
    return JobProcess(identity, ended is None, pid, GpuUse(gpus, used, named=True), exited)


def reported(
    *job: JobProcess, lives: Mapping[int, ProcessLife] | None = None
) -> dict[str, list[ReportedProcess]]:
    holders = GpuHolders()
    holders.update(job, None, WorkUse(), lives or {}, wall=WALL, now=NOW)
    return holders.reported(job, UUIDS, now=NOW)


@pytest.mark.parametrize("name", ["1", "GPU-11111111-bbbb", "GPU-11111111-b"])
def test_a_gpu_in_the_feed_is_found_by_number_and_by_prefix(name: str) -> None:
    assert list(reported(process(name))) == [UUIDS[1]]


@pytest.mark.parametrize("name", ["2", "GPU-11111111", "GPU-", "MIG-11111111-aaaa", "GPU-3"])
def test_an_ambiguous_or_unknown_name_is_no_gpu(name: str) -> None:
    assert reported(process(name)) == {}


def test_a_process_that_was_seen_after_its_exit_only_has_its_pid_by_the_start() -> None:
    lives = {7: ProcessLife(7, 89.5, 91.2)}
    job = [process("0", started=90.0, ended=91.0)]
    holders = GpuHolders()
    holders.update(job, None, WorkUse(), lives, wall=WALL, now=NOW)
    (holder,) = holders.reported(job, UUIDS, now=NOW)[UUIDS[0]]

    assert holders.run_of(7) == "a"
    assert holder.life == lives[7]


def test_another_process_of_the_same_pid_is_not_the_process() -> None:
    lives = {7: ProcessLife(7, 95.0)}
    (holder,) = reported(process("0", started=90.0, ended=91.0), lives=lives)[UUIDS[0]]

    assert holder.life.pid < 0
    assert (holder.life.began, holder.life.ended) == (90.0, 91.0)


def test_a_running_process_without_a_pid_is_in_no_list() -> None:
    (holder,) = reported(process("0"))[UUIDS[0]]

    assert not holder.listable


@pytest.mark.parametrize(
    "process_without_gpu",
    [process("0", used=False), process("0", rank=None), process("0", started=20.0, ended=30.0)],
)
def test_a_process_that_uses_no_gpu_is_not_reported(process_without_gpu: JobProcess) -> None:
    assert reported(process_without_gpu) == {}
