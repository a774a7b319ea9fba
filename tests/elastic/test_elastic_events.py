"""Events of torchelastic: equal calls on the torch module and the compatibility module, and corrected defects."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from program_support import page_of_feed, run_program, series, sum_by_labels

import exporter
from exporter.elastic import bridge, events
from exporter.recording.events import EVENTS

pytestmark = pytest.mark.timeout(120)  # includes the import of torch

TORCH_MODULE = "torch.distributed.elastic.events"


@pytest.fixture(autouse=True)
def _no_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # With this value, the compatibility module does not change the torch module.
    monkeypatch.setattr(bridge.CompatibilityHandlers, "is_installed", True)
    yield
    events.unconfigure()


@pytest.fixture(params=["torch", "exporter"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    """Return the torch module or the compatibility module."""
    if request.param == "exporter":
        return events
    pytest.importorskip("torch", reason="torch is not installed")
    return importlib.import_module(TORCH_MODULE)


class LinesInMemory(logging.Handler):
    """Logging handler that stores lines in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def add_destination(
    module: ModuleType, handler: logging.Handler, monkeypatch: pytest.MonkeyPatch, name: str
) -> str:
    """Add a handler to the registry of a module, and return the name of the new destination."""
    registry = importlib.import_module(f"{module.__name__}.handlers")
    unused_name = f"{name}-{id(handler)}"
    monkeypatch.setitem(registry._log_handlers, unused_name, handler)
    return unused_name


def count_of(event_type: str, severity: str = "info") -> int:
    """Return the number of recorded events of a type, after a flush."""
    exporter.flush()
    return EVENTS.reading().counts.get((event_type, severity), 0)


# Equal behavior of both modules -----------------------------------------------------------------------------


def test_every_public_name_of_the_torch_module_exists() -> None:
    torch_module = pytest.importorskip(TORCH_MODULE, reason="torch is not installed")
    imported_names = {"inspect", "logging", "os", "socket", "traceback", "Optional"}

    assert {name for name in dir(torch_module) if not name.startswith("_")} - imported_names <= set(
        dir(events)
    )


def test_events_of_both_kinds_survive_serializing(module: ModuleType) -> None:
    metadata = {"text": "a", "whole": 1, "real": 0.5, "no": None, "yes": True}
    event = module.Event("test", module.EventSource.WORKER, 12, metadata)
    rendezvous_fields = {
        "name": "n",
        "run_id": "r",
        "message": "m",
        "hostname": "h",
        "pid": 1,
        "rank": 0,
        "local_id": 4,
    }
    rendezvous_fields |= {"node_state": module.NodeState.INIT, "master_endpoint": "e", "error_trace": "t"}
    rendezvous = module.RdzvEvent(**rendezvous_fields)

    assert module.Event.deserialize(event.serialize()) == event
    assert module.Event.deserialize(event) is event
    assert str(event) == event.serialize()
    assert vars(rendezvous) == rendezvous_fields
    assert module.RdzvEvent.deserialize(rendezvous.serialize()) == rendezvous


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_a_destination_observed_in_torch_keeps_its_single_handler(tmp_path: Path) -> None:
    program = """
        import logging
        from exporter.elastic import events
        class Printing(events.EventHandler):
            def record(self, event):
                print("received", event.name)
        events.configure(Printing())
        import torch.distributed.elastic.events as torch_events
        torch_events.handlers._log_handlers["mine"] = handler = logging.NullHandler()
        torch_events.record(torch_events.Event("of.torch", torch_events.EventSource.WORKER), "mine")
        print(torch_events._get_or_create_logger("mine").handlers == [handler])
    """
    completed = run_program(tmp_path / "feed", program, library="torch")

    assert completed.stdout == "received of.torch\nTrue\n"
    assert sum_by_labels(page_of_feed(tmp_path / "feed"), "training_events_total", type="of.torch") == 1


