"""Status page as an HTML document, readable without JavaScript and on small screens.

jinja2 escapes all texts except the style sheet, the scripts and the SVG paths. The style sheet and the scripts are files of this
package, and the Content-Security-Policy names their hashes. The SVG paths contain only numbers that this package has formatted.
uPlot draws the plots if scripts run.
"""

from __future__ import annotations

import base64
import hashlib
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from exporter.status.attention import FindingStarts, finding_groups, headline, node_cost_text
from exporter.status.conditions import CONDITIONS, findings
from exporter.status.conditions.runs import remote_ranks_text
from exporter.status.elements import COLOR_COUNT, HEIGHT, MAX_ROWS, WIDTH
from exporter.status.formatting import duration, share
from exporter.status.runs import run_sections
from exporter.status.sections import (
    collectors_fold,
    gpus_section,
    machine_section,
    ranks_section,
    statistics_fold,
)
from exporter.status.view import View

MAX_DISPLAYED_CHARACTERS = 300
"""Maximum length of a text that a template inserts into the page, because a name that a user has chosen can have any length."""
_FOLDER = Path(__file__).parent
_LINKS = (
    ("/metrics", "Metrics"),
    ("/-/ready", "Ready"),
    ("/-/healthy", "Healthy"),
    ("/config", "Configuration"),
    ("/runbook", "Runbook"),
)


@dataclass(frozen=True, slots=True)
class InlineAssets:
    """Style sheet and scripts that the page contains."""

    style_sheet: str
    plot_library: str
    page_script: str


@lru_cache(maxsize=1)
def _inline_assets() -> InlineAssets:
    """Read the style sheets, which are joined, and the scripts."""
    library_style, page_style, plot_library, page_script = (
        (_FOLDER / name).read_text(encoding="utf-8")
        for name in ("uPlot.min.css", "page.css", "uPlot.iife.min.js", "live.js")
    )
    return InlineAssets(library_style + page_style, plot_library, page_script)


@lru_cache(maxsize=1)
def content_security_policy() -> str:
    """Return a policy that allows the style sheet and the scripts of the page, requests to the exporter, and the empty icon."""
    assets = _inline_assets()
    style, library, script = map(_source_hash, (assets.style_sheet, assets.plot_library, assets.page_script))
    return (
        f"default-src 'none'; style-src {style}; script-src {library} {script}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _source_hash(text: str) -> str:
    """Return the source expression of an inline style sheet or script in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@lru_cache(maxsize=1)
def template_environment() -> Environment:
    """Return the template environment. Templates are compiled on first use."""
    templates = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        auto_reload=False,
        finalize=_display_text,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    templates.filters |= {"duration": duration, "share": share, "utc": _utc}
    templates.globals |= {"COLOR_COUNT": COLOR_COUNT, "WIDTH": WIDTH, "HEIGHT": HEIGHT}
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return templates


@lru_cache(maxsize=1)
def _template() -> Template:
    return template_environment().get_template("page.html")


def _display_text(value: object) -> object:
    """Shorten a text, and replace its characters that are not printable. Markup and objects of other types are unchanged."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    text = value if len(value) <= MAX_DISPLAYED_CHARACTERS else value[: MAX_DISPLAYED_CHARACTERS - 1] + "…"
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def _utc(timestamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(timestamp)) + " UTC"


def style_sheet() -> str:
    """Return the style sheet of the page."""
    return _inline_assets().style_sheet


def render(view: View, starts: FindingStarts) -> bytes:
    """Render the status page as UTF-8."""
    assets = _inline_assets()
    page_findings = findings(view)
    groups = finding_groups(view, page_findings, starts)
    gpu_remarks = (
        status.message or "; ".join(status.unsupported) for status in view.collectors if status.name == "gpu"
    )
    text = _template().render(
        exporter=view.exporter,
        style=assets.style_sheet,
        library=assets.plot_library,
        script=assets.page_script,
        headline=headline(view, page_findings, starts),
        finding_groups=groups[:MAX_ROWS],
        alert_count=sum(bool(condition.alert_name) for condition in CONDITIONS),
        hidden_groups=max(0, len(groups) - MAX_ROWS),
        series=view.samples.value("exporter_series"),
        cost=node_cost_text(view),
        remote_ranks={
            name: text
            for name, run in view.runs.items()
            if (text := remote_ranks_text(run)) and not run.is_ended
        },
        runs=run_sections(view, page_findings),
        ranks=ranks_section(view) if view.ranks else None,
        machine=machine_section(view),
        gpus=gpus_section(view, page_findings) if view.gpus else None,
        gpu_remark=" ".join(gpu_remarks),
        statistics=statistics_fold(view),
        collectors=collectors_fold(view.collectors),
        links=_LINKS,
    )
    return text.encode("utf-8", "replace")
