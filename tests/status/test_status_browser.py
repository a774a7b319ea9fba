"""Status page in Chromium, served by a sidecar that watches real processes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium_support import Browser, Tab, chromium, needs_chromium
from serve_support import Sidecar, recording, sidecar
from waiting import wait_until

JOB = """
import sys
from exporter import Stat, flush
Stat("loss", window_seconds=0.5).add(1.0)
flush()
print("recording", flush=True)
sys.stdin.readline()
"""

pytestmark = [needs_chromium, pytest.mark.timeout(90)]


def recording_rank(
    tmp_path: Path, rank: int, run: str = "night"
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return recording(tmp_path, JOB, rank, run)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    opened_tab = Tab(browser)
    yield opened_tab
    opened_tab.close()


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """Yield a sidecar with the GPUs of a replayed machine and with a rank of a run with a long name."""
    directory = tmp_path_factory.mktemp("sidecar")
    with (
        sidecar(directory, "--gpu.replay=h100") as running,
        recording_rank(directory, 0, "a-long-word-" * 20),
    ):
        wait_until(lambda: all(text in running.request("/")[1] for text in ('id="GPU power-"', "alive")))
        yield running


def test_the_page_is_drawn_without_errors_and_without_requests_to_other_hosts(
    exporter: Sidecar, tab: Tab
) -> None:
    tab.open(f"http://{exporter.address}/")
    tab.wait_for("document.getElementById('live').textContent.startsWith('live')")
    fits_window = tab.value("document.documentElement.scrollWidth <= window.innerWidth")
    plot = "document.querySelector('figure[id=\"GPU power-\"] .u-over')"
    tab.value(f"{plot}.scrollIntoView({{block: 'center'}})")
    x, y = tab.value(f"(({{x, y, width}}) => [x + width - 1, y + 9])({plot}.getBoundingClientRect())")
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tab.wait_for(f"/GPU 7[0-9.]+ W/.test({plot}.closest('figure').innerText)")

    assert "GPUs (8)" in tab.text()
    assert fits_window
    assert tab.complaints == []
    own_prefixes = (f"http://{exporter.address}/", "data:", "about:")
    assert tab.requests
    assert [url for url in tab.requests if not url.startswith(own_prefixes)] == []


@pytest.mark.parametrize("width", [360, 390, 800, 1000, 1400])
def test_neither_the_page_nor_a_table_scrolls_horizontally(exporter: Sidecar, tab: Tab, width: int) -> None:
    tab.resize(width, 800)
    tab.open(f"http://{exporter.address}/")
    tab.value("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")

    boxes = "[...document.querySelectorAll('.wide')]"
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert tab.value(f"{boxes}.length") > 0
    assert tab.value(f"{boxes}.filter((box) => box.scrollWidth > box.clientWidth).length") == 0


def test_the_legend_of_a_plot_has_the_latest_value_after_a_refresh(exporter: Sidecar, tab: Tab) -> None:
    tab.open(f"http://{exporter.address}/")
    tab.wait_for("document.querySelector('figure[id=\"GPU power-\"] .u-legend') !== null")
    tab.value(
        "const parse = DOMParser.prototype.parseFromString;"
        "DOMParser.prototype.parseFromString = function (text, type) {"
        "  const page = parse.call(this, text, type);"
        "  const figure = page.querySelector('figure[id=\"GPU power-\"]');"
        "  const content = JSON.parse(figure.dataset.plot);"
        "  content.data[1][content.data[1].length - 1] = 77;"
        "  figure.dataset.plot = JSON.stringify(content);"
        "  return page;"
        "}; 0"
    )

    tab.wait_for("document.querySelector('figure[id=\"GPU power-\"] .u-legend').innerText.includes('77 W')")


def test_a_link_to_the_runbook_opens_the_entry_of_the_alert(exporter: Sidecar, tab: Tab) -> None:
    tab.open(f"http://{exporter.address}/runbook#traininghang")

    assert tab.value("document.querySelector(':target').textContent") == "TrainingHang"
    assert tab.value("Math.abs(document.querySelector(':target').getBoundingClientRect().top)") < 60
    assert not [markup for markup in ("**", "](", "`", "###", "<!--") if markup in tab.text()]
    assert tab.complaints == []


def test_a_fold_is_reachable_by_keyboard_and_keeps_the_focus_over_a_refresh_that_removes_a_link_above(
    exporter: Sidecar, tab: Tab
) -> None:
    tab.open(f"http://{exporter.address}/")
    tab.value(
        "document.querySelector('main').insertAdjacentHTML('afterbegin', '<a href=#removed>removed</a>')"
    )
    tab.value(
        "window.before = document.querySelector('main'); document.querySelector('#collectors summary').focus()"
    )
    tab.wait_for("window.before !== document.querySelector('main')")

    assert tab.value("document.activeElement.tagName") == "SUMMARY"
    assert tab.value("document.activeElement.parentElement.id") == "collectors"
    assert tab.value("[...document.body.children].map((child) => child.tagName).join()").startswith(
        "HEADER,MAIN,FOOTER"
    )
    assert tab.value("document.getElementById('live').closest('header') !== null")


def test_without_javascript_the_page_shows_the_ranks_and_requests_a_reload(
    exporter: Sidecar, tab: Tab
) -> None:
    tab.open(f"http://{exporter.address}/", script=False)

    assert "alive" in tab.text()
    assert tab.value("document.querySelector('noscript meta[http-equiv=refresh]') !== null")


def test_the_end_of_a_rank_is_shown_without_a_reload(tmp_path: Path, tab: Tab) -> None:
    with (
        sidecar(tmp_path) as running,
        recording_rank(tmp_path, 0),
        recording_rank(tmp_path, 1) as killed_rank,
    ):
        wait_until(lambda: running.request("/")[1].count(">alive<") == 2)
        tab.open(f"http://{running.address}/")
        tab.value("window.sameDocument = true")
        assert "Nothing needs attention" in tab.text()
        killed_rank.send_signal(signal.SIGKILL)
        tab.wait_for("document.body.innerText.includes('Rank 1 of night ended')")

        assert tab.value("window.sameDocument")
        assert tab.value("document.title").startswith("●")
        assert tab.complaints == []


def test_a_stopped_exporter_is_reported_and_the_old_content_is_grayed(tmp_path: Path, tab: Tab) -> None:
    with sidecar(tmp_path) as running:
        tab.open(f"http://{running.address}/")
        tab.wait_for("document.getElementById('live').textContent.startsWith('live')")
        running.process.send_signal(signal.SIGSTOP)
        try:
            tab.wait_for("document.body.classList.contains('stale')", seconds=40)
        finally:
            running.process.send_signal(signal.SIGCONT)
        tab.wait_for("!document.body.classList.contains('stale')", seconds=30)


def test_the_page_says_that_it_is_paused_while_text_is_selected(exporter: Sidecar, tab: Tab) -> None:
    tab.open(f"http://{exporter.address}/")
    tab.value("getSelection().selectAllChildren(document.querySelector('main h2'))")
    tab.wait_for("document.getElementById('live').textContent.startsWith('paused while text is selected')")
    tab.value("window.before = document.querySelector('main'); getSelection().removeAllRanges()")
    tab.wait_for("document.getElementById('live').textContent.startsWith('live')")
    tab.wait_for("window.before !== document.querySelector('main')")

    assert tab.complaints == []


def test_the_policy_blocks_injected_scripts_images_and_styles(exporter: Sidecar, tab: Tab) -> None:
    tab.open(f"http://{exporter.address}/")
    tab.value(
        "const script = document.createElement('script'); script.textContent = \"document.title='owned'\";"
        "document.body.append(script); const image = new Image(); image.src = 'http://127.0.0.1:1/x';"
        "document.body.append(image); document.body.setAttribute('style', 'color: red')"
    )

    assert tab.value("document.title") != "owned"
    assert tab.value("getComputedStyle(document.body).color") != "rgb(255, 0, 0)"
    assert any("Content Security Policy" in complaint for complaint in tab.complaints)
