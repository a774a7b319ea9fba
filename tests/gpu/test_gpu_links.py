"""Processes and links of a GPU: replays without waiting."""

from __future__ import annotations

import pytest
from gpu_support import machine, replay, small_machine, small_text


def test_the_first_pass_over_processes_uses_no_stale_sample() -> None:
    idle_now = "load: {steps: [{seconds: 30s, level: 1}, {seconds: 20s, level: 0}]}"
    described = small_machine(
        "processes: [{pid: 5, memory: 100, sm: 90}, {pid: 6, memory: 1}]", model=idle_now
    )
    played = replay(described, 1, origin=-40.0)

    # The process was active until ten seconds ago; the query covers the last five.
    assert played.registry.processes()[0].ratios["sm"] == 0.0


@pytest.mark.parametrize("how", ["errors: {%s: SUCCESS}", "errors: {%s: NOT_FOUND}", "delay: {%s: 100ms}"])
def test_late_samples_and_samples_between_two_calls_are_no_error(how: str) -> None:
    unusual = how % "nvmlDeviceGetProcessUtilization"
    played = replay(
        small_machine("processes: [{pid: 5, memory: 100, sm: 90}, {pid: 6, memory: 1}]", unusual), 12
    )

    assert played.registry.processes()[0].memory_bytes == 100
    assert list(played.registry.processes()[0].ratios) == ["sm"] * ("delay" in how)
    assert played.values("exporter_nvml_errors_total") == {}


LINKS = "nvlinks: 4, nvlinks_active: 3"
SENT = "set: {nvlink_transmit_kib: {idle: 1000, counter_from: 0}}"


def test_a_link_that_is_not_in_use_disables_nothing() -> None:
    played = replay(small_machine(f"set: {{{LINKS}}}", SENT), 65)

    assert played.values("gpu_nvlink_links", "0") == {("active",): 3, ("inactive",): 1}
    for gpu in ("0", "1"):
        (sent,) = played.values("gpu_nvlink_transmit_bytes_total", gpu).values()
        assert 60 <= sent / (3 * 1000 * 1024) <= 65


def test_a_sum_over_links_does_not_decrease_when_a_link_goes_down() -> None:
    down = small_machine(f"set: {{{LINKS}, nvlink_errors: 2}}", "at: 30s, set: {nvlinks_active: 2}")
    before, after = (replay(down, seconds).values("gpu_nvlink_errors_total", "0") for seconds in (20, 130))

    assert before["replay",] == 3 * 2
    assert all(after[kind] >= number for kind, number in before.items())


def test_nvlink_5_has_separate_fields() -> None:
    sent = "nvlink_transmit_kib: 0, nvlink_transmit_bytes: {idle: 5000, counter_from: 100}"
    text = small_text(f"set: {{{LINKS}, {sent}, nvlink_errors_fifth: 1}}").replace("hopper", "blackwell")
    played = replay(machine(text), 65)

    (sent_bytes,) = played.values("gpu_nvlink_transmit_bytes_total", "0").values()
    assert 60 <= (sent_bytes / 3 - 100) / 5000 <= 65
    kinds = played.values("gpu_nvlink_errors_total", "0").keys()
    assert ("malformed_packet",) in kinds
    assert ("crc_flit",) not in kinds
