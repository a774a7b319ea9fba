"""Conditions of GPUs: lost and defective GPUs, memory errors, throttling, and idle GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from exporter.status.condition import AlertSeverity, Condition, Match
from exporter.status.conditions.runs import LOST_GPU_REMEDY
from exporter.status.formatting import share
from exporter.status.thresholds import GPU_IDLE_RATIO, GPU_STRAGGLER_RATIO
from exporter.status.view import THERMAL_REASON, Gpu, View, clock_event_ratio
from exporter.status.xids import with_meaning

# The Xids of the alerts GpuXidCritical and GpuXidWarning; the alerts have the reasons.
CRITICAL_XIDS = frozenset({46, 48, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158})
WARNING_XIDS = frozenset({94, *range(144, 151)})
EVENT_SECONDS = 600.0
"""Time range of the alerts on Xids and uncorrected errors."""
KEPT_SECONDS = 3600.0
"""`keep_firing_for` of the alerts on Xids and uncorrected errors. Until then, an event is not past."""
RATE_SECONDS = 300.0
"""Time range of rates and means."""
MAX_HEAT_RATIOS = {"hw_thermal": 0.05, "sw_thermal": 0.1, THERMAL_REASON: 0.1}
"""Share of the time above which throttling for a thermal reason needs attention."""
MAX_BRAKE_RATIO = 0.01
"""Share of the time above which throttling by the external power brake needs attention."""
MIN_MARGIN_CELSIUS = 5.0
"""Distance from the slowdown temperature below which a GPU is nearly too hot."""
IDLE_SECONDS = 900.0
"""Time range of the utilization of an idle GPU."""
LOOKBACK_SECONDS = 300.0
"""Age up to which Prometheus uses a sample (`query.lookback-delta`)."""
RECOVERY_ACTIONS = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain peer to peer traffic",
    4: "drain the node and reset the GPU",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the system",
}
"""Text of each value of `gpu_recovery_action`, from NVML's `nvmlDeviceGpuRecoveryAction_t`."""


def _nvml_down(view: View) -> Iterator[Match]:
    value = view.samples.value
    expected = value("gpu_devices_expected")
    if value("gpu_nvml_up") == 0 and expected:
        errors = [labels.get("reason", "") for labels, _ in view.samples.select("gpu_nvml_error_info")]
        reason = f" ({', '.join(errors)})" if errors else ""
        yield Match((), {"expected": f"{expected:.0f}", "reason": reason})


def _lost_gpus(view: View) -> Iterator[Match]:
    for gpu in view.gpus:
        if not gpu.is_up:
            errors = [labels["reason"] for labels, _ in view.samples.select("gpu_error_info", uuid=gpu.uuid)]
            reason = f" ({', '.join(errors)})" if errors else ""
            labels = view.history.find_gpu_labels(gpu.uuid)
            names = (("PCI", "pci_bus_id"), ("serial number", "serial"))
            identity = [f"{title} {labels[name]}" for title, name in names if labels.get(name)]
            facts = {"gpu": gpu.title, "index": gpu.index, "reason": reason}
            yield Match((gpu.uuid,), facts | {"identity": ", ".join([gpu.uuid, *identity])})


def _missing_gpus(view: View) -> Iterator[Match]:
    """Yield a match if fewer GPUs respond than expected. The page lists it under the first lost GPU, if any."""
    value = view.samples.value
    present, expected = value("gpu_devices"), value("gpu_devices_expected")
    if present is not None and expected is not None and present < expected:
        lost_uuid = next((gpu.uuid for gpu in view.gpus if not gpu.is_up), "")
        yield Match((), {"present": f"{present:.0f}", "expected": f"{expected:.0f}"}, gpu_uuid=lost_uuid)


def _critical_xids(view: View) -> Iterator[Match]:
    yield from _xids(view, CRITICAL_XIDS)


def _warning_xids(view: View) -> Iterator[Match]:
    yield from _xids(view, WARNING_XIDS)


