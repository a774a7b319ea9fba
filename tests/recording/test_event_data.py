"""Event data: conversion to plain values, and output of each built-in handler."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import io
import itertools
import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import thread_time
from types import SimpleNamespace
from typing import Any

import pytest
from feed_support import mounted_filesystem, new_identity
from hypothesis import given
from hypothesis import strategies as st
from waiting import WAIT_LIMIT_SECONDS

import exporter
from exporter.recording.event_log import EventLog
from exporter.recording.event_values import (
    MAX_EVENT_NAME_CHARACTERS,
    MAX_PARENTS,
    Event,
    check_data,
    check_timestamp,
)
from exporter.recording.handlers import (
    ConsoleHandler,
    JsonLinesHandler,
    LoggingHandler,
    TensorBoardHandler,
    json_line,
    text_line,
)


@pytest.fixture
def events() -> Iterator[EventLog]:
    log = EventLog()
    yield log
    log.close(timeout_seconds=1.0)


# Logged values -----------------------------------------------------------------------------------------------


CONVERSIONS: list[tuple[Any, str | float]] = [
    (2**64, "18446744073709551616"),
    (Path("/data/x"), "/data/x"),
    ([1, "a", None], "[1, 'a', None]"),
    ({"a": 1}, "{'a': 1}"),
    (b"ab\xff", "ab\\xff"),
    (decimal.Decimal("1.5"), 1.5),
    (dt.date(2026, 1, 2), "2026-01-02"),
    (SimpleNamespace(item=lambda: 1.5), 1.5),
]
"""Arguments of `log`, and the values that events have for them."""


def test_log_converts_objects_to_plain_values(events: EventLog) -> None:
    arguments = {f"x{index}": argument for index, (argument, _) in enumerate(CONVERSIONS)}
    events.log("a", **arguments)

    assert list(events.recent()[0].data.values()) == [logged for _, logged in CONVERSIONS]
    assert not events.reading().suppressed


def test_log_accepts_numbers_of_numpy_and_torch(events: EventLog) -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    events.log("a", f=numpy.float32(0.5), i=numpy.int64(3), t=torch.tensor(2.0), v=torch.zeros(3), n=None)

    assert events.recent()[0].data == {"f": 0.5, "i": 3, "t": 2.0, "v": "Tensor of shape (3,) on cpu"}


def test_log_of_containers_with_a_million_items_is_bounded(events: EventLog) -> None:
    class Losses(list[int]):
        pass

    class Settings(dict[int, int]):
        pass

    losses, settings = Losses(range(1_000_000)), Settings.fromkeys(range(1_000_000))
    start_seconds = thread_time()
    for _ in losses:
        pass
    seconds_of_a_million = thread_time() - start_seconds
    start_seconds = thread_time()
    events.log("a", losses, losses=losses, settings=settings)  # type: ignore[arg-type]  # as an untyped job may

    # A call for each item takes longer than ten empty loops over them.
    assert thread_time() - start_seconds < 10 * seconds_of_a_million
    assert str(events.recent()[0].data["losses"]).startswith("[0, 1, 2, ")


@pytest.mark.parametrize(
    "values", [{"a" * 2000: 1.0}, {"a" * 2000: 1.0, "b": None}], ids=["plain", "converted"]
)
def test_the_name_of_a_value_is_cut(events: EventLog, values: dict[str, Any]) -> None:
    events.log("step", **values)
    (event,) = events.recent()

    assert dict(event.data) == {"a" * MAX_EVENT_NAME_CHARACTERS: 1.0}
    assert dict(check_data({"a" * 2000: 1.0})) == dict(event.data)


def test_the_type_of_an_event_is_cut(events: EventLog) -> None:
    events.log("a" * 2000)
    events.log("a" * 2000)

    assert [event.type for event in events.recent()] == ["a" * MAX_EVENT_NAME_CHARACTERS] * 2


@pytest.mark.parametrize(
    ("parent_ids", "expected"),
    [
        (map(str, itertools.count()), tuple(map(str, range(MAX_PARENTS)))),
        (["p" * 1000], ("p" * MAX_EVENT_NAME_CHARACTERS,)),
        (range(10**12), ()),
    ],
    ids=["endless", "long", "no text"],
)
def test_the_number_and_the_length_of_parents_are_limited(
    events: EventLog, parent_ids: Iterable[Any], expected: tuple[str, ...]
) -> None:
    events.log("step", parent_ids=parent_ids)

    assert [event.parent_ids for event in events.recent()] == [expected]


def test_an_event_is_recorded_without_parents_that_cannot_be_read(events: EventLog) -> None:
    def parents() -> Iterator[str]:
        yield "a"
        raise RuntimeError("the iterator of the job fails")

    events.log("step", parent_ids=parents())

    assert [event.parent_ids for event in events.recent()] == [()]
    assert events.reading().suppressed == {("step", "payload"): 1}


def test_an_invalid_timestamp_is_named() -> None:
    with pytest.raises(ValueError, match="not nan"):
        check_timestamp(math.nan)


def test_log_reads_neither_data_nor_a_message_from_a_gpu(events: EventLog) -> None:
    class Tensor:
        __module__ = "torch"
        device, shape = "cuda:0", (1,)

        def item(self) -> float:
            raise AssertionError("this would wait for the GPU")

        __repr__ = item  # type: ignore[assignment]  # invalid on purpose

    events.log("a", Tensor(), loss=Tensor(), losses=[Tensor()])  # type: ignore[arg-type]  # invalid on purpose

    description = "Tensor of shape (1,) on cuda:0"
    (event,) = events.recent()
    assert event.message == description
    assert event.data == {"loss": description, "losses": f"[{description}]"}


def test_log_accepts_severities_of_logging_and_torch(events: EventLog) -> None:
    severities: list[Any] = ["warn", "FATAL", 40, exporter.Severity.DEBUG, None, "odd"]
    for severity in severities:
        events.log("a", severity=severity)

    logged_severities = [event.severity for event in events.recent()]
    assert logged_severities == ["warning", "critical", "error", "debug", "info", "info"]


class Hostile:
    """Object of the job that raises on any access."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("mine")

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise RuntimeError("mine")

    def __repr__(self) -> str:
        raise RuntimeError("mine")

    __str__ = __repr__
    __hash__ = None  # type: ignore[assignment]  # invalid on purpose


