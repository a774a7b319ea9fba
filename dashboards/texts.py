"""What a reader is told about each panel: text/*.md, a file for each dashboard, a heading for each panel.

A panel has a paragraph on what it shows, one on what a bad value looks like, one on what to do then, one on what a gap
means (where it means more than that nothing was measured), and the words that stand in the panel when it is empty.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent / "text"
GAP = "nothing was measured then: the exporter was down, or its source was; no line is drawn over it."
PARTS = ("**Bad:** ", "**What to do:** ", "**A gap or no data:** ", "**Empty:** ")


@dataclass(frozen=True, slots=True)
class Text:
    """The description of a panel as Markdown, and what an empty panel says."""

    description: str
    empty: str


def texts_of(uid: str, directory: Path = DIRECTORY) -> dict[str, Text]:
    """Read the texts of a dashboard's panels, by title.

    Raises:
        ValueError: A panel lacks one of its parts.
    """
    content = (directory / f"{uid}.md").read_text(encoding="utf-8")
    parts = re.split(r"^### (.+)\n", content, flags=re.MULTILINE)
    return {
        title: _text(title, re.split(r"^## ", body, flags=re.MULTILINE)[0])
        for title, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def _text(title: str, body: str) -> Text:
    paragraphs = [" ".join(paragraph.split()) for paragraph in body.strip().split("\n\n")]
    found = {part: paragraph for part in PARTS for paragraph in paragraphs if paragraph.startswith(part)}
    found.setdefault("**A gap or no data:** ", f"**A gap or no data:** {GAP}")
    missing = [part.strip("* ") for part in PARTS if part not in found]
    if missing or paragraphs[0] in found.values():
        raise ValueError(f"{title}: missing {', '.join(missing) or 'what it shows'}")
    description = "\n\n".join([paragraphs[0], *(found[part] for part in PARTS[:3])])
    return Text(description, found["**Empty:** "].removeprefix("**Empty:** "))
