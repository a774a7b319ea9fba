"""RAPL: energy of the CPUs and of the memory behind them, from their own registers.

Used in the sidecar; `collect` is called from one thread at a time, `readings` may be read from any. Registers of
/sys/class/powercap come in, every 5 s: a register of 262 kJ wraps every nine minutes at 500 W. Families go out,
and readings for the attribution to runs. Totals are kept in a page of the ledger's state and begin at 0; a
sidecar that is started again in the same boot counts what was used meanwhile.

Since Linux 5.10 only root may read the registers (they tell secrets, CVE-2020-8694): then everything here is
absent, and the reason is `permission`. A model of the CPU's power stands in only where the configuration asks for
one, and is labelled as what it is. Machines without registers may have power meters (`power_meters`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exporter.collectors.energy.counter import EnergyCounter
from exporter.collectors.energy.families import (
    CPU_ENERGY,
    CPU_POWER,
    DRAM_ENERGY,
    DRAM_POWER,
    IDLE_POWER,
    SOC_ENERGY,
    SPECS,
)
from exporter.collectors.energy.hwmon import PowerMeters
from exporter.collectors.energy.idle import IdlePower
from exporter.collectors.energy.model import TdpModel
from exporter.collectors.energy.zones import Zone, find_zones
from exporter.collectors.job import EnergyReading
from exporter.collectors.keeping import Fleeting, Keeper, Rows
from exporter.collectors.kernel_files import parse_count, procfs, read_existing, read_file, source
from exporter.errors import CollectError
from exporter.families import Collected, FamilySpec

MAX_WATTS = 2000.0
"""More than any package, its memory, or a platform of one of them draws."""
DISCOVERY_SECONDS = 300.0
"""How often zones are looked for: drivers may be loaded late."""
MIRROR_JOULES = 2.0
"""Registers that never differ by more are one register: it moves while they are read one after the other."""
SUSPENDED_SECONDS = 1.0

SOURCE = "rapl"
GAPS = ("permission", "lost", "error", "suspended")

_BURST_CHANGES = 11


def boottime() -> float:
    """Seconds since boot, with the time that the machine slept; the monotonic clock leaves that out."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(slots=True, eq=False)
class _Register:
    """A zone with what has been counted.

    Attributes:
        zone: Which.
        counter: Its total.
        idle: What it draws without work.
        distinct: Whether it has ever differed from the zones before it.
        readable: Whether the last reading succeeded.
        read_at: Monotonic time of the last reading; None before it.
        gaps: Time without a reading, by reason.
        resolution: Measured time between two changes; None when it could not be measured.
    """

    zone: Zone
    counter: EnergyCounter
    idle: IdlePower
    distinct: bool = False
    readable: bool = False
    read_at: float | None = None
    gaps: dict[str, float] = field(default_factory=lambda: dict.fromkeys(GAPS, 0.0))
    resolution: float | None = None