def test_values_that_cannot_be_logged_are_dropped_and_counted(events: EventLog) -> None:
    events.log("hostile", good=1, bad=Hostile())
    events.log("hostile", timestamp="never", parent_ids=5)  # type: ignore[arg-type]  # invalid on purpose
    events.log(None)  # type: ignore[arg-type]  # invalid on purpose
    events.log(Hostile())  # type: ignore[arg-type]  # invalid on purpose

    assert events.recent()[0].data == {"good": 1}
    assert events.reading().counts["hostile", "info"] == 2
    assert events.reading().suppressed["hostile", "payload"] == 3


# Console -----------------------------------------------------------------------------------------------------


def test_the_console_prints_an_event_as_one_line_in_any_encoding() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    event = Event("ckpt.f\xe4iled", 'no "space"\nleft', "error", {"step": 3, "path": "/a b"}, 1e9, rank=2)
    ConsoleHandler(stream).handle(event)

    assert raw.getvalue() == (
        b"2001-09-09T01:46:40.000Z ERROR rank=2 ckpt.f\\xe4iled 'no \"space\"\\nleft' step=3 path='/a b'\n"
    )


logged_values = st.text() | st.floats() | st.integers(-(2**63), 2**63 - 1) | st.booleans()


@given(
    st.text(min_size=1),
    st.none() | st.text(),
    st.dictionaries(st.text(), logged_values),
    st.floats(-1e300, 1e300),
)
def test_any_event_is_one_printable_line_and_one_json_line(
    type_: str, message: str | None, data: dict[str, Any], timestamp: float
) -> None:
    event = Event(type_, message, data=data, timestamp=timestamp)
    line = json_line(event)
    record = json.loads(line, parse_constant=pytest.fail)

    assert text_line(event).isprintable()
    assert line.count(b"\n") == 1
    assert (record["type"], record["message"], record["data"].keys()) == (type_, message, data.keys())


