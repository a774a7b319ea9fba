"""Sections of the status page: run, ranks, GPUs, machine, statistics, collectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exporter.collectors.status import CollectorStatus
from exporter.status.elements import (
    MISSING,
    Figure,
    Part,
    Plot,
    Span,
    Table,
    Words,
    ago,
    figure,
    known,
    parts,
    plot,
    share_of,
    table,
    words,
)
from exporter.status.numbers import age, duration, energy, grams, number, quantity, share, size, watts
from exporter.status.readings import Line
from exporter.status.view import Gpu, Rank, Run, View

MANY_RANKS = 16
"""Maximum number of ranks outside the fold; ranks in trouble come first."""
FEW_STATISTICS = 8
"""Maximum number of statistics in an open fold."""
_CAUSES = 3
_WINDOW_GAUGES = ("_window_mean", "_window_last", "_window_p50", "_window_added", "_window_max")
"""Gauges that can represent a statistic, in order of preference."""
_STATES = {"stalled": "warn", "stopped": "dim", **dict.fromkeys(("failed", "hung", "lost"), "bad")}
_CONDITIONS = {
    "alive": Span("alive", "good"),
    "slow": Span("slow", "warn"),
    "silent": Span("silent", "bad"),
    "hangs": Span("no progress", "bad"),
}
_VERDICTS = {None: Span("not yet", "dim"), True: Span("ok", "good"), False: Span("failing", "bad")}


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a run between its first and last step."""

    text: str
    done: float | None  # share of the steps; None if the target is not known


@dataclass(frozen=True, slots=True)
class RunSection:
    """A run."""

    name: str
    badges: Words
    facts: tuple[tuple[str, str], ...]
    position: Position | None
    remark: str
    figures: list[Figure]
    phases_title: str
    phases: list[Part]
    plots: list[Plot]


@dataclass(frozen=True, slots=True)
class TableSection:
    """A table, and a second one in a fold."""

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


def run_section(seen: View, run: Run) -> RunSection:
    """Return the section of a run; rates and losses only while its steps end."""
    readings, now, name = seen.readings, seen.about.now, run.name
    info = next((labels for labels, _ in readings.rows("training_run_info", run=name)), {})
    attempt = readings.value("training_attempt", run=name)
    badges = [Span(run.state, _STATES.get(run.state, "good"))] if run.state else []
    if run.state and run.since is not None:
        badges.append(Span(f"since {age(run.since, now).removesuffix(' ago')}", "dim"))
    if attempt is not None and attempt > 1:
        badges.append(Span(f"attempt {attempt:.0f}", "warn"))
    remark = ""
    if run.is_partial and not run.has_rank_zero:
        remark = "Rank 0 runs on another node: the status page of its exporter shows steps, loss and saves."
    return RunSection(
        name=name,
        badges=tuple(badges),
        facts=tuple((key, fact) for key, fact in info.items() if key != "run" and fact),
        position=_position(seen, run),
        remark=remark,
        figures=_run_figures(seen, run),
        phases_title=f"last minute of all ranks{' of this node' if run.is_partial else ''}",
        phases=[] if run.ended else parts(run.phases),
        plots=_run_plots(seen, run),
    )


def _step_seconds(seen: View, run: Run) -> float | None:
    return seen.past.recent("step seconds", run.name, per="steps") if run.steps_now else None


def _tokens_per_second(seen: View, run: Run) -> float | None:
    return seen.past.recent("tokens", run.name) if run.steps_now else None


def _loss(seen: View, run: Run) -> float | None:
    return seen.readings.value("training_loss", run=run.name, mode="train") if run.steps_now else None


def _run_figures(seen: View, run: Run) -> list[Figure]:
    readings, past, now, name = seen.readings, seen.past, seen.about.now, run.name
    here = " (this node)" if run.is_partial else ""

    def current(family: str) -> float | None:
        return readings.value(family, run=name) if run.steps_now else None

    nonfinite = readings.total("training_nonfinite_total", run=name)
    saved = readings.value("training_checkpoint_last_success_timestamp_seconds", run=name)
    unsaved = None if run.ended else readings.value("training_uncommitted_seconds", run=name)
    figures = [
        *figure("step time", known(_step_seconds(seen, run), duration)),
        *figure("steps per second", known(past.recent("steps", name) if run.steps_now else None, number)),
        *figure("loss", known(_loss(seen, run), number)),
        *figure("not finite", words(f"{nonfinite:.0f}", "bad") if nonfinite else ()),
        *figure(f"tokens per second{here}", known(_tokens_per_second(seen, run), number)),
        *figure("gradient norm", known(current("training_grad_norm"), number)),
        *figure("learning rate", known(current("training_learning_rate"), number)),
        *_goodput(seen, run),
        *figure("at risk, unsaved", known(unsaved, duration)),
        *figure("last checkpoint", ago(saved, now)),
        *figure("restarts", known(readings.total("training_restarts_total", run=name), number)),
        *figure(f"energy{here}", known(readings.total("training_energy_joules_total", run=name), energy)),
        *figure(f"CO2{here}", known(readings.total("training_carbon_grams_total", run=name), grams)),
    ]
    costs: dict[str, float] = {}
    for labels, amount in readings.rows("training_cost_total", run=name):
        costs[labels["currency"]] = costs.get(labels["currency"], 0.0) + amount
    for currency, amount in costs.items():
        figures += figure(f"cost{here}", words(f"{amount:,.2f} {currency}"))
    losses = readings.rows("training_badput_seconds_total", run=name)
    lost = sorted(((seconds, labels["cause"]) for labels, seconds in losses if seconds > 0), reverse=True)
    notes = [f"{cause} {duration(seconds)}" for seconds, cause in lost[:_CAUSES]]
    return figures + (figure("lost to", (), *notes) if notes else [])


