"""Bridge to torch's wait counters (stores, process groups, …).

Used in the training process and in torchrun's agent. A thread reads the counters; nothing is patched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from exporter.bridges.periodic import Periodic
from exporter.recording.identity import clean_text
from exporter.recording.recorder import RECORDER
from exporter.recording.stat import metric

MOST_KEYS = 200
"""Counters with series of their own; the rest is `other`."""
OTHER = "other"

Counters = Mapping[str, Mapping[str, int]]


class WaitCounters:
    """Turns totals into increments; `read` gives the counters of this process."""

    def __init__(self, read: Callable[[], Counters]) -> None:
        self._read = read
        self._before: dict[str, Mapping[str, int]] | None = {}
        self._keys: set[str] = set()

    def look(self) -> None:
        """Look once."""
        if RECORDER.process.is_agent and not RECORDER.process.run_id:
            return  # whose they are is not known yet; they are totals, so nothing is lost
        found = self._read()
        before, self._before = self._before, dict(found)
        if before is None:
            return  # a forked child begins with what its parent had
        for key, now in found.items():
            if now != before.get(key):
                self._record(key, before.get(key, {}), now)

    def forget(self) -> None:
        """In a forked child: what was counted so far is the parent's."""
        self._before = None

    def _record(self, key: str, before: Mapping[str, int], now: Mapping[str, int]) -> None:
        def increase(what: str) -> int:
            return max(now.get(what, 0) - before.get(what, 0), 0)

        label = clean_text(key.removeprefix("pytorch.wait_counter.")) or OTHER
        if label not in self._keys:
            if len(self._keys) >= MOST_KEYS:
                label = OTHER
            self._keys.add(label)
        labels = {"key": label}
        metric("counter", "training.torch.wait_calls", labels=labels)(increase("total_calls"))
        seconds = increase("total_time_us") / 1e6
        metric("counter", "training.torch.wait", unit="seconds", labels=labels)(seconds)
        if label != OTHER:  # of several together there is no such number
            metric("gauge", "training.torch.waits", labels=labels)(now.get("active_count", 0))
            longest = metric("gauge", "training.torch.wait_longest", unit="seconds", labels=labels)
            longest(now.get("max_time_us", 0) / 1e6)


def install() -> None:
    """Look at the wait counters from time to time. Raises ImportError: This torch has none."""
    counters = WaitCounters(_wait_reader())
    Periodic("wait-counters", counters.look, seconds=1.0, after_fork=counters.forget)


def _wait_reader() -> Callable[[], Counters]:
    c10d: Any = import_module("torch._C._distributed_c10d")  # its type stubs lack what is needed here

    request_class, response_class = c10d._Request, c10d._Response  # noqa: SLF001  # there are no public names
    handler = c10d._get_handler("wait_counter_values")  # noqa: SLF001  # as above

    class Request(request_class):  # type: ignore[misc, valid-type]  # torch's
        def body(self) -> bytes:
            return b""

        def params(self) -> dict[str, str]:
            return {}

    class Response(response_class):  # type: ignore[misc, valid-type]  # torch's
        content: str | bytes = "{}"

        def set_content(self, content: str | bytes, _content_type: str) -> None:
            self.content = content

        def set_status(self, status: int) -> None:
            pass

    def read() -> Counters:
        response = Response()
        handler(Request(), response)
        found: dict[str, Any] = json.loads(response.content)
        return {key: value for key, value in found.items() if isinstance(value, dict)}

    return read
