"""Counters of GPUs that are kept: what is withheld when, what a restart goes on from, and when there is one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from gpu_support import QUICK, described, values, watching
from waiting import wait_until

from exporter.cli.wiring import KeptGpus
from exporter.collectors.gpu.collector import GpuCollector
from exporter.collectors.gpu.options import GpuOptions
from exporter.collectors.gpu.supervisor import Supervisor, Timings
from exporter.collectors.job import Keeper, Page, Rows
from exporter.ledger.store import StateStore
from exporter.replay.machines import collector_arguments

ENERGY = "gpu_energy_joules_total"
BUSY = "gpu_utilization_busy_seconds_total"


@contextmanager
def kept(tmp_path: Path, pages: Keeper, counts: Callable[[], bool] = lambda: True) -> Iterator[KeptGpus]:
    arguments = collector_arguments(described(tmp_path, head="shared: true\n"))
    gpus = KeptGpus(GpuCollector(GpuOptions(period=0.1), **arguments, timings=QUICK), pages, counts=counts)
    try:
        yield gpus
    finally:
        gpus.close()


def shown(gpus: KeptGpus, name: str) -> list[float]:
    return list(values(gpus.collect(), name).values())


def test_energy_is_absent_while_another_exporter_counts_and_nothing_else_is(tmp_path: Path) -> None:
    counting: list[bool] = []
    with kept(tmp_path, StateStore(tmp_path), counts=lambda: bool(counting)) as gpus:
        wait_until(lambda: shown(gpus, BUSY))
        before, told = shown(gpus, ENERGY), gpus.collect().unsupported
        counting.append(True)

        assert before == []
        assert any("another exporter on this machine counts" in what for what in told)
        assert len(shown(gpus, ENERGY)) == 2


def test_a_restart_beside_another_exporter_does_not_count_the_time_between(tmp_path: Path) -> None:
    state = StateStore(tmp_path)
    with kept(tmp_path, state) as gpus:
        wait_until(lambda: sum(shown(gpus, ENERGY)) > 5.0)
        last = sum(shown(gpus, ENERGY))
    time.sleep(1.0)  # 200 J, which the other one counts
    counting = [False]
    with kept(tmp_path, state, counts=lambda: counting[0]) as again:
        wait_until(lambda: shown(again, BUSY))
        time.sleep(1.0)  # the replay's counter begins anew, which takes two looks to be believed
        counting[0] = True
        wait_until(lambda: shown(again, ENERGY))

        assert last <= sum(shown(again, ENERGY)) < last + 100.0


def test_counters_that_another_sidecar_keeps_are_taken_over_when_it_has_ended(tmp_path: Path) -> None:
    class Taken(Keeper, Page):
        """A keeper whose page another sidecar keeps for a while."""

        kept, free = StateStore(tmp_path).page("gpu"), False

        def page(self, subject: str, name: str = "") -> Page:
            return self

        def load(self) -> Rows | None:
            return self.kept.load() if self.free else None

        def save(self, rows: Rows) -> None:
            self.kept.save(rows)

    keeper = Taken()
    with kept(tmp_path, keeper) as gpus:
        wait_until(lambda: shown(gpus, "gpu_power_watts"))
        before = shown(gpus, BUSY)
        keeper.free = True
        wait_until(lambda: shown(gpus, BUSY))

    assert before == []


def test_a_long_period_is_no_hang(tmp_path: Path) -> None:
    # The deadline of QUICK is 1.5 s.
    with watching(described(tmp_path), options=GpuOptions(period=3.0)) as gpus:
        wait_until(lambda: values(gpus.collect(), "gpu_power_watts"))
        until = time.monotonic() + 3
        while time.monotonic() < until:
            assert values(gpus.collect(), "gpu_nvml_up") == {(): 1.0}
            time.sleep(0.1)


def test_a_child_that_fails_is_tried_ever_more_seldom() -> None:
    tried: list[float] = []

    def start(*_: object) -> NoReturn:
        tried.append(time.monotonic())
        raise OSError("no memory")

    supervisor = Supervisor(
        start=start,
        take=lambda *_: None,
        change=lambda *_: None,
        timings=Timings(first_backoff=0.3, most_backoff=1.2),
    )
    supervisor.start()
    wait_until(lambda: len(tried) == 5)
    supervisor.stop()

    waits = [later - earlier for earlier, later in itertools.pairwise(tried)]
    for waited, least in zip(waits, (0.3, 0.6, 1.2, 1.2), strict=True):
        assert waited >= least
    assert not supervisor.alive
    assert supervisor.pid is None
