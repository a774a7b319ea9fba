"""Status page as an HTML document, readable without script and on a telephone.

jinja2 escapes every text. Style and scripts are files of this package; the Content-Security-Policy names their hashes.
uPlot draws the plots if scripts run.
"""

from __future__ import annotations

import base64
import hashlib
import time
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from exporter.status.attention import Onsets, concerns
from exporter.status.conditions import CONDITIONS, findings
from exporter.status.elements import COLOURS, HEIGHT, MOST_ROWS, WIDTH
from exporter.status.numbers import duration, share
from exporter.status.runs import run_section
from exporter.status.sections import (
    collectors_fold,
    gpus_section,
    machine_section,
    ranks_section,
    statistics_fold,
)
from exporter.status.view import View

LONGEST_TEXT = 300
_FOLDER = Path(__file__).parent
_LINKS = (
    ("/metrics", "Metrics"),
    ("/-/ready", "Ready"),
    ("/-/healthy", "Healthy"),
    ("/config", "Configuration"),
    ("/runbook", "Runbook"),
)


@lru_cache(maxsize=1)
def _assets() -> tuple[str, str, str]:
    library_style, style, library, script = (
        (_FOLDER / name).read_text(encoding="utf-8")
        for name in ("uPlot.min.css", "page.css", "uPlot.iife.min.js", "live.js")
    )
    return library_style + style, library, script


@lru_cache(maxsize=1)
def policy() -> str:
    """Return the Content-Security-Policy: style, scripts and address of the page only."""
    style, *scripts = (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in _assets()
    )
    return (
        f"default-src 'none'; style-src {style}; script-src {' '.join(scripts)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Return the templates of the page, which are compiled at first use."""
    made = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        auto_reload=False,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters |= {"duration": duration, "share": share, "utc": _utc}
    made.globals |= {"COLOURS": COLOURS, "WIDTH": WIDTH, "HEIGHT": HEIGHT}
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return made


@lru_cache(maxsize=1)
def _template() -> Template:
    return environment().get_template("page.html")


def _printable(value: object) -> object:
    """Return foreign text with a bounded length and without control characters; markup stays as is."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    shown = value if len(value) <= LONGEST_TEXT else value[: LONGEST_TEXT - 1] + "…"
    return shown if shown.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in shown)


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) + " UTC"


def style() -> str:
    """Return the style sheet of the page."""
    return _assets()[0]


def render(seen: View, onsets: Onsets) -> bytes:
    """Return the document in UTF-8."""
    style_sheet, library, script = _assets()
    found = concerns(findings(seen), onsets, seen.about.now)
    remarks = (
        status.message or "; ".join(status.unsupported) for status in seen.collectors if status.name == "gpu"
    )
    text = _template().render(
        about=seen.about,
        style=style_sheet,
        library=library,
        script=script,
        is_urgent=any(concern.urgent for concern in found),
        concerns=found[:MOST_ROWS],
        conditions=sum(bool(condition.alert) for condition in CONDITIONS),
        hidden_concerns=max(0, len(found) - MOST_ROWS),
        series=seen.readings.value("exporter_series"),
        runs=[run_section(seen, run) for run in [*seen.runs.values()][:MOST_ROWS]],
        ranks=ranks_section(seen) if seen.ranks else None,
        machine=machine_section(seen),
        gpus=gpus_section(seen) if seen.gpus else None,
        gpu_remark=" ".join(remarks),
        statistics=statistics_fold(seen),
        collectors=collectors_fold(seen.collectors),
        links=_LINKS,
    )
    return text.encode("utf-8", "replace")
