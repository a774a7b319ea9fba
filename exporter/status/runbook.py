"""Runbook of the alerts as an HTML document, for `/runbook`.

The source is docs/runbook.md, which uses headings, paragraphs, tables, numbered lists, emphasis, code and links.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from markupsafe import Markup, escape

from exporter.status.document import style_sheet, template_environment

SOURCE = Path(__file__).resolve().parents[1] / "assets" / "runbook.md"
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_INLINE = re.compile(
    r"`(?P<code>[^`]+)`|\*\*(?P<bold>[^*]+)\*\*|\*(?P<italic>[^*]+)\*|\[(?P<text>[^]]+)\]\((?P<target>[^)]+)\)"
)
_ITEM = re.compile(r"^\d+\. ", re.MULTILINE)
_CELL = re.compile(r"(?<!\\)\|")


@lru_cache(maxsize=1)
def render() -> bytes:
    """Render the runbook as UTF-8. The id of a section is the name of the alert in lower case."""
    text = _COMMENT.sub("", SOURCE.read_text(encoding="utf-8"))
    blocks = Markup("\n").join(_block(block) for block in re.split(r"\n\s*\n", text) if block.strip())
    return (
        template_environment()
        .get_template("runbook.html")
        .render(style=style_sheet(), blocks=blocks)
        .encode()
    )


def _block(block: str) -> Markup:
    """Convert a heading, table, numbered list or paragraph."""
    block = block.strip()
    if block.startswith("#"):
        marks, _, title = block.partition(" ")
        level = len(marks)
        return Markup('<h{0} id="{1}"><a href="#{1}">{2}</a></h{0}>').format(level, title.lower(), title)
    if block.startswith("|"):
        return _table(block.splitlines())
    if _ITEM.match(block):
        items = (Markup("<li>{}</li>").format(_lines(item)) for item in _ITEM.split(block)[1:])
        return Markup("<ol>{}</ol>").format(Markup("").join(items))
    return Markup("<p>{}</p>").format(_lines(block))


def _lines(text: str) -> Markup:
    """Return the lines of a paragraph or of a list item as one line."""
    return _inline(" ".join(text.split()))


def _table(lines: list[str]) -> Markup:
    """Convert a table of Markdown, whose second line separates the head from the rows."""
    head, _, *rows = ([cell.strip() for cell in _CELL.split(line)[1:-1]] for line in lines)
    titles = Markup("").join(Markup("<th>{}</th>").format(title) for title in head)
    body = Markup("").join(
        Markup("<tr>{}</tr>").format(
            Markup("").join(
                Markup('<td data-name="{}">{}</td>').format(title, _inline(cell.replace("\\|", "|")))
                for title, cell in zip(head, row, strict=True)
            )
        )
        for row in rows
    )
    return Markup(
        '<div class="card wide"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    ).format(titles, body)


def _inline(text: str) -> Markup:
    """Convert code, emphasis and links within a line. A link to a file of the repository becomes its text."""
    markup, end = Markup(), 0
    for match in _INLINE.finditer(text):
        markup += escape(text[end : match.start()])
        if match["code"]:
            markup += Markup("<code>{}</code>").format(match["code"])
        elif match["bold"]:
            markup += Markup("<b>{}</b>").format(match["bold"])
        elif match["italic"]:
            markup += Markup("<em>{}</em>").format(match["italic"])
        elif match["target"].startswith("#"):
            markup += Markup('<a href="{}">{}</a>').format(match["target"], match["text"])
        else:  # the exporter does not serve the file
            markup += escape(match["text"])
        end = match.end()
    return markup + escape(text[end:])
