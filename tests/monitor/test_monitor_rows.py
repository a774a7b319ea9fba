"""Every row of the RFC's and its reviewers' requests: R1 to R15 and V1 to V28, as docs/torch-monitor.md answers them."""

from __future__ import annotations

import datetime as dt
import pickle
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import GaugeMetricFamily
from waiting import wait_until

import exporter
from exporter import Stat, events, log
from exporter.cli.push import Gateway, TextFile, target_of
from exporter.collectors.catalogue import CATALOGUE
from exporter.collectors.gpu.publishing import SPECS as GPU_SPECS
from exporter.errors import DefinitionError
from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page
from exporter.ledger.energy.families import SPECS as ENERGY_SPECS
from exporter.monitor import rfc
from exporter.recording.handlers.console import ConsoleHandler
from exporter.recording.handlers.json_lines import JsonLinesHandler, read_lines
from exporter.recording.handlers.logs import EventsFromLogs, LogRecords
from exporter.recording.handlers.tensorboard import TensorBoardHandler
from exporter.recording.naming import families_of
from exporter.recording.values import Aggregation

DOCUMENT = (Path(exporter.__file__).parent.parent / "docs" / "torch-monitor.md").read_text(encoding="utf-8")
ROWS = [f"r{number}" for number in range(1, 16)] + [f"v{number}" for number in range(1, 29)]
CELLS = {
    cells[1].strip().lower(): cells
    for line in DOCUMENT.splitlines()
    if len(cells := re.split(r"(?<!\\)\|", line)) == 6
}

FAMILIES = {
    spec.name for spec in (*(spec for entry in CATALOGUE for spec in entry.specs), *GPU_SPECS, *ENERGY_SPECS)
}


def last() -> exporter.Event:
    return events.recent()[-1]


def drained(stat: Stat) -> Stat:
    assert exporter.flush()
    return stat


# The table ---------------------------------------------------------------------------------------------------


def test_every_row_is_in_the_document_and_has_a_test() -> None:
    tests = {match[1] for name in globals() if (match := re.match(r"test_([rv]\d+)_", name))}

    assert set(ROWS) == tests == {row for row in CELLS if re.fullmatch(r"[rv]\d+", row)}
    assert all(cell.strip() for row in ROWS for cell in CELLS[row][1:5])


