"""GPU families read from a stand-in for libnvidia-ml.so.1 (tests/fakenvml)."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from fake_nvml_support import FakeNvml, Load, fake_nvml_collector, needs_fake_nvml, play_constant_load
from gpu_support import gpus_up, label_values, samples_by_label, value, values, xid_counts
from waiting import wait_until

from exporter.collectors.gpu.collector import GpuCollector

pytestmark = needs_fake_nvml

ENERGY_JOULES, BUSY_SECONDS = "gpu_energy_joules_total", "gpu_utilization_busy_seconds_total"
RECEIVE_BYTES, THROTTLED_SECONDS = "gpu_pcie_receive_bytes_total", "gpu_clocks_event_seconds_total"
GARBAGE_FUNCTIONS = (
    "nvmlGpmMetricsGet",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetSamples",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetFieldValues",
)
GARBAGE_SECONDS = 20.0


def counter_values(collector: GpuCollector) -> dict[str, float]:
    """Return the four counters of the only GPU after the next pass, each -1 if absent."""
    previous_time = collector.registry.time
    wait_until(lambda: collector.registry.time > previous_time)
    families = collector.collect()
    throttled_seconds = samples_by_label(families, THROTTLED_SECONDS, "reason")
    values_by_name = {
        name: next(iter(values(families, name).values()), -1.0)
        for name in (ENERGY_JOULES, BUSY_SECONDS, RECEIVE_BYTES)
    }
    return {**values_by_name, THROTTLED_SECONDS: throttled_seconds.get("sw_power_cap", -1.0)}


SLOW_SECONDS = 15.0
"""Duration in which each energy call of a GPU takes three seconds."""
FAST_LINK = 56_000.0
"""Rate in MiB per second at which a 32-bit register of bytes wraps about 14 times per second."""


def cpu_seconds(collector: GpuCollector) -> float:
    """Return the CPU time of the NVML child."""
    pid = collector.child_pid
    assert pid is not None
    cpu_clock = (~pid << 3) | 2  # as clock_getcpuclockid(3) computes it
    return time.clock_gettime(cpu_clock)


@pytest.mark.slow
def test_rates_over_15_seconds_at_constant_load_are_within_five_percent(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path / "nvml")
    play_constant_load(fake, Load(received_mebibytes_per_second=FAST_LINK))
    with fake_nvml_collector(fake) as collector:
        wait_until(lambda: counter_values(collector)[BUSY_SECONDS] > 1)
        samples = []
        start_time = time.monotonic()
        while time.monotonic() < start_time + 20.0:
            samples.append((time.monotonic(), counter_values(collector)))
    windows = [
        (start_values, end_values, sample_end - sample_start)
        for (sample_start, start_values), (sample_end, end_values) in itertools.combinations(samples, 2)
        if 14.0 < sample_end - sample_start < 16.0
    ]

    assert len(windows) >= 4
    for start_values, end_values, seconds in windows:
        rates = {name: (end_values[name] - start_values[name]) / seconds for name in start_values}
        assert rates[ENERGY_JOULES] == pytest.approx(300, rel=0.05)
        assert rates[BUSY_SECONDS] == pytest.approx(0.5, rel=0.05)
        assert rates[RECEIVE_BYTES] == pytest.approx(FAST_LINK * 2**20, rel=0.05)
        assert rates[THROTTLED_SECONDS] == pytest.approx(0.25, rel=0.05)


@pytest.mark.slow
def test_refused_readings_are_absent_and_their_energy_is_a_gap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeNvml(tmp_path / "nvml")
    play_constant_load(fake)
    with fake_nvml_collector(fake) as collector:
        wait_until(lambda: counter_values(collector)[BUSY_SECONDS] > 1)
        fault_time = time.time()
        fake.fail(
            *(f"{name} -1 0 {fault_time} {fault_time + GARBAGE_SECONDS} 0 1" for name in GARBAGE_FUNCTIONS)
        )
        wait_until(lambda: set(counter_values(collector).values()) == {-1.0})
        assert value(collector, "gpu_up") == 1
        wait_until(lambda: counter_values(collector)[ENERGY_JOULES] > 0)
        initial_values, start_time = counter_values(collector), time.monotonic()
        time.sleep(8)
        final_values, seconds = counter_values(collector), time.monotonic() - start_time
        (energy,) = collector.registry.energies()

    assert (final_values[ENERGY_JOULES] - initial_values[ENERGY_JOULES]) / seconds == pytest.approx(
        300, rel=0.1
    )
    assert energy.gap_joules["no_reading"] == pytest.approx(300 * GARBAGE_SECONDS, rel=0.15)
    assert sum("exporter_energy_gap_joules_total" in line for line in caplog.messages) == 1


def test_a_gpu_without_nvlink_has_no_nvlink_bytes(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path / "nvml")
    play_constant_load(fake)
    with fake_nvml_collector(fake) as collector:
        wait_until(lambda: counter_values(collector)[RECEIVE_BYTES] > 0)

        assert value(collector, "gpu_nvlink_transmit_bytes_total") is None
        assert value(collector, "gpu_nvlink_receive_bytes_total") is None


def test_a_gpu_that_is_lost_before_the_start_is_expected(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path / "nvml", count=2)
    play_constant_load(fake)
    fake.fail("* 1 15 0 1e12")  # GPU_IS_LOST
    with fake_nvml_collector(fake) as collector:
        assert value(collector, "gpu_devices_expected") == 2
        assert value(collector, "gpu_devices") == 1
        assert gpus_up(collector) == {"0": 1, "1": 0}


def test_a_lost_gpu_affects_no_other_and_returns_with_its_counters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="exporter.collectors.gpu")
    fake = FakeNvml(tmp_path / "nvml", count=2)
    play_constant_load(fake)
    with fake_nvml_collector(fake, retry=0.5) as collector:
        wait_until(lambda: gpus_up(collector) == {"0": 1, "1": 1})
        initial_joules = value(collector, ENERGY_JOULES, "1") or 0.0
        fault_time = time.time()
        fake.fail(f"* 1 15 {fault_time} {fault_time + 5}")  # GPU_IS_LOST
        fake.report_xid(fault_time, 1, 79)
        wait_until(lambda: gpus_up(collector) == {"0": 1, "1": 0})
        families_during_loss = collector.collect()
        wait_until(lambda: gpus_up(collector) == {"0": 1, "1": 1})
        wait_until(lambda: (value(collector, ENERGY_JOULES, "1") or 0.0) > initial_joules)
        counts = xid_counts(collector.collect())

    assert label_values(families_during_loss, "gpu_power_watts", "gpu") == ["0"]
    assert label_values(families_during_loss, BUSY_SECONDS, "gpu") == ["0"]
    assert counts == {("1", "79"): 1}
    messages = [message.rpartition(") ")[2] for message in caplog.messages]
    assert messages == ["does not answer: gpu_is_lost", "answers again"]


def test_xids_of_the_only_gpu_are_counted_after_it_was_lost_at_the_start(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path / "nvml")
    play_constant_load(fake)
    return_time = time.time() + 4
    fake.fail(f"* 0 15 0 {return_time}")  # GPU_IS_LOST
    with fake_nvml_collector(fake, retry=0.5) as collector:
        assert gpus_up(collector) == {"0": 0}
        wait_until(lambda: gpus_up(collector) == {"0": 1})
        fake.report_xid(time.time() + 1, 0, 31)

        wait_until(lambda: values(collector.collect(), "gpu_xid_errors_total"))


def test_an_xid_is_counted_once_while_the_event_thread_waits_for_the_previous_event_set(
    tmp_path: Path,
) -> None:
    fake = FakeNvml(tmp_path / "nvml", count=2)
    play_constant_load(fake)
    fake.fail(f"* 1 15 0 {time.time() + 1000}")  # GPU_IS_LOST
    with fake_nvml_collector(fake, retry=0.5) as collector:
        assert gpus_up(collector) == {"0": 1, "1": 0}
        fake.fail()
        wait_until(lambda: gpus_up(collector) == {"0": 1, "1": 1})  # both GPUs are in a new event set
        fake.report_xid(time.time() + 0.5, 0, 31)
        wait_until(lambda: values(collector.collect(), "gpu_xid_errors_total"))
        time.sleep(6)  # longer than a wait of the event thread
        counts = xid_counts(collector.collect())

    assert counts == {("0", "31"): 1}


def test_processes_are_listed_and_are_no_labels(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path / "nvml")
    play_constant_load(fake)
    with fake_nvml_collector(fake) as collector:
        wait_until(lambda: value(collector, "gpu_processes") == 0)
        fake.hold((4_190_001, 0), (4_190_002, 0))
        wait_until(lambda: any(process.ratios for process in collector.registry.processes()))
        uses = collector.registry.processes()
        families = collector.collect()
        fake.hold()
        wait_until(lambda: value(collector, "gpu_processes") == 0)

    assert [(usage.pid, usage.memory_bytes, usage.ratios) for usage in uses] == [
        (4_190_001, 1_000_000_000, {"sm": 0.5}),
        (4_190_002, 1_000_000_000, {"sm": 0.5}),
    ]
    assert "419000" not in str(families)


@pytest.mark.slow
def test_the_calls_of_a_gpu_cost_at_most_0_2_percent_of_a_core(tmp_path: Path) -> None:
    machines = [FakeNvml(tmp_path / f"nvml{cost}", count=8, state={"costs": cost}) for cost in (0, 1)]
    for machine in machines:
        play_constant_load(machine)
    with fake_nvml_collector(machines[0]) as without_cost, fake_nvml_collector(machines[1]) as with_cost:
        initial_seconds = [cpu_seconds(collector) for collector in (without_cost, with_cost)]
        start_time = time.monotonic()
        time.sleep(20)
        final_seconds = [cpu_seconds(collector) for collector in (without_cost, with_cost)]
        elapsed_seconds = time.monotonic() - start_time

    # The costs of the calls are the difference between the children, of which only one has calls that cost CPU time.
    seconds_without_cost, seconds_with_cost = (
        final - initial for initial, final in zip(initial_seconds, final_seconds, strict=True)
    )
    call_seconds_per_gpu = (seconds_with_cost - seconds_without_cost) / 8
    # A smaller ratio means that the stand-in has not spent the costs of its calls.
    assert 0.0005 < call_seconds_per_gpu / elapsed_seconds < 0.002


@pytest.mark.slow
def test_a_slow_call_on_one_gpu_causes_no_gap_and_no_lost_busy_time_of_the_other(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path / "nvml", count=2)
    play_constant_load(fake)
    families_with_gaps = set[str]()
    with fake_nvml_collector(fake) as collector:
        wait_until(lambda: (value(collector, BUSY_SECONDS, "1") or 0) > 0)
        fault_time = time.time()
        fake.fail(f"nvmlDeviceGetTotalEnergyConsumption 0 0 {fault_time} {fault_time + SLOW_SECONDS} 3")
        start_time, initial_busy_seconds = time.monotonic(), value(collector, BUSY_SECONDS, "1") or 0
        while time.monotonic() - start_time < SLOW_SECONDS:
            for name, labels in (("gpu_nvml_up", ()), ("gpu_up", ("0",)), ("gpu_up", ("1",))):
                if value(collector, name, *labels) != 1:
                    families_with_gaps.add(name)
            time.sleep(0.2)
        busy_seconds = (value(collector, BUSY_SECONDS, "1") or 0) - initial_busy_seconds
        elapsed_seconds = time.monotonic() - start_time
        restarts = sum(values(collector.collect(), "exporter_nvml_child_restarts_total").values())
        resets = sum(values(collector.collect(), "exporter_nvml_resets_total").values())

    assert families_with_gaps == set()
    assert restarts == 0
    assert resets == 0
    assert busy_seconds == pytest.approx(0.5 * elapsed_seconds, abs=0.5 * 2)  # two intervals at the edges


def test_a_gpu_is_up_while_any_call_answers(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path / "nvml")
    play_constant_load(fake)
    call_names = ("UtilizationRates", "MemoryInfo", "MemoryInfo_v2", "PowerUsage")
    fake.fail(*(f"nvmlDeviceGet{name} 0 3 0 1e12" for name in call_names))  # NOT_SUPPORTED
    with fake_nvml_collector(fake) as collector:
        wait_until(lambda: counter_values(collector)[ENERGY_JOULES] > 0)

        assert value(collector, "gpu_up") == 1
        assert value(collector, "gpu_temperature_celsius") == 50
        assert value(collector, "gpu_power_watts") is None
        assert value(collector, "gpu_sm_activity_ratio") == pytest.approx(0.6)


def test_energy_follows_the_load(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path / "nvml")
    play_time = time.time()
    fake.play(
        (play_time - 100, Load(watts=100)),
        (play_time + 8, Load(watts=700)),
        (play_time + 16, Load(watts=100)),
    )
    with fake_nvml_collector(fake) as collector:
        wait_until(lambda: time.time() > play_time + 4)
        initial = collector.registry.energies()[0]
        wait_until(lambda: time.time() > play_time + 24)
        final = collector.registry.energies()[0]

    assert initial.joules is not None
    assert final.joules is not None
    # 100 W, and 600 W more for eight seconds.
    expected_joules = 100 * (final.time - initial.time) + 600 * 8
    assert final.joules - initial.joules == pytest.approx(expected_joules, rel=0.02)
