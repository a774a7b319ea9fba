"""Which GPUs are watched, under which numbers, and what becomes of one that goes: replays without waiting."""

from __future__ import annotations

import pytest
from gpu_support import DIVIDED, SMALL, Replayed, machine, replay, small, values


def numbers(played: Replayed) -> dict[int, int]:
    return {gpu.index: gpu.number for gpu in played.registry.gpus.values()}


U = "GPU-00000000-0000-0000-0000-00000000000"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,0", {2: 0, 0: 1}),
        (f"{U}3,{U}1", {3: 0, 1: 1}),
        ("1,9,2", {1: 0}),
        ("0,-1,2", {0: 0}),
        ("9", {}),
        ("GPU-12345678-0000", {}),
        ("MIG-12345678-0000", {}),
        (U, {}),  # all of them begin so
        ("-1", {index: index for index in range(4)}),
        ("", {index: index for index in range(4)}),
        ("nonsense", {index: index for index in range(4)}),
        (None, {index: index for index in range(4)}),
    ],
)
def test_gpus_are_numbered_as_the_job_sees_them(visible: str | None, expected: dict[int, int]) -> None:
    played = replay(machine(SMALL.replace("count: 2", "count: 4")), 1, visible=visible)

    assert numbers(played) == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {2: 0, 3: 1}),
        ("0", {2: 0}),
        ("1,0", {3: 0, 2: 1}),
        (f"{U}3", {3: 0}),
        ("3", {2: 0, 3: 1}),
    ],
)
def test_gpus_that_may_not_be_used_are_not_the_jobs(visible: str | None, expected: dict[int, int]) -> None:
    four = SMALL.replace("count: 2", "count: 4")
    kept = "\ntimeline:\n  - {gpus: [0, 1], errors: {nvmlDeviceGetHandleByIndex_v2: NO_PERMISSION}}\n"
    played = replay(machine(four + kept), 400, visible=visible)

    assert numbers(played) == expected
    assert played.farewell == "released"
    assert values(played.families(), "exporter_nvml_errors_total") == {}


def test_the_gpus_of_others_do_not_stand_in_for_one_that_is_gone() -> None:
    four = SMALL.replace("count: 2", "count: 4") + "\ntimeline:\n  - {gpus: [3], removed: true}\n"
    families = replay(machine(four), 10, visible=f"{U}3").families(expected=1)

    assert values(families, "gpu_up") == {}
    assert values(families, "gpu_devices") == {(): 0}
    assert values(families, "gpu_devices_expected") == {(): 1}


def test_an_instance_that_is_visible_brings_its_gpu() -> None:
    uuid = replay(machine(DIVIDED), 6).registry.gpus[1].values["mig"][0]["uuid"]

    assert numbers(replay(machine(DIVIDED), 1, visible=uuid)) == {1: 0}


def test_a_lost_gpu_ends_alone_and_returns_with_its_counters() -> None:
    lost = small("at: 10s, until: 35s, gpus: [1], lost: true")
    during, after = replay(lost, 20), replay(lost, 60)

    assert during.registry.gpus[1].down == "gpu_is_lost"
    assert {labels[0] for labels in values(during.families(), "gpu_power_watts")} == {"0"}
    assert set(values(after.families(), "gpu_up").values()) == {1.0}
    # Tried again every 30 s: lost at 10 s, found at 40 s.
    down = [message["gpus"][1].get("down") for message in after.samples]
    assert (down[9], down[10], down[39], down[40]) == (None, "gpu_is_lost", "gpu_is_lost", None)
    # 100 W, also in the half minute in which nobody could ask.
    assert set(values(after.families(), "gpu_energy_joules_total").values()) == {6000.0}


def test_a_gpu_that_needs_a_reset_says_so() -> None:
    described = small('at: 5s, gpus: [0], errors: {"*": RESET_REQUIRED}')
    families = replay(described, 10).families()

    reset = {labels[0]: number for labels, number in values(families, "gpu_reset_required").items()}
    assert reset == {"0": 1, "1": 0}
    assert {labels[2] for labels in values(families, "gpu_error_info")} == {"reset_required"}


def test_a_gpu_that_was_never_there_is_down_from_the_start() -> None:
    families = replay(small("gpus: [1], lost: true"), 5).families()

    assert [labels for labels, up in values(families, "gpu_up").items() if not up] == [("1", "")]
    assert set(values(families, "gpu_devices").values()) == {1.0}


@pytest.mark.parametrize(
    ("fault", "farewell"),
    [
        ("removed: true, gpus: [1]", "devices_changed"),
        ('driver: "590.44.01"', "lib_rm_version_mismatch"),
        ('errors: {"*": DRIVER_NOT_LOADED}', "driver_not_loaded"),
        ('errors: {"*": UNKNOWN}', "unknown"),
    ],
)
def test_what_only_a_new_process_can_mend_ends_this_one(fault: str, farewell: str) -> None:
    played = replay(small(f"at: 5s, {fault}"), 60)

    assert played.farewell == farewell
    assert len(played.samples) <= 11


def test_other_gpus_are_heard_while_one_is_lost_and_that_one_when_it_is_back() -> None:
    described = small(
        "at: 10s, until: 35s, gpus: [1], xid: [79, 79, 48], lost: true",
        "at: 20s, gpus: [0], xid: [48]",
        "at: 50s, gpus: [0, 1], xid: [31]",
    )

    def xids(seconds: float) -> set[tuple[str, str, float]]:
        found = values(replay(described, seconds).families(), "gpu_xid_errors_total")
        return {(labels[0], labels[2], number) for labels, number in found.items()}

    during, after = xids(30), xids(60)

    assert during == {("1", "79", 2), ("1", "48", 1), ("0", "48", 1)}
    assert after == during | {("0", "31", 1), ("1", "31", 1)}


def test_a_gpu_that_does_not_return_asks_for_a_new_process_in_the_end() -> None:
    played = replay(small("at: 5s, gpus: [1], lost: true"), 400)

    assert played.farewell == "gpu_lost"
    assert 300 < len(played.samples) < 320


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("DRIVER_NOT_LOADED", "driver_not_loaded"),
        ("NO_PERMISSION", "no_permission"),
        ("LIB_RM_VERSION_MISMATCH", "lib_rm_version_mismatch"),
        ("LIBRARY_NOT_FOUND", "library_not_found"),
    ],
)
def test_a_library_that_does_not_come_up_says_why(error: str, reason: str) -> None:
    played = replay(small(f"errors: {{nvmlInitWithFlags: {error}}}"), 5)

    assert played.farewell == reason
    assert values(played.families(), "gpu_nvml_up") == {(): 0.0}


def test_counters_go_with_their_gpu_when_the_ones_before_it_are_gone() -> None:
    four = SMALL.replace("count: 2", "count: 4") + "\ntimeline:\n  - {at: 20s, gpus: [1], removed: true}\n"
    played = replay(machine(four), 19)

    # The process that comes next finds three; NVML counts without gaps.
    for message in replay(machine(four), 10, origin=-21.0).samples:
        played.registry.take_sample({**message, "time": message["time"] + 21.0}, 2)

    energy = {
        labels[1][-1]: number
        for labels, number in values(played.families(), "gpu_energy_joules_total").items()
    }
    assert energy == {"0": 3100.0, "2": 3100.0, "3": 3100.0}
    assert numbers(played) == {0: 0, 1: 1, 2: 2}
