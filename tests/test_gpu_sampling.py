"""What the NVML child makes of a library that misbehaves, lacks things or moves on: replays without waiting."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from gpu_support import SMALL, Replayed, assert_sound, machine, replay, small, values
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.collectors.family import Distribution
from exporter.collectors.nvml.buffers import Ring
from exporter.collectors.nvml.conversions import GarbageError, celsius, count, hertz, ratio, size, watts
from exporter.collectors.nvml.description import UNCHANGED
from exporter.collectors.nvml.fields import throttle_fields
from exporter.collectors.nvml.machine_files import load_machine


def seconds_of(played: Replayed, reason: str) -> float | None:
    found = values(played.families(), "gpu_clocks_event_seconds_total")
    return next(
        (number for labels, number in found.items() if labels[0] == "0" and labels[2] == reason), None
    )


THERMAL = """
timeline:
  - set:
      throttle_sw_power_cap: {idle: 500000000, counter_from: 3000000000}
      throttle_hw_thermal: {idle: 100000000, counter_from: 0}
      power_smoothing: 1
"""


@pytest.mark.parametrize("driver", ["535.129.03", "550.90.07", "580.65.06", "580.82.07", "590.44.01"])
def test_throttle_counters_are_read_under_the_id_of_the_driver(driver: str) -> None:
    played = replay(machine(f'driver: "{driver}"\n{SMALL}{THERMAL}'), 20)

    # Nanoseconds: half a second in each, and a tenth.
    assert seconds_of(played, "sw_power_cap") == pytest.approx(3 + 0.5 * 20)
    assert seconds_of(played, "hw_thermal") == pytest.approx(0.1 * 20)


def test_between_the_two_numberings_nothing_is_asked() -> None:
    played = replay(machine(f'driver: "580.70.01"\n{SMALL}{THERMAL}'), 20)

    assert seconds_of(played, "sw_power_cap") == pytest.approx(13)
    assert seconds_of(played, "hw_thermal") is None


@pytest.mark.parametrize("version", ["", "N/A", "580", "r580.82", "580.x"])
def test_a_version_that_says_nothing_leaves_the_stable_ids(version: str) -> None:
    assert set(throttle_fields(version, details=False)) == {74, 75, 76, 77, 78, 79}


def test_a_counter_of_seconds_that_is_another_metric_is_not_shown() -> None:
    wrong = (
        SMALL
        + """
timeline:
  - {set: {throttle_sw_power_cap: {idle: 40000000000, counter_from: 0}}}
"""
    )
    played = replay(machine(wrong), 20)

    assert seconds_of(played, "sw_power_cap") is None


def test_one_question_without_an_answer_costs_no_other() -> None:
    broken = small(
        """
timeline:
  - errors:
      nvmlDeviceGetPowerUsage: UNKNOWN
      nvmlDeviceGetTemperatureV: NO_PERMISSION
      nvmlDeviceGetTemperature: NO_PERMISSION
      nvmlDeviceGetClockInfo: NOT_SUPPORTED
"""
    )
    played = replay(broken, 20)
    families = played.families()

    assert_sound(families)
    for name in ("gpu_power_watts", "gpu_temperature_celsius", "gpu_clock_hertz"):
        assert values(families, name) == {}
    assert len(values(families, "gpu_utilization_ratio")) == 2
    assert len(values(families, "gpu_energy_joules_total")) == 2
    errors = values(families, "exporter_nvml_errors_total")
    assert errors[("nvmlDeviceGetPowerUsage", "unknown")] == 2 * 21
    assert errors[("nvmlDeviceGetTemperatureV", "no_permission")] == 2  # forbidden: asked once in ten minutes
    assert not any(call == "nvmlDeviceGetClockInfo" for call, _ in errors)


def test_unsupported_failed_forbidden_and_zero_stay_apart() -> None:
    broken = small(
        """
timeline:
  - errors: {nvmlDeviceGetPowerUsage: UNKNOWN, nvmlDeviceGetPerformanceState: NO_PERMISSION}
  - set: {utilization: 0}
