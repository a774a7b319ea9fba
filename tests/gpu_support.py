"""Replays through the real child process, simulated and in real time, for the tests of GPUs."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric

from exporter.collectors.gpu.child_process import command_of
from exporter.collectors.gpu.collector import GpuCollector
from exporter.collectors.gpu.nvml import child, encode, parse
from exporter.collectors.gpu.nvml.events import NvmlEvents
from exporter.collectors.gpu.nvml.library import NvmlLibrary
from exporter.collectors.gpu.nvml.sampler import NvmlSampler
from exporter.collectors.gpu.options import GpuOptions
from exporter.collectors.gpu.publishing import SPECS, GpuBlock
from exporter.collectors.gpu.state import GpuRegistry
from exporter.collectors.gpu.supervisor import RESTART_REASONS, Timings
from exporter.config.loader import load, load_file
from exporter.families import Collected
from exporter.replay.description import MachineDescription
from exporter.replay.library import Clock, install
from exporter.replay.machines import load_machine

DATA = Path(__file__).parent / "data" / "gpu"

UPDATE_GOLDEN = os.environ.get("UPDATE_GOLDEN") == "1"
"""Write the expected expositions instead of comparing; the diff is the review."""

SHORT_TIMINGS = Timings(deadline=1.5, start_deadline=10, patience=0.3, first_backoff=0.2, max_backoff=1.0)
"""A supervisor that does not let a test wait, on a machine that is busy with other tests."""

SMALL_MACHINE = """{head}
models:
  small:
    name: Small
    architecture: hopper
    values:
      utilization: 50
      memory_utilization: 25
      memory_total: 1000000
      memory_used: 400000
      memory_reserved: 100000
      sample_buffers: 1
      power: 100000
      energy: {{idle: 100000, counter_from: 5000}}
      temperature: 40
      clock_sm: 1500
      event_types: 0xC11F
    {model}
gpus:
  - {{model: small, count: {count}}}
