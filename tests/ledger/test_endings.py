"""Why attempts end: what processes say, what others saw, what the machine knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from goodput_support import Watched, a_job, reasons
from ledger_support import Clock, Sidecar

from exporter.feed.runs import End
from exporter.ledger.goodput.run_state import Witnesses


def killed(
    tmp_path: Path,
    witnesses: Witnesses,
    *,
    failure: str = "",
    final: bool = False,
    others: tuple[str, ...] = (),
    others_final: bool = False,
) -> dict[str, float]:
    """Why an attempt ended that was killed in the middle of a step, under these circumstances."""
    sidecar = Sidecar(tmp_path)
    sidecar.collector.sessions.witnesses = witnesses
    first = Watched(sidecar, job=a_job())
    first.job.hold(0.5)
    peers = [Watched(sidecar, rank=rank) for rank in range(1, 1 + len(others))]
    for peer in peers:
        peer.job = a_job()
    first.see()
    for peer, why in zip(peers, others, strict=True):
        peer.job.failure = why
        peer.write(final=others_final).kill()
    first.job.failure = failure
    first.write(final=final)
    return reasons(first.die())


def test_a_process_says_itself_why_it_ends(tmp_path: Path) -> None:
    assert killed(tmp_path, Witnesses(), failure="gpu_memory", final=True) == {"gpu_memory": 1}


def test_another_rank_may_have_been_the_cause(tmp_path: Path) -> None:
    assert killed(tmp_path, Witnesses(), failure="nccl_timeout", others=("gpu", "network")) == {"gpu": 1}


@pytest.mark.parametrize("consequence", ["network", "nccl_timeout", ""])
def test_a_rank_that_died_without_a_word_is_the_cause_of_what_the_others_see(
    tmp_path: Path, consequence: str
) -> None:
    assert killed(tmp_path, Witnesses(), failure=consequence, final=True, others=("",)) == {"signal": 1}


def test_a_rank_that_left_in_order_before_is_the_cause_of_a_lost_connection(tmp_path: Path) -> None:
    ended = killed(tmp_path, Witnesses(), failure="network", final=True, others=("",), others_final=True)

    assert ended == {"exit": 1}


def test_a_process_whose_end_nobody_saw_ended_for_an_unknown_reasons(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path)
    first = Watched(sidecar, job=a_job())
    first.see()
    sidecar.feed.files.clear()
    sidecar.restart()
    page = Watched(sidecar, job=a_job()).see()

    assert reasons(page) == {"unknown": 1}


def test_the_kernel_counts_those_it_kills_for_memory(tmp_path: Path) -> None:
    counts = iter([3.0, 4.0])  # while it lives, and after its end

    assert killed(tmp_path, Witnesses(oom_kills=lambda: next(counts))) == {"oom_kill": 1}


@pytest.mark.parametrize(
    ("status", "expected"), [(-9, "signal"), (137, "signal"), (-2, "user"), (-11, "signal"), (1, "exit")]
)
def test_run_has_seen_the_exit_status(tmp_path: Path, status: int, expected: str) -> None:
    sidecar_time = Clock().wall + 6.0
    end = End(tmp_path / "x", 7, status, sidecar_time)

    assert killed(tmp_path, Witnesses(ends=lambda: [end])) == {expected: 1}


def test_a_shell_around_the_job_passes_on_its_signal_and_nothing_else(tmp_path: Path) -> None:
    time = Clock().wall + 6.0
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    shell, launcher = End(tmp_path, 99, 137, time), End(tmp_path, 99, 1, time)

    assert killed(tmp_path / "a", Witnesses(ends=lambda: [shell])) == {"signal": 1}
    assert killed(tmp_path / "b", Witnesses(ends=lambda: [launcher])) == {"signal": 1}


def test_a_process_that_exited_normally_is_believed_unless_its_status_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    failed = Witnesses(ends=lambda: [End(tmp_path, 7, 3, Clock().wall + 6.0)])

    assert killed(tmp_path / "a", Witnesses(), final=True) == {}
    assert killed(tmp_path / "b", failed, final=True) == {"exit": 1}


def test_a_machine_that_began_anew_took_the_job_with_it(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path)
    sidecar.collector.sessions.witnesses = Witnesses(machine=("node", "boot-1"))
    first = Watched(sidecar, job=a_job())
    first.see()
    sidecar.feed.files.clear()
    sidecar.restart()
    sidecar.collector.sessions.witnesses = Witnesses(machine=("node", "boot-2"))
    second = Watched(sidecar, job=a_job())
    page = second.see()

    assert reasons(page) == {"host": 1}
    assert reasons(page, "restarts") == {"host": 1}
