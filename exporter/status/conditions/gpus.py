"""Conditions of GPUs: lost and broken cards, memory errors, heat, power, idle cards."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from exporter.status.condition import AlertSeverity, Condition, Found
from exporter.status.numbers import age, share
from exporter.status.thresholds import GPU_IDLE_RATIO, GPU_STRAGGLER_RATIO
from exporter.status.view import HEAT, Gpu, View

CRITICAL_XIDS = frozenset({46, 48, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158})
WARNING_XIDS = frozenset({94, *range(144, 151)})
EVENT_SECONDS = 600.0
KEPT_SECONDS = 3600.0
"""`keep_firing_for` of the alerts on Xids and uncorrected errors."""
RATE_SECONDS = 300.0
HEAT_RATIOS = {"hw_thermal": 0.05, "sw_thermal": 0.1, HEAT: 0.1}
BRAKE_RATIO = 0.01
LEAST_MARGIN_CELSIUS = 5.0
IDLE_SECONDS = 900.0
RECOVERY_ACTIONS = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain peer to peer traffic",
    4: "drain the node and reset the GPU",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the system",
}


def _nvml_down(seen: View) -> Iterator[Found]:
    value = seen.readings.value
    expected = value("gpu_devices_expected")
    if value("gpu_nvml_up") == 0 and expected:
        errors = [labels.get("reason", "") for labels, _ in seen.readings.rows("gpu_nvml_error_info")]
        reason = f" ({', '.join(errors)})" if errors else ""
        yield Found((), {"expected": f"{expected:.0f}", "reason": reason})


def _lost(seen: View) -> Iterator[Found]:
    for gpu in seen.gpus:
        if not gpu.up:
            errors = [labels["reason"] for labels, _ in seen.readings.rows("gpu_error_info", uuid=gpu.uuid)]
            reason = f" ({', '.join(errors)})" if errors else ""
            yield Found((gpu.uuid,), {"gpu": gpu.title, "index": gpu.index, "reason": reason})


def _missing(seen: View) -> Iterator[Found]:
    value = seen.readings.value
    found, expected = value("gpu_devices"), value("gpu_devices_expected")
    if found is not None and expected is not None and found < expected:
        yield Found((), {"found": f"{found:.0f}", "expected": f"{expected:.0f}"})


def _critical_xids(seen: View) -> Iterator[Found]:
    yield from _xids(seen, CRITICAL_XIDS)


def _warning_xids(seen: View) -> Iterator[Found]:
    yield from _xids(seen, WARNING_XIDS)


def _xids(seen: View, wanted: frozenset[int]) -> Iterator[Found]:
    last = {
        (labels["uuid"], labels["xid"]): at
        for labels, at in seen.readings.rows("gpu_xid_last_timestamp_seconds")
    }
    titles = {gpu.uuid: gpu.title for gpu in seen.gpus}
    for uuid, xid in sorted({*last, *((owner[0], owner[1]) for owner in seen.past.owners("xid"))}):
        if not xid.isdecimal() or int(xid) not in wanted or uuid not in titles:
            continue
        increase = seen.past.increase("xid", uuid, xid, seconds=EVENT_SECONDS + KEPT_SECONDS)
        at = last.get((uuid, xid)) or (increase.last if increase else None)
        if at is None:
            continue
        count = seen.readings.total("gpu_xid_errors_total", uuid=uuid, xid=xid) or 1
        times = f" {count:.0f} times" if count > 1 else ""
        yield Found(
            (uuid, xid),
            {"gpu": titles[uuid], "xid": xid, "times": times},
            since=at,
            event=True,
            is_past=seen.about.now - at >= EVENT_SECONDS + KEPT_SECONDS,
        )


def _recovery(seen: View) -> Iterator[Found]:
    for gpu in seen.gpus:
        action = seen.readings.value("gpu_recovery_action", uuid=gpu.uuid)
        if action:
            text = RECOVERY_ACTIONS.get(round(action), f"recovery action {action:.0f}")
            yield Found((gpu.uuid,), {"gpu": gpu.title, "action": text})


def _reset_required(seen: View) -> Iterator[Found]:
    for gpu in seen.gpus:
        if seen.readings.value("gpu_reset_required", uuid=gpu.uuid):
            yield Found((gpu.uuid,), {"gpu": gpu.title, "index": gpu.index})


def _uncorrected(seen: View) -> Iterator[Found]:
    for gpu in seen.gpus:
        count = seen.readings.total("gpu_ecc_errors_total", uuid=gpu.uuid, kind="uncorrected")
        if count:
            increase = seen.past.increase("uncorrected", gpu.uuid, seconds=EVENT_SECONDS + KEPT_SECONDS)
            last = f", the last {age(increase.last, seen.about.now)}" if increase else ""
            errors = f"{count:.0f} uncorrected ECC error{'s' if count > 1 else ''}"
            yield Found(
                (gpu.uuid,),
                {"gpu": gpu.title, "errors": errors, "last": last},
                since=increase.first if increase else None,
                event=True,
                is_past=increase is None,
            )


def _remap_failed(seen: View) -> Iterator[Found]:
    yield from _flagged(seen, "gpu_remapped_rows_failed")


def _remap_pending(seen: View) -> Iterator[Found]:
    yield from _flagged(seen, "gpu_remapped_rows_pending")


def _flagged(seen: View, family: str) -> Iterator[Found]:
    for gpu in seen.gpus:
        if seen.readings.value(family, uuid=gpu.uuid) == 1:
            yield Found((gpu.uuid,), {"gpu": gpu.title})


def _hot(seen: View) -> Iterator[Found]:
    for gpu in seen.gpus:
        rates = {reason: _clock_events(seen, gpu, reason) for reason in HEAT_RATIOS}
        if rates["sw_thermal"] is not None:
            rates[HEAT] = None  # contains the others
        over = {reason: rate for reason, rate in rates.items() if rate and rate > HEAT_RATIOS[reason]}
        if over:
            reason, rate = max(over.items(), key=lambda item: item[1])
            yield Found((gpu.uuid,), {"gpu": gpu.title, "share": share(rate), "reason": reason})


def _clock_events(seen: View, gpu: Gpu, reason: str) -> float | None:
    return seen.past.rate("clock events", gpu.uuid, reason, seconds=RATE_SECONDS)


def _braked(seen: View) -> Iterator[Found]:
    for gpu in seen.gpus:
        rate = _clock_events(seen, gpu, "hw_power_brake")
        if rate and rate > BRAKE_RATIO:
            yield Found((gpu.uuid,), {"gpu": gpu.title, "share": share(rate)})


def _near_limit(seen: View) -> Iterator[Found]:
    value = seen.readings.value
    for gpu in seen.gpus:
        limit = value("gpu_temperature_threshold_celsius", uuid=gpu.uuid, threshold="slowdown")
        now = value("gpu_temperature_celsius", uuid=gpu.uuid, sensor="gpu")
        margin = value("gpu_temperature_margin_celsius", uuid=gpu.uuid, threshold="nearest")
        if limit is not None and now is not None:
            margin = limit - now
        if margin is not None and margin < LEAST_MARGIN_CELSIUS:
            yield Found((gpu.uuid,), {"gpu": gpu.title, "margin": f"{margin:.0f}"})


def _idle(seen: View) -> Iterator[Found]:
    trainers = seen.readings.total("training_process_instances", role="trainer")
    for gpu in seen.gpus if trainers else ():
        busy = seen.past.rate("busy seconds", gpu.uuid, seconds=IDLE_SECONDS)
        if busy is None:
            busy = seen.past.mean("busy", gpu.uuid, seconds=IDLE_SECONDS)
        if busy is not None and busy < GPU_IDLE_RATIO:
            yield Found((gpu.uuid,), {"gpu": gpu.title, "share": share(busy)})


def _behind(seen: View) -> Iterator[Found]:
    for track, signal in (("clock", "SM clock"), ("power", "power"), ("SM activity", "SM activity")):
        means = {gpu: seen.past.mean(track, gpu.uuid, seconds=RATE_SECONDS) for gpu in seen.gpus if gpu.runs}
        for run in sorted({run for gpu in means for run in gpu.runs}):
            known = {gpu: mean for gpu, mean in means.items() if run in gpu.runs and mean is not None}
            usual = median(known.values()) if known else 0.0
            for gpu, mean in known.items():
                if mean < GPU_STRAGGLER_RATIO * usual:
                    facts = {"gpu": gpu.title, "signal": signal, "run": run, "share": share(mean / usual)}
                    yield Found((gpu.uuid, run, track), facts)


CONDITIONS = (
    Condition(
        alert="NvmlDown",
        condition="no answer of NVML where GPUs are expected",
        severity=AlertSeverity.CRITICAL,
        sentence="NVIDIA's library does not answer{reason}, and {expected} GPUs are expected",
        remedy="check nvidia-smi and dmesg; reload the driver or reboot the node",
        find=_nvml_down,
    ),
    Condition(
        alert="GpuLost",
        condition="a GPU that does not answer",
        severity=AlertSeverity.CRITICAL,
        sentence="{gpu} does not answer{reason}",
        remedy="drain the node, then reset the card: nvidia-smi --gpu-reset -i {index}",
        find=_lost,
    ),
    Condition(
        alert="GpuMissing",
        condition="fewer GPUs than expected",
        severity=AlertSeverity.CRITICAL,
        sentence="only {found} of {expected} GPUs answer",
        remedy="compare lspci with nvidia-smi -L; drain and reboot the node",
        find=_missing,
    ),
    Condition(
        alert="GpuXidCritical",
        condition="Xid 46|48|54|62|64|74|79|95|109|110|119|120|136|140|143|155|156|158 in the last 10m",
        severity=AlertSeverity.CRITICAL,
        sentence="{gpu} reported Xid {xid}{times}",
        remedy="drain the node, reset or reboot it, and run the vendor's diagnostics",
        find=_critical_xids,
    ),
    Condition(
        alert="GpuXidWarning",
        condition="Xid 94 or 144 to 150 in the last 10m",
        sentence="{gpu} reported Xid {xid}{times}",
        remedy="restart the run; reset the card when it is free",
        find=_warning_xids,
    ),
    Condition(
        alert="GpuRecoveryActionNeeded",
        condition="the driver requests any recovery",
        severity=AlertSeverity.CRITICAL,
        sentence="the driver requests a recovery of {gpu}: {action}",
        remedy="{action}, after the job has left the node",
        find=_recovery,
    ),
    Condition(
        condition="gpu_reset_required is 1",
        severity=AlertSeverity.CRITICAL,
        sentence="{gpu} needs a reset before the driver can use the card",
        remedy="drain the node, then reset the card: nvidia-smi --gpu-reset -i {index}",
        find=_reset_required,
    ),
    Condition(
        alert="GpuEccUncorrected",
        condition="any uncorrected memory error in 10m",
        severity=AlertSeverity.CRITICAL,
        sentence="{gpu}: {errors} since the driver was loaded{last}",
        remedy="return to a checkpoint from before the error, and reset the card",
        find=_uncorrected,
    ),
    Condition(
        alert="GpuRowRemapFailed",
        condition="a memory row could not be replaced",
        severity=AlertSeverity.CRITICAL,
        sentence="{gpu}: a memory row could not be remapped",
        remedy="replace the card",
        find=_remap_failed,
    ),
    Condition(
        alert="GpuRowRemapPending",
        condition="a memory row waits for the next reset",
        sentence="{gpu}: a memory row will be remapped at the next reset",
        remedy="reset the card when its job is over",
        find=_remap_pending,
    ),
    Condition(
        alert="GpuThermalThrottle",
        condition=(
            "held back by heat more than 0.05 (hardware) or 0.1 (software, or either before driver 575) of the time"
        ),
        sentence="heat slows {gpu} {share} of the time ({reason})",
        remedy="check fans and air flow; until then lower the power limit: nvidia-smi -pl",
        find=_hot,
    ),
    Condition(
        alert="GpuPowerBrake",
        condition="braked from outside more than 0.01 of the time",
        severity=AlertSeverity.CRITICAL,
        sentence="the power supply or the rack brakes {gpu} {share} of the time",
        remedy="inform the operators of the data centre, and move the job",
        find=_braked,
    ),
    Condition(
        alert="GpuNearSlowdown",
        condition="less than 5 °C below the board's own limit",
        sentence="{gpu} is {margin} °C below the temperature at which it slows down",
        remedy="check fans and air flow",
        find=_near_limit,
    ),
    Condition(
        alert="GpuIdleWhileJobRuns",
        condition="busy less than threshold:gpu_idle:ratio over 15m while a trainer runs on the machine",
        sentence="{gpu} has been idle while a job runs ({share} busy)",
        remedy="release the card, or correct the launch (--nproc-per-node)",
        find=_idle,
    ),
    Condition(
        alert="GpuStraggler",
        condition="clock, power or SM activity below threshold:gpu_straggler:ratio of the median of the run's GPUs",
        sentence="{gpu}: {signal} is {share} of the median of the run's GPUs",
        remedy="check power limit, locked clocks and heat of the card",
        find=_behind,
    ),
)
