"""Processes and links of a GPU: replays on a simulated clock."""

from __future__ import annotations

import itertools

import pytest
from gpu_support import parse_machine, replay, small_machine, small_text, values

from exporter.collectors.gpu.publishing import GpuBlock
from exporter.collectors.gpu.state import GpuRegistry


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


TRAFFIC = "nvlink_transmit_kib: {idle: 1000, counter_from: 1000000000}"
GPM_TRAFFIC = 'gpm: {"1": 50, "61": 5}'


@pytest.mark.parametrize("error", ["TIMEOUT", "NOT_SUPPORTED"])
@pytest.mark.parametrize("start", ["0s", "20s"])
def test_a_failed_reading_of_the_traffic_is_not_replaced_by_another_counter(error: str, start: str) -> None:
    description = small_machine(
        f"set: {{{LINKS}, {TRAFFIC}}}",
        f"at: {start}, until: 23s, errors: {{nvmlDeviceGetFieldValues: {error}}}",
        model=GPM_TRAFFIC,
        count=1,
    )
    registry, block = GpuRegistry(), GpuBlock()
    totals: list[float] = []
    for sample in replay(description, 70).samples:
        registry.add_sample(sample, 1)
        families = block.families(registry, "", {})
        totals += values(families, "gpu_nvlink_transmit_bytes_total").values()
    increases = [later - earlier for earlier, later in itertools.pairwise(totals)]

    assert min(increases) >= 0
    assert max(increases) <= 30 * 3 * 1000 * 1024  # three links over the time of the errors and a few passes


def test_a_failed_field_of_nvlink_5_is_not_replaced_by_the_old_field() -> None:
    counters = "nvlink_transmit_kib: 0, nvlink_transmit_bytes: {idle: 5000, counter_from: 100000}"
    failed_field = 'at: 30s, until: 40s, fields: {"202": nan}'
    text = small_text(f"set: {{{LINKS}, {counters}}}", failed_field, count=1)
    result = replay(parse_machine(text.replace("hopper", "blackwell")), 65)

    assert result.readings("nvlink_transmit_kibibytes", 0, "") == []  # always 0
    assert len(result.readings("nvlink_transmit_bytes", 0, "0")) == 56


def test_a_failed_field_of_single_links_is_not_replaced_by_the_field_of_their_sum() -> None:
    failed_field = 'at: 50s, until: 70s, fields: {"161": nan}'
    description = small_machine(f"set: {{{LINKS}, nvlink_errors: 2}}", failed_field)
    # The errors are read at 0 s, 8 s, 68 s and 128 s.
    during, after = (replay(description, end).values("gpu_nvlink_errors_total", "0") for end in (69, 130))

    assert (during.get(("replay",)), during["recovery",]) == (None, 3 * 2)
    assert after["replay",] == 3 * 2


def test_a_sum_over_links_is_absent_while_the_number_of_a_link_is_in_doubt() -> None:
    registry, sums = GpuRegistry(), []
    for time_seconds, count in enumerate((7, 3, 1, 9)):
        rows = [[["0", "replay"], 5], [["1", "replay"], count]]
        entry = {
            "index": 0,
            "uuid": "GPU-0",
            "job_index": 0,
            "values": {},
            "replaced": {"nvlink_errors": rows},
        }
        registry.add_sample({"kind": "sample", "time": float(time_seconds), "gpus": [entry]}, 1)
        families = GpuBlock().families(registry, "", {})
        sums.append([*values(families, "gpu_nvlink_errors_total").values()])

    assert sums == [[12], [12], [], [14]]


def test_a_link_that_becomes_active_adds_no_earlier_traffic() -> None:
    registry, sums = GpuRegistry(), list[float]()
    for time_seconds, counts in enumerate(({"0": 100}, {"0": 110, "1": 5000}, {"0": 120, "1": 5001})):
        rows = [[[link], count] for link, count in counts.items()]
        replaced = {"nvlink_transmit_bytes": rows}
        entry = {"index": 0, "uuid": "GPU-0", "job_index": 0, "values": {}, "replaced": replaced}
        registry.add_sample({"kind": "sample", "time": float(time_seconds), "gpus": [entry]}, 1)
        families = GpuBlock().families(registry, "", {})
        sums += values(families, "gpu_nvlink_transmit_bytes_total").values()

    assert sums == [100, 110, 121]
