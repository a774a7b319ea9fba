"""Attribution: which share of a device's energy is a run's, and what of a GPU's was drawn in which phase; arithmetic.

| component | method | share of a run |
|---|---|---|
| gpu | `exclusive` | 1: only its processes hold the device |
| gpu | `sm_share` | its part of the SM utilization of all processes on the device |
| gpu | `memory_share` | its part of their memory, where utilization is not known or zero |
| cpu, soc | `cpu_share` | `(1 - i) dcpu_run / dcpu_busy + i cpus_run / cpus`, i = idle power / power |
| dram | `memory_share` | its resident memory, divided by all that is used |
| any | `whole` | 1: the configuration says that the machine serves one run |

Idle power is divided by the CPUs that a run may use, since it keeps them from others whether it works or not. Energy by
phase is a GPU's power, sample by sample, integrated over the phases of the ranks on it and scaled to the energy counter.
Samples are dated by the wall clock, phases by the monotonic one; after a step of the former one interval is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from exporter.collectors.job import EnergyReading, GpuProcessUse, MachineUse, RunUse
from exporter.recording.values import TrainingReading

Stay = tuple[float, float, str]
"""A phase of a main thread: begin and end on the monotonic clock, and its name."""
Interval = tuple[float, float, float]
"""A sample of power: begin and end on the monotonic clock, and watts."""

UNATTRIBUTED = "unattributed"

KEPT_SECONDS = 30.0
"""How long stays are remembered; the GPU collector remembers its samples for as long."""
MOST_NUMBERS = 8192
"""Numbers of one snapshot's history that are taken; no writer makes more."""
PATIENCE_SECONDS = 20.0
"""How long power waits for the phases that drew it."""
LONGEST_STEP_SECONDS = 0.2
"""Where samples are usually further apart they tell no phases."""
LONGEST_GAP_SECONDS = 1.0
"""What a sample stands for at most, and what may be missing before the first."""
USUAL_STEP_SECONDS = 0.02
CLOCK_STEP_SECONDS = 0.01
CLEAR_SAMPLES = 2.5
"""A shorter stay is mixed with its neighbours: two of 40 ms at 20 ms a sample came out as 732 and 316 W, not 784 and 142."""

PowerSource = Callable[[Mapping[str, float]], Mapping[str, Sequence[tuple[float, float]]]]
"""Gives pairs of Unix seconds and watts by UUID, those later than what is asked for; see `GpuCollector.power_samples`."""


@dataclass(frozen=True, slots=True)
class Share:
    """A run's part of one device, from 0 to 1, and the method by which it was found."""

    run: str
    method: str
    ratio: float


def shares_of(
    reading: EnergyReading,
    before: MachineUse,
    now: MachineUse,
    gpu_use: Sequence[GpuProcessUse],
    whole: str | None = None,
) -> list[Share]:
    """Divide one device among the runs with a part in it by what was used between two moments; empty is not known."""
    if whole is not None:
        return [Share(whole, "whole", 1.0)]
    if reading.component == "gpu":
        return _gpu_shares([use for use in gpu_use if use.uuid == reading.device], now.runs)
    if reading.component == "dram":
        total = max(now.memory_used_bytes or 0, sum(run.resident_bytes for run in now.runs))
        known = now.runs if now.memory_used_bytes else ()
        return [Share(run.run, "memory_share", run.resident_bytes / total) for run in known]
    return _cpu_shares(reading, before, now)


def _cpu_shares(reading: EnergyReading, before: MachineUse, now: MachineUse) -> list[Share]:
    if before.cpu_busy_seconds is None or now.cpu_busy_seconds is None or not now.runs:
        return []
    earlier = {run.run: run.cpu_seconds for run in before.runs}
    # A run that has just come has no past; its next interval has.
    used = {run.run: max(0.0, run.cpu_seconds - earlier.get(run.run, run.cpu_seconds)) for run in now.runs}
    busy = max(now.cpu_busy_seconds - before.cpu_busy_seconds, sum(used.values())) or 1.0
    cpus = max(now.cpus, sum(run.cpus for run in now.runs))
    idle = 0.0
    if reading.idle_watts is not None and reading.watts:
        idle = min(1.0, max(0.0, reading.idle_watts / reading.watts))
    return [
        Share(run.run, "cpu_share", (1 - idle) * used[run.run] / busy + idle * run.cpus / cpus)
        for run in now.runs
    ]


def _gpu_shares(users: Sequence[GpuProcessUse], runs: Sequence[RunUse]) -> list[Share]:
    """Divide a device among those who hold it, by the first measure that is known of all of them and not zero."""
    of_pid = {pid: run.run for run in runs for pid in run.pids}
    owners = [of_pid.get(use.pid, "") for use in users]  # "" is a stranger, whose part is nobody's
    if len(set(owners)) == 1 and owners[0]:
        return [Share(owners[0], "exclusive", 1.0)]
    for method, amounts in (
        ("sm_share", [use.ratios.get("sm") for use in users]),
        ("memory_share", [use.memory_bytes for use in users]),
    ):
        known = [amount for amount in amounts if amount is not None]
        if len(known) == len(users) and sum(known) > 0:
            parts = dict.fromkeys(owners, 0.0)
            for owner, amount in zip(owners, known, strict=True):
                parts[owner] += amount / sum(known)
            return [Share(run, method, part) for run, part in parts.items() if run]
    return []


# What the processes of each run do, told by the ledger's thread once a pass -----------------------------


