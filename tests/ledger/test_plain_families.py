"""Plain families of the exporter's own: from a counter in a process to the page, and nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_support import child, labelled, page_of, series
from ledger_support import Sidecar, a_definition, a_process, a_reading, a_snapshot

from exporter.feed.decoder import decode
from exporter.feed.encoder import encode
from exporter.recording.values import KINDS, Aggregation

RECORD = """
import exporter
exporter.configure(run="mine")
from exporter.recording.stat import metric
metric("counter", "training.elastic.restarts")
add = metric("counter", "training.elastic.failure_restarts", labels={"worker_role": "a"})
add(1); add(2)
left = metric("gauge", "training.elastic.remaining_restarts", labels={"worker_role": "a"})
left(3); left(-1)
wait = metric("histogram", "training.elastic.rendezvous", unit="seconds", buckets=(1.0, 5.0))
wait(0.5); wait(3)
metric("summary", "training.elastic.flakiness", unit="ratio", labels={"worker_role": "a"})(0.25)
"""


def test_each_kind_becomes_its_one_family_and_a_counter_begins_at_zero(tmp_path: Path) -> None:
    child(tmp_path / "feed", RECORD + "import exporter, time; exporter.flush()")
    page = page_of(tmp_path / "feed")

    assert labelled(page, "training_elastic_failure_restarts_total", worker_role="a") == 3
    assert series(page, "training_elastic_restarts_total") == {'{role="helper",run="mine"}': 0.0}
    assert labelled(page, "training_elastic_rendezvous_seconds_bucket", le="1.0") == 1
    assert labelled(page, "training_elastic_rendezvous_seconds_sum") == 3.5
    assert labelled(page, "training_elastic_flakiness_ratio_sum") == 0.25
    assert "# TYPE training_elastic_failure_restarts_total counter" in page
    assert "# TYPE training_elastic_rendezvous_seconds histogram" in page
    assert "window" not in page
    assert "training_elastic_restarts_last_sample" not in page


def test_totals_go_on_over_a_restart_and_a_gauge_is_of_the_living_only(tmp_path: Path) -> None:
    labels = (("worker_role", "a"),)
    counter = a_definition("training.elastic.failure_restarts", labels=labels).replace(
        kind="counter", aggregations=frozenset()
    )
    gauge = a_definition("training.elastic.remaining_restarts", labels=labels).replace(
        kind="gauge", aggregations=frozenset()
    )
    sidecar = Sidecar(tmp_path)
    first, second = a_process(), a_process()
    readings = a_reading(counter, [1, 1]), a_reading(gauge, [5]).replace(value=5.0)
    sidecar.feed.put(a_snapshot(first, *readings))
    while_alive = sidecar.collect()
    sidecar.feed.kill(first)
    dead = sidecar.after(1)
    sidecar.restart()
    sidecar.feed.put(a_snapshot(second, a_reading(counter, [1])))
    later = sidecar.after(1)

    where = {"run": "r", "rank": "0", "worker_role": "a"}
    assert while_alive.get("training_elastic_remaining_restarts", **where) == 5
    assert dead.get("training_elastic_remaining_restarts", **where) is None
    assert dead.get("training_elastic_failure_restarts_total", **where) == 2
    assert later.get("training_elastic_failure_restarts_total", **where) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_survives_the_feed(kind: str) -> None:
    buckets = (1.0, 2.0) if kind == "histogram" else ()
    definition = a_definition("a.b", buckets=buckets).replace(kind=kind)
    if kind != "stat":
        plain_one = frozenset({Aggregation.HISTOGRAM} if buckets else ())
        definition = definition.replace(aggregations=plain_one)
    reading = a_reading(definition, [1.0]).replace(value=7.5)
    snapshot = a_snapshot(a_process(), reading)

    assert decode(encode(snapshot)) == snapshot
