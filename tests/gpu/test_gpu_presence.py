"""Monitored GPUs, their indices, lost GPUs, and families reused between passes: replays on a simulated clock."""

from __future__ import annotations

import threading

import pytest
from gpu_support import (
    MIG_MACHINE,
    ReplayResult,
    label_values,
    replay,
    samples_by_label,
    small_machine,
    values,
    xid_counts,
)

from exporter.collectors.gpu.collector import LATE_SECONDS, GpuCollector
from exporter.collectors.gpu.energy import OUTAGE_SECONDS
from exporter.collectors.gpu.options import expected_devices
from exporter.collectors.gpu.publishing import GpuBlock
from exporter.collectors.gpu.state import GpuRegistry

UUID = "GPU-00000000-0000-0000-0000-00000000000"
ALL_GPUS = {index: index for index in range(4)}
NO_PERMISSION_FOR_TWO_GPUS = "gpus: [0, 1], errors: {nvmlDeviceGetHandleByIndex_v2: NO_PERMISSION}"


def job_indices(result: ReplayResult) -> dict[int, int]:
    """Return the index of each GPU in the job, by its NVML index."""
    return {gpu.index: gpu.job_index for gpu in result.registry.gpus.values()}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,0", {2: 0, 0: 1}),
        (f"{UUID}3,{UUID}1", {3: 0, 1: 1}),
        ("1,9,2", {1: 0}),
        ("0,-1,2", {0: 0}),
        ("9", {}),
        ("GPU-12345678-0000", {}),
        ("MIG-12345678-0000", {}),
        (UUID, {}),  # the common prefix
        ("-1", ALL_GPUS),
        ("", ALL_GPUS),
        ("nonsense", ALL_GPUS),
        (None, ALL_GPUS),
    ],
)
def test_gpus_are_numbered_as_the_job_sees_them(visible: str | None, expected: dict[int, int]) -> None:
    assert job_indices(replay(small_machine(count=4), 1, visible=visible)) == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {2: 0, 3: 1}),
        ("0", {2: 0}),
        ("1,0", {3: 0, 2: 1}),
        (f"{UUID}3", {3: 0}),
        ("3", {2: 0, 3: 1}),
    ],
)
def test_gpus_without_permission_do_not_belong_to_the_job(
    visible: str | None, expected: dict[int, int]
) -> None:
    result = replay(small_machine(NO_PERMISSION_FOR_TWO_GPUS, count=4), 400, visible=visible)

    assert job_indices(result) == expected
    assert result.exit_reason == "detached"
    assert result.values("exporter_nvml_errors_total") == {}


def test_a_missing_gpu_is_not_replaced_by_the_gpu_of_another_job() -> None:
    result = replay(small_machine("gpus: [3], removed: true", count=4), 10, visible=f"{UUID}3")
    families = result.families(expected=1)

    assert values(families, "gpu_up") == {}
    assert values(families, "gpu_devices") == {(): 0}
    assert values(families, "gpu_devices_expected") == {(): 1}


def test_a_visible_instance_includes_its_parent_gpu() -> None:
    uuid = replay(small_machine(MIG_MACHINE), 6).registry.gpus[1].instances[0].uuid

    assert job_indices(replay(small_machine(MIG_MACHINE), 1, visible=uuid)) == {1: 0}


@pytest.mark.parametrize("gpus", [[1], [0, 1]])
def test_instances_of_a_gpu_count_as_one_expected_gpu(gpus: list[int]) -> None:
    registry = replay(small_machine(MIG_MACHINE), 6).registry
    visible = ",".join(instance.uuid for gpu in gpus for instance in registry.gpus[gpu].instances)
    result = replay(small_machine(MIG_MACHINE), 6, visible=visible)
    families = result.families(expected=expected_devices(visible))

    assert visible.count("MIG-") == 2 * len(gpus)
    assert values(families, "gpu_devices") == {(): len(gpus)}
    assert values(families, "gpu_devices_expected") == {(): len(gpus)}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("MIG-GPU-1234/1/0,MIG-GPU-1234/2/0,MIG-GPU-5678/1/0", 2),
        ("MIG-1234,MIG-5678", 1),
        ("0,2,2", 2),
        ("-1", None),
    ],
)
def test_gpus_are_expected_by_name_before_nvml_lists_them(visible: str, expected: int | None) -> None:
    assert expected_devices(visible) == expected


def test_a_lost_gpu_affects_no_other_and_returns_with_its_counters() -> None:
    description = small_machine("at: 10s, until: 35s, gpus: [1], lost: true")
    while_lost, after_return = replay(description, 20), replay(description, 60)

    assert while_lost.registry.gpus[1].failure == "gpu_is_lost"
    assert set(label_values(while_lost.families(), "gpu_power_watts", "gpu")) == {"0"}
    assert set(after_return.values("gpu_up").values()) == {1.0}
    # Retried every 30 s: lost at 10 s, found at 40 s.
    failures = [message["gpus"][1].get("failure") for message in after_return.samples]
    assert failures[9:11] == [None, "gpu_is_lost"]
    assert failures[39:41] == ["gpu_is_lost", None]
    # The GPUs draw 100 W. The energy of the 31 s without an answer is a gap.
    healthy_gpu, lost_gpu = after_return.registry.energies()
    assert healthy_gpu.joules == 6000.0
    assert healthy_gpu.gap_joules == {}
    assert lost_gpu.joules == 2900.0
    assert lost_gpu.gap_joules == {"no_reading": 3100.0}


