"""The status page as HTML: one self-contained document, readable without script and on a telephone.

Every text is escaped; style and scripts are files of this package, named in the policy by their hashes. uPlot draws the
plots where there is script.
"""

from __future__ import annotations

import base64
import hashlib
import time
from functools import lru_cache
from pathlib import Path

from exporter.collectors.status import CollectorStatus
from exporter.status.elements import (
    MISSING,
    MOST_ROWS,
    ago,
    cell,
    duration,
    energy,
    folded,
    known,
    marked,
    number,
    plot,
    quantity,
    share,
    shares,
    size,
    swatch,
    table,
    text,
    watts,
)
from exporter.status.readings import Line
from exporter.status.view import Gpu, Rank, Run, View, concerns

MANY_RANKS = 16
"""Of more ranks the first are shown, which are those in trouble, and the others folded."""
FEW_STATISTICS = 8
"""Up to this the table of statistics is not folded."""
_CAUSES = 3
_WINDOW_GAUGES = ("_window_mean", "_window_last", "_window_p50", "_window_added", "_window_max")
"""Those that stand for a statistic, the best first."""
_STATES = {"stalled": "warn", "stopped": "dim", **dict.fromkeys(("failed", "hung", "lost"), "bad")}
_CONDITIONS = {
    "alive": marked("good", "alive"),
    "slow": marked("warn", "slow"),
    "silent": marked("bad", "silent"),
    "hangs": marked("bad", "no progress"),
}


@lru_cache(maxsize=1)
def _assets() -> tuple[str, str, str]:
    library_style, style, library, script = (
        (Path(__file__).parent / name).read_text(encoding="utf-8")
        for name in ("uPlot.min.css", "page.css", "uPlot.iife.min.js", "live.js")
    )
    return library_style + style, library, script


@lru_cache(maxsize=1)
def policy() -> str:
    """The Content-Security-Policy of the page: its own style and scripts, its own address, and nothing else."""
    style, *scripts = (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in _assets()
    )
    return (
        f"default-src 'none'; style-src {style}; script-src {' '.join(scripts)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def render(seen: View) -> bytes:
    """Write the document, UTF-8."""
    style, library, script = _assets()
    found = concerns(seen)
    mark = "● " if any(concern.urgent for concern in found) else ""
    warnings = "".join(
        f'<p class="concern{" urgent" if urgent else ""}">{"<b>Now:</b> " if urgent else ""}{text(told)}</p>'
        for urgent, told in found[:MOST_ROWS]
    )
    if len(found) > MOST_ROWS:
        warnings += f'<p class="dim">and {len(found) - MOST_ROWS} more</p>'
    node = text(seen.about.node)
    parts = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        '<link rel="icon" href="data:,">',
        '<noscript><meta http-equiv="refresh" content="15"></noscript>',
        f"<title>{mark}{node} · training-exporter</title><style>{style}</style></head><body>",
        f'<header><h1>{node}</h1><p id="live"></p></header><main>',
        _state(seen),
        f'<section id="attention" aria-label="Attention">{warnings}</section>'
        if found
        else '<p class="calm">Nothing needs attention.</p>',
        _runs(seen),
        f'<div class="columns"><div>{_ranks(seen)}{_machine(seen)}</div>{_gpus(seen)}</div>',
        _statistics(seen),
        _collectors(seen),
        f"</main>{_footer(seen)}<script>{library}</script><script>{script}</script></body></html>\n",
    )
    return "".join(parts).encode("utf-8", "replace")


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) + " UTC"


def _state(seen: View) -> str:
    about, series = seen.about, seen.readings.value("exporter_series")
    ready = marked("good", "ready") if about.not_ready is None else marked("bad", "not ready")
    told = f" · {series:.0f} series" if series else ""
    up = marked("dim", f"up {duration(about.now - about.started)}{told} · {_time(about.now)}")
    return f"<p>{ready} {up}</p>"


def _runs(seen: View) -> str:
    if seen.runs:
        return "<h2>Runs</h2>" + "".join(_run(seen, run) for run in [*seen.runs.values()][:MOST_ROWS])
    where = text(seen.about.feed_directory)
    return (
        '<h2>Runs</h2><div class="card"><p>No job has recorded anything yet.</p>'
        f'<p class="dim">This exporter looks in <code>{where}</code>. A job appears here as soon as it records '
        "something with <code>import exporter</code>, or is started by <code>training-exporter run</code>, with "
        "the same <code>EXPORTER_FEED_DIR</code>; <code>training-exporter check</code> says what is in the way."
        "</p></div>"
    )


