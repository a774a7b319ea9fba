"""The status page as HTML: one self-contained document, readable without script and on a telephone.

Used in the sidecar, on a worker thread of the web server. Every text is escaped, since run names and error messages
come from outside; style and script are files of this package, named in the policy by their hashes, so that nothing
else can style, run or load.
"""

from __future__ import annotations

import base64
import hashlib
import time
from functools import lru_cache
from pathlib import Path

from exporter.collectors.status import CollectorStatus
from exporter.status.attention import concerns, is_hanging, is_stopped
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
    quantity,
    share,
    size,
    spark,
    table,
    text,
)
from exporter.status.history import CPU, LOSS, POWER, STEP_COUNT, STEP_SUM, TOKENS
from exporter.status.readings import Labels
from exporter.status.view import Gpu, Rank, Run, View

MANY_RANKS = 16
"""Beyond this the table of ranks is folded."""
FEW_STATISTICS = 8
"""Up to this that of statistics is not."""
_CAUSES = 3
_WINDOW_GAUGES = ("_window_mean", "_window_last", "_window_p50", "_window_added", "_window_max")
"""Those that stand for a statistic, the best first."""


@lru_cache(maxsize=1)
def _assets() -> tuple[str, str]:
    folder = Path(__file__).parent
    return (folder / "page.css").read_text(encoding="utf-8"), (folder / "live.js").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def policy() -> str:
    """The Content-Security-Policy of the page: its own style and script, its own address, and nothing else."""
    style, script = (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in _assets()
    )
    return (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def render(seen: View) -> bytes:
    """Write the document, UTF-8."""
    style, script = _assets()
    found = concerns(seen)
    mark = "● " if any(concern.urgent for concern in found) else ""
    warnings = "".join(
        f'<p class="concern{" urgent" if urgent else ""}">{"<b>Now:</b> " if urgent else ""}{text(told)}</p>'
        for urgent, told in found[:MOST_ROWS]
    )
    if len(found) > MOST_ROWS:
        warnings += f'<p class="dim">and {len(found) - MOST_ROWS} more</p>'
    parts = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        '<link rel="icon" href="data:,">',
        '<noscript><meta http-equiv="refresh" content="15"></noscript>',
        f"<title>{mark}{text(seen.about.node)} · training-exporter</title><style>{style}</style></head><body>",
        '<p id="live"></p><main>',
        _header(seen),
        f'<section id="attention">{warnings}</section>'
        if found
        else '<p class="calm">Nothing needs attention.</p>',
        _runs(seen),
        _ranks(seen),
        _gpus(seen),
        _machine(seen),
        _statistics(seen),
        _energy_sources(seen),
        _collectors(seen),
        _footer(seen),
        f"</main><script>{script}</script></body></html>\n",
    )
    return "".join(parts).encode("utf-8", "replace")


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) + " UTC"


def _header(seen: View) -> str:
    about, series = seen.about, seen.readings.value("exporter_series")
    ready = marked("good", "ready") if about.not_ready is None else marked("bad", "not ready")
    told = "" if series is None else f" · {series:.0f} series"
    up = marked("dim", f"up {duration(about.now - about.started)}{told} · {_time(about.now)}")
    return f"<header><h1>{text(about.node)}</h1><span>{ready}</span>{up}</header>"


def _runs(seen: View) -> str:
    if seen.runs:
        return "<h2>Runs</h2>" + "".join(_run(seen, run) for run in [*seen.runs.values()][:MOST_ROWS])
    where = text(seen.about.feed_directory)
    return (
        '<h2>Runs</h2><div class="card"><p>No job has recorded anything yet.</p>'
        f'<p class="dim">This exporter looks in <code>{where}</code>. A job appears here as soon as it records '
        "something with <code>import exporter</code>, or is started by <code>python -m exporter run</code>, with "
        "the same <code>EXPORTER_FEED_DIR</code>; <code>python -m exporter check</code> says what is in the way."
        "</p></div>"
    )


