"""What tests of the training telemetry's surface share: exporters that keep or refuse, and a process of one's own."""

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

from waiting import PATIENCE

from exporter.one_logger.exporters import BaseExporter
from exporter.training import metrics

ROOT = Path(__file__).resolve().parent.parent


class KeepingExporter(BaseExporter):
    """Keeps what it is given, as (method, name); refuses while `refuses` says so, waits while `gate` is closed."""

    def __init__(self, refuses: Callable[[str], bool] = lambda method: False) -> None:
        super().__init__()
        self.refuses = refuses
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[str] = []
        self.kept: list[tuple[str, str]] = []
        self.spans: list[Any] = []
        self.errors: list[Any] = []
        self.threads: set[str] = set()

    def _take(self, method: str, name: str = "", *arguments: Any) -> None:
        self.calls.append(method)
        self.threads.add(threading.current_thread().name)
        self.gate.wait()
        if self.refuses(method):
            raise ConnectionError(method)
        self.kept.append((method, name))
        self.spans += arguments

    def initialize(self) -> None:
        self._take("initialize")
        super().initialize()

    def export_start(self, span: Any) -> None:
        self._take("start", span.name_str, span)

    def export_stop(self, span: Any) -> None:
        self._take("stop", span.name_str, span)

    def export_event(self, event: Any, span: Any) -> None:
        self._take("event", event.name_str, span)

    def export_error(self, event: Any, span: Any) -> None:
        self._take("error", event.error_message, span)

    def export_telemetry_data_error(self, error: Any) -> None:
        self.errors.append(error)
        self._take("telemetry_data_error", error.error_message)

    def close(self) -> None:
        self._take("close")
        super().close()


@contextmanager
def reported() -> Iterator[list[tuple[str, str, str]]]:
    """Collect what is reported inside."""
    found: list[tuple[str, str, str]] = []

    class Kept(deque[tuple[str, str, str]]):
        def append(self, item: tuple[str, str, str]) -> None:
            found.append(item)
            super().append(item)

    before = metrics.REPORTED
    metrics.REPORTED = Kept()
    try:
        yield found
    finally:
        metrics.REPORTED = before


def run_python(
    code: str, directory: Path, *, python: str = sys.executable, timeout: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter of its own, in a directory, with a feed of its own."""
    feed = directory / "feed"
    feed.mkdir(mode=0o700, exist_ok=True)
    script = directory / "job.py"
    script.write_text(textwrap.dedent(code), encoding="utf-8")
    inherited = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE"}}
    return subprocess.run(
        [python, "-W", "error", script.name],
        cwd=directory,
        env=inherited
        | {"EXPORTER_FEED_DIR": str(feed), "PYTHONPATH": str(ROOT), "EXPORTER_FLUSH_SECONDS": "0.2"}
        | environment,
        capture_output=True,
        text=True,
        timeout=timeout * PATIENCE,
        check=False,
    )
