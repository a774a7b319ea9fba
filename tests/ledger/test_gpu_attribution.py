"""Attribution of a GPU's energy to processes: from the first to the last second, shared, restarted, unknown at first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from exporter.collectors.job import EnergyPoint, EnergyReading, GpuListing, GpuProcessUse, ProcessLife
from exporter.ledger.energy.gpu_attribution import GpuAttribution, GpuSlice
from exporter.ledger.families.run_info import Gpus, RankDevices

WATTS = 500.0
Lives = Mapping[int, ProcessLife]


def history(until: float) -> list[EnergyPoint]:
    """Return a point each second at constant power."""
    return [EnergyPoint(float(at), WATTS * at) for at in range(int(until) + 1)]


def listing(at: float, *pids: int) -> GpuListing:
    return GpuListing("GPU-a", at, tuple(GpuProcessUse(pid, "0", "GPU-a", 100, {"sm": 0.5}) for pid in pids))


def played(
    lists: Sequence[GpuListing], lives: Lives, runs: Mapping[int, str], *, until: float
) -> list[GpuSlice]:
    """Divide every five seconds, each time by the last list."""
    gpu, found = GpuAttribution(0.0), list[GpuSlice]()
    for each in lists:
        ended = {
            pid: life if life.ended and life.ended <= each.at else ProcessLife(pid, life.began)
            for pid, life in lives.items()
        }
        found += gpu.divide(history(each.at), each, ended, lambda pid: runs.get(pid, ""))
    return found + gpu.divide(history(until), None, lives, lambda pid: runs.get(pid, ""))


def joules(found: Sequence[GpuSlice], run: str) -> float:
    return sum(each.joules for each in found if each.run == run)


@pytest.mark.parametrize("ended", [13.4, 14.9, 26.1])
def test_a_run_has_the_energy_of_its_whole_life(ended: float) -> None:
    lists = [listing(at, *([7] if 3.2 < at < ended else [])) for at in range(2, 30, 2)]
    found = played(lists, {7: ProcessLife(7, 3.2, ended)}, {7: "a"}, until=30)

    assert joules(found, "a") == pytest.approx(WATTS * (ended - 3.2))
    assert {each.method for each in found} == {"exclusive"}


def test_an_ended_run_gets_its_share_without_another_process_list() -> None:
    found = played([listing(2), listing(4, 7)], {7: ProcessLife(7, 3.0, 15.5)}, {7: "a"}, until=16)

    assert joules(found, "a") == pytest.approx(WATTS * 12.5)


def test_two_runs_share_a_card_while_both_are_on_it() -> None:
    lists = [listing(at, *([7] if at < 20 else []), *([8] if at > 10 else [])) for at in range(2, 32, 2)]
    lives = {7: ProcessLife(7, 0.0, 20.0), 8: ProcessLife(8, 10.0)}
    found = played(lists, lives, {7: "a", 8: "b"}, until=30)

    assert joules(found, "a") == pytest.approx(WATTS * (10 + 5))
    assert joules(found, "b") == pytest.approx(WATTS * (5 + 10))
    assert {each.method for each in found} == {"exclusive", "sm_share"}


def test_a_process_whose_run_is_known_later_has_its_energy_from_the_start() -> None:
    gpu, runs = GpuAttribution(0.0), dict[int, str]()
    found = list[GpuSlice]()
    for at in range(2, 22, 2):
        if at == 12:
            runs[7] = "a"
        found += gpu.divide(
            history(at), listing(at, 7), {7: ProcessLife(7, 1.0)}, lambda pid: runs.get(pid, "")
        )

    assert joules(found, "a") == pytest.approx(WATTS * 19)


def test_a_process_gets_no_energy_from_before_its_arrival_on_the_card() -> None:
    lists = [listing(2), listing(4), listing(6, 7), listing(8, 7)]
    found = played(lists, {7: ProcessLife(7, 0.0)}, {7: "a"}, until=8)

    assert joules(found, "a") == pytest.approx(WATTS * 4)


@pytest.mark.parametrize(("divided", "name"), [(False, "NVIDIA A100"), (True, "")])
def test_a_process_on_a_mig_instance_has_the_peak_of_the_instance(divided: bool, name: str) -> None:
    card = EnergyReading(
        component="gpu", device="GPU-a", source="nvml_counter", measured=True, joules=1.0, watts=1.0, at=1.0,
        name="NVIDIA A100", divided=divided,
    )  # fmt: skip
    gpus = Gpus(use=lambda: listing(1.0, 7).processes, readings=lambda: (card,))

    assert RankDevices(gpus).name(7) == name