timeline:
"""
"""GPUs in a constant state."""

MIG_MACHINE = (
    "set: {mig_mode: 1}, "
    "mig: [{gi: 1, profile: 1g.10gb, memory: 1000}, {gi: 2, profile: 1g.10gb, memory: 1000}]"
)
"""Timeline of a machine whose GPUs have two MIG instances each."""


@dataclass
class ReplayResult:
    """Result of a replay."""

    messages: list[dict[str, Any]]
    registry: GpuRegistry = field(default_factory=GpuRegistry)

    @property
    def farewell(self) -> str:
        return str(self.messages[-1]["reason"])

    @property
    def samples(self) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["kind"] == "sample"]

    def readings(self, name: str, gpu: int = 0, *labels: str) -> list[Any]:
        """Return a reading over time, in the passes that read it."""
        found = []
        for message in self.samples:
            for entry in message["gpus"]:
                if entry["index"] == gpu:
                    rows = [*entry.get("values", {}).get(name, ()), *entry.get("replaced", {}).get(name, ())]
                    found += [number for names, number in rows if tuple(names) == labels]
        return found

    def values(self, name: str, gpu: str | None = None) -> dict[tuple[str, ...], float]:
        """Samples of a family by label values; for a single GPU, by the labels that differ."""
        found = values(self.families(), name)
        return found if gpu is None else {key[2:]: number for key, number in found.items() if key[0] == gpu}

    def families(self, *, reason: str | None = None, **options: Any) -> Collected:
        """Current families of the sidecar."""
        if reason is None:
            reason = "" if self.samples else self.farewell
        return GpuBlock().families(self.registry, reason, dict.fromkeys(RESTART_REASONS, 0), **options)


def machine(text: str) -> MachineDescription:
    """Return the machine described in YAML."""
    return load(text, "machine.yaml", MachineDescription)


def small_text(*timeline: str, head: str = "", model: str = "", count: int = 2) -> str:
    """Return the YAML of the small machine with additional fields of its model and a timeline."""
    entries = "".join(f"  - {{{entry}}}\n" for entry in timeline or ("at: 1h",))
    return SMALL_MACHINE.format(head=head, model=model, count=count) + entries


def small_machine(*timeline: str, **more: Any) -> MachineDescription:
    return machine(small_text(*timeline, **more))


class VirtualClock(Clock):
    """Clock that advances only on request; starts at 0."""

    def __init__(self) -> None:
        self._now = self._worked = 0.0

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return 1_700_000_000.0 + self._now

    def delay(self, seconds: float) -> None:
        self._now += seconds

    def work(self, seconds: float, since: float) -> None:
        self._worked += seconds

    def busy(self) -> float:
        """Same as `now` for measuring calls, which take the described time."""
        return self._now + self._worked


def simulate(
    described: dict[str, Any], seconds: float, options: GpuOptions, *, origin: float = 0.0, **start: Any
) -> list[dict[str, Any]]:
    """Return the messages of a child about a machine over a number of seconds, on a simulated clock."""
    pynvml = pytest.importorskip("pynvml")
    clock = VirtualClock()
    install(pynvml, described, clock=clock, origin=origin)
    events = NvmlEvents(NvmlLibrary(pynvml, clock=clock.now), wall=clock.wall)
    messages: list[bytes] = []
    sampler = NvmlSampler(
        NvmlLibrary(pynvml, clock=clock.busy), events, options, start, progress=lambda _what: None
    )

    def sample() -> None:
        messages.append(encode(sampler.start(clock.now())))
        due = clock.now()
        while due <= seconds:
            clock.delay(due - clock.now())
            events.poll()
            messages.append(encode(sampler.sample(clock.now(), clock.wall())))
            due = max(due + options.period, clock.now())

    messages.append(encode(child.last_message(sampler, sample)))
    return [parse(line) for line in messages]


def replay(described: MachineDescription | str, seconds: float, **more: Any) -> ReplayResult:
    """Replay a machine through pynvml on a simulated clock; options of GPUs, or parts of the first message."""
    if isinstance(described, str):
        described = load_machine(described)
    start = {key: more.pop(key) for key in ("visible", "origin") if key in more}
    played = ReplayResult(simulate(described.plain(), seconds, GpuOptions(**more), **start))
    for message in played.messages:
        if message["kind"] == "machine":
            played.registry.machine = message
        elif message["kind"] == "sample":
            played.registry.take_sample(message, 1)
    return played


@contextlib.contextmanager
def running_collector(file: str, *, options: GpuOptions | None = None, **more: Any) -> Iterator[GpuCollector]:
    """Run a collector over a machine in real time, with ten passes a second."""
    chosen = options or GpuOptions(period=0.1, retry=0.3)
    collector = GpuCollector(chosen, **{**replay_arguments(file), "timings": SHORT_TIMINGS, **more})
    collector.start()
    try:
        yield collector
    finally:
        collector.stop()
        assert collector.child_pid is None


def replay_arguments(file: str) -> dict[str, Any]:
    """Return the arguments with which a collector replays the machine of a file."""
    plain = load_file(file, MachineDescription).plain()
    return {"replay": plain, "command": command_of("exporter.replay.library")}


def write_machine(tmp_path: Path, *timeline: str, head: str = "") -> str:
    """Write the small machine to a file and return its path."""
    file = tmp_path / "machine.yaml"
    file.write_text(small_text(*timeline, head=head))
    return str(file)


LABELS = {spec.name: spec.labels for spec in SPECS}


def values(families: Sequence[Metric], name: str) -> dict[tuple[str, ...], float]:
    """Samples of a family by label values in the order of its specification; empty if absent."""
    return {
        tuple(sample.labels.get(label, "") for label in LABELS[name]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
    }


def value(collector: GpuCollector, name: str, *labels: str) -> float | None:
    """Return the current sample of a collector; labels are compared from the first."""
    found = values(collector.collect(), name)
    return next((number for key, number in found.items() if key[: len(labels)] == labels), None)


def gpus_up(collector: GpuCollector) -> Mapping[str, float]:
    """Return the value of `gpu_up` by GPU index."""
    return {labels[0]: up for labels, up in values(collector.collect(), "gpu_up").items()}


def assert_sound(families: Sequence[Metric]) -> None:
    """Check the invariants of every block."""
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    for family in families:
        series = [tuple(sorted(sample.labels.items())) for sample in family.samples]
        assert series
        assert len(series) == len(set(series)), family.name
        for sample in family.samples:
            assert sample.labels.keys() <= set(LABELS[sample.name])
            assert math.isfinite(sample.value)
            if family.type == "counter" or family.unit == "bytes":
                assert sample.value >= 0
            if "_ratio" in family.name:
                assert 0 <= sample.value <= 1, family.name