def _run(seen: View, run: Run) -> str:
    readings, past, now, name = seen.readings, seen.past, seen.about.now, run.name

    def value(family: str, **labels: str) -> float | None:
        return readings.value(family, run=name, **labels)

    def total(family: str) -> float | None:
        return readings.total(family, run=name)

    info = next((labels for labels, _ in readings.rows("training_run_info", run=name)), {})
    facts = " · ".join(f"{text(key)} {text(fact)}" for key, fact in info.items() if key != "run" and fact)
    attempt = value("training_attempt")
    step_seconds = past.recent(STEP_SUM, name, per=STEP_COUNT)
    wall, productive = value("training_wall_seconds_total"), value("training_productive_seconds_total")
    goodput = productive / wall if wall and productive is not None else None
    saved = value("training_checkpoint_last_success_timestamp_seconds")
    unsaved = goodput is not None and saved is None and run.state not in {"finished", "failed"}
    explained = "<small>nothing is saved yet: work counts once it is, or when the job ends well</small>"
    losses = readings.rows("training_badput_seconds_total", run=name)
    badput = sorted(((seconds, labels["cause"]) for labels, seconds in losses if seconds > 0), reverse=True)
    lost = ", ".join(
        f'<span class="whole">{text(cause)} {duration(seconds)}</span>' for seconds, cause in badput[:_CAUSES]
    )
    costs: dict[str, float] = {}
    for labels, amount in readings.rows("training_cost_total", run=name):
        costs[labels["currency"]] = costs.get(labels["currency"], 0.0) + amount
    nonfinite, rates = total("training_nonfinite_total"), past.rates(STEP_SUM, name, per=STEP_COUNT)
    cells = (
        cell("step time", known(step_seconds, duration), spark(rates, "step time", duration)),
        cell(
            "loss",
            known(value("training_loss", mode="train"), number),
            spark(past.levels(LOSS, name), "loss", number),
        ),
        cell("not finite", marked("bad", f"{nonfinite:.0f}") if nonfinite else ""),
        cell("tokens per second", known(past.recent(TOKENS, name), number)),
        cell("gradient norm", known(value("training_grad_norm"), number)),
        cell("learning rate", known(value("training_learning_rate"), number)),
        cell("goodput", known(goodput, share), explained if unsaved else ""),
        cell("at risk, unsaved", known(value("training_uncommitted_seconds"), duration)),
        cell("last checkpoint", ago(saved, now)),
        cell("restarts", known(total("training_restarts_total"), number)),
        cell("energy here", known(total("training_energy_joules_total"), energy)),
        cell("CO2 here", known(total("training_carbon_grams_total"), lambda grams: number(grams, "g"))),
        *(cell("cost here", f"{amount:,.2f} {text(currency)}") for currency, amount in costs.items()),
        cell("lost to", lost and f"<small>{lost}</small>"),
    )
    again = "" if attempt is None or attempt <= 1 else " " + marked("warn", f"attempt {attempt:.0f}")
    position = _position(value("training_step"), value("training_step_target"), step_seconds)
    return (
        f'<section class="card"><h3>{text(name)}{again}</h3>'
        f'{facts and f"<p class=facts>{facts}</p>"}{position}<dl class="grid">{"".join(cells)}</dl></section>'
    )


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
        if not rank.alive:
            verdict = marked("dim", "unknown" if rank.alive is None else "ended")
        elif is_stopped(rank, now=now):
            verdict = marked("bad", "silent")
        elif is_hanging(rank, seen.runs.get(rank.run), now=now):
            verdict = marked("bad", "no progress")
        else:
            verdict = marked("good", "alive")
        since = "" if rank.phase_seconds is None else " " + marked("dim", duration(rank.phase_seconds))
        return {
            "run": text(rank.run) if several_runs else "",
            "rank": text(rank.rank),
            "worker": text(rank.worker),
            "role": text(rank.role),
            "process": verdict,
            "phase": text(rank.phase) + since if rank.phase and rank.alive else MISSING,
            "last step": ago(rank.progress, now),
            "own time a step": known(rank.compute_seconds, duration),
            "snapshot": ago(rank.updated, now),
            "GPU": text(rank.gpu),
            "node": text(rank.node) if other_nodes else "",
        }

    content = table(seen.ranks, row, numbers="rank, worker, last step, own time a step, snapshot")
    return folded("ranks", f"Ranks ({len(seen.ranks)})", content, unfolded=len(seen.ranks) <= MANY_RANKS)


def _watts(value: float | None) -> str:
    return number(value, "W")


