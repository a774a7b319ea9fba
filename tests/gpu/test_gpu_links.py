"""Processes and links of a GPU: replays without waiting."""

from __future__ import annotations

import pytest
from gpu_support import parse_machine, replay, small_machine, small_text


def test_the_first_pass_over_processes_uses_no_stale_sample() -> None:
    load = "load: {steps: [{seconds: 30s, level: 1}, {seconds: 20s, level: 0}]}"
    description = small_machine("processes: [{pid: 5, memory: 100, sm: 90}, {pid: 6, memory: 1}]", model=load)
    result = replay(description, 1, origin=-40.0)

    # The process was active until ten seconds ago; the query covers the last five seconds.
    assert result.registry.processes()[0].ratios["sm"] == 0.0


@pytest.mark.parametrize("fault", ["errors: {%s: SUCCESS}", "errors: {%s: NOT_FOUND}", "delay: {%s: 100ms}"])
def test_late_samples_and_samples_between_two_calls_are_no_error(fault: str) -> None:
    timeline_entry = fault % "nvmlDeviceGetProcessUtilization"
    result = replay(
        small_machine("processes: [{pid: 5, memory: 100, sm: 90}, {pid: 6, memory: 1}]", timeline_entry), 12
    )

    assert result.registry.processes()[0].memory_bytes == 100
    assert list(result.registry.processes()[0].ratios) == ["sm"] * ("delay" in fault)
    assert result.values("exporter_nvml_errors_total") == {}


LINKS = "nvlinks: 4, nvlinks_active: 3"
TRANSMITTED = "set: {nvlink_transmit_kib: {idle: 1000, counter_from: 0}}"


def test_an_inactive_link_does_not_disable_the_counters_of_the_other_links() -> None:
    result = replay(small_machine(f"set: {{{LINKS}}}", TRANSMITTED), 65)

    assert result.values("gpu_nvlink_links", "0") == {("active",): 3, ("inactive",): 1}
    for gpu in ("0", "1"):
        (byte_count,) = result.values("gpu_nvlink_transmit_bytes_total", gpu).values()
        assert 60 <= byte_count / (3 * 1000 * 1024) <= 65


def test_a_sum_over_links_does_not_decrease_when_a_link_goes_down() -> None:
    description = small_machine(f"set: {{{LINKS}, nvlink_errors: 2}}", "at: 30s, set: {nvlinks_active: 2}")
    earlier, later = (
        replay(description, seconds).values("gpu_nvlink_errors_total", "0") for seconds in (20, 130)
    )

    assert earlier["replay",] == 3 * 2
    assert all(later[kind] >= number for kind, number in earlier.items())


def test_nvlink_5_has_separate_fields() -> None:
    counters = "nvlink_transmit_kib: 0, nvlink_transmit_bytes: {idle: 5000, counter_from: 100}"
    text = small_text(f"set: {{{LINKS}, {counters}, nvlink_errors_fifth: 1}}").replace("hopper", "blackwell")
    result = replay(parse_machine(text), 65)

    (sent_bytes,) = result.values("gpu_nvlink_transmit_bytes_total", "0").values()
    assert 60 <= (sent_bytes / 3 - 100) / 5000 <= 65
    kinds = result.values("gpu_nvlink_errors_total", "0").keys()
    assert ("malformed_packet",) in kinds
    assert ("crc_flit",) not in kinds
