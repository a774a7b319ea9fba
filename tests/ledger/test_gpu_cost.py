"""Cost of GPU time: lost GPUs, and time without a sidecar."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from energy_support import EnergyNode, gpu_reading
from ledger_support import Page

from exporter.collectors.job import EnergyReading, GpuProcessUse
from exporter.ledger.energy.options import EnergyOptions

EUR_PER_SECOND = 0.001
OPTIONS = EnergyOptions(currency="EUR", gpu_hour_price=3600 * EUR_PER_SECOND)


class Node(EnergyNode):
    """Machine with a GPU that can be lost, and with a run that can end."""

    def __init__(self, directory: Path) -> None:
        self.is_lost = self.is_free = self.has_ended = False
        super().__init__(directory, options=OPTIONS)

    def readings(self) -> Sequence[EnergyReading]:
        joules = None if self.is_lost else 500.0 * self.clock.monotonic
        return (gpu_reading(joules, self.clock.monotonic),)

    def gpu_use(self) -> Sequence[GpuProcessUse]:
        return () if self.is_lost or self.is_free else super().gpu_use()

    def alive(self) -> set[str]:
        return set() if self.has_ended else super().alive()

    def run_for(self, seconds: int) -> Page:
        """Run a pass every five seconds, and return the last page."""
        for _ in range(seconds // 5):
            self.clock.advance(5.0)
            page = self.collect()
        return page


def charged_seconds(page: Page) -> float | None:
    """Return the GPU time that the run is charged for, or None without a cost."""
    cost = page.get("training_cost_total", run="r", kind="device_time", currency="EUR")
    return None if cost is None else cost / EUR_PER_SECOND


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    node.collect()
    return node


def test_a_lost_gpu_is_charged_while_its_run_lives(node: Node) -> None:
    node.run_for(100)
    node.is_lost = True
    lost_page = node.run_for(200)
    node.has_ended = True

    assert charged_seconds(lost_page) == pytest.approx(300)
    assert charged_seconds(node.run_for(200)) == pytest.approx(300)


def test_a_lost_gpu_that_returns_is_charged_once(node: Node) -> None:
    node.run_for(100)
    node.is_lost = True
    node.run_for(200)
    node.is_lost = False

    assert charged_seconds(node.run_for(100)) == pytest.approx(400)


def test_a_gpu_that_its_run_has_left_is_not_charged_once_it_is_lost(node: Node) -> None:
    node.run_for(100)
    node.is_free = True
    node.run_for(100)
    node.is_lost = True

    assert charged_seconds(node.run_for(200)) == pytest.approx(100)


def test_a_lost_gpu_is_charged_after_a_restart_of_the_sidecar(node: Node) -> None:
    node.run_for(100)
    node.is_lost = True
    node.run_for(100)
    node.restart()

    assert charged_seconds(node.run_for(100)) == pytest.approx(300)


@pytest.mark.parametrize(
    ("outage_seconds", "expected_seconds"),
    [
        (60, 100 + 60 + 100),
        # After an hour, the time is charged from the first pass, which is five seconds after the restart.
        (3600, 100 + 95),
    ],
)
def test_a_short_time_without_a_sidecar_is_charged_to_the_run_that_survives(
    node: Node, outage_seconds: int, expected_seconds: int
) -> None:
    node.run_for(100)
    node.clock.advance(outage_seconds)
    node.restart()

    assert charged_seconds(node.run_for(100)) == pytest.approx(expected_seconds)
