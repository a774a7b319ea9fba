"""The NVML child: the only process that loads NVIDIA's library.

Started by the sidecar in a fresh interpreter (`child_process`), never by a fork; options and commands come by standard
input, messages go to standard output. Threads: the main one makes all NVML calls; one waits for events; one tells when a
call takes long; one reads commands, and ends the process when the sidecar is gone, even while a call hangs. Should that
thread be stopped too, the kernel kills the process together with the sidecar.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from exporter.collectors.gpu.nvml import encode, messages
from exporter.collectors.gpu.nvml.device import LibraryDownError
from exporter.collectors.gpu.nvml.events import Events
from exporter.collectors.gpu.nvml.library import CallFailedError, Library
from exporter.collectors.gpu.nvml.sampler import RestartError, Sampler
from exporter.collectors.gpu.options import GpuOptions

_PR_SET_PDEATHSIG = 1
_WATCH_SECONDS = 1.0
_COST_SECONDS = 10.0
_MOST_MEMORY_BYTES = 128 << 20
"""Resident size at which the child asks to be replaced; a guard against leaks."""

Install = Callable[[Any, Mapping[str, Any]], None]
"""Puts a library in the place of NVIDIA's: takes the binding, and the first message."""

Commands = queue.SimpleQueue[dict[str, Any]]


class Output:
    """The pipe to the sidecar; two threads write whole messages."""

    def __init__(self) -> None:
        # For us alone: what libraries print must not end up in it.
        self._descriptor = os.dup(1)
        self._lock = threading.Lock()
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)

    def send(self, kind: str, **more: Any) -> None:
        """Write a message; blocks while the sidecar does not read, ends the process when it is gone."""
        data = memoryview(encode({"kind": kind, **more}))
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                os._exit(0)


def run(install: Install | None = None) -> None:
    """Be the NVML child, perhaps with another library in the place of NVIDIA's; does not return."""
    _serve(install)
    os._exit(0)  # no orderly end of the interpreter: the threads may be in calls that never return


def _serve(install: Install | None) -> None:
    output, incoming = Output(), messages(0)
    start = next(incoming, None)
    if start is None:
        return
    options = GpuOptions(**start.get("options", {}))
    _die_with(start.get("parent", 0))
    output.send("progress", what="import")
    try:
        import pynvml  # noqa: PLC0415 - its absence is an answer to give, not a failure to start
    except ImportError as error:
        output.send("bye", reason="binding_not_found", message=str(error)[:200])
        return
    os.dup2(1, 2)  # from here on nobody reads standard error; until now it told why the start failed
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)  # gives back what compiling pynvml took
    if install is not None:
        install(pynvml, start)
    library = Library(pynvml, clock=time.monotonic)
    events = Events(Library(pynvml, clock=time.monotonic), wall=time.time)
    commands: Commands = queue.SimpleQueue()
    slow = start.get("slow_call_seconds", 2.0)
    threading.Thread(target=_listen, args=(incoming, commands), name="nvml-pipe", daemon=True).start()
    threading.Thread(target=_watch, args=(library, output, slow), name="nvml-watch", daemon=True).start()
    sampler = Sampler(
        library, events, options, start, progress=lambda what: output.send("progress", what=what)
    )

    def sample() -> None:
        output.send(**sampler.start(time.monotonic()))
        events.start()
        limit = start.get("memory_limit_bytes", _MOST_MEMORY_BYTES)
        _sample(sampler, commands, output, options.period, limit)

    output.send(**last_message(sampler, sample))


def _listen(incoming: Iterator[dict[str, Any]], commands: Commands) -> None:
    try:
        for message in incoming:
            commands.put(message)
    finally:
        os._exit(0)  # the sidecar is gone; the main thread may be in a call that never returns


def _watch(library: Library, output: Output, slow_call_seconds: float) -> None:
    """Tell of calls of the main thread that take long."""
    told: tuple[str, int | None, float] | None = None
    while True:
        time.sleep(min(_WATCH_SECONDS, slow_call_seconds / 2))
        call = library.current
        if call is not None and call is not told and time.monotonic() - call[2] >= slow_call_seconds:
            told = call
            output.send("slow", call=call[0], gpu=call[1])


def last_message(sampler: Sampler, sample: Callable[[], None]) -> dict[str, Any]:
    """Sample until something ends it; gives the last message."""
    reason = "released"
    try:
        sample()
    except CallFailedError as failure:
        told = _loading_error() if failure.error == "library_not_found" else ""
        return {"kind": "bye", "reason": failure.error, "message": told or str(failure)}
    except LibraryDownError as error:
        return {"kind": "bye", "reason": error.reason, "message": ""}
    except RestartError as error:
        reason = error.reason
    sampler.stop()
    return {"kind": "bye", "reason": reason, "message": ""}


def _sample(
    sampler: Sampler, commands: Commands, output: Output, period_seconds: float, most_memory_bytes: int
) -> None:
    due = own_due = time.monotonic()
    own: dict[str, float] = {}
    while True:
        now = time.monotonic()
        message = sampler.sample(now, time.time())
        if now >= own_due:
            own_due = now + _COST_SECONDS
            message["own"] = own = _own_cost()
        output.send(**message)
        if own["resident_bytes"] > most_memory_bytes:
            raise RestartError("memory")
        # A pass that took longer than a period is followed by a whole one: no catching up.
        due = max(due + period_seconds, time.monotonic())
        while (rest := due - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                command = commands.get(timeout=rest)
                if command["kind"] == "release":
                    return
                sampler.admit(command["gpu"], time.monotonic())


def _die_with(parent: int) -> None:
    """Be killed when the thread that started us ends, which lives as long as the sidecar does."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent and os.getppid() != parent:  # it was gone before we asked
        os._exit(0)


def _loading_error() -> str:
    """What the binding does not tell: there is no library, or one of another machine, or half of one."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return str(error)[:200]
    return ""  # there is one; the machine is a replayed one without


def _own_cost() -> dict[str, float]:
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text(encoding="ascii").split()[1]) if statm.exists() else 0
    return {"cpu_seconds": sum(os.times()[:2]), "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE")}