def _run_plots(seen: View, run: Run) -> list[Plot]:
    past, now, name = seen.past, seen.about.now, run.name

    def drawn(title: str, line: Line, latest: float | None, unit: str = "") -> list[Plot]:
        if run.ended and run.since is not None:
            line = [point for point in line if point[0] <= run.since]
        return plot(title, {title: line}, unit, now, owner=name, latest=latest)

    loss = _loss(seen, run)
    rates = past.rates("step seconds", name, per="steps")
    return [
        *drawn("loss", _with_current(past.levels("loss", name), loss, now), loss),
        *drawn("step time", rates, _step_seconds(seen, run), "seconds"),
        *drawn("tokens per second", past.rates("tokens", name), _tokens_per_second(seen, run)),
    ]


def _with_current(line: Line, value: float | None, now: float) -> Line:
    """Return a line that ends with the current value, which the figure shows as well."""
    return (
        line
        if value is None or not line
        else [*(point for point in line if point[0] < now - 1), (now, value)]
    )


def _goodput(seen: View, run: Run) -> list[Figure]:
    value = seen.readings.value
    wall, productive = (
        value(f"training_{each}_seconds_total", run=run.name) for each in ("wall", "productive")
    )
    if not wall or productive is None:
        return []
    last_save = value("training_checkpoint_last_success_timestamp_seconds", run=run.name)
    saves = seen.readings.total("training_checkpoints_total", run=run.name, result="ok")
    note = ""
    if last_save is None and not saves and not productive and not run.ended:
        note = "nothing is saved yet: work counts after a save or at a successful end"
        unsaved = value("training_uncommitted_seconds", run=run.name) or 0.0
        if unsaved and run.steps_now:
            note += f"; {share((productive + unsaved) / wall)} if saved"
    return figure("goodput", words(share(productive / wall)), *([note] if note else []))


def _position(seen: View, run: Run) -> Position | None:
    step, target = (
        seen.readings.value(family, run=run.name) for family in ("training_step", "training_step_target")
    )
    if step is None:
        return None
    if not target:
        return Position(f"step {step:,.0f}", None)
    done = min(max(step / target, 0.0), 1.0)
    step_seconds = _step_seconds(seen, run)
    left = ""
    if step_seconds and step < target:
        left = f" · about {duration((target - step) * step_seconds)} left at this pace"
    return Position(f"step {step:,.0f} of {target:,.0f} · {share(done)}{left}", done)


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
            "worker": words(rank.worker),
            "role": words(rank.role),
            "process": (_CONDITIONS.get(rank.condition) or Span(rank.condition, "dim"),),
            "phase": words(rank.phase) + since if rank.phase and rank.alive else MISSING,
            "last step": ago(rank.progress, now),
            "own time a step": known(rank.compute_seconds if rank.alive else None, duration),
            "snapshot": ago(rank.updated, now),
            "GPU": words(rank.gpu),
            "node": words(rank.node) if other_nodes else (),
        }

    numeric = {"rank", "worker", "last step", "own time a step", "snapshot"}
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
    colours = {gpu.uuid: place for place, gpu in enumerate(seen.gpus)}

    def row(gpu: Gpu) -> dict[str, Words]:
        def value(family: str, **labels: str) -> float | None:
            return seen.readings.value(family, uuid=gpu.uuid, **labels)

        held = words(f"slowed {share(gpu.throttled_ratio)}", "warn") if gpu.throttled_ratio else ()
        used, total = value("gpu_memory_used_bytes"), value("gpu_memory_total_bytes")
        power, limit = value("gpu_power_watts"), value("gpu_power_limit_watts", limit="enforced")
        users = [rank.rank or rank.role for rank in seen.ranks if rank.uuid == gpu.uuid and rank.alive]
        of_total = () if used is None or total is None else words(f"of {size(total)}", "dim")
        of_limit = words(f"of {limit:.0f}", "dim") if power is not None and limit else ()
        return {
            "GPU": (Span(gpu.index, "", colours[gpu.uuid]),),
            "model": words(names.get(gpu.uuid, "")) if len(models) > 1 else (),
            "rank": words(", ".join(users)),
            "state": (Span("up", "good") if gpu.up else Span("lost", "bad"), *held),
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
        past.recent("network", ""),
        past.recent("disk", ""),
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
                {"CPU": _with_current(past.levels("cpu", ""), cpu, now)},
                "ratio",
                now,
                floor=0.0,
                latest=cpu,
            ),
            *plot(
                "network per second",
                {"network per second": past.rates("network", "")},
                "bytes",
                now,
                floor=0.0,
                latest=network,
            ),
            *plot(
                "disks per second",
                {"disks per second": past.rates("disk", "")},
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