def _xids(view: View, codes: frozenset[int]) -> Iterator[Match]:
    """Yield a match for each GPU and code. The time comes from NVML's event, otherwise from the history of the counter."""
    last_times = {
        (labels["uuid"], labels["xid"]): timestamp
        for labels, timestamp in view.samples.select("gpu_xid_last_timestamp_seconds")
    }
    titles = {gpu.uuid: gpu.title for gpu in view.gpus}
    counted_xids = [(uuid, xid) for uuid, xid in view.history.list_owners("xid")]
    for uuid, xid in sorted({*last_times, *counted_xids}):
        if not xid.isdecimal() or int(xid) not in codes or uuid not in titles:
            continue
        increase = view.history.compute_increase("xid", uuid, xid, seconds=EVENT_SECONDS + KEPT_SECONDS)
        last_event_at = last_times.get((uuid, xid)) or (increase.last_at if increase else None)
        if last_event_at is None:
            continue
        count = view.samples.total("gpu_xid_errors_total", uuid=uuid, xid=xid) or 1
        times = f" {count:.0f} times" if count > 1 else ""
        yield Match(
            (uuid, xid),
            {"gpu": titles[uuid], "xid": with_meaning(xid), "times": times},
            start=last_event_at,
            is_event=True,
            is_past=view.exporter.now - last_event_at >= EVENT_SECONDS + KEPT_SECONDS,
        )


def _requested_recoveries(view: View) -> Iterator[Match]:
    for gpu in view.gpus:
        action = view.samples.value("gpu_recovery_action", uuid=gpu.uuid)
        if action:
            text = RECOVERY_ACTIONS.get(round(action), f"recovery action {action:.0f}")
            yield Match((gpu.uuid,), {"gpu": gpu.title, "action": text})


def _required_resets(view: View) -> Iterator[Match]:
    for gpu in view.gpus:
        if view.samples.value("gpu_reset_required", uuid=gpu.uuid):
            yield Match((gpu.uuid,), {"gpu": gpu.title, "index": gpu.index})


def _uncorrected_errors(view: View) -> Iterator[Match]:
    """Yield a match for each GPU with errors since the driver was loaded. Errors before the history have no time, and are past."""
    for gpu in view.gpus:
        count = view.samples.total("gpu_ecc_errors_total", uuid=gpu.uuid, kind="uncorrected")
        if count:
            increase = view.history.compute_increase(
                "uncorrected", gpu.uuid, seconds=EVENT_SECONDS + KEPT_SECONDS, starts_at_zero=False
            )
            errors = f"{count:.0f} uncorrected ECC error{'s' if count > 1 else ''}"
            yield Match(
                (gpu.uuid,),
                {"gpu": gpu.title, "errors": errors},
                start=increase.first_at if increase else None,
                last_event_at=increase.last_at if increase else None,
                is_event=True,
                is_past=increase is None,
            )


def _failed_remaps(view: View) -> Iterator[Match]:
    yield from _gpus_with_flag(view, "gpu_remapped_rows_failed")


def _pending_remaps(view: View) -> Iterator[Match]:
    yield from _gpus_with_flag(view, "gpu_remapped_rows_pending")


def _gpus_with_flag(view: View, family: str) -> Iterator[Match]:
    """Yield a match for each GPU whose gauge *family* is 1."""
    for gpu in view.gpus:
        if view.samples.value(family, uuid=gpu.uuid) == 1:
            yield Match((gpu.uuid,), {"gpu": gpu.title})


def _heat_throttled_gpus(view: View) -> Iterator[Match]:
    for gpu in view.gpus:
        ratio_by_reason = {reason: _clock_event_ratio(view, gpu, reason) for reason in MAX_HEAT_RATIOS}
        if ratio_by_reason["sw_thermal"] is not None:
            # The driver reports the specific reasons, which have their own thresholds and are part of the general reason.
            ratio_by_reason[THERMAL_REASON] = None
        exceeded_ratios = {
            reason: ratio
            for reason, ratio in ratio_by_reason.items()
            if ratio and ratio > MAX_HEAT_RATIOS[reason]
        }
        if exceeded_ratios:
            reason, ratio = max(exceeded_ratios.items(), key=lambda item: item[1])
            yield Match((gpu.uuid,), {"gpu": gpu.title, "share": share(ratio), "reason": reason})


def _clock_event_ratio(view: View, gpu: Gpu, reason: str) -> float | None:
    """Return the share of the time in which the clocks were reduced for a reason, or None if unknown."""
    return clock_event_ratio(
        view.history.compute_mean_rate("clock events", gpu.uuid, reason, seconds=RATE_SECONDS)
    )


