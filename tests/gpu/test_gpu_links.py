"""Processes and links of a GPU: replays without waiting."""

from __future__ import annotations

import pytest
from gpu_support import SMALL, machine, replay, values


def test_processes_are_values_and_no_labels() -> None:
    played = replay("h100", 30)
    processes = played.registry.processes()

    assert [process.pid for process in processes] == [7300 + index for index in range(8)]
    first = processes[0]
    assert (first.gpu, first.memory_bytes) == ("0", 73014444032)
    assert first.ratios["sm"] == pytest.approx(0.91, abs=0.05)
    shown = [text for family in played.families() for each in family.samples for text in each.labels.values()]
    assert shown
    assert "7300" not in shown


def test_the_first_look_at_processes_takes_no_stale_sample() -> None:
    idle_now = SMALL.replace(
        "    values:",
        "    load: {steps: [{seconds: 30s, level: 1}, {seconds: 20s, level: 0}]}\n    values:",
    ).replace("gpus:", "    processes: [{pid: 5, memory: 100, sm: 90}]\ngpus:")

    played = replay(machine(idle_now), 1, origin=-40.0)

    # It worked until ten seconds ago; what is asked for is the last five.
    assert played.registry.processes()[0].ratios["sm"] == 0.0


def test_processes_come_and_go() -> None:
    described = SMALL.replace("gpus:", "    processes: [{pid: 5, memory: 100}]\ngpus:")
    change = "\ntimeline:\n  - {at: 8s, gpus: [0], processes: []}\n"
    change += "  - {at: 20s, gpus: [0], processes: [{pid: 77, memory: 300}, {pid: 78}]}\n"

    counts = [
        values(replay(machine(described + change), seconds).families(), "gpu_processes")
        for seconds in (7, 15, 25)
    ]

    assert [next(n for labels, n in found.items() if labels[0] == "0") for found in counts] == [1, 0, 2]


@pytest.mark.parametrize("answer", ["SUCCESS", "NOT_FOUND"])
def test_no_new_samples_of_processes_are_no_error(answer: str) -> None:
    described = SMALL.replace("gpus:", "    processes: [{pid: 5, memory: 100, sm: 90}]\ngpus:")
    quiet = f"\ntimeline:\n  - {{errors: {{nvmlDeviceGetProcessUtilization: {answer}}}}}\n"
    played = replay(machine(described + quiet), 12)

    assert played.registry.processes()[0].memory_bytes == 100
    assert played.registry.processes()[0].ratios == {}
    assert values(played.families(), "exporter_nvml_errors_total") == {}


LINKED = SMALL.replace(
    "event_types:",
    "nvlinks: 4\n      nvlinks_active: 3\n      nvlink_errors: 2\n"
    "      nvlink_transmit_kib: {idle: 1000, counter_from: 0}\n      event_types:",
)


def test_a_link_that_is_not_in_use_disables_nothing() -> None:
    families = replay(machine(LINKED), 65).families()

    links = {labels[2]: n for labels, n in values(families, "gpu_nvlink_links").items() if labels[0] == "0"}
    assert links == {"active": 3, "inactive": 1}
    sent = values(families, "gpu_nvlink_transmit_bytes_total")
    assert all(60 <= number / (3 * 1000 * 1024) <= 65 for number in sent.values())
    assert len(sent) == 2


def test_a_sum_over_links_does_not_fall_when_one_goes_down() -> None:
    down = LINKED + "\ntimeline:\n  - {at: 30s, set: {nvlinks_active: 2}}\n"
    played = replay(machine(down), 20)
    before = values(played.families(), "gpu_nvlink_errors_total")
    played = replay(machine(down), 130)
    after = values(played.families(), "gpu_nvlink_errors_total")

    assert next(number for labels, number in before.items() if labels[2] == "replay") == 3 * 2
    assert all(after[labels] >= number for labels, number in before.items())


def test_the_fifth_generation_has_fields_of_its_own() -> None:
    described = LINKED.replace("hopper", "blackwell").replace(
        "nvlink_transmit_kib: {idle: 1000, counter_from: 0}",
        "nvlink_transmit_kib: 0\n      nvlink_transmit_bytes: {idle: 5000, counter_from: 100}\n"
        "      nvlink_errors_fifth: 1",
    )
    families = replay(machine(described), 65).families()

    sent = values(families, "gpu_nvlink_transmit_bytes_total")
    assert all(60 <= (number / 3 - 100) / 5000 <= 65 for number in sent.values())
    assert len(sent) == 2
    kinds = {labels[2] for labels in values(families, "gpu_nvlink_errors_total")}
    assert "malformed_packet" in kinds
    assert "crc_flit" not in kinds