"""
    )
    played = replay(broken, 5)
    states = played.samples[0]["cost"]["states"]

    assert states["failed"] == 2
    assert states["forbidden"] == 2
    assert states["unsupported"] > 0
    assert played.readings("utilization")[-1] == 0.0
    assert played.readings("power")[-1] is None


def test_what_is_not_there_is_asked_again_after_ten_minutes() -> None:
    late = small("\ntimeline:\n  - {until: 100s, errors: {nvmlDeviceGetPowerUsage: NOT_SUPPORTED}}\n")
    played = replay(late, 610)

    assert played.readings("power")[-12:] == [None, *[100.0] * 11]
    calls = values(played.families(), "exporter_nvml_calls_total")
    assert calls[("nvmlDeviceGetPowerUsage",)] <= 2 * (1 + 12)  # once, and since it is there


GARBAGE = """
timeline:
  - set:
      utilization: 4294967295
      memory_utilization: 18446744073709551615
      memory_total: 18446744073709551615
      power: 4294967295
      energy: 18446744073709551615
      temperature: 2147483647
      clock_sm: 4294967295
      performance_state: 4
      pcie_generation: 4294967295
      pcie_width: 4294967295
      fans: 4294967295
      nvlinks: 1000000
      ecc_mode: 77
      ecc_corrected_dram: 18446744073709551615
      remapped_correctable: 4294967295
      remapping_pending: 9
      retired_pages_sbe: 0
      recovery_action: 4294967295
      mma_stall: 4000
      edpp_multiplier: nan
      event_reasons: 18446744073709551615
      mig_mode: 4294967295
    fields: {"186": nan, "74": infinity, "82": 999999, "197": infinity, "169": nan, "170": 18446744073709551615}
    gpm: {"1": nan, "2": infinity, "3": -5, "5": 1e300, "10": 4294967295, "248": -1, "249": nan, "60": nan}