class RaplCollector:
    """Counts the energy of CPUs and memory.

    Args:
        sys: Where sysfs is mounted.
        keeper: Where totals are kept; None keeps them for the life of this process.
        counts: Whether this exporter is the one that counts the machine's energy.
        working: Whether a job is running.
        idle_watts: Of one package, as configured.
        tdp_watts: Of all packages; makes a model stand in where no register can be read. None for no model.
        monotonic: Seconds.
        boottime: Seconds, with those that the machine slept.
        burst_seconds: How long to look for the time between two changes of a register.

    Attributes:
        readings: The last ones, for the attribution to runs.
    """

    name = "rapl"
    specs = SPECS

    def __init__(
        self,
        *,
        sys: Path = Path("/sys"),
        keeper: Keeper | None = None,
        counts: Callable[[], bool] = lambda: True,
        working: Callable[[], bool | None] = lambda: None,
        idle_watts: float | None = None,
        tdp_watts: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        boottime: Callable[[], float] = boottime,
        burst_seconds: float = 0.1,
    ) -> None:
        self.readings: tuple[EnergyReading, ...] = ()
        self._sys = sys
        self._proc = procfs()
        self._page = (keeper or Fleeting()).page("rapl")
        self._counts = counts
        self._working = working
        self._idle_watts = idle_watts
        self._model = None if tdp_watts is None else TdpModel(tdp_watts)
        self._monotonic = monotonic
        self._boottime = boottime
        self._meters = PowerMeters(sys)
        self._burst_seconds = burst_seconds
        self._boot = ""
        self._rested = False  # whether another exporter has counted meanwhile
        self._kept: Rows | None = None
        self._registers: dict[str, _Register] = {}
        self._looked_at: float | None = None
        self._passed_at: float | None = None
        self._asleep: float | None = None

    def collect(self) -> Collected:
        """Read all registers once."""
        collected = Collected()
        if not self._counts():
            self._rest()
            collected.unsupported.append("another exporter on this machine counts its energy: absent here")
            return collected
        if not self._load(collected):
            return collected
        now = self._monotonic()
        self._find(collected, now)
        since = 0.0 if self._passed_at is None else max(0.0, now - self._passed_at)
        slept = self._note_sleep()
        working = self._working()
        for register in self._registers.values():
            self._read(register, collected, since=since, slept=slept, working=working)
        self._meters.read(collected, now, since=since)
        self._passed_at = now
        modelled = self._read_model(now, collected)
        shown = self._save(collected)
        self._tell_readings(now, modelled)
        self._publish(collected, shown=shown)
        return collected

    def _rest(self) -> None:
        """Count nothing; what the other exporter counts meanwhile is not ours later either."""
        self.readings = ()
        self._rested = True
        self._passed_at = self._asleep = None
        self._meters.rest()
        for register in self._registers.values():
            register.counter.forget()
            register.read_at = None

    def _load(self, collected: Collected) -> bool:
        """Learn what was counted before; False where another sidecar keeps it.

        As long as that cannot be read, counting goes on from 0 and nothing of it is shown.
        """
        self._boot = self._boot or (read_file(self._proc / "sys/kernel/random/boot_id") or "").strip()
        if self._kept is not None:
            return True
        try:
            self._kept = self._page.load()
        except CollectError as error:
            collected.fail(error)
            return True
        if self._kept is None:
            collected.unsupported.append("another sidecar keeps this machine's energy totals: absent here")
            return False
        for register in self._registers.values():
            self._resume(register)
        self._meters.resume(self._kept)
        return True

    def _find(self, collected: Collected, now: float) -> None:
        if (
            self._looked_at is not None
            and (self._registers or [*self._meters])
            and now - self._looked_at < DISCOVERY_SECONDS
        ):
            return
        self._looked_at = now
        self._meters.find(collected, self._kept or {})
        with source(collected, self._sys / "class/powercap"):
            self._add_registers(find_zones(self._sys, collected))

    def _add_registers(self, zones: Sequence[Zone]) -> None:
        for zone in zones:
            if zone.key in self._registers:
                continue
            register = self._registers[zone.key] = _Register(
                zone,
                EnergyCounter(range_joules=zone.range_joules, max_watts=MAX_WATTS),
                IdlePower(self._idle_watts if zone.kind == "package" else None),
            )
            self._resume(register)
            if zone.kind == "package":
                register.resolution = self._measure_resolution(zone)

    def _resume(self, register: _Register) -> None:
        kept = self._kept or {}
        key = register.zone.key
        register.idle.resume(kept.get(("idle", key), ()))
        total = kept.get(("total", key))
        if total:
            mark = () if self._rested else kept.get(("register", self._boot, key), ())
            register.counter.resume(total, mark)
            register.distinct = True
        gaps = kept.get(("gaps", key), ())
        for reason, gap in zip(GAPS, gaps, strict=False):
            register.gaps[reason] += gap or 0.0

    def _measure_resolution(self, zone: Zone) -> float | None:
        """Look at a register until it has changed often enough; the smallest time between two changes."""
        begun = last_change = time.monotonic()
        changes: list[float] = []
        try:
            before = self._energy(zone)
            while len(changes) < _BURST_CHANGES and time.monotonic() - begun < self._burst_seconds:
                energy, now = self._energy(zone), time.monotonic()
                if energy != before:
                    changes.append(now - last_change)
                    before, last_change = energy, now
                time.sleep(1e-4)
        except (CollectError, OSError):
            return None  # told by the reading that follows
        # The first change ends a time that began before anybody looked.
        return min(changes[1:]) if len(changes) >= _BURST_CHANGES else None

    # Counting -------------------------------------------------------------------------------------------

    def _note_sleep(self) -> float:
        asleep = self._boottime() - self._monotonic()
        slept = 0.0 if self._asleep is None else asleep - self._asleep
        self._asleep = asleep
        return slept if slept >= SUSPENDED_SECONDS else 0.0

    def _energy(self, zone: Zone) -> float:
        path = zone.path / "energy_uj"
        return parse_count(read_existing(path).strip(), path) / 1e6

    def _read(
        self, register: _Register, collected: Collected, *, since: float, slept: float, working: bool | None
    ) -> None:
        register.readable = False
        register.gaps["suspended"] += slept
        try:
            energy, now = self._energy(register.zone), self._monotonic()
        except OSError:
            register.gaps["error"] += since  # the driver has gone
            collected.unsupported.append(f"no {register.zone.path / 'energy_uj'}")
            return
        except CollectError as error:
            register.gaps["permission" if error.reason == "permission" else "error"] += since
            collected.fail(_with_remedy(error, register.zone))
            return
        if not register.distinct and self._is_mirror(register, energy, collected):
            return
        register.readable = True
        told = register.counter.update(energy, now)
        if told is None and register.read_at is not None:
            register.gaps["lost"] += now - register.read_at
        register.read_at = now
        if told and register.counter.watts is not None and register.zone.kind == "package":
            register.idle.note(register.counter.watts, working=working)

    def _is_mirror(self, register: _Register, energy: float, collected: Collected) -> bool:
        """Tell whether a register has so far been nothing but another one of its socket."""
        zone = register.zone
        for other in self._registers.values():
            if other is register:
                break
            same_kind = (other.zone.kind, other.zone.socket) == (zone.kind, zone.socket)
            if not same_kind or not other.readable:
                continue
            seen = other.counter.mark()[0]
            if seen is not None and abs(seen - energy) <= MIRROR_JOULES:
                collected.unsupported.append(
                    f"{zone.key} ({zone.name}) shows the register of {other.zone.key}: counted once"
                )
                return True
        register.distinct = True
        return False

    def _read_model(self, now: float, collected: Collected) -> EnergyReading | None:
        readable = (each.readable and each.zone.kind == "package" for each in self._registers.values())
        if self._model is None or self._meters.measures_cpus or any(readable):
            return None
        if self._kept is not None and not self._model.resumed:
            self._model.resume(self._kept.get(("model",), ()))
        with source(collected, self._proc / "stat"):
            self._model.update(now)
        return self._model.reading(now)

    def _save(self, collected: Collected) -> bool:
        rows: Rows = self._meters.rows()
        for key, register in self._registers.items():
            if register.distinct:
                rows["total", key] = register.counter.row()
                rows["register", self._boot, key] = register.counter.mark()
            rows["gaps", key] = tuple(register.gaps[reason] for reason in GAPS)
            rows["idle", key] = register.idle.row()
        if self._model is not None:
            rows["model",] = self._model.row()
        if self._kept is None:
            return False
        if not rows:
            return True
        # Zones that are not there at the moment may come back.
        self._kept = {**_of_others(self._kept, rows), **rows}
        try:
            self._page.save(self._kept)
        except CollectError as error:
            collected.fail(error)
            return False
        return True

    # What goes out --------------------------------------------------------------------------------------

    def _tell_readings(self, now: float, modelled: EnergyReading | None) -> None:
        readings = [
            EnergyReading(
                component="cpu" if register.zone.kind == "package" else "dram",
                device=register.zone.device,
                source=SOURCE,
                measured=True,
                joules=register.counter.joules if register.readable else None,
                watts=register.counter.watts if register.readable else None,
                at=now,
                idle_watts=register.idle.best(),
                name=register.zone.name,
                index=register.zone.package,
                resolution_seconds=register.resolution,
                resets=dict(register.counter.resets),
                gap_seconds=dict(register.gaps),
            )
            for register in self._registers.values()
            if register.distinct or not register.readable
        ]
        self.readings = (
            *readings,
            *self._meters.readings(now),
            *([] if modelled is None else [modelled]),
        )

    def _publish(self, collected: Collected, *, shown: bool) -> None:
        samples: dict[FamilySpec, dict[tuple[str, ...], float]] = {spec: {} for spec in SPECS}

        def add(energy: FamilySpec, power: FamilySpec | None, reading: EnergyReading, *labels: str) -> None:
            if reading.joules is not None and shown:
                samples[energy][labels] = reading.joules
            if reading.watts is not None and power is not None:
                samples[power][labels] = reading.watts

        for reading in self.readings:
            if reading.component == "cpu":
                add(CPU_ENERGY, CPU_POWER, reading, reading.index, reading.source)
            elif reading.component == "dram":
                add(DRAM_ENERGY, DRAM_POWER, reading, reading.index, reading.source)
            else:
                add(SOC_ENERGY, None, reading, reading.device, reading.source)
        for register in self._registers.values():
            if register.zone.kind == "package":
                for method, watts in register.idle.by_method().items():
                    samples[IDLE_POWER][register.zone.package, method] = watts
        for spec, values in samples.items():
            collected.add_family(spec, values)


def _with_remedy(error: CollectError, zone: Zone) -> CollectError:
    if error.reason != "permission":
        return error
    return CollectError(
        f"{error}: since Linux 5.10 only root may read energy registers; let the exporter, with"
        f" `chmod a+r {zone.path}/energy_uj` at every boot (tmpfiles.d), CAP_DAC_READ_SEARCH or as root",
        reason="permission",
    )


def _of_others(kept: Mapping[tuple[str, ...], tuple[float | None, ...]], rows: Rows) -> Rows:
    """Keep the rows of zones that are not there, without the registers of other boots."""
    return {name: values for name, values in kept.items() if name not in rows and name[0] != "register"}
