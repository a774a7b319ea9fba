"""The NVML child: the only process that loads NVIDIA's library.

A program of its own, `python -m exporter.collectors.nvml.child`, started by the sidecar in a fresh interpreter,
never by a fork. Standard input brings the options and then commands; standard output takes messages
(`protocol`); it has no other descriptor of the sidecar's.

Threads: the main thread makes all NVML calls; one waits for events (`events`); one watches: it reads commands,
tells the sidecar when a call takes long, and ends the process at once when the sidecar is gone, even while a
call hangs. Should that thread be stopped too, the kernel kills the process together with the sidecar.

What holds when this process dies: the sidecar goes on, and starts another one by its own rules.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections import deque

from exporter.collectors.nvml.clocks import RealClock, VirtualClock
from exporter.collectors.nvml.events import Events
from exporter.collectors.nvml.gpu import LibraryDownError
from exporter.collectors.nvml.library import CallFailedError, Library
from exporter.collectors.nvml.options import Options
from exporter.collectors.nvml.protocol import Decoder, ProtocolError, encode
from exporter.collectors.nvml.sampler import RestartError, Sampler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PR_SET_PDEATHSIG = 1
_WATCH_SECONDS = 1.0
_COST_SECONDS = 10.0


class Output:
    """The pipe to the sidecar; two threads write whole messages."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Write a message; blocks while the sidecar does not read, ends the process when it is gone."""
        data = memoryview(encode(message))
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                os._exit(0)


class Watch:
    """The thread that looks at the sidecar, and at what the main thread is doing.

    Args:
        library: The main thread's.
        output: Where to tell of calls that take long.
        decoder: With what has been read of the input so far.
        commands: Those that came with the options.
        slow_call_seconds: What is long.
    """

    def __init__(
        self,
        library: Library,
        output: Output,
        decoder: Decoder,
        commands: list[dict[str, Any]],
        *,
        slow_call_seconds: float,
    ) -> None:
        self._library = library
        self._output = output
        self._decoder = decoder
        self._slow_call_seconds = slow_call_seconds
        self._look_seconds = min(_WATCH_SECONDS, slow_call_seconds / 2)
        self._commands = deque(commands)
        self._came = threading.Event()
        if commands:
            self._came.set()

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="nvml-watch", daemon=True).start()

    def wait(self, seconds: float) -> list[dict[str, Any]]:
        """Wait, at most until the next command; give those that came."""
        if self._came.wait(max(0.0, seconds)):
            self._came.clear()
        return [self._commands.popleft() for _ in range(len(self._commands))]

    def _run(self) -> None:
        told: tuple[str, int | None, float] | None = None
        while True:
            ready, _, _ = select.select([0], [], [], self._look_seconds)
            if ready:
                self._read()
            call = self._library.current
            if call is None or call is told:
                continue
            name, subject, began = call
            seconds = time.monotonic() - began
            if seconds >= self._slow_call_seconds:
                told = call
                self._output.send({"kind": "slow", "call": name, "gpu": subject, "seconds": seconds})

    def _read(self) -> None:
        data = os.read(0, 1 << 16)
        if not data:
            os._exit(0)  # the sidecar is gone; the main thread may be in a call that never returns
        try:
            self._commands.extend(self._decoder.feed(data))
        except ProtocolError:
            os._exit(1)
        self._came.set()


def main() -> int:
    """Sample until told to end.

    Returns:
        0; how it went is in the last message.
    """
    output = Output(_take_output())
    decoder = Decoder()
    messages = _read_first(decoder)
    if not messages:
        return 0
    options = Options(messages[0])
    _die_with(options.parent)
    output.send({"kind": "progress", "what": "import"})
    try:
        import pynvml  # noqa: PLC0415 - its absence is an answer to give, not a failure to start
    except ImportError as error:
        output.send({"kind": "bye", "reason": "binding_not_found", "message": str(error)[:200]})
        return 0
    _silence()
    _give_memory_back()
    clock = RealClock() if options.virtual_seconds is None else VirtualClock()
    if options.replay is not None:
        from exporter.collectors.nvml.replay_library import (  # noqa: PLC0415 - a megabyte that only a replay needs
            ReplayLibrary,
        )

        origin = clock.now() if options.origin is None else options.origin
        _install(pynvml, ReplayLibrary(options.replay, clock=clock, origin=origin))
    library = Library(pynvml, clock=clock.now)
    events = Events(Library(pynvml, clock=clock.now), wall=clock.wall, details=options.details)
    sampler = Sampler(
        library, events, options, progress=lambda what: output.send({"kind": "progress", "what": what})
    )
    watch = Watch(library, output, decoder, messages[1:], slow_call_seconds=options.slow_call_seconds)
    if isinstance(clock, RealClock):
        watch.start()
    output.send(_run(sampler, events, watch, output, options, clock))
    return 0


