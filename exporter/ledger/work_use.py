"""What the processes of each run do, for whoever divides energy by it.

Runs in the sidecar: `update` on the ledger's collecting thread, `latest` may be read from any. What the processes tell
of their phases, the readings of the GPUs that they hold, and what has become of their work come in; one immutable value
goes out with each pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from exporter.collectors.job import EnergyReading
from exporter.ledger.phase_power import PhasePower
from exporter.ledger.training_info import RankDevices
from exporter.ledger.views import SeatView


@dataclass(frozen=True, slots=True)
class Flows:
    """What has become of the work of a run, in seconds so far.

    Attributes:
        session: Whose; numbers of another one cannot be compared with these.
        productive: Work that is safe, validation left out.
        lost: Work that was lost.
        hung: Work that hung.
        uncommitted: Work of which neither is known yet.
        validates: Whether validation is productive.
    """

    session: str
    productive: float
    lost: float
    hung: float
    uncommitted: float
    validates: bool


@dataclass(frozen=True, slots=True)
class ProcessWork:
    """What one process does.

    Attributes:
        run: Its run.
        rank: Its rank.
        process: Its id.
        phases: Seconds in each phase so far.
        device: UUID of the GPU that it alone holds; "" where there is none such.
        watts: What that GPU draws in each phase; None where that is not known well enough.
        quality: Share of each phase's energy from increments of the counter that are its own.
    """

    run: str
    rank: int
    process: str
    phases: Mapping[str, float]
    device: str = ""
    watts: Mapping[str, float] | None = None
    quality: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkUse:
    """What all processes do that tell of it.

    Attributes:
        processes: Of one run those of lower ranks first.
        flows: What has become of the work, by run.
    """

    processes: tuple[ProcessWork, ...] = ()
    flows: Mapping[str, Flows] = field(default_factory=dict)

    def flow(self, run: str, session: str) -> Flows | None:
        """Tell what has become of the work of a run, which its session may have gone on with under another name."""
        own = self.flows.get(run)
        if own is None and session:
            return next((each for each in self.flows.values() if each.session == session), None)
        return own


class WorkUses:
    """Follows all processes.

    Attributes:
        latest: As of the latest pass.
    """

    def __init__(self) -> None:
        self.latest = WorkUse()
        self._powers: dict[tuple[str, str], PhasePower] = {}

    def update(
        self,
        views: Sequence[SeatView],
        pids: Mapping[str, int | None],
        devices: RankDevices,
        readings: Iterable[EnergyReading],
        flows: Mapping[str, Flows],
    ) -> None:
        """Take what is known in one pass.

        Args:
            views: Of all seats.
            pids: Of living processes as seen from here, by process id.
            devices: Which GPU is whose.
            readings: The energy of each GPU.
            flows: What has become of the work, by run.
        """
        by_device = {each.device: each for each in readings if each.component == "gpu"}
        known: dict[tuple[str, str], PhasePower] = {}
        processes = []
        for view in views:
            record = view.record
            reading = None if record.snapshot is None else record.snapshot.recording.training
            if reading is None or not record.living or record.process.rank is None:
                continue
            device = devices.alone(pids.get(record.process.id))
            power = None
            if device in by_device:
                key = (record.process.id, device)
                power = known[key] = self._powers.get(key) or PhasePower()
                energy = by_device[device]
                if energy.joules is not None:
                    power.add_reading(energy.joules, energy.at)
                power.add_timeline(reading.timeline)
            processes.append(
                ProcessWork(
                    run=record.process.run,
                    rank=record.process.rank,
                    process=record.process.id,
                    phases=reading.phases,
                    device=device,
                    watts=None if power is None else power.powers(),
                    quality={} if power is None else power.quality(),
                )
            )
        self._powers = known
        processes.sort(key=lambda each: (each.run, each.rank))
        self.latest = WorkUse(tuple(processes), flows)
