"""Performance counters of GPUs and MIG instances: replays on a simulated clock."""

from __future__ import annotations

import pytest
from gpu_support import MIG_MACHINE, label_values, replay, small_machine

GPM_METRICS = 'gpm: {"2": 60, "5": 130, "7": -0.2, "10": 40, "20": 100}'
SM_ACTIVITY, TRANSMIT_BYTES = "gpu_sm_activity_ratio", "gpu_pcie_transmit_bytes_total"


def test_percentages_become_ratios_and_rates_become_bytes() -> None:
    result = replay(small_machine(model=GPM_METRICS), 21)

    assert result.values(SM_ACTIVITY, "0") == {(): 0.6}
    assert result.values("gpu_tensor_activity_ratio", "0") == {(): 1.0}
    assert result.values("gpu_pipe_activity_ratio", "0") == {("hmma",): 0.0}
    assert result.values(TRANSMIT_BYTES, "0") == {(): 100 * 2**20 * 21.0}


def test_samples_too_close_in_time_are_not_compared() -> None:
    result = replay(small_machine(model=GPM_METRICS), 2, period=0.01)

    # A pass takes place every 50 ms. If the child compared samples so close in time, every ratio would be NaN.
    assert result.values(SM_ACTIVITY, "0") == {(): 0.6}
    assert result.values("exporter_nvml_errors_total") == {}


@pytest.mark.parametrize("newest", [2, 7, 20])
def test_a_metric_unknown_to_the_driver_affects_no_other(newest: int) -> None:
    result = replay(small_machine(model=GPM_METRICS, head=f"newest_metric: {newest}"), 60)

    assert result.values(SM_ACTIVITY, "0") == {(): 0.6}
    assert bool(result.values("gpu_tensor_activity_ratio", "0")) == (newest >= 5)
    assert bool(result.values("gpu_pipe_activity_ratio", "0")) == (newest >= 7)
    assert bool(result.values(TRANSMIT_BYTES)) == (newest >= 20)
    assert result.values("exporter_nvml_errors_total") == {}


@pytest.mark.parametrize("error", ["UNKNOWN", "NOT_SUPPORTED"])
@pytest.mark.parametrize("call", ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"])
def test_activity_that_is_no_longer_measured_is_absent(call: str, error: str) -> None:
    result = replay(small_machine(f"at: 20s, errors: {{{call}: {error}}}", model=GPM_METRICS), 40)

    assert 0.6 in result.readings("sm_activity_ratio")
    assert result.values(SM_ACTIVITY) == result.values(TRANSMIT_BYTES) == {}


@pytest.mark.parametrize(
    "fault",
    ["delay: {nvmlGpmSampleGet: 300ms}", "errors: {nvmlGpmQueryDeviceSupport: MEMORY}"],
    ids=["slow sample", "support unknown"],
)
@pytest.mark.parametrize("has_utilization", [True, False], ids=["utilization", "no utilization"])
def test_busy_time_counts_once_while_performance_counters_pause_and_return(
    fault: str, *, has_utilization: bool
) -> None:
    faults = [f"at: {start}s, until: {start + 4}s, {fault}" for start in (20, 80)]
    if not has_utilization:
        faults.append(
            "errors: {nvmlDeviceGetSamples: NOT_SUPPORTED, nvmlDeviceGetUtilizationRates: NOT_SUPPORTED}"
        )
    result = replay(small_machine(*faults, model='gpm: {"1": 50, "20": 100}', count=1), 150)
    totals = [total for total in result.readings("busy_seconds") if total is not None]

    assert totals == sorted(totals)
    assert totals[-1] == pytest.approx(75, abs=1)
    assert result.values("gpu_pcie_transmit_bytes_total", "0") == {
        (): pytest.approx(150 * 100 * 2**20, rel=0.03)
    }


def test_a_repartitioned_gpu_shows_only_its_new_instances() -> None:
    description = small_machine(
        MIG_MACHINE,
        "at: 31s, gpus: [0], mig: [{gi: 1, profile: 3g.40gb, memory: 3000}]",
        "at: 40s, until: 80s, gpus: [1], mig: []",
        model=GPM_METRICS,
    )
    at_30_s, at_45_s, at_141_s = (replay(description, seconds) for seconds in (30, 45, 141))
    (removed_uuid,) = [
        mig_uuid for mig_uuid, gpu_instance, *_ in at_30_s.values("gpu_mig_info", "0") if gpu_instance == "1"
    ]
    ratios = at_30_s.values("gpu_mig_sm_activity_ratio")

    assert len(ratios) == 4
    assert set(ratios.values()) == {0.6}
    assert at_30_s.values(SM_ACTIVITY) == {}  # the family of the whole GPU is absent while MIG is enabled
    assert label_values(at_45_s.families(), "gpu_mig_info", "gpu") == ["0"]
    assert label_values(at_45_s.families(), "gpu_mig_info", "profile") == ["3g.40gb"]
    assert removed_uuid not in label_values(at_45_s.families(), "gpu_mig_memory_total_bytes", "mig_uuid")
    assert set(at_45_s.values("gpu_mig_sm_activity_ratio").values()) == {0.6}
    assert len(at_141_s.values("gpu_mig_info")) == 3
