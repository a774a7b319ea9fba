"""NVML child with a misbehaving, incomplete or newer library: replays on a simulated clock."""

from __future__ import annotations

import dataclasses

import pytest
from gpu_support import assert_sound, parse_machine, replay, small_machine, small_text, values

from exporter.replay.machines import load_machine

THROTTLE_COUNTERS = """set: {
    throttle_sw_power_cap: {idle: 500000000, counter_from: 3000000000},
    throttle_hw_thermal: {idle: 100000000, counter_from: 0},
    power_smoothing: 1,
  }"""


@pytest.mark.parametrize(
    ("driver", "has_thermal"),
    [
        *((driver, True) for driver in ("575.51.03", "580.65.06", "580.82.07", "590.44.01")),
        # In these drivers, the field id has another meaning.
        *((driver, False) for driver in ("535.129.03", "550.90.07", "570.148.08", "580.70.01")),
    ],
)
def test_throttle_counters_use_the_field_ids_of_the_driver(driver: str, has_thermal: bool) -> None:
    result = replay(small_machine(THROTTLE_COUNTERS, head=f'driver: "{driver}"'), 21)
    seconds = result.values("gpu_clocks_event_seconds_total", "0")

    # The counters of nanoseconds increase by 0.5 s and 0.1 s per second.
    assert seconds["sw_power_cap",] == pytest.approx(3 + 0.5 * 21)
    assert seconds.get(("hw_thermal",)) == (pytest.approx(0.1 * 21) if has_thermal else None)


def test_unsupported_failed_forbidden_and_zero_are_distinct() -> None:
    description = small_machine(
        "errors: {nvmlDeviceGetPowerUsage: UNKNOWN, nvmlDeviceGetPcieReplayCounter: NO_PERMISSION}",
        "errors: {nvmlDeviceGetClockInfo: NOT_SUPPORTED}",
        "set: {utilization: 0}",
    )
    result = replay(description, 10)

    # Two GPUs and eleven passes. A failed call is made in each pass, and a forbidden call once per GPU. An unsupported call is no error.
    assert_sound(result.families())
    assert result.values("exporter_nvml_errors_total") == {
        ("nvmlDeviceGetPowerUsage", "unknown"): 2 * 11,
        ("nvmlDeviceGetPcieReplayCounter", "no_permission"): 2,
    }
    assert result.readings("utilization_ratio")[-1] == 0.0
    assert result.readings("power_watts")[-1] is None


def test_an_unsupported_call_is_retried_after_ten_minutes() -> None:
    result = replay(small_machine("until: 100s, errors: {nvmlDeviceGetPowerUsage: NOT_SUPPORTED}"), 610)

    assert result.readings("power_watts")[-12:] == [None, *[100.0] * 11]


def test_error_counters_are_read_after_an_xid_and_at_most_every_ten_seconds() -> None:
    timeline = (
        "set: {ecc_uncorrected_dram: 0}",
        "at: 25s, xid: [48], set: {ecc_uncorrected_dram: 2}",
        "at: 30s, xid: [48], set: {ecc_uncorrected_dram: 3}",
    )

    def uncorrected_errors(seconds: int) -> float:
        result = replay(small_machine(*timeline), seconds)
        return result.values("gpu_ecc_errors_total", "0")["uncorrected", "dram"]

    assert [uncorrected_errors(seconds) for seconds in (24, 27, 33, 37)] == [0, 2, 2, 3]


@pytest.mark.parametrize("garbage", [0xFFFFFFFFFFFFFFFF, 0xFFFFFFFF, -1])
def test_a_garbage_value_is_absent_in_every_family(garbage: int) -> None:
    h100 = load_machine("h100")
    (model,) = h100.models.values()
    switches = {"event_types", "nvlinks", "nvlinks_active", "sample_buffers", "mig_mode"}
    garbage_values = {**model.values, **dict.fromkeys(model.values.keys() - switches, garbage)}
    gpu = dataclasses.replace(h100.gpus[0], values=garbage_values, count=1)
    result = replay(dataclasses.replace(h100, gpus=(gpu,), timeline=()), 30)
    families = result.families()

    assert_sound(families)
    implausible_families = {
        family.name
        for family in families
        for sample in family.samples
        if sample.value < 0 or sample.value >= 1e18
    }
    # For other readings, a register of all ones is garbage. A margin of -1 is valid: the GPU is a degree above the limit.
    assert implausible_families <= {"gpu_temperature_margin_celsius"}
    assert values(families, "exporter_nvml_errors_total")
    errors = values(families, "gpu_error_info")  # present if every call of the GPU failed
    assert {labels[-1] for labels in errors} <= {"garbage"}


def test_invalid_text_affects_only_its_reading() -> None:
    result = replay(parse_machine(small_text().replace("name: Small", 'name: "Sm\\xe9ll"')), 20)

    # pynvml decodes a name that is not UTF-8.
    assert result.values("exporter_nvml_errors_total")["nvmlDeviceGetName", "garbage"] == 2
    assert len(result.values("gpu_info")) == 2


def test_impossible_process_ids_are_garbage() -> None:
    result = replay(small_machine("processes: [{pid: 4294967290, memory: 1}]"), 10)

    assert result.registry.processes() == ()
    errors = result.values("exporter_nvml_errors_total")
    assert set(errors) == {("nvmlDeviceGetComputeRunningProcesses_v3", "garbage")}


@pytest.mark.parametrize("period", [1.0, 5.0, 30.0])
def test_without_an_energy_counter_power_is_integrated_at_any_interval(
    period: float,
) -> None:
    result = replay(small_machine("set: {energy: null}"), 600, period=period)

    # The GPU draws 100 W and is busy half of the time. The driver's buffers hold a few seconds.
    joules = result.values("gpu_energy_joules_total", "0")
    assert joules == {("nvml_power",): pytest.approx(60_000, rel=0.12)}
    busy_seconds = result.values("gpu_utilization_busy_seconds_total", "0")
    assert busy_seconds == {(): pytest.approx(300, rel=0.12)}


def test_a_missing_driver_symbol_is_unsupported_and_not_an_error() -> None:
    missing_symbols = "missing: [nvmlDeviceGetMemoryInfo_v2, nvmlDeviceGetTemperatureV, nvmlDeviceGetSamples]"
    result = replay(small_machine(head=missing_symbols), 10)

    # The first version counts memory reserved by the driver as used.
    assert set(result.values("gpu_memory_used_bytes").values()) == {500000}
    assert set(result.values("gpu_temperature_celsius").values()) == {40.0}
    assert set(result.values("gpu_utilization_busy_seconds_total").values()) == {5.0}
    assert result.values("exporter_nvml_errors_total") == {}