"""


def test_garbage_is_absent_and_counted() -> None:
    described = SMALL.replace("gpus:", '    gpm: {"1": 50, "2": 50}\ngpus:') + GARBAGE
    played = replay(machine(described), 70, details=True, per_link=True, video_engines=True)
    families = played.families(per_link=True)

    assert played.farewell == "released"
    assert_sound(families)
    for name in (
        "gpu_utilization_ratio",
        "gpu_power_watts",
        "gpu_energy_joules_total",
        "gpu_temperature_celsius",
        "gpu_clock_hertz",
        "gpu_sm_activity_ratio",
        "gpu_mma_stall_ratio",
        "gpu_recovery_action",
        "gpu_ecc_mode",
    ):
        assert all(labels[-1] == "nvml_power" for labels in values(families, name)), name
    assert set(values(families, "gpu_up").values()) == {1.0}
    assert any(error == "garbage" for _, error in values(families, "exporter_nvml_errors_total"))


@pytest.mark.parametrize("garbage", [0xFFFFFFFFFFFFFFFF, 0xFFFFFFFF, -1])
def test_one_wrong_number_everywhere_is_shown_nowhere(garbage: int) -> None:
    h100 = load_machine("h100")
    (model,) = h100.models.values()
    numbers = {
        each.name: garbage
        for each in dataclasses.fields(model.values)
        if getattr(model.values, each.name) is not UNCHANGED
        and each.name not in {"event_types", "nvlinks", "nvlinks_active", "sample_buffers", "mig_mode"}
    }
    gpus = dataclasses.replace(h100.gpus[0], values=dataclasses.replace(model.values, **numbers), count=1)
    played = replay(dataclasses.replace(h100, gpus=(gpus,), timeline=()), 30, details=True)
    families = played.families()

    assert_sound(families)
    shown = {
        family.spec.name
        for family in families
        for sample in family.samples
        if not isinstance(sample.value, Distribution) and (sample.value < 0 or sample.value >= 1e18)
    }
    # A margin of -1 is one degree beyond the limit, all ones or not.
    assert shown <= {"gpu_temperature_margin_celsius"}
    assert values(families, "exporter_nvml_errors_total")
    down = values(families, "gpu_error_info")  # where nothing at all was an answer
    assert {labels[-1] for labels in down} <= {"garbage"}


def test_lists_of_a_wrong_length_and_text_that_is_none_cost_only_themselves() -> None:
    described = SMALL.replace("    name: Small", '    name: "Sm\\xe9ll"').replace(
        "gpus:", "    processes: [{pid: 5, memory: 100}]\ngpus:"
    )
    lists = "\ntimeline:\n  - {returns: {nvmlDeviceGetComputeRunningProcesses_v3: 1000}}\n"
    played = replay(machine(described + lists), 20)
    families = played.families()

    # pynvml reads beyond the array, and decodes a name that is not UTF-8.
    assert values(families, "gpu_processes") == {}
    errors = values(families, "exporter_nvml_errors_total")
    assert errors[("nvmlDeviceGetName", "garbage")] == 2
    assert errors[("nvmlDeviceGetComputeRunningProcesses_v3", "garbage")] > 0
    assert len(values(families, "gpu_info")) == 2


@given(st.floats() | st.integers(-(2**65), 2**65))
def test_a_number_is_converted_or_refused(number: float) -> None:
    for convert, least, most in (
        (ratio, 0, 1),
        (watts, 0, 1e5),
        (celsius, -300, 300),
        (hertz, 0, 1e11),
        (size, 0, 2**50),
    ):
        try:
            assert least <= convert(number) <= most  # type: ignore[arg-type]  # as NVML would
        except GarbageError:
            assert not 0 <= number <= 100 or not math.isfinite(number)
    if isinstance(number, int):
        try:
            assert 0 <= count(number) < 2**64 - 1
        except GarbageError:
            assert not 0 <= number < 2**64 - 1


# Sample buffers ----------------------------------------------------------------------------------------


def take(ring: Ring, samples: list[tuple[float, float]], at: float, moment: float | None = None) -> None:
    """Let a ring take samples, whose times are seconds."""
    ring.take(
        [(int(time * 1e6), value) for time, value in samples],
        now=at,
        wall_microseconds=int(at * 1e6),
        moment=moment,
    )


def test_a_ring_counts_what_is_newer_than_the_first_look() -> None:
    ring = Ring(15)

    take(ring, [(90, 1.0), (95, 1.0), (99.9, 1.0)], at=100)
    take(ring, [(99.9, 1.0), (100.5, 0.5), (101, 1.0)], at=101)

    assert ring.integral == pytest.approx(0.5 * 0.5 + 1.0 * 0.5)


def test_a_sample_is_counted_once_however_often_it_is_read() -> None:
    ring = Ring(15)
    take(ring, [], at=100)

    for _ in range(3):
        take(ring, [(100.5, 1.0), (101, 1.0)], at=101)

    assert ring.integral == pytest.approx(1.0)


def test_the_reading_of_the_moment_stands_in_when_the_ring_is_dry() -> None:
    ring = Ring(15)
    take(ring, [], at=100, moment=0.2)

    for second in range(102, 112, 2):
        take(ring, [], at=second, moment=0.2)

    assert ring.integral == pytest.approx(0.2 * 10)


def test_a_gap_that_nobody_measured_is_not_bridged() -> None:
    ring = Ring(15)
    take(ring, [], at=100)

    take(ring, [(160, 1.0), (160.5, 1.0)], at=160.5)

    assert ring.integral == pytest.approx(0.5)


def test_a_clock_that_was_set_back_begins_the_ring_anew() -> None:
    ring = Ring(15)
    take(ring, [], at=10_000)
    take(ring, [(10_001, 1.0)], at=10_001)

    take(ring, [(9000.5, 1.0)], at=9001)
    take(ring, [(9001.5, 1.0), (9002, 1.0)], at=9002)

    assert ring.integral == pytest.approx(2.0)


def test_least_and_most_are_those_of_the_window() -> None:
    ring = Ring(15)
    take(ring, [], at=100, moment=0.5)
    take(ring, [(101, 0.1), (101.5, 0.9)], at=102, moment=0.5)
    assert ring.extremes() == (0.1, 0.9)

    for second in range(104, 120, 2):
        take(ring, [(second - 0.5, 0.6)], at=second, moment=0.5)

    assert ring.extremes() == (0.5, 0.6)


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(-(2**40), 2**64), st.floats(0, 1)), max_size=5),
        min_size=1,
        max_size=10,
    )
)
def test_an_integral_never_falls_and_never_outruns_the_clock(batches: list[list[tuple[int, float]]]) -> None:
    ring, before = Ring(15), 0.0
    for place, batch in enumerate(batches):
        at = 1000 + 2 * place
        ring.take(batch, now=at, wall_microseconds=at * 1_000_000, moment=0.5)

        assert before <= ring.integral <= 2 * place + 5.001
        before = ring.integral


# Performance counters ----------------------------------------------------------------------------------

WITH_GPM = SMALL.replace(
    "gpus:",
    '    gpm: {"2": 60, "5": 130, "7": -0.2, "10": 40, "20": 100, "248": {idle: 5e9, counter_from: 7}}\ngpus:',
)


def test_ratios_are_percent_clamped() -> None:
    families = replay(machine(WITH_GPM), 20).families()

    assert set(values(families, "gpu_sm_activity_ratio").values()) == {0.6}
    tensor = values(families, "gpu_tensor_activity_ratio")
    assert {labels[2]: number for labels, number in tensor.items()} == {"any": 1.0, "hmma": 0.0}


def test_rates_become_bytes_and_cycles_a_counter() -> None:
    played = replay(machine(WITH_GPM), 21)

    sent = values(played.families(), "gpu_pcie_transmit_bytes_total")
    assert set(sent.values()) == {100 * 2**20 * 21.0}
    cycles = values(played.families(), "gpu_sm_cycles_total")
    assert all(number == pytest.approx(7 + 5e9 * 21) for number in cycles.values())


def test_samples_that_are_too_close_are_not_compared() -> None:
    played = replay(machine(WITH_GPM), 2, period_seconds=0.01)

    # A pass of the tier comes every 50 ms; without the pause every ratio would be NaN.
    assert set(values(played.families(), "gpu_sm_activity_ratio").values()) == {0.6}
    errors = values(played.families(), "exporter_nvml_errors_total")
    assert errors == {}


def test_a_whole_request_that_fails_costs_only_its_metrics() -> None:
    broken = WITH_GPM + "\ntimeline:\n  - {until: 12s, errors: {nvmlGpmSampleGet: TIMEOUT}}\n"
    played = replay(machine(broken), 30)

    assert played.readings("sm_activity")[0] is None
    assert played.readings("sm_activity")[-1] == 0.6


# MIG, processes, links ---------------------------------------------------------------------------------


def test_a_divided_gpu_tells_of_its_instances() -> None:
    played = replay("a100-mig", 12)
    families = played.families()

    assert len(values(families, "gpu_mig_info")) == 8 * 4
    assert values(families, "gpu_utilization_ratio") == {}
    assert len(values(families, "gpu_mig_memory_used_bytes")) == 8 * 4
    profiles = {labels[5] for labels in values(families, "gpu_mig_info")}
    assert profiles == {"3g.40gb", "2g.20gb", "1g.10gb"}


DIVIDED = SMALL.replace(
    "gpus:",
    """    gpm: {"2": 60, "5": 30, "10": 40}
    mig: [{gi: 1, profile: 1g.10gb, memory: 1000}, {gi: 2, profile: 1g.10gb, memory: 1000}]
