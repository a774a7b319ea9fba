"""The landing page: what this exporter is, which ranks it sees, and how its collectors fare.

Used in the sidecar, on a server's worker thread, when a person opens `/`. What the page and the scheduler know
comes in as values; one self-contained HTML document goes out: no script, no font, nothing from elsewhere, and
every text escaped, since run names and error messages come from outside.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from exporter.collectors.family import Family
from exporter.collectors.standing import CollectorStatus
from exporter.exposition.page import SERIES
from exporter.ledger.feed_families import ALIVE, LAST_UPDATE, RANK_INFO

MOST_ROWS = 200
"""Ranks and collectors shown at most; the metrics have them all."""

_STYLE = """
:root{color-scheme:light dark;--ink:#1d2530;--dim:#667085;--line:#d9dee5;--back:#f6f7f9;--card:#fff;
--good:#1a7f45;--bad:#c0341d;--link:#1f5fbf}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ee;--dim:#97a3b4;--line:#343c48;--back:#14181e;--card:#1c222a;
--good:#4cc27d;--bad:#ff7a61;--link:#7fb0ff}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:68rem;margin:0 auto;padding:2rem 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .5rem}
p{margin:.3rem 0}.dim{color:var(--dim)}a{color:var(--link)}
nav a{margin-right:1.2rem}
.card{background:var(--card);border:1px solid var(--line);border-radius:.5rem;overflow-x:auto}
table{border-collapse:collapse;width:100%}
th,td{padding:.4rem .8rem;text-align:left;vertical-align:top;border-top:1px solid var(--line)}
thead th{border-top:0;color:var(--dim);font-weight:600;white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.good{color:var(--good)}.bad{color:var(--bad)}
.empty{padding:.8rem}
"""


@dataclass(frozen=True, slots=True)
class Rank:
    """One training process as the page shows it.

    Attributes:
        run: Its run.
        rank: Its number; "" for a process of no rank.
        worker: Its slot among the processes of one rank; "" for the only one.
        role: What it does.
        node: Where it runs.
        alive: Whether it lives; None when that is not known.
        updated: Unix time of its last snapshot; None when that is not known.
    """

    run: str
    rank: str
    worker: str = ""
    role: str = ""
    node: str = ""
    alive: bool | None = None
    updated: float | None = None


@dataclass(frozen=True, slots=True)
class Landing:
    """Everything that the page says.

    Attributes:
        version: Of the exporter.
        node: The host's name.
        started: Unix time.
        now: Unix time.
        feed_directory: Where it looks for training processes.
        telemetry_path: Where the metrics are.
        series: On the metrics page; None when that is not known.
        not_ready: Why a scrape is refused, None when it is not.
        ranks: In order.
        collectors: In order.
    """

    version: str
    node: str
    started: float
    now: float
    feed_directory: str
    telemetry_path: str
    series: int | None
    not_ready: str | None
    ranks: Sequence[Rank]
    collectors: Sequence[CollectorStatus]


def render_landing(landing: Landing) -> bytes:
    """The document, UTF-8."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(landing.started))
    series = "" if landing.series is None else f" · {landing.series} series"
    state = (
        '<span class="good">ready</span>'
        if landing.not_ready is None
        else f'<span class="bad">not ready: {_text(landing.not_ready)}</span>'
    )
    links = {
        landing.telemetry_path: "Metrics",
        "/-/ready": "Ready",
        "/-/healthy": "Healthy",
        "/config": "Configuration",
    }
    anchors = "".join(f'<a href="{_text(path)}">{name}</a>' for path, name in links.items())
    parts = (
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>training-exporter · {_text(landing.node)}</title><style>{_STYLE}</style></head><body><main>",
        f'<h1>training-exporter <span class="dim">{_text(landing.version)}</span></h1>',
        f"<p>{_text(landing.node)} · {state} · up {_duration(landing.now - landing.started)} ",
        f'<span class="dim">since {since} UTC{series}</span></p>',
        f"<nav><p>{anchors}</p></nav>",
        "<h2>Training processes</h2>",
        _ranks_table(landing),
        "<h2>Collectors</h2>",
        _collectors_table(landing.collectors),
        "</main></body></html>\n",
    )
    return "".join(parts).encode("utf-8", "replace")


def ranks_of(families: Iterable[Family]) -> list[Rank]:
    """The training processes that a page's families tell of, in order of run and rank."""
    ranks: dict[tuple[str, ...], Rank] = {}
    for family in families:
        if family.spec not in (ALIVE, LAST_UPDATE, RANK_INFO):
            continue
        for sample in family.samples:
            labels = dict(zip(family.spec.labels, sample.labels, strict=True))
            run, number, worker, role = (labels[name] for name in ("run", "rank", "worker", "role"))
            # The role is a process's identity only where it has no rank; RANK_INFO alone says it of all.
            identity = (run, number, worker, "" if number else role)
            rank = ranks.get(identity) or Rank(run, number, worker, role)
            value = sample.value
            if family.spec == RANK_INFO:
                rank = replace(rank, role=role, node=labels["node"])
            elif isinstance(value, int | float) and family.spec == ALIVE:
                rank = replace(rank, alive=value == 1)
            elif isinstance(value, int | float):
                rank = replace(rank, updated=value)
            ranks[identity] = rank
    return sorted(ranks.values(), key=lambda each: (each.run, each.rank.zfill(12), each.worker, each.role))


def series_of(families: Iterable[Family]) -> int | None:
    """How many series the metrics have, None when the families do not say."""
    values = [sample.value for family in families if family.spec == SERIES for sample in family.samples]
    return int(values[0]) if values and isinstance(values[0], int | float) else None


def _ranks_table(landing: Landing) -> str:
    if not landing.ranks:
        where = _text(landing.feed_directory)
        return (
            f'<div class="card"><p class="empty dim">None yet. Looking in <code>{where}</code>: a job that records with '
            "<code>import exporter</code> and the same <code>EXPORTER_FEED_DIR</code> appears here.</p></div>"
        )
    rows = []
    for rank in landing.ranks[:MOST_ROWS]:
        verdict = '<span class="dim">unknown</span>'
        if rank.alive is not None:
            verdict = '<span class="good">alive</span>' if rank.alive else '<span class="bad">ended</span>'
        age = "" if rank.updated is None else _duration(landing.now - rank.updated)
        rows.append(
            f'<tr><td>{_text(rank.run)}</td><td class="n">{_text(rank.rank)}</td>'
            f'<td class="n">{_text(rank.worker)}</td><td>{_text(rank.role)}</td>'
            f'<td>{_text(rank.node)}</td><td>{verdict}</td><td class="n">{age}</td></tr>'
        )
    head = '<th>run</th><th class="n">rank</th><th class="n">worker</th><th>role</th><th>node</th><th>process</th><th class="n">last snapshot</th>'
    return _table(head, rows, len(landing.ranks))


def _collectors_table(collectors: Sequence[CollectorStatus]) -> str:
    rows = []
    for status in collectors[:MOST_ROWS]:
        verdict = '<span class="dim">not yet</span>'
        if status.success is not None:
            verdict = '<span class="good">ok</span>' if status.success else '<span class="bad">failing</span>'
        about = status.message or "; ".join(status.unsupported)
        age = "" if status.age_seconds is None else _duration(status.age_seconds)
        took = "" if status.duration_seconds is None else f"{status.duration_seconds * 1000:.1f} ms"
        rows.append(
            f'<tr><td>{_text(status.name)}</td><td>{verdict}</td><td class="n">{_duration(status.interval_seconds)}</td>'
            f'<td class="n">{age}</td><td class="n">{took}</td><td class="dim">{_text(about)}</td></tr>'
        )
    head = (
        '<th>collector</th><th>verdict</th><th class="n">every</th><th class="n">age</th>'
        '<th class="n">took</th><th>remarks</th>'
    )
    return _table(head, rows, len(collectors))


def _table(head: str, rows: Sequence[str], total: int) -> str:
    more = f'<p class="empty dim">and {total - len(rows)} more</p>' if total > len(rows) else ""
    return f'<div class="card"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>{more}</div>'


def _text(text: str) -> str:
    """Foreign text, harmless in HTML and of bounded length."""
    shown = text if len(text) <= 300 else text[:299] + "…"
    return escape("".join(c if c.isprintable() else "�" for c in shown))


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