def _run(
    sampler: Sampler,
    events: Events,
    watch: Watch,
    output: Output,
    options: Options,
    clock: RealClock | VirtualClock,
) -> dict[str, Any]:
    """Sample until something ends it; gives the last message."""
    try:
        output.send(sampler.start(clock.now()))
        if isinstance(clock, RealClock):
            events.start()
        _sample(sampler, events, watch, output, options, clock)
    except CallFailedError as failure:
        message = _loading_error() if failure.error == "library_not_found" else ""
        return {"kind": "bye", "reason": failure.error, "message": message or str(failure)}
    except LibraryDownError as error:
        return {"kind": "bye", "reason": error.reason, "message": ""}
    except RestartError as error:
        sampler.stop()
        return {"kind": "bye", "reason": error.reason, "message": ""}
    sampler.stop()
    return {"kind": "bye", "reason": "released", "message": ""}


def _sample(
    sampler: Sampler,
    events: Events,
    watch: Watch,
    output: Output,
    options: Options,
    clock: RealClock | VirtualClock,
) -> None:
    due = clock.now()
    own_due = due
    while True:
        now = clock.now()
        if isinstance(clock, VirtualClock):
            events.poll()
        message = sampler.sample(now, clock.wall())
        if now >= own_due and isinstance(clock, RealClock):
            own_due = now + _COST_SECONDS
            message["own"] = own = _own_cost()
            if own["resident_bytes"] > options.memory_limit_bytes:
                output.send(message)
                raise RestartError("memory")
        output.send(message)
        # A pass that took longer than a period is followed by a whole one: no catching up.
        due = max(due + options.period_seconds, clock.now())
        if isinstance(clock, VirtualClock):
            clock.delay(due - clock.now())
            if options.virtual_seconds is not None and due > options.virtual_seconds:
                return
            continue
        while (rest := due - clock.now()) > 0:
            for command in watch.wait(rest):
                if command["kind"] == "release":
                    return
                if command["kind"] == "admit":
                    sampler.admit(command["gpu"], clock.now())


def _take_output() -> int:
    """Take the pipe for us alone: what libraries print must not end up in it."""
    descriptor = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return descriptor


def _silence() -> None:
    """From here on nobody reads standard error; until now it told why the start failed."""
    os.dup2(1, 2)


def _read_first(decoder: Decoder) -> list[dict[str, Any]]:
    """Read the options, and what came with them; nothing where the sidecar is gone already."""
    messages: list[dict[str, Any]] = []
    while not messages:
        data = os.read(0, 1 << 16)
        if not data:
            break
        messages = decoder.feed(data)
    return messages


def _die_with(parent: int) -> None:
    """Be killed when the thread that started us ends, which lives as long as the sidecar does."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent and os.getppid() != parent:  # it was gone before we asked
        os._exit(0)


def _give_memory_back() -> None:
    """Return what compiling pynvml took, 11 MiB where its compiled form could not be kept."""
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _install(binding: Any, library: Any) -> None:
    """Put a library of ours in the place of NVIDIA's."""
    binding.nvmlLib = library
    binding._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - else functions of an earlier one would go on answering


def _loading_error() -> str:
    """What the binding does not tell: there is no library, or one of another machine, or half of one."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return str(error)[:200]
    return ""  # there is one; the machine is a replayed one without


def _own_cost() -> dict[str, float]:
    times = os.times()
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - pathlib costs a megabyte here
            pages = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        pages = 0
    return {
        "cpu_seconds": times.user + times.system,
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


if __name__ == "__main__":
    status = main()
    # No orderly end of the interpreter: the threads may be in calls that never return.
    os._exit(status)
