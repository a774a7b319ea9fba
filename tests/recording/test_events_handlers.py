"""The handlers that come with the package: real files, streams, loggers."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from feed_support import mounted, new_identity
from hypothesis import given
from hypothesis import strategies as st

from exporter.recording.event_values import Event
from exporter.recording.events import EventLog
from exporter.recording.handlers import (
    ConsoleHandler,
    JsonLinesHandler,
    LogRecords,
    TensorBoardHandler,
    json_line,
    text_line,
)


@pytest.fixture
def events() -> Iterator[EventLog]:
    log = EventLog()
    yield log
    log.close(timeout_seconds=1.0)


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; what was cut short is no JSON."""
    found = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


# Console -----------------------------------------------------------------------------------------------------


def test_the_console_shows_an_event_as_one_line() -> None:
    stream = io.StringIO()
    event = Event("ckpt.failed", 'no "space"\nleft', "error", {"step": 3, "path": "/a b"}, 1e9, rank=2)
    ConsoleHandler(stream).handle(event)

    assert stream.getvalue() == (
        "2001-09-09T01:46:40.000Z ERROR rank=2 ckpt.failed 'no \"space\"\\nleft' step=3 path='/a b'\n"
    )


@given(st.text(), st.text(), st.dictionaries(st.text(), st.text() | st.floats()), st.floats(allow_nan=False))
def test_whatever_an_event_holds_it_is_one_printable_line(
    type_: str, message: str, data: dict[str, Any], when: float
) -> None:
    line = text_line(Event(type_, message, "info", data, when if math.isfinite(when) else 0.0))

    assert line.isprintable()


def test_the_console_writes_what_its_encoding_cannot_as_escapes_and_a_closed_stream_is_counted(
    events: EventLog,
) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    events.register(ConsoleHandler(stream))
    events.log("ä", "\ud800")
    assert events.flush(5.0)
    assert b"\\xe4" in raw.getvalue()
    stream.close()
    events.log("b")
    assert events.flush(5.0)

    assert events.reading().dropped == {("ConsoleHandler", "error"): 1}


# JSON lines --------------------------------------------------------------------------------------------------


