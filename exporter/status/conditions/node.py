"""Conditions of the node, and of the resource limits of the job's container."""

from __future__ import annotations

from collections.abc import Iterator

from exporter.status.condition import AlertSeverity, Condition, Match
from exporter.status.numbers import share
from exporter.status.thresholds import CGROUP_MEMORY_RATIO
from exporter.status.view import View

RATE_SECONDS = 300.0
EVENT_SECONDS = 600.0
WAITING_RATIO, ACTIVE_RATIO = 0.3, 0.3
AT_LIMIT_RATIO, HALF_RATIO = 0.95, 0.5
PREDICTED_SECONDS = 3600.0
THROTTLED_RATIO = 0.25
SHM_RATIO = 0.9
ACTIVE_PORT = 4.0


def _starved(view: View) -> Iterator[Match]:
    samples = view.samples
    if any(rank.phase for rank in view.ranks) or any(True for _ in samples.select("training_phase_active")):
        return
    active = {labels["uuid"]: value for labels, value in samples.select("gpu_utilization_ratio")}
    active |= {labels["uuid"]: value for labels, value in samples.select("gpu_sm_activity_ratio")}
    pressure_ratio = view.history.rate_over("I/O pressure", seconds=RATE_SECONDS)
    sleeping = samples.total("training_process_state", state="disk_sleep")
    processes = samples.total("training_process_instances")
    sleeping_ratio = sleeping / processes if sleeping is not None and processes else None
    ratios = [ratio for ratio in (pressure_ratio, sleeping_ratio) if ratio is not None]
    waiting_ratio = next((ratio for ratio in ratios if ratio > WAITING_RATIO), None)
    if waiting_ratio is not None and active and sum(active.values()) / len(active) < ACTIVE_RATIO:
        yield Match((), {"share": share(waiting_ratio)})


def _memory_use_and_limit(view: View) -> tuple[float, float] | None:
    used = view.samples.value("cgroup_memory_working_set_bytes")
    limit = view.samples.value("cgroup_memory_limit_bytes")
    return (used, limit) if used is not None and limit else None


def _near_limit(view: View) -> Iterator[Match]:
    memory = _memory_use_and_limit(view)
    if memory is None:
        return
    used, limit = memory
    predictions = [
        view.history.predicted("working set", seconds=seconds, ahead_seconds=PREDICTED_SECONDS)
        for seconds in (1800.0, 600.0)
    ]
    recent = [value for _, value in view.history.levels("working set", seconds=600.0) if value is not None]
    grows = all(value is not None and value > limit for value in predictions)
    if used / limit > CGROUP_MEMORY_RATIO:
        yield Match((), {"share": share(used / limit), "forecast": ""})
    elif grows and recent and min(recent) / limit > HALF_RATIO:
        yield Match((), {"share": share(used / limit), "forecast": " and exceeds it within the hour"})


def _at_limit(view: View) -> Iterator[Match]:
    memory = _memory_use_and_limit(view)
    if memory is not None and memory[0] / memory[1] > AT_LIMIT_RATIO:
        yield Match((), {"share": share(memory[0] / memory[1])})


def _killed(view: View) -> Iterator[Match]:
    increase = view.history.increase("OOM kills", seconds=EVENT_SECONDS, starts_at_zero=False)
    if increase is not None:
        processes = f"{increase.amount:.0f} process{'es' if increase.amount > 1 else ''}"
        yield Match((), {"processes": processes}, since=increase.first_at, is_event=True)


def _throttled(view: View) -> Iterator[Match]:
    throttled = view.history.rate_over("throttled CPU periods", seconds=RATE_SECONDS)
    periods = view.history.rate_over("CPU periods", seconds=RATE_SECONDS)
    if throttled is not None and periods and throttled / periods > THROTTLED_RATIO:
        yield Match((), {"share": share(throttled / periods)})


def _shm(view: View) -> Iterator[Match]:
    used = view.samples.value("host_shm_used_bytes")
    size = view.samples.value("host_shm_size_bytes")
    if used is not None and size and used / size > SHM_RATIO:
        yield Match((), {"share": share(used / size)})


def _link_down(view: View) -> Iterator[Match]:
    for device, port in view.history.owners("port state"):
        states = [value for _, value in view.history.levels("port state", device, port) if value is not None]
        state = view.samples.value("host_rdma_port_state", device=device, port=port)
        if state is not None and state < ACTIVE_PORT and max(states, default=0.0) >= ACTIVE_PORT:
            yield Match((device, port), {"device": device, "port": port, "state": f"{state:.0f}"})


def _link_errors(view: View) -> Iterator[Match]:
    for device, port in view.history.owners("link failures"):
        state = view.samples.value("host_rdma_port_state", device=device, port=port)
        increase = view.history.increase(
            "link failures", device, port, seconds=EVENT_SECONDS, starts_at_zero=False
        )
        if increase is not None and not (state is not None and state < ACTIVE_PORT):
            yield Match(
                (device, port), {"device": device, "port": port}, since=increase.first_at, is_event=True
            )


CONDITIONS = (
    Condition(
        alert_name="DataLoaderStarved",
        criterion="more than 0.3 waiting for I/O and GPUs less than 0.3 active",
        sentence="the job waits for storage {share} of the time while its GPUs idle",
        remedy="check the file server and the disks",
        find_matches=_starved,
    ),
    Condition(
        alert_name="CgroupMemoryNearLimit",
        criterion="more than threshold:cgroup_memory:ratio of the limit, or the trend of 30m exceeds the limit within 3600 s",
        sentence="the job uses {share} of its memory limit{forecast}",
        remedy="use fewer workers or less prefetching, or raise the limit",
        find_matches=_near_limit,
    ),
    Condition(
        alert_name="CgroupMemoryAtLimit",
        criterion="more than 0.95 of the limit",
        severity=AlertSeverity.CRITICAL,
        sentence="the job uses {share} of its memory limit: the kernel is about to kill a process",
        remedy="save a checkpoint now; use fewer workers, or raise the limit",
        find_matches=_at_limit,
    ),
    Condition(
        alert_name="CgroupOomKill",
        criterion="any process killed in 10m",
        severity=AlertSeverity.CRITICAL,
        sentence="the kernel killed {processes} of the job for lack of memory",
        remedy="use fewer workers, or raise the limit; restart the run if it hangs",
        find_matches=_killed,
    ),
    Condition(
        alert_name="CgroupCpuThrottled",
        criterion="throttled by the CPU limit in more than 0.25 of the periods",
        sentence="the CPU limit stops the job in {share} of the periods",
        remedy="raise or remove the CPU limit, or use fewer threads (OMP_NUM_THREADS)",
        find_matches=_throttled,
    ),
    Condition(
        alert_name="ShmAlmostFull",
        criterion="more than 0.9 of /dev/shm used",
        sentence="{share} of /dev/shm is used",
        remedy="raise its size (--shm-size), and remove files of dead jobs",
        find_matches=_shm,
    ),
    Condition(
        alert_name="IbLinkDown",
        criterion="an RDMA port that was active within a week and is not",
        severity=AlertSeverity.CRITICAL,
        sentence="port {port} of {device} is not active (state {state})",
        remedy="repair cable, transceiver or switch; drain the node until then",
        find_matches=_link_down,
    ),
    Condition(
        alert_name="IbErrors",
        criterion="a link that failed in 10m and does not stay down",
        sentence="the link of {device} port {port} went down and came back",
        remedy="replace cable or transceiver before the link stays down",
        find_matches=_link_errors,
    ),
)