def _run(seen: View, run: Run) -> str:
    readings, past, now, name = seen.readings, seen.past, seen.about.now, run.name

    def value(family: str, **labels: str) -> float | None:
        return readings.value(family, run=name, **labels)

    def total(family: str) -> float | None:
        return readings.total(family, run=name)

    def lines(title: str, line: Line, unit: str = "") -> str:
        return plot(title, {title: line}, unit, now, of=name)

    info = next((labels for labels, _ in readings.rows("training_run_info", run=name)), {})
    facts = " · ".join(f"{text(key)} {text(fact)}" for key, fact in info.items() if key != "run" and fact)
    attempt = value("training_attempt")
    step_seconds = past.recent("step seconds", name, per="steps")
    losses = readings.rows("training_badput_seconds_total", run=name)
    badput = sorted(((seconds, labels["cause"]) for labels, seconds in losses if seconds > 0), reverse=True)
    lost = ", ".join(
        f'<span class="whole">{text(cause)} {duration(seconds)}</span>' for seconds, cause in badput[:_CAUSES]
    )
    costs: dict[str, float] = {}
    for labels, amount in readings.rows("training_cost_total", run=name):
        costs[labels["currency"]] = costs.get(labels["currency"], 0.0) + amount
    nonfinite = total("training_nonfinite_total")
    stands = run.state in {"hung", "stalled"}
    saved = value("training_checkpoint_last_success_timestamp_seconds")
    cells = (
        cell("step time", known(None if stands else step_seconds, duration)),
        cell("steps per second", known(None if stands else past.recent("steps", name), number)),
        cell("loss", known(value("training_loss", mode="train"), number)),
        cell("not finite", marked("bad", f"{nonfinite:.0f}") if nonfinite else ""),
        cell("tokens per second", known(None if stands else past.recent("tokens", name), number)),
        cell("gradient norm", known(value("training_grad_norm"), number)),
        cell("learning rate", known(value("training_learning_rate"), number)),
        _goodput(seen, run),
        cell("at risk, unsaved", known(value("training_uncommitted_seconds"), duration)),
        cell("last checkpoint", ago(saved, now)),
        cell("restarts", known(total("training_restarts_total"), number)),
        cell("energy here", known(total("training_energy_joules_total"), energy)),
        cell("CO2 here", known(total("training_carbon_grams_total"), lambda grams: number(grams, "g"))),
        *(cell("cost here", f"{amount:,.2f} {text(currency)}") for currency, amount in costs.items()),
        cell("lost to", lost and f"<small>{lost}</small>"),
    )
    plots = (
        lines("loss", past.levels("loss", name)),
        lines("step time", past.rates("step seconds", name, per="steps"), "seconds"),
        lines("tokens per second", past.rates("tokens", name)),
    )
    state = run.state and " " + marked(_STATES.get(run.state, "good"), run.state)
    again = "" if attempt is None or attempt <= 1 else " " + marked("warn", f"attempt {attempt:.0f}")
    position = _position(value("training_step"), value("training_step_target"), step_seconds)
    return (
        f'<section class="card" aria-label="{text(name)}"><h3>{text(name)}{state}{again}</h3>'
        f'{facts and f"<p class=facts>{facts}</p>"}{position}<dl class="grid">{"".join(cells)}</dl>'
        f"{shares(run.phases, 'last minute of all ranks')}<div class=plots>{''.join(plots)}</div></section>"
    )


def _goodput(seen: View, run: Run) -> str:
    value = seen.readings.value
    wall, productive = (
        value(f"training_{each}_seconds_total", run=run.name) for each in ("wall", "productive")
    )
    if not wall or productive is None:
        return ""
    never = value("training_checkpoint_last_success_timestamp_seconds", run=run.name) is None
    unsaved = value("training_uncommitted_seconds", run=run.name) or 0.0
    below = ""
    if never and run.state not in {"finished", "failed"}:
        below = "nothing is saved yet: work counts once it is, or when the job ends well"
        if unsaved and run.state not in {"hung", "stalled"}:
            below += f"; with it {share((productive + unsaved) / wall)}"
    return cell("goodput", share(productive / wall), below and f"<small>{below}</small>")


def _position(step: float | None, target: float | None, step_seconds: float | None) -> str:
    if step is None:
        return ""
    if not target:
        return f"<p>step {step:,.0f}</p>"
    left = ""
    if step_seconds and step < target:
        left = f" · about {duration((target - step) * step_seconds)} left at this pace"
    done = min(max(step / target, 0.0), 1.0)
    return (
        f"<p>step {step:,.0f} of {target:,.0f} · {share(done)}{left}</p>"
        f'<progress max="1" value="{done:.4f}" aria-label="steps done">{share(done)}</progress>'
    )