gpus:""",
).replace("event_types:", "mig_mode: 1\n      event_types:")


def test_instances_have_activity_of_their_own() -> None:
    families = replay(machine(DIVIDED), 20).families()

    assert len(values(families, "gpu_mig_sm_activity_ratio")) == 4
    assert set(values(families, "gpu_mig_tensor_activity_ratio").values()) == {0.3}
    assert values(families, "gpu_sm_activity_ratio") == {}  # of the whole: not while it is divided


def test_a_change_of_the_instances_is_seen_when_the_driver_says_so() -> None:
    changed = (
        DIVIDED
        + """
timeline:
  - {at: 8500ms, gpus: [0], event: [mig_config], set: {mig_mode: 0}}
"""
    )
    played = replay(machine(changed), 12)

    instances = {labels[0] for labels in values(played.families(), "gpu_mig_info")}
    assert instances == {"1"}


def test_processes_are_values_and_no_labels() -> None:
    played = replay("h100", 30)
    processes = played.fleet.processes()

    assert [process.pid for process in processes] == [7300 + index for index in range(8)]
    first = processes[0]
    assert (first.gpu, first.memory_bytes) == ("0", 73014444032)
    assert first.sm_ratio == pytest.approx(0.91, abs=0.05)
    assert first.sm_seconds == pytest.approx(25 * 0.91, rel=0.1)
    assert not any("7300" in labels for family in played.families() for labels in [family.spec.labels])


def test_the_first_look_at_processes_takes_no_stale_sample() -> None:
    idle_now = SMALL.replace(
        "    values:",
        "    load: {steps: [{seconds: 30s, level: 1}, {seconds: 20s, level: 0}]}\n    values:",
    ).replace("gpus:", "    processes: [{pid: 5, memory: 100, sm: 90}]\ngpus:")

    played = replay(machine(idle_now), 1, origin=-40.0)

    # It worked until ten seconds ago; what is asked for is the last five.
    assert played.fleet.processes()[0].sm_ratio == 0.0


@pytest.mark.parametrize("answer", ["SUCCESS", "NOT_FOUND"])
def test_no_new_samples_of_processes_are_no_error(answer: str) -> None:
    described = SMALL.replace("gpus:", "    processes: [{pid: 5, memory: 100, sm: 90}]\ngpus:")
    quiet = f"\ntimeline:\n  - {{errors: {{nvmlDeviceGetProcessUtilization: {answer}}}}}\n"
    played = replay(machine(described + quiet), 12)

    assert played.fleet.processes()[0].memory_bytes == 100
    assert played.fleet.processes()[0].sm_ratio is None
    assert values(played.families(), "exporter_nvml_errors_total") == {}


LINKED = SMALL.replace(
    "event_types:",
    "nvlinks: 4\n      nvlinks_active: 3\n      nvlink_errors: 2\n"
    "      nvlink_transmit_kib: {idle: 1000, counter_from: 0}\n      event_types:",
)


def test_a_link_that_is_not_in_use_disables_nothing() -> None:
    played = replay(machine(LINKED), 65, per_link=True)
    families = played.families(per_link=True)

    up = {
        labels[2]: number for labels, number in values(families, "gpu_nvlink_up").items() if labels[0] == "0"
    }
    assert up == {"0": 1, "1": 1, "2": 1, "3": 0}
    sent = {labels[2] for labels in values(families, "gpu_nvlink_transmit_bytes_total") if labels[0] == "0"}
    assert sent == {"0", "1", "2"}


def test_a_sum_over_links_does_not_fall_when_one_goes_down() -> None:
    down = LINKED + "\ntimeline:\n  - {at: 30s, set: {nvlinks_active: 2}}\n"
    played = replay(machine(down), 20)
    before = values(played.families(), "gpu_nvlink_errors_total")
    played = replay(machine(down), 130)
    after = values(played.families(), "gpu_nvlink_errors_total")

    assert next(number for labels, number in before.items() if labels[3] == "replay") == 3 * 2
    assert all(after[labels] >= number for labels, number in before.items())


def test_the_fifth_generation_has_fields_of_its_own() -> None:
    described = LINKED.replace("hopper", "blackwell").replace(
        "nvlink_transmit_kib: {idle: 1000, counter_from: 0}",
        "nvlink_transmit_kib: 0\n      nvlink_transmit_bytes: {idle: 5000, counter_from: 100}\n"
        "      nvlink_errors_fifth: 1",
    )
    families = replay(machine(described), 65).families()

    assert set(values(families, "gpu_nvlink_transmit_bytes_total").values()) > {0} or all(
        number > 100 for number in values(families, "gpu_nvlink_transmit_bytes_total").values()
    )
    kinds = {labels[3] for labels in values(families, "gpu_nvlink_errors_total")}
    assert "malformed_packet" in kinds
    assert "crc_flit" not in kinds


# Which GPUs, and when ----------------------------------------------------------------------------------


def numbers(played: Replayed) -> dict[int, int]:
    return {gpu.index: gpu.number for gpu in played.fleet.gpus.values()}


U = "GPU-00000000-0000-0000-0000-00000000000"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,0", {2: 0, 0: 1}),
        (f"{U}3,{U}1", {3: 0, 1: 1}),
        ("1,9,2", {1: 0}),
        ("0,-1,2", {0: 0}),
        ("", {index: index for index in range(4)}),
        ("nonsense", {index: index for index in range(4)}),
        (None, {index: index for index in range(4)}),
    ],
)
def test_gpus_are_numbered_as_the_job_sees_them(visible: str | None, expected: dict[int, int]) -> None:
    played = replay(machine(SMALL.replace("count: 2", "count: 4")), 1, visible=visible)

    assert numbers(played) == expected


def test_an_instance_that_is_visible_brings_its_gpu() -> None:
    uuid = replay(machine(DIVIDED), 6).fleet.gpus[1].values["mig"][0]["uuid"]

    assert numbers(replay(machine(DIVIDED), 1, visible=uuid)) == {1: 0}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"include": ["GPU-*2"]}, {2}),
        ({"exclude": ["0", "00000000:11:00.0"]}, {2, 3}),
        ({"include": ["*"], "exclude": ["Small"]}, set()),
    ],
)
def test_gpus_are_chosen_by_pattern(choice: dict[str, Any], expected: set[int]) -> None:
    played = replay(machine(SMALL.replace("count: 2", "count: 4")), 1, **choice)

    assert set(numbers(played)) == expected


def test_a_lost_gpu_ends_alone_and_returns() -> None:
    lost = small("\ntimeline:\n  - {at: 10s, until: 35s, gpus: [1], lost: true}\n")
    during, after = replay(lost, 20), replay(lost, 45)

    assert during.fleet.gpus[1].down == "gpu_is_lost"
    assert {labels[0] for labels in values(during.families(), "gpu_power_watts")} == {"0"}
    assert set(values(after.families(), "gpu_up").values()) == {1.0}
    # Tried again every 30 s: lost at 10 s, found at 40 s.
    down = [message["gpus"][1].get("down") for message in after.samples]
    assert (down[9], down[10], down[39], down[40]) == (None, "gpu_is_lost", "gpu_is_lost", None)


def test_counters_go_on_over_a_loss() -> None:
    lost = small("\ntimeline:\n  - {at: 10s, until: 35s, gpus: [1], lost: true}\n")
    energy = values(replay(lost, 60).families(), "gpu_energy_joules_total")

    # 100 W, also in the half minute in which nobody could ask.
    assert set(energy.values()) == {6000.0}


def test_a_gpu_that_needs_a_reset_says_so() -> None:
    described = small('\ntimeline:\n  - {at: 5s, gpus: [0], errors: {"*": RESET_REQUIRED}}\n')
    families = replay(described, 10).families()

    reset = {labels[0]: number for labels, number in values(families, "gpu_reset_required").items()}
    assert reset == {"0": 1, "1": 0}
    assert {labels[2] for labels in values(families, "gpu_error_info")} == {"reset_required"}


def test_a_gpu_that_was_never_there_is_down_from_the_start() -> None:
    families = replay(small("\ntimeline:\n  - {gpus: [1], lost: true}\n"), 5).families()

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
    played = replay(small(f"\ntimeline:\n  - {{at: 5s, {fault}}}\n"), 60)

    assert played.farewell == farewell
    assert len(played.samples) <= 11


def test_a_gpu_that_does_not_return_asks_for_a_new_process_in_the_end() -> None:
    played = replay(small("\ntimeline:\n  - {at: 5s, gpus: [1], lost: true}\n"), 400)

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
    played = replay(small(f"\ntimeline:\n  - {{errors: {{nvmlInitWithFlags: {error}}}}}\n"), 5)

    assert played.farewell == reason
    assert values(played.families(), "gpu_nvml_up") == {(): 0.0}


def test_events_are_counted_and_stay_while_the_gpu_is_lost() -> None:
    described = small(
        """
