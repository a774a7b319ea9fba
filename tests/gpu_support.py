"""Replays through the code of the NVML child, on a simulated clock and in real time, for the tests of GPUs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from places import DATA
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

GPU_DATA = DATA / "gpu"

SHORT_TIMINGS = Timings(
    deadline_seconds=1.5,
    start_deadline_seconds=10,
    replacement_delay_seconds=0.3,
    first_backoff_seconds=0.2,
    max_backoff_seconds=1.0,
)
"""Short timings of the supervisor, long enough for a busy machine."""

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
"""Description of a machine whose GPUs have a constant state."""

MIG_MACHINE = (
    "set: {mig_mode: 1}, "
    "mig: [{gi: 1, profile: 1g.10gb, memory: 1000}, {gi: 2, profile: 1g.10gb, memory: 1000}]"
)
"""Timeline entry that gives each GPU two MIG instances."""


@dataclass
class ReplayResult:
    """Messages of a replayed child, and the registry of the sidecar after these messages."""

    messages: list[dict[str, Any]]
    registry: GpuRegistry = field(default_factory=GpuRegistry)

    @property
    def exit_reason(self) -> str:
        return str(self.messages[-1]["reason"])

    @property
    def samples(self) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["kind"] == "sample"]

    def readings(self, name: str, gpu: int = 0, *labels: str) -> list[Any]:
        """Return the values of a reading in all passes that read it."""
        readings = []
        for message in self.samples:
            for entry in message["gpus"]:
                if entry["index"] == gpu:
                    rows = [*entry.get("values", {}).get(name, ()), *entry.get("replaced", {}).get(name, ())]
                    readings += [reading for names, reading in rows if tuple(names) == labels]
        return readings

    def values(self, name: str, gpu: str | None = None) -> dict[tuple[str, ...], float]:
        """Return the samples of a family by label values.

        With `gpu`, return only the samples of this GPU, by the labels after `gpu` and `uuid`.
        """
        samples = values(self.families(), name)
        if gpu is None:
            return samples
        return {
            tuple(other_labels): number
            for (sample_gpu, _uuid, *other_labels), number in samples.items()
            if sample_gpu == gpu
        }

    def families(self, *, reason: str | None = None, **options: Any) -> Collected:
        """Return the families that the sidecar publishes."""
        if reason is None:
            reason = "" if self.samples else self.exit_reason
        return GpuBlock().families(self.registry, reason, dict.fromkeys(RESTART_REASONS, 0), **options)


def parse_machine(text: str) -> MachineDescription:
    """Return the machine described in YAML."""
    return load(text, "machine.yaml", MachineDescription)


def small_text(*timeline: str, head: str = "", model: str = "", count: int = 2) -> str:
    """Return the YAML of the small machine with additional fields of its model and a timeline."""
    entries = "".join(f"  - {{{entry}}}\n" for entry in timeline or ("at: 1h",))
    return SMALL_MACHINE.format(head=head, model=model, count=count) + entries


def small_machine(*timeline: str, **fields: Any) -> MachineDescription:
    return parse_machine(small_text(*timeline, **fields))


class VirtualClock(Clock):
    """Clock that starts at 0 and advances only on request."""

    def __init__(self) -> None:
        self._seconds = self._call_seconds = 0.0

    def now(self) -> float:
        return self._seconds

    def wall(self) -> float:
        return 1_700_000_000.0 + self._seconds

    def delay(self, seconds: float) -> None:
        self._seconds += seconds

    def work(self, seconds: float, start: float) -> None:
        self._call_seconds += seconds

    def now_with_calls(self) -> float:
        """Return the time, including the described duration of all calls."""
        return self._seconds + self._call_seconds


def simulate(
    description: dict[str, Any],
    seconds: float,
    options: GpuOptions,
    *,
    origin: float = 0.0,
    starts_events: bool = False,
    **start: Any,
) -> list[dict[str, Any]]:
    """Return the messages of a child that monitors a described machine for some seconds, on a simulated clock.

    By default no event thread is started, because its waits are in real time, and events are polled before each pass.

    Args:
        description: The machine, as plain mappings and lists.
        seconds: Time of the last pass.
        options: Options of the GPU collector.
        origin: Time of the clock at which the timeline starts.
        starts_events: True to start the event thread.
        start: Further keys of the first message to the child.
    """
    pynvml = pytest.importorskip("pynvml")
    clock = VirtualClock()
    install(pynvml, description, clock=clock, origin=origin)
    events = NvmlEvents(NvmlLibrary(pynvml, clock=clock.now), wall=clock.wall)
    messages: list[bytes] = []
    sampler = NvmlSampler(
        NvmlLibrary(pynvml, clock=clock.now_with_calls), events, options, start, progress=lambda _call: None
    )

    def sample() -> None:
        messages.append(encode(sampler.start(clock.now())))
        if starts_events:
            events.start()
        due = clock.now()
        while due <= seconds:
            clock.delay(due - clock.now())
            if not starts_events:
                events.poll()
            messages.append(encode(sampler.sample(clock.now(), clock.wall())))
            due = max(due + options.period, clock.now())

    messages.append(encode(child.run_until_exit(sampler, sample)))
    return [parse(line) for line in messages]


def replay(description: MachineDescription | str, seconds: float, **options: Any) -> ReplayResult:
    """Replay a machine through pynvml on a simulated clock.

    Args:
        description: Description or name of the machine.
        seconds: Duration of the replay.
        options: Options of the GPU collector, the keys `visible` and `origin` of the first message, and `starts_events`.
    """
    if isinstance(description, str):
        description = load_machine(description)
    start = {key: options.pop(key) for key in ("visible", "origin", "starts_events") if key in options}
    result = ReplayResult(simulate(description.plain(), seconds, GpuOptions(**options), **start))
    for message in result.messages:
        if message["kind"] == "machine":
            result.registry.machine = message
        elif message["kind"] == "sample":
            result.registry.add_sample(message, 1)
    return result


@contextlib.contextmanager
def replaying_collector(
    file: str, *, options: GpuOptions | None = None, **arguments: Any
) -> Iterator[GpuCollector]:
    """Run a collector over a machine in real time, with ten passes a second."""
    options = options or GpuOptions(period=0.1, retry=0.3)
    collector = GpuCollector(options, **{**replay_arguments(file), "timings": SHORT_TIMINGS, **arguments})
    collector.start()
    try:
        yield collector
    finally:
        collector.stop()
        assert collector.child_pid is None


def replay_arguments(file: str) -> dict[str, Any]:
    """Return the arguments with which a collector replays the machine of a file."""
    description = load_file(file, MachineDescription).plain()
    return {"replay": description, "command": command_of("exporter.replay.library")}


def write_machine(tmp_path: Path, *timeline: str, head: str = "") -> str:
    """Write the small machine to a file and return its path."""
    file = tmp_path / "machine.yaml"
    file.write_text(small_text(*timeline, head=head))
    return str(file)


LABELS = {spec.name: spec.labels for spec in SPECS}
"""Labels of each family, in the order of its specification."""


def values(families: Sequence[Metric], name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of a family by label values in the order of its specification."""
    return {
        tuple(sample.labels.get(label, "") for label in LABELS[name]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
    }


def label_values(families: Sequence[Metric], name: str, label: str) -> list[str]:
    """Return the value of a label in each sample of a family."""
    position = LABELS[name].index(label)
    return [labels[position] for labels in values(families, name)]


def samples_by_label(families: Sequence[Metric], name: str, label: str) -> dict[str, float]:
    """Return the samples of a family by the value of a label, which no two samples share."""
    samples = values(families, name)
    keys = label_values(families, name, label)
    assert len(keys) == len(set(keys)), f"several samples of {name} have the same {label}"
    return dict(zip(keys, samples.values(), strict=True))


def xid_counts(families: Sequence[Metric]) -> dict[tuple[str, str], float]:
    """Return the number of errors by GPU index and XID."""
    return {
        (gpu, xid): count for (gpu, _uuid, xid), count in values(families, "gpu_xid_errors_total").items()
    }


def value(collector: GpuCollector, name: str, *labels: str) -> float | None:
    """Return the first sample of a family whose label values start with `labels`, or None if absent."""
    samples = values(collector.collect(), name)
    return next((number for key, number in samples.items() if key[: len(labels)] == labels), None)


def gpus_up(collector: GpuCollector) -> Mapping[str, float]:
    """Return the value of `gpu_up` by GPU index."""
    return samples_by_label(collector.collect(), "gpu_up", "gpu")


def assert_sound(families: Sequence[Metric]) -> None:
    """Check the invariants that hold for every published set of families."""
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
