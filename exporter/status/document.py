"""The status page as HTML: one self-contained document, readable without script and on a telephone.

Used in the sidecar, on a worker thread of the web server. The page's values come in, bytes and the policy that they
are to be sent with go out. Every text is escaped, since run names and error messages come from outside; style and
script are files of this package, named in the policy by their hashes, so that nothing else can style, run or load.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from exporter.collectors.status import CollectorStatus
from exporter.status.attention import Concern, is_hanging, is_stopped
from exporter.status.elements import (
    MISSING,
    MOST_ROWS,
    Column,
    ago,
    cell,
    duration,
    energy,
    folded,
    known,
    number,
    quantity,
    share,
    size,
    spark,
    table,
    text,
)
from exporter.status.values import Gpu, Machine, Rank, Run, Source, Statistic, View

MANY_RANKS = 16
"""Beyond this the table of ranks is folded."""
FEW_STATISTICS = 8
"""Up to this that of statistics is not."""
_CAUSES = 3


@lru_cache(maxsize=1)
def _assets() -> tuple[str, str]:
    folder = Path(__file__).parent
    return tuple((folder / name).read_text(encoding="utf-8") for name in ("page.css", "live.js"))  # type: ignore[return-value]  # two names, two texts


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


def render(seen: View, concerns: Sequence[Concern]) -> bytes:
    """Write the document, UTF-8.

    Args:
        seen: What the page tells.
        concerns: What of it needs somebody.
    """
    style, script = _assets()
    mark = "● " if any(concern.urgent for concern in concerns) else ""
    parts = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        '<link rel="icon" href="data:,">',
        '<noscript><meta http-equiv="refresh" content="15"></noscript>',
        f"<title>{mark}{text(seen.about.node)} · training-exporter</title><style>{style}</style></head><body>",
        '<p id="live"></p><main>',
        _header(seen),
        _concerns(concerns),
        _runs(seen),
        _ranks(seen),
        _gpus(seen.gpus),
        _machine(seen.machine),
        _statistics(seen.statistics),
        _sources(seen.sources),
        _collectors(seen.collectors),
        _footer(seen),
        f"</main><script>{script}</script></body></html>\n",
    )
    return "".join(parts).encode("utf-8", "replace")


def _header(seen: View) -> str:
    about = seen.about
    ready = (
        '<span class="good">ready</span>' if about.not_ready is None else '<span class="bad">not ready</span>'
    )
    series = "" if seen.series is None else f" · {seen.series} series"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(about.now))
    return (
        f"<header><h1>{text(about.node)}</h1><span>{ready}</span>"
        f'<span class="dim">up {duration(about.now - about.started)}{series} · {at} UTC</span></header>'
    )


def _concerns(concerns: Sequence[Concern]) -> str:
    if not concerns:
        return '<p class="calm">Nothing needs attention.</p>'
    rows = [
        f'<p class="concern{" urgent" if each.urgent else ""}">{"<b>Now:</b> " if each.urgent else ""}{text(each.text)}</p>'
        for each in concerns[:MOST_ROWS]
    ]
    if len(concerns) > MOST_ROWS:
        rows.append(f'<p class="dim">and {len(concerns) - MOST_ROWS} more</p>')
    return f'<section id="attention">{"".join(rows)}</section>'


# Runs -----------------------------------------------------------------------------------------------------


def _runs(seen: View) -> str:
    if not seen.runs:
        where = text(seen.about.feed_directory)
        return (
            '<h2>Runs</h2><div class="card"><p>No job has recorded anything yet.</p>'
            f'<p class="dim">This exporter looks in <code>{where}</code>. A job appears here as soon as it records '
            "something with <code>import exporter</code>, or is started by <code>python -m exporter run</code>, with "
            "the same <code>EXPORTER_FEED_DIR</code>; <code>python -m exporter check</code> says what is in the way."
            "</p></div>"
        )
    return "<h2>Runs</h2>" + "".join(_run(run, seen.about.now) for run in seen.runs[:MOST_ROWS])


def _run(run: Run, now: float) -> str:
    facts = " · ".join(f"{text(name)} {text(value)}" for name, value in run.facts.items())
    facts = facts and f'<p class="facts">{facts}</p>'
    attempt = (
        ""
        if run.attempt is None or run.attempt <= 1
        else f' <span class="warn">attempt {run.attempt:.0f}</span>'
    )
    cells = [
        cell("step time", known(run.step_seconds, duration), spark(run.step_history, "step time", duration)),
        cell("loss", known(run.loss, number), spark(run.loss_history, "loss", number)),
        cell("tokens per second", known(run.tokens_per_second, number)),
        cell("gradient norm", known(run.grad_norm, number)),
        cell("learning rate", known(run.learning_rate, number)),
        cell("goodput", known(run.goodput_ratio, share), _unsaved(run)),
        cell("at risk, unsaved", known(run.uncommitted_seconds, duration)),
        cell("last checkpoint", ago(run.checkpoint_at, now)),
        cell("restarts", known(run.restarts, number)),
        cell("energy here", known(run.joules, energy)),
        cell("CO2 here", known(run.grams, lambda grams: number(grams, "g"))),
        *(cell("cost here", f"{amount:,.2f} {text(name)}") for name, amount in run.costs.items()),
    ]
    if run.nonfinite:
        cells.insert(2, cell("not finite", f'<span class="bad">{run.nonfinite:.0f}</span>'))
    if run.badput:
        lost = ", ".join(
            f'<span class="whole">{text(cause)} {duration(seconds)}</span>'
            for cause, seconds in run.badput[:_CAUSES]
        )
        cells.append(cell("lost to", f"<small>{lost}</small>"))
    shown = "".join(cell for cell in cells if cell)
    return (
        f'<section class="card"><h3>{text(run.name)}{attempt}</h3>{facts}{_position(run)}'
        f'<dl class="grid">{shown}</dl></section>'
    )


def _unsaved(run: Run) -> str:
    if run.checkpoint_at is not None or run.goodput_ratio is None or run.state in {"finished", "failed"}:
        return ""
    return "<small>nothing is saved yet: work counts once it is, or when the job ends well</small>"


def _position(run: Run) -> str:
    if run.step is None:
        return ""
    if not run.target:
        return f"<p>step {run.step:,.0f}</p>"
    left = ""
    if run.step_seconds and run.step < run.target:
        left = f" · about {duration((run.target - run.step) * run.step_seconds)} left at this pace"
    done = min(max(run.step / run.target, 0.0), 1.0)
    return (
        f"<p>step {run.step:,.0f} of {run.target:,.0f} · {share(done)}{left}</p>"
        f'<progress max="1" value="{done:.4f}" aria-label="steps done">{share(done)}</progress>'
    )


# Ranks ----------------------------------------------------------------------------------------------------


def _ranks(seen: View) -> str:
    if not seen.ranks:
        return ""
    now = seen.about.now
    runs = {run.name: run for run in seen.runs}
    several_runs = len({rank.run for rank in seen.ranks}) > 1
    other_nodes = any(rank.node not in {"", seen.about.node} for rank in seen.ranks)

    def verdict(rank: Rank) -> str:
        if rank.alive is None:
            return '<span class="dim">unknown</span>'
        if not rank.alive:
            return '<span class="dim">ended</span>'
        if is_stopped(rank, now=now):
            return '<span class="bad">silent</span>'
        if is_hanging(rank, runs.get(rank.run), now=now):
            return '<span class="bad">no progress</span>'
        return '<span class="good">alive</span>'

    def phase(rank: Rank) -> str:
        if not rank.phase or not rank.alive:
            return MISSING
        since = (
            "" if rank.phase_seconds is None else f' <span class="dim">{duration(rank.phase_seconds)}</span>'
        )
        return text(rank.phase) + since

    columns: tuple[Column[Rank], ...] = (
        Column("run", lambda rank: text(rank.run) if several_runs else ""),
        Column("rank", lambda rank: text(rank.rank), "n"),
        Column("worker", lambda rank: text(rank.worker), "n"),
        Column("role", lambda rank: text(rank.role)),
        Column("process", verdict),
        Column("phase", phase),
        Column("last step", lambda rank: ago(rank.progress, now), "n"),
        Column("own time a step", lambda rank: known(rank.compute_seconds, duration), "n"),
        Column("snapshot", lambda rank: ago(rank.updated, now), "n"),
        Column("GPU", lambda rank: text(rank.gpu)),
        Column("node", lambda rank: text(rank.node) if other_nodes else ""),
    )
    title = f"Ranks ({len(seen.ranks)})"
    return folded("ranks", title, table(columns, seen.ranks), unfolded=len(seen.ranks) <= MANY_RANKS)


# GPUs, machine, energy ------------------------------------------------------------------------------------


def _gpus(gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return ""

    def state(gpu: Gpu) -> str:
        answers = '<span class="good">up</span>' if gpu.up else '<span class="bad">lost</span>'
        if gpu.throttled_ratio:
            answers += f' <span class="warn">held back {share(gpu.throttled_ratio)}</span>'
        return answers

    def memory(gpu: Gpu) -> str:
        if gpu.memory_used is None or not gpu.memory_total:
            return MISSING
        return f'{size(gpu.memory_used)} <span class="dim">of {size(gpu.memory_total)}</span>'

    def power(gpu: Gpu) -> str:
        limit = f' <span class="dim">of {gpu.limit_watts:.0f}</span>' if gpu.limit_watts else ""
        return MISSING if gpu.watts is None else f"{gpu.watts:.0f} W{limit}"

    models = {gpu.name for gpu in gpus}
    model = f'<span class="dim"> · {text(gpus[0].name)}</span>' if len(models) == 1 and gpus[0].name else ""
    columns: tuple[Column[Gpu], ...] = (
        Column("GPU", lambda gpu: text(gpu.index), "n"),
        Column("model", lambda gpu: text(gpu.name) if len(models) > 1 else ""),
        Column("state", state),
        Column("busy", lambda gpu: known(gpu.use, share), "n"),
        Column("tensor cores", lambda gpu: known(gpu.tensor, share), "n"),
        Column("memory", memory, "n"),
        Column("power", power, "n"),
        Column("lately", lambda gpu: spark(gpu.history, f"power of GPU {gpu.index}", _watts, floor=0.0)),
        Column("temperature", lambda gpu: known(gpu.celsius, lambda value: f"{value:.0f} °C"), "n"),
        Column("energy", lambda gpu: known(gpu.joules, energy), "n"),
    )
    return f"<h2>GPUs ({len(gpus)}){model}</h2>{table(columns, gpus)}"


def _watts(value: float | None) -> str:
    return number(value, "W")


def _machine(machine: Machine) -> str:
    memory = (
        None
        if not machine.memory_total or machine.memory_used is None
        else machine.memory_used / machine.memory_total
    )
    cells = "".join(
        (
            cell(
                "CPU",
                known(machine.cpu_ratio, share),
                spark(machine.cpu_history, "use of the CPUs", share, floor=0.0),
            ),
            cell("CPUs", known(machine.cpus, number)),
            cell(
                "memory used",
                "" if memory is None else f"{share(memory)} <small>of {size(machine.memory_total)}</small>",
            ),
            cell("CPU power", known(machine.cpu_watts, _watts)),
            cell("GPU power", known(machine.gpu_watts, _watts)),
        )
    )
    return f'<h2>Machine</h2><div class="card"><dl class="grid">{cells}</dl></div>'


def _sources(sources: Sequence[Source]) -> str:
    if not sources:
        return ""
    columns: tuple[Column[Source], ...] = (
        Column("component", lambda each: text(each.component)),
        Column("device", lambda each: text(each.name or each.device)),
        Column("read from", lambda each: text(each.source)),
        Column("how", lambda each: "measured" if each.measured else '<span class="warn">modelled</span>'),
    )
    title = f"Where energy is read ({len(sources)})"
    return folded("energy", title, table(columns, sources), unfolded=False)


def _statistics(statistics: Sequence[Statistic]) -> str:
    if not statistics:
        return ""

    def value(each: Statistic) -> str:
        low, high = quantity(each.low, each.unit), quantity(each.high, each.unit)
        if each.low is None:
            return MISSING
        return low if low == high else f"{low} … {high}"

    def state(each: Statistic) -> str:
        missing = each.ranks - each.with_data
        if missing:
            return f'<span class="warn">no data on {missing} of {each.ranks}</span>'
        return '<span class="good">data</span>'

    columns: tuple[Column[Statistic], ...] = (
        Column("statistic, last window", lambda each: f"<code>{text(each.family)}</code>"),
        Column("over ranks", value, "n"),
        Column("gaps", state),
    )
    silent = sum(each.with_data < each.ranks for each in statistics)
    gaps = f", {silent} with gaps" if silent else ""
    title = f"Recorded statistics ({len(statistics)}{gaps})"
    return folded("statistics", title, table(columns, statistics), unfolded=len(statistics) <= FEW_STATISTICS)


# Collectors -----------------------------------------------------------------------------------------------


def _collectors(collectors: Sequence[CollectorStatus]) -> str:
    def verdict(status: CollectorStatus) -> str:
        if status.success is None:
            return '<span class="dim">not yet</span>'
        return '<span class="good">ok</span>' if status.success else '<span class="bad">failing</span>'

    columns: tuple[Column[CollectorStatus], ...] = (
        Column("collector", lambda status: text(status.name)),
        Column("verdict", verdict),
        Column("every", lambda status: duration(status.interval_seconds), "n"),
        Column("age", lambda status: known(status.age_seconds, duration), "n"),
        Column("took", lambda status: known(status.duration_seconds, duration), "n"),
        Column(
            "remarks: what fails, and what this machine does not offer",
            lambda status: text(status.message or "; ".join(status.unsupported)),
            "words dim",
        ),
    )
    failing = sum(status.success is False for status in collectors)
    title = (
        f"Collectors ({len(collectors)}, {failing} failing)" if failing else f"Collectors ({len(collectors)})"
    )
    ordered = sorted(collectors, key=lambda status: status.success is not False)
    return folded("collectors", title, table(columns, ordered), unfolded=bool(failing))


def _footer(seen: View) -> str:
    links = {
        seen.about.telemetry_path: "Metrics",
        "/-/ready": "Ready",
        "/-/healthy": "Healthy",
        "/config": "Configuration",
    }
    anchors = "".join(f'<a href="{text(path)}">{name}</a>' for path, name in links.items())
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seen.about.started))
    return (
        f"<footer><nav>{anchors}</nav><p>training-exporter {text(seen.about.version)}, started {since} UTC, feed "
        f"<code>{text(seen.about.feed_directory)}</code>. A dash is no data: it is never an old number.</p></footer>"
    )
