"""NVML child: the only process that loads NVIDIA's library.

Started by the sidecar in a fresh interpreter (`child_process`), never by a fork. Options and commands arrive on standard input,
messages are written to standard output. Threads: the main thread makes all NVML calls; an event thread waits for events; a
pipe thread reads commands, reports slow calls, and exits the process after the sidecar, even during a hanging call.
If the pipe thread is stopped too, the kernel kills the process together with the sidecar.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from exporter.collectors.gpu.nvml import MessageReader, encode
from exporter.collectors.gpu.nvml.device import LibraryDownError
from exporter.collectors.gpu.nvml.events import NvmlEvents
from exporter.collectors.gpu.nvml.library import CallFailedError, CallUnderWay, NvmlLibrary
from exporter.collectors.gpu.nvml.sampler import NvmlSampler, RestartError
from exporter.collectors.gpu.options import GpuOptions

_PR_SET_PDEATHSIG = 1
_COST_SECONDS = 10.0
_MAX_MEMORY_BYTES = 128 << 20
"""Resident size above which the child requests a restart, against leaks."""

Install = Callable[[Any, Mapping[str, Any]], None]
"""Puts a library in the place of NVIDIA's; called with the binding and the first message."""

Commands = queue.SimpleQueue[dict[str, Any]]


class ChildOutput:
    """Pipe to the sidecar; two threads write whole messages."""

    def __init__(self) -> None:
        # Output of libraries must not go into the pipe.
        self._descriptor = os.dup(1)
        self._lock = threading.Lock()
        with Path(os.devnull).open("wb") as null:
            os.dup2(null.fileno(), 1)

    def send(self, kind: str, **more: Any) -> None:
        """Write a message; blocks if the pipe is full, exits the process if the sidecar has exited."""
        data = memoryview(encode({"kind": kind, **more}))
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                os._exit(0)


def run(install: Install | None = None) -> None:
    """Run the NVML child; does not return. `install` replaces NVIDIA's library."""
    _serve(install)
    os._exit(0)  # no orderly end of the interpreter: threads may be in calls that never return


def _serve(install: Install | None) -> None:
    output, reader = ChildOutput(), MessageReader(0)
    incoming = reader.receive()
    while incoming == []:
        incoming = reader.receive()
    if not incoming:
        return
    start, *waiting = incoming
    options = GpuOptions(**start.get("options", {}))
    _die_with(start.get("parent", 0))
    output.send("progress", step="import")
    try:
        import pynvml  # noqa: PLC0415 - without the package the child reports the reason
    except ImportError as error:
        output.send("exit", reason="binding_not_found", message=str(error)[:200])
        return
    os.dup2(1, 2)  # standard error is not read any more; before, the output explained a failed start
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)  # releases memory used for compiling pynvml
    if install is not None:
        install(pynvml, start)
    library = NvmlLibrary(pynvml, clock=time.monotonic)
    events = NvmlEvents(NvmlLibrary(pynvml, clock=time.monotonic), wall=time.time)
    commands: Commands = queue.SimpleQueue()
    for command in waiting:
        commands.put(command)
    slow = start.get("slow_call_seconds", 2.0)
    listening = (reader, commands, library, output, slow)
    threading.Thread(target=_listen, args=listening, name="nvml-pipe", daemon=True).start()
    sampler = NvmlSampler(
        library, events, options, start, progress=lambda step: output.send("progress", step=step)
    )

    def sample() -> None:
        output.send(**sampler.start(time.monotonic()))
        events.start()
        limit = start.get("memory_limit_bytes", _MAX_MEMORY_BYTES)
        _sample(sampler, commands, output, options.period, limit)

    output.send(**last_message(sampler, sample))


def _listen(
    reader: MessageReader,
    commands: Commands,
    library: NvmlLibrary,
    output: ChildOutput,
    slow_call_seconds: float,
) -> None:
    """Read commands, and report slow calls of the main thread."""
    reported: CallUnderWay | None = None
    try:
        while True:
            call = library.current
            timeout = slow_call_seconds / 2
            if call is not None and call is not reported:
                timeout = max(0.05, call.began + slow_call_seconds - time.monotonic())
            ready, _, _ = select.select([reader.descriptor], [], [], timeout)
            if ready:
                received = reader.receive()
                if received is None:
                    return
                for message in received:
                    commands.put(message)
            call = library.current
            if call is None or call is reported or time.monotonic() - call.began < slow_call_seconds:
                continue
            reported = call
            output.send("slow", call=call.name, gpu=call.gpu)
    finally:
        os._exit(0)  # the sidecar has exited; the main thread may be in a call that never returns


def last_message(sampler: NvmlSampler, sample: Callable[[], None]) -> dict[str, Any]:
    """Sample until the child exits; return the message `exit`."""
    reason = "detached"
    try:
        sample()
    except CallFailedError as failure:
        detail = _loading_error() if failure.error == "library_not_found" else ""
        return {"kind": "exit", "reason": failure.error, "message": detail or str(failure)}
    except LibraryDownError as error:
        return {"kind": "exit", "reason": error.reason, "message": ""}
    except RestartError as error:
        reason = error.reason
    sampler.stop()
    return {"kind": "exit", "reason": reason, "message": ""}


def _sample(
    sampler: NvmlSampler,
    commands: Commands,
    output: ChildOutput,
    period_seconds: float,
    max_memory_bytes: int,
) -> None:
    due = cost_due = time.monotonic()
    own_cost: dict[str, float] = {}
    while True:
        now = time.monotonic()
        message = sampler.sample(now, time.time())
        if now >= cost_due:
            cost_due = now + _COST_SECONDS
            message["own"] = own_cost = _own_cost()
        output.send(**message)
        if own_cost["resident_bytes"] > max_memory_bytes:
            raise RestartError("memory")
        # After a pass longer than a period, wait a whole period without catching up.
        due = max(due + period_seconds, time.monotonic())
        while (wait_seconds := due - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                command = commands.get(timeout=wait_seconds)
                if command["kind"] == "stop":
                    return
                sampler.reattach(command["gpu"], command["calls"], time.monotonic())


def _die_with(parent: int) -> None:
    """Let the kernel kill this process at the end of the parent thread, which lives as long as the sidecar."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent and os.getppid() != parent:  # the parent exited before
        os._exit(0)


def _loading_error() -> str:
    """Return the loader's error, which the binding drops: missing library, wrong machine type, or damaged file."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return str(error)[:200]
    return ""  # the library exists; a replayed machine has none


def _own_cost() -> dict[str, float]:
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text(encoding="ascii").split()[1]) if statm.exists() else 0
    return {"cpu_seconds": sum(os.times()[:2]), "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE")}