@pytest.mark.parametrize(
    ("now", "gap_seconds"),
    [
        pytest.param(60.0, {"no_reading": 39.0 - LATE_SECONDS}, id="outage"),
        pytest.param(21.0 + OUTAGE_SECONDS + 0.9 * LATE_SECONDS, {}, id="late reading"),
    ],
)
def test_the_energy_gap_grows_while_no_child_works(now: float, gap_seconds: dict[str, float]) -> None:
    collector = GpuCollector(is_detached=True, monotonic=lambda: now)
    collector.start()
    for message in replay(small_machine(count=1), 21).samples:
        collector.registry.add_sample(message, 1)
    collector.registry.clear_readings()
    (energy,) = collector.energies()
    collector.stop()

    assert energy.joules is None
    assert energy.gap_seconds == gap_seconds


def test_a_gpu_that_needs_a_reset_is_reported() -> None:
    result = replay(small_machine('at: 5s, gpus: [0], errors: {"*": RESET_REQUIRED}'), 10)

    assert samples_by_label(result.families(), "gpu_reset_required", "gpu") == {"0": 1, "1": 0}
    assert label_values(result.families(), "gpu_error_info", "reason") == ["reset_required"]


@pytest.mark.parametrize(
    ("fault", "exit_reason", "sample_counts"),
    [
        ("removed: true, gpus: [1]", "devices_changed", range(12)),
        ('driver: "590.44.01"', "lib_rm_version_mismatch", range(12)),
        ('errors: {"*": DRIVER_NOT_LOADED}', "driver_not_loaded", range(12)),
        ('errors: {"*": UNKNOWN}', "unknown", range(12)),
        ("gpus: [1], lost: true", "gpu_lost", range(300, 320)),  # a lost GPU may return within five minutes
    ],
)
def test_errors_that_need_a_new_process_end_the_child(
    fault: str, exit_reason: str, sample_counts: range
) -> None:
    result = replay(small_machine(f"at: 5s, {fault}"), 400)

    assert result.exit_reason == exit_reason
    assert len(result.samples) in sample_counts


def test_xids_of_a_lost_gpu_and_of_other_gpus_are_counted() -> None:
    description = small_machine(
        "at: 10s, until: 35s, gpus: [1], xid: [79, 79, 48], lost: true",
        "at: 20s, gpus: [0], xid: [48]",
        "at: 50s, gpus: [0, 1], xid: [31]",
    )
    while_lost, after_return = (xid_counts(replay(description, seconds).families()) for seconds in (30, 60))

    assert while_lost == {("1", "79"): 2, ("1", "48"): 1, ("0", "48"): 1}
    assert after_return == while_lost | {("0", "31"): 1, ("1", "31"): 1}


def test_xids_are_counted_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail_to_start)
    result = replay(small_machine("at: 2s, gpus: [0], xid: [31]"), 5, starts_events=True)

    assert result.exit_reason == "detached"
    assert xid_counts(result.families()) == {("0", "31"): 1}


@pytest.mark.parametrize(
    "error", ["DRIVER_NOT_LOADED", "NO_PERMISSION", "LIB_RM_VERSION_MISMATCH", "LIBRARY_NOT_FOUND"]
)
def test_a_failing_library_is_reported_with_the_reason(error: str) -> None:
    result = replay(small_machine(f"errors: {{nvmlInitWithFlags: {error}}}"), 5)

    assert result.exit_reason == error.lower()
    assert result.values("gpu_nvml_up") == {(): 0.0}


def test_counters_stay_with_their_gpu_when_indices_shift() -> None:
    description = small_machine("at: 20s, gpus: [1], removed: true", count=4)
    result = replay(description, 19)

    # The next child process finds three GPUs, whose NVML indices have no gap.
    for message in replay(description, 10, origin=-21.0).samples:
        for entry in message["gpus"]:
            entry["power"]["end_time"] += 21.0
        result.registry.add_sample({**message, "time": message["time"] + 21.0}, 2)

    joules_by_uuid = samples_by_label(result.families(), "gpu_energy_joules_total", "uuid")
    assert joules_by_uuid == {f"{UUID}{index}": 3100.0 for index in (0, 2, 3)}
    assert job_indices(result) == {0: 0, 1: 1, 2: 2}


def test_families_reused_between_passes_equal_newly_built_families() -> None:
    events = (
        "at: 3s, until: 9s, gpus: [1], lost: true",
        "at: 20s, until: 25s, gpus: [0], set: {temperature: null, utilization: 70}",
        "at: 50s, gpus: [1], set: {power: 200000}",
    )
    registry, reused_block = GpuRegistry(), GpuBlock()

    for message in replay(small_machine(*events), 60).samples:
        registry.add_sample(message, 1)
        reason = "hung" if 29 < message["time"] < 32 else ""
        if reason:
            registry.clear_readings(hanging=0)

        assert reused_block.families(registry, reason, {}) == GpuBlock().families(registry, reason, {})


def test_a_family_without_a_new_value_is_the_same_object() -> None:
    registry, block = GpuRegistry(), GpuBlock()
    messages = replay(small_machine(), 12).samples

    for message in messages[:-1]:
        registry.add_sample(message, 1)
    previous_families = {family.name: family for family in block.families(registry, "", {})}
    registry.add_sample(messages[-1], 1)
    families = {family.name: family for family in block.families(registry, "", {})}

    assert families["gpu_memory_total_bytes"] is previous_families["gpu_memory_total_bytes"]
    assert families["gpu_energy_joules"] is not previous_families["gpu_energy_joules"]
