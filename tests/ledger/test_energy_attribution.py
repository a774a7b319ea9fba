"""Attribution of a GPU's energy to processes, by process lists and by the GPUs in the feed.

The last test checks the peak performance of a process on a MIG instance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from exporter.collectors.job import (
    EnergyPoint,
    EnergyReading,
    GpuListing,
    GpuProcessUse,
    JobProcess,
    ProcessLife,
)
from exporter.ledger.energy.devices import DeviceEnergy
from exporter.ledger.energy.gpu_attribution import (
    NOT_LISTED,
    SHARE_UNKNOWN,
    DividedEnergy,
    GpuAttribution,
    GpuSlice,
    ReportedProcess,
)
from exporter.ledger.energy.gpu_division import GpuDivision, GpuSnapshot
from exporter.ledger.families.run_info import Gpus, GpusByPid
from exporter.recording.values import GpuUse, ProcessIdentity

WATTS = 500.0
Lives = Mapping[int, ProcessLife]


def history(end_seconds: float) -> list[EnergyPoint]:
    """Return the energy counter at each second, at a constant power of WATTS."""
    return [EnergyPoint(float(second), WATTS * second) for second in range(int(end_seconds) + 1)]


def listing(read_at: float, *pids: int) -> GpuListing:
    return GpuListing(
        "GPU-a", read_at, tuple(GpuProcessUse(pid, "0", "GPU-a", 100, {"sm": 0.5}) for pid in pids)
    )


def divide_until(
    gpu: GpuAttribution,
    end_seconds: float,
    lists: Sequence[GpuListing] = (),
    lives: Lives | None = None,
    runs: Mapping[int, str] | None = None,
    reported_processes: Sequence[ReportedProcess] = (),
) -> DividedEnergy:
    """Divide the energy up to a time. *lives* and *runs* are by pid; a reported process brings its own lifetime."""
    all_lives = {**(lives or {}), **{process.life.pid: process.life for process in reported_processes}}
    return gpu.divide(
        history(end_seconds),
        lists,
        all_lives,
        lambda pid: (runs or {}).get(pid, ""),
        reported_processes=reported_processes,
    )


def new_attribution() -> GpuAttribution:
    return GpuAttribution(EnergyPoint(0.0, 0.0))


def attribute_all(
    lists: Sequence[GpuListing], lives: Lives, runs: Mapping[int, str], *, end_seconds: float
) -> list[GpuSlice]:
    """Divide after each process list and at the end, and return all slices."""
    gpu, slices = new_attribution(), list[GpuSlice]()
    for process_list in lists:
        known_lives = {
            pid: life
            if life.ended_at and life.ended_at <= process_list.time
            else ProcessLife(pid, life.started_at)
            for pid, life in lives.items()
        }
        slices += divide_until(gpu, process_list.time, [process_list], known_lives, runs).slices
    return slices + divide_until(gpu, end_seconds, [], lives, runs).slices


def reported_process(
    start_seconds: float,
    end_seconds: float | None,
    *,
    pid: int = 7,
    has_used_cuda: bool = True,
    has_gpu_name: bool = True,
    is_listable: bool = True,
) -> ReportedProcess:
    return ReportedProcess(
        ProcessLife(pid, start_seconds, end_seconds),
        has_used_cuda=has_used_cuda,
        has_gpu_name=has_gpu_name,
        is_listable=is_listable,
    )


def joules(slices: Sequence[GpuSlice], run: str) -> float:
    return sum(gpu_slice.joules for gpu_slice in slices if gpu_slice.run == run)


@pytest.mark.parametrize("end_seconds", [13.4, 14.9, 26.1])
def test_a_run_is_attributed_the_energy_of_its_whole_lifetime(end_seconds: float) -> None:
    lists = [listing(second, *([7] if 3.2 < second < end_seconds else [])) for second in range(2, 30, 2)]
    slices = attribute_all(lists, {7: ProcessLife(7, 3.2, end_seconds)}, {7: "a"}, end_seconds=30)

    assert joules(slices, "a") == pytest.approx(WATTS * (end_seconds - 3.2))
    assert {gpu_slice.method for gpu_slice in slices} == {"exclusive"}


def test_an_ended_run_is_attributed_its_energy_without_another_process_list() -> None:
    slices = attribute_all(
        [listing(2), listing(4, 7)], {7: ProcessLife(7, 3.0, 15.5)}, {7: "a"}, end_seconds=16
    )

    assert joules(slices, "a") == pytest.approx(WATTS * 12.5)


def test_two_runs_share_a_gpu_while_both_are_on_it() -> None:
    lists = [
        listing(second, *([7] if second < 20 else []), *([8] if second > 10 else []))
        for second in range(2, 32, 2)
    ]
    lives = {7: ProcessLife(7, 0.0, 20.0), 8: ProcessLife(8, 10.0)}
    slices = attribute_all(lists, lives, {7: "a", 8: "b"}, end_seconds=30)

    assert joules(slices, "a") == pytest.approx(WATTS * (10 + 5))
    assert joules(slices, "b") == pytest.approx(WATTS * (5 + 10))
    assert {gpu_slice.method for gpu_slice in slices} == {"exclusive", "sm_share"}


def test_a_process_whose_run_is_known_later_has_its_energy_from_the_start() -> None:
    gpu, runs = new_attribution(), dict[int, str]()
    slices = list[GpuSlice]()
    for second in range(2, 22, 2):
        if second == 12:
            runs[7] = "a"
        slices += divide_until(gpu, second, [listing(second, 7)], {7: ProcessLife(7, 1.0)}, runs).slices

    assert joules(slices, "a") == pytest.approx(WATTS * 19)


def test_a_process_is_attributed_no_energy_before_its_first_use_of_the_gpu() -> None:
    lists = [listing(2), listing(4), listing(6, 7), listing(8, 7)]
    slices = attribute_all(lists, {7: ProcessLife(7, 0.0)}, {7: "a"}, end_seconds=8)

    assert joules(slices, "a") == pytest.approx(WATTS * 4)


def test_a_process_listed_only_between_two_divisions_is_attributed_its_energy() -> None:
    lists = [listing(1), listing(2), listing(3, 7), listing(4), listing(5)]
    division = divide_until(new_attribution(), 5, lists, {7: ProcessLife(7, 2.4, 3.6)}, {7: "a"})

    assert joules(division.slices, "a") == pytest.approx(WATTS * 1.2)


def test_a_process_that_the_driver_lists_again_keeps_its_earlier_energy() -> None:
    lists = [listing(1, 7), listing(2), listing(3), listing(4, 7), listing(5, 7)]
    division = divide_until(new_attribution(), 5, lists, {7: ProcessLife(7, 0.0)}, {7: "a"})

    assert joules(division.slices, "a") == pytest.approx(WATTS * (2 + 2))


def test_an_ended_process_that_the_driver_still_lists_is_attributed_no_energy_after_its_end() -> None:
    gpu, slices = new_attribution(), list[GpuSlice]()
    for second in range(2, 602, 2):
        lives = {7: ProcessLife(7, 1.0, 20.0 if second >= 20 else None)}
        slices += divide_until(gpu, second, [listing(second, 7)], lives, {7: "a"}).slices

    assert joules(slices, "a") == pytest.approx(WATTS * 19)


def test_a_process_that_exited_before_a_list_is_attributed_energy_by_the_gpu_in_the_feed() -> None:
    gpu = new_attribution()
    first = divide_until(gpu, 5, [listing(1), listing(2), listing(3), listing(4), listing(5)])
    second = divide_until(
        gpu, 6, [listing(6)], runs={7: "a"}, reported_processes=[reported_process(2.1, 2.9)]
    )
    third = divide_until(gpu, 7, [listing(7)], runs={7: "a"}, reported_processes=[reported_process(2.1, 2.9)])

    assert not first.slices
    assert joules(second.slices, "a") == pytest.approx(WATTS * 0.8)
    assert second.gap_joules == third.gap_joules == {}
    assert not third.slices


def test_a_later_process_with_the_pid_of_an_ended_process_is_attributed_energy() -> None:
    gpu = new_attribution()
    processes = [reported_process(2.1, 2.9), reported_process(6.1, 6.9)]
    divide_until(gpu, 5, [listing(second) for second in range(1, 6)], reported_processes=processes[:1])
    division = divide_until(
        gpu, 8, [listing(second) for second in (6, 7, 8)], runs={7: "b"}, reported_processes=processes[1:]
    )

    assert joules(division.slices, "b") == pytest.approx(WATTS * 0.8)


def test_energy_is_attributed_to_only_one_of_a_listed_and_a_reported_process() -> None:
    lists = [listing(second, *([8] if second >= 3 else [])) for second in (1.0, 2.0, 3.0, 4.0, 5.0)]
    slices = divide_until(
        new_attribution(), 5, lists, {8: ProcessLife(8, 2.5)}, {7: "a", 8: "b"}, [reported_process(2.1, 2.9)]
    ).slices

    assert joules(slices, "a") == pytest.approx(WATTS * 0.4)
    assert joules(slices, "b") == pytest.approx(WATTS * 2.5)


@pytest.mark.parametrize("has_used_cuda", [True, False])
def test_energy_before_the_last_list_without_a_process_is_not_attributed_to_the_process(
    has_used_cuda: bool,
) -> None:
    lists = [listing(second) for second in (1.0, 2.0, 3.0, 4.0, 5.0)]
    division = divide_until(
        new_attribution(),
        5,
        lists,
        runs={7: "a"},
        reported_processes=[reported_process(1.5, 3.9, has_used_cuda=has_used_cuda)],
    )

    assert joules(division.slices, "a") == pytest.approx(WATTS * 0.9 if has_used_cuda else 0.0)
    assert division.gap_joules == ({} if has_used_cuda else {NOT_LISTED: pytest.approx(WATTS * 0.9)})


def test_the_energy_of_a_process_without_a_known_gpu_is_a_gap() -> None:
    lists = [listing(second) for second in (1.0, 2.0, 3.0)]
    division = divide_until(
        new_attribution(),
        3,
        lists,
        runs={7: "a"},
        reported_processes=[reported_process(1.1, 1.9, has_used_cuda=False, has_gpu_name=False)],
    )

    assert not division.slices
    assert division.gap_joules == {NOT_LISTED: pytest.approx(WATTS * 0.8)}


def test_a_process_of_another_pid_namespace_holds_the_gpu_in_the_feed() -> None:
    gpu, slices = new_attribution(), list[GpuSlice]()
    for second in range(1, 13):
        process = reported_process(3.0, 11.5 if second > 11 else None, pid=-1, is_listable=False)
        reported_processes = [process] if second > 6 else []
        pids_of_host = [4242] if 3 < second < 12 else []  # the driver lists the pid of the host
        listings = [listing(second, *pids_of_host)]
        slices += divide_until(
            gpu, second, listings, runs={-1: "a"}, reported_processes=reported_processes
        ).slices
    slices += divide_until(gpu, 14, [listing(14)], runs={-1: "a"}).slices

    assert joules(slices, "a") == pytest.approx(WATTS * 8.5)


def test_without_lists_a_process_holds_the_gpu_in_the_feed() -> None:
    gpu, slices = new_attribution(), list[GpuSlice]()
    for second in range(1, 100):
        end_seconds = 90.5 if second > 90.5 else None
        reported_processes = [reported_process(2.5, end_seconds)] if second > 4 else []
        slices += divide_until(gpu, second, runs={7: "a"}, reported_processes=reported_processes).slices

    assert joules(slices, "a") == pytest.approx(WATTS * 88)


def test_energy_of_two_runs_without_utilization_and_memory_is_a_gap() -> None:
    uses = tuple(GpuProcessUse(pid, "0", "GPU-a") for pid in (7, 8))
    lists = [GpuListing("GPU-a", second, uses) for second in (1.0, 2.0)]
    lives = {pid: ProcessLife(pid, 0.0) for pid in (7, 8)}
    division = divide_until(new_attribution(), 2, lists, lives, {7: "a", 8: "b"})

    assert not division.slices
    assert division.gap_joules == {SHARE_UNKNOWN: pytest.approx(WATTS * 2)}


def test_energy_since_the_last_division_is_complete_after_a_long_pause() -> None:
    gpu, lives, runs = new_attribution(), {7: ProcessLife(7, 0.0)}, {7: "a"}
    divide_until(gpu, 10, [listing(10, 7)], lives, runs)
    division = gpu.divide(history(100)[50:], [listing(100, 7)], lives, lambda _pid: "a")

    assert joules(division.slices, "a") == pytest.approx(WATTS * 90)


def test_a_process_that_the_driver_lists_on_one_gpu_leaves_no_gap_on_another() -> None:
    readings = [
        EnergyReading(
            "gpu",
            uuid,
            "nvml_counter",
            is_measured=True,
            joules=2500.0,
            watts=WATTS,
            time=5.0,
            history=tuple(history(5)),
        )
        for uuid in ("GPU-b", "GPU-a")
    ]
    gpus = [DeviceEnergy(reading) for reading in readings]
    identity = ProcessIdentity("ab" * 16, 7, 1.1, "a", 0)
    job = [JobProcess(identity, is_alive=False, gpus=GpuUse(("0",)), ended_at=4.9)]
    lists = [*(listing(read_at, 7) for read_at in (2.0, 3.0, 4.0)), listing(5.0)]
    other_lists = [GpuListing("GPU-b", process_list.time, ()) for process_list in lists]
    snapshot = GpuSnapshot(
        job,
        listings=[*lists, *other_lists],
        lives={7: ProcessLife(7, 1.0, 4.9)},
        uuids={0: "GPU-b", 1: "GPU-a"},
    )
    attributed_slices = list(GpuDivision().divide(gpus, snapshot, wall=5.0, now=5.0))

    assert joules([attributed.gpu_slice for attributed in attributed_slices], "a") == pytest.approx(
        WATTS * 3.9
    )
    assert [gpu.gap_joules for gpu in gpus] == [{}, {}]


@pytest.mark.parametrize(("is_mig", "name"), [(False, "NVIDIA A100"), (True, "")])
def test_a_process_on_a_mig_instance_does_not_have_the_peak_of_the_gpu(is_mig: bool, name: str) -> None:
    reading = EnergyReading(
        component="gpu",
        device="GPU-a",
        source="nvml_counter",
        is_measured=True,
        joules=1.0,
        watts=1.0,
        time=1.0,
        name="NVIDIA A100",
        is_mig=is_mig,
    )
    gpus = Gpus(use=lambda: listing(1.0, 7).processes, readings=lambda: (reading,))

    assert GpusByPid(gpus).find_gpu_name(7) == name
