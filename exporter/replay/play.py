"""Plays a described machine: as the NVML child of a sidecar, by the clock, or within a program, on one of its own.

`run` is the child of a sidecar that replays: the same program as the one of real GPUs, with a `ReplayLibrary` in
the place of NVIDIA's. `play` gives the same messages without waiting, on a clock that stands still unless it is told
to go on; for tests and tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exporter.collectors.gpu.nvml import child, encode, parse
from exporter.collectors.gpu.nvml.events import Events
from exporter.collectors.gpu.nvml.library import Library
from exporter.collectors.gpu.nvml.sampler import Sampler
from exporter.collectors.gpu.options import GpuOptions
from exporter.replay.library import Clock, ReplayLibrary

VIRTUAL_EPOCH = 1_700_000_000.0
"""Unix time at which a virtual clock starts."""


class VirtualClock(Clock):
    """A clock that stands still unless it is told to go on; starts at 0."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds that it was told to go on."""
        return self._now

    def wall(self) -> float:
        """Unix seconds."""
        return VIRTUAL_EPOCH + self._now

    def delay(self, seconds: float) -> None:
        """Go on by so much."""
        self._now += seconds

    def work(self, seconds: float, since: float) -> None:
        """Take no time."""


def install(binding: Any, replay: dict[str, Any], *, clock: Clock, origin: float) -> None:
    """Put a machine (see `MachineDescription.plain`), whose timeline began at `origin`, in the place of NVIDIA's library."""
    binding.nvmlLib = ReplayLibrary(replay, clock=clock, origin=origin)
    binding._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - else functions of an earlier one would go on answering


def run() -> None:
    """Be the NVML child of a sidecar that replays; does not return."""
    child.run(_install)


def _install(binding: Any, start: Mapping[str, Any]) -> None:
    clock = Clock()
    install(binding, start["replay"], clock=clock, origin=start.get("origin", clock.now()))


def play(
    replay: dict[str, Any], seconds: float, options: GpuOptions, *, origin: float = 0.0, **start: Any
) -> list[dict[str, Any]]:
    """Give every message that a child would send about a machine in so many seconds.

    Args:
        replay: See `MachineDescription.plain`.
        seconds: How long it is played.
        options: What to ask for.
        origin: When its timeline began.
        start: Further parts of the child's first message.
    """
    import pynvml  # noqa: PLC0415 - a sidecar that reads descriptions does without it

    clock = VirtualClock()
    install(pynvml, replay, clock=clock, origin=origin)
    library = Library(pynvml, clock=clock.now)
    events = Events(Library(pynvml, clock=clock.now), wall=clock.wall)
    said: list[bytes] = []

    def progress(what: str) -> None:
        said.append(encode({"kind": "progress", "what": what}))

    sampler = Sampler(library, events, options, start, progress=progress)

    def sample() -> None:
        said.append(encode(sampler.start(clock.now())))
        due = clock.now()
        while due <= seconds:
            clock.delay(due - clock.now())
            events.poll()
            said.append(encode(sampler.sample(clock.now(), clock.wall())))
            due = max(due + options.period, clock.now())

    said.append(encode(child.last_message(sampler, sample)))
    return [parse(line) for line in said]