def _gpus(seen: View) -> str:
    if not seen.gpus:
        return ""
    names = {labels["uuid"]: labels.get("name", "") for labels, _ in seen.readings.rows("gpu_info")}
    models = {names.get(gpu.uuid, "") for gpu in seen.gpus}

    def row(gpu: Gpu) -> dict[str, str]:
        def value(family: str, **labels: str) -> float | None:
            return seen.readings.value(family, uuid=gpu.uuid, **labels)

        held = gpu.throttled_ratio and " " + marked("warn", f"held back {share(gpu.throttled_ratio)}")
        used, total = value("gpu_memory_used_bytes"), value("gpu_memory_total_bytes")
        limit = value("gpu_power_limit_watts", limit="enforced")
        of = " " + marked("dim", f"of {limit:.0f}") if limit else ""
        line = spark(seen.past.levels(POWER, gpu.uuid), f"power of GPU {gpu.index}", _watts, floor=0.0)
        return {
            "GPU": text(gpu.index),
            "model": text(names.get(gpu.uuid, "")) if len(models) > 1 else "",
            "state": (marked("good", "up") if gpu.up else marked("bad", "lost")) + (held or ""),
            "busy": known(value("gpu_utilization_ratio"), share),
            "tensor cores": known(value("gpu_tensor_activity_ratio", pipe="any"), share),
            "memory": MISSING if used is None else f"{size(used)} {marked('dim', f'of {size(total)}')}",
            "power": known(value("gpu_power_watts"), lambda watts: f"{watts:.0f} W{of}"),
            "lately": line,
            "temperature": known(value("gpu_temperature_celsius", sensor="gpu"), "{:.0f} °C".format),
            "energy": known(seen.readings.total("gpu_energy_joules_total", uuid=gpu.uuid), energy),
        }

    model = marked("dim", f" · {text(next(iter(models)))}") if len(models) == 1 and models != {""} else ""
    content = table(seen.gpus, row, numbers="GPU, busy, tensor cores, memory, power, temperature, energy")
    return f"<h2>GPUs ({len(seen.gpus)}){model}</h2>{content}"


def _machine(seen: View) -> str:
    value, total = seen.readings.value, seen.readings.total
    all_bytes, available = value("host_memory_total_bytes"), value("host_memory_available_bytes")
    memory = ""
    if all_bytes and available is not None:
        memory = f"{share((all_bytes - available) / all_bytes)} <small>of {size(all_bytes)}</small>"
    use = spark(seen.past.levels(CPU), "use of the CPUs", share, floor=0.0)
    cells = (
        cell("CPU", known(value("host_cpu_utilization_ratio"), share), use),
        cell("CPUs", known(value("host_cpus", kind="online"), number)),
        cell("memory used", memory),
        cell("CPU power", known(total("host_cpu_power_watts"), _watts)),
        cell("GPU power", known(total("gpu_power_watts"), _watts)),
    )
    return f'<h2>Machine</h2><div class="card"><dl class="grid">{"".join(cells)}</dl></div>'


def _energy_sources(seen: View) -> str:
    sources = [labels for labels, _ in seen.readings.rows("exporter_energy_source_info")]
    if not sources:
        return ""

    def row(labels: Labels) -> dict[str, str]:
        return {
            "component": text(labels["component"]),
            "device": text(labels.get("name") or labels["device"]),
            "read from": text(labels["source"]),
            "how": "measured" if labels.get("measured") == "true" else marked("warn", "modelled"),
        }

    return folded("energy", f"Where energy is read ({len(sources)})", table(sources, row), unfolded=False)


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
    content = table(counted, row, numbers="over ranks")
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
    return folded(
        "collectors", title, table(ordered, row, numbers="every, age, took"), unfolded=bool(failing)
    )


def _footer(seen: View) -> str:
    about = seen.about
    links = {
        about.telemetry_path: "Metrics",
        "/-/ready": "Ready",
        "/-/healthy": "Healthy",
        "/config": "Configuration",
    }
    anchors = "".join(f'<a href="{text(path)}">{name}</a>' for path, name in links.items())
    return (
        f"<footer><nav>{anchors}</nav><p>training-exporter {text(about.version)}, started {_time(about.started)}, feed "
        f"<code>{text(about.feed_directory)}</code>. A dash is no data: it is never an old number.</p></footer>"
    )