def test_the_examples_of_the_document_run_as_they_stand(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    examples = [CELLS[row][4].strip().strip("`") for row in ROWS]
    program = "\n".join([*blocks, *examples]).replace("/tmp/exporter-doc", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert len(blocks) == 2
    assert len(examples) == 43


# R: the RFC's own text ---------------------------------------------------------------------------------------


def test_r1_an_event_has_type_message_time_and_typed_data() -> None:
    log("r1.saved", "step 100", timestamp=5.0, step=100, ok=True, loss=0.5, path="/x")
    event = last()

    assert (event.type, event.message, event.timestamp) == ("r1.saved", "step 100", 5.0)
    assert [type(value) for value in event.data.values()] == [int, bool, float, str]
    exporter.flush()
    assert events.EVENTS.reading().counts["r1.saved", "info"] == 1


def test_r2_handlers_are_objects_or_callables_with_filters_and_leave_quietly() -> None:
    class Handler(rfc.EventHandler):
        seen: list[str] = []  # noqa: RUF012  # one handler of this class

        def handle(self, event: rfc.Event) -> None:
            self.seen.append(event.type)

    told: list[exporter.Event] = []
    handles = [rfc.register(Handler()), events.register(told.append, types="r2.a")]
    log("r2.a")
    log("r2.b")
    for handle in [*handles, *handles]:
        handle.unregister()

    assert Handler.seen == ["r2.a", "r2.b"]
    assert [event.type for event in told] == ["r2.a"]


def test_r3_logging_is_a_matter_of_microseconds() -> None:
    began = time.perf_counter()
    for _ in range(10_000):
        log("r3.tick")

    assert time.perf_counter() - began < 2  # 0.5 us each is measured; this is only to find a wait or a lock


def test_r4_events_can_be_typed_and_written_as_json_lines(tmp_path: Path) -> None:
    @dataclass
    class Saved(rfc.Event):
        type: str = "r4.saved"
        step: int = 0

    handle = events.register(JsonLinesHandler(tmp_path / "events.jsonl"), types="r4.*")
    rfc.log(Saved(message="m", step=7))
    handle.unregister()
    event = last()

    assert [line["type"] for line in read_lines(tmp_path / "events.jsonl")] == ["r4.saved"]
    assert Saved(step=7).asdict()["step"] == 7
    assert pickle.loads(pickle.dumps(event)) == event
    assert repr(event).startswith("Event(type='r4.saved'")


def test_r5_a_key_is_unique() -> None:
    rfc.Stat("r5.key", {rfc.StatType.MEAN})
    with pytest.raises(DefinitionError, match="was first made at"):
        rfc.Stat("r5.key", {rfc.StatType.MAX})


def test_r6_all_six_aggregations_are_right() -> None:
    stat = Stat(
        "r6.six", ["value", "mean", "count", "sum", "max", "min"], window_seconds=None, window_samples=3
    )
    for value in (3.0, 1.0, 2.0):
        stat.add(value)
    found = {each.value: value for each, value in drained(stat).get().items()}

    assert found == {"value": 2.0, "mean": 2.0, "count": 3.0, "sum": 6.0, "max": 3.0, "min": 1.0}
    assert (stat.count, stat.sum) == (3, 6.0)


def test_r7_histograms_percentiles_and_standard_deviation() -> None:
    stat = Stat(
        "r7.more", ["histogram", "p50", "p99", "stddev"], window_seconds=None, window_samples=2, buckets=[1.5]
    )
    stat.add(1.0)
    stat.add(3.0)

    assert drained(stat).get()[Aggregation.STDDEV] == 1.0
    assert stat.get()[Aggregation.P50] == 2.0
    assert stat._state.reading().bucket_counts == (1,)


def test_r8_collectors_are_given_raw_samples() -> None:
    seen: list[tuple[str, float]] = []

    class Collector(rfc.StatCollector):
        def handle(self, stat: rfc.Stat, v: float) -> None:
            seen.append((stat.key, v))

    handle = rfc.register_stat_collector(Collector())
    rfc.Stat("r8.raw", {rfc.StatType.SUM}).add(1.5)
    handle.unregister()

    assert seen == [("r8.raw", 1.5)]


def test_r9_a_collector_reports_and_is_reset() -> None:
    collector = rfc.AggregatingStatCollector()
    handle = rfc.register_stat_collector(collector)
    stat = rfc.Stat("r9.key", {rfc.StatType.MEAN})
    stat.add(1.0)
    stat.add(2.0)
    first = collector.report()
    collector.reset()
    handle.unregister()

    assert (first, collector.report()) == ({"r9.key.mean": 1.5}, {})


def test_r10_adding_is_a_call_into_c() -> None:
    assert type(Stat("r10.hot").add) is type([].append)


def test_r11_timed_blocks_are_ranges_of_the_profiler() -> None:
    torch = pytest.importorskip("torch")
    stat = rfc.Stat("r11.block", {rfc.StatType.MEAN}, unit="seconds")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, stat.add_time(profile=True):
        torch.ones(2).sum()

    assert "r11.block" in {event.name for event in profile.events()}


def test_r12_the_faces_that_replace_others_load_no_torch() -> None:
    program = (
        "import sys, exporter.monitor.rfc, exporter.elastic.metrics, exporter.elastic.events\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_r13_the_sidecar_watches_the_machine() -> None:
    names = {entry.name for entry in CATALOGUE}

    assert {"cpu", "memory", "disk", "network", "processes", "rapl"} <= names
    assert callable(exporter.start_sidecar)


def test_r14_destinations_are_included() -> None:
    for handler in (ConsoleHandler, JsonLinesHandler, LogRecords, TensorBoardHandler):
        assert callable(handler.handle)
    assert callable(EventsFromLogs.emit)
    assert type(target_of("/tmp/training.prom")) is TextFile
    assert type(target_of("http://gateway:9091/metrics/job/training")) is Gateway


def test_r15_a_rate_limit_for_each_type_is_seen() -> None:
    told: list[str] = []
    handle = events.register(lambda event: told.append(event.type), types="r15.*")
    events.limit("r15.loud", per_second=1)
    for _ in range(100):
        log("r15.loud")
        log("r15.other")
    handle.unregister()
    events.limit("r15.loud")

    assert told.count("r15.loud") < 10
    assert told.count("r15.other") == 100
    assert events.EVENTS.reading().suppressed["r15.loud", "rate_limit"] == 100 - told.count("r15.loud")


# V: the reviewers' requests ----------------------------------------------------------------------------------


def test_v1_an_iteration_is_timed_and_its_events_are_sampled() -> None:
    told: list[Any] = []
    events.limit("v1.step", sample=0.01)
    handle = events.register(told.append, types="v1.*")
    for _ in range(200):
        log("v1.step")
    handle.unregister()
    events.limit("v1.step")

    assert len(told) == 2
    assert events.EVENTS.reading().counts["v1.step", "info"] == 200


def test_v2_windows_of_so_many_samples() -> None:
    stat = Stat("v2.counted", ["mean"], window_seconds=None, window_samples=20)
    for value in range(50):
        stat.add(float(value))

    assert drained(stat).window.samples == 20
    assert stat.get() == {Aggregation.MEAN: 29.5}


def test_v3_no_data_is_no_value() -> None:
    stat = Stat("v3.gap", ["mean"], window_seconds=0.2)
    stat.add(1.0)
    wait_until(lambda: stat.count == 1)
    over = time.time() + 0.2
    wait_until(lambda: stat.window.started > over)

    assert stat.get() == {}
    assert stat._state.reading().last_sample is not None


def test_v4_a_window_of_too_few_samples_is_no_data_and_their_number_is_always_published() -> None:
    stat = Stat("v4.few", ["mean"], window_seconds=1, min_samples=20)
    stat.add(1.0)
    wait_until(lambda: stat.window.samples == 1)

    assert families_of(stat.definition).samples == "v4_few_window_samples"
    assert stat.get() == {}
    assert stat.count == 1


def test_v5_energy_and_carbon_are_collected_without_code() -> None:
    collected = {"host_cpu_energy_joules_total", "gpu_energy_joules_total", "training_carbon_grams_total"}

    assert collected <= FAMILIES


def test_v6_severity_is_a_label_and_a_threshold() -> None:
    told: list[exporter.Event] = []
    handle = events.register(told.append, types="v6.*", severity="warning")
    for severity in ("info", "warning", "error"):
        log("v6.event", severity=severity)
    handle.unregister()

    assert [event.severity for event in told] == ["warning", "error"]
    assert events.EVENTS.reading().counts["v6.event", "info"] == 1


def test_v7_an_event_may_precede_its_logging_whatever_the_time_zone() -> None:
    zone = dt.timezone(dt.timedelta(hours=9))
    log("v7.gpu", timestamp=dt.datetime(1970, 1, 1, 9, 0, 5, tzinfo=zone))  # type: ignore[arg-type]  # understood

    assert last().timestamp == 5.0
    assert abs(last().logged_at - time.time()) < 60


def test_v8_a_type_and_a_message_are_enough() -> None:
    log("v8.a", "said")
    rfc.log("v8.b", "said", x=1)

    assert [(event.type, event.message) for event in events.recent()[-2:]] == [
        ("v8.a", "said"),
        ("v8.b", "said"),
    ]


def test_v9_raw_values_reach_a_sink_and_the_mean_of_any_range_is_known() -> None:
    stat = Stat("v9.raw")
    for value in (1.0, 2.0, 6.0):
        stat.add(value)

    assert drained(stat).sum / stat.count == 3.0


def test_v10_names_that_collide_are_refused() -> None:
    Stat("v10.batch.latency")
    for name in ("v10.batch_latency", "training.events", "exporter.mine"):
        with pytest.raises(DefinitionError):
            Stat(name)


def test_v11_training_begins_and_ends_with_an_event() -> None:
    log("v11.begin", model="tiny", parameters=1234)

    assert last().data == {"model": "tiny", "parameters": 1234}
    with exporter.training.training_loop(train_iterations_start=0) as loop:
        assert (str(loop.start_event.name), loop.stop_event) == ("span_start", None)
    assert str(getattr(loop.stop_event, "name", None)) == "span_stop"


def test_v12_a_loss_that_is_no_number_is_counted_and_kept_out() -> None:
    stat = Stat("v12.loss", ["value"], window_seconds=None, window_samples=1)
    for value in (0.5, float("nan"), float("inf")):
        stat.add(value)

    assert drained(stat).get() == {Aggregation.VALUE: 0.5}
    assert stat._state.reading().rejected == {"nan": 1, "infinite": 1}


def test_v13_gpus_are_watched() -> None:
    watched = {"gpu_utilization_ratio", "gpu_memory_used_bytes", "host_cpu_seconds_total"}

    assert watched | {"host_memory_available_bytes"} <= FAMILIES


def test_v14_windows_close_without_a_thread_of_the_users() -> None:
    stat = Stat("v14.window", ["mean"], window_seconds=0.2)
    stat.add(1.0)

    wait_until(lambda: stat.window.samples == 1)


def test_v15_events_have_a_monotonic_time() -> None:
    before = time.monotonic_ns()
    log("v15.a")

    assert before <= last().monotonic_ns <= time.monotonic_ns()


def test_v16_events_have_ids() -> None:
    log("v16.a")
    log("v16.a")

    first, second = (event.id for event in events.recent()[-2:])
    assert re.fullmatch("[0-9a-f]{16}", first)
    assert first != second


def test_v17_events_know_their_span_and_parents() -> None:
    log("v17.cause")
    cause = last()
    with exporter.span("v17.span"):
        log("v17.effect", span_id="5b8aa5a2d2c872e8", parent_ids=[cause.id])

    assert (last().span_id, last().parent_ids) == ("5b8aa5a2d2c872e8", (cause.id,))


def test_v18_what_nobody_wants_is_not_made() -> None:
    def never() -> dict[str, int]:
        raise AssertionError

    events.limit("v18.off", enabled=False)

    assert not events.enabled("v18.off")
    assert events.enabled("v18.on")
    log("v18.off", payload=never)
    log("v18.on", payload=never)
    events.limit("v18.off")


def test_v19_totals_only_grow_and_are_sampled() -> None:
    stat = Stat("v19.total")
    counts = []
    for _ in range(3):
        stat.add(1.0)
        counts.append(drained(stat).count)

    assert counts == [1, 2, 3]


def test_v20_passive_stats_are_measured_by_the_recording() -> None:
    stat = Stat.passive("v20.memory", lambda: 42.0, unit="bytes")
    wait_until(lambda: exporter.flush() and stat.count > 0)

    assert stat.sum == 42.0 * stat.count


def test_v21_blocks_and_functions_are_timed() -> None:
    stat = Stat("v21.block", unit="seconds")
    with stat.time():
        pass
    assert stat.time()(abs)(-2) == 2

    assert drained(stat).count == 2


def test_v22_help_and_unit_are_part_of_the_definition() -> None:
    definition = Stat("v22.read", unit="bytes", help="Bytes read.").definition

    assert (families_of(definition).main, definition.help) == ("v22_read_bytes", "Bytes read.")


def test_v23_stats_can_be_listed_found_and_switched() -> None:
    stat = Stat("v23.layer", labels={"layer": "1"})

    assert exporter.registry.names("v23.*") == ["v23.layer"]
    assert exporter.registry.find("v23.layer", {"layer": "1"}) is stat
    exporter.registry.switch("v23.*", enabled=False)
    assert not stat.enabled
    exporter.registry.switch("v23.*", enabled=True)
    page = Page()
    page.publish("feed", [GaugeMetricFamily("v23_layer", "", 1.0), GaugeMetricFamily("v24_other", "", 2.0)])
    assert b"v24" not in page.render(Format.TEXT, ["v23_*"])


def test_v24_nothing_is_a_count_of_zero() -> None:
    stat = drained(Stat("v24.never"))

    assert (stat.count, stat.window.samples) == (0, 0)


def test_v25_rules_change_what_is_aggregated() -> None:
    from exporter.recording.stat import REGISTRY

    stat = Stat("v25.rules", ["mean"])
    assert REGISTRY.override([{"match": "v25.*", "aggregations": ["p99"]}]) == []
    assert drained(stat).definition.aggregations == {Aggregation.P99}
    REGISTRY.override([])


def test_v26_percentiles_are_the_default() -> None:
    assert {Aggregation.P95, Aggregation.P99} <= Stat("v26.default").definition.aggregations


def test_v27_a_bad_collector_harms_itself() -> None:
    told: list[str] = []
    handles = [
        events.register(lambda _event: 1 // 0, types="v27.*", name="v27 bad"),
        events.register(lambda event: told.append(event.type), types="v27.*"),
    ]
    for _ in range(5):
        log("v27.a")
    for handle in handles:
        handle.unregister()

    assert told == ["v27.a"] * 5
    assert events.EVENTS.reading().dropped["v27 bad", "error"] == 5


def test_v28_every_stat_has_a_window_of_its_own() -> None:
    fast, slow = Stat("v28.fast", window_seconds=0.5), Stat("v28.slow", window_seconds=60)

    assert (fast.definition.window_seconds, slow.definition.window_seconds) == (0.5, 60.0)