def _power_braked_gpus(view: View) -> Iterator[Match]:
    for gpu in view.gpus:
        ratio = _clock_event_ratio(view, gpu, "hw_power_brake")
        if ratio and ratio > MAX_BRAKE_RATIO:
            yield Match((gpu.uuid,), {"gpu": gpu.title, "share": share(ratio)})


def _nearly_hot_gpus(view: View) -> Iterator[Match]:
    """Yield a match for each GPU near the slowdown temperature, or near the nearest threshold if NVML reports only the margin."""
    value = view.samples.value
    for gpu in view.gpus:
        limit = value("gpu_temperature_threshold_celsius", uuid=gpu.uuid, threshold="slowdown")
        temperature = value("gpu_temperature_celsius", uuid=gpu.uuid, sensor="gpu")
        margin = value("gpu_temperature_margin_celsius", uuid=gpu.uuid, threshold="nearest")
        if limit is not None and temperature is not None:
            margin = limit - temperature
        if margin is not None and margin < MIN_MARGIN_CELSIUS:
            yield Match((gpu.uuid,), {"gpu": gpu.title, "margin": f"{margin:.0f}"})


def _idle_gpus(view: View) -> Iterator[Match]:
    training = {run for run in view.runs if _has_trained(view, run)}
    for gpu in view.gpus:
        if not gpu.runs & training:
            continue
        busy_ratio = view.history.compute_mean_rate("busy seconds", gpu.uuid, seconds=IDLE_SECONDS)
        if busy_ratio is None:
            busy_ratio = view.history.compute_mean("busy", gpu.uuid, seconds=IDLE_SECONDS)
        if busy_ratio is not None and busy_ratio < GPU_IDLE_RATIO:
            yield Match((gpu.uuid,), {"gpu": gpu.title, "share": share(busy_ratio)})


def _has_trained(view: View, run: str) -> bool:
    """Return True if the run has had trainers for `IDLE_SECONDS` and has not been starting in this time."""
    range_start = view.exporter.now - IDLE_SECONDS
    levels = view.history.read_levels("trainers", run, seconds=IDLE_SECONDS + LOOKBACK_SECONDS)
    return (
        bool(view.samples.total("training_process_instances", run=run, role="trainer"))
        and any(trainers for timestamp, trainers in levels if timestamp <= range_start)
        and not view.history.compute_mean("starting", run, seconds=IDLE_SECONDS)
    )


def _slow_gpus(view: View) -> Iterator[Match]:
    """Yield a match for each GPU and signal below the median of the GPUs that the same run uses on this node."""
    for track, signal in (("clock", "SM clock"), ("power", "power"), ("SM activity", "SM activity")):
        means = {
            gpu: view.history.compute_mean(track, gpu.uuid, seconds=RATE_SECONDS)
            for gpu in view.gpus
            if gpu.runs
        }
        for run in sorted({run for gpu in means for run in gpu.runs}):
            run_means = {gpu: mean for gpu, mean in means.items() if run in gpu.runs and mean is not None}
            run_median = median(run_means.values()) if run_means else 0.0
            for gpu, mean in run_means.items():
                if mean < GPU_STRAGGLER_RATIO * run_median:
                    facts = {
                        "gpu": gpu.title,
                        "signal": signal,
                        "run": run,
                        "share": share(mean / run_median),
                    }
                    yield Match((gpu.uuid, run, track), facts)


