"""What tests of the training telemetry's surface share: an exporter that keeps or refuses, and a process of one's own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from places import PROJECT
from waiting import PATIENCE

from exporter.one_logger.exporters import BaseExporter
from exporter.training import metrics


class KeepingExporter(BaseExporter):
    """Keeps what it is given; refuses what `refuses` says, a method and a name, waits while `gate` is closed.

    Attributes:
        records: Method, name and span or event of what was kept.
    """

    def __init__(
        self,
        refuses: Callable[[str, str], bool] = lambda method, name: False,
        error: BaseException | None = None,
    ) -> None:
        self.refuses = refuses
        self.error = error or ConnectionError()
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[str] = []
        self.records: list[tuple[str, str, Any]] = []
        self.threads: set[str] = set()

    def _take(self, method: str, name: str = "", subject: Any = None) -> None:
        self.calls.append(method)
        self.threads.add(threading.current_thread().name)
        self.gate.wait()
        if self.refuses(method, name):
            raise self.error
        self.records.append((method, name, subject))

    def initialize(self) -> None:
        self._take("initialize")

    def export_start(self, span: Any) -> None:
        self._take("start", span.name_str, span)

    def export_stop(self, span: Any) -> None:
        self._take("stop", span.name_str, span)

    def export_event(self, event: Any, span: Any) -> None:
        self._take("event", event.name_str, event)

    def export_error(self, event: Any, span: Any) -> None:
        self._take("error", event.error_message, event)

    def export_telemetry_data_error(self, error: Any) -> None:
        self._take("telemetry_data_error", error.error_message, error)

    def close(self) -> None:
        self._take("close")

    @property
    def kept(self) -> list[tuple[str, str]]:
        return [record[:2] for record in self.records]

    def all_of(self, method: str) -> list[Any]:
        return [subject for each, _, subject in self.records if each == method]

    def names(self, method: str = "start") -> list[str]:
        return [name for each, name, _ in self.records if each == method]

    def attributes(self, event: str) -> list[dict[str, Any]]:
        """Of all events of a name."""
        return [each.attributes.to_json() for each in self.all_of("event") if each.name_str == event]


class _Held(deque[tuple[str, str, str]]):
    def __bool__(self) -> bool:
        return False  # so that the recording thread leaves them here


@contextmanager
def reported() -> Iterator[deque[tuple[str, str, str]]]:
    """Collect what is reported inside: call, rule and what was expected."""
    before, metrics.REPORTED = metrics.REPORTED, _Held()
    try:
        yield metrics.REPORTED
    finally:
        metrics.REPORTED = before


def run_python(
    code: str, directory: Path, *, timeout: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter of its own, in a directory, with a feed of its own."""
    feed = directory / "feed"
    feed.mkdir(mode=0o700, exist_ok=True)
    script = directory / "job.py"
    script.write_text(textwrap.dedent(code), encoding="utf-8")
    inherited = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
    ours = {"EXPORTER_FEED_DIR": str(feed), "PYTHONPATH": str(PROJECT), "EXPORTER_FLUSH_SECONDS": "0.2"}
    return subprocess.run(
        [sys.executable, "-W", "error", script.name],
        cwd=directory,
        env=inherited | ours | environment,
        capture_output=True,
        text=True,
        timeout=timeout * PATIENCE,
        check=False,
    )