timeline:
  - {at: 3s, gpus: [0], xid: [79, 79, 48], event: [ecc_dbe]}
  - {at: 4s, gpus: [0], lost: true}
"""
    )
    families = replay(described, 10).families()

    xids = values(families, "gpu_xid_errors_total")
    assert {labels[2]: number for labels, number in xids.items()} == {"79": 2, "48": 1}
    events = values(families, "gpu_events_total")
    assert {labels[2]: number for labels, number in events.items() if labels[0] == "0"}["ecc_dbe"] == 1


def test_where_there_is_no_energy_counter_power_is_integrated_and_labelled() -> None:
    without = small(energy="null")
    families = replay(without, 30).families()

    energy = values(families, "gpu_energy_joules_total")
    assert {labels[2] for labels in energy} == {"nvml_power"}
    assert all(number == pytest.approx(3000, rel=0.01) for number in energy.values())


def test_a_symbol_that_the_driver_lacks_is_a_lack_and_no_error() -> None:
    described = (
        "missing: [nvmlDeviceGetMemoryInfo_v2, nvmlDeviceGetTemperatureV, nvmlDeviceGetSamples]\n" + SMALL
    )
    families = replay(machine(described), 10).families()

    # The first version counts what the driver reserves as used, and has no name for it.
    assert set(values(families, "gpu_memory_used_bytes").values()) == {500000}
    assert values(families, "gpu_memory_reserved_bytes") == {}
    assert set(values(families, "gpu_temperature_celsius").values()) == {40.0}
    assert set(values(families, "gpu_utilization_busy_seconds_total").values()) == {5.0}
    assert values(families, "exporter_nvml_errors_total") == {}
