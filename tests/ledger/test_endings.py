"""Why attempts end: what processes say, what others saw, what the machine knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from goodput_support import Watched, a_job, reasons
from ledger_support import Clock, Sidecar

from exporter.feed.runs import End
from exporter.ledger.goodput.run_state import Witnesses


def killed(
    directory: Path,
    *,
    failure: str = "",
    final: bool = False,
    others: Sequence[str] = (),
    others_final: bool = False,
    status: int | None = None,
    pid: int = 7,
    oom_kills: Sequence[float] = (),
) -> dict[str, float]:
    """Why an attempt ended that was killed in the middle of a step, under these circumstances."""
    directory.mkdir(exist_ok=True)
    sidecar, counts = Sidecar(directory), iter(oom_kills)
    ends = [] if status is None else [End(directory, pid, status, Clock().wall + 6.0)]
    sidecar.collector.sessions.witnesses = Witnesses(lambda: next(counts, None), lambda: ends)
    first = Watched(sidecar, job=a_job())
    first.job.hold(0.5)
    peers = [Watched(sidecar, rank=rank, job=a_job()) for rank in range(1, 1 + len(others))]
    first.see()
    for peer, why in zip(peers, others, strict=True):
        peer.job.failure = why
        peer.write(final=others_final).kill()
    first.job.failure = failure
    first.write(final=final)
    return reasons(first.die())


@pytest.mark.parametrize("failure", ["network", "nccl_timeout", ""])
def test_a_rank_that_died_without_a_word_is_the_cause_of_what_the_others_see(
    tmp_path: Path, failure: str
) -> None:
    assert killed(tmp_path, failure=failure, final=True, others=[""]) == {"signal": 1}


def test_what_the_processes_say_is_believed_the_most_telling_first(tmp_path: Path) -> None:
    said = killed(tmp_path / "a", failure="gpu_memory", final=True)
    by_others = killed(tmp_path / "b", failure="nccl_timeout", others=["gpu", "network"])
    left_before = killed(tmp_path / "c", failure="network", final=True, others=[""], others_final=True)

    assert [said, by_others, left_before] == [{"gpu_memory": 1}, {"gpu": 1}, {"exit": 1}]


def test_the_kernel_counts_those_it_kills_for_memory(tmp_path: Path) -> None:
    assert killed(tmp_path, oom_kills=[3.0, 4.0]) == {"oom_kill": 1}  # while it lives, and after its end


@pytest.mark.parametrize(
    ("status", "pid", "expected"),
    [
        *((-9, 7, "signal"), (137, 7, "signal"), (-2, 7, "user"), (-11, 7, "signal"), (1, 7, "exit")),
        # A shell or a launcher around it passes on a signal and nothing else.
        *((137, 99, "signal"), (1, 99, "signal")),
    ],
)
def test_run_has_seen_the_exit_status(tmp_path: Path, status: int, pid: int, expected: str) -> None:
    assert killed(tmp_path, status=status, pid=pid) == {expected: 1}


def test_a_process_that_exited_normally_is_believed_unless_its_status_says_otherwise(tmp_path: Path) -> None:
    assert killed(tmp_path / "a", final=True) == {}
    assert killed(tmp_path / "b", final=True, status=3) == {"exit": 1}


@pytest.mark.parametrize(("boot", "expected"), [("boot-1", "unknown"), ("boot-2", "host")])
def test_who_ended_while_nobody_looked_ended_with_the_machine_if_that_began_anew(
    tmp_path: Path, boot: str, expected: str
) -> None:
    sidecar = Sidecar(tmp_path)
    sidecar.collector.sessions.witnesses = Witnesses(machine=("node", "boot-1"))
    Watched(sidecar, job=a_job()).see()
    sidecar.feed.files.clear()
    sidecar.restart()
    sidecar.collector.sessions.witnesses = Witnesses(machine=("node", boot))
    page = Watched(sidecar, job=a_job()).see()

    assert reasons(page) == reasons(page, "restarts") == {expected: 1}