@dataclass(frozen=True, slots=True)
class Flows:
    """What has become of the work of a run, in seconds so far."""

    session: str  # whose; numbers of another one cannot be compared with these
    productive: float  # safe, validation left out
    lost: float
    hung: float
    uncommitted: float
    validates: bool  # validation is productive


@dataclass(frozen=True, slots=True)
class ProcessWork:
    """What one process does."""

    run: str
    rank: int
    process: str
    phases: Mapping[str, float]  # seconds in each so far
    device: str = ""  # UUID of the one GPU that it holds
    stays: tuple[Stay, ...] = ()  # its last seconds


@dataclass(frozen=True, slots=True)
class WorkUse:
    """What all processes do that tell of it, of one run those of lower ranks first, and what has become of the work."""

    processes: tuple[ProcessWork, ...] = ()
    flows: Mapping[str, Flows] = field(default_factory=dict)

    def flow(self, run: str, session: str) -> Flows | None:
        """Tell what has become of the work of a run, which its session may have gone on with under another name."""
        own = self.flows.get(run)
        if own is None and session:
            return next((each for each in self.flows.values() if each.session == session), None)
        return own


# Energy by phase ------------------------------------------------------------------------------------------


def gone_on(stays: tuple[Stay, ...], reading: TrainingReading) -> tuple[Stay, ...]:
    """Add what a snapshot tells of the last seconds to what is known of a process."""
    history, phases, until = reading.history[-MOST_NUMBERS:], reading.history_phases, reading.history_until
    known = stays[-1][1] if stays else 0.0
    if until <= known or len(history) % 2 or any(not 0 <= place < len(phases) for place in history[::2]):
        return stays
    found = [each for each in stays if each[1] > until - KEPT_SECONDS]
    at = until - sum(history[1::2]) / 1e6
    for place, microseconds in zip(history[::2], history[1::2], strict=True):
        began, at = max(at, known), at + microseconds / 1e6
        if at <= began:
            continue
        if found and found[-1][1:] == (began, phases[place]):
            began = found.pop()[0]
        found.append((began, at, phases[place]))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Split:
    """What one GPU drew in an interval, in joules."""

    joules: Mapping[str, float]  # by phase
    blurred: Mapping[str, float]  # of them, those in stays of fewer samples than `CLEAR_SAMPLES`
    waiting: float  # drawn after the interval


class PowerSplitter:
    """What the GPUs drew since it was last divided."""

    def __init__(self) -> None:
        self._drawn: dict[str, list[Interval]] = {}
        self._asked: dict[str, float] = {}  # Unix time of the last sample
        self._divided: dict[str, float] = {}  # up to when
        self._offset: float | None = None

    def take(self, source: PowerSource, *, wall: float, now: float) -> None:
        """Take the samples that have come since the last time."""
        offset, before = wall - now, self._offset
        self._offset = offset
        if before is not None and abs(offset - before) > CLOCK_STEP_SECONDS:
            self._drawn.clear()
            self._divided.clear()
        for uuid, samples in source(self._asked).items():
            drawn, last = self._drawn.setdefault(uuid, []), self._asked.get(uuid, 0.0)
            for at, watts in samples:
                step = at - last if 0 < at - last <= LONGEST_GAP_SECONDS else USUAL_STEP_SECONDS
                drawn.append((at - step - offset, at - offset, watts))
                last = at
            self._asked[uuid] = last

    def split(self, uuid: str, ranks: Sequence[tuple[Stay, ...]], now: float) -> Split | None:
        """Divide what a GPU drew since the last time among the phases of the ranks on it.

        None where that cannot be: nothing is waiting then. Where there are no joules, all of them wait.
        """
        drawn, began = self._drawn.pop(uuid, []), self._divided.pop(uuid, None)
        if not drawn and began is None:
            return None
        newest = drawn[-1][1] if drawn else began or 0.0
        self._divided[uuid] = newest
        if began is None or not ranks or not all(ranks):
            return None
        step = sum(end - start for start, end, _ in drawn) / max(1, len(drawn))
        until = max(began, min([newest, *(stays[-1][1] for stays in ranks)]))
        late = now - until > PATIENCE_SECONDS or (drawn and drawn[0][0] > began + LONGEST_GAP_SECONDS)
        if late or step > LONGEST_STEP_SECONDS:
            return None
        self._divided[uuid] = until
        self._drawn[uuid] = [each for each in drawn if each[1] > until]
        joules: dict[str, float] = {}
        blurred: dict[str, float] = {}
        for stays in ranks:
            for stay, amount in _overlaps(drawn, stays, began, until):
                phase = UNATTRIBUTED if stay is None else stay[2]
                joules[phase] = joules.get(phase, 0.0) + amount
                if stay is not None and stay[1] - stay[0] < CLEAR_SAMPLES * step:
                    blurred[phase] = blurred.get(phase, 0.0) + amount
        return Split(
            joules, blurred, sum(watts * (end - max(start, until)) for start, end, watts in self._drawn[uuid])
        )


def _overlaps(
    drawn: Sequence[Interval], stays: Sequence[Stay], began: float, until: float
) -> Iterator[tuple[Stay | None, float]]:
    """Give the joules drawn in each stay between two moments, piece by piece; None for time of which no stay is known."""
    place = 0
    for start, stop, watts in drawn:
        at, end = max(start, began), min(stop, until)
        while at < end:
            while place < len(stays) and stays[place][1] <= at:
                place += 1
            stay = stays[place] if place < len(stays) else None
            piece = end
            if stay is not None:
                inside = stay[0] <= at
                piece = min(end, stay[1] if inside else stay[0])
                stay = stay if inside else None
            yield stay, watts * (piece - at)
            at = piece
