"""Metrics that are ready already: answered on the loop, without a worker, whatever the workers do."""

from __future__ import annotations

import gzip
import threading

from web_child import numbers
from web_support import Page, fetch, port_of, serving

from exporter.exposition.negotiation import Format


class Hanging(Page):
    """Makes no page before it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def metrics(self, form: Format, *, compress: bool) -> bytes:
        del form, compress
        self.let_go.wait(15)
        return b"late 1\n"


class Shelf:
    """Has a page in one form."""

    def __init__(self, form: Format, *, compress: bool) -> None:
        self.has = form, compress

    def __call__(self, form: Format, *, compress: bool) -> bytes | None:
        body = b"ready 1\n"
        if (form, compress) != self.has:
            return None
        return gzip.compress(body) if compress else body


def test_a_prepared_page_is_answered_while_every_render_hangs() -> None:
    hanging = Hanging()
    with serving(hanging, prepared=Shelf(Format.TEXT, compress=False)) as server:
        answer = fetch(port_of(server))
        counted = numbers(server)
        hanging.let_go.set()

    assert (answer.status, answer.body) == (200, b"ready 1\n")
    assert counted["exporter_http_renders_total"] == 0


def test_a_form_that_is_not_prepared_is_made_by_a_worker() -> None:
    page = Page()
    with serving(page, prepared=Shelf(Format.TEXT, compress=True)) as server:
        made = fetch(port_of(server))
        ready = fetch(port_of(server), headers={"Accept-Encoding": "gzip"})
        counted = numbers(server)

    assert made.body == page.body
    assert gzip.decompress(ready.body) == b"ready 1\n"
    assert counted["exporter_http_renders_total"] == 1


def test_a_prepared_page_is_not_given_before_it_would_be_right() -> None:
    page = Page()
    page.reason = "the state is still being read"
    with serving(page, prepared=Shelf(Format.TEXT, compress=False)) as server:
        answer = fetch(port_of(server))

    assert answer.status == 503


def test_a_defect_of_what_prepares_costs_its_answer_only() -> None:
    def broken(form: Format, *, compress: bool) -> bytes | None:
        raise RuntimeError(form, compress)

    with serving(prepared=broken) as server:
        first, healthy = fetch(port_of(server)), fetch(port_of(server), "/-/healthy")

    assert (first.status, healthy.status) == (500, 200)
