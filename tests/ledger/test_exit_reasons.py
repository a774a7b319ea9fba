"""Reason of the end of a run, from the reports of its processes, of the command `run` and of the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from goodput_support import MonitoredJob, counts_by_reason, job_in_loop
from ledger_support import Clock, SimulatedSidecar

from exporter.feed.runs import ProcessEnd
from exporter.ledger.goodput.attempt import MachineIdentity
from exporter.ledger.goodput.endings import ExitEvidence


def reasons_after_end(
    directory: Path,
    *,
    failure: str = "",
    final: bool = False,
    peer_reasons: Sequence[str] = (),
    peers_are_final: bool = False,
    status: int | None = None,
    pid: int = 7,
    oom_kills: Sequence[float] = (),
) -> dict[str, float]:
    """Return the number of interruptions by reason, after rank 0 has ended during a step. Empty after a normal end.

    Args:
        directory: State directory of a new sidecar.
        failure: Failure that rank 0 reports in its last snapshot.
        final: True if the last snapshot of rank 0 is that of a normal exit.
        peer_reasons: Failure that each further rank reports before it ends.
        peers_are_final: True if the last snapshots of the further ranks are those of normal exits.
        status: Exit status that the command `run` reports, or None without this command.
        pid: Process of the exit status: 7 is rank 0.
        oom_kills: Counts of OOM kills that the kernel reports, one for each reading.
    """
    directory.mkdir(exist_ok=True)
    sidecar, counts = SimulatedSidecar(directory), iter(oom_kills)
    ends = [] if status is None else [ProcessEnd(directory, pid, status, Clock().wall + 6.0)]
    sidecar.collector.endings.evidence = ExitEvidence(lambda: next(counts, None), lambda: ends)
    rank_0 = MonitoredJob(sidecar, job_in_loop())
    rank_0.simulated.hold(0.5)
    peers = [
        MonitoredJob(sidecar, rank=rank, simulated=job_in_loop()) for rank in range(1, 1 + len(peer_reasons))
    ]
    rank_0.write_and_collect()
    for peer, reason in zip(peers, peer_reasons, strict=True):
        peer.simulated.failure = reason
        peer.write(final=peers_are_final)
        peer.kill()
    rank_0.simulated.failure = failure
    rank_0.write(final=final)
    return counts_by_reason(rank_0.die())


@pytest.mark.parametrize("failure", ["network", "nccl_timeout", ""])
def test_a_silently_killed_rank_is_the_cause_of_errors_in_other_ranks(tmp_path: Path, failure: str) -> None:
    # Rank 1 is killed and reports nothing; rank 0 reports the consequence.
    assert reasons_after_end(tmp_path, failure=failure, final=True, peer_reasons=[""]) == {"signal": 1}


def test_a_silently_killed_rank_is_the_cause_although_the_sidecar_restarts_before_the_other_ranks_exit(
    tmp_path: Path,
) -> None:
    sidecar = SimulatedSidecar(tmp_path)
    rank_0 = MonitoredJob(sidecar, job_in_loop())
    rank_0.simulated.hold(0.5)
    peer = MonitoredJob(sidecar, rank=1, simulated=job_in_loop())
    rank_0.write()
    peer.write_and_collect()
    peer.kill()
    sidecar.collect_after(1)
    sidecar.restart()
    rank_0.simulated.failure = "network"
    rank_0.write(final=True)

    assert counts_by_reason(rank_0.die()) == {"signal": 1}


def test_exit_reasons_of_processes_are_ranked_by_evidence(tmp_path: Path) -> None:
    own_report = reasons_after_end(tmp_path / "a", failure="gpu_memory", final=True)
    reports_of_peers = reasons_after_end(
        tmp_path / "b", failure="nccl_timeout", peer_reasons=["gpu", "network"]
    )
    after_normal_exit_of_peer = reasons_after_end(
        tmp_path / "c", failure="network", final=True, peer_reasons=[""], peers_are_final=True
    )

    assert [own_report, reports_of_peers, after_normal_exit_of_peer] == [
        {"gpu_memory": 1},
        {"gpu": 1},
        {"exit": 1},
    ]


def test_an_oom_kill_is_recognized_from_kernel_counters(tmp_path: Path) -> None:
    # The counts during the process, and after its exit.
    assert reasons_after_end(tmp_path / "killed", oom_kills=[3.0, 4.0]) == {"oom_kill": 1}
    assert reasons_after_end(tmp_path / "earlier", oom_kills=[3.0, 3.0]) == {"signal": 1}


@pytest.mark.parametrize(
    ("status", "pid", "expected"),
    [
        *((-9, 7, "signal"), (137, 7, "signal"), (-2, 7, "user"), (-11, 7, "signal"), (1, 7, "exit")),
        # Process 99 launched rank 0. The status 137 passes on SIGKILL. The status 1 is ignored, because a launcher whose rank was killed
        # exits with a positive status.
        *((137, 99, "signal"), (1, 99, "signal")),
    ],
)
def test_the_exit_status_reported_by_the_run_command_decides_the_reason(
    tmp_path: Path, status: int, pid: int, expected: str
) -> None:
    assert reasons_after_end(tmp_path, status=status, pid=pid) == {expected: 1}


def test_a_normal_exit_is_accepted_unless_the_exit_status_contradicts(tmp_path: Path) -> None:
    assert reasons_after_end(tmp_path / "a", final=True) == {}
    assert reasons_after_end(tmp_path / "b", final=True, status=3) == {"exit": 1}


@pytest.mark.parametrize(("boot", "expected"), [("boot-1", "unknown"), ("boot-2", "host")])
def test_processes_that_exited_at_a_reboot_have_the_reason_host(
    tmp_path: Path, boot: str, expected: str
) -> None:
    sidecar = SimulatedSidecar(tmp_path)
    sidecar.collector.endings.evidence = ExitEvidence(machine=MachineIdentity("node", "boot-1"))
    MonitoredJob(sidecar, job_in_loop()).write_and_collect()
    sidecar.feed.files.clear()
    sidecar.restart()
    sidecar.collector.endings.evidence = ExitEvidence(machine=MachineIdentity("node", boot))
    page = MonitoredJob(sidecar, job_in_loop()).write_and_collect()

    assert counts_by_reason(page) == counts_by_reason(page, "restarts") == {expected: 1}
