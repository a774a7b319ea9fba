"""Log lines: any message is one parsable line, and logging never blocks or raises."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.cli.logs import (
    MAX_QUEUED_LINES,
    MAX_VALUE_CHARACTERS,
    Formatter,
    LogFormat,
    LogLevel,
    Logs,
    _Output,
)

LOG = logging.getLogger("exporter.test")


@contextmanager
def logging_to(
    descriptor: int,
    level: LogLevel = "debug",
    log_format: LogFormat = "logfmt",
    *,
    finish_seconds: float = 60.0,
) -> Iterator[Logs]:
    logs = Logs(level=level, log_format=log_format, descriptor=descriptor)
    try:
        yield logs
    finally:
        logs.finish(finish_seconds)
        logging.getLogger().setLevel(logging.WARNING)  # the previous level


def lines_of(
    action: Callable[[Logs], object], level: LogLevel = "debug", log_format: LogFormat = "logfmt"
) -> list[str]:
    """Return the lines that an action logs through a real pipe."""
    read_end, write_end = os.pipe()
    with logging_to(write_end, level, log_format) as logs:
        action(logs)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        return pipe.read().decode().splitlines()


def parse_logfmt(line: str) -> dict[str, str]:
    """Parse a line like Go's logfmt parsers: a quoted value has the escapes of JSON."""
    keys_and_values = re.findall(r'([^\s="]+)=("(?:[^"\\]|\\.)*"|[^\s"]*)(?: |$)', line)
    assert " ".join(f"{key}={value}" for key, value in keys_and_values) == line
    return {key: json.loads(value) if value.startswith('"') else value for key, value in keys_and_values}


def record_of(message: str, **extra: object) -> logging.LogRecord:
    record = logging.LogRecord("exporter.test", logging.INFO, __file__, 1, message, None, None)
    record.__dict__.update(extra)
    return record


def test_a_log_line_has_time_level_source_and_message() -> None:
    (line,) = lines_of(
        lambda _: LOG.warning("collector failed", extra={"collector": "cpu", "tries": 3, "last": None})
    )
    fields = parse_logfmt(line)

    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", fields["time"])
    assert re.fullmatch(r"test_configuration_logs\.py:\d+", fields["source"])
    assert list(fields) == ["time", "level", "source", "msg", "collector", "tries", "last"]
    assert list(fields.values())[3:] == ["collector failed", "cpu", "3", "null"]
    assert fields["level"] == "warn"


LOGGED_TEXTS = st.one_of(
    st.text(max_size=40), st.text('= "\\\n\r\t\0\x1b\x85\u2028\u202e\ud800a', max_size=20)
)


@given(LOGGED_TEXTS, LOGGED_TEXTS)
def test_any_text_is_one_printable_line_that_parses_back(message: str, value: str) -> None:
    line = Formatter("logfmt").format(record_of(message, key=value))
    fields = parse_logfmt(line)

    assert line.isprintable()
    assert (fields["msg"], fields["key"]) == (message, value)


@given(
    LOGGED_TEXTS, st.one_of(LOGGED_TEXTS, st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False))
)
def test_any_value_in_json_is_one_line_that_parses_back(message: str, value: object) -> None:
    line = Formatter("json").format(record_of(message, key=value))
    fields = json.loads(line)

    assert "\n" not in line
    assert fields["msg"] == message
    assert fields["key"] in (value, str(value))


class Hostile:
    """Object whose conversion to text raises."""

    def __str__(self) -> str:
        raise RuntimeError("no")


def test_hostile_values_are_escaped_truncated_or_renamed_and_never_raise() -> None:
    def act(_: Logs) -> None:
        LOG.info("numbers %d", "x")
        LOG.info("x", extra={"value": Hostile(), "level": "fake", "a b=c": 1, "long": "y" * 10**6})

    failure, later_line = (parse_logfmt(line) for line in lines_of(act))
    assert failure["msg"] == "!(TypeError)"
    assert (later_line["value"], later_line["a_b_c"]) == ("!(RuntimeError)", "1")
    assert (later_line["level"], later_line["level_"]) == ("info", "fake")
    assert len(later_line["long"]) == MAX_VALUE_CHARACTERS


def test_uncaught_thread_exceptions_and_warnings_are_logged() -> None:
    def fail() -> None:
        raise RuntimeError("lost")

    def act(_: Logs) -> None:
        thread = threading.Thread(target=fail, name="worker")
        thread.start()
        thread.join()
        warnings.warn("careful", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        error, warning = (parse_logfmt(line) for line in lines_of(act))
    assert (error["level"], error["thread_name"]) == ("error", "worker")
    assert error["stack"].endswith("RuntimeError: lost")
    assert (warning["level"], "careful" in warning["msg"]) == ("warn", True)


def test_logging_never_waits_for_a_full_pipe_and_lost_lines_are_counted() -> None:
    read_end, write_end = os.pipe()
    with logging_to(write_end, finish_seconds=1.0):  # later lines find the pipe full again
        for _ in range(MAX_QUEUED_LINES + 3000):
            LOG.info("x" * 1000)  # would wait forever, because the pipe is read only after the loop
        with os.fdopen(read_end, "rb", closefd=False) as pipe:
            for line in pipe:
                if b"dropped=" in line:
                    break
    os.close(write_end)
    os.close(read_end)

    last_line_fields = parse_logfmt(line.decode().rstrip())
    assert last_line_fields["msg"] == "log lines were dropped"
    assert int(last_line_fields["dropped"]) > 0


def test_a_report_of_dropped_lines_has_their_number_since_the_last_report() -> None:
    read_end, write_end = os.pipe()
    queue: Any = SimpleNamespace(format=lambda record: f"dropped={record.dropped}")
    output = _Output(write_end, queue)
    for queue.dropped_count in (0, 3, 3, 5):
        output.emit(record_of("line"))
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        lines = pipe.read().splitlines()

    assert lines == ["line", "line", "dropped=3", "line", "line", "dropped=2"]


@pytest.mark.parametrize("is_closed", [True, False])
def test_logging_to_a_closed_descriptor_or_a_broken_pipe_does_not_raise(is_closed: bool) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    if is_closed:
        os.close(write_end)
    with logging_to(write_end):
        LOG.error("x")
    if not is_closed:
        os.close(write_end)


def test_level_and_format_change_at_runtime() -> None:
    def act(logs: Logs) -> None:
        LOG.info("unseen")
        logs.configure(level="info", log_format="json")
        LOG.info("seen")

    (line,) = lines_of(act, "error")
    assert json.loads(line)["msg"] == "seen"
