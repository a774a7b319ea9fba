"""Sections of the status page: ranks, GPUs, machine, statistics, collectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exporter.collectors.status import CollectorStatus
from exporter.status.elements import (
    MISSING,
    Figure,
    Plot,
    StyledText,
    Table,
    Words,
    ago,
    figure,
    known,
    plot,
    share_of,
    table,
    with_current,
    words,
)
from exporter.status.numbers import duration, energy, number, quantity, share, size, watts
from exporter.status.view import Gpu, Rank, View

MANY_RANKS = 16
"""Maximum number of ranks outside the fold; ranks in trouble are first."""
FEW_STATISTICS = 8
"""Maximum number of statistics in an open fold."""
_WINDOW_GAUGES = ("_window_mean", "_window_last", "_window_p50", "_window_added", "_window_max")
"""Gauges that can represent a statistic, in order of preference."""
_CONDITIONS = {
    "alive": StyledText("alive", "good"),
    "ended early": StyledText("ended", "bad"),
    "slow": StyledText("slow", "warn"),
    "silent": StyledText("silent", "bad"),
    "hangs": StyledText("no progress", "bad"),
}
_VERDICTS = {
    None: StyledText("not yet", "dim"),
    True: StyledText("ok", "good"),
    False: StyledText("failing", "bad"),
}


@dataclass(frozen=True, slots=True)
class TableSection:
    """A table, and a second table in a fold."""

    title: str
    note: str
    table: Table
    folded: Table | None = None
    plots: tuple[Plot, ...] = ()


@dataclass(frozen=True, slots=True)
class Fold:
    """A table in a fold."""

    key: str
    title: str
    is_open: bool
    table: Table


@dataclass(frozen=True, slots=True)
class MachineSection:
    """The machine: processors, memory, disks, network, power."""

    figures: list[Figure]
    plots: list[Plot]


def ranks_section(seen: View) -> TableSection:
    """Return the table of the ranks."""
    now = seen.about.now
    several_runs = len({rank.run for rank in seen.ranks}) > 1
    other_nodes = any(rank.node not in {"", seen.about.node} for rank in seen.ranks)

    def row(rank: Rank) -> dict[str, Words]:
        since = () if rank.phase_seconds is None else words(duration(rank.phase_seconds), "dim")
        return {
            "run": words(rank.run) if several_runs else (),
            "rank": words(rank.rank),
            "GPU": words(rank.gpu),
            "worker": words(rank.worker),
            "role": words(rank.role),
            "process": (_CONDITIONS.get(rank.condition) or StyledText(rank.condition, "dim"),),
            "phase": words(rank.phase) + since if rank.phase and rank.alive else MISSING,
            "last step": ago(rank.progress, now),
            "own work per step": known(rank.compute_seconds if rank.alive else None, duration),
            "snapshot": ago(rank.updated, now),
            "node": words(rank.node) if other_nodes else (),
        }

    numeric = {"rank", "worker", "last step", "own work per step", "snapshot"}
    others = seen.ranks[MANY_RANKS:]
    return TableSection(
        title=f"Ranks ({len(seen.ranks)})",
        note="",
        table=table("Ranks", seen.ranks[:MANY_RANKS], row, numeric),
        folded=table(f"{len(others)} more ranks", others, row, numeric) if others else None,
    )


def gpus_section(seen: View) -> TableSection:
    """Return the table and the plots of the GPUs."""
    names = {labels["uuid"]: labels.get("name", "") for labels, _ in seen.readings.rows("gpu_info")}
    models = {names.get(gpu.uuid, "") for gpu in seen.gpus}
    several_runs = len({rank.run for rank in seen.ranks}) > 1
    colours = {gpu.uuid: place for place, gpu in enumerate(seen.gpus)}

    def row(gpu: Gpu) -> dict[str, Words]:
        def value(family: str, **labels: str) -> float | None:
            return seen.readings.value(family, uuid=gpu.uuid, **labels)

        held = words(f"slowed {share(gpu.throttled_ratio)}", "warn") if gpu.throttled_ratio else ()
        used, total = value("gpu_memory_used_bytes"), value("gpu_memory_total_bytes")
        power, limit = value("gpu_power_watts"), value("gpu_power_limit_watts", limit="enforced")
        users = [rank for rank in seen.ranks if rank.uuid == gpu.uuid and rank.alive]
        holders = [f"{rank.rank or rank.role}{f' of {rank.run}' if several_runs else ''}" for rank in users]
        of_total = () if used is None or total is None else words(f"of {size(total)}", "dim")
        of_limit = words(f"of {limit:.0f}", "dim") if power is not None and limit else ()
        return {
            "GPU": (StyledText(gpu.index, "", colours[gpu.uuid]),),
            "model": words(names.get(gpu.uuid, "")) if len(models) > 1 else (),
            "rank": words(", ".join(holders)),
            "state": (StyledText("up", "good") if gpu.up else StyledText("lost", "bad"), *held),
            "busy": known(value("gpu_utilization_ratio"), share),
            "tensor cores": known(value("gpu_tensor_activity_ratio"), share),
            "memory": known(used, size) + of_total,
            "power": known(power, "{:.0f} W".format) + of_limit,
            "temperature": known(value("gpu_temperature_celsius", sensor="gpu"), "{:.0f} °C".format),
            "energy": known(seen.readings.total("gpu_energy_joules_total", uuid=gpu.uuid), energy),
        }

    plots: list[Plot] = []
    for title, track, unit in (("GPU power", "power", "watts"), ("GPU memory", "memory", "bytes")):
        lines = {f"GPU {gpu.index}": seen.past.levels(track, gpu.uuid) for gpu in seen.gpus}
        plots += plot(title, lines, unit, seen.about.now, floor=0.0)
    numeric = {"GPU", "busy", "tensor cores", "memory", "power", "temperature", "energy"}
    return TableSection(
        title=f"GPUs ({len(seen.gpus)})",
        note=next(iter(models)) if len(models) == 1 else "",
        table=table("GPUs", seen.gpus, row, numeric),
        plots=tuple(plots),
    )


def machine_section(seen: View) -> MachineSection:
    """Return the section of the machine."""
    past, now = seen.past, seen.about.now
    value, total = seen.readings.value, seen.readings.total
    memory, available = value("host_memory_total_bytes"), value("host_memory_available_bytes")
    rooms = {labels["mountpoint"]: room for labels, room in seen.readings.rows("host_filesystem_avail_bytes")}
    disks = (
        (1 - rooms[labels["mountpoint"]] / whole, labels["mountpoint"], whole)
        for labels, whole in seen.readings.rows("host_filesystem_size_bytes")
        if whole >= 2**30 and labels["mountpoint"] in rooms
    )
    fullest = max(disks, default=None)
    cpu, network, disk = (
        value("host_cpu_utilization_ratio"),
        past.recent("network"),
        past.recent("disk"),
    )

    def part(name: str, used: float | None, whole: float | None) -> list[Figure]:
        ratio, note = share_of(used, whole, size)
        return figure(name, ratio, note) if ratio else []

    def per_second(count: float) -> str:
        return f"{size(count)}/s"

    return MachineSection(
        figures=[
            *figure("CPU", known(cpu, share)),
            *figure("CPUs", known(value("host_cpus", kind="online"), number)),
            *part("memory used", memory and available and memory - available, memory),
            *part("shared memory used", value("host_shm_used_bytes"), value("host_shm_size_bytes")),
            *(part(f"fullest disk, {fullest[1]}", fullest[0] * fullest[2], fullest[2]) if fullest else []),
            *figure("disks, read and written", known(disk, per_second)),
            *figure("network, in and out", known(network, per_second)),
            *figure("CPU power", known(total("host_cpu_power_watts"), watts)),
            *figure("GPU power", known(total("gpu_power_watts"), watts)),
        ],
        plots=[
            *plot(
                "CPU",
                {"CPU": with_current(past.levels("cpu"), cpu, now)},
                "ratio",
                now,
                floor=0.0,
                latest=cpu,
            ),
            *plot(
                "network per second",
                {"network per second": past.rates("network")},
                "bytes",
                now,
                floor=0.0,
                latest=network,
            ),
            *plot(
                "disks per second",
                {"disks per second": past.rates("disk")},
                "bytes",
                now,
                floor=0.0,
                latest=disk,
            ),
        ],
    )


def statistics_fold(seen: View) -> Fold | None:
    """Return the table of the recorded statistics, or None without statistics."""
    readings = seen.readings
    names = sorted(readings.names())
    stems = [name.removesuffix("_window_samples") for name in names if name.endswith("_window_samples")]
    if not stems:
        return None
    samples = {stem: [value for _, value in readings.rows(f"{stem}_window_samples")] for stem in stems}

    def row(stem: str) -> dict[str, Words]:
        gauges = ([each for each in names if each.startswith(stem + ending)] for ending in _WINDOW_GAUGES)
        shown = min(next(filter(None, gauges), [""]), key=len)
        values = [value for _, value in readings.rows(shown)]
        ends = [quantity(end, readings.unit(shown)) for end in (min(values), max(values))] if values else []
        missing, ranks = samples[stem].count(0), len(samples[stem])
        gaps = words(f"no data on {missing} of {ranks}", "warn") if missing else words("data", "good")
        return {
            "statistic, last window": words(shown or f"{stem}_window_samples", "code"),
            "over ranks": words(" … ".join(dict.fromkeys(ends))) or MISSING,
            "gaps": gaps,
        }

    with_gaps = sum(0 in counts for counts in samples.values())
    return Fold(
        key="statistics",
        title=f"Recorded statistics ({len(stems)}{f', {with_gaps} with gaps' if with_gaps else ''})",
        is_open=len(stems) <= FEW_STATISTICS,
        table=table("Recorded statistics", stems, row, {"over ranks"}),
    )


def collectors_fold(collectors: Sequence[CollectorStatus]) -> Fold:
    """Return the table of the collectors, the failing first."""

    def row(status: CollectorStatus) -> dict[str, Words]:
        return {
            "collector": words(status.name),
            "verdict": (_VERDICTS[status.success],),
            "every": words(duration(status.interval_seconds)),
            "age": known(status.age_seconds, duration),
            "took": known(status.duration_seconds, duration),
            "remarks: failures and missing features of this machine": words(
                status.message or "; ".join(status.unsupported), "remark"
            ),
        }

    ordered = sorted(collectors, key=lambda status: status.success is not False)
    failing = sum(status.success is False for status in collectors)
    return Fold(
        key="collectors",
        title=f"Collectors ({len(ordered)}{f', {failing} failing' if failing else ''})",
        is_open=bool(failing),
        table=table("Collectors", ordered, row, {"every", "age", "took"}),
    )