def _ranks(seen: View) -> str:
    if not seen.ranks:
        return ""
    now = seen.about.now
    several_runs = len({rank.run for rank in seen.ranks}) > 1
    other_nodes = any(rank.node not in {"", seen.about.node} for rank in seen.ranks)

    def row(rank: Rank) -> dict[str, str]:
        since = "" if rank.phase_seconds is None else " " + marked("dim", duration(rank.phase_seconds))
        return {
            "run": text(rank.run) if several_runs else "",
            "rank": text(rank.rank),
            "worker": text(rank.worker),
            "role": text(rank.role),
            "process": _CONDITIONS.get(rank.condition) or marked("dim", rank.condition),
            "phase": text(rank.phase) + since if rank.phase and rank.alive else MISSING,
            "last step": ago(rank.progress, now),
            "own time a step": known(rank.compute_seconds, duration),
            "snapshot": ago(rank.updated, now),
            "GPU": text(rank.gpu),
            "node": text(rank.node) if other_nodes else "",
        }

    numbers = "rank, worker, last step, own time a step, snapshot"
    content = table("Ranks", seen.ranks[:MANY_RANKS], row, numbers=numbers)
    if others := seen.ranks[MANY_RANKS:]:
        title = f"{len(others)} more ranks"
        content += folded("ranks", title, table(title, others, row, numbers=numbers))
    return f"<section><h2>Ranks ({len(seen.ranks)})</h2>{content}</section>"


def _gpus(seen: View) -> str:
    if not seen.gpus:
        gpu = (each for each in seen.collectors if each.name == "gpu")
        told = [each.message or "; ".join(each.unsupported) for each in gpu]
        return f'<section><h2>GPUs</h2><p class="card">No GPU. {text(" ".join(told))}</p></section>'
    names = {labels["uuid"]: labels.get("name", "") for labels, _ in seen.readings.rows("gpu_info")}
    models = {names.get(gpu.uuid, "") for gpu in seen.gpus}
    past, now = seen.past, seen.about.now
    gpus = {gpu.uuid: place for place, gpu in enumerate(seen.gpus)}

    def row(gpu: Gpu) -> dict[str, str]:
        def value(family: str, **labels: str) -> float | None:
            return seen.readings.value(family, uuid=gpu.uuid, **labels)

        held = gpu.throttled_ratio and " " + marked("warn", f"held back {share(gpu.throttled_ratio)}")
        used, total = value("gpu_memory_used_bytes"), value("gpu_memory_total_bytes")
        limit = value("gpu_power_limit_watts", limit="enforced")
        of = " " + marked("dim", f"of {limit:.0f}") if limit else ""
        users = [rank.rank or rank.role for rank in seen.ranks if rank.uuid == gpu.uuid and rank.alive]
        return {
            "GPU": swatch(gpus[gpu.uuid]) + text(gpu.index),
            "model": text(names.get(gpu.uuid, "")) if len(models) > 1 else "",
            "rank": text(", ".join(users)),
            "state": (marked("good", "up") if gpu.up else marked("bad", "lost")) + (held or ""),
            "busy": known(value("gpu_utilization_ratio"), share),
            "tensor cores": known(value("gpu_tensor_activity_ratio"), share),
            "memory": known(used, lambda used: f"{size(used)} {marked('dim', f'of {known(total, size)}')}"),
            "power": known(value("gpu_power_watts"), lambda power: f"{power:.0f} W{of}"),
            "temperature": known(value("gpu_temperature_celsius", sensor="gpu"), "{:.0f} °C".format),
            "energy": known(seen.readings.total("gpu_energy_joules_total", uuid=gpu.uuid), energy),
        }

    model = marked("dim", f" · {text(next(iter(models)))}") if len(models) == 1 and models != {""} else ""
    numbers = "GPU, busy, tensor cores, memory, power, temperature, energy"
    content = table("GPUs", seen.gpus, row, numbers=numbers)
    plots = ""
    for title, what, unit in (("GPU power", "power", "watts"), ("GPU memory", "memory", "bytes")):
        lines = {f"GPU {gpu.index}": past.levels(what, gpu.uuid) for gpu in seen.gpus}
        plots += plot(title, lines, unit, now, floor=0.0)
    plots = plots and f'<div class="card plots">{plots}</div>'
    return f"<section><h2>GPUs ({len(seen.gpus)}){model}</h2>{content}{plots}</section>"


