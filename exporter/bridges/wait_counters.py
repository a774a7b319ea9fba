"""The bridge to torch's wait counters: calls and times of stores, of process groups and of compilation.

Used in the training process and in torchrun's agent. torch counts them since the process began, and tells them in the
form of an answer of its control plane; a thread of the bridge asks for it. Nothing is hooked, so that the job does not
notice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from exporter.bridges.periodic import Periodic
from exporter.recording.identity import AGENT, clean_text
from exporter.recording.plain import plain

LOOK_SECONDS = 1.0
MOST_KEYS = 200
"""Counters with series of their own; the rest is `other`."""
OTHER = "other"
_PREFIX = "pytorch.wait_counter."

Counters = Mapping[str, Mapping[str, int]]


class WaitCounters:
    """Turns totals into increments.

    Args:
        read: Gives the counters of this process.
    """

    def __init__(self, read: Callable[[], Counters]) -> None:
        self._read = read
        self._before: dict[str, Mapping[str, int]] | None = {}
        self._keys: set[str] = set()

    def step(self) -> None:
        """Look once."""
        if AGENT.is_agent and not AGENT.run_id:
            return  # whose they are is not known yet; they are totals, so nothing is lost
        found = self._read()
        if self._before is None:
            self._before = dict(found)  # a forked child's counters begin with its parent's
            return
        for key, now in found.items():
            before = self._before.get(key)
            if before != now:
                self._record(key, before or {}, now)
                self._before[key] = now

    def forget(self) -> None:
        """In a forked child: what was counted so far is the parent's."""
        self._before = None

    def _record(self, key: str, before: Mapping[str, int], now: Mapping[str, int]) -> None:
        label = clean_text(key.removeprefix(_PREFIX)) or OTHER
        if label not in self._keys:
            if len(self._keys) >= MOST_KEYS:
                label = OTHER
            self._keys.add(label)
        labels = {"key": label}
        calls = _increase(before, now, "total_calls")
        plain("counter", "training.torch.wait_calls", labels=labels)(calls)
        microseconds = _increase(before, now, "total_time_us")
        plain("counter", "training.torch.wait", unit="seconds", labels=labels)(microseconds / 1e6)
        if label != OTHER:  # of several together there is no such number
            plain("gauge", "training.torch.waits", labels=labels)(now.get("active_count", 0))
            longest = plain("gauge", "training.torch.wait_longest", unit="seconds", labels=labels)
            longest(now.get("max_time_us", 0) / 1e6)


def _increase(before: Mapping[str, int], now: Mapping[str, int], what: str) -> int:
    return max(now.get(what, 0) - before.get(what, 0), 0)


def install() -> None:
    """Look at the wait counters from time to time.

    Raises:
        ImportError: This torch has none.
    """
    counters = WaitCounters(_reader())
    Periodic("exporter-wait-counters", counters.step, seconds=LOOK_SECONDS, after_fork=counters.forget)


def _reader() -> Callable[[], Counters]:
    c10d: Any = import_module("torch._C._distributed_c10d")  # its type stubs lack what is needed here

    class Request(c10d._Request):  # type: ignore[misc]  # noqa: SLF001  # there is no public name
        def __init__(self) -> None:
            c10d._Request.__init__(self)  # noqa: SLF001  # as above

        def body(self) -> bytes:
            return b""

        def params(self) -> dict[str, str]:
            return {}

    class Response(c10d._Response):  # type: ignore[misc]  # noqa: SLF001  # as above
        def __init__(self) -> None:
            c10d._Response.__init__(self)  # noqa: SLF001  # as above
            self.content = "{}"

        def set_content(self, content: str | bytes, content_type: str) -> None:
            del content_type
            self.content = content.decode() if isinstance(content, bytes) else content

        def set_status(self, status: int) -> None:
            del status

    handler = c10d._get_handler("wait_counter_values")  # noqa: SLF001  # as above

    def read() -> Counters:
        response = Response()
        handler(Request(), response)
        found: dict[str, Any] = json.loads(response.content)
        return {key: value for key, value in found.items() if isinstance(value, dict)}

    return read