def test_every_event_is_a_line_of_json_with_all_its_fields(events: EventLog, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events-{run}-{rank}.jsonl"
    events.identify = lambda: new_identity(run="a/b", rank=7)
    events.register(JsonLinesHandler(path))
    events.log("a", "m", step=1, ok=True, loss=math.nan)
    events.log("b", severity="error", span_id="s", parent_ids=["p"])
    assert events.flush(5.0)
    first, second = lines(tmp_path / "deep" / "events-a_b-7.jsonl")

    assert first["data"] == {"step": 1, "ok": True, "loss": "nan"}
    assert (first["type"], first["message"], first["run"], first["rank"]) == ("a", "m", "a/b", 7)
    assert (second["severity"], second["span_id"], second["parent_ids"]) == ("error", "s", ["p"])
    assert set(first) == set(Event.__slots__)
    assert first["id"] != second["id"]


values = st.text() | st.floats() | st.integers(-(2**63), 2**63 - 1) | st.booleans()


@given(st.text(min_size=1), st.none() | st.text(), st.dictionaries(st.text(), values))
def test_whatever_an_event_holds_it_is_one_line_of_json(
    type_: str, message: str | None, data: dict[str, Any]
) -> None:
    line = json_line(Event(type_, message, data=data))

    assert line.count(b"\n") == 1
    read = json.loads(line, parse_constant=pytest.fail)
    assert (read["type"], read["message"]) == (type_, message)
    assert read["data"].keys() == data.keys()


def test_a_file_is_rotated_by_size_and_only_so_many_are_kept(events: EventLog, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events.register(JsonLinesHandler(path, max_bytes=4096, backups=2), queue=10_000)
    for number in range(200):
        events.log("a", number=number)
    assert events.flush(5.0)
    kept = [tmp_path / "events.jsonl.2", tmp_path / "events.jsonl.1", path]

    assert sorted(tmp_path.iterdir()) == sorted(kept)
    assert all(0 < file.stat().st_size <= 4096 for file in kept)
    numbers = [line["data"]["number"] for file in kept for line in lines(file)]
    assert numbers == list(range(numbers[0], 200))


def test_a_line_that_was_cut_short_does_not_spoil_the_next_and_a_moved_file_is_made_anew(
    events: EventLog, tmp_path: Path
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"type": "cut off by SIGK')
    events.register(JsonLinesHandler(path))
    events.log("a")
    assert events.flush(5.0)
    assert [line["type"] for line in lines(path)] == ["a"]
    path.rename(tmp_path / "elsewhere")
    events.log("b")
    assert events.flush(5.0)

    assert [line["type"] for line in lines(path)] == ["b"]


def test_a_full_disk_costs_lines_which_are_counted_and_nothing_else(events: EventLog, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, "-t", "tmpfs", "-o", "size=64k", "tmpfs"):
        path = disk / "events.jsonl"
        events.register(JsonLinesHandler(path), name="file", queue=10_000)
        for number in range(1000):
            events.log("a", "x" * 200, number=number)
        assert events.flush(5.0)
        reading = events.reading()
        written = len(lines(path))
        path.unlink()
        events.log("later")
        assert events.flush(5.0)

        assert 0 < written < 1000
        assert reading.delivered["file"] == written
        assert reading.dropped == {("file", "error"): 1000 - written}
        assert [line["type"] for line in lines(path)] == ["later"]


def test_what_was_written_survives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    program = f"""
import os, signal, exporter
from exporter.recording.handlers import JsonLinesHandler
exporter.events.register(JsonLinesHandler({str(path)!r}))
for number in range(500):
    exporter.log("a", number=number)
exporter.events.EVENTS.flush(5.0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)

    assert done.returncode == -9
    assert [line["data"]["number"] for line in lines(path)] == list(range(500))


def test_several_processes_may_write_to_one_file_that_rotates(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    program = f"""
import sys, exporter
from exporter.recording.handlers import JsonLinesHandler
exporter.events.register(JsonLinesHandler({str(path)!r}, max_bytes=20_000, backups=100))
for number in range(300):
    exporter.log(sys.argv[1], number=number)
    if number % 10 == 0:
        exporter.events.EVENTS.flush(5.0)
"""
    children = [subprocess.Popen([sys.executable, "-c", program, f"p{number}"]) for number in range(3)]
    for child in children:
        assert child.wait() == 0
    found = [line for file in tmp_path.iterdir() for line in lines(file)]

    assert len(found) == 900
    assert len({(line["type"], line["data"]["number"]) for line in found}) == 900
    assert len(list(tmp_path.iterdir())) > 5


def test_a_forked_child_writes_its_own_events_to_its_own_file(tmp_path: Path) -> None:
    handler = JsonLinesHandler(tmp_path / "{pid}.jsonl")
    handler.handle(Event("parent"))
    child = os.fork()
    if child == 0:
        handler.handle(Event("child"))
        os._exit(0)
    os.waitpid(child, 0)

    assert [line["type"] for line in lines(tmp_path / f"{child}.jsonl")] == ["child"]
    assert [line["type"] for line in lines(tmp_path / f"{os.getpid()}.jsonl")] == ["parent"]


# Logging -----------------------------------------------------------------------------------------------------


def test_an_event_becomes_a_log_record(events: EventLog, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tests.events")
    events.register(LogRecords("tests.events"))
    events.log("quiet", severity="debug")
    events.log("ckpt.saved", "100%", severity="critical", step=3)
    assert events.flush(5.0)

    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.CRITICAL, "ckpt.saved '100%' step=3")
    assert vars(record)["exporter_event"].type == "ckpt.saved"


# TensorBoard -------------------------------------------------------------------------------------------------


def test_the_real_summary_writer_takes_it(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        TensorBoardHandler(writer).handle(
            Event("eval", "done", data={"loss": 0.5, "ok": True, "split": "dev"}, timestamp=9.0)
        )

    (file,) = tmp_path.iterdir()
    written = file.read_bytes()
    assert all(name in written for name in (b"eval/loss", b"eval/ok", b"eval/message"))
    assert b"eval/split" not in written
