"""Conditions of the node, and of the resource limits of the job's container."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from exporter.status.condition import AlertSeverity, Condition, Match
from exporter.status.formatting import share
from exporter.status.thresholds import CGROUP_MEMORY_RATIO
from exporter.status.view import View

RATE_SECONDS = 300.0
"""Time range of rates."""
EVENT_SECONDS = 600.0
"""Time range of OOM kills and of link failures."""
WAITING_RATIO = 0.3
"""Share of the time above which the job waits for the storage too long."""
ACTIVE_RATIO = 0.3
"""Mean activity of the GPUs below which the wait for the storage needs attention."""
AT_LIMIT_RATIO = 0.95
"""Used share of the memory limit above which an OOM kill is near."""
MIN_TREND_RATIO = 0.5
"""Used share of the memory limit above which the trend of the memory is predicted."""
MIN_TREND_SECONDS = 540.0
"""Minimum time between the first and the last point of a trend. Nine minutes suffice for a range of ten: no point is exactly at the start."""
PREDICTED_SECONDS = 3600.0
"""Time after which the predicted memory is compared with the limit."""
THROTTLED_RATIO = 0.25
"""Share of the CPU periods above which throttling needs attention."""
SHM_RATIO = 0.9
"""Used share of /dev/shm above which it is almost full."""
ACTIVE_PORT = 4.0
"""Value of `host_rdma_port_state` for an active port."""


def _storage_waits(view: View) -> Iterator[Match]:
    """Yield a match if processes wait for I/O while the GPUs idle. For jobs with phases, the condition TrainingDataStall is more precise."""
    samples = view.samples
    has_phases = any(rank.phase for rank in view.ranks) or any(samples.select("training_phase_active"))
    if has_phases:
        return
    activity_by_gpu = {
        labels["uuid"]: ratio
        for family in ("gpu_utilization_ratio", "gpu_sm_activity_ratio")  # the latter is more precise
        for labels, ratio in samples.select(family)
    }
    pressure_ratio = view.history.compute_mean_rate("I/O pressure", seconds=RATE_SECONDS)
    sleeping_count = samples.total("training_process_state", state="disk_sleep")
    process_count = samples.total("training_process_instances")
    sleeping_ratio = sleeping_count / process_count if sleeping_count is not None and process_count else None
    ratios = [ratio for ratio in (pressure_ratio, sleeping_ratio) if ratio is not None]
    waiting_ratio = next((ratio for ratio in ratios if ratio > WAITING_RATIO), None)
    if waiting_ratio is not None and activity_by_gpu and mean(activity_by_gpu.values()) < ACTIVE_RATIO:
        yield Match((), {"share": share(waiting_ratio)})


def _memory_limit_bytes(view: View) -> float | None:
    """Return the memory limit of the job's container, or None without a limit."""
    return view.samples.value("cgroup_memory_limit_bytes") or None


def _memory_ratio(view: View) -> float | None:
    """Return the used share of the memory limit, or None if the use or the limit is unknown."""
    used_bytes = view.samples.value("cgroup_memory_working_set_bytes")
    limit_bytes = _memory_limit_bytes(view)
    return None if used_bytes is None or limit_bytes is None else used_bytes / limit_bytes


def _memory_near_limit(view: View) -> Iterator[Match]:
    used_ratio = _memory_ratio(view)
    if used_ratio is None:
        return
    if used_ratio > CGROUP_MEMORY_RATIO:
        yield Match((), {"share": share(used_ratio), "forecast": ""})
    elif _will_exceed_memory_limit(view):
        yield Match((), {"share": share(used_ratio), "forecast": " and exceeds it within the hour"})


def _will_exceed_memory_limit(view: View) -> bool:
    """Return True if the trends of both 30 and 10 minutes exceed the limit within `PREDICTED_SECONDS`.

    In the last 10 minutes, the job must always have used more than `MIN_TREND_RATIO` of the limit.
    """
    limit_bytes = _memory_limit_bytes(view)
    recent_levels = view.history.read_levels("working set", seconds=600.0)
    recent_bytes = [level for _, level in recent_levels if level is not None]
    if limit_bytes is None or not recent_bytes or min(recent_bytes) <= MIN_TREND_RATIO * limit_bytes:
        return False
    predictions = (
        view.history.predict(
            "working set", seconds=seconds, min_seconds=MIN_TREND_SECONDS, ahead_seconds=PREDICTED_SECONDS
        )
        for seconds in (1800.0, 600.0)
    )
    return all(predicted is not None and predicted > limit_bytes for predicted in predictions)


def _memory_at_limit(view: View) -> Iterator[Match]:
    used_ratio = _memory_ratio(view)
    if used_ratio is not None and used_ratio > AT_LIMIT_RATIO:
        yield Match((), {"share": share(used_ratio)})


