"""The page /runbook: docs/runbook.md as HTML."""

from __future__ import annotations

import html
import re

from exporter.status.runbook import render


def test_the_page_shows_no_markup_of_the_source() -> None:
    page = render().decode().partition("<main")[2]
    visible_text = html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"<code>.*?</code>", "", page)))

    assert "TrainingHang" in visible_text
    assert re.findall(r"[*`]|\]\(|^#|\s(?:\d\.|-) ", visible_text, re.MULTILINE) == []


def test_a_numbered_list_and_the_name_of_a_board_are_formatted() -> None:
    page = render().decode()

    assert (
        "<li>Save. Wait for the next regular checkpoint (<em>Work at risk or lost</em> on <em>Run</em> falls"
        in page
    )
    assert page.count("<ol>") == page.count("</ol>") > 0
