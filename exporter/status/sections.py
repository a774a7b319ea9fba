"""Sections of the status page for ranks, GPUs, the machine, recorded statistics and collectors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from exporter.collectors.status import CollectorStatus
from exporter.status.condition import Finding
from exporter.status.elements import (
    MISSING,
    Figure,
    Plot,
    RichText,
    StyledText,
    Table,
    age_or_dash,
    append_current,
    figure,
    plot,
    styled,
    table,
    used_share,
    value_or_dash,
)
from exporter.status.formatting import duration, energy, exit_text, number, quantity, share, size, watts
from exporter.status.history import Line
from exporter.status.samples import SampleIndex
from exporter.status.view import Gpu, Rank, View

MAX_UNFOLDED_RANKS = 16
"""Maximum number of ranks outside the fold. Ranks that need attention are first."""
MIN_DISK_BYTES = 2**30
"""Smallest filesystem that can be named as the fullest disk."""
MAX_OPEN_STATISTICS = 8
"""Number of statistics up to which the fold is open."""
_WINDOW_GAUGES = ("_window_mean", "_window_last", "_window_p50", "_window_added", "_window_max")
"""Gauges that can represent a statistic, in order of preference."""
_PROCESS_STATES = {  # by `Rank.process_state`
    "alive": StyledText("alive", "good"),
    "ended early": StyledText("ended", "bad"),
    "slow": StyledText("slow", "warn"),
    "silent": StyledText("silent", "bad"),
    "hangs": StyledText("no progress", "bad"),
    "stalled": StyledText("no step", "warn"),
}
_FAULTS = {
    "GpuXidCritical": "Xid {1}",
    "GpuEccUncorrected": "memory errors",
    "GpuRecoveryActionNeeded": "recovery requested",
    "GpuRowRemapFailed": "row remapping failed",
}
"""Text in the state of a GPU by alert. The placeholders are the parts of the subject: `{1}` is the code of an Xid."""
_VERDICTS = {  # by `CollectorStatus.success`
    None: StyledText("not yet", "dim"),
    True: StyledText("ok", "good"),
    False: StyledText("failing", "bad"),
}


@dataclass(frozen=True, slots=True)
class TableSection:
    """Section with a table, and optionally a folded table and plots."""

    title: str
    note: str
    table: Table
    fold_table: Table | None = None
    plots: tuple[Plot, ...] = ()


@dataclass(frozen=True, slots=True)
class Fold:
    """Collapsible table."""

    key: str
    title: str
    is_open: bool
    table: Table


@dataclass(frozen=True, slots=True)
class MachineSection:
    """Section of the machine: processors, memory, disks, network and power."""

    figures: list[Figure]
    plots: list[Plot]


@dataclass(frozen=True, slots=True)
class FilesystemUse:
    """Used and total space of a mounted filesystem."""

    mount_point: str
    used_bytes: float
    size_bytes: float


def ranks_section(view: View) -> TableSection:
    """Return the section of the ranks. Ranks after the first `MAX_UNFOLDED_RANKS` are in a folded table."""
    now = view.exporter.now
    has_several_runs = len({rank.run for rank in view.ranks}) > 1
    has_other_nodes = any(rank.node not in {"", view.exporter.node} for rank in view.ranks)

    def row(rank: Rank) -> dict[str, RichText]:
        phase_duration = () if rank.phase_seconds is None else styled(duration(rank.phase_seconds), "dim")
        return {
            "run": styled(rank.run) if has_several_runs else (),
            "rank": styled(rank.rank),
            "GPU": styled(rank.gpu),
            "worker": styled(rank.worker),
            "role": styled(rank.role),
            "process": _process_text(rank),
            "phase": styled(rank.phase) + phase_duration if rank.phase and rank.alive else MISSING,
            "last step": age_or_dash(rank.progress_at, now),
            "compute time per step": value_or_dash(rank.compute_seconds if rank.alive else None, duration),
            "snapshot": age_or_dash(rank.updated_at, now),
            "node": styled(rank.node) if has_other_nodes else (),
        }

    numeric = {"rank", "worker", "last step", "compute time per step", "snapshot"}
    further_ranks = view.ranks[MAX_UNFOLDED_RANKS:]
    fold_table = None
    if further_ranks:
        fold_table = table(f"{len(further_ranks)} more ranks", further_ranks, row, numeric)
    return TableSection(
        title=f"Ranks ({len(view.ranks)})",
        note="",
        table=table("Ranks", view.ranks[:MAX_UNFOLDED_RANKS], row, numeric),
        fold_table=fold_table,
    )


def _process_text(rank: Rank) -> RichText:
    """Return the state of a process, with the reason of a failure."""
    if rank.failed_at is not None:
        return styled(f"ended, {exit_text(rank.exit_reason)}", "bad")
    return (_PROCESS_STATES.get(rank.process_state) or StyledText(rank.process_state, "dim"),)


def gpus_section(view: View, findings: Sequence[Finding]) -> TableSection:
    """Return the table and the plots of the GPUs. The state of a GPU includes its urgent findings of `_FAULTS`."""
    faults: dict[str, list[str]] = {}
    for finding in findings:
        name = _FAULTS.get(finding.condition.alert_name)
        if name and finding.is_urgent:
            faults.setdefault(finding.match.subject[0], []).append(name.format(*finding.match.subject))
    names = {gpu.uuid: view.history.find_gpu_labels(gpu.uuid).get("name", "") for gpu in view.gpus}
    names |= {labels["uuid"]: labels.get("name", "") for labels, _ in view.samples.select("gpu_info")}
    models = {names.get(gpu.uuid, "") for gpu in view.gpus}
    has_several_runs = len({rank.run for rank in view.ranks}) > 1
    colors = {gpu.uuid: index for index, gpu in enumerate(view.gpus)}

    def row(gpu: Gpu) -> dict[str, RichText]:
        def value(family: str, **labels: str) -> float | None:
            return view.samples.value(family, uuid=gpu.uuid, **labels)

        used, total = value("gpu_memory_used_bytes"), value("gpu_memory_total_bytes")
        power, limit = value("gpu_power_watts"), value("gpu_power_limit_watts", limit="enforced")
        users = [rank for rank in view.ranks if rank.uuid == gpu.uuid and rank.alive]
        holders = [
            f"{rank.rank or rank.role}{f' of {rank.run}' if has_several_runs else ''}" for rank in users
        ]
        of_total = () if used is None or total is None else styled(f"of {size(total)}", "dim")
        of_limit = styled(f"of {limit:.0f}", "dim") if power is not None and limit else ()
        return {
            "GPU": (StyledText(gpu.index, "", colors[gpu.uuid]),),
            "model": styled(names.get(gpu.uuid, "")) if len(models) > 1 else (),
            "rank": styled(", ".join(holders)),
            "state": _gpu_state(gpu, faults.get(gpu.uuid, ())),
            "MIG": styled(_mig_text(view.samples, gpu.uuid)),
            "busy": value_or_dash(value("gpu_utilization_ratio"), share),
            "tensor cores": value_or_dash(value("gpu_tensor_activity_ratio"), share),
            "memory": value_or_dash(used, size) + of_total,
            "power": value_or_dash(power, "{:.0f} W".format) + of_limit,
            "temperature": value_or_dash(value("gpu_temperature_celsius", sensor="gpu"), "{:.0f} °C".format),
            "energy": value_or_dash(view.samples.total("gpu_energy_joules_total", uuid=gpu.uuid), energy),
        }

    plots: list[Plot] = []
    now = view.exporter.now
    for title, track, family, unit in (
        ("GPU power", "power", "gpu_power_watts", "watts"),
        ("GPU memory", "memory", "gpu_memory_used_bytes", "bytes"),
    ):
        lines = {
            f"GPU {gpu.index}": append_current(
                view.history.read_levels(track, gpu.uuid), view.samples.value(family, uuid=gpu.uuid), now
            )
            for gpu in view.gpus
        }
        plots += plot(title, lines, unit, now, floor=0.0)
    numeric = {"GPU", "busy", "tensor cores", "memory", "power", "temperature", "energy"}
    return TableSection(
        title=f"GPUs ({len(view.gpus)})",
        note=next(iter(models)) if len(models) == 1 else "",
        table=table("GPUs", view.gpus, row, numeric),
        plots=tuple(plots),
    )


def _gpu_state(gpu: Gpu, faults: Sequence[str]) -> RichText:
    """Return the state of a GPU (up or lost), the urgent faults, and the share of time with throttling."""
    state = StyledText("lost", "bad")
    if gpu.is_up:
        state = StyledText("up", "" if faults or gpu.throttled_ratio else "good")
    text = f"throttled {share(gpu.throttled_ratio or 0.0)} ({gpu.throttling_reason})"
    throttled = styled(text, "warn") if gpu.throttled_ratio else ()
    return (state, *styled(", ".join(faults), "bad"), *throttled)


def _mig_text(samples: SampleIndex, uuid: str) -> str:
    """Return the number of MIG devices of a GPU by profile, such as "2 of 3g.40gb"; "" without MIG devices."""
    counts = Counter(labels.get("profile", "") for labels, _ in samples.select("gpu_mig_info", uuid=uuid))
    return ", ".join(f"{count} of {profile}" for profile, count in sorted(counts.items()))


def _fullest_filesystem(samples: SampleIndex) -> FilesystemUse | None:
    """Return the filesystem of at least `MIN_DISK_BYTES` with the largest used share, or None without one."""
    available_bytes = {
        labels["mountpoint"]: count for labels, count in samples.select("host_filesystem_avail_bytes")
    }
    filesystems = [
        FilesystemUse(labels["mountpoint"], size_bytes - available_bytes[labels["mountpoint"]], size_bytes)
        for labels, size_bytes in samples.select("host_filesystem_size_bytes")
        if size_bytes >= MIN_DISK_BYTES and labels["mountpoint"] in available_bytes
    ]
    return max(filesystems, key=lambda use: use.used_bytes / use.size_bytes, default=None)


def machine_section(view: View) -> MachineSection:
    """Return figures and plots of the machine."""
    history, now = view.history, view.exporter.now
    value, total = view.samples.value, view.samples.total
    memory, available = value("host_memory_total_bytes"), value("host_memory_available_bytes")
    used_memory = None if memory is None or available is None else memory - available
    fullest = _fullest_filesystem(view.samples)
    cpu, network, disk = (
        value("host_cpu_utilization_ratio"),
        history.compute_last_rate("network"),
        history.compute_last_rate("disk"),
    )

    def share_figure(name: str, used: float | None, total: float | None) -> list[Figure]:
        ratio, note = used_share(used, total, size)
        return figure(name, ratio, note) if ratio else []

    def per_second(count: float) -> str:
        return f"{size(count)}/s"

    def machine_plot(title: str, line: Line, unit: str, latest: float | None) -> list[Plot]:
        return plot(title, {title: line}, unit, now, floor=0.0, latest=latest)

    return MachineSection(
        figures=[
            *figure("CPU", value_or_dash(cpu, share)),
            *figure("CPUs", value_or_dash(value("host_cpus", kind="online"), number)),
            *share_figure("memory used", used_memory, memory),
            *share_figure("shared memory used", value("host_shm_used_bytes"), value("host_shm_size_bytes")),
            *(
                share_figure(f"fullest disk, {fullest.mount_point}", fullest.used_bytes, fullest.size_bytes)
                if fullest
                else []
            ),
            *figure("disks, read and written", value_or_dash(disk, per_second)),
            *figure("network, in and out", value_or_dash(network, per_second)),
            *figure("CPU power", value_or_dash(total("host_cpu_power_watts"), watts)),
            *figure("GPU power", value_or_dash(total("gpu_power_watts"), watts)),
        ],
        plots=[
            *machine_plot("CPU", append_current(history.read_levels("cpu"), cpu, now), "ratio", cpu),
            *machine_plot("network per second", history.compute_rates("network"), "bytes", network),
            *machine_plot("disks per second", history.compute_rates("disk"), "bytes", disk),
        ],
    )


def statistics_fold(view: View) -> Fold | None:
    """Return the folded table of the recorded statistics, or None without statistics."""
    samples = view.samples
    names = sorted(samples.names())
    stems = [name.removesuffix("_window_samples") for name in names if name.endswith("_window_samples")]
    if not stems:
        return None
    window_counts = {stem: [count for _, count in samples.select(f"{stem}_window_samples")] for stem in stems}

    def row(stem: str) -> dict[str, RichText]:
        # A name may have the unit after the suffix; a longer name may belong to another statistic.
        gauges = ([name for name in names if name.startswith(stem + suffix)] for suffix in _WINDOW_GAUGES)
        gauge = min(next(filter(None, gauges), [""]), key=len)
        values = [value for _, value in samples.select(gauge)]
        bounds = (
            [quantity(bound, samples.unit(gauge)) for bound in (min(values), max(values))] if values else []
        )
        empty_count, rank_count = window_counts[stem].count(0), len(window_counts[stem])
        gaps = styled("data", "good")
        if empty_count:
            gaps = styled(f"no data on {empty_count} of {rank_count}", "warn")
        return {
            "statistic, last window": styled(gauge or f"{stem}_window_samples", "code"),
            "over ranks": styled(" … ".join(dict.fromkeys(bounds))) or MISSING,
            "gaps": gaps,
        }

    gap_count = sum(0 in counts for counts in window_counts.values())
    return Fold(
        key="statistics",
        title=f"Recorded statistics ({len(stems)}{f', {gap_count} with gaps' if gap_count else ''})",
        is_open=len(stems) <= MAX_OPEN_STATISTICS,
        table=table("Recorded statistics", stems, row, {"over ranks"}),
    )


def collectors_fold(collectors: Sequence[CollectorStatus]) -> Fold:
    """Return the folded table of the collectors, failing collectors first."""

    def row(status: CollectorStatus) -> dict[str, RichText]:
        return {
            "collector": styled(status.name),
            "verdict": (_VERDICTS[status.success],),
            "every": styled(duration(status.interval_seconds)),
            "age": value_or_dash(status.age_seconds, duration),
            "took": value_or_dash(status.duration_seconds, duration),
            "remarks: failures and missing features of this machine": styled(
                status.message or "; ".join(status.unsupported), "remark"
            ),
        }

    sorted_statuses = sorted(collectors, key=lambda status: status.success is not False)
    failing_count = sum(status.success is False for status in collectors)
    return Fold(
        key="collectors",
        title=f"Collectors ({len(sorted_statuses)}{f', {failing_count} failing' if failing_count else ''})",
        is_open=failing_count > 0,
        table=table("Collectors", sorted_statuses, row, {"every", "age", "took"}),
    )