def test_an_event_is_written_by_the_one_handler_of_its_destination(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = LinesInMemory()
    name = add_destination(module, handler, monkeypatch, "lines")

    module.record(module.Event("test", module.EventSource.AGENT, 5, {"a": 1}), name)

    (line,) = handler.lines
    logger = module._get_or_create_logger(name)
    assert logger.handlers == [handler]
    assert logger.propagate is False
    assert json.loads(line) == {"name": "test", "source": "AGENT", "timestamp": 5, "metadata": {"a": 1}}


def test_an_unknown_destination_is_a_key_error(module: ModuleType) -> None:
    with pytest.raises(KeyError):
        module.record(module.Event("test", module.EventSource.AGENT), "nowhere")
    with pytest.raises(KeyError):
        module.get_logging_handler("nowhere")


def test_a_rendezvous_event_has_its_source_if_a_handler_exists(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report(state: str, **fields: Any) -> None:
        module.construct_and_record_rdzv_event("r", "m", module.NodeState[state], **fields)

    recorded_events: list[Any] = []
    monkeypatch.setattr(module, "record_rdzv_event", recorded_events.append)
    report("RUNNING")
    assert recorded_events == []
    registry = importlib.import_module(f"{module.__name__}.handlers")
    monkeypatch.setitem(registry._log_handlers, "dynamic_rendezvous", LinesInMemory())

    report("RUNNING")
    try:
        math.sqrt(-1)
    except ValueError:
        report("FAILED", name="mine", pid=3, hostname="h")

    running_event, failed_event = recorded_events
    assert running_event.name == "test_elastic_events.py:report"
    assert failed_event.name == "test_elastic_events.py:mine"
    assert failed_event.pid == 3
    assert failed_event.hostname == "h"
    assert "ValueError: math domain error" in failed_event.error_trace


# Documented examples -----------------------------------------------------------------------------------------


def test_the_event_handler_of_the_customization_page_runs_unchanged() -> None:
    page = """
import exporter.elastic.events as events

class MyEventHandler(events.EventHandler):
    def record(self, event: events.Event):
        # process event
        processed_events.append(event)

def main():
    events.configure(MyEventHandler())

main()
"""
    processed_events: list[events.Event] = []
    exec(compile(page, "page", "exec"), {"processed_events": processed_events})
    exporter.log("not.of.torchelastic")
    events.record(events.Event("promised", events.EventSource.WORKER, metadata={"step": 3}))

    (event,) = processed_events
    assert event.name == "promised"
    assert event.metadata == {"step": 3}


def test_the_documented_call_writes_to_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    handler = events.get_logging_handler(destination="console")
    handler.setStream(sys.stderr)  # type: ignore[attr-defined]

    handler.info(events.Event("documented", events.EventSource.WORKER))  # type: ignore[attr-defined]

    assert json.loads(capsys.readouterr().err)["name"] == "documented"


def test_configure_replaces_handlers_and_accepts_several() -> None:
    class NamesInMemory(events.EventHandler):
        def __init__(self) -> None:
            self.names: list[str] = []

        def record(self, event: events.Event) -> None:
            self.names.append(event.name)

    replaced, listed, single = NamesInMemory(), NamesInMemory(), NamesInMemory()
    events.configure(replaced)
    handler_list = [listed, single, events.NullEventHandler()]
    for name, handlers in (("one", handler_list), ("two", single), ("three", None)):
        events.configure(handlers)
        events.record(events.Event(name, events.EventSource.WORKER))

    assert replaced.names == []
    assert listed.names == ["one"]
    assert single.names == ["one", "two"]


@pytest.mark.parametrize("handler", [5, object(), events.NullEventHandler, [events.NullEventHandler(), "x"]])
def test_an_invalid_handler_is_refused_at_the_call(handler: Any) -> None:
    with pytest.raises(TypeError, match="record"):
        events.configure(handler)


# Corrected defects -------------------------------------------------------------------------------------------


def test_an_event_without_a_timestamp_has_the_time_of_its_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = LinesInMemory()
    event = events.Event("stamped", events.EventSource.WORKER)

    events.record(event, add_destination(events, handler, monkeypatch, "stamped"))

    assert json.loads(handler.lines[0])["timestamp"] > 1_600_000_000_000
    assert event.timestamp == 0


class Unprintable:
    """Object whose conversion to text raises."""

    def __str__(self) -> str:
        raise ValueError

    __repr__ = __str__


INVALID_ENTRIES = [math.nan, object(), {1: {2}}, [b"x"], threading.Lock(), 1 << 80, "\ud800", Unprintable()]


@pytest.mark.parametrize(
    "fields",
    [
        *({"metadata": {"a": entry}} for entry in INVALID_ENTRIES),
        {"metadata": {Unprintable(): 1, 2: 3}},
        {"metadata": {f"a{index}": index for index in range(1000)}},
        {"metadata": None},
        {"metadata": [1]},
        {"timestamp": "yesterday"},
        {"timestamp": math.nan},
        {"source": None},
        {"name": 7},
    ],
)
def test_an_event_with_invalid_fields_is_counted_delivered_and_written(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, delivered_events = LinesInMemory(), list[exporter.Event]()
    event = events.Event(**{"name": "odd", "source": events.EventSource.WORKER, **fields})
    event_type = str(event.name)
    handle, initial_count = (
        exporter.events.register(delivered_events.append, types=event_type),
        count_of(event_type),
    )

    events.record(event, add_destination(events, handler, monkeypatch, "odd"))
    handle.unregister()

    assert count_of(event_type) == initial_count + 1
    assert [event.type for event in delivered_events] == [event_type]
    json.loads(handler.lines[0], parse_constant=pytest.fail)


@pytest.mark.parametrize("timestamp", ["Infinity", "1e999", "NaN"])
def test_an_event_logged_by_torch_with_a_timestamp_that_is_not_finite_is_recorded(timestamp: str) -> None:
    line = f'{{"name": "endless", "source": "WORKER", "metadata": {{}}, "timestamp": {timestamp}}}'
    initial_count = count_of("endless")

    events.PrometheusEventHandler().handle(logging.makeLogRecord({"msg": line}))

    assert count_of("endless") == initial_count + 1


@pytest.mark.parametrize(
    ("serialized", "error"),
    [
        (None, TypeError),
        ("{", ValueError),
        ("[]", ValueError),
        ('{"name": "x", "source": "MOON"}', ValueError),
        ('{"name": "x", "source": "AGENT", "more": 1}', ValueError),
    ],
)
def test_deserializing_an_invalid_event_raises(serialized: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        events.Event.deserialize(serialized)


def test_a_level_silences_the_console_and_nothing_else(tmp_path: Path) -> None:
    program = """
        from exporter.elastic import events
        events.record(events.Event("quiet", events.EventSource.WORKER), "console")
    """
    feeds = {level: tmp_path / level for level in ("WARNING", "INFO", "nonsense")}
    stderr_by_level = {
        level: run_program(feed, program, LOGLEVEL=level).stderr for level, feed in feeds.items()
    }

    assert '"quiet"' not in stderr_by_level["WARNING"]
    assert '"quiet"' in stderr_by_level["INFO"]
    assert '"quiet"' in stderr_by_level["nonsense"]
    for feed in feeds.values():
        assert sum_by_labels(page_of_feed(feed), "training_events_total", type="quiet") == 1


STATUS_FUNCTION = """
import json
from exporter.elastic import events
def status(state, source, code=None, **more):
    inner = json.dumps({"exit_code": [code], "worker_pid": [None]})
    data = {"run_id": "run7", "role": "my.role", "state": state, "metadata": inner, "raw_error": None, **more}
    events.record(events.Event("torchelastic.worker.status." + state, events.EventSource[source], metadata=data))
"""


def test_the_end_of_workers_is_counted_from_worker_events_only(tmp_path: Path) -> None:
    program = f"""{STATUS_FUNCTION}
status("START", "WORKER"); status("START", "WORKER")
status("FAILED", "WORKER", -11, raw_error="x" * 100_000)
status("FAILED", "WORKER", "nonsense")
status("SUCCEEDED", "WORKER")
status("SUCCEEDED", "AGENT")
"""
    run_program(tmp_path / "feed", program)
    page = page_of_feed(tmp_path / "feed")
    results, events_total = "training_elastic_worker_results_total", "training_events_total"

    assert 'role="agent",run="run7"' in page
    assert sum_by_labels(page, "training_elastic_worker_starts_total", worker_role="my.role") == 2
    assert sum_by_labels(page, results, result="failed", exit_code="-11") == 1
    assert sum_by_labels(page, results, result="failed", exit_code="unknown") == 1
    assert sum_by_labels(page, results, result="succeeded", exit_code="0") == 1
    assert sum_by_labels(page, events_total, type="torchelastic.agent.status.SUCCEEDED") == 1
    assert sum_by_labels(page, events_total, type="torchelastic.worker.status.FAILED", severity="error") == 2


def test_a_worker_event_with_an_invalid_worker_id_is_counted_and_writes_no_file(tmp_path: Path) -> None:
    program = f"""{STATUS_FUNCTION}
status("FAILED", "WORKER", 1, worker_id="7" * 5000)
status("FAILED", "WORKER", 1, worker_id="7")
"""
    feed = tmp_path / "feed"
    run_program(feed, program, EXPORTER_LAUNCH_ID="5f2c")

    failures = sum_by_labels(
        page_of_feed(feed), "training_events_total", type="torchelastic.worker.status.FAILED"
    )
    worker_ends = [path.name.rpartition("-")[0] for path in feed.glob("runs/worker-*")]
    assert failures == 2
    assert worker_ends == ["worker-7"]


def test_a_worker_that_records_agent_events_stays_a_worker(tmp_path: Path) -> None:
    run_program(
        tmp_path / "feed", f'{STATUS_FUNCTION}status("START", "AGENT")', RANK="3", TORCHELASTIC_RUN_ID="run7"
    )

    (labels,) = series(page_of_feed(tmp_path / "feed"), "training_rank_info")
    assert 'rank="3"' in labels
    assert 'role="trainer"' in labels


def test_a_long_error_is_cut_to_its_end() -> None:
    metadata: dict[str, Any] = {"raw_error": "a" * 10_000 + "the cause"}
    events.record(events.Event("cut", events.EventSource.WORKER, metadata=metadata))

    (event,) = [event for event in EVENTS.recent() if event.type == "cut"]
    assert str(event.data["raw_error"]) == "a" * 1991 + "the cause"
