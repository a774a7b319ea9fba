"""Shares of runs in the energy of a GPU: one run, two runs at once and in sequence, a free GPU and a lost GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from energy_support import EnergyNode, energy_of, gpu_reading
from ledger_support import Page

from exporter.collectors.job import (
    EnergyPoint,
    EnergyReading,
    GpuListing,
    GpuProcessUse,
    MachineUse,
    ProcessLife,
    RunUse,
)
from exporter.ledger.energy.sources import Sources

RUNS = {7: "a", 8: "b"}
"""Run of each process."""
WATTS = 500.0


class Node(EnergyNode):
    """Machine whose driver lists the processes of the only GPU."""

    def __init__(self, directory: Path) -> None:
        self.pids = [7]
        self.is_lost = False
        self.points: list[EnergyPoint] = []
        super().__init__(directory)

    def sources(self) -> Sources:
        return replace(super().sources(), gpu_listings=self.listings, process_lives=self.lives)

    def readings(self) -> Sequence[EnergyReading]:
        joules = None if self.is_lost else WATTS * self.clock.monotonic
        reading = gpu_reading(joules, self.points[-1].time)
        return (replace(reading, history=() if self.is_lost else tuple(self.points)),)

    def use(self) -> MachineUse | None:
        runs = tuple(RunUse(RUNS[pid], frozenset({pid}), 0.0, 1, 0) for pid in self.pids)
        return MachineUse(self.clock.monotonic, runs, None, 1, None)

    def gpu_use(self) -> Sequence[GpuProcessUse]:
        return tuple(GpuProcessUse(pid, "0", "GPU-a", 100, {"sm": 0.5}) for pid in self.pids)

    def alive(self) -> set[str]:
        return {RUNS[pid] for pid in self.pids}

    def listings(self) -> Sequence[GpuListing]:
        return () if self.is_lost else (GpuListing("GPU-a", self.clock.monotonic, tuple(self.gpu_use())),)

    def lives(self, pids: object) -> dict[int, ProcessLife]:
        return {pid: ProcessLife(pid, 0.0) for pid in self.pids}

    def shares(self, passes: int = 3) -> dict[str, float]:
        """Return the share of each run in the GPU after passes of five seconds."""
        for _ in range(passes):
            self.clock.advance(5.0)
            if not self.is_lost:
                self.points.append(EnergyPoint(self.clock.monotonic, WATTS * self.clock.monotonic))
            page: Page = self.collect()
        shares = {
            run: page.get("training_energy_share_ratio", run=run, component="gpu", device="GPU-a")
            for run in RUNS.values()
        }
        return {run: share for run, share in shares.items() if share is not None}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_only_run_on_a_gpu_has_the_whole_share(node: Node) -> None:
    assert node.shares() == {"a": 1.0}


def test_two_runs_on_a_gpu_have_shares_that_sum_to_one(node: Node) -> None:
    node.pids = [7, 8]

    assert node.shares() == {"a": 0.5, "b": 0.5}


def test_a_run_that_follows_another_on_a_gpu_replaces_its_share(node: Node) -> None:
    node.shares()
    node.pids = [8]

    assert node.shares() == {"b": 1.0}


def test_a_free_gpu_has_no_shares(node: Node) -> None:
    node.shares()
    node.pids = []

    assert node.shares() == {}


@pytest.mark.parametrize("pids", [[7], [7, 8]])
def test_energy_used_while_no_sidecar_was_running_is_attributed_once(node: Node, pids: list[int]) -> None:
    node.pids = pids
    node.shares()
    joules_before = energy_of(node.collect())
    seconds_before = node.clock.monotonic
    node.clock.advance(30.0)
    node.points.clear()  # the readings of the new sidecar start after the restart
    node.restart()
    node.shares(passes=6)

    joules = energy_of(node.collect()) - joules_before
    assert joules == pytest.approx(WATTS * (node.clock.monotonic - seconds_before))


def test_a_gpu_has_no_shares_after_40_seconds_without_a_reading(node: Node) -> None:
    node.shares()
    node.is_lost = True

    assert node.shares(passes=8) == {}