def _machine(seen: View) -> str:
    readings, past = seen.readings, seen.past
    value, total = readings.value, readings.total
    memory, available = value("host_memory_total_bytes"), value("host_memory_available_bytes")
    rooms = {labels["mountpoint"]: room for labels, room in readings.rows("host_filesystem_avail_bytes")}
    disks = (
        (1 - rooms[labels["mountpoint"]] / whole, labels["mountpoint"], whole)
        for labels, whole in readings.rows("host_filesystem_size_bytes")
        if whole >= 2**30 and labels["mountpoint"] in rooms
    )
    fullest = max(disks, default=None)

    def rate(what: str) -> str:
        return known(past.recent(what, ""), lambda bytes_: f"{size(bytes_)}/s")

    def share_of(used: float | None, whole: float | None) -> str:
        return f"{share(used / whole)} <small>of {size(whole)}</small>" if whole and used is not None else ""

    cells = (
        cell("CPU", known(value("host_cpu_utilization_ratio"), share)),
        cell("CPUs", known(value("host_cpus", kind="online"), number)),
        cell("memory used", share_of(memory and available and memory - available, memory)),
        cell("shared memory used", share_of(value("host_shm_used_bytes"), value("host_shm_size_bytes"))),
        cell(f"fullest disk, {text(fullest[1])}", share_of(fullest[0] * fullest[2], fullest[2]))
        if fullest
        else "",
        cell("disks, read and written", rate("disk")),
        cell("network, in and out", rate("network")),
        cell("CPU power", known(total("host_cpu_power_watts"), watts)),
        cell("GPU power", known(total("gpu_power_watts"), watts)),
    )
    plots = (
        plot(title, {title: line}, unit, seen.about.now, floor=0.0)
        for title, line, unit in (
            ("CPU", past.levels("cpu", ""), "ratio"),
            ("network per second", past.rates("network", ""), "bytes"),
            ("disks per second", past.rates("disk", ""), "bytes"),
        )
    )
    return (
        f'<h2>Machine</h2><section class="card" aria-label="Machine"><dl class="grid">{"".join(cells)}</dl>'
        f'<div class="plots">{"".join(plots)}</div></section>'
    )


def _statistics(seen: View) -> str:
    readings = seen.readings
    names = sorted(readings.names())
    counted = [name.removesuffix("_window_samples") for name in names if name.endswith("_window_samples")]
    if not counted:
        return ""
    samples = {stem: [value for _, value in readings.rows(f"{stem}_window_samples")] for stem in counted}

    def row(stem: str) -> dict[str, str]:
        gauges = ([each for each in names if each.startswith(stem + ending)] for ending in _WINDOW_GAUGES)
        shown = min(next(filter(None, gauges), [""]), key=len)
        values = [value for _, value in readings.rows(shown)]
        ends = [quantity(end, readings.unit(shown)) for end in (min(values), max(values))] if values else []
        missing, ranks = samples[stem].count(0), len(samples[stem])
        return {
            "statistic, last window": f"<code>{text(shown or f'{stem}_window_samples')}</code>",
            "over ranks": " … ".join(dict.fromkeys(ends)) or MISSING,
            "gaps": marked("warn", f"no data on {missing} of {ranks}") if missing else marked("good", "data"),
        }

    silent = sum(0 in counts for counts in samples.values())
    title = f"Recorded statistics ({len(counted)}{f', {silent} with gaps' if silent else ''})"
    content = table("Recorded statistics", counted, row, numbers="over ranks")
    return folded("statistics", title, content, unfolded=len(counted) <= FEW_STATISTICS)


def _collectors(seen: View) -> str:
    words = {None: marked("dim", "not yet"), True: marked("good", "ok"), False: marked("bad", "failing")}

    def row(status: CollectorStatus) -> dict[str, str]:
        remarks = text(status.message or "; ".join(status.unsupported))
        return {
            "collector": text(status.name),
            "verdict": words[status.success],
            "every": duration(status.interval_seconds),
            "age": known(status.age_seconds, duration),
            "took": known(status.duration_seconds, duration),
            "remarks: what fails, and what this machine does not offer": remarks
            and f'<div class="words dim">{remarks}</div>',
        }

    ordered = sorted(seen.collectors, key=lambda status: status.success is not False)
    failing = sum(status.success is False for status in seen.collectors)
    title = f"Collectors ({len(ordered)}{f', {failing} failing' if failing else ''})"
    content = table("Collectors", ordered, row, numbers="every, age, took")
    return folded("collectors", title, content, unfolded=bool(failing))


def _footer(seen: View) -> str:
    about = seen.about
    links = (
        ("/metrics", "Metrics"),
        ("/-/ready", "Ready"),
        ("/-/healthy", "Healthy"),
        ("/config", "Configuration"),
    )
    anchors = "".join(f'<a href="{path}">{name}</a>' for path, name in links)
    return (
        f'<footer><nav aria-label="Pages">{anchors}</nav><p>training-exporter {text(about.version)}, started '
        f"{_time(about.started)}, feed <code>{text(about.feed_directory)}</code>. A dash is no data: it is never an "
        "old number.</p></footer>"
    )