CONDITIONS = (
    Condition(
        alert_name="NvmlDown",
        criterion="no answer of NVML where GPUs are expected",
        severity=AlertSeverity.CRITICAL,
        sentence="NVML does not respond{reason}, and {expected} GPUs are expected",
        remedy="check nvidia-smi and dmesg; reload the driver or reboot the node",
        find_matches=_nvml_down,
    ),
    Condition(
        alert_name="GpuLost",
        criterion="a GPU that does not answer",
        severity=AlertSeverity.CRITICAL,
        sentence="{gpu} does not answer{reason}. It is {identity}",
        remedy=LOST_GPU_REMEDY,
        is_cause=True,
        find_matches=_lost_gpus,
    ),
    Condition(
        alert_name="GpuMissing",
        criterion="fewer GPUs than expected",
        severity=AlertSeverity.CRITICAL,
        sentence="only {present} of {expected} GPUs respond",
        remedy="compare lspci with nvidia-smi -L; drain and reboot the node",
        find_matches=_missing_gpus,
    ),
    Condition(
        alert_name="GpuXidCritical",
        criterion="Xid 46|48|54|62|64|74|79|95|109|110|119|120|136|140|143|155|156|158 in the last 10m",
        severity=AlertSeverity.CRITICAL,
        sentence="{gpu} reported Xid {xid}{times}",
        remedy="drain the node, reset or reboot it, and run the vendor's diagnostics",
        find_matches=_critical_xids,
    ),
    Condition(
        alert_name="GpuXidWarning",
        criterion="Xid 94 or 144 to 150 in the last 10m",
        sentence="{gpu} reported Xid {xid}{times}",
        remedy="restart the run; reset the GPU when it is free",
        find_matches=_warning_xids,
    ),
    Condition(
        alert_name="GpuRecoveryActionNeeded",
        criterion="the driver requests any recovery",
        severity=AlertSeverity.CRITICAL,
        sentence="the driver requests a recovery of {gpu}: {action}",
        remedy="{action}, after the job has left the node",
        find_matches=_requested_recoveries,
    ),
    Condition(
        criterion="gpu_reset_required is 1",
        severity=AlertSeverity.CRITICAL,
        sentence="{gpu} needs a reset before the driver can use the GPU",
        remedy="drain the node, then reset the GPU: nvidia-smi --gpu-reset -i {index}",
        find_matches=_required_resets,
    ),
    Condition(
        alert_name="GpuEccUncorrected",
        criterion="any uncorrected memory error in 10m",
        severity=AlertSeverity.CRITICAL,
        sentence="{gpu} has had {errors} since the driver was loaded",
        remedy="return to a checkpoint from before the error, and reset the GPU",
        find_matches=_uncorrected_errors,
    ),
    Condition(
        alert_name="GpuRowRemapFailed",
        criterion="remapping of a memory row failed",
        severity=AlertSeverity.CRITICAL,
        sentence="a memory row of {gpu} could not be remapped",
        remedy="replace the GPU",
        find_matches=_failed_remaps,
    ),
    Condition(
        alert_name="GpuRowRemapPending",
        criterion="remapping of a memory row is pending until the next reset",
        sentence="a memory row of {gpu} will be remapped at the next reset",
        remedy="reset the GPU when its job is over",
        find_matches=_pending_remaps,
    ),
    Condition(
        alert_name="GpuThermalThrottle",
        criterion=(
            "throttled by heat for more than 0.05 (hardware) or 0.1 (software, or either before driver 575) of the time"
        ),
        sentence="heat slows {gpu} {share} of the time ({reason})",
        remedy="check fans and air flow; until then lower the power limit: nvidia-smi -pl",
        find_matches=_heat_throttled_gpus,
    ),
    Condition(
        alert_name="GpuPowerBrake",
        criterion="throttled by the external power brake for more than 0.01 of the time",
        severity=AlertSeverity.CRITICAL,
        sentence="the power supply or the rack brakes {gpu} {share} of the time",
        remedy="inform the operators of the data center, and move the job",
        find_matches=_power_braked_gpus,
    ),
    Condition(
        alert_name="GpuNearSlowdown",
        criterion="less than 5 °C below the board's own limit",
        sentence="{gpu} is {margin} °C below the temperature at which it slows down",
        remedy="check fans and air flow",
        find_matches=_nearly_hot_gpus,
    ),
    Condition(
        alert_name="GpuIdleWhileJobRuns",
        criterion=(
            "a run's GPU busy less than threshold:gpu_idle:ratio over 15m, and for 15m more; none of the time in the start of the run"
        ),
        sentence="{gpu} has been idle while its run trains ({share} busy)",
        remedy="release the GPU, or correct the launch (--nproc-per-node)",
        find_matches=_idle_gpus,
    ),
    Condition(
        alert_name="GpuStraggler",
        criterion="clock, power or SM activity below threshold:gpu_straggler:ratio of the median of the run's GPUs",
        sentence="the {signal} of {gpu} is {share} of the median of the GPUs of run {run}",
        remedy="check power limit, locked clocks and heat of the GPU",
        find_matches=_slow_gpus,
    ),
)
