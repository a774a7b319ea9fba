"""NVML child: the only process that loads NVML.

The sidecar starts the child in a fresh interpreter (`child_process`), never by a fork. The child reads options and
commands from standard input and writes messages to standard output. The main thread makes all NVML calls except the wait
for events, for which the event thread exists. The pipe thread reads commands, reports slow calls, and exits the process when
the sidecar exits, even during a hanging call. If the pipe thread cannot run, the kernel kills the process when the sidecar
exits.
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
from exporter.collectors.gpu.nvml.library import CallFailedError, CallInProgress, NvmlLibrary
from exporter.collectors.gpu.nvml.sampler import NvmlSampler, RestartError
from exporter.collectors.gpu.options import GpuOptions

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_COST_INTERVAL_SECONDS = 10.0
"""Interval in which the child reports its CPU time and memory."""
_MAX_MEMORY_BYTES = 128 << 20
"""Resident memory from which the child requests a restart, in case of a memory leak."""

Install = Callable[[Any, Mapping[str, Any]], None]
"""Function that replaces NVML by a replayed library. Called with pynvml and the first message."""

Commands = queue.SimpleQueue[dict[str, Any]]
"""Messages of the sidecar after the message `start`, for the main thread."""


class ChildOutput:
    """Pipe to the sidecar, for messages of several threads."""

    def __init__(self) -> None:
        # Libraries may write to standard output, which must not corrupt the pipe.
        self._descriptor = os.dup(1)
        self._lock = threading.Lock()
        with Path(os.devnull).open("wb") as null:
            os.dup2(null.fileno(), 1)

    def send(self, kind: str, **fields: Any) -> None:
        """Write a message. Block while the pipe is full, and exit the process if the sidecar has exited."""
        data = memoryview(encode({"kind": kind, **fields}))
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                os._exit(0)


def run(install: Install | None = None) -> None:
    """Run the NVML child. Does not return. `install` replaces NVML by a replayed library."""
    _serve(install)
    os._exit(0)  # without finalizing the interpreter: threads may be in calls that never return


def _serve(install: Install | None) -> None:
    """Wait for the message `start`, import pynvml, start the threads, and sample until the child must exit."""
    output, reader = ChildOutput(), MessageReader(0)
    received_messages = reader.receive()
    while received_messages == []:
        received_messages = reader.receive()
    if not received_messages:
        return
    start, *later_messages = received_messages
    options = GpuOptions(**start.get("options", {}))
    _exit_with_parent(start.get("parent", 0))
    output.send("progress", step="import")
    try:
        import pynvml  # noqa: PLC0415 - without the package the child reports the reason
    except ImportError as error:
        output.send("exit", reason="binding_not_found", message=str(error)[:200])
        return
    os.dup2(1, 2)  # standard error goes to a memory file of the sidecar, which must not grow
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)  # releases memory used for compiling pynvml
    if install is not None:
        install(pynvml, start)
    library = NvmlLibrary(pynvml, clock=time.monotonic)
    events = NvmlEvents(NvmlLibrary(pynvml, clock=time.monotonic), wall=time.time)
    commands: Commands = queue.SimpleQueue()
    for command in later_messages:
        commands.put(command)
    slow_call_seconds = start.get("slow_call_seconds", 2.0)
    listener_arguments = (reader, commands, library, output, slow_call_seconds)
    threading.Thread(target=_listen, args=listener_arguments, name="nvml-pipe", daemon=True).start()
    sampler = NvmlSampler(
        library, events, options, start, progress=lambda step: output.send("progress", step=step)
    )

    def sample() -> None:
        output.send(**sampler.start(time.monotonic()))
        events.start()
        max_memory_bytes = start.get("memory_limit_bytes", _MAX_MEMORY_BYTES)
        _sample_until_stop(sampler, commands, output, options.period, max_memory_bytes)

    output.send(**run_until_exit(sampler, sample))


def _listen(
    reader: MessageReader,
    commands: Commands,
    library: NvmlLibrary,
    output: ChildOutput,
    slow_call_seconds: float,
) -> None:
    """Read commands, and report slow calls of the main thread. Exit the process when the sidecar has exited."""
    reported_call: CallInProgress | None = None
    try:
        while True:
            call = library.current
            timeout = slow_call_seconds / 2
            if call is not None and call is not reported_call:
                timeout = max(0.05, call.started_at + slow_call_seconds - time.monotonic())
            ready, _, _ = select.select([reader.descriptor], [], [], timeout)
            if ready:
                messages = reader.receive()
                if messages is None:
                    return
                for message in messages:
                    commands.put(message)
            call = library.current
            if (
                call is None
                or call is reported_call
                or time.monotonic() - call.started_at < slow_call_seconds
            ):
                continue
            reported_call = call
            output.send("slow", call=call.name, gpu=call.gpu)
    finally:
        os._exit(0)  # the sidecar has exited; the main thread may be in a call that never returns


def run_until_exit(sampler: NvmlSampler, sample: Callable[[], None]) -> dict[str, Any]:
    """Run `sample` until the child must exit, and return the message `exit`.

    The reason is `detached` if `sample` returns after the command `stop`.
    """
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


def _sample_until_stop(
    sampler: NvmlSampler,
    commands: Commands,
    output: ChildOutput,
    period_seconds: float,
    max_memory_bytes: int,
) -> None:
    """Read all GPUs periodically until the command `stop`. Raises RestartError if the child uses too much memory."""
    next_pass_at = next_cost_at = time.monotonic()
    own_cost: dict[str, float] = {}
    while True:
        now = time.monotonic()
        message = sampler.sample(now, time.time())
        if now >= next_cost_at:
            next_cost_at = now + _COST_INTERVAL_SECONDS
            message["own"] = own_cost = _own_cost()
        output.send(**message)
        if own_cost["resident_bytes"] > max_memory_bytes:
            raise RestartError("memory")
        # After a pass longer than the period, missed passes are skipped.
        next_pass_at = max(next_pass_at + period_seconds, time.monotonic())
        while (wait_seconds := next_pass_at - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                command = commands.get(timeout=wait_seconds)
                if command["kind"] == "stop":
                    return
                sampler.reattach(command["gpu"], command["calls"], time.monotonic())


def _exit_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent thread exits: the supervisor's, which runs as long as the sidecar."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent and os.getppid() != parent:  # the parent exited before the call of prctl
        os._exit(0)


def _loading_error() -> str:
    """Return the error of the dynamic loader, which pynvml discards: a missing, foreign or damaged library."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return str(error)[:200]
    return ""  # the library exists, but the replayed machine has none


def _own_cost() -> dict[str, float]:
    """Return the CPU time and the resident memory of this process."""
    statm, times = Path("/proc/self/statm"), os.times()
    resident_pages = 0
    if statm.exists():
        _total_pages, resident_pages, *_ = map(int, statm.read_text(encoding="ascii").split())
    return {
        "cpu_seconds": times.user + times.system,
        "resident_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
    }
