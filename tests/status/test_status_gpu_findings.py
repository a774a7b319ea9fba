"""Findings of the status page about GPUs: loss, throttling, Xids, and uncorrected memory errors with their times."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from places import PROJECT
from status_support import (
    GPU_3,
    GPU_3_LABELS,
    JOB,
    NOW,
    Rows,
    finding_texts,
    finding_views_of,
    history_of,
    run_sample,
    status_page,
    uncorrected_errors,
    view_of,
)

from exporter.status.attention import FindingStarts
from exporter.status.conditions import findings
from exporter.status.conditions.gpus import CRITICAL_XIDS, WARNING_XIDS
from exporter.status.history import History


def allocation_retries(*ranks: str) -> Rows:
    return {
        "training_gpu_alloc_retries_total": [
            ({"run": "night", "rank": rank, "gpu": "3"}, 2.0) for rank in ranks
        ]
    }


def test_ranks_that_free_cached_memory_are_named() -> None:
    history = history_of(
        4,
        lambda tick: {
            name: [(labels, value * tick) for labels, value in rows]  # type: ignore[operator]  # numbers
            for name, rows in allocation_retries("0", "1").items()
        },
    )

    assert finding_texts(JOB, history=history) == [
        "Ranks 0-1 of night freed cached memory of GPU 3 to continue."
    ]


@pytest.mark.parametrize("reasons", [("hw_thermal",), ("thermal",), ("thermal", "sw_thermal")])
def test_lost_missing_and_throttled_gpus_are_findings(reasons: tuple[str, ...]) -> None:
    name = "gpu_clocks_event_seconds_total"
    history = history_of(
        3, lambda tick: {name: [({**GPU_3_LABELS, "reason": reason}, 4.0 * tick) for reason in reasons]}
    )
    rows: Rows = {
        "gpu_up": [({"gpu": "0", "uuid": "GPU-0"}, 0.0), (GPU_3_LABELS, 1.0)],
        "gpu_error_info": [({"gpu": "0", "uuid": "GPU-0", "reason": "gpu_is_lost"}, 1.0)],
        "gpu_devices": [({}, 2.0)],
        "gpu_devices_expected": [({}, 8.0)],
        "gpu_recovery_action": [(GPU_3_LABELS, 1.0)],
    }

    assert finding_texts(rows, history=history) == [
        "GPU 0 does not answer (gpu_is_lost). It is GPU-0.",
        "Only 2 of 8 GPUs respond.",
        "The driver requests a recovery of GPU 3: reset the GPU.",
        f"Heat slows GPU 3 80 % of the time ({reasons[-1]}).",
    ]


def throttling(*reasons: str, seconds_per_tick: float) -> Callable[[int], Rows]:
    """Return the counters of a GPU at each tick of 5 s."""
    return lambda tick: {
        "gpu_clocks_event_seconds_total": [
            ({**GPU_3_LABELS, "reason": reason}, seconds_per_tick * tick) for reason in reasons
        ]
    }


def test_a_jump_of_a_throttling_counter_is_not_throttling() -> None:
    history = history_of(3, throttling("hw_thermal", "hw_power_brake", seconds_per_tick=500.0))

    assert finding_texts(GPU_3, history=history) == []
    assert "throttled" not in status_page(GPU_3, history=history).visible_text


def test_throttling_for_several_reasons_at_the_same_time_counts_once() -> None:
    history = history_of(3, throttling("hw_thermal", "sw_thermal", seconds_per_tick=4.0))

    assert "throttled 80 % (hw_thermal)" in status_page(GPU_3, history=history).visible_text


def test_a_lost_gpu_keeps_its_model_and_has_the_address_and_the_serial_number_of_the_device() -> None:
    info: Rows = {
        "gpu_info": [({**GPU_3_LABELS, "name": "H100", "pci_bus_id": "0000:13:00.0", "serial": "165"}, 1.0)]
    }
    lost: Rows = GPU_3 | {"gpu_up": [(GPU_3_LABELS, 0.0)]}
    history = history_of(3, lambda tick: GPU_3 | info if tick < 2 else lost)

    assert finding_texts(lost, history=history) == [
        "GPU 3 (rank 5 of night) does not answer. It is GPU-3, PCI 0000:13:00.0, serial number 165."
    ]
    assert "GPUs (1) · H100" in status_page(lost, history=history).visible_text


def test_a_gpu_with_mig_devices_has_their_number_by_profile() -> None:
    devices: Rows = {
        "gpu_mig_info": [({**GPU_3_LABELS, "gi": str(gi), "profile": "3g.40gb"}, 1.0) for gi in (1, 2)]
    }

    assert "2 of 3g.40gb" in status_page(GPU_3 | devices).visible_text


def xid(code: int, age_seconds: float) -> Rows:
    return {"gpu_xid_last_timestamp_seconds": [({**GPU_3_LABELS, "xid": str(code)}, NOW - age_seconds)]}


@pytest.mark.parametrize(
    ("code", "meaning", "age_seconds", "age_text", "is_urgent"),
    [
        (48, "uncorrectable memory error", 300.0, "5 min ago (", True),
        (48, "uncorrectable memory error", 7000.0, "117 min ago (", False),
        (94, "contained memory error: only its program ended", 300.0, "5 min ago (", False),
    ],
)
def test_an_xid_is_a_finding_with_meaning_gpu_rank_and_time(
    code: int, meaning: str, age_seconds: float, age_text: str, is_urgent: bool
) -> None:
    (finding,) = finding_views_of(GPU_3 | xid(code, age_seconds))

    assert finding.is_urgent is is_urgent
    assert finding.text == f"GPU 3 (rank 5 of night) reported Xid {code} ({meaning})."
    assert finding.time_text.startswith(age_text)


def test_an_xid_of_the_program_is_no_finding() -> None:
    assert finding_texts(GPU_3 | xid(13, 5)) == []


def test_a_lost_gpu_and_the_gpu_of_a_dead_rank_name_their_last_holder() -> None:
    history = History()
    history.record_holders({"GPU-3": frozenset({("night", "5")})})
    history.record_holders({"GPU-3": frozenset()})
    lost_gpu: Rows = {"gpu_up": [(GPU_3_LABELS, 0.0)]}
    gpu_in_use = GPU_3 | {
        "training_rank_info": [({"run": "day", "rank": "0", **GPU_3_LABELS}, 1.0)],
        "training_feed_alive": [({"run": "day", "rank": "0"}, 1.0)],
    }

    shared: Rows = {"training_energy_share_ratio": run_sample(0.5, component="gpu", device="GPU-3")}
    assert finding_texts(lost_gpu, history=history) == [
        "GPU 3 (last held by rank 5 of night) does not answer. It is GPU-3."
    ]
    assert finding_texts(lost_gpu | shared, history=history) == [
        "GPU 3 (rank 5 of night) does not answer. It is GPU-3."
    ]
    assert finding_texts(gpu_in_use | xid(48, 5), history=history) == [
        "GPU 3 (rank 0 of day) reported Xid 48 (uncorrectable memory error)."
    ]


def test_the_xids_are_those_of_the_alerts() -> None:
    rules = (PROJECT / "deploy/prometheus/rules/alerts-gpu.yml").read_text()
    critical, warning = re.findall(r"gpu_xid_last_timestamp_seconds\{xid=~\"([^\"]+)\"", rules)[:2]

    assert {number for number in range(1, 300) if re.fullmatch(critical, str(number))} == CRITICAL_XIDS
    assert {number for number in range(1, 300) if re.fullmatch(warning, str(number))} == WARNING_XIDS


def test_uncorrected_memory_errors_are_urgent_for_an_hour_and_remain_a_finding() -> None:
    history = history_of(
        60, lambda minute: uncorrected_errors(0.0 if minute < 30 else 2.0), interval_seconds=60.0
    )
    text = "GPU 3 (rank 5 of night) has had 2 uncorrected ECC errors since the driver was loaded"

    (recent,), (earlier,) = (
        finding_views_of(GPU_3 | uncorrected_errors(2.0), history=history),
        finding_views_of(GPU_3 | uncorrected_errors(2.0)),
    )
    assert recent.text == f"{text}."
    assert recent.is_urgent is True
    assert earlier.text == f"{text}."
    assert earlier.is_urgent is False
    assert finding_texts(GPU_3 | uncorrected_errors(0.0)) == []


def test_a_finding_links_to_the_runbook_entry_of_its_alert() -> None:
    document = status_page(GPU_3 | xid(48, 5))

    assert "/runbook#gpuxidcritical" in document.links


def uncorrected_time_texts(starts: FindingStarts, history: History, count: float) -> list[str]:
    """Return the time texts of the page, and record the findings of a pass at `NOW`."""
    rows = GPU_3 | uncorrected_errors(count)
    starts.record(NOW, findings(view_of(rows, history)))
    return [finding.time_text for finding in finding_views_of(rows, history=history, starts=starts)]


def test_an_ecc_error_that_has_left_the_history_keeps_its_time() -> None:
    starts = FindingStarts()
    starts.record(NOW - 9000, [])
    recent = history_of(3, lambda tick: uncorrected_errors(float(tick == 2)))
    error_text = uncorrected_time_texts(starts, recent, 1.0)
    constant = history_of(3, lambda tick: uncorrected_errors(1.0))

    assert error_text == ["5.0 s ago (1970-01-01 02:46 UTC)"]
    assert uncorrected_time_texts(starts, constant, 1.0) == error_text


def test_only_an_ecc_error_of_the_first_pass_is_older_than_the_exporter() -> None:
    constant = history_of(3, lambda tick: uncorrected_errors(1.0))
    first_pass, later_pass = FindingStarts(), FindingStarts()
    later_pass.record(NOW - 9000, [])

    assert uncorrected_time_texts(first_pass, constant, 1.0) == ["before the start of the exporter"]
    assert uncorrected_time_texts(later_pass, constant, 1.0) == ["at an unknown time"]
