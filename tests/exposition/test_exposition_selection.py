"""`/metrics?name[]=…`: some families only, in every form, and what the official parsers make of them."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from web_support import Page as Application
from web_support import fetch, port_of, serving

from exporter.collectors.family import Distribution, Family, FamilySpec, Sample
from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page
from exporter.exposition.selection import omit, select

OPENMETRICS = "application/openmetrics-text;version=1.0.0"


HISTOGRAM = [f"train_step_seconds_{part}" for part in ("bucket", "bucket", "count", "sum")]


def page() -> Page:
    made = Page()
    gauge = FamilySpec("train_loss", "gauge", "Loss.", ("rank",))
    counter = FamilySpec("train_steps_total", "counter", "Steps\\n# of a line.", ("rank",))
    histogram = FamilySpec("train_step_seconds", "histogram", "Time.", ("rank",), "seconds")
    times = Distribution(3, 4.5, ((1.0, 2),))
    made.publish(
        "a",
        (
            Family(gauge, (Sample(("# train_steps\r\n{",), 0.5), Sample(("1",), 0.25))),
            Family(counter, (Sample(("0",), 7),)),
            Family(histogram, (Sample(("0",), times),)),
        ),
    )
    return made


def names(body: bytes, form: Format) -> list[str]:
    parse = parse_text if form is Format.TEXT else parse_openmetrics
    return [sample.name for family in parse(body.decode()) for sample in family.samples]


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["train_loss"], ["train_loss"] * 2),
        (["train_steps_total"], ["train_steps_total"]),
        (["train_step_seconds_count"], HISTOGRAM),
        (["train_step_seconds"], HISTOGRAM),
        (["train_s*_total", "train_los?"], ["train_loss", "train_loss", "train_steps_total"]),
        (["train"], []),
        (["exporter_series"], []),
    ],
)  # fmt: skip
def test_families_are_found_by_their_names_those_of_their_samples_or_a_pattern(
    form: Format, wanted: list[str], found: list[str]
) -> None:
    body = select(page().render(form, compress=False), wanted)

    assert sorted(names(body, form)) == found
    assert body.endswith(b"# EOF\n") is (form is Format.OPENMETRICS)
    assert body.count(b"# TYPE") == len(
        {name.removesuffix("_total").partition("_seconds")[0] for name in found}
    )


@given(st.lists(st.sampled_from(["train_loss", "train_steps_total", "train_step_seconds", "x"])))
def test_what_is_selected_is_part_of_the_page_and_all_of_it_is_the_page(wanted: Iterable[str]) -> None:
    body = page().render(Format.TEXT, compress=False)

    assert set(select(body, wanted).splitlines()) <= set(body.splitlines())
    assert select(body, ["*"]) == body


@given(st.lists(st.sampled_from(["train_loss", "train_steps_*", "train_step_seconds_sum", "x"])))
def test_what_is_left_out_is_what_is_selected_otherwise(names: list[str]) -> None:
    body = page().render(Format.OPENMETRICS, compress=False)
    kept, left = select(body, names).splitlines(), omit(body, names).splitlines()

    assert sorted(kept + left) == sorted([*body.splitlines(), b"# EOF"])


class Served(Application):
    def metrics(self, form: Format, *, compress: bool) -> bytes:
        return page().render(form, compress=compress)


def test_the_server_gives_what_is_asked_for_in_every_form() -> None:
    query = "/metrics?" + urlencode([("name[]", "train_loss"), ("name[]", "none"), ("else", "x")])
    with serving(Served()) as server:
        port = port_of(server)
        whole, other = fetch(port), fetch(port, "/metrics?else=1")
        plain = fetch(port, query)
        packed = fetch(port, query, headers={"Accept": OPENMETRICS, "Accept-Encoding": "gzip"})
        nothing = fetch(port, "/metrics?name[]=none")
        too_many = fetch(port, "/metrics?" + "&".join(["name[]=x"] * 101))

    assert whole.body == other.body
    assert names(plain.body, Format.TEXT) == ["train_loss"] * 2
    assert names(gzip.decompress(packed.body), Format.OPENMETRICS) == ["train_loss"] * 2
    assert (nothing.status, nothing.body) == (200, b"")
    assert too_many.status == 400