def _oom_kills(view: View) -> Iterator[Match]:
    increase = view.history.compute_increase("OOM kills", seconds=EVENT_SECONDS, starts_at_zero=False)
    if increase is not None:
        processes = f"{increase.amount:.0f} process{'es' if increase.amount > 1 else ''}"
        yield Match((), {"processes": processes}, start=increase.first_at, is_event=True)


def _cpu_throttled(view: View) -> Iterator[Match]:
    throttled_rate = view.history.compute_mean_rate("throttled CPU periods", seconds=RATE_SECONDS)
    period_rate = view.history.compute_mean_rate("CPU periods", seconds=RATE_SECONDS)
    if throttled_rate is not None and period_rate and throttled_rate / period_rate > THROTTLED_RATIO:
        yield Match((), {"share": share(throttled_rate / period_rate)})


def _shm_almost_full(view: View) -> Iterator[Match]:
    used_bytes = view.samples.value("host_shm_used_bytes")
    size_bytes = view.samples.value("host_shm_size_bytes")
    if used_bytes is not None and size_bytes and used_bytes / size_bytes > SHM_RATIO:
        yield Match((), {"share": share(used_bytes / size_bytes)})


def _inactive_ports(view: View) -> Iterator[Match]:
    """Yield a match for each RDMA port that was active in the history and is not active now."""
    for device, port in view.history.list_owners("port state"):
        states = [
            value for _, value in view.history.read_levels("port state", device, port) if value is not None
        ]
        state = view.samples.value("host_rdma_port_state", device=device, port=port)
        if state is not None and state < ACTIVE_PORT and max(states, default=0.0) >= ACTIVE_PORT:
            yield Match((device, port), {"device": device, "port": port, "state": f"{state:.0f}"})


def _link_failures(view: View) -> Iterator[Match]:
    """Yield a match for each RDMA link that failed within `EVENT_SECONDS` and whose port is not inactive now."""
    for device, port in view.history.list_owners("link failures"):
        state = view.samples.value("host_rdma_port_state", device=device, port=port)
        increase = view.history.compute_increase(
            "link failures", device, port, seconds=EVENT_SECONDS, starts_at_zero=False
        )
        if increase is not None and not (state is not None and state < ACTIVE_PORT):
            yield Match(
                (device, port), {"device": device, "port": port}, start=increase.first_at, is_event=True
            )


CONDITIONS = (
    Condition(
        alert_name="DataLoaderStarved",
        criterion="more than 0.3 waiting for I/O and GPUs less than 0.3 active",
        sentence="the job waits for storage {share} of the time while its GPUs idle",
        remedy="check the file server and the disks",
        find_matches=_storage_waits,
    ),
    Condition(
        alert_name="CgroupMemoryNearLimit",
        criterion="more than threshold:cgroup_memory:ratio of the limit, or the trend of 30m exceeds the limit within 3600 s",
        sentence="the job uses {share} of its memory limit{forecast}",
        remedy="use fewer workers or less prefetching, or raise the limit",
        find_matches=_memory_near_limit,
    ),
    Condition(
        alert_name="CgroupMemoryAtLimit",
        criterion="more than 0.95 of the limit",
        severity=AlertSeverity.CRITICAL,
        sentence="the job uses {share} of its memory limit: the kernel is about to kill a process",
        remedy="save a checkpoint now; use fewer workers, or raise the limit",
        find_matches=_memory_at_limit,
    ),
    Condition(
        alert_name="CgroupOomKill",
        criterion="any process killed in 10m",
        severity=AlertSeverity.CRITICAL,
        sentence="the kernel killed {processes} of the job for lack of memory",
        remedy="use fewer workers, or raise the limit; restart the run if it hangs",
        find_matches=_oom_kills,
    ),
    Condition(
        alert_name="CgroupCpuThrottled",
        criterion="throttled by the CPU limit in more than 0.25 of the periods",
        sentence="the CPU limit stops the job in {share} of the periods",
        remedy="raise or remove the CPU limit, or use fewer threads (OMP_NUM_THREADS)",
        find_matches=_cpu_throttled,
    ),
    Condition(
        alert_name="ShmAlmostFull",
        criterion="more than 0.9 of /dev/shm used",
        sentence="{share} of /dev/shm is used",
        remedy="raise its size (--shm-size), and remove files of dead jobs",
        find_matches=_shm_almost_full,
    ),
    Condition(
        alert_name="IbLinkDown",
        criterion="an RDMA port that was active within a week and is not",
        severity=AlertSeverity.CRITICAL,
        sentence="port {port} of {device} is not active (state {state})",
        remedy="repair cable, transceiver or switch; drain the node until then",
        find_matches=_inactive_ports,
    ),
    Condition(
        alert_name="IbErrors",
        criterion="a link that failed in 10m and does not stay down",
        sentence="the link of {device} port {port} went down and came back",
        remedy="replace cable or transceiver before the link stays down",
        find_matches=_link_failures,
    ),
)