# JSON lines --------------------------------------------------------------------------------------------------


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file's complete lines. A truncated line is not JSON."""
    records = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def test_every_event_is_a_line_of_json_with_all_its_fields(tmp_path: Path) -> None:
    events = EventLog(identify=lambda: new_identity(run="a/b", rank=7))
    events.register(JsonLinesHandler(tmp_path / "deep" / "events-{run}-{rank}-{pid}.jsonl"))
    events.log("a", "m", severity="error", span_id="s", parent_ids=["p"], step=1, ok=True, loss=math.nan)
    assert events.flush(WAIT_LIMIT_SECONDS)

    (record,) = read_records(tmp_path / "deep" / f"events-a_b-7-{os.getpid()}.jsonl")
    assert record["data"] == {"step": 1, "ok": True, "loss": "nan"}
    assert (record["type"], record["message"], record["run"], record["rank"]) == ("a", "m", "a/b", 7)
    assert (record["severity"], record["span_id"], record["parent_ids"]) == ("error", "s", ["p"])
    assert set(record) == set(Event.__slots__)


def test_a_file_is_rotated_by_size_and_old_files_are_removed(events: EventLog, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events.register(JsonLinesHandler(path, max_bytes=4096, backups=2), queue=10_000)
    for number in range(200):
        events.log("a", number=number)
    assert events.flush(WAIT_LIMIT_SECONDS)
    files = [tmp_path / "events.jsonl.2", tmp_path / "events.jsonl.1", path]

    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert all(0 < file.stat().st_size <= 4096 for file in files)
    numbers = [record["data"]["number"] for file in files for record in read_records(file)]
    assert numbers == list(range(numbers[0], 200))


def test_a_truncated_line_does_not_damage_the_next_and_a_moved_file_is_recreated(
    tmp_path: Path,
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"type": "cut off by SIGK')
    handler = JsonLinesHandler(path)
    handler.handle(Event("a"))
    path.rename(tmp_path / "elsewhere")
    handler.handle(Event("b"))

    assert [record["type"] for file in ("elsewhere", path) for record in read_records(tmp_path / file)] == [
        "a",
        "b",
    ]


def test_a_full_disk_loses_only_counted_lines(events: EventLog, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted_filesystem(disk, "-t", "tmpfs", "-o", "size=64k", "tmpfs"):
        path = disk / "events.jsonl"
        events.register(JsonLinesHandler(path), name="file", queue=10_000)
        for number in range(1000):
            events.log("a", "x" * 200, number=number)
        assert events.flush(WAIT_LIMIT_SECONDS)
        reading = events.reading()
        written_lines = len(read_records(path))
        path.unlink()
        events.log("later")
        assert events.flush(WAIT_LIMIT_SECONDS)

        assert 0 < written_lines < 1000
        assert reading.delivered["file"] == written_lines
        assert reading.dropped == {("file", "error"): 1000 - written_lines}
        assert [record["type"] for record in read_records(path)] == ["later"]


def test_several_processes_can_write_to_one_rotating_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    program = f"""
import sys, exporter
from exporter.recording.handlers import JsonLinesHandler
exporter.events.register(JsonLinesHandler({str(path)!r}, max_bytes=20_000, backups=100))
for number in range(300):
    exporter.log(sys.argv[1], number=number)
    if number % 10 == 0:
        exporter.events.EVENTS.flush({WAIT_LIMIT_SECONDS})
"""
    children = [subprocess.Popen([sys.executable, "-c", program, f"p{number}"]) for number in range(3)]
    for child in children:
        assert child.wait() == 0
    records = [record for file in tmp_path.iterdir() for record in read_records(file)]

    assert len(records) == 900
    assert len({(record["type"], record["data"]["number"]) for record in records}) == 900
    assert len(list(tmp_path.iterdir())) > 5


# Logging and TensorBoard -------------------------------------------------------------------------------------


def test_an_event_becomes_a_log_record(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tests.events")
    handler = LoggingHandler("tests.events")
    handler.handle(Event("quiet", severity="debug"))
    handler.handle(Event("ckpt.saved", "100%", "critical", {"step": 3}))

    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.CRITICAL, "ckpt.saved '100%' step=3")
    assert vars(record)["exporter_event"].type == "ckpt.saved"


def test_the_real_summary_writer_accepts_an_event(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        TensorBoardHandler(writer).handle(
            Event("eval", "done", data={"loss": 0.5, "ok": True, "split": "dev"}, timestamp=9.0)
        )

    (file,) = tmp_path.iterdir()
    event_file = file.read_bytes()
    assert all(name in event_file for name in (b"eval/loss", b"eval/ok", b"eval/message"))
    assert b"eval/split" not in event_file
